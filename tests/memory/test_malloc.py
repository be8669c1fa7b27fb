"""Freed memory is kept while runs are open and a little longer, and never when it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from dask_gpurt.memory.malloc import HEAP_BYTES, KEEP_BYTES, LINGER_SECONDS, PRESSURE, TRIM_BYTES, Heap
from dask_gpurt.memory.pages import Pages

if TYPE_CHECKING:
    from collections.abc import Callable


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

    def malloc(self, nbytes: int) -> int:
        return 64

    def free(self, at: int) -> None:
        pass


NANNY = {"MALLOC_TRIM_THRESHOLD_": "65536"}
BACK = [(-1, 65536), (-3, 128 << 10), "trim"]


class Clock:
    """Timers that go off when told."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, seconds: float, function: Callable[[], None]) -> None:
        self.waiting.append((seconds, function))

    def run(self) -> float:
        """Until nothing waits; seconds that passed."""
        passed = 0.0
        while self.waiting:
            seconds, function = self.waiting.pop(0)
            passed += seconds
            function()
        return passed


def make(environment: dict[str, str] = NANNY, rss_bytes: int = 0, refuse: int = 0) -> tuple[Heap, Libc, Clock]:
    libc, clock = Libc(refuse), Clock()
    return Heap(environment, libc, lambda: rss_bytes), libc, clock


def now(function: Callable[[], None]) -> None:
    function()


def test_kept_from_the_first_run_to_some_seconds_after_the_last():
    heap, libc, clock = make()
    heap.keep()
    heap.keep()
    assert libc.calls == [(-1, KEEP_BYTES), (-3, HEAP_BYTES[0])]
    heap.release(clock, now)
    clock.run()
    assert len(libc.calls) == 2
    assert heap.users == 1
    heap.release(clock, now)
    assert heap.warm
    assert clock.run() == LINGER_SECONDS
    assert not heap.warm
    assert libc.calls[2:] == BACK


def test_values_of_the_environment_come_back():
    heap, libc, clock = make({"MALLOC_TRIM_THRESHOLD_": "1000", "MALLOC_MMAP_THRESHOLD_": "5000"})
    heap.keep()
    heap.release(clock, now)
    clock.run()
    assert libc.calls[2:4] == [(-1, 1000), (-3, 5000)]


def test_a_run_that_began_meanwhile_keeps_its_memory():
    heap, libc, clock = make()
    heap.keep()
    heap.release(clock, now)
    heap.keep()
    clock.run()
    assert len(libc.calls) == 2
    heap.release(clock, now)
    heap.keep()
    heap.release(clock, now)  # two timers: the first is of no account
    clock.waiting.pop(0)[1]()
    assert not libc.calls[2:]
    clock.run()
    assert libc.calls[2:] == BACK


def test_a_run_that_begins_just_before_the_trim_keeps_its_memory():
    heap, libc, clock = make()
    later: list[Callable[[], None]] = []
    heap.keep()
    heap.release(clock, later.append)
    clock.run()
    heap.keep()
    later[0]()
    assert "trim" not in libc.calls


def test_given_back_at_once_when_the_worker_needs_it():
    limit = 1 << 30
    for rss, wanted in ((int(PRESSURE * limit) + 1, 0.0), (int(PRESSURE * limit) - 1, LINGER_SECONDS)):
        heap, libc, clock = make(rss_bytes=rss)
        heap.keep(2 * limit)
        heap.keep(limit)
        heap.release(clock, now)
        heap.release(clock, now)
        assert clock.run() == wanted
        assert libc.calls[2:] == BACK


def test_older_libc_takes_less():
    heap, libc, _ = make(refuse=HEAP_BYTES[0])
    heap.keep()
    assert libc.calls[-1] == (-3, HEAP_BYTES[1])


def test_nothing_without_the_nannys_setting():
    for environment in ({}, {"MALLOC_TRIM_THRESHOLD_": "64k"}):
        heap, libc, clock = make(environment)
        heap.keep()
        heap.release(clock, now)
        assert libc.calls == clock.waiting == []
        assert heap.pool.backend_name == pa.default_memory_pool().backend_name
    heap = Heap(NANNY, None)
    heap.keep()
    heap.release(clock, now)
    assert make()[0].pool.backend_name == "system"


def test_the_process_grows_by_no_more_than_a_little_while_outputs_are_made():
    rss = [1 << 30]
    libc, clock = Libc(), Clock()
    heap = Heap(NANNY, libc, lambda: rss[0])
    heap.keep()
    libc.calls.clear()
    for _ in range(8):
        heap.freed(TRIM_BYTES // 2, now)
    assert libc.calls == ["trim"]  # the first
    rss[0] += TRIM_BYTES + 1
    for _ in range(4):
        heap.freed(TRIM_BYTES // 2, now)
    assert libc.calls == ["trim", "trim", "trim"]
    heap.release(clock, now)
    heap.keep()
    for _ in range(4):
        heap.freed(TRIM_BYTES, now)  # another run starts from what there is
    assert libc.calls == ["trim", "trim", "trim", "trim"]


def test_every_piece_is_returned_when_the_worker_needs_it():
    limit = 1 << 30
    heap, libc, _ = make(rss_bytes=int(PRESSURE * limit) + 1)
    heap.keep(limit)
    libc.calls.clear()
    for _ in range(4):
        heap.freed(TRIM_BYTES, now)
    assert libc.calls == ["trim"] * 4


class Idle(Pages):
    """Pages that wait."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(None)
        self.bytes = nbytes
        self.trims = 0

    @property
    def idle_bytes(self) -> int:
        return self.bytes

    def trim(self) -> int:
        self.trims += 1
        return 0


def test_idle_pages_go_while_rows_come_in_when_the_worker_needs_them():
    limit = 1 << 30
    clock = [0.0]
    for idle, rss, limited, wanted in (
        (TRIM_BYTES, limit, limit, 1),
        (TRIM_BYTES - 1, limit, limit, 0),
        (TRIM_BYTES, 0, limit, 0),
        (TRIM_BYTES, limit, None, 0),
    ):
        pages = Idle(idle)
        heap = Heap({}, None, lambda rss=rss: rss, pages, lambda: clock[0])
        heap.keep(limited)
        heap.look(now)
        heap.look(now)
        assert pages.trims == wanted
        clock[0] += 1.0
        heap.look(now)
        assert pages.trims == 2 * wanted


def test_pages_are_kept_and_given_back_without_the_nannys_setting():
    clock = Clock()
    pages = Idle(0)
    heap = Heap({}, None, lambda: 0, pages)
    heap.keep()
    assert pages._keep
    heap.release(clock, now)
    assert clock.run() == LINGER_SECONDS
    assert not pages._keep
    assert pages.trims == 1


def test_a_worker_at_its_limit_gets_all_back_until_the_next_run():
    pages, clock, libc = Idle(0), Clock(), Libc()
    heap = Heap(NANNY, libc, lambda: 0, pages)
    heap.keep()
    heap.give_back()
    assert (pages.trims, heap.warm) == (1, False)
    assert libc.calls[2:] == BACK[:2]
    heap.give_back()  # asked for twice a second
    assert (pages.trims, libc.calls[4:]) == (1, [])
    heap.keep()
    assert heap.warm
    assert libc.calls[4:] == [(-1, KEEP_BYTES), (-3, HEAP_BYTES[0])]
    for _ in range(2):
        heap.release(clock, now)
    clock.run()
    assert libc.calls[6:] == BACK


def test_the_limit_of_workers_that_are_gone_counts_no_more():
    """A small cluster in this process, then a large one: what is free was returned all the time."""
    heap, _, clock = make(rss_bytes=1 << 30)
    for limit in (1 << 30, 8 << 30):
        heap.keep(limit)
        heap.release(clock, lambda function: function())
    assert clock.run() == LINGER_SECONDS
    heap.keep(None)
    assert not heap._needed(1 << 40)


def test_thresholds_that_mallopt_cannot_take_are_as_high_as_it_can():
    """4 GiB passed to it as an int are 0: from the first shuffle on, each free would have trimmed."""
    for asked, wanted in ((str(4 << 30), (1 << 31) - 1), (str(3 << 29), 3 << 29), ("-1", -1), ("0", 0)):
        heap, libc, clock = make({"MALLOC_TRIM_THRESHOLD_": asked})
        heap.keep()
        heap.release(clock, lambda function: function())
        clock.run()
        trims = [call[1] for call in libc.calls if call[0] == -1]
        assert trims == [max(KEEP_BYTES, wanted), wanted]
