"""The barrier on the scheduler: what it does when a worker does not answer."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle.scheduler.barrier import Barrier
from dask_gpurt.shuffle.scheduler.calls import AnswersFailed
from dask_gpurt.shuffle.scheduler.recovery import Amender
from dask_gpurt.shuffle.worker.sender import Sender
from tests.shuffle.helpers import drained, left, ordered, source, taken_over, until, whole


@pytest.mark.parametrize("error", [TimeoutError("no answer"), AnswersFailed("it closes")])
def test_a_worker_that_is_stopped_or_closes_restarts_the_run_and_fails_no_query(error: Exception) -> None:
    restarted: list[str] = []
    record = SimpleNamespace(
        id="s",
        version=0,
        run=SimpleNamespace(run_id=1),
        telling=None,
        participants={"tcp://a"},
        amendments=SimpleNamespace(epoch=1, handing={}),
    )
    runs: Any = SimpleNamespace(
        get=lambda shuffle_id: record,
        barrier_of=lambda shuffle_id: SimpleNamespace(state="processing"),
        current=lambda record: True,
        restart=lambda record, why: restarted.append(why),
    )

    async def flushed(*args: Any) -> list[Any]:
        return []

    async def no_answer(*args: Any) -> Any:
        raise error

    calls: Any = SimpleNamespace(flush=flushed, amend=no_answer, tell=no_answer)
    barrier = Barrier(runs, calls, SimpleNamespace(), SimpleNamespace(hear=flushed), lambda record: None, lambda: None)  # type: ignore[arg-type]
    assert asyncio.run(barrier.passes("s", 1)) is False
    assert restarted == [str(error)]


@pytest.mark.parametrize("error", [TimeoutError("no answer"), AnswersFailed("it closes"), ValueError("ours")])
def test_only_an_error_of_ours_counts_as_one_when_an_epoch_is_announced(error: Exception) -> None:
    """A few of those leave all shuffles to Dask."""
    restarted: list[str] = []
    failed: list[int] = []
    runs: Any = SimpleNamespace(
        current=lambda record: True,
        restart=lambda record, why: restarted.append(why),
        changed=lambda record: None,
    )

    async def no_answer(*args: Any) -> Any:
        raise error

    calls: Any = SimpleNamespace(amend=no_answer)
    nothing: Any = None
    record: Any = SimpleNamespace(version=0, telling=None, amendments=SimpleNamespace(epoch=1, opened=None))

    async def check() -> None:
        Amender(nothing, runs, calls, nothing, lambda: failed.append(1)).amend(record)
        await record.telling

    asyncio.run(check())
    assert len(restarted) == 1
    assert str(error) in restarted[0]
    assert len(failed) == isinstance(error, ValueError)


@pytest.mark.cluster
@pytest.mark.parametrize("again", [False, True], ids=["released", "asked for again"])
def test_a_barrier_whose_run_is_dropped_while_it_waits_is_no_error(
    again: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held: list[Sender] = []
    go = asyncio.Event()
    flush = Sender.flush

    async def waits(self: Sender) -> None:
        if not held:
            held.append(self)
        if self is held[0]:
            await go.wait()
        await flush(self)

    monkeypatch.setattr(Sender, "flush", waits)

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], timeout=60)
    async def test(c: Any, s: Any, a: Any) -> None:
        def barriers(state: str) -> list[Any]:
            return [ts for ts in s.tasks.values() if "barrier" in str(ts.key) and ts.state == state]

        async with taken_over(s) as (takeover, _):
            frame = source(left).shuffle("k", npartitions=4)
            future = c.compute(frame)
            await until(lambda: held)
            future.release()
            await until(lambda: not s.tasks)
            if again:
                future = c.compute(frame)
                await until(lambda: barriers("processing"))
                # The worker takes the call of the first one, which is not answered yet, for that of the second one.
                await until(lambda: a.state.tasks[barriers("processing")[0].key].state == "executing")
            go.set()
            if again:
                got, want = ordered(await future), ordered(whole(left, 6))
                assert got.equals(want.astype(dict(got.dtypes)))
                assert takeover.statistics()["runs"] == 2
            del future
            await until(lambda: not s.tasks and not a.state.tasks)

    test()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], timeout=60)
async def test_a_query_that_is_cancelled_as_its_barrier_passes_leaves_no_listener(c: Any, s: Any, a: Any) -> None:
    """Each kept its run, with the keys of a join's side."""
    pinned, go = asyncio.Event(), asyncio.Event()

    async def pin(*args: Any) -> None:
        pinned.set()
        await go.wait()

    async with taken_over(s) as (takeover, _):
        takeover.pin = pin
        runs = takeover._plugin.runs
        future = c.compute(source(left).shuffle("k", npartitions=4))
        await pinned.wait()
        assert runs._listeners
        future.release()
        await until(lambda: not s.tasks)
        go.set()
        await until(lambda: not runs._listeners)


def with_one(frame: Any) -> Any:
    return frame.assign(one=1)


def with_two(frame: Any) -> Any:
    return frame.assign(two=2)


def with_three(frame: Any) -> Any:
    return frame.assign(three=3)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=120)
async def test_a_query_that_is_cancelled_in_its_barrier_ends_its_run_though_an_earlier_one_is_kept(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    """What is kept of the earlier query keeps the barrier known: it was taken for one that runs again."""
    go, flushing = asyncio.Event(), asyncio.Event()
    hold = False
    flush = Sender.flush

    async def slow(self: Any, *args: Any) -> Any:
        if hold:
            flushing.set()
            await go.wait()
        return await flush(self, *args)

    async with taken_over(s, [a, b]) as (_, stores):
        plugin = s.plugins["shuffle"]
        shuffled = source(left).shuffle("k", npartitions=4)
        kept = c.persist(shuffled.map_partitions(with_one))
        await c.compute(kept.size)
        await until(lambda: not plugin.active_shuffles)
        hold = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sender, "flush", slow)
            cancelled = c.persist(shuffled.map_partitions(with_two))
            await asyncio.wait_for(flushing.wait(), 60)
            await c.cancel(cancelled)
            del cancelled
            go.set()
            await until(lambda: not plugin.active_shuffles)
        await drained(stores)
        rows = len(await asyncio.wait_for(c.compute(shuffled.map_partitions(with_three)), 20))
        assert rows == len(whole(left, 6))
        assert len(await c.compute(kept)) == rows
