"""Whose choice of a thief stands: ours, stock's, or nobody's."""

from __future__ import annotations

import logging
import types
from typing import Any
from unittest.mock import Mock

import pytest
from distributed.core import Status

from dask_gpurt.model.circuit_breaker import Guard
from dask_gpurt.placement.decide.steal_policy import MAX_INPUTS, STOCK
from dask_gpurt.placement.takeover import stealing as takeover
from dask_gpurt.placement.takeover.stealing import Stealing


class Extension:
    """As much of distributed's work stealing as is taken over."""

    def __init__(self, tasks: list[Any]) -> None:
        self.in_flight: dict[Any, Any] = {}
        self.in_flight_occupancy: dict[Any, float] = {}
        self.in_flight_tasks: dict[Any, int] = {}
        self.key_stealable: dict[Any, Any] = {}
        self.tasks = tasks
        self.thieves: list[Any] = []
        self.scheduler: Any = None
        self.rounds = 0

    def _get_thief(self, scheduler: Any, ts: Any, potential_thieves: set[Any], *, occupancies: dict[Any, float]) -> Any:
        return "stock's"

    def balance(self) -> None:
        self.rounds += 1
        self.thieves = [self._get_thief(self.scheduler, ts, {"ours", "stock's"}, occupancies={}) for ts in self.tasks]

    def move_task_request(self, ts: Any, victim: Any, thief: Any) -> None:
        raise AssertionError


def task(inputs: int) -> Any:
    return types.SimpleNamespace(dependencies=range(inputs), loose_restrictions=False)


def rig(choose: Any, tasks: list[Any]) -> tuple[Stealing, Extension]:
    extension = Extension(tasks)
    scheduler: Any = types.SimpleNamespace(
        extensions={"stealing": extension},
        valid_workers=lambda ts: None,
        periodic_callbacks={"stealing": object()},
        status=Status.running,
    )
    stealing = Stealing(scheduler, Guard("placement", logging.getLogger("test")))
    assert stealing.install(choose)
    extension.scheduler = scheduler
    return stealing, extension


def test_additional_rounds_leave_tasks_with_very_many_inputs() -> None:
    """In stock's own rounds stock decides about them; ours would have them fetch everything anew, again and again."""
    few, many = task(2), task(MAX_INPUTS + 1)
    stealing, extension = rig(lambda *args: STOCK, [few, many])
    extension.balance()
    assert extension.thieves == ["stock's", "stock's"]
    stealing.balance()
    assert extension.thieves == ["stock's", None]
    extension.balance()
    assert extension.thieves == ["stock's", "stock's"]


def test_an_opinion_goes_first_in_every_round() -> None:
    stealing, extension = rig(lambda ts, *args: "ours" if len(ts.dependencies) else None, [task(1), task(0)])
    for balance in (extension.balance, stealing.balance):
        balance()
        assert extension.thieves == ["ours", None]


@pytest.mark.parametrize(
    ("loose", "named", "asked"), [(True, {"busy"}, None), (True, {"ours"}, {"ours"}), (False, {"busy"}, {"busy"})]
)
def test_a_wish_for_workers_binds_while_one_of_them_has_time(loose: bool, named: set[str], asked: set[str]) -> None:
    """Tasks with ``allow_other_workers`` may be stolen by any other once none of those asked for is a thief."""
    seen: list[Any] = []

    def choose(ts: Any, thieves: Any, in_flight: Any, valid: Any) -> Any:
        seen.append(valid)

    ts = task(0)
    ts.loose_restrictions = loose
    stealing, extension = rig(choose, [ts])
    stealing.scheduler.valid_workers = lambda ts: named  # type: ignore[method-assign, assignment, return-value]
    extension.balance()
    assert seen == [asked]


def test_additional_rounds_that_look_at_very_many_tasks_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a hundred thousand that may run on one worker only; stock's own rounds are made as before."""
    monkeypatch.setattr(takeover, "LOOKED", 10, raising=False)
    few = [task(1)] * 9
    stealing, extension = rig(lambda *args: None, few)
    for _ in range(10):
        stealing.balance()
    assert extension.rounds == 10
    extension.tasks = few * 10
    for _ in range(30):
        stealing.balance()
    assert extension.rounds == 13
    extension.balance()
    assert extension.rounds == 14


def test_no_additional_rounds_once_stealing_was_stopped() -> None:
    """`WorkStealing.stop` takes its callback away, and waits until no task is being moved."""
    stealing, extension = rig(lambda *args: None, [task(1)])
    callback = stealing.scheduler.periodic_callbacks.pop("stealing")
    stealing.balance()
    assert extension.rounds == 0
    stealing.scheduler.periodic_callbacks["stealing"] = callback
    stealing.balance()
    assert extension.rounds == 1


def test_no_task_is_asked_back_once_stealing_was_stopped() -> None:
    stealing, extension = rig(lambda *args: None, [])
    moved: list[Any] = []
    extension.move_task_request = lambda ts, victim, thief: moved.append(ts)  # type: ignore[method-assign]
    ts: Any = Mock(processing_on="slow")
    extension.key_stealable = {ts: None}
    callback = stealing.scheduler.periodic_callbacks.pop("stealing")
    fast: Any = "fast"
    assert not stealing.request(ts, fast)
    assert not moved
    stealing.scheduler.periodic_callbacks["stealing"] = callback
    assert stealing.request(ts, fast)
    assert moved == [ts]


def test_an_additional_round_that_raises_is_over() -> None:
    stealing, extension = rig(lambda *args: STOCK, [task(MAX_INPUTS + 1)])
    extension.tasks = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        stealing.balance()
    extension.tasks = [task(MAX_INPUTS + 1)]
    extension.balance()
    assert extension.thieves == ["stock's"]


def test_workers_that_have_left_are_forgotten_unless_tasks_are_being_moved() -> None:
    """Dask's extension adds an entry for each worker that it looks at, which keeps the states of all that ever came."""
    stealing, extension = rig(lambda *args: None, [])
    extension.in_flight_occupancy, extension.in_flight_tasks = {"gone": 0.0}, {"gone": 1}
    extension.in_flight = {"task": "to gone"}
    stealing.worker_removed()
    assert extension.in_flight_tasks == {"gone": 1}
    extension.in_flight = {}
    stealing.worker_removed()
    assert not extension.in_flight_occupancy
    assert not extension.in_flight_tasks
    stealing.uninstall()
    stealing.worker_removed()
