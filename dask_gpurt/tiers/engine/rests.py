"""`Rests`: what is not written for a while, as a write failed: single entries, and the tier as a whole.

An entry waits 1 s, doubling to 60 s. After `TIER_FAILURES` failed writes in a row, of any keys, the tier waits as long:
to try every key in turn would cost as many failing writes.

A tier that is full is another matter than one that fails. Room comes when a copy is deleted, and then nothing that
wants room rests any longer. Others may have made room too: processes on the same disk, or a deletion that ended just
before the news of the full disk. So it never rests for more than `FULL_SECONDS`.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

from dask_gpurt.tiers.backoff import BackOff, rest_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.tiers.engine.entry import Entry

#: failed writes in a row, of any keys, before the tier as a whole rests
TIER_FAILURES = 3
#: of the longest rest for want of room
FULL_SECONDS = 5.0


class Rests:
    """Times are monotonic seconds. Event loop only."""

    def __init__(self) -> None:
        #: (end, serial number, entry, it wants room)
        self._entries: list[tuple[float, int, Entry, bool]] = []
        self._serial = itertools.count()
        self._tier = BackOff(TIER_FAILURES)
        #: something rests for want of room
        self._full = False

    def __bool__(self) -> bool:
        """Some entry rests."""
        return bool(self._entries)

    @property
    def next_end(self) -> float:
        """When the first entry has rested long enough. There must be one."""
        return self._entries[0][0]

    @property
    def tier_until(self) -> float:
        """Until when nothing is to be written."""
        return self._tier.until

    def failed(self, entry: Entry, now: float, *, full: bool) -> bool:
        """A write failed, with `full` for want of room; whether that is news of the tier."""
        self._rest(entry, now, full=full)
        first = self._tier.failed(now) or self._tier.failures == 1
        if full:
            self._full = True
            self._tier.until = min(self._tier.until, now + FULL_SECONDS)
        return first

    def compare_failed(self, entry: Entry, now: float) -> None:
        """It could not be compared with its copy. That says nothing about the tier."""
        self._rest(entry, now, full=False)

    def _rest(self, entry: Entry, now: float, *, full: bool) -> None:
        entry.failures += 1
        entry.resting = True
        seconds = rest_seconds(entry.failures)
        end = now + (min(seconds, FULL_SECONDS) if full else seconds)
        heapq.heappush(self._entries, (end, next(self._serial), entry, full))

    def succeeded(self, entry: Entry) -> None:
        """A write did not fail."""
        self._tier.failures = 0
        entry.failures = 0

    def ended(self, now: float) -> Iterator[Entry]:
        """Entries that have rested long enough. They rest no more."""
        while self._entries and self._entries[0][0] <= now:
            entry = heapq.heappop(self._entries)[2]
            entry.resting = False
            yield entry

    def freed(self) -> list[Entry]:
        """Copies were deleted; the entries that rested for want of room. Neither they nor the tier rest any more.

        Failures in a row go on being counted, so a tier that is still full rests again with the next one.
        """
        if not self._full:
            return []
        self._full = False
        self._tier.until = 0.0
        wanted = [entry for _, _, entry, full in self._entries if full]
        self._entries = [item for item in self._entries if not item[3]]
        heapq.heapify(self._entries)
        for entry in wanted:
            entry.resting = False
        return wanted
