"""`write_below`: frames of a device value on the first tier below the device that takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.errors import TierFull
from dask_gpurt.tiers.device.pinned import SlabTier, stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.tiers.storage.handle import Group, Handle
    from dask_gpurt.tiers.storage.protocol import StorageTier


def write_below(below: Sequence[StorageTier], groups: list[Group], grow: bool) -> Handle:
    """The copy, on the first of `below` that has room.

    Parameters
    ----------
    grow
        Whether blocks may be allocated for it.

    Raises
    ------
    OSError
        None of them takes it; that of the last.
    """
    error: Exception = TierFull("there is no tier below the device")
    staged: list[Group] | None = None
    try:
        for tier in below:
            try:
                if isinstance(tier, SlabTier):  # blocks take device frames as they are
                    return tier.write(groups, grow=grow)
                if staged is None:
                    staged = [(part, [stage(b) for b in buffers]) for part, buffers in groups]
                return tier.write(staged)
            except OSError as e:
                error = e
        raise error
    finally:
        # Its traceback holds this frame, which holds it and the frames of the value: the value would stay on the
        # device until the next garbage collection.
        del error
