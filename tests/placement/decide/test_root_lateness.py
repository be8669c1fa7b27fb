"""How late roots come, by the times of the tasks that ran."""

from __future__ import annotations

import types
from typing import Any

import pytest

from dask_gpurt.placement.decide.root_lateness import EVERY, LEAST_SECONDS, MOST_SECONDS, Lateness


class _Info:
    """As much of a `WorkerInfo` as is read."""

    def __init__(self, ws: Any) -> None:
        self.ws = ws


def _worker(threads: int = 1) -> Any:
    return _Info(types.SimpleNamespace(nthreads=threads))


def _run(
    late: Lateness, gap: float, seconds: float, n: int, *, threads: int = 1, root: bool = True, queued: bool = True
) -> None:
    """`n` tasks on each thread of a worker, each so long after the one before."""
    info = _worker(threads)
    for i in range(n + 1):
        start = 100 + i * (seconds + gap)
        for _ in range(threads):
            times = [{"action": "compute", "start": start, "stop": start + seconds}]
            late.ran(info, times, root=root, queued=queued)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_that_idle_before_roots_get_more_ahead(threads: int) -> None:
    late = Lateness()
    _run(late, 0.002, 0.003, 2 * EVERY, threads=threads)
    assert late.seconds_ahead > LEAST_SECONDS
    _run(late, 0.002, 0.003, 10 * EVERY, threads=threads)
    assert late.seconds_ahead == MOST_SECONDS


def test_less_when_no_root_is_late_any_more() -> None:
    late = Lateness()
    _run(late, 0.002, 0.003, 10 * EVERY)
    _run(late, 0.0, 0.003, 20 * EVERY)
    assert late.seconds_ahead == LEAST_SECONDS


@pytest.mark.parametrize(
    ("gap", "root", "queued"),
    [
        (0.0001, True, True),  # in time
        (0.1, False, True),  # what waits may wait for its inputs
        (0.1, True, False),  # there was no root to send
    ],
)
def test_as_before(gap: float, root: bool, queued: bool) -> None:
    late = Lateness()
    _run(late, gap, 0.003, 10 * EVERY, root=root, queued=queued)
    assert late.seconds_ahead == LEAST_SECONDS


def test_a_long_task_on_another_thread_makes_nothing_late() -> None:
    late, info = Lateness(), _worker(2)
    seconds = 1 / 256  # sums of it are exact: each task starts when the one before ends
    for i in range(10 * EVERY):
        start = i * seconds
        if i == 5 * EVERY:
            late.ran(info, [{"action": "compute", "start": 0.0, "stop": start}], root=True, queued=True)
        late.ran(info, [{"action": "compute", "start": start, "stop": start + seconds}], root=True, queued=True)
    assert late.seconds_ahead == LEAST_SECONDS
    assert len(late.freed[info]) == 2


def test_nothing_is_kept_of_a_worker_without_roots_to_come() -> None:
    late, info = Lateness(), _worker()
    times = [{"action": "compute", "start": 0.0, "stop": 1.0}]
    late.ran(info, times, root=True, queued=True)
    assert late.freed
    late.ran(info, times, root=True, queued=False)
    assert not late.freed
    late.ran(info, times, root=True, queued=True)
    late.lost(info)
    assert not late.freed
    late.ran(info, [{"action": "transfer", "start": 0.0, "stop": 1.0}], root=True, queued=True)
    assert not late.freed
