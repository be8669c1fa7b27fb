"""Which copies are on disk, and how long the disk of a worker is busy reading. Fed by what workers tell.

Stock Dask knows of a copy but not of its tier: of two holders of an input it cannot tell the one that has it in memory
from the one that must read it first (dask/distributed#6002). With this, a decision can: see `candidates.read_seconds`.

A disk serves one read after the other, so what a decision makes a worker read is *booked* there, and the next decision
sees the queue. Booked reads run out with time; nobody has to report them.

Bounded: with more than `MAX_KEYS` copies on disks the oldest news is forgotten and counts as in memory, as everything
does that nobody has told us of. It is advice: a wrong entry costs a read or a transfer, never a result.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

#: copies on disk that are remembered
MAX_KEYS = 500_000
#: bytes/s that a worker reads: an ordinary NVMe
READ_BYTES_PER_SECOND = 2e9


class DiskResidency:
    """Copies on the disks of all workers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        #: key -> address of a holder -> bytes, of copies that are only on disk there; read only
        self.on_disk: dict[Hashable, dict[str, float]] = {}
        self.copies = 0
        #: copies forgotten because there were too many
        self.dropped = 0
        self._clock = clock
        self._by_worker: dict[str, dict[Hashable, None]] = {}
        #: address -> when its disk has done what was booked
        self._free_at: dict[str, float] = {}

    def heard(self, address: str, disk: Iterable[tuple[Hashable, float]], back: Iterable[Hashable]) -> None:
        """News of one worker, see `model.residence`."""
        for key in back:
            self._forget(key, address)
        for key, nbytes in disk:
            holders = self.on_disk.setdefault(key, {})
            if address not in holders:
                self.copies += 1
            holders[address] = nbytes
            self._by_worker.setdefault(address, {})[key] = None
        while self.copies > MAX_KEYS:
            key, holders = next(iter(self.on_disk.items()))
            self.dropped += len(holders)
            for holder in list(holders):
                self._forget(key, holder)

    def _forget(self, key: Hashable, address: str) -> None:
        holders = self.on_disk.get(key)
        if holders is None or holders.pop(address, None) is None:
            return
        self.copies -= 1
        if not holders:
            del self.on_disk[key]
        self._by_worker[address].pop(key, None)

    def worker_removed(self, address: str) -> None:
        for key in list(self._by_worker.get(address, ())):
            self._forget(key, address)
        self._by_worker.pop(address, None)
        self._free_at.pop(address, None)

    def queue_seconds(self, address: str) -> float:
        """Until the disk of a worker has done what was booked."""
        free_at = self._free_at.get(address)
        return 0.0 if free_at is None else max(0.0, free_at - self._clock())

    def book(self, address: str, nbytes: float) -> None:
        """A decision makes a worker read so much."""
        now = self._clock()
        self._free_at[address] = max(now, self._free_at.get(address, now)) + nbytes / READ_BYTES_PER_SECOND

    def clear(self) -> None:
        """The scheduler has forgotten all tasks."""
        self.on_disk.clear()
        self._by_worker.clear()
        self._free_at.clear()
        self.copies = 0
