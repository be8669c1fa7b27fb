"""Choose the workers to compare for a task, and take a snapshot of each.

`Inputs` locates the inputs, `pick` chooses the candidates, and `views` tells what each candidate would have to fetch
and wait for. All of it is O(inputs + candidates), never O(workers).

Candidates
----------
At most ``gpurt.placement.candidates`` workers:

* holders of the largest inputs, up to half of the limit;
* up to two idle workers on each of the two nodes that hold most: free, and near enough to fetch cheaply;
* two idle and two random workers from anywhere; eight random ones where no worker is idle and few hold an input.

Dask compares holders only. The dependents of one small key then all queue on its holder, and only stealing spreads them
(dask/distributed#8177). Two random probes make the choice nearly as good as a look at all workers ("power of two
choices"). With only those two, the fullest of 64 workers got a fifth more than its share.

A small cluster is compared whole. An input with more than `WIDE` replicas is everywhere and gives no hint. Walking over
its holders is what makes Dask's own decision O(workers).

An input that a worker already fetches for another task counts as present; its bytes are in the inbound traffic.

Only nodes of holders
---------------------
When a link would take longer for the inputs than a thread for the task, workers on other nodes are left out. The
network is then the bottleneck. A worker that holds nothing would save in its own queue what it takes from the links of
others, and what would have stayed there has to be moved too. Measured: rechunk on single hosts took 1.08 to 1.13 of
``saturation: inf`` without this, 0.97 to 0.99 with it, and an eighth fewer bytes. A higher price of moving did not
achieve that. Where one worker holds everything, stealing still takes work from it when others are idle.
"""

from __future__ import annotations

import functools
import heapq
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dask_gpurt.model.link import LinkClass
from dask_gpurt.model.views import WorkerView
from dask_gpurt.placement.decide.zone_cost import price
from dask_gpurt.placement.tables.disk_residency import READ_BYTES_PER_SECOND
from dask_gpurt.placement.tables.worker_facts import is_running, pending_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.tables.disk_residency import DiskResidency
    from dask_gpurt.placement.tables.tables import Tables
    from dask_gpurt.placement.tables.workers import Node, WorkerInfo, Workers

#: an input with more replicas than this gives no hint where to run
WIDE = 8
#: inputs looked at; of a task with more, a sample stands for all
MAX_INPUTS = 256
#: widely replicated inputs looked at
MAX_WIDE = 8
#: random workers; and their number where all workers are busy and few hold an input, so that there is no other choice
PROBES, MORE_PROBES = 2, 8
#: a view from a tuple of all of its fields: half the time of a call with them, and this is done ten times per decision
_make = functools.partial(tuple.__new__, WorkerView)
NO_DISK: MappingProxyType[Any, Any] = MappingProxyType({})
_NOTHING = (0.0, 0.0)
_NOWHERE = (0.0, 0.0, 0)


class Inputs:
    """Where the inputs of one task are.

    Parameters
    ----------
    deps
        The inputs (TaskStates). Of more than `MAX_INPUTS` a sample stands for all, see `scale`.
    by_address
        All workers.
    on_disk
        Key -> address -> bytes of copies that are only on disk, see `DiskResidency`.
    """

    __slots__ = ("by_node", "by_worker", "count", "counted", "own_bytes", "scale", "spilled", "total_bytes", "wide")

    def __init__(
        self,
        deps: Collection[TaskState],
        by_address: dict[str, WorkerInfo],
        on_disk: Mapping[Any, Mapping[str, float]] = NO_DISK,
    ) -> None:
        #: holder -> [bytes, inputs]
        self.by_worker: dict[WorkerInfo, list[float]] = {}
        #: node of holders -> [bytes, inputs, holders], each input once however many replicas the node has
        self.by_node: dict[Node, list[float]] = {}
        #: (input, bytes, nodes known to have it) of widely replicated inputs
        self.wide: list[tuple[TaskState, float, set[Node]]] = []
        #: (input, bytes on disk by address) of those of which some copy is only on disk
        self.spilled: list[tuple[TaskState, Mapping[str, float]]] = []
        #: bytes and number of the inputs, without the wide ones
        self.total_bytes = 0.0
        self.count = 0.0
        #: their bytes, each input divided among the tasks that wait for it: moved for one, it is there for all of them
        self.own_bytes = 0.0
        n = len(deps)
        self.scale = scale = 1.0 if n <= MAX_INPUTS else n / MAX_INPUTS
        #: the inputs that are in the sums here or in `wide`
        self.counted: list[TaskState] = []
        by_worker, by_node, counted = self.by_worker, self.by_node, self.counted
        for d in deps if n <= MAX_INPUTS else islice(deps, MAX_INPUTS):
            nbytes = d.nbytes
            nbytes = (nbytes if nbytes >= 0 else d.get_nbytes()) * scale
            holders = d.who_has
            if not holders:
                continue
            if len(holders) > WIDE:
                if len(self.wide) < MAX_WIDE:
                    nodes = {w.node for h in islice(holders, WIDE) if (w := by_address.get(h.address)) is not None}
                    self.wide.append((d, nbytes, nodes))
                    counted.append(d)
                continue
            counted.append(d)
            if on_disk and d.key in on_disk:
                self.spilled.append((d, on_disk[d.key]))
            self.total_bytes += nbytes
            self.count += scale
            waiters = d.waiters
            self.own_bytes += nbytes / len(waiters) if waiters else nbytes
            seen: Node | None = None
            for h in holders:
                info = by_address.get(h.address)
                if info is None:
                    continue
                node = info.node
                entry = by_worker.get(info)
                first = entry is None
                if entry is None:
                    by_worker[info] = [nbytes, scale]
                else:
                    entry[0] += nbytes
                    entry[1] += scale
                # Replicas of one input are mostly on few nodes; the exact test is only needed from the second node on.
                if seen is not None and (node is seen or self._twice(h, holders, node, by_address)):
                    if first:
                        by_node[node][2] += 1
                    continue
                seen = node
                entry = by_node.get(node)
                if entry is None:
                    by_node[node] = [nbytes, scale, 1]
                else:
                    entry[0] += nbytes
                    entry[1] += scale
                    if first:
                        entry[2] += 1

    @staticmethod
    def _twice(
        holder: WorkerState, holders: Iterable[WorkerState], node: Node, by_address: dict[str, WorkerInfo]
    ) -> bool:
        """Whether an earlier holder of the same input is on the same node. At most `WIDE` holders."""
        for h in holders:
            if h is holder:
                return False
            info = by_address.get(h.address)
            if info is not None and info.node is node:
                return True
        return False


def pick(
    inputs: Inputs,
    table: Workers,
    limit: int,
    valid: Collection[WorkerState] | None,
    abroad: bool = True,
) -> list[WorkerInfo]:
    """The candidates: running workers, at most `limit`. May be empty.

    Parameters
    ----------
    valid
        WorkerStates that the task may run on; None: all.
    abroad
        Whether workers on nodes that hold no input are candidates too.
    """
    by_worker = inputs.by_worker
    rnd = table.random
    half = limit // 2
    if valid is not None:
        return _pick_valid(inputs, table, limit, valid)
    everybody = table.all.items
    if len(everybody) <= half:
        return [w for w in everybody if is_running(w.ws)]
    out: dict[WorkerInfo, None]
    if len(by_worker) > half:
        out = dict.fromkeys(heapq.nlargest(half, by_worker, key=lambda w: by_worker[w][0]))
    else:
        out = dict.fromkeys(by_worker)
    by_node = inputs.by_node
    if by_node:
        for node in _two_largest(by_node) if len(by_node) > 2 else by_node:
            idle = node.idle.items
            if idle:
                for _ in range(min(2, len(idle))):
                    out[idle[int(rnd() * len(idle))]] = None
    idle = table.idle.items
    if idle:
        n = len(idle)
        out[idle[int(rnd() * n)]] = None
        out[idle[int(rnd() * n)]] = None
    n = len(everybody)
    for _ in range(PROBES if idle or len(by_worker) > 2 else MORE_PROBES):
        out[everybody[int(rnd() * n)]] = None
    picked = [w for w in out if is_running(w.ws)]
    if not abroad:
        picked = [w for w in picked if w in by_worker or w.node in by_node] or picked
    if not picked:
        # All holders and probes are paused or leaving. A few more probes, else Dask searches.
        picked = [w for _ in range(limit) if is_running((w := everybody[int(rnd() * n)]).ws)]
    return picked[:limit]


def _two_largest(by_node: Mapping[Node, list[float]]) -> list[Node]:
    """The two nodes with the most bytes, the larger first; the earlier one among equals."""
    first = second = None
    most = more = -1.0
    for node, entry in by_node.items():
        nbytes = entry[0]
        if nbytes > most:
            second, more = first, most
            first, most = node, nbytes
        elif nbytes > more:
            second, more = node, nbytes
    return [n for n in (first, second) if n is not None]


def _pick_valid(inputs: Inputs, table: Workers, limit: int, valid: Collection[WorkerState]) -> list[WorkerInfo]:
    """Candidates of a restricted task. Dask has just built the set `valid`, so this may be linear in it, once."""
    by_address = table.by_address
    if len(valid) <= limit:
        infos = (by_address.get(ws.address) for ws in valid)
        return [w for w in infos if w is not None and is_running(w.ws)]
    by_worker = inputs.by_worker
    holders = [w for w in by_worker if w.ws in valid]
    if len(holders) > limit // 2:
        holders = heapq.nlargest(limit // 2, holders, key=lambda w: by_worker[w][0])
    out = dict.fromkeys(holders)
    pool = list(valid)
    for _ in range(limit - len(out)):
        info = by_address.get(pool[int(table.random() * len(pool))].address)
        if info is not None:
            out[info] = None
    return [w for w in out if is_running(w.ws)]


def views(
    picked: Collection[WorkerInfo],
    inputs: Inputs,
    tables: Tables,
    prefix: str = "",
    *,
    disk: bool = False,
    inbound: bool = True,
) -> list[WorkerView]:
    """A snapshot of each candidate, relative to the task with these inputs. Takes seceded tasks out of the backlog.

    Parameters
    ----------
    prefix
        Of the task: how slow a worker is may depend on it.
    disk, inbound
        Whether to count the time to read spilled inputs, and the inputs already on their way to the worker.
    """
    residence = tables.residence if disk and inputs.spilled else None
    table, fits, reconcile = tables.workers, tables.links.fits, tables.backlog.reconcile
    by_address = table.by_address
    far_spb = 1.0 / fits[LinkClass.NETWORK].link.bytes_per_second
    out: list[WorkerView] = []
    append = out.append
    zoned = table.zoned
    # Hashing an enum costs as much as the rest of a look-up, and nearly always all nodes have one kind of link.
    link_class = LinkClass.HOST
    near = fits[link_class].link
    for info in picked:
        ws = info.ws
        node = info.node
        near_bytes, near_n, far_bytes, far_n = _missing(info, ws, node, inputs, by_address)
        if node.link_class is not link_class:
            link_class = node.link_class
            near = fits[link_class].link
        pending = pending_bytes(ws) if inbound else 0
        if pending:
            share = info.far_share
            pending_seconds = pending * (share * far_spb + (1.0 - share) / near.bytes_per_second)
        else:
            pending_seconds = 0.0
        if len(ws.long_running) != info.seceded:
            reconcile(info)
        slowness = info.slowness
        if info.speed_samples:
            slowness = info.speed.own.get(prefix, slowness)
        held = ws.nbytes
        room = info.mark_bytes - held - info.reserved_bytes - pending
        queue = queue_seconds(info)
        factor = price(inputs.counted, node, by_address) if zoned and far_n else 1.0
        read = 0.0 if residence is None else read_seconds(info, inputs, residence, by_address)
        append(
            _make(
                (queue, pending_seconds, near_bytes, near_n, far_bytes, far_n, slowness, room, held, near, factor, read)
            )
        )
    return out


def _missing(
    info: WorkerInfo, ws: WorkerState, node: Node, inputs: Inputs, by_address: dict[str, WorkerInfo]
) -> tuple[float, float, float, float]:
    """What a worker has to fetch: bytes and requests to neighbours, bytes and requests to others."""
    here_bytes, here = inputs.by_worker.get(info, _NOTHING)
    at_node_bytes, at_node, holders = inputs.by_node.get(node, _NOWHERE)
    near_bytes, near_n = at_node_bytes - here_bytes, at_node - here
    far_bytes, far_n = inputs.total_bytes - at_node_bytes, inputs.count - at_node
    scale = inputs.scale
    for d, nbytes, nodes in inputs.wide:
        if ws in d.who_has:
            continue
        if node in nodes:
            near_bytes += nbytes
            near_n += scale
        else:
            far_bytes += nbytes
            far_n += scale
    needs = ws.needs_what
    if needs and (near_n or far_n):
        for d in inputs.counted:
            if d in needs:  # it is on its way for another task: take it off the side it was counted on
                nbytes = d.get_nbytes() * scale
                if any(
                    (w := by_address.get(h.address)) is not None and w.node is node
                    for h in islice(d.who_has or (), WIDE)
                ):
                    near_bytes, near_n = near_bytes - nbytes, near_n - scale
                else:
                    far_bytes, far_n = far_bytes - nbytes, far_n - scale
        # Sums of floats in another order: a difference of equal sums may be a little below zero.
        if near_n < 0.5:
            near_bytes = near_n = 0.0
        if far_n < 0.5:
            far_bytes = far_n = 0.0
    # A worker asks a peer for many small inputs at once: there are no more fetches than holders.
    if near_n > 1.0:
        others = holders - 1 if here else holders
        if near_n > others:
            near_n = others or 1
    if far_n > 1.0:
        others = len(inputs.by_worker) - holders
        if far_n > others:
            far_n = others or 1
    return near_bytes, near_n, far_bytes, far_n


def queue_seconds(info: WorkerInfo) -> float:
    """Seconds until a thread of a worker is free, by the backlog; call `Backlog.reconcile` before."""
    ws = info.ws
    threads: int = ws.nthreads
    # A free thread means no wait, however long the tasks on the other threads are.
    if len(ws.processing) - info.seceded < threads:
        return 0.0
    queue = (info.backlog_seconds - info.root_seconds) / threads
    roots = info.roots
    if roots:
        # Tasks that join roots have precedence over roots that wait; they only wait until a running one is done.
        queue += info.root_seconds / (roots * (threads + 1))
    return queue * info.slowness


def readers(info: WorkerInfo, inputs: Inputs, by_address: dict[str, WorkerInfo]) -> dict[str, float]:
    """Bytes that each worker would have to read from disk for a candidate to get the spilled inputs, by address.

    A worker fetches from neighbours if they hold an input, else from any holder, and does not know the tier. So where
    some sources have the input in memory and some on disk, all are equally likely.
    """
    out: dict[str, float] = {}
    address, node = info.address, info.node
    for d, disk in inputs.spilled:
        holders = d.who_has or ()
        if info.ws in holders:
            if address in disk:
                out[address] = out.get(address, 0.0) + disk[address]
            continue
        near = [h.address for h in holders if (w := by_address.get(h.address)) is not None and w.node is node]
        sources = near or [h.address for h in holders]
        for source in sources:
            if source in disk:
                out[source] = out.get(source, 0.0) + disk[source] / len(sources)
    return out


def read_seconds(
    info: WorkerInfo, inputs: Inputs, residence: DiskResidency, by_address: dict[str, WorkerInfo]
) -> float:
    """Seconds until the spilled inputs of a candidate are read, queues of the disks included."""
    return max(
        (
            residence.queue_seconds(address) + nbytes / READ_BYTES_PER_SECOND
            for address, nbytes in readers(info, inputs, by_address).items()
        ),
        default=0.0,
    )
