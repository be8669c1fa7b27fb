"""Small values together in segment files: one file for many keys.

A file per value costs a create, a rename and an unlink, each of them a change of the folder and of the journal; for a
value of a few KiB that is all of the cost, and each takes at least a block. A record in a segment is one append.

* A writer takes an open segment for itself (or makes one), appends its record, puts it back. So appends need no lock
  during I/O, and there are as many open segments as there were writers at once.
* A failed append is cut off again; when even that fails the segment takes no more, and what lies there is dead space.
  A record is known only by its handle, made after the write, so a torn one is never read.
* A segment takes no more from `SEGMENT` bytes on (*sealed*). When its last record dies it is deleted. A sealed one
  whose live share falls below `LIVE_SHARE` is compacted by the thread that freed the record: what lives is read,
  verified and appended elsewhere, the handles point there, the file goes. So at most 1 / LIVE_SHARE of the live bytes
  are on disk, plus the open segments. If that fails (disk full, a damaged record) the segment stays as it is and is not
  tried again; it still goes with its last record.
* Readers hold the segment while they read, so it is unlinked by the last of them at the earliest. Only open segments
  keep a descriptor.

Records go through the page cache (they are not aligned); when a segment is sealed its pages are written and dropped.

Rejected: punching holes for dead records (whole blocks only, and not on every file system); collecting records in
memory until a chunk is full (the memory would not be free when the write returns).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from dask_gpurt.errors import CorruptData
from dask_gpurt.tiers.storage.disk.direct_io import DirectFile, drop_cache
from dask_gpurt.tiers.storage.disk.frames import Frame, FrameWriter, read_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: bytes from which on a segment takes no more
SEGMENT = 16 << 20
#: below this share of live bytes a sealed segment is compacted
LIVE_SHARE = 0.4


@dataclasses.dataclass(eq=False, slots=True)
class Segment:
    """One file. Its fields are guarded by the lock of `Segments`."""

    name: str
    #: of the writers; -1 once it is sealed
    fd: int
    #: bytes of the file
    size: int = 0
    live_bytes: int = 0
    records: set[Record] = dataclasses.field(default_factory=set)
    readers: int = 0
    #: takes no more records
    sealed: bool = False
    #: a writer has it
    busy: bool = False
    #: not in the folder any more
    unlinked: bool = False
    #: compaction is under way, or failed
    keep: bool = False


@dataclasses.dataclass(eq=False, slots=True)
class Record:
    """Where one value is. Compaction changes `segment` and `frames`, both at once under the lock."""

    segment: Segment
    frames: tuple[Frame, ...]
    nbytes: int
    freed: bool = False


class Piece(NamedTuple):
    """A frame to be written."""

    part: int
    #: when expanded
    nbytes: int
    codec: str
    #: see `Frame`
    whole_digest: int
    #: one after the other
    stored: list[memoryview]


class Segments:
    """The segment files of one folder. Thread-safe.

    Parameters
    ----------
    claim, release
        Called with the bytes that are about to be used, and that are not used any more. `claim` raises `TierFull`.
    """

    def __init__(
        self,
        system: Any,
        directory: str,
        dir_fd: int,
        name: Callable[[], str],
        claim: Callable[[int], None],
        release: Callable[[int], None],
        segment_bytes: int = SEGMENT,
    ) -> None:
        self._os = system
        self._directory = directory
        self._dir_fd = dir_fd
        self._name = name
        self._claim = claim
        self._release = release
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        #: One compaction at a time: another one must not move on what the first has written and not entered yet.
        self._compacting = threading.Lock()
        self._open: list[Segment] = []
        #: segments that were compacted
        self.compactions = 0

    def write(self, parts: Sequence[Piece]) -> Record:
        """Append a record. Raises as `DiskTier.write`; nothing is left behind."""
        nbytes = sum(v.nbytes for piece in parts for v in piece.stored)
        self._claim(nbytes)
        try:
            segment = self._take()
        except BaseException:
            self._release(nbytes)
            raise
        start = segment.size
        writer = FrameWriter(DirectFile(self._os, segment.fd, direct=False), start, align=False)
        try:
            for piece in parts:
                writer.frame(
                    *(piece.part, piece.nbytes, piece.codec, piece.stored), large=False, whole_digest=piece.whole_digest
                )
            frames = writer.finish()
            if not os.fstat(segment.fd).st_nlink:
                # Reading opens it by its name. (Cleaners of temporary folders delete what looks old.)
                segment.sealed = True
                raise FileNotFoundError(errno.ENOENT, "an open segment was deleted by somebody else", segment.name)
        except BaseException:
            self._cut_off(segment, start, nbytes)
            raise
        with self._lock:
            segment.size += nbytes
            record = self._enter(segment, frames, nbytes)
            self._put_back(segment)
        return record

    def _enter(self, segment: Segment, frames: tuple[Frame, ...], nbytes: int) -> Record:
        record = Record(segment, frames, nbytes)
        segment.records.add(record)
        segment.live_bytes += nbytes
        return record

    def _take(self) -> Segment:
        with self._lock:
            if self._open:
                segment = self._open.pop()
                segment.busy = True
                return segment
        name = self._name()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return Segment(name, self._os.open(name, flags, 0o600, dir_fd=self._dir_fd), busy=True)

    def _put_back(self, segment: Segment) -> None:
        """With the lock."""
        segment.busy = False
        if not segment.sealed and segment.size < self._segment_bytes:
            self._open.append(segment)
            return
        self._seal(segment)

    def _seal(self, segment: Segment) -> None:
        """With the lock."""
        segment.sealed = True
        fd, segment.fd = segment.fd, -1
        drop_cache(fd)
        with contextlib.suppress(OSError):
            self._os.close(fd)
        self._drop_if_dead(segment)

    def _cut_off(self, segment: Segment, start: int, nbytes: int) -> None:
        """A write from `start` failed: as if it had not been begun."""
        try:
            self._os.ftruncate(segment.fd, start)
        except OSError:
            left = start + nbytes
            with contextlib.suppress(OSError):
                left = os.fstat(segment.fd).st_size
            with self._lock:
                segment.size = max(start, left)
                self._release(nbytes - (segment.size - start))
                segment.sealed = True
                self._put_back(segment)
            return
        with self._lock:
            self._release(nbytes)
            if not segment.live_bytes:
                segment.sealed = True  # an empty file is not kept
            self._put_back(segment)

    # ------------------------------------------------------------------ reading

    def read(self, record: Record, part: int | None) -> tuple[tuple[Frame, ...], list[memoryview]]:
        """Verified frames of a record: all, or those of one part."""
        with self._lock:
            if record.freed:
                raise FileNotFoundError(errno.ENOENT, "this value was deleted", record.segment.name)
            segment, frames = record.segment, record.frames
            segment.readers += 1
        try:
            if part is not None:
                frames = tuple(f for f in frames if f.part == part)
            fd = self._os.open(segment.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._dir_fd)
            try:
                file = DirectFile(self._os, fd, direct=False)
                return frames, read_frames(file, frames, f"{segment.name} in {self._directory}")
            finally:
                self._os.close(fd)
        finally:
            with self._lock:
                segment.readers -= 1
                self._drop_if_dead(segment)

    # ------------------------------------------------------------------ reclaiming

    def free(self, record: Record) -> None:
        """The record is dead. May compact its segment."""
        with self._lock:
            if record.freed:
                return
            record.freed = True
            segment = record.segment
            segment.records.discard(record)
            segment.live_bytes -= record.nbytes
            self._lost_one(segment)
            worth = (
                segment.sealed
                and not segment.unlinked
                and not segment.keep
                and segment.live_bytes < LIVE_SHARE * segment.size
            )
            segment.keep = segment.keep or worth
        if worth:
            with self._compacting:
                self._compact(segment)

    def _compact(self, segment: Segment) -> None:
        """Move what lives elsewhere. Failing is no harm: the file goes when its last record dies."""
        with self._lock:
            records = list(segment.records)
        for record in records:
            try:
                frames, buffers = self.read(record, None)
                stored = zip(frames, buffers, strict=True)
                moved = self.write([Piece(f.part, f.nbytes, f.codec, f.whole_digest, [b]) for f, b in stored])
            except (OSError, CorruptData):
                if record.freed:  # meanwhile, by another thread: one less to move, and no reason to give up
                    continue
                return  # reading the record finds the same, and reports it
            with self._lock:
                copy = moved.segment
                copy.records.discard(moved)
                if record.freed:
                    copy.live_bytes -= record.nbytes
                    self._lost_one(copy)
                    continue
                copy.records.add(record)
                segment.records.discard(record)
                segment.live_bytes -= record.nbytes
                record.segment, record.frames = copy, moved.frames
                self._drop_if_dead(segment)
        with self._lock:
            self.compactions += 1

    def _lost_one(self, segment: Segment) -> None:
        """With the lock: a record left it. An open one that has none left takes no more, so that it can go."""
        if not segment.records and segment in self._open:
            self._open.remove(segment)
            self._seal(segment)
        else:
            self._drop_if_dead(segment)

    def _drop_if_dead(self, segment: Segment) -> None:
        """With the lock."""
        if segment.records or not segment.sealed or segment.busy or segment.readers or segment.unlinked:
            return
        segment.unlinked = True
        with contextlib.suppress(OSError):  # gone with its folder, or by hand
            self._os.unlink(segment.name, dir_fd=self._dir_fd)
        self._release(segment.size)

    def close(self) -> None:
        """Close what is open; the folder is about to go. Nothing may be under way."""
        with self._lock:
            for segment in self._open:
                with contextlib.suppress(OSError):
                    self._os.close(segment.fd)
            self._open.clear()
