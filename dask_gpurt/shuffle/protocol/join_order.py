"""Which side of a join runs first: priorities of the tasks before its two barriers. Pure.

Theory of operation. Neither side's outputs can be joined before both barriers have passed, so the order of the sides
moves no result. But only the side that is complete first can filter the other (`join_plan`). `reordered` gives the side
with clearly fewer inputs the lower priorities of both sides together, and the other side the rest; within a side the
order stays. What is complete first is then the smaller side, so no more rows wait in memory than in the other order.

Only tasks that serve one side alone change places: what both sides read, and what other tasks need, keeps its priority.
A priority decides among tasks that are ready. So where the small side waits for something, the large one runs, as
before; nothing waits for a filter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

#: how many times the inputs of one side the other must have. Less says little of the rows.
CLEARLY = 1.5


class Node(Protocol):
    """A task as Dask's scheduler keeps it."""

    priority: Any
    state: str

    @property
    def dependencies(self) -> Iterable[Any]:
        """Tasks that it needs."""

    @property
    def dependents(self) -> Iterable[Any]:
        """Tasks that need it."""


def alone_before(barrier: Node, limit: int) -> list[Node] | None:
    """A barrier and the tasks that only it needs, in no order; None: more than `limit`.

    The barrier is among them: behind the other side's inputs it would be late, and the filter with it.
    """
    mine: set[Any] = {barrier}
    stack = list(barrier.dependencies)
    while stack:
        ts = stack.pop()
        # What is in memory, or was asked for by an earlier graph, has its place already.
        if ts in mine or ts.state != "released" or not all(dependent in mine for dependent in ts.dependents):
            continue
        if len(mine) > limit:
            return None
        mine.add(ts)
        stack.extend(ts.dependencies)
    return list(mine)


def reordered(small: Iterable[Node], large: Iterable[Node]) -> list[tuple[Node, Any]]:
    """(task, new priority) of those that change; [] if the small side is first already, or they cannot be compared."""
    first = sorted(small, key=lambda ts: ts.priority)
    last = sorted(large, key=lambda ts: ts.priority)
    if not first or not last or first[-1].priority < last[0].priority:
        return []
    # Of one graph, and of one priority of the user's.
    if len({ts.priority[:2] for ts in (*first, *last)}) != 1:
        return []
    priorities = sorted(ts.priority for ts in (*first, *last))
    return [(ts, new) for ts, new in zip((*first, *last), priorities, strict=True) if ts.priority != new]
