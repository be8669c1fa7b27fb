"""On a real worker: tasks take turns where memory is short, run side by side where it is not."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker, wait
from distributed.utils_test import gen_cluster

from dask_gpurt.config import Settings
from dask_gpurt.tiers.runtime import TierRuntime
from dask_gpurt.tiers.worker import task_admission
from tests.memory_watch import NO_WATCH

pytestmark = pytest.mark.cluster

MB = 1_000_000
LIMIT = 1000 * MB
BARRIER = threading.Barrier(2)


def together(value: bytes, patience: float) -> bool:
    """Did another one run at the same time?"""
    try:
        BARRIER.wait(patience)
    except threading.BrokenBarrierError:
        BARRIER.reset()
        return False
    return True


@pytest.mark.parametrize(("process_bytes", "patience", "side_by_side"), [(799 * MB, 0.2, False), (100 * MB, 30, True)])
def test_turns(process_bytes: int, patience: float, side_by_side: bool) -> None:
    @gen_cluster(
        client=True,
        nthreads=[("127.0.0.1", 2)],
        worker_kwargs={"memory_limit": LIMIT},
        config=NO_WATCH,
    )
    async def main(c: Client, s: Scheduler, a: Worker) -> None:
        runtime = await TierRuntime.install(a, Settings.load({"tiers.disk-reserve": 0}).tiers)
        a.monitor.get_process_memory = lambda: process_bytes  # type: ignore[method-assign]
        values = c.map(lambda i: bytes(20 * MB), range(2), pure=False)
        await wait(values)
        met: list[Any] = await c.gather(c.map(together, values, patience=patience, pure=False))
        assert met == [side_by_side] * 2
        stats = runtime.statistics()
        assert (stats["turn_waits"] > 0) is not side_by_side
        assert stats["turns_passed_by"] == 0
        assert stats["fallbacks"] == {}
        await runtime.uninstall()

    main()


def test_the_end_of_a_write_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was seen up to a tenth of a second later, by each task that waited for it: 40 took 4 s instead of 0.5."""
    monkeypatch.setattr(task_admission, "_LOOK_SECONDS", 1000)

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": LIMIT}, config=NO_WATCH)
    async def main(c: Client, s: Scheduler, a: Worker) -> None:
        runtime = await TierRuntime.install(a, Settings.load({"tiers.disk-reserve": 0}).tiers)
        a.monitor.get_process_memory = lambda: 799 * MB  # type: ignore[method-assign]
        await wait(c.submit(lambda: bytes(20 * MB), key="value"))
        assert runtime._seam is not None
        entry: Any = SimpleNamespace(nbytes=20 * MB, in_memory=False)
        turn = asyncio.ensure_future(runtime._seam.turns.begin("task", [entry]))
        runtime.engine.shrink(20 * MB)
        assert runtime.engine.moving_bytes
        await asyncio.wait_for(turn, 20)
        assert runtime.statistics()["turn_waits"] == 1
        assert not runtime.engine.moving_bytes
        await runtime.uninstall()

    main()
