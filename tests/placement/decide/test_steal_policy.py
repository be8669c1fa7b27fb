"""`StealPolicy`: how many of the tasks behind one input a thief may take."""

from __future__ import annotations

import pytest
from distributed.core import Status

from dask_gpurt.placement.decide.steal_policy import STOCK
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


@pytest.mark.parametrize("what", ["unknown", "known", "on disk"])
def test_a_task_leaves_a_worker_whose_threads_do_not_come_free(what: str) -> None:
    """Seen: it stayed behind a task of an hour that nothing was known of, as its input takes 0.2 s to send."""
    home, idle = FakeWorker(1, nthreads=2), FakeWorker(2)
    engine = make_engine([home, idle])
    source = FakeTask("source-0", nbytes=20_000_000, on=(home,))
    short = FakeTask("use-0", source)
    learn(engine, "use", 0.02, 1000)
    if what == "known":
        learn(engine, "hour", 0.05, 1000)
    elif what == "on disk":
        engine.tables.residence.heard(home.address, [(source.key, source.nbytes)], [])
    hours = [FakeTask(f"hour-{i}") for i in range(2)]
    for task in (*hours, short):
        assign(engine, task, home)
    home.executing = {hours[0]: 60.0, hours[1]: 0.1}
    assert engine.thief(short, {idle}, {}, None) is None, "one thread will be free soon"
    home.executing[hours[1]] = 60.0
    assert engine.thief(short, {idle}, {}, None) is idle
    home.long_running.add(hours[1])
    assert engine.thief(short, {idle}, {}, None) is None, "it has seceded"


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_task_at_a_worker_that_is_paused_is_left_to_dask(on_disk: bool) -> None:
    """Seen: tasks stayed for good at a worker whose values filled its memory, where Dask had taken them elsewhere."""
    home, idle = FakeWorker(1), FakeWorker(2)
    engine = make_engine([home, idle])
    source = FakeTask("source-0", nbytes=200_000_000, on=(home,))
    task = FakeTask("use-0", source)
    learn(engine, "use", 0.02, 1000)
    if on_disk:
        engine.tables.residence.heard(home.address, [(source.key, source.nbytes)], [])
    assign(engine, task, home)
    assert engine.thief(task, {idle}, {}, None) is None
    home.status = Status.paused
    assert engine.thief(task, {idle}, {}, None) is STOCK
    slow = engine.steal_policy.choose(task, {idle}, {}, busy=True)  # type: ignore[arg-type]
    assert slow is not STOCK, "what is rescued from a slow worker is, paused or not"
