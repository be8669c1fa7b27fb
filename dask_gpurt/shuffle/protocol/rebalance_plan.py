"""Which large outputs of a shuffle go to a less loaded worker once their sizes are known. Pure.

Theory of operation. Owners are chosen before the first row is seen, by number. With skewed keys one of them may hold
several of the large outputs while others are done in no time. When all inputs are split the sizes are known, and no
output has been made yet: then the worker that would take longest gives the output, to the worker, that shortens the
longer of the two most; and again, as long as that helps. Of the plan so made as much is kept as makes the sum of the
longest worker's time and of the moving least (`choose`). Outputs are never divided.

A worker's time is that of its threads for its outputs, no less than that of its largest, and of writing and reading
what does not fit in its memory. Moving is paid for by the bytes that the busiest worker sends and receives, and by a
fixed price for the rounds of messages.

Measured (`benchmarks.shuffle_binding`, two cores shared with the senders, every key four times): moving two of eight
outputs regardless took the busier worker from 0.94 to 0.71 s and its peak from 917 to 843 MB, and left wall time where
it was; with prices the policy leaves most such runs alone. What it should gain with idle cores has not been measured.

Rejected: to hold the rows of large outputs back on the senders until all inputs are split, which saves sending them
twice and makes every sender's memory part of the shuffle's; and to move small outputs as well, which levels what no
user would notice and has every worker ask the scheduler about each.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: smaller outputs stay
LEAST_BYTES = 4 << 20
#: of the outputs, so many of the largest are looked at
LOOK_AT = 64
#: and of the workers that may take one, so many of the least loaded
TAKERS = 16


@dataclasses.dataclass(frozen=True)
class Output:
    """An output that was not made yet."""

    part: int
    owner: str
    nbytes: float
    #: workers it may go to; None: all
    allowed: frozenset[str] | None = None


@dataclasses.dataclass(frozen=True)
class Room:
    """A worker."""

    threads: int
    #: bytes of this run that it can hold in memory
    nbytes: float = math.inf
    #: it may get outputs; else it only has some
    takes: bool = True


@dataclasses.dataclass(frozen=True)
class Prices:
    """Seconds."""

    #: of making an output, by its bytes
    unpack_per_byte: float
    #: of sending and receiving
    move_per_byte: float
    #: of writing and reading again what does not fit in memory
    spill_per_byte: float
    #: of any move
    fixed: float


@dataclasses.dataclass(frozen=True)
class Move:
    """One output goes to another worker."""

    part: int
    source: str
    target: str
    nbytes: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is moved, and what that is expected to save."""

    moves: tuple[Move, ...] = ()
    #: seconds of the longest worker before and after, and of the moving
    before: float = 0.0
    after: float = 0.0
    price: float = 0.0


def choose(outputs: Sequence[Output], rooms: Mapping[str, Room], prices: Prices, most: int) -> Plan:
    """The moves that gain more than they cost; none in most cases.

    Parameters
    ----------
    outputs
        All that are to be made.
    rooms
        All workers, the owners included.
    most
        Moves.
    """
    held: dict[str, _Load] = {address: _Load(room, prices) for address, room in rooms.items()}
    for output in outputs:
        held.setdefault(output.owner, _Load(Room(1, takes=False), prices)).add(output.nbytes)
    before = max((load.seconds() for load in held.values()), default=0.0)
    none = Plan((), before, before)
    if before <= prices.fixed:
        return none
    large = sorted(outputs, key=lambda o: (-o.nbytes, o.part))[:LOOK_AT]
    at = {o.part: o.owner for o in large if o.nbytes >= LEAST_BYTES}
    best, moves = none, dict[int, Move]()
    for _ in range(most):
        seconds = {address: load.seconds() for address, load in held.items()}
        longest = max(seconds, key=lambda address: (seconds[address], address))
        step = _step([o for o in large if at.get(o.part) == longest and o.part not in moves], longest, held)
        if step is None:
            break
        output, target = step
        held[longest].remove(output.nbytes)
        held[target].add(output.nbytes)
        moves[output.part] = Move(output.part, longest, target, output.nbytes)
        at[output.part] = target
        price = _price(moves.values(), prices)
        after = max(load.seconds() for load in held.values())
        if after + price < best.after + best.price:
            best = Plan(tuple(moves.values()), before, after, price)
    return best


def _step(mine: Iterable[Output], source: str, held: Mapping[str, _Load]) -> tuple[Output, str] | None:
    """The output of the longest worker, and to whom it goes, that shorten the longer of the two most."""
    best, least = None, held[source].seconds()
    takers = sorted((load.seconds(), a) for a, load in held.items() if a != source and load.room.takes)
    for output in sorted(mine, key=lambda o: (o.nbytes, o.part)):  # of two as good, the smaller
        left = held[source].without(output.nbytes)
        if left >= least:
            continue
        can = (a for _, a in takers if output.allowed is None or a in output.allowed)
        for target in itertools.islice(can, TAKERS):
            longer = max(left, held[target].seconds(output.nbytes))
            if longer < least:
                best, least = (output, target), longer
    return best


def _price(moves: Iterable[Move], prices: Prices) -> float:
    busy: dict[tuple[str, bool], float] = {}
    for move in moves:
        for place in ((move.source, True), (move.target, False)):
            busy[place] = busy.get(place, 0.0) + move.nbytes
    return prices.fixed + prices.move_per_byte * max(busy.values())


class _Load:
    """What one worker has to make."""

    def __init__(self, room: Room, prices: Prices) -> None:
        self.room = room
        self._prices = prices
        self._total = 0.0
        #: ascending
        self._sizes: list[float] = []

    def add(self, nbytes: float) -> None:
        self._total += nbytes
        bisect.insort(self._sizes, nbytes)

    def remove(self, nbytes: float) -> None:
        self._total -= nbytes
        del self._sizes[bisect.bisect_left(self._sizes, nbytes)]

    def seconds(self, more: float = 0.0) -> float:
        """As it is, with another output of `more` bytes."""
        return self._seconds(self._total + more, max(more, self._sizes[-1] if self._sizes else 0.0))

    def without(self, nbytes: float) -> float:
        """Without one output of so many bytes."""
        sizes = self._sizes
        largest = sizes[-1] if sizes[-1] != nbytes else sizes[-2] if len(sizes) > 1 else 0.0
        return self._seconds(self._total - nbytes, largest)

    def _seconds(self, total: float, largest: float) -> float:
        over = max(0.0, total - self.room.nbytes)
        making = max(total / max(1, self.room.threads), largest) * self._prices.unpack_per_byte
        return making + over * self._prices.spill_per_byte
