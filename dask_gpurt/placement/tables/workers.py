"""`Workers`: the workers by address, by node and by idleness, with the work assigned to each.

Every operation is O(1) per event and per look-up, except `Workers.clear_charges`. Probing idle or random workers needs
a set that can be indexed (`IndexedSet`). Dask's `idle` and `running` cannot be indexed, and ``next(iter(d))`` on a dict
whose first entries were removed walks over the gaps they leave.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dask_gpurt.model.link import LinkClass
from dask_gpurt.placement.tables.worker_speed import Speed

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.scheduler import WorkerState

T = TypeVar("T")
_NUMBER = re.compile(r"(\d+)")


class IndexedSet(Generic[T]):
    """A set whose elements are also a list, so that a random one is found in O(1).

    `add` and `discard` are O(1). The order is arbitrary but deterministic.
    """

    __slots__ = ("_position", "items")

    def __init__(self) -> None:
        #: the elements; read only
        self.items: list[T] = []
        self._position: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, item: T) -> bool:
        return item in self._position

    def add(self, item: T) -> None:
        """Add an element; does nothing if it is there."""
        if item not in self._position:
            self._position[item] = len(self.items)
            self.items.append(item)

    def discard(self, item: T) -> None:
        """Remove an element; does nothing if it is not there. The last one takes its place."""
        at = self._position.pop(item, None)
        if at is None:
            return
        last = self.items.pop()
        if at < len(self.items):
            self.items[at] = last
            self._position[last] = at


class Node:
    """Workers that reach one another without the network: those of one host, or of one process with ``inproc://``.

    Where the network has several zones (see `topology.zones`), a node is a zone instead. The path between zones is then
    so much longer than any within one that hosts do not matter.
    """

    __slots__ = ("idle", "link_class", "name", "order", "workers")

    def __init__(self, name: str, link_class: LinkClass) -> None:
        self.name = name
        #: sort key among the nodes. Kept, because all workers are sorted at once when a graph arrives
        self.order = natural(name)
        #: the path between two of its workers
        self.link_class = link_class
        self.workers: IndexedSet[WorkerInfo] = IndexedSet()
        self.idle: IndexedSet[WorkerInfo] = IndexedSet()


class WorkerInfo:
    """What placement knows of one worker. `WorkerState` has slots and takes no further attributes."""

    __slots__ = (
        "address",
        "asked",
        "backlog_seconds",
        "far_share",
        "free",
        "looked_at",
        "looked_samples",
        "mark_bytes",
        "node",
        "order",
        "passed_over",
        "reserved_bytes",
        "root_seconds",
        "roots",
        "seceded",
        "slowness",
        "speed",
        "speed_samples",
        "tasks",
        "ws",
        "zoned",
    )

    def __init__(self, ws: WorkerState, node: Node, mark_bytes: float) -> None:
        #: distributed's WorkerState
        self.ws = ws
        self.address: str = ws.address
        #: sort key among the workers of its node
        self.order = natural(self.address)
        self.node = node
        #: bytes of task data at which it starts to overflow; infinite without a memory limit
        self.mark_bytes = mark_bytes
        #: work assigned and not done, in seconds on a worker of slowness 1
        self.backlog_seconds = 0.0
        #: expected results of the tasks assigned and not done
        self.reserved_bytes = 0.0
        #: the part of the backlog that is roots pulled from blocks, in seconds; and how many roots
        self.root_seconds = 0.0
        self.roots = 0
        #: tasks charged to this worker now
        self.tasks = 0
        #: how many of `ws.long_running` have been taken out of the backlog
        self.seceded = 0
        #: measured duration over expected duration, whatever the task; `worker_speed` knows it per prefix
        self.slowness = 1.0
        self.speed = Speed()
        #: durations compared so far
        self.speed_samples = 0
        #: short tasks that were not learned from
        self.passed_over = 0
        #: decayed share of the inbound bytes that come over the network rather than from neighbours
        self.far_share = 0.5
        #: whether a thread is free, as the table of idle workers has it; None: not entered yet
        self.free: bool | None = None
        #: number of speed samples when the monitor last saw a change, and the time of that (Unix seconds)
        self.looked_samples = -1
        self.looked_at = 0.0
        #: whether its round trip is known, and how many measurements of it were tried
        self.zoned = False
        self.asked = 0

    def __repr__(self) -> str:
        return f"<WorkerInfo {self.ws.address} tasks={self.tasks} backlog={self.backlog_seconds:.3g}s>"


class Workers:
    """All workers, by address, by node and by idleness."""

    def __init__(self, host_share: float) -> None:
        #: share of a worker's memory limit that task data may fill
        self.host_share = host_share
        self.by_address: dict[str, WorkerInfo] = {}
        self.all: IndexedSet[WorkerInfo] = IndexedSet()
        self.idle: IndexedSet[WorkerInfo] = IndexedSet()
        self.nodes: dict[str, Node] = {}
        #: whether nodes are zones
        self.zoned = False
        #: seeded, so that the same events give the same decisions
        self.random: Callable[[], float] = random.Random(0).random

    def add(self, ws: WorkerState) -> WorkerInfo:
        """Add a worker. One that came back under its old address replaces the former entry."""
        self.remove(ws.address)
        name, link_class = node_of(ws.address, ws.host)
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node(name, link_class)
        mark = ws.memory_limit * self.host_share if ws.memory_limit else float("inf")
        info = self.by_address[ws.address] = WorkerInfo(ws, node, mark)
        node.workers.add(info)
        self.all.add(info)
        self.refresh(info)
        return info

    def move(self, info: WorkerInfo, name: str, link_class: LinkClass) -> None:
        """Put a worker on the node `name`, made if needed; `link_class` is the path between two workers of it."""
        old = info.node
        if old.name == name:
            return
        old.workers.discard(info)
        old.idle.discard(info)
        if not old.workers:
            del self.nodes[old.name]
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node(name, link_class)
        info.node = node
        info.free = None
        node.workers.add(info)
        self.refresh(info)

    def remove(self, address: str) -> WorkerInfo | None:
        """Remove a worker and, with its last worker, its node. Return its entry; None: it is unknown."""
        info = self.by_address.pop(address, None)
        if info is None:
            return None
        node = info.node
        self.all.discard(info)
        self.idle.discard(info)
        node.workers.discard(info)
        node.idle.discard(info)
        if not node.workers:
            del self.nodes[node.name]
        return info

    def refresh(self, info: WorkerInfo) -> None:
        """Update the sets of idle workers: whether a thread of this worker is free.

        Call when a task came or left, and now and then: no event tells that one has seceded.
        """
        ws = info.ws
        free = len(ws.processing) - len(ws.long_running) < ws.nthreads
        if free is info.free:
            return
        info.free = free
        if free:
            self.idle.add(info)
            info.node.idle.add(info)
        else:
            self.idle.discard(info)
            info.node.idle.discard(info)

    def clear_charges(self) -> None:
        """Forget all assigned work (the scheduler has just forgotten all tasks)."""
        for info in self.all.items:
            info.backlog_seconds = info.reserved_bytes = info.root_seconds = 0.0
            info.tasks = info.seceded = info.roots = 0
            self.refresh(info)


def natural(text: str) -> list[Any]:
    """Sort key of a text, with its digits compared as numbers."""
    return [int(part) if part.isdigit() else part for part in _NUMBER.split(text)]


def node_of(address: str, host: str) -> tuple[str, LinkClass]:
    """Name of a worker's node, and the path between two workers of that node.

    ``inproc://host/pid/n`` passes references within a process. Two ``tcp://`` workers may share a process too, but they
    talk through a socket, so they count as two processes of one host.
    """
    if address.startswith("inproc://"):
        return address.rpartition("/")[0], LinkClass.PROCESS
    return host, LinkClass.HOST
