"""What becomes of a key that is lost where the scheduler is in the worker's process, or has forgotten the key."""

# ruff: noqa: ASYNC240
from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from distributed import Client, Scheduler, Worker, wait
from distributed.utils_test import async_poll_for, gen_test

from dask_gpurt.config import Settings
from dask_gpurt.errors import LostData
from dask_gpurt.tiers.runtime import TierRuntime
from dask_gpurt.tiers.worker import lost_keys
from dask_gpurt.tiers.worker.lost_keys import Losses
from tests.tiers.conftest import guard, handles

if TYPE_CHECKING:
    import pathlib


@pytest.mark.cluster
@gen_test()
async def test_scattered_data_that_is_lost_in_the_process_of_the_scheduler(tmp_path: pathlib.Path) -> None:
    """It was taken for what can be computed again: the scheduler failed, and removed the worker with all it had."""
    async with (
        Scheduler(protocol="inproc://", dashboard_address=":0") as s,
        Worker(s.address, local_directory=str(tmp_path)) as worker,
        Client(s.address, asynchronous=True) as c,
    ):
        runtime = await TierRuntime.install(worker, Settings.load({"tiers.disk-reserve": 0}).tiers)
        x = await c.scatter(np.ones(100_000), hash=False)
        other = c.submit(np.zeros, 10)
        await wait(other)
        runtime.engine.shrink(1 << 60)
        await async_poll_for(lambda: len(handles(runtime.engine)) == 2, timeout=30)
        runtime.engine.shrink(0)
        for handle in handles(runtime.engine):
            path = os.path.join(runtime._disk.directory, handle.name)  # type: ignore[attr-defined]
            if os.path.getsize(path) > 100_000:
                os.truncate(path, 4096)
        with pytest.raises(LostData, match="no valid copy"):
            await asyncio.wait_for(c.submit(np.sum, x).result(), 30)
        assert list(s.workers) == [worker.address]
        assert await asyncio.wait_for(c.submit(np.sum, other).result(), 30) == 0


def test_a_key_that_the_scheduler_has_forgotten_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raised there, as ERROR in both logs, and the key stayed."""

    async def known_as(worker: Worker) -> str:
        return "tcp://here:1"

    async def who_has(keys: list[str]) -> dict[str, list[str]]:
        return {key: [] for key in keys}

    async def get_runspec(key: str) -> Any:
        raise KeyError(key)

    monkeypatch.setattr(lost_keys, "known_as", known_as)
    worker: Any = SimpleNamespace(
        state=SimpleNamespace(tasks={"x": SimpleNamespace(run_spec=None)}),
        scheduler=SimpleNamespace(who_has=who_has, get_runspec=get_runspec),
    )
    store: Any = SimpleNamespace(is_lost=lambda key: True)
    breaker = guard()
    losses = Losses(worker, store, breaker, active=lambda: True)
    given_up: list[Any] = []
    monkeypatch.setattr(losses, "give_up", given_up.append)
    asyncio.run(losses.settle("x"))
    assert given_up == ["x"]
