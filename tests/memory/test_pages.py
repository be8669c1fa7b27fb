"""Blocks are made of pages that were used before, never of pages somebody has; for all who use them."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from dask_gpurt.memory.pages import FRESH_BYTES, GRANULE, IDLE_SECONDS, MOST_EXTENTS, SMALLEST, Pages, system

MiB = 1 << 20
pytestmark = pytest.mark.skipif(system() is None, reason="needs mremap")


class Refusing:
    """A kernel that says no to some calls."""

    def __init__(self, *refused: str) -> None:
        self.real = system()
        self.refused = set(refused)

    def fresh(self, nbytes):
        return None if "fresh" in self.refused else self.real.fresh(nbytes)

    def reserve(self, nbytes):
        return None if "reserve" in self.refused else self.real.reserve(nbytes)

    def move(self, at, nbytes, to):
        return "move" not in self.refused and self.real.move(at, nbytes, to)

    def unmap(self, at, nbytes):
        self.real.unmap(at, nbytes)


@pytest.fixture
def pages():
    p = Pages(system())
    p.keep(True)
    yield p
    gc.collect()
    p.keep(False)


def filled(pages: Pages, nbytes: int, value: int):
    block = np.frombuffer(pages.take(nbytes), np.uint8)
    assert len(block) == nbytes
    assert block.ctypes.data % 64 == 0
    block[:] = value
    return block


def test_memory_is_used_again_when_the_last_view_is_gone(pages):
    a = filled(pages, 3 * MiB, 1)
    there = a.ctypes.data
    idle = pages.idle_bytes
    view = memoryview(a)[10:20]
    del a
    gc.collect()
    assert pages.idle_bytes == idle
    del view
    gc.collect()
    assert pages.idle_bytes == idle + 3 * MiB
    assert filled(pages, 3 * MiB, 2).ctypes.data == there
    assert (pages.fresh, pages.reused) == (1, 1)


def test_a_large_block_is_made_of_small_ones(pages):
    small = [filled(pages, MiB, i) for i in range(3 * FRESH_BYTES // MiB)]
    assert pages.idle_bytes == 0
    fresh = pages.fresh
    del small[::2]
    gc.collect()
    large = filled(pages, FRESH_BYTES + MiB, 100)
    assert (pages.joined, pages.fresh) == (1, fresh)
    assert [int(b[0]) for b in small] == [int(b[-1]) for b in small] == list(range(1, 3 * FRESH_BYTES // MiB, 2))
    del large
    gc.collect()
    # Its pages are single extents again.
    again = [filled(pages, MiB, 7) for _ in range(FRESH_BYTES // MiB)]
    assert pages.fresh == fresh
    assert all((b == 7).all() for b in again)


def test_small_blocks_are_not_made_of_pages(pages):
    filled(pages, SMALLEST - 1, 1)
    assert len(pages.take(0)) == 0
    assert (pages.fresh, pages.reused, pages.joined) == (0, 0, 0)


def test_nothing_is_kept_that_nobody_wants_kept(pages):
    a, b = filled(pages, MiB, 1), filled(pages, MiB, 2)
    del a
    gc.collect()
    pages.keep(False)
    assert pages.idle_bytes == 0
    assert (b == 2).all()
    del b
    gc.collect()
    assert pages.idle_bytes == 0


def test_an_allowance_is_kept_though_no_shuffle_runs_and_not_for_long():
    now = [0.0]
    pages = Pages(system(), lambda: now[0])
    pages.allowance_bytes = 10 * MiB
    blocks = [filled(pages, 4 * MiB, i) for i in range(6)]
    blocks.clear()  # all before anybody looks
    gc.collect()
    assert pages.idle_bytes == 8 * MiB
    pages.trim_idle()
    block = filled(pages, 4 * MiB, 1)  # one is wanted again
    del block
    gc.collect()
    now[0] += IDLE_SECONDS / 2
    assert pages.trim_idle() == 0  # too soon
    now[0] += IDLE_SECONDS
    assert pages.trim_idle() == 4 * MiB  # the other was not
    pages.keep(True)
    now[0] += 10 * IDLE_SECONDS
    assert pages.trim_idle() == 0  # a shuffle runs
    pages.keep(False)
    assert pages.idle_bytes == pages._extents == 0


def test_the_block_of_an_address(pages):
    a, b = filled(pages, 3 * MiB, 1), filled(pages, MiB, 2)
    at = a.ctypes.data
    assert pages.owner(at) == pages.owner(a[-1:].ctypes.data) == (at, 3 * MiB)
    assert pages.owner(b[7:].ctypes.data) == (b.ctypes.data, MiB)
    assert pages.owner(id(pages)) is None
    plain = filled(pages, 100, 0)
    assert pages.owner(plain.ctypes.data) is None
    part = a[100:]
    del a
    gc.collect()
    assert pages.owner(at) == (at, 3 * MiB)
    del part
    gc.collect()
    assert pages.owner(at) is None
    again = filled(pages, 2 * MiB, 3)  # in the same place, shorter
    assert pages.owner(again.ctypes.data) == (at, 2 * MiB)
    assert pages.owner(at + 2 * MiB) is None


def test_a_block_that_dies_while_another_is_made_is_not_mistaken_for_it(pages, monkeypatch):
    """Its memory goes back at once, and the kernel gives its address away before anybody has looked."""
    pages.keep(False)
    a = pages.take(FRESH_BYTES)
    at = pages.owner(np.frombuffer(a, "u1").ctypes.data)[0]
    real = pages._system.fresh

    def fresh(nbytes):
        nonlocal a
        a = None
        gc.collect()
        return real(nbytes)

    monkeypatch.setattr(pages._system, "fresh", fresh)
    b = np.frombuffer(pages.take(FRESH_BYTES), "u1")
    assert pages.owner(b.ctypes.data) == (b.ctypes.data, FRESH_BYTES)
    assert b.ctypes.data == at or pages.owner(at) is None
    pages._register(b.ctypes.data, FRESH_BYTES)  # the kernel need not have chosen that address: as if it had
    pages._dead.append((b.ctypes.data, 1))
    assert pages.owner(b.ctypes.data) == (b.ctypes.data, FRESH_BYTES)


@pytest.mark.parametrize("nbytes", [100, 5 * SMALLEST])
@pytest.mark.parametrize("kernel", [True, False])
def test_aligned_as_direct_reading_wants_it(nbytes, kernel):
    pages = Pages(system() if kernel else None)
    views = [pages.take(nbytes, 4096) for _ in range(3)]
    assert [np.frombuffer(v, "u1").ctypes.data % 4096 for v in views] == [0, 0, 0]
    assert [v.nbytes for v in views] == [nbytes] * 3


def test_trimmed_memory_is_given_back(pages):
    del_me = [filled(pages, 16 * MiB, 1) for _ in range(4)]
    before = _rss()
    del_me.clear()
    gc.collect()
    assert pages.trim() >= 64 * MiB
    assert _rss() < before - 32 * MiB


def _rss() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


@pytest.mark.parametrize("refused", [("reserve",), ("move",), ("fresh",), ("reserve", "fresh"), ("move", "fresh")])
def test_a_kernel_that_refuses_costs_no_memory_and_no_block(refused):
    pages = Pages(Refusing())
    pages.keep(True)
    small = [filled(pages, MiB, i) for i in range(12)]
    del small[::2]
    gc.collect()
    pages._system.refused = set(refused)
    large = filled(pages, 4 * MiB, 50)
    assert [int(b[5]) for b in small] == [1, 3, 5, 7, 9, 11]
    pages._drain()
    assert pages._extents >= len(pages._free)
    assert (large == 50).all()
    pages._system.refused = set()
    del large, small
    gc.collect()
    pages.keep(False)
    assert pages.idle_bytes == pages._extents == 0


def test_without_a_kernel_blocks_are_plain_memory():
    pages = Pages(None)
    pages.keep(True)
    assert (filled(pages, MiB, 3) == 3).all()
    assert pages.idle_bytes == pages.trim() == 0


def counted(pages: Pages, *blocks_extents: int) -> None:
    pages._drain()
    assert pages._extents == len(pages._free) + sum(blocks_extents)


def test_extents_are_not_kept_without_limit(pages, monkeypatch):
    assert MOST_EXTENTS < 65_530 // 2
    blocks = [filled(pages, SMALLEST, i) for i in range(64)]
    del blocks[::2]
    gc.collect()
    counted(pages, 32)
    monkeypatch.setattr("dask_gpurt.memory.pages.MOST_EXTENTS", 4)
    large = filled(pages, 4 * SMALLEST, 77)
    assert pages.joined == 0  # though what is free would do
    assert len(pages._free) <= 1
    counted(pages, 33)
    assert [int(b[0]) for b in blocks] == list(range(1, 64, 2))
    assert (large == 77).all()


def test_extents_are_counted(pages):
    small = [filled(pages, SMALLEST, i) for i in range(20)]
    del small[::2]
    gc.collect()
    counted(pages, 10)
    large = filled(pages, FRESH_BYTES, 1)
    larger = filled(pages, FRESH_BYTES - SMALLEST, 2)
    del large, larger
    gc.collect()
    counted(pages, 10)
    pages.trim()
    counted(pages, 10)
    pages.keep(False)
    del small
    gc.collect()
    counted(pages)
    assert pages._extents == 0


def test_blocks_never_overlap_from_many_threads(pages):
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        held: list[tuple[np.ndarray, int]] = []
        for i in range(150):
            value = int(rng.integers(256))
            held.append((filled(pages, int(rng.integers(SMALLEST, 20 * GRANULE)), value), value))
            while len(held) > 4 or (held and rng.random() < 0.5):
                block, value = held.pop(int(rng.integers(len(held))))
                if not (block == value).all():
                    wrong.append(f"{seed}: {i}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pages.reused + pages.joined > pages.fresh
