"""Room on disks: a quota, bytes on their way to a file system, and file systems that are not what one expects."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import threading
from typing import TYPE_CHECKING

from dask_gpurt.backends.system import System
from dask_gpurt.errors import TierFull

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

logger = logging.getLogger("distributed.worker.gpurt")

_NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "wekafs", "glusterfs"),
    *("fuse.glusterfs", "fuse.ceph", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse"),
)
#: file systems on which spilling does not do what one expects, and why
ODD_FILESYSTEMS = {
    "tmpfs": "keeps its files in memory: spilling to it frees none",
    "ramfs": "keeps its files in memory: spilling to it frees none",
    **dict.fromkeys(_NETWORK, "is a network mount: spilling is slow and competes with transfers"),
}

#: never through a link in the place of the folder itself
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


#: left free where it was not chosen, but at most this share of what is free: a disk that is nearly full would take
#: nothing else, and a worker that has filled its memory would stand still, where Dask goes on
_RESERVE = 1 << 30
_RESERVE_SHARE = 0.1


def reserve_of(chosen: int | None, free_bytes: int) -> int:
    """Bytes to leave free on a file system. `chosen` None: the usual, of what is free but for our own files."""
    return min(_RESERVE, int(free_bytes * _RESERVE_SHARE)) if chosen is None else chosen


class Quota:
    """Bytes spilled by one worker, to whichever folder. Thread-safe."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        #: None: none
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    @property
    def half_used(self) -> bool:
        """No more is left than is used."""
        return self.limit_bytes is not None and 2 * self.used_bytes >= self.limit_bytes

    def claim(self, nbytes: int) -> None:
        """Count bytes that are about to be written; TierFull when they would pass the limit."""
        with self._lock:
            if self.limit_bytes is not None and self.used_bytes + nbytes > self.limit_bytes:
                raise TierFull(
                    errno.EDQUOT,
                    f"{nbytes} bytes more than the {self.used_bytes} spilled would pass the limit of "
                    f"{self.limit_bytes}. The value stays in memory. Remedy: raise gpurt.tiers.disk-limit",
                )
            self.used_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Count bytes that were deleted, or not written after all."""
        with self._lock:
            self.used_bytes -= nbytes


class InFlight:
    """Bytes being written to one file system, which statvfs does not know yet. Thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes whose write begins; negative ones when it has ended."""
        with self._lock:
            self.nbytes += nbytes


class Room:
    """What one file has claimed, and what of that is on its way. One thread uses it.

    Parameters
    ----------
    claim, release
        As those of `segments.Segments`.
    """

    def __init__(self, claim: Callable[[int], None], release: Callable[[int], None], in_flight: InFlight) -> None:
        self._claim = claim
        self._release = release
        self._in_flight = in_flight
        self._claimed = self._coming = 0

    def more(self, nbytes: int) -> None:
        """Claim that many."""
        self._claim(nbytes)
        self._claimed += nbytes
        self._coming += nbytes
        self._in_flight.add(nbytes)

    def require(self, nbytes: float) -> None:
        """TierFull where so many could not be claimed now."""
        self._claim(int(nbytes))
        self._release(int(nbytes))

    def around(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """The same pieces, each claimed before it is given."""
        for piece in pieces:
            self.more(piece.nbytes)
            yield piece

    def written(self, nbytes: int) -> None:
        """So many are with the file system, which counts them from now on."""
        self._coming -= nbytes
        self._in_flight.add(-nbytes)

    def end(self, stored_bytes: int) -> None:
        """The file is complete and takes so many, or is deleted and takes none."""
        self._in_flight.add(-self._coming)
        self._release(self._claimed - stored_bytes)


class FolderClosed(OSError):
    """A folder was used after its tier was closed."""


class FolderDescriptor:
    """A descriptor of a folder, closed when its last user has left. Thread-safe.

    The kernel gives the number of a closed descriptor to whatever is opened next. A thread that is still at work, or a
    value that is freed late, would read and delete in a folder that is not ours.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, _FOLDER)
        #: times that it was made again
        self.renewals = 0
        self._users = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def closed(self) -> bool:
        """No more use is allowed; some may not have ended."""
        return self._closed

    def renew(self, renewals: int) -> bool:
        """Make the folder again if it was deleted by somebody else; whether it was, since there were `renewals`.

        The number of the descriptor stays, so all that have it use the new folder from now on.
        """
        with self._lock:
            if self._closed:
                return False
            if self.renewals != renewals:  # another writer has found the same, and was first
                return True
            try:
                os.makedirs(self.path, mode=0o700)
            except FileExistsError:
                return False
            try:
                fd = os.open(self.path, _FOLDER)
            except OSError:
                # Too many files are open, say. Left there it would be taken for somebody else's from now on.
                os.rmdir(self.path)
                raise
            os.dup2(fd, self.fd, inheritable=False)
            os.close(fd)
            self.renewals += 1
            return True

    def __enter__(self) -> int:
        with self._lock:
            if self._closed:
                raise FolderClosed(errno.ESHUTDOWN, "the tiers of this worker are closed", self.path)
            self._users += 1
        return self.fd

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            self._end()

    def close(self) -> None:
        """Allow no more use. A second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._end()

    def _end(self) -> None:
        """With the lock."""
        if self._closed and not self._users:
            os.close(self.fd)


def remove_folder(directory: str) -> None:
    """Delete a folder of ours and all that is in it. Does not raise: what cannot be deleted is logged."""
    # Under another name first: were this to hang, it must not delete what is made in its place meanwhile.
    doomed = f"{directory}.{secrets.token_hex(4)}.closed"
    try:
        os.rename(directory, doomed)
    except OSError:
        doomed = directory
    failed: list[str] = []
    shutil.rmtree(doomed, onerror=lambda function, path, info: failed.append(f"{path}: {info[1]}"))
    if failed and os.path.lexists(doomed):
        logger.warning("%d files or folders were not deleted. The first: %s", len(failed), failed[0])


def filesystem_of(directory: str) -> str:
    """Type of the file system a folder is on (``ext4``), or "" when the system does not tell."""
    return System().filesystem(os.path.realpath(directory))
