"""`MemoryWatch`: makes values leave memory while the whole process is too large. Their own budget is in `limits`.

Two triggers move values to disk, as in distributed:

* *managed* bytes (the sizes of values) above the budget, at once, by the engine itself;
* the process's resident set above ``distributed.worker.memory.spill``, watched here every ``monitor-interval``, down to
  ``distributed.worker.memory.target``: sizes are estimates, and tasks need memory too.

What waits in `memory.pages` for the next value to be read counts as free, and goes before any value does. So do columns
of files that are kept while memory is free (`tiers.read_cache`). While the process is still too large, memory that
other parts keep for later (`memory.reclaim`) and what is free inside of allocators (`memory.arenas`) is given back too.
Where shuffles have raised its thresholds, the allocator keeps much of it. To move values then does not make the process
smaller, and a worker that distributed has paused for it would stay paused for good, with nothing in memory. (Seen: a
sort of three times the memory.) So it is given back, too, wherever the worker is paused, also where ``spill`` is false
and values stay. Far below its limit a worker keeps some of what tasks free (`memory.reuse`).

Pausing stays with distributed's monitor, which reads the same resident set. The nanny's ``terminate`` stays as well.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import weakref
from typing import TYPE_CHECKING

from dask.utils import format_bytes
from distributed.core import Status
from tornado.ioloop import PeriodicCallback

from dask_gpurt.memory import reclaim
from dask_gpurt.memory.arenas import arenas
from dask_gpurt.memory.pages import pages
from dask_gpurt.memory.reuse import reuse
from dask_gpurt.model import safe_mode
from dask_gpurt.tiers.read_cache import seam as reads
from dask_gpurt.tiers.threads import run_apart

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from distributed.worker import Worker

    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.limits import Limits

# distributed limits the rate of the warning below on this logger
logger = logging.getLogger("distributed.worker.memory")

#: between two times that the allocator is asked to give memory back
_TRIM_SECONDS = 0.5
#: share of the limit for memory that waits for the next value to be read into it
_KEPT = 0.08
_KEPT_LEAST = 64 << 20
#: and at most this share of the room that the process leaves to values. (Where libraries fill 172 MiB of 267, 64 MiB
#: more brought the process above its marks with each value that was read, and the nanny ended it.)
_KEPT_OF_ROOM = 0.25
#: share of what values may fill the process up to, above which no column of a file is kept: half of the limit. A task
#: may take the other half in less time than passes between two looks, and the nanny would end the process for them
_READS_BELOW = 0.7
#: and no more than was free all through so many seconds, at most twice that. What is dropped in turns with what is kept
#: costs, and gains nothing (1.06 of the time, where each round of tasks fills the worker)
_READS_SECONDS = 10.0
#: the process itself has no less than the least that it had beside its values in so many seconds, at most twice that
_BESIDE_SECONDS = 10.0
#: for the allocator to give back memory, 0.05 ms per MB
_END_SECONDS = 5.0


def _give_back() -> None:
    reclaim.give_back()
    _release_arrow()
    arenas.trim()


def _release_arrow() -> None:
    # Arrow's own allocator keeps what it freed until it is used again. While it is imported it has no pool yet.
    pool = getattr(sys.modules.get("pyarrow"), "default_memory_pool", None)
    if pool is not None:
        pool().release_unused()


#: bytes that wait for the next value to be read into them, for each worker in this process
_allowed: weakref.WeakKeyDictionary[MemoryWatch, int] = weakref.WeakKeyDictionary()


def _allow(watch: MemoryWatch, nbytes: int | None) -> None:
    if nbytes is None:
        _allowed.pop(watch, None)
    else:
        _allowed[watch] = nbytes
    # If it stayed when the last of them has gone, freed pages would stay in a process without a watch.
    pages.allowance_bytes = max(_allowed.values(), default=0)


#: bytes of columns of files that may be kept, by each worker of this process; they share its memory
_shares: weakref.WeakKeyDictionary[MemoryWatch, int] = weakref.WeakKeyDictionary()


def _allow_reads(watch: MemoryWatch, nbytes: int | None) -> int:
    """Let a worker have so many; None: it has ended. Returns the bytes that were dropped."""
    if nbytes is None:
        _shares.pop(watch, None)
    else:
        _shares[watch] = nbytes
    return reads.CACHE.allow(min(_shares.values(), default=0))


class _Least:
    """The least of a figure in the last `seconds` at least, and twice as many at most."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since = -math.inf
        self._before = self._least = math.inf

    def of(self, figure: float) -> float:
        """That least, with the figure of now."""
        self._least = min(self._least, figure)
        now = time.monotonic()
        if now - self._since >= self._seconds:
            self._before, self._since, self._least = self._least, now, figure
        return min(self._before, self._least)


class MemoryWatch:
    """Asks the engine to shrink while the process is too large."""

    def __init__(self, worker: Worker, engine: Engine, limits: Limits) -> None:
        self._worker = worker
        self._engine = engine
        self._limits = limits
        self._callback: PeriodicCallback | None = None
        #: times the process was found above the mark
        self.alarms = 0
        #: times that the allocator was asked to give back what is free
        self.trims = 0
        self._trimmed = -math.inf
        #: how much may wait where there is room enough
        self._kept_bytes = 0
        #: it has asked for a share of the read cache
        self._reads = False
        #: what was free for it
        self._reads_free = _Least(_READS_SECONDS)
        #: what the process has beside values and what is kept
        self._beside = _Least(_BESIDE_SECONDS)
        #: bytes of columns that were dropped, and that Arrow's allocator may still have
        self._dropped_bytes = 0
        engine.eviction.on_pressed.append(self._pressed)
        #: the allocator is at it
        self._trimming: asyncio.Future[object] | None = None
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        """Start, stop or change the watch."""
        self.stop()
        self._limits = limits
        self._kept_bytes = max(_KEPT_LEAST, int(_KEPT * (self._worker.memory_manager.memory_limit or 0)))
        _allow(self, self._kept_bytes)
        # Also where the resident set moves no values: what is kept for later has to go.
        self._callback = PeriodicCallback(self.look, limits.interval_seconds * 1000)
        self._callback.start()

    def stop(self) -> None:
        """Look no longer, until `set_limits`."""
        pages.trim()
        reuse.cool()
        self._allow_reads(0)  # the memory is not watched
        self._reads_free = _Least(_READS_SECONDS)
        if self._callback is not None:
            self._callback.stop()
            self._callback = None

    async def end(self) -> None:
        """Stop for good, and give back what is kept and free: from now on nothing watches it."""
        self.stop()
        _allow(self, None)
        self._reads = False  # else the engine, as it empties, would allow some again
        _allow_reads(self, None)
        reads.uninstall(self)
        await run_apart(_give_back, _END_SECONDS)

    def _allow_reads(self, nbytes: int) -> None:
        # What is written to disk while columns of it are kept frees nothing, so nothing is kept where values may leave.
        free = 0 if self._engine.eviction.pressed else max(0, min(self._limits.reads_bytes, nbytes))
        allowed = int(self._reads_free.of(free))
        if allowed and not self._reads:
            self._reads = True
            reads.install(self)
        if not self._reads:
            return
        reads.look()
        dropped = _allow_reads(self, allowed)
        if dropped:
            self._dropped_bytes += dropped
            releasing = self._in_thread(_release_arrow)
            if releasing is None:
                self._dropped_bytes = 0
            else:
                releasing.add_done_callback(self._released)

    def _released(self, _: object) -> None:
        self._dropped_bytes = 0

    def _pressed(self) -> None:
        if self._reads and self._engine.eviction.pressed:
            self._allow_reads(0)

    def trim(self) -> None:
        """Give back what is kept and free; not too often. In a thread: it takes 0.05 ms per MB that is free."""
        now = time.monotonic()
        # On a large worker it takes seconds. Begun anew meanwhile, it would take one thread after the other of those
        # in which the loop also looks up the names of hosts.
        if now - self._trimmed >= _TRIM_SECONDS and not self._is_trimming():
            self._trimmed = now
            self.trims += 1
            self._trimming = self._in_thread(_give_back)

    def _is_trimming(self) -> bool:
        """Whether the allocator is at it. It holds locks then, for which the loop would wait to ask it anything."""
        return self._trimming is not None and not self._trimming.done()

    def _return_free(self) -> None:
        arenas.trim()
        reuse.returned(self._worker.monitor.get_process_memory())

    def _in_thread(self, function: Callable[[], object]) -> asyncio.Future[object] | None:
        try:
            return self._engine.io.loop.run_in_executor(None, function)
        except RuntimeError:  # the system starts no thread, and values are to leave all the same
            function()
            return None

    def look(self) -> None:
        """Look at the resident set once, and act."""
        pages.trim_idle()
        self._engine.eviction.relax()
        # The source that distributed itself uses, and that its tests replace.
        size = self._worker.monitor.get_process_memory()
        if (
            self._limits.reuse
            and not self._is_trimming()
            and reuse.look(
                size,
                self._worker.memory_manager.memory_limit,
                threads=self._worker.state.nthreads,
                busy=self._worker.state.executing_count > 0,
                pressed=self._engine.eviction.pressed or "tiers" in safe_mode.parts_of(self._worker),
            )
        ):
            self._trimming = self._in_thread(self._return_free)
        if self._worker.status is Status.paused:  # by a mark of its own, which may lie below ours, or be the only one
            self.trim()
        high, low = self._limits.watch_high_bytes, self._limits.watch_low_bytes
        if high is None or low is None:
            return
        idle = pages.idle_bytes
        kept = reads.CACHE.kept_bytes
        if self._limits.ceiling_bytes is not None and not self._limits.shards_only:
            managed = self._engine.resident_bytes
            kept += self._dropped_bytes
            beside = max(0, size - idle - kept - managed)
            # Results of tasks that run, and values that are being read, are promised room, and some of their bytes are
            # in the process. Counted twice, one result of a fifth of the limit would leave room for nothing else.
            coming = self._engine.eviction.used_bytes - managed
            room = self._limits.ceiling_bytes - max(self._beside.of(beside), beside - coming)
            self._engine.set_room(room)
            _allow(self, max(0, min(self._kept_bytes, int(_KEPT_OF_ROOM * room))))
            # Values may be made of what is kept, so it does not count beside them.
            free = _READS_BELOW * self._limits.ceiling_bytes - max(managed, size - idle - kept)
            self._allow_reads(int(free))
        if size > high and idle:
            # At once, as values would have to leave for it: the turns of `trim` are half a second apart.
            self._in_thread(pages.trim)
            size -= idle
        size -= self._dropped_bytes
        if size <= high:
            self._engine.shrink(0)
            return
        self.alarms += 1
        self.trim()
        self._engine.shrink(size - low)
        # With shards alone our bytes say nothing about the process; distributed's monitor has its own warning.
        if not self._engine.can_shrink and not self._limits.shards_only:
            logger.warning(
                "Unmanaged memory use is high. This may indicate a memory leak or the memory may not be released to "
                "the OS; see https://distributed.dask.org/en/latest/worker-memory.html for more information. "
                "-- Process memory: %s -- Managed in memory: %s",
                format_bytes(size),
                format_bytes(self._engine.resident_bytes),
            )
