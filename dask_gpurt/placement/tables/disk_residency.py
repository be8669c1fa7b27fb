"""`DiskResidency`: which copies of results must be read first, and how long each worker's disk will be busy.

Workers report what they spill and load (`heard`). Decisions read `on_disk` and `queue_seconds`, see
`candidates.read_seconds`.

Dask knows of a copy but not of its tier. Of two holders of an input it cannot tell the one that has it in memory from
the one that must read it first (dask/distributed#6002).

The copy of a device value in page-locked host memory counts as well, with the bytes that a disk would read in the time
of its copy to the device: so one figure prices them all.

A disk serves one read after the other. What a decision makes a worker read is therefore *booked* (`book`), and the next
decision sees the queue. Booked reads expire with time; workers need not report them.

The table is bounded: beyond `MAX_KEYS` copies the oldest reports are forgotten. A copy without a report counts as in
memory. All of it is advice: a wrong entry costs a read or a transfer, never a result.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

#: copies on disk that are remembered
MAX_KEYS = 500_000
#: share of them that is forgotten at a time
LOT = 64
#: bytes/s that a worker reads: an ordinary NVMe
READ_BYTES_PER_SECOND = 2e9
#: bytes/s from page-locked memory to a device, until a worker has measured it: what PCIe 4.0 x16 gives
PINNED_BYTES_PER_SECOND = 20e9


class DiskResidency:
    """The copies on the disks of all workers, and the reads booked there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        #: key -> address of a holder -> bytes to read, of copies that are only on disk there; read only
        self.on_disk: dict[Hashable, dict[str, float]] = {}
        self.copies = 0
        self._clock = clock
        self._by_worker: dict[str, dict[Hashable, None]] = {}
        #: address -> when its disk has done what was booked
        self._free_at: dict[str, float] = {}

    def heard(
        self,
        address: str,
        disk: Iterable[tuple[Hashable, float]],
        back: Iterable[Hashable],
        pinned: Iterable[tuple[Hashable, float]] = (),
        pinned_rate: float | None = None,
    ) -> None:
        """Take in a worker's report, see `model.residence`.

        Parameters
        ----------
        address
            Of the worker.
        disk
            (key, bytes) of copies that are only on disk there now.
        back
            Keys of copies that are where tasks compute on them again, or gone.
        pinned
            (key, bytes) of device values that are only in host memory there now.
        pinned_rate
            Bytes/s of the copies that brought such values back to its device; None: there were none.
        """
        for key in back:
            self._forget(key, address)
        share = READ_BYTES_PER_SECOND / (pinned_rate or PINNED_BYTES_PER_SECOND)
        for key, nbytes in [*disk, *((key, share * nbytes) for key, nbytes in pinned)]:
            holders = self.on_disk.setdefault(key, {})
            if address not in holders:
                self.copies += 1
            holders[address] = nbytes
            self._by_worker.setdefault(address, {})[key] = None
        if self.copies > MAX_KEYS + MAX_KEYS // LOT:
            # Many at a time: to find the first entry of a dict takes as long as there are deleted ones before it.
            for key in list(islice(self.on_disk, self.copies - MAX_KEYS)):
                if self.copies <= MAX_KEYS:
                    break
                for holder in list(self.on_disk[key]):
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
        """Forget the copies and the booked reads of a worker that has left."""
        for key in list(self._by_worker.get(address, ())):
            self._forget(key, address)
        self._by_worker.pop(address, None)
        self._free_at.pop(address, None)

    def queue_seconds(self, address: str) -> float:
        """Seconds until the disk of a worker has done the reads that are booked."""
        free_at = self._free_at.get(address)
        return 0.0 if free_at is None else max(0.0, free_at - self._clock())

    def book(self, address: str, nbytes: float) -> None:
        """Book a read of `nbytes`, which a decision has caused, on the disk of a worker."""
        now = self._clock()
        self._free_at[address] = max(now, self._free_at.get(address, now)) + nbytes / READ_BYTES_PER_SECOND

    def clear(self) -> None:
        """Drop all copies and booked reads: the scheduler has forgotten all tasks."""
        self.on_disk.clear()
        self._by_worker.clear()
        self._free_at.clear()
        self.copies = 0
