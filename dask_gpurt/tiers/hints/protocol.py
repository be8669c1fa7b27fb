"""The messages of next-use hints, as both halves know them.

From the scheduler, on a worker's stream: ``{"op": OP, "items": [(key, uses), ...]}``. The last one of a stream has
``"stop": True``. A worker that wants them says so in its heartbeats: ``metrics["gpurt"]["next_use"]`` is `PROTOCOL`.
When it no longer does, the last message for the time being has ``"pause": True``.
"""

from __future__ import annotations

#: of the messages
OP = "gpurt-next-use"
#: to be raised when messages change: workers of another release then get none
PROTOCOL = 1
#: field of `scheduler_plugin.HEARTBEAT_NAME`
HEARTBEAT_FIELD = "next_use"
#: uses of one key that are sent
KEEP = 8

#: priorities of the tasks that will read a key, soonest first; empty: no task is known to
Uses = tuple[tuple[float, ...], ...]


def without(uses: Uses, use: tuple[float, ...]) -> Uses:
    """One use less. Only one: tasks that were submitted one by one may have the same priority."""
    if use not in uses:
        return uses
    i = uses.index(use)
    return uses[:i] + uses[i + 1 :]
