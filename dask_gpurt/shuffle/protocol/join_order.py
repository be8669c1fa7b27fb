"""Which side of a join runs first: priorities of the tasks before its two barriers. Pure.

Theory of operation. Neither side's outputs can be joined before both barriers have passed, so the order of the sides
moves no result. But only the side that is complete first can filter the other (`join_plan`). `reordered` gives groups
of tasks the priorities of all of them, the first group the lowest; within a group the order stays. What is complete
first is then the smaller side, so no more rows wait in memory than in the other order.

Which side that is, bytes say where all inputs are in memory. Else the number of inputs says a little: of a side that
is filtered while it is read, nothing. So one input of each side runs before all others where that needs no more than a
few dozen tasks (`first_input`), and the order is changed again when both were split.

Only tasks that serve one side alone change places: what both sides read, and what other tasks need, keeps its priority.
A priority decides among tasks that are ready. So where the small side waits for something, the large one runs, as
before; nothing waits for a filter.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

#: how many times the inputs, bytes or rows of one side the other must have. Less is no reason to change an order.
CLEARLY = 1.5
#: tasks behind one input that runs before all others, at most: a file is read, columns are made, rows are dropped.
#: Dask does not fuse them: a condition of five comparisons is a dozen
FIRST_TASKS = 64
#: inputs that are looked at for that
FIRST_INPUTS = 32
#: results up to this size may wait in memory
LIGHT_BYTES = 64 << 10
#: states of tasks that were not sent to a worker
UNSENT = frozenset(("released", "waiting", "queued", "no-worker"))
_NEW = frozenset(("released",))


class Node(Protocol):
    """A task as Dask's scheduler keeps it."""

    key: Any
    priority: Any
    state: str
    nbytes: int

    @property
    def dependencies(self) -> Iterable[Any]:
        """Tasks that it needs."""

    @property
    def dependents(self) -> Iterable[Any]:
        """Tasks that need it."""


def alone_before(barrier: Node, limit: int, states: Collection[str] = _NEW) -> list[Node] | None:
    """A barrier and the tasks that only it needs, in no order; None: more than `limit`.

    The barrier is among them: behind the other side's inputs it would be late, and the filter with it.

    Parameters
    ----------
    states
        Tasks in other states, and what needs such a one, have their place already: they are under way, or were asked
        for by an earlier graph.
    """
    mine: set[Any] = {barrier}
    stack = list(barrier.dependencies)
    while stack:
        ts = stack.pop()
        if ts in mine or ts.state not in states or not all(dependent in mine for dependent in ts.dependents):
            continue
        if states is not _NEW and any(_begun(d) for d in ts.dependencies):
            continue
        if len(mine) >= limit:
            return None
        mine.add(ts)
        stack.extend(ts.dependencies)
    return list(mine)


def _begun(ts: Node) -> bool:
    """Whether what needs a task's result should not wait: the result is being made, or takes memory."""
    return ts.state == "processing" or (ts.state == "memory" and ts.nbytes > LIGHT_BYTES)


def first_input(barrier: Node) -> list[Node] | None:
    """The tasks of an input that may come first; None: all need many tasks, or work that other inputs need."""
    inputs = sorted((ts for ts in barrier.dependencies if ts.state in _NEW), key=lambda ts: ts.priority)
    if len(inputs) < 2:  # there is nothing to be put behind it
        return None
    found = None
    for first in inputs[:FIRST_INPUTS]:
        if (tasks := alone_before(first, FIRST_TASKS)) is None:
            continue
        others = [d for ts in tasks for d in ts.dependencies if d not in tasks and d.state != "memory"]
        if not others:
            return tasks
        # Values of a condition (`isin`) are a source that all inputs share.
        if found is None and not any(d.dependencies for d in others):
            found = tasks
    return found


def known_bytes(barrier: Node) -> int | None:
    """Bytes of a side whose inputs are all in memory; None: some are not."""
    inputs = [d for ts in barrier.dependencies for d in ts.dependencies]
    if not inputs or not all(d.state == "memory" for d in inputs):
        return None
    return sum(d.nbytes for d in inputs)


def reordered(*groups: Iterable[Node]) -> list[tuple[Node, Any]]:
    """(task, new priority) of those that change; [] if the order is this one already, or they cannot be compared."""
    ordered = [sorted(group, key=lambda ts: ts.priority) for group in groups]
    if not all(ordered) or all(one[-1].priority < two[0].priority for one, two in pairwise(ordered)):
        return []
    tasks = [ts for group in ordered for ts in group]
    # Of one graph, and of one priority of the user's.
    if len({ts.priority[:2] for ts in tasks}) != 1:
        return []
    priorities = sorted(ts.priority for ts in tasks)
    return [(ts, new) for ts, new in zip(tasks, priorities, strict=True) if ts.priority != new]
