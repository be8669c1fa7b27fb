"""`Books`: which entries an engine has, in which states, and how many bytes that makes.

`Books.move` is the only place where an entry changes its state. All byte counts, the order of victims and the log
follow from it, so one look at `validate` shows what always holds. No I/O and no decisions; event loop only.

The order of victims is kept only between `begin_order` and `end_order`, that is, while something may have to leave. To
keep it costs more than all else that is done for a tiny value, and most workers never move one.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import TYPE_CHECKING

from dask_gpurt.tiers.engine.buffer_roots import UNKNOWN_BYTES, as_bytes
from dask_gpurt.tiers.engine.entry import Entry, EventLog, ReadAhead, State, next_state
from dask_gpurt.tiers.engine.shared_buffers import Blocks
from dask_gpurt.tiers.engine.victims import SMALL_BYTES, Victims
from dask_gpurt.tiers.storage.handle import another

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from dask_gpurt.tiers.engine.entry import Account
    from dask_gpurt.tiers.storage.handle import Handle

logger = logging.getLogger("distributed.worker.gpurt")

#: values that are brought into the order of victims in one turn of the loop, 4 us each
ORDERED_AT_ONCE = 2000
_BELOW = (State.STORED, State.LOADING)
#: events that end the stay of a value in memory
_DEPARTS = frozenset({"write", "compare", "drop"})
#: and its way there
_LEAVES = _DEPARTS | {"damaged", "undecodable"}


def _prefetch_ended(entry: Entry, outcome: ReadAhead) -> None:
    entry.prefetched = False


class Books:
    """Entries and byte counts; `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.log = EventLog()
        #: in the order in which they came
        self.entries: dict[Entry, None] = {}
        #: in no order, and empty, unless `ordered`
        self.victims = Victims()
        #: the order of victims is kept
        self.ordered = False
        #: of what was here when that began, what is still to come into it, the longest unused first
        self.unordered: deque[Entry] = deque()
        #: (when, value) that a task, or a peer, has read, the last ones
        self.read: deque[tuple[float, Entry]] = deque(maxlen=256)
        #: the memory of what is in memory
        self.blocks = Blocks()
        #: entries that are not in memory
        self.absent = 0
        #: being read
        self.loading_bytes = 0
        #: values whose ``sizeof`` was negative, or no number
        self.implausible_sizes = 0
        #: called when a value that was read ahead is used, or leaves; see `prefetch`
        self.on_prefetch_end: Callable[[Entry, ReadAhead], None] = _prefetch_ended
        #: called when there may be room
        self.on_change: Callable[[], None] = lambda: None

    def add(self, account: Account, key: Hashable, value: object, nbytes: int) -> Entry:
        """A value in memory."""
        if type(nbytes) is not int or nbytes < 0:
            nbytes = self._believed(key, nbytes)
        entry = Entry(key, account, nbytes, value, last_use=self.clock())
        self.entries[entry] = None
        self.blocks.join(entry, value)
        # Any of them: what a task changed of its input may be the first block of the result, and of the result alone.
        if nbytes >= SMALL_BYTES and any(block.members > 1 for block in entry.blocks):
            # A task may change its input and return that. Then no copy made so far, or on its way, is of the result.
            of = account.renames(entry)
            if of is None or of.apart or of.value is not value:
                entry.apart = True
            elif of.handle is not None:
                # While it is compared with its copy, it is not known yet whether they are the same.
                entry.handle, entry.lent = another(of.handle), of.lent or of.state is State.MOVING
                entry.lends = of.lends
        self.log.append(key, None, "add", State.RESIDENT)
        if self.ordered:
            self.victims.add(entry)
        return entry

    def twins(self, entry: Entry) -> list[Entry]:
        """Other keys, in memory too, of the very same object. Small objects have none.

        (The interpreter has only one None: all keys of it would be twins.)
        """
        if not entry.blocks or entry.blocks[0].members == 1 or entry.nbytes < SMALL_BYTES:
            return []
        value, account = entry.value, entry.account
        members = entry.blocks[0].entries
        return [e for e in members if e is not entry and e.value is value and e.account is account]

    def share_copy(self, entry: Entry) -> None:
        """It was just written: its twins need no copy of their own."""
        for twin in self.twins(entry):
            if twin.handle is None and not twin.apart and twin.state is State.RESIDENT and entry.handle is not None:
                twin.handle = another(entry.handle)
                # A task may have changed it, by either name, since that was begun.
                twin.lent, twin.lends = twin.lent or entry.lent, entry.lends
                if twin in self.victims:
                    self.victims.add(twin)
                else:
                    self.offer(twin)

    def lend(self, entry: Entry) -> None:
        """A task gets a value that is in memory: its copy may become wrong, and those of others that share its memory.

        The others are looked at when it matters (`look_lent`): there may be thousands, and of most there is no copy.
        """
        entry.lent = True
        for block in entry.blocks:
            block.lends += 1
        if entry in self.victims:
            self.victims.discard(entry)
            self.offer(entry)  # among those that are not clean

    def shares(self, entry: Entry) -> bool:
        """Whether others in memory are made of the same memory. Small ones do not count."""
        for block in entry.blocks:  # noqa: SIM110  each input of each task passes here, and a generator takes twice as long
            if block.members > 1 and block.nbytes >= SMALL_BYTES:
                return True
        return False

    def begin_copy(self, entry: Entry) -> None:
        """A copy is begun of it as it is now, or compared with it."""
        entry.lent = False
        entry.lends = sum(block.lends for block in entry.blocks)
        for twin in self.twins(entry):
            if twin.handle is None and not twin.pins:  # what was changed so far is in the copy that it will share
                twin.lent = False

    def look_lent(self, entry: Entry) -> bool:
        """Whether a task got it, or what shares its memory, since its copy was known to be of it."""
        if not entry.lent and entry.lends != sum(block.lends for block in entry.blocks):
            entry.lent = True
        return entry.lent

    def disown_copy(self, handle: Handle) -> int:
        """It is no good: values in memory with a claim on it are without a copy now. How many; free it so often."""
        # Names of one object that were read back are objects of their own. So all are looked at; damage is rare.
        owners = [e for e in self.entries if e.handle is handle and e.in_memory]
        for entry in owners:
            entry.handle = None
            self.victims.discard(entry)
            self.offer(entry)
        return len(owners)

    def add_stored(self, account: Account, key: Hashable, nbytes: int, handle: Handle) -> Entry:
        """A value that is on a lower tier already."""
        nbytes = self._believed(key, nbytes)
        entry = Entry(key, account, nbytes, None, State.STORED, handle, last_use=self.clock())
        self.entries[entry] = None
        self.absent += 1
        self._count_stored(entry, 1)
        self.log.append(key, None, "adopt", State.STORED)
        return entry

    def _believed(self, key: Hashable, nbytes: int) -> int:
        believed = as_bytes(nbytes)
        if believed is not None:
            return believed
        self.implausible_sizes += 1
        if self.implausible_sizes in (1, 100, 10_000):
            logger.warning(
                "sizeof says that %r takes %r bytes, which cannot be (%d such values so far). It is taken for %d. "
                "Remedy: correct what is registered with dask.sizeof for its type",
                *(key, nbytes, self.implausible_sizes, UNKNOWN_BYTES),
            )
        return UNKNOWN_BYTES

    def remove(self, entry: Entry) -> None:
        """Take an entry out. The caller frees its handle and wakes those that wait for it."""
        if entry.prefetched:
            self.on_prefetch_end(entry, ReadAhead.WASTED)
        entry.gone = True
        del self.entries[entry]
        if self.ordered:
            self.victims.discard(entry)
        self.log.append(entry.key, entry.state, "remove", None)
        state = entry.state
        if state is State.RESIDENT or state is State.MOVING:
            self.blocks.leave(entry, was_moving=state is State.MOVING)
        else:
            self.absent -= 1
            if state is not State.LOST:
                self._count_stored(entry, -1)
            if state is State.LOADING:
                self.loading_bytes -= entry.nbytes
        entry.value = None
        if self.ordered:
            self.on_change()

    @property
    def resident_bytes(self) -> int:
        """Bytes of values in memory (RESIDENT and MOVING); what several share is counted once, see `shared_buffers`."""
        return self.blocks.resident_bytes

    @property
    def moving_bytes(self) -> int:
        """Bytes of `resident_bytes` that go when the writes under way are done."""
        return self.blocks.moving_bytes

    def move(self, entry: Entry, event: str, value: object = None) -> None:
        """Change the state of an entry, and with it all byte counts. `value`: what came to memory."""
        if entry.prefetched and event in _LEAVES:
            self.on_prefetch_end(entry, ReadAhead.EARLY if event in _DEPARTS else ReadAhead.WASTED)
        before = entry.state
        after = next_state(entry, event, self.log)
        was, is_ = entry.in_memory, after in (State.RESIDENT, State.MOVING)
        n = entry.nbytes
        self.absent += was - is_
        if is_ and not was:
            entry.value = value
            self.blocks.join(entry, value)
            if event != "revived":  # else it is the object that was here, and not what its copy was read to
                entry.lends = sum(block.lends for block in entry.blocks)
        elif was and not is_:
            self.blocks.leave(entry, was_moving=before is State.MOVING)
        elif is_ and (after is State.MOVING) != (before is State.MOVING):
            self.blocks.move(entry, 1 if after is State.MOVING else -1)
        self.loading_bytes += n * ((after is State.LOADING) - (before is State.LOADING))
        was_stored, is_stored = before in _BELOW, after in _BELOW
        if was_stored != is_stored:
            self._count_stored(entry, 1 if is_stored else -1)
        entry.state = after
        if after is not State.RESIDENT:
            self.victims.discard(entry)
            if after is State.STORED:
                self.on_change()
        elif before is not State.RESIDENT:
            entry.weak = None
            self.offer(entry)
        self.log.append(entry.key, before, event, after)

    def replace(self, entry: Entry, value: object) -> None:
        """Another object stands for a value that is in memory, and is not being written."""
        self.blocks.leave(entry, was_moving=False)
        entry.value = value
        self.blocks.join(entry, value)

    def _count_stored(self, entry: Entry, sign: int) -> None:
        account, handle = entry.account, entry.handle
        account.stored += sign
        account.stored_memory_bytes += sign * entry.nbytes
        account.stored_disk_bytes += sign * (handle.nbytes if handle is not None else 0)

    # ------------------------------------------------------------------ victims

    def begin_order(self) -> None:
        """Keep the order of victims from now on. Those that are here come into it by their last uses (`order_more`)."""
        if not self.ordered:
            self.ordered = True
            self.unordered.extend(sorted(self.entries, key=lambda e: e.last_use))
            self.order_more()

    def order_more(self) -> None:
        """Bring some more of `unordered` into the order. Call it until there are none."""
        for _ in range(min(ORDERED_AT_ONCE, len(self.unordered))):
            entry = self.unordered.popleft()
            if entry not in self.victims:  # used meanwhile
                self.offer(entry)

    def end_order(self) -> None:
        """Nothing leaves memory for now."""
        self.read.clear()
        self.ordered = False
        self.unordered.clear()
        self.victims.clear()

    def offer(self, entry: Entry) -> None:
        """Make it a victim if it may be one."""
        if not self.ordered or entry.gone or entry.pins or entry.state is not State.RESIDENT:
            return
        if not entry.clean and (entry.unspillable or entry.resting):
            return
        if entry.lent and entry.readers:  # an abandoned read is at work on the copy, which may have to go
            return
        self.victims.add(entry)

    def touch(self, entry: Entry) -> None:
        """It was used just now."""
        entry.last_use = self.clock()
        if entry.prefetched:
            self.on_prefetch_end(entry, ReadAhead.IN_TIME)
        if self.ordered and entry in self.victims:
            self.victims.add(entry)

    def pin(self, entry: Entry) -> None:
        """Keep it in memory once it is there, until `unpin`. Counts."""
        entry.pins += 1
        if entry.prefetched:
            self.on_prefetch_end(entry, ReadAhead.IN_TIME if entry.in_memory else ReadAhead.LATE)
        if entry.pins == 1 and self.ordered:
            self.victims.discard(entry)

    def unpin(self, entry: Entry) -> bool:
        """One user less; whether it was the last one of an entry that is still here."""
        entry.pins -= 1
        if entry.pins or entry.gone:
            return False
        entry.last_use = self.clock()
        if self.ordered:
            self.read.append((entry.last_use, entry))
            self.offer(entry)
            self.on_change()
        return True

    def leaving_bytes(self, seconds: float) -> int:
        """Bytes of values that were read in the last `seconds`, and that no task is known to read again."""
        since = self.clock() - seconds
        while self.read and self.read[0][0] < since:
            self.read.popleft()
        return sum(
            e.nbytes
            for at, e in self.read
            if e.last_use == at and e.state is State.RESIDENT and not (e.gone or e.pins or e.is_wanted)
        )

    def hint(self, entry: Entry, next_use: tuple[float, ...] | None) -> None:
        """Set when it is used next (see `Entry.next_use`)."""
        if entry.gone:  # a peer fetched it, and meanwhile it was freed
            return
        entry.next_use = next_use
        if self.ordered and entry in self.victims:
            self.victims.add(entry)

    def set_due(self, entry: Entry, due: tuple[float, ...] | None) -> None:
        """Set which task that is here already reads it next (see `Entry.due`)."""
        entry.due = due
        if self.ordered and entry in self.victims:
            self.victims.add(entry)

    # ------------------------------------------------------------------ inspection

    def states(self) -> dict[str, int]:
        """Entries per state."""
        counts = Counter(e.state.value for e in self.entries)
        return {s.value: counts[s.value] for s in State}

    def validate(self) -> None:
        """Check every invariant; AssertionError names what is broken."""
        entries = self.entries
        assert self.absent == sum(not e.in_memory for e in entries), "absent"
        assert self.ordered or not len(self.victims), "victims, without an order"
        self.blocks.validate(entries.keys())
        assert all(e.in_memory == bool(e.blocks) for e in entries), "in memory, without a block"
        assert self.loading_bytes == sum(e.nbytes for e in entries if e.state is State.LOADING), "loading_bytes"
        for account in {e.account for e in entries}:
            below = [e for e in entries if e.account is account and e.state in _BELOW]
            assert account.stored == len(below), (account.name, "stored")
            assert account.stored_memory_bytes == sum(e.nbytes for e in below), (account.name, "memory bytes")
            disk = sum(e.handle.nbytes for e in below if e.handle is not None)
            assert account.stored_disk_bytes == disk, (account.name, "disk bytes")
        for e in entries:
            story = self.log.story(e.key)
            assert not e.gone, story
            assert e.pins >= 0, story
            assert e.readers >= 0, story
            assert not e.prefetched or (not e.pins and e.state in (State.RESIDENT, State.LOADING)), story
            assert (e.handle is not None) or e.state not in _BELOW, story
            assert (e.waiter is not None) == (e.state is State.LOADING), story
            may_go = e.state is State.RESIDENT and not e.pins
            if e in self.victims:
                assert may_go, story
            elif may_go and self.ordered and not self.unordered:
                assert not e.clean, story
                assert e.unspillable or e.resting or (e.lent and e.readers), story
