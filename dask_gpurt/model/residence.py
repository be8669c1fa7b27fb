"""The message by which a worker reports the tier of its keys to the scheduler.

It goes over the worker's stream: ``{"op": OP, "disk": [(key, bytes), ...], "pinned": [...], "back": [key, ...],
"pinned_rate": bytes per second or None}``. ``disk`` has keys that are only on disk now, or farther. ``pinned`` has keys
of device values that are only in host memory now; ``pinned_rate`` is how fast they came back to the device so far.
``back`` has keys of which neither is true any more, as they were read or are gone. A key that was never in a message is
where tasks compute on it: in host memory, or on the device.

A scheduler that meets an unknown op removes the worker. So a worker sends only when the plugin that the scheduler
gave it says that the scheduler listens. The scheduler keeps its handler for some seconds after the plugin was taken
out again, since messages may be under way.
"""

from __future__ import annotations

from typing import Any

#: of the messages
OP = "gpurt-tier"


def message(
    disk: list[tuple[Any, float]],
    back: list[Any],
    pinned: list[tuple[Any, float]],
    pinned_rate: float | None = None,
) -> dict[str, Any]:
    """The message for the scheduler."""
    return {"op": OP, "disk": disk, "back": back, "pinned": pinned, "pinned_rate": pinned_rate}
