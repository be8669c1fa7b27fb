"""Memory that several keys share is counted once, and goes with the last of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dask_gpurt.tiers.entry import State
from dask_gpurt.tiers.sharing import root_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Rig


def test_root() -> None:
    x = np.arange(10)
    assert root_of(x) == root_of(x[2:]) == root_of(x.reshape(2, 5)[1:].T) == id(x)
    assert root_of(x.copy()) != id(x)
    assert root_of("a") == id("a")


def test_counted_once(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        engine = rig.engine
        x = np.zeros(10_000, "u1")
        rig.store["part"] = x[:1000]
        small = engine.resident_bytes
        rig.store["x"] = x
        rig.store["same"] = x
        whole = engine.resident_bytes
        assert 10_000 <= whole < 10_500
        assert small < whole
        del rig.store["x"]
        assert engine.resident_bytes == whole  # two others hold it
        engine.validate()
        del rig.store["same"]
        del rig.store["part"]
        assert engine.resident_bytes == 0
        rig.store["copy"] = x.copy()
        rig.store["other"] = x
        assert engine.resident_bytes >= 20_000
        engine.validate()

    run_rig(test)


def test_leaving_one_by_one(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        engine = rig.engine
        x = np.ones(10_000, "u1")
        rig.store["a"], rig.store["b"] = x, x
        del x
        rig.spill_all()
        assert engine.moving_bytes == engine.resident_bytes >= 10_000  # both writers are at it
        await rig.settle()
        engine.shrink(0)
        assert engine.resident_bytes == 0
        assert engine.moving_bytes == 0
        entries = await rig.store.ensure(["a", "b"])
        assert engine.resident_bytes >= 20_000  # what is read back is two objects
        np.testing.assert_array_equal(rig.store["a"], rig.store["b"])
        rig.store.release(entries)
        engine.validate()

    run_rig(test)


def test_another_object_stands_for_a_value(run_rig: Callable[..., None]) -> None:
    """As when what was on a device becomes a plain value."""

    async def test(rig: Rig) -> None:
        engine = rig.engine
        x = np.ones(10_000, "u1")
        rig.store["a"], rig.store["b"] = x, x
        before = engine.resident_bytes
        entry = rig.store.entry("a")
        assert entry is not None
        engine.books.replace(entry, x.copy())
        engine.validate()
        assert engine.resident_bytes > before + 9000  # no longer one memory
        del rig.store["a"], rig.store["b"]
        assert engine.resident_bytes == 0

    run_rig(test)


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])  # a file of its own, a record of a segment
def test_one_copy_serves_all_names_of_an_object(run_rig: Callable[..., None], small_bytes: int) -> None:
    async def test(rig: Rig) -> None:
        engine, counters = rig.engine, rig.engine.counters
        x = np.arange(10_000)
        rig.store["a"] = x
        rig.spill_all()
        await rig.settle()
        engine.shrink(0)
        entries = await rig.store.ensure(["a"])  # the same object: it is still held here
        rig.store["b"] = rig.store["a"]  # a task that gives it another name
        rig.store["view"] = rig.store["a"][:]  # another object, which is written for itself
        b = rig.store.entry("b")
        assert b is not None
        assert b.clean
        rig.store.release(entries)
        del x
        del rig.store["view"]
        used = rig.disk.used_bytes
        rig.spill_all()
        await rig.settle()
        engine.shrink(0)
        assert counters.cumulative["disk-write", "count"] == 1
        assert b.state is State.STORED
        assert rig.disk.used_bytes == used
        rig.validate()
        del rig.store["a"]
        await rig.settle()
        assert len(rig.disk.files()) == 1  # the other needs it
        entries = await rig.store.ensure(["b"])
        np.testing.assert_array_equal(rig.store["b"], np.arange(10_000))
        rig.store.release(entries)
        rig.store["c"] = rig.store["b"]
        del rig.store["b"]
        rig.spill_all()
        await rig.settle()
        assert counters.cumulative["disk-write", "count"] == 1
        rig.validate()
        del rig.store["c"]
        await rig.settle()
        assert rig.disk.used_bytes == 0
        assert rig.disk.files() == []
        rig.validate()

    run_rig(test, small_bytes=small_bytes)


def test_a_copy_made_later_serves_the_other_names_too(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        engine = rig.engine
        rig.store["a"] = np.arange(10_000)
        rig.store["b"] = rig.store["a"]
        a, b = rig.store.entry("a"), rig.store.entry("b")
        assert a is not None
        assert b is not None
        engine.pin(b)
        rig.spill_all()
        await rig.settle()
        engine.shrink(0)
        assert a.state is State.STORED
        assert b.handle is a.handle
        engine.unpin(b)
        assert b in engine.books.victims
        rig.spill_all()
        assert b.state is State.STORED  # at once: it is clean
        assert engine.counters.cumulative["disk-write", "count"] == 1
        rig.validate()
        for name in ("a", "b"):
            entries = await rig.store.ensure([name])
            np.testing.assert_array_equal(rig.store[name], np.arange(10_000))
            rig.store.release(entries)
            del rig.store[name]
            await rig.settle()
        assert rig.disk.files() == []

    run_rig(test, small_bytes=0)


def test_a_damaged_copy_is_lost_for_each_of_its_names(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        rig.store["a"] = np.arange(10_000)
        rig.store["b"] = rig.store["a"]
        for name in ("a", "b"):
            entry = rig.store.entry(name)
            assert entry is not None
            rig.engine.pin(entry)
            rig.spill_all()
            rig.engine.unpin(entry)
        await rig.settle()
        rig.spill_all()
        await rig.settle()
        for name in rig.disk.files():
            with open(os.path.join(rig.disk.directory, name), "r+b") as f:  # noqa: ASYNC230
                f.seek(5000)
                f.write(b"spoilt")
        for name in ("a", "b"):
            entries = await rig.store.ensure([name])
            assert rig.store.is_lost(name)
            rig.store.release(entries)
        await rig.settle()
        assert rig.disk.files() == []
        assert rig.disk.used_bytes == 0

    run_rig(test, small_bytes=0)


def test_a_hundred_thousand_names_of_nothing(run_rig: Callable[..., None]) -> None:
    """What all keys have in common must not cost each of them a look at all others."""

    async def test(rig: Rig) -> None:
        for i in range(20_000):
            rig.store[i] = None
        blocks = {e.block for e in rig.engine.books.entries}
        assert len(blocks) == 1
        entry = rig.store.entry(7)
        assert entry is not None
        assert rig.engine.books.twins(entry) == []
        big = bytes(10_000)
        for i in range(2000):
            rig.store["big", i] = big
        entry = rig.store.entry(("big", 5))
        assert entry is not None
        assert len(rig.engine.books.twins(entry, 8)) <= 8
        assert len(rig.engine.books.twins(entry)) == 1999

    run_rig(test)
