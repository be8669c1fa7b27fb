"""When a root goes to somebody else than its owner, or to nobody yet; and for how long nobody waits for a task."""

from __future__ import annotations

from typing import Any

import pytest
from distributed.core import Status

from dask_gpurt.model import circuit_breaker
from dask_gpurt.placement.decide import root_dispatch
from dask_gpurt.placement.decide.root_blocks import Block, RootBlocks
from dask_gpurt.placement.decide.root_cuts import Member
from dask_gpurt.placement.decide.root_dispatch import RootDispatch
from dask_gpurt.placement.decide.steal_policy import STOCK
from dask_gpurt.placement.engine import Engine
from dask_gpurt.placement.evaluate.decision_log import DecisionLog
from dask_gpurt.simulate import simulate
from dask_gpurt.simulate.shapes import build
from tests.placement.fakes import FakeTask, FakeWorker, assign, finish, learn, make_engine

GB = 10**9


class Queue(list[Any]):
    def peek(self) -> Any:
        return self[0]


def rig(n: int = 4, **kw: Any) -> tuple[Any, list[FakeWorker]]:
    workers = [FakeWorker(i, **kw) for i in range(n)]
    engine = make_engine(workers)
    engine.scheduler.queued = Queue()
    engine.scheduler.idle_task_count = set()
    return engine, workers


def own(engine: Any, ws: FakeWorker, n: int, prefix: str = "r") -> list[FakeTask]:
    """Queued roots that a worker owns."""
    roots = [FakeTask(f"{prefix}-{ws.address}-{i}") for i in range(n)]
    for i, t in enumerate(roots):
        t.state, t.priority = "queued", (0, 1, i)  # type: ignore[attr-defined]
        engine.scheduler.tasks[t.key] = t
        engine.scheduler.queued.append(t)
    block = Block([t.key for t in roots], ws.address, ws.host)
    engine.groups._list(block)
    return roots


def test_a_root_is_left_to_an_owner_at_work() -> None:
    engine, (a, b, *_) = rig()
    (root,) = own(engine, a, 1)
    engine.scheduler.idle_task_count = {b}
    assert not engine.held(root), "its owner does nothing"
    assign(engine, FakeTask("busy"), a)
    assert engine.held(root)
    assert not engine.root_dispatch.may_take(a.address, 1)
    assert engine.root_dispatch.may_take(a.address, 2)


def test_a_held_root_keeps_nobody_from_their_own() -> None:
    """The rest of a more urgent graph waits for its owner; workers that have roots of the next graph go on."""
    engine, (a, b, *_) = rig()
    (root,) = own(engine, a, 1)
    mine = own(engine, b, 2)
    for t in mine:
        t.priority = (0, 2, 0)  # type: ignore[attr-defined]
    engine.scheduler.idle_task_count = {b}
    assert engine.pull(b) is None, "its owner does nothing: the more urgent one goes first"
    assign(engine, FakeTask("busy"), a)
    assert engine.held(root)
    assert engine.pull(b) is mine[0]


def test_a_root_is_not_held_for_ever() -> None:
    """Its owner may run a task of hours, and all that is queued behind it would wait as well."""
    engine, (a, b, *_) = rig()
    now = [0.0]
    engine.tables.clock = lambda: now[0]
    (root,) = own(engine, a, 1)
    assign(engine, FakeTask("hours"), a)
    engine.scheduler.idle_task_count = {b}
    assert engine.held(root)
    assert not engine.root_dispatch.impatient()
    now[0] = 4.0
    assert engine.held(root)
    now[0] = 6.0
    assert not engine.held(root)
    assert engine.root_dispatch.impatient(), "no task may end that would have slots filled"
    engine.root_dispatch.root_done(engine.workers.all.items[0], 2.0, GB)
    assert engine.held(root), "four of them take longer"
    now[0] = 9.0
    assert not engine.held(root)
    engine.groups.gone(root.key)
    assert not engine.root_dispatch.impatient()
    engine.root_dispatch.graph_arrived([])
    (again,) = own(engine, a, 1)
    assert again.key == root.key
    assert not engine.root_dispatch.impatient()
    assert engine.held(again), "the same query once more"


def test_a_slow_owner_is_not_waited_for() -> None:
    engine, (a, b, *_) = rig()
    (root,) = own(engine, a, 1)
    assign(engine, FakeTask("busy"), a)
    engine.workers.by_address[a.address].slowness = 2 * root_dispatch.SLOW
    engine.scheduler.idle_task_count = {b}
    assert not engine.held(root)
    assert engine.root_dispatch.may_take(a.address, 1)
    assert engine.pull(b) is root


def test_a_retired_policy_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, (a, *_) = rig()
    (root,) = own(engine, a, 1)
    assign(engine, FakeTask("busy"), a)
    monkeypatch.setattr(type(engine), "retired", True)
    assert not engine.held(root)
    assert engine.pull(a) is None
    assert engine.root_dispatch.hungry() == []


@pytest.mark.parametrize("shadow", [False, True])
def test_in_shadow_mode_no_blocks_are_cut(shadow: bool) -> None:
    engine = make_engine([FakeWorker(i) for i in range(4)], shadow=shadow)
    engine.graph_judge.enabled = False
    engine.scheduler.is_rootish = lambda ts: True
    roots: list[Any] = [FakeTask(f"r-{i}") for i in range(20)]
    for i, t in enumerate(roots):
        t.state, t.priority = "released", (0, 1, i)
        t.worker_restrictions = t.host_restrictions = t.resource_restrictions = None
        engine.scheduler.tasks[t.key] = t
    engine.graph_arrived([t.key for t in roots])
    assert len(engine.groups) == (0 if shadow else 20)


def test_who_only_waits_for_inputs_is_hungry() -> None:
    engine, (a, b, *_) = rig()
    own(engine, a, 4)
    x = FakeTask("x", nbytes=GB, on=(b,))
    assign(engine, FakeTask("f", x), a)
    assert engine.root_dispatch.hungry() == [a]
    assert engine.root_dispatch.hungry() == [], "looked at once after each change"
    assign(engine, FakeTask("local"), a)
    assert engine.root_dispatch.hungry() == [], "a thread has something to do"


def test_the_hungry_are_not_fed_without_end() -> None:
    engine, (a, b, *_) = rig()
    own(engine, a, 4)
    for i in range(root_dispatch.MAX_AHEAD + 1):
        assign(engine, FakeTask(f"f-{i}", FakeTask(f"x-{i}", nbytes=GB, on=(b,))), a)
    assert engine.root_dispatch.hungry() == []


def test_who_has_finished_is_asked_first() -> None:
    engine, (a, b, *_) = rig()
    own(engine, a, 2)
    for ws in (b, a):
        ts = FakeTask(f"t-{ws.address}")
        assign(engine, ts, ws)
        finish(engine, ts, 0.1)
    assert engine.root_dispatch.first()[:2] == [b, a]
    engine.scheduler.idle_task_count = {a, b}
    assert set(engine.root_dispatch.first()) == {a, b}, "and who could take one anyway"


def test_what_nobody_pulls_goes_to_its_owner_if_that_is_idle() -> None:
    engine, workers = rig(40)
    (root,) = own(engine, workers[7], 1)
    engine.scheduler.idle_task_count = set(workers)
    assert engine.root_dispatch.takers(root) == [workers[7]]
    engine.scheduler.idle_task_count.discard(workers[7])
    some = engine.root_dispatch.takers(root)
    assert 0 < len(some) <= 2 * root_dispatch.ASKED, "not all forty"
    assert engine.root_dispatch.takers() != [workers[7]]


def test_workers_that_are_paused_are_not_asked() -> None:
    engine, workers = rig(20)
    for ws in workers[:15]:
        ws.status = Status.paused
    assert set(engine.root_dispatch._free()) == set(workers[15:])


def test_without_a_slot_only_the_hungry_are_looked_for() -> None:
    engine, (a, b, *_) = rig()
    own(engine, b, 4)
    info = engine.workers.by_address[a.address]
    engine.root_dispatch.finished(info)
    assert engine.root_dispatch.quiet()
    assert engine.root_dispatch.first() == []  # forgotten: its slot has been taken
    x = FakeTask("x", nbytes=10, on=(b,))
    task = FakeTask("f-1", x)
    assign(engine, task, a)
    assert a.needs_what
    assert not engine.root_dispatch.quiet()
    assert engine.root_dispatch.hungry() == [a]
    assert engine.root_dispatch.quiet()


def test_hosts_are_in_order_of_their_numbers() -> None:
    workers = [FakeWorker(i, host=f"10.0.0.{n}") for i, n in enumerate((10, 9, 1))]
    engine = make_engine(workers)
    assert [m.node for m in engine.root_dispatch._dealt_to()] == ["10.0.0.1", "10.0.0.9", "10.0.0.10"]
    assert engine.root_dispatch._dealt_to()[0] == Member(workers[2].address, "10.0.0.1", 1.0)
    engine.worker_removed(workers[2].address)
    assert len(engine.root_dispatch._dealt_to()) == 2


# ---------------------------------------------------------------------- slack


class Group:
    def __init__(self, prefix: str, **states: int) -> None:
        self.name = prefix
        self.prefix = FakeTask(prefix).prefix
        self.states = {"waiting": 0, "queued": 0, "no-worker": 0, "processing": 0, "memory": 0, **states}


def test_slack_is_the_remaining_work_spread_evenly() -> None:
    engine, workers = rig(4)
    learn(engine, "f", 0.5)
    engine.scheduler.task_groups = {"f": Group("f", waiting=36, processing=4, memory=1000)}
    assert engine.slack.seconds() == 0.0, "everybody is idle"
    for ws in workers:
        assign(engine, FakeTask(f"busy-{ws.address}"), ws)
    assert engine.slack.seconds() == pytest.approx(0.8 * 40 * 0.5 / 4)


def test_work_never_seen_counts_by_the_usual_duration() -> None:
    engine, (a, *_) = rig(4)
    for i in range(500):
        ts = FakeTask(f"f-{i}")
        assign(engine, ts, a)
        finish(engine, ts, 0.5)
    assert engine.durations.guess_seconds == pytest.approx(0.3 * 0.5, rel=1e-3)
    engine.scheduler.task_groups = {"f": Group("f", waiting=10), "g": Group("g", waiting=10)}
    engine.scheduler.queued.append("roots are queued, so nobody stays idle")
    assert engine.slack.seconds() == pytest.approx(0.8 * (10 * 0.5 + 10 * 0.15) / 4, rel=1e-3)


# ---------------------------------------------------------------------- together


@pytest.mark.parametrize(("shape", "worst", "far_gb"), [("tree", 1.15, 2.0), ("binop", 1.1, 0.1), ("stencil", 1.2, 8)])
def test_simulated_shapes_stay_near_the_bound(shape: str, worst: float, far_gb: float) -> None:
    from dask_gpurt.simulate.bounds import bound

    workload, cluster = build(shape, workers=16)
    result = simulate(workload, cluster, "gpurt")
    assert result.makespan_seconds < worst * bound(workload, cluster, 0).seconds
    assert result.between_nodes_bytes < far_gb * 1e9
    assert not result.statistics["fallbacks"]


def test_a_root_whose_result_is_small_is_not_left_to_a_busy_owner() -> None:
    """Waiting for its owner would take longer than sending the result ever does."""
    engine, (a, b, *_) = rig()
    (root,) = own(engine, a, 1)
    engine.scheduler.idle_task_count = {b}
    assign(engine, FakeTask("busy"), a)
    engine.root_dispatch.root_done(engine.workers.all.items[0], 1.0, 1000)
    assert not engine.held(root)
    assert engine.root_dispatch.may_take(a.address, 1)
    engine.root_dispatch.root_done(engine.workers.all.items[0], 1.0, 1e13)
    assert engine.held(root)
    assert not engine.root_dispatch.may_take(a.address, 1)


def test_what_waits_for_a_worker_waits_behind_a_long_root() -> None:
    engine, (a, *_) = rig()
    info = engine.workers.all.items[0]
    own(engine, a, 9)
    for _ in range(3):
        engine.root_dispatch.root_done(info, 0.001, 1000)
    engine.root_dispatch.finished(info)
    assert engine.root_dispatch.hungry() == [a, a], "short ones are sent ahead"
    engine.root_dispatch.root_done(info, 0.04, 1000)
    engine.root_dispatch.finished(info)
    assert engine.root_dispatch.hungry() == [], "a few take most of the time, however short most of them are"


def test_short_roots_go_in_lots() -> None:
    """What a worker has in hand doubles at most, and is filled up again when half of it is done."""
    engine, (a, *_) = rig()
    info = engine.workers.all.items[0]
    own(engine, a, 99)
    engine.root_dispatch.root_done(info, 0.001, 1000)
    most = engine.root_dispatch._ahead()
    assert most == 10
    given: list[FakeTask] = []
    sizes = []
    for done in (0, 0, 0, 0, 1, 4, 1):
        for ts in given[:done]:
            finish(engine, ts, 0.001)
        del given[:done]
        engine.root_dispatch.finished(info)
        lot = engine.root_dispatch.hungry()
        sizes.append(len(lot))
        for _ in lot:
            given.append(FakeTask(f"given-{len(sizes)}-{len(given)}"))
            assign(engine, given[-1], a)
    assert sizes == [2, 2, 4, 0, 0, 3, 5]
    assert len(given) <= most
    for ts in given[:5]:
        finish(engine, ts, 0.001)
    engine.scheduler.queued.clear()
    engine.scheduler.queued.extend([FakeTask(f"last-{i}") for i in range(8)])
    engine.root_dispatch.finished(info)
    assert len(engine.root_dispatch.hungry()) == 2, "the last roots stay where every worker can get them"


def test_one_that_was_held_up_does_not_end_it() -> None:
    """As a pause of the garbage collector does, once in a while."""
    engine, (a, *_) = rig(memory_limit=10**9)
    info = engine.workers.all.items[0]
    own(engine, a, 9)
    for seconds in [0.001] * 50 + [0.02]:
        engine.root_dispatch.root_done(info, seconds, 1000)
    engine.root_dispatch.finished(info)
    assert engine.root_dispatch.hungry() == [a, a]


def test_short_roots_that_nobody_owns_are_sent_ahead_too() -> None:
    """As of a plain map over many small arguments, or of tasks that all read one input."""
    engine, (a, *_) = rig(memory_limit=10**9)
    for i in range(9):
        root = FakeTask(f"map-{i}")
        root.state, root.priority = "queued", (0, 1, i)  # type: ignore[attr-defined]
        engine.scheduler.queued.append(root)
    first, second, third = engine.scheduler.queued[:3]
    for done in (first, second):
        engine.scheduler.queued.remove(done)
        assign(engine, done, a, queued=True)
        finish(engine, done, 0.001, nbytes=1000)
    assert engine.root_dispatch.hungry() == [a, a], "learned from a queued task without a block"
    assert engine.pull(a) is None, "stock's choice where a slot is free"
    assert engine.pull(a, ahead=True) is third


def test_what_others_own_is_not_sent_ahead() -> None:
    engine, (a, b, *_) = rig()
    own(engine, b, 1)
    engine.workers.by_address[b.address].slowness = 1.0
    assign(engine, FakeTask("busy"), b)
    assert engine.pull(a, ahead=True) is None


def test_slots_full_of_short_followers_do_not_keep_a_root_away() -> None:
    engine, (a, *_) = rig(memory_limit=10**9)
    info = engine.workers.all.items[0]
    own(engine, a, 9)
    engine.root_dispatch.root_done(info, 0.1, 1000)
    learn(engine, "short", 0.001)
    learn(engine, "long", 0.05)
    followers = [FakeTask(f"short-{i}") for i in range(2)]

    def hungry(*tasks: FakeTask) -> list[Any]:
        for task in tasks[:1]:
            assign(engine, task, a)
        engine.root_dispatch.finished(info)  # before what follows is assigned, as in the scheduler
        for task in tasks[1:]:
            assign(engine, task, a)
        found: list[Any] = engine.root_dispatch.hungry()
        for task in tasks:
            finish(engine, task, 0.001)
        engine.root_dispatch.hungry()
        return found

    assert hungry(*followers) == [a], "they are done before a message could bring a root"
    assert hungry(followers[0], FakeTask("long-1")) == [], "there is time"
    assert hungry(followers[0], FakeTask("unknown-1")) == []
    assert hungry() == [], "its slots are free: it is asked in any case"
    learn(engine, "tiny", 1e-6)
    assert hungry(*[FakeTask(f"tiny-{i}") for i in range(9)]) == [a]
    assert hungry(*[FakeTask(f"tiny-{i}") for i in range(100)]) == [], "so many are not looked at"
    engine.root_dispatch.root_done(info, 0.1, 1e12)
    assert hungry(*followers) == [], "a root more would not fit into memory easily"


def test_the_last_roots_are_not_queued_behind_a_busy_thread() -> None:
    engine, (a, b, c, _) = rig()
    first, *_ = own(engine, a, 3)
    engine.scheduler.total_nthreads = 4
    assign(engine, first, a)
    engine.scheduler.queued.remove(first)
    assert engine.worth(a), "nothing is known of how long roots take"
    engine.root_dispatch.root_done(engine.workers.all.items[0], 1.0, 1000)
    assert not engine.worth(a)
    assert engine.worth(b), "it has a free thread"
    assign(engine, FakeTask("join"), c)
    assert engine.worth(c), "what it is busy with is no root"
    engine.root_dispatch.root_done(engine.workers.all.items[0], 1.0, 10**11)
    assert engine.worth(a), "nobody else would take what is so dear to send"
    engine.root_dispatch._owned.seconds, engine.root_dispatch._owned.nbytes = 1.0, 1000
    assert not engine.worth(a)


def test_a_long_root_is_not_queued_before_what_follows_the_one_before() -> None:
    engine, (a, *_) = rig()
    first, second, *_ = own(engine, a, 9)
    assign(engine, first, a)
    engine.scheduler.queued.remove(first)
    engine.root_dispatch.root_done(engine.workers.all.items[0], 1.0, 10**11)
    assert engine.worth(a)
    FakeTask("slice", second)
    assert not engine.worth(a)
    engine.root_dispatch._owned.seconds = root_dispatch.LONG_SECONDS / 2
    engine.root_dispatch._owned.nbytes = 10**11
    assert engine.worth(a), "a message's time is a good part of its own"


def test_there_is_enough_for_all() -> None:
    engine, (a, *_) = rig()
    first, *_ = own(engine, a, 2)
    engine.scheduler.total_nthreads = 4
    assign(engine, first, a)
    engine.scheduler.queued.remove(first)
    engine.root_dispatch.root_done(engine.workers.all.items[0], 1.0, 1000)
    assert not engine.worth(a)
    own(engine, a, 9, "more")
    assert engine.worth(a), "there are enough for all"


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Engine, "held"),
        (Engine, "pull"),
        (Engine, "worth"),
        (RootDispatch, "first"),
        (RootDispatch, "hungry"),
        (RootDispatch, "takers"),
        (RootBlocks, "waits"),
    ],
)
def test_an_exception_in_dealing_does_no_harm(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Live clusters under test assert that free slots are used, and never come to some of these; the simulated do."""
    calls = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        raise ZeroDivisionError(f"{name} is broken")

    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr(circuit_breaker, "LIMIT", 10**6)
    workload, cluster = build("straggler", workers=8)
    result = simulate(workload, cluster, "gpurt")
    assert calls
    assert result.executed - result.wasted == len(workload.tasks), "all of them, each once"
    assert result.statistics["fallbacks"]["roots"]["exception"] == len(calls)
    assert f"{name} is broken" in result.statistics["last_traceback"]


@pytest.mark.parametrize(("owner", "name"), [(RootBlocks, "waits"), (DecisionLog, "root")])
def test_an_exception_over_a_queued_root_does_no_harm(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Slots are filled while a task finishes: what is raised there would have distributed remove its worker."""
    calls = []
    stock, seen = getattr(owner, name), {}

    def broken(self: Any, task: Any, *args: Any) -> Any:
        # Not as the root becomes ready, where all of ours is guarded together.
        if seen.get(task, task).state == "queued":
            calls.append(name)
            raise ZeroDivisionError(f"{name} is broken")
        return stock(self, task, *args)

    def home(self: RootDispatch, ts: Any) -> Any:
        seen[ts.key] = ts
        wanted = owner is DecisionLog and ts.state == "queued"
        return next(iter(self._tables.scheduler.running)) if wanted else None

    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr(RootDispatch, "home", home)
    monkeypatch.setattr(circuit_breaker, "LIMIT", 10**6)
    workload, cluster = build("straggler", workers=8)
    result = simulate(workload, cluster, "gpurt")
    assert calls
    assert result.executed - result.wasted == len(workload.tasks), "all of them, each once"
    assert result.statistics["fallbacks"]["roots"]["exception"] == len(calls)


def test_with_books_that_failed_dask_deals_roots_and_steals() -> None:
    engine = make_engine([FakeWorker(0), FakeWorker(1)])
    engine.untrusted = True
    task = FakeTask("f-1")
    assert engine.decide(task, None) is None
    assert engine.declined == {"bookkeeping retired": 1}
    assert engine.leaves_roots()
    assert engine.pull(FakeWorker(0)) is None
    assert engine.thief(task, [], {}, None) is STOCK
