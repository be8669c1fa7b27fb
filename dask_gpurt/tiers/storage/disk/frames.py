"""Frames of values as bytes of a file: where each lies, its checksum, streamed out and in.

A value is a row of frames (see `codec`). On disk they follow one another::

    [small][small][small]..pad..[large frame          ..pad..][large frame  ..pad..][small]..pad..

* A frame of at least `LARGE` bytes begins at a multiple of `BLOCK`, so that it can be read with ``O_DIRECT`` straight
  into its final memory. Small ones lie together unaligned; a shuffle's shards are of that kind, and a block for each
  would multiply their bytes.
* **Every byte is covered by a checksum**: the zeros up to the next frame belong to the frame before them, and its xxh3
  covers them. So reading a frame finds a flipped bit anywhere in it.
* Nothing on disk describes the rest: index and checksums are in the handle, in memory. The files mean nothing without
  the process that wrote them, and are deleted when it is gone. (A header on disk would be checked against the same
  handle, so it would find nothing that the frames' own checksums do not.)

Both directions go piece by piece, each transferred and hashed in turn. Direct writes take chunks that stay in the
processor's cache, because they are copied first. Elsewhere pieces are large: after each call an I/O thread must get the
interpreter lock again, which takes up to 5 ms while a task computes in pure Python, and the checksum of bytes that left
the processor's cache (10 GB/s) costs less than that.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy
import xxhash

from dask_gpurt.errors import CorruptData
from dask_gpurt.memory.pages import pages
from dask_gpurt.tiers.storage.disk.direct_io import BLOCK, CHUNK, IOV_MAX, POOL, DirectFile, drop_cache, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: bytes from which on a frame has blocks of its own
LARGE = 1 << 16
_ZEROS = memoryview(bytes(BLOCK))
#: bytes of one call where nothing is copied
_PIECE = 16 << 20
#: bytes written through the page cache before the kernel is asked to write and drop them
_WINDOW = 4 * CHUNK


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A frame in a file."""

    #: the group it belongs to
    part: int
    offset: int
    #: bytes in the file, without the zeros after it
    stored_bytes: int
    #: bytes covered by `digest`: to the beginning of the next frame
    extent_bytes: int
    #: xxh3-64 of the extent
    digest: int
    #: how it was compressed: a name of `compression`, "" for not
    codec: str
    #: bytes when expanded
    nbytes: int
    #: xxh3-64 of these, of a compressed frame
    whole_digest: int

    def is_of(self, view: memoryview) -> bool:
        """Whether it holds these bytes, by its checksum."""
        if self.codec:
            return xxhash.xxh3_64_intdigest(view) == self.whole_digest
        digest = xxhash.xxh3_64(view)
        digest.update(_ZEROS[: self.extent_bytes - self.stored_bytes])
        return digest.intdigest() == self.digest


class FrameWriter:
    """Streams frames to a file, beginning at `start`.

    Parameters
    ----------
    file
        With ``direct``, `start` must be a multiple of `BLOCK`.
    align
        Give large frames blocks of their own, and pad the end to a block.
    drop_behind
        Ask the kernel to write and drop what goes through its cache.
    on_written
        Called with the bytes that the system has taken, each time.
    """

    def __init__(
        self,
        file: DirectFile,
        start: int = 0,
        *,
        align: bool = True,
        drop_behind: bool = False,
        on_written: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._file = file
        self._on_written = on_written
        self._align = align
        self._drop_behind = drop_behind and not file.direct
        self._start = self._flushed = self._dropped = start
        #: where the next byte goes
        self.at = start
        self._frames: list[Frame] = []
        #: what is known of the frame being written: (part, offset, stored bytes, codec, bytes, digest of these)
        self._open: tuple[int, int, int, str, int, int] | None = None
        self._hash = xxhash.xxh3_64()
        # Direct: bytes are gathered in the chunk. Else: views are gathered as they are.
        self._chunk = POOL.take() if file.direct else None
        self._piece = CHUNK if file.direct or self._drop_behind else _PIECE
        self._views: list[memoryview] = []

    def frame(
        self, part: int, nbytes: int, codec: str, pieces: Iterable[memoryview], *, large: bool, whole_digest: int
    ) -> None:
        """Append a frame whose stored bytes are `pieces`, one after the other."""
        self._end_frame(align=large)
        offset = self.at
        for piece in pieces:
            self._put(piece)
        self._open = (part, offset, self.at - offset, codec, nbytes, whole_digest)

    def finish(self) -> tuple[Frame, ...]:
        """Everything is with the system when this returns."""
        self._end_frame(align=True)
        self._flush()
        return tuple(self._frames)

    def release(self) -> None:
        """Give the chunk back; in any case, once."""
        if self._chunk is not None:
            POOL.give(self._chunk)
            self._chunk = None

    def _end_frame(self, *, align: bool) -> None:
        if self._open is None:
            return
        if align and self._align:
            self._put(_ZEROS[: round_up(self.at) - self.at])
        part, offset, stored, codec, nbytes, whole = self._open
        digest = self._hash.intdigest()
        self._frames.append(Frame(part, offset, stored, self.at - offset, digest, codec, nbytes, whole))
        self._hash = xxhash.xxh3_64()
        self._open = None

    def _put(self, view: memoryview) -> None:
        done, total = 0, view.nbytes
        while done < total:
            filled = self.at - self._flushed
            piece = view[done : done + self._piece - filled]
            if self._chunk is not None:
                target = self._chunk[filled : filled + piece.nbytes]
                target[:] = piece
                piece = target
            else:
                self._views.append(piece)
            self._hash.update(piece)
            self.at += piece.nbytes
            done += piece.nbytes
            if self.at - self._flushed == self._piece or len(self._views) == IOV_MAX:
                self._flush()

    def _flush(self) -> None:
        filled = self.at - self._flushed
        if not filled:
            return
        self._file.write([self._chunk[:filled]] if self._chunk is not None else self._views, self._flushed)
        self._on_written(filled)
        self._views = []
        self._flushed = self.at
        if self._drop_behind and self._flushed - self._dropped >= _WINDOW:
            # The window before this one was begun to be written then; by now its pages are clean and go.
            drop_cache(self._file.fd, max(self._start, self._dropped - _WINDOW), 2 * _WINDOW)
            self._dropped = self._flushed


def read_frames(file: DirectFile, frames: Sequence[Frame], what: str) -> list[memoryview]:
    """Fresh, writeable memory with the verified stored bytes of `frames`, which must be in file order.

    Raises
    ------
    CorruptData
        The file is too short, or a checksum differs. `what` names the file in the message.
    OSError
        The device could not read.
    """
    if not file.direct:
        return _read_cached(file, frames, what)
    out: list[memoryview] = []
    window = _Window(file, what)
    try:
        for frame in frames:
            hasher = xxhash.xxh3_64()
            if frame.offset % BLOCK == 0 and frame.extent_bytes >= LARGE:
                buffer = pages.take(round_up(frame.extent_bytes), BLOCK)
                for at in range(0, frame.extent_bytes, _PIECE):
                    piece = buffer[at : at + _PIECE]
                    needed = min(piece.nbytes, frame.extent_bytes - at)
                    if file.read([piece], frame.offset + at) < needed:
                        raise _too_short(frame, what)
                    hasher.update(piece[:needed])
            else:
                buffer = numpy.empty(frame.extent_bytes, "u1").data
                window.copy(frame, buffer)
                hasher.update(buffer)
            _verify(frame, hasher.intdigest(), what)
            out.append(buffer[: frame.stored_bytes])
    finally:
        window.release()
    return out


class _Window:
    """Small frames come through an aligned chunk that holds a range of the file."""

    def __init__(self, file: DirectFile, what: str) -> None:
        self._file = file
        self._what = what
        self._chunk: memoryview | None = None
        self._start = self._end = 0

    def copy(self, frame: Frame, target: memoryview) -> None:
        if self._chunk is None:
            self._chunk = POOL.take()
        at, end = frame.offset, frame.offset + frame.extent_bytes
        while at < end:
            if not self._start <= at < self._end:
                # Not far ahead: what follows may be a large frame, which is read elsewhere.
                self._start = at // BLOCK * BLOCK
                want = min(CHUNK, max(LARGE, round_up(end - self._start)))
                self._end = self._start + self._file.read([self._chunk[:want]], self._start)
                if self._end <= at:
                    raise _too_short(frame, self._what)
            n = min(end, self._end) - at
            source = at - self._start
            target[at - frame.offset : at - frame.offset + n] = self._chunk[source : source + n]
            at += n

    def release(self) -> None:
        if self._chunk is not None:
            POOL.give(self._chunk)
            self._chunk = None


def _read_cached(file: DirectFile, frames: Sequence[Frame], what: str) -> list[memoryview]:
    buffers = [pages.take(f.extent_bytes, BLOCK) for f in frames]
    hashes = [xxhash.xxh3_64() for _ in frames]
    batch: list[tuple[int, memoryview]] = []
    start = end = filled = 0

    def fetch() -> None:
        nonlocal batch, filled
        if batch:
            if file.read([piece for _, piece in batch], start) < end - start:
                raise _too_short(frames[batch[0][0]], what)
            for i, piece in batch:
                hashes[i].update(piece)
        batch, filled = [], 0

    for i, (frame, buffer) in enumerate(zip(frames, buffers, strict=True)):
        for at in range(0, buffer.nbytes, _PIECE):
            piece = buffer[at : at + _PIECE]
            if frame.offset + at != end or filled + piece.nbytes > _PIECE or len(batch) == IOV_MAX:
                fetch()
                start = end = frame.offset + at
            batch.append((i, piece))
            end += piece.nbytes
            filled += piece.nbytes
    fetch()
    for frame, hasher in zip(frames, hashes, strict=True):
        _verify(frame, hasher.intdigest(), what)
    return [b[: f.stored_bytes] for f, b in zip(frames, buffers, strict=True)]


def _verify(frame: Frame, digest: int, what: str) -> None:
    if digest != frame.digest:
        raise CorruptData(f"checksum of {frame.extent_bytes} bytes at {frame.offset} of {what} differs")


def _too_short(frame: Frame, what: str) -> CorruptData:
    return CorruptData(f"{what} ends before {frame.offset + frame.extent_bytes} bytes")
