"""What tasks free is used again while there is room, and goes back when it is more than a little of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dask_gpurt.memory.malloc import Heap
from dask_gpurt.memory.pages import Pages
from dask_gpurt.memory.reuse import (
    ASKING_SHARE,
    IDLE_SECONDS,
    LEAST_BYTES,
    MMAP_BYTES,
    PRESSURE,
    ROOM,
    SHARE,
    SLOW_SECONDS,
    TRIM_BYTES,
    Reuse,
    allocated,
    thresholds,
)
from tests.memory.test_malloc import NANNY, Libc

if TYPE_CHECKING:
    from collections.abc import Mapping

MB, GB = 1 << 20, 1 << 30
OURS = [(-1, TRIM_BYTES), (-3, MMAP_BYTES)]
STOCK = [(-1, 65536), (-3, 128 << 10)]


class Process:
    """Says what is allocated, and what time it is."""

    def __init__(self, environment: Mapping[str, str] = NANNY) -> None:
        self.libc = Libc()
        self.heap = Heap(environment, self.libc, pages=Pages(None))
        self.used = 100 * MB
        self.seconds = 0.0
        self.asking = 0.0  # seconds that an answer takes
        self.cpu = 0.0
        self.reuse = Reuse(self.heap, self.allocated, lambda: self.seconds, lambda: self.cpu)

    def allocated(self) -> int:
        self.cpu += self.asking
        return self.used

    def look(self, rss_bytes: int, busy: bool = True, limit_bytes: int | None = 2 * GB, pressed: bool = False) -> bool:
        return self.reuse.look(rss_bytes, limit_bytes, threads=1, busy=busy, pressed=pressed)

    def calls(self) -> list[tuple[int, int] | str]:
        made, self.libc.calls = self.libc.calls, []
        return made


@pytest.mark.parametrize("limit", [None, 0, 2 * GB])
def test_on_while_there_is_room(limit: int | None) -> None:
    p = Process()
    assert not p.look(200 * MB, limit_bytes=limit)
    assert p.reuse.on
    assert p.calls() == OURS


@pytest.mark.parametrize("limit", [128 * MB, 300 * MB, GB, 4 * GB, 64 * GB])
@pytest.mark.parametrize("threads", [1, 2, 4, 16, 64])
def test_the_threads_of_a_small_worker_keep_little(limit: int, threads: int) -> None:
    end, piece = thresholds(limit, threads)
    assert 64 << 10 <= end <= TRIM_BYTES
    assert 128 << 10 <= piece <= MMAP_BYTES
    assert piece == 128 << 10 or threads * piece <= limit / 16
    assert end == 64 << 10 or threads * end <= limit / 64
    if limit >= 512 * MB * threads:
        assert (end, piece) == (TRIM_BYTES, MMAP_BYTES)


def test_free_pieces_still_go_back_once_the_thresholds_are_dasks_again() -> None:
    """Allocations that would be mappings are put into them, and stay in the process when they are freed."""
    p = Process()
    assert not p.look(200 * MB, pressed=True)
    p.used = 50 * MB
    assert not p.look(200 * MB, pressed=True)  # the thresholds never were high
    p.used = 100 * MB
    p.look(1000 * MB)
    assert p.look(1000 * MB, pressed=True)
    p.reuse.returned(200 * MB)
    assert not p.look(200 * MB + LEAST_BYTES, pressed=True)
    assert p.look(201 * MB + LEAST_BYTES, pressed=True)


def test_off_near_the_limit_until_there_is_room_again() -> None:
    p = Process()
    p.look(200 * MB)
    p.calls()
    assert p.look(int(PRESSURE * 2 * GB) + 1)
    assert p.calls() == STOCK
    assert not p.look(int(PRESSURE * 2 * GB) - 1)  # no turning on and off around one mark
    assert p.calls() == []
    p.look(int(ROOM * 2 * GB) - 1)
    assert p.calls() == OURS


def test_off_while_values_may_have_to_leave() -> None:
    p = Process()
    p.look(200 * MB, pressed=True)
    assert p.calls() == []
    p.look(200 * MB)
    assert p.calls() == OURS
    assert p.look(200 * MB, pressed=True)
    assert p.calls() == STOCK


def test_what_is_free_goes_when_it_is_more_than_a_little() -> None:
    p = Process()
    p.look(200 * MB)
    assert not p.look(200 * MB)
    p.used += 500 * MB
    assert not p.look(700 * MB)  # all of it is allocated
    bound = int(SHARE * 700 * MB)
    assert bound > LEAST_BYTES
    p.used -= bound
    assert not p.look(700 * MB)
    p.used -= MB
    assert p.look(700 * MB)
    p.reuse.returned(700 * MB)
    assert not p.look(700 * MB)  # what would not go counts as the process's own
    assert p.reuse.trims == 1


def test_what_tasks_free_right_after_it_went_back_goes_as_well() -> None:
    """At the next look it is there already. It does not count as the process's own."""
    p = Process()
    for rss in (200, 200, 300):
        trims = p.look(rss * MB)
    assert trims
    p.reuse.returned(200 * MB)
    assert p.look(300 * MB)


def test_a_small_process_may_have_the_least() -> None:
    p = Process()
    p.look(101 * MB)
    p.look(101 * MB)
    assert not p.look(101 * MB + LEAST_BYTES)
    assert p.look(102 * MB + LEAST_BYTES)


def test_what_is_free_goes_once_when_no_task_runs() -> None:
    p = Process()
    p.look(200 * MB)
    assert not p.look(200 * MB, busy=True)
    p.seconds = IDLE_SECONDS
    assert not p.look(200 * MB, busy=False)
    p.seconds += 0.1
    assert p.look(200 * MB, busy=False)
    p.seconds += 100
    assert not p.look(200 * MB, busy=False)


def test_a_shuffle_keeps_what_it_wants() -> None:
    p = Process()
    p.look(200 * MB)
    p.look(200 * MB)
    p.heap.keep(2 * GB)
    p.calls()
    assert not p.look(900 * MB)
    p.reuse.cool()
    assert p.calls() == []  # it has thresholds of its own
    assert not p.look(200 * MB)
    assert p.calls() == []
    p.heap.give_back()
    assert p.calls() == OURS


def test_a_heap_that_takes_long_to_look_through_is_left_as_dask_has_it() -> None:
    p = Process()
    p.look(200 * MB)
    p.asking = SLOW_SECONDS
    assert not p.look(200 * MB)
    p.asking = 25e-3
    p.calls()
    assert p.look(200 * MB)
    assert p.calls() == STOCK
    asked = p.cpu
    for _ in range(100):
        p.seconds += p.asking / ASKING_SHARE / 101
        assert not p.look(200 * MB)
    assert not p.reuse.on
    assert p.cpu == asked
    p.seconds += 1.0
    p.look(200 * MB)
    assert p.calls() == OURS


@pytest.mark.parametrize("environment", [{}, {"MALLOC_TRIM_THRESHOLD_": "0"}, {"MALLOC_TRIM_THRESHOLD_": "1000000"}])
def test_what_glibc_or_a_user_has_chosen_stays(environment: dict[str, str]) -> None:
    p = Process(environment)
    for _ in range(3):
        assert not p.look(200 * MB)
    assert not p.reuse.on
    assert p.calls() == []


def test_a_library_that_does_not_say_what_is_allocated() -> None:
    heap = Heap(NANNY, libc := Libc())
    assert not Reuse(heap, None).look(200 * MB, None, threads=1, busy=True, pressed=False)
    assert libc.calls == []


FAULTS = """
import resource, numpy as np
from dask_gpurt.memory.malloc import heap
from dask_gpurt.memory.reuse import reuse
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        np.ones(300_000) + 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
stock = faults()
reuse.look(1, None, threads=1, busy=True, pressed=False)
faults()
print(stock, faults(), reuse.on)
"""


@pytest.mark.skipif(allocated() is None, reason="needs glibc 2.33")
def test_a_process_has_far_fewer_page_faults() -> None:
    environment = {**os.environ, **NANNY}
    run = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    stock, ours, on = run.stdout.split()
    assert on == "True"
    assert int(ours) < int(stock) / 10
