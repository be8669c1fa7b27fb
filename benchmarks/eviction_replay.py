"""A recorded trace against other policies, at the same capacity: how many bytes had they moved?

The accesses are those of the record (when a value came, was needed, was released and went); only what leaves memory
differs. Mechanics are ideal: evictions happen at once, exactly when memory would pass the budget, and only values
that are not in use leave. So the difference between what was really moved and `Ours` is the price of the mechanics:
time that writes take, requests in flight. That between `Ours` and `belady` is the price of not knowing the future.

All policies keep the copy below after a load (values are immutable): leaving a second time costs no write.

`belady` evicts the value whose next use is farthest, a clean one among those without any. With values of different
sizes and writes that cost as well it is not the optimum (which is NP-hard), but what the literature compares with.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol, cast

from dask_gpurt.tiers.engine.entry import Entry, State
from dask_gpurt.tiers.engine.victims import Victims

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.eviction_record import TraceEvent
    from dask_gpurt.tiers.engine.entry import Account
    from dask_gpurt.tiers.storage.handle import Handle

#: a write or read that was begun costs its bytes, whatever became of it
_READS = ("load", "read")
_SAID = ("hint", "due")


@dataclasses.dataclass
class Moved:
    """Bytes, as they are in memory."""

    written_bytes: int = 0
    read_bytes: int = 0
    #: most bytes beyond the budget that pinned values made necessary
    overflow_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Written and read."""
        return self.written_bytes + self.read_bytes


@dataclasses.dataclass(eq=False)
class Item:
    """A value of the record."""

    number: int
    nbytes: int
    in_memory: bool
    stored: bool
    pins: int = 0


class ReplayPolicy(Protocol):
    """Chooses victims during a replay."""

    def offer(self, item: Item, at: int) -> None:
        """It may leave now (it came, or its last user is done)."""

    def withdraw(self, item: Item) -> None:
        """It may not leave any more."""

    def hint(self, item: Item, kind: str, argument: Sequence[float] | None) -> None:
        """What was said of its next use; `kind` is "hint" or "due"."""

    def pop(self) -> Item | None:
        """The next victim, or None."""


class _Ordered(ABC):
    """A heap with lazy deletion: the largest place leaves first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bool, int, Item]] = []
        self._place: dict[int, float] = {}

    @abstractmethod
    def place(self, item: Item, at: int) -> float:
        """How soon it leaves."""

    def offer(self, item: Item, at: int) -> None:
        place = self.place(item, at)
        self._place[item.number] = place
        heapq.heappush(self._heap, (-place, not item.stored, item.number, item))

    def withdraw(self, item: Item) -> None:
        self._place.pop(item.number, None)

    def hint(self, item: Item, kind: str, argument: Sequence[float] | None) -> None:  # noqa: B027
        """Nothing: neither order heeds it."""

    def pop(self) -> Item | None:
        while self._heap:
            place, _, number, item = heapq.heappop(self._heap)
            if self._place.get(number) == -place:
                del self._place[number]
                return item
        return None


class Lru(_Ordered):
    """The value used longest ago, as stock Dask."""

    def place(self, item: Item, at: int) -> float:
        """The earlier it was used, the larger."""
        return -at


class Belady(_Ordered):
    """The value whose next use is farthest; needs the whole trace."""

    def __init__(self, events: Sequence[TraceEvent]) -> None:
        super().__init__()
        self._uses: defaultdict[int, list[int]] = defaultdict(list)
        for i, (_, kind, number, _a) in enumerate(events):
            if kind in ("pin", "touch"):
                self._uses[number].append(i)

    def place(self, item: Item, at: int) -> float:
        """When it is used next."""
        uses = self._uses[item.number]
        i = bisect.bisect_right(uses, at)
        return uses[i] if i < len(uses) else float("inf")


class Ours:
    """`victims.Victims` itself, with the hints of the record."""

    def __init__(self) -> None:
        self._victims = Victims()
        self._entries: dict[int, Entry] = {}
        self._items: dict[Entry, Item] = {}

    def _entry(self, item: Item) -> Entry:
        entry = self._entries.get(item.number)
        if entry is None:
            # Neither account nor copy is looked at: `Victims` only asks whether there is a copy.
            entry = self._entries[item.number] = Entry(item.number, cast("Account", None), item.nbytes)
            self._items[entry] = item
        entry.state = State.RESIDENT
        entry.handle = cast("Handle", item) if item.stored else None
        return entry

    def offer(self, item: Item, at: int) -> None:
        """It may leave now."""
        entry = self._entry(item)
        entry.last_use = at
        self._victims.add(entry)

    def withdraw(self, item: Item) -> None:
        """It may not leave any more."""
        self._victims.discard(self._entry(item))

    def hint(self, item: Item, kind: str, argument: Sequence[float] | None) -> None:
        """What was said of its next use."""
        entry = self._entry(item)
        priority = None if argument is None else tuple(argument)
        if kind == "due":
            entry.due = priority
        else:
            entry.next_use = priority
        if entry in self._victims:
            self._victims.add(entry)

    def pop(self) -> Item | None:
        """The next victim, or None."""
        entry = self._victims.pop_clean() or self._victims.pop_dirty(small=True)
        return None if entry is None else self._items[entry]


def moved(events: Sequence[TraceEvent]) -> Moved:
    """What was really written and read."""
    out = Moved()
    for _, kind, _number, argument in events:
        if kind == "write":
            out.written_bytes += argument
        elif kind in _READS:
            out.read_bytes += argument
    return out


def replay(events: Sequence[TraceEvent], policy: ReplayPolicy, *, budget_bytes: int | None = None) -> Moved:
    """What `policy` had moved. `budget_bytes` overrides the budgets of the record."""
    out = Moved()
    items: dict[int, Item] = {}
    budget = budget_bytes
    used = 0
    for at, (_, kind, number, argument) in enumerate(events):
        if kind == "budget":
            if budget_bytes is None:
                budget = argument
        elif kind in ("add", "adopt"):
            item = items[number] = Item(number, argument, kind == "add", kind == "adopt")
            if item.in_memory:
                used += item.nbytes
                policy.offer(item, at)
        elif kind in _SAID:
            policy.hint(items[number], kind, argument)
        elif kind in ("pin", "touch"):
            item = items[number]
            if not item.in_memory:
                out.read_bytes += item.nbytes
                used += item.nbytes
                item.in_memory = True
            if kind == "pin":
                item.pins += 1
                policy.withdraw(item)
            elif not item.pins:
                policy.offer(item, at)
        elif kind == "unpin":
            item = items[number]
            item.pins -= 1
            policy.offer(item, at)
        elif kind == "remove":
            item = items.pop(number)
            policy.withdraw(item)
            used -= item.nbytes * item.in_memory
        else:
            continue
        if at + 1 < len(events) and events[at + 1][1] in _SAID and events[at + 1][2] == number:
            continue  # what is known of a new value is said in the next breath, before anything leaves
        while budget is not None and used > budget:
            victim = policy.pop()
            if victim is None:
                out.overflow_bytes = max(out.overflow_bytes, used - budget)
                break
            victim.in_memory = False
            used -= victim.nbytes
            if not victim.stored:
                victim.stored = True
                out.written_bytes += victim.nbytes
    return out
