"""How far shuffles are, from the states of their tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.observe.figures.shuffle_progress import ENDED_SECONDS, RUNS, Progress, Shuffles


class _Scheduler:
    """One shuffle after another, whose tasks change state on demand."""

    def __init__(self) -> None:
        self.tasks: dict[str, Any] = {}
        self.shuffle = SimpleNamespace(active_shuffles={}, heartbeats={})
        self.plugins = {"shuffle": self.shuffle}

    def start(self, name: str, run_id: int = 1, inputs: int = 4, outputs: int = 3) -> Any:
        waiting = [[SimpleNamespace(state="waiting") for _ in range(n)] for n in (inputs, outputs)]
        barrier = SimpleNamespace(state="waiting", dependencies=waiting[0], dependents=waiting[1])
        self.tasks[f"shuffle-barrier-{name}"] = barrier
        self.shuffle.active_shuffles[name] = SimpleNamespace(run_id=run_id, participating_workers={"a", "b"})
        self.shuffle.heartbeats[name] = {"a": {"comm": {"read": 5}}, "b": {"comm": {"read": 6}}}
        return barrier


def _only(runs: Shuffles) -> Progress:
    (run,) = runs
    return run


def test_from_the_first_input_to_the_last_output() -> None:
    scheduler, runs = _Scheduler(), Shuffles()
    runs.look(scheduler)
    assert len(runs) == 0
    barrier = scheduler.start("s")
    barrier.dependencies[0].state = "memory"
    barrier.dependencies[1].state = "processing"
    runs.look(scheduler)
    run = _only(runs)
    assert (run.inputs_done, run.inputs, run.outputs_done, run.outputs) == (1, 4, 0, 3)
    assert (run.bytes, run.workers, run.active) == (11, 2, True)
    barrier.state = "memory"
    for ts in barrier.dependencies:
        ts.state = "released"  # nobody needs them behind the barrier
    barrier.dependents[0].state = "memory"
    barrier.dependents.pop()  # assembled, used and forgotten
    runs.look(scheduler)
    assert (run.inputs_done, run.inputs, run.outputs_done, run.outputs) == (4, 4, 2, 3)
    scheduler.shuffle.active_shuffles.clear()
    runs.look(scheduler)
    assert (run.inputs_done, run.outputs_done, run.outputs, run.active) == (4, 3, 3, False)


def test_a_run_that_was_started_over_has_not_done_all() -> None:
    scheduler, runs = _Scheduler(), Shuffles()
    scheduler.start("s").dependencies[0].state = "memory"
    runs.look(scheduler)
    scheduler.start("s", run_id=2)
    runs.look(scheduler)
    first, second = runs
    assert (first.inputs_done, first.active, second.active) == (1, False, True)


def test_the_newest_are_kept_and_the_active_ones_longest() -> None:
    scheduler, runs = _Scheduler(), Shuffles()
    scheduler.start("long")
    for i in range(RUNS + 5):
        scheduler.start(f"s{i}")
        runs.look(scheduler)
        del scheduler.shuffle.active_shuffles[f"s{i}"]
        runs.look(scheduler)
        assert len(runs) <= RUNS
    names = [run.id for run in runs]
    assert names == ["long", *(f"s{i}" for i in range(6, RUNS + 5))]


@pytest.mark.parametrize("plugins", [{}, {"shuffle": None}, {"shuffle": SimpleNamespace()}])
def test_without_shuffles(plugins: Any) -> None:
    runs = Shuffles()
    runs.look(SimpleNamespace(plugins=plugins))
    runs.look(SimpleNamespace())
    assert list(runs) == []


def test_a_run_that_ended_leaves_after_a_while() -> None:
    clock = [100.0]
    scheduler, runs = _Scheduler(), Shuffles(lambda: clock[0])
    scheduler.start("s")
    scheduler.start("other")
    runs.look(scheduler)
    del scheduler.shuffle.active_shuffles["s"]
    for second, left in ((0.0, 2), (ENDED_SECONDS - 1, 2), (ENDED_SECONDS + 1, 1)):
        clock[0] = 100.0 + second
        runs.look(scheduler)
        assert len(runs) == left
    assert _only(runs).id == "other", "one that runs stays"
