"""Freed memory is kept while runs are open, and not a moment longer."""

from __future__ import annotations

from dask_gpurt.shuffle.heap import HEAP_BYTES, KEEP_BYTES, TRIM_BYTES, Heap


class Libc:
    def __init__(self, refuse: int = 0) -> None:
        self.calls: list[tuple[int, int] | str] = []
        self.refuse = refuse

    def mallopt(self, option: int, value: int) -> int:
        self.calls.append((option, value))
        return int(value != self.refuse)

    def malloc_trim(self, pad: int) -> int:
        self.calls.append("trim")
        return 1


NANNY = {"MALLOC_TRIM_THRESHOLD_": "65536"}


def test_kept_from_the_first_run_to_the_last():
    libc = Libc()
    heap = Heap(NANNY, libc)
    heap.keep()
    heap.keep()
    assert libc.calls == [(-1, KEEP_BYTES), (-3, HEAP_BYTES[0])]
    heap.release(lambda f: f())
    assert len(libc.calls) == 2
    assert heap.users == 1
    heap.release(lambda f: f())
    assert libc.calls[2:] == [(-1, 65536), (-3, 128 << 10), "trim"]


def test_values_of_the_environment_come_back():
    libc = Libc()
    heap = Heap({"MALLOC_TRIM_THRESHOLD_": "1000", "MALLOC_MMAP_THRESHOLD_": "5000"}, libc)
    heap.keep()
    heap.release(lambda f: f())
    assert libc.calls[2:4] == [(-1, 1000), (-3, 5000)]


def test_a_run_that_began_meanwhile_keeps_its_memory():
    libc, later = Libc(), []
    heap = Heap(NANNY, libc)
    heap.keep()
    heap.release(later.append)
    heap.keep()
    later[0]()
    assert "trim" not in libc.calls


def test_older_libc_takes_less():
    libc = Libc(refuse=HEAP_BYTES[0])
    Heap(NANNY, libc).keep()
    assert libc.calls[-1] == (-3, HEAP_BYTES[1])


def test_nothing_without_the_nannys_setting():
    for environment in ({}, {"MALLOC_TRIM_THRESHOLD_": "64k"}):
        libc = Libc()
        heap = Heap(environment, libc)
        heap.keep()
        heap.release(lambda f: f())
        assert libc.calls == []
    heap = Heap(NANNY, None)
    heap.keep()
    heap.release(lambda f: f())


def test_what_outputs_freed_is_given_back_in_between():
    libc = Libc()
    heap = Heap(NANNY, libc)
    heap.keep()
    libc.calls.clear()
    for _ in range(4):
        heap.freed(TRIM_BYTES // 2, lambda f: f())
    assert libc.calls == ["trim", "trim"]
