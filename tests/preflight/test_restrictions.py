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


class Task:
    def __init__(self, key: str) -> None:
        self.key = key
        self.worker_restrictions: set[str] | None = None
        self.host_restrictions = None


def test_many_tasks_that_ask_for_the_same_are_one_question() -> None:
    """100,000 tasks and 500 workers would stop the scheduler for minutes, and each task would have a set of its own."""
    tasks = {f"t{i}": Task(f"t{i}") for i in range(200)}
    tasks["t0"].worker_restrictions = {"tcp://h1:1"}
    scheduler: Any = SimpleNamespace(tasks=tasks, workers={}, unrunnable=set(), coerce_hostname=str)
    restrictions = ClassRestrictions()
    restrictions.start(scheduler)
    nodes: Any = {f"tcp://h{i}:1": CountedNode() for i in range(50)}
    assert restrictions.ask({key: {"node_class": "a*"} for key in tasks}, nodes) == []
    before = tasks["t1"].worker_restrictions
    restrictions.joined("tcp://new:1", nodes["tcp://h0:1"])
    restrictions.left("tcp://h2:1")
    assert tasks["t1"].worker_restrictions is before, "a worker that comes or goes is no pass over all tasks"
    assert CountedNode.compared <= 2 * (len(nodes) + 1)
    assert tasks["t0"].worker_restrictions == {"tcp://h1:1"}, "the user has named one"
    assert tasks["t1"].worker_restrictions == {*nodes, "tcp://new:1"} - {"tcp://h2:1"}
    assert tasks["t1"].worker_restrictions is tasks["t199"].worker_restrictions
    restrictions.left("tcp://h1:1")
    assert tasks["t0"].worker_restrictions == {NOWHERE}
    scheduler.unrunnable.add(tasks["t0"])
    assert restrictions.waiting({}) == {"a*": 1}


def test_what_a_shuffle_has_bound_stays_where_it_is() -> None:
    """An output has its rows on one worker. A worker that comes, or the graph once more, must not open it to others."""
    tasks = {key: Task(key) for key in ("bound", "free")}
    scheduler: Any = SimpleNamespace(
        tasks=tasks, workers={}, unrunnable=set(), coerce_hostname=str, running=set(), transitions=None
    )
    restrictions = ClassRestrictions()
    restrictions.start(scheduler)
    nodes: Any = {f"tcp://h{i}:1": CountedNode() for i in range(3)}
    asked = {key: {"node_class": "a*"} for key in tasks}
    restrictions.ask(asked, nodes)
    tasks["bound"].worker_restrictions = {"tcp://h1:1"}  # as `Scheduler.set_restrictions` does
    restrictions.joined("tcp://new:1", nodes["tcp://h0:1"])
    restrictions.ask(asked, nodes)
    restrictions.left("tcp://h0:1")
    assert tasks["bound"].worker_restrictions == {"tcp://h1:1"}
    assert tasks["free"].worker_restrictions == {"tcp://h1:1", "tcp://h2:1", "tcp://new:1"}
    restrictions.stop()
    assert tasks["bound"].worker_restrictions == {"tcp://h1:1"}
    assert tasks["free"].worker_restrictions is None


def test_groups_are_dropped_with_their_tasks() -> None:
    tasks = {f"t{i}": Task(f"t{i}") for i in range(4)}
    scheduler: Any = SimpleNamespace(tasks=tasks, workers={}, unrunnable=set(), coerce_hostname=str)
    restrictions = ClassRestrictions()
    restrictions.start(scheduler)
    restrictions.ask({key: {"node_class": f"a{key}"} for key in tasks}, {})
    tasks["t0"] = Task("t0")  # another one of the same key
    restrictions.ask({"t0": {"node_class": "b*"}}, {})
    assert len(restrictions._groups) == 4
    tasks.clear()
    assert not restrictions._asked
    assert not restrictions._groups


def test_what_waits_is_counted_where_no_node_fits() -> None:
    tasks = {key: Task(key) for key in ("one", "two", "fits", "plain")}
    scheduler: Any = SimpleNamespace(tasks=tasks, workers={}, unrunnable=dict.fromkeys(tasks.values()))
    scheduler.coerce_hostname = str
    restrictions = ClassRestrictions()
    restrictions.start(scheduler)
    nodes: Any = {"tcp://h1:1": CountedNode()}
    asked = {"one": ["b*"], "two": ["b*", "c*"], "fits": ["a*"]}
    restrictions.ask({key: {"node_class": patterns} for key, patterns in asked.items()}, nodes)
    assert restrictions.waiting(nodes) == {"b*": 2, "c*": 1}
    CountedNode.compared = 0
    tasks.clear()
    scheduler.unrunnable.clear()
    assert restrictions.waiting(nodes) == {}
    assert CountedNode.compared == 0, "none asks any more"
