"""Take over a `SpillBuffer` without reading what it has on disk (`adopt`), and give everything back (`give_back`).

This module and `seam` together are the seam to distributed: `seam` knows the private names of its Worker, this one
those of its `SpillBuffer` and of the zict classes below it. No other module knows any. `check` looks them up before
anything is changed.

Only distributed's own `SpillBuffer` is taken over. Anything else is the user's choice: a ``dict`` is what distributed
takes when it must not spill, another mapping came with ``Worker(data=...)`` or from dask-cuda. `left_alone` says
which. One exception: ``dask cuda worker`` gives each worker a ``DeviceHostFile``; where our device tier can be
had, `stand_in` puts a `SpillBuffer` in its place while it is still empty.

Adoption: values on disk stay in the buffer's files and are read by our reader threads when they are needed
(`ForeignHandle`).

Draining (`give_back`) happens on workers that are as full as they may be, so it is ordered by memory:

1. what the buffer never ceased to have (`ForeignHandle`) is forgotten here; new results go to the buffer from now on;
2. values in memory change hands, the least recently used first. That is a reference, no bytes. Those that do not fit
   below the buffer's target are written to its folder in a thread;
3. values on our disk are read and written to the buffer's folder one at a time. None of them goes to the buffer's
   memory: they were on disk, and are read when they are needed.

So bytes of values in both together never exceed ``max(budget, target)`` by more than one value. For what tasks load
meanwhile to be in that sum, the bytes in the buffer are taken off the engine's budget until it is over. Values enter
the buffer by ``set_noevict``: its normal ``__setitem__`` evicts to disk on the event loop, and drops a large value that
cannot be pickled. A file becomes known to the buffer in one step of the loop, after it was written: a key deleted or
set again during the write leaves only a file to delete.

Rejected: draining in the order of keys (values read from disk came on top of those still in memory, and the nanny
killed the worker); asking the buffer to evict (it writes on the event loop).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from distributed.metrics import context_meter
from distributed.sizeof import safe_sizeof
from distributed.spill import SpillBuffer, SpilledSize

from dask_gpurt.backends import dask_cuda
from dask_gpurt.errors import CorruptData
from dask_gpurt.model.checks import require_call, require_names
from dask_gpurt.tiers.engine.buffer_roots import as_bytes
from dask_gpurt.tiers.storage.handle import IoCost, decoded, error_kind

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from dask.typing import Key
    from distributed.spill import Slow
    from distributed.worker import Worker
    from zict import File

    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.engine.entry import Entry
    from dask_gpurt.tiers.storage.handle import Codec
    from dask_gpurt.tiers.stores.task_store import TieredStore

logger = logging.getLogger("distributed.worker.gpurt")

#: seconds of handing over after which the loop gets a turn
_TURN_SECONDS = 0.005
#: attributes of a SpillBuffer that are used
NAMES = (
    *("fast.n", "fast.total_weight", "evict", "set_noevict"),
    *("slow.cache", "slow._gen", "slow._last_updated"),
    *("_slow_uncached.load", "_slow_uncached.dump", "_slow_uncached.max_weight"),
    *("_slow_uncached.weight_by_key", "_slow_uncached.total_weight"),
    *("_slow_uncached.d.directory", "_slow_uncached.d.filenames", "_slow_uncached.d._safe_key"),
)


def check(data: SpillBuffer) -> None:
    """Raise `SeamMismatch` when this `SpillBuffer` is not the one this module was written for."""
    require_names(data, "SpillBuffer", NAMES)
    require_call(data.set_noevict, "SpillBuffer.set_noevict", "key", None)
    require_call(data.evict, "SpillBuffer.evict")
    require_call(data._slow_uncached.d._safe_key, "the file mapping's _safe_key", "key")
    require_call(data._slow_uncached.dump, "Slow.dump", None)
    require_call(data._slow_uncached.load, "Slow.load", b"")
    require_names(SpilledSize(0, 0), "SpilledSize", ("memory", "disk"))


@dataclasses.dataclass(frozen=True, slots=True)
class LeftAlone:
    """A ``worker.data`` that is not taken over."""

    reason: str
    #: what to do to have it taken over
    remedy: str
    #: of the log message
    level: int


def left_alone(data: MutableMapping[Key, Any]) -> LeftAlone | None:
    """Return why this mapping is not taken over; None when it is."""
    if type(data) is SpillBuffer:
        return None
    if type(data) is dict:
        return LeftAlone(
            "worker.data is a plain dict: the worker has no memory limit, or spilling is switched off",
            "start the worker with a memory limit and distributed.worker.memory.target or .spill",
            logging.INFO,
        )
    kind = f"{type(data).__module__}.{type(data).__qualname__}"
    if dask_cuda.is_store(data):
        return LeftAlone(
            f"worker.data is a {kind}, which manages device memory itself",
            "gpurt.tiers.device: auto or on, before the first task, where nothing is against it, see `device_off`; or "
            "one plain `dask worker` per GPU with CUDA_VISIBLE_DEVICES set",
            logging.WARNING,
        )
    return LeftAlone(
        f"worker.data is a {kind}, not distributed's own SpillBuffer", "start the worker without data=", logging.WARNING
    )


def stand_in(worker: Worker) -> Callable[[], None]:
    """Put what distributed itself would have chosen in the place of dask-cuda's mapping, in which nothing is yet.

    `dask_gpurt.tiers.device.coexistence` says when: it is empty, and the worker has a limit of host memory.

    Returns
    -------
    What undoes it.
    """
    manager, state = worker.memory_manager, worker.state
    data = manager.data
    share = manager.memory_target_fraction or manager.memory_spill_fraction
    assert manager.memory_limit, "there is nothing to spill by"
    assert share, "there is nothing to spill by"
    target = int(manager.memory_limit * share) if manager.memory_target_fraction else sys.maxsize
    buffer = SpillBuffer(os.path.join(worker.local_directory, "storage"), target=target, max_spill=manager.max_spill)
    manager.data = state.data = buffer

    def undo() -> None:
        if manager.data is not buffer:
            return
        if not buffer:
            manager.data = state.data = data
            return
        logger.warning(
            "worker.data holds %d keys and stays distributed's SpillBuffer, in the place of dask-cuda's %s: it moves "
            "values by host memory alone. Remedy: restart the worker, or detach while no keys are held",
            len(buffer),
            type(data).__name__,
        )

    return undo


# ---------------------------------------------------------------------------------------------- taking over


@dataclasses.dataclass(slots=True)
class ForeignHandle:
    """A value that a `SpillBuffer` has on disk."""

    buffer: SpillBuffer
    lock: threading.Lock
    key: Key
    nbytes: int
    #: its file; the buffer may have another value of this key by now
    name: str
    #: the buffer has the key to itself again: `free` must leave it there
    kept: bool = False

    def load(self, codec: Codec) -> tuple[Any, IoCost]:
        """See `Handle.load`."""
        slow = self.buffer._slow_uncached
        start = time.perf_counter()
        try:
            raw = slow.d[self.key]
        except KeyError as e:
            raise CorruptData(f"{self.key!r} is no longer in {self.buffer!r}") from e
        middle = time.perf_counter()
        with context_meter.clear_callbacks():
            value = decoded(slow.load, raw)
        return value, IoCost(self.nbytes, middle - start, time.perf_counter() - middle)

    def load_part(self, part: int) -> tuple[list[memoryview], IoCost]:
        """Raise KeyError: the buffer stores no parts."""
        raise KeyError(part)

    def free(self) -> None:
        """Delete the key from the buffer, unless it has it to itself again."""
        with self.lock:  # its byte totals are not safe against two threads
            if not self.kept and _files(self.buffer).filenames.get(self.key) == self.name:
                del self.buffer[self.key]


def _files(buffer: SpillBuffer) -> File[bytes]:
    return buffer._slow_uncached.d


def adopt(data: SpillBuffer, store: TieredStore) -> None:
    """Move what `data` holds into `store`. What is on disk stays there.

    Synchronous: no task sees a state in between.
    """
    lock = threading.Lock()
    names = _files(data).filenames
    for key, size in list(data._slow_uncached.weight_by_key.items()):
        store.adopt(key, size.memory, ForeignHandle(data, lock, key, size.disk, names[key]))
    for key in list(data.fast):
        value = data.fast[key]
        del data[key]
        store[key] = value


# ---------------------------------------------------------------------------------------------- giving back


async def give_back(store: TieredStore, data: SpillBuffer, engine: Engine) -> list[Key]:
    """Move everything from `store` into `data`; see the module for the order. The loop stays free.

    Returns
    -------
    list
        Keys that could not be read back; they are still in `store`.
    """
    for key in store.own_keys():
        entry = store.entry(key)
        if entry is not None and isinstance(entry.handle, ForeignHandle):
            entry.handle.kept = True  # `data` never ceased to have it
            store.forget(key)
    store.drain_into(data)
    budget_bytes = engine.budget_bytes
    try:
        draining = _Draining(store, data, engine)
        await draining.values_in_memory()
        await draining.values_on_disk()
    finally:
        engine.budget_bytes = budget_bytes
    return store.own_keys()


class _Draining:
    def __init__(self, store: TieredStore, data: SpillBuffer, engine: Engine) -> None:
        self._store = store
        self._data = data
        self._engine = engine
        self._budget_bytes = engine.budget_bytes
        self._turn_began = time.perf_counter()
        self._share_budget()

    async def values_in_memory(self) -> None:
        """Hand over as many as fit, the most recently used of them; write the others."""
        entries = [e for e in map(self._store.entry, self._store.own_keys()) if e is not None and e.in_memory]
        entries.sort(key=lambda e: e.last_use)
        room = self._data.fast.n - self._data.fast.total_weight
        fitting: list[Entry] = []
        others: list[Entry] = []
        for entry in reversed(entries):
            if entry.nbytes <= room:
                room -= entry.nbytes
                fitting.append(entry)
            else:
                others.append(entry)
        del entries
        # From the oldest to the newest, which becomes the buffer's order of eviction.
        for entry in [*reversed(fitting), *reversed(others)]:
            if self._here(entry) and entry.in_memory:
                await self._move(entry, to_memory=True)

    async def values_on_disk(self) -> None:
        """Read and write one after the other."""
        for key in self._store.own_keys():
            entry = self._store.entry(key)
            if entry is None:
                continue
            was_in_memory = entry.in_memory  # a task has read it meanwhile
            pinned = await self._store.ensure([key])
            try:
                if self._here(entry) and entry.in_memory:  # else deleted, or lost and being computed again
                    await self._move(entry, to_memory=was_in_memory)
            finally:
                self._store.release(pinned)

    def _here(self, entry: Entry) -> bool:
        return self._store.entry(entry.key) is entry

    async def _move(self, entry: Entry, *, to_memory: bool) -> None:
        fast = self._data.fast
        if to_memory and fast.total_weight + entry.nbytes <= fast.n:
            self._hand_over(entry)
        else:
            await self._write(entry)
        self._share_budget()
        now = time.perf_counter()
        if now - self._turn_began > _TURN_SECONDS:
            await asyncio.sleep(0)
            self._turn_began = time.perf_counter()

    def _hand_over(self, entry: Entry) -> None:
        key, value = entry.key, entry.value
        self._store.forget(key)
        self._data.set_noevict(key, value)

    async def _write(self, entry: Entry) -> None:
        """Straight to the buffer's folder; to its memory, whatever its target, when that cannot be done."""
        key, value, files = entry.key, entry.value, _files(self._data)
        name = files._safe_key(key)
        path = os.path.join(files.directory, name)
        self._engine.pin(entry)
        try:
            size = await self._engine.offload(_write_file, self._data._slow_uncached, path, value)
        except Exception as e:  # whatever it is, the value stays in memory, as distributed would have it
            size = None
            self._failed(e, f"{key!r} cannot be written to {path} and stays in memory")
        finally:
            self._engine.unpin(entry)
        if not self._here(entry):
            if size is not None:
                try:
                    await self._engine.offload(os.remove, path)
                except OSError as e:
                    self._failed(e, f"{path} is left behind until the worker's folder goes")
            return
        self._store.forget(key)
        if size is None:
            self._data.set_noevict(key, value)
            return
        slow, cached = self._data._slow_uncached, self._data.slow
        files.filenames[key] = name
        slow.weight_by_key[key] = size
        slow.total_weight += size
        cached._gen += 1
        cached._last_updated[key] = cached._gen
        cached.cache[key] = value  # weakly: a task that still has it needs no second copy

    def _failed(self, error: Exception, message: str) -> None:
        kind = error_kind(error)
        self._engine.counters.write_errors[kind] += 1
        if self._engine.counters.write_errors[kind] in (1, 100, 10_000):
            logger.warning("%s: %s", message, repr(error))  # text: records are kept, and a traceback holds the value

    def _share_budget(self) -> None:
        if self._budget_bytes is not None:
            self._engine.budget_bytes = max(0, self._budget_bytes - (as_bytes(self._data.fast.total_weight) or 0))


def _write_file(slow: Slow, path: str, value: object) -> SpilledSize | None:
    """In a thread. None when it would pass the buffer's limit. Raises whatever went wrong, and leaves no file then."""
    with context_meter.clear_callbacks():
        frames = slow.dump(value)
    disk = sum(memoryview(frame).nbytes for frame in frames)
    if slow.max_weight is not False and slow.total_weight.disk + disk > slow.max_weight:
        return None
    try:
        with open(path, "wb") as f:
            f.writelines(frames)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(path)
        raise
    return SpilledSize(as_bytes(safe_sizeof(value)) or 0, disk)
