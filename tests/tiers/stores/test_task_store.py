"""`TieredStore` and its engine on a real folder: the mapping, eviction, and what goes on while I/O is under way."""

# ruff: noqa: ASYNC110
from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from dask_gpurt.errors import LostData
from dask_gpurt.tiers.engine.counters import LoopTime
from dask_gpurt.tiers.engine.entry import TABLE, Entry, IllegalMove, State
from dask_gpurt.tiers.engine.eviction import LEAST
from dask_gpurt.tiers.storage.codec import PickleCodec, flat
from tests.tiers.stores.mapping import check_mapping

if TYPE_CHECKING:
    from tests.tiers.conftest import Rig

RunRig = Callable[..., None]
KB = 1000


def value(i: int, n: int = 10_000) -> np.ndarray[Any, Any]:
    return np.full(n, i, "u1")


def test_dict_conforms() -> None:
    check_mapping(dict)


@pytest.mark.parametrize("budget", [None, 0, 10_000])
def test_conforms(run_rig: RunRig, budget: int | None) -> None:
    async def test(rig: Rig) -> None:
        check_mapping(lambda: rig.store)
        await rig.settle()
        rig.validate()

    run_rig(test, budget=budget)


def test_spills_in_lru_order_and_loads(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        for i in range(10):
            rig.store[i] = value(i)
            await rig.settle()
        assert sorted(rig.store.slow) == [0, 1, 2, 3, 4]
        assert rig.store.spilled_total.memory == sum(rig.store.entry(i).nbytes for i in range(5))
        assert rig.store.spilled_total.disk == rig.disk.used_bytes > 50_000
        assert sorted(rig.store.memory) == [5, 6, 7, 8, 9]
        pinned = await rig.store.ensure(range(3))
        for i in range(3):
            assert (rig.store[i] == i).all()
        assert rig.engine.counters.sync_reads == 0
        rig.store.release(pinned)
        await rig.settle()
        # 0-2 are clean now: they go in their turn, after 8 and 9, but without a write
        writes = rig.engine.counters.cumulative["disk-write", "count"]
        for i in range(4):
            rig.store[f"new{i}"] = value(1)
            await rig.settle()
        assert sorted(rig.store.memory, key=str) == [2, "new0", "new1", "new2", "new3"]
        assert rig.engine.counters.cumulative["disk-write", "count"] == writes + 2
        assert rig.engine.counters.clean_drops == 2
        rig.validate()

    run_rig(test, budget=52_000)


def test_next_use(run_rig: RunRig) -> None:
    """Victims: no known use first, then the farthest."""

    async def test(rig: Rig) -> None:
        for i in range(6):
            rig.store[i] = value(i)
        for i, use in {0: (0, 9), 1: (0, 1), 2: (0, 5), 3: None, 4: (0, 7), 5: (0, 2)}.items():
            rig.hint(i, use)
        order = []
        for _ in range(6):
            rig.engine.shrink(1)
            await rig.settle()
            order += [k for k in rig.store.slow if k not in order]
        assert order == [3, 0, 4, 2, 5, 1]
        rig.validate()

    run_rig(test)


def test_small_values_go_last(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store["small"] = 1
        rig.store["big"] = value(1)
        rig.engine.shrink(1)
        await rig.settle()
        assert list(rig.store.slow) == ["big"]
        rig.engine.shrink(1)
        await rig.settle()
        assert sorted(rig.store.slow) == ["big", "small"]

    run_rig(test)


def test_pinned_values_stay(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store["a"] = value(1)
        pinned = await rig.store.ensure(["a", "absent"])
        assert [e.key for e in pinned] == ["a"]
        rig.spill_all()
        await rig.settle()
        assert len(rig.store.slow) == 0
        rig.store.release(pinned)
        await rig.settle()
        assert list(rig.store.slow) == ["a"]

    run_rig(test)


class SlowOs:
    """`os`, whose pwritev and preadv of more than one block wait for an event."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name in ("pwritev", "preadv"):

            def wait(fd: int, buffers: list[memoryview], *args: Any) -> Any:
                if sum(map(len, buffers)) > 4096:  # not the probe for direct I/O
                    assert self.gate.wait(30)
                return real(fd, buffers, *args)

            return wait
        return real


def test_pinned_while_moving_is_kept_with_its_copy(run_rig: RunRig) -> None:
    slow = SlowOs()

    async def test(rig: Rig) -> None:
        rig.store["a"] = value(1)
        rig.spill_all()
        assert rig.engine.states()["moving"] == 1
        pinned = await asyncio.wait_for(rig.store.ensure(["a"]), 30)  # does not wait for the write
        assert (rig.store["a"] == 1).all(), "readable while it is written"
        slow.gate.set()
        await rig.settle()
        assert pinned[0].clean
        rig.validate()
        rig.store.release(pinned)
        rig.spill_all()
        assert list(rig.store.slow) == ["a"], "dropped at once, without a write"

    run_rig(test, os_layer=slow)


def test_what_the_process_needs_for_itself_is_not_filled_with_values(run_rig: RunRig) -> None:
    """The mark comes down with the room that the process leaves."""
    slow = SlowOs()

    async def test(rig: Rig) -> None:
        size = value(1).nbytes
        rig.engine.budget_bytes = 4 * size
        rig.engine.set_room(3 * size)
        rig.store["a"] = value(1)
        rig.store["b"] = value(2)
        rig.spill_all()
        assert rig.engine.states()["moving"] > 0, "without writes under way nobody waits"
        rig.engine.shrink(0)
        (await asyncio.wait_for(rig.engine.admit(size), 30)).release()
        waits = asyncio.ensure_future(rig.engine.admit(2 * size))
        await asyncio.sleep(0)
        assert not waits.done(), "two there and two more are within the budget, but more than there is room for"
        rig.engine.set_room(None)
        (await asyncio.wait_for(waits, 30)).release()
        rig.engine.set_room(-size)
        slow.gate.set()
        await rig.settle()
        (await asyncio.wait_for(rig.engine.admit(2 * size), 30)).release()
        rig.validate()

    run_rig(test, os_layer=slow)


def test_some_values_stay_however_little_room_the_process_leaves(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        size = value(1).nbytes
        rig.engine.budget_bytes = int(2.5 * size / LEAST)
        for i in range(6):
            rig.store[f"v{i}"] = value(i)
        await rig.settle()
        assert rig.engine.resident_bytes == 6 * size
        rig.engine.set_room(4 * size)
        await rig.settle()
        assert rig.engine.resident_bytes == 4 * size
        rig.engine.set_room(-size)
        await rig.settle()
        assert rig.engine.resident_bytes == 2 * size
        rig.validate()

    run_rig(test)


@pytest.mark.parametrize("replace", [False, True])
def test_deleted_while_moving(run_rig: RunRig, replace: bool) -> None:
    slow = SlowOs()

    async def test(rig: Rig) -> None:
        rig.store["a"] = value(1)
        rig.spill_all()
        assert rig.engine.states()["moving"] == 1
        if replace:
            rig.store["a"] = value(2)
        else:
            del rig.store["a"]
        slow.gate.set()
        await rig.settle()
        rig.engine.shrink(0)
        assert ("a" in rig.store) is replace
        if replace:
            assert (rig.store["a"] == 2).all()
        else:
            assert rig.disk.files() == []
        await rig.settle()
        rig.validate()

    run_rig(test, os_layer=slow)


@pytest.mark.parametrize("how", ["delete", "read", "replace"])
def test_interrupted_while_loading(run_rig: RunRig, how: str) -> None:
    slow = SlowOs()
    slow.gate.set()

    async def test(rig: Rig) -> None:
        rig.store["a"] = value(1)
        rig.spill_all()
        await rig.settle()
        slow.gate.clear()
        waiting = asyncio.ensure_future(rig.store.ensure(["a"]))
        while rig.engine.states()["loading"] == 0:
            await asyncio.sleep(0)
        if how == "delete":
            del rig.store["a"]
        elif how == "replace":
            rig.store["a"] = value(2)
        else:
            threading.Timer(0.05, slow.gate.set).start()
            assert (rig.store["a"] == 1).all()
            assert rig.engine.counters.sync_reads == 1
        slow.gate.set()
        rig.store.release(await asyncio.wait_for(waiting, 30))
        await rig.settle()
        assert ("a" in rig.store) is (how != "delete")
        if how == "replace":
            assert (rig.store["a"] == 2).all()
        rig.validate()

    run_rig(test, os_layer=slow)


def test_two_wait_for_one_load_and_one_is_cancelled(run_rig: RunRig) -> None:
    slow = SlowOs()
    slow.gate.set()

    async def test(rig: Rig) -> None:
        rig.store["a"] = value(1)
        rig.spill_all()
        await rig.settle()
        slow.gate.clear()
        first, second = (asyncio.ensure_future(rig.store.ensure(["a"])) for _ in range(2))
        while rig.store.entry("a").pins < 2 or rig.engine.states()["loading"] == 0:
            await asyncio.sleep(0)
        first.cancel()
        while not first.done():
            await asyncio.sleep(0)
        slow.gate.set()
        pinned = await asyncio.wait_for(second, 30)
        assert pinned[0].pins == 1
        assert (rig.store["a"] == 1).all()
        assert rig.engine.counters.cumulative["disk-read", "count"] == 1
        rig.store.release(pinned)
        rig.validate()

    run_rig(test, os_layer=slow)


def test_object_still_held_is_not_read_again(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        held = value(1)
        rig.store["a"] = held
        rig.spill_all()
        await rig.settle()
        assert list(rig.store.slow) == ["a"]
        rig.store.release(await rig.store.ensure(["a"]))
        assert rig.store["a"] is held
        assert rig.engine.counters.cumulative["disk-read", "count"] == 0
        rig.validate()

    run_rig(test)


def test_reading_from_another_thread(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store["a"], rig.store["b"] = value(1), value(2)
        rig.engine.shrink(1)
        await rig.settle()
        assert list(rig.store.slow) == ["a"]
        got = await asyncio.to_thread(lambda: (rig.store["a"], rig.store["b"]))
        assert (got[0] == 1).all()
        assert (got[1] == 2).all()
        assert list(rig.store.slow) == ["a"], "books are the loop's alone"
        rig.validate()

    run_rig(test)


def test_setting_and_deleting_from_another_thread(run_rig: RunRig) -> None:
    """A task that keeps values of its own in ``get_worker().data``. Who hears of the moves expects the loop."""

    async def test(rig: Rig) -> None:
        rig.engine.log.listener = lambda key, after: heard.add(threading.get_ident())

        def task() -> None:
            for i in range(20):
                rig.store[i] = value(i)
            for i in range(5):
                del rig.store[i]
            with pytest.raises(KeyError):
                del rig.store[0]

        await asyncio.to_thread(task)
        await rig.settle()
        assert heard == {threading.get_ident()}
        assert list(rig.store) == list(range(5, 20))
        assert len(rig.store.slow) >= 10
        assert all((rig.store[i] == i).all() for i in range(5, 20))
        await rig.settle()  # to read them drove others out
        rig.validate()

    heard: set[int] = set()
    run_rig(test, budget=52_000)


def test_reading_from_another_thread_what_comes_meanwhile(run_rig: RunRig) -> None:
    """The value was looked at first, then the state: None, as it was not here, was taken for the value."""

    async def test(rig: Rig) -> None:
        loop = asyncio.get_running_loop()
        loop_thread = threading.get_ident()

        async def load() -> None:
            rig.store.release(await rig.store.ensure(["a"]))

        class Comes(Entry):
            @property
            def value(self) -> Any:
                held = self.__dict__["value"]
                if threading.get_ident() != loop_thread:
                    asyncio.run_coroutine_threadsafe(load(), loop).result()
                return held

            @value.setter
            def value(self, value: Any) -> None:
                self.__dict__["value"] = value

        rig.store["a"], rig.store["none"] = value(1), None
        rig.spill_all()
        await rig.settle()
        rig.engine.shrink(0)
        entry = rig.store.entry("a")
        assert entry is not None
        entry.__class__ = Comes
        assert (await asyncio.to_thread(rig.store.__getitem__, "a") == 1).all()
        assert entry.in_memory
        assert await asyncio.to_thread(rig.store.__getitem__, "none") is None
        rig.validate()

    run_rig(test)


def test_reading_from_another_thread_what_was_removed(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store["a"] = value(1)
        entry = rig.store.entry("a")
        assert entry is not None
        del rig.store["a"]
        with pytest.raises(LostData):
            await asyncio.to_thread(rig.engine.get, entry)

    run_rig(test)


def test_admission_is_first_come_first_served_and_ends(run_rig: RunRig) -> None:
    slow = SlowOs()

    async def test(rig: Rig) -> None:
        for i in range(20):
            rig.store[i] = value(i)
        order: list[int] = []

        async def ask(n: int) -> None:
            with await rig.engine.admit(n):
                order.append(n)

        tasks = [asyncio.ensure_future(ask(n)) for n in (30_000, 1, 2)]
        while len(rig.engine.gate) < 3:
            await asyncio.sleep(0)
        assert order == []
        tasks[1].cancel()
        slow.gate.set()
        await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2]), 30)
        assert order == [30_000, 2]
        assert rig.engine.gate.wait_seconds > 0
        await rig.settle()
        assert rig.engine.gate.reserved_bytes == 0
        rig.validate()

    run_rig(test, budget=50_000, os_layer=slow)


def test_admission_never_waits_for_what_cannot_come(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        for i in range(20):
            rig.store[i] = value(i)
        pinned = await asyncio.wait_for(rig.store.ensure(range(20)), 30)
        forced = rig.engine.gate.forced
        with await asyncio.wait_for(rig.engine.admit(10**9), 30):
            assert rig.engine.gate.forced == forced + 1
        rig.store.release(pinned)

    run_rig(test, budget=50_000)


def test_files_are_private(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store["secret-name"] = value(1)
        rig.spill_all()
        await rig.settle()
        (name,) = rig.disk.files()
        assert "secret" not in name
        assert stat.S_IMODE(os.stat(rig.disk.directory).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(os.path.join(rig.disk.directory, name)).st_mode) == 0o600

    old = os.umask(0)
    try:
        run_rig(test)
    finally:
        os.umask(old)


def test_cumulative_metrics_have_the_labels_of_stock(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store["a"] = value(1)
        assert rig.store["a"][0] == 1
        rig.spill_all()
        await rig.settle()
        assert rig.store["a"][0] == 1
        assert set(rig.store.cumulative_metrics) == {
            (label, unit)
            for label, units in {
                "disk-write": ("seconds", "count", "bytes"),
                "disk-read": ("seconds", "count", "bytes"),
                "memory-read": ("count", "bytes"),
                "serialize": ("seconds",),
                "deserialize": ("seconds",),
            }.items()
            for unit in units
        }
        assert not hasattr(rig.store, "fast")
        assert not hasattr(rig.store, "evict")

    run_rig(test)


class Custom:
    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.x == self.x

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "obj",
    [
        np.arange(12).reshape(3, 4).T,
        np.arange(100)[::3],
        np.broadcast_to(np.ones(3), (1000, 3)),
        np.array(["a", None], object),
        np.ma.masked_array([1, 2], [0, 1]),
        np.empty(0),
        np.array(["2020", "NaT"], "M8[s]"),
        pd.DataFrame({"a": [1, 2], "b": ["x", None], "c": pd.Categorical(["u", "v"])}),
        pd.Series(["x", "y"], dtype="str"),
        b"x" * 5000,
        bytearray(b"abc"),
        {"k": [1, {"z": np.ones(3)}]},
        Custom(4),
        None,
    ],
    ids=lambda v: type(v).__name__,
)
def test_codec_round_trip(obj: Any) -> None:
    codec = PickleCodec()
    frames = [memoryview(bytearray(flat(f))) for _, group in codec.encode(obj) for f in group]
    got = codec.decode(frames)
    assert type(got) is type(obj)
    if isinstance(obj, np.ndarray):
        np.testing.assert_array_equal(got, obj)
        assert got.flags.writeable == obj.flags.writeable
    elif isinstance(obj, (pd.DataFrame, pd.Series)):
        (pd.testing.assert_frame_equal if isinstance(obj, pd.DataFrame) else pd.testing.assert_series_equal)(got, obj)
    else:
        assert str(got) == str(obj) or got == obj


def test_codec_does_not_blow_up_a_broadcast_array() -> None:
    big = np.broadcast_to(np.ones(3), (100_000, 3))
    assert sum(flat(f).nbytes for _, group in PickleCodec().encode(big) for f in group) < 10_000


def test_codec_takes_what_stock_takes() -> None:
    """Lambdas, local classes and modules go through cloudpickle."""
    codec = PickleCodec()

    class Local:
        y = 5

    def again(obj: Any) -> Any:
        return codec.decode([memoryview(bytearray(flat(f))) for _, g in codec.encode(obj) for f in g])

    assert again(lambda x: x + 1)(2) == 3
    assert again(Local()).y == 5
    assert isinstance(again(os), types.ModuleType)


def test_illegal_moves_are_refused_with_the_story(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        rig.store["a"] = value(1)
        entry: Entry = rig.store.entry("a")
        events = {event for _, event in TABLE}
        for event in events:
            if (State.RESIDENT, event) not in TABLE:
                with pytest.raises(IllegalMove, match=r"'a' is resident, where .* Story: -"):
                    rig.engine.books.move(entry, event)
        assert entry.state is State.RESIDENT
        rig.engine.validate()
        assert [e[3] for e in rig.engine.log.story("a")] == ["add"]

    run_rig(test)


def test_many_keys_are_cheap(run_rig: RunRig) -> None:
    """No operation looks at all keys: 20,000 insertions over budget need no more than a few per key."""

    async def test(rig: Rig) -> None:
        looks = 0
        real = rig.engine.books.victims.pop_dirty

        def counted(*, small: bool) -> Any:
            nonlocal looks
            looks += 1
            return real(small=small)

        rig.engine.books.victims.pop_dirty = counted
        for i in range(20_000):
            rig.store[i] = i
        for i in range(20_000):
            del rig.store[i]
        assert looks <= 3 * 20_000
        assert rig.engine.resident_bytes == 0

    run_rig(test, budget=100_000)


def test_time_on_the_loop_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("dask_gpurt.tiers.engine.counters.time", types.SimpleNamespace(perf_counter=lambda: now))
    loop_time = LoopTime()
    with loop_time:
        now += 1
        with loop_time:
            now += 2
        now += 4
    now += 8
    with contextlib.suppress(ZeroDivisionError), loop_time:
        now += 16
        raise ZeroDivisionError
    with loop_time:
        now += 1
    assert (loop_time.sum_seconds, loop_time.max_seconds) == (24, 16)


def test_every_way_into_our_code_is_timed(run_rig: RunRig) -> None:
    """Each step adds to the sum, and the longest hold is part of it."""

    async def test(rig: Rig) -> None:
        loop_time = rig.engine.counters.loop_time

        def spent() -> float:
            got = rig.engine.counters.to_dict()["loop_blocked_seconds"]
            assert got == {"sum": loop_time.sum_seconds, "max": loop_time.max_seconds}
            assert 0 < got["max"] <= got["sum"]
            return float(got["sum"])

        rig.engine.eviction.press()  # else nothing is done that would be worth its measurement
        rig.store["a"] = value(1)
        added = spent()
        rig.spill_all()
        began = spent()
        assert began > added
        await rig.settle()
        written = spent()
        assert written > began
        rig.engine.shrink(0)
        before = spent()
        assert (rig.store["a"] == 1).all()
        assert rig.engine.counters.sync_reads == 1
        assert spent() > before

    run_rig(test)


def test_very_many_keys_that_are_freed_at_once(run_rig: RunRig) -> None:
    """One piece of work for each is too much for the event loop. One copy that cannot be deleted is counted."""

    async def test(rig: Rig) -> None:
        for i in range(1000):
            rig.store[i] = bytes(5000)
        rig.spill_all()
        await rig.settle()
        assert len(rig.store.slow) == 1000
        submitted = []
        writers = rig.engine.io._writers
        submit = writers.submit
        writers.submit = lambda *args: submitted.append(args) or submit(*args)  # type: ignore[method-assign]
        entry = rig.store.entry(0)
        assert entry is not None
        handle = entry.handle
        assert handle is not None

        def broken() -> None:
            handle.free()
            raise OSError("no")

        entry.handle = types.SimpleNamespace(free=broken, nbytes=handle.nbytes)  # type: ignore[assignment]
        rig.store.clear()
        await rig.engine.idle()
        assert rig.disk.used_bytes == 0
        assert len(submitted) < 100
        assert rig.engine.io.failures == 1

    run_rig(test)
