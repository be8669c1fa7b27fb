"""`TinyRoots`: which groups of roots are given out at once, as with ``worker-saturation: inf``, and not queued.

A queue balances roots and bounds their results in memory. It costs the scheduler one transition more per root, and each
worker a message to and fro before it knows that roots are short. Where tasks do next to nothing the scheduler is what
all wait for: then there is nothing to balance, and that cost is all. With 6,000 empty tasks on four workers it is a
fifth of the time; with 300 it is a third; 40 tasks of 3 ms took 0.26 s queued and 0.20 s at once.

What a queue costs depends on the machine, so it is measured. While a group is queued, threads idle for some time
(`_Times.idle_seconds`). An even deal at once spares most of that, and may end late (`_late_seconds`). Nothing is known
of roots before they have run, so a group is queued unless all of this holds:

1. The last group of the same prefix and size (rounded to a power of two) was computed to its end, without an error.
2. As many results again, dealt evenly, fit in `ROOM_SHARE` of what each worker has free below its memory mark, or in
   what roots sent ahead may take (`AHEAD_SHARE`).
3. An even deal would be late by less than half of the time that each thread idled when such groups were queued,
   as far as a message per root explains it. No worker is known to be slow (`ClusterSpeed.uneven`).
4. It has not been slower at once than queued (`STRIKES`).
5. When its first root is ready, no worker has anything in hand but such roots, and tasks that have seceded: none must
   wait behind a long task.
6. That root carries no data (`CARRIED_BYTES`), as those of ``from_pandas`` do, or all workers are on one host. On a
   slow link its message takes longer than the one that queuing would cost, and a worker behind such a link must get
   fewer: a shuffle of 12 such roots of 0.7 MB, one of two workers behind 10 Mbit/s, took 8.1 s at once and 6.0 s
   queued. Within a host such roots take 1.05 to 1.2 times as long queued.

Rejected: durations of the prefix alone. ``lambda`` or ``process`` may be tiny in one graph and load files in the next;
a group of about as many tasks is a better sign of a computation that is repeated. Also rejected: constants for what a
queue costs (0.2 ms of the scheduler a task, four messages a phase). On a machine that is half as fast, 400 tasks of
0.4 ms were just not tiny by them and took 1.6 times as long as at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from distributed.protocol.pickle import dumps

from dask_gpurt.placement.decide.root_times import AHEAD_SHARE, ROUND_TRIP_SECONDS
from dask_gpurt.placement.tables import worker_facts

if TYPE_CHECKING:
    import pickle

    from distributed.scheduler import TaskGroup, TaskState, WorkerState

    from dask_gpurt.placement.decide.root_blocks import RootBlocks
    from dask_gpurt.placement.tables.durations import Prefix
    from dask_gpurt.placement.tables.tables import Tables

#: kinds of group kept; the oldest is forgotten
MAX_KINDS = 1024
#: groups at work that are followed: all are looked through when a graph arrives, and beside so many none is alone
MAX_LOOKED = 256
#: by how much a worker may turn out to be slower than the others, although it is not known to be
DOUBT = 0.1
#: After `STRIKES` groups of a kind in a row that took `WORSE` times as long at once as queued, `BANNED` are queued. One
#: group of 30 empty tasks takes half to twice as long as another, so less is no evidence
WORSE, STRIKES, BANNED = 1.25, 3, 16
#: weight of a queued group in what is known of queuing
GAIN = 0.25
#: of what a worker has free: all results may be there at once, the next tasks' beside them, and copies of both that are
#: on their way
ROOM_SHARE = 0.25
#: what 100 Mbit/s carry in the time of the message that a root given out at once spares
CARRIED_BYTES = int(ROUND_TRIP_SECONDS * 12.5e6)


class Known(NamedTuple):
    """What the last group of a kind took."""

    #: of a task: mean, standard deviation, bytes of its result
    seconds: float
    spread_seconds: float
    nbytes: float
    #: moving averages over groups that were queued: how long each thread did nothing, and the group's time per task
    idle_seconds: float
    queued_seconds: float
    #: how many times in a row it was slower at once; from `STRIKES` on it is not tried
    strikes: int = 0


class _Times:
    """Durations of a group's tasks, as far as they were followed, and what all threads did meanwhile."""

    __slots__ = ("began", "busy_before", "busy_seconds", "ended", "kind", "n", "seconds", "squares")

    def __init__(self, kind: Prefix, began: float, busy_before: float) -> None:
        #: what `Durations.kind` says of its tasks
        self.kind = kind
        #: when its first root was ready, when its last task was done, and `TinyRoots.busy_seconds` at both
        self.began = self.ended = began
        self.busy_before = self.busy_seconds = busy_before
        self.n, self.seconds, self.squares = 0, 0.0, 0.0

    def spread_seconds(self) -> float:
        """Standard deviation of a duration; infinite where too few were followed."""
        if self.n < 2:
            return math.inf
        mean = self.seconds / self.n
        return math.sqrt(max(0.0, self.squares / self.n - mean * mean))

    def idle_seconds(self, threads: int) -> float:
        """For how long each thread did nothing, in the mean."""
        return max(0.0, self.ended - self.began - (self.busy_seconds - self.busy_before) / max(1, threads))


class Looked(NamedTuple):
    """A group of roots when its first one became ready. It may have older tasks, which are done but not forgotten."""

    prefix: str
    #: tasks that were still to run
    size: int
    #: all tasks that it had had
    total: int
    at_once: bool
    times: _Times
    #: results of the prefix, compute seconds and bytes of the group by then
    results: int
    seconds: float
    nbytes: int

    @property
    def kind(self) -> tuple[str, int]:
        """Prefix and bits of the size: groups of one kind are expected to be alike."""
        return self.prefix, self.size.bit_length()


class TinyRoots:
    """Of one scheduler. Tables and blocks are read only."""

    def __init__(self, tables: Tables, groups: RootBlocks) -> None:
        self._tables = tables
        self._groups = groups
        #: by prefix and bits of the size, see `Looked.kind`
        self._known: dict[tuple[str, int], Known] = {}
        #: groups that were not done when the newest graph arrived. Not for longer: groups refer to those they depend
        #: on, so that keeping the last of an iteration would keep all
        self._looked: dict[TaskGroup, Looked] = {}
        #: of these groups, by what `Durations.kind` says of their tasks
        self.times: dict[Prefix, _Times] = {}
        #: those of these groups that have got more tasks since
        self._grown: set[TaskGroup] = set()
        #: compute seconds of all tasks while there are `times`
        self.busy_seconds = 0.0
        #: roots given out at once since the start
        self.given = 0

    def graph_arrived(self) -> None:
        """Learn from groups that are done."""
        for group, looked in [*self._looked.items()]:
            if group.done:
                del self._looked[group]
                self._grown.discard(group)
                self.times.pop(looked.times.kind, None)
                self._learn(group, looked)
            elif group.states["released"]:
                self._grown.add(group)

    def ran(self, kind: Prefix, seconds: float, stands_for: int = 1) -> None:
        """Take in a task that has run; it may stand for others that are not followed. Call while there are `times`."""
        self.busy_seconds += stands_for * seconds
        times = self.times.get(kind)
        if times is not None:
            times.n += 1
            times.seconds += seconds
            times.squares += seconds * seconds
            times.ended = self._tables.clock()
            times.busy_seconds = self.busy_seconds

    def _learn(self, group: TaskGroup, looked: Looked) -> None:
        kind, n, times = looked.kind, looked.size, looked.times
        before = self._known.pop(kind, None)
        results = group.prefix.state_counts["memory"] - looked.results
        # Fewer results than tasks: some were cancelled.
        if group.states["erred"] or results < n:
            return
        if len(self._known) >= MAX_KINDS:
            del self._known[next(iter(self._known))]
        # It may have got more tasks while it ran, or just now. Other groups of the prefix may have run beside it.
        n = min(n + sum(group.states.values()) - looked.total, results)
        seconds = (group.all_durations["compute"] - looked.seconds) / n
        nbytes = (group.nbytes_total - looked.nbytes) / n
        each = (times.ended - times.began) / n
        if looked.at_once and before is not None:
            strikes = before.strikes + 1 if each > WORSE * before.queued_seconds else 0
            if strikes >= STRIKES:
                strikes += BANNED
            idle, each = before.idle_seconds, before.queued_seconds
        else:
            strikes = 0 if before is None else max(0, before.strikes - 1)
            idle = times.idle_seconds(self._tables.scheduler.total_nthreads)
            if before is not None:
                idle = before.idle_seconds + GAIN * (idle - before.idle_seconds)
                each = before.queued_seconds + GAIN * (each - before.queued_seconds)
        self._known[kind] = Known(seconds, times.spread_seconds(), nbytes, idle, each, strikes)

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
        if n <= 2 * scheduler.total_nthreads or len(self._looked) >= MAX_LOOKED or not scheduler.is_rootish(ts):
            return None
        prefix = group.prefix
        seconds, results = group.all_durations["compute"], prefix.state_counts["memory"]
        kind = self._tables.durations.kind(ts)
        times = self.times[kind] = _Times(kind, self._tables.clock(), self.busy_seconds)
        looked = Looked(prefix.name, n, sum(states.values()), False, times, results, seconds, group.nbytes_total)
        if (
            self._is_tiny(looked)
            and self._nothing_else()
            and not (len(self._tables.workers.nodes) > 1 and _carries_data(ts))
        ):
            looked = looked._replace(at_once=True)
        self._looked[group] = looked
        return looked

    def _is_tiny(self, looked: Looked) -> bool:
        known = self._known.get(looked.kind)
        if known is None or known.strikes >= STRIKES:
            return False
        tables = self._tables
        threads = tables.scheduler.total_nthreads
        if not threads:  # the last worker is just leaving: its tasks are ready again before the tables hear of it
            return False
        each = looked.size / threads
        if tables.speeds.uneven or any(
            known.nbytes * each * info.ws.nthreads
            >= max(AHEAD_SHARE * info.mark_bytes, ROOM_SHARE * (info.mark_bytes - info.ws.nbytes))
            for info in tables.workers.all.items
        ):
            return False
        # A message for each root explains no more. Other idle time, as of threads without an own block, is no queue's.
        idle = min(known.idle_seconds, each * ROUND_TRIP_SECONDS)
        return _late_seconds(known, each) < idle / 2

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


def _carries_data(ts: TaskState) -> bool:
    """Whether the message with a task is large. Pickles it once more, as is done for each of so many anyway."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        pickled = dumps(ts.run_spec, buffer_callback=buffers.append)
        return len(pickled) + sum(buffer.raw().nbytes for buffer in buffers) > CARRIED_BYTES
    except Exception:  # of the user's object; Dask tells of it when it sends the task
        return True


def _late_seconds(known: Known, each: float) -> float:
    """How much later the last thread is done when each gets so many tasks at once, and takes none of another's.

    By chance, as sums of so many durations spread, and because its worker may be slower than is known.
    """
    return math.sqrt(each) * known.spread_seconds + DOUBT * each * known.seconds
