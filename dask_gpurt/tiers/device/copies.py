"""`Copies`: copies of device values on the tiers below the device, and what became of each attempt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import CorruptData, LostData, TierFull
from dask_gpurt.tiers.device.pinned import SlabTier, stage
from dask_gpurt.tiers.engine.io_threads import will_pass
from dask_gpurt.tiers.storage.handle import DecodeError
from dask_gpurt.tiers.storage.protocol import TierMetrics

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from dask_gpurt.tiers.device.backend import DeviceBackend
    from dask_gpurt.tiers.device.box import Box
    from dask_gpurt.tiers.storage.handle import Group, Handle
    from dask_gpurt.tiers.storage.protocol import StorageTier

#: bytes of copies that make a measurement
MEASURED_BYTES = 1 << 20


class Copies:
    """Thread-safe where each call has the lock of its box.

    Copies go to `below`, in this order; the first are blocks of pinned memory. The list itself: it may change.
    """

    def __init__(self, backend: DeviceBackend, below: Sequence[StorageTier]) -> None:
        self.backend = backend
        self.below = below
        self.metrics = TierMetrics()
        #: values that cannot be encoded
        self.unspillable = 0
        #: reads that failed for want of device memory
        self.load_failures = 0
        self.last_error = ""

    def write(self, box: Box) -> Handle | None:
        """Copy the value of a box; None: it could not be, and is on the device as before."""
        start = time.perf_counter()
        try:
            groups = self.backend.encode(box.value)
        except MemoryError as e:  # of the host, or of what the backend keeps apart for this: another one may need less
            self.failed(e)
            return None
        except BaseException as e:  # a panic of an extension in Rust is no `Exception`
            box.unspillable = True
            self.unspillable += 1
            self.failed(e)
            return None
        try:
            handle = write_below(self.below, groups)
        except Exception as e:
            self.failed(e)
            return None
        self.metrics.add(writes=1, written_bytes=box.nbytes, write_seconds=time.perf_counter() - start)
        return handle

    def read(self, box: Box) -> tuple[Any, Sequence[tuple[Hashable, int]]]:
        """The value of a box, on the device again, and the allocations that it now holds there.

        Raises
        ------
        LostData
            The copy cannot be read. (One that is damaged is noticed, see `handle`.)
        MemoryError
            The host has no memory to read it now.
        OSError
            The process has too few descriptors, or the like, to read it now.
        DecodeError
            What the code of a member in host memory raised (``__cause__``), or the device has no room for it.
        """
        assert box.handle is not None
        start = time.perf_counter()
        try:
            value, _ = box.handle.load(self.backend)
        except DecodeError as e:
            self.load_failures += isinstance(e.__cause__, MemoryError)
            raise
        except (CorruptData, OSError) as e:
            self.metrics.add(read_failures=1)
            if will_pass(e):
                raise
            raise LostData(f"the copy of {box.key!r} below the device could not be read: {e}") from e
        blocks = self.backend.blocks(value)
        nbytes = sum(n for _, n in blocks)
        self.metrics.add(reads=1, read_bytes=nbytes, read_seconds=time.perf_counter() - start)
        return value, blocks

    def failed(self, error: BaseException) -> None:
        """Count that something could not leave the device."""
        self.metrics.add(write_failures=1)
        self.last_error = f"{type(error).__name__}: {error}"

    @property
    def promotion_rate(self) -> float | None:
        """Bytes/s at which values came back from blocks of host memory so far; None: too few to say."""
        metrics = [tier.metrics for tier in self.below if isinstance(tier, SlabTier)]
        nbytes, seconds = sum(m["read_bytes"] for m in metrics), sum(m["read_seconds"] for m in metrics)
        return nbytes / seconds if nbytes >= MEASURED_BYTES and seconds > 0 else None

    def statistics(self) -> dict[str, Any]:
        """Return counts as plain JSON."""
        return {
            "unspillable": self.unspillable,
            "load_failures": self.load_failures,
            "last_error": self.last_error,
            "to_and_from_device": self.metrics.to_dict(),
            "below": {
                tier.tier.name.lower(): tier.metrics.to_dict() for tier in self.below if hasattr(tier, "metrics")
            },
        }

    def close(self) -> None:
        """Close the tiers that are the device's alone (blocks of memory)."""
        for tier in self.below:
            if isinstance(tier, SlabTier):
                tier.close()


def write_below(below: Sequence[StorageTier], groups: list[Group]) -> Handle:
    """The copy, on the first of `below` that has room.

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
                    return tier.write(groups)
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
