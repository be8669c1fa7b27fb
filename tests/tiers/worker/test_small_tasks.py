"""A task that reads and returns little runs at once while memory is relaxed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from distributed.worker_state_machine import ExecuteSuccessEvent

from dask_gpurt.tiers.worker.small_tasks import SmallTasks
from dask_gpurt.tiers.worker.task_admission import Turns

MB = 1 << 20


class Case:
    """A worker of one thread and 640 MB with one task, which reads one value; ten MB are little."""

    def __init__(self, nbytes: int) -> None:
        self.entry = SimpleNamespace(nbytes=nbytes, in_memory=True, handle=None)
        self.pinned: list[Any] = []
        self.eviction = SimpleNamespace(pressed=False)
        task = SimpleNamespace(prefix="a", dependencies=[SimpleNamespace(key="input")])
        worker: Any = SimpleNamespace(state=SimpleNamespace(tasks={"a-1": task}))
        books = SimpleNamespace(shares=lambda entry: False)
        engine: Any = SimpleNamespace(eviction=self.eviction, pin=self.pinned.append, books=books)
        store: Any = SimpleNamespace(entry=lambda key: self.entry, host_bytes=lambda value, nbytes: nbytes)
        nothing: Any = None
        self.turns = Turns(
            nothing,
            limit_bytes=lambda: 640 * MB,
            process_bytes=lambda: 0,
            seceded=lambda key: False,
            threads=lambda: 1,
        )
        self.small = SmallTasks(worker, engine, store, self.turns, nothing)

    def returned(self, nbytes: int) -> None:
        fields: dict[str, Any] = {"run_id": 1, "value": 1, "start": 0, "stop": 1, "type": int, "stimulus_id": "s"}
        self.small.ended(ExecuteSuccessEvent(key="a-0", nbytes=nbytes, **fields))


def test_a_part_of_the_limit_is_little() -> None:
    case = Case(9 * MB)
    assert case.small.hold("a-1") == [case.entry]
    assert case.pinned == [case.entry]


def test_more_than_that_has_to_wait() -> None:
    case = Case(10 * MB)
    assert case.small.hold("a-1") is None
    assert not case.pinned


def test_half_of_it_is_a_little_result() -> None:
    case = Case(1)
    case.returned(4 * MB)
    assert case.turns.outputs.expected("a-1") == 4 * MB
    assert case.small.hold("a-1") is not None
    case.returned(5 * MB)
    assert case.small.hold("a-1") is None


def test_nothing_is_little_where_memory_is_short() -> None:
    case = Case(1)
    case.eviction.pressed = True
    assert case.small.hold("a-1") is None


def test_a_task_that_is_forgotten_has_nothing_to_hold() -> None:
    assert Case(1).small.hold("b-1") is None
