"""Who is compared: workers on nodes that hold no input only where fetching it takes less time than the task."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dask_gpurt.model import LinkClass
from dask_gpurt.placement.evaluate.decision_record import Detail
from tests.placement.fakes import FakeTask, FakeWorker, assign, learn, make_engine

if TYPE_CHECKING:
    from dask_gpurt.placement.engine import Engine

COMPUTE = 0.1
HOLDERS = 2


def cluster(per_host: int = 1) -> tuple[Engine, list[FakeWorker]]:
    """Forty workers; the first ones have a long queue, the others none."""
    workers = [FakeWorker(i, host=f"10.0.1.{i // per_host}") for i in range(40)]
    engine = make_engine(workers)
    learn(engine, "f", COMPUTE, 1000)
    for ws in workers[:HOLDERS]:
        engine.workers.by_address[ws.address].backlog_seconds = 5.0
        ws.processing.update(FakeTask(f"b-{ws}-{i}") for i in range(50))
        engine.workers.refresh(engine.workers.by_address[ws.address])
    return engine, workers


def compared(engine: Engine, key: str) -> set[str]:
    detail = Detail(engine.log._rows[key])
    return {detail.address(i) for i in range(detail.candidates)}


@pytest.mark.parametrize(("share", "abroad"), [(2.0, False), (0.5, True)])
def test_a_task_shorter_than_its_transfer_stays_among_holders(share: float, abroad: bool) -> None:
    engine, workers = cluster()
    nbytes = int(share * COMPUTE * engine.links.link(LinkClass.NETWORK).bytes_per_second / HOLDERS)
    inputs = [FakeTask(f"x-{i}", nbytes=nbytes, on=(workers[i],)) for i in range(HOLDERS)]
    chosen = engine.decide(FakeTask("f-1", *inputs), None)
    assert (compared(engine, "f-1") > {w.address for w in workers[:HOLDERS]}) == abroad
    assert (chosen not in workers[:HOLDERS]) == abroad


def test_neighbours_of_holders_are_compared_all_the_same() -> None:
    engine, workers = cluster(per_host=8)
    inputs = [FakeTask(f"x-{i}", nbytes=10**9, on=(workers[i],)) for i in range(HOLDERS)]
    engine.decide(FakeTask("f-1", *inputs), None)
    found = compared(engine, "f-1")
    assert len(found) > HOLDERS
    assert found <= {w.address for w in workers[:8]}


def test_an_input_of_many_is_moved_for_all_of_them() -> None:
    engine, workers = cluster()
    key = FakeTask("key", nbytes=10**8, on=(workers[0],))
    tasks = [FakeTask(f"f-{i}", key) for i in range(64)]  # a sixty-fourth of the transfer each
    engine.decide(tasks[0], None)
    assert len(compared(engine, "f-0")) > 1


def test_none_of_the_holders_runs() -> None:
    engine, workers = cluster()
    inputs = [FakeTask(f"x-{i}", nbytes=10**9, on=(workers[i],)) for i in range(HOLDERS)]
    for ws in workers[:HOLDERS]:
        ws.status = "closing"  # type: ignore[assignment]
    assert engine.decide(FakeTask("f-1", *inputs), None) in workers[HOLDERS:]


def test_a_small_input_does_not_hold_a_burst() -> None:
    workers = [FakeWorker(i, memory_limit=10**10) for i in range(6)]
    engine = make_engine(workers)
    learn(engine, "f", COMPUTE, 1000)
    engine.slack.seconds = lambda: 100.0  # type: ignore[method-assign]
    key = FakeTask("key", nbytes=10, on=(workers[0],))
    for i in range(12):
        task = FakeTask(f"f-{i}", key)
        ws = engine.decide(task, None)
        assign(engine, task, ws)
    assert max(len(ws.processing) for ws in workers) < 12
