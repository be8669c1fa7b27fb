"""The memory of one simulated worker: results in memory, the rest on its disk.

As upstream's: above ``spill_share`` of the limit the least recently used results are written to disk, one after the
other; who stored the result that was too much waits for that. The disk serves one request at a time. Inputs of running
tasks are *pinned*: written out they would not leave memory anyway.

Or, ``in_background``, as this package's tiers do it: no task waits for a write, only for room when memory is a quarter
above the limit; writes do not hold up reads; a value that was read keeps its copy on disk, and leaves memory again
without a write; of the others goes first what is used last, as far as the scheduler knows. Reading ahead is left out.

Invariant: `resident_bytes` is the sum of the sizes of the keys in memory, including those still being written out.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dask.typing import Key

    from dask_gpurt.simulate.clock import VirtualLoop

MEMORY = "memory"
DISK = "disk"
#: share of the limit by which memory may pass it before tasks wait for room, in the background mode
SLACK = 0.25


class Store:
    """Data of one worker."""

    def __init__(
        self,
        loop: VirtualLoop,
        limit_bytes: float,
        write: float,
        read: float,
        changed: Callable[[int], None] = lambda nbytes: None,
        resides: Callable[[Key, str | None, int], None] = lambda key, tier, nbytes: None,
        *,
        in_background: bool = False,
        next_use: Callable[[Key], tuple[float, ...] | None] = lambda key: None,
    ) -> None:
        self._loop = loop
        #: task data in memory above which it spills
        self.limit_bytes = limit_bytes
        self._write, self._read = write, read
        #: called with how many bytes came to memory (negative: left it)
        self._changed = changed
        #: called with a key that came to memory, went to disk or left: (key, tier or None, bytes)
        self._resides = resides
        #: key -> size, wherever it is
        self.sizes: dict[Key, int] = {}
        #: keys in memory, least recently used first; True while being written out
        self._resident: collections.OrderedDict[Key, bool] = collections.OrderedDict()
        self._pins: collections.Counter[Key] = collections.Counter()
        self._in_background = in_background
        #: key -> the priority of the task that needs it first; None: no task is known to
        self._next_use = next_use
        #: keys in memory that have a copy on disk too
        self._clean: set[Key] = set()
        #: writes under way, in order: when each will be done, and its size
        self._writing: collections.deque[tuple[float, int]] = collections.deque()
        #: when the disk is free again: for writes, and for reads; one and the same unless in the background
        self._disk_free = 0.0
        self._read_free = 0.0
        #: no new work before the writes under way are done
        self.settled_at = 0.0
        self.resident_bytes = 0
        self._leaving_bytes = 0
        self.peak_bytes = 0
        self.spilled_bytes = 0
        self.read_bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self.sizes

    @property
    def on_disk_bytes(self) -> int:
        """Of the values that are not in memory."""
        return sum(self.sizes.values()) - self.resident_bytes

    def where(self, key: Key) -> str:
        """``memory`` or ``disk``, of a key that is here."""
        return MEMORY if key in self._resident else DISK

    def put(self, key: Key, nbytes: int) -> float:
        """A result or a copy arrives; the time at which what brought it goes on."""
        if key in self.sizes:
            return self._loop.now
        self.sizes[key] = nbytes
        return self._load(key)

    def put_on_disk(self, key: Key, nbytes: int) -> None:
        """A value is on disk from the start."""
        self.sizes[key] = nbytes
        self._resides(key, DISK, nbytes)

    def use(self, keys: Iterable[Key]) -> tuple[float, float]:
        """Bring inputs to memory. The times at which their reading begins and is done; both are now without one."""
        began = done = self._loop.now
        reading = False
        for key in keys:
            if key in self._resident:
                self._resident.move_to_end(key)
            elif key in self.sizes:
                nbytes = self.sizes[key]
                start = max(self._loop.now, self._read_free if self._in_background else self._disk_free)
                self._read_free = done = start + nbytes / self._read
                if self._in_background:
                    self._clean.add(key)
                else:
                    self._disk_free = done
                self.read_bytes += nbytes
                if not reading:
                    reading, began = True, start
                done = max(done, self._load(key))
        return began, done

    def pin(self, keys: Iterable[Key]) -> None:
        """Keep keys in memory, as a task or a request uses them."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[Key]) -> None:
        """Undo one `pin`."""
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]

    def drop(self, key: Key) -> bool:
        """Forget a key; False when it was not here."""
        nbytes = self.sizes.pop(key, None)
        if nbytes is None:
            return False
        self._clean.discard(key)
        leaving = self._resident.pop(key, None)
        if leaving is not None:
            self.resident_bytes -= nbytes
            self._changed(-nbytes)
            if leaving:
                self._leaving_bytes -= nbytes
        self._resides(key, None, nbytes)
        return True

    def _load(self, key: Key) -> float:
        nbytes = self.sizes[key]
        self._resident[key] = False
        self.resident_bytes += nbytes
        self._changed(nbytes)
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        self._resides(key, MEMORY, nbytes)
        return self._squeeze(key)

    def _squeeze(self, newest: Key) -> float:
        done = self._loop.now
        if self.resident_bytes - self._leaving_bytes <= self.limit_bytes:
            return done
        victims = []
        excess = self.resident_bytes - self._leaving_bytes - self.limit_bytes
        for key in self._candidates(newest):
            if excess <= 0:
                break
            victims.append(key)
            excess -= self.sizes[key]
        if excess > 0 and newest not in self._pins:
            victims.append(newest)
        for key in victims:
            nbytes = self.sizes[key]
            if key in self._clean:
                self._gone(key)
                continue
            self._resident[key] = True
            self._leaving_bytes += nbytes
            self.spilled_bytes += nbytes
            self._disk_free = done = max(self._loop.now, self._disk_free) + nbytes / self._write
            self._writing.append((done, nbytes))
            self._loop.at(done, self._written, key)
        if self._in_background:
            self._wait_for_room()
            return self._loop.now
        self.settled_at = max(self.settled_at, done)
        return done

    def _candidates(self, newest: Key) -> Iterable[Key]:
        """What may leave memory, in the order in which it should."""
        keys = (k for k, leaving in self._resident.items() if not (leaving or k == newest or k in self._pins))
        if not self._in_background:
            return keys
        order: dict[Key, tuple[object, ...]] = {}
        for key in keys:
            use = self._next_use(key)
            # What needs no write first, then what is used last; of equals the least recently used.
            order[key] = (key in self._clean, use is None, *(() if use is None else (use,)))
        return sorted(order, key=order.__getitem__, reverse=True)

    def _wait_for_room(self) -> None:
        """Tasks wait until writes have brought memory down to a quarter above the limit."""
        over = self.resident_bytes - (1 + SLACK) * self.limit_bytes
        for done, nbytes in self._writing:
            if over <= 0:
                break
            over -= nbytes
            self.settled_at = max(self.settled_at, done)

    def _gone(self, key: Key) -> None:
        """It has left memory, and is on disk."""
        nbytes = self.sizes[key]
        del self._resident[key]
        self._clean.discard(key)
        self.resident_bytes -= nbytes
        self._changed(-nbytes)
        self._resides(key, DISK, nbytes)

    def _written(self, key: Key) -> None:
        self._writing.popleft()
        if not self._resident.get(key):
            return  # dropped meanwhile
        nbytes = self.sizes[key]
        self._leaving_bytes -= nbytes
        if key in self._pins:
            self._resident[key] = False  # in use again: it stays
            if self._in_background:
                self._clean.add(key)
            return
        self._gone(key)
