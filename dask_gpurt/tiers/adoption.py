"""Taking over a worker's data without reading it, and giving it back.

What can be taken over: a plain ``dict``, and distributed's `SpillBuffer` with whatever it has on disk, which stays
where it is and is read by our reader threads when it is needed (`ForeignHandle`). Any other mapping only while it is
empty, except dask-cuda's, which holds device memory that this package must not manage at the same time.

Used by `seam` alone: it knows the insides of `SpillBuffer`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from distributed.metrics import context_meter
from distributed.sizeof import safe_sizeof
from distributed.spill import SpillBuffer, SpilledSize

from dask_gpurt.errors import CorruptData, InstallError
from dask_gpurt.tiers.handle import DecodeError, IoCost

if TYPE_CHECKING:
    from dask_gpurt.tiers.account import Codec
    from dask_gpurt.tiers.engine import Engine
    from dask_gpurt.tiers.store import TieredStore


@dataclasses.dataclass(slots=True)
class ForeignHandle:
    """A value that a `SpillBuffer` has on disk."""

    buffer: SpillBuffer
    lock: threading.Lock
    key: Any
    nbytes: int
    #: the buffer has the key to itself again: `free` must leave it there
    kept: bool = False

    def load(self, codec: Codec) -> tuple[Any, IoCost]:
        slow = self.buffer._slow_uncached
        start = time.perf_counter()
        try:
            raw = slow.d[self.key]
        except KeyError as e:
            raise CorruptData(f"{self.key!r} is no longer in {self.buffer!r}") from e
        middle = time.perf_counter()
        try:
            with context_meter.clear_callbacks():
                value = slow.load(raw)
        except Exception as e:
            raise DecodeError from e
        return value, IoCost(self.nbytes, middle - start, time.perf_counter() - middle)

    def load_part(self, part: int) -> tuple[list[memoryview], IoCost]:
        raise KeyError(part)

    def free(self) -> None:
        with self.lock:  # its byte totals are not safe against two threads
            if not self.kept and self.key in self.buffer:
                del self.buffer[self.key]


def check(data: Any) -> None:
    """Raise `InstallError` when this mapping cannot be taken over."""
    kind = f"{type(data).__module__}.{type(data).__qualname__}"
    if kind.startswith("dask_cuda."):
        raise InstallError(
            f"worker.data is a {kind}, which manages device memory itself; tiers cannot be stacked on it. "
            "Remedy: start the worker without device_memory_limit, or set gpurt.tiers.enabled: false"
        )
    if not isinstance(data, MutableMapping):
        raise InstallError(f"worker.data is a {kind}, must be a MutableMapping. Remedy: gpurt.tiers.enabled: false")
    if len(data) and type(data) is not dict and not isinstance(data, SpillBuffer):
        raise InstallError(
            f"worker.data is a {kind} with {len(data)} keys; only a dict or distributed's SpillBuffer can be taken "
            "over while there is data. Remedy: install at the start of the worker, or set gpurt.tiers.enabled: false"
        )


def adopt(data: MutableMapping[Any, Any], store: TieredStore) -> None:
    """Move what `data` holds into `store`. What is on disk stays there.

    Synchronous: no task sees a state in between.
    """
    if isinstance(data, SpillBuffer):
        lock = threading.Lock()
        for key, size in list(data._slow_uncached.weight_by_key.items()):
            store.adopt(key, size.memory, ForeignHandle(data, lock, key, size.disk))
        for key in list(data.fast):
            value = data.fast[key]
            del data[key]
            store[key] = value
    else:
        for key in list(data):
            store[key] = data.pop(key)


async def give_back(store: TieredStore, data: MutableMapping[Any, Any], engine: Engine) -> list[Any]:
    """Move everything from `store` into `data`. The loop stays free; new keys go to `data` at once.

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
    store.successor = data
    for key in store.own_keys():
        pinned = await store.ensure([key])
        try:
            entry = store.entry(key)
            if entry is None or not entry.in_memory:
                continue  # deleted, or lost and being recomputed
            value = entry.value
            if isinstance(data, SpillBuffer) and data.fast.total_weight + entry.nbytes > data.fast.n:
                raw = await _to_disk(data, key, value, engine)
                if store.entry(key) is not entry:  # deleted meanwhile
                    if raw is not None:
                        del data._slow_uncached.d[key]
                    continue
                if raw is not None:
                    store.forget(key)
                    slow = data._slow_uncached
                    slow.weight_by_key[key] = raw
                    slow.total_weight += raw
                    data.slow._gen += 1
                    data.slow._last_updated[key] = data.slow._gen
                    continue
            store.forget(key)
            data[key] = value
        finally:
            store.release(pinned)
    return store.own_keys()


async def _to_disk(data: SpillBuffer, key: Any, value: Any, engine: Engine) -> SpilledSize | None:
    """Write straight below, in a thread; None when that cannot be done."""
    slow = data._slow_uncached
    if not hasattr(data.slow, "_last_updated") or not hasattr(data.slow, "_gen"):
        return None

    def write() -> SpilledSize | None:
        try:
            with context_meter.clear_callbacks():
                raw = slow.dump(value)
            disk = sum(memoryview(frame).nbytes for frame in raw)
            if slow.max_weight is not False and slow.total_weight.disk + disk > slow.max_weight:
                return None
            slow.d[key] = raw
        except Exception:  # whatever it is, the value goes to memory instead, as distributed would have it
            if key in slow.d:
                del slow.d[key]
            return None
        return SpilledSize(safe_sizeof(value), disk)

    size: SpilledSize | None = await engine.offload(write)
    return size
