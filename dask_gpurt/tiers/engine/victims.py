"""`Victims`: which value leaves memory next. Bookkeeping only: no I/O, no clock of its own.

Order of victims among the unpinned values in memory:

1. values that no task will read (only a client holds them), oldest use first;
2. values about which nothing is known, oldest use first; without hints these are all that are not due;
3. values with a known next use, the farthest first (Belady's rule);
4. values that are *due*: a task that was sent here already reads them (`pending_tasks`), the last in priority order
   first;
5. values of a few kB that hold no more than that, only when nothing else is left: a file each costs more than it frees.

A value that is *clean* (a valid copy is on disk) keeps its place in that order and is preferred among equals; leaving
costs it no write. Only when nothing can be written (`pop_clean` with `any_place`) do clean ones go first.

A fresh value must not be in class 2 while the others are in class 3: it would always be the victim, just before its
first use. `hints.worker` therefore guesses its next use until the scheduler's word comes.

Every operation is O(log n) or better: 100,000 keys on a worker are normal.

Measured on records of nine task graphs, in bytes moved: with hints 0.65 of what LRU moves; of what Belady's rule moves
on the same record at most 1.11 in this order, 1.30 by priorities alone. Without the guess all that hints gain is lost
(1.07). Rejected: clean ones first. What was read back is then dropped again just before it is used: 0.72 of LRU instead
of 0.65 with hints, and up to 2.5 (a shuffle by tasks) without.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from dask_gpurt.tiers.engine.entry import NEVER

if TYPE_CHECKING:
    from dask_gpurt.tiers.engine.entry import Entry

#: below this, a value is a victim of last resort
SMALL_BYTES = 4096

_NEVER_PLACE = (0.0, *(-x for x in NEVER))


class Victims:
    """The entries that could leave memory now."""

    def __init__(self) -> None:
        # Not plain dicts: these keep the places of what was taken out, and the search for the first one passes them all
        # (100 us each, where 20,000 of 40,000 have left; on the event loop).
        self._unknown: OrderedDict[Entry, None] = OrderedDict()
        self._small: OrderedDict[Entry, None] = OrderedDict()
        #: (negated next use, is dirty, last use, ticket, entry), valid while the ticket is the entry's
        self._known: list[tuple[tuple[float, ...], bool, float, int, Entry]] = []
        self._known_set: set[Entry] = set()
        #: those of all classes that cost no write
        self._clean: OrderedDict[Entry, None] = OrderedDict()
        self._ticket = 0
        #: victims by what chose them: "due" (see `pending_tasks`), "hint" (the scheduler's word), "guess" (see
        #: `Entry.guessed`), "lru", "small", "clean" (nothing could be written)
        self.decided_by: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._unknown) + len(self._small) + len(self._known_set)

    def __contains__(self, entry: object) -> bool:
        return entry in self._known_set or entry in self._unknown or entry in self._small

    def add(self, entry: Entry) -> None:
        """Add, or move to the place its fields now give it (as the one used last)."""
        self.discard(entry)
        clean = entry.clean
        if clean:
            self._clean[entry] = None
        if not clean and _small(entry):
            self._small[entry] = None
        elif entry.next_use is None and entry.due is None:
            self._unknown[entry] = None
        else:
            self._ticket += 1
            entry.ticket = self._ticket
            self._known_set.add(entry)
            place = _place(entry)
            heapq.heappush(self._known, (place, not clean, entry.last_use, self._ticket, entry))
            if len(self._known) > 2 * len(self._known_set) + 64:
                self._known = [item for item in self._known if self._valid(item)]
                heapq.heapify(self._known)

    def keep_first(self, entry: Entry) -> None:
        """It was the next one, and came back without having been used."""
        if entry in self._unknown:
            self._unknown.move_to_end(entry, last=False)

    def clear(self) -> None:
        """Forget all of them."""
        for table in (self._unknown, self._small, self._known, self._known_set, self._clean):
            table.clear()

    def discard(self, entry: Entry) -> None:
        """Take an entry out, if it is in."""
        self._clean.pop(entry, None)
        self._unknown.pop(entry, None)
        self._small.pop(entry, None)
        self._known_set.discard(entry)

    def pop_clean(self, *, any_place: bool = False) -> Entry | None:
        """The next victim if it costs no write; with `any_place` also one that is not next."""
        entry = self.first()
        if entry is not None and entry in self._clean:
            return self._take(entry, _reason(entry))
        if any_place and self._clean:
            return self._take(next(iter(self._clean)), "clean")
        return None

    def pop_dirty(self, *, small: bool) -> Entry | None:
        """The next victim that has to be written; with `small`, also one of last resort."""
        entry = self.first()
        if entry is not None:
            return self._take(entry, _reason(entry))
        if small and self._small:
            return self._take(next(iter(self._small)), "small")
        return None

    def first(self) -> Entry | None:
        """The next victim, small ones apart. It stays."""
        known = self._known
        while known and not self._valid(known[0]):
            heapq.heappop(known)
        if self._unknown and not (known and known[0][0] == _NEVER_PLACE):
            return next(iter(self._unknown))
        return known[0][4] if known else None

    def _take(self, entry: Entry, reason: str) -> Entry:
        self.discard(entry)
        self.decided_by[reason] += 1
        return entry

    def _valid(self, item: tuple[tuple[float, ...], bool, float, int, Entry]) -> bool:
        return item[4].ticket == item[3] and item[4] in self._known_set


def leaves_before(a: Entry, b: Entry) -> bool:
    """Whether `a`, which is in memory, is certainly not needed before `b`. Unknown uses come last."""
    if b.next_use is None and b.due is None:
        return False
    return (a.next_use is None and a.due is None) or _place(a) < _place(b)


def soonest_use(entry: Entry) -> tuple[float, ...] | None:
    """The next use as one order for those that are due and those that are not; smaller is sooner, None: not known."""
    if entry.next_use is None and entry.due is None:
        return None
    return tuple(-x for x in _place(entry))


def _small(entry: Entry) -> bool:
    """It frees next to nothing. (A few rows of a frame may hold all of it; a thousand such values hold it together.)"""
    return entry.nbytes < SMALL_BYTES and all(b.nbytes < SMALL_BYTES * (b.members + 1) for b in entry.blocks)


def _place(entry: Entry) -> tuple[float, ...]:
    """Smaller leaves sooner."""
    if entry.due is not None:
        return (1.0, *(-x for x in entry.due))
    return (0.0, *(-x for x in entry.next_use or ()))


def _reason(entry: Entry) -> str:
    if entry.due is not None:
        return "due"
    if entry.next_use is None:
        return "lru"
    return "guess" if entry.guessed else "hint"
