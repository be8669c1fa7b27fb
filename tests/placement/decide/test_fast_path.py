"""Tasks that stay where their inputs are: when nothing could be gained elsewhere, and only then."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from distributed.core import Status
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.model import LinkClass
from dask_gpurt.placement import statistics
from dask_gpurt.placement.decide import fast_path
from dask_gpurt.placement.decide.cost import cost
from dask_gpurt.placement.decide.policy import WEIGHTS, Cheapest
from dask_gpurt.placement.engine import OBSERVED, Engine
from dask_gpurt.placement.evaluate.decision_record import STAYS, Detail
from dask_gpurt.placement.evaluate.governor import Standing
from tests.placement.fakes import SETTINGS, FakeScheduler, FakeTask, FakeWorker, assign, learn, make_engine

if TYPE_CHECKING:
    from collections.abc import Callable

COMPUTE = 1.0


def cluster(slack: float = 100.0) -> tuple[Engine, list[FakeWorker]]:
    workers = [FakeWorker(i, memory_limit=10**10) for i in range(6)]
    engine = make_engine(workers)
    learn(engine, "f", COMPUTE, 1000)
    engine.slack.seconds = lambda: slack  # type: ignore[method-assign]
    return engine, workers


def queue(engine: Engine, ws: FakeWorker, tasks: int) -> None:
    for i in range(tasks):
        assign(engine, FakeTask(f"f-queued-{ws.address}-{i}"), ws)


def compared(engine: Engine, key: str) -> int:
    """Candidates of the newest decision about a key."""
    return Detail(engine.log._rows[key]).candidates


def test_a_task_stays_and_says_so() -> None:
    engine, (a, *_) = cluster()
    queue(engine, a, 2)
    x, y = (FakeTask(name, nbytes=10**9, on=(a,)) for name in "xy")
    assert engine.decide(FakeTask("f-1", x, y), None) is a
    story = engine.log.story("f-1")
    assert story is not None
    assert (story["kind"], story["reason"], story["chosen"]) == ("cost", STAYS, a.address)
    assert story["inputs"] == {"bytes": 2 * 10**9, "count": 2}
    assert (story["workers"], story["restricted"]) == (6, False)
    (only,) = story["candidates"]
    assert (only["why"], only["has_bytes"], only["missing_bytes"]) == ("holder", 2 * 10**9, 0)
    assert only["queue_seconds"] == pytest.approx(2 * COMPUTE)
    assert story["predicted"]["finish_seconds"] == pytest.approx(3 * COMPUTE)
    assert story["predicted"]["moved_bytes"] == 0
    assert json.loads(json.dumps(story)) == story
    assert statistics.of(engine)["decisions"]["local"] == 1


def _slow(engine: Engine, a: FakeWorker) -> None:
    info = engine.workers.by_address[a.address]
    info.slowness = 3.0
    engine.speeds.learned(info)


def _trial(engine: Engine, a: FakeWorker) -> None:
    engine.governor.standing = Standing.TRIAL
    engine.governor._lot = lambda: 0.0


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("slow", _slow),
        ("on disk", lambda engine, a: engine.residence.heard(a.address, [("x", 10.0**9)], ())),
        ("no room", lambda engine, a: setattr(a, "nbytes", 6 * 10**9)),
        ("not running", lambda engine, a: setattr(a, "status", Status.paused)),
        ("long queue", lambda engine, a: queue(engine, a, 60)),
        ("on trial", _trial),
    ],
)
def test_a_task_is_weighed_when_elsewhere_may_be_better(why: str, change: Callable[[Engine, FakeWorker], None]) -> None:
    engine, (a, *_) = cluster()
    assert engine.decide(FakeTask("f-0", FakeTask("x", nbytes=10**9, on=(a,))), None) is a
    assert compared(engine, "f-0") == 1
    change(engine, a)
    engine.decide(FakeTask("f-1", FakeTask("x", nbytes=10**9, on=(a,))), None)
    assert compared(engine, "f-1") > 1


def test_the_governor_sees_its_share_of_them() -> None:
    """Else it would not notice that the policy loses by tasks that stay."""
    engine, (a, *_) = cluster()
    for i in range(4 * OBSERVED):
        assert engine.decide(FakeTask(f"f-{i}", FakeTask(f"x-{i}", nbytes=10**6, on=(a,))), None) is a
    weighed = [i for i in range(4 * OBSERVED) if compared(engine, f"f-{i}") > 1]
    assert len(weighed) == 4


def test_the_governor_does_not_judge_what_waits_for_event_loops() -> None:
    """It would see tasks that take a hundred times as long as predicted, under placement and stock alike."""
    engine, (a, b, *_) = cluster(slack=0.0)
    for i, brief in enumerate((False, True)):
        engine.durations.prefix("f").brief = brief
        for k in range(4 * OBSERVED):
            inputs = [FakeTask(f"x-{i}-{k}-{w}", nbytes=10**6, on=(w,)) for w in (a, b)]
            engine.decide(FakeTask(f"f-{i}-{k}", *inputs), None)
    assert {key.split("-")[1] for key in engine.governor.open} == {"0"}


def test_a_task_is_weighed_when_somebody_waits_for_it() -> None:
    engine, (a, *_) = cluster(slack=0.5 * COMPUTE)
    engine.decide(FakeTask("f-1", FakeTask("x", nbytes=10**9, on=(a,))), None)
    assert compared(engine, "f-1") > 1


def test_a_task_is_weighed_when_its_inputs_are_on_several_workers_or_nobody_knows_it() -> None:
    engine, (a, b, *_) = cluster()
    engine.decide(FakeTask("f-1", FakeTask("x", nbytes=10**9, on=(a, b))), None)
    engine.decide(FakeTask("f-2", *(FakeTask(f"y{w}", nbytes=10**9, on=(w,)) for w in (a, b))), None)
    engine.decide(FakeTask("new-1", FakeTask("z", nbytes=10**9, on=(a,))), {a, b})
    assert all(compared(engine, key) > 1 for key in ("f-1", "f-2", "new-1"))


def test_a_small_input_does_not_hold_a_burst() -> None:
    engine, workers = cluster()
    key = FakeTask("key", nbytes=10, on=(workers[0],))
    for i in range(12):
        task = FakeTask(f"f-{i}", key)
        ws = engine.decide(task, None)
        assign(engine, task, ws)
    assert max(len(ws.processing) for ws in workers) < 12


def test_the_policy_of_somebody_else_sees_every_task() -> None:
    seen = []

    class Mine(Cheapest):
        def decide(self, task: Any, workers: Any, far: Any) -> int | None:
            seen.append(len(workers))
            return super().decide(task, workers, far)

    a, b = FakeWorker(0), FakeWorker(1)
    engine = Engine(FakeScheduler([a, b]), SETTINGS, Mine())
    engine.budget.decision_seconds = float("inf")
    engine.adopt()
    learn(engine, "f", COMPUTE, 1000)
    engine.slack.seconds = lambda: 100.0  # type: ignore[method-assign]
    assert engine.decide(FakeTask("f-1", FakeTask("x", nbytes=10**9, on=(a,))), None) is a
    assert seen == [2]


@settings(deadline=None)
@given(
    queues=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    nbytes=st.integers(0, 10**10),
    held=st.integers(0, 7 * 10**9),
    slack=st.floats(0, 20),
)
def test_no_place_is_better_by_more_than_a_tenth_of_the_task(
    queues: list[int], nbytes: int, held: int, slack: float
) -> None:
    engine, workers = cluster(slack)
    for ws, n in zip(workers, queues, strict=True):
        queue(engine, ws, n)
    a = workers[0]
    a.nbytes = held
    ts = FakeTask("f-1", FakeTask("x", nbytes=nbytes, on=(a,)))
    task, far = engine.tables.task_view(ts), engine.links.link(LinkClass.NETWORK)
    stays = fast_path.stays(engine, ts, task, far, WEIGHTS)
    if stays is None:
        return
    assert stays[0].ws is a
    picked, _, views, _, _, i = engine.weigh(ts, None, 0, task, far)
    costs = {w.ws: cost(task, view, far, WEIGHTS) for w, view in zip(picked, views, strict=True)}
    assert costs[a] <= cost(task, views[i], far, WEIGHTS) + WEIGHTS.excused * COMPUTE + 1e-9
