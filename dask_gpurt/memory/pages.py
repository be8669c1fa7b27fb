"""`Pages`: large blocks of memory made of pages that were used before. The shuffle and the tiers share them.

`Pages.take` gives a block; it goes back by itself when its last view dies. Its users say how long free memory waits.
While a shuffle runs, all of it does (`Pages.keep`). Else at most `allowance_bytes` do, and what was not taken between
two looks goes (`Pages.trim_idle`). `Pages.trim` gives all of it back, for a process that has to be small. `Pages.owner`
says which block an address lies in: a column of a frame that was read from disk keeps the memory of the whole frame,
and that has to be counted.

Theory of operation. A shuffle needs memory in blocks of very different sizes: what is gathered for a peer, what is
received, what becomes an output. What is read from disk needs as much as what left for it gave back a moment ago. The
nanny sets ``MALLOC_TRIM_THRESHOLD_``, so freed memory goes back to the system at once. Fresh memory costs ten times
what writing to it costs (a page fault for every 4 KiB, 0.6 ms per MB on a virtual machine). An allocator can use a
freed block again only for one that is no longer, so an output of 40 MB found no place in what forty messages of 1 MB
had left: rows were there twice.

Here a block is *virtual*: it is put together from free *extents* (ranges of pages that lie anywhere) by ``mremap``,
which moves page table entries and neither copies nor clears (0.04 ms per MB). So the peak is what is alive at a time,
whatever the sizes, and memory is touched the first time once. What is fresh comes in pieces of `FRESH_BYTES`, aligned
and advised for huge pages (0.15 ms per MB instead of 0.6); what is not needed of them is not touched.

Invariants
- An extent is one mapping of the kernel, or a part of one, and belongs to one block or to the free list.
- A block's first extent that is long enough is used where it lies; only several need `mremap`.
- `take` never fails for want of extents: without ``mremap`` (no Linux), for small blocks and when the kernel refuses,
  it is plain memory of numpy's.
- The finalizer of a block may run in any thread, also inside `take` (garbage collection), so it takes no lock: it
  appends to a deque, first the block, then its memory. A block's number tells it from a later one at its address.

Rejected: slabs of 2 MiB, counted by their users (memory goes back when the last of several neighbours does); giving
freed memory back and taking fresh huge pages (0.15 ms per MB where the host of a virtual machine has the memory, up to
7 where it has to find it first); coalescing free extents (what is returned was one block of a like size mostly); a
pool of whole mappings for what is read from disk (neither could use what the other had left); malloc's own memory, with
its thresholds raised (what is free in its heaps counts as used, but has no other use).
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import itertools
import math
import mmap
import threading
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np

from dask_gpurt.memory import reclaim

if TYPE_CHECKING:
    from collections.abc import Callable

#: extents are multiples of this many bytes
GRANULE = 1 << 15
#: shorter blocks come from the C allocator
SMALLEST = 1 << 18
#: what was not taken for so long goes, if no shuffle runs
IDLE_SECONDS = 2.0
#: fresh memory is mapped in multiples of this
FRESH_BYTES = 8 << 20
#: from so many extents on, of blocks and free, none are joined or kept: a process may have 65,530 mappings
MOST_EXTENTS = 16_000
_HUGE = 2 << 20
_ALIGN = 64
_PROT_RW, _PROT_NONE = 3, 0
_PRIVATE_ANON, _NORESERVE = 0x22, 0x4000
_MADV_HUGEPAGE = 14
_MAYMOVE_FIXED = 3
_FAILED = ctypes.c_void_p(-1).value


class System:
    """The calls of the kernel that are used. `None` from one that returns an address: it refused."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        libc.mremap.argtypes, libc.mremap.restype = (address, size, size, number, address), address
        libc.mmap.argtypes, libc.mmap.restype = (address, size, number, number, number, ctypes.c_long), address
        libc.munmap.argtypes, libc.munmap.restype = (address, size), number
        libc.madvise.argtypes, libc.madvise.restype = (address, size, number), number
        self._libc = libc

    def fresh(self, nbytes: int) -> int | None:
        """Memory that was never touched, aligned for huge pages."""
        at = self._map(nbytes + _HUGE, _PROT_RW, _PRIVATE_ANON)
        if at is None:
            return None
        skip = -at % _HUGE
        if skip:
            self._libc.munmap(at, skip)
        if rest := _HUGE - skip:
            self._libc.munmap(at + skip + nbytes, rest)
        self._libc.madvise(at + skip, nbytes, _MADV_HUGEPAGE)
        return at + skip

    def reserve(self, nbytes: int) -> int | None:
        """Addresses without memory."""
        return self._map(nbytes, _PROT_NONE, _PRIVATE_ANON | _NORESERVE)

    def move(self, at: int, nbytes: int, to: int) -> bool:
        """Pages of one place to another, in place of what is mapped there."""
        return bool(self._libc.mremap(at, nbytes, nbytes, _MAYMOVE_FIXED, to) == to)

    def unmap(self, at: int, nbytes: int) -> None:
        """Give memory back to the system."""
        self._libc.munmap(at, nbytes)

    def _map(self, nbytes: int, protection: int, flags: int) -> int | None:
        at = self._libc.mmap(None, nbytes, protection, flags, -1, 0)
        return None if at in (None, _FAILED) else int(at)


def system() -> System | None:
    """The calls of this kernel; None where it has not all of them."""
    try:
        return System() if mmap.PAGESIZE <= GRANULE and hasattr(mmap, "MADV_HUGEPAGE") else None
    except (OSError, AttributeError, TypeError):  # no Linux
        return None


class Pages:
    """Blocks of memory. One per process (`pages`); any thread. Without a `system` all blocks are numpy's."""

    def __init__(self, system: System | None, now: Callable[[], float] = time.monotonic) -> None:
        self._system = system
        self._now = now
        self._lock = threading.RLock()
        #: free extents by size: (bytes, address), ascending
        self._free: list[tuple[int, int]] = []
        self._free_bytes = 0
        #: extents of blocks that died since the last look
        self._returned: collections.deque[tuple[tuple[int, int], ...]] = collections.deque()
        #: extents of all blocks, and free ones
        self._extents = 0
        #: their bytes, about: finalizers add to it without a lock
        self._returned_bytes = 0
        #: how many were given back by finalizers since the last look
        self._unmapped: collections.deque[int] = collections.deque()
        #: whether all memory of dead blocks is kept
        self._keep = False
        #: bytes of it that are kept otherwise
        self.allowance_bytes = 0
        #: least free bytes since the last look, and when the next is due, in seconds
        self._unwanted_bytes = 0
        self._look_at = -math.inf
        #: addresses of blocks, ascending; each with its bytes and number
        self._starts: list[int] = []
        self._blocks: dict[int, tuple[int, int]] = {}
        self._numbers = itertools.count()
        #: address and number of blocks that died since the last look
        self._dead: collections.deque[tuple[int, int]] = collections.deque()
        #: blocks made where one free extent lay, of several, and of fresh memory
        self.reused = self.joined = self.fresh = 0

    @property
    def idle_bytes(self) -> int:
        """Memory that waits to be used again."""
        with self._lock:
            self._drain()
            return self._free_bytes

    def keep(self, keep: bool) -> None:
        """Whether all memory of blocks that die waits for new ones. False gives back what waits."""
        self._keep = keep
        if not keep:
            self.trim()

    def trim(self) -> int:
        """Give back what waits; bytes."""
        with self._lock:
            self._drain()
            free, self._free = self._free, []
            self._free_bytes = self._unwanted_bytes = 0
            self._extents -= len(free)
        return self._unmap(free)

    def trim_idle(self) -> int:
        """Give back what was not taken for `IDLE_SECONDS`, unless a shuffle runs; bytes. Cheap: call it often."""
        now = self._now()
        if self._keep or now < self._look_at:
            return 0
        with self._lock:
            self._look_at = now + IDLE_SECONDS
            self._drain()
            count, left = 0, self._unwanted_bytes
            while count < len(self._free) and self._free[count][0] <= left:
                left -= self._free[count][0]
                count += 1
            free, self._free = self._free[:count], self._free[count:]
            self._free_bytes -= sum(size for size, _ in free)
            self._unwanted_bytes = self._free_bytes
            self._extents -= count
        return self._unmap(free)

    def _unmap(self, extents: list[tuple[int, int]]) -> int:
        for size, at in extents:
            assert self._system is not None
            self._system.unmap(at, size)
        return sum(size for size, _ in extents)

    def owner(self, address: int) -> tuple[int, int] | None:
        """Address and bytes of the block that an address lies in; None: in none of ours."""
        with self._lock:
            self._drain()
            place = bisect.bisect_right(self._starts, address) - 1
            if place < 0:
                return None
            at = self._starts[place]
            nbytes = self._blocks[at][0]
        return (at, nbytes) if address < at + nbytes else None

    def statistics(self) -> dict[str, int]:
        """Plain JSON; of the process, so workers in one process tell the same."""
        reused = self.reused + self.joined
        return {"kept_bytes": self.idle_bytes, "taken": reused + self.fresh, "reused": reused}

    def take(self, nbytes: int, alignment: int = _ALIGN) -> memoryview:
        """Writable memory at a multiple of `alignment` (at most a page); its contents are arbitrary."""
        if self._system is not None and nbytes >= SMALLEST:
            size = -(-nbytes // GRANULE) * GRANULE
            with self._lock:
                block = self._block(self._system, size)
                if block is not None:
                    at, extents = block
                    number = self._register(at, size)
            if block is not None:
                # Every view of the memory refers to this object. Of the whole size: every length is a type of
                # its own to ctypes, and these are few.
                raw = (ctypes.c_uint8 * size).from_address(at)
                weakref.finalize(raw, self._died, at, number, extents).atexit = False
                return memoryview(raw).cast("B")[:nbytes]
        plain = np.empty(nbytes + alignment, np.uint8)
        # `plain.ctypes` takes six times as long
        skip = -ctypes.addressof(ctypes.c_char.from_buffer(plain.data)) % alignment
        return plain.data[skip : skip + nbytes]

    def _register(self, at: int, nbytes: int) -> int:
        if at not in self._blocks:  # else one that died there is still to be forgotten
            bisect.insort(self._starts, at)
        number = next(self._numbers)
        self._blocks[at] = nbytes, number
        return number

    def _died(self, at: int, number: int, extents: tuple[tuple[int, int], ...]) -> None:
        self._dead.append((at, number))
        nbytes = sum(size for size, _ in extents)
        if self._keep or self._free_bytes + self._returned_bytes + nbytes <= self.allowance_bytes:
            self._returned_bytes += nbytes
            self._returned.append(extents)
        elif self._system is not None:
            for size, at in extents:
                self._system.unmap(at, size)
            self._unmapped.append(len(extents))

    def _drain(self) -> None:
        while self._unmapped:
            self._extents -= self._unmapped.popleft()
        while self._returned:
            for extent in self._returned.popleft():
                bisect.insort(self._free, extent)
                self._free_bytes += extent[0]
        self._returned_bytes = 0
        # After their memory: a block must not be made of it and then taken for the one that died.
        while self._dead:
            at, number = self._dead.popleft()
            if self._blocks[at][1] == number:
                del self._blocks[at]
                del self._starts[bisect.bisect_left(self._starts, at)]

    def _block(self, system: System, size: int) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """(address, its extents)."""
        self._drain()
        self._unwanted_bytes = min(self._unwanted_bytes, max(0, self._free_bytes - size))
        many = self._extents > MOST_EXTENTS
        if many:
            self.trim()
        place = bisect.bisect_left(self._free, (size, 0))
        if place < len(self._free):
            self.reused += 1
            at = self._cut(place, size)
            return at, ((size, at),)
        if not many and self._free_bytes >= size and (to := system.reserve(size)) is not None:
            extents = self._join(system, size, to)
            if extents is not None:
                self.joined += 1
                return to, extents
        whole = -(-size // FRESH_BYTES) * FRESH_BYTES
        fresh = system.fresh(whole)
        if fresh is None:
            return None
        self.fresh += 1
        self._extents += 1 + (whole > size)
        if whole > size:
            bisect.insort(self._free, (whole - size, fresh + size))
            self._free_bytes += whole - size
        return fresh, ((size, fresh),)

    def _cut(self, place: int, size: int) -> int:
        """Take the first `size` bytes of a free extent out of the list."""
        whole, at = self._free.pop(place)
        self._free_bytes -= size
        if whole > size:
            bisect.insort(self._free, (whole - size, at + size))
            self._extents += 1
        return at

    def _join(self, system: System, size: int, to: int) -> tuple[tuple[int, int], ...] | None:
        """Move the longest free extents there; None when the kernel refuses, and then nothing is lost."""
        extents: list[tuple[int, int]] = []
        done = 0
        while done < size:
            place = bisect.bisect_left(self._free, (size - done, 0))
            if place == len(self._free):
                place -= 1
            part = min(self._free[place][0], size - done)
            at = self._cut(place, part)
            if not system.move(at, part, to + done):
                # Too many mappings, or one extent is several to the kernel: what is free is not worth its keep.
                system.unmap(at, part)
                system.unmap(to, size)
                self._extents -= 1 + len(extents)
                self.trim()
                return None
            extents.append((part, to + done))
            done += part
        return tuple(extents)


#: this process's
pages = Pages(system())
reclaim.register(pages.trim)
