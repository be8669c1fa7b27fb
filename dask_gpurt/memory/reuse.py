"""`Reuse`: what tasks free stays in the process, within bounds, for the tasks that come next.

While a worker has room, `Reuse.look` has the thresholds of the C allocator at what glibc chooses by itself, or lower
where many threads share a small limit. It says when what is free in there is to go back to the system: it is more than
`SHARE` of the process, or no task has run for `IDLE_SECONDS`. While values may have to leave memory, or above
`PRESSURE` of the worker's memory limit, the nanny's thresholds are back, until it is below `ROOM`.

Theory of operation. distributed's nanny starts workers with ``MALLOC_TRIM_THRESHOLD_``, so that freed memory goes back.
With glibc that also ends its own adjustment: each allocation of 128 KiB or more is then a mapping of its own, and goes
when it is freed. So each temporary of numpy or pandas is fresh memory, whose page faults cost more than most functions
that write to it. (Elementwise functions of 4 MB, two threads: 3.9 s of CPU time, 0.85 with glibc's own
thresholds. Filters, new columns and a groupby of a frame: 0.38 and 0.2 s. The process had 3 and 5 % more at its peak.)

glibc has an arena for each thread. What one frees another cannot have, and what lies between two values that stay is of
use to smaller ones only. So a process may grow. How much is free cannot be asked for: what went back counts as free,
too. It is seen by what the process has beside all that is allocated. When that has grown by the bound since free memory
went back last, it goes back again (`malloc_trim`, in a thread: 0.05 ms per MB, a tenth of what its page faults cost).
What the process has beside is taken as that thread ends. By the next look tasks have freed more, which would stay.
(Seen with Dask's rechunk: 390 MB for good, in a process of 590.)

To say what is allocated, glibc walks along all free pieces under its locks: 1 us as a rule, 25 ms where a million small
pieces are free between others. Where it takes longer than `SLOW_SECONDS`, the nanny's thresholds are back for a
thousand times as long, so that the loop waits for less than 0.1 % of the time.

Once the thresholds were high, there are free pieces in the arenas, and allocations that would be mappings are put into
them for good. So what is free goes back from then on, when it is more than `LEAST_BYTES`, also under Dask's thresholds.

Rejected: thresholds without a bound (the peak of a process of 240 MB was 390); a bound at the end of each task (the
watch looks ten times a second already, and a thread touches at most 200 MB between two looks); doing this where the
nanny's setting is not there, or is not Dask's (then glibc adjusts them already, or a user has chosen).
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from typing import TYPE_CHECKING

from dask_gpurt.memory import reclaim
from dask_gpurt.memory.malloc import NANNY_MMAP_BYTES, NANNY_TRIM_BYTES, heap

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.memory.malloc import Heap

#: the greatest size that glibc, by itself, does not make a mapping of its own
MMAP_BYTES = 32 << 20
#: free bytes that stay at the end of an arena
TRIM_BYTES = 8 << 20
#: share of the memory limit that the largest pieces of all threads may take, and of a piece, what may stay at an end
PIECES, END = 1 / 16, 1 / 4
#: share of the process that may be free, and what may be in any case
SHARE, LEAST_BYTES = 1 / 8, 16 << 20
#: shares of the memory limit above which nothing is kept, and below which it is again (values leave at 0.7)
PRESSURE, ROOM = 0.65, 0.6
#: without a task, after which what is free goes
IDLE_SECONDS = 10.0
#: that the loop may take to learn what is allocated, and the share of its time
SLOW_SECONDS, ASKING_SHARE = 0.002, 0.001


class _Info(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "free", "keepcost")
    )


def allocated() -> Callable[[], int] | None:
    """What says how many bytes of this process are allocated, in microseconds; None: its C library does not say."""
    try:
        info = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    info.restype = _Info

    def nbytes() -> int:
        now = info()
        # Arrow has an allocator of its own. While it is imported it has no pool yet.
        pool = getattr(sys.modules.get("pyarrow"), "default_memory_pool", None)
        return int(now.used + now.hblkhd) + (pool().bytes_allocated() if pool is not None else 0)

    return nbytes


def thresholds(limit_bytes: int | None, threads: int) -> tuple[int, int]:
    """Free bytes at the end of an arena that stay, and the size from which an allocation is a mapping of its own."""
    if not limit_bytes:
        return TRIM_BYTES, MMAP_BYTES
    piece = max(NANNY_MMAP_BYTES, min(MMAP_BYTES, int(PIECES * limit_bytes) // threads))
    return max(NANNY_TRIM_BYTES, min(TRIM_BYTES, int(END * piece))), piece


class Reuse:
    """One per process (`reuse`). Event loop only, but for `cool` and `returned`.

    Parameters
    ----------
    heap
        Has the thresholds.
    allocated_bytes
        See `allocated`.
    now
        Seconds of any clock.
    cpu
        Seconds that this thread has computed.
    """

    def __init__(
        self,
        heap: Heap,
        allocated_bytes: Callable[[], int] | None,
        now: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._heap = heap
        self._allocated_bytes = allocated_bytes
        self._now = now
        self._cpu = cpu
        #: whether tasks may use again what others freed
        self.on = False
        #: whether they ever might, so that there may be free pieces
        self._was_on = False
        #: the least that the process has had beside what is allocated since free memory went back
        self._beside_bytes = math.inf
        #: when a task was last seen to run; None: what was free has gone since then
        self._busy: float | None = None
        #: before which what is allocated is not asked for
        self._not_before = -math.inf
        #: times that it went back
        self.trims = 0

    def look(self, rss_bytes: int, limit_bytes: int | None, *, threads: int, busy: bool, pressed: bool) -> bool:
        """Whether what is free is to go back now. Called several times a second, but not while it goes.

        Parameters
        ----------
        rss_bytes
            Of the process.
        limit_bytes
            Of the worker; None or 0: it has none.
        threads
            That run tasks.
        busy
            Whether a task runs.
        pressed
            Whether values may have to leave memory soon.
        """
        if self._allocated_bytes is None:
            return False
        now = self._now()
        if self.on:
            if pressed or (limit_bytes and rss_bytes > PRESSURE * limit_bytes):
                self.cool()
                return self._trim()
        elif now >= self._not_before and not pressed and (not limit_bytes or rss_bytes < ROOM * limit_bytes):
            self.on = self._heap.rest(thresholds(limit_bytes, threads))
            self._was_on |= self.on
            return False
        if not self._was_on or self._heap.warm:  # a shuffle keeps more, and has bounds of its own
            return False
        if busy:
            self._busy = now
        elif self._busy is not None and now - self._busy > IDLE_SECONDS:
            self._busy = None
            return self._trim()
        return now >= self._not_before and self._is_much(rss_bytes, now)

    def _is_much(self, rss_bytes: int, now: float) -> bool:
        """Whether more is free than may be. Where that takes long to say, Dask's thresholds are back for a while."""
        assert self._allocated_bytes is not None
        began = self._cpu()  # a clock on the wall would count the turns of other processes
        beside = rss_bytes - self._allocated_bytes()
        took = self._cpu() - began
        if took > SLOW_SECONDS:
            self._not_before = now + took / ASKING_SHARE
            self.cool()
            return self._trim()
        if beside > self._beside_bytes + max(LEAST_BYTES, SHARE * rss_bytes if self.on else 0):
            return self._trim()
        self._beside_bytes = min(self._beside_bytes, beside)
        return False

    def _trim(self) -> bool:
        self.trims += 1
        return True

    def returned(self, rss_bytes: int) -> None:
        """What was free has gone back, and the process has `rss_bytes` now. Any thread."""
        if self._allocated_bytes is not None:
            self._beside_bytes = rss_bytes - self._allocated_bytes()

    def cool(self) -> None:
        """What is freed goes back at once, as without us, until `look` finds room. Any thread."""
        if self.on:
            self.on = False
            self._heap.rest(None)


#: this process's
reuse = Reuse(heap, allocated())
reclaim.register(reuse.cool)
