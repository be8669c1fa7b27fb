"""The engine: entries, their budget of host memory, and the I/O threads. Bookkeeping on the event loop only.

One engine per worker serves several owners (`Account`): the store behind ``worker.data`` and the shuffle's shards.

* `balance` keeps ``resident + loading + asked for`` below the budget by choosing victims (`policy.Victims`) late: only
  as many writes are begun as there are writer threads, so each choice is made with the newest knowledge.
* `ensure` brings entries into memory in reader threads. The caller pins them first, so that they are not evicted
  between the end of the load and their use.
* `admission.Gate` holds back whoever would bring more bytes while writes are behind.
* A write that fails leaves the value in memory: objects that cannot be encoded are never tried again; I/O errors make
  the key wait (1 s, doubling to 60 s), three in a row the whole tier. Other keys go on meanwhile.
* A copy that fails length, checksum or I/O (after one more try) makes its entry LOST and tells the owner.

Ends of I/O arrive by ``call_soon_threadsafe``; each carries the generation it belongs to, because meanwhile the entry
may have been deleted, or read by the synchronous slow path.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import itertools
import logging
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import CorruptData, LostData
from dask_gpurt.model.events import Event, Sink, null_sink
from dask_gpurt.tiers.admission import Gate, Reservation
from dask_gpurt.tiers.entry import Entry, EventLog, State, next_state
from dask_gpurt.tiers.handle import DecodeError, EncodeError, Handle, IoCost
from dask_gpurt.tiers.policy import Victims
from dask_gpurt.tiers.statistics import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from dask_gpurt.tiers.account import Account
    from dask_gpurt.tiers.disk import StorageTier

logger = logging.getLogger("distributed.worker.gpurt")

#: share of the budget by which admitted requests may pass it, so that computing and writing overlap
SLACK = 0.25
#: failed writes in a row, of any keys, before the tier as a whole rests
TIER_FAILURES = 3
#: errors of a read that say nothing about the data
_TRANSIENT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}


class Engine:
    """Entries of one worker. Create it, and call it, on the event loop's thread.

    Parameters
    ----------
    tier
        Where victims go.
    budget_bytes
        Bytes of values to hold in memory; None: any number (nothing leaves memory unless `shrink` says so).
    threads
        I/O threads for writing, and as many for reading.
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
        self.budget_bytes = budget_bytes
        self.counters = Counters()
        self.log = EventLog()
        self.gate = Gate(self._over, self._can_progress)
        self._sink = sink
        self._clock = clock
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._writers = ThreadPoolExecutor(threads, "gpurt-tier-write")
        self._readers = ThreadPoolExecutor(threads, "gpurt-tier-read")
        self._entries: set[Entry] = set()
        self._victims = Victims()
        #: (monotonic seconds, serial number, entry): writes that failed wait here
        self._resting: list[tuple[float, int, Entry]] = []
        self._serial = itertools.count()
        self._tier_rests_until = 0.0
        self._tier_failures = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        #: bytes of values in memory (RESIDENT and MOVING)
        self.resident_bytes = 0
        #: of these, being written
        self.moving_bytes = 0
        #: being read
        self.loading_bytes = 0
        #: bytes that `shrink` still wants out, beyond the budget
        self._shrink_bytes = 0
        self._writes = 0
        self._idle: asyncio.Future[None] | None = None
        self._in_flight = 0

    # ------------------------------------------------------------------ entries

    def add(self, account: Account, key: Hashable, value: Any, nbytes: int, *, balance: bool = True) -> Entry:
        """Keep a value. Starts evictions if it makes memory pass the budget, perhaps that of this value.

        With `balance` False the caller has books of its own to bring up to date before it calls `balance`.
        """
        entry = Entry(key, account, nbytes, value, last_use=self._clock())
        self._entries.add(entry)
        self.resident_bytes += nbytes
        self.log.append(key, None, "add", State.RESIDENT)
        self._victims.add(entry)
        if balance:
            self.balance()
        return entry

    def add_stored(self, account: Account, key: Hashable, nbytes: int, handle: Handle) -> Entry:
        """Take over a value that is on a lower tier already."""
        entry = Entry(key, account, nbytes, None, State.STORED, handle, last_use=self._clock())
        self._entries.add(entry)
        self._count_stored(entry, 1)
        self.log.append(key, None, "adopt", State.STORED)
        return entry

    def remove(self, entry: Entry) -> None:
        """Forget an entry and its copies. I/O at work on it goes on; nothing that it brings is kept."""
        if entry.gone:
            return
        entry.gone = True
        self._entries.discard(entry)
        self._victims.discard(entry)
        self.log.append(entry.key, entry.state, "remove", None)
        if entry.in_memory:
            self.resident_bytes -= entry.nbytes
            if entry.state is State.MOVING:
                self.moving_bytes -= entry.nbytes
        elif entry.state is not State.LOST:
            self._count_stored(entry, -1)
            if entry.state is State.LOADING:
                self.loading_bytes -= entry.nbytes
        entry.value = None
        self._wake(entry)
        self._free_when_idle(entry)
        self.gate.wake()

    def get(self, entry: Entry) -> Any:
        """The value, now. Reads synchronously when it is not in memory: correct, but it blocks the caller, so counted.

        Raises
        ------
        LostData
            No valid copy is left.
        """
        if threading.get_ident() != self._thread_id:
            return self._get_elsewhere(entry)
        if entry.in_memory:
            self.touch(entry)
            return entry.value
        if entry.load_error is not None:
            raise entry.load_error
        if entry.state is State.LOST or entry.handle is None:
            raise LostData(f"no valid copy of {entry.key!r} is left here")
        if self._revive(entry):
            return entry.value
        self.counters.sync_reads += 1
        try:
            value, cost = _load(entry.handle, entry.account)
        except DecodeError as e:
            raise (e.__cause__ or e) from None
        except Exception as e:
            self._damaged(entry, e)
            raise LostData(f"the last copy of {entry.key!r} could not be read: {e}") from e
        self.counters.read(cost)
        was_loading = entry.state is State.LOADING
        self._move(entry, "read")
        entry.value = value
        entry.generation += 1  # an I/O thread at work on it brings a second object: not wanted
        if was_loading:
            self._wake(entry)
        self.touch(entry)
        self.balance()
        return value

    def _get_elsewhere(self, entry: Entry) -> Any:
        # Called by user code in a task's thread: change no books. The value may go between any two lines.
        value, handle = entry.value, entry.handle
        if value is not None or entry.in_memory:
            return value
        if handle is None:
            raise LostData(f"no valid copy of {entry.key!r} is left here")
        self.counters.sync_reads += 1
        try:
            return _load(handle, entry.account)[0]
        except DecodeError as e:
            raise (e.__cause__ or e) from None
        except (CorruptData, OSError) as e:
            raise LostData(f"the copy of {entry.key!r} could not be read: {e}") from e

    def touch(self, entry: Entry) -> None:
        """It was used just now."""
        entry.last_use = self._clock()
        if entry in self._victims:
            self._victims.add(entry)

    def hint(self, entry: Entry, next_use: tuple[float, ...] | None) -> None:
        """Tell when it is used next (see `Entry.next_use`)."""
        entry.next_use = next_use
        if entry in self._victims:
            self._victims.add(entry)

    def pin(self, entry: Entry) -> None:
        """Keep it in memory once it is there, until `unpin`. Counts."""
        entry.pins += 1
        if entry.pins == 1:
            self._victims.discard(entry)

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        if entry.pins == 0 and not entry.gone:
            entry.last_use = self._clock()
            self._offer(entry)
            self.balance()

    # ------------------------------------------------------------------ loading

    async def ensure(self, entries: Iterable[Entry]) -> None:
        """Bring entries into memory, all I/O in threads.

        Returns when each of them is in memory, gone, LOST, or has a `load_error`. The caller pins them before. Waits
        for room in memory first (see `admission`).
        """
        entries = list(entries)
        for entry in entries:
            if self._loadable(entry):
                self._revive(entry)
        with await self.gate.admit(sum(e.nbytes for e in entries if self._loadable(e))):
            for entry in entries:
                if self._loadable(entry):
                    self._start_load(entry)
        waiters = {e.waiter for e in entries if e.waiter is not None}
        if waiters:
            # not gather: its cancellation would cancel the futures that others wait for
            await asyncio.wait(waiters)

    async def admit(self, nbytes: int) -> Reservation:
        """Room for `nbytes` more; see `admission`. Release it when the bytes are in an entry, or given up."""
        return await self.gate.admit(nbytes)

    async def load_part(self, entry: Entry, part: int) -> list[memoryview]:
        """The frames of one part of an entry that is on a lower tier. It stays there.

        Raises
        ------
        LostData
            The copy could not be read or failed its checksum; the entry is LOST.
        """
        handle = entry.handle
        if handle is None:
            raise LostData(f"no valid copy of {entry.key!r} is left here")
        entry.readers += 1
        self._begin()
        try:
            frames, cost = await asyncio.wrap_future(self._readers.submit(_retry, handle.load_part, part))
        except (CorruptData, OSError) as e:
            if not entry.gone and entry.state is State.STORED:
                self._damaged(entry, e)
            raise LostData(f"part {part} of {entry.key!r} could not be read: {e}") from e
        finally:
            entry.readers -= 1
            self._free_when_idle(entry)
            self._end()
        self.counters.read(cost)
        return frames

    async def offload(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in a reader thread."""
        self._begin()
        try:
            return await asyncio.wrap_future(self._readers.submit(function, *args))
        finally:
            self._end()

    def _loadable(self, entry: Entry) -> bool:
        return entry.state is State.STORED and not entry.gone and entry.load_error is None and not self._closed

    def _revive(self, entry: Entry) -> bool:
        value = entry.weak() if entry.weak is not None else None
        if value is None or entry.state is not State.STORED:
            return False
        self._move(entry, "revived")
        entry.value = value
        self._offer(entry)
        return True

    def _start_load(self, entry: Entry) -> None:
        assert entry.handle is not None
        self._move(entry, "load")
        entry.generation += 1
        entry.readers += 1
        entry.waiter = self._loop.create_future()
        self._submit(self._readers, self._loaded, entry, _load, entry.handle, entry.account)

    def _loaded(self, entry: Entry, generation: int, future: Future[Any]) -> None:
        entry.readers -= 1
        error = future.exception()
        if error is None:
            self.counters.read(future.result()[1])
        if entry.gone or generation != entry.generation:
            self._free_when_idle(entry)
            return
        if error is None:
            self._move(entry, "loaded")
            entry.value = future.result()[0]
        elif isinstance(error, DecodeError):
            # Not lost: the next one who asks gets what the object's code raised, as with stock Dask.
            self._move(entry, "undecodable")
            entry.load_error = error.__cause__ or error
            self.counters.decode_errors += 1
        else:
            self._damaged(entry, error)
        self._wake(entry)
        self._offer(entry)
        self.balance()
        self.gate.wake()

    def _damaged(self, entry: Entry, error: BaseException) -> None:
        was_loading = entry.state is State.LOADING
        self._move(entry, "damaged")
        entry.generation += 1
        if was_loading:
            self._wake(entry)
        self.counters.lost += 1
        if isinstance(error, CorruptData):
            self.counters.checksum_failures += 1
        else:
            self.counters.read_errors[_kind(error)] += 1
        self._free_when_idle(entry)
        message = f"the stored copy of {entry.key!r} ({entry.nbytes} bytes) could not be read back: {error}"
        logger.warning("%s", message)
        self._sink(Event("tiers.lost", message, {"key": str(entry.key), "error": _kind(error)}))
        self._loop.call_soon(self._tell_lost, entry)

    def _tell_lost(self, entry: Entry) -> None:
        if not entry.gone:
            entry.account.on_lost(entry)

    # ------------------------------------------------------------------ eviction

    def shrink(self, nbytes: int) -> None:
        """Move `nbytes` out of memory, even below the budget (the process as a whole is too large)."""
        self._shrink_bytes = max(0, nbytes - self.moving_bytes)
        self.balance()

    @property
    def can_shrink(self) -> bool:
        """Is anything leaving memory, or could it?"""
        return self._writes > 0 or len(self._victims) > 0

    def balance(self, wanted_bytes: int = 0) -> None:
        """Begin evictions until memory (with `wanted_bytes` more) will be within budget, or all writers are busy."""
        if self._closed:
            return
        now = self._clock()
        while self._resting and self._resting[0][0] <= now:
            self._offer(heapq.heappop(self._resting)[2])
        while True:
            excess = self._excess(wanted_bytes)
            if excess <= 0:
                return
            entry = self._victims.pop_clean(any_place=self._tier_rests_until > now)
            if entry is not None:
                self._drop(entry)
                continue
            if self._writes >= self._threads:
                return
            if self._tier_rests_until > now:
                self._set_timer(self._tier_rests_until - now)
                return
            # Small values only when nothing else is being done about it.
            entry = self._victims.pop_dirty(small=self._writes == 0)
            if entry is None:
                if self._resting:
                    self._set_timer(self._resting[0][0] - now)
                return
            self._start_write(entry)

    def _excess(self, wanted_bytes: int) -> int:
        staying = self.resident_bytes - self.moving_bytes
        excess = self._shrink_bytes
        if self.budget_bytes is not None:
            coming = self.loading_bytes + self.gate.reserved_bytes + wanted_bytes
            excess = max(excess, staying + coming - self.budget_bytes)
        return excess if staying > 0 else 0

    def _over(self, nbytes: int) -> bool:
        if self.budget_bytes is None or self._closed:
            return False
        used = self.resident_bytes + self.loading_bytes + self.gate.reserved_bytes
        return used + nbytes > self.budget_bytes * (1 + SLACK)

    def _can_progress(self, nbytes: int) -> bool:
        self.balance(nbytes)
        return self._writes > 0

    def _drop(self, entry: Entry) -> None:
        self._move(entry, "drop")
        self._shrunk(entry)
        self._forget_value(entry)
        self.counters.clean_drops += 1

    def _forget_value(self, entry: Entry) -> None:
        # Whoever still holds the object gives it back for nothing, and a second copy in memory is avoided.
        try:
            entry.weak = weakref.ref(entry.value)
        except TypeError:
            entry.weak = None
        shell = entry.account.shell
        entry.value = None if shell is None else shell(entry.value)

    def _shrunk(self, entry: Entry) -> None:
        self._shrink_bytes = max(0, self._shrink_bytes - entry.nbytes)

    def _start_write(self, entry: Entry) -> None:
        self._move(entry, "write")
        self._shrunk(entry)
        entry.generation += 1
        self._writes += 1
        account = entry.account
        self._submit(self._writers, self._written, entry, _write, self.tier, account, entry.value, account.parts(entry))

    def _written(self, entry: Entry, generation: int, future: Future[Any]) -> None:
        self._writes -= 1
        error = future.exception()
        if error is not None:
            if not entry.gone:
                self._write_failed(entry, error)
        else:
            handle, cost = future.result()
            self.counters.written(cost)
            self._tier_failures = 0
            entry.failures = 0
            if entry.gone:
                self._free(handle)
            else:
                entry.handle = handle
                if entry.pins:
                    self._move(entry, "kept")
                else:
                    self._move(entry, "written")
                    self._forget_value(entry)
        self.balance()
        self.gate.wake()

    def _write_failed(self, entry: Entry, error: BaseException) -> None:
        # What keeps it from being chosen again is set before the move, which offers it as a victim.
        if isinstance(error, EncodeError):
            entry.unspillable = True
            self._move(entry, "write-failed")
            self.counters.write_errors["unpicklable"] += 1
            logger.warning("%r cannot be written and stays in memory: %r", entry.key, error.__cause__)
            return
        kind = _kind(error)
        self.counters.write_errors[kind] += 1
        entry.failures += 1
        now = self._clock()
        pause = min(60.0, 2.0 ** (entry.failures - 1))
        heapq.heappush(self._resting, (now + pause, next(self._serial), entry))
        self._move(entry, "write-failed")
        self._tier_failures += 1
        if self._tier_failures >= TIER_FAILURES:
            # The tier, not a key: trying every key in turn would cost as many failing writes.
            self._tier_rests_until = now + min(60.0, 2.0 ** (self._tier_failures - TIER_FAILURES))
        if self._tier_failures in (1, TIER_FAILURES):
            message = f"could not write {entry.key!r} ({entry.nbytes} bytes), which stays in memory: {error}"
            logger.warning("%s", message)
            self._sink(Event("tiers.write-failed", message, {"key": str(entry.key), "error": kind}))

    def _set_timer(self, seconds: float) -> None:
        when = self._loop.time() + max(0.01, seconds)
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.balance()
        self.gate.wake()

    # ------------------------------------------------------------------ shared

    def _move(self, entry: Entry, event: str) -> None:
        """The only place where states change, and with them all byte counts."""
        before = entry.state
        after = next_state(entry, event, self.log)
        was, is_ = entry.in_memory, after in (State.RESIDENT, State.MOVING)
        n = entry.nbytes
        self.resident_bytes += n * (is_ - was)
        self.moving_bytes += n * ((after is State.MOVING) - (before is State.MOVING))
        self.loading_bytes += n * ((after is State.LOADING) - (before is State.LOADING))
        was_stored, is_stored = before in _BELOW, after in _BELOW
        if was_stored != is_stored:
            self._count_stored(entry, 1 if is_stored else -1)
        entry.state = after
        if after is not State.RESIDENT:
            self._victims.discard(entry)
        elif before is not State.RESIDENT:
            entry.weak = None
            self._offer(entry)
        self.log.append(entry.key, before, event, after)

    def _count_stored(self, entry: Entry, sign: int) -> None:
        account, handle = entry.account, entry.handle
        account.stored += sign
        account.stored_memory_bytes += sign * entry.nbytes
        account.stored_disk_bytes += sign * (handle.nbytes if handle is not None else 0)

    def _offer(self, entry: Entry) -> None:
        """Make it a victim if it may be one."""
        if entry.gone or entry.pins or entry.state is not State.RESIDENT:
            return
        if entry.handle is None and (entry.unspillable or self._rests(entry)):
            return
        self._victims.add(entry)

    def _rests(self, entry: Entry) -> bool:
        return entry.failures > 0 and any(item[2] is entry for item in self._resting)

    def _wake(self, entry: Entry) -> None:
        if entry.waiter is not None:
            if not entry.waiter.done():
                entry.waiter.set_result(None)
            entry.waiter = None

    def _free_when_idle(self, entry: Entry) -> None:
        if (entry.gone or entry.state is State.LOST) and not entry.readers and entry.handle is not None:
            handle, entry.handle = entry.handle, None
            self._free(handle)

    def _free(self, handle: Handle) -> None:
        # Deleting a large file takes milliseconds: not on the loop.
        if self._closed:
            return
        self._begin()

        def hand_over(future: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._end)

        self._writers.submit(handle.free).add_done_callback(hand_over)

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        done: Callable[[Entry, int, Future[Any]], None],
        entry: Entry,
        function: Callable[..., Any],
        *args: Any,
    ) -> None:
        generation = entry.generation
        self._begin()

        def finish(future: Future[Any]) -> None:
            try:
                done(entry, generation, future)
            finally:
                self._end()

        def hand_over(future: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(finish, future)

        pool.submit(function, *args).add_done_callback(hand_over)

    def _begin(self) -> None:
        self._in_flight += 1

    def _end(self) -> None:
        self._in_flight -= 1
        if not self._in_flight and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def idle(self) -> None:
        """Wait until no I/O is under way, deletions included."""
        while self._in_flight:
            self._idle = self._loop.create_future()
            await self._idle

    async def close(self) -> None:
        """Stop evicting, wait for the I/O at work, delete all files. Values in memory stay readable."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.gate.wake()
        await self.idle()
        for pool in (self._writers, self._readers):
            await self._loop.run_in_executor(None, pool.shutdown)
        for entry in self._entries:
            entry.handle = None
        await self._loop.run_in_executor(None, self.tier.close)

    @property
    def decided_by(self) -> dict[str, int]:
        """What chose the victims so far; see `Victims.decided_by`."""
        return dict(self._victims.decided_by)

    def states(self) -> dict[str, int]:
        """Entries per state."""
        counts = Counter(e.state.value for e in self._entries)
        return {s.value: counts[s.value] for s in State}

    def validate(self) -> None:
        """Check every invariant; AssertionError names what is broken."""
        entries = self._entries
        assert self.resident_bytes == sum(e.nbytes for e in entries if e.in_memory), "resident_bytes"
        assert self.moving_bytes == sum(e.nbytes for e in entries if e.state is State.MOVING), "moving_bytes"
        assert self.loading_bytes == sum(e.nbytes for e in entries if e.state is State.LOADING), "loading_bytes"
        accounts = {e.account for e in entries}
        for account in accounts:
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
            assert (e.handle is not None) or e.state not in _BELOW, story
            assert (e.waiter is not None) == (e.state is State.LOADING), story
            may_go = e.state is State.RESIDENT and not e.pins
            if e in self._victims:
                assert may_go, story
            elif may_go:
                assert e.handle is None, story
                assert e.unspillable or self._rests(e), story
        assert self.gate.reserved_bytes >= 0, "reserved_bytes"

    def handles(self) -> list[Handle]:
        """All copies on lower tiers."""
        return [e.handle for e in self._entries if e.handle is not None]


_BELOW = (State.STORED, State.LOADING)


def _kind(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return errno.errorcode.get(error.errno, str(error.errno))
    return type(error).__name__


def _write(tier: StorageTier, account: Account, value: Any, parts: Sequence[int] | None) -> tuple[Handle, IoCost]:
    start = time.perf_counter()
    try:
        groups = account.codec.encode(value, parts)
    except MemoryError:  # says nothing about the object: try again later
        raise
    except Exception as e:
        raise EncodeError from e
    middle = time.perf_counter()
    handle = tier.write(groups)
    return handle, IoCost(handle.nbytes, time.perf_counter() - middle, middle - start)


def _load(handle: Handle, account: Account) -> tuple[Any, IoCost]:
    result: tuple[Any, IoCost] = _retry(handle.load, account.codec)
    return result


def _retry(read: Callable[[Any], Any], argument: Any) -> Any:
    """Read; once more if the bytes were wrong (a bad bus heals), a few times if the system was short of something."""
    for pause in (0.02, 0.1, 0.5):
        try:
            return read(argument)
        except CorruptData:
            break
        except FileNotFoundError:
            raise
        except OSError as e:
            if e.errno not in _TRANSIENT:
                break
            time.sleep(pause)
    return read(argument)
