"""Memory for values that are read, used again when the last value in it is gone.

A value that comes back from disk needs as much memory as the one that left for it gave back a moment ago. The nanny
sets ``MALLOC_TRIM_THRESHOLD_``, so that freed memory goes back to the system at once and what is allocated is fresh:
the system clears each page when it is touched first. Measured on a virtual machine: 0.4 ms per MB, and 10 ms per MB
where the host has to find the memory first; the copy from the page cache takes 0.3. It also stops others: freeing 40 MB
waits for all threads that fault at that time, with the interpreter lock held.

`Recycled.take` hands out a `memoryview` over memory of ours. The decoded object keeps that view alive (arrays, Arrow
buffers and pandas blocks all hold on to what they were made from); when the last of them goes, a finalizer gets the
memory back. It is kept while the kept bytes are below `keep_bytes`, and for at most `IDLE_SECONDS`.

Finalizers run in whatever thread lets the last reference go, at any bytecode, perhaps inside of `take`: so there is no
lock here, only single operations on a list, which the interpreter lock makes atomic.

Each is a mapping of its own, which goes back to the system when it is not kept. From malloc it would lie in the arena
of the reader's thread while a shuffle has malloc's thresholds raised, and stay there (see `model.arenas`).

Rejected: raising malloc's thresholds for the whole process, as shuffles do for their time: a worker that spills is at
its limit, and free memory inside of malloc's heaps counts as used, but cannot be given to a reader.
"""

from __future__ import annotations

import contextlib
import mmap
import time
import weakref
from typing import TYPE_CHECKING, TypeAlias

import numpy

from dask_gpurt.tiers.direct import aligned_buffer

if TYPE_CHECKING:
    from collections.abc import Callable

Bytes: TypeAlias = "numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]"

#: below this malloc does well enough
LEAST_BYTES = 1 << 20
#: bytes kept by default
KEEP_BYTES = 64 << 20
#: memory is kept for so long after its last use
IDLE_SECONDS = 2.0
#: from here on memory is asked for in huge pages
_HUGE_FROM = 4 << 20
#: memory may be larger than what is asked for by this factor
_FIT = 1.1


class _Block:
    """Memory that is not in use."""

    __slots__ = ("array", "since")

    def __init__(self, array: Bytes, since: float) -> None:
        self.array = array
        self.since = since


class Recycled:
    """One per process (`RECYCLED`). Thread-safe."""

    def __init__(self, keep_bytes: int = KEEP_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        #: bytes that may lie here unused
        self.keep_bytes = keep_bytes
        self._clock = clock
        self._free: list[_Block] = []
        #: values that were read into memory that had been used before, and all large ones
        self.reused = 0
        self.taken = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that lie here unused."""
        return sum(b.array.nbytes for b in tuple(self._free))

    def take(self, nbytes: int) -> memoryview:
        """Writeable memory, its address a multiple of a block; what was in it before may still be there."""
        if nbytes < LEAST_BYTES:
            return aligned_buffer(nbytes)
        self.taken += 1
        array = self._find(nbytes)
        if array is None:
            array = _fresh(nbytes)
        # All that is made of this memory leads to the view, and nobody but the finalizer has `array`. By way of a
        # memoryview, because slices of an array refer to the array at the bottom and not to the one in between.
        view = numpy.frombuffer(array.data[:nbytes], "u1")
        weakref.finalize(view, self._came_back, array).atexit = False
        return view.data

    def _find(self, nbytes: int) -> Bytes | None:
        fitting = [b for b in tuple(self._free) if nbytes <= b.array.nbytes <= _FIT * nbytes]
        for block in sorted(fitting, key=lambda b: b.array.nbytes):
            try:
                self._free.remove(block)
            except ValueError:  # another thread was faster
                continue
            self.reused += 1
            return block.array
        return None

    def _came_back(self, array: Bytes) -> None:
        self.trim()
        if self.kept_bytes + array.nbytes <= self.keep_bytes:
            self._free.append(_Block(array, self._clock()))

    def statistics(self) -> dict[str, int]:
        """Plain JSON; of the process, so workers in one process tell the same."""
        return {"kept_bytes": self.kept_bytes, "taken": self.taken, "reused": self.reused}

    def trim(self, *, all_of_it: bool = False) -> None:
        """Give back what nobody has wanted for a while, or all."""
        since = self._clock() - IDLE_SECONDS
        for block in tuple(self._free):
            if all_of_it or block.since <= since:
                try:
                    self._free.remove(block)
                except ValueError:
                    continue


def _fresh(nbytes: int) -> Bytes:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes, flags=private)
    if nbytes >= _HUGE_FROM:
        with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return numpy.frombuffer(memory, "u1")


#: the process's own
RECYCLED = Recycled()
