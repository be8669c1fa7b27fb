"""What running a task on a worker costs, in seconds. Pure arithmetic.

`cost` compares workers, `finish_seconds` predicts the time of the result, and `terms` names the parts of the cost::

    T    = max(Q, X, R) + 0.1 * min(Q, X) + C
    cost = T - (1 - epsilon) * min(T, S) + E + lambda * F

    Q  queue: work assigned to the worker and not yet done
    X  inputs: bytes already inbound, then missing bytes over the link of each class, then one latency per fetch
    R  spilled inputs: until the disks that must read them have done so
    C  the task itself, slower on a slow worker
    S  slack: for so long the cluster has other work for every worker, see `slack`
    E  overflow: what this task alone pushes over the memory mark is written out and, in general, read back
    F  moved: time on the link and in the event loops at both ends, for bytes and fetches; and reads from disk

Q and X are a maximum, not a sum, because a worker fetches inputs while its threads compute. Dask adds them, and also
counts queued transfers in the queue, so that a transfer is paid twice (dask/distributed#7003).

E is *marginal*: min(new bytes, bytes over the mark). What is over the mark already has to be paid wherever this task
goes. Charging it too made an over-full worker look worse with every task, and drove data round the cluster.

F is an externality: bytes on a link delay other tasks, which Q and X of this task do not show. Without F an idle worker
wins as soon as its fetch is a little shorter than the holder's queue, and locality dissolves (dask/distributed#5253).
Workers of two zones (two racks joined by a slow link) share one link, so a second between zones costs more: see
`zone_cost`. The latency of a fetch is mostly work of the two event loops, so it is part of F as well. Without it a
chain of very short tasks hops between idle workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dask_gpurt.model.link import Link
    from dask_gpurt.model.views import TaskView, WorkerView


#: lambda: seconds charged to the task per second that its fetches occupy a link
MOVED = 1.0
#: weight of the smaller of queue and inputs. Both go on at once, but neither is known well; and of workers that must
#: fetch equally much, the one with the shorter queue is better
HIDDEN = 0.1
#: epsilon: weight of a second that slack covers; decides among workers that cost the same otherwise
EXCUSED = 0.1
#: to write one byte out and read it back: 1 GB/s each way, an ordinary NVMe shared by a few workers
OVERFLOW_SECONDS_PER_BYTE = 2e-9


def cost(task: TaskView, worker: WorkerView, far: Link) -> float:
    """Cost of a task on a worker in seconds, `far` being the path between two nodes; smaller is better."""
    queue, pending, near_bytes, near_fetches, far_bytes, far_fetches, slowness, room, _, near, far_price, read = worker
    compute, output, slack = task
    moved = priced = 0.0
    if near_fetches:
        moved = priced = near.latency_seconds * near_fetches + near_bytes / near.bytes_per_second
    if far_fetches:
        across = far.latency_seconds * far_fetches + far_bytes / far.bytes_per_second
        moved += across
        priced += far_price * across
    inputs = pending + moved
    seconds = (queue if queue > inputs else inputs) + HIDDEN * (inputs if queue > inputs else queue)
    if read > seconds:
        seconds = read
    seconds += compute * slowness
    if slack:
        seconds -= (1.0 - EXCUSED) * (seconds if seconds < slack else slack)
    seconds += MOVED * (priced + read)
    new = near_bytes + far_bytes + output
    over = new - room
    if over > 0:
        seconds += (over if over < new else new) * OVERFLOW_SECONDS_PER_BYTE
    return seconds


def finish_seconds(task: TaskView, worker: WorkerView, far: Link) -> tuple[float, float]:
    """Seconds until the result is there; and the seconds on links, as priced, that its fetches take from others."""
    moved, priced = _moved(worker, far)
    wait = max(worker.queue_seconds, worker.pending_seconds + moved)
    return wait + task.compute_seconds * worker.slowness, priced


def _moved(worker: WorkerView, far: Link) -> tuple[float, float]:
    """Seconds that the fetches occupy links: as they are, and as priced for other tasks."""
    near = worker.near
    close = near.latency_seconds * worker.near_fetches + worker.near_bytes / near.bytes_per_second
    across = far.latency_seconds * worker.far_fetches + worker.far_bytes / far.bytes_per_second
    return close + across, close + worker.far_price * across


def terms(task: TaskView, worker: WorkerView, far: Link) -> dict[str, float]:
    """The terms of `cost` by name, in seconds.

    ``max(max(queue, inputs) + hidden, read) + compute - excused + overflow + moved`` is the cost.
    """
    moved, priced = _moved(worker, far)
    new = worker.near_bytes + worker.far_bytes + task.output_bytes
    inputs = worker.pending_seconds + moved
    compute = task.compute_seconds * worker.slowness
    hidden = HIDDEN * min(worker.queue_seconds, inputs)
    wait = max(max(worker.queue_seconds, inputs) + hidden, worker.read_seconds)
    return {
        "queue": worker.queue_seconds,
        "inputs": inputs,
        "read": worker.read_seconds,
        "hidden": hidden,
        "compute": compute,
        "excused": (1.0 - EXCUSED) * min(wait + compute, task.slack_seconds),
        "overflow": max(0.0, min(new, new - worker.room_bytes)) * OVERFLOW_SECONDS_PER_BYTE,
        "moved": MOVED * (priced + worker.read_seconds),
    }
