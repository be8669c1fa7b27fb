"""`Monitor`: which tasks of a slow worker it looks at, the last of its queue first; where it starts second copies."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement import monitor
from dask_gpurt.placement.monitor import LOOKED, MOVES, Monitor
from dask_gpurt.placement.plugin import PlacementPlugin
from dask_gpurt.placement.tables.worker_speed import FORGET_SECONDS
from tests.placement.fakes import SETTINGS, FakeTask, FakeWorker, assign, finish, learn, make_engine

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
            steal_policy=SimpleNamespace(choose=choose),
        )
        stealing: Any = SimpleNamespace(in_flight={}, request=request, may_steal=lambda ts, thieves: None)
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


def test_a_round_that_takes_long_goes_on_at_the_next_slow_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of ten thousand workers may be slow, and each has a queue: all of them at once would block the loop."""
    now = [0.0]
    monkeypatch.setattr(monitor, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    slow = [
        SimpleNamespace(
            ws=SimpleNamespace(processing={Task(i): None, Task(i): None}, executing={}, long_running=set(), nthreads=1)
        )
        for i in range(5)
    ]
    looked: list[int] = []

    def choose(ts: Task, *args: Any, **kwargs: Any) -> None:
        looked.append(ts.priority[0])
        now[0] += monitor.LIMIT_SECONDS / 3

    engine: Any = SimpleNamespace(
        speeds=SimpleNamespace(slow=slow),
        steal_policy=SimpleNamespace(choose=choose),
    )
    nothing: Any = None
    stealing: Any = SimpleNamespace(in_flight={}, may_steal=lambda ts, thieves: None)
    patrol = Monitor(engine, nothing, stealing, None)
    monkeypatch.setattr(patrol, "_some", lambda home, idle=False: [Other()])
    patrol._rescue()
    assert looked == [0, 0, 1, 1]
    patrol._rescue()
    assert looked[4:] == [2, 2, 3, 3]


def copied(kind: str = "list", device: bool = True, limit: int = 0, held: int = 0, forbidden: int = 0) -> bool:
    """Whether a task that is late on a slow worker is copied to the other one.

    That may have no device, and data already. As many tasks as are `forbidden` are later still, but must not run twice.
    """
    home, other = workers = [FakeWorker(i, memory_limit=limit) for i in range(2)]
    engine = make_engine(workers)
    for ws in workers:
        said: Any = SimpleNamespace(address=ws.address, metrics={"gpurt": {"device_possible": device or ws is home}})
        engine.tables.devices.look(said)
    learn(engine, "f", 0.1)
    x: Any = FakeTask("x", nbytes=1000, on=(home,))
    x.type, x.run_spec = kind, object()
    tasks: list[Any] = [FakeTask(f"f-{i}", x) for i in range(forbidden + 1)]
    for ts in tasks:
        ts.state, ts.annotations, ts.resource_restrictions, ts.suspicious = "processing", None, None, 0
        ts.run_spec, ts._queueable = object(), True
        assign(engine, ts, home)
    for ts in tasks[1:]:
        ts.annotations = {"gpurt_rerun": False}
    other.nbytes = held
    engine.scheduler.idle = {}
    engine.scheduler.valid_workers = lambda ts: None
    started: list[Any] = []
    copies: Any = SimpleNamespace(
        copies={}, failed=set(), gained=Counter(), per_worker=Counter(), start=lambda ts, ws: started.append(ws)
    )
    nothing: Any = None
    slow = engine.workers.by_address[home.address]
    slow.speed.observe("f", 4.0)
    slow.speed.observe("f", 4.0)
    stealing: Any = SimpleNamespace(in_flight={}, may_steal=lambda ts, thieves: None)
    patrol = Monitor(engine, nothing, stealing, copies)
    late = [(1.0 + i, ts, slow) for i, ts in enumerate(tasks)]
    patrol._look = lambda info, now, overdue: overdue.extend(late if info is slow else [])  # type: ignore[method-assign]
    patrol.round()
    assert started in ([], [other])
    return bool(started)


def test_a_copy_that_reads_device_values_goes_to_no_worker_without_a_device() -> None:
    assert copied("pandas.core.frame.DataFrame", device=False)
    assert not copied("cudf.core.dataframe.DataFrame", device=False)
    assert copied("cudf.core.dataframe.DataFrame", device=True)


def test_a_copy_goes_to_no_worker_that_has_no_room_for_its_inputs() -> None:
    assert copied(limit=10_000)
    assert not copied(limit=10_000, held=9_900)


def test_tasks_that_must_not_run_twice_keep_no_other_from_its_copy() -> None:
    assert copied(forbidden=2 * MOVES)


def test_the_patience_with_a_slow_worker_ends_with_the_queue() -> None:
    workers = [FakeWorker(i) for i in range(4)]
    engine = make_engine(workers)
    now = [100.0]
    engine.speeds._clock = lambda: now[0]
    slow = engine.workers.all.items[0]
    slow.slowness = 10.0
    engine.speeds.learned(slow)
    assert not engine.speeds.worth(slow, 1)
    nothing: Any = None
    stealing: Any = SimpleNamespace(in_flight={}, may_steal=lambda ts, thieves: None)
    patrol = Monitor(engine, nothing, stealing, None)
    patrol._look = lambda info, now, overdue: None  # type: ignore[method-assign]
    engine.scheduler.idle = {}
    patrol.round()
    # The next graph comes when the patience of the last one would be over.
    now[0] += 100.0
    assert not engine.speeds.worth(slow, 1)


def test_one_long_task_is_not_held_against_its_worker_for_good() -> None:
    """While it runs the worker may be slow, and gets less. To take it out, as the quarantine does, is another thing."""
    workers = [FakeWorker(i) for i in range(4)]
    engine = make_engine(workers)
    engine.scheduler.idle = {}
    engine.scheduler.stream_comms = {}
    for i in range(160):
        ts, ws = FakeTask(f"f-{i}"), workers[i % 4]
        assign(engine, ts, ws)
        finish(engine, ts, 1.0 + 0.1 * (i % 3) if ws is not workers[1] else 9.0)
    plugin = PlacementPlugin(SETTINGS)
    plugin.engine = engine
    long = FakeTask("f-long")
    assign(engine, long, workers[0])
    workers[0].executing = {long: 100.0}
    for ws in workers:
        ws.metrics, ws.last_seen = {}, 0.0  # type: ignore[attr-defined]
    nothing: Any = None
    stealing: Any = SimpleNamespace(in_flight={}, may_steal=lambda ts, thieves: None, balance=lambda: None)
    Monitor(engine, nothing, stealing, None, lambda: 1.0).round()
    assert engine.workers.by_address[workers[0].address].slowness > 10
    slowness = plugin.slowness()
    assert slowness[workers[0].address] < 1.5
    assert slowness[workers[1].address] > 5, "it has shown that it is slow"


def test_of_two_workers_one_may_be_slow() -> None:
    workers = [FakeWorker(i) for i in range(2)]
    engine = make_engine(workers)
    for i in range(100):
        ts, ws = FakeTask(f"f-{i}"), workers[not i % 10]
        assign(engine, ts, ws)
        finish(engine, ts, 1.0 if ws is workers[0] else 9.0)
    plugin = PlacementPlugin(SETTINGS)
    plugin.engine = engine
    fast, slow = (plugin.slowness()[ws.address] for ws in workers)
    assert fast == 1.0
    assert slow > 5.0


def test_a_clock_that_is_set_back_does_not_keep_a_worker_slow() -> None:
    (ws,) = workers = [FakeWorker(0)]
    engine = make_engine(workers)
    engine.scheduler.idle = {}
    engine.scheduler.stream_comms = {}
    ws.metrics = {}  # type: ignore[attr-defined]
    info = engine.workers.by_address[ws.address]
    for _ in range(5):
        info.speed.observe("f", 2.0)
        info.speed_samples += 1
    now = [10_000.0]
    nothing: Any = None
    stealing: Any = SimpleNamespace(in_flight={}, may_steal=lambda ts, thieves: None, balance=lambda: None)
    patrol = Monitor(engine, nothing, stealing, None, lambda: now[0])
    patrol.round()
    assert info.slowness > 4.0
    now[0] = 100.0
    for _ in range(6):
        now[0] += FORGET_SECONDS + 1.0
        patrol.round()
    assert info.slowness == 1.0
