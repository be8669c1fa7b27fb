"""Snapshots that a placement decision is made from: numbers only, so that it can be tested, replayed and explained.

Tuples, because one decision builds about ten of them and has some tens of microseconds in all: a tuple costs 0.2 µs,
a frozen dataclass 1 µs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dask_gpurt.model.link import Link


class TaskView(NamedTuple):
    """What a decision knows of the task."""

    #: expected duration in seconds on a worker of speed 1, inputs in memory
    compute_seconds: float
    #: expected size of the result in bytes; 0 when nothing is known
    output_bytes: float
    #: seconds for which the cluster has other work for all workers; nothing waits for this task until then
    slack_seconds: float = 0.0


class WorkerView(NamedTuple):
    """What a decision knows of one candidate, relative to one task."""

    #: seconds until a thread is free: work already assigned, by our own account
    queue_seconds: float
    #: seconds of inbound traffic already promised to this worker
    pending_seconds: float
    #: inputs that must come from a neighbour (same process or host), and in how many fetches
    near_bytes: float
    near_fetches: float
    #: inputs that must come over the network, and in how many fetches
    far_bytes: float
    far_fetches: float
    #: how much longer than usual this worker takes for the same task (1 = usual, 4 = four times slower)
    slowness: float
    #: bytes that can still be added before this worker overflows; negative when it already does
    room_bytes: float
    #: bytes it holds now; decides ties
    held_bytes: int
    #: the path from a neighbour to this worker
    near: Link
    #: what others pay per second that the far fetches occupy the network, relative to that of a network like any other
    far_price: float = 1.0
    #: seconds until spilled inputs are read from disk, at the workers that must read them, queue of that disk included
    read_seconds: float = 0.0
