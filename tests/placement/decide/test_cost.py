from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.model import Link, LinkClass
from dask_gpurt.model.views import TaskView, WorkerView
from dask_gpurt.placement import statistics
from dask_gpurt.placement.decide.cost import HIDDEN, OVERFLOW_SECONDS_PER_BYTE, cost, terms
from dask_gpurt.placement.decide.policy import Cheapest
from tests.placement.fakes import FakeTask, FakeWorker, assign, learn, make_engine

HOST = Link(1e-3, 1e9)
FAR = Link(1e-3, 1e8)
TASK = TaskView(0.1, 0.0)
choose = Cheapest().decide


def view(**kw: float) -> WorkerView:
    fields: dict[str, float] = {
        "queue_seconds": 0.0,
        "pending_seconds": 0.0,
        "near_bytes": 0.0,
        "near_fetches": 0.0,
        "far_bytes": 0.0,
        "far_fetches": 0.0,
        "slowness": 1.0,
        "room_bytes": float("inf"),
        "held_bytes": 0,
    }
    return WorkerView(**{**fields, **kw}, near=HOST)  # type: ignore[arg-type]


def test_nothing_to_do_costs_the_task() -> None:
    assert cost(TASK, view(), FAR) == pytest.approx(0.1)


def test_queue_and_inputs_overlap() -> None:
    fetching = cost(TASK, view(near_bytes=1e9, near_fetches=1), FAR)
    assert fetching == pytest.approx(1.001 + 0.1 + 1.001)  # latency and bytes, the task, lambda * F
    short = cost(TASK, view(near_bytes=1e9, near_fetches=1, queue_seconds=0.9), FAR)
    assert short == pytest.approx(fetching + 0.9 * HIDDEN)
    long = cost(TASK, view(near_bytes=1e9, near_fetches=1, queue_seconds=5), FAR)
    assert long == pytest.approx(5 + 1.001 * HIDDEN + 0.1 + 1.001)


def test_of_places_that_must_fetch_as_much_the_shorter_queue() -> None:
    waits = [view(near_bytes=1e9, near_fetches=1, queue_seconds=q) for q in (0.4, 0.2, 0.6)]
    assert choose(TASK, waits, FAR) == 1


def test_nobody_waits_for_a_task_while_there_is_other_work() -> None:
    home, idle = view(queue_seconds=3.0), view(far_bytes=1e8, far_fetches=1)
    assert choose(TASK, [home, idle], FAR) == 1
    assert choose(TaskView(0.1, 0.0, 10.0), [home, idle], FAR) == 0
    assert choose(TaskView(0.1, 0.0, 0.5), [home, idle], FAR) == 1, "it would end long after all the others"


def test_reading_from_disk_costs() -> None:
    disk, memory = view(read_seconds=0.3), view(queue_seconds=0.2)
    assert choose(TASK, [disk, memory], FAR) == 1
    assert cost(TASK, disk, FAR) == pytest.approx(0.3 + 0.1 + 0.3)


def test_link_classes_matter() -> None:
    near = view(near_bytes=1e8, near_fetches=1)
    far = view(far_bytes=1e8, far_fetches=1)
    assert choose(TASK, [far, near], FAR) == 1
    assert cost(TASK, far, FAR) > 5 * cost(TASK, near, FAR)


def test_a_slow_worker_takes_longer() -> None:
    assert cost(TASK, view(slowness=4.0), FAR) == pytest.approx(0.4)
    assert choose(TASK, [view(slowness=4.0), view(queue_seconds=0.2)], FAR) == 1


def test_overflow_is_marginal() -> None:
    task = TaskView(0.1, 1e9)
    fits = cost(task, view(room_bytes=1e9), FAR)
    half = cost(task, view(room_bytes=0.5e9), FAR)
    full = cost(task, view(room_bytes=0.0), FAR)
    sunk = cost(task, view(room_bytes=-50e9), FAR)
    assert fits == pytest.approx(0.1)
    assert half - fits == pytest.approx(0.5e9 * OVERFLOW_SECONDS_PER_BYTE)
    assert full - fits == pytest.approx(1e9 * OVERFLOW_SECONDS_PER_BYTE)
    assert sunk == full, "what overflowed before is not this task's doing"


def test_ties_go_to_the_emptier_worker_then_the_first() -> None:
    assert choose(TASK, [view(held_bytes=5), view(held_bytes=3), view(held_bytes=3)], FAR) == 1


def test_no_candidates() -> None:
    with pytest.raises(ValueError, match="no candidates"):
        choose(TASK, [], FAR)


nonnegative = st.floats(0, 1e12)


@settings(deadline=None)
@given(st.builds(TaskView, nonnegative, nonnegative, nonnegative), st.lists(nonnegative, min_size=8, max_size=8))
def test_terms_add_up_to_the_cost(task: TaskView, n: list[float]) -> None:
    worker = WorkerView(n[0], n[1], n[2], float(n[2] > 0), n[3], float(n[3] > 0), n[4], n[5] - n[6], 0, HOST, 1.0, n[7])
    t = terms(task, worker, FAR)
    total = max(max(t["queue"], t["inputs"]) + t["hidden"], t["read"])
    total += t["compute"] - t["excused"] + t["overflow"] + t["moved"]
    assert cost(task, worker, FAR) == pytest.approx(total, rel=1e-9)
    assert all(v >= 0 for v in t.values())


# ---------------------------------------------------------------------- through the engine


def busy(engine: object, ws: FakeWorker, n: int, prefix: str = "busy") -> None:
    for i in range(n):
        assign(engine, FakeTask(f"{prefix}-{ws.address}-{i}"), ws)  # type: ignore[arg-type]


def test_prefers_the_holder_of_large_data() -> None:
    a, b, c = (FakeWorker(i) for i in range(3))
    engine = make_engine([a, b, c])
    learn(engine, "busy", 0.1)
    busy(engine, a, 5)
    x = FakeTask("x", nbytes=10**9, on=(a,))
    assert engine.decide(FakeTask("f", x), None) is a
    decisions = statistics.of(engine)["decisions"]
    assert {k: decisions[k] for k in ("total", "moved", "local", "restricted")} == {
        "total": 1,
        "moved": 0,
        "local": 1,
        "restricted": 0,
    }


def test_prefers_an_idle_worker_for_tiny_data_and_a_deep_queue() -> None:
    a, b = (FakeWorker(i) for i in range(2))
    engine = make_engine([a, b])
    learn(engine, "busy", 0.1)
    busy(engine, a, 5)
    x = FakeTask("x", nbytes=1000, on=(a,))
    assert engine.decide(FakeTask("f", x), None) is b
    assert statistics.of(engine)["decisions"]["moved"] == 1


def test_an_unmeasured_queue_does_not_justify_moving_bytes() -> None:
    a, b = (FakeWorker(i) for i in range(2))
    engine = make_engine([a, b])
    busy(engine, a, 10)
    x = FakeTask("x", nbytes=100_000_000, on=(a,))
    assert engine.decide(FakeTask("f", x), None) is a


def test_an_idle_neighbour_before_a_stranger() -> None:
    a, near, far = FakeWorker(0, host="one"), FakeWorker(1, host="one"), FakeWorker(2, host="two")
    engine = make_engine([a, far, near])
    learn(engine, "busy", 1.0)
    busy(engine, a, 5)
    x = FakeTask("x", nbytes=10**8, on=(a,))
    assert engine.decide(FakeTask("f", x), None) is near


def test_a_free_thread_is_no_queue() -> None:
    a, b = FakeWorker(0, nthreads=4), FakeWorker(1, nthreads=4)
    engine = make_engine([a, b])
    learn(engine, "busy", 10.0)
    busy(engine, a, 3)
    x = FakeTask("x", nbytes=1000, on=(a,))
    assert engine.decide(FakeTask("f", x), None) is a


def test_promised_copies_count_as_there() -> None:
    a, b, c = (FakeWorker(i) for i in range(3))
    engine = make_engine([a, b, c])
    learn(engine, "busy", 100.0)
    busy(engine, a, 1)
    x = FakeTask("x", nbytes=10**9, on=(a,))
    assign(engine, FakeTask("g", x), b)  # b fetches x
    learn(engine, "g", 0.001)
    assert engine.decide(FakeTask("f", x), None) is b
    assert statistics.of(engine)["decisions"]["local"] == 1, "x is not fetched a second time"


def test_promised_copies_of_a_widely_replicated_input() -> None:
    workers = [FakeWorker(i) for i in range(24)]
    engine = make_engine(workers)
    x = FakeTask("x", nbytes=10**9, on=tuple(workers[:9]))
    thief = workers[-1]
    assign(engine, FakeTask("g", x), thief)
    picked = [engine.workers.by_address[thief.address]]
    from dask_gpurt.placement.decide import candidates

    inputs = candidates.Inputs({x}, engine.workers.by_address)
    (seen,) = candidates.views(picked, inputs, engine.tables)
    assert (seen.near_bytes, seen.near_fetches, seen.far_bytes, seen.far_fetches) == (0, 0, 0, 0)
    assert seen.pending_seconds > 0


def test_a_full_worker_is_avoided_when_that_is_cheaper() -> None:
    a, b = FakeWorker(0, memory_limit=10**10), FakeWorker(1, memory_limit=10**10)
    engine = make_engine([a, b])
    learn(engine, "f", 0.1, nbytes=4 * 10**9)
    x = FakeTask("x", nbytes=10**6, on=(a,))
    assert engine.decide(FakeTask("f-0", x), None) is a
    a.nbytes = 6 * 10**9
    assert engine.decide(FakeTask("f-1", x), None) is b


def test_same_host_is_near_and_same_process_is_nearer() -> None:
    host = [FakeWorker(i, host="one") for i in range(2)]
    assert make_engine(host).workers.nodes["one"].link_class is LinkClass.HOST
    for i, ws in enumerate(host):
        ws.address = f"inproc://10.0.0.1/77/{i}"
    engine = make_engine(host)
    (node,) = engine.workers.nodes.values()
    assert node.link_class is LinkClass.PROCESS
    assert len(node.workers) == 2


def test_widely_replicated_inputs_do_not_pin_the_task() -> None:
    workers = [FakeWorker(i) for i in range(40)]
    engine = make_engine(workers)
    wide = FakeTask("wide", nbytes=10**9, on=tuple(workers))
    own = FakeTask("own", nbytes=10**8, on=(workers[33],))
    assert engine.decide(FakeTask("f", wide, own), None) is workers[33]


def test_left_to_stock() -> None:
    a = FakeWorker(0)
    engine = make_engine([a])
    assert engine.decide(FakeTask("f"), None) is None
    actor = FakeTask("g", FakeTask("x", nbytes=1, on=(a,)))
    actor.actor = True
    assert engine.decide(actor, None) is None
    assert engine.decide(FakeTask("h", FakeTask("y", nbytes=1, on=(a,))), set()) is None
    assert engine.declined == {"no inputs": 1, "actor": 1, "no candidate": 1}


def test_steal_prices() -> None:
    a, near, far = FakeWorker(0, host="one"), FakeWorker(1, host="one"), FakeWorker(2, host="two")
    engine = make_engine([a, near, far])
    engine.scheduler.bandwidth = 5e7
    x = FakeTask("x", nbytes=10**8, on=(a,))
    ts = FakeTask("f", x)
    host, network = (engine.links.link(c) for c in (LinkClass.HOST, LinkClass.NETWORK))
    assert engine.comm_cost(ts, a) == 0
    # The slowest link in use costs what stock says; a neighbour is cheaper by what was learned.
    assert engine.comm_cost(ts, far) == pytest.approx(2.0 + network.latency_seconds)
    cheaper = network.bytes_per_second / host.bytes_per_second
    assert engine.comm_cost(ts, near) == pytest.approx(2.0 * cheaper + host.latency_seconds)
    assert engine.comm_cost(ts, FakeWorker(9)) is None, "a worker we do not know is priced by stock"


def test_steal_prices_on_one_node_are_those_of_stock() -> None:
    a, b = FakeWorker(0, host="one"), FakeWorker(1, host="one")
    engine = make_engine([a, b])
    engine.scheduler.bandwidth = 5e7
    ts = FakeTask("f", FakeTask("x", nbytes=10**8, on=(a,)))
    assert engine.comm_cost(ts, b) == pytest.approx(2.0 + engine.links.link(LinkClass.HOST).latency_seconds)
