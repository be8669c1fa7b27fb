"""`DeviceSpace`: values in device memory, and how they leave it: in time, or when an allocation fails.

A device value is kept in a `Box`, and the store keeps the box. A box is in one of four states:

==========  ==========================  ==================================================
state       value on the device         copy below (pinned blocks, else disk)
==========  ==========================  ==================================================
DEVICE      yes                         maybe: kept after a load, values are immutable
SPILLING    yes, some thread copies it  not yet
BELOW       no                          yes
GONE        no                          no
==========  ==========================  ==================================================

Moves are looked up in `TABLE`, and `DeviceSpace._move` alone makes them, with the value and the byte count.

Victims: values with a copy first (free of charge), then the farthest next use, then the least recently used.

This is the one part of the tiers that is not bookkeeping on the event loop. An allocation fails in the thread of a
task, inside RMM, perhaps deep in a C++ library, and room must be made there and then. To wait for the loop could be a
deadlock: the loop may hold the allocator's lock, or be allocating. Hence:

1. A box is changed under its own lock only. A thread that spills takes locks with ``blocking=False`` and goes on to the
   next box. A thread that is inside one box never waits for another, so no order of locks is needed.
2. Copying a value down may allocate on the device itself (packing a table). If that fails, the same thread enters the
   callback again, which refuses at once (`oom`).
3. A box that is pinned (inputs of running tasks) is not taken. The memory goes with the last reference to the value,
   which may be outside of the box. So success is what RMM counts as free.
4. Before the reference is dropped, the device is made to order the free after its last use (`DeviceBackend.fence`).
   Memory belongs to the stream it was allocated on; a kernel on another stream may still read it.

No vendor library is imported here: `DeviceBackend` is what a device has to offer, `dask_gpurt.backends.cuda` has it.
"""

from __future__ import annotations

import enum
import itertools
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from dask_gpurt.errors import CorruptData, LostData, TierFull
from dask_gpurt.tiers.engine.entry import IllegalMove
from dask_gpurt.tiers.storage.protocol import TierMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from dask_gpurt.tiers.storage.handle import Group, Handle
    from dask_gpurt.tiers.storage.protocol import StorageTier


class DeviceBackend(Protocol):
    """What a kind of device has to offer; also the codec of its values (`handle.Codec`)."""

    def owns(self, value: Any) -> bool:
        """Whether this is a value in device memory."""

    def nbytes(self, value: Any) -> int:
        """Bytes of device memory that it takes."""

    def encode(self, value: Any, parts: Sequence[int] | None = None) -> list[Group]:
        """Frames, those in device memory as `pinned.DeviceFrame`."""

    def decode(self, frames: list[memoryview]) -> Any:
        """The value, on the device again."""

    def decode_pieces(self, frames: list[list[memoryview]]) -> Any:
        """The same, from frames that lie in pieces."""

    def fence(self) -> None:
        """Return when everything that was begun on the device is done."""

    def allocated_bytes(self) -> int:
        """Bytes of device memory in use, by the allocator's own count."""


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
_HERE = (BoxState.DEVICE, BoxState.SPILLING)


class Box:
    """One device value. Fields are read and written under `lock`, but for `pins`, `last_use` and `next_use`."""

    __slots__ = (
        "handle",
        "key",
        "last_use",
        "lock",
        "nbytes",
        "next_use",
        "pins",
        "space",
        "state",
        "unspillable",
        "value",
    )

    def __init__(self, space: DeviceSpace, key: Hashable, value: Any, nbytes: int) -> None:
        self.space = space
        self.key = key
        #: of device memory
        self.nbytes = nbytes
        self.lock = threading.Lock()
        self.state = BoxState.DEVICE
        self.value: Any = value
        self.handle: Handle | None = None
        #: running tasks that need it on the device; changed on the event loop only
        self.pins = 0
        #: serial number of the last use
        self.last_use = 0
        #: see `victims.soonest_use`
        self.next_use: Callable[[], tuple[float, ...] | None] = _unknown
        self.unspillable = False

    def get(self) -> Any:
        """The value, on the device. Blocks when it has to be brought there."""
        return self.space.load(self)

    def __sizeof__(self) -> int:
        return 512  # of host memory


def _unknown() -> None:
    return None


class DeviceSpace:
    """All device values of one worker. Thread-safe.

    Parameters
    ----------
    below
        Where values go, in this order; the first are blocks of pinned memory.
    limit_bytes
        Device memory that kept values may take before they leave unasked; None: only when an allocation fails.
    """

    def __init__(self, backend: DeviceBackend, below: Sequence[StorageTier], *, limit_bytes: int | None) -> None:
        self.backend = backend
        self.below = list(below)
        self.limit_bytes = limit_bytes
        self.metrics = TierMetrics()
        self._lock = threading.Lock()
        self._boxes: dict[int, Box] = {}
        #: of boxes whose value is on the device
        self._device_bytes = 0
        self._serial = itertools.count(1)
        self.unspillable = 0
        #: loads that had to make room first, and that failed for want of memory
        self.load_failures = 0
        self.last_error = ""

    # ------------------------------------------------------------------ values

    def put(self, key: Hashable, value: Any) -> Box:
        """Keep a value; `balance` then makes others leave."""
        box = Box(self, key, value, self.backend.nbytes(value))
        box.last_use = next(self._serial)
        with self._lock:
            self._boxes[id(box)] = box
            self._device_bytes += box.nbytes
        return box

    def remove(self, box: Box) -> None:
        """Forget a value and its copy."""
        with self._lock:
            self._boxes.pop(id(box), None)
        with box.lock:  # waits for a copy that is under way, by a thread that does not wait
            if box.state is not BoxState.GONE:
                self._move(box, "remove")
            handle, box.handle = box.handle, None
        if handle is not None:
            handle.free()

    def load(self, box: Box) -> Any:
        """The value, brought to the device if it is not there.

        Raises
        ------
        LostData
            It was removed, or its copy cannot be read. (A copy that is damaged is noticed, see `handle`.)
        MemoryError
            The device has no room for it, even after all others that could leave have left.
        """
        box.last_use = next(self._serial)
        with box.lock:
            if box.state is BoxState.GONE:
                raise LostData(f"{box.key!r} was removed")
            if box.state is not BoxState.BELOW:
                return box.value
            assert box.handle is not None
            start = time.perf_counter()
            try:
                # May call back into `spill`, on this thread: that finds this box locked and takes another.
                value, _ = box.handle.load(self.backend)
            except MemoryError:
                self.load_failures += 1
                raise
            except (CorruptData, OSError) as e:
                self.metrics.add(read_failures=1)
                raise LostData(f"the copy of {box.key!r} below the device could not be read: {e}") from e
            self._move(box, "load", value)
            self.metrics.add(reads=1, read_bytes=box.nbytes, read_seconds=time.perf_counter() - start)
            return value

    # ------------------------------------------------------------------ leaving

    @property
    def over(self) -> bool:
        """Whether kept values take more than the limit."""
        return self.limit_bytes is not None and self.device_bytes > self.limit_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of kept values, by their own account."""
        return self._device_bytes

    def _move(self, box: Box, event: str, value: Any = None) -> None:
        """Change the state of a box, and with it its value and the byte count. Hold the lock of the box.

        Raises
        ------
        IllegalMove
            The table has no such move: a bug in this package.
        """
        before = box.state
        after = TABLE.get((before, event))
        if after is None:
            raise IllegalMove(f"the box of {box.key!r} is {before.value}, where {event!r} is not allowed")
        box.state = after
        change = (after in _HERE) - (before in _HERE)
        if change:
            box.value = value
            # Never held where device memory is allocated: the callback cannot meet its own thread in it.
            with self._lock:
                self._device_bytes += change * box.nbytes

    def balance(self, coming_bytes: int = 0) -> int:
        """Make values leave until they and `coming_bytes` are within the limit; what left. For an I/O thread."""
        if self.limit_bytes is None:
            return 0
        excess = self.device_bytes + coming_bytes - self.limit_bytes
        return self.spill(excess) if excess > 0 else 0

    def spill(self, nbytes: int) -> int:
        """Make at least `nbytes` of values leave the device, in this thread, without waiting; the bytes that left.

        Called in the allocation callback among others: never raises, never blocks on a lock.
        """
        left = 0
        fenced = False
        for box in self._victims():
            if left >= nbytes:
                break
            if not box.lock.acquire(blocking=False):
                continue
            try:
                if box.state is not BoxState.DEVICE or box.pins:
                    continue
                if not fenced:
                    # Once per call: what is freed below was last used by work that was begun before now. Later
                    # work needs a pin, and pinned boxes are not taken.
                    self.backend.fence()
                    fenced = True
                if self._leave(box):
                    left += box.nbytes
            finally:
                box.lock.release()
        return left

    def _victims(self) -> list[Box]:
        def order(box: Box) -> tuple[bool, bool, tuple[float, ...], int]:
            use = box.next_use()
            # Farthest first; unknown ones come after known-far and before known-near ones only by their age.
            far = tuple(-x for x in use) if use is not None else (-math.inf,)
            return (box.handle is None, use is None, far, box.last_use)

        able = [b for b in self._all() if b.state is BoxState.DEVICE and not b.pins and not b.unspillable]
        return sorted(able, key=order)

    def _all(self) -> list[Box]:
        # A copy, without the lock: the callback may interrupt the thread that holds it. (C code, atomic under the GIL.)
        return list(self._boxes.values())

    def _leave(self, box: Box) -> bool:
        """Move the value of a box off the device; False where it could not be copied. Hold the lock of the box."""
        if box.handle is not None:
            self._move(box, "drop")
            return True
        self._move(box, "copy")
        try:
            box.handle = self._copy(box)
        finally:
            self._move(box, "copy-failed" if box.handle is None else "copied")
        return box.handle is not None

    def _copy(self, box: Box) -> Handle | None:
        start = time.perf_counter()
        try:
            groups = self.backend.encode(box.value)
        except MemoryError as e:  # no room to pack it: another one may need none
            self._failed(e)
            return None
        except Exception as e:
            box.unspillable = True
            self.unspillable += 1
            self._failed(e)
            return None
        try:
            handle = self._write(groups)
        except Exception as e:
            self._failed(e)
            return None
        self.metrics.add(writes=1, written_bytes=box.nbytes, write_seconds=time.perf_counter() - start)
        return handle

    def _write(self, groups: list[Group]) -> Handle:
        error: Exception = TierFull("there is no tier below the device")
        staged: list[Group] | None = None
        try:
            for tier in self.below:
                try:
                    if hasattr(tier, "pool"):  # blocks take device frames as they are
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

    def _failed(self, error: BaseException) -> None:
        self.metrics.add(write_failures=1)
        self.last_error = f"{type(error).__name__}: {error}"

    # ------------------------------------------------------------------ inspection

    def largest(self, n: int = 10) -> list[tuple[str, int, bool]]:
        """(key, bytes, pinned) of the largest values on the device."""
        here = [b for b in self._all() if b.state in _HERE]
        here.sort(key=lambda b: b.nbytes, reverse=True)
        return [(str(b.key), b.nbytes, b.pins > 0) for b in here[:n]]

    def statistics(self) -> dict[str, Any]:
        """Return counts as plain JSON."""
        boxes = self._all()
        return {
            "values": len(boxes),
            "device_bytes": self.device_bytes,
            "limit_bytes": self.limit_bytes,
            "allocator_bytes": self.backend.allocated_bytes(),
            "below_values": sum(1 for b in boxes if b.state is BoxState.BELOW),
            "unspillable": self.unspillable,
            "load_failures": self.load_failures,
            "last_error": self.last_error,
            "to_and_from_device": self.metrics.to_dict(),
            "below": {
                tier.tier.name.lower(): tier.metrics.to_dict() for tier in self.below if hasattr(tier, "metrics")
            },
        }

    def validate(self) -> None:
        """Check every invariant; AssertionError names what is broken. Nothing may be under way."""
        assert self._device_bytes == sum(b.nbytes for b in self._all() if b.state is BoxState.DEVICE)
        for box in self._all():
            assert not box.lock.locked(), box.key
            assert box.state in (BoxState.DEVICE, BoxState.BELOW), (box.key, box.state)
            assert (box.value is None) == (box.state is BoxState.BELOW), box.key
            assert box.handle is not None or box.state is BoxState.DEVICE, box.key
            assert box.pins >= 0, box.key

    def close(self) -> None:
        """Forget all values, and close the tiers that are ours alone (blocks of memory)."""
        for box in self._all():
            self.remove(box)
        for tier in self.below:
            if hasattr(tier, "pool"):
                tier.close()


def stage(frame: Any) -> Any:
    """A frame in ordinary host memory."""
    if not hasattr(frame, "copy_to"):
        return frame
    out = numpy.empty(frame.nbytes, "u1").data
    frame.copy_to(0, out)
    return out
