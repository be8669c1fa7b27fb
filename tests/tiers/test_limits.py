"""What a worker's settings make of its memory limit."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from distributed.core import Status
from distributed.utils_test import async_poll_for

from dask_gpurt.config import Settings
from dask_gpurt.memory import reclaim
from dask_gpurt.memory.arenas import Arenas
from dask_gpurt.memory.pages import SMALLEST, pages
from dask_gpurt.model import safe_mode
from dask_gpurt.tiers.engine.entry import State
from dask_gpurt.tiers.limits import limits_of
from dask_gpurt.tiers.worker import memory_watch
from dask_gpurt.tiers.worker.memory_watch import MemoryWatch
from tests.memory.test_reuse import Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.tiers.conftest import Rig

    RunRig = Callable[..., None]


def worker(limit: int | None, target: Any = 0.6, spill: Any = 0.7, pause: Any = 0.8) -> Any:
    manager = SimpleNamespace(
        memory_limit=limit,
        memory_target_fraction=target,
        memory_spill_fraction=spill,
        memory_pause_fraction=pause,
        max_spill=False,
        memory_monitor_interval=0.1,
    )
    return SimpleNamespace(
        memory_manager=manager, state=SimpleNamespace(nthreads=1, executing_count=0), status=Status.running
    )


def watching(rig: Rig, size: list[int], limit_bytes: int) -> MemoryWatch:
    """The watch of a worker whose process has `size[0]` bytes; it looks when it is asked to."""
    fake = worker(limit_bytes)
    fake.monitor = SimpleNamespace(get_process_memory=lambda: size[0])
    watch = MemoryWatch(fake, rig.engine, limits_of(fake, Settings.load().tiers, shards_only=False))
    watch.stop()
    return watch


@pytest.mark.parametrize(
    ("spill", "pause", "ceiling"),
    [
        (0.7, 0.8, 700),  # values alone never bring a process to where it is told to shrink
        (0.8, 0.8, 750),  # nor to where distributed pauses it
        (0.7, 0.7, 650),
        (0.9, False, 800),  # nor to where the nanny ends it
    ],
)
def test_values_leave_room_in_the_process(spill: Any, pause: Any, ceiling: int) -> None:
    limits = limits_of(worker(1000, spill=spill, pause=pause), Settings.load().tiers, shards_only=False)
    assert limits.ceiling_bytes == pytest.approx(ceiling, abs=1)
    assert (limits.budget_bytes, limits.watch_low_bytes) == (600, 600)
    assert limits.watch_high_bytes == pytest.approx(1000 * spill, abs=1)


@pytest.mark.parametrize(("limit", "spill"), [(None, 0.7), (1000, False)])
def test_nothing_is_watched_without_a_limit_or_a_mark(limit: int | None, spill: Any) -> None:
    limits = limits_of(worker(limit, spill=spill), Settings.load().tiers, shards_only=False)
    assert limits.watch_high_bytes is limits.ceiling_bytes is None


def test_an_alarm_gives_back_what_is_free_and_moves_values(run_rig: RunRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when no value is left: what is free in the allocator alone can keep a worker paused for good."""
    trimmed = threading.Semaphore(0)
    libc = SimpleNamespace(malloc_trim=lambda nbytes: trimmed.release())
    monkeypatch.setattr(memory_watch, "arenas", Arenas(libc))
    monkeypatch.setattr(memory_watch, "_TRIM_SECONDS", 30.0)  # longer than what comes between the two looks may take
    given = threading.Semaphore(0)

    def broken() -> None:
        raise OSError("not now")

    monkeypatch.setattr(reclaim, "_givers", [])
    monkeypatch.setattr(reclaim, "errors", 0)
    for giver in (broken, given.release, pages.trim, broken):
        reclaim.register(giver)
    assert len(reclaim._givers) == 3
    at_it = threading.Event()
    reclaim.register(lambda: at_it.wait(60))

    async def main(rig: Rig) -> None:
        size = [50_000_000]
        watch = watching(rig, size, 100_000_000)
        rig.store["x"] = bytes(5_000_000)
        pages.take(SMALLEST)
        assert pages.idle_bytes > 0
        watch.look()
        assert (watch.alarms, watch.trims) == (0, 0)
        size[0] = 90_000_000
        watch.look()
        await rig.settle()
        await async_poll_for(lambda: pages.idle_bytes == 0, timeout=10)
        assert rig.store.entry("x").state is State.STORED  # type: ignore[union-attr]
        watch.look()  # with nothing in memory, and at once
        assert (watch.alarms, watch.trims) == (2, 1)
        watch._trimmed -= 60
        watch.look()
        assert watch.trims == 1  # the first is still at it
        at_it.set()
        assert watch._trimming is not None
        await watch._trimming
        watch.look()
        assert watch.trims == 2
        for _ in range(2):
            assert await asyncio.to_thread(trimmed.acquire, timeout=60)
            assert await asyncio.to_thread(given.acquire, timeout=60)
        assert reclaim.errors >= 1
        await watch.end()  # else its allowance stays in this process

    run_rig(main, budget=100_000_000)


def test_memory_that_waits_goes_before_values(run_rig: RunRig) -> None:
    """It counted as used, so values left for it."""

    async def main(rig: Rig) -> None:
        fake = worker(100_000_000)
        fake.monitor = SimpleNamespace(get_process_memory=lambda: 70_000_000 + idle)
        watch = MemoryWatch(fake, rig.engine, limits_of(fake, Settings.load().tiers, shards_only=False))
        watch.stop()
        pages.take(SMALLEST)
        idle = pages.idle_bytes
        assert idle > 0
        rig.store["x"] = bytes(5_000_000)
        watch.look()
        await async_poll_for(lambda: pages.idle_bytes == 0, timeout=10)
        assert (watch.alarms, rig.engine.eviction.used_bytes) == (0, 5_000_000)
        assert rig.engine.eviction._room_bytes == pytest.approx(5_000_000)
        watch.look()  # with nothing left that waits
        assert watch.alarms == 1
        await watch.end()

    run_rig(main, budget=100_000_000)


def test_what_is_kept_is_among_what_is_given_back() -> None:
    from dask_gpurt.memory.malloc import heap

    assert {heap.give_back, pages.trim} <= set(reclaim._givers)


@pytest.mark.parametrize(
    ("limit", "size", "kept"),
    [
        (280 << 20, 172 << 20, 6 << 20),  # of 24 MiB that values may take
        (280 << 20, 250 << 20, 0),
        (1 << 30, 180 << 20, int(0.08 * (1 << 30))),
    ],
)
def test_memory_kept_for_later_is_a_part_of_what_values_may_take(
    run_rig: RunRig, limit: int, size: int, kept: int
) -> None:
    """64 MiB kept on a worker with room for 24: each value that was read brought it above its marks."""

    async def main(rig: Rig) -> None:
        pages.trim()
        fake = worker(limit)
        fake.monitor = SimpleNamespace(get_process_memory=lambda: size)
        watch = MemoryWatch(fake, rig.engine, limits_of(fake, Settings.load().tiers, shards_only=False))
        watch.stop()
        watch.look()
        assert memory_watch._allowed[watch] == pytest.approx(kept, abs=2)
        await watch.end()

    run_rig(main, budget=limit // 2)


def test_values_leave_where_the_system_starts_no_thread_to_give_memory_back(
    run_rig: RunRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(rig: Rig) -> None:
        fake = worker(100_000_000)
        fake.status = Status.paused
        fake.monitor = SimpleNamespace(get_process_memory=lambda: 95_000_000)
        watch = MemoryWatch(fake, rig.engine, limits_of(fake, Settings.load().tiers, shards_only=False))
        watch.stop()
        pages.take(SMALLEST)
        rig.store["x"] = bytes(5_000_000)

        def refuse(executor: Any, function: Any, *args: Any) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(rig.engine.io.loop, "run_in_executor", refuse)
            watch.look()
            assert pages.idle_bytes == 0
        assert (watch.alarms, watch.trims) == (1, 1)
        await rig.settle()
        assert rig.store.entry("x").state is State.STORED  # type: ignore[union-attr]
        await watch.end()

    run_rig(main, budget=100_000_000)


def test_a_pyarrow_that_is_being_imported_has_no_pool_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    trimmed: list[bool] = []
    monkeypatch.setattr(memory_watch, "arenas", SimpleNamespace(trim=lambda: trimmed.append(True)))
    memory_watch._give_back()
    assert trimmed == [True]


@pytest.mark.parametrize("wanted", [True, False])
def test_what_tasks_free_is_used_again_as_the_setting_says(
    wanted: bool, run_rig: RunRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process()
    monkeypatch.setattr(memory_watch, "reuse", process.reuse)

    async def main(rig: Rig) -> None:
        fake = worker(1_000_000_000)
        fake.monitor = SimpleNamespace(get_process_memory=lambda: 100_000_000)
        tiers = Settings.load({"tiers.reuse-memory": wanted}).tiers
        watch = MemoryWatch(fake, rig.engine, limits_of(fake, tiers, shards_only=False))
        watch.look()
        assert process.reuse.on is wanted
        safe_mode.keep(fake, {"tiers"})
        watch.look()
        assert not process.reuse.on
        safe_mode.keep(fake, ())
        await async_poll_for(lambda: not watch._is_trimming(), timeout=10)
        watch.look()
        assert process.reuse.on is wanted
        await watch.end()
        assert not process.reuse.on

    run_rig(main)


def test_the_allocator_is_not_asked_while_it_gives_back(run_rig: RunRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the locks of its arenas for that, and the event loop would wait for them."""
    process, at_it = Process(), threading.Event()
    asked: list[int] = []
    monkeypatch.setattr(process.reuse, "_allocated_bytes", lambda: asked.append(1) or 0)
    monkeypatch.setattr(memory_watch, "reuse", process.reuse)
    monkeypatch.setattr(memory_watch, "arenas", SimpleNamespace(trim=lambda: at_it.wait(60)))

    async def main(rig: Rig) -> None:
        size = [100_000_000]
        watch = watching(rig, size, 1_000_000_000)
        watch.look()
        watch.look()
        size[0] = 300_000_000
        watch.look()  # more than a little is free
        assert (len(asked), process.reuse.trims) == (2, 1)
        watch.look()
        assert len(asked) == 2
        at_it.set()
        await async_poll_for(lambda: not watch._is_trimming(), timeout=10)
        assert len(asked) == 3  # in that thread, as it ended
        watch.look()
        assert len(asked) == 4
        assert process.reuse.trims == 1  # what would not go counts as the process's own
        await watch.end()

    run_rig(main)


def test_what_is_promised_and_partly_there_counts_once(run_rig: RunRig) -> None:
    """The result of a task that runs: its bytes are in the process, and it is promised room for them."""

    async def main(rig: Rig) -> None:
        size = [100_000_000]
        fake = worker(1_000_000_000)
        fake.monitor = SimpleNamespace(get_process_memory=lambda: size[0])
        limits = limits_of(fake, Settings.load().tiers, shards_only=False)
        assert limits.ceiling_bytes is not None
        watch = MemoryWatch(fake, rig.engine, limits)
        watch.stop()
        rig.engine.budget_bytes = limits.budget_bytes

        def own_bytes() -> float:
            watch.look()
            room = rig.engine.eviction._room_bytes
            assert room is not None
            return limits.ceiling_bytes - room

        assert own_bytes() == 100_000_000
        promise = await rig.engine.admit(60_000_000)
        assert own_bytes() == 100_000_000  # it has none of it yet
        size[0] = 160_000_000
        assert own_bytes() == 100_000_000
        size[0] = 190_000_000
        assert own_bytes() == 130_000_000  # the task has more in hand
        promise.release()
        assert own_bytes() == 190_000_000
        await watch.end()

    run_rig(main)
