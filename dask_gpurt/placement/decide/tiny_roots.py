"""`TinyRoots`: which groups of roots are given out at once, as with ``worker-saturation: inf``, and not queued.

A queue balances roots and bounds their results in memory. It costs the scheduler one transition more per root, and each
worker a message to and fro before it knows that roots are short. Where tasks do next to nothing the scheduler is what
all wait for: then there is nothing to balance, and that cost is all. With 6,000 empty tasks on four workers it is a
fifth of the time; with 300 it is a third. Where all roots together take some tens of milliseconds there is hardly time
to balance anything: 40 tasks of 3 ms on four workers took 0.26 s queued and 0.20 s at once.

Nothing tells that roots are tiny before they have run, so a group is queued unless all of this holds:

1. The last group of the same prefix and size (rounded to a power of two) was computed to its end, without an error.
2. As many results again fit in `AHEAD_SHARE` of the memory marks.
3. Its tasks took less than `BRIEF_SECONDS` times the cluster's threads in the mean: the scheduler cannot hand out such
   tasks as fast as the workers run them. The mean, as one long task among many short ones is a reason to balance.
   Or an even deal makes the last thread less late (`_late_seconds`) than a queue does, for whose messages it waits
   (`QUEUE_SECONDS`), and which ends as unevenly as one task is long.
4. When its first root is ready, no worker has anything in hand but such roots, and tasks that have seceded: none must
   wait behind a long task.

Rejected: durations of the prefix alone. ``lambda`` or ``process`` may be tiny in one graph and load files in the next;
a group of about as many tasks is a better sign of a computation that is repeated.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from dask_gpurt.placement.decide.root_times import AHEAD_SHARE, ROUND_TRIP_SECONDS
from dask_gpurt.placement.tables import worker_facts
from dask_gpurt.placement.tables.durations import BRIEF_SECONDS

if TYPE_CHECKING:
    from distributed.scheduler import TaskGroup, TaskState, WorkerState

    from dask_gpurt.placement.decide.root_blocks import RootBlocks
    from dask_gpurt.placement.tables.durations import Prefix
    from dask_gpurt.placement.tables.tables import Tables

#: kinds of group kept; the oldest is forgotten
MAX_KINDS = 1024
#: a thread waits so long until a queue has given it enough: one root, then twice as many with each message
QUEUE_SECONDS = 4 * ROUND_TRIP_SECONDS
#: how much slower than the others a worker may turn out to be, about which nothing is known; and who is known to be
DOUBT, SLOW = 0.1, 1.5


class Looked(NamedTuple):
    """A group of roots when its first one became ready. It may have older tasks, which are done but not forgotten."""

    prefix: str
    #: tasks that were still to run
    size: int
    #: all tasks that it ever had
    total: int
    at_once: bool
    #: what is known of the durations of its tasks
    durations: Prefix
    #: results of the prefix, compute seconds and bytes of the group by then
    results: int
    seconds: float
    nbytes: int

    @property
    def kind(self) -> tuple[str, int]:
        """Prefix and bits of the size: groups of one kind are expected to be alike."""
        return self.prefix, self.size.bit_length()


class Known(NamedTuple):
    """What a task of the last group of a kind took: mean and standard deviation in seconds, bytes of its result."""

    seconds: float
    spread_seconds: float
    nbytes: float


class _Times:
    """Sums over the tasks of a group that were followed."""

    __slots__ = ("n", "seconds", "squares")

    def __init__(self) -> None:
        self.n, self.seconds, self.squares = 0, 0.0, 0.0

    def spread_seconds(self) -> float:
        """Standard deviation; infinite where too few were followed."""
        if self.n < 2:
            return math.inf
        mean = self.seconds / self.n
        return math.sqrt(max(0.0, self.squares / self.n - mean * mean))


_NONE = _Times()


class TinyRoots:
    """Of one scheduler.

    Parameters
    ----------
    tables, groups
        Read only.
    """

    def __init__(self, tables: Tables, groups: RootBlocks) -> None:
        self._tables = tables
        self._groups = groups
        #: by prefix and bits of the size, see `Looked.kind`
        self._known: dict[tuple[str, int], Known] = {}
        #: groups that were not done when the newest graph arrived. Not for longer: groups refer to those they depend
        #: on, so that keeping the last of an iteration would keep all
        self._looked: dict[TaskGroup, Looked] = {}
        #: durations of these groups, by what `Durations.kind` says of their tasks
        self.times: dict[Prefix, _Times] = {}
        #: those that have got more tasks since
        self._grown: set[TaskGroup] = set()
        #: roots given out at once since the start
        self.given = 0

    def graph_arrived(self) -> None:
        """Learn from groups that are done."""
        for group, looked in [*self._looked.items()]:
            if group.done:
                del self._looked[group]
                self._grown.discard(group)
                self._learn(group, looked, self.times.pop(looked.durations, _NONE))
            elif group.states["released"]:
                self._grown.add(group)

    def ran(self, kind: Prefix, seconds: float) -> None:
        """Take in a task that has run. Call while there are `times`."""
        times = self.times.get(kind)
        if times is not None:
            times.n += 1
            times.seconds += seconds
            times.squares += seconds * seconds

    def _learn(self, group: TaskGroup, looked: Looked, times: _Times) -> None:
        kind, n = looked.kind, looked.size
        self._known.pop(kind, None)
        results = group.prefix.state_counts["memory"] - looked.results
        # Fewer results than tasks: some were cancelled.
        if group.states["erred"] or results < n:
            return
        if len(self._known) >= MAX_KINDS:
            del self._known[next(iter(self._known))]
        seconds = group.all_durations["compute"] - looked.seconds
        # It may have got more tasks while it ran, or just now. Other groups of the prefix may have run beside it.
        n = min(n + sum(group.states.values()) - looked.total, results)
        self._known[kind] = Known(seconds / n, times.spread_seconds(), (group.nbytes_total - looked.nbytes) / n)

    def at_once(self, ts: TaskState) -> bool:
        """Whether a ready task is of a group that is given out at once."""
        group = ts.group
        looked = self._looked.get(group)
        if looked is None or (self._grown and group in self._grown):
            looked = self._look(ts, group)
        return looked is not None and looked.at_once

    def worker(self, ts: TaskState) -> WorkerState | None:
        """The worker that gets such a root: the owner of its block, else Dask's choice; None: no worker is there."""
        self.given += 1
        owner = self._groups.owner(ts.key)
        info = None if owner is None else self._tables.workers.by_address.get(owner)
        if info is not None and worker_facts.is_running(info.ws):
            return info.ws
        return self._tables.scheduler.decide_worker_rootish_queuing_disabled(ts)

    def _look(self, ts: TaskState, group: TaskGroup) -> Looked | None:
        scheduler = self._tables.scheduler
        self._grown.discard(group)
        states = group.states
        n = states["released"] + states["waiting"]
        # What `is_rootish` asks first. Small groups, of which there may be thousands, are not kept.
        if n <= 2 * scheduler.total_nthreads or not scheduler.is_rootish(ts):
            return None
        prefix = group.prefix
        seconds, results = group.all_durations["compute"], prefix.state_counts["memory"]
        durations = self._tables.durations.kind(ts)
        looked = Looked(prefix.name, n, sum(states.values()), False, durations, results, seconds, group.nbytes_total)
        if self._is_tiny(looked) and self._nothing_else():
            looked = looked._replace(at_once=True)
        self._looked[group] = looked
        self.times.setdefault(durations, _Times())
        return looked

    def _is_tiny(self, looked: Looked) -> bool:
        known = self._known.get(looked.kind)
        if known is None:
            return False
        tables = self._tables
        workers = tables.workers.all.items
        if known.nbytes * looked.size >= AHEAD_SHARE * sum(info.mark_bytes for info in workers):
            return False
        threads = tables.scheduler.total_nthreads
        if known.seconds < BRIEF_SECONDS * threads:
            return True
        late = _late_seconds(known, looked.size / threads)
        return late < QUEUE_SECONDS + known.seconds and all(w.slowness < SLOW for w in workers)

    def _nothing_else(self) -> bool:
        """Whether workers have nothing in hand but roots given out at once."""
        tiny = sum(group.states["processing"] for group, looked in self._looked.items() if looked.at_once)
        workers = self._tables.scheduler.workers.values()
        return sum(len(ws.processing) - len(ws.long_running) for ws in workers) <= tiny

    def clear(self) -> None:
        """Drop the groups at work: the scheduler has forgotten all tasks."""
        self._looked.clear()
        self._grown.clear()
        self.times.clear()


def _late_seconds(known: Known, each: float) -> float:
    """How much later the last thread is done when each gets so many tasks at once, and takes none of another's.

    By chance, as sums of so many durations spread, and because its worker may be slower than is known.
    """
    return math.sqrt(each) * known.spread_seconds + DOUBT * each * known.seconds
