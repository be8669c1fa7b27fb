"""Phases of runs, and who is woken when they change."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.shuffle.protocol.recovery import State, Validity
from dask_gpurt.shuffle.scheduler import runs as runs_module
from dask_gpurt.shuffle.scheduler.phases import TRANSITIONS, InvalidTransition, Phase, RunEvent
from dask_gpurt.shuffle.scheduler.runs import RunRecord, Runs
from tests.shuffle.invariants import check_record, check_runs


def run(run_id: int = 1, name: str = "x") -> Any:
    spec = SimpleNamespace(state=State())
    return SimpleNamespace(
        id=name,
        run_id=run_id,
        run_spec=SimpleNamespace(spec=spec, worker_for={}),
        participating_workers=set(),
        _failed=False,
    )


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", RunEvent)
def test_events_move_a_run_by_the_table(phase, event):
    record = RunRecord(run(), phase=phase)
    wanted = TRANSITIONS[phase].get(event)
    if wanted is None:
        with pytest.raises(InvalidTransition, match=f"{event.name} happened to .*, which is {phase.name}; must be one"):
            record.happened(event)
        assert (record.phase, record.version) == (phase, 0)
    else:
        record.happened(event)
        assert (record.phase, record.version) == (wanted, 1)


def test_every_phase_can_end_and_then_nothing_happens():
    assert all(events.get(RunEvent.DROPPED) is Phase.ENDED for p, events in TRANSITIONS.items() if p is not Phase.ENDED)
    assert not TRANSITIONS[Phase.ENDED]
    assert {phase for phase in Phase if RunRecord(run(), phase=phase).passed} == {Phase.PASSED, Phase.OPENED}


@pytest.mark.parametrize(
    ("phase", "state"),
    [
        (Phase.RECEIVING, State(opened=frozenset())),
        (Phase.PASSED, State(opened=frozenset({1}))),
        (Phase.OPENED, State()),
        (Phase.OPENED, State(opened=frozenset())),
        (Phase.OPENED, State(epoch=1, opened=frozenset({1}), handing={1: "a"}, bound={1: 1})),
        (Phase.RECEIVING, State(epoch=1, handing={1: "a"})),
        (Phase.RECEIVING, State(epoch=1, bound={1: 2})),
        (Phase.RECEIVING, State(epoch=1, validity=Validity(2, {}))),
    ],
)
def test_validate_finds_what_does_not_agree(phase, state):
    record = RunRecord(run(), phase=phase)
    record.run.run_spec.spec.state = state
    with pytest.raises(AssertionError):
        check_record(record)


def test_a_change_between_a_look_and_the_wait_is_not_missed(monkeypatch):
    monkeypatch.setattr(runs_module, "RECHECK_SECONDS", 3600.0)

    async def check():
        record = RunRecord(run())
        since = record.version
        record.changed()
        await asyncio.wait_for(record.change(since), 60)
        waiting = [asyncio.create_task(record.change(record.version)) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        record.happened(RunEvent.BARRIER_PASSED)
        await asyncio.wait_for(asyncio.gather(*waiting), 60)

    asyncio.run(check())


def test_a_change_without_an_event_is_found_later(monkeypatch):
    monkeypatch.setattr(runs_module, "RECHECK_SECONDS", 0.0)

    async def check():
        record = RunRecord(run())
        await asyncio.wait_for(record.change(record.version), 60)

    asyncio.run(check())


def registry(monkeypatch, *states: Any) -> tuple[Runs, dict[str, Any]]:
    """Runs of shuffles that share their only output."""
    monkeypatch.setattr(runs_module, "GpurtShuffleSpec", SimpleNamespace)
    barriers = [SimpleNamespace(key=f"shuffle-barrier-{state.id}", dependents=[]) for state in states]
    output = SimpleNamespace(dependencies=barriers)
    for barrier in barriers:
        barrier.dependents = [output]
    active = {state.id: state for state in states}
    scheduler: Any = SimpleNamespace(tasks={barrier.key: barrier for barrier in barriers})
    return Runs(scheduler, SimpleNamespace(active_shuffles=active)), active


def test_the_sides_of_a_join_wake_each_other(monkeypatch):
    runs, _ = registry(monkeypatch, run(1, "left"), run(2, "right"))
    left, right = runs.all()
    assert runs.partners("left") == ["right"]
    runs.changed(left)
    assert (left.version, right.version) == (1, 1)
    right.changed()
    assert (left.version, right.version) == (1, 2)


def test_an_output_of_a_join_has_an_owner_once_both_sides_have_passed_and_agree(monkeypatch):
    runs, active = registry(monkeypatch, run(1, "left"), run(2, "right"))
    left, right = runs.all()
    (output,) = runs.barrier_of("left").dependents
    left.worker_for[3] = right.worker_for[3] = "a"
    seen = [runs.owner(output, 3)]
    for record in (left, right):
        record.happened(RunEvent.BARRIER_PASSED)
        seen.append(runs.owner(output, 3))
    assert seen == [None, None, "a"]
    assert runs.owner(output, 4) is None
    right.worker_for[3] = "b"
    assert runs.owner(output, 3) is None
    right.worker_for[3] = "a"
    del active["right"]  # over, or Dask's own
    assert runs.owner(output, 3) is None


def test_a_run_that_dask_dropped_has_ended(monkeypatch):
    runs, active = registry(monkeypatch, run(1, "left"))
    (record,) = runs.all()
    assert runs.get("left") is record is runs.of_run("left", 1)
    assert runs.of_run("left", 2) is None
    check_runs(runs)
    active["left"] = run(2, "left")
    assert not runs.current(record)
    with pytest.raises(AssertionError):
        check_runs(runs)
    assert runs.get("left") is not record
    assert record.phase is Phase.ENDED
    check_runs(runs)
    assert runs.get("right") is None


def test_a_task_that_ends_is_told_once_to_each_who_listens(monkeypatch):
    monkeypatch.setattr(runs_module, "LISTENED", 2)
    runs, _ = registry(monkeypatch)
    heard: list[Any] = []
    for _ in range(3):
        runs.listen("a", heard.append)
    runs.listen("a", heard.extend)
    runs.ended("b", [])
    runs.ended("a", [{"stop": 1}])
    runs.ended("a", [{"stop": 2}])
    assert heard == [[{"stop": 1}], {"stop": 1}]
    for key in "abc":
        runs.listen(key, heard.append)
    assert list(runs._listeners) == ["b", "c"]
