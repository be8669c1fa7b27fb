"""`stays`: the worker where a task stays with its inputs, found without a comparison.

Most tasks of most graphs (the links of a chain, what follows from one chunk) have all inputs on one worker and run
there. A task stays, unweighed, when

1. each of its inputs has one copy, all on one running worker that is not a slow one, none on disk;
2. the cluster has other work for longer than the task takes there, queue included (`slack`);
3. its result has room there, so there is no overflow to avoid;
4. a shorter queue could gain less than the fastest transfer costs, or the queue is shorter than the task.

Why this agrees with `cost`: the worker that has the inputs costs ``C + Q`` of the task's own time. Any other worker
costs the transfer, twice: it delays the task, and others on the link. While slack covers the task, its own time counts
a tenth, so a shorter queue elsewhere gains ``0.1 * Q`` at most.

Neglected is a tenth of two differences: in speed between workers that are not slow, and of a queue shorter than the
task. On eight simulated shapes (64 workers, nodes) the comparison chose another worker in 8 of 8,600 such tasks.

Rejected: "has a free thread" in place of 2 and 4. It rarely applied: a worker that has just finished an input has begun
the next root by the time the task is ready, so nearly every such worker has a queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.decide.candidates import queue_seconds
from dask_gpurt.placement.tables import worker_facts

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

    from dask_gpurt.model.link import Link
    from dask_gpurt.model.views import TaskView
    from dask_gpurt.placement.decide.cost import Weights
    from dask_gpurt.placement.tables.tables import Tables
    from dask_gpurt.placement.tables.workers import WorkerInfo

#: a task with more inputs is compared: looking at each of them costs as much
MAX_INPUTS = 16


def stays(
    tables: Tables, ts: TaskState, task: TaskView, far: Link, weights: Weights
) -> tuple[WorkerInfo, tuple[float, ...], float] | None:
    """The worker on which a task stays; None: workers have to be compared.

    Parameters
    ----------
    tables
        Read; seceded tasks are taken out of the backlog.
    ts, task
        The task, and what is expected of it.
    far, weights
        The path between two nodes, and the constants of the cost.

    Returns
    -------
    (WorkerInfo, (queue seconds, pending seconds, slowness, bytes of room, bytes held), bytes of inputs)
    """
    deps = ts.dependencies
    if not deps or len(deps) > MAX_INPUTS:
        return None
    home: Any = None
    on_disk = tables.residence.on_disk
    total = 0.0
    for d in deps:
        holders = d.who_has
        if not holders or len(holders) != 1 or (on_disk and d.key in on_disk):
            return None
        for ws in holders:
            if home is None:
                home = ws
            elif ws is not home:
                return None
        nbytes = d.nbytes
        total += nbytes if nbytes >= 0 else d.get_nbytes()
    info = tables.workers.by_address.get(home.address)
    if info is None or info.ws is not home or not worker_facts.is_running(home) or tables.speeds.is_slow(info):
        return None
    compute, output, slack = task
    slowness = info.speed.own.get(ts.group.prefix.name, info.slowness) if info.speed_samples else info.slowness
    if compute * slowness > slack:
        return None
    node = info.node
    near = tables.links.fits[node.link_class].link
    pending = worker_facts.pending_bytes(home)
    pending_seconds = 0.0
    if pending:
        share = info.far_share
        pending_seconds = pending * (share / far.bytes_per_second + (1.0 - share) / near.bytes_per_second)
    if len(home.long_running) != info.seceded:
        tables.backlog.reconcile(info)
    queue = queue_seconds(info)
    if (queue if queue > pending_seconds else pending_seconds) + compute * slowness > slack:
        return None
    held = home.nbytes
    room = info.mark_bytes - held - info.reserved_bytes - pending
    if room < output:
        return None
    if queue > compute:
        link = near if len(node.workers.items) > 1 else far
        moved = link.latency_seconds + total / link.bytes_per_second
        if weights.excused * queue > (weights.moved + weights.excused) * moved:
            return None
    return info, (queue, pending_seconds, slowness, room, held), total
