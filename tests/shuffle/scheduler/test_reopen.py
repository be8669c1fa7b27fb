"""Outputs that are opened after the barrier leave their workers, and inputs that run again take their place."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from distributed import Event, futures_of
from distributed.utils_test import NO_AMM, gen_cluster

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.scheduler import reopen
from dask_gpurt.shuffle.scheduler.calls import AnswersFailed, FlushFailed
from dask_gpurt.shuffle.scheduler.reopen import Opener
from dask_gpurt.shuffle.scheduler.runs import PATIENCE
from dask_gpurt.shuffle.worker.scheduler_calls import SchedulerCalls
from tests.shuffle.helpers import left, source, taken_over, until, went_on
from tests.shuffle.test_amendment import N, same_rows

pytestmark = pytest.mark.cluster
#: a worker gets no more tasks than it has threads
ONE_SLOT = {"distributed.scheduler.worker-saturation": 1.0}


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], timeout=60, config=NO_AMM | ONE_SLOT)
async def test_an_output_that_is_parked_makes_room_for_the_inputs_that_it_waits_for(c, s, a):
    """The only thread is the output's when inputs are to run again: they are queued, and no task's end follows."""
    settings = ShuffleSettings(enabled=True, transport="rpc", retain=0.0)
    ask = SchedulerCalls.open_again

    async def then_wait(self, key):
        opened = await ask(self, key)
        await until(lambda: s.queued)
        return opened

    async with taken_over(s, [a], settings=settings) as (takeover, _):
        d = source(left, N).shuffle("k", npartitions=3)
        made = futures_of(c.persist(d))
        # The run is held as long as this waits, which takes no thread.
        waits = c.submit(len, made[0], workers=["tcp://127.0.0.1:1"])
        await until(lambda: all(f.status == "finished" for f in made) and s.unrunnable)
        again = made[1].key
        made[1].release()
        await until(lambda: again not in s.tasks)
        with mock.patch.object(SchedulerCalls, "open_again", then_wait):
            same_rows(await asyncio.wait_for(c.compute(d), 30))
        assert went_on(takeover)["recovery"]["outputs_void"] == 1
        waits.release()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=60)
async def test_a_parked_output_that_may_run_anywhere_waits_too(c, s, a, b):
    """``allow_other_workers`` would have Dask send it out, to come back at once, until its rows are there."""
    async with taken_over(s) as (takeover, _):
        plugin, go = takeover._plugin, Event("go")
        future = c.submit(abs, c.submit(go.wait), workers=[a.address], allow_other_workers=True)
        await until(lambda: s.tasks.get(future.key) is not None and s.tasks[future.key].state == "waiting")
        output = s.tasks[future.key]
        plugin.opener.parking.park(output)
        await go.set()
        await until(lambda: output.state in ("no-worker", "memory"))
        assert output.state == "no-worker"
        seam.unrestrict(plugin, output)
        assert output.loose_restrictions
        assert output.worker_restrictions == {a.address}
        s.transitions({future.key: "processing"}, stimulus_id="test")
        assert await future == 1


def test_inputs_under_way_are_not_all_looked_at_when_one_ends():
    looked = []

    class Task:
        def __init__(self, key: int) -> None:
            self.key, self.now = key, "processing"

        @property
        def state(self) -> str:
            looked.append(self.key)
            return self.now

    nothing: Any = None
    listened: list[int] = []
    runs: Any = SimpleNamespace(listen=lambda key, heard: listened.append(key))
    opener = Opener(nothing, nothing, runs, nothing)
    record: Any = SimpleNamespace(changed=None)
    tasks = [Task(i) for i in range(100)]
    barrier: Any = SimpleNamespace(dependencies=tasks)
    some: list[Any] = []
    for _ in tasks:
        assert opener._under_way(record, barrier, some)
        tasks[listened[-1]].now = "memory"
    assert not opener._under_way(record, barrier, some)
    assert sorted(listened) == list(range(100))
    assert len(looked) <= 5 * len(tasks)


def test_a_worker_that_cannot_flush_is_no_error_of_ours_and_one_that_closes_has_its_time(monkeypatch):
    monkeypatch.setattr(reopen, "PATIENCE_SECONDS", 0)
    nothing: Any = None
    closes = [True] * 3 * PATIENCE
    tries = []
    barrier: Any = SimpleNamespace(state="memory")
    runs: Any = SimpleNamespace(barrier_of=lambda name: barrier, current=lambda record: True)
    calls: Any = SimpleNamespace(closing=lambda addresses: bool(closes and closes.pop()))
    opener = Opener(nothing, nothing, runs, calls)

    async def once(*args: Any) -> Any:
        tries.append(args)
        raise FlushFailed("closed")

    monkeypatch.setattr(opener, "_complete_once", once)
    record: Any = SimpleNamespace(id="s", version=0, participants=(), amendments=SimpleNamespace(epoch=1))
    with pytest.raises(AnswersFailed, match="cannot be flushed: closed"):
        asyncio.run(opener.complete(record, 1))
    assert len(tries) == 4 * PATIENCE + 1
