"""Nothing is prepared for evictions while memory is far from full, and all of it is there when it is not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client, Scheduler, Worker, wait
from distributed.utils_test import async_poll_for, gen_cluster

from dask_gpurt.extension import NAME
from dask_gpurt.tiers.engine import entry_table, eviction
from dask_gpurt.tiers.engine.entry import NEVER
from dask_gpurt.tiers.hints import pending_tasks, scheduler
from tests.memory_watch import NO_WATCH
from tests.tiers.conftest import beat
from tests.tiers.hints.test_hints_cluster import SIZE, attach, entry, make, runtime

if TYPE_CHECKING:
    from tests.tiers.conftest import Rig, RunRig


def values(rig: Rig, *names: str) -> None:
    for name in names:
        rig.now += 1
        rig.store[name] = bytes(SIZE)


def test_the_order_begins_with_what_was_used_last(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        values(rig, "a", "b", "c", "d")
        rig.now += 1
        assert rig.store["a"] == bytes(SIZE)
        assert not rig.engine.eviction.pressed
        assert not len(rig.engine.books.victims)
        rig.validate()
        values(rig, "e", "f")
        assert rig.engine.eviction.pressed
        assert len(rig.engine.books.victims) == 6
        values(rig, "g", "h", "i", "j", "k")
        await rig.engine.idle()
        assert list(rig.store.slow) == ["b"], "used before all others"
        rig.validate()

    run_rig(test, budget=10 * (SIZE + 100))


def test_very_many_values_are_ordered_in_several_turns(run_rig: RunRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_table, "ORDERED_AT_ONCE", 10)

    async def test(rig: Rig) -> None:
        books = rig.engine.books
        values(rig, *map(str, range(25)))
        for i in range(15):  # the first that are ordered cannot leave
            value = rig.store.entry(str(i))
            assert value is not None
            rig.engine.pin(value)
        rig.engine.shrink(1)
        assert len(books.unordered) == 15
        rig.validate()
        with await asyncio.wait_for(rig.engine.admit(200 * SIZE), 30):
            await rig.engine.idle()
        assert not books.unordered
        assert "15" in rig.store.slow
        rig.validate()
        rig.engine.shrink(1 << 60)
        await rig.engine.idle()
        assert len(rig.store.slow) == 10

    run_rig(test, budget=100 * (SIZE + 100))


def test_it_ends_when_all_is_here_and_little(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        eviction, told = rig.engine.eviction, []
        eviction.on_pressed.append(lambda: told.append(eviction.pressed))
        values(rig, *"abcdefghijk")
        await rig.engine.idle()
        (below,) = rig.store.slow
        for name in "bcdefghijk":
            del rig.store[name]
        assert list(rig.store.slow) == [below] == ["a"]
        eviction.relax()
        assert eviction.pressed, "a value that is not here may be read ahead"
        assert rig.store["a"] == bytes(SIZE)
        values(rig, "b", "c")
        eviction.relax()
        assert eviction.pressed, "above half of the mark"
        del rig.store["b"]
        eviction.relax()
        assert not eviction.pressed
        await asyncio.sleep(0)
        assert told == [True, False]
        rig.validate()
        del rig.store["a"]
        values(rig, *"defghijklm")
        await rig.engine.idle()
        assert list(rig.store.slow) == ["c"]
        rig.validate()

    run_rig(test, budget=10 * (SIZE + 100))


@pytest.mark.parametrize("how", ["shrink", "adopt", "room", "budget"])
def test_every_way_to_an_eviction_presses(run_rig: RunRig, how: str) -> None:
    async def test(rig: Rig) -> None:
        values(rig, "a", "b", "c")
        assert not rig.engine.eviction.pressed
        if how == "shrink":
            rig.engine.shrink(1)
        elif how == "room":
            rig.engine.set_room(SIZE)
        elif how == "budget":
            rig.engine.budget_bytes = SIZE
            rig.engine.balance()
        else:
            rig.store.adopt("z", SIZE, SimpleNamespace(nbytes=1))  # type: ignore[arg-type]
        assert rig.engine.eviction.pressed

    run_rig(test, budget=10 * (SIZE + 100))


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=NO_WATCH)
async def test_tiny_tasks_pay_for_nothing(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    """No messages about next uses, no listener to transitions, nobody at the gate."""
    plugin = await attach(s)
    asked = []
    for w in (a, b):
        engine = runtime(w).engine
        real = engine.gate.admit

        async def admit(nbytes: int, real: Any = real) -> Any:
            asked.append(nbytes)
            return await real(nbytes)

        engine.gate.admit = admit  # type: ignore[method-assign]
        await beat(w)
    inputs = c.map(lambda i: i, range(5))
    done = c.map(lambda i, inputs: i + len(inputs), range(200), inputs=inputs)
    assert await c.gather(done) == [i + 5 for i in range(200)]
    # Only what goes from worker to worker, once at each side: tasks whose inputs are in memory wait for nothing.
    assert len(asked) <= 20
    hints = plugin.statistics()["next_use"]
    assert hints["sent"] == {"hints": 0, "messages": 0}
    assert hints["transitions"] == 0
    for w in (a, b):
        assert pending_tasks.NAME not in w.plugins
        assert "next_use" not in s.workers[w.address].metrics[NAME]
        assert all(e.pins == 0 for e in runtime(w).engine.books.entries)
        runtime(w).engine.validate()


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": "1 MB"}, config=NO_WATCH)
async def test_hints_come_and_go_with_the_pressure(c: Client, s: Scheduler, a: Worker) -> None:
    """They are asked for when memory is half full, sent for all that is there, and end when it is free again."""
    plugin = await attach(s)
    eviction = runtime(a).engine.eviction
    for _ in range(2):
        few = c.map(make, range(5), pure=False)
        await wait(few)
        assert not eviction.pressed
        many = c.map(make, range(35), pure=False)
        await wait(many)
        assert eviction.pressed
        await async_poll_for(lambda: runtime(a).statistics()["hints"]["active"], timeout=20)
        keys = list(a.data)
        await async_poll_for(lambda keys=keys: all(entry(a, k).next_use == NEVER for k in keys), timeout=20)
        assert pending_tasks.NAME in a.plugins
        del few, many
        await async_poll_for(lambda: not s.tasks, timeout=20)
        await async_poll_for(lambda: not a.data, timeout=20)
        eviction.relax()
        assert not eviction.pressed
        await beat(a)
        await async_poll_for(lambda: not runtime(a).statistics()["hints"]["active"], timeout=20)
        assert pending_tasks.NAME not in a.plugins
        await asyncio.sleep(2 * scheduler.LOOK_SECONDS)
        assert plugin.statistics()["next_use"]["workers"] == 0
    await plugin.uninstall()
    assert set(s.workers) == {a.address}
    assert scheduler.OP not in a.stream_handlers, "its stream was ended, though it had paused"


def test_many_values_that_leave_for_free_do_so_in_several_turns(run_rig: RunRig, monkeypatch: Any) -> None:
    """50,000 of them held the event loop for 1.3 s."""
    monkeypatch.setattr(eviction, "DROPS", 10)

    async def test(rig: Rig) -> None:
        for i in range(35):
            rig.store[i] = bytes(10_000)
        rig.spill_all()
        await rig.settle()
        rig.engine.shrink(0)
        rig.store.release(await rig.store.ensure(range(35)))
        rig.engine.budget_bytes = 100_000
        asks = asyncio.ensure_future(rig.engine.admit(100_000))  # room for it is there after four turns
        await asyncio.sleep(0)
        assert len(rig.store.slow) == 10
        assert not asks.done()
        with await asyncio.wait_for(asks, 30):
            assert len(rig.store.slow) > 20
        assert rig.engine.gate.forced == 0
        assert rig.engine.counters.cumulative["disk-write", "count"] == 35
        rig.validate()

    run_rig(test)
