"""A worker that is out for one cause, and then for another: only one that is nothing but slow comes back by itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Scheduler

from dask_gpurt.client import remote
from dask_gpurt.preflight.gate import Gate
from dask_gpurt.preflight.members import Mode as GateMode
from dask_gpurt.quarantine import scheduler as quarantine
from dask_gpurt.quarantine.evidence import SLOW_SECONDS, Cause, Suspect
from dask_gpurt.quarantine.scheduler import Mode, Quarantine

#: in ``health`` of a heartbeat
HARDWARE = {"hardware": "Xid 79"}


class Script:
    """Three workers, of which `a` is slow and held for that, unless it is the only one that runs."""

    def __init__(self, running: str = "abc") -> None:
        self.slowness = {"a": 9.0}
        self.told: list[tuple[str, str]] = []
        self.quarantine = q = Quarantine(Mode.ON, lambda: self.slowness, sink=self.hear)
        self.workers = {name: SimpleNamespace(address=name, name=f"worker-{name}", metrics={}) for name in "abc"}
        held: dict[str, Any] = {}
        holds = SimpleNamespace(held=held, look=list, forget=lambda worker: None)
        holds.release = held.pop
        holds.hold = lambda worker: worker not in held and held.setdefault(worker, True)
        fake: Any = SimpleNamespace(workers=self.workers, running=[self.workers[name] for name in running])
        q._scheduler, q._holds = fake, holds  # type: ignore[assignment]
        q._try_slow_ones = lambda now: None  # type: ignore[method-assign]
        for now in (0.0, SLOW_SECONDS):
            q._clock = lambda now=now: now  # type: ignore[misc]
            q.look()
        if running == "abc":
            assert list(held) == ["a"]
            assert q._why["a"].cause == "slow"
            self.told.clear()

    def hear(self, event: Any) -> None:
        self.told.append((event.name, event.fields["cause"]))


@pytest.mark.parametrize("cause", ["hardware", "asked"])
def test_a_slow_one_of_which_more_is_known_stays_out(cause: str) -> None:
    """Let in again as fast enough, it would have been pardoned for the broken card, or against an operator's word."""
    s = Script()
    q = s.quarantine
    if cause == "hardware":
        s.workers["a"].metrics = {"gpurt": {"health": HARDWARE}}
        q.look()
    else:
        assert q.hold(["a"], "fan failed") == ["a"]
    q.look()
    assert q._why["a"].cause == cause, "not one that is let in by known computations"
    assert s.told == [("quarantine.held", cause)]
    assert q.counts["held"] == 1
    assert list(q._names) == ["worker-a"], "also when its nanny starts it again"
    assert q.release(["a"]) == ["a"]
    assert not q._names


def test_what_is_known_of_a_broken_one_stays() -> None:
    s = Script()
    q = s.quarantine
    s.workers["a"].metrics = {"gpurt": {"health": HARDWARE}}
    q.look()
    q.hold(["a"], "fan failed")
    q.look()
    assert q._why["a"].cause == "hardware"


def test_the_only_one_that_runs_works_on() -> None:
    """The others are paused: with none that runs all work would wait, as they are not asked for a task that waits."""
    s = Script(running="a")
    q = s.quarantine
    assert s.told == [("quarantine.alarm", "slow")]
    assert not q._why
    s.quarantine._scheduler.running.append(s.workers["b"])  # type: ignore[union-attr]
    q.look()
    assert q._why["a"].cause == "slow", "now it is held"


def test_a_name_that_another_host_has_later_is_not_kept_out() -> None:
    """A cluster that gets smaller and larger gives the names of workers that have left again."""
    s = Script()
    q = s.quarantine
    q._names["worker-b"] = Suspect("tcp://elsewhere:1", Cause.HARDWARE, "Xid 79", "replace it")
    q.look()
    assert "b" not in q._why
    assert "worker-b" not in q._names


def test_a_name_is_released_while_no_worker_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q = Quarantine(Mode.ALARM, dict)
    q._holds = SimpleNamespace(held={}, taken_back=0)  # type: ignore[assignment]
    q._scheduler = scheduler = SimpleNamespace(workers={}, running=[])  # type: ignore[assignment]
    q._names[7] = Suspect("tcp://gone:1", Cause.ASKED, "fan failed", "dask gpurt release")
    monkeypatch.setattr(remote, "_plugin", lambda scheduler: SimpleNamespace(quarantine=q))
    refused = remote.quarantined(scheduler, [], ["7", "8"], "")  # type: ignore[arg-type]
    assert refused is not None
    assert refused["unknown"] == ["8"]
    assert q.names() == {"7"}, "nothing was changed"
    answer = remote.quarantined(scheduler, [], ["7"], "")  # type: ignore[arg-type]
    assert answer is not None
    assert answer["released"] == ["7"]
    assert not q.names()


def test_one_that_is_back_works_while_no_other_runs() -> None:
    s = Script(running="b")
    q = s.quarantine
    q._names["worker-b"] = Suspect("b", Cause.HARDWARE, "Xid 79", "replace it")
    s.slowness.clear()
    q.look()
    assert "b" not in q._why
    q._scheduler.running.append(s.workers["c"])  # type: ignore[union-attr]
    s.told.clear()
    q.look()
    assert q._why["b"].cause == "hardware"


def test_what_is_told_after_a_sender_has_left_is_not_held_against_the_next_with_its_address() -> None:
    s = Script()
    q = s.quarantine
    b = s.workers.pop("b")
    q.remove_worker(q._scheduler, "b")  # type: ignore[arg-type]
    s.workers["c"].metrics = {"gpurt": {"health": {"corrupt": {"b": 3}}}}
    q.look()
    s.workers["b"] = b
    q.look()
    assert not s.told
    s.workers["c"].metrics = {"gpurt": {"health": {"corrupt": {"b": 6}}}}
    q.look()
    assert s.told == [("quarantine.alarm", "corruption")]


def test_one_that_does_not_answer_keeps_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "_ANSWER_SECONDS", 0.05)

    async def broadcast(msg: Any, workers: list[str], on_error: str) -> dict[str, Any]:
        if "hung" in workers:
            await asyncio.Event().wait()
        return {worker: OSError() if worker == "gone" else 0.5 for worker in workers}

    fake: Any = SimpleNamespace(broadcast=broadcast)
    answers = asyncio.run(quarantine._measured(fake, ["a", "hung", "gone", "b"]))
    assert answers == {"a": 0.5, "b": 0.5}


def test_a_scheduler_that_starts_its_plugins_later_starts_this_one_once() -> None:
    """As after a preload. Two chains of timers ran, and the end of it cancelled one."""

    async def check() -> None:
        q = Quarantine(Mode.ALARM, dict)
        async with Scheduler(dashboard_address=":0", port=0) as scheduler:
            await q.start(scheduler)
            timer = q._timer
            await q.start(scheduler)
            assert q._timer is timer
            q.stop()
            assert timer is not None
            assert timer.cancelled()

    asyncio.run(check())


@pytest.mark.parametrize("mode", ["hold", "close"])
def test_so_does_the_gate_of_new_workers(mode: str) -> None:
    """Its handler was wrapped twice, and the end of it unwrapped one."""

    async def check() -> None:
        gate = Gate(GateMode(mode))
        async with Scheduler(dashboard_address=":0", port=0) as scheduler:
            stock = scheduler.stream_handlers["worker-status-change"]
            await gate.start(scheduler)
            await gate.start(scheduler)
            assert scheduler.stream_handlers["worker-status-change"] is not stock
            gate.stop()
            assert scheduler.stream_handlers["worker-status-change"] == stock

    asyncio.run(check())
