"""`Engine`: keeps values in memory up to a budget, and the others on lower tiers.

One engine serves several owners (`Account`) under one budget of host memory: the store behind ``worker.data``, and the
shuffle's shards::

    Engine ── Loading ──┬── Eviction (with the Gate) ──┬── Books (entries, states, bytes, victims)
      (this module)     └──────── IoThreads ───────────┘

Each of the four knows only those to its right. The engine has the calls that need several of them: an entry that is
added may make others leave; one that is removed may let a request pass the gate.

All of it is bookkeeping on the event loop. Ends of I/O arrive there by ``call_soon_threadsafe``.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from dask_gpurt.model.events import Sink, null_sink
from dask_gpurt.tiers.engine.counters import Counters
from dask_gpurt.tiers.engine.entry_table import Books
from dask_gpurt.tiers.engine.eviction import Eviction
from dask_gpurt.tiers.engine.io_threads import IoThreads
from dask_gpurt.tiers.engine.loading import Loading, wake
from dask_gpurt.tiers.threads import run_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from dask_gpurt.tiers.engine.entry import Account, Entry, EventLog
    from dask_gpurt.tiers.engine.memory_gate import Gate, Reservation
    from dask_gpurt.tiers.storage.handle import Handle
    from dask_gpurt.tiers.storage.protocol import StorageTier


logger = logging.getLogger("distributed.worker.gpurt")

#: at the end: for I/O that is under way, and for deleting what is left
CLOSE_SECONDS = 20.0


class Engine:
    """Entries of one worker. Create it, and call it, on the event loop's thread.

    Parameters
    ----------
    tier
        Where victims go.
    budget_bytes
        Bytes of values to hold in memory; None: any number (nothing leaves memory unless `shrink` says so).
    threads
        I/O threads for writing, and one more for reading.
    """

    def __init__(
        self,
        tier: StorageTier,
        *,
        budget_bytes: int | None,
        threads: int = 2,
        sink: Sink = null_sink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.counters = Counters()
        self.books = Books(clock)
        self.io = IoThreads(threads, self.counters.loop_time)
        self.eviction = Eviction(self.books, self.io, tier, self.counters, sink, budget_bytes)
        self.loading = Loading(self.books, self.io, self.eviction, self.counters, sink)
        self.log: EventLog = self.books.log
        self.gate: Gate = self.eviction.gate
        # Nothing is to be added to these calls.
        self.pin = self.books.pin
        self.ensure = self.loading.ensure
        self.load_part = self.loading.load_part
        self.get = self.loading.get
        self.touch = self.books.touch
        self.hint = self.books.hint
        self.balance = self.eviction.balance
        self.shrink = self.eviction.shrink
        self.set_room = self.eviction.set_room
        self.offload = self.io.run
        self.idle = self.io.idle
        self.states = self.books.states

    # ------------------------------------------------------------------ bytes

    @property
    def budget_bytes(self) -> int | None:
        """Bytes of values to hold in memory; None: any number. After setting it, call `balance`."""
        return self.eviction.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, nbytes: int | None) -> None:
        self.eviction.budget_bytes = nbytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of values in memory, those being written included."""
        return self.books.resident_bytes

    @property
    def moving_bytes(self) -> int:
        """Bytes of values being written."""
        return self.books.moving_bytes

    @property
    def loading_bytes(self) -> int:
        """Bytes of values being read."""
        return self.books.loading_bytes

    @property
    def can_shrink(self) -> bool:
        """Whether anything is leaving memory, or could."""
        return self.eviction.can_shrink

    # ------------------------------------------------------------------ entries

    def add(self, account: Account, key: Hashable, value: object, nbytes: int, *, balance: bool = True) -> Entry:
        """Keep a value. Starts evictions if it makes memory pass the budget, perhaps that of this value.

        With `balance` False the caller has books of its own to bring up to date before it calls `balance`.
        """
        entry = self.books.add(account, key, value, nbytes)
        if balance:
            self.balance()
        return entry

    def add_stored(self, account: Account, key: Hashable, nbytes: int, handle: Handle) -> Entry:
        """Take over a value that is on a lower tier already."""
        self.eviction.press()  # it may be read ahead
        return self.books.add_stored(account, key, nbytes, handle)

    def remove(self, entry: Entry) -> None:
        """Forget an entry and its copies. I/O at work on it goes on; nothing that it brings is kept."""
        if entry.gone:
            return
        self.books.remove(entry)
        if entry.waiter is not None:
            wake(entry)
        if entry.handle is not None:
            self.loading.free_when_idle(entry)
        self.gate.wake()

    def unpin(self, entry: Entry) -> None:
        """One user less; the last one makes the value a victim again."""
        if self.books.unpin(entry) and self.eviction.pressed:
            self.balance()

    async def admit(self, nbytes: int) -> Reservation:
        """Room for `nbytes` more; see `memory_gate`. Release it when the bytes are in an entry, or given up."""
        return await self.gate.admit(nbytes)

    # ------------------------------------------------------------------ life

    async def close(self) -> None:
        """Stop evicting, wait for the I/O at work, delete all files. Values in memory stay readable.

        Waits `CLOSE_SECONDS` for the I/O and as long for the files at most: a device that hangs must not keep a worker
        from closing.
        """
        if self.io.closed:
            return
        self.io.closed = True
        self.eviction.stop()
        if not await self.settle():
            logger.warning(
                "%d reads, writes and deletions did not end within %g s of closing. They are left to themselves",
                *(self.io.in_flight, CLOSE_SECONDS),
            )
        await self.io.shutdown()
        for entry in self.books.entries:
            entry.handle = None
            wake(entry)  # nothing else would
        if not await run_apart(self.tier.close, CLOSE_SECONDS):
            logger.warning("files on lower tiers were not deleted within %g s; that goes on", CLOSE_SECONDS)

    async def settle(self) -> bool:
        """Wait until no I/O is under way, `CLOSE_SECONDS` at most; whether none is."""
        return await self.io.settle(CLOSE_SECONDS)

    @property
    def decided_by(self) -> dict[str, int]:
        """Count victims by what chose them; see `Victims.decided_by`."""
        return dict(self.books.victims.decided_by)

    def validate(self) -> None:
        """Check every invariant; AssertionError names what is broken."""
        self.books.validate()
        assert self.gate.reserved_bytes >= 0, "reserved_bytes"
