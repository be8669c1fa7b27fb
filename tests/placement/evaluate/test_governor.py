"""The governor on scripted observations, and the budget per decision and second."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.placement import engine as engine_module
from dask_gpurt.placement.engine import OBSERVED
from dask_gpurt.placement.evaluate import governor
from dask_gpurt.placement.evaluate.governor import Governor, Standing, compare
from dask_gpurt.placement.tables import overhead_budget
from dask_gpurt.placement.tables.overhead_budget import Budget
from tests.placement.fakes import FakeTask, FakeWorker, learn, make_engine

if TYPE_CHECKING:
    from collections.abc import Callable


class Script:
    """Runs decisions one after the other on a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.governor = Governor(lambda: self.now)
        self.rnd = random.Random(1)
        self.retired: list[str] = []
        self.n = 0

    def run(
        self,
        count: int,
        ours: Callable[[], float],
        stock: Callable[[], float],
        predicted: float = 0.1,
        predicted_stock: float = 0.1,
        price: float = 0.0,
    ) -> None:
        """`count` decisions; `ours` and `stock` draw the seconds their tasks take."""
        for _ in range(count):
            self.n += 1
            mine = self.governor.ours()
            standing = self.governor.standing
            if standing is Standing.RETIRED:
                self.now += 0.01
                continue
            prefix = f"p{self.n % 3}"
            self.governor.decided(self.n, prefix, mine, predicted, predicted_stock, 10.0, price if mine else 0.0)
            self.now += ours() if mine else stock()
            reason = self.governor.finished(self.n, True)
            if reason is not None:
                self.retired.append(reason)

    def draw(self, middle: float) -> Callable[[], float]:
        return lambda: middle * self.rnd.uniform(0.7, 1.3)


def test_a_good_policy_is_left_alone() -> None:
    s = Script()
    s.run(1000, s.draw(0.1), s.draw(0.1))
    assert s.governor.standing is Standing.TRUSTED
    told = s.governor.statistics()
    assert (told["trials"], told["retirements"], told["left_by_lot"]) == (0, 0, 0)
    assert told["prefixes"]["p0"]["median_ratio"] == pytest.approx(1, rel=0.2)
    assert told["prefixes"]["p0"]["median_moved_bytes"] == 10
    assert told["open"] == 0


def test_a_policy_that_loses_is_retired_and_comes_back() -> None:
    s = Script()
    s.run(400, s.draw(1.0), s.draw(0.1))
    assert len(s.retired) == 1
    assert "as long as predicted" in s.retired[0]
    assert s.governor.standing is Standing.RETIRED
    left = s.governor.left
    s.run(10, s.draw(1.0), s.draw(0.1))
    assert s.governor.left == left + 10
    # After the back-off it is tried again, loses again, and rests twice as long.
    s.now += governor.REST_SECONDS
    s.run(governor.TRIAL, s.draw(1.0), s.draw(0.1))
    assert len(s.retired) == 2
    assert f"{2 * governor.REST_SECONDS:g} s" in s.retired[1]
    # Now it is as good as stock.
    s.now += 2 * governor.REST_SECONDS
    s.run(governor.TRIAL, s.draw(0.1), s.draw(0.1))
    assert s.governor.standing is Standing.TRUSTED
    assert s.governor.retirements == 2


def test_knowingly_worse_than_stock_is_suspicious() -> None:
    s = Script()
    s.run(400, s.draw(0.5), s.draw(0.1), predicted=0.5, predicted_stock=0.1)
    assert len(s.retired) == 1
    assert "stock would have chosen" in s.retired[0]


def test_wrong_predictions_alone_are_no_reason() -> None:
    # The model is wrong by ten, for both in the same way: tried, acquitted, and not tried again at once.
    s = Script()
    s.run(600, s.draw(1.0), s.draw(1.0))
    assert not s.retired
    assert 1 <= s.governor.trials <= 5
    lots = s.governor.lots
    assert 0.3 * governor.TRIAL * (s.governor.trials - 1) < lots < 0.7 * governor.TRIAL * s.governor.trials


def test_bytes_count() -> None:
    # As fast as stock for the task itself, but it moves bytes that are worth more than the task.
    s = Script()
    s.run(600, s.draw(1.0), s.draw(1.0), price=2.0)
    assert len(s.retired) == 1


def test_milliseconds_are_noise() -> None:
    s = Script()
    s.run(500, s.draw(0.01), s.draw(0.001), predicted=0.001, predicted_stock=0.001)
    assert s.governor.trials == 0


def test_what_was_not_computed_says_nothing() -> None:
    s = Script()
    s.governor.decided("a", "p", True, 0.1, 0.1, 0, 0)
    assert s.governor.finished("a", False) is None
    assert s.governor.finished("never decided", True) is None
    assert not s.governor.prefixes


def test_open_decisions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "MAX_OPEN", 3)
    s = Script()
    for i in range(10):
        s.governor.decided(i, "p", True, 0.1, 0.1, 0, 0)
    assert s.governor.statistics()["open"] == 3
    s.governor.forget()
    assert s.governor.statistics()["open"] == 0


def test_a_task_that_is_never_sent_does_not_stay_open() -> None:
    """Dask decides on a worker for a task, and fails it at once where its inputs do not fit into that worker."""
    a = FakeWorker(0)
    engine = make_engine([a])
    engine.governor.decided("f-0", "f", True, 1.0, 1.0, 0.0, 0.0)
    engine.books.left("f-0", "erred", {"worker": a.address})
    assert not engine.governor.open


def test_what_waits_for_event_loops_is_not_judged() -> None:
    """It would see tasks that take a hundred times as long as predicted, under placement and stock alike."""
    a, b = workers = [FakeWorker(i) for i in range(2)]
    engine = make_engine(workers)
    learn(engine, "f", 1.0, 1000)
    for i, brief in enumerate((False, True)):
        engine.durations.prefix("f").brief = brief
        for k in range(4 * OBSERVED):
            inputs = [FakeTask(f"x-{i}-{k}-{w}", nbytes=10**6, on=(w,)) for w in (a, b)]
            engine.decide(FakeTask(f"f-{i}-{k}", *inputs), None)
    assert {key.split("-")[1] for key in engine.governor.open} == {"0"}


def test_equally_good_policies_are_seldom_retired() -> None:
    rnd = random.Random(5)
    wrong = 0
    for _ in range(300):
        results = {p: ([], []) for p in "abc"}  # type: ignore[var-annotated]
        for i in range(governor.TRIAL):
            results["abc"[i % 3]][rnd.random() < 0.5].append(rnd.lognormvariate(0, 1))
        z, ratio = compare(results)
        wrong += z > governor.Z and ratio > governor.RATIO
    assert wrong <= 9


def test_compare() -> None:
    z, ratio = compare({"p": ([2.0] * 20, [1.0] * 20)})
    assert z > 3
    assert ratio == 2
    z, ratio = compare({"p": ([1.0] * 20, [2.0] * 20), "only ours": ([9.0], [])})
    assert z < -3
    assert ratio == 0.5
    z, ratio = compare({"p": ([1.0], []), "q": ([], [1.0])})
    assert z == 0
    assert ratio != ratio
    z, _ = compare({"p": ([1.0] * 5, [1.0] * 5)})
    assert z == 0


def test_the_share_of_a_second() -> None:
    now = [10.0]
    b = Budget(clock=lambda: now[0])
    for _ in range(600):  # four fifths of each second
        now[0] += 0.0025
        b.record(0.002)
        if b.exhausted:
            break
    else:
        raise AssertionError("never over budget")
    assert b.statistics()["full_seconds"] == 1
    now[0] += 1.0
    assert not b.exhausted
    for _ in range(400):
        now[0] += 0.1
        b.record(0.002)
        assert not b.exhausted


def test_a_decision_given_up_counts_its_time() -> None:
    b = Budget()
    b.gave_up(2 * overhead_budget.DECISION_SECONDS)
    assert b.statistics()["given_up"] == 1
    assert b.count == 0
    assert b.total_seconds == 2 * overhead_budget.DECISION_SECONDS


@pytest.mark.parametrize("answer", [None, ValueError("no answer")])
def test_a_policy_that_takes_long_to_leave_it_to_dask_is_over_budget(
    monkeypatch: pytest.MonkeyPatch, answer: Exception | None
) -> None:
    now = [10**9]

    class Slow:
        def decide(self, task: Any, workers: Any, far: Any) -> None:
            now[0] += 5_000_000
            if answer is not None:
                raise answer

    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter_ns=lambda: now[0], monotonic=lambda: 0.0))
    a = FakeWorker(0)
    engine = make_engine([a, FakeWorker(1)])
    engine.policy = Slow()
    engine.budget = Budget(clock=lambda: now[0] * 1e-9)
    ts = FakeTask("f", FakeTask("x", nbytes=10, on=(a,)))
    for _ in range(1000):
        with contextlib.suppress(ValueError):
            engine.decide(ts, None)
    assert engine.declined["over budget"] >= 700
    assert engine.budget.count == 0
