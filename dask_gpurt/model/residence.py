"""What workers tell the scheduler about the tier of each key, and how.

One message, on a worker's stream: ``{"op": OP, "disk": [(key, bytes), ...], "back": [key, ...]}``: keys that are only
on disk now, and keys of which that is no longer true (they were read, or are gone). What is never spoken of is in
memory.

A scheduler that meets an unknown op removes the worker. So a worker speaks only when it was told that somebody listens:
the plugin that the scheduler sends to it says so. The scheduler keeps its handler for some seconds after the plugin was
taken out again, since messages may be under way.
"""

from __future__ import annotations

from typing import Any

#: of the messages
OP = "gpurt-tier"


def message(disk: list[tuple[Any, float]], back: list[Any]) -> dict[str, Any]:
    """The message for the scheduler."""
    return {"op": OP, "disk": disk, "back": back}
