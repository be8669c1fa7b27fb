"""`IoThreads`: the threads of an engine that encode and write, read and decode.

It submits work from the event loop and brings the end of it back there. Nothing else in the engine creates a thread or
crosses from one to another. Each end carries the generation of its entry, because meanwhile the entry may have been
deleted, or read by the synchronous slow path.

Writers and readers are two pools: a task that waits for an input must not wait behind evictions. Reading ahead leaves
one reader free for it. Where the system starts no thread (a container has a limit of them) and a pool has none so far,
its work is done on the loop at once, as by distributed's own spilling.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from distributed.threadpoolexecutor import ThreadPoolExecutor

from dask_gpurt.errors import CorruptData, Undelivered
from dask_gpurt.memory.arenas import arenas
from dask_gpurt.tiers.storage.handle import EncodeError, Group, Handle, IoCost, compressing_seconds, is_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.tiers.engine.counters import LoopTime
    from dask_gpurt.tiers.engine.entry import Account, Entry
    from dask_gpurt.tiers.storage.protocol import StorageTier

logger = logging.getLogger("distributed.worker.gpurt")

#: errors of a read that say nothing about the data
_TRANSIENT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}
#: copies that one piece of work deletes, so that a writer is soon free again
_FREED_AT_ONCE = 64
_S = TypeVar("_S")
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class _NoThread(Exception):
    """The system starts no thread, and the pool has none."""


class _Pool(ThreadPoolExecutor):
    """Threads of distributed are daemons: one that hangs with its device does not keep the process from ending."""

    _threads: set[threading.Thread]

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError as e:
            # The pool has it among its threads already. It does no work, and cannot be joined.
            self._threads = {t for t in self._threads if t.is_alive()}
            if not self._threads:
                raise _NoThread from e

    def begin(self, function: Callable[[*_Ts], _T], *args: *_Ts) -> Future[_T]:
        """Run a function in a thread; at once and here if there is none."""
        work = [(function, args)]

        def once() -> _T:
            function, args = work.pop()
            return function(*args)

        try:
            future: Future[_T] = self.submit(once)
        except _NoThread:
            future = Future()
            _fill(future, once)  # a thread that is started later finds nothing left to do
        return future


def _fill(future: Future[_T], function: Callable[[], _T]) -> None:
    try:
        future.set_result(function())
    except BaseException as e:
        future.set_exception(e)
        del future  # its error has this frame


class IoThreads:
    """Threads for writing, and one more for reading. Create it, and call it, on the event loop's thread."""

    def __init__(self, threads: int, loop_time: LoopTime) -> None:
        self.threads = threads
        self.loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._loop_time = loop_time
        self._writers = _Pool(threads, thread_name_prefix="gpurt-tier-write")
        # One more, as reading ahead uses `threads` of them.
        self._readers = _Pool(threads + 1, thread_name_prefix="gpurt-tier-read")
        self._idle: asyncio.Future[None] | None = None
        #: copies to be deleted, from the next turn of the loop on
        self._doomed: list[Handle] = []
        #: called on the loop when copies were deleted; must not raise
        self.on_freed: Callable[[], None] = lambda: None
        #: writes, reads and deletions under way
        self.in_flight = 0
        #: failures of what is not waited for: deletions, mostly
        self.failures = 0
        #: nothing new is begun
        self.closed = False

    @property
    def on_loop(self) -> bool:
        """Whether this is the event loop's thread."""
        return threading.get_ident() == self._thread_id

    def write(self, entry: Entry, tier: StorageTier, done: Callable[[Entry, int, Future[Any]], None]) -> None:
        """Encode and write the value of an entry; ``done(entry, generation, future of (handle, cost))`` on the loop."""
        account = entry.account
        self._submit(self._writers, done, entry, _write, tier, account, entry.value, account.parts(entry))

    def compare(self, entry: Entry, done: Callable[[Entry, int, Future[Any]], None]) -> None:
        """Encode the value of an entry, and compare that with its copy; ``done(entry, generation, future of bool)``."""
        assert entry.handle is not None
        account = entry.account
        self._submit(self._writers, done, entry, _is_copy, entry.handle, account, entry.value, account.parts(entry))

    def read(self, entry: Entry, done: Callable[[Entry, int, Future[Any]], None]) -> None:
        """Read and decode the copy of an entry; ``done(entry, generation, future of (value, cost))`` on the loop."""
        assert entry.handle is not None
        self._submit(self._readers, done, entry, read_value, entry.handle, entry.account)

    def _submit(
        self,
        pool: _Pool,
        done: Callable[[Entry, int, Future[Any]], None],
        entry: Entry,
        function: Callable[[*_Ts], object],
        *args: *_Ts,
    ) -> None:
        generation = entry.generation
        self._begin()

        def finish(future: Future[Any]) -> None:
            try:
                with self._loop_time:
                    done(entry, generation, future)
            finally:
                self._end()

        def hand_over(future: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(finish, future)

        pool.begin(function, *args).add_done_callback(hand_over)

    def free(self, handle: Handle) -> None:
        """Delete a copy. Not on the loop: a large file takes milliseconds."""
        if self.closed:
            return
        # To hand over each by itself takes 60 us of the loop, and a message may free thousands of keys.
        if not self._doomed:
            self._begin()
            self.loop.call_soon(self._free_doomed)
        self._doomed.append(handle)

    def _free_doomed(self) -> None:
        doomed, self._doomed = self._doomed, []
        try:
            for at in range(0, len(doomed), _FREED_AT_ONCE):
                self._hand_over(_free, doomed[at : at + _FREED_AT_ONCE], done=self.on_freed)
        finally:
            self._end()

    def submit(self, function: Callable[[*_Ts], object], *args: *_Ts) -> None:
        """Run a function in a writer thread; only `idle` waits for it. What it raises is counted."""
        if not self.closed:
            self._hand_over(function, *args)

    def _hand_over(
        self, function: Callable[[*_Ts], object], *args: *_Ts, done: Callable[[], None] = lambda: None
    ) -> None:
        self._begin()

        def finish(future: Future[Any]) -> None:
            try:
                done()
            finally:
                self._end()
            error = future.exception()
            if error is not None:
                self.failures += 1
                if self.failures in (1, 100, 10_000):
                    what = repr(function), self.failures, repr(error)  # text: the log of a worker keeps records
                    logger.warning("%s failed in an I/O thread (%d such failures): %s", *what)

        def hand_over(future: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(finish, future)

        self._writers.begin(function, *args).add_done_callback(hand_over)

    async def run(self, function: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        """Run a function in a reader thread. It counts as under way until it ends, also after a cancellation."""
        future = self._readers.begin(function, *args)
        self._begin()
        try:
            return await asyncio.wrap_future(future)
        finally:
            if future.done():
                self._end()
            else:  # a worker that closes cancels what waits; were the thread not counted, it would be joined

                def hand_over(_: Future[_T]) -> None:
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        self.loop.call_soon_threadsafe(self._end)

                future.add_done_callback(hand_over)

    def run_on_loop(self, function: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        """From another thread: run a function on the event loop, and wait for it. Never where the loop waits for us."""

        async def call() -> _T:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result()

    def _begin(self) -> None:
        self.in_flight += 1

    def _end(self) -> None:
        self.in_flight -= 1
        if not self.in_flight and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def idle(self) -> None:
        """Wait until no I/O is under way, deletions included."""
        while self.in_flight:
            if self._idle is None or self._idle.done():
                self._idle = self.loop.create_future()
            # Not the future itself: others may wait for it too, and one that is cancelled would cancel it.
            await asyncio.wait([self._idle])

    async def settle(self, seconds: float) -> bool:
        """Wait until no I/O is under way, so long at most; whether none is."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.idle(), seconds)
        return not self.in_flight

    async def shutdown(self) -> None:
        """End the threads. One that is at work is left alone; it does not keep the process from ending."""
        for pool in (self._writers, self._readers):
            if self.in_flight:
                pool.shutdown(wait=False)
                continue
            try:
                await self.loop.run_in_executor(None, pool.shutdown)
            except RuntimeError:  # the system starts no thread; those that are there wait for work, and end at once
                pool.shutdown()


def _free(handles: Sequence[Handle]) -> None:
    error: Exception | None = None
    for handle in handles:
        try:
            handle.free()
        except Exception as e:  # the others are to go all the same
            error = e
    if error is not None:
        raise error


def _is_copy(handle: Handle, account: Account, value: object, parts: Sequence[int] | None) -> bool:
    arenas.mark()
    return is_copy(handle, _encode(account, value, parts))


def _write(tier: StorageTier, account: Account, value: object, parts: Sequence[int] | None) -> tuple[Handle, IoCost]:
    start = time.perf_counter()
    arenas.mark()
    groups = _encode(account, value, parts)
    middle = time.perf_counter()
    handle = tier.write(groups)
    compressing = compressing_seconds(handle)
    return handle, IoCost(handle.nbytes, time.perf_counter() - middle - compressing, middle - start + compressing)


def _encode(account: Account, value: object, parts: Sequence[int] | None) -> list[Group]:
    try:
        return account.codec.encode(value, parts)
    except BaseException as e:  # a panic of an extension in Rust is no `Exception`
        # It says nothing about the object: try again later. Dask's serialization raises something else from it.
        if _has_memory_error(e):
            raise MemoryError("there was too little memory to encode a value") from e
        raise EncodeError from e


def _has_memory_error(error: BaseException | None) -> bool:
    seen: list[BaseException] = []  # user code may have made it a cause of itself
    while error is not None and not isinstance(error, MemoryError) and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return isinstance(error, MemoryError)


def read_value(handle: Handle, account: Account) -> tuple[Any, IoCost]:
    """The value of a copy and what it cost. Raises as `Handle.load`."""
    return retry(handle.load, account.codec)


def will_pass(error: BaseException) -> bool:
    """Whether a failed read says nothing about the copy: an object store does not deliver, or the process was short of
    memory, descriptors or the like.
    """
    return isinstance(error, (MemoryError, Undelivered)) or (isinstance(error, OSError) and error.errno in _TRANSIENT)


def retry(read: Callable[[_S], _T], argument: _S) -> _T:
    """Read; once more if the bytes were wrong (a bad bus heals), a few times if the system was short of something."""
    arenas.mark()
    for pause in (0.02, 0.1, 0.5):
        try:
            return read(argument)
        except CorruptData:
            break
        except (FileNotFoundError, Undelivered):  # the latter was repeated already, and is again later (`loading`)
            raise
        except MemoryError:
            time.sleep(pause)
        except OSError as e:
            if e.errno not in _TRANSIENT:
                break
            time.sleep(pause)
    return read(argument)
