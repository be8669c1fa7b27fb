"""Values whose ``sizeof`` lies, devices that hang at the end, and failures that have to be counted."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dask.sizeof import sizeof
from distributed.spill import SpillBuffer
from distributed.utils_test import async_poll_for
from distributed.worker_state_machine import ExecuteSuccessEvent

from dask_gpurt.tiers.engine import engine as engine_module
from dask_gpurt.tiers.engine.buffer_roots import UNKNOWN_BYTES, as_bytes
from dask_gpurt.tiers.engine.engine import Engine
from dask_gpurt.tiers.engine.memory_gate import Gate
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from dask_gpurt.tiers.stores.task_store import TieredStore
from dask_gpurt.tiers.worker import spill_buffer
from dask_gpurt.tiers.worker.small_tasks import SmallTasks
from dask_gpurt.tiers.worker.task_admission import Outputs
from tests.tiers.conftest import guard

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tiers.conftest import Rig

RunRig = Callable[..., None]
NUMBERS: list[Any] = [-1, -(50 << 20), math.nan, math.inf, -math.inf, np.float64("nan"), np.int32(-5)]
NO_NUMBERS: list[Any] = ["many", "12", None, []]
BAD = NUMBERS + NO_NUMBERS


class Liar:
    """A value of a megabyte whose ``sizeof`` says something else."""

    def __init__(self, said: Any) -> None:
        self.said = said
        self.data = np.ones(1 << 20, "u1")


sizeof.register(Liar, lambda o: o.said)


@pytest.mark.parametrize("said", BAD)
def test_a_size_that_cannot_be_is_none(said: Any) -> None:
    assert as_bytes(said) is None


def test_sizes_that_can_be() -> None:
    assert [as_bytes(n) for n in (0, 7, 1e6 + 0.5, np.int64(3), True, 1 << 62)] == [0, 7, 1_000_000, 3, 1, 1 << 62]


@pytest.mark.parametrize("said", NO_NUMBERS)
def test_a_size_that_is_no_number_is_refused_as_stock_does(run_rig: RunRig, said: Any, tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        for data in (SpillBuffer(str(tmp_path), target=500_000), rig.store):
            with pytest.raises(TypeError):
                data["liar"] = Liar(said)
        assert "liar" not in rig.store
        for i in range(10):
            rig.store[i] = np.full(100_000, i)
        await rig.settle()
        assert len(rig.store.slow) >= 8
        rig.validate()

    run_rig(test, budget=500_000)


@pytest.mark.parametrize("said", NUMBERS)
def test_one_lying_value_does_not_stop_eviction(run_rig: RunRig, said: Any) -> None:
    async def test(rig: Rig) -> None:
        for i in range(3):
            rig.store["liar", i] = Liar(said)
        for i in range(10):
            rig.store[i] = np.full(100_000, i)
        await rig.settle()
        assert rig.engine.books.implausible_sizes == 3
        assert rig.engine.resident_bytes <= 500_000 + UNKNOWN_BYTES
        assert len(rig.store.slow) >= 8
        rig.spill_all()
        await rig.settle()
        rig.engine.shrink(0)
        assert rig.engine.resident_bytes == 0
        assert rig.store["liar", 0].data.sum() == 1 << 20
        rig.validate()

    run_rig(test, budget=500_000)


@pytest.mark.parametrize("said", BAD)
def test_the_gate_forgets_a_size_that_cannot_be(said: Any) -> None:
    async def main() -> None:
        gate = Gate(lambda nbytes: False, lambda nbytes: False)
        with await gate.admit(said):
            assert gate.reserved_bytes == 0
        with await gate.admit(5):
            assert gate.reserved_bytes == 5
        assert gate.reserved_bytes == 0
        outputs = Outputs()
        outputs.learn("a-1", said)
        assert outputs.expected("a-2") is None
        outputs.learn("a-1", 7)
        outputs.learn("a-1", said)
        assert outputs.expected("a-2") == 7

    asyncio.run(main())


@pytest.mark.parametrize("said", BAD)
def test_a_small_task_with_a_size_that_cannot_be_is_no_failure(said: Any) -> None:
    counted, outputs = guard(), Outputs()
    nothing: Any = None
    store: Any = types.SimpleNamespace(host_bytes=lambda value, nbytes: nbytes)
    turns: Any = types.SimpleNamespace(outputs=outputs)
    small = SmallTasks(nothing, nothing, store, turns, counted)
    fields: dict[str, Any] = {"run_id": 1, "value": 1, "start": 0, "stop": 1, "type": Liar, "stimulus_id": "s"}
    small.ended(ExecuteSuccessEvent(key="a-1", nbytes=said, **fields))
    assert counted.part("execute").failures == 0
    assert outputs.expected("a-2") is None
    small.ended(ExecuteSuccessEvent(key="a-1", nbytes=1 << 30, **fields))
    assert outputs.expected("a-2") == 1 << 30


class Stuck:
    """A disk whose writes, and whose end, hang."""

    def __init__(self, inner: DiskTier) -> None:
        self.inner = inner
        self.gate = threading.Event()
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, groups: Any) -> Any:
        self.writes += 1
        assert self.gate.wait(60)
        return self.inner.write(groups)

    def close(self) -> None:
        assert self.gate.wait(60)
        self.inner.close()


def test_a_device_that_hangs_does_not_keep_the_engine_open(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "CLOSE_SECONDS", 0.05)

    async def main() -> None:
        tier = Stuck(DiskTier(str(tmp_path / "a")))
        engine = Engine(tier, budget_bytes=None)  # type: ignore[arg-type]
        store = TieredStore(engine)
        store["a"] = np.ones(100_000)
        engine.shrink(1)
        await async_poll_for(lambda: tier.writes, timeout=30)
        await engine.close()
        assert engine.io.in_flight == 1
        assert store["a"].sum() == 100_000
        tier.gate.set()
        await async_poll_for(lambda: not engine.io.in_flight and tier.inner._folder.closed, timeout=30)
        assert not (tmp_path / "a").exists()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_read_that_nobody_waits_for_does_not_keep_the_engine_open(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that closes cancels its tasks. The thread of one that read a part was then joined, however it hung."""
    monkeypatch.setattr(engine_module, "CLOSE_SECONDS", 0.05)

    async def main() -> None:
        engine = Engine(DiskTier(str(tmp_path / "a")), budget_bytes=None)
        begun, gate = threading.Event(), threading.Event()

        def read() -> None:
            begun.set()
            assert gate.wait(60)

        reading = asyncio.ensure_future(engine.offload(read))
        await async_poll_for(begun.is_set, timeout=30)
        reading.cancel()
        await asyncio.wait([reading])
        assert engine.io.in_flight == 1
        closing = asyncio.ensure_future(engine.close())
        done, _ = await asyncio.wait([closing], timeout=20)
        gate.set()
        await closing
        assert done
        await async_poll_for(lambda: not engine.io.in_flight, timeout=30)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("until", [None, 5], ids=["never", "after some values"])
def test_a_system_that_starts_no_threads(run_rig: RunRig, monkeypatch: pytest.MonkeyPatch, until: int | None) -> None:
    """A container has a limit of them. Results could not be kept, reads did not end, nor did waits for room."""
    start, refuses = threading.Thread.start, True

    def may_start(thread: threading.Thread) -> None:
        if refuses and thread.name.startswith("gpurt-tier"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", may_start)

    async def test(rig: Rig) -> None:
        nonlocal refuses
        for i in range(8):
            refuses = until is None or i < until
            rig.store[i] = np.full(100_000, i)
        with await asyncio.wait_for(rig.engine.admit(100_000), 30):
            pass
        for i in range(8):
            rig.store.release(await asyncio.wait_for(rig.store.ensure([i]), 30))
            assert rig.store[i][0] == i
        await asyncio.wait_for(rig.engine.idle(), 30)
        assert rig.engine.counters.sync_reads == rig.engine.io.failures == 0
        rig.validate()

    run_rig(test, budget=2_500_000)


def test_two_may_wait_until_nothing_is_under_way(run_rig: RunRig) -> None:
    """The second took the first one's place, which then waited for good."""

    async def test(rig: Rig) -> None:
        gate = threading.Event()
        rig.engine.io.submit(gate.wait, 30)
        waiting = [asyncio.ensure_future(rig.engine.idle()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait_for(asyncio.gather(waiting[0], waiting[2]), 30)

    run_rig(test)


def test_a_failed_write_while_giving_back_is_counted(run_rig: RunRig, tmp_path: Any) -> None:
    class Proud(Liar):
        def __reduce__(self) -> Any:
            raise TypeError("not to be pickled")

    async def test(rig: Rig) -> None:
        data = SpillBuffer(str(tmp_path / "storage"), target=1000)
        rig.store["a"], rig.store["b"] = Proud(100_000), np.ones(100_000)
        assert await spill_buffer.give_back(rig.store, data, rig.engine) == []
        assert sorted(data) == ["a", "b"]
        assert list(data.fast) == ["a"]
        assert sum(rig.engine.counters.write_errors.values()) == 1

    run_rig(test)


def test_a_system_that_starts_no_threads_does_not_keep_it_from_closing(
    run_rig: RunRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is raised in there would end Dask's own close of the worker half-way."""

    async def main(rig: Rig) -> None:
        rig.store["x"] = bytes(1000)
        rig.engine.shrink(1000)
        await rig.settle()

        def refuse(*args: Any) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(rig.engine.io.loop, "run_in_executor", refuse)
            await rig.engine.close()
        folders.append(rig.disk.directory)

    folders: list[str] = []
    run_rig(main)
    assert not os.path.exists(folders[0])
