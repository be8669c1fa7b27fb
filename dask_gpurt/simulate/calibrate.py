"""From a trace to what is simulated: the tasks with their times and sizes, the cluster with its links and overheads.

What a simulation needs and a trace does not say outright is estimated from it, each by a median or a robust fit, since
a trace has pauses and outliers:

* *overhead* of a task: the pause of a thread between two tasks when the next one was there in time and had all its
  inputs. It is the worker's and the scheduler's work per task, and is added to every task's duration.
* *message*: from the end of a computation to the scheduler's note of it. Workers' clocks are off by some milliseconds
  either way, so it may be negative for one of them; the median is over all.
* *slowness* of a worker: its durations over the medians of their prefixes. Durations are divided by it, so that a task
  which ran on a slow worker is not slow elsewhere.
* *disk*: what workers have written and read while the trace was made, over the seconds that it took them.
* *links*: a line through bytes and times of the recorded transfers. The bytes of a transfer are not reported; they are
  those of the task's inputs that the source had made.

Not estimated: what tasks cost each other on shared cores, caches and disks; it is in the durations as recorded. And
nothing of a shuffle's own traffic, which is inside the durations of its tasks.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
from collections import Counter, defaultdict
from itertools import combinations
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import TraceError
from dask_gpurt.model.link import Link
from dask_gpurt.simulate.model import Cluster, Path, Placed, TaskSpec, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dask.typing import Key

    from dask_gpurt.observe.trace.reader import Trace, TracedTask

#: bounds of what is believed, in seconds
_MESSAGE = (0.2e-3, 50e-3)
_OVERHEAD = (0.0, 50e-3)
#: tasks of a prefix, and of a worker, before anything is said of its speed
JUDGED = 5
#: written or read before a disk's bandwidth is believed
MEASURED_BYTES = 50e6
#: transfers that a link is fitted to, at most, and by how many bytes two of them must differ to say something of it
FITTED = 400
APART_BYTES = 2_000_000
#: bytes/s that are not believed any more
FASTEST = 50e9
#: before any transfer was recorded: two processes on one machine
_SEED = Link(latency_seconds=5e-3, bytes_per_second=1e9)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was estimated; see the head of this file. Seconds, bytes."""

    overhead_seconds: float
    message_seconds: float
    #: by number of the worker
    slowness: dict[int, float]
    link: Link

    @classmethod
    def of(cls, trace: Trace) -> Calibration:
        """Fit to a trace."""
        ran = [t for t in trace.tasks.values() if t.runs and t.compute_stop_seconds is not None]
        notes = [
            t.finished_seconds - t.compute_stop_seconds for t in ran if t.finished_seconds and t.compute_stop_seconds
        ]
        return cls(
            overhead_seconds=_within(_median(_pauses(trace, ran), 1e-3), _OVERHEAD),
            message_seconds=_within(statistics.median(notes or [1e-3]), _MESSAGE),
            slowness=_slowness(ran),
            link=_link(trace, ran),
        )


def _median(values: Iterable[float], otherwise: float) -> float:
    kept = [v for v in values if v >= 0]
    return statistics.median(kept) if kept else otherwise


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def _pauses(trace: Trace, ran: list[TracedTask]) -> Iterable[float]:
    """Pauses of threads before tasks that could have begun at once."""
    by_worker: dict[int, list[TracedTask]] = defaultdict(list)
    for t in ran:
        if t.worker in trace.workers and t.runs == 1:
            by_worker[t.worker].append(t)
    for number, tasks in by_worker.items():
        # When each thread is free again; which thread ran what does not matter.
        free = [-math.inf] * max(trace.workers[number].threads, 1)
        for t in sorted(tasks, key=lambda t: t.compute_start_seconds or 0.0):
            assert t.compute_start_seconds is not None
            assert t.compute_stop_seconds is not None
            since = heapq.heapreplace(free, t.compute_stop_seconds)
            ready = t.assigned_seconds is not None and t.assigned_seconds < since
            if ready and not t.transfers and not t.disk_reads:
                yield t.compute_start_seconds - since


def _slowness(ran: list[TracedTask]) -> dict[int, float]:
    """Geometric: a worker twice as slow and one twice as fast are equally far from one."""
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for t in ran:
        seconds = t.compute_seconds
        if t.worker is not None and seconds is not None and seconds > 1e-3:
            times[t.prefix][t.worker].append(seconds)
    logs: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for workers in times.values():
        if len(workers) < 2:
            continue
        medians = {w: statistics.median(v) for w, v in workers.items() if len(v) >= JUDGED}
        if len(medians) < 2:
            continue
        middle = statistics.median(medians.values())
        for w, m in medians.items():
            logs[w].append((math.log(m / middle), len(workers[w])))
    out = {}
    for w, values in logs.items():
        slow = math.exp(sum(v * n for v, n in values) / sum(n for _, n in values))
        # Within a third it is noise, and a simulation with noise as speeds is worse than one without.
        if not 0.75 < slow < 1.33:
            out[w] = slow
    return out


def _link(trace: Trace, ran: list[TracedTask]) -> Link:
    """Theil and Sen's line: the median of the slopes between all two transfers, then the median of what is left.

    The live fit (`topology.links`) follows a link as it changes and keeps few samples; a trace is there as a whole,
    and one transfer of which the sender was busy must not make a link a hundred times slower.
    """
    seen: list[tuple[int, float]] = []
    for t in ran:
        for x in t.transfers:
            inputs = [trace.tasks.get(n) for n in t.dependencies]
            nbytes = sum(d.nbytes or 0 for d in inputs if d is not None and x.source in (d.worker, *d.holders))
            if nbytes and x.source is not None:
                seen.append((nbytes, x.stop_seconds - x.start_seconds))
    if not seen:
        return _SEED
    some = sorted(seen)[:: -(-len(seen) // FITTED)]
    apart = max(APART_BYTES, max(nbytes for nbytes, _ in some) // 4)
    slopes = [
        (seconds - fewer_seconds) / (nbytes - fewer)
        for (fewer, fewer_seconds), (nbytes, seconds) in combinations(some, 2)
        if nbytes - fewer >= apart
    ]
    large = sum(nbytes - some[0][0] >= apart for nbytes, _ in some)
    # One alone may have been delayed, and a replay may move a hundred times as much.
    slope = statistics.median(slopes) if large >= 2 and len(slopes) >= JUDGED else 0.0
    # All of one size, or larger ones no slower: nothing is known of the bandwidth.
    slope = slope if slope >= 1 / FASTEST else 1 / _SEED.bytes_per_second
    latency = statistics.median(seconds - nbytes * slope for nbytes, seconds in some)
    return Link(latency_seconds=max(latency, 1e-4), bytes_per_second=1 / slope)


@dataclasses.dataclass(frozen=True)
class Submission:
    """One graph of a trace."""

    #: in order of their priority
    keys: tuple[Key, ...]
    outputs: tuple[Key, ...]
    #: after the phase began
    offset_seconds: float


@dataclasses.dataclass(frozen=True)
class Phase:
    """Graphs that overlap in time. Between two phases the recorded cluster had nothing to do."""

    submissions: tuple[Submission, ...]
    #: how long it took in the trace
    recorded_seconds: float
    #: outputs, of this or an earlier phase, that the client let go of before the next phase
    released: tuple[Key, ...] = ()


def workload(trace: Trace, calibration: Calibration) -> tuple[Workload, list[Phase]]:
    """What ran, with the phases in which it was submitted.

    Tasks that never finished are left out, with those that wait for them. A key that was computed, forgotten and
    submitted again counts as several tasks.

    Raises
    ------
    TraceError
        Nothing of the trace can be replayed.
    """
    keys, place = _keys(trace), places(trace)
    kept = _replayable(trace)
    tasks: dict[Any, TaskSpec] = {}
    for number in kept:
        t = trace.tasks[number]
        slow = calibration.slowness.get(t.worker, 1.0) if t.worker is not None else 1.0
        seconds = (t.compute_seconds or 0.0) / slow + calibration.overhead_seconds
        rules = t.restrictions or {}
        annotations: dict[str, Any] = {}
        if rules.get("workers"):
            where = sorted({place[w] for w in rules["workers"]})
            annotations = {"workers": where, "allow_other_workers": bool(rules.get("loose"))}
        tasks[keys[number]] = TaskSpec(
            tuple(keys[d] for d in t.dependencies),
            seconds,
            t.nbytes or 0,
            bool(rules.get("data_producer")),
            annotations or None,
        )
    if not tasks:
        raise TraceError(f"{trace.path} has no finished task, so there is nothing to replay")
    inputs = {
        keys[n]: Placed(t.nbytes or 0, dict.fromkeys([place[w] for w in t.holders] or [0], "memory"))
        for n, t in trace.tasks.items()
        if t.data
    }
    phases = _phases(trace, kept, keys)
    if not phases:
        raise TraceError(
            f"{trace.path} has no graph of which a task finished: its tasks were there before. Remedy: begin to record "
            "before the work is submitted"
        )
    outputs = [k for p in phases for s in p.submissions for k in s.outputs]
    return Workload(trace.path, tasks, list(dict.fromkeys(outputs)), inputs), phases


def _keys(trace: Trace) -> dict[int, Any]:
    """Number -> key; one that is not the first with its key gets its number into the name."""
    seen: set[Any] = set()
    out: dict[int, Any] = {}
    for n, t in trace.tasks.items():
        key: Key = t.key
        if key in seen:
            key = (f"{key[0]}~{n}", *key[1:]) if isinstance(key, tuple) else f"{key}~{n}"
        seen.add(key)
        out[n] = key
    return out


def _replayable(trace: Trace) -> list[int]:
    """Finished tasks whose inputs are finished tasks or data; in order of their numbers."""
    bad = {n for n, t in trace.tasks.items() if not t.data and (t.runs == 0 or t.erred is not None)}
    users: dict[int, list[int]] = defaultdict(list)
    for n, t in trace.tasks.items():
        for d in t.dependencies:
            users[d].append(n)
            if d not in trace.tasks:
                bad.add(n)
    stack = list(bad)
    while stack:
        for n in users[stack.pop()]:
            if n not in bad:
                bad.add(n)
                stack.append(n)
    return [n for n, t in trace.tasks.items() if not t.data and n not in bad]


def _phases(trace: Trace, kept: list[int], keys: dict[int, Any]) -> list[Phase]:
    by_graph: dict[int, list[int]] = defaultdict(list)
    for n in kept:
        graph = trace.tasks[n].graph
        if graph is not None:
            by_graph[graph].append(n)
    _run_again(trace, set(kept), by_graph)
    used = {d for n in kept for d in trace.tasks[n].dependencies}
    groups: list[list[int]] = []
    until = -math.inf
    for graph in sorted(by_graph):
        begin = trace.graphs[graph].seconds
        if begin >= until:
            groups.append([])
        groups[-1].append(graph)
        until = max(until, *(trace.tasks[n].finished_seconds or begin for n in by_graph[graph]))
    out = []
    held: list[int] = []
    for i, group in enumerate(groups):
        begin = trace.graphs[group[0]].seconds
        end = max(trace.tasks[n].finished_seconds or begin for g in group for n in by_graph[g])
        after = trace.graphs[groups[i + 1][0]].seconds if i + 1 < len(groups) else math.inf
        submissions = []
        for g in group:
            # Of what is wanted, the record may be lost: the recorder drops blocks when its disk is too slow.
            own = set(by_graph[g])
            wanted = [n for n in trace.graphs[g].wanted if n in own and trace.tasks[n].graph == g]
            wanted = wanted or [n for n in by_graph[g] if n not in used] or by_graph[g][-1:]
            offset = trace.graphs[g].seconds - begin
            ordered = sorted(by_graph[g], key=lambda n: trace.tasks[n].priority)
            submissions.append(Submission(tuple(keys[n] for n in ordered), tuple(keys[n] for n in wanted), offset))
            held += wanted
        gone = {n for n in held if _let_go(trace.tasks[n], after)}
        held = [n for n in held if n not in gone]
        out.append(Phase(tuple(submissions), end - begin, tuple(keys[n] for n in sorted(gone))))
    return out


def _let_go(task: TracedTask, before: float) -> bool:
    """Whether a result was released for good by then; one whose worker was lost is released, and made again."""
    gone = task.released_seconds
    return gone is not None and (task.finished_seconds or 0.0) <= gone <= before


def _run_again(trace: Trace, kept: set[int], by_graph: dict[int, list[int]]) -> None:
    """Add tasks that were there when the trace began, and ran in it, to the first graph that needs them.

    Such as the source of a persisted frame: it was released, and a graph that is recorded has it computed again.
    """
    seen: set[int] = set()
    for graph in sorted(by_graph):
        stack = list(by_graph[graph])
        while stack:
            for d in trace.tasks[stack.pop()].dependencies:
                if d in kept and trace.tasks[d].graph is None and d not in seen:
                    seen.add(d)
                    by_graph[graph].append(d)
                    stack.append(d)


def places(trace: Trace) -> dict[int, int]:
    """Number of a worker -> index in the simulated cluster; one that came after another has left takes its place.

    Those of one host are neighbours, as `Cluster` counts its nodes by index; they join in any order.
    """
    out: dict[int, int] = {}
    free: list[tuple[float, int]] = []
    count = 0
    for w in sorted(trace.workers.values(), key=lambda w: (w.joined_seconds, w.number)):
        if free and min(free)[0] <= w.joined_seconds:
            left = min(free)
            free.remove(left)
            out[w.number] = left[1]
        else:
            out[w.number] = count
            count += 1
        if w.left_seconds is not None:
            free.append((w.left_seconds, out[w.number]))
    hosts: dict[str, int] = {}
    host_of = {out[n]: hosts.setdefault(trace.workers[n].host, len(hosts)) for n in sorted(out)}
    index = {place: i for i, place in enumerate(sorted(host_of, key=lambda place: (host_of[place], place)))}
    return {number: index[place] for number, place in out.items()}


def cluster(trace: Trace, calibration: Calibration, *, background: bool = False) -> Cluster:
    """The recorded cluster. Workers that came late or left early count as there all the time.

    `background`: results are spilled as this package's tiers do it.
    """
    place = places(trace)
    there = {place[w.number]: w for w in sorted(trace.workers.values(), key=lambda w: w.number)}
    if not there:
        raise TraceError(f"{trace.path} has no workers")
    members = [there[i] for i in range(len(there))]
    hosts = Counter(w.host for w in members)
    limits = [w.memory_limit_bytes for w in members]
    path = Path(calibration.link.latency_seconds, calibration.link.bytes_per_second)
    slow = [calibration.slowness.get(w.number, 1.0) for w in members]
    return Cluster(
        workers=len(members),
        threads=round(statistics.median(w.threads for w in members)),
        per_node=max(hosts.values()),
        near=path,
        far=path,
        memory_bytes=limits if all(limits) else None,
        slowness=slow if any(s != 1.0 for s in slow) else 1.0,
        message_seconds=calibration.message_seconds,
        **_disk(trace, background),
    )


def _disk(trace: Trace, background: bool) -> dict[str, Any]:
    """Bandwidths of the disk and the share of memory above which it is used, where the trace tells."""
    out: dict[str, Any] = {"spill_in_background": background}
    before: dict[str, float] = trace.about.get("disk") or {}
    after: dict[str, float] = {}
    budgets: list[float] = []
    for sample in trace.samples:
        after = sample.figures.get("disk") or after
        limit = (sample.figures.get("gpurt") or {}).get("host_limit_bytes")
        if limit and sample.worker is not None:
            budgets.append(limit / max(1, trace.workers[sample.worker].memory_limit_bytes))
    for kind, name in (("disk-write", "disk_write"), ("disk-read", "disk_read")):
        nbytes, seconds = (
            after.get(f"{kind} {unit}", 0.0) - before.get(f"{kind} {unit}", 0.0) for unit in ("bytes", "seconds")
        )
        if nbytes >= MEASURED_BYTES and seconds > 0:
            out[name] = nbytes / seconds
    if budgets:
        out["spill_share"] = min(statistics.median(budgets), 1.0)
    return out
