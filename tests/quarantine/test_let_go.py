"""When a held worker is let go for tasks that wait: no other may run them, or none of those that may does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from distributed.core import Status
from distributed.utils_test import NO_AMM, gen_cluster, inc

from dask_gpurt.quarantine.hold import Held, Holds
from tests.quarantine.test_hold import THREE, guarded, until

pytestmark = pytest.mark.timeout(200)

WANTS = {"loose_restrictions": False, "worker_restrictions": None, "host_restrictions": None}


class Script:
    """Four workers, of which `a` and `b` are held, and one task that waits for a worker with a GPU."""

    def __init__(self) -> None:
        self.workers = {name: mock.Mock(address=name, resources={"GPU": 1}) for name in "abcd"}
        self.scheduler = mock.Mock(workers=self.workers, queued=(), running=set(), unrunnable={self.task(): 0.0})
        self.holds = Holds(self.scheduler, mock.Mock())
        self.holds.held.update({name: Held(name, 0.0, "running") for name in "ab"})

    def task(self, **wants: Any) -> Any:
        return mock.Mock(**{**WANTS, "resource_restrictions": {"GPU": 1}, **wants})


def test_one_is_let_go_while_no_other_runs() -> None:
    """They may be paused for good; a pause that is over at the next look is none."""
    s = Script()
    c, d = s.workers["c"], s.workers["d"]
    assert s.holds._wanted() == []
    s.scheduler.running.add(c)
    assert s.holds._wanted() == []
    s.scheduler.running.remove(c)
    assert s.holds._wanted() == []
    assert s.holds._wanted() == ["a"], "one is enough"
    s.scheduler.running.add(d)
    assert s.holds._wanted() == []


def test_none_is_let_go_that_is_paused_itself() -> None:
    s = Script()
    s.holds.held["a"].reported = "paused"
    assert [s.holds._wanted() for _ in range(2)] == [[], ["b"]]
    s.holds.held["b"].reported = "closing_gracefully"
    assert s.holds._wanted() == []
    s.holds.held["a"].reported = "running"
    assert s.holds._wanted() == ["a"]


def test_those_that_run_count_only_where_they_may() -> None:
    s = Script()
    s.workers["c"].resources = {}
    s.scheduler.running.add(s.workers["c"])
    assert [s.holds._wanted() for _ in range(2)] == [[], ["a"]]


def test_one_serves_several_that_wait() -> None:
    s = Script()
    s.scheduler.unrunnable[s.task(loose_restrictions=True)] = 0.0
    s.scheduler.unrunnable[s.task(worker_restrictions={"a", "c"})] = 0.0
    assert [s.holds._wanted() for _ in range(2)] == [[], ["a"]]
    s.scheduler.unrunnable[s.task(worker_restrictions={"b"})] = 0.0
    assert s.holds._wanted() == ["a", "b"], "no other may run the last"


@gen_cluster(client=True, nthreads=THREE, config={**NO_AMM, "distributed.worker.memory.pause": False})
async def test_paused_for_good(c: Any, s: Any, bad: Any, *others: Any) -> None:
    """Stock would run it there."""
    async with guarded(s, "on") as quarantine:
        quarantine.evidence.hardware(bad.address, "Xid 79")
        quarantine.look()
        assert list(quarantine.statistics()["held"]) == [bad.address]
        for other in others:
            other.status = Status.paused
        await until(lambda: not s.running)
        future = c.submit(inc, 1)
        await until(lambda: s.tasks.get(future.key) is not None and s.tasks[future.key].state == "no-worker")
        quarantine.look()
        quarantine.look()
        assert await future == 2
        assert quarantine.counts["let_go"] == 1
        quarantine.look()
        assert quarantine.statistics()["held"] == {}, "its card reports the same error with every heartbeat"
        s.validate_state()
        for other in others:
            other.status = Status.running


def test_tasks_that_wait_for_the_same_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands was held against each worker, every five seconds, on the scheduler's event loop."""
    tasks = [mock.Mock(**WANTS, resource_restrictions={"GPU": 1 + i % 2}) for i in range(100)]
    workers = {f"w{i}": mock.Mock(address=f"w{i}", resources={"GPU": 1} if i == 0 else {}) for i in range(5)}
    holds = Holds(mock.Mock(unrunnable=dict.fromkeys(tasks, 0.0), queued=(), workers=workers), mock.Mock())
    holds.held["w0"] = Held("w0", 0.0, "running")
    looks = 0
    may_run = holds._may_run

    def counted(*args: Any) -> bool:
        nonlocal looks
        looks += 1
        return may_run(*args)

    monkeypatch.setattr(holds, "_may_run", counted)
    assert holds._wanted() == ["w0"]
    assert looks == 2 * len(workers)
