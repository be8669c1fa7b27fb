"""What workers tell the scheduler about the tier of each key, and how.

One message, on a worker's stream: ``{"op": OP, "disk": [(key, bytes), ...], "back": [key, ...]}``: keys that are only
on disk now, and keys of which that is no longer true (they were read, or are gone). What is never spoken of is in
memory.

A scheduler that meets an unknown op removes the worker. So a worker speaks only when it was told that somebody listens:
the plugin that the scheduler sends to it says so. The scheduler keeps its handler for some seconds after the plugin was
taken out again, since messages may be under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

#: of the messages
OP = "gpurt-tier"


class ResidenceListener(Protocol):
    """Receives what a worker tells."""

    def heard(self, address: str, disk: Iterable[tuple[Hashable, float]], back: Iterable[Hashable]) -> None:
        """Keys of the worker at `address` that went to disk, with their bytes, and that are not only there any more."""


def message(disk: list[tuple[Any, float]], back: list[Any]) -> dict[str, Any]:
    """The message for the scheduler."""
    return {"op": OP, "disk": disk, "back": back}
