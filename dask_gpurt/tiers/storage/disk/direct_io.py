"""Page-aligned memory, and files read and written past the page cache.

Spilling is meant to free memory. Pages written through the cache stay in it, dirty, until the kernel has written them,
and count against the container's limit meanwhile. With ``O_DIRECT`` the memory is free when the call returns, and the
call returns when the device has the data, so its duration is the device's speed.

The price is alignment: address, length and offset must be multiples of the block. The memory of arrays and columns
never is (malloc gives 16 bytes), so a write goes through a pooled chunk: copied (about 15 GB/s measured), hashed while
it is in the processor's cache, written. A read needs no copy: it goes straight into the final memory, which is ours
to align. Chunks are aligned to, and backed by, huge pages where the system has them: the same writes from 4 KiB pages
were half as fast.

A file opened with ``O_DIRECT`` must cope with a short transfer (after which nothing is aligned) and with file
systems that accept the flag but not the transfer (EINVAL): the flag is taken off the descriptor and the rest goes
through the page cache. That is slower and always right.

Rejected: kernel AIO and io_uring (no binding in Python worth a dependency; the engine's two writers and three
readers already keep several requests in flight). ``posix_memalign`` by ctypes (numpy allocates as well and asks for
huge pages).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy

from dask_gpurt.memory import reclaim

if TYPE_CHECKING:
    from collections.abc import Callable

#: bytes; a multiple of the logical block of every disk there is
BLOCK = 4096
#: bytes copied, hashed and transferred at a time
CHUNK = 4 << 20
_HUGE_PAGE = 2 << 20
#: 0 where the system has no such flag
O_DIRECT: int = getattr(os, "O_DIRECT", 0)


def round_up(nbytes: int) -> int:
    """The next multiple of `BLOCK`."""
    return -(-nbytes // BLOCK) * BLOCK


def aligned_buffer(nbytes: int, alignment: int = BLOCK) -> memoryview:
    """Fresh, writeable memory whose address is a multiple of `alignment`; not zeroed."""
    raw = numpy.empty(nbytes + alignment, "u1")
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes].data


class BufferPool:
    """Aligned chunks that are used again: fresh memory costs a page fault per page.

    One per process; thread-safe. More than `keep` chunks exist only while more are in use. Those that are not in use go
    when a worker is at its memory limit, or gives back its tiers (`reclaim`): of a small worker they are a twentieth.
    """

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self) -> memoryview:
        """`CHUNK` bytes. Give them back."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return aligned_buffer(CHUNK, _HUGE_PAGE)

    def give(self, chunk: memoryview) -> None:
        """Take a buffer back."""
        with self._lock:
            if len(self._free) < self._keep:
                self._free.append(chunk)

    def give_back(self) -> None:
        """Keep none of those that are not in use."""
        with self._lock:
            self._free.clear()


#: the process's own
POOL = BufferPool()
reclaim.register(POOL.give_back)


class DirectFile:
    """A descriptor that may have been opened with ``O_DIRECT``, and the loops around its system calls.

    Parameters
    ----------
    system
        `os`, or what stands for it in a test.
    direct
        Was the flag given? Goes to False when it had to be taken off.
    """

    def __init__(self, system: Any, fd: int, direct: bool) -> None:
        self._system = system
        self.fd = fd
        self.direct = direct

    def write(self, buffers: list[memoryview], offset: int) -> None:
        """All of these bytes, at this place. OSError when the system does not take them."""

        def call(pending: list[memoryview], at: int) -> int:
            written = int(self._system.pwritev(self.fd, pending, at))
            if written <= 0:
                raise OSError(errno.EIO, f"pwritev wrote {written} bytes")
            return written

        self._all(call, buffers, offset)

    def read(self, buffers: list[memoryview], offset: int) -> int:
        """Fill these buffers from this place; returns the bytes got, which are fewer only at the end of the file."""
        return self._all(lambda pending, at: int(self._system.preadv(self.fd, pending, at)), buffers, offset)

    def _all(self, call: Callable[[list[memoryview], int], int], buffers: list[memoryview], offset: int) -> int:
        pending = [b for b in reversed(buffers) if b.nbytes]
        start = offset
        while pending:
            try:
                n = call(pending[: -IOV_MAX - 1 : -1], offset)
            except OSError as e:
                if e.errno == errno.EINVAL and self.direct:
                    self.through_cache()
                    continue
                raise
            if n <= 0:
                break
            offset += n
            while n:
                view = pending.pop()
                if n < view.nbytes:  # short: go on in the middle of this buffer
                    pending.append(view[n:])
                    if self.direct:
                        self.through_cache()
                    break
                n -= view.nbytes
        return offset - start

    def through_cache(self) -> None:
        """From here on without ``O_DIRECT``."""
        self.direct = False
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~O_DIRECT)


try:
    IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX"))
except (ValueError, OSError):
    IOV_MAX = 16  # what POSIX guarantees


def supports_direct(dir_fd: int, system: Any = os) -> bool:
    """Whether this file system writes and reads with ``O_DIRECT``: tries it with a block, and leaves nothing behind."""
    if not O_DIRECT:
        return False
    name = ".gpurt-direct"
    block = aligned_buffer(BLOCK)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | O_DIRECT
        fd = system.open(name, flags, 0o600, dir_fd=dir_fd)
    except OSError:
        return False
    try:
        return bool(system.pwritev(fd, [block], 0) == BLOCK and system.preadv(fd, [block], 0) == BLOCK)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            system.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=dir_fd)


def drop_cache(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Ask the kernel to give up the cached pages of a range (0: to the end): clean ones go, dirty ones begin to be
    written. Advice only: a system without it keeps them."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
