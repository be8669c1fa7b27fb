"""`StealCost`: what moving a task's inputs costs, in the unit that Dask's work stealing uses."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from dask_gpurt.model import LinkClass
from dask_gpurt.placement.decide import candidates
from dask_gpurt.placement.tables.disk_residency import READ_BYTES_PER_SECOND

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.tables.tables import Tables
    from dask_gpurt.placement.tables.workers import Node

#: inputs above which Dask's own `get_comm_cost` is used: locating more of them for every thief takes too long
MAX_PRICED_INPUTS = 64


class StealCost:
    """Answers work stealing's question what it costs to move a task."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        #: how many answers were given
        self.given = 0
        self._asked: tuple[Hashable, int] | None = None
        self._located: list[tuple[Collection[Any], int, set[Node], float]] = []

    def comm_cost(self, ts: TaskState, ws: WorkerState) -> float | None:
        """Seconds to bring a task's missing inputs (not too many) to a worker; None: use Dask's own estimate.

        The slowest kind of link in use is priced at `Scheduler.bandwidth`. Measured links are used only for what Dask
        does not know: how much less a neighbour costs, and the latency of each fetch.

        Rejected: true seconds. Stealing compares this with occupancies, which contain inbound bytes at Dask's one
        bandwidth. Beside those, true seconds made every move look profitable on fast links. Simulated at 64 workers,
        ten times as much was stolen, and a stencil took three times as long.
        """
        tables = self._tables
        by_address = tables.workers.by_address
        info = by_address.get(ws.address)
        deps = ts.dependencies
        if info is None or info.ws is not ws:
            return None
        self.given += 1
        # Stealing asks for one task and every idle worker in turn. What does not depend on the worker is kept until
        # the next transition. Replicas may appear without one, but this is only an estimate.
        asked = (ts.key, tables.scheduler.transition_counter)
        if self._asked != asked:
            self._asked = asked
            self._located = [
                (
                    holders,
                    d.get_nbytes(),
                    {w.node for h in islice(holders, candidates.WIDE) if (w := by_address.get(h.address)) is not None},
                    self._reading_seconds(d, holders),
                )
                for d in deps
                if (holders := d.who_has)
            ]
        node = info.node
        near = tables.links.link(node.link_class)
        far = near if len(tables.workers.nodes) == 1 else tables.links.link(LinkClass.NETWORK)
        near_bytes = far_bytes = near_fetches = far_fetches = 0
        # A value on a disk has to be read first, and that disk also reads for its own worker's tasks.
        reading = 0.0
        for holders, nbytes, nodes, read in self._located:
            if ws in holders:
                continue
            reading += read
            if node in nodes:
                near_bytes += nbytes
                near_fetches += 1
            else:
                far_bytes += nbytes
                far_fetches += 1
        seconds = reading + near.latency_seconds * near_fetches + far.latency_seconds * far_fetches
        discount = min(1.0, far.bytes_per_second / near.bytes_per_second)
        # Dask's bandwidth is a mean over all transfers: where most come from neighbours it is far above the network's.
        bandwidth = min(tables.scheduler.bandwidth, far.bytes_per_second)
        return float(seconds + (far_bytes + near_bytes * discount) / bandwidth)

    def _reading_seconds(self, d: Any, holders: Collection[Any]) -> float:
        """Seconds until a disk has read a value; 0 when some holder has it in memory."""
        residence = self._tables.residence
        disk = residence.on_disk.get(d.key)
        if disk is None or len(disk) < len(holders):
            return 0.0
        return min(residence.queue_seconds(a) + n / READ_BYTES_PER_SECOND for a, n in disk.items())
