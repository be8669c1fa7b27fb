"""Memory that several keys share is counted once, and goes with the last of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

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
