"""What an engine holds in device memory and can do without, for the one that makes room there.

When an allocation fails on the device, the tiers make values leave. Rows of shuffles lie there, too, and the tiers know
nothing of them but this protocol.
"""

from __future__ import annotations

from typing import Protocol


class HeldOnDevice(Protocol):
    """Device memory of this process beside the values of tasks. Any thread."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device that may leave."""

    def leave(self, nbytes: int) -> int:
        """Copy about `nbytes` to the host, in this thread, and give their device memory up.

        Called inside of a failed allocation, too: it takes no device memory, and waits for no lock that is held where
        device memory is allocated.

        Returns
        -------
        int
            Bytes given up here; 0: there are none left. The allocator gets back less where others still use some.
        """
