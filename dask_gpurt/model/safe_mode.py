"""Safe mode: parts of the extension that do as Dask would, for as long as an operator says so.

Unlike a detach it works while shuffles run, and takes effect with the next decision or message. Nothing is uninstalled.

placement
    Dask decides where tasks run and which are stolen. No second copies of stragglers, no fused steps in new graphs.
tiers
    Nothing is read ahead of its use. What tasks free goes back to the system.
shuffle
    New shuffles are Dask's. Those that run send their next messages over Dask's comms, uncompressed, and leave outputs
    on the workers they were planned for.

The scheduler and each worker keep the parts in an attribute of their own object: what is installed later finds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PARTS = ("placement", "tiers", "shuffle")
_ATTRIBUTE = "_gpurt_safe"


def parts_of(node: object) -> frozenset[str]:
    """The parts that a `distributed.Scheduler` or `distributed.Worker` has in safe mode."""
    found: frozenset[str] = getattr(node, _ATTRIBUTE, frozenset())
    return found


def keep(node: object, parts: Iterable[str]) -> None:
    """Note them, and no others. Who has to do something about it is told by `extension.safe`."""
    setattr(node, _ATTRIBUTE, frozenset(parts))


def chosen(parts: Iterable[str] | None) -> tuple[str, ...]:
    """The parts that a user named; None: all.

    Raises
    ------
    ValueError
        There is no such part.
    """
    if parts is None:
        return PARTS
    named = (parts,) if isinstance(parts, str) else tuple(parts)
    wrong = [part for part in named if part not in PARTS]
    if wrong or not named:
        raise ValueError(f"parts are {named!r}, must be some of {', '.join(PARTS)}, or None for all")
    return named
