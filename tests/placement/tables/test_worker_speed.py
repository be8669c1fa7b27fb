"""How slow a worker is, what it is given then, when a task is overdue, and who may steal."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from dask.task_spec import Task, TaskRef
from distributed.core import Status

from dask_gpurt.model.link import LinkClass
from dask_gpurt.placement.decide import straggler_policy
from dask_gpurt.placement.decide.root_blocks import Block
from dask_gpurt.placement.decide.steal_policy import STOCK
from dask_gpurt.placement.tables.cluster_speed import PATIENCE_SECONDS, ClusterSpeed
from dask_gpurt.placement.tables.durations import Prefix
from dask_gpurt.placement.tables.worker_speed import Speed, believed
from dask_gpurt.placement.tables.workers import Workers
from tests.placement.fakes import FakeTask, FakeWorker, assign, finish, learn, make_engine

if TYPE_CHECKING:
    from dask_gpurt.placement.engine import Engine


def test_one_straggler_is_not_slowness() -> None:
    s = Speed()
    for x in (0.0, 0.1, math.log(50), -0.1, 0.0):
        s.observe("p", x)
    assert s.slowness == pytest.approx(1, rel=0.15)


def test_a_first_measurement_is_believed_in_part() -> None:
    s = Speed()
    s.observe("p", math.log(10))
    assert 1.5 < s.slowness < 5
    s.observe("p", math.log(10))
    assert s.slowness == pytest.approx(10, rel=0.3)
    for _ in range(9):
        s.observe("p", math.log(10))
    assert s.slowness == pytest.approx(10, rel=0.05)
    assert s.for_prefix("q") == pytest.approx(10, rel=0.05)


def test_what_chance_does_is_not_believed() -> None:
    assert believed(math.log(3), 1, 0.1) == pytest.approx(math.log(3), rel=0.1)
    assert believed(math.log(3), 1, 0.8) == 0.0
    assert 0 < believed(math.log(3), 11, 0.8) < math.log(3)
    assert believed(-math.log(3), 2, 0.5) == 0.0 < believed(math.log(3), 2, 0.5)
    assert believed(0.0, 11, 0.3) == 0.0


def test_a_faster_worker_is_known() -> None:
    s = Speed()
    for _ in range(11):
        s.observe("p", math.log(0.5), 0.1)
    assert s.slowness == pytest.approx(0.5, rel=0.1)
    s.suspect(math.log(5))
    assert s.slowness > 3


def test_slow_for_one_kind_only() -> None:
    s = Speed()
    for _ in range(3):
        s.observe("vector", math.log(8))
    for _ in range(5):
        s.observe("text", 0.0)
    assert s.for_prefix("vector") == pytest.approx(8, rel=0.2)
    assert s.for_prefix("text") == pytest.approx(1)
    assert s.for_prefix("new") == pytest.approx(1)


def test_a_suspicion_ends() -> None:
    s = Speed()
    s.suspect(math.log(5))
    assert 2 < s.slowness <= 5
    assert s.measured_slowness("p") == 1
    s.suspect(0.0)
    assert s.slowness == 1


def test_measurements_are_forgotten() -> None:
    s = Speed()
    for _ in range(3):
        s.observe("p", math.log(10))
    for _ in range(3):
        s.forget_one()
    assert len(s) == 0
    assert s.slowness == s.for_prefix("p") == 1


def table(slowness: list[float]) -> tuple[Workers, list[Any], ClusterSpeed, list[float]]:
    now = [100.0]
    t = Workers(0.6)
    infos = [t.add(FakeWorker(i)) for i in range(len(slowness))]
    pace = ClusterSpeed(t, clock=lambda: now[0])
    for info, x in zip(infos, slowness, strict=True):
        info.slowness = x
        pace.learned(info)
    return t, infos, pace, now


def test_the_last_tasks_are_not_for_the_slow() -> None:
    _, infos, pace, _ = table([10, 1, 1, 1])
    assert pace.uneven
    assert pace.worth(infos[0], 100)
    assert not pace.worth(infos[0], 10)
    assert pace.refusing
    assert all(pace.worth(w, 10) for w in infos[1:])


def test_what_follows_a_root_counts_against_a_slow_worker() -> None:
    _, infos, pace, _ = table([10, 1, 1, 1])
    # The others need 9.3 of its 10 units for the queue: true to one root, but what joins it would be late here too.
    assert not pace.worth(infos[0], 28)
    assert pace.worth(infos[0], 30)


def test_a_refused_worker_gets_work_in_the_end() -> None:
    _, infos, pace, now = table([10, 1, 1, 1])
    assert not pace.worth(infos[0], 1)
    now[0] += PATIENCE_SECONDS + 1
    assert pace.worth(infos[0], 1)
    assert pace.worth(infos[0], 1), "it has got none yet"
    pace.given(infos[0])
    assert not pace.refusing
    assert not pace.worth(infos[0], 1)


def test_workers_that_take_no_tasks_do_not_keep_a_slow_one_from_them() -> None:
    _, infos, pace, _ = table([10, 1, 1, 1])
    for info in infos[1:]:
        info.ws.status = Status.paused
    assert pace.worth(infos[0], 1)
    infos[1].ws.status = Status.running
    pace.refresh()
    assert not pace.worth(infos[0], 1)


def test_equally_slow_workers_all_work() -> None:
    _, infos, pace, _ = table([10, 10, 10])
    pace.refresh()
    assert not pace.uneven
    assert all(pace.worth(w, 0) for w in infos)


def test_a_lone_slow_worker_works() -> None:
    t, infos, pace, _ = table([10, 1])
    t.remove(infos[1].address)
    pace.removed(infos[1])
    assert pace.worth(infos[0], 0)


def prefix(*seconds: float) -> Prefix:
    p = Prefix("p")
    for s in seconds:
        p.learn(s, 0)
    return p


def test_overdue() -> None:
    assert straggler_policy.overdue_seconds(prefix(1, 1)) is None
    assert straggler_policy.overdue_seconds(prefix(*[0.01] * 6)) == pytest.approx(0.01 + straggler_policy.LEAST_SECONDS)
    assert straggler_policy.overdue_seconds(prefix(*[10.0] * 6)) == pytest.approx(20)
    first_calls = Prefix("p")
    for s in [10.0] * 6:
        first_calls.learn(s, 0, first=True)
    assert first_calls.spread_seconds == 0
    assert straggler_policy.overdue_seconds(first_calls) is None
    wide = straggler_policy.overdue_seconds(prefix(1, 2, 3, 4, 5, 6, 7))
    assert wide is not None
    assert wide > 4 + 6 * 2


def test_a_copy_must_pay() -> None:
    assert straggler_policy.pays(run_seconds=1.0, here_seconds=10.0, there_seconds=1.0)
    assert not straggler_policy.pays(run_seconds=9.5, here_seconds=10.0, there_seconds=6.0)
    # The worker is not slow: the task may as well be a long one, and what comes next would wait behind the copy.
    assert not straggler_policy.pays(run_seconds=30.0, here_seconds=1.0, there_seconds=1.0)
    assert straggler_policy.pays(run_seconds=30.0, here_seconds=1.0, there_seconds=1.0, spare=True)
    assert not straggler_policy.pays(run_seconds=1.5, here_seconds=1.0, there_seconds=1.0, spare=True)


class P2PBarrierTask:
    """Only the name counts."""


def candidate(**kw: Any) -> Any:
    values: dict[str, Any] = {
        "key": ("inc-0f", 1),
        "annotations": None,
        "actor": False,
        "resource_restrictions": None,
        "suspicious": 0,
        "run_spec": object(),
        "prefix": SimpleNamespace(name="inc"),
        "_queueable": True,
        "dependents": (),
        "dependencies": (),
    }
    return SimpleNamespace(**{**values, **kw})


def one_task(*names: str) -> Task:
    """Made of several, as `placement.decide.steps` makes it."""
    tasks = [Task((name, 1), len, TaskRef((below, 1))) for below, name in itertools.pairwise(("in", *names))]
    return Task.fuse(*tasks, key=(names[-1], 1))


@pytest.mark.parametrize(
    ("reason", "kw"),
    [
        (None, {}),
        (None, {"run_spec": one_task("read-0f", "inc-0f")}),
        ("writes", {"run_spec": one_task("save_rows-0f", "inc-0f")}),
        ("impure", {"run_spec": one_task("f-2b6e1f2a-8a0f-4c55-9d0e-3f1b7c9d2e10", "inc-0f")}),
        (None, {"annotations": {"gpurt_rerun": True, "priority": 1}}),
        ("annotated", {"annotations": {"gpurt_rerun": False}}),
        ("actor", {"actor": True}),
        ("actor", {"dependencies": [*(candidate() for _ in range(100)), candidate(actor=True)]}),
        ("resources", {"resource_restrictions": {"GPU": 1}}),
        ("suspicious", {"suspicious": 1}),
        ("no recipe", {"run_spec": None}),
        ("writes", {"prefix": SimpleNamespace(name="to-parquet")}),
        ("writes", {"prefix": SimpleNamespace(name="store-map")}),
        ("writes", {"prefix": SimpleNamespace(name="process_and_upload")}),
        (None, {"prefix": SimpleNamespace(name="compute_inputs")}),
        (None, {"prefix": SimpleNamespace(name="read-parquet")}),
        ("shuffle", {"prefix": SimpleNamespace(name="shuffle-transfer")}),
        ("shuffle", {"_queueable": False}),
        ("impure", {"key": "inc-2b6e1f2a-8a0f-4c55-9d0e-3f1b7c9d2e10"}),
        ("shuffle", {"run_spec": P2PBarrierTask()}),
        ("shuffle", {"dependents": [candidate(run_spec=P2PBarrierTask())]}),
        ("shuffle", {"dependencies": [candidate(), candidate(run_spec=P2PBarrierTask())]}),
    ],
)
def test_forbidden(reason: str | None, kw: dict[str, Any]) -> None:
    assert straggler_policy.forbidden(candidate(**kw)) == reason


def waiting(n: int, nbytes: int = 10) -> tuple[Engine, list[FakeWorker], list[FakeTask]]:
    """`n` tasks of 0.1 s on the first of three workers, which holds their input."""
    workers = [FakeWorker(i) for i in range(3)]
    engine = make_engine(workers)
    learn(engine, "f", 0.1)
    x = FakeTask("x", nbytes=nbytes, on=(workers[0],))
    tasks = [FakeTask(f"f-{i}", x) for i in range(n)]
    for ts in tasks:
        assign(engine, ts, workers[0])
    return engine, workers, tasks


def test_an_idle_worker_may_steal() -> None:
    engine, workers, tasks = waiting(5)
    assert engine.thief(tasks[-1], set(workers[1:]), {}, None) in workers[1:]
    assert engine.thief(tasks[-1], set(workers[1:]), {}, {workers[2]}) is workers[2]
    assert engine.steal_policy.opinions["allowed"] == 2


def test_what_is_cheaper_at_home_stays() -> None:
    engine, workers, tasks = waiting(5, nbytes=10**9)
    assert engine.thief(tasks[-1], set(workers[1:]), {}, None) is None
    assert engine.steal_policy.opinions["home"] == 1


def test_not_from_the_busy_to_the_busy() -> None:
    engine, workers, tasks = waiting(5, nbytes=2_000_000)
    for i, ws in enumerate(workers[1:]):
        assign(engine, FakeTask(f"f-other{i}"), ws)
    assert engine.thief(tasks[-1], set(workers[1:]), {}, None) is None
    assert engine.steal_policy.opinions["busy"] == 1
    assert engine.steal_policy.choose(tasks[-1], set(workers[1:]), {}, None, busy=True) in workers[1:]


def test_a_task_on_its_way_counts() -> None:
    engine, workers, tasks = waiting(5, nbytes=2_000_000)
    assert engine.thief(tasks[-1], {workers[1]}, {workers[1]: 1}, None) is None


def test_a_slow_worker_does_not_steal() -> None:
    engine, workers, tasks = waiting(2)
    info = engine.workers.by_address[workers[1].address]
    for _ in range(3):
        info.speed.observe("f", math.log(10))
    info.slowness, info.speed_samples = info.speed.slowness, 3
    assert engine.thief(tasks[-1], {workers[1]}, {}, None) is None
    assert engine.thief(tasks[-1], {workers[1], workers[2]}, {}, None) is workers[2]


def test_unknown_durations_are_for_stock() -> None:
    engine, workers, tasks = waiting(2)
    tasks[0].prefix.name = tasks[0].group.name = "unheard"
    assert engine.thief(tasks[0], set(workers[1:]), {}, None) is STOCK


def test_independent_tasks_avoid_a_slow_worker() -> None:
    workers = [FakeWorker(i) for i in range(3)]
    engine = make_engine(workers)
    learn(engine, "f", 0.1)
    assert engine.decide(FakeTask("f-0"), None) is None
    info = engine.workers.by_address[workers[0].address]
    info.speed.observe("f", math.log(10))
    info.speed.observe("f", math.log(10))
    info.slowness, info.speed_samples = info.speed.slowness, 2
    engine.speeds.learned(info)
    chosen = []
    for i in range(1, 7):
        ts = FakeTask(f"f-{i}")
        ws = engine.decide(ts, None)
        assert ws is not None
        assign(engine, ts, ws)
        chosen.append(ws)
    assert workers[0] not in chosen
    assert {chosen.count(w) for w in workers[1:]} == {3}


class Queue(list[Any]):
    def peek(self) -> Any:
        return self[0]


def zoned() -> tuple[Engine, list[FakeWorker]]:
    """Two racks of two hosts."""
    workers = [FakeWorker(i) for i in range(4)]
    engine = make_engine(workers)
    for ws, trip in zip(workers, (1e-5, 1e-5, 2e-2, 2e-2), strict=True):
        engine.measured(engine.workers.by_address[ws.address], trip)
    return engine, workers


def test_two_racks_are_known_by_their_round_trips() -> None:
    engine, workers = zoned()
    nodes = [engine.workers.by_address[w.address].node for w in workers]
    assert nodes[0] is nodes[1]
    assert nodes[2] is nodes[3]
    assert nodes[0] is not nodes[2]
    far, near = engine.links.link(LinkClass.NETWORK), engine.links.link(LinkClass.RACK)
    assert far.seconds(10**7) > 10 * near.seconds(10**7)
    late = FakeWorker(9)
    engine.scheduler.workers[late.address] = late
    engine.worker_added(late.address)
    engine.measured(engine.workers.by_address[late.address], 2.1e-2)
    assert engine.workers.by_address[late.address].node is nodes[2]
    engine.worker_removed(late.address)
    assert late.address not in engine.zones.by_address


def test_hosts_count_again_when_the_far_workers_have_left() -> None:
    """An adaptive cluster that had a far worker once, or one that seemed so, would have one node only for good."""
    workers = [FakeWorker(i, host=f"10.0.0.{i // 2}") for i in range(5)]
    engine = make_engine(workers)
    hosts = [engine.workers.by_address[w.address].node.name for w in workers]
    near = engine.links.link(LinkClass.NETWORK)
    for ws in workers:
        engine.measured(engine.workers.by_address[ws.address], 2e-2 if ws is workers[4] else 1e-5)
    assert engine.workers.zoned
    assert len(engine.workers.nodes) == 2
    del engine.scheduler.workers[workers[4].address]
    engine.worker_removed(workers[4].address)
    assert not engine.workers.zoned
    assert [engine.workers.by_address[w.address].node.name for w in workers[:4]] == hosts[:4]
    assert set(engine.workers.nodes) == set(hosts[:4])
    assert engine.links.link(LinkClass.NETWORK) == near
    # Those that come are measured as before.
    late = FakeWorker(9)
    engine.scheduler.workers[late.address] = late
    engine.worker_added(late.address)
    engine.measured(engine.workers.by_address[late.address], 2e-2)
    assert {n.name for n in engine.workers.nodes.values()} == {"zone-0", "zone-1"}


def test_pairs_stay_in_their_rack() -> None:
    engine, workers = zoned()
    learn(engine, "f", 0.1)
    for i in range(16):
        inputs = [FakeTask(f"x{k}-{i}", nbytes=10**6, on=(workers[k],)) for k in (0, 1)]
        ts = FakeTask(f"f-{i}", *inputs)
        ws = engine.decide(ts, None)
        assert ws in workers[:2]
        assign(engine, ts, ws)


def test_what_many_need_crosses_once() -> None:
    engine, workers = zoned()
    learn(engine, "f", 0.1)
    x = FakeTask("x", nbytes=8 * 10**6, on=(workers[0],))
    tasks = [FakeTask(f"f-{i}", x) for i in range(40)]
    x.waiters = set(tasks)  # type: ignore[attr-defined]
    used = []
    for ts in tasks:
        ws = engine.decide(ts, None)
        assert ws is not None
        assign(engine, ts, ws)
        used.append(ws)
    far = {w.address for w in used} & {w.address for w in workers[2:]}
    assert len(far) == 1, "one of the other rack fetches it, the other does not fetch it too"


def test_a_root_waits_for_what_is_crossing_already() -> None:
    engine, workers = zoned()
    engine.scheduler.idle_task_count = set(workers)  # type: ignore[attr-defined]
    x = FakeTask("x", nbytes=8 * 10**6, on=(workers[0],))
    roots = [FakeTask(f"r-{i}", x) for i in range(8)]
    x.waiters = set(roots)  # type: ignore[attr-defined]
    for i, t in enumerate(roots):
        t.state, t.priority = "queued", (0, 1, i)  # type: ignore[attr-defined]
        engine.scheduler.tasks[t.key] = t
    engine.scheduler.queued = Queue(roots)
    for ws in workers:
        engine.groups._list(Block([t.key for t in roots[2 * workers.index(ws) :][:2]], ws.address, ws.host))
    assert engine.root_dispatch.pull(workers[2]) is roots[4], "nobody there fetches it yet"
    assign(engine, roots[4], workers[2])
    assert engine.root_dispatch.pull(workers[3]) is None
    workers[2].status = Status.paused
    assert engine.root_dispatch.pull(workers[3]) is roots[6], "a paused worker does not go on fetching"
    workers[2].status = Status.running
    nobodys = FakeTask("q-0", x)
    assert workers[3] not in engine.root_dispatch.takers(nobodys)
    assert workers[1] in engine.root_dispatch.takers(nobodys)
    assert engine.root_dispatch.pull(workers[1]) is roots[2], "it is near"
    finish(engine, roots[4], 0.1)
    assert engine.root_dispatch.pull(workers[3]) is roots[6], "it can be had next door"
    small = FakeTask("s-0", FakeTask("y", nbytes=1000, on=(workers[0],)))
    assign(engine, small, workers[2])
    assert not engine.root_dispatch._crosses_again(small, engine.workers.by_address[workers[3].address])
