"""Memory that several keys share is counted once, and goes with the last of them."""

from __future__ import annotations

import asyncio
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dask_gpurt.memory.pages import GRANULE
from dask_gpurt.tiers.engine import buffer_roots
from dask_gpurt.tiers.engine.buffer_roots import MOST_PARTS, roots_of
from dask_gpurt.tiers.engine.entry import State

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.tiers.conftest import Rig


def resident(engine: Any, *sizes: int) -> None:
    """These, and at most a few kB more."""
    assert sum(sizes) <= engine.resident_bytes < sum(sizes) + 20_000
    engine.validate()


def test_counted_once(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        engine = rig.engine
        x = np.zeros(1_000_000, "u1")
        rig.store["part"] = x[:1000].reshape(10, 100)[3:].T
        resident(engine, 1_000_000)  # which it keeps from being freed
        rig.store["x"] = x
        rig.store["same"] = x
        resident(engine, 1_000_000)
        del rig.store["x"], rig.store["same"]
        resident(engine, 1_000_000)
        del rig.store["part"]
        assert engine.resident_bytes == 0
        rig.store["copy"] = x.copy()
        rig.store["other"] = x
        resident(engine, 2_000_000)
        rig.store["none"], rig.store["no bytes"], rig.store["empty"] = None, x[:0], np.empty(0)
        resident(engine, 2_000_000)

    run_rig(test, budget=None)


def test_what_cannot_be_looked_into_is_counted() -> None:
    class Frame(pd.DataFrame):  # type: ignore[misc]
        @property
        def _mgr(self) -> Any:
            raise RuntimeError("made otherwise")

        @_mgr.setter
        def _mgr(self, value: Any) -> None: ...

    Frame.__module__ = "pandas.somewhere"
    before = buffer_roots.errors
    frame = Frame.__new__(Frame)
    assert roots_of(frame, 5000) == ((id(frame), 5000),)
    assert buffer_roots.errors == before + 1


class BadArray(np.ndarray[Any, Any]):
    @property
    def nbytes(self) -> int:
        raise RuntimeError("no size")


class BadClass:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @__class__.setter
    def __class__(self, kind: Any) -> None: ...


def dead_proxy() -> Any:
    class Gone: ...

    return weakref.proxy(Gone())


def odd_values() -> list[Any]:
    return [
        np.arange(1000).view(BadArray).copy(),
        *(type("Made", (), {"__module__": module})() for module in (None, 3, property(str))),
    ]


def test_whatever_a_value_raises_it_is_one_root() -> None:
    for value in [*odd_values(), BadClass(), dead_proxy()]:
        before = buffer_roots.errors
        assert roots_of(value, 5000) == ((id(value), 5000),)
        assert buffer_roots.errors == before + 1


def test_values_that_cannot_be_looked_into_disturb_no_others(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        odd = odd_values()
        for i, value in enumerate(odd):
            rig.store[i] = value
        rig.store["a"], rig.store["b"] = np.ones(10_000), np.zeros(10_000)
        rig.spill_all()
        await rig.settle()
        rig.engine.shrink(0)
        assert "a" in rig.store.disk
        assert "b" in rig.store.disk
        del odd, value
        entries = await asyncio.wait_for(rig.store.ensure([*range(4), "a", "b"]), 30)
        assert rig.store["a"].sum() == 10_000
        assert np.asarray(rig.store[0]).sum() == 499_500
        rig.store.release(entries)
        rig.engine.validate()

    run_rig(test)


def test_what_is_no_frame_is_no_error() -> None:
    """Tasks return the least day, categories, a schema, groups: ordinary results."""
    frame = pd.DataFrame({"a": [1, 2]})
    plain = [pd.Timestamp(0), pd.NaT, pd.NA, pd.Interval(0, 1), pd.Int64Dtype(), frame.groupby("a"), frame.rolling(2)]
    plain += [pa.schema([("a", pa.int64())]), pa.scalar(1), pa.int64(), pa.py_buffer(bytes(10_000))]
    before = buffer_roots.errors
    for value in plain:
        assert roots_of(value, 5000) == ((id(value), 5000),)
    for column in (pd.Categorical(["x"] * 10_000), pd.array([1, None] * 5000), pd.array(["x"] * 5000)):
        assert roots_of(column, 5000)[0] == roots_of(pd.Series(column, copy=False), 5000)[0]
    assert buffer_roots.errors == before


def test_what_is_no_memory_is_not_counted(run_rig: Callable[..., None], tmp_path: Path) -> None:
    """A file that is mapped; an array that repeats a few bytes."""

    async def test(rig: Rig) -> None:
        mapped = np.memmap(tmp_path / "f", "u1", "w+", shape=10_000_000)
        rig.store["a"], rig.store["b"] = mapped[:100_000], mapped[:50_000]
        resident(rig.engine, 100_000)
        rig.store["repeated"] = np.broadcast_to(np.zeros(1000), (1000, 1000))
        with open(tmp_path / "f", "r+b") as f, mmap.mmap(f.fileno(), 0) as whole:  # noqa: ASYNC230
            rig.store["c"] = np.frombuffer(whole, "u1")[:200_000]
            resident(rig.engine, 100_000, 200_000)
            del rig.store["c"]
        resident(rig.engine, 100_000)

    run_rig(test, budget=None)


N = 100_000
FRAMES = {
    # k and i in a block each, x, y, z in one
    "numbers": (
        lambda: pd.DataFrame({"k": np.arange(N, dtype="i4"), **{c: np.random.default_rng(0).random(N) for c in "xyz"}}),
        "x",
        4 * N + 24 * N,
        24 * N,
    ),
    "strings": (
        lambda: pd.DataFrame({"s": pd.array(["0123456789"] * N, dtype="string[pyarrow]"), "x": np.zeros(N)}),
        "s",
        18 * N + 8 * N,
        18 * N,
    ),
    "an index": (lambda: pd.DataFrame({"x": np.zeros(N)}, index=np.arange(N) * 2), "x", 16 * N, 16 * N),
    "nullable, dates, categories": (
        lambda: pd.DataFrame(
            {
                "n": pd.array(np.arange(N), dtype="Int64"),
                "d": np.arange(N).astype("M8[s]"),
                "c": pd.Categorical(["a", "b"] * (N // 2)),
            }
        ),
        "n",
        9 * N + 8 * N + N,
        9 * N,
    ),
    "table": (
        lambda: pa.table({"x": np.random.default_rng(0).random(N), "s": pa.array(["0123456789"] * N)}),
        "s",
        8 * N + 14 * N,
        14 * N,
    ),
}


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("read_back", [False, True])
def test_a_column_is_charged_for_what_it_holds(
    run_rig: Callable[..., None], monkeypatch: pytest.MonkeyPatch, kind: str, read_back: bool
) -> None:
    make, column, whole, held = FRAMES[kind]
    if kind == "strings":  # 32-bit or 64-bit offsets
        offsets = make()[column].array._pa_array.chunk(0).buffers()[1].size
        whole, held = whole - 8 * N + offsets, held - 8 * N + offsets

    async def test(rig: Rig) -> None:
        rig.store["frame"] = make()
        resident(rig.engine, whole)
        if read_back:
            rig.spill_all()
            await rig.settle()
            rig.engine.shrink(0)
            assert rig.engine.resident_bytes == 0
            rig.store.release(await rig.store.ensure(["frame"]))
            resident_about(rig.engine, whole)
        frame = rig.store["frame"]
        rig.store["column"] = frame[column]
        rig.store["rows"] = frame[column].iloc[5:9] if kind != "table" else frame[column].slice(5, 4)
        resident_about(rig.engine, whole)  # counted once
        del rig.store["frame"], frame
        resident_about(rig.engine, held)
        del rig.store["column"]
        resident_about(rig.engine, held)
        rows = rig.store.entry("rows")
        assert rows is not None
        assert rows.nbytes < 4096 or kind == "table"
        rig.store["other"] = bytes(10_000)  # used after it
        rig.engine.shrink(1)  # of a few bytes, but what goes with it is worth the writing
        await rig.settle()
        assert rows.state is State.STORED
        resident(rig.engine, 10_000)

    def resident_about(engine: Any, nbytes: int) -> None:
        # Blocks of pages and of the file are a little larger than what is in them.
        assert nbytes <= engine.resident_bytes < 1.05 * nbytes + 6 * GRANULE
        engine.validate()

    run_rig(test, budget=None)


def test_what_cannot_be_looked_into_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = pd.DataFrame({str(i): pd.array(np.zeros(1000), dtype="Float64") for i in range(MOST_PARTS + 1)})
    assert roots_of(wide, 5000) == ((id(wide), 5000),)
    multi = pd.DataFrame({"x": np.zeros(N)}, index=pd.MultiIndex.from_product([range(N // 2), list("ab")]))
    assert len(roots_of(multi, 9 * N)) == 2
    assert roots_of("a", 50) == ((id("a"), 50),)
    assert roots_of(pd.RangeIndex(N), 100)[0][1] == 100

    def otherwise(value: Any) -> Any:
        raise AttributeError("_mgr")

    monkeypatch.setattr(buffer_roots, "_pandas", otherwise)
    assert roots_of(multi, 5000) == ((id(multi), 5000),)


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


def test_a_copy_from_before_a_change_serves_no_result_of_it(run_rig: Callable[..., None]) -> None:
    """A task changes its input in place and returns it: the same object, of which there is a copy, or one under way."""

    async def test(rig: Rig) -> None:
        engine = rig.engine
        rig.names.update({"renamed": "changed", "renamed later": "changed later"})
        x = rig.store["x"] = np.zeros(10_000)
        rig.spill_all()
        await rig.settle()
        engine.shrink(0)
        entries = await rig.store.ensure(["x"])  # the same object: it is still held here
        x += 1
        rig.store["changed"] = rig.store["renamed"] = x
        rig.store.release(entries)
        del x
        rig.spill_all()
        await rig.settle()
        y = rig.store["y"] = np.zeros(10_000)
        rig.spill_all()
        assert engine.moving_bytes
        y += 1
        rig.store["changed later"] = rig.store["renamed later"] = y
        del y
        await rig.settle()
        rig.spill_all()
        await rig.settle()
        for key in ("changed", "renamed", "changed later", "renamed later"):
            entries = await rig.store.ensure([key])
            assert (rig.store[key] == 1).all()
            rig.store.release(entries)
        rig.validate()

    run_rig(test)


def test_a_result_whose_first_column_alone_was_changed_gets_a_copy_of_its_own(run_rig: Callable[..., None]) -> None:
    """What of its memory is its input's may come second, behind a column that is new."""

    async def test(rig: Rig) -> None:
        x = rig.store["x"] = pd.DataFrame({"flag": np.zeros(4000, bool), "x": np.zeros(4000)})
        rig.spill_all()
        assert rig.engine.moving_bytes
        rig.engine.shrink(0)
        x["flag"] = np.ones(4000, np.int64)
        rig.store["changed"] = x
        entry, changed = rig.store.entry("x"), rig.store.entry("changed")
        assert entry is not None
        assert changed is not None
        assert entry.blocks[0] in changed.blocks[1:]
        await rig.settle()
        assert entry.handle is not None
        assert changed.handle is None
        rig.validate()

    run_rig(test)


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


def test_a_name_that_is_in_memory_does_not_rely_on_a_copy_found_damaged(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        rig.store["a"] = np.arange(10_000)
        rig.store["b"] = rig.store["a"]
        a, b = rig.store.entry("a"), rig.store.entry("b")
        assert a is not None
        assert b is not None
        rig.engine.pin(b)
        rig.spill_all()
        await rig.settle()
        rig.engine.shrink(0)
        assert b.clean
        a.weak = None  # else it is had from the other
        rig.engine.unpin(b)
        (name,) = rig.disk.files()
        with open(os.path.join(rig.disk.directory, name), "r+b") as f:  # noqa: ASYNC230
            f.seek(5000)
            f.write(b"spoilt")
        rig.store.release(await rig.store.ensure(["a"]))
        assert rig.store.is_lost("a")
        rig.spill_all()
        await rig.settle()
        entries = await rig.store.ensure(["b"])
        np.testing.assert_array_equal(rig.store["b"], np.arange(10_000))
        rig.store.release(entries)
        del rig.store["a"], rig.store["b"]
        await rig.settle()
        assert rig.disk.files() == []
        assert rig.disk.used_bytes == 0

    run_rig(test, small_bytes=0)


def test_a_hundred_thousand_names_of_nothing(run_rig: Callable[..., None]) -> None:
    """What all keys have in common must not cost each of them a look at all others."""

    async def test(rig: Rig) -> None:
        for i in range(20_000):
            rig.store[i] = None
        blocks = {e.blocks for e in rig.engine.books.entries}
        assert len(blocks) == 1
        entry = rig.store.entry(7)
        assert entry is not None
        assert rig.engine.books.twins(entry) == []
        big = bytes(10_000)
        for i in range(2000):
            rig.store["big", i] = big
        entry = rig.store.entry(("big", 5))
        assert entry is not None
        assert len(rig.engine.books.twins(entry)) == 1999

    run_rig(test)
