"""`JoinSides`: which side of a join comes first, and whose keys are collected. On the scheduler.

Theory of operation (`protocol.join_order`). When a graph comes, the smaller side of a join is put first: by bytes, if
all inputs of both are in memory, else by the number of inputs. Numbers of inputs may be wrong. So where either side
might filter the other, and one input of each needs a few dozen tasks at most, these two run before all others, and the
keys of both sides are collected. When both inputs are split, their rows times the inputs say which side is the smaller:
its keys are collected from then on, and what of it was not sent to a worker yet comes first. Nothing waits for that:
meanwhile the inputs come in the order that they have.

Tasks that are in the queue of the scheduler change their places in it, and `moved` is called with all tasks whose
priority changed.

One input may say little of the others (rows that are filtered by what they are sorted by). That costs a filter, as
wrong numbers of inputs do; which rows are dropped does not depend on it.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.join_order import (
    CLEARLY,
    UNSENT,
    alone_before,
    first_input,
    known_bytes,
    reordered,
)
from dask_gpurt.shuffle.protocol.join_plan import droppers
from dask_gpurt.shuffle.protocol.messages import AskJoinBits, AskJoinKeys, JoinKeys
from dask_gpurt.shuffle.scheduler.calls import AnswersFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from distributed.scheduler import Scheduler, TaskState

    from dask_gpurt.shuffle.protocol.join_order import Node
    from dask_gpurt.shuffle.protocol.join_plan import Join
    from dask_gpurt.shuffle.scheduler.calls import Calls
    from dask_gpurt.shuffle.scheduler.runs import RunRecord, Runs

logger = logging.getLogger("distributed.scheduler.gpurt")

#: tasks of one side that are put in order
ORDERED = 50_000
#: joins that are remembered
REMEMBERED = 1000


class JoinSides:
    """The sides of one scheduler's joins."""

    def __init__(
        self,
        scheduler: Scheduler,
        runs: Runs,
        calls: Calls,
        moved: Callable[[Iterable[TaskState]], None],
        failed: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._runs = runs
        self._calls = calls
        self._moved = moved
        self._failed = failed
        #: id of the left shuffle -> ids of the sides whose keys are collected; absent: by their inputs
        self._collecting: dict[str, frozenset[str]] = {}
        #: joins whose sides changed places when their graph came, and later
        self.reordered = 0
        self.changed = 0

    def collecting(self, join: Join) -> Collection[str] | None:
        """Ids of the sides whose keys are collected, if the other may lose rows; None: by their inputs."""
        return self._collecting.get(join.left)

    def arrange(self, join: Join, barriers: dict[str, TaskState]) -> None:
        """Put the smaller side of a new join first. Before any of its tasks is on its way."""
        nbytes = {name: known_bytes(ts) for name, ts in barriers.items()}
        known = [size for size in nbytes.values() if size is not None]
        sizes = {name: nbytes[name] or 0 if len(known) == 2 else len(ts.dependencies) for name, ts in barriers.items()}
        small, large = sorted(barriers, key=lambda name: sizes[name])
        clear = sizes[large] >= CLEARLY * sizes[small]
        first: dict[str, list[Node]] = {}
        if len(known) == 2 and clear:
            self._collect(join, {small})
        elif len(droppers(join)) == 2:
            first = {name: tasks for name, ts in barriers.items() if (tasks := first_input(ts))}
        groups = [alone_before(barriers[name], ORDERED) for name in (small, large)]
        if not all(groups):
            return
        ahead = [ts for tasks in first.values() for ts in tasks] if len(first) == 2 else []
        sides = [[ts for ts in group or () if ts not in ahead] for group in groups]
        if not clear:
            sides = [[ts for side in sides for ts in side]]
        changed = reordered(*([ahead] if ahead else []), *sides)
        for ts, priority in changed:
            ts.priority = priority
        self.reordered += clear and bool(changed)
        if ahead:
            self._collect(join, barriers)
            pending = set(barriers)
            for name, tasks in first.items():
                key = next(ts.key for ts in tasks if ts in barriers[name].dependencies)
                self._runs.listen(key, functools.partial(self._split, join, pending, name))

    def _collect(self, join: Join, names: Iterable[str]) -> None:
        self._collecting[join.left] = frozenset(names)
        while len(self._collecting) > REMEMBERED:
            del self._collecting[next(iter(self._collecting))]

    # ---- the first input of each side was split

    def _split(self, join: Join, pending: set[str], name: str, startstops: object) -> None:
        pending.discard(name)
        if not pending:
            seam.in_background(self._scheduler, self._choose, join)

    async def _choose(self, join: Join) -> None:
        """Collect the keys of the smaller side alone, and put it first."""
        try:
            records = {name: self._runs.get(seam.ShuffleId(name)) for name in (join.left, join.right)}
            rows: dict[str, float] = {}
            for name, record in records.items():
                if record is None or record.spec.join is None:
                    return
                answers = await self._calls.tell(record, AskJoinKeys()) or ()
                rows[name] = expected(map(JoinKeys.from_dict, answers), record.spec.join.inputs)
            small, large = sorted(rows, key=lambda name: rows[name])
            if math.isinf(rows[large]):
                return
            self._collect(join, {small})
            if (record := records[large]) is not None:
                await self._collect_no_more(record)
            if rows[large] >= CLEARLY * rows[small]:
                self._swap(small, large)
        except (AnswersFailed, TimeoutError):
            # A worker closes, or is stopped: the sides stay as they are.
            logger.info("gpurt: the sides of the join %s stay in their order: a worker did not answer", join.left)
        except Exception:
            self._failed()

    async def _collect_no_more(self, record: RunRecord) -> None:
        if record.spec.join is not None and self._runs.current(record) and not record.join_asked:
            # Workers that join the run from now on have it with the spec.
            record.spec.join.builds = False
            await self._calls.tell(record, AskJoinBits(0))

    def _swap(self, small: str, large: str) -> None:
        queue = self._scheduler.queued
        if len(queue) > 2 * ORDERED:
            return
        barriers = [self._runs.barrier_of(seam.ShuffleId(name)) for name in (small, large)]
        first, last = (None if ts is None else alone_before(ts, ORDERED, UNSENT) for ts in barriers)
        changed: list[tuple[Any, Any]] = [] if first is None or last is None else reordered(first, last)
        if not changed:
            return
        for ts, priority in changed:
            ts.priority = priority
        self.changed += 1
        # The queue notes a task's priority when it is added.
        tasks = list(queue)
        queue.clear()
        for ts in tasks:
            queue.add(ts)
        self._moved([ts for ts, _ in changed])


def expected(seen: Iterable[JoinKeys], inputs: int) -> float:
    """Rows of a side of so many inputs, by those that were split; infinite when none was."""
    counts = [(one.seen_inputs, one.seen_rows) for one in seen]
    split, rows = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    return rows / split * inputs if split else math.inf
