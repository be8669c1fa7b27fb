"""Which value leaves memory next. Bookkeeping only: no I/O, no clock of its own.

Order of victims among the unpinned values in memory:

1. *clean* ones (a valid copy is on disk already), oldest use first: they cost nothing;
2. values nobody is known to read again, oldest use first. Where the scheduler sends hints, a value without one has no
   unfinished dependent, so its next use is as far away as can be; without any hints this is plain LRU;
3. values with a known next use, the farthest first (Belady; on nine real task graphs 0.55 of the bytes LRU moves);
4. values of a few kB, only when nothing else is left: a file each costs more than it frees.

Everything is O(log n) or better per operation: an eviction scan over all keys per insertion was rejected, as 100k keys
on a worker are normal.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dask_gpurt.tiers.entry import Entry

#: below this, a value is a victim of last resort
SMALL_BYTES = 4096


class Victims:
    """The entries that could leave memory now."""

    def __init__(self) -> None:
        self._clean: dict[Entry, None] = {}
        self._unknown: dict[Entry, None] = {}
        self._small: dict[Entry, None] = {}
        #: (negated next use, ticket, entry), valid while the ticket is the entry's
        self._known: list[tuple[tuple[float, ...], int, Entry]] = []
        self._known_set: set[Entry] = set()
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._clean) + len(self._unknown) + len(self._small) + len(self._known_set)

    def __contains__(self, entry: object) -> bool:
        return any(entry in s for s in (self._clean, self._unknown, self._small, self._known_set))

    def add(self, entry: Entry) -> None:
        """Add, or move to the place its fields now give it (as the one used last)."""
        self.discard(entry)
        if entry.clean:
            self._clean[entry] = None
        elif entry.nbytes < SMALL_BYTES:
            self._small[entry] = None
        elif entry.next_use is None:
            self._unknown[entry] = None
        else:
            self._ticket += 1
            entry.ticket = self._ticket
            self._known_set.add(entry)
            heapq.heappush(self._known, (tuple(-x for x in entry.next_use), self._ticket, entry))
            if len(self._known) > 2 * len(self._known_set) + 64:
                self._known = [item for item in self._known if self._valid(item)]
                heapq.heapify(self._known)

    def discard(self, entry: Entry) -> None:
        self._clean.pop(entry, None)
        self._unknown.pop(entry, None)
        self._small.pop(entry, None)
        self._known_set.discard(entry)

    def pop_clean(self) -> Entry | None:
        """The next victim that costs nothing."""
        return _pop(self._clean)

    def pop_dirty(self, *, small: bool) -> Entry | None:
        """The next victim that has to be written; with `small`, also those of last resort."""
        entry = _pop(self._unknown)
        if entry is not None:
            return entry
        while self._known:
            item = heapq.heappop(self._known)
            if self._valid(item):
                self._known_set.discard(item[2])
                return item[2]
        return _pop(self._small) if small else None

    @property
    def has_large(self) -> bool:
        return bool(self._unknown or self._known_set)

    def _valid(self, item: tuple[tuple[float, ...], int, Entry]) -> bool:
        return item[2].ticket == item[1] and item[2] in self._known_set


def _pop(entries: dict[Entry, None]) -> Entry | None:
    for entry in entries:
        del entries[entry]
        return entry
    return None
