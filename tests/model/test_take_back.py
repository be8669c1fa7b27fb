"""`take_back`: who gets what a worker has not begun."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast
from unittest import mock

from distributed.stealing import WorkStealing

from dask_gpurt.model.take_back import take_back


class FakeWorker:
    looks = 0

    def __init__(self, processing: int, nthreads: int = 1) -> None:
        self._processing = dict.fromkeys(range(processing))
        self.nthreads = nthreads

    @property
    def processing(self) -> dict[Any, None]:
        FakeWorker.looks += 1
        return self._processing


def test_tasks_go_where_there_are_fewest_without_a_look_at_all_workers_for_each() -> None:
    """5,000 tasks of a worker among 1,000 others held the scheduler for seconds."""
    ws, loaded, wide = FakeWorker(0), FakeWorker(50), FakeWorker(0, nthreads=2)
    ws._processing = {mock.Mock(actor=False, name=i): None for i in range(200)}
    others = [FakeWorker(0) for _ in range(47)]
    bound = next(iter(ws._processing))
    went: Counter[Any] = Counter()
    stealing = mock.Mock(spec=WorkStealing, in_flight={})
    stealing.move_task_request = lambda ts, victim, thief: went.update([thief])
    scheduler = mock.Mock(extensions={"stealing": stealing}, running={ws, loaded, wide, *others})
    scheduler.valid_workers = lambda ts: {ws, loaded} if ts is bound else None
    FakeWorker.looks = 0
    assert take_back(cast("Any", scheduler), cast("Any", ws)) == 200
    assert FakeWorker.looks < 2 * 200
    assert went[ws] == 0
    assert went[loaded] == 1
    assert went[wide] in (8, 9)
    assert {went[w] for w in others} <= {4, 5}
