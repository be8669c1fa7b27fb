"""One value and where its copies are: a state machine written as a table.

Every value kept by the engine is an `Entry`, in exactly one `State`:

==========  ======================================  ==========  ===============
state       value in memory                         on disk     counted as
==========  ======================================  ==========  ===============
RESIDENT    yes                                     maybe       resident
MOVING      yes, an I/O thread reads it             maybe       resident, moving
STORED      no                                      yes         stored
LOADING     no, an I/O thread is reading it         yes         loading, stored
LOST        no                                      no          nothing
==========  ======================================  ==========  ===============

Moves are looked up in `TABLE`, and `Books.move` alone makes them. A pair that is not in the table raises `IllegalMove`
with the story of the key.

A disk copy stays valid after the value was loaded, and a RESIDENT entry that has one (*clean*) leaves memory for free.
Until a task gets the value: it may change it in place. Dask forbids that, but with its own spilling the change stays,
as the file goes when it is read. Here the value is then *lent*, and its copy is compared with it before it counts. So
are copies of others that share its memory: each block counts how often it was lent.

Removal is not a state. An entry that is taken out while an I/O thread works on it is flagged `gone`, and the end of the
I/O cleans up. `generation` numbers the I/O of an entry, so that the late end of an abandoned read is recognised.

Rejected: methods per transition that assign the state directly. There is then no list of legal moves to test against.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import StoreError

if TYPE_CHECKING:
    import asyncio
    import weakref
    from collections.abc import Callable, Collection, Hashable, Sequence

    from dask_gpurt.tiers.storage.handle import Codec, Handle

#: a next use that is later than all others
NEVER: tuple[float, ...] = (math.inf,)


class State(enum.Enum):
    """Where the value of an entry is; see the module."""

    RESIDENT = "resident"
    MOVING = "moving"
    STORED = "stored"
    LOADING = "loading"
    LOST = "lost"


class ReadAhead(enum.StrEnum):
    """How it ended that a value was read ahead of its use; see `prefetch`."""

    IN_TIME = "in_time"
    LATE = "late"
    EARLY = "early"
    WASTED = "wasted"


#: (state, event) -> next state
TABLE: dict[tuple[State, str], State] = {
    (State.RESIDENT, "write"): State.MOVING,
    (State.RESIDENT, "drop"): State.STORED,  # it has a clean copy
    (State.RESIDENT, "compare"): State.MOVING,  # it was lent: is it what its copy is?
    (State.MOVING, "written"): State.STORED,
    (State.MOVING, "kept"): State.RESIDENT,  # written, but in use by now; or compared
    (State.MOVING, "write-failed"): State.RESIDENT,
    (State.STORED, "load"): State.LOADING,
    (State.STORED, "revived"): State.RESIDENT,  # the user still held the object
    (State.STORED, "read"): State.RESIDENT,  # read synchronously, the slow path
    (State.STORED, "damaged"): State.LOST,
    (State.LOADING, "loaded"): State.RESIDENT,
    (State.LOADING, "read"): State.RESIDENT,  # the slow path overtook the I/O thread
    (State.LOADING, "undecodable"): State.STORED,  # bytes are right, the object's own code raised
    (State.LOADING, "damaged"): State.LOST,
}


class IllegalMove(StoreError):
    """A bug in this package: an event that the state of the entry does not allow."""


@dataclasses.dataclass(eq=False)
class Account:
    """One owner of entries, with its codec and its counters.

    The store behind ``worker.data`` and the shuffle's shards live in one engine under one budget. Their spilled bytes
    are counted apart: Dask subtracts ``spilled_bytes`` from the bytes of its *tasks*, so shards must not be in it.
    """

    name: str
    codec: Codec
    #: called on the loop thread when the last copy of an entry turned out to be unreadable
    on_lost: Callable[[Entry], None] = lambda entry: None
    #: the parts of a value that are still worth writing; None: all
    parts: Callable[[Entry], Sequence[int] | None] = lambda entry: None
    #: the entry that this one is but another name of; its task cannot have changed the value
    renames: Callable[[Entry], Entry | None] = lambda entry: None
    #: what stands for the value while it is on disk
    shell: Callable[[Any], Any] | None = None
    #: entries that are not in memory (STORED or LOADING)
    stored: int = 0
    #: their bytes in memory, had they been there
    stored_memory_bytes: int = 0
    #: their bytes on disk
    stored_disk_bytes: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """Memory that one or more values in memory are made of."""

    root: int
    nbytes: int
    #: entries in memory
    members: int = 0
    #: of these, being written
    moving: int = 0
    #: the entry in memory, while it is the only one; else all of them (a worker has 100,000 blocks, few with several)
    only: Entry | None = None
    several: dict[Entry, None] | None = None
    #: times that a task got a value that is made of it
    lends: int = 0

    @property
    def entries(self) -> Collection[Entry]:
        """Those in memory."""
        if self.several is not None:
            return self.several.keys()
        return () if self.only is None else (self.only,)

    @property
    def resident_bytes(self) -> int:
        """Its bytes, while a value in memory is made of it."""
        return self.nbytes if self.members else 0

    @property
    def moving_bytes(self) -> int:
        """It goes when all its members are gone: until the last is on its way, nothing is."""
        return self.nbytes if self.members and self.moving == self.members else 0


class Entry:
    """A value of one account. All fields are read and written on the loop thread only.

    One is made for each result of a task, and most of them never leave memory: what `__init__` does not set is a
    default of the class, which costs nothing until it changes.
    """

    #: the copy on a lower tier; kept after a load
    handle: Handle | None = None
    #: users that need the value in memory until they unpin
    pins: int = 0
    #: I/O threads that read the handle now; it is freed when they are done
    readers: int = 0
    #: the priority of the next task that reads it, smaller is sooner; `NEVER`: no task will; None: not known
    next_use: tuple[float, ...] | None = None
    #: the priorities that the scheduler named and that have not passed, soonest first; see `worker`
    uses: tuple[tuple[float, ...], ...] = ()
    #: uses that passed here since the scheduler last spoke; a message may have crossed with the news of them
    passed: tuple[tuple[float, ...], ...] = ()
    #: peers that fetched it since the scheduler last spoke of what they did with it
    sent: int = 0
    #: the priority of the first task that was sent here and will read it; None: no such task. See `pending_tasks`
    due: tuple[float, ...] | None = None
    #: heap of (priority, number) of tasks that were sent here; some may have run. None: there was none
    dues: list[tuple[tuple[float, ...], int]] | None = None
    #: `next_use` is a guess of this worker that stands until the scheduler's word comes
    guessed: bool = False
    #: it was read ahead, or is being read, for a task that has not come yet
    prefetched: bool = False
    #: the memory that its value holds; none unless it is in memory
    blocks: tuple[Block, ...] = ()
    #: counts I/O operations of this entry
    generation: int = 0
    #: taken out of the store
    gone: bool = False
    #: a copy of a twin may be of the object as it was before the task of this key changed it
    apart: bool = False
    #: a task got the value after the copy was made, or while it is being made: it may differ; see the module
    lent: bool = False
    #: `Block.lends` of its blocks when its copy was known to be of it; more by now: it may differ
    lends: int = 0
    #: it could not be encoded; stays in memory for good
    unspillable: bool = False
    #: writes that failed in a row
    failures: int = 0
    #: it waits after a failed write before the next one
    resting: bool = False
    #: the bytes are right but could not be turned into the object: what the object's code raised
    load_error: BaseException | None = None
    #: resolved when LOADING ends, whatever the outcome
    waiter: asyncio.Future[None] | None = None
    #: the object, if the user still holds it after it was evicted
    weak: weakref.ref[Any] | None = None
    #: ticket of the valid item in the heap of next uses
    ticket: int = 0

    def __init__(
        self,
        key: Hashable,
        account: Account,
        nbytes: int,
        value: Any = None,
        state: State = State.RESIDENT,
        handle: Handle | None = None,
        *,
        last_use: float = 0.0,
    ) -> None:
        self.key = key
        #: whose it is: codec and counters
        self.account = account
        #: bytes of memory that go when the value goes (``sizeof``)
        self.nbytes = nbytes
        #: the object; None unless RESIDENT or MOVING
        self.value = value
        self.state = state
        if handle is not None:
            self.handle = handle
        #: seconds (monotonic) of the last use
        self.last_use = last_use

    @property
    def in_memory(self) -> bool:
        """The value is in memory."""
        return self.state is State.RESIDENT or self.state is State.MOVING

    @property
    def clean(self) -> bool:
        """In memory, with a copy below that is certainly the same: dropping it costs nothing."""
        return self.state is State.RESIDENT and self.handle is not None and not self.lent

    @property
    def is_wanted(self) -> bool:
        """The scheduler has said that a task will read it, or one that is here will."""
        return self.due is not None or not (self.guessed or self.next_use is None or self.next_use == NEVER)


class EventLog:
    """The last moves of all entries, for `story`."""

    def __init__(self) -> None:
        # As they come; `story` makes text of them.
        self._events: deque[tuple[float, Hashable, State | None, str, State | None]] = deque(maxlen=5000)
        #: called with every move: key, state after it (None: gone); must not raise
        self.listener: Callable[[Hashable, State | None], None] | None = None

    def append(self, key: Hashable, before: State | None, event: str, after: State | None) -> None:
        """Add a move; `before` is None for a new entry, `after` for one that is gone."""
        self._events.append((time.time(), key, before, event, after))
        if self.listener is not None:
            self.listener(key, after)

    def story(self, key: Hashable) -> list[tuple[float, Hashable, str, str, str]]:
        """What happened to one key, oldest first: (Unix time, key, state before, event, state after); bounded."""
        return [(t, k, _said(before), event, _said(after)) for t, k, before, event, after in self._events if k == key]


def _said(state: State | None) -> str:
    return "-" if state is None else state.value


def next_state(entry: Entry, event: str, log: EventLog) -> State:
    """The state that follows; `IllegalMove` when the table has none."""
    try:
        return TABLE[entry.state, event]
    except KeyError:
        story = "; ".join(f"{b} -{ev}-> {a}" for _, _, b, ev, a in log.story(entry.key))
        raise IllegalMove(
            f"entry {entry.key!r} is {entry.state.value}, where {event!r} is not allowed. Story: {story or 'none'}"
        ) from None
