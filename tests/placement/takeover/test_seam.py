"""The take-over: all of it or nothing, wrapped, and given back exactly."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from distributed.core import Status
from distributed.scheduler import Scheduler

from dask_gpurt.errors import InstallError, SeamMismatch
from dask_gpurt.model import circuit_breaker
from dask_gpurt.placement.takeover import seam as seam_module
from dask_gpurt.placement.takeover.seam import Seam
from tests.placement.fakes import FakeTask, FakeWorker

if TYPE_CHECKING:
    from dask_gpurt.model import Event


class Stock:
    """What `Scheduler` looks like to the seam."""

    _TRANSITIONS_TABLE: ClassVar[Any] = Scheduler._TRANSITIONS_TABLE
    decide_worker_rootish_queuing_enabled = Scheduler.decide_worker_rootish_queuing_enabled
    is_rootish = Scheduler.is_rootish
    stimulus_queue_slots_maybe_opened = Scheduler.stimulus_queue_slots_maybe_opened
    transitions = Scheduler.transitions
    _task_to_msg = Scheduler._task_to_msg

    def __init__(self, *workers: FakeWorker) -> None:
        self.workers = {ws.address: ws for ws in workers}
        self.valid: set[Any] | None = None

    def decide_worker_non_rootish(self, ts: Any) -> Any:
        return "stock"

    def get_comm_cost(self, ts: Any, ws: Any) -> Any:
        return -42

    def bulk_schedule_unrunnable_after_adding_worker(self, ws: Any) -> Any:
        return {"one": "processing"}

    def valid_workers(self, ts: Any) -> Any:
        return self.valid


class Task(FakeTask):
    worker_restrictions: Any = None
    host_restrictions: Any = None
    resource_restrictions: Any = None
    loose_restrictions = False


def make(ours: Any = None, price: Any = None, **kw: Any) -> tuple[Stock, Seam, list[FakeWorker], list[Event]]:
    workers = [FakeWorker(i) for i in range(3)]
    scheduler = Stock(*workers)
    events: list[Event] = []
    seam = Seam(scheduler, sink=events.append, **kw)
    seam.check()
    seam.install(ours or (lambda ts, valid: workers[0]), price or (lambda ts, ws: 1.0))
    return scheduler, seam, workers, events


def test_install_and_uninstall() -> None:
    scheduler = Stock()
    before = dict(scheduler.__dict__)
    w = FakeWorker(0)
    scheduler.workers[w.address] = w
    seam = Seam(scheduler)
    seam.install(lambda ts, valid: w, lambda ts, ws: 1.5)
    assert seam.installed == (
        "decide_worker_non_rootish",
        "get_comm_cost",
        "bulk_schedule_unrunnable_after_adding_worker",
    )
    assert scheduler.decide_worker_non_rootish(Task("t")) is w
    assert scheduler.get_comm_cost(Task("t"), w) == 1.5
    seam.uninstall()
    seam.uninstall()
    assert scheduler.__dict__ == before
    assert scheduler.decide_worker_non_rootish(Task("t")) == "stock"
    assert seam.installed == ()


def test_other_parameters_are_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Stock()
    before = dict(scheduler.__dict__)

    def decide_worker_non_rootish(self: Any, ts: Any, valid: Any) -> None: ...

    monkeypatch.setattr(Stock, "decide_worker_non_rootish", decide_worker_non_rootish)
    with pytest.raises(SeamMismatch, match=r"expected .*non_rootish\(self, ts\), found .*\(self, ts, valid\).*Remedy"):
        Seam(scheduler).check()
    assert scheduler.__dict__ == before


@pytest.mark.parametrize("table", [None, {}, {("waiting", "processing"): lambda self, key: None}])
def test_another_transition_table_is_a_mismatch(monkeypatch: pytest.MonkeyPatch, table: Any) -> None:
    monkeypatch.setattr(Stock, "_TRANSITIONS_TABLE", table)
    with pytest.raises(SeamMismatch, match="_TRANSITIONS_TABLE"):
        Seam(Stock()).check()


@pytest.mark.parametrize("found", [None, 3], ids=["missing", "not callable"])
def test_missing_names_are_a_mismatch(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    if found is None:
        monkeypatch.delattr(Stock, "get_comm_cost")
    else:
        monkeypatch.setattr(Stock, "get_comm_cost", found)
    with pytest.raises(SeamMismatch, match="get_comm_cost"):
        Seam(Stock()).check()


def test_missing_slots_are_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(seam_module.ATTRIBUTES, FakeWorker, ("no_such_slot",))
    with pytest.raises(SeamMismatch, match=r"FakeWorker\.no_such_slot"):
        Seam(Stock()).check()


def test_a_foreign_override_is_respected() -> None:
    scheduler = Stock()
    theirs = scheduler.__dict__["get_comm_cost"] = lambda ts, ws: 0.0
    with pytest.raises(InstallError, match="already overridden"):
        Seam(scheduler).install(lambda ts, valid: None, lambda ts, ws: 1)
    assert scheduler.__dict__ == {"workers": {}, "valid": None, "get_comm_cost": theirs}


def test_a_later_foreign_override_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, seam, _, _ = make()
    theirs = lambda ts: "theirs"  # noqa: E731
    scheduler.decide_worker_non_rootish = theirs  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, logger="distributed.scheduler.gpurt"):
        seam.uninstall()
    assert scheduler.decide_worker_non_rootish is theirs
    assert "get_comm_cost" not in scheduler.__dict__
    assert "decide_worker_non_rootish was overridden" in caplog.text


def test_an_exception_falls_back() -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("no good")

    scheduler, seam, workers, events = make(broken, broken)
    assert scheduler.decide_worker_non_rootish(Task("t")) == "stock"
    assert scheduler.get_comm_cost(Task("t"), workers[0]) == -42
    for part in map(seam.parts.__getitem__, ("decide_worker_non_rootish", "get_comm_cost")):
        assert part.fallbacks == {"exception": 1}
        assert part.last_traceback is not None
        assert "ZeroDivisionError: no good" in part.last_traceback
    assert [e.name for e in events] == ["placement.fallback"] * 2
    assert "ZeroDivisionError" in events[0].fields["traceback"]


def test_an_exception_while_tasks_are_woken_leaves_those_that_dask_wakes() -> None:
    scheduler, seam, workers, events = make()
    assert not hasattr(scheduler, "unrunnable")
    assert scheduler.bulk_schedule_unrunnable_after_adding_worker(workers[0]) == {"one": "processing"}
    assert seam.parts["bulk_schedule_unrunnable_after_adding_worker"].fallbacks == {"exception": 1}
    assert [e.name for e in events] == ["placement.fallback"]


def test_none_declines() -> None:
    scheduler, seam, workers, events = make(lambda ts, valid: None, lambda ts, ws: None)
    assert scheduler.decide_worker_non_rootish(Task("t")) == "stock"
    assert scheduler.get_comm_cost(Task("t"), workers[0]) == -42
    assert not events
    assert not any(p.fallbacks for p in seam.parts.values())


@pytest.mark.parametrize("wrong", ["unknown", "paused", "stale", "not valid", "nonsense"])
def test_a_wrong_worker_falls_back(wrong: str) -> None:
    scheduler, seam, workers, _ = make(lambda ts, valid: answer)
    ts = Task("t")
    answer: Any = workers[0]
    if wrong == "unknown":
        answer = FakeWorker(77)
    elif wrong == "paused":
        answer.status = Status.paused
    elif wrong == "stale":
        scheduler.workers[answer.address] = FakeWorker(0)
    elif wrong == "not valid":
        ts.worker_restrictions = {"somewhere else"}
        scheduler.valid = {workers[1]}
    else:
        answer = "tcp://1.2.3.4:5"
    assert scheduler.decide_worker_non_rootish(ts) == "stock"
    (reason,) = seam.parts["decide_worker_non_rootish"].fallbacks
    assert reason == ("exception" if wrong == "nonsense" else "rejected")


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf"), "cheap"])
def test_a_wrong_price_falls_back(price: Any) -> None:
    scheduler, seam, workers, _ = make(None, lambda ts, ws: price)
    assert scheduler.get_comm_cost(Task("t"), workers[0]) == -42
    assert sum(seam.parts["get_comm_cost"].fallbacks.values()) == 1


@pytest.mark.parametrize("kind", ["worker_restrictions", "host_restrictions", "resource_restrictions"])
def test_restrictions_are_passed_on(kind: str) -> None:
    seen = []

    def ours(ts: Any, valid: Any) -> Any:
        seen.append(valid)
        return None

    scheduler, _, workers, _ = make(ours)
    ts = Task("t")
    scheduler.decide_worker_non_rootish(ts)
    setattr(ts, kind, {"x": 1})
    scheduler.valid = {workers[1]}
    scheduler.decide_worker_non_rootish(ts)
    scheduler.valid = set()
    scheduler.decide_worker_non_rootish(ts)
    ts.loose_restrictions = True
    scheduler.decide_worker_non_rootish(ts)
    assert seen == [None, {workers[1]}, set(), None]


def test_retires_after_too_many_failures(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def broken(ts: Any, valid: Any) -> Any:
        calls.append(ts)
        raise ValueError("always")

    now = [0.0]
    scheduler, seam, _, events = make(broken, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING, logger="distributed.scheduler.gpurt"):
        for _ in range(circuit_breaker.LIMIT + 50):
            assert scheduler.decide_worker_non_rootish(Task("t")) == "stock"
    assert len(calls) == circuit_breaker.LIMIT
    part = seam.parts["decide_worker_non_rootish"]
    assert part.retired is not None
    assert "ValueError: always" in part.retired
    assert part.fallbacks == {"exception": circuit_breaker.LIMIT, "retired": 50}
    assert [r.name for r in caplog.records] == ["distributed.scheduler.gpurt"]
    assert [e.name for e in events] == ["placement.fallback", "placement.retired"]
    assert seam.parts["get_comm_cost"].retired is None


def test_rare_failures_do_not_retire_and_events_are_rationed() -> None:
    def broken(ts: Any, valid: Any) -> Any:
        raise ValueError("now and then")

    now = [0.0]
    scheduler, seam, _, events = make(broken, clock=lambda: now[0])
    for _ in range(3 * circuit_breaker.LIMIT):
        now[0] += 1.0
        scheduler.decide_worker_non_rootish(Task("t"))
    assert seam.parts["decide_worker_non_rootish"].retired is None
    assert len(events) == 3 * circuit_breaker.LIMIT / circuit_breaker.EVENT_SECONDS


def test_a_broken_sink_does_no_harm() -> None:
    def broken(*args: Any) -> Any:
        raise ValueError("broken")

    w = FakeWorker(0)
    scheduler = Stock(w)
    seam = Seam(scheduler, sink=broken)
    seam.install(broken, broken)
    assert scheduler.decide_worker_non_rootish(Task("t")) == "stock"
    assert seam.parts["decide_worker_non_rootish"].fallbacks == {"exception": 1}
