"""What is simulated: a workload on a cluster. Plain data, so that a recorded trace can be turned into it.

Everything here is frozen and picklable; benchmarks send it to other processes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import dask.order

from dask_gpurt.simulate.seam import task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dask.typing import Key


class StableStr(str):
    """A string whose hash is the same in every process, for a given salt.

    Upstream iterates over sets of tasks and workers, so the order of hashes decides ties. Python's own hash of strings
    changes from process to process (PYTHONHASHSEED) and cannot be set from within. Equal to the plain string, but a
    dictionary does not find one by the other: the simulator exchanges all keys on their way in and out.
    """

    __slots__ = ("_hash",)
    _hash: int

    def __new__(cls, text: str, salt: int = 0) -> StableStr:
        self = super().__new__(cls, text)
        self._hash = zlib.crc32(text.encode(), salt & 0xFFFFFFFF)
        return self

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    def __reduce__(self) -> Any:
        return str, (str(self),)


def stable(key: Key, salt: int) -> Any:
    """A key with a hash that does not change: its strings made `StableStr`."""
    if isinstance(key, tuple):
        return tuple(StableStr(p, salt) if isinstance(p, str) else p for p in key)
    return StableStr(key, salt) if isinstance(key, str) else key


class TaskSpec(NamedTuple):
    """One task of a workload."""

    #: keys of its inputs
    dependencies: tuple[Key, ...] = ()
    #: seconds on a worker of slowness 1, inputs in memory
    seconds: float = 0.0
    #: size of its result
    nbytes: int = 0
    #: declared by dask as a source of data, hence "root-ish" however few there are
    data_producer: bool = False
    #: distributed's annotations, such as {"workers": [...]}; None: none
    annotations: Mapping[str, Any] | None = None


class Placed(NamedTuple):
    """Data that is there before the workload begins."""

    nbytes: int
    #: index of a worker -> "memory" or "disk"
    where: Mapping[int, str]


class Step(NamedTuple):
    """One graph that a client submits: what it runs, what it gives back, and what the client lets go of after it."""

    #: keys of the tasks that are submitted; others that they need are there from steps before
    keys: Sequence[Any]
    #: keys that the client holds from now on
    outputs: Sequence[Any]
    #: keys of this or earlier steps that the client lets go of when this step is done
    releases: Sequence[Any] = ()
    #: whether the client waits for the outputs before it goes on (compute), or not (persist)
    waits: bool = True
    #: steps of one client follow one another; those of different clients run side by side
    client: int = 0
    #: seconds that the client takes to make and send the graph, before the scheduler has it
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """A graph with times and sizes, whether invented or recorded."""

    name: str
    #: key (str, or tuple of str and int) -> task
    tasks: Mapping[Any, TaskSpec]
    #: keys the client waits for and keeps
    outputs: Sequence[Any]
    #: data that is there already
    inputs: Mapping[Any, Placed] = dataclasses.field(default_factory=dict)
    #: standard deviation of the logarithm of each task's duration around its `seconds`
    jitter: float = 0.0
    #: seconds that the network needs under any schedule; what `bounds` cannot see from the graph
    network_seconds: float = 0.0
    #: key -> index of the worker that runs it under the policy ``plan``: a schedule made by hand, with hindsight
    plan: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    #: all tasks as `dask.order` would have them, where that is too large to be asked; None: it is asked
    ordered: Sequence[Any] | None = None
    #: graphs submitted one after the other; none: all tasks at once
    steps: Sequence[Step] = ()

    def __post_init__(self) -> None:
        for key, spec in self.tasks.items():
            for d in spec.dependencies:
                if d not in self.tasks and d not in self.inputs:
                    raise ValueError(f"task {key!r} needs {d!r}, which is neither a task nor an input of {self.name}")
        for key in self.outputs:
            if key not in self.tasks:
                raise ValueError(f"output {key!r} is not a task of {self.name}")
        if self.ordered is not None and (len(self.ordered) != len(self.tasks) or set(self.ordered) != set(self.tasks)):
            raise ValueError(f"ordered must have each of the {len(self.tasks)} tasks of {self.name} once")
        for step in self.steps:
            for key in (*step.keys, *step.outputs):
                if key not in self.tasks:
                    raise ValueError(f"a step of {self.name} names {key!r}, which is not one of its tasks")

    @functools.cached_property
    def order(self) -> dict[Any, int]:
        """Key -> position in `dask.order`, which a client sends along. Kept: it takes longer than a small run."""
        if self.ordered is not None:
            return {key: i for i, key in enumerate(self.ordered)}
        names = {key: stable(key, 0) for key in (*self.tasks, *self.inputs)}
        dsk = {names[k]: task(names[k], [names[d] for d in t.dependencies]) for k, t in self.tasks.items()}
        positions = dask.order.order(dsk=dsk)
        return {k: positions[names[k]] for k in self.tasks}

    def durations(self, seed: int) -> dict[Any, float]:
        """Seconds of every task on a worker of slowness 1, with jitter. The mean is `seconds` for any jitter."""
        if not self.jitter:
            return {k: t.seconds for k, t in self.tasks.items()}
        rnd = random.Random(seed)
        mu = -0.5 * self.jitter**2
        return {k: t.seconds * math.exp(rnd.gauss(mu, self.jitter)) for k, t in self.tasks.items()}


@dataclasses.dataclass(frozen=True)
class Path:
    """One class of link: latency of a fetch in seconds, and the capacity in bytes/s of each end, in each direction."""

    latency_seconds: float
    bytes_per_second: float


class SchedulerCost(NamedTuple):
    """Seconds for which the scheduler's one thread is busy, so that a slow one shows on the virtual clock."""

    #: with a task that has finished: its transitions, and the decisions about those that it makes ready
    task: float = 0.0
    #: with each task of a graph that is submitted
    submitted: float = 0.0
    #: with any other message
    message: float = 0.0

    def of(self, op: str) -> float:
        """Seconds for a worker's message."""
        return self.task if op == "task-finished" else self.message

    def times(self, ratio: float) -> SchedulerCost:
        """The cost of a scheduler that takes `ratio` times as long for a task; messages cost what they did."""
        return SchedulerCost(self.task * ratio, self.submitted * ratio, self.message)


#: a scheduler that decides in no time
FREE = SchedulerCost()


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Workers, where they are, and what connects them.

    Workers ``0 .. per_node-1`` are on the first node, and so on; nodes likewise fill racks. Between two workers of a
    node data takes the *near* path, whose ports belong to the workers. Between nodes it takes the *far* path, whose
    ports (network cards) belong to the nodes. Between racks it also takes the uplinks of both racks.
    """

    workers: int
    threads: int = 1
    per_node: int = 1
    nodes_per_rack: int | None = None
    near: Path = Path(0.5e-3, 50e9)
    far: Path = Path(1e-3, 1.25e9)
    #: between racks; the bandwidth is that of each rack's uplink, in each direction
    uplink: Path = Path(1e-3, 1e12)
    #: memory limit of each worker in bytes; None: no limit
    memory_bytes: int | Sequence[int] | None = 64 << 30
    #: share of the limit above which task data is spilled (distributed.worker.memory.target)
    spill_share: float = 0.6
    #: of each worker's disk, bytes/s
    disk_write: float = 1e9
    disk_read: float = 2e9
    #: as this package's tiers do it, rather than as Dask does; see `memory`
    spill_in_background: bool = False
    #: how much longer each worker takes than usual; one number for all, or one for each
    slowness: float | Sequence[float] = 1.0
    #: one way between scheduler and worker, in seconds
    message_seconds: float = 1e-3
    #: how long the scheduler is busy with what it is sent; constants, so that a run can be repeated on any machine
    scheduler: SchedulerCost = FREE
    #: of a worker for each task, besides the task itself: its slot is taken for as long
    overhead_seconds: float = 0.0
    #: peers from which a worker fetches at the same time, at most. Upstream allows 50 in and 10 out.
    connections: int = 10
    #: bytes asked for in one request, at most (distributed.worker.transfer.message-bytes-limit)
    request_bytes: int = 50_000_000

    def __post_init__(self) -> None:
        if self.workers < 1 or self.threads < 1 or self.per_node < 1:
            raise ValueError(f"{self!r}: workers, threads and per_node must be at least 1")
        for name in ("slowness", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (int, float)) and len(value) != self.workers:
                raise ValueError(f"{name} has {len(value)} entries for {self.workers} workers; give one for each")

    def slowness_of(self, worker: int) -> float:
        """How much longer a worker takes than usual."""
        return float(self.slowness if isinstance(self.slowness, (int, float)) else self.slowness[worker])

    def memory_of(self, worker: int) -> int | None:
        """Memory limit of a worker in bytes; None: no limit."""
        m = self.memory_bytes
        return m if m is None or isinstance(m, int) else m[worker]

    def node_of(self, worker: int) -> int:
        """The node that a worker is on."""
        return worker // self.per_node

    def rack_of(self, worker: int) -> int:
        """The rack that a worker is in."""
        return 0 if self.nodes_per_rack is None else self.node_of(worker) // self.nodes_per_rack

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return -(-self.workers // self.per_node)

    @property
    def racks(self) -> int:
        """How many racks there are."""
        return 1 if self.nodes_per_rack is None else -(-self.nodes // self.nodes_per_rack)

    def link_class(self, a: int, b: int) -> str:
        """``node``, ``rack`` or ``far``: how near two workers are."""
        if self.node_of(a) == self.node_of(b):
            return "node"
        return "rack" if self.rack_of(a) == self.rack_of(b) else "far"

    def capacities(self) -> list[float]:
        """Of all resources: ports in and out of each worker, of each node, of each rack."""
        return (
            [self.near.bytes_per_second] * (2 * self.workers)
            + [self.far.bytes_per_second] * (2 * self.nodes)
            + [self.uplink.bytes_per_second] * (2 * self.racks)
        )

    def route(self, source: int, target: int) -> tuple[float, tuple[int, ...]]:
        """Latency of a fetch, and the resources its bytes occupy."""
        kind = self.link_class(source, target)
        if kind == "node":
            return self.near.latency_seconds, (2 * source, 2 * target + 1)
        base = 2 * self.workers
        nodes = (base + 2 * self.node_of(source), base + 2 * self.node_of(target) + 1)
        if kind == "rack":
            return self.far.latency_seconds, nodes
        base += 2 * self.nodes
        latency = self.far.latency_seconds + self.uplink.latency_seconds
        return latency, (*nodes, base + 2 * self.rack_of(source), base + 2 * self.rack_of(target) + 1)


@dataclasses.dataclass
class Result:
    """What a simulated run came to. Times are virtual unless they say otherwise."""

    workload: str
    policy: str
    seed: int
    workers: int
    #: from submission to the last output in memory, as the scheduler sees it
    makespan_seconds: float = 0.0
    #: bytes that travelled, by ``node``, ``rack`` and ``far``
    bytes_moved: dict[str, int] = dataclasses.field(default_factory=dict)
    transfers: int = 0
    #: largest amount of task data in the memory of one worker, and of all workers together at one time
    peak_memory_bytes: int = 0
    peak_total_bytes: int = 0
    #: written to disk, and read back
    spilled_bytes: int = 0
    read_bytes: int = 0
    #: seconds of computing, all workers together
    busy_seconds: float = 0.0
    #: slot-seconds in which a slot was free and a task here waited for inputs from elsewhere; and those in which tasks
    #: waited for the disk, for their own inputs or for room in memory
    network_seconds: float = 0.0
    disk_seconds: float = 0.0
    #: runs of tasks, and those whose result was not wanted any more
    executed: int = 0
    wasted: int = 0
    stolen: int = 0
    #: real seconds in the scheduler, policy included, and of the whole simulation
    scheduler_seconds: float = 0.0
    wall_seconds: float = 0.0
    events: int = 0
    #: `PlacementPlugin.statistics`, for policies that run in it
    statistics: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: key (as text) -> `PlacementPlugin.explain`, for the keys asked for
    stories: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: key -> index of the worker that ran it, when asked for
    assigned: dict[Any, int] = dataclasses.field(default_factory=dict)
    #: (key, worker, start, stop) of every run, when asked for
    timeline: list[tuple[Any, int, float, float]] = dataclasses.field(default_factory=list)

    @property
    def between_nodes_bytes(self) -> int:
        """Bytes that travelled between nodes."""
        return self.bytes_moved.get("rack", 0) + self.bytes_moved.get("far", 0)
