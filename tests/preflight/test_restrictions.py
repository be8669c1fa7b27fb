"""Classes of nodes that tasks ask for, with a scheduler of plain objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dask_gpurt.preflight.restrictions import NOWHERE, ClassRestrictions


class CountedNode:
    """A class of nodes that counts how often it is compared with a pattern."""

    compared = 0

    def matches(self, pattern: str) -> bool:
        CountedNode.compared += 1
        return pattern == "a*"


def test_many_tasks_that_ask_for_the_same_are_one_question() -> None:
    """100,000 tasks and 500 workers would stop the scheduler for minutes, and each task would have a set of its own."""

    class Task:
        def __init__(self, key: str) -> None:
            self.key = key
            self.worker_restrictions: set[str] | None = None
            self.host_restrictions = None

    tasks = {f"t{i}": Task(f"t{i}") for i in range(200)}
    tasks["t0"].worker_restrictions = {"tcp://h1:1"}
    scheduler: Any = SimpleNamespace(tasks=tasks, workers={}, unrunnable=set(), coerce_hostname=str)
    restrictions = ClassRestrictions()
    restrictions.start(scheduler)
    nodes: Any = {f"tcp://h{i}:1": CountedNode() for i in range(50)}
    assert restrictions.ask({key: {"node_class": "a*"} for key in tasks}, nodes) == []
    restrictions.joined("tcp://new:1", nodes["tcp://h0:1"])
    restrictions.left("tcp://h2:1")
    assert CountedNode.compared <= 2 * (len(nodes) + 1)
    assert tasks["t0"].worker_restrictions == {"tcp://h1:1"}, "the user has named one"
    assert tasks["t1"].worker_restrictions == {*nodes, "tcp://new:1"} - {"tcp://h2:1"}
    assert tasks["t1"].worker_restrictions is tasks["t199"].worker_restrictions
    restrictions.left("tcp://h1:1")
    assert tasks["t0"].worker_restrictions == {NOWHERE}
    scheduler.unrunnable.add(tasks["t0"])
    assert restrictions.waiting({}) == {"a*": 1}
