"""`record`: what is asked of an engine of the tiers and what it does, to be read and replayed (`eviction_replay`).

It wraps the methods of the engine's `Books`, so the engine itself knows nothing of it. The record is bounded. When it
is full it ends, and `dropped` counts what is missing: a record without its beginning could not be replayed.

Events are ``(seconds, kind, entry, argument)``; entries are numbered in the order in which they came.

What was asked:

=========  =======================  ==================================================================
kind       argument                 meaning
=========  =======================  ==================================================================
budget     bytes or None            values may take so much, at the beginning of the record
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

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.tiers.engine.engine import Engine
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
        self._numbers: dict[Entry, int] = {}
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
            if entry not in self._numbers:
                self._numbers[entry] = self._entries
                self._entries += 1
            number = self._numbers[entry]
            if kind == "remove":
                del self._numbers[entry]
        self.events.append((self._clock(), kind, number, argument))

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"events": [list(e) for e in self.events], "dropped": self.dropped}


def record(engine: Engine, limit: int) -> Trace:
    """Begin a record of at most `limit` events, for as long as the engine lives. What is here is its first events."""
    engine.eviction.press()  # the record is to have all that choices are made by
    engine.eviction.relaxes = False
    books = engine.books
    trace = Trace(limit, books.clock)
    trace.note("budget", None, engine.budget_bytes)
    for entry in books.entries:
        trace.note("add" if entry.in_memory else "adopt", entry, entry.nbytes)
        if entry.pins:
            trace.note("pin", entry)

    def added(entry: Entry, *args: Any) -> None:
        trace.note("add", entry, entry.nbytes)

    def adopted(entry: Entry, *args: Any) -> None:
        trace.note("adopt", entry, entry.nbytes)

    def removed(_: None, entry: Entry) -> None:
        trace.note("remove", entry)

    def moved(_: None, entry: Entry, event: str, *args: Any) -> None:
        trace.note(event, entry, entry.nbytes)

    def touched(_: None, entry: Entry) -> None:
        trace.note("touch", entry)

    def pinned(_: None, entry: Entry) -> None:
        if entry.pins == 1:
            trace.note("pin", entry)

    def unpinned(last: bool, entry: Entry) -> None:
        if last:
            trace.note("unpin", entry)

    def hinted(_: None, entry: Entry, next_use: tuple[float, ...] | None) -> None:
        if not entry.gone:
            trace.note("hint", entry, next_use)

    def due(_: None, entry: Entry, use: tuple[float, ...] | None) -> None:
        trace.note("due", entry, use)

    noted: dict[str, Callable[..., None]] = {
        "add": added,
        "add_stored": adopted,
        "remove": removed,
        "move": moved,
        "touch": touched,
        "pin": pinned,
        "unpin": unpinned,
        "hint": hinted,
        "set_due": due,
    }
    for name, note in noted.items():
        setattr(books, name, _followed_by(getattr(books, name), note))
    engine.pin, engine.touch, engine.hint = books.pin, books.touch, books.hint
    return trace


def _followed_by(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*args: Any) -> Any:
        result = method(*args)
        note(result, *args)
        return result

    return wrapped
