"""`Box`: one device value, and where it is.

==========  ==========================  ==================================================
state       value on the device         copy below (pinned blocks, else disk)
==========  ==========================  ==================================================
DEVICE      yes                         maybe: kept after a load, see `Box.lent`
SPILLING    yes, some thread copies it  not yet
BELOW       no                          yes
GONE        no                          no
==========  ==========================  ==================================================

Moves are looked up in `TABLE`, and `DeviceSpace._move` alone makes them, with the value and the byte count.
"""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt.model.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from dask_gpurt.tiers.storage.handle import Handle


class BoxState(enum.Enum):
    """Where the value of a box is; see the module."""

    DEVICE = "device"
    SPILLING = "spilling"
    BELOW = "below"
    GONE = "gone"


#: (state, event) -> next state
TABLE: dict[tuple[BoxState, str], BoxState] = {
    (BoxState.DEVICE, "copy"): BoxState.SPILLING,
    (BoxState.DEVICE, "drop"): BoxState.BELOW,  # it has a copy
    (BoxState.DEVICE, "remove"): BoxState.GONE,
    (BoxState.SPILLING, "copied"): BoxState.BELOW,
    (BoxState.SPILLING, "copy-failed"): BoxState.DEVICE,
    (BoxState.BELOW, "load"): BoxState.DEVICE,
    (BoxState.BELOW, "remove"): BoxState.GONE,
}
#: the value is on the device, and counted
HERE = (BoxState.DEVICE, BoxState.SPILLING)
#: of host memory that a box takes
BOX_BYTES = 512


class BoxKeeper(Protocol):
    """What a box belongs to."""

    def load(self, box: Box) -> Any:
        """The value, brought to the device if it is not there."""

    def remove(self, box: Box) -> None:
        """Forget the value and its copy."""

    def touch(self, box: Box) -> bool:
        """Whether a pinned value is on the device."""


class Box:
    """One device value. Fields are read and written under `lock`, but for `pins`, `lent`, `last_use` and `next_use`."""

    __slots__ = (
        "blocks",
        "handle",
        "key",
        "last_use",
        "lent",
        "lock",
        "lost",
        "nbytes",
        "next_use",
        "outside",
        "pins",
        "space",
        "state",
        "unspillable",
        "value",
    )

    def __init__(self, space: BoxKeeper, key: Hashable, value: Any, blocks: Sequence[tuple[Hashable, int]]) -> None:
        self.space = space
        self.key = key
        #: the allocations that it holds while it is on the device
        self.blocks = blocks
        #: of device memory, shared with others or not
        self.nbytes = sum(n for _, n in blocks)
        self.lock = threading.Lock()
        self.state = BoxState.DEVICE
        self.value: Any = value
        self.handle: Handle | None = None
        #: running tasks that need it on the device; changed on the event loop only
        self.pins = 0
        #: a task had it on the device, and may have changed it: a copy made before that counts no more
        self.lent = False
        #: serial number of the last use
        self.last_use = 0
        #: see `victims.soonest_use`
        self.next_use: Callable[[], tuple[float, ...] | None] = lambda: None
        self.unspillable = False
        #: no valid copy is left; set on the event loop
        self.lost = False
        #: its memory is not the allocator's: that it leaves makes no room there
        self.outside = False

    def get(self) -> Any:
        """The value, on the device. Blocks when it has to be brought there."""
        return self.space.load(self)

    @property
    def clean(self) -> bool:
        """It has a copy below that is certainly the same."""
        return self.handle is not None and not self.lent

    @property
    def in_memory(self) -> bool:
        """The value is on the device."""
        return self.state in HERE

    @property
    def tier(self) -> Tier:
        """The fastest place that has the value."""
        handle = self.handle
        return Tier.DEVICE if self.state in HERE or handle is None else getattr(handle, "tier", Tier.DISK)

    @property
    def below_bytes(self) -> int | None:
        """What its copy takes below the device; None without one."""
        handle = self.handle
        return None if handle is None else handle.nbytes

    def __sizeof__(self) -> int:
        return BOX_BYTES
