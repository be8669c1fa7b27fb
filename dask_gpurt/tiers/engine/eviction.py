"""`Eviction`: what leaves memory, when, and what happens when it cannot.

`balance` keeps ``resident + loading`` bytes below the budget. It chooses victims (`victims`) late: only as many writes
are begun as there are writer threads, so each choice is made with the newest knowledge. A victim that was lent to a
task (`entry`) is first compared with its copy, and the next one ahead of its turn.

A write that fails leaves the value in memory. An object that cannot be encoded is never tried again. After any other
error the key waits, and after several in a row the whole tier (`rests`). Other keys go on meanwhile.

While memory is *relaxed*, nothing prepares for a choice: no order of victims, no next uses, no reading ahead. Memory is
*pressed* from the time that values fill `NEAR` of what they may. It relaxes when all values are in memory and fill half
as much (`relax`). Before the first value has to leave, as many bytes must come as are here already; meanwhile the
scheduler is asked for the next uses.

A task that needs room asks as another ends, and what that one read is freed when the scheduler has heard of its end, in
some milliseconds. Where that is enough nothing is written for the new task meanwhile. (Futures of 30 MB, doubled and
summed by workers of 350 MiB: 3.1 times stock's time; 1.2 with this, and with what is promised counted once.)

The gate (`memory_gate`) is here because both of its questions are about evictions.
"""

from __future__ import annotations

import logging
import math
import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import TierFull
from dask_gpurt.model.events import Event, Sink
from dask_gpurt.tiers.engine.memory_gate import Gate
from dask_gpurt.tiers.engine.rests import Rests
from dask_gpurt.tiers.engine.victims import leaves_before
from dask_gpurt.tiers.storage.handle import EncodeError, error_kind

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from concurrent.futures import Future

    from dask_gpurt.tiers.engine.counters import Counters
    from dask_gpurt.tiers.engine.entry import Entry
    from dask_gpurt.tiers.engine.entry_table import Books
    from dask_gpurt.tiers.engine.io_threads import IoThreads
    from dask_gpurt.tiers.storage.protocol import StorageTier

logger = logging.getLogger("distributed.worker.gpurt")

#: share of the budget by which admitted requests may pass it, so that computing and writing overlap
SLACK = 0.25
#: share of what values may fill from which on it matters which of them leaves first
NEAR = 0.5
#: share of the budget that values may fill, however little room the process has. (Half of it, where libraries fill 180
#: of 286 MiB, brought every second process to 0.96 of its limit. The price: joins at 500 MB write a third more.)
LEAST = 0.125
#: values that leave without a write in one turn of the loop, 25 us each
DROPS = 1000
#: for which a value that a task has read is expected to be freed, if no other task here waits for it: the scheduler has
#: to hear of the task, and to answer
LEAVING_SECONDS = 0.01


class Eviction:
    """Keeps memory within the budget. Event loop only."""

    def __init__(
        self, books: Books, io: IoThreads, tier: StorageTier, counters: Counters, sink: Sink, budget_bytes: int | None
    ) -> None:
        self._books = books
        self._io = io
        self._tier = tier
        self._counters = counters
        self._sink = sink
        self._budget_bytes = budget_bytes
        self.gate = Gate(self._over, self._can_progress)
        #: something may have to leave soon; see the module
        self.pressed = False
        #: False: it stays pressed, as the device tier chooses by the same knowledge
        self.relaxes = True
        #: called on the loop, soon after `pressed` has changed
        self.on_pressed: list[Callable[[], None]] = []
        #: after writes that failed
        self.rests = Rests()
        io.on_freed = self._freed
        #: runs when something that rests may be tried again
        self.timer: asyncio.TimerHandle | None = None
        #: bytes that `shrink` still wants out, beyond the budget
        self._shrink_bytes = 0
        #: bytes of values above which nothing more is let in, as the process needs the rest for itself; None: unknown
        self._room_bytes: float | None = None
        self._writes = 0
        #: what asks waits for values that are about to be freed
        self._leaving = False
        #: more values are to be dropped, or ordered, in the next turn of the loop
        self._more: asyncio.Handle | None = None
        #: called with each copy that was written, after the books; must not raise
        self.on_copy: Callable[[Entry], None] | None = None
        #: called when a value has left memory, or does not leave after all
        self.on_moved: Callable[[], None] = lambda: None
        self._set_near()

    # ------------------------------------------------------------------ whether there is anything to choose

    @property
    def budget_bytes(self) -> int | None:
        """Bytes of values to hold in memory; None: any number."""
        return self._budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, nbytes: int | None) -> None:
        self._budget_bytes = nbytes
        self._set_near()

    @property
    def used_bytes(self) -> int:
        """Bytes of values here and coming, and of what is promised."""
        return self._books.blocks.resident_bytes + self._books.loading_bytes + self.gate.reserved_bytes

    def press(self) -> None:
        """Begin to prepare for choices."""
        if not self.pressed:
            self.pressed = True
            self._books.begin_order()
            if self._books.unordered:
                self._go_on_soon()
            self._tell_pressed()

    def relax(self) -> None:
        """Stop preparing for choices if none is near. Call it now and then."""
        if (
            self.pressed
            and self.relaxes
            and self.used_bytes <= self._near_bytes / 2
            and not (self._shrink_bytes or self._writes or self.rests or self._books.absent or len(self.gate))
        ):
            self.pressed = False
            self._books.end_order()
            self._tell_pressed()

    def _tell_pressed(self) -> None:
        # Not at once: a value may be on its way into the store, in the middle of a transition of its task.
        for listener in self.on_pressed:
            self._io.loop.call_soon(listener)

    def _set_near(self) -> None:
        budget = self._budget_bytes
        self._near_bytes = math.inf if budget is None else NEAR * min(budget, self._fits())

    # ------------------------------------------------------------------ choosing

    def shrink(self, nbytes: int) -> None:
        """Move `nbytes` out of memory, even below the budget (the process as a whole is too large)."""
        self._shrink_bytes = max(0, nbytes - self._books.moving_bytes)
        if self._shrink_bytes:
            self.press()
        self.balance()

    def set_room(self, nbytes: float | None) -> None:
        """Set how many bytes of values the process can hold beside what it needs for itself; None: any number.

        The budget is a share of the worker's limit and knows nothing of the interpreter, of libraries and of what tasks
        allocate, which on a small worker is a third of the limit. Without this the slack above the budget brought such
        workers to where the nanny ends them. Never below `LEAST` of the budget: some have to be here for tasks to read.
        """
        self._room_bytes = nbytes
        self._set_near()
        self.balance()
        self.gate.wake()

    @property
    def can_shrink(self) -> bool:
        """Whether anything is leaving memory, or could."""
        return self._writes > 0 or self._more is not None or len(self._books.victims) > 0

    def balance(self, asked_bytes: int = 0) -> None:
        """Begin evictions until values are within budget, with room for `asked_bytes`, or all writers are busy."""
        if not self.pressed:
            # `used_bytes`, without a call: each result of a task passes here.
            books = self._books
            used = books.blocks.resident_bytes + books.loading_bytes + self.gate.reserved_bytes
            if used + asked_bytes <= self._near_bytes:
                return
            self.press()
        if self._io.closed:
            return
        with self._counters.loop_time:
            self._balance(asked_bytes)

    def _balance(self, asked_bytes: int) -> None:
        now = self._books.clock()
        for rested in self.rests.ended(now):
            self._books.offer(rested)
        victims = self._books.victims
        drops = 0
        while self._excess(0, asked_bytes) > 0:
            if drops == DROPS or (self._books.unordered and victims.first() is None):
                self._go_on_soon()
                return
            entry = victims.pop_clean(any_place=self.rests.tier_until > now)
            if entry is not None:
                drops += 1
                if self._books.look_lent(entry):
                    self._books.offer(entry)  # among those that are not clean
                else:
                    self._drop(entry)
                continue
            if self._writes >= self._io.threads:
                return
            if asked_bytes and not self._writes and victims.first() is not None and self._will_leave(asked_bytes):
                return
            if self._compare_next():
                continue
            if self.rests.tier_until > now:
                self._set_timer(self.rests.tier_until - now)
                return
            # Small values only when nothing else is being done about it.
            entry = victims.pop_dirty(small=self._writes == 0)
            if entry is None:
                if self.rests:
                    self._set_timer(self.rests.next_end - now)
                return
            self._start_write(entry)
        if not self._writes:
            # While nothing waits for it: it then leaves at once, as a clean one.
            self._compare_next(ahead=True)

    def _will_leave(self, asked_bytes: int) -> bool:
        """Whether so much is about to be freed. Soon after that it is not expected any more."""
        self._leaving = self._excess(0, asked_bytes) <= self._books.leaving_bytes(LEAVING_SECONDS)
        if self._leaving:
            self._set_timer(LEAVING_SECONDS)
        return self._leaving

    def _compare_next(self, *, ahead: bool = False) -> bool:
        """Begin to compare the next victim with its copy, if it was lent; `ahead`: if one more value drives it out."""
        entry = self._books.victims.first()
        if entry is None or not entry.lent or entry.handle is None or (ahead and self._excess(entry.nbytes) <= 0):
            return False
        self._books.move(entry, "compare")
        entry.generation += 1
        self._books.begin_copy(entry)
        self._writes += 1
        self._io.compare(entry, self._compared)
        return True

    def _compared(self, entry: Entry, generation: int, future: Future[Any]) -> None:
        self._writes -= 1
        if not entry.gone:
            # One that cannot be encoded any more is not the same; the write that follows says why.
            error = future.exception()
            if isinstance(error, MemoryError):  # nothing is known: its copy may be all that can be had of it
                entry.lent = True
                self.rests.compare_failed(entry, self._books.clock())
            elif error is None and future.result():
                self._counters.unchanged += 1
                entry.failures = 0
            else:
                self._forget_copy(entry)
            self._books.move(entry, "kept")
            if not entry.pins:
                self._books.victims.keep_first(entry)
        self._moved()

    def _moved(self) -> None:
        # A value has left memory, or does not leave after all.
        self.balance()
        self.gate.wake()
        self.on_moved()

    def _forget_copy(self, entry: Entry) -> None:
        copy, entry.handle = entry.handle, None
        if copy is not None:
            self._io.free(copy)

    def _go_on_soon(self) -> None:
        if self._more is None:
            self._more = self._io.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._more = None
        self._books.order_more()
        if self._books.unordered:
            self._go_on_soon()
        self.balance()
        self.gate.wake()

    def yields(self, entry: Entry) -> bool:
        """Whether a value may come to memory ahead of its use, without driving out what is needed sooner."""
        if self.budget_bytes is None:
            return False
        # Not where the process needs so much for itself that not even half the budget is left.
        if self._room_bytes is not None and self._room_bytes < self.budget_bytes / 2:
            return False
        lacking = self._excess(entry.nbytes)
        if lacking <= 0:
            return not self._over(entry.nbytes)
        victim = self._books.victims.first()
        if victim is None or victim.nbytes < lacking or not leaves_before(victim, entry):
            return False
        return victim.clean or not self._over(entry.nbytes)  # a clean one makes room at once

    def _excess(self, coming_bytes: int, asked_bytes: int = 0) -> int:
        """Bytes too many, with a value of `coming_bytes` read besides and one that asks at the gate let in.

        Values, also those being read, keep to the budget. What is promised (the results of tasks that run) may lie in
        the slack until it is here: to make room for it before costs as much of the budget as there are threads times
        results (a matrix product moved 1.29 of what Belady's rule moves, where a result is 5 % of the budget).
        """
        books = self._books
        staying = books.resident_bytes - books.moving_bytes
        excess = self._shrink_bytes
        if self.budget_bytes is not None:
            fits = self._fits()
            values = staying + books.loading_bytes + coming_bytes
            promised = self.gate.reserved_bytes + asked_bytes
            over_budget = values - min(self.budget_bytes, fits)
            over_slack = values + promised - min(self.budget_bytes * (1 + SLACK), fits)
            excess = max(excess, math.ceil(over_budget), math.ceil(over_slack))
        return excess if staying > 0 else 0

    def _fits(self) -> float:
        """Bytes of values that the process has room for."""
        assert self.budget_bytes is not None
        return math.inf if self._room_bytes is None else max(self._room_bytes, self.budget_bytes * LEAST)

    def _over(self, nbytes: int) -> bool:
        if self.budget_bytes is None or self._io.closed:
            return False
        used = self._books.resident_bytes + self._books.loading_bytes + self.gate.reserved_bytes
        return used + nbytes > min(self.budget_bytes * (1 + SLACK), self._fits())

    def _can_progress(self, nbytes: int) -> bool:
        self._leaving = False
        self.balance(nbytes)
        return self._writes > 0 or self._more is not None or self._leaving

    # ------------------------------------------------------------------ leaving

    def _drop(self, entry: Entry) -> None:
        self._books.move(entry, "drop")
        self._shrunk(entry)
        _forget_value(entry)
        self._counters.clean_drops += 1

    def _shrunk(self, entry: Entry) -> None:
        self._shrink_bytes = max(0, self._shrink_bytes - entry.nbytes)

    def _start_write(self, entry: Entry) -> None:
        self._forget_copy(entry)  # a small value that was lent
        self._books.move(entry, "write")
        self._shrunk(entry)
        entry.generation += 1
        self._books.begin_copy(entry)
        self._writes += 1
        self._io.write(entry, self._tier, self._written)

    def _written(self, entry: Entry, generation: int, future: Future[Any]) -> None:
        self._writes -= 1
        error = future.exception()
        if error is not None:
            if not entry.gone:
                self._write_failed(entry, error)
        else:
            handle, cost = future.result()
            self._counters.written(cost)
            self.rests.succeeded(entry)
            if entry.gone:
                self._io.free(handle)
            else:
                entry.handle = handle
                lent = self._books.look_lent(entry)
                self._books.share_copy(entry)
                # Lent: to a task of its own, or of another key of the same memory, while it was being written.
                if entry.pins or lent:
                    self._books.move(entry, "kept")
                else:
                    self._books.move(entry, "written")
                    _forget_value(entry)
                if self.on_copy is not None:
                    self.on_copy(entry)
        self._moved()

    # ------------------------------------------------------------------ failing

    def _write_failed(self, entry: Entry, error: BaseException) -> None:
        # What keeps it from being chosen again is set before the move, which offers it as a victim.
        if isinstance(error, EncodeError):
            entry.unspillable = True
            self._books.move(entry, "write-failed")
            self._counters.write_errors["unpicklable"] += 1
            # As text: a worker keeps its last 10,000 records, and an exception has the value in its traceback.
            logger.warning("%r cannot be written and stays in memory: %s", entry.key, repr(error.__cause__))
            return
        kind = error_kind(error)
        self._counters.write_errors[kind] += 1
        news = self.rests.failed(entry, self._books.clock(), full=isinstance(error, TierFull))
        self._books.move(entry, "write-failed")
        if news:
            message = f"could not write {entry.key!r} ({entry.nbytes} bytes), which stays in memory: {error}"
            logger.warning("%s", message)
            self._sink(Event("tiers.write-failed", message, {"key": str(entry.key), "error": kind}))

    def _freed(self) -> None:
        # Copies were deleted: a tier that was full has room.
        wanted = self.rests.freed()
        for entry in wanted:
            self._books.offer(entry)
        if wanted:
            self.balance()
            self.gate.wake()

    def _set_timer(self, seconds: float) -> None:
        loop = self._io.loop
        when = loop.time() + max(0.01, seconds)
        if self.timer is not None:
            if self.timer.when() <= when:
                return
            self.timer.cancel()
        self.timer = loop.call_at(when, self.on_timer)

    def on_timer(self) -> None:
        """Something has rested long enough."""
        self.timer = None
        self._books.read.clear()  # what was to be freed is not
        self.balance()
        self.gate.wake()

    def stop(self) -> None:
        """Begin nothing more, and open the gate."""
        if self.timer is not None:
            self.timer.cancel()
        self.gate.wake()


def _forget_value(entry: Entry) -> None:
    # While it is referenced elsewhere it comes back for nothing, and a second copy in memory is avoided.
    try:
        entry.weak = weakref.ref(entry.value)
    except TypeError:
        entry.weak = None
    shell = entry.account.shell
    entry.value = None if shell is None else shell(entry.value)
