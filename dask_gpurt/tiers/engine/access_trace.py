"""`Trace`: a record of what was asked of an engine and what it did, to be read and replayed.

Off by default. While on, each event is one tuple appended to a list: about 0.3 us. The list is bounded. When it is full
the record ends, and `dropped` counts what is missing: a record without its beginning could not be replayed.

Events are ``(seconds, kind, entry, argument)``; entries are numbered in the order in which they came.

What was asked:

=========  =======================  ==================================================================
kind       argument                 meaning
=========  =======================  ==================================================================
budget     bytes or None            from here on values may take so much
add        bytes                    a value came into being, in memory
adopt      bytes                    a value came into being, on a lower tier
pin        None                     its first user needs the value in memory now
unpin      None                     the last user is done with it
touch      None                     it was read without being pinned
hint       priority or None         its next use, as `Entry.next_use`
due        priority or None         the next task here that reads it, as `Entry.due`
remove     None                     it is not needed any more
=========  =======================  ==================================================================

What was done: ``write``, ``written``, ``kept``, ``drop``, ``load``, ``loaded``, ``read``, ``revived``... (the events of
`entry.TABLE`), with the entry's bytes as argument. The bytes are those in memory, so that values of one record compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.tiers.engine.entry import Entry

#: (seconds, kind, number of the entry or -1, argument)
TraceEvent = tuple[float, str, int, Any]


class Trace:
    """One record. Loop thread only.

    Parameters
    ----------
    limit
        Events that are kept, at most.
    clock
        Monotonic seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        if limit < 1:
            raise ValueError(f"limit is {limit!r}, must be at least 1 event")
        self._limit = limit
        self._clock = clock
        self._numbers: dict[int, int] = {}
        #: events, oldest first
        self.events: list[TraceEvent] = []
        #: events that came when the record was full
        self.dropped = 0
        self._entries = 0

    def note(self, kind: str, entry: Entry | None = None, argument: int | Sequence[float] | None = None) -> None:
        """Append one event."""
        if len(self.events) >= self._limit:
            self.dropped += 1
            return
        number = -1
        if entry is not None:
            known = self._numbers.get(id(entry))
            if known is None:
                known = self._numbers[id(entry)] = self._entries
                self._entries += 1
            number = known
            if kind == "remove":  # its id may be used again
                del self._numbers[id(entry)]
        self.events.append((self._clock(), kind, number, argument))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"events": [list(e) for e in self.events], "dropped": self.dropped}
