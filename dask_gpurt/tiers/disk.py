"""The disk tier: one file per value, checksummed, written by gather and read by scatter.

Layout of a file::

    header   magic "GPRT", version, number of frames, bytes of payload          (struct, 24 bytes)
    index    per frame: part, length, xxh3-64                                   (24 bytes each)
    payload  the frames, one after the other

The handle keeps the same index in memory; a whole read verifies magic, version, lengths and the checksum of the index
and of every frame; a read of one part (a shuffle's shard) verifies the frames it reads. A truncated, swapped or flipped
file therefore never yields a value.

* Files are 0600 below a 0700 folder, under opaque names, made with O_EXCL|O_NOFOLLOW relative to a directory
  descriptor, renamed when complete. Whatever fails, the partial file is unlinked and its bytes are given back.
* Quota (`limit_bytes`) and free space to leave (`reserve_bytes`, by statvfs, writes in flight included) are checked
  before the first byte is written: `TierFull`.
* After a crash the folder is removed with the worker's local directory by distributed's own lock files; a folder of
  the user's choice gets the same lock.
* No fsync and no FADV_DONTNEED: the data need not survive the process, and dirty pages cannot be dropped without
  waiting for the device (0.12-0.30 s per 200 MB measured), which the kernel does better when it must.
  Rejected: O_DIRECT (needs aligned copies of every frame), mmap for reading (a truncated file kills the process with
  SIGBUS).

Methods are called in I/O threads and are thread-safe. System calls go through `os_layer`, so that tests can make
each of them fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import shutil
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy
import xxhash

from dask_gpurt.errors import CorruptData, TierFull
from dask_gpurt.model.tier import Tier
from dask_gpurt.tiers.codec import flat
from dask_gpurt.tiers.handle import DecodeError, IoCost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.tiers.account import Codec, Group

MAGIC = b"GPRT"
VERSION = 1
_HEADER = struct.Struct("<4sHHQQ")
_INDEX = struct.Struct("<qQQ")
try:
    _IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))
except (ValueError, OSError):
    _IOV_MAX = 16  # what POSIX guarantees
#: file systems on which spilling does not do what one expects, and why
ODD_FILESYSTEMS = {
    "tmpfs": "keeps its files in memory: spilling to it frees none",
    "ramfs": "keeps its files in memory: spilling to it frees none",
    "nfs": "is a network mount: spilling is slow and competes with transfers",
    "nfs4": "is a network mount: spilling is slow and competes with transfers",
    "cifs": "is a network mount: spilling is slow and competes with transfers",
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Frame:
    part: int
    offset: int
    nbytes: int
    digest: int


@dataclasses.dataclass(frozen=True, slots=True)
class DiskHandle:
    """A file of a `DiskTier`."""

    disk: DiskTier
    name: str
    frames: tuple[_Frame, ...]
    #: xxh3-64 of header and index
    head_digest: int
    nbytes: int

    def load(self, codec: Codec) -> tuple[Any, IoCost]:
        start = time.perf_counter()
        buffers = self.disk.read(self, self.frames, head=True)
        middle = time.perf_counter()
        try:
            value = codec.decode(buffers)
        except Exception as e:
            raise DecodeError from e
        return value, IoCost(self.nbytes, middle - start, time.perf_counter() - middle)

    def load_part(self, part: int) -> tuple[list[memoryview], IoCost]:
        frames = tuple(f for f in self.frames if f.part == part)
        if not frames:
            raise KeyError(part)
        start = time.perf_counter()
        buffers = self.disk.read(self, frames, head=False)
        return buffers, IoCost(sum(f.nbytes for f in frames), time.perf_counter() - start, 0.0)

    def free(self) -> None:
        self.disk.free(self)


class DiskTier:
    """Files below one folder that nobody else uses.

    Parameters
    ----------
    directory
        Made (0700) if it is not there. Must be empty otherwise: leftovers of a dead process are deleted.
    limit_bytes
        Quota; None: none.
    reserve_bytes
        Bytes of the file system that are always left free.
    """

    tier = Tier.DISK

    def __init__(
        self, directory: str, *, limit_bytes: int | None = None, reserve_bytes: int = 0, os_layer: Any = os
    ) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes
        self.reserve_bytes = reserve_bytes
        self._os = os_layer
        self._lock = threading.Lock()
        #: bytes of complete and of half-written files
        self._used_bytes = 0
        #: bytes of files being written, which statvfs does not know yet
        self._in_flight_bytes = 0
        self._names = itertools.count()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)
        os.makedirs(directory, mode=0o700)
        #: all names are relative to it, so that a swapped path component cannot redirect us
        self._dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def files(self) -> list[str]:
        """Names on disk now, partial ones included. For tests and `validate`."""
        return sorted(os.listdir(self.directory))

    def write(self, groups: Sequence[Group]) -> DiskHandle:
        """Write the frames of a value.

        Raises
        ------
        TierFull
            Quota or reserve would be passed, or the device said so. Nothing is left behind.
        OSError
            Any other failure. Nothing is left behind.
        """
        views: list[memoryview] = []
        frames: list[_Frame] = []
        total = 0
        parts: list[int] = []
        for part, buffers in groups:
            for buffer in buffers:
                view = flat(buffer)
                views.append(view)
                parts.append(part)
        offset = _HEADER.size + _INDEX.size * len(views)
        for part, view in zip(parts, views, strict=True):
            frames.append(_Frame(part, offset, view.nbytes, xxhash.xxh3_64_intdigest(view)))
            offset += view.nbytes
            total += view.nbytes
        head = _HEADER.pack(MAGIC, VERSION, 0, len(views), total) + b"".join(
            _INDEX.pack(f.part, f.nbytes, f.digest) for f in frames
        )
        handle = DiskHandle(self, f"{next(self._names):x}", tuple(frames), xxhash.xxh3_64_intdigest(head), offset)
        self._claim(offset)
        try:
            self._write_file(handle.name, [memoryview(head), *views])
        except BaseException as e:
            with self._lock:
                self._used_bytes -= offset
            if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise TierFull(
                    e.errno,
                    f"{os.strerror(e.errno)} while writing {offset} bytes to {self.directory}. The value stays in "
                    "memory. Remedy: free space, or set gpurt.tiers.directory to a larger disk",
                ) from e
            raise
        finally:
            with self._lock:
                self._in_flight_bytes -= offset
        return handle

    def _claim(self, nbytes: int) -> None:
        free_bytes: int | None = None
        if self.reserve_bytes:
            stat = self._os.statvfs(self._dir_fd)
            free_bytes = stat.f_bavail * stat.f_frsize
        with self._lock:
            if self.limit_bytes is not None and self._used_bytes + nbytes > self.limit_bytes:
                raise TierFull(
                    errno.EDQUOT,
                    f"{nbytes} bytes more than the {self._used_bytes} spilled would pass the limit of "
                    f"{self.limit_bytes}. The value stays in memory. Remedy: raise gpurt.tiers.disk-limit",
                )
            if free_bytes is not None and free_bytes - self._in_flight_bytes - nbytes < self.reserve_bytes:
                raise TierFull(
                    errno.ENOSPC,
                    f"{nbytes} bytes would leave less than {self.reserve_bytes} of {free_bytes} free on "
                    f"{self.directory}. The value stays in memory. Remedy: free space, set gpurt.tiers.directory, "
                    "or lower gpurt.tiers.disk-reserve",
                )
            self._used_bytes += nbytes
            self._in_flight_bytes += nbytes

    def _write_file(self, name: str, views: list[memoryview]) -> None:
        system = self._os
        partial = name + ".part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = system.open(partial, flags, 0o600, dir_fd=self._dir_fd)
        try:
            try:
                pending = [v for v in reversed(views) if v.nbytes]
                while pending:
                    batch = pending[: -_IOV_MAX - 1 : -1]
                    written = system.writev(fd, batch)
                    if written <= 0:
                        raise OSError(errno.EIO, f"writev wrote {written} bytes", partial)
                    while written:
                        view = pending.pop()
                        if written < view.nbytes:  # a short write: go on in the middle of this frame
                            pending.append(view[written:])
                            break
                        written -= view.nbytes
            finally:
                system.close(fd)
            system.rename(partial, name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        except BaseException:
            for leftover in (partial, name):
                with contextlib.suppress(OSError):
                    os.unlink(leftover, dir_fd=self._dir_fd)
            raise

    def read(self, handle: DiskHandle, frames: Sequence[_Frame], *, head: bool) -> list[memoryview]:
        """Fresh, writeable memory with the verified bytes of `frames`, which must be in file order.

        Raises
        ------
        CorruptData
            Short file, or a checksum differs.
        OSError
            The device could not read.
        """
        fd = self._os.open(handle.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._dir_fd)
        try:
            buffers = [numpy.empty(f.nbytes, "u1").data for f in frames]
            if head:
                head_view = numpy.empty(_HEADER.size + _INDEX.size * len(handle.frames), "u1").data
                self._read_into(fd, handle, 0, [head_view])
                magic, version, *_ = _HEADER.unpack_from(head_view)
                if magic != MAGIC or version != VERSION or xxhash.xxh3_64_intdigest(head_view) != handle.head_digest:
                    raise CorruptData(f"header or index of {handle.name} in {self.directory} is not what was written")
            # Frames of one part lie together; those of another part in between end a run.
            run: list[memoryview] = []
            start = end = -1
            for frame, buffer in zip(frames, buffers, strict=True):
                if frame.offset != end:
                    self._read_into(fd, handle, start, run)
                    run, start = [], frame.offset
                run.append(buffer)
                end = frame.offset + frame.nbytes
            self._read_into(fd, handle, start, run)
        finally:
            self._os.close(fd)
        for i, (frame, buffer) in enumerate(zip(frames, buffers, strict=True)):
            if xxhash.xxh3_64_intdigest(buffer) != frame.digest:
                raise CorruptData(
                    f"checksum of frame {i} ({frame.nbytes} bytes at {frame.offset}) of {handle.name} in "
                    f"{self.directory} differs"
                )
        return buffers

    def _read_into(self, fd: int, handle: DiskHandle, offset: int, buffers: list[memoryview]) -> None:
        pending = [b for b in reversed(buffers) if b.nbytes]
        while pending:
            got = self._os.preadv(fd, pending[: -_IOV_MAX - 1 : -1], offset)
            if got <= 0:
                raise CorruptData(f"{handle.name} in {self.directory} ends at {offset} of {handle.nbytes} bytes")
            offset += got
            while got:
                view = pending.pop()
                if got < view.nbytes:
                    pending.append(view[got:])
                    break
                got -= view.nbytes

    def free(self, handle: DiskHandle) -> None:
        """Delete the file. Once per handle."""
        with contextlib.suppress(OSError):  # gone with its folder, or by somebody's hand: the space is free
            self._os.unlink(handle.name, dir_fd=self._dir_fd)
        with self._lock:
            self._used_bytes -= handle.nbytes

    def probe(self) -> None:
        """Write, read and delete a small file. Raises what went wrong."""
        handle = self.write([(0, [b"dask-gpurt"])])
        try:
            (data,) = self.read(handle, handle.frames, head=True)
            if bytes(data) != b"dask-gpurt":
                raise CorruptData(f"{self.directory} gave back {bytes(data)!r}")
        finally:
            self.free(handle)

    def close(self) -> None:
        """Delete everything, the folder too."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._dir_fd)


def filesystem_of(directory: str) -> str:
    """Type of the file system a folder is on (``ext4``), or "" when the system does not tell."""
    best, kind = "", ""
    real = os.path.realpath(directory)
    try:
        with open("/proc/self/mountinfo") as f:
            for line in f:
                left, _, right = line.partition(" - ")
                mount = left.split()[4].replace("\\040", " ")
                inside = real == mount or real.startswith(mount.rstrip("/") + "/")
                if inside and len(mount) >= len(best):
                    best, kind = mount, right.split()[0]
    except (OSError, IndexError):
        return ""
    return kind
