"""What it costs to run a task on a worker, in seconds. Pure arithmetic.

::

    T    = max(Q, X, R) + 0.1 * min(Q, X) + C
    cost = T - (1 - epsilon) * min(T, S) + E + lambda * F

    Q  the worker's queue: work assigned to it and not yet done
    X  its inputs: promised inbound traffic, then missing bytes over the link of each class, then one latency per fetch
    R  spilled inputs: until the disk of whoever must read them has done so
    C  the task itself, slower on a slow worker
    S  slack: for so long the cluster has other work for everybody, see `slack`
    E  overflow: what this task alone pushes over the memory mark has to be written out and, in general, read back
    F  what is moved, priced as time on the link and in the event loops at both ends: bytes and fetches; and read

Q and X are a maximum, not a sum, because a worker fetches inputs while its threads compute. Upstream adds them and also
counts queued transfers in the queue, so that a transfer is paid twice (dask/distributed#7003).

E is *marginal*: min(new bytes, bytes over the mark). What is over already is sunk: it has to be paid wherever this
task goes. Charging it made an over-full worker look worse with every task and drove data round the cluster.

F is an externality: bytes on a link delay others, whom Q and X of this task do not see. Without it an idle worker wins
as soon as its fetch is a little shorter than the holder's queue, and locality dissolves (dask/distributed#5253).
Between zones (two racks joined by a slow link) it is priced higher, see `zone_cost`: there all share one link.
The latency of a fetch is mostly work of the two event loops, so it is in F as well: without it a chain of very short
tasks hops to whoever happens to be idle.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dask_gpurt.model.link import Link
    from dask_gpurt.model.views import TaskView, WorkerView


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """The constants of the cost."""

    #: lambda: seconds charged to the task per second that its fetches occupy a link
    moved: float = 1.0
    #: what a second of the smaller of queue and inputs counts: both go on at once, but neither is known well, and of
    #: places that must fetch as much the one with the shorter queue is better
    hidden: float = 0.1
    #: epsilon: what a second counts for which nobody waits; decides among places that cost the same otherwise
    excused: float = 0.1
    #: seconds to write one byte out and read it back: 1 GB/s each way, an ordinary NVMe shared by a few workers
    overflow_seconds_per_byte: float = 2e-9


def cost(task: TaskView, worker: WorkerView, far: Link, weights: Weights) -> float:
    """Seconds; smaller is better. `far` is the network path to the worker."""
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
    seconds = (queue if queue > inputs else inputs) + weights.hidden * (inputs if queue > inputs else queue)
    if read > seconds:
        seconds = read
    seconds += compute * slowness
    if slack:
        seconds -= (1.0 - weights.excused) * (seconds if seconds < slack else slack)
    seconds += weights.moved * (priced + read)
    new = near_bytes + far_bytes + output
    over = new - room
    if over > 0:
        seconds += (over if over < new else new) * weights.overflow_seconds_per_byte
    return seconds


def finish_seconds(task: TaskView, worker: WorkerView, far: Link) -> tuple[float, float]:
    """(seconds until the result is there, what its fetches cost others as seconds on links)."""
    moved, priced = _moved(worker, far)
    wait = max(worker.queue_seconds, worker.pending_seconds + moved)
    return wait + task.compute_seconds * worker.slowness, priced


def _moved(worker: WorkerView, far: Link) -> tuple[float, float]:
    """Seconds that the fetches occupy links: as they are, and as others pay for them."""
    near = worker.near
    close = near.latency_seconds * worker.near_fetches + worker.near_bytes / near.bytes_per_second
    across = far.latency_seconds * worker.far_fetches + worker.far_bytes / far.bytes_per_second
    return close + across, close + worker.far_price * across


def terms(task: TaskView, worker: WorkerView, far: Link, weights: Weights) -> dict[str, float]:
    """The terms of `cost` by name, in seconds.

    ``max(max(queue, inputs) + hidden, read) + compute - excused + overflow + moved`` is the cost.
    """
    moved, priced = _moved(worker, far)
    new = worker.near_bytes + worker.far_bytes + task.output_bytes
    inputs = worker.pending_seconds + moved
    compute = task.compute_seconds * worker.slowness
    hidden = weights.hidden * min(worker.queue_seconds, inputs)
    wait = max(max(worker.queue_seconds, inputs) + hidden, worker.read_seconds)
    return {
        "queue": worker.queue_seconds,
        "inputs": inputs,
        "read": worker.read_seconds,
        "hidden": hidden,
        "compute": compute,
        "excused": (1.0 - weights.excused) * min(wait + compute, task.slack_seconds),
        "overflow": max(0.0, min(new, new - worker.room_bytes)) * weights.overflow_seconds_per_byte,
        "moved": weights.moved * (priced + worker.read_seconds),
    }
