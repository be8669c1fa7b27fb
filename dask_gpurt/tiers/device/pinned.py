"""Host memory cut into blocks: where device values go first.

`BlockPool` hands out blocks of any writeable memory; a `SlabSource` provides it, as page-locked memory comes from
`dask_gpurt.backends.device_copies.PinnedSlabs`. `SlabTier` is the `StorageTier` over a pool.

Page-locked memory takes copies from a GPU at several times the rate of ordinary memory, but to lock it takes as long as
many copies. So it is allocated in *slabs* that are kept, each cut into *blocks* of 1 to 4 MB, grown lazily up to a
limit. A value takes as many blocks as it needs, wherever they are: there is no fragmentation, and at most one block per
value is partly unused. `BlockPool.keep_ahead` has blocks ready for those that should not wait for a slab.

Frames are copied into blocks, device frames (`backend.DeviceFrame`) by their own ``copy_to``: all copies are begun,
then all are waited for. Neighbouring blocks are one target, as few long copies take less than many short ones. Reading
gives the pieces to a codec that can take them (``decode_pieces``: back to the device without a detour), or else joins
them. Bytes that stay in memory have no checksum; they get one when they go on to a disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from dask_gpurt.errors import CorruptData, TierFull
from dask_gpurt.tiers.storage.codec import flat
from dask_gpurt.tiers.storage.handle import IoCost, decoded
from dask_gpurt.tiers.storage.protocol import TierMetrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.model.shards import Buffer
    from dask_gpurt.model.tier import Tier
    from dask_gpurt.tiers.device.backend import DeviceFrame
    from dask_gpurt.tiers.storage.handle import Codec

DEFAULT_BLOCK_BYTES = 1 << 20
DEFAULT_SLAB_BYTES = 64 << 20


class SlabSource(Protocol):
    """Where slabs come from."""

    #: PINNED when the memory is page-locked, else HOST
    tier: Tier

    def allocate(self, nbytes: int) -> memoryview:
        """Writeable memory; MemoryError or OSError when there is none."""

    def release(self, slab: memoryview) -> None:
        """Give a slab back that is not used any more."""


class BlockPool:
    """Blocks of one size, in slabs allocated as they are needed. Thread-safe.

    Parameters
    ----------
    limit_bytes
        Of all slabs; None: none.
    """

    def __init__(
        self,
        source: SlabSource,
        *,
        limit_bytes: int | None,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
    ) -> None:
        if block_bytes <= 0:
            raise ValueError(f"block_bytes is {block_bytes}, must be > 0; 1 to 4 MB is usual")
        self.source = source
        self.limit_bytes = limit_bytes
        self.block_bytes = block_bytes
        self._blocks_per_slab = max(1, slab_bytes // block_bytes)
        #: of the lists below; held for a moment only
        self._lock = threading.Lock()
        #: held while a slab is allocated, which takes long
        self._growing = threading.Lock()
        self._slabs: list[memoryview] = []
        #: (slab, block) that are free; the last freed first, as it is in the caches
        self._free: list[tuple[int, int]] = []
        self._slab_sizes: list[int] = []
        #: blocks to keep free
        self._ahead = 0
        self._look = threading.Event()
        self._keeper: threading.Thread | None = None
        self._closed = False

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slabs."""
        with self._lock:
            return sum(self._slab_sizes)

    @property
    def free_bytes(self) -> int:
        """Bytes of blocks that can be taken at once."""
        with self._lock:
            return len(self._free) * self.block_bytes

    def keep_ahead(self, nbytes: int) -> None:
        """Have a thread keep so many bytes free, as far as the limit allows, for those that should not wait."""
        self._ahead = -(-nbytes // self.block_bytes)
        self._look.set()
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="gpurt-pinned", daemon=True)
            self._keeper.start()

    def _keep(self) -> None:
        while self._look.wait():
            self._look.clear()
            while not self._closed:
                with self._lock:
                    have, short = len(self._slabs), len(self._free) < self._ahead
                if not short:
                    break
                try:
                    self._grow(have)
                except TierFull:
                    break
            if self._closed:
                return

    def take(self, nbytes: int) -> list[tuple[int, int]]:
        """Blocks for so many bytes.

        Raises
        ------
        TierFull
            The limit would be passed, or the system has no such memory. Nothing was taken.
        """
        need = -(-nbytes // self.block_bytes)
        if not need:
            return []
        while True:
            with self._lock:
                if len(self._free) >= need:
                    taken, self._free = self._free[: -need - 1 : -1], self._free[:-need]
                    short = len(self._free) < self._ahead
                    break
                have = len(self._slabs)
            self._grow(have)
        if short:
            self._look.set()
        return taken

    def _grow(self, have: int) -> None:
        """One slab more than the `have` that there were."""
        with self._growing:
            with self._lock:
                if self._closed:
                    raise TierFull("the blocks were given back")
                if len(self._slabs) != have:  # another thread was here meanwhile
                    return
                room = None if self.limit_bytes is None else self.limit_bytes - sum(self._slab_sizes)
            n = self._blocks_per_slab if room is None else min(self._blocks_per_slab, room // self.block_bytes)
            if n <= 0:
                raise TierFull(f"all {self.limit_bytes} bytes of {self.source.tier.name.lower()} blocks are taken")
            try:
                slab = self.source.allocate(n * self.block_bytes)
            except (MemoryError, OSError) as e:
                raise TierFull(f"no {self.source.tier.name.lower()} memory for {n} blocks more: {e}") from e
            with self._lock:
                self._slabs.append(slab)
                self._slab_sizes.append(slab.nbytes)
                self._free.extend((have, j) for j in reversed(range(n)))

    def view(self, block: tuple[int, int], count: int = 1) -> memoryview:
        """The memory of a block, and of those that follow it in its slab, `count` in all."""
        slab, i = block
        return self._slabs[slab][i * self.block_bytes : (i + count) * self.block_bytes]

    def give(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Back to the pool."""
        with self._lock:
            self._free.extend(blocks)

    def close(self) -> None:
        """Give all slabs back; blocks must not be used afterwards."""
        with self._growing, self._lock:
            self._closed = True
            slabs, self._slabs = self._slabs, []
            self._free.clear()
            self._slab_sizes.clear()
        self._look.set()
        if self._keeper is not None:
            self._keeper.join(10)
        for slab in slabs:
            self.source.release(slab)


@dataclasses.dataclass(frozen=True, slots=True)
class SlabHandle:
    """Frames in blocks of a `SlabTier`, one after the other without gaps."""

    slab: SlabTier
    blocks: tuple[tuple[int, int], ...]
    #: part and length of each frame
    frames: tuple[tuple[int, int], ...]
    nbytes: int
    #: cleared when freed
    alive: list[bool]

    @property
    def tier(self) -> Tier:
        """Where it is."""
        return self.slab.tier

    def load(self, codec: Codec) -> tuple[Any, IoCost]:
        """See `Handle.load`."""
        start = time.perf_counter()
        self._check()
        decode_pieces = getattr(codec, "decode_pieces", None)
        if decode_pieces is not None:
            pieces = [self.pieces(i) for i in range(len(self.frames))]
            middle = time.perf_counter()
            value = decoded(decode_pieces, pieces)
        else:
            buffers = [self._joined(i) for i in range(len(self.frames))]
            middle = time.perf_counter()
            value = decoded(codec.decode, buffers)
        end = time.perf_counter()
        self.slab.metrics.add(reads=1, read_bytes=self.nbytes, read_seconds=end - start)
        return value, IoCost(self.nbytes, middle - start, end - middle)

    def load_part(self, part: int) -> tuple[list[memoryview], IoCost]:
        """See `Handle.load_part`."""
        start = time.perf_counter()
        self._check()
        mine = [i for i, (p, _) in enumerate(self.frames) if p == part]
        if not mine:
            raise KeyError(part)
        buffers = [self._joined(i) for i in mine]
        nbytes = sum(b.nbytes for b in buffers)
        self.slab.metrics.add(reads=1, read_bytes=nbytes, read_seconds=time.perf_counter() - start)
        return buffers, IoCost(nbytes, time.perf_counter() - start, 0.0)

    def pieces(self, frame: int) -> list[memoryview]:
        """The memory of one frame, in order; valid until `free`."""
        offset = sum(n for _, n in self.frames[:frame])
        return self.slab.span(self.blocks, offset, self.frames[frame][1])

    def _joined(self, frame: int) -> memoryview:
        out = numpy.empty(self.frames[frame][1], "u1").data
        at = 0
        for piece in self.pieces(frame):
            out[at : at + piece.nbytes] = piece
            at += piece.nbytes
        return out

    def _check(self) -> None:
        if not self.alive[0]:
            raise CorruptData("the blocks of this copy were given back")

    def free(self) -> None:
        """Give the blocks back. A second call does nothing."""
        if self.alive[0]:
            self.alive[0] = False
            self.slab.give(self)


class SlabTier:
    """Implements `StorageTier` over a `BlockPool`."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.tier = pool.source.tier
        self.metrics = TierMetrics()
        self._lock = threading.Lock()
        #: blocks taken, in bytes
        self.used_bytes = 0

    @property
    def limit_bytes(self) -> int | None:
        """Bytes of all blocks; None: no limit."""
        return self.pool.limit_bytes

    def write(self, groups: Sequence[tuple[int, Sequence[Buffer | DeviceFrame]]]) -> SlabHandle:
        """See `StorageTier.write`; frames may be `DeviceFrame`."""
        start = time.perf_counter()
        sources: list[Any] = []
        frames: list[tuple[int, int]] = []
        for part, buffers in groups:
            for buffer in buffers:
                source: Any = buffer if hasattr(buffer, "copy_to") else flat(buffer)
                sources.append(source)
                frames.append((part, source.nbytes))
        total = sum(n for _, n in frames)
        blocks = self.pool.take(total)
        nbytes = len(blocks) * self.pool.block_bytes
        with self._lock:
            self.used_bytes += nbytes
        handle = SlabHandle(self, tuple(blocks), tuple(frames), nbytes, [True])
        try:
            self._fill(handle.blocks, sources)
        except BaseException:
            self.metrics.add(write_failures=1)
            handle.free()
            raise
        self.metrics.add(writes=1, written_bytes=total, write_seconds=time.perf_counter() - start)
        return handle

    def _fill(self, blocks: Sequence[tuple[int, int]], sources: Sequence[Any]) -> None:
        """Copy all sources into blocks; returns, or raises, when no copy is under way any more."""
        begun: list[DeviceFrame] = []
        offset = 0
        try:
            for source in sources:
                targets = self.span(blocks, offset, source.nbytes)
                offset += source.nbytes
                if isinstance(source, memoryview):
                    done = 0
                    for target in targets:
                        target[:] = source[done : done + target.nbytes]
                        done += target.nbytes
                else:
                    begun.append(source)
                    source.copy_to(targets)
            while begun:
                begun.pop().finish()
        except BaseException:
            for frame in begun:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    frame.finish()
            raise

    def span(self, blocks: Sequence[tuple[int, int]], offset: int, nbytes: int) -> list[memoryview]:
        """The memory from `offset` on, in the order of the blocks; neighbouring blocks are one piece."""
        size = self.pool.block_bytes
        out = []
        while nbytes:
            i, at = divmod(offset, size)
            slab, first = blocks[i]
            count = 1
            while count * size - at < nbytes and blocks[i + count] == (slab, first + count):
                count += 1
            n = min(count * size - at, nbytes)
            out.append(self.pool.view(blocks[i], count)[at : at + n])
            offset += n
            nbytes -= n
        return out

    def give(self, handle: SlabHandle) -> None:
        """Blocks back to the pool."""
        self.pool.give(handle.blocks)
        with self._lock:
            self.used_bytes -= handle.nbytes

    def probe(self) -> None:
        """See `StorageTier.probe`."""
        handle = self.write([(0, [b"dask-gpurt"])])
        try:
            if bytes(handle.load_part(0)[0][0]) != b"dask-gpurt":
                raise CorruptData(f"a block of {self.tier.name.lower()} memory did not keep what was written")
        finally:
            handle.free()

    def close(self) -> None:
        """Give all slabs back."""
        self.pool.close()


def stage(frame: Any) -> Any:
    """A frame in ordinary host memory."""
    if not hasattr(frame, "copy_to"):
        return frame
    out = numpy.empty(frame.nbytes, "u1").data
    try:
        frame.copy_to([out])
    finally:
        frame.finish()
    return out
