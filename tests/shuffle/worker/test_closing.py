"""A worker leaves while the barrier of a shuffle flushes: no row that was not delivered counts as delivered."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pandas as pd
import pytest
from distributed import WorkerPlugin
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle.scheduler import barrier
from dask_gpurt.shuffle.scheduler.calls import Calls
from dask_gpurt.shuffle.worker.peer_calls import PeerCalls
from dask_gpurt.shuffle.worker.run import GpurtShuffleRun
from dask_gpurt.shuffle.worker.sender import Sender
from tests.shuffle.helpers import left, ordered, source, taken_over, until, went_on, whole

N = 12
PATIENCE = 2


class Lingers(WorkerPlugin):
    """A worker that has ended its runs stays connected, as it does while tasks in its threads end."""

    def __init__(self, until: asyncio.Event) -> None:
        self.until = until

    async def teardown(self, worker: Any) -> None:
        await self.until.wait()


@pytest.mark.cluster
@pytest.mark.parametrize("flushes", [2, PATIENCE + 3])
def test_rows_under_way_from_a_worker_that_closes_are_not_there(flushes, monkeypatch):
    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=180)
    async def check(c: Any, s: Any, a: Any, b: Any) -> None:
        leave = asyncio.Event()
        once, inputs_done, flush = PeerCalls._once, GpurtShuffleRun.inputs_done, Calls.flush
        sends = {w.address: asyncio.Event() for w in (a, b)}
        flushing: dict[str, GpurtShuffleRun] = {}
        flushed: list[str] = []
        answers: list[Any] = []
        for worker in (a, b):
            await worker.plugin_add(Lingers(leave))

        async def late(self: Any, address: str, data: Any) -> Any:
            await sends[self._host.local_address].wait()
            return await once(self, address, data)

        async def noted(self: Any) -> None:
            flushing[self.local_address] = self
            await inputs_done(self)
            flushed.append(self.local_address)

        async def heard(self: Any, *args: Any) -> Any:
            answers.append(await flush(self, *args))
            return answers[-1]

        monkeypatch.setattr(barrier, "PATIENCE", PATIENCE)
        monkeypatch.setattr(PeerCalls, "_once", late)
        monkeypatch.setattr(GpurtShuffleRun, "inputs_done", noted)
        monkeypatch.setattr(Calls, "flush", heard)
        async with taken_over(s, (a, b)) as (takeover, _):
            f = c.compute(source(left, N).shuffle("k", npartitions=6))
            await until(lambda: len(flushing) == 2)
            task = next(ts for key, ts in s.tasks.items() if "barrier" in str(key))
            here = task.processing_on.address
            victim = a if here == b.address else b
            # The other one delivers its rows first: else it would wait for what becomes of the victim.
            sends[here].set()
            await until(lambda: here in flushed)
            assert victim.address not in flushed
            closing = asyncio.create_task(victim.close(executor_wait=False))
            try:
                await until(lambda: flushing[victim.address].closed)
                sends[victim.address].set()
                await until(lambda: len(answers) >= flushes or task.state != "processing")
                leave.set()
                got = ordered(await f)
                pd.testing.assert_frame_equal(got, ordered(whole(left, N)).astype(dict(got.dtypes)))
                assert went_on(takeover)["recovery"]["amended"] == 1
            finally:
                leave.set()
                await closing

    check()


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, timeout=180)
async def test_a_flush_that_an_amendment_overtakes_closes_no_buffer(c: Any, s: Any, *workers: Any) -> None:
    """It hands over what is staged, as slowly as the budget for unsent bytes allows, when a worker is lost."""
    unstage, inputs_done = Sender._unstage, GpurtShuffleRun.inputs_done
    go, flushed = asyncio.Event(), asyncio.Event()
    held: list[str] = []

    async def late(self: Any, places: Any) -> None:
        if self._host.local_address in held:
            await go.wait()
        await unstage(self, places)

    async def noted(self: Any) -> None:
        begun = not go.is_set()
        await inputs_done(self)
        if begun and self.local_address in held:
            flushed.set()

    async with taken_over(s, workers) as (takeover, _):
        calls = s.plugins["shuffle"].shuffle_calls
        amend = calls.amend

        async def then_flush(record: Any) -> Any:
            answers = await amend(record)
            # They know of the loss, and no input was split again yet.
            go.set()
            await flushed.wait()
            return answers

        prefix = "shuffle-barrier"
        with (
            mock.patch.object(Sender, "_unstage", late),
            mock.patch.object(GpurtShuffleRun, "inputs_done", noted),
            mock.patch.object(calls, "amend", then_flush),
        ):
            held.append(workers[0].address)
            f = c.compute(source(left, N).shuffle("k", npartitions=6))
            await until(lambda: any(str(k).startswith(prefix) and ts.processing_on for k, ts in s.tasks.items()))
            task = next(ts for key, ts in s.tasks.items() if str(key).startswith(prefix))
            victim = next(w for w in workers[1:] if w.address != task.processing_on.address)
            run = workers[0].plugins["shuffle"].shuffle_runs._active_runs
            await until(lambda: all(one.transferred for one in run.values()))
            await victim.close(executor_wait=False)
            got = ordered(await asyncio.wait_for(f, 60))
        pd.testing.assert_frame_equal(got, ordered(whole(left, N)).astype(dict(got.dtypes)))
        assert went_on(takeover)["recovery"]["amended"] == 1
