"""`DiskTier`: the disk tier in one folder, a file per large value, segments for small ones (`segments`).

The handle keeps where the frames are and their checksums. Reading verifies length and checksum of each, so a truncated,
swapped or flipped file never yields a value (`frames`). Large values go past the page cache where the file system
allows (`direct_io`), unless the machine has memory to spare (`idle_memory`). They are compressed where that pays
(`compression`).

* Files are 0600 below a 0700 folder, under opaque names, made with O_EXCL|O_NOFOLLOW relative to a directory
  descriptor, renamed when complete. Whatever fails, the partial file is unlinked and its bytes are given back.
* Quota (`Quota`, shared by the folders of a worker) and free space to leave (`reserve_bytes`, by statvfs, writes in
  flight of all folders on that file system included) are checked before the first byte is written: `TierFull`. Claimed
  is what a value takes at most. One that does not fit so is made as small as it gets, and claimed piece by piece while
  it is written. Once half of the room is used, values are made as small as they get at once: Dask's spilling
  compresses all that shrinks, and must not hold more where room is short.
* After a crash the folder goes with the worker's local directory, by distributed's lock; so do folders of the user.
* No fsync for durability: the data need not survive the process. Where ``O_DIRECT`` cannot be had and memory is not
  idle, a large file is synced all the same: only written pages can be dropped, and until then they count as memory.

Methods are called in I/O threads and are thread-safe. System calls go through `os_layer`, so that tests can make each
of them fail.

Rejected: mmap for reading (a truncated file kills the process with SIGBUS).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import math
import os
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy
import xxhash

from dask_gpurt.errors import TierFull
from dask_gpurt.model import compression
from dask_gpurt.model.tier import Tier
from dask_gpurt.tiers.storage.codec import flat
from dask_gpurt.tiers.storage.disk.direct_io import BLOCK, CHUNK, O_DIRECT, DirectFile, drop_cache, supports_direct
from dask_gpurt.tiers.storage.disk.frames import LARGE, Frame, FrameWriter, read_frames
from dask_gpurt.tiers.storage.disk.handle import DiskHandle
from dask_gpurt.tiers.storage.disk.io_mode import Ways
from dask_gpurt.tiers.storage.disk.quota import (
    FolderClosed,
    FolderDescriptor,
    InFlight,
    Quota,
    Room,
    filesystem_of,
    remove_folder,
    reserve_of,
)
from dask_gpurt.tiers.storage.disk.segments import SEGMENT, Piece, Segments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.tiers.storage.disk.idle_memory import IdleMemory
    from dask_gpurt.tiers.storage.disk.io_mode import Way
    from dask_gpurt.tiers.storage.handle import Group

    #: the frames of each part of a value
    _Views = list[tuple[int, list[memoryview]]]

#: a value below this goes to a segment
SMALL = 1 << 18
#: a cached write from this size on is synced, so that its pages can be dropped
_SYNCED = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskTier:
    """Files below one folder that only this tier uses.

    Parameters
    ----------
    directory
        Made (0700) if it is not there. Leftovers of a dead process in it are deleted: it must be ours alone.
    limit_bytes
        Quota; None: none. Ignored when `quota` is given.
    reserve_bytes
        Bytes of the file system that are always left free; None: see `quota.reserve_of`.
    direct_io
        ``auto``, ``on`` or ``off``. ``on`` where it does not work is an error.
    codec
        See `compression.Chooser`.
    small_bytes
        Values below this share segment files; 0: none does.
    quota, in_flight
        What is shared with other folders of the worker, and with those on the same file system.
    idle_memory
        Where it says that memory is ample, files are left in the page cache if that is faster (see `io_mode`); None:
        nowhere.

    Raises
    ------
    OSError
        The folder cannot be made, or ``direct_io`` is ``on`` and does not work.
    """

    tier = Tier.DISK

    def __init__(
        self,
        directory: str,
        *,
        limit_bytes: int | None = None,
        reserve_bytes: int | None = 0,
        direct_io: str = "auto",
        codec: str = "none",
        small_bytes: int = SMALL,
        segment_bytes: int = SEGMENT,
        quota: Quota | None = None,
        in_flight: InFlight | None = None,
        idle_memory: IdleMemory | None = None,
        os_layer: Any = os,
    ) -> None:
        self.directory = directory
        self.reserve_bytes = reserve_bytes
        self.quota = Quota(limit_bytes) if quota is None else quota
        #: compresses what the setting says, or what pays
        self.chooser = compression.Chooser(codec)
        #: chooses between past and through the page cache, and knows how fast both are
        self.ways = Ways(idle_memory)
        #: half of the room is used, so it counts more than time. As the last claim found
        self._room_is_short = False
        #: of writes past the page cache, in bytes as they lie on disk
        self.write_rate = self.ways.past.write
        #: frames written, by codec
        self.compressed_frames: dict[str, int] = {}
        #: files that could not be deleted before the tier is closed
        self.failed_deletions = 0
        #: called with reads that the system could not do
        self.on_read_error: Callable[[DiskTier, OSError], None] = lambda disk, error: None
        self._in_flight = InFlight() if in_flight is None else in_flight
        self._os = os_layer
        self._lock = threading.Lock()
        #: bytes of files, half-written ones and dead records of segments included
        self.used_bytes = 0
        #: of those that were left in the page cache, which the kernel may have given up by now
        self.cached_bytes = 0
        self._names = itertools.count()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)
        os.makedirs(directory, mode=0o700)
        #: all names are relative to it, so that a swapped path component cannot redirect us; used inside of `with` only
        self._folder = FolderDescriptor(directory)
        self._dir_fd = self._folder.fd
        self.filesystem = filesystem_of(directory)
        #: large values go past the page cache
        self.direct = direct_io != "off" and supports_direct(self._dir_fd, os_layer)
        if direct_io == "on" and not self.direct:
            self._folder.close()
            shutil.rmtree(directory, ignore_errors=True)
            raise OSError(
                errno.EINVAL,
                f"{directory} ({self.filesystem}) does not take O_DIRECT. Remedy: set gpurt.tiers.direct-io to auto",
            )
        self._small_bytes = small_bytes
        self._segments = Segments(
            os_layer, directory, self._dir_fd, self._next_name, self._claim, self._release, segment_bytes
        )

    # ------------------------------------------------------------------ bytes

    @property
    def limit_bytes(self) -> int | None:
        """Quota of the worker; None: none."""
        return self.quota.limit_bytes

    @property
    def compactions(self) -> int:
        """Segments whose live records were moved elsewhere."""
        return self._segments.compactions

    def files(self) -> list[str]:
        """Names on disk now, partial ones included. For tests and `validate`."""
        return sorted(os.listdir(self.directory))

    def free_bytes(self) -> int:
        """Bytes that may still be written before the reserve is reached, quota aside."""
        free, reserve = self._room()
        return free - reserve

    def _room(self) -> tuple[int, int]:
        """Bytes that are free but for writes on their way, and how many of them are to stay so."""
        with self._folder as fd:
            space = self._os.statvfs(fd)
        free = int(space.f_bavail * space.f_frsize)
        return free - self._in_flight.nbytes, reserve_of(self.reserve_bytes, free + self.used_bytes)

    def _claim(self, nbytes: int) -> None:
        room = math.inf
        if self.reserve_bytes != 0:
            free, reserve = self._room()
            room = free - reserve
            if room < nbytes:
                raise TierFull(
                    errno.ENOSPC,
                    f"{nbytes} bytes do not fit into the {max(free, 0)} that are free on {self.directory}, of which "
                    f"{reserve} stay free. The value stays in memory. Remedy: free space, set gpurt.tiers.directory, "
                    "or lower gpurt.tiers.disk-reserve",
                )
        self.quota.claim(nbytes)
        with self._lock:
            self.used_bytes += nbytes
        self._room_is_short = self.used_bytes >= room - nbytes or self.quota.half_used

    def _release(self, nbytes: int) -> None:
        self.quota.release(nbytes)
        with self._lock:
            self.used_bytes -= nbytes

    def _next_name(self) -> str:
        return f"{next(self._names):x}"

    # ------------------------------------------------------------------ writing

    def write(self, groups: Sequence[Group]) -> DiskHandle:
        """Write the frames of a value.

        Raises
        ------
        TierFull
            Quota or reserve would be passed, or the device said so. Nothing is left behind.
        OSError
            Any other failure. Nothing is left behind.
        """
        views = [(part, [flat(b) for b in buffers]) for part, buffers in groups]
        total = sum(v.nbytes for _, part in views for v in part)
        write = self._write_record if total < self._small_bytes else self._write_file
        try:
            try:
                return self._in_folder(write, views)
            except OSError as e:
                if e.errno not in _FULL or not self._may_be_smaller(e):
                    raise
                with contextlib.suppress(TierFull):
                    return self._in_folder(functools.partial(write, smallest=True), views)
                raise
        except TierFull:
            raise
        except OSError as e:
            if e.errno in _FULL:
                raise TierFull(
                    e.errno,
                    f"{os.strerror(e.errno)} while writing {total} bytes to {self.directory}. The value stays in "
                    "memory. Remedy: free space, or set gpurt.tiers.directory to a larger disk",
                ) from e
            raise

    def _may_be_smaller(self, full: OSError) -> bool:
        # Where the system itself says that it is full, a codec that was named has done what it can.
        return self.chooser.can_compress and (isinstance(full, TierFull) or self.chooser.setting == "auto")

    def _in_folder(self, write: Callable[[_Views], DiskHandle], views: _Views) -> DiskHandle:
        renewals = self._folder.renewals
        try:
            with self._folder:
                return write(views)
        except FileNotFoundError:
            # Cleaners of temporary folders delete what looks old. Without a folder no value could leave memory any
            # more, and a worker that is paused for its memory would stay so for good.
            if not self._folder.renew(renewals):
                raise
            with self._folder:
                return write(views)

    def _write_record(self, views: _Views, *, smallest: bool = False) -> DiskHandle:
        smallest = smallest or self._room_is_short
        pieces = []
        for part, buffers in views:
            for view in buffers:
                codec = self._choose(view, self.ways.past, smallest).codec
                stored = list(compression.compress(codec, view)) if codec else [view]
                whole = xxhash.xxh3_64_intdigest(view) if codec else 0
                pieces.append(Piece(part, view.nbytes, codec, whole, stored))
        record = self._segments.write(pieces)
        return DiskHandle(self, record, (), record.nbytes)

    def _write_file(self, views: _Views, *, cached: bool | None = None, smallest: bool = False) -> DiskHandle:
        # At most: every frame has a block of its own, and none becomes smaller.
        buffers = [v for _, part in views for v in part]
        padding = BLOCK * (1 + sum(v.nbytes >= LARGE for v in buffers))
        most = padding + sum(compression.most_stored(v.nbytes) for v in buffers)
        room = Room(self._claim, self._release, self._in_flight)
        if smallest:  # Of what is far from fitting no part is to be written, again and again. A sample may be wrong.
            room.require(sum(map(self.chooser.least_bytes, buffers)) / 2)
        room.more(padding if smallest else most)
        name = self._next_name()
        stored = 0
        if cached is None:
            cached = self.ways.cached(most, direct=self.direct)
        try:
            frames, stored, compressing_seconds = self._stream(name, views, room, cached=cached, smallest=smallest)
        except BaseException:
            for leftover in (name + ".part", name):
                with contextlib.suppress(OSError):
                    os.unlink(leftover, dir_fd=self._dir_fd)
            raise
        finally:
            room.end(stored)
        if cached:
            with self._lock:
                self.cached_bytes += stored
        return DiskHandle(self, name, frames, stored, cached, compressing_seconds)

    def _stream(
        self, name: str, views: _Views, room: Room, *, cached: bool, smallest: bool
    ) -> tuple[tuple[Frame, ...], int, float]:
        system = self._os
        least_room = smallest or self._room_is_short
        partial = name + ".part"
        file = self._open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, cached=cached)
        way = self.ways.through if cached else self.ways.past
        try:
            writer = FrameWriter(file, drop_behind=not cached, on_written=room.written)
            timer = compression.Timer()
            try:
                for part, buffers in views:
                    for view in buffers:
                        choice = self._choose(view, way, least_room)
                        codec, before = choice.codec, timer.inside
                        whole = timer.call(xxhash.xxh3_64_intdigest, view) if codec else 0
                        pieces = timer.around(compression.compress(codec, view)) if codec else [view]
                        pieces = room.around(pieces) if smallest else pieces
                        large = view.nbytes >= LARGE
                        writer.frame(part, view.nbytes, codec, pieces, large=large, whole_digest=whole)
                        self.chooser.learn(choice, timer.inside - before)
                frames = writer.finish()
            finally:
                writer.release()
            if not self.direct and not cached and writer.at >= _SYNCED:
                system.fdatasync(file.fd)
                drop_cache(file.fd)
        finally:
            system.close(file.fd)
        system.rename(partial, name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        self.ways.wrote(writer.at, timer.seconds_outside, cached=cached)
        return frames, writer.at, timer.inside

    def _open(self, name: str, flags: int, *, cached: bool) -> DirectFile:
        direct = self.direct and not cached
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | (O_DIRECT if direct else 0)
        return DirectFile(self._os, self._os.open(name, flags, 0o600, dir_fd=self._dir_fd), direct)

    def _choose(self, view: memoryview, way: Way, least_room: bool) -> compression.Choice:
        if self.chooser.setting == "none" or view.nbytes < compression.LEAST:
            return compression.Choice("")
        choice = self.chooser.choose(view, way.write.bytes_per_second, way.read.bytes_per_second, least_room=least_room)
        name = choice.codec or "none"
        with self._lock:
            self.compressed_frames[name] = self.compressed_frames.get(name, 0) + 1
        return choice

    # ------------------------------------------------------------------ reading

    def read(self, handle: DiskHandle, part: int | None = None) -> tuple[tuple[Frame, ...], list[memoryview]]:
        """The frames of a value, or of one part, and their verified bytes as stored, in fresh, writeable memory.

        Raises
        ------
        CorruptData
            Short file, or a checksum differs.
        OSError
            The device could not read.
        """
        try:
            with self._folder:
                if not isinstance(handle.place, str):
                    return self._segments.read(handle.place, part)
                return self._read_file(handle, handle.place, part)
        except OSError as e:
            self.on_read_error(self, e)
            raise

    def _read_file(self, handle: DiskHandle, name: str, part: int | None) -> tuple[tuple[Frame, ...], list[memoryview]]:
        frames = handle.frames if part is None else tuple(f for f in handle.frames if f.part == part)
        start = time.perf_counter()
        # What was left in the cache is read from there, or comes back through it.
        file = self._open(name, os.O_RDONLY, cached=handle.cached)
        try:
            buffers = read_frames(file, frames, f"{name} in {self.directory}")
            if not file.direct and not handle.cached:
                drop_cache(file.fd)
        finally:
            self._os.close(file.fd)
        nbytes = sum(f.extent_bytes for f in frames)
        self.ways.read(nbytes, time.perf_counter() - start, cached=handle.cached)
        return frames, buffers

    def claim(self, handle: DiskHandle) -> None:
        """Count one more that needs the copy."""
        with self._lock:
            handle.claims[0] += 1

    def free(self, handle: DiskHandle) -> None:
        """Give the space back. Once per claim."""
        with self._lock:
            handle.claims[0] -= 1
            if handle.claims[0]:
                return
        with contextlib.suppress(FolderClosed), self._folder as fd:  # closed: the file is gone with its folder
            if not isinstance(handle.place, str):
                self._segments.free(handle.place)
                return
            try:
                self._os.unlink(handle.place, dir_fd=fd)
            except OSError as e:
                self.failed_deletions += e.errno != errno.ENOENT  # deleted by hand: the space is free
        if not isinstance(handle.place, str):
            return
        self._release(handle.nbytes)
        if handle.cached:
            with self._lock:
                self.cached_bytes -= handle.nbytes

    # ------------------------------------------------------------------ life

    def probe(self) -> None:
        """Write, read and delete one chunk (less under a small quota), past the page cache and through it.

        It also measures. Raises what went wrong.
        """
        room = CHUNK if self.limit_bytes is None else (self.limit_bytes - self.quota.used_bytes) // 2
        nbytes = max(1, min(CHUNK, room))
        # No codec makes it smaller. Whole words: single bytes take five times as long, with the GIL held.
        words = numpy.random.default_rng(0).integers(0, 1 << 64, -(-nbytes // 8), "u8")
        data = words.view("u1").data[:nbytes]
        for cached in (False, True) if self.ways.ample(nbytes) else (False,):
            with self._folder:
                handle = self._write_file([(0, [data])], cached=cached)
            try:
                self.read(handle)  # compares its checksum
            finally:
                self.free(handle)

    def close(self) -> None:
        """Delete everything, the folder too."""
        if self._folder.closed:
            return
        self._folder.close()
        self._segments.close()
        remove_folder(self.directory)
