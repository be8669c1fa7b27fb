"""The decision log: bounded, true to the decisions, and it keeps no task or worker alive."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from distributed.scheduler import TaskState, WorkerState

from dask_gpurt.placement import statistics
from dask_gpurt.placement.decide.cost import cost
from dask_gpurt.placement.evaluate import decision_log
from dask_gpurt.placement.evaluate.decision_log import DecisionLog
from dask_gpurt.placement.evaluate.decision_record import REPORT, Detail, transfer_seconds
from tests.placement.fakes import FakeTask, FakeWorker, assign, finish, learn, make_engine


def decide(engine: Any, ts: FakeTask, valid: Any = None) -> FakeWorker:
    ws = engine.decide(ts, valid)
    assert isinstance(ws, FakeWorker)
    return ws


def test_a_decision_is_told_with_the_terms_it_was_made_from() -> None:
    a, b, c = (FakeWorker(i) for i in range(3))
    engine = make_engine([a, b, c])
    learn(engine, "f", 0.25, 1000)
    x = FakeTask("x", nbytes=10**8, on=(a,))
    task = FakeTask("f-1", x)
    assert decide(engine, task) is a
    story = engine.log.story("f-1")
    assert story is not None
    assert (story["kind"], story["chosen"], story["workers"], story["restricted"]) == ("cost", a.address, 3, False)
    assert story["inputs"] == {"bytes": 10**8, "count": 1}
    assert story["task"] == {"compute_seconds": 0.25, "output_bytes": 1000}
    by_address = {w["address"]: w for w in story["candidates"]}
    assert set(by_address) == {w.address for w in (a, b, c)}
    chosen = by_address[a.address]
    assert chosen["chosen"]
    assert chosen["why"] == "holder"
    assert (chosen["has_bytes"], chosen["missing_bytes"]) == (10**8, 0)
    assert by_address[b.address]["missing_bytes"] == 10**8
    assert by_address[b.address]["why"] == "idle"
    assert chosen["total_seconds"] == min(w["total_seconds"] for w in by_address.values())
    # The total that is told is the one that was compared.
    detail = Detail(engine.log._rows["f-1"])
    assert detail.candidates == 3
    for i, told in enumerate(story["candidates"]):
        assert told["total_seconds"] == pytest.approx(cost(detail.task, detail.view(i), detail.far))
    assert story["actual"] is None
    assert json.loads(json.dumps(story)) == story


def test_neighbours_and_workers_that_are_allowed_are_told_apart() -> None:
    a, b = FakeWorker(0, host="h"), FakeWorker(1, host="h")
    c = FakeWorker(2, host="g")
    engine = make_engine([a, b, c])
    learn(engine, "busy", 1.0)
    for ws in (b, c):
        assign(engine, FakeTask(f"busy-{ws.address}"), ws)
    x = FakeTask("x", nbytes=10**6, on=(a,))
    decide(engine, FakeTask("f-1", x), {a, b, c})
    story = engine.log.story("f-1")
    assert story is not None
    assert story["restricted"] is True
    assert {w["address"]: w["why"] for w in story["candidates"]} == {
        a.address: "holder",
        b.address: "neighbour",
        c.address: "allowed",
    }


def test_what_came_of_it() -> None:
    a, b = (FakeWorker(i) for i in range(2))
    engine = make_engine([a, b])
    learn(engine, "f", 0.25)
    x = FakeTask("x", nbytes=5000, on=(a,))
    task = FakeTask("f-1", x)
    assert decide(engine, task, {b}) is b
    assign(engine, task, b)
    now = engine.log._rows["f-1"][2]
    transfers = [
        {"action": "transfer", "start": now, "stop": now + 2.0, "source": a.address},
        {"action": "transfer", "start": now + 1.0, "stop": now + 3.0, "source": a.address},
    ]
    finish(engine, task, 0.5, nbytes=77, startstops=transfers)
    story = engine.log.story("f-1")
    assert story is not None
    actual = story["actual"]
    assert actual["worker"] == b.address
    assert actual["outcome"] == "memory"
    assert actual["compute_seconds"] == 0.5
    assert actual["transfer_seconds"] == pytest.approx(3.0), "the time of the union"
    assert (actual["moved_bytes"], actual["result_bytes"]) == (5000, 77)
    assert actual["finish_seconds"] >= actual["wait_seconds"] >= 0
    predicted = story["predicted"]
    assert predicted["moved_bytes"] == 5000
    assert predicted["finish_seconds"] == pytest.approx(predicted["wait_seconds"] + predicted["compute_seconds"])
    decisions = statistics.of(engine)["decisions"]
    assert decisions["finished"] == 1
    assert decisions["mean_predicted_seconds"] == pytest.approx(predicted["finish_seconds"])
    assert decisions["mean_actual_seconds"] == pytest.approx(actual["finish_seconds"])
    assert decisions["median_ratio"] == pytest.approx(actual["finish_seconds"] / predicted["finish_seconds"])
    assert decisions["inputs_error_p90_seconds"] == pytest.approx(3.0 - predicted["inputs_seconds"])


def test_stolen_tasks_and_tasks_that_never_finished_do_not_count_as_predictions() -> None:
    a, b = (FakeWorker(i) for i in range(2))
    engine = make_engine([a, b])
    x = FakeTask("x", nbytes=5000, on=(a,))
    stolen, lost = FakeTask("f-1", x), FakeTask("f-2", x)
    for task in (stolen, lost):
        assert decide(engine, task, {a}) is a
        assign(engine, task, a)
    a.processing.discard(stolen)
    b.processing.add(stolen)
    stolen.processing_on = b
    engine.books.stolen("f-1", a.address, b.address)
    finish(engine, stolen, 0.1)
    engine.books.left("f-2", "released", {})
    story = engine.log.story("f-1")
    assert story is not None
    assert (story["actual"]["worker"], story["actual"]["stolen_from"]) == (b.address, a.address)
    assert story["actual"]["moved_bytes"] == 5000
    story = engine.log.story("f-2")
    assert story is not None
    assert story["actual"]["outcome"] == "released"
    assert statistics.of(engine)["decisions"]["finished"] == 0


def test_what_is_left_to_stock_says_why() -> None:
    a, b = (FakeWorker(i) for i in range(2))
    engine = make_engine([a, b])
    assert engine.decide(FakeTask("r-1"), None) is None
    actor = FakeTask("c-1", FakeTask("x", nbytes=1, on=(a,)))
    actor.actor = True
    assert engine.decide(actor, None) is None
    assign(engine, FakeTask("q-1"), a)  # no decision was asked for: from stock's queue
    told = {key: engine.log.story(key) for key in ("r-1", "c-1", "q-1")}
    assert {key: (s["kind"], s["reason"]) for key, s in told.items() if s} == {
        "r-1": ("stock", "no inputs"),
        "c-1": ("stock", "actor"),
        "q-1": ("stock", "queue"),
    }
    assert engine.declined == {"no inputs": 1, "actor": 1}


def test_in_safe_mode_all_is_left_to_stock_whatever_is_known() -> None:
    a, b = (FakeWorker(i) for i in range(2))
    engine = make_engine([a, b])
    one, two = (FakeTask(f"f-{i}", FakeTask(f"x-{i}", nbytes=10**6, on=(a,))) for i in range(2))
    engine.safe = True
    assert engine.decide(one, None) is None
    assert engine.declined == {"safe mode": 1}
    engine.safe = False
    assert engine.decide(two, None) is not None


def test_a_key_that_is_computed_again_has_its_newest_decision() -> None:
    a, b = (FakeWorker(i) for i in range(2))
    engine = make_engine([a, b])
    task = FakeTask("f-1", FakeTask("x", nbytes=1, on=(a, b)))
    assert decide(engine, task, {a}) is a
    assign(engine, task, a)
    finish(engine, task, 0.1)
    assert decide(engine, task, {b}) is b
    story = engine.log.story("f-1")
    assert story is not None
    assert (story["chosen"], story["actual"]) == (b.address, None)
    assert len(engine.log) == 1


def test_a_restart_ends_what_was_under_way() -> None:
    a = FakeWorker(0)
    engine = make_engine([a])
    x = FakeTask("x", nbytes=1, on=(a,))
    for key in ("f-1", "f-2"):
        task = FakeTask(key, x)
        decide(engine, task)
        assign(engine, task, a)
    finish(engine, engine.scheduler.tasks["f-1"], 0.1)
    engine.books.restarted()
    told = [engine.log.story(key) for key in ("f-1", "f-2")]
    assert [s["actual"]["outcome"] for s in told if s] == ["memory", "forgotten"]


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    log = DecisionLog(limit=80)
    for i in range(203):
        log.left(f"k-{i % 120}", "no inputs")
        assert len(log) <= 80
        assert len(log._rows) <= 90  # it forgets several at a time
        assert all(key == row[0] for key, row in log._rows.items())
    # k-0..k-119, then k-0..k-82 again: the last eighty are k-3..k-82
    assert all(log.story(f"k-{i}") is not None for i in range(3, 83))
    assert sum(log.story(f"k-{i}") is not None for i in range(83, 120)) <= 7
    assert log.matches("k-") == ["k-82", "k-81", "k-80"]


def test_calibration_looks_at_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_gpurt.placement.evaluate.decision_log.CALIBRATED", 5)
    a = FakeWorker(0)
    engine = make_engine([a])
    x = FakeTask("x", nbytes=1, on=(a,))
    for i in range(8):
        task = FakeTask(f"f-{i}", x)
        decide(engine, task)
        assign(engine, task, a)
        finish(engine, task, 0.1)
    assert engine.log.calibration()["finished"] == 5


def test_it_holds_no_task_and_no_worker() -> None:
    a, b = (FakeWorker(i) for i in range(2))
    engine = make_engine([a, b])
    x = FakeTask("x", nbytes=1, on=(a,))
    task = FakeTask("f-1", x)
    decide(engine, task)
    assign(engine, task, a)
    finish(engine, task, 0.1)
    engine.decide(FakeTask("r-1"), None)
    seen: set[int] = set()
    todo: list[Any] = [engine.log]
    kinds = set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        kinds.add(type(thing).__name__)
        assert not isinstance(thing, (FakeTask, FakeWorker, TaskState, WorkerState)), kinds
        todo += [t for t in gc.get_referents(thing) if type(t).__module__ != "builtins" or not callable(t)]
    assert {"dict", "Link"} <= kinds
    assert "WorkerInfo" not in kinds


def test_what_a_worker_reported_is_kept_as_a_few_numbers() -> None:
    """Its list of times, with 32 sources, is ten times as large as the rest of a row."""
    log = DecisionLog()
    transfers = [{"action": "transfer", "start": 1.0 + i, "stop": 2.0 + i, "source": "a"} for i in range(32)]
    report = {
        "startstops": [*transfers, {"action": "compute", "start": 40.0, "stop": 42.0}],
        "worker": "b",
        "nbytes": 8,
    }
    log.assigned("x-1", "b")
    log.finished("x-1", "memory", report)
    assert log._rows["x-1"][REPORT] == (40.0, 2.0, 32.0, 8, "b")
    log.assigned("x-2", "b")
    log.finished("x-2", "memory", {})
    assert log._rows["x-2"][REPORT] == (None, None, None, None, None)


def test_transfers_that_overlap_count_once() -> None:
    def transfer(start: float, stop: float) -> dict[str, Any]:
        return {"action": "transfer", "start": start, "stop": stop}

    assert transfer_seconds([]) is None
    assert transfer_seconds([{"action": "compute", "start": 1, "stop": 2}]) is None
    assert transfer_seconds([transfer(5, 6), transfer(1, 3), transfer(2, 4), transfer(2, 3)]) == 4


def test_no_task_takes_less_than_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is set back by an hour while it runs."""
    now = [10_000.0]
    monkeypatch.setattr(decision_log, "_time", lambda: now[0])
    a = FakeWorker(0)
    engine = make_engine([a])
    learn(engine, "f", 0.25, 1000)
    task = FakeTask("f-1", FakeTask("x", nbytes=10**6, on=(a,)))
    assign(engine, task, decide(engine, task))
    now[0] -= 3600.0
    finish(engine, task, 0.25)
    story = engine.log.story("f-1")
    assert story is not None
    assert story["actual"]["finish_seconds"] == 0.0
    assert engine.log.calibration()["mean_actual_seconds"] == 0.0
