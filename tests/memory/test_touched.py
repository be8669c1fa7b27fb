"""`Touched`: memory that is there, aligned, and given back."""

from __future__ import annotations

import mmap
import threading

import numpy as np
import psutil
import pytest

from dask_gpurt.memory.touched import HUGE_PAGE, Touched

MB = 1 << 20


@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE, HUGE_PAGE + 1, 32 * MB])
def test_it_is_zeros_aligned_and_writeable(nbytes: int) -> None:
    area = Touched(nbytes)
    assert area.view.nbytes == nbytes
    assert area.address % HUGE_PAGE == 0
    assert not np.frombuffer(area.view, "u1").any()
    area.view[-1:] = b"x"
    area.end()
    with pytest.raises(ValueError, match="released"):
        area.view[0]


def test_all_of_it_is_there_until_it_ends() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    area = Touched(256 * MB)
    assert process.memory_info().rss - before > 200 * MB
    area.end()
    assert process.memory_info().rss - before < 100 * MB


def test_a_part_that_is_looked_at_outlives_it() -> None:
    area = Touched(MB)
    area.view[:] = b"y" * MB
    part = np.frombuffer(area.view, "u1")[100:200]
    area.end()
    assert part.tobytes() == b"y" * 100


@pytest.mark.parametrize("starts", [0, 2])
def test_where_the_system_starts_no_more_threads_it_is_touched_by_this_one(
    starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [None] * starts
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    process = psutil.Process()
    before = process.memory_info().rss
    area = Touched(64 * MB)
    assert process.memory_info().rss - before > 50 * MB
    area.end()
