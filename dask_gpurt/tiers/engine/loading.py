"""`Loading`: brings values back into memory, and handles copies that cannot be read.

`Loading.ensure` reads in threads. The caller pins the entries first, so that they are not evicted between the end of
the load and their use. `Loading.get` reads at once on the caller's thread, which is right but slow, and is counted.

A copy that fails length, checksum or I/O is read once more. If that fails too, its entry is LOST and the owner is
informed. An object whose own code raises is not lost: the caller gets what it raised, as with stock Dask. Nor is a copy
that an object store does not deliver: it is read again for some minutes (`Patience`), with no thread kept meanwhile, as
others read from the disk. Then the caller gets the error, and the next read begins anew. `get` does not wait so long.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import CorruptData, LostData, Undelivered
from dask_gpurt.model.events import Event, Sink
from dask_gpurt.tiers.backoff import Patience
from dask_gpurt.tiers.engine.entry import State
from dask_gpurt.tiers.engine.io_threads import read_value, retry, will_pass
from dask_gpurt.tiers.storage.handle import DecodeError, as_raised, error_kind, is_shared, without_values

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from dask_gpurt.tiers.engine.counters import Counters
    from dask_gpurt.tiers.engine.entry import Entry
    from dask_gpurt.tiers.engine.entry_table import Books
    from dask_gpurt.tiers.engine.eviction import Eviction
    from dask_gpurt.tiers.engine.io_threads import IoThreads
    from dask_gpurt.tiers.storage.handle import Handle, IoCost

logger = logging.getLogger("distributed.worker.gpurt")


class Loading:
    """Reads what is on lower tiers. Event loop only, but for `get`."""

    def __init__(self, books: Books, io: IoThreads, eviction: Eviction, counters: Counters, sink: Sink) -> None:
        self._books = books
        self._io = io
        self._eviction = eviction
        self._counters = counters
        self._sink = sink

    # ------------------------------------------------------------------ in threads

    async def ensure(self, entries: Iterable[Entry]) -> None:
        """Bring entries into memory, all I/O in threads.

        Returns when each of them is in memory, gone, LOST, or has a `load_error`. The caller pins them before. Waits
        for room in memory first (see `memory_gate`).
        """
        entries = list(entries)
        ours = await self._bring(entries)
        # A read that another began may have lacked what there is by now. Once: each that waits tries once.
        again = [e for e in entries if e not in ours and (e.waiter is not None or _may_pass(e))]
        if again:
            await self._bring(again)

    async def _bring(self, entries: list[Entry]) -> set[Entry]:
        """The entries whose reads this has begun."""
        for entry in entries:
            if _may_pass(entry):
                entry.load_error = None  # of an earlier try, perhaps one ahead of its use
            if self._loadable(entry):
                self._revive(entry)
        ours: set[Entry] = set()
        with await self._eviction.gate.admit(sum(e.nbytes for e in entries if self._loadable(e))):
            for entry in entries:
                if self._loadable(entry):
                    self._start(entry)
                    ours.add(entry)
        waiters = {e.waiter for e in entries if e.waiter is not None}
        if waiters:
            # not gather: its cancellation would cancel the futures that others wait for
            await asyncio.wait(waiters)
        return ours

    def prefetch(self, entry: Entry) -> bool:
        """Begin to read what is not needed yet; ask `Eviction.yields` first. False: there was nothing to read."""
        if not self._loadable(entry) or self._revive(entry):
            return False
        self._start(entry)
        return True

    async def load_part(self, entry: Entry, part: int) -> list[memoryview]:
        """The frames of one part of an entry that is on a lower tier. It stays there.

        Raises
        ------
        LostData
            The part could not be read. The entry is LOST, too, unless that says nothing about its copy (`will_pass`).
        """
        handle = entry.handle
        if handle is None:
            raise LostData(f"no valid copy of {entry.key!r} is left here")
        entry.readers += 1
        try:
            frames, cost = await self._read_part(entry, handle, part)
        except (CorruptData, OSError, MemoryError) as e:
            if not entry.gone and entry.state is State.STORED and not will_pass(e):
                self._damaged(entry, e)
            raise LostData(f"part {part} of {entry.key!r} could not be read: {e}") from e
        finally:
            entry.readers -= 1
            self.free_when_idle(entry)
        self._counters.read(cost)
        return frames

    async def _read_part(self, entry: Entry, handle: Handle, part: int) -> tuple[list[memoryview], IoCost]:
        clock = self._io.loop.time
        patience = Patience(clock())
        while True:
            try:
                return await self._io.run(retry, handle.load_part, part)
            except Undelivered as e:
                pause = None if e.lasting else patience.pause(clock())
                if pause is None:
                    raise
                await asyncio.sleep(pause)
                if entry.gone or self._io.closed:
                    raise

    def _loadable(self, entry: Entry) -> bool:
        return entry.state is State.STORED and not entry.gone and entry.load_error is None and not self._io.closed

    def _revive(self, entry: Entry) -> bool:
        value = entry.weak() if entry.weak is not None else None
        if value is None or entry.state is not State.STORED:
            return False
        self._books.move(entry, "revived", value)
        self._books.offer(entry)
        return True

    def _start(self, entry: Entry) -> None:
        self._books.move(entry, "load")
        entry.generation += 1
        entry.waiter = self._io.loop.create_future()
        self._read(entry, Patience(self._io.loop.time()))

    def _read(self, entry: Entry, patience: Patience) -> None:
        entry.readers += 1
        self._io.read(entry, functools.partial(self._loaded, patience))

    def _read_again(self, entry: Entry, generation: int, patience: Patience) -> None:
        # Meanwhile it may have been deleted, or read at once by `get`.
        if not entry.gone and generation == entry.generation and not self._io.closed:
            self._read(entry, patience)

    def _loaded(self, patience: Patience, entry: Entry, generation: int, future: Future[Any]) -> None:
        entry.readers -= 1
        error = future.exception()
        if error is None:
            self._counters.read(future.result()[1])
        if entry.gone or generation != entry.generation:
            self.free_when_idle(entry)
            self._books.offer(entry)
            return
        if isinstance(error, Undelivered) and not error.lasting and not self._io.closed:
            pause = patience.pause(self._io.loop.time())
            if pause is not None:
                self._io.loop.call_later(pause, self._read_again, entry, generation, patience)
                return
        if error is None:
            self._books.move(entry, "loaded", future.result()[0])
        elif isinstance(error, DecodeError) or will_pass(error):
            # Not lost: the next read raises what the object's code raised, as with stock Dask.
            self._books.move(entry, "undecodable")
            entry.load_error = without_values(error)
            self._counters.decode_errors += 1
        else:
            self._damaged(entry, error)
        wake(entry)
        self._books.offer(entry)
        self._eviction.balance()
        self._eviction.gate.wake()

    # ------------------------------------------------------------------ at once

    def get(self, entry: Entry) -> Any:
        """The value, now. Reads synchronously when it is not in memory: correct, but it blocks the caller, so counted.

        Raises
        ------
        LostData
            No valid copy is left.
        """
        if not self._io.on_loop:
            return self._get_elsewhere(entry)
        if entry.state is State.RESIDENT or entry.state is State.MOVING:
            self._books.touch(entry)
            self._hand_out(entry)
            return entry.value
        if entry.load_error is not None:
            error = entry.load_error
            if will_pass(error):
                entry.load_error = None  # the copy is good, and the next try may find what this one lacked
            raise _once_more(error)
        if entry.state is State.LOST or entry.handle is None:
            raise LostData(f"no valid copy of {entry.key!r} is left here")
        if self._revive(entry):
            self._hand_out(entry)
            return entry.value
        return as_raised(self._read_now, entry, entry.handle)

    def _read_now(self, entry: Entry, handle: Handle) -> Any:
        self._counters.sync_reads += 1
        with self._counters.loop_time:
            try:
                value, cost = read_value(handle, entry.account)
            except DecodeError:
                raise
            except Exception as e:
                if will_pass(e):
                    raise
                self._damaged(entry, e)
                raise LostData(f"the last copy of {entry.key!r} could not be read: {e}") from e
            self._counters.read(cost)
            was_loading = entry.state is State.LOADING
            self._books.move(entry, "read", value)
            entry.generation += 1  # an I/O thread at work on it brings a second object: not wanted
            if was_loading:
                wake(entry)
            self._books.touch(entry)
            self._hand_out(entry)
            self._eviction.balance()
        return value

    def _hand_out(self, entry: Entry) -> None:
        # What reads by itself (`client.run`) may change the value. A task has it pinned, and was lent it by its name.
        if not entry.pins and (entry.handle is not None or entry.state is State.MOVING):
            self._books.lend(entry)

    def _get_elsewhere(self, entry: Entry) -> Any:
        # Called by user code in a task's thread: change no books. The value may come, or go, and its copy with it,
        # between any two lines. Where what is found may be of two moments, the loop is asked.
        value = entry.value
        if value is not None:
            if entry.handle is not None or entry.state is State.MOVING:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._io.loop.call_soon_threadsafe(self._hand_out, entry)
            return value
        handle = entry.handle
        if handle is None:
            return self._io.run_on_loop(self._get_if_here, entry)  # None itself, or a value that came and was changed
        return as_raised(self._read_elsewhere, entry, handle)

    def _read_elsewhere(self, entry: Entry, handle: Handle) -> Any:
        self._counters.sync_reads += 1
        try:
            return read_value(handle, entry.account)[0]
        except (CorruptData, OSError) as e:
            if entry.handle is not handle:  # freed: another task has changed the value, which is in memory now
                return self._io.run_on_loop(self._get_if_here, entry)
            if will_pass(e):
                raise
            raise LostData(f"the copy of {entry.key!r} could not be read: {e}") from e

    def _get_if_here(self, entry: Entry) -> Any:
        if entry.gone:
            raise LostData(f"{entry.key!r} was deleted here")
        return self.get(entry)

    # ------------------------------------------------------------------ copies that are no good, or not needed

    def _damaged(self, entry: Entry, error: BaseException) -> None:
        was_loading = entry.state is State.LOADING
        self._books.move(entry, "damaged")
        entry.generation += 1
        if was_loading:
            wake(entry)
        self._counters.lost += 1
        if isinstance(error, CorruptData):
            self._counters.checksum_failures += 1
        else:
            self._counters.read_errors[error_kind(error)] += 1
        handle = entry.handle
        if handle is not None and is_shared(handle):
            # Else those would leave memory for free, and be lost too.
            for _ in range(self._books.disown_copy(handle)):
                self._io.free(handle)
        self.free_when_idle(entry)
        message = f"the stored copy of {entry.key!r} ({entry.nbytes} bytes) could not be read back: {error}"
        logger.warning("%s", message)
        self._sink(Event("tiers.lost", message, {"key": str(entry.key), "error": error_kind(error)}))
        self._io.loop.call_soon(_tell_lost, entry)

    def free_when_idle(self, entry: Entry) -> None:
        """Delete the copy of an entry that is gone or LOST, once no thread reads it."""
        if (entry.gone or entry.state is State.LOST) and not entry.readers and entry.handle is not None:
            handle, entry.handle = entry.handle, None
            self._io.free(handle)


def _may_pass(entry: Entry) -> bool:
    return entry.load_error is not None and will_pass(entry.load_error)


def _once_more(error: BaseException) -> BaseException:
    """The error, to be raised: else its traceback would get, and keep, the inputs of each task that reads the value."""
    try:
        again = copy.copy(error)
    except Exception:  # the class is the user's
        return error
    return again.with_traceback(error.__traceback__) if type(again) is type(error) else error


def _tell_lost(entry: Entry) -> None:
    if not entry.gone:
        entry.account.on_lost(entry)


def wake(entry: Entry) -> None:
    """Resolve the future of those that wait for a load."""
    if entry.waiter is not None:
        if not entry.waiter.done():
            entry.waiter.set_result(None)
        entry.waiter = None
