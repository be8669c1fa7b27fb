"""Taking over a `SpillBuffer` and giving it back, without a worker: memory, files, races, and what it relies on."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from distributed.spill import SpillBuffer

from dask_gpurt.errors import SeamMismatch
from dask_gpurt.tiers.worker import spill_buffer

if TYPE_CHECKING:
    from tests.tiers.conftest import Rig

RunRig = Callable[..., None]
SIZE = 100_000


class Counted:
    """A value that is counted while it is alive."""

    lock = threading.Lock()
    alive = 0
    peak = 0

    def __init__(self, i: int) -> None:
        self.i = i
        with Counted.lock:
            Counted.alive += 1
            Counted.peak = max(Counted.peak, Counted.alive)

    def __reduce__(self) -> Any:
        return Counted, (self.i,)

    def __del__(self) -> None:
        with Counted.lock:
            Counted.alive -= 1

    def __sizeof__(self) -> int:
        return SIZE


class Unpicklable(Counted):
    def __reduce__(self) -> Any:
        raise TypeError("nope")


def consistent(data: SpillBuffer) -> None:
    """The books of the buffer, and its files."""
    slow = data._slow_uncached
    assert set(slow.weight_by_key) == set(slow.d.filenames) == set(data.slow._last_updated)  # type: ignore[attr-defined]
    assert slow.total_weight.disk == sum(v.disk for v in slow.weight_by_key.values())
    assert slow.total_weight.memory == sum(v.memory for v in slow.weight_by_key.values())
    assert sorted(os.listdir(slow.d.directory)) == sorted(slow.d.filenames.values())  # type: ignore[attr-defined]
    assert data.fast.total_weight == sum(data.fast.weights.values())


@pytest.mark.parametrize("target_values", [5, 20, 30])
def test_never_more_in_memory_than_before(run_rig: RunRig, tmp_path: Any, target_values: int) -> None:
    """Half of the values are in memory, half on disk; the buffer has room for some of the former, for all, or more."""
    n, budget_values = 40, 20

    async def test(rig: Rig) -> None:
        data = SpillBuffer(str(tmp_path / "storage"), target=(SIZE + 1000) * target_values)
        gc.collect()
        Counted.alive = Counted.peak = 0
        for i in range(n):
            rig.store[i] = Counted(i)
            await rig.settle()
        assert len(rig.store.memory) == budget_values
        threads: set[int] = set()
        slow = data._slow_uncached
        dump = slow.dump
        slow.dump = lambda value: (threads.add(threading.get_ident()), dump(value))[1]
        Counted.peak = Counted.alive
        assert await spill_buffer.give_back(rig.store, data, rig.engine) == []
        # One in hand, and those that I/O threads have written but not let go yet.
        assert Counted.peak <= max(budget_values, target_values) + 1 + rig.engine.io.threads
        assert threading.get_ident() not in threads, "nothing is written on the loop"
        assert len(threads) > 0
        # Values that were on disk stay there; of the others the newest are in memory, in their order.
        assert list(data.fast.order) == list(range(n - min(target_values, budget_values), n))
        consistent(data)
        await rig.settle()
        rig.validate()
        assert rig.engine.budget_bytes == (SIZE + 1000) * budget_values, "as before"
        assert rig.engine.resident_bytes == 0
        assert [data[i].i for i in range(n)] == list(range(n))  # type: ignore[attr-defined]
        assert rig.engine.counters.sync_reads == 0
        for i in range(n):
            del data[i]
        consistent(data)

    run_rig(test, budget=(SIZE + 1000) * budget_values)


def test_to_and_fro(run_rig: RunRig, tmp_path: Any) -> None:
    """What the buffer had on disk all the time is neither read nor written."""

    async def test(rig: Rig) -> None:
        data = SpillBuffer(str(tmp_path / "storage"), target=SIZE * 3)
        for i in range(10):
            data[i] = np.full(SIZE, i, "u1")
        files = dict(data._slow_uncached.d.filenames)  # type: ignore[attr-defined]
        assert len(files) >= 7
        spill_buffer.adopt(data, rig.store)
        assert len(rig.store) == 10
        assert len(data.fast) == 0
        assert await spill_buffer.give_back(rig.store, data, rig.engine) == []
        assert dict(data._slow_uncached.d.filenames) == files  # type: ignore[attr-defined]
        assert len(rig.store._entries) == 0
        consistent(data)
        assert all((data[i] == i).all() for i in range(10))  # type: ignore[attr-defined]

    run_rig(test)


def test_keys_that_change_while_they_are_written(run_rig: RunRig, tmp_path: Any) -> None:
    """A key deleted, or deleted and set again, during its write: no stray file, the new value stays."""

    async def test(rig: Rig) -> None:
        data = SpillBuffer(str(tmp_path / "storage"), target=SIZE // 2)
        for i in range(6):
            rig.store[i] = np.full(SIZE, i, "u1")
        slow = data._slow_uncached
        dump, gate, busy = slow.dump, threading.Event(), threading.Event()

        def dump_slowly(value: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                busy.set()
                assert gate.wait(30)
            return dump(value)

        slow.dump = dump_slowly
        draining = asyncio.ensure_future(spill_buffer.give_back(rig.store, data, rig.engine))
        assert await asyncio.to_thread(busy.wait, 30)
        del rig.store[0]  # it is being written
        rig.store[0] = np.full(SIZE, 100, "u1")  # heavy: the buffer writes it at once, on this thread
        del rig.store[1]  # its turn has not come
        rig.store[2] = np.full(10, 102, "u1")
        assert sorted(rig.store) == [0, 2, 3, 4, 5]
        gate.set()
        assert await asyncio.wait_for(draining, 30) == []
        assert sorted(data) == [0, 2, 3, 4, 5]
        assert (data[0] == 100).all()  # type: ignore[attr-defined]
        assert (data[2] == 102).all()  # type: ignore[attr-defined]
        assert all((data[i] == i).all() for i in (3, 4, 5))  # type: ignore[attr-defined]
        consistent(data)
        await rig.settle()
        rig.validate()

    run_rig(test)


@pytest.mark.parametrize("why", ["unpicklable", "max-spill", "folder gone"])
def test_what_cannot_be_written_stays_in_memory(run_rig: RunRig, tmp_path: Any, why: str) -> None:
    """Heavier than the target: distributed's own ``__setitem__`` would drop the unpicklable one, and raise."""

    async def test(rig: Rig) -> None:
        data = SpillBuffer(str(tmp_path / "storage"), target=SIZE // 2, max_spill=10 if why == "max-spill" else False)
        kind = Unpicklable if why == "unpicklable" else Counted
        if why == "folder gone":
            os.rmdir(data._slow_uncached.d.directory)  # type: ignore[attr-defined]
        for i in range(3):
            rig.store[i] = kind(i)
        assert await spill_buffer.give_back(rig.store, data, rig.engine) == []
        assert sorted(data.fast) == [0, 1, 2]
        assert [data[i].i for i in range(3)] == [0, 1, 2]  # type: ignore[attr-defined]
        if why != "folder gone":
            consistent(data)
        await rig.settle()
        rig.validate()

    run_rig(test)


def test_a_late_deletion_leaves_the_new_value(run_rig: RunRig, tmp_path: Any) -> None:
    """The copy of a key was given up, but its file not yet deleted when the key came again."""

    async def test(rig: Rig) -> None:
        data = SpillBuffer(str(tmp_path / "storage"), target=1)
        data["k"] = np.zeros(SIZE, "u1")
        spill_buffer.adopt(data, rig.store)
        entry = rig.store.entry("k")
        assert entry is not None
        handle = entry.handle
        data["k"] = np.ones(SIZE, "u1")
        assert handle is not None
        handle.free()
        assert (data["k"] == 1).all()  # type: ignore[attr-defined]
        rig.store.forget("k")

    run_rig(test)


def test_distributeds_memory_monitor_watches_the_drained_store(run_rig: RunRig, tmp_path: Any) -> None:
    async def test(rig: Rig) -> None:
        data = SpillBuffer(str(tmp_path / "storage"), target=SIZE * 10)
        assert not hasattr(rig.store, "fast")
        assert not hasattr(rig.store, "evict")
        rig.store[0] = np.zeros(SIZE, "u1")
        await spill_buffer.give_back(rig.store, data, rig.engine)
        assert rig.store.fast is data.fast
        assert rig.store.evict() >= SIZE
        assert list(data.slow) == [0]

    run_rig(test)


def test_another_signature_is_noticed(tmp_path: Any) -> None:
    data = SpillBuffer(str(tmp_path / "storage"), target=1)
    data.set_noevict = lambda key: None  # type: ignore[assignment,method-assign,misc]
    with pytest.raises(SeamMismatch, match="set_noevict"):
        spill_buffer.check(data)
