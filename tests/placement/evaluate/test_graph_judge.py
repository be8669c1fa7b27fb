"""The judge of whole graphs, its verdict and the alarm of idle threads, on scripted episodes."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from distributed.core import Status

from dask_gpurt.placement.evaluate import graph_judge, graph_verdict, idle_alarm
from dask_gpurt.placement.evaluate.graph_judge import GraphJudge
from dask_gpurt.placement.evaluate.graph_record import REST_SECONDS, GraphStanding, Record
from dask_gpurt.placement.evaluate.graph_verdict import Outcome, verdict
from dask_gpurt.placement.evaluate.idle_alarm import IdleAlarm
from tests.placement.fakes import FakeTask, FakeWorker, assign, make_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

THREADS = 4
GRAPH = {"make": 40, "norm": 40, "total": 1}


class Script:
    """Runs episodes one after the other on a clock of its own."""

    def __init__(self, **kw: Any) -> None:
        self.now = 1000.0
        self.told: list[str] = []
        #: processor seconds of the scheduler's event loop
        self.loop = 0.0
        self.judge = GraphJudge(lambda: self.now, self.told.append, loop_seconds=lambda: self.loop, **kw)
        self.sides: list[str] = []
        self.rnd = random.Random(1)

    def run(
        self,
        ours: Callable[[], float] | float,
        stock: Callable[[], float] | float,
        tasks: Mapping[str, int] = GRAPH,
        *,
        needs: float = 0.5,
        loop: float = 0.0,
        moved: tuple[float, float] = (0.0, 0.0),
        fullest: tuple[float, float] = (0.1, 0.1),
        made: int = 1000,
        computed: bool = True,
        during: Callable[[], None] = lambda: None,
    ) -> bool:
        """One graph; whether it was stock's. `needs`: computing over threads; `loop`: the event loop's seconds."""
        judge = self.judge
        judge.arrived(tasks, THREADS)
        n = sum(tasks.values())
        side = judge.stock
        self.sides.append("stock" if side else "ours")
        seconds = stock if side else ours
        judge.tick(True, fullest[side])
        during()
        self.loop += loop
        took = seconds if isinstance(seconds, (int, float)) else seconds()
        for i in range(n):
            self.now += took / n
            judge.finished(computed or i > 0)
            judge.compute_seconds += needs * THREADS / n
            judge.made_bytes += made
        if judge.in_trial:
            judge.moved_bytes += int(moved[side])
        judge.tick(False, fullest[side])
        return side

    def times(self, n: int, *args: Any, **kw: Any) -> None:
        for _ in range(n):
            self.run(*args, **kw)

    def noisy(self, middle: float, spread: float = 0.1) -> Callable[[], float]:
        return lambda: middle * self.rnd.lognormvariate(0, spread)

    @property
    def record(self) -> Record:
        (record,) = self.judge.records.values()
        return record


def test_what_is_near_its_bound_is_left_alone() -> None:
    s = Script()
    s.times(50, 2.0, 1.0, needs=1.8)
    told = s.judge.statistics()
    assert set(s.sides) == {"ours"}
    assert (told["judged"], told["trials"], told["by_lot"]) == (50, 0, 0)
    assert json.loads(json.dumps(told)) == told


def test_a_scheduler_has_to_take_its_time_for_tiny_tasks() -> None:
    tiny, s = {"increment": 5000}, Script()
    s.times(20, 1.2 * graph_judge.LOOP_SHARE * 2.0, 1.0, tiny, needs=0.1, loop=2.0)
    assert set(s.sides) == {"ours"}
    s.times(2, 1.4 * graph_judge.LOOP_SHARE * 2.0, 1.0, tiny, needs=0.1, loop=2.0)
    assert s.judge.statistics()["trials"] == 1, "far more than that is suspicious all the same"


def test_a_client_may_take_its_time_to_send_graphs() -> None:
    s = Script()

    def sends() -> None:
        s.now += 3.0
        s.judge.arrived({"late": 1}, THREADS)

    for _ in range(20):
        s.run(0.5, 0.5, needs=0.1, during=sends)
        s.judge.finished(True)
        s.judge.tick(False, 0.1)
    assert set(s.sides) == {"ours"}
    told = s.judge.statistics()
    assert told["judged"] == 20
    assert told["trials"] == 0


def test_what_loses_is_left_to_stock_within_six_graphs() -> None:
    s = Script()
    s.times(10, s.noisy(4.0), s.noisy(2.8))
    assert s.sides[:2] == ["ours", "ours"], "the first says nothing, the second is suspicious"
    assert sorted(s.sides[2:6]) == ["ours", "ours", "stock", "stock"], "the trial"
    assert s.sides[6:] == ["stock"] * 4
    (text,) = s.told
    assert "make, norm, total (81 tasks)" in text
    assert "times as long as stock's" in text
    told = s.judge.statistics()
    assert (told["trials"], told["retirements"], told["by_lot"], told["left_to_stock"]) == (1, 1, 2, 4)
    ((name, why),) = told["switched_off"].items()
    assert name == "make, norm, total (81 tasks)"
    assert "s more)" in why


def test_it_is_tried_again_and_rests_longer() -> None:
    s = Script()
    s.times(6, 4.0, 2.8)
    s.now += REST_SECONDS
    s.times(4, 4.0, 2.8)
    assert s.judge.retirements == 2
    assert s.record.rest == 4 * REST_SECONDS
    s.now += 2 * REST_SECONDS
    s.times(4, 2.0, 2.8)  # it has become better
    assert s.record.standing is GraphStanding.CLEARED
    s.times(20, 2.0, 2.8)
    assert set(s.sides[-20:]) == {"ours"}


def test_what_wins_costs_two_graphs() -> None:
    s = Script()
    s.times(30, s.noisy(2.0), s.noisy(4.0))
    assert s.sides.count("stock") == 2
    assert not s.told
    assert s.judge.statistics()["cleared"]


def test_stock_is_given_up_where_it_takes_far_longer() -> None:
    """Ours takes 2 s, stock 8: a trial costs 1.3 times ours and the rest at ours' pace, and it counts for ours."""
    s, costs = Script(), []
    for _ in range(30):
        began = s.now
        s.judge.arrived(GRAPH, THREADS)
        side = "stock" if s.judge.stock else "ours"
        for _ in range(n := sum(GRAPH.values())):
            s.now += (8.0 if s.judge.stock else 2.0) / n
            s.judge.finished(True)
            s.judge.compute_seconds += 0.5 * THREADS / n
            s.judge.tick(True, 0.1)
        s.judge.tick(False, 0.1)
        s.sides.append(side)
        costs.append(s.now - began)
    told = s.judge.statistics()
    assert (told["by_lot"], told["given_up"], told["retirements"]) == (2, 2, 0)
    assert told["on_trial"] == {}
    assert max(costs) < 4.2
    assert s.record.standing is GraphStanding.CLEARED
    assert "ours took 0.7" in s.record.reason  # of what stock had taken by then


def test_stock_is_not_given_up_where_it_is_as_fast() -> None:
    s = Script()
    for _ in range(60):
        s.judge.arrived(GRAPH, THREADS)
        for _ in range(n := sum(GRAPH.values())):
            s.now += s.noisy(2.0)() / n
            s.judge.finished(True)
            s.judge.compute_seconds += 0.5 * THREADS / n
            s.judge.tick(True, 0.1)
        s.judge.tick(False, 0.1)
    assert s.judge.statistics()["by_lot"] > 1
    assert s.judge.statistics()["given_up"] == 0


def test_what_is_even_is_kept_or_costs_nothing() -> None:
    s = Script()
    s.times(40, s.noisy(2.0, 0.02), s.noisy(2.0, 0.02))
    assert s.sides.count("stock") <= graph_verdict.MOST


def test_each_kind_of_graph_is_judged_alone() -> None:
    s = Script()
    other = {"read": 64, "sum": 9}
    for _ in range(8):
        s.run(4.0, 2.0)
        s.run(1.5, 3.0, other)
    assert [r.standing for r in s.judge.records.values()] == [GraphStanding.RETIRED, GraphStanding.CLEARED]
    # Another size is another kind, near sizes are not.
    assert not s.run(4.0, 2.0, {"make": 400, "norm": 400, "total": 1})
    assert s.run(4.0, 2.0, {"make": 42, "norm": 42, "total": 1})


def test_several_that_lose_retire_everything() -> None:
    s = Script()
    for i in range(graph_judge.SEVERAL):
        s.times(6, 4.0, 2.0, {f"make-{i}": 40})
    assert "for everything" in s.told[-1]
    assert s.run(4.0, 2.0, {"new": 40})
    assert s.run(0.01, 0.01, {"small": 1})
    assert "everything" in s.judge.statistics()["switched_off"]
    s.now += REST_SECONDS
    assert not s.run(4.0, 2.0, {"newer": 40})


def test_bytes_decide_where_times_are_even() -> None:
    s = Script()
    s.times(12, s.noisy(2.0, 0.001), s.noisy(2.0, 0.001), moved=(3e9, 1e9))
    assert s.record.standing is GraphStanding.RETIRED
    assert "times the bytes" in s.told[0]
    few = Script()
    few.times(24, 2.0, 2.0, moved=(3e6, 1e6))
    assert few.record.standing is GraphStanding.CLEARED, "a few megabytes are nothing"


def test_memory_decides_where_the_rest_is_even() -> None:
    s = Script()
    s.times(24, s.noisy(2.0, 0.001), s.noisy(2.0, 0.001), fullest=(0.9, 0.5))
    assert s.record.standing is GraphStanding.RETIRED
    assert "held 1.8" in s.told[0]
    fast = Script()
    fast.times(24, 2.0, 3.0, fullest=(0.9, 0.5))
    assert fast.record.standing is GraphStanding.CLEARED, "what is faster may use the room there is"
    spills = Script()
    spills.times(24, spills.noisy(2.0), spills.noisy(2.2), fullest=(1.5, 0.5))
    assert spills.record.standing is GraphStanding.RETIRED, "but not more than there is"


def test_a_full_worker_is_suspicious() -> None:
    s = Script()
    s.times(3, 2.0, 2.0, needs=1.9, fullest=(1.2, 0.5))
    assert s.record.standing is GraphStanding.TRIAL


def test_the_alarm_is_suspicious_at_once() -> None:
    s = Script()
    s.run(2.0, 2.0, needs=1.9, during=s.judge.alarmed)
    assert s.record.standing is GraphStanding.TRIAL
    assert "idle" in s.record.reason


@pytest.mark.parametrize("tasks", [{"make": 15}, {"make": 3}])
def test_small_graphs_say_nothing(tasks: dict[str, int]) -> None:
    s = Script()
    s.times(30, 4.0, 2.0, tasks)
    assert not s.judge.records


def test_short_graphs_say_nothing() -> None:
    s = Script()
    s.times(30, 0.4, 0.2, needs=0.1)
    assert not s.judge.records


def test_what_went_wrong_says_nothing() -> None:
    s = Script()
    s.times(10, 4.0, 2.0, computed=False)
    s.times(10, 4.0, 2.0, during=lambda: s.judge.spoil("workers came or left"))
    assert not s.judge.records
    assert s.judge.statistics()["unjudged"] == {"a task had no result": 10, "workers came or left": 10}


def test_tasks_that_do_not_come_end_an_episode() -> None:
    s = Script()
    s.judge.arrived(GRAPH, THREADS)
    s.now += 10
    for _ in range(graph_judge.QUIET_TICKS - 1):
        s.judge.tick(False, 0.0)
    assert s.judge.observing
    s.judge.tick(True, 0.0)
    for _ in range(graph_judge.QUIET_TICKS):
        s.judge.tick(False, 0.0)
    assert not s.judge.observing
    assert s.judge.left == 0
    assert s.judge.unjudged == {"tasks were cancelled or cannot run": 1}
    s.judge.arrived(GRAPH, THREADS)
    s.judge.forget()
    assert not s.judge.observing


def test_results_are_compared_with_like_ones_only() -> None:
    # Stock's graphs happen to be small: nothing to compare, whatever the times.
    s = Script()
    s.times(2, 4.0, 4.0)
    for _ in range(graph_judge.MOST_DRAWN):
        side = s.judge._by_lot(s.record)
        s.judge._lot = lambda side=side: 0.0 if side else 1.0  # type: ignore[misc]
        s.run(4.0, 0.5 * 4.0, made=10 if side else 100_000)
    assert s.record.standing is GraphStanding.CLEARED
    assert "no two sides" in s.record.reason


def test_a_trial_that_is_always_spoiled_ends() -> None:
    s = Script()
    s.times(2, 4.0, 2.0)
    assert s.judge.trials == 1
    s.times(graph_judge.MOST_DRAWN, 4.0, 2.0, computed=False)
    assert s.record.standing is GraphStanding.CLEARED
    assert not s.judge.stock


def overlapping(
    s: Script, first: dict[str, int], second: dict[str, int], ours: float = 2.0, stock: float = 2.0
) -> list[bool]:
    """Two graphs, the second of which comes when the first is half done."""
    j = s.judge
    j.arrived(first, THREADS)
    sides = [j.stock]
    for _ in range(sum(first.values()) // 2):
        j.finished(True)
    j.arrived(second, THREADS)
    sides.append(j.stock)
    s.now += stock if j.stock else ours
    while j.left:
        j.finished(True)
    j.tick(False, 0.0)
    return sides


def test_overlapping_graphs_are_one_episode() -> None:
    s = Script()
    a, b = {"a": 30}, {"b": 100}
    sides = [overlapping(s, a, b, 4.0, 2.0) for _ in range(20)]
    assert s.record.standing is GraphStanding.RETIRED
    assert s.judge.by_lot == 2
    assert sides[6:] == [[True, True]] * 14, "what follows stays on the side of the first"
    assert not s.judge.unjudged


def test_the_larger_graph_decides_the_side() -> None:
    s = Script()
    s.times(6, 4.0, 2.0)
    assert s.record.standing is GraphStanding.RETIRED
    assert overlapping(s, GRAPH, {"b": 10}) == [True, True], "a smaller one changes nothing"
    assert overlapping(s, GRAPH, {"b": 400}) == [True, False], "a larger one is ours again"
    assert overlapping(s, {"b": 40}, GRAPH) == [False, True], "or stock's, as it was retired"
    assert s.judge.unjudged["its side changed"] == 2


def test_a_graph_that_outgrows_its_lot_is_ours_again() -> None:
    s = Script()
    s.times(2, 4.0, 2.0)
    s.judge._lot = lambda: 0.0  # stock's
    assert overlapping(s, GRAPH, {"b": 1000}) == [True, False]


def test_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_judge, "MAX_HEADS", 3)
    s = Script()
    for i in range(10):
        s.run(2.0, 2.0, {f"make-{i}": 40})
    assert [r.name for r in s.judge.records.values()] == [f"make-{i} (40 tasks)" for i in (7, 8, 9)]


def test_kinds_of_task_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_judge, "MAX_KINDS", 50)
    s = Script()
    for i in range(200):  # as a service does whose work never ends
        s.judge.arrived({f"job-{i}": 1}, THREADS)
    assert len(s.judge._tasks) <= 51
    s.now += 10
    while s.judge.left:
        s.judge.finished(True)
    s.judge.tick(False, 0.0)
    assert s.judge.unjudged == {"too many kinds of task": 1}


def test_switched_off_it_does_nothing() -> None:
    s = Script(enabled=False)
    s.judge.arrived(GRAPH, THREADS)
    assert s.judge.left == 0
    assert not s.judge.observing


# ------------------------------------------------------------------ the verdict


def share_lost(ratio: float, spread: float, trials: int = 400) -> float:
    """How often a placement loses whose graphs take `ratio` times stock's seconds."""
    rnd = random.Random(7)
    lost = 0
    for _ in range(trials):
        sides: tuple[list[Outcome], list[Outcome]] = ([], [])
        decided = None
        while decided is None:
            side = len(sides[0]) > len(sides[1]) if len(sides[0]) != len(sides[1]) else rnd.random() < 0.5
            seconds = (1.0 if side else ratio) * rnd.lognormvariate(0, spread)
            sides[side].append(Outcome(seconds, 0.0, 0.0))
            decided, _ = verdict([sides])
        lost += decided
    return lost / trials


@pytest.mark.parametrize(
    ("ratio", "spread", "least", "most"),
    [(1.3, 0.1, 0.9, 1.0), (1.1, 0.1, 0.4, 1.0), (1.1, 0.02, 0.99, 1.0), (1.0, 0.1, 0.0, 0.25), (0.9, 0.1, 0.0, 0.05)],
)
def test_how_often_it_is_right(ratio: float, spread: float, least: float, most: float) -> None:
    assert least <= share_lost(ratio, spread) <= most


def test_one_slow_run_decides_nothing() -> None:
    ours = [Outcome(s, 0.0, 0.0) for s in (2.0, 2.1, 9.0, 1.9)]
    stock = [Outcome(s, 0.0, 0.0) for s in (2.1, 2.0, 2.05, 2.2)]
    assert verdict([(ours, stock)])[0] is False


# ------------------------------------------------------------------ the alarm


def until(alarm: IdleAlarm, idle: float, task: float | None, seconds: float = 60.0) -> float | None:
    """Seconds until it trips; None: not within `seconds`."""
    begin = 100.0
    for i in range(int(seconds / 0.1)):
        if alarm.tick(begin + i * 0.1, idle, task):
            return i * 0.1
    return None


def test_the_alarm_trips_by_idle_threads() -> None:
    half = until(IdleAlarm(), 0.5, 0.5)
    third = until(IdleAlarm(), 0.33, 0.5)
    assert half is not None
    assert third is not None
    assert 0.5 < half < 1.5 < third < 3.0
    assert until(IdleAlarm(), idle_alarm.ALLOWED, 0.5) is None
    assert until(IdleAlarm(), 0.0, 0.5) is None


def test_the_alarm_is_patient_by_the_length_of_tasks() -> None:
    waits = [until(IdleAlarm(), 0.5, seconds) for seconds in (0.001, 0.1, 0.5, 1.0, 100.0)]
    assert None not in waits
    assert waits == sorted(w for w in waits if w is not None)
    assert waits[-1] == pytest.approx(idle_alarm.MOST_SECONDS * 0.25 / 0.4, abs=0.2)


def test_the_alarm_has_two_stages_and_ends() -> None:
    alarm = IdleAlarm()
    assert until(alarm, 0.5, 0.1) is not None
    assert alarm.stage == 1
    assert until(alarm, 0.5, 0.1) is not None
    assert alarm.stage == 2
    assert until(alarm, 0.5, 0.1) is None
    alarm.reset()
    assert (alarm.stage, alarm.trips) == (0, 2)


def test_moments_of_idleness_and_blocked_loops_are_no_alarm() -> None:
    alarm = IdleAlarm()
    now = 100.0
    for i in range(600):
        now += 0.1
        assert not alarm.tick(now, 0.9 if i % 10 == 0 else 0.0, 0.1)
    assert not alarm.tick(now + 60.0, 0.0, 0.1)
    alarm = IdleAlarm()
    alarm.tick(100.0, 0.3, 0.5)
    assert not alarm.tick(160.0, 0.3, 0.5), "a minute without a tick is not a minute of idleness"


# ------------------------------------------------------------------ what they are fed with


def at_work() -> tuple[Any, list[FakeWorker]]:
    """An engine in the midst of an episode: one of two workers has a task."""
    workers = [FakeWorker(i, memory_limit=1000) for i in range(2)]
    engine = make_engine(workers)
    engine.graph_judge.arrived({"a": 10}, 2)
    assign(engine, FakeTask("a-0"), workers[0])
    return engine, workers


def test_the_alarm_ends_with_the_roots_that_it_was_about() -> None:
    engine, _ = at_work()
    engine.idle_alarm.stage = 2
    assert engine.leaves_roots()
    engine.scheduler.queued = ["a root"]
    engine.samples.look_round()
    assert engine.leaves_roots()
    engine.scheduler.queued = []
    engine.samples.look_round()
    assert not engine.leaves_roots(), "the episode goes on, the roots are done"


def test_idle_threads_are_those_that_could_work() -> None:
    engine, (_, b) = at_work()
    assert engine.samples._idle_share() == 0.5
    b.status = Status.paused
    assert engine.samples._idle_share() == 0.0


def test_the_fullest_worker_is_measured_by_its_mark() -> None:
    engine, (a, b) = at_work()
    b.nbytes = 300
    engine.samples.look_round()
    a.nbytes = 150
    engine.samples.look_round()
    assert engine.graph_judge._fullest == 0.5


def test_bytes_are_counted_once() -> None:
    engine, (a, b) = at_work()
    x = FakeTask("x-0", nbytes=500, on=(a,))
    engine.graph_judge.in_trial = True
    assign(engine, FakeTask("y-0", x), b)
    assign(engine, FakeTask("y-1", x), b)
    assign(engine, FakeTask("y-2", x), a)
    assert engine.graph_judge.moved_bytes == 500
