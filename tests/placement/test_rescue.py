"""`Monitor`: tasks that wait on a slow or stuck worker are looked at a few at a time, the last of its queue first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
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
        monitor = Monitor(engine, nothing, stealing, None)
        monkeypatch.setattr(monitor, "_some", lambda home, idle=False: [Other()])
        monitor._rescue()


def test_so_many_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Script(monkeypatch, None)
    assert s.asked == s.tasks[-3 : -3 - LOOKED : -1], "neither the one that runs nor the one that has seceded"
    assert not s.moved


def test_so_many_are_asked_back(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Script(monkeypatch, "other")
    assert s.moved == s.tasks[-3 : -3 - MOVES : -1]


class Piece:
    """A task of a worker's hand."""

    def __init__(self, number: int, inputs: tuple[Any, ...] = ()) -> None:
        self.priority, self.dependencies, self.restricted = (number,), inputs, False


class Worker:
    """What the monitor reads of one worker."""

    def __init__(self, tasks: list[Piece], name: str) -> None:
        self.ws = SimpleNamespace(
            processing=set(tasks), executing=dict.fromkeys(tasks[:1], 1.0), long_running=set(), nthreads=1, name=name
        )
        self.speed_samples = self.passed_over = 0


class Hands:
    """A worker with a hand of short tasks, and two idle ones."""

    def __init__(self, tasks: list[Piece]) -> None:
        self.full, *idle = Worker(tasks, "full"), Worker([], "b"), Worker([], "c")
        self.moved: list[tuple[Piece, str]] = []
        self.engine: Any = SimpleNamespace(
            scheduler=SimpleNamespace(queued=[], valid_workers=lambda ts: {1} if ts.restricted else None),
            workers=SimpleNamespace(
                idle=SimpleNamespace(items=idle), all=SimpleNamespace(items=[self.full, *idle]), random=lambda: 0.0
            ),
        )
        stealing: Any = SimpleNamespace(request_short=self.request)
        nothing: Any = None
        self.monitor = Monitor(self.engine, nothing, stealing, None)
        some: Any = lambda home, idle=False: self.engine.workers.idle.items  # noqa: E731
        self.monitor._some = some  # type: ignore[method-assign]

    def request(self, ts: Piece, thief: Any) -> bool:
        self.moved.append((ts, thief.name))
        return True


def test_short_tasks_leave_a_worker_that_has_done_nothing_for_a_round() -> None:
    tasks = [Piece(i) for i in range(5)]
    h = Hands(tasks)
    h.monitor._unstick()
    assert not h.moved, "one look says nothing"
    h.monitor._unstick()
    assert h.moved == [(tasks[4], "b"), (tasks[3], "c"), (tasks[2], "b"), (tasks[1], "c")], "all but the one that runs"


def test_a_worker_that_gets_on_keeps_its_tasks() -> None:
    h = Hands([Piece(i) for i in range(5)])
    for _ in range(4):
        h.monitor._unstick()
        h.full.passed_over += 1
    assert not h.moved


def test_so_do_all_while_roots_are_queued_or_nobody_is_idle() -> None:
    h = Hands([Piece(i) for i in range(5)])
    h.monitor._unstick()
    h.engine.scheduler.queued = [1]
    h.monitor._unstick()
    h.engine.scheduler.queued = []
    h.monitor._unstick()
    assert not h.moved, "what was seen before the queue is forgotten"
    h.engine.workers.idle.items = []
    h.monitor._unstick()
    assert not h.moved


def test_what_is_restricted_or_needs_inputs_from_elsewhere_stays() -> None:
    here, there = SimpleNamespace(who_has=[]), SimpleNamespace(who_has=[])
    tasks = [Piece(0), Piece(1, (here,)), Piece(2, (there,)), Piece(3)]
    tasks[3].restricted = True
    h = Hands(tasks)
    there.who_has = [info.ws for info in h.engine.workers.idle.items]
    h.monitor._unstick()
    h.monitor._unstick()
    assert h.moved == [(tasks[2], "b")]


def test_moves_are_bounded() -> None:
    h = Hands([Piece(i) for i in range(500)])
    h.monitor._unstick()
    h.monitor._unstick()
    assert len(h.moved) == LOOKED
