"""Memory whose copies happen late: what device memory does to a program that forgets to wait, without a device.

`LazyMemory` gives blocks of RMM's own ``CallbackMemoryResource``, limited and counted by RMM's adaptors. Each thread
has a *lazy stream*: a copy that is asked for runs at `LazyMemory.ready` of that thread and not before. Freed memory is
poisoned, and so is fresh memory. `LazyMemory.fail` makes allocations fail at any step.

It is ordinary host memory and never more than that. What it finds are errors of order: a result that is read before it
was waited for (`NotReady`), memory that was given up while a copy of it was still to come (`UsedAfterFree`), bytes that
nothing was written to. Real streams may run earlier than that, so a program that passes here is not late on a device
either. Speed, and what CUDA itself does, it says nothing of.

Theory of operation. A stream is a queue of steps. A step knows addresses, not the objects that keep them alive: the
free of a block is a step, too, on the stream of the thread that allocated it. So a copy on another stream may come
after it, as on a device. Every step checks what it touches, and what it finds is raised by `ready` and kept in
`LazyMemory.faults`, in case that the caller swallowed it.
"""

from __future__ import annotations

import collections
import ctypes
import threading
import weakref
from typing import TYPE_CHECKING, Any

import rmm
import rmm.mr

from tests.tiers.device.host_rmm import host_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.backends.rmm_stack import Stack

FREED, FRESH = 0xDD, 0xCD
#: resources live as long as the process: buffers may die in the same collection as they
_RESOURCES: list[Any] = []


class NotReady(AssertionError):
    """Something was read before the copy into it was waited for."""


class UsedAfterFree(AssertionError):
    """Memory was touched after it was free."""


class _Cell:
    """What is known of a block without keeping it alive."""

    __slots__ = ("address", "alive", "nbytes", "unwritten")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.alive = True
        #: writes that are still to come
        self.unwritten = 0


class Block:
    """Memory of a `LazyMemory`; free when it is garbage and its stream gets there."""

    __slots__ = ("__weakref__", "cell", "nbytes")

    def __init__(self, cell: _Cell) -> None:
        self.cell, self.nbytes = cell, cell.nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """By which device memory is known, and sent."""
        return {"data": (self.cell.address, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}


class Stream:
    """Steps in their order."""

    def __init__(self) -> None:
        self.steps: collections.deque[Callable[[], None]] = collections.deque()
        self.lock = threading.RLock()

    def run(self, most: int | None = None) -> None:
        """Do the steps so far, or the first of them."""
        with self.lock:
            while self.steps and most != 0:
                self.steps.popleft()()
                most = None if most is None else most - 1


class LazyMemory:
    """Blocks, and the streams that copy to and from them.

    Parameters
    ----------
    limit_bytes
        That may be allocated.
    over
        Allocate from this stack instead, which has a limit of its own.
    """

    def __init__(self, limit_bytes: int = 1 << 30, over: Stack | None = None) -> None:
        if over is None:
            base = host_memory()
            limiting = rmm.mr.LimitingResourceAdaptor(base, limit_bytes)
            self._resource = self._counts = rmm.mr.StatisticsResourceAdaptor(limiting)
            _RESOURCES.extend([base, limiting, self._resource])
        else:
            self._resource, self._counts = over.resource, over.statistics
        self._local = threading.local()
        self._lock = threading.RLock()
        self.streams: list[Stream] = []
        #: allocations so far, and which of them fail: called with the number of each
        self.allocations = 0
        self.fail: Callable[[int], bool] = lambda number: False
        #: called before a stream is waited for: what other streams do meanwhile
        self.meanwhile: Callable[[], None] = lambda: None
        #: what was found
        self.faults: list[str] = []
        #: bytes that steps have copied, by what for
        self.copied: collections.Counter[str] = collections.Counter()

    # ---- streams

    @property
    def stream(self) -> Stream:
        """That of this thread."""
        try:
            return self._local.stream
        except AttributeError:
            return self.use(Stream())

    def use(self, stream: Stream) -> Stream:
        """Give this thread another stream."""
        self._local.stream = stream
        with self._lock:
            if stream not in self.streams:
                self.streams.append(stream)
        return stream

    def ready(self) -> None:
        """Do what this thread has asked for."""
        self.meanwhile()
        self.stream.run()

    def drain(self) -> None:
        """Do what all threads have asked for."""
        for stream in list(self.streams):
            stream.run()

    # ---- memory

    def allocate(self, nbytes: int) -> Block:
        """A block; MemoryError beyond the limit, and where `fail` says so."""
        with self._lock:
            self.allocations += 1
            number = self.allocations
        if self.fail(number):
            raise MemoryError(f"allocation {number} fails on purpose")
        try:
            buffer = rmm.DeviceBuffer(size=nbytes, mr=self._resource)
        except MemoryError:
            # What is free in stream order is there once the streams got to it.
            self.drain()
            buffer = rmm.DeviceBuffer(size=nbytes, mr=self._resource)
        cell = _Cell(buffer.ptr if nbytes else 0, nbytes)
        if nbytes:
            ctypes.memset(cell.address, FRESH, nbytes)
        block = Block(cell)
        weakref.finalize(block, self._give_up, self.stream, cell, buffer).atexit = False
        return block

    @staticmethod
    def _give_up(stream: Stream, cell: _Cell, buffer: Any) -> None:
        # In any thread, at any time: takes no lock.
        def free(buffer: Any = buffer) -> None:
            cell.alive = False
            if cell.nbytes:
                ctypes.memset(cell.address, FREED, cell.nbytes)

        stream.steps.append(free)

    @property
    def copied_bytes(self) -> int:
        """Bytes that steps have copied."""
        return sum(self.copied.values())

    def write(self, block: Block, data: Any, what: str = "") -> None:
        """Copy from the host, at `ready`; as many bytes as the block has."""
        source = memoryview(data).cast("B")
        cell = block.cell
        assert source.nbytes == cell.nbytes, (source.nbytes, cell.nbytes)
        with self._lock:
            cell.unwritten += 1

        def step() -> None:
            self._check(cell, reads=False)
            ctypes.memmove(cell.address, bytes(source), cell.nbytes)
            with self._lock:
                cell.unwritten -= 1
                self.copied[what] += cell.nbytes

        self.stream.steps.append(step)

    def read(self, block: Block, target: memoryview) -> None:
        """Copy to the host, at `ready`. Until then the host's memory is poison."""
        cell = block.cell
        assert target.nbytes == cell.nbytes, (target.nbytes, cell.nbytes)
        target[:] = bytes([FRESH]) * target.nbytes

        def step() -> None:
            self._check(cell, reads=True)
            target[:] = ctypes.string_at(cell.address, cell.nbytes)
            with self._lock:
                self.copied["to host"] += cell.nbytes

        self.stream.steps.append(step)

    def whole(self, block: Block) -> None:
        """Find out whether a block could be sent now."""
        self._check(block.cell, reads=True)

    def fill(self, block: Block, data: bytes) -> None:
        """Put bytes into a block past all streams, as a transport does."""
        self._check(block.cell, reads=False)
        ctypes.memmove(block.cell.address, data, len(data))

    def bytes_of(self, block: Block) -> bytes:
        """What a kernel finds in a block now: all copies into it must have been waited for."""
        self._check(block.cell, reads=True)
        return ctypes.string_at(block.cell.address, block.nbytes)

    def _check(self, cell: _Cell, *, reads: bool) -> None:
        if not cell.alive:
            self._found(UsedAfterFree(f"{cell.nbytes} bytes at {cell.address:#x} were given up"))
        if reads and cell.unwritten:
            self._found(NotReady(f"{cell.nbytes} bytes at {cell.address:#x}: {cell.unwritten} copies are to come"))

    def _found(self, fault: AssertionError) -> None:
        self.faults.append(f"{type(fault).__name__}: {fault}")
        raise fault

    def allocated_bytes(self) -> int:
        """Now, by RMM."""
        return int(self._counts.allocation_counts.current_bytes)

    def peak_bytes(self) -> int:
        """The most at one time, by RMM."""
        return int(self._counts.allocation_counts.peak_bytes)
