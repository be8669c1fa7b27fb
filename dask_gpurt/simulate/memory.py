"""The memory of one simulated worker: results in memory, the rest on its disk.

As upstream's: above ``spill_share`` of the limit the least recently used results are written to disk, one after the
other; who stored the result that was too much waits for that. The disk serves one request at a time. Inputs of running
tasks are *pinned*: written out they would not leave memory anyway.

Invariant: `resident_bytes` is the sum of the sizes of the keys in memory, including those still being written out.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dask_gpurt.simulate.clock import VirtualLoop

MEMORY = "memory"
DISK = "disk"


class Store:
    """Data of one worker."""

    def __init__(
        self,
        loop: VirtualLoop,
        limit_bytes: float,
        write: float,
        read: float,
        changed: Callable[[int], None] = lambda nbytes: None,
        resides: Callable[[Any, str | None, int], None] = lambda key, tier, nbytes: None,
    ) -> None:
        self._loop = loop
        #: task data in memory above which it spills
        self.limit_bytes = limit_bytes
        self._write, self._read = write, read
        #: told how many bytes came to memory (negative: left it)
        self._changed = changed
        #: told of a key that came to memory, went to disk or left: (key, tier or None, bytes)
        self._resides = resides
        #: key -> size, wherever it is
        self.sizes: dict[Any, int] = {}
        #: keys in memory, least recently used first; True while being written out
        self._resident: collections.OrderedDict[Any, bool] = collections.OrderedDict()
        self._pins: collections.Counter[Any] = collections.Counter()
        self._disk_free = 0.0
        #: no new work before the writes under way are done
        self.settled_at = 0.0
        self.resident_bytes = 0
        self._leaving_bytes = 0
        self.peak_bytes = 0
        self.spilled_bytes = 0
        self.read_bytes = 0

    def __contains__(self, key: Any) -> bool:
        return key in self.sizes

    @property
    def on_disk_bytes(self) -> int:
        return sum(self.sizes.values()) - self.resident_bytes

    def where(self, key: Any) -> str:
        return MEMORY if key in self._resident else DISK

    def put(self, key: Any, nbytes: int) -> float:
        """A result or a copy arrives; the time at which whoever brought it may go on."""
        if key in self.sizes:
            return self._loop.now
        self.sizes[key] = nbytes
        return self._load(key)

    def put_on_disk(self, key: Any, nbytes: int) -> None:
        self.sizes[key] = nbytes
        self._resides(key, DISK, nbytes)

    def use(self, keys: Iterable[Any]) -> tuple[float, float]:
        """Bring inputs to memory. The times at which their reading begins and is done; both are now without one."""
        began = done = self._loop.now
        reading = False
        for key in keys:
            if key in self._resident:
                self._resident.move_to_end(key)
            elif key in self.sizes:
                nbytes = self.sizes[key]
                start = max(self._loop.now, self._disk_free)
                self._disk_free = done = start + nbytes / self._read
                self.read_bytes += nbytes
                if not reading:
                    reading, began = True, start
                done = max(done, self._load(key))
        return began, done

    def pin(self, keys: Iterable[Any]) -> None:
        self._pins.update(keys)

    def unpin(self, keys: Iterable[Any]) -> None:
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def drop(self, key: Any) -> bool:
        """Forget a key; False when it was not here."""
        nbytes = self.sizes.pop(key, None)
        if nbytes is None:
            return False
        leaving = self._resident.pop(key, None)
        if leaving is not None:
            self.resident_bytes -= nbytes
            self._changed(-nbytes)
            if leaving:
                self._leaving_bytes -= nbytes
        self._resides(key, None, nbytes)
        return True

    def _load(self, key: Any) -> float:
        nbytes = self.sizes[key]
        self._resident[key] = False
        self.resident_bytes += nbytes
        self._changed(nbytes)
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        self._resides(key, MEMORY, nbytes)
        return self._squeeze(key)

    def _squeeze(self, newest: Any) -> float:
        done = self._loop.now
        if self.resident_bytes - self._leaving_bytes <= self.limit_bytes:
            return done
        victims = []
        excess = self.resident_bytes - self._leaving_bytes - self.limit_bytes
        for key, leaving in self._resident.items():
            if excess <= 0:
                break
            if leaving or key == newest or key in self._pins:
                continue
            victims.append(key)
            excess -= self.sizes[key]
        if excess > 0 and newest not in self._pins:
            victims.append(newest)
        for key in victims:
            nbytes = self.sizes[key]
            self._resident[key] = True
            self._leaving_bytes += nbytes
            self.spilled_bytes += nbytes
            self._disk_free = done = max(self._loop.now, self._disk_free) + nbytes / self._write
            self._loop.at(done, self._written, key)
        self.settled_at = max(self.settled_at, done)
        return done

    def _written(self, key: Any) -> None:
        if not self._resident.get(key):
            return  # dropped meanwhile
        nbytes = self.sizes[key]
        self._leaving_bytes -= nbytes
        if key in self._pins:
            self._resident[key] = False  # in use again: it stays
            return
        del self._resident[key]
        self.resident_bytes -= nbytes
        self._changed(-nbytes)
        self._resides(key, DISK, nbytes)
