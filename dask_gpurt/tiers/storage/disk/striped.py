"""`Directories`: several folders as one tier; values go where they are soonest written.

Weighted fair queueing: each folder has a clock that advances by bytes / bandwidth with every value it gets, and the
next value goes where the clock would be least. So each gets bytes in proportion to the bandwidth measured there, also
when values come one at a time, and what was written in parallel can be read in parallel. Room counts too: below
`AMPLE_BYTES` of it a folder counts as slower in proportion, one without room for the value comes last. A folder on the
same file system as another is no faster for it; both are used as if they were.

A write that fails is tried on the next folder at once. The one that failed is set aside, 1 s at first and twice as long
each time up to 60 s. The same holds for a read that the device could not do (EIO): what is there may still be readable,
but nothing more goes there. When all are set aside, the one whose time ends first is tried. When that fails too the
error goes to the caller, and the value stays in memory. With a single folder nothing is ever set aside here: the engine
has its own back-off, per key and for the whole tier.

The quota is one for all folders. The reserve is kept on each file system, and counts what is being written to it
through any of them.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from distributed.diskutils import WorkDir, WorkSpace

from dask_gpurt.errors import CorruptData, InstallError, TierFull
from dask_gpurt.model.events import Event, Sink, null_sink
from dask_gpurt.model.tier import Tier
from dask_gpurt.tiers.backoff import BackOff
from dask_gpurt.tiers.storage.disk.idle_memory import IdleMemory
from dask_gpurt.tiers.storage.disk.quota import ODD_FILESYSTEMS, InFlight, Quota
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from dask_gpurt.tiers.storage.handle import error_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.config import TierSettings
    from dask_gpurt.tiers.limits import Limits
    from dask_gpurt.tiers.storage.disk.handle import DiskHandle
    from dask_gpurt.tiers.storage.handle import Group

logger = logging.getLogger("distributed.worker.gpurt")

#: bytes of room from which on more makes no difference
AMPLE_BYTES = 4 << 30
#: bytes per second of a folder to which nothing was written yet
_UNKNOWN = 1e9
#: system errors of a read that are about the device
_DEVICE = {errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EREMOTEIO}


class _Folder:
    """A folder and how it fares. Fields are guarded by the lock of `Directories`."""

    def __init__(self, disk: DiskTier, serial: int) -> None:
        self.disk = disk
        self.serial = serial
        #: seconds it would have taken to write all it got; how far it is ahead of the others is what counts
        self.clock_seconds = 0.0
        self.rest = BackOff()
        self.errors: dict[str, int] = {}


class Directories:
    """A `StorageTier` over one or more `DiskTier`, which share a `Quota`. Thread-safe."""

    tier = Tier.DISK

    def __init__(
        self,
        disks: Sequence[DiskTier],
        quota: Quota,
        *,
        sink: Sink = null_sink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not disks:
            raise ValueError("no folder to spill to")
        self._folders = [_Folder(disk, i) for i, disk in enumerate(disks)]
        self._quota = quota
        self._sink = sink
        self._clock = clock
        self._lock = threading.Lock()
        for disk in disks:
            disk.on_read_error = self._read_failed

    # ------------------------------------------------------------------ bytes

    @property
    def disks(self) -> list[DiskTier]:
        """The tier of each folder."""
        return [f.disk for f in self._folders]

    @property
    def directory(self) -> str:
        """All folders, for people to read."""
        return ", ".join(f.disk.directory for f in self._folders)

    @property
    def used_bytes(self) -> int:
        """Bytes in all folders."""
        return sum(f.disk.used_bytes for f in self._folders)

    @property
    def limit_bytes(self) -> int | None:
        """Quota of the worker; None: none."""
        return self._quota.limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, nbytes: int | None) -> None:
        self._quota.limit_bytes = nbytes

    @property
    def reserve_bytes(self) -> int | None:
        """Left free on each file system."""
        return self._folders[0].disk.reserve_bytes

    @reserve_bytes.setter
    def reserve_bytes(self, nbytes: int | None) -> None:
        for folder in self._folders:
            folder.disk.reserve_bytes = nbytes

    # ------------------------------------------------------------------ writing

    def write(self, groups: Sequence[Group]) -> DiskHandle:
        """Write the frames of a value to one of the folders. Raises as `DiskTier.write`, what the last one said."""
        if len(self._folders) == 1:
            return self._folders[0].disk.write(groups)
        nbytes = sum(memoryview(b).nbytes for _, buffers in groups for b in buffers)
        error: OSError | None = None
        try:
            for folder in self._order(nbytes):
                seconds = self._seconds(folder, nbytes)[1]
                with self._lock:
                    folder.clock_seconds += seconds
                try:
                    handle = folder.disk.write(groups)
                except OSError as e:
                    error = e
                    with self._lock:
                        folder.clock_seconds -= seconds
                    # The worker's quota says nothing about the folder.
                    quota = isinstance(e, TierFull) and e.errno == errno.EDQUOT and e.__cause__ is None
                    if quota:
                        raise
                    self._failed(folder, e)
                else:
                    with self._lock:
                        # The rate is of bytes as they lie there.
                        folder.clock_seconds += seconds * (handle.nbytes / max(1, nbytes) - 1)
                        if folder.rest.failures:
                            # It got nothing meanwhile; it is not to get everything now.
                            folder.rest.failures = 0
                            others = [f.clock_seconds for f in self._folders if f is not folder]
                            folder.clock_seconds = max(folder.clock_seconds, min(others))
                    return handle
            assert error is not None
            raise error
        finally:
            # Its traceback holds this frame, which holds it and the frames of the value: as in `fallback`.
            del error

    def _order(self, nbytes: int) -> list[_Folder]:
        """The folders to try, best first: those that are not set aside, or the one whose time ends first."""
        now = self._clock()
        with self._lock:
            ready = [f for f in self._folders if f.rest.until <= now]
            if not ready:
                return [min(self._folders, key=lambda f: f.rest.until)]
        if len(ready) == 1:
            return ready

        def key(folder: _Folder) -> tuple[bool, float, int]:
            lacks_room, seconds = self._seconds(folder, nbytes)
            return lacks_room, folder.clock_seconds + seconds, folder.serial

        return sorted(ready, key=key)

    def _seconds(self, folder: _Folder, nbytes: int) -> tuple[bool, float]:
        """Whether it has no room for so many bytes, and the seconds that they would take."""
        try:
            room = folder.disk.free_bytes()
        except OSError:
            room = 0  # it will say so itself when it is tried, as the last
        rate = folder.disk.write_rate.bytes_per_second or _UNKNOWN
        return room < nbytes, nbytes / (rate * min(1.0, max(room, 1) / AMPLE_BYTES))

    def _failed(self, folder: _Folder, error: Exception) -> None:
        with self._lock:
            news = folder.rest.failed(self._clock())
            kind = error_kind(error)
            folder.errors[kind] = folder.errors.get(kind, 0) + 1
        if news:
            message = f"{folder.disk.directory} is set aside for 1 s at first: {error}. Other folders go on"
            logger.warning("%s", message)
            self._sink(Event("tiers.directory", message, {"directory": folder.disk.directory, "error": kind}))

    def _read_failed(self, disk: DiskTier, error: OSError) -> None:
        if error.errno in _DEVICE and len(self._folders) > 1:
            self._failed(next(f for f in self._folders if f.disk is disk), error)

    # ------------------------------------------------------------------ life

    def probe(self) -> None:
        """Try, and measure, every folder; one that fails is set aside. Raises when all of them do."""
        last: Exception | None = None
        worked = 0
        for folder in self._folders:
            try:
                folder.disk.probe()
                worked += 1
            except (OSError, CorruptData) as e:
                last = e
                if len(self._folders) > 1:
                    self._failed(folder, e)
        if not worked and last is not None:
            raise last

    def warnings(self) -> list[tuple[str, str]]:
        """(message, file system) for each kind of file system on which spilling does not do what one expects."""
        said: dict[str, str] = {}
        for folder in self._folders:
            kind = folder.disk.filesystem
            if kind in ODD_FILESYSTEMS and kind not in said:
                said[kind] = (
                    f"{folder.disk.directory} is on {kind}, which {ODD_FILESYSTEMS[kind]}. "
                    "Remedy: set gpurt.tiers.directory to a local disk"
                )
        return [(message, kind) for kind, message in said.items()]

    def statistics(self) -> list[dict[str, Any]]:
        """One mapping per folder, plain JSON."""
        now = self._clock()
        return [
            {
                "directory": f.disk.directory,
                "filesystem": f.disk.filesystem,
                "direct_io": f.disk.direct,
                "used_bytes": f.disk.used_bytes,
                "cached_bytes": f.disk.cached_bytes,
                "write_bytes_per_second": f.disk.write_rate.bytes_per_second,
                "read_bytes_per_second": f.disk.ways.past.read.bytes_per_second,
                "cached_write_bytes_per_second": f.disk.ways.through.write.bytes_per_second,
                "cached_read_bytes_per_second": f.disk.ways.through.read.bytes_per_second,
                "compressed_frames": dict(f.disk.compressed_frames),
                "compactions": f.disk.compactions,
                "failed_deletions": f.disk.failed_deletions,
                "set_aside": f.rest.until > now,
                "errors": dict(f.errors),
            }
            for f in self._folders
        ]

    def close(self) -> None:
        """Delete everything, the folders too."""
        for folder in self._folders:
            folder.disk.close()


def open_directories(
    local_directory: str, settings: TierSettings, limits: Limits, sink: Sink = null_sink
) -> tuple[Directories, list[WorkDir]]:
    """Make the folders of a worker. In a thread.

    Folders of the user's choice lie below one with distributed's lock, as the worker's own does, so the next
    worker that starts purges leftovers of a killed one. One of several that cannot be used is left out, with a warning.

    Raises
    ------
    InstallError
        No folder can be used.
    """
    quota = Quota(limits.disk_limit_bytes)
    flights: dict[int, InFlight] = {}
    # Asked for, direct I/O is had.
    idle = None if settings.direct_io == "on" else IdleMemory()
    disks: list[DiskTier] = []
    work_dirs: list[WorkDir] = []
    failed: list[str] = []
    for chosen in settings.folders or (None,):
        parent = local_directory if chosen is None else chosen
        work_dir: WorkDir | None = None
        try:
            if chosen is not None:
                work_dir = WorkSpace(os.path.join(chosen, "dask-gpurt-space")).new_work_dir(prefix="worker-")
                parent = work_dir.dir_path
            disk = DiskTier(
                os.path.join(parent, "gpurt-tiers"),
                reserve_bytes=limits.disk_reserve_bytes,
                direct_io=settings.direct_io,
                codec=settings.codec,
                quota=quota,
                in_flight=flights.setdefault(os.stat(parent).st_dev, InFlight()),
                idle_memory=idle,
            )
        except OSError as e:
            if work_dir is not None:
                work_dir.release()
            failed.append(f"{parent!r}: {e}")
            continue
        if work_dir is not None:
            work_dirs.append(work_dir)
        disks.append(disk)
    if not disks:
        raise InstallError(
            f"cannot use {'; '.join(failed)} for spilled data. Remedy: set gpurt.tiers.directory to a folder that the "
            "worker may write to"
        )
    for text in failed:
        logger.warning("Not spilling to %s. The other folders are used", text)
    directories = Directories(disks, quota, sink=sink)
    try:
        directories.probe()
    except OSError as e:  # full just now: the engine copes
        logger.warning("A test of %s failed; values stay in memory until it works: %s", directories.directory, e)
    except CorruptData as e:
        directories.close()
        for work_dir in work_dirs:
            work_dir.release()
        raise InstallError(
            f"what is written to {directories.directory} comes back wrong: {e}. Remedy: check the disk (dmesg, "
            "smartctl), and set gpurt.tiers.directory to another one"
        ) from e
    return directories, work_dirs
