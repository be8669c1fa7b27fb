"""`Monitor`: tasks that wait on a slow worker are looked at a few at a time, the last of its queue first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement import monitor
from dask_gpurt.placement.monitor import LOOKED, MOVES, Monitor

if TYPE_CHECKING:
    import pytest


class Task:
    def __init__(self, number: int) -> None:
        self.priority = (number,)


class Other:
    """A worker that may take tasks."""

    ws = "other"


class Script:
    """A slow worker with a thousand tasks in hand, and one other worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Any, rounds: int = 1) -> None:
        self.tasks = [Task(i) for i in range(1000)]
        self.asked: list[Task] = []
        self.moved: list[Task] = []
        running, seceded = self.tasks[-1], self.tasks[-2]
        slow = SimpleNamespace(
            processing=dict.fromkeys(self.tasks), executing={running: 1.0}, long_running={seceded}, nthreads=1
        )

        def choose(ts: Task, *args: Any, **kwargs: Any) -> Any:
            self.asked.append(ts)
            return answer

        def request(ts: Task, thief: Any) -> bool:
            self.moved.append(ts)
            return True

        engine: Any = SimpleNamespace(
            speeds=SimpleNamespace(slow=[SimpleNamespace(ws=slow)]),
            scheduler=SimpleNamespace(valid_workers=lambda ts: None),
            steal_policy=SimpleNamespace(choose=choose),
        )
        stealing: Any = SimpleNamespace(in_flight={}, request=request)
        nothing: Any = None
        patrol = Monitor(engine, nothing, stealing, None)
        monkeypatch.setattr(patrol, "_some", lambda home, idle=False: [Other()])
        for _ in range(rounds):
            patrol.rounds += 1
            patrol._rescue()


def test_so_many_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Script(monkeypatch, None)
    assert s.asked == s.tasks[-3 : -3 - LOOKED : -1], "neither the one that runs nor the one that has seceded"
    assert not s.moved


def test_the_end_of_a_very_long_queue_is_sought_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "MANY", 100, raising=False)
    s = Script(monkeypatch, None, rounds=22)
    assert s.asked == 2 * s.tasks[-3 : -3 - LOOKED : -1]


def test_so_many_are_asked_back(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Script(monkeypatch, "other")
    assert s.moved == s.tasks[-3 : -3 - MOVES : -1]
