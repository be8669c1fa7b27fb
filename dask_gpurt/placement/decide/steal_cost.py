"""What moving a task's inputs costs, in the currency of work stealing."""

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

#: a task with more inputs costs too much to price for every thief; stock prices it
MAX_PRICED_INPUTS = 64


class StealCost:
    """StealCost given to work stealing."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        #: how many
        self.given = 0
        self._asked: tuple[Hashable, int] | None = None
        self._located: list[tuple[Collection[Any], int, set[Node], float]] = []

    def comm_cost(self, ts: TaskState, ws: WorkerState) -> float | None:
        """Seconds to bring a task's missing inputs to a worker, for work stealing; None to leave it to stock.

        Stealing compares this with occupancies, which contain inbound bytes at the one bandwidth of stock. Pricing
        moves in true seconds beside that made every move look profitable on fast links: simulated at 64 workers, it
        stole ten times as much and tripled the time of a stencil. So the slowest kind of link in use is priced at
        stock's bandwidth, and what was learned is used for what stock cannot know: how much less a neighbour costs,
        and the latency of each fetch.
        """
        tables = self._tables
        by_address = tables.workers.by_address
        info = by_address.get(ws.address)
        deps = ts.dependencies
        if info is None or info.ws is not ws or len(deps) > MAX_PRICED_INPUTS:
            return None
        self.given += 1
        # Stealing asks for one task and every idle worker in turn; what does not depend on the worker is kept. The
        # counter bounds how stale it gets: replicas may appear without a transition, and this is only an estimate.
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
        # Whoever asks for a value on a disk waits for that disk, which has its own tasks to read for.
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
        # Stock's bandwidth is a mean over all transfers: where most come from neighbours it is far above the network's.
        bandwidth = min(tables.scheduler.bandwidth, far.bytes_per_second)
        return float(seconds + (far_bytes + near_bytes * discount) / bandwidth)

    def _reading_seconds(self, d: Any, holders: Collection[Any]) -> float:
        """Until a disk has read a value; 0 when some holder has it in memory."""
        residence = self._tables.residence
        disk = residence.on_disk.get(d.key)
        if disk is None or len(disk) < len(holders):
            return 0.0
        return min(residence.queue_seconds(a) + n / READ_BYTES_PER_SECOND for a, n in disk.items())
