"""`StealPolicy`: how many of the tasks behind one input a thief may take."""

from __future__ import annotations

import pytest

from tests.placement.fakes import FakeTask, FakeWorker, assign, learn, make_engine


@pytest.mark.parametrize(("nbytes", "most"), [(0, 12), (1000, 12), (500_000, 1)])
def test_a_thief_queues_tasks_whose_inputs_cost_nothing(nbytes: int, most: int) -> None:
    """Of those with large inputs it gets one for its free thread: what follows is where the inputs are. 0: no input."""
    home, idle = FakeWorker(1), FakeWorker(2)
    engine = make_engine([home, idle])
    sources = [FakeTask("source-0", nbytes=nbytes, on=(home,))] if nbytes else []
    tasks = [FakeTask(f"use-{i}", *sources) for i in range(24)]
    learn(engine, "use", 0.01, 1000)
    for task in tasks:
        assign(engine, task, home)
    coming: dict[FakeWorker, int] = {}
    moved = 0
    for task in tasks:
        if engine.thief(task, {idle}, coming, None) is idle:
            moved += 1
            coming = {idle: moved, home: -moved}
    assert 1 <= moved <= most
    assert most == 1 or moved >= 8
