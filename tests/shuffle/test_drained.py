"""Shuffles beside workers that do not run: paused, held back before their first task, or drained and connected."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest
from distributed import Status, Worker
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle.scheduler.candidates import keepers, running
from dask_gpurt.shuffle.scheduler.drain import worker_for
from tests.shuffle.helpers import left, ordered, source, taken_over, until, went_on, whole
from tests.shuffle.test_amendment import THREE, N, after_the_barrier, gate, same_rows, transferred, vouched, whose

#: a worker that never runs
HOW = ["paused", "init", "drained"]


def workers_of(**status: Status) -> Any:
    return {name: SimpleNamespace(status=one) for name, one in status.items()}


def test_who_gets_outputs_and_who_keeps_them():
    workers = workers_of(a=Status.running, b=Status.paused, c=Status.closing_gracefully, d=Status.init)
    assert running(workers, ["d", "c", "b", "a", "gone"]) == ["a"]
    assert keepers(workers) == {"a", "b"}
    # None runs: as Dask has it.
    assert running(workers, ["d", "b"]) == ["d", "b"]
    assert keepers(workers_of(c=Status.closing_gracefully, d=Status.init)) == {"c", "d"}


def test_both_sides_of_a_join_agree_on_owners_that_do_not_run_any_more():
    workers = workers_of(a=Status.running, b=Status.running, c=Status.paused)
    scheduler: Any = SimpleNamespace(workers=workers)
    barrier = SimpleNamespace(worker_restrictions=set())
    spec = SimpleNamespace(
        id="s", output_partitions=range(4), pick_worker=lambda part, names: names[part * len(names) // 4]
    )
    partner: dict[int, str] = {}
    runs: Any = SimpleNamespace(barrier_of=lambda name: barrier, partner_owners=lambda name: partner)
    assert worker_for(scheduler, runs, spec, 0) == {0: "a", 1: "a", 2: "b", 3: "b"}
    assert worker_for(scheduler, runs, spec, 3) == {0: "b", 1: "b", 2: "a", 3: "a"}
    partner = {0: "c", 3: "a"}
    assert worker_for(scheduler, runs, spec, 0) == {0: "c", 1: "a", 2: "b", 3: "a"}
    barrier.worker_restrictions = {"a"}
    assert worker_for(scheduler, runs, spec, 0) is None  # all of those that are allowed run
    barrier.worker_restrictions = {"c"}
    assert worker_for(scheduler, runs, spec, 0) is None  # none does


def joined(d: Any) -> Any:
    return d.merge(source(left, 4), on="k", how="inner", shuffle_method="p2p", npartitions=7)


def shuffled(d: Any) -> Any:
    return d.shuffle("k", npartitions=7)


def same_join(got: pd.DataFrame) -> None:
    want = ordered(whole(left, N).merge(whole(left, 4), on="k", how="inner"))
    got = ordered(got)
    pd.testing.assert_frame_equal(got, want.astype(dict(got.dtypes)))


QUERIES = {"shuffle": (shuffled, same_rows), "merge": (joined, same_join)}


@contextlib.asynccontextmanager
async def one_that_never_runs(c: Any, s: Any, workers: list[Any], how: str):
    """Its address; workers[0] is it, or a new one is."""
    address = workers[0].address
    if how == "paused":
        s.handle_worker_status_change("paused", address, "test")
        yield address
    elif how == "drained":
        await c.retire_workers([address], close_workers=False, remove=False)
        assert s.workers[address].status is Status.closing_gracefully
        yield address
    else:
        inner = s.stream_handlers["worker-status-change"]
        known = set(s.workers)

        def held(status: Any, worker: str, stimulus_id: str) -> None:
            if worker in known or status != "running":
                inner(status=status, worker=worker, stimulus_id=stimulus_id)

        s.stream_handlers["worker-status-change"] = held
        async with Worker(s.address, nthreads=1) as late:
            assert s.workers[late.address].status is Status.init
            yield late.address


def errors(takeover: Any) -> Any:
    stats = takeover.statistics()
    assert stats["errors"] == 0, stats["last_error"]
    return stats


@pytest.mark.cluster
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("query", list(QUERIES))
def test_a_worker_that_does_not_run_gets_no_outputs(how, query):
    @gen_cluster(**THREE)
    async def check(c, s, *workers):
        async with one_that_never_runs(c, s, workers, how) as address, taken_over(s, workers) as (takeover, _):
            make, same = QUERIES[query]
            f = c.compute(make(source(left, N)))
            await until(lambda: s.plugins["shuffle"].active_shuffles)
            (first, *_) = s.plugins["shuffle"].active_shuffles.values()
            assert address not in first.run_spec.worker_for.values()
            same(await f)
            stats = errors(takeover)
            assert stats["runs"] == (2 if query == "merge" else 1)
            assert stats["recovery"]["restarted"] == stats["recovery"]["drained"] == 0

    check()


@pytest.mark.cluster
@gen_cluster(**THREE)
async def test_where_no_worker_runs_all_may_own(c, s, *workers):
    async with taken_over(s, workers) as (takeover, _):
        g, d = gate(6)
        f = c.compute(d.shuffle("k", npartitions=7))
        await until(lambda: g.begun == g.first + 3)
        for w in workers:
            s.handle_worker_status_change("paused", w.address, "test")
        g.go.set()
        await until(lambda: s.plugins["shuffle"].active_shuffles)
        for w in workers:
            s.handle_worker_status_change("running", w.address, "test")
        same_rows(await f)
        went_on(takeover)


async def begun(c: Any, s: Any, workers: list[Any], query: str) -> tuple[Any, Any, Any]:
    """A query in the middle of its inputs: (gate, future, the worker that has split most)."""
    g, d = gate(6)
    f = c.compute(QUERIES[query][0](d))
    await until(lambda: g.begun == g.first + 3 and transferred(s) >= 1)
    return g, f, max(workers, key=vouched)


def owned(s: Any, address: str) -> int:
    """Outputs of a worker, in all active shuffles."""
    runs = s.plugins["shuffle"].active_shuffles.values()
    return sum(owner == address for run in runs for owner in run.run_spec.worker_for.values())


@pytest.mark.cluster
@pytest.mark.parametrize("query", list(QUERIES))
def test_drained_while_inputs_are_split(query):
    """What it has split counts; its outputs, and the tasks that it has not begun, go to others."""

    @gen_cluster(**THREE)
    async def check(c, s, *workers):
        async with taken_over(s, workers) as (takeover, _):
            g, f, leaving = await begun(c, s, workers, query)
            assert owned(s, leaving.address)
            retired = asyncio.create_task(c.retire_workers([leaving.address], close_workers=False, remove=False))
            await until(lambda: takeover.statistics()["recovery"]["drained"])
            assert not owned(s, leaving.address)
            g.go.set()
            QUERIES[query][1](await f)
            await retired
            assert s.workers[leaving.address].status is Status.closing_gracefully
            stats = errors(takeover)
            assert stats["recovery"]["restarted"] == stats["recovery"]["amended"] == 0

    check()


@pytest.mark.cluster
@pytest.mark.parametrize("query", list(QUERIES))
@pytest.mark.parametrize("back", [False, True])
def test_held_back_while_inputs_are_split(query, back):
    @gen_cluster(**THREE)
    async def check(c, s, *workers):
        async with taken_over(s, workers) as (takeover, _):
            g, f, held = await begun(c, s, workers, query)
            s.handle_worker_status_change("init", held.address, "test")
            await until(lambda: takeover.statistics()["recovery"]["drained"])
            assert not owned(s, held.address)
            if back:  # it splits inputs again, and owns nothing of these runs
                s.handle_worker_status_change("running", held.address, "test")
            g.go.set()
            QUERIES[query][1](await f)
            assert errors(takeover)["recovery"]["restarted"] == 0

    check()


@pytest.mark.cluster
@pytest.mark.parametrize("query", list(QUERIES))
def test_paused_while_inputs_are_split_keeps_its_outputs(query):
    """It has too little memory for the moment, and comes back."""

    @gen_cluster(**THREE)
    async def check(c, s, *workers):
        async with taken_over(s, workers) as (takeover, _):
            g, f, paused = await begun(c, s, workers, query)
            before = owned(s, paused.address)
            s.handle_worker_status_change("paused", paused.address, "test")
            g.go.set()
            # No output is waited for before it runs again: whether all inputs are split by then or not.
            await until(lambda: len(g.made) == N)
            assert owned(s, paused.address) >= before
            s.handle_worker_status_change("running", paused.address, "test")
            QUERIES[query][1](await f)
            stats = errors(takeover)
            assert stats["recovery"]["restarted"] == stats["recovery"]["drained"] == 0

    check()


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["drained", "init"])
@pytest.mark.parametrize("query", list(QUERIES))
def test_drained_while_outputs_are_made(query, how):
    """An output that it has begun it makes; the others are opened and made by others."""

    @gen_cluster(**THREE)
    async def check(c, s, *workers):
        async with taken_over(s, workers) as (takeover, _):
            make, same = QUERIES[query]
            first = 3 if query == "shuffle" else 5
            async with after_the_barrier(c, s, make(source(left, N)), first) as (out, keys):
                leaving, _kept = whose(s, keys)
                assert owned(s, leaving)
                retired = None
                if how == "drained":
                    retired = asyncio.create_task(c.retire_workers([leaving], close_workers=False, remove=False))
                else:
                    s.handle_worker_status_change("init", leaving, "test")
                await until(lambda: s.workers[leaving].status.name != "running")
            same(await c.compute(out))
            if retired is not None:
                await retired
            assert leaving in s.workers
            assert errors(takeover)["recovery"]["restarted"] == 0

    check()


@pytest.mark.cluster
@pytest.mark.parametrize("when", ["before", "middle"])
def test_a_rechunk_beside_a_drained_worker(when):
    """Dask's own run: it is restarted when one of its owners is drained."""

    @gen_cluster(**THREE)
    async def check(c, s, *workers):
        async with taken_over(s, workers) as (takeover, _):
            leaving, go = workers[0].address, threading.Event()
            values = np.arange(24 * 24).reshape(24, 24)
            calls = itertools.count()

            def block(block_id: tuple[int, int]) -> Any:
                if next(calls) >= 6:
                    assert go.wait(120)
                return values[:, 2 * block_id[1] : 2 * block_id[1] + 2]

            HELD.append(block)
            x = da.map_blocks(held_block, len(HELD) - 1, chunks=((24,), (2,) * 12), dtype=values.dtype)
            if when == "before":
                await c.retire_workers([leaving], close_workers=False, remove=False)
            # Without a limit Dask puts small blocks together first, and waits for all of them.
            f = c.compute(x.rechunk((2, 24), method="p2p", block_size_limit=24 * 2 * 8))
            await until(lambda: s.plugins["shuffle"].active_shuffles)
            retired = None
            if when == "middle":
                retired = asyncio.create_task(c.retire_workers([leaving], close_workers=False, remove=False))
                await until(lambda: takeover.statistics()["recovery"]["restarted"])
            go.set()
            np.testing.assert_array_equal(await f, values)
            if retired is not None:
                await retired
            assert errors(takeover)["recovery"]["restarted"] == (when == "middle")

    check()


#: functions of tests in this process, by number: what a graph holds is pickled
HELD: list[Any] = []


def held_block(number: int, block_id: Any = None) -> Any:
    return HELD[number](block_id)
