"""The scheduler's half of the ledger, with a scheduler of plain objects and a clock that moves when it is asked to."""

from __future__ import annotations

import json
import math
import types
from collections import deque
from typing import Any

import numpy as np
import pytest

from dask_gpurt.observe.collect import stall_ledger as module
from dask_gpurt.observe.collect import task_history
from dask_gpurt.observe.collect.causes import BUSY, CLOCK, LOCAL, UNASSIGNED, heartbeat_key
from dask_gpurt.observe.collect.stall_ledger import StallLedger
from tests.observe.fakes import Clock


class Scheduler:
    """As much of a scheduler as the ledger looks at. Workers tell the truth in their heartbeats."""

    def __init__(self, slots: int = 2, planning: float = 0.0) -> None:
        self.workers: dict[str, Any] = {}
        self.tasks: dict[Any, Any] = {}
        self.queued: deque[Any] = deque()
        self.unrunnable: set[Any] = set()
        self.clock = Clock()
        self.planned = 0.0
        for address in ("a", "b"):
            self.workers[address] = types.SimpleNamespace(
                address=address, name=address, nthreads=slots, processing={}, long_running=set()
            )
        self.reported = {address: dict.fromkeys(("slots", BUSY, UNASSIGNED, *LOCAL), 0.0) for address in self.workers}
        self.ledger = StallLedger(self, lambda: self.planned, self.clock)

    def start(self, key: str, worker: str, prefix: str = "f") -> None:
        ts = types.SimpleNamespace(
            key=key, prefix=types.SimpleNamespace(name=prefix), processing_on=self.workers[worker], state="processing"
        )
        self.tasks[key] = ts
        self.workers[worker].processing[key] = 0
        self.ledger.transition(key, "waiting", "processing", {})

    def end(self, key: str, seconds: float = 1.0) -> None:
        ts = self.tasks.pop(key)
        worker = ts.processing_on.address
        del self.workers[worker].processing[key]
        startstops = [{"action": "compute", "start": 0.0, "stop": seconds}]
        self.ledger.transition(key, "processing", "memory", {"worker": worker, "startstops": startstops, "nbytes": 8})

    def move(self, seconds: float, late: float = 0.0) -> None:
        """Time passes: workers run what is assigned to them, after `late` seconds in which it was not there."""
        self.clock.now += seconds
        for address, ws in self.workers.items():
            busy = min(ws.nthreads, len(ws.processing)) * (seconds - late)
            figures = self.reported[address]
            figures["slots"] += ws.nthreads * seconds
            figures[BUSY] += busy
            figures[UNASSIGNED] += ws.nthreads * seconds - busy

    def beat(self) -> dict[str, float]:
        """All heartbeats; the causes so far."""
        for address, ws in self.workers.items():
            self.ledger.heartbeat(ws, {heartbeat_key(name): value for name, value in self.reported[address].items()})
        got = self.ledger.statistics()
        assert got["busy_seconds"] + sum(got["causes"].values()) == pytest.approx(got["slot_seconds"], abs=1e-6)
        return {cause: round(seconds, 6) for cause, seconds in got["causes"].items() if round(seconds, 6)}


def test_nothing_submitted_then_one_task() -> None:
    s = Scheduler()
    s.move(10)
    assert s.beat() == {"no_work": 40}
    s.start("x", "a")
    s.move(5)
    s.end("x")
    assert s.beat() == {"no_work": 40, "no_ready_task": 15}
    assert s.ledger.statistics()["busy_seconds"] == 5


def test_causes_change_between_two_heartbeats() -> None:
    s = Scheduler()
    s.start("x", "a")
    s.queued.append("y")
    s.ledger.guarded(s.ledger._turn)
    s.move(1)
    s.queued.clear()
    for i in range(3):
        s.start(f"b{i}", "b")  # one more than its threads
    s.move(2)
    for i in range(3):
        s.end(f"b{i}")
    s.move(4)
    s.end("x")
    s.move(8)
    assert s.beat() == {"scheduler": 3, "queued_elsewhere": 2, "no_ready_task": 4 * 3, "no_work": 8 * 4}


def test_what_is_assigned_but_not_there_is_the_schedulers() -> None:
    s = Scheduler()
    for i in range(4):
        s.start(f"x{i}", "ab"[i % 2])
    s.move(10, late=0.5)
    assert s.beat() == {"scheduler": 2}


def test_late_heartbeats_of_idle_workers_are_no_wait_for_the_scheduler() -> None:
    s = Scheduler()
    s.move(1)
    s.beat()
    for _ in range(100):
        s.clock.now += 0.2  # it was written before, and comes now
        s.beat()
        s.clock.now -= 0.2
        s.move(0.5)
        s.beat()
    assert s.beat() == {"no_work": 4 * 51}


def test_what_a_paused_worker_explains_itself_is_not_kept_for_later() -> None:
    s = Scheduler()
    for _ in range(20):
        s.clock.now += 10
        for figures in s.reported.values():
            figures["slots"] += 20
            figures["memory"] += 20
        s.beat()
    for i in range(4):
        s.start(f"x{i}", "ab"[i % 2])
    s.move(100, late=5)
    assert s.beat() == {"memory": 20 * 40, "scheduler": 4 * 5 - 4, "no_work": 4}


def test_own_planning_is_part_of_the_schedulers() -> None:
    s = Scheduler()
    s.beat()
    for i in range(4):
        s.start(f"x{i}", "ab"[i % 2])
    s.move(10, late=1)
    s.planned = 2.0
    assert s.beat() == {"scheduler": 3.2, "planning": 0.8}


def test_a_shuffle_barrier() -> None:
    s = Scheduler()
    s.ledger.transition("shuffle-barrier-1", "released", "waiting", {})
    s.start("x", "a")
    s.move(3)
    s.end("x")
    s.ledger.transition("shuffle-barrier-1", "waiting", "memory", {})
    s.move(1)
    assert s.beat() == {"shuffle_barrier": 9, "no_work": 4}


def test_a_skewed_task_is_found_and_named() -> None:
    s = Scheduler()
    for i in range(3):
        s.start(f"x{i}", "a", "g")
        s.end(f"x{i}", 0.1)
    s.start("hot", "b", "g")
    s.move(1)
    assert s.beat() == {"no_ready_task": 3}
    s.move(5)
    assert s.beat() == {"no_ready_task": 3, "skew": 15}
    s.end("hot", 6)
    s.move(1)
    assert s.beat() == {"no_ready_task": 3, "skew": 15, "no_work": 4}
    assert s.ledger.details()["skewed"] == [["g", "b", 15.0]]


def test_workers_that_leave_and_start_over() -> None:
    s = Scheduler()
    s.move(10)
    s.beat()
    s.ledger.worker_removed("b")
    del s.workers["b"], s.reported["b"]
    s.move(5)
    assert s.beat() == {"no_work": 50}
    s.reported["a"] = dict.fromkeys(s.reported["a"], 0.0)  # attached anew
    s.move(1)
    assert s.beat() == {"no_work": 52}


def test_a_busy_worker_that_starts_over_idle() -> None:
    """Its idle seconds are more than before, and all its seconds fewer."""
    s = Scheduler()
    for key in ("x", "y"):
        s.start(key, "a")
    s.move(10)
    s.beat()
    for key in ("x", "y"):
        s.end(key)
    s.reported["a"] = dict.fromkeys(s.reported["a"], 0.0)
    s.move(1)
    s.beat()
    a = s.ledger.statistics()["workers"]["a"]
    assert (a["slot_seconds"], a["busy_seconds"]) == (20 + 2, 20)


def test_figures_that_are_overtaken_are_left_out() -> None:
    """A report brings figures too, perhaps before a heartbeat that was under way: nothing may count twice."""
    s = Scheduler()
    ws, figures = s.workers["a"], {}
    for clock, seconds in ((7.0, 4.0), (7.5, 5.0)):
        figures[clock] = {CLOCK: clock, heartbeat_key("slots"): seconds, heartbeat_key(UNASSIGNED): seconds}
    s.ledger.heartbeat(ws, figures[7.5])
    s.ledger.heartbeat(ws, figures[7.0])
    assert s.ledger.statistics()["slot_seconds"] == 5.0
    # Attached anew, it counts from zero; its clock goes on.
    s.ledger.heartbeat(ws, {CLOCK: 8.0, heartbeat_key("slots"): 1.0, heartbeat_key(UNASSIGNED): 1.0})
    assert s.ledger.statistics()["slot_seconds"] == 6.0


def test_a_worker_without_the_extension_is_left_out() -> None:
    s = Scheduler()
    s.move(3)
    s.ledger.heartbeat(s.workers["a"], None)
    s.ledger.heartbeat(s.workers["b"], {"host_bytes": 3})
    assert s.ledger.statistics()["slot_seconds"] == 0


def test_an_exception_is_counted_and_repeated_ones_end_it() -> None:
    s = Scheduler()

    def fail() -> None:
        raise RuntimeError("no")

    for _ in range(module.ERRORS + 5):
        s.ledger.guarded(fail)
    assert s.ledger.errors == module.ERRORS
    assert "RuntimeError: no" in s.ledger.last_traceback


def test_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_history, "PREFIXES", 5)
    s = Scheduler()
    for i in range(task_history.ROWS + 10):
        s.start("x", "a", f"p{i}")
        s.end("x")
    assert len(s.ledger.history.rows) == task_history.ROWS
    assert list(s.ledger.history.prefixes) == [f"p{task_history.ROWS + i}" for i in range(5, 10)], "the newest"
    assert s.ledger._running == {}


@pytest.mark.parametrize(("size", "kept"), [(np.int64(7), 7), (7.5, 7), (None, 0), (math.nan, 0), (-1, 0)], ids=str)
def test_sizes_of_outputs_are_plain(size: Any, kept: int) -> None:
    """They are what a user's `sizeof` returns; kept runs are JSON."""
    history = task_history.TaskHistory()
    ran = [{"action": "compute", "start": 1.0, "stop": 2.0}]
    history.ended("a", task_history.UNPACK[0], {"startstops": ran, "nbytes": size})
    assert json.dumps([list(output) for output in history.outputs]) == json.dumps([[task_history.UNPACK[0], kept]])


def test_skew_of_workers_that_come_and_go_is_bounded() -> None:
    s = Scheduler()
    s.ledger.skewed.update({("f", f"tcp://gone:{i}"): 1.0 + i for i in range(module.SKEWED)})
    for i in range(3):
        s.start(f"x{i}", "a", "g")
        s.end(f"x{i}", 0.1)
    s.start("hot", "b", "g")
    s.move(1)
    s.beat()
    s.move(5)
    s.beat()
    assert len(s.ledger.skewed) <= module.SKEWED
    assert s.ledger.details()["skewed"][0] == ["f", f"tcp://gone:{module.SKEWED - 1}", float(module.SKEWED)]
