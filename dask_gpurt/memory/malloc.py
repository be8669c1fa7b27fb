"""`Heap`: makes the C allocator keep freed memory while shuffles run in this process and some seconds longer.

While at least one run is open in this process both thresholds of the allocator are high, and temporaries come from it
(`Heap.pool`). What stays (gathered and received rows, outputs) lies in blocks of `pages`, which keeps what they leave
as long. When the last run has closed, memory stays for `LINGER_SECONDS`, as shuffles come one after another. Then the
thresholds are set back and what is free is returned (`malloc_trim`, in a thread: it takes 0.05 ms per MB). It is
returned at once when the process takes more than `PRESSURE` of its worker's memory limit, looked at every second: Dask
counts free memory of a process as used, and would spill or pause for it. While a run is open, that is looked at as rows
come in and outputs are made; when neither happens, the watch of the tiers asks for it (`reclaim`).

When the first output is made, what splitting left free is returned. From then on the process may grow by `TRIM_BYTES`
before what is free is returned again (`Heap.freed`): rows must not be there twice.

Theory of operation. distributed's nanny starts workers with ``MALLOC_TRIM_THRESHOLD_`` (64 KiB), so that freed memory
goes back to the system at once. With glibc that also pins the size from which an allocation is a mapping of its own, at
128 KiB. A shuffle allocates and frees everything in larger pieces: temporaries of the hash and of the split. Each of
them is then fresh memory, and its page faults cost ten times what writing to it costs (0.5 ms per MB on a virtual
machine, much more where the host has to find the memory first). They were half of a worker's CPU time in a shuffle.

The thresholds are touched only where the environment has ``MALLOC_TRIM_THRESHOLD_``: its value is what to restore, and
only then glibc's own adjustment of the thresholds is off already, which `mallopt` would switch off for good. Elsewhere
(no glibc, no nanny) they stay as they are. While no shuffle runs, tasks may have others (`reuse`).

Measured, one partition of 62 MB split, encoded, checked and assembled (CPU seconds, page faults): 0.29 and 50,000 with
the nanny's setting, 0.12 and none in warm memory; 0.11 is what Arrow alone takes there. `TRIM_BYTES` of 64 MiB instead
of 32: the peak of 0.3 GB of text was 589 MB instead of 569 (p2p: 584). Rejected: Arrow's own pool for outputs (mimalloc
gives memory back within 10 ms, and cannot use what received rows leave); returning memory at the end of each run (the
next one starts cold: 5.6 instead of 3.4 CPU seconds for 1 GB on two workers, 16 partitions).
"""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil

from dask_gpurt.memory import reclaim
from dask_gpurt.memory.arenas import Arenas, arenas, glibc
from dask_gpurt.memory.pages import Pages, pages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow as pa

    Later = Callable[[float, Callable[[], None]], Any]
    #: runs a function in a thread, now or later
    Submit = Callable[[Callable[[], object]], Any]

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
#: ``MALLOC_TRIM_THRESHOLD_`` as distributed's configuration has it. Another one was chosen by a user
NANNY_TRIM_BYTES = 65536
#: glibc's default of the size from which an allocation is a mapping of its own
NANNY_MMAP_BYTES = 128 << 10
#: `mallopt` takes an int; more would be cut off to its last bits
_MOST_BYTES = (1 << 31) - 1
#: free bytes at the end of a heap that are kept while a shuffle runs
KEEP_BYTES = 1 << 30
#: received bytes that became outputs between two looks at the process, and how much it may grow by them
TRIM_BYTES = 32 << 20
#: memory is kept for so long after the last run
LINGER_SECONDS = 60.0
#: share of the worker's memory limit above which it is not
PRESSURE = 0.5
#: between two looks at the process after the last run
_TICK_SECONDS = 1.0
#: allocations up to this size come from the heap while a shuffle runs; the second is what glibc before 2.35 takes
HEAP_BYTES = (1 << 30, 32 << 20)


def _rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


class Heap:
    """Counts the users that want freed memory kept. One per process (`malloc`); any thread.

    Parameters
    ----------
    environment
        Where the thresholds of this process were set.
    libc
        With `mallopt(option, value)` and what `Arenas` needs; None: nothing is ever done.
    rss_bytes
        Memory of this process.
    pages
        What is kept and given back with it.
    now
        Seconds of any clock.
    arenas
        Of `libc`; None: some of its own.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        libc: Any,
        rss_bytes: Callable[[], int] = _rss_bytes,
        pages: Pages | None = None,
        now: Callable[[], float] = time.monotonic,
        arenas: Arenas | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._arenas = arenas or Arenas(libc)
        self._pages = pages or Pages(None)
        self._active = pages is not None
        self._now = now
        #: when `look` may look again, seconds of that clock
        self._look_at = 0.0
        self._libc = libc
        self._rss_bytes = rss_bytes
        #: runs that are open
        self.users = 0
        #: counts calls of `keep`: a timer of before does nothing
        self._kept = 0
        #: whether the thresholds are high
        self.warm = False
        #: least memory limit of the workers whose runs are open, or were the last to be, bytes; 0: none
        self._limit_bytes = 0
        #: bytes freed since the last look
        self._freed = 0
        #: thresholds while no shuffle runs, of trimming and of mappings; None: those of the environment
        self._resting: tuple[int, int] | None = None
        #: process memory when the first output of these runs had been made, bytes; 0: none was
        self._mark_bytes = 0
        try:
            self._before = (
                min(_MOST_BYTES, int(environment["MALLOC_TRIM_THRESHOLD_"])),
                min(_MOST_BYTES, int(environment.get("MALLOC_MMAP_THRESHOLD_", NANNY_MMAP_BYTES))),
            )
            self._active = True
        except (KeyError, ValueError):
            self._libc = None
        self._active = self._active and (self._libc is not None or pages is not None)

    @property
    def pool(self) -> pa.MemoryPool:
        """Where Arrow memory of a shuffle comes from, for the thread that asks."""
        # Late: on a worker that has no shuffle it would be most of what this package takes, 24 MB.
        import pyarrow as pa

        if self._libc is None:
            return pa.default_memory_pool()
        self._arenas.mark()
        return pa.system_memory_pool()

    def keep(self, limit_bytes: int | None = None) -> None:
        """Keep freed memory from now on; once per `release`. `limit_bytes`: of the worker; None or 0: it has none."""
        with self._lock:
            self.users += 1
            self._kept += 1
            if self.users == 1:  # what was left by workers that may be gone
                self._limit_bytes = self._mark_bytes = 0
            if limit_bytes:
                self._limit_bytes = min(self._limit_bytes or limit_bytes, limit_bytes)
            if self.warm or not self._active:
                return
            self.warm = True
            self._pages.keep(True)
            if self._libc is None:
                return
            self._libc.mallopt(_TRIM, max(KEEP_BYTES, self._before[0]))
            for size in HEAP_BYTES:
                if self._libc.mallopt(_MMAP, size):
                    break

    def release(self, later: Later, submit: Submit) -> None:
        """The reverse of `keep`; some seconds after the last one memory is given back.

        Parameters
        ----------
        later
            Calls a function after so many seconds, as `call_later` of an event loop that lives at least as long as the
            worker: a loop that ends before takes the memory with it.
        """
        with self._lock:
            self.users -= 1
            if self.users or not self._active:
                return
            kept = self._kept
        self._look(kept, LINGER_SECONDS, later, submit)

    def _look(self, kept: int, left_seconds: float, later: Later, submit: Submit) -> None:
        """Give memory back if it is time to, or it is needed; else look again."""
        with self._lock:
            if self.users or kept != self._kept:
                return
            if left_seconds > 0 and not self._needed(self._rss_bytes()):
                later(_TICK_SECONDS, functools.partial(self._look, kept, left_seconds - _TICK_SECONDS, later, submit))
                return
            self._cool()
        submit(self._trim)

    def give_back(self) -> None:
        """The worker is at its limit: what waits goes, and what is freed from now on goes at once, until the next run.

        The thresholds too: with them, what tasks free stays in the arenas of their threads (see `arenas`).
        """
        with self._lock:
            if self.warm:
                self._cool()

    def rest(self, thresholds: tuple[int, int] | None) -> bool:
        """Have other thresholds than the environment's while no shuffle runs; whether that can be. None: no longer.

        Parameters
        ----------
        thresholds
            Bytes: of what is free at the end of an arena before it goes back, and of the least mapping of its own.
        """
        with self._lock:
            if self._libc is None or self._before[0] != NANNY_TRIM_BYTES:
                return False
            self._resting = thresholds
            if not self.warm:
                self._set_thresholds()
            return True

    def _set_thresholds(self) -> None:
        trim, mmap = self._resting or self._before
        self._libc.mallopt(_TRIM, trim)
        self._libc.mallopt(_MMAP, mmap)

    def _cool(self) -> None:
        self._pages.keep(False)
        if self._libc is not None:
            self._set_thresholds()
        self.warm = False

    def _needed(self, rss_bytes: int) -> bool:
        """Whether the worker needs what is free."""
        return bool(self._limit_bytes) and rss_bytes > PRESSURE * self._limit_bytes

    def freed(self, nbytes: int, submit: Submit) -> None:
        """Received memory was freed for good, its rows are in an output now."""
        with self._lock:
            if not self._active or not self.users:
                return
            self._freed += nbytes
            first = not self._mark_bytes
            if first:
                self._mark_bytes = 1 << 62  # until it is known
            elif self._freed < TRIM_BYTES:
                return
            self._freed = 0
            if not first:
                rss_bytes = self._rss_bytes()
                needed = self._needed(rss_bytes)
                if rss_bytes <= self._mark_bytes + TRIM_BYTES and not needed:
                    return
                if needed:
                    self._pages.trim()
        submit(self._start_outputs if first else self._trim_now)

    def look(self, submit: Submit) -> None:
        """While rows come in: give back what waits to be used again when the worker needs it. At most once a second."""
        now = self._now()
        with self._lock:
            if not self._limit_bytes or now < self._look_at:
                return
            self._look_at = now + _TICK_SECONDS
            if self._pages.idle_bytes < TRIM_BYTES or not self._needed(self._rss_bytes()):
                return
        submit(self._pages.trim)

    def _start_outputs(self) -> None:
        self._trim_now()
        self._mark_bytes = self._rss_bytes()

    def _trim(self) -> None:
        if not self.users:  # else another shuffle has begun, and needs it
            self._trim_now()

    def _trim_now(self) -> None:
        if self._libc is not None:
            self._arenas.trim()


#: this process's
heap = Heap(os.environ, glibc(), pages=pages, arenas=arenas)
reclaim.register(heap.give_back)
