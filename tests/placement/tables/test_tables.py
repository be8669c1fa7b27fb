"""Workers, ledger, durations, candidates, budget: the tables behind a decision."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from distributed.core import Status
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.model import LinkClass
from dask_gpurt.placement import statistics
from dask_gpurt.placement.tables import durations, overhead_budget
from dask_gpurt.placement.tables.durations import UNKNOWN_SECONDS, Durations, compute_seconds
from dask_gpurt.placement.tables.overhead_budget import Budget
from dask_gpurt.placement.tables.workers import IndexedSet
from tests.placement.fakes import FakeTask, FakeWorker, assign, finish, learn, make_engine


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8))))
def test_indexed_set_is_a_set(ops: list[tuple[bool, int]]) -> None:
    ours: IndexedSet[int] = IndexedSet()
    real: set[int] = set()
    for add, x in ops:
        (ours.add if add else ours.discard)(x)
        (real.add if add else real.discard)(x)
        assert set(ours.items) == real
        assert len(ours) == len(real) == len(ours.items)
        assert all((y in ours) == (y in real) for y in range(9))


# ---------------------------------------------------------------------- workers


def test_idle_follows_threads() -> None:
    a = FakeWorker(0, nthreads=2)
    engine = make_engine([a])
    info = engine.workers.by_address[a.address]
    t = [FakeTask(f"t-{i}") for i in range(2)]
    assign(engine, t[0], a)
    assert info in engine.workers.idle
    assign(engine, t[1], a)
    assert info not in engine.workers.idle
    assert info not in info.node.idle
    finish(engine, t[0], 0.1)
    assert info in engine.workers.idle
    assert info in info.node.idle


def test_worker_leaves_no_trace() -> None:
    a, b = FakeWorker(0), FakeWorker(1)
    engine = make_engine([a, b])
    ts = FakeTask("t")
    assign(engine, ts, a)
    a.processing.clear()
    engine.books.left("t", "released", {})
    engine.worker_removed(a.address)
    engine.worker_removed(a.address)
    assert list(engine.workers.by_address) == [b.address]
    assert engine.workers.all.items == engine.workers.idle.items == [engine.workers.by_address[b.address]]
    assert list(engine.workers.nodes) == [b.host]


def test_worker_comes_back_under_its_address() -> None:
    a = FakeWorker(0)
    engine = make_engine([a])
    assign(engine, FakeTask("t"), a)
    again = FakeWorker(0)
    engine.scheduler.workers[again.address] = again
    engine.worker_added(again.address)
    assert len(engine.workers.all) == 1
    engine.books.left("t", "released", {})  # of the old one
    info = engine.workers.by_address[again.address]
    assert info.ws is again
    assert (info.tasks, info.backlog_seconds) == (0, 0.0)


# ---------------------------------------------------------------------- ledger


def test_charges_come_back_to_zero_whatever_is_learned() -> None:
    rnd = random.Random(3)
    workers = [FakeWorker(i, nthreads=2) for i in range(4)]
    engine = make_engine(workers)
    running: list[FakeTask] = []
    for i in range(400):
        if running and rnd.random() < 0.5:
            finish(engine, running.pop(rnd.randrange(len(running))), rnd.random(), rnd.randrange(10**6))
        else:
            ts = FakeTask(f"{rnd.choice('abcdef')}-{i}")
            assign(engine, ts, rnd.choice(workers))
            running.append(ts)
        for info in engine.workers.all.items:
            charges = [c for c in engine.backlog.charges.values() if c.info is info]
            assert info.tasks == len(charges)
            assert info.backlog_seconds == pytest.approx(sum(c.seconds for c in charges), abs=1e-9)
            assert info.reserved_bytes == pytest.approx(sum(c.nbytes for c in charges), abs=1e-3)
    for ts in running:
        finish(engine, ts, 0.1)
    assert statistics.of(engine)["tables"] == {
        "workers": 4,
        "charges": 0,
        "unknown": 0,
        "roots": 0,
        "copies_on_disk": 0,
    }
    assert all(w.backlog_seconds == w.reserved_bytes == w.tasks == 0 for w in engine.workers.all.items)


def test_a_burst_of_unknown_tasks_is_charged_again_when_known() -> None:
    a = FakeWorker(0)
    engine = make_engine([a])
    tasks = [FakeTask(f"t-{i}") for i in range(10)]
    for ts in tasks:
        assign(engine, ts, a)
    info = engine.workers.by_address[a.address]
    assert info.backlog_seconds == pytest.approx(10 * UNKNOWN_SECONDS)
    finish(engine, tasks[0], 2.0, 1000)
    assert info.backlog_seconds == pytest.approx(9 * 2.0)
    assert info.reserved_bytes == pytest.approx(9 * 1000)
    assert not engine.backlog.unknown


def test_what_distributed_knows_is_used_for_an_unknown_prefix() -> None:
    a = FakeWorker(0)
    engine = make_engine([a])
    ts = FakeTask("t")
    ts.prefix.duration_average = 7.0
    assign(engine, ts, a)
    assert engine.workers.by_address[a.address].backlog_seconds == 7.0


def test_seceded_tasks_leave_the_queue() -> None:
    a, b = FakeWorker(0), FakeWorker(1)
    engine = make_engine([a, b])
    learn(engine, "long", 1000.0)
    long = FakeTask("long-0")
    assign(engine, long, a)
    x = FakeTask("x", nbytes=10**8, on=(a,))
    assert engine.decide(FakeTask("f-0", x), None) is b
    a.long_running.add(long)
    assert engine.decide(FakeTask("f-1", x), None) is a
    assert engine.workers.by_address[a.address].backlog_seconds == 0
    a.long_running.clear()
    finish(engine, long, 1000.0)
    assert engine.workers.by_address[a.address].backlog_seconds == 0


def test_stolen_tasks_take_their_charge_along() -> None:
    a, b = FakeWorker(0), FakeWorker(1)
    engine = make_engine([a, b])
    learn(engine, "t", 1.0, 50)
    ts = FakeTask("t-0")
    assign(engine, ts, a)
    a.processing.clear()
    ts.processing_on = b
    b.processing.add(ts)
    engine.books.stolen("t-0", a.address, b.address)
    ia, ib = (engine.workers.by_address[w.address] for w in (a, b))
    assert (ia.tasks, ia.backlog_seconds, ib.tasks, ib.backlog_seconds) == (0, 0.0, 1, 1.0)
    assert ia in engine.workers.idle
    assert ib not in engine.workers.idle
    finish(engine, ts, 1.0)
    assert (ib.tasks, ib.backlog_seconds) == (0, 0.0)


def test_restart_forgets_tasks() -> None:
    a = FakeWorker(0)
    engine = make_engine([a])
    assign(engine, FakeTask("t"), a)
    a.processing.clear()
    engine.books.restarted()
    assert statistics.of(engine)["tables"] == {
        "workers": 1,
        "charges": 0,
        "unknown": 0,
        "roots": 0,
        "copies_on_disk": 0,
    }
    assert engine.workers.by_address[a.address] in engine.workers.idle


# ---------------------------------------------------------------------- durations


def test_one_slow_first_call_is_forgotten() -> None:
    p = Durations().prefix("f")
    for seconds in (60.0, 0.1, 0.1, 0.1):
        p.learn(seconds, 0)
    assert p.seconds == 0.1


def test_durations_follow_a_change() -> None:
    p = Durations().prefix("f")
    for seconds in [0.1] * 100 + [5.0] * durations.WINDOW:
        p.learn(seconds, 0)
    assert p.seconds == 5.0


def test_slow_workers_are_found() -> None:
    rnd = random.Random(0)
    workers = [FakeWorker(i) for i in range(4)]
    engine = make_engine(workers)
    true = dict(zip(workers, (1.0, 1.0, 4.0, 0.5), strict=True))
    for i in range(600):
        ws = rnd.choice(workers)
        ts = FakeTask(f"{rnd.choice('ab')}-{i}")
        assign(engine, ts, ws)
        base = 0.1 if ts.prefix.name == "a" else 1.0
        finish(engine, ts, base * true[ws] * rnd.uniform(0.8, 1.2))
    speeds = statistics.of(engine)["speeds"]
    usual = speeds[workers[0].address]
    for ws in workers:
        assert speeds[ws.address] / usual == pytest.approx(1 / true[ws], rel=0.35)
    for name, base in (("a", 0.1), ("b", 1.0)):
        seconds = engine.durations.prefix(name).seconds
        assert seconds is not None
        fast, slow = (engine.workers.by_address[workers[i].address].slowness for i in (0, 2))
        assert seconds * fast == pytest.approx(base, rel=0.35)
        assert seconds * slow == pytest.approx(4 * base, rel=0.35)


def test_a_large_table_is_not_a_slow_worker() -> None:
    # dask.dataframe reads all tables by one prefix; what they have in common ends there.
    workers = [FakeWorker(i) for i in range(2)]
    engine = make_engine(workers)
    a = engine.workers.by_address[workers[0].address]
    for table, seconds, nbytes in (("small", 0.01, 10), ("large", 2.0, 10**8)):
        for i in range(6):
            ts = FakeTask(f"{table}-{i}", prefix="read", group=f"read-{table}")
            assign(engine, ts, workers[0])
            finish(engine, ts, seconds, nbytes)
    assert a.slowness == pytest.approx(1.0)
    assign(engine, FakeTask("again", prefix="read", group="read-large"), workers[0])
    assert (a.backlog_seconds, a.reserved_bytes) == pytest.approx((2.0, 10**8))
    other = FakeTask("other", prefix="read", group="read-other")
    known, prefix = engine.durations.known(other), engine.durations.prefix("read")
    assert known is prefix, "of a group never seen the prefix is all that is known"
    before = a.backlog_seconds
    assign(engine, other, workers[0])
    another = FakeTask("another", prefix="read", group="read-other")
    assign(engine, another, workers[0])
    assert a.backlog_seconds - before == pytest.approx(2 * (prefix.seconds or 0.0))
    finish(engine, other, 5.0, 7)
    assert a.backlog_seconds - before == pytest.approx(5.0), "charged again by its own group"
    assert not engine.backlog.unknown
    finish(engine, another, 5.0, 7)


def test_a_kind_never_seen_takes_no_longer_than_its_inputs_say() -> None:
    engine = make_engine([a := FakeWorker(0)])
    for i in range(500):
        ts = FakeTask(f"long-{i}")
        assign(engine, ts, a)
        finish(engine, ts, 10.0)
    usual = engine.durations.guess_seconds
    assert usual > 2.0
    assert engine.durations.guess(FakeTask("root")) == usual
    small, large, huge = (FakeTask(f"x-{n}", nbytes=n, on=(a,)) for n in (1000, 10**8, 10**12))
    assert engine.durations.guess(FakeTask("f-0", small)) == UNKNOWN_SECONDS
    assert engine.durations.guess(FakeTask("f-1", large)) == pytest.approx(10**8 / durations.BYTES_PER_SECOND)
    assert engine.durations.guess(FakeTask("f-2", large, huge)) == usual


def test_tiny_tasks_say_nothing_about_a_worker() -> None:
    a = FakeWorker(0)
    engine = make_engine([a])
    for i in range(50):
        ts = FakeTask(f"t-{i}")
        assign(engine, ts, a)
        finish(engine, ts, 1e-4 if i % 2 else 1e-3)
    assert engine.workers.by_address[a.address].slowness == 1.0
    assert statistics.of(engine)["speeds"] == {}


def test_reading_from_disk_is_not_computing() -> None:
    read = {"action": "disk-read", "start": 0.0, "stop": 8.0}
    assert compute_seconds([read, {"action": "compute", "start": 8.0, "stop": 9.0}]) == 1.0
    assert compute_seconds([read, {"action": "compute", "start": 5.0, "stop": 9.0}]) == 1.0
    assert compute_seconds([read]) is None


def test_prefixes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "MAX_PREFIXES", 10)
    a = FakeWorker(0)
    engine = make_engine([a])
    tasks = [FakeTask(f"p{i}-0") for i in range(30)]
    for ts in tasks:
        assign(engine, ts, a)
    for ts in tasks:
        finish(engine, ts, 0.1)
    stats = statistics.of(engine)
    assert stats["prefixes"] == 10
    assert stats["tables"] == {"workers": 1, "charges": 0, "unknown": 0, "roots": 0, "copies_on_disk": 0}


# ---------------------------------------------------------------------- links from what tasks report


def fetched(start: float, stop: float, source: FakeWorker) -> dict[str, Any]:
    return {"action": "transfer", "start": start, "stop": stop, "source": source.address}


def test_links_are_learned_from_the_transfers_of_tasks() -> None:
    a, b, c = FakeWorker(0, host="one"), FakeWorker(1, host="one"), FakeWorker(2, host="two")
    engine = make_engine([a, b, c])
    for i in range(100):
        nbytes = 10 ** (3 + i % 6)
        x = FakeTask(f"x-{i}", nbytes=nbytes, on=(a,))
        for link_class, ws, bandwidth in ((LinkClass.HOST, b, 2e9), (LinkClass.NETWORK, c, 1e8)):
            ts = FakeTask(f"f-{i}-{link_class.value}", x)
            x.who_has = {a}
            assign(engine, ts, ws)
            finish(engine, ts, 0.1, startstops=[fetched(0, 0.003 + nbytes / bandwidth, a)])
    for link_class, bandwidth in ((LinkClass.HOST, 2e9), (LinkClass.NETWORK, 1e8)):
        link = engine.links.link(link_class)
        assert link.bytes_per_second == pytest.approx(bandwidth, rel=0.1)
        assert link.latency_seconds == pytest.approx(0.003, rel=0.1)
    assert engine.links.fits[LinkClass.PROCESS].samples == 0


def test_concurrent_transfers_are_one_sample() -> None:
    a, b, c = (FakeWorker(i) for i in range(3))
    engine = make_engine([a, b, c])
    x, y = FakeTask("x", nbytes=10**8, on=(a,)), FakeTask("y", nbytes=10**8, on=(b,))
    ts = FakeTask("f", x, y)
    assign(engine, ts, c)
    finish(engine, ts, 0.1, startstops=[fetched(0, 1, a), fetched(0, 1, b)])
    assert engine.links.fits[LinkClass.NETWORK].samples == 1


def test_a_value_that_many_fetch_says_little_of_the_link() -> None:
    workers = [FakeWorker(i) for i in range(16)]
    engine = make_engine(workers)
    source = workers[0]
    for i in range(20):
        shared = FakeTask(f"x-{i}", nbytes=10**7, on=(source,))
        tasks = [FakeTask(f"f-{i}-{k}", shared) for k in range(15)]
        for ts, ws in zip(tasks, workers[1:], strict=True):
            assign(engine, ts, ws)
        shared.who_has = set(workers)  # all have it before the first of them is done
        for ts in tasks:
            finish(engine, ts, 0.1, startstops=[fetched(0, 15 * 10**7 / 1e9, source)])
        for k in range(3):
            own = FakeTask(f"y-{i}-{k}", nbytes=10**7, on=(source,))
            ts = FakeTask(f"g-{i}-{k}", own)
            assign(engine, ts, workers[1])
            finish(engine, ts, 0.1, startstops=[fetched(0, 10**7 / 1e9, source)])
    assert engine.links.link(LinkClass.NETWORK).bytes_per_second == pytest.approx(1e9, rel=0.3)


@pytest.mark.parametrize("why", ["other traffic", "two replicas", "two requests", "unknown source", "not carried"])
def test_ambiguous_transfers_teach_nothing(why: str) -> None:
    a, b, c, d = (FakeWorker(i) for i in range(4))
    engine = make_engine([a, b, c, d])
    x = FakeTask("x", nbytes=10**8, on=(a,))
    other = FakeTask("other", nbytes=10**8, on=(b,))
    ts = FakeTask("f", x)
    reported = [fetched(0, 1, a)]
    if why == "other traffic":
        assign(engine, FakeTask("g", other), c)
    assign(engine, ts, c)
    if why == "two replicas":
        assert x.who_has is not None
        x.who_has.add(b)
        reported.append(fetched(0, 1, b))
    elif why == "two requests":
        reported.append(fetched(1, 2, a))
    elif why == "unknown source":
        engine.worker_removed(a.address)
    elif why == "not carried":
        reported.append(fetched(1, 2, d))
    finish(engine, ts, 0.1, startstops=reported)
    assert all(f.samples == f.dropped == 0 for f in engine.links.fits.values())


# ---------------------------------------------------------------------- candidates


class NoIteration(list):  # type: ignore[type-arg]
    """Fails on anything that takes time proportional to its length."""

    def __iter__(self) -> Any:
        raise AssertionError("walked over all workers")


def test_never_walks_over_all_workers() -> None:
    workers = [FakeWorker(i, host=f"h{i // 8}") for i in range(200)]
    engine = make_engine(workers)
    for table in (engine.workers.all, engine.workers.idle):
        table.items = NoIteration(table.items)
    wide = FakeTask("wide", nbytes=1000, on=tuple(workers))
    own = FakeTask("own", nbytes=10**8, on=(workers[99],))
    for i in range(20):
        assert engine.decide(FakeTask(f"f-{i}", wide, own), None) is not None


@settings(deadline=None)
@given(data=st.data())
def test_decisions_are_always_allowed(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40), label="workers")
    limit = data.draw(st.integers(2, 20), label="candidates")
    threads = data.draw(st.integers(1, 3))
    workers = [FakeWorker(i, host=f"h{i % 7}", nthreads=threads, memory_limit=10**9) for i in range(n)]
    engine = make_engine(workers, candidates=limit)
    subset = st.sets(st.sampled_from(workers))
    for i in range(data.draw(st.integers(0, 10), label="busy")):
        assign(engine, FakeTask(f"busy-{i}"), data.draw(st.sampled_from(workers)))
    inputs = [
        FakeTask(f"x-{i}", nbytes=data.draw(st.integers(-1, 10**9)), on=tuple(data.draw(subset)))
        for i in range(data.draw(st.integers(1, 6), label="inputs"))
    ]
    paused = data.draw(subset, label="paused")
    for ws in paused:
        ws.status = Status.paused
    valid = data.draw(st.none() | subset, label="valid")
    if valid is not None:
        valid -= paused  # as Scheduler.valid_workers does
    chosen = engine.decide(FakeTask("f", *inputs), valid)
    if chosen is None:
        assert engine.declined == {"no candidate": 1}
        assert not valid if valid is not None else n > limit // 2 or paused == set(workers)
    else:
        assert chosen in workers
        assert chosen not in paused
        assert valid is None or chosen in valid


def test_same_events_same_decisions() -> None:
    def run() -> list[str]:
        workers = [FakeWorker(i, host=f"h{i // 4}") for i in range(50)]
        engine = make_engine(workers)
        out = []
        for i in range(50):
            ts = FakeTask(f"f-{i}", FakeTask(f"x-{i}", nbytes=1000, on=(workers[i % 3],)))
            ws = engine.decide(ts, None)
            assign(engine, ts, ws)
            out.append(ws.address)
        return out

    assert run() == run()


def test_very_many_inputs_are_sampled() -> None:
    a, b = FakeWorker(0), FakeWorker(1)
    engine = make_engine([a, b])
    inputs = [FakeTask(f"x-{i}", nbytes=10**6, on=(a if i % 10 else b,)) for i in range(5000)]
    assert engine.decide(FakeTask("f", *inputs), None) is a


# ---------------------------------------------------------------------- budget


def test_rests_when_too_slow_and_tries_again() -> None:
    now = [0.0]
    b = Budget(limit_seconds=1e-4, clock=lambda: now[0])
    for _ in range(overhead_budget.WINDOW):
        b.record(1e-3)
    assert b.exhausted
    assert b.statistics()["over_budget"] == 1
    now[0] += overhead_budget.REST_SECONDS + 1
    assert not b.exhausted
    for _ in range(overhead_budget.WINDOW):
        b.record(1e-5)
    assert not b.exhausted


def test_one_long_pause_is_not_slowness() -> None:
    now = [100.0]
    b = Budget(limit_seconds=1e-4, clock=lambda: now[0])
    for i in range(overhead_budget.WINDOW):
        seconds = 10.0 if i % 10 == 0 else 1e-5
        now[0] += seconds
        b.record(seconds)
    assert not b.exhausted
    assert b.statistics()["median"] == pytest.approx(10)
    assert b.statistics()["p99"] == pytest.approx(1e7)


def test_over_budget_decisions_are_left_to_stock() -> None:
    a, b = FakeWorker(0), FakeWorker(1)
    engine = make_engine([a, b])
    engine.budget = Budget(limit_seconds=0.0)
    engine.budget.decision_seconds = math.inf
    ts = FakeTask("f", FakeTask("x", nbytes=10, on=(a,)))
    for _ in range(overhead_budget.WINDOW):
        assert engine.decide(ts, None) is a
    assert engine.decide(ts, None) is None
    assert engine.declined == {"over budget": 1}
    assert math.isfinite(statistics.of(engine)["microseconds"]["median"])


def test_a_decision_that_takes_too_long_is_given_up() -> None:
    a, b = FakeWorker(0), FakeWorker(1)
    engine = make_engine([a, b])
    engine.budget.decision_seconds = 0.0
    assert engine.decide(FakeTask("f", FakeTask("x", nbytes=10, on=(a,))), None) is None
    assert engine.declined == {"took too long": 1}
    assert statistics.of(engine)["microseconds"]["given_up"] == 1


def test_what_stock_does_not_know() -> None:
    """Where nothing is known beyond stock's own figures a task is stock's; each kind of knowledge changes that."""
    a, b = FakeWorker(1), FakeWorker(2)
    engine = make_engine([a, b])
    engine.always = False
    x, y = FakeTask("x", nbytes=1000, on=(a,)), FakeTask("y", nbytes=1000, on=(b,))
    one, both = FakeTask("one", x), FakeTask("both", x, y)
    assert not engine.knows_more(both)
    engine.workers.zoned = True
    assert engine.knows_more(both), "its inputs are in two zones"
    assert not engine.knows_more(one), "stock looks at holders only, and does not leave their zone"
    engine.workers.zoned = False
    engine.tables.residence.heard(a.address, [("x", 1000)], ())
    assert engine.knows_more(one)
    assert not engine.knows_more(FakeTask("other", y))
