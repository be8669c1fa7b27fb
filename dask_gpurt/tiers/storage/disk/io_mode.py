"""`Ways`: past the page cache or through it, whichever is faster here and now.

The page cache is no gain where its pages are dear. On virtual machines whose host takes unused memory back, a page that
is touched first can cost ten times what a fast disk takes for it (measured: 30 to 400 MB/s through the cache, 1.5 GB/s
past it). On others, with a slow disk, it is a gain of ten times. So both ways are measured: at the start with one
chunk, then with whatever goes through them. One in `EXPLORE` values goes the way that is not in use, and the more
rarely the dearer that is: its price must be known, and not felt.

The page cache is taken only while memory is idle (`idle_memory`). Values are taken to be read as often as they were so
far.
"""

from __future__ import annotations

import itertools
import math
import threading
from typing import TYPE_CHECKING

from dask_gpurt.model.compression import Rate

if TYPE_CHECKING:
    from dask_gpurt.tiers.storage.disk.idle_memory import IdleMemory

#: the page cache costs the processor, a device does not: it has to be faster by this factor
CACHE_GAIN = 0.8
EXPLORE = 32
#: reads per write that are reckoned with
_READS = (0.5, 4.0)


class Way:
    """One of them."""

    def __init__(self) -> None:
        self.write = Rate()
        self.read = Rate()

    def seconds(self, reads: float) -> float | None:
        """Seconds to write a byte and read it so often; None when none was written."""
        write = self.write.bytes_per_second
        if write is None:
            return None
        # Until a value was read back, reading is taken to be as fast as writing.
        return 1 / write + reads / (self.read.bytes_per_second or write)


class Ways:
    """Both ways to and from one folder, and how fast they are. Thread-safe."""

    def __init__(self, idle_memory: IdleMemory | None) -> None:
        self.past = Way()
        self.through = Way()
        self._idle_memory = idle_memory
        self._decisions = itertools.count(1)
        self._lock = threading.Lock()
        self._written_bytes = self._read_bytes = 0

    def ample(self, nbytes: int) -> bool:
        """Whether there is memory to spare for so many bytes."""
        return self._idle_memory is not None and self._idle_memory.ample(nbytes)

    def cached(self, nbytes: int, *, direct: bool) -> bool:
        """Shall the next value stay in the page cache? `direct`: it can be written past it."""
        if not self.ample(nbytes):
            return False
        if not direct:
            return True  # else it would have to be synced
        with self._lock:
            least, most = _READS
            reads = min(most, max(least, self._read_bytes / max(1, self._written_bytes)))
            decision = next(self._decisions)
        through, past = self.through.seconds(reads), self.past.seconds(reads)
        if through is None or past is None:
            return through is None  # once, to know
        every = math.ceil(EXPLORE * (max(through, past) / min(through, past)) ** 2)
        return (through < CACHE_GAIN * past) != (decision % every == 0)

    def wrote(self, nbytes: int, seconds: float, *, cached: bool) -> None:
        """So many bytes were written."""
        (self.through if cached else self.past).write.add(nbytes, seconds)
        with self._lock:
            self._written_bytes += nbytes

    def read(self, nbytes: int, seconds: float, *, cached: bool) -> None:
        """So many bytes were read."""
        (self.through if cached else self.past).read.add(nbytes, seconds)
        with self._lock:
            self._read_bytes += nbytes
