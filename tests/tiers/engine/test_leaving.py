"""A task that needs room waits for values that are about to be freed, before any is written for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from distributed.utils_test import async_poll_for

from dask_gpurt.tiers.engine.entry import NEVER
from dask_gpurt.tiers.engine.eviction import LEAVING_SECONDS
from tests.tiers.hints.test_hints_cluster import SIZE

if TYPE_CHECKING:
    from dask_gpurt.tiers.engine.memory_gate import Reservation
    from tests.tiers.conftest import Rig, RunRig

#: three values and one more are too much
BUDGET = int(3.1 * SIZE)


async def read_one_of_three(rig: Rig) -> None:
    for name in "abc":
        rig.now += 1
        rig.store[name] = bytes(SIZE)
    await rig.settle()
    rig.store.release(await rig.store.ensure(["b"]))


def written(rig: Rig) -> int:
    return int(rig.engine.counters.to_dict()["written"]["ops"])


async def asks(rig: Rig) -> asyncio.Task[Reservation]:
    task = asyncio.ensure_future(rig.engine.admit(SIZE))
    await asyncio.sleep(0)
    return task


def test_freed_in_time(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        await read_one_of_three(rig)
        request = await asks(rig)
        assert not request.done()
        del rig.store["b"]
        (await asyncio.wait_for(request, 30)).release()
        assert written(rig) == 0
        rig.validate()

    run_rig(test, budget=BUDGET)


def test_not_freed(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        await read_one_of_three(rig)
        request = await asks(rig)
        assert not request.done()
        rig.now += 2 * LEAVING_SECONDS
        (await asyncio.wait_for(request, 30)).release()
        assert written(rig) == 1
        rig.validate()

    run_rig(test, budget=BUDGET)


@pytest.mark.parametrize("hint", [NEVER, None, (5.0,)])
def test_what_is_read_again_is_not_waited_for(hint: tuple[float, ...] | None, run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        await read_one_of_three(rig)
        value = rig.store.entry("b")
        assert value is not None
        rig.engine.books.hint(value, hint)
        request = await asks(rig)
        if hint == (5.0,):
            (await asyncio.wait_for(request, 30)).release()
            assert written(rig) == 1
        else:
            del rig.store["b"]
            (await asyncio.wait_for(request, 30)).release()
            assert written(rig) == 0

    run_rig(test, budget=BUDGET)


def test_too_little_is_about_to_be_freed(run_rig: RunRig) -> None:
    async def test(rig: Rig) -> None:
        await read_one_of_three(rig)
        request = asyncio.ensure_future(rig.engine.admit(2 * SIZE))
        await async_poll_for(lambda: written(rig) > 0, timeout=30)
        (await asyncio.wait_for(request, 30)).release()

    run_rig(test, budget=BUDGET)
