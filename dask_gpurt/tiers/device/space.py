"""`DeviceSpace`: values in device memory, and how they leave it: in time, or when an allocation fails.

A device value is kept in a `Box`, and the store keeps the box. `make_room` is for an allocation that has failed: it
makes values leave until the *allocator* has got that much back. `spill` and `balance` do it by what is kept.

Bytes: several values may be views of one allocation, whose memory goes with the last of them. So kept bytes are those
of distinct allocations (`DeviceBackend.blocks`), and room is what the allocator's own count says, before and after a
value was dropped. A value whose object another still holds, or whose memory came past the allocator (`Box.outside`),
leaves without making room there, and is not counted as if it had.

Victims: values with a copy first, free of charge. Then what others hold (`held`, rows of shuffles): no output of a
shuffle is made before all its inputs were split, so these are used late. Then values, the farthest next use first, then
the least recently used.

This is the one part of the tiers that is not bookkeeping on the event loop. An allocation fails in the thread of a
task, inside RMM, perhaps deep in a C++ library, and room must be made there and then. To wait for the loop could be a
deadlock: the loop may hold the allocator's lock, or be allocating. Hence:

1. A box is changed under its own lock only. A thread that spills takes locks with ``blocking=False`` and goes on to the
   next box. Only where none is left does it wait, for one that another thread copies.
2. `make_room` takes no device memory, which is full. Blocks are kept ready for it (`pinned.BlockPool.keep_ahead`);
   where none is left, it locks pages: that is several times as fast as to write to a disk.
3. A box that is pinned (inputs of running tasks) is not taken.
4. Before the reference is dropped, the device is made to order the free after its last use (`DeviceBackend.fence`).
   Memory belongs to the stream it was allocated on; a kernel on another stream may still read it.

No vendor library is imported here: `DeviceBackend` is what a device has to offer.
"""

from __future__ import annotations

import itertools
import math
import threading
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import LostData
from dask_gpurt.tiers.device.blocks import KeptBlocks
from dask_gpurt.tiers.device.box import HERE, TABLE, Box, BoxState
from dask_gpurt.tiers.device.copies import Copies
from dask_gpurt.tiers.engine.entry import IllegalMove
from dask_gpurt.tiers.storage.handle import as_raised

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from dask_gpurt.model.device_memory import HeldOnDevice
    from dask_gpurt.tiers.device.backend import DeviceBackend
    from dask_gpurt.tiers.storage.protocol import StorageTier

#: for which an allocation waits at most for a value that another thread makes leave: 1 GB over a slow link
LEAVING_SECONDS = 1.0


class DeviceSpace:
    """All device values of one worker. Thread-safe.

    Parameters
    ----------
    below
        Where values go, in this order; the first are blocks of pinned memory.
    limit_bytes
        Device memory that kept values may take before they leave unasked; None: only when an allocation fails.
    high_bytes
        Bytes allocated on the device, by tasks at work too, above which values leave unasked; None: no such mark.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        below: Sequence[StorageTier],
        *,
        limit_bytes: int | None,
        high_bytes: int | None = None,
    ) -> None:
        self.backend = backend
        self.below = list(below)
        self.copies = Copies(backend, self.below)
        self.limit_bytes = limit_bytes
        self.high_bytes = high_bytes
        #: device memory beside the values that may leave, too; None: there is none
        self.held: HeldOnDevice | None = None
        #: that has left so far
        self.held_left_bytes = 0
        #: something else moves values out of this memory: none leaves unasked
        self.rests = False
        #: of `_boxes` and `_blocks`
        self._lock = threading.Lock()
        self._boxes: dict[int, Box] = {}
        self._blocks = KeptBlocks()
        self._serial = itertools.count(1)
        #: called with a box whose value has left the device or come back, in any thread, its lock held; must not raise
        self.on_moved: Callable[[Box], None] = lambda box: None
        #: libraries of values so far whose memory came past the allocator
        self.outside_seen: set[str] = set()
        #: values that left while the allocator got nothing back: others held the memory
        self.left_without_room = 0

    # ------------------------------------------------------------------ values

    def put(self, key: Hashable, value: Any) -> Box:
        """Keep a value; `balance` then makes others leave."""
        box = Box(self, key, value, self.backend.blocks(value))
        box.last_use = next(self._serial)
        box.outside = self.backend.outside(value)
        if box.outside:
            self.outside_seen.add(type(value).__module__.partition(".")[0])
        with self._lock:
            self._boxes[id(box)] = box
            self._blocks.count(box.blocks, 1)
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
            It was removed, or its copy cannot be read.
        MemoryError
            The device has no room for it, even after all others that could leave have left.
        OSError
            The copy cannot be read now.
        Exception
            What the code of a member in host memory raised.
        """
        box.last_use = next(self._serial)
        with box.lock:
            if box.state is BoxState.GONE:
                raise LostData(f"{box.key!r} was removed")
            if box.state is not BoxState.BELOW:
                return box.value
            # May call back into `make_room`, on this thread: that finds this box locked and takes another.
            value, box.blocks = as_raised(self.copies.read, box)  # others than before; so may be their sizes
            box.nbytes = sum(n for _, n in box.blocks)
            self._move(box, "load", value)
            self.on_moved(box)
            return value

    def touch(self, box: Box) -> bool:
        """Whether a value that is pinned is on the device, where it then stays; never blocks, unlike `load`."""
        if not box.lock.acquire(blocking=False):
            return False
        try:
            box.last_use = next(self._serial)
            return box.state is BoxState.DEVICE  # who makes values leave looks at pins with the lock held
        finally:
            box.lock.release()

    # ------------------------------------------------------------------ leaving

    @property
    def over(self) -> bool:
        """Whether kept values take more than their limit, or all that is allocated passes the high mark."""
        return self._excess() > 0

    @property
    def device_bytes(self) -> int:
        """Bytes of the allocations that kept values hold on the device."""
        return self._blocks.nbytes

    resident_bytes = device_bytes  # see `task_admission.Memory`

    #: see `task_admission.Memory`
    moving_bytes = 0

    @property
    def fixed_bytes(self) -> int:
        """Bytes allocated on the device, without those that others hold and can do without."""
        return self.backend.allocated_bytes() - (0 if self.held is None else self.held.nbytes)

    @property
    def room_bytes(self) -> int:
        """Bytes of values that could come now and keep all below its limits."""
        return 0 if self.rests else max(0, -self._excess())

    @property
    def outside_bytes(self) -> int:
        """Bytes of values on the device whose memory came past the allocator."""
        return sum(b.nbytes for b in self._all() if b.outside and b.state in HERE)

    def _excess(self) -> int:
        """Bytes too much; negative: room. Without limits there is neither."""
        return max((excess for excess in self._excesses() if excess is not None), default=0)

    def _excesses(self) -> tuple[int | None, int | None]:
        """Bytes of kept values beyond their limit, and all allocated ones beyond the high mark; None: no such limit."""
        if self.rests:
            return None, None
        return (
            None if self.limit_bytes is None else self.device_bytes - self.limit_bytes,
            None if self.high_bytes is None else self.backend.allocated_bytes() - self.high_bytes,
        )

    def _move(self, box: Box, event: str, value: Any = None) -> int:
        """Change the state of a box, and with it its value and the byte count. Hold the lock of the box.

        Returns the bytes by which kept values are less. `IllegalMove`: the table has no such move, a bug in here.
        """
        before = box.state
        after = TABLE.get((before, event))
        if after is None:
            raise IllegalMove(f"the box of {box.key!r} is {before.value}, where {event!r} is not allowed")
        box.state = after
        change = (after in HERE) - (before in HERE)
        if not change:
            return 0
        box.value = value
        # Never held where device memory is allocated: the callback cannot meet its own thread in it.
        with self._lock:
            return self._blocks.count(box.blocks, change)

    def balance(self, coming_bytes: int = 0) -> int:
        """Make values leave until all is within the limits, and `coming_bytes` more; what left. For an I/O thread."""
        left = 0
        for mark in (0, 1):
            excess = self._excesses()[mark]
            if excess is not None and excess + coming_bytes > 0:
                # What others hold is no part of the kept bytes: these are no less when it leaves.
                left += self._leave_until(excess + coming_bytes, for_allocation=False, held=mark == 1)
        return left

    def spill(self, nbytes: int) -> int:
        """Make at least `nbytes` of what is kept leave the device, in this thread; the bytes that left.

        Never raises, never blocks on the lock of a box.
        """
        return self._leave_until(nbytes, for_allocation=False)

    def make_room(self, nbytes: int) -> int:
        """Make values leave until the allocator has got `nbytes` back, in this thread; the bytes that it got back.

        For the allocation callback: takes no device memory, never raises, and waits for the lock of a box only where
        nothing else can leave and another thread is making that one leave.
        """
        before = self.backend.allocated_bytes()
        left = self._leave_until(nbytes, for_allocation=True)
        if left:
            return left
        # No deadlock: who waits here has no box that leaves, and who copies such a box waits for no lock.
        for box in self._all():
            if box.state is BoxState.SPILLING and box.lock.acquire(timeout=LEAVING_SECONDS):
                box.lock.release()
                break
        return max(0, before - self.backend.allocated_bytes())

    def _leave_until(self, nbytes: int, *, for_allocation: bool, held: bool = True) -> int:
        free: list[Box] = []
        rest: list[Box] = []
        chosen = next(self._serial)
        for box in self._victims():
            (free if box.clean else rest).append(box)
        left = self._leave_of(free, nbytes, for_allocation, chosen)
        if held and left < nbytes:
            left += self._leave_held(nbytes - left, for_allocation)
        if left < nbytes:
            left += self._leave_of(rest, nbytes - left, for_allocation, chosen)
        return left

    def _leave_held(self, nbytes: int, for_allocation: bool) -> int:
        """Make what others hold leave; the bytes as in `make_room` or `spill`."""
        held, left, gone = self.held, 0, 1
        before = self.backend.allocated_bytes()
        try:
            # Some may still be used by others, and makes no room as yet: so once more, until none is left.
            while held is not None and gone and left < nbytes:
                gone = held.leave(nbytes - left)
                self.held_left_bytes += gone
                left = max(0, before - self.backend.allocated_bytes()) if for_allocation else left + gone
        except Exception as e:  # the host's memory is short, too
            self.copies.failed(e)
        return left

    def _leave_of(self, boxes: Sequence[Box], nbytes: int, for_allocation: bool, chosen: int) -> int:
        left = 0
        fenced = False
        for box in boxes:
            if left >= nbytes:
                break
            if (for_allocation and box.outside) or not box.lock.acquire(blocking=False):
                continue
            try:
                if box.state is not BoxState.DEVICE or box.pins:
                    continue
                if not fenced or box.last_use > chosen:
                    # Once per call: what is freed below was last used by work that was begun before now. Later
                    # work needs a pin. A task that had one meanwhile may have left work behind: once more for it.
                    self.backend.fence()
                    fenced = True
                kept, room = self._leave(box)
                left += room if for_allocation else kept
            finally:
                box.lock.release()
        return left

    def _victims(self) -> list[Box]:
        def order(box: Box) -> tuple[bool, bool, tuple[float, ...], int]:
            use = box.next_use()
            # Farthest first; unknown ones come after known-far and before known-near ones only by their age.
            far = tuple(-x for x in use) if use is not None else (-math.inf,)
            return (not box.clean, use is None, far, box.last_use)

        able = [b for b in self._all() if b.state is BoxState.DEVICE and not b.pins and not b.unspillable]
        return sorted(able, key=order)

    def _all(self) -> list[Box]:
        # A copy, without the lock: the callback may interrupt the thread that holds it. (C code, atomic under the GIL.)
        return list(self._boxes.values())

    def _leave(self, box: Box) -> tuple[int, int]:
        """Move the value of a box off the device. Hold the lock of the box.

        Returns
        -------
        tuple of int, int
            Bytes that kept values are less, and that the allocator got back; 0 where it could not be copied.
        """
        event = "drop"
        if not box.clean:
            # To compare the old copy would take a copy to the host, too.
            old, box.handle, box.lent = box.handle, None, False
            if old is not None:
                old.free()
            self._move(box, "copy")
            try:
                box.handle = self.copies.write(box)
            finally:
                if box.handle is None:
                    self._move(box, "copy-failed")
            if box.handle is None:
                return 0, 0
            event = "copied"
        before = self.backend.allocated_bytes()
        kept = self._move(box, event)
        # Other threads allocate and free, too; between these two lines little of it happens.
        room = max(0, before - self.backend.allocated_bytes())
        self.left_without_room += not room
        self.on_moved(box)
        return kept, room

    # ------------------------------------------------------------------ inspection

    def largest(self, n: int = 10) -> list[tuple[str, int, bool]]:
        """(key, bytes, pinned) of the largest values on the device."""
        here = [b for b in self._all() if b.state in HERE]
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
            "outside_values": sum(b.outside and b.state in HERE for b in boxes),
            "outside_bytes": self.outside_bytes,
            "held_bytes": 0 if self.held is None else self.held.nbytes,
            "held_left_bytes": self.held_left_bytes,
            "outside_libraries": ", ".join(sorted(self.outside_seen)),
            "below_values": sum(1 for b in boxes if b.state is BoxState.BELOW),
            "left_without_room": self.left_without_room,
            **self.copies.statistics(),
        }

    def validate(self) -> None:
        """Check every invariant; AssertionError names what is broken. Nothing may be under way."""
        here = [b for b in self._all() if b.state is BoxState.DEVICE]
        self._blocks.validate(block for b in here for block, _ in b.blocks)
        for box in self._all():
            assert not box.lock.locked(), box.key
            assert box.state in (BoxState.DEVICE, BoxState.BELOW), (box.key, box.state)
            assert (box.value is None) == (box.state is BoxState.BELOW), box.key
            assert box.handle is not None or box.state is BoxState.DEVICE, box.key
            assert box.pins >= 0, box.key

    def close(self) -> None:
        """Forget all values, and close the tiers that are the device's alone."""
        for box in self._all():
            self.remove(box)
        self.copies.close()
