"""Why a slot is idle: the causes of the stall ledger, in the order in which they are shown."""

from __future__ import annotations

BUSY = "busy"

#: cause -> (short label, what it means)
CAUSES: dict[str, tuple[str, str]] = {
    "network": ("waiting for input", "a task is here, and its inputs are on their way from other workers"),
    "unspill": ("unspilling", "a task reads its inputs back from a lower tier"),
    "memory": ("memory", "a task waits for room in memory, or the worker is paused because its memory is full"),
    "shuffle_barrier": ("shuffle barrier", "all that is left waits until every input of a shuffle has been sent"),
    "skew": ("skewed task", "nothing else can run until a task ends that takes much longer than its siblings"),
    "queued_elsewhere": ("queued elsewhere", "ready tasks wait for a thread of another worker"),
    "scheduler": ("scheduler", "a task was ready, but its assignment had not been decided or had not arrived"),
    "planning": ("own planning", "the part of the scheduler's time that was spent in this package's decisions"),
    "serialisation": (
        "task overhead",
        "the worker prepares a task or stores its result: serialisation, deserialisation, its event loop",
    ),
    "resources": ("resources", "a task is here, and waits for an abstract resource that others hold"),
    "no_ready_task": ("no ready task", "tasks run elsewhere, and all others wait for their results"),
    "no_work": ("no work", "nothing was submitted"),
}

#: the causes that a worker knows by itself
LOCAL = ("network", "unspill", "memory", "shuffle_barrier", "serialisation", "resources")
#: the causes that only the scheduler can tell apart; a worker says ``unassigned`` for all of them
CENTRAL = ("shuffle_barrier", "skew", "queued_elsewhere", "scheduler", "planning", "no_ready_task", "no_work")
UNASSIGNED = "unassigned"
#: how the key of a task begins that waits for all senders of a shuffle
BARRIER = "shuffle-barrier-"
#: key of the histograms of waits (`dask_gpurt.observe.collect.wait_histogram`) in a worker's heartbeat
WAITS = "slot_waits"
#: key of the moment at which the figures of a heartbeat were taken: seconds of the worker's own clock, never going back
CLOCK = "slot_clock"


def label(use: str) -> str:
    """How a cause, or ``busy``, is called."""
    return BUSY if use == BUSY else CAUSES[use][0]


def heartbeat_key(name: str) -> str:
    """The key of a cause, or of ``busy``, in a worker's heartbeat."""
    return f"slot_{name}_seconds"
