"""A worker is lost while a shuffle runs: survivors keep what they have, and the rows are right."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dask.dataframe as dd
import pandas as pd
import pytest
from dask import delayed
from distributed import SchedulerPlugin, futures_of
from distributed.client import FutureCancelledError
from distributed.comm import CommClosedError
from distributed.core import ConnectionPool
from distributed.utils_test import NO_AMM, gen_cluster

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.shuffle.counters import worker_statistics
from dask_gpurt.shuffle.scheduler.calls import Calls
from dask_gpurt.shuffle.scheduler.parking import NOWHERE, Parking
from dask_gpurt.shuffle.scheduler.recovery import Amender
from dask_gpurt.shuffle.scheduler.runs import RecoveryCounters, RunRecord
from dask_gpurt.shuffle.worker.owners import Owners
from dask_gpurt.shuffle.worker.peer_calls import PeerCalls
from dask_gpurt.shuffle.worker.run import GpurtShuffleRun
from tests.shuffle.helpers import left, ordered, source, taken_over, went_on, whole

pytestmark = pytest.mark.cluster
THREE = {
    "client": True,
    "nthreads": [("127.0.0.1", 1)] * 3,
    "timeout": 180,
    "config": {"distributed.p2p.comm.retry.delay.min": "100ms"},
}
#: copies stay: the active memory manager drops, every two seconds, those that nothing waits for
NO_DROPS = {"config": THREE["config"] | NO_AMM}
N = 12


class ReceiveGate:
    """Inputs in this process: the first ones are made, the others wait to be let go."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.go = threading.Event()
        self.lock = threading.Lock()
        self.begun = 0
        self.made: list[int] = []

    def make(self, i: int) -> pd.DataFrame:
        with self.lock:
            self.begun += 1
            wait = self.begun > self.first
        if wait:
            assert self.go.wait(120)
        self.made.append(i)
        return left(i)


GATES: list[ReceiveGate] = []


def gated(i: int, gate: int) -> pd.DataFrame:
    return GATES[gate].make(i)


def gate(first: int):
    """So many inputs pass. Two are given to a worker at once: with fewer than six left, one worker may get none."""
    assert first <= N - 6
    GATES.append(ReceiveGate(first))
    d = dd.from_map(gated, list(range(N)), gate=len(GATES) - 1, meta=left(0).iloc[:0])
    return GATES[-1], d


async def until(condition) -> None:
    for _ in range(9000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not become true")


def transferred(s) -> int:
    return sum("transfer" in str(k) and ts.state == "memory" for k, ts in s.tasks.items())


def vouched(worker) -> int:
    runs = worker.plugins["shuffle"].shuffle_runs._active_runs.values()
    return sum(len(run._log.vouched()) for run in runs)


def same_rows(got, n=N) -> None:
    want = ordered(whole(left, n))
    got = ordered(got)
    pd.testing.assert_frame_equal(got, want.astype(dict(got.dtypes)))


async def lose(*workers) -> None:
    # Their threads may wait at the gate.
    await asyncio.gather(*(w.close(executor_wait=False) for w in workers))


def amended(s, takeover, victim) -> bool:
    return victim.address not in s.workers and not takeover.statistics()["recovery"]["amending"]


@pytest.mark.parametrize("transport", ["rpc", "tcp"])
def test_survivors_keep_their_inputs(transport):
    @gen_cluster(**THREE)
    async def check(c, s, *workers):
        settings = ShuffleSettings(enabled=True, transport=transport)
        async with taken_over(s, workers, settings=settings) as (takeover, _):
            g, d = gate(6)
            f = c.compute(d.shuffle("k", npartitions=7))
            await until(lambda: g.begun == g.first + 3 and transferred(s) >= 1)
            victim = max(workers, key=vouched)
            done = vouched(victim)
            await lose(victim)
            await until(lambda: amended(s, takeover, victim))
            kept = sum(vouched(w) for w in workers if w is not victim)
            g.go.set()
            same_rows(await f)
            stats = went_on(takeover)
            assert stats["recovery"]["amended"] == 1
            assert stats["recovery"]["restarted"] == 0
            # What the survivors had split was not made again, be it of the first ones or begun by the lost worker.
            assert len(g.made) <= N + (6 - kept) + done + 2
            if kept:
                assert sum(worker_statistics(w)["shards_resent"] for w in workers if w is not victim) > 0

    check()


@gen_cluster(**THREE)
async def test_two_workers_lost_at_once(c, s, *workers):
    async with taken_over(s, workers) as (takeover, _):
        g, d = gate(6)
        f = c.compute(d.shuffle("k", npartitions=7))
        await until(lambda: g.begun == g.first + 3 and transferred(s) >= 1)
        await lose(*workers[:2])
        g.go.set()
        same_rows(await f)
        stats = went_on(takeover)
        assert stats["recovery"]["amended"] == 2


@gen_cluster(**THREE)
async def test_what_was_not_retained_is_split_again(c, s, *workers):
    settings = ShuffleSettings(enabled=True, transport="rpc", retain=0.0)
    async with taken_over(s, workers, settings=settings) as (takeover, _):
        g, d = gate(6)
        f = c.compute(d.shuffle("k", npartitions=7))
        await until(lambda: g.begun == g.first + 3 and transferred(s) >= 1)
        # Not the only one that has finished a transfer: those of the lost worker do not count.
        await lose(min(workers, key=lambda w: sum("transfer" in str(k) for k in w.data)))
        g.go.set()
        same_rows(await f)
        stats = went_on(takeover)
        assert stats["recovery"]["transfers_again"] > 0


@gen_cluster(**THREE)
async def test_what_only_the_barrier_finds_undone(c, s, *workers):
    """All have flushed by then, and take inputs again: else the transfer task fails for good."""
    async with taken_over(s, workers) as (takeover, _):
        g, d = gate(6)
        f = c.compute(d.shuffle("k", npartitions=7))
        await until(lambda: g.begun == g.first + 3 and transferred(s) >= 3)
        victim = min(workers, key=vouched)
        await lose(victim)
        await until(lambda: amended(s, takeover, victim))
        before = takeover.statistics()["recovery"]["transfers_again"]
        runs = [r for w in workers if w is not victim for r in w.plugins["shuffle"].shuffle_runs._active_runs.values()]
        # As when a result that was fetched from the lost worker is taken for the task's own: nobody has split it.
        forgotten = next(i for r in runs for i, attempt, _ in r._log.vouched() if not attempt)
        for run in runs:
            run._log._forget(forgotten)
            run._counting.validity.attempts.pop(forgotten, None)
        g.go.set()
        same_rows(await f)
        stats = went_on(takeover)
        assert stats["recovery"]["transfers_again"] > before


@gen_cluster(**THREE)
async def test_a_join_keeps_its_sides_together(c, s, *workers):
    async with taken_over(s, workers) as (takeover, _):
        g, d = gate(6)
        f = c.compute(d.merge(source(left, 4), on="k", how="inner", shuffle_method="p2p"))
        await until(lambda: g.begun == g.first + 3 and transferred(s) >= 1)
        await lose(workers[1])
        g.go.set()
        got = ordered(await f)
        want = ordered(whole(left, N).merge(whole(left, 4), on="k", how="inner"))
        pd.testing.assert_frame_equal(got, want.astype(dict(got.dtypes)))
        stats = takeover.statistics()
        assert stats["errors"] == 0, stats["last_error"]
        assert stats["recovery"]["amended"] >= 1


class Ended(SchedulerPlugin):
    def __init__(self) -> None:
        self.keys: set[object] = set()

    def transition(self, key, start, finish, *args, **kwargs):
        if start == "processing" and finish == "memory":
            self.keys.add(key)


@contextlib.asynccontextmanager
async def after_the_barrier(c, s, d, first=3):
    """The first outputs are in memory, about as many on each worker, the others wait: (outputs, their keys)."""
    go, lock = threading.Event(), threading.Lock()
    #: output -> worker; a join asks twice
    passed: dict[int, str] = {}
    each = -(-first // len(s.workers))
    make = GpurtShuffleRun._get_output_partition

    def held(self, partition_id, *args, **kwargs):
        with lock:
            room = len(passed) < first and sum(where == self.local_address for where in passed.values()) < each
            if room:
                passed.setdefault(partition_id, self.local_address)
            wait = partition_id not in passed
        if wait:
            assert go.wait(120)
        return make(self, partition_id, *args, **kwargs)

    GpurtShuffleRun._get_output_partition = held
    try:
        out = c.persist(d)
        keys = [f.key for f in futures_of(out)]
        await until(lambda: sum(k in s.tasks and s.tasks[k].state == "memory" for k in keys) == first)
        yield out, keys
    finally:
        GpurtShuffleRun._get_output_partition = make
        go.set()


def whose(s, keys):
    """(a worker that has outputs, those in memory on others)."""
    owners = {k: {ws.address for ws in s.tasks[k].who_has} for k in keys if s.tasks[k].state == "memory"}
    victim = sorted(set.union(*owners.values()))[0]
    return victim, {k for k, who in owners.items() if victim not in who}


@pytest.mark.parametrize("retain", [0.1, 0.0])
def test_after_the_barrier_a_lost_worker_costs_its_own_part(retain):
    @gen_cluster(**THREE)
    async def check(c, s, *workers):
        settings = ShuffleSettings(enabled=True, transport="rpc", retain=retain)
        async with taken_over(s, workers, settings=settings) as (takeover, _):
            async with after_the_barrier(c, s, source(left, N).shuffle("k", npartitions=9)) as (out, keys):
                victim, kept = whose(s, keys)
                (lost,) = (w for w in workers if w.address == victim)
                split = vouched(lost)
                ended = Ended()
                s.add_plugin(ended, name="ended")
                await lose(lost)
            same_rows(await c.compute(out))
            stats = went_on(takeover)
            assert stats["recovery"]["amended"] == 1
            assert stats["recovery"]["outputs_opened"] >= 1
            assert not kept & ended.keys
            transfers = sum("transfer" in str(k) for k in ended.keys)
            assert transfers == (split if retain else N)

    check()


@gen_cluster(**THREE)
async def test_two_workers_lost_after_the_barrier(c, s, *workers):
    async with taken_over(s, workers) as (takeover, _):
        async with after_the_barrier(c, s, source(left, N).shuffle("k", npartitions=9)) as (out, _):
            await lose(workers[0])
            await lose(workers[2])
        same_rows(await c.compute(out))
        stats = went_on(takeover)
        assert stats["recovery"]["amended"] == 2


@gen_cluster(**(THREE | NO_DROPS))
async def test_rows_of_an_output_that_was_not_lost_are_there_when_it_is(c, s, *workers):
    """Its owner is lost while another worker has a copy, and then that one."""
    async with taken_over(s, workers) as (takeover, _):
        async with after_the_barrier(c, s, source(left, N).shuffle("k", npartitions=9)) as (out, keys):
            first, _ = whose(s, keys)
            (owner,) = (w for w in workers if w.address == first)
            second = next(w for w in workers if w is not owner)
            copied = [f for f in futures_of(out) if f.key in owner.data]
            await c.replicate(copied, workers=[owner.address, second.address])
            await lose(owner)
            await until(lambda: owner.address not in s.workers)
            assert all(s.tasks[f.key].state == "memory" for f in copied)
            await lose(second)
        same_rows(await c.compute(out))
        stats = went_on(takeover)
        assert stats["recovery"]["outputs_opened"] >= len(copied) + 1


class Waiting:
    """A task's state on the scheduler."""

    def __init__(self, restriction: str) -> None:
        self.worker_restrictions = {restriction}


def test_parked_outputs_do_not_run_into_the_timeout_of_tasks_without_a_worker():
    parked, other = Waiting(NOWHERE), Waiting("tcp://x")
    unrunnable = {parked: 1.0, other: 2.0}
    for limit, order in ((None, [parked, other]), (5.0, [other, parked])):
        scheduler: Any = SimpleNamespace(no_workers_timeout=limit, unrunnable=unrunnable)
        Parking(scheduler, None).wait_on()  # type: ignore[arg-type]
        assert list(unrunnable) == order
    assert unrunnable[other] == 2.0 < unrunnable[parked]


def test_an_owner_that_took_no_part_yet_is_lost_too(monkeypatch):
    run_spec = SimpleNamespace(worker_for={0: "a", 1: "b"})
    state = SimpleNamespace(participating_workers={"a"}, run_spec=run_spec)
    begun: list[str] = []
    monkeypatch.setattr(Amender, "_begin", lambda self, record, worker, released: begun.append(worker))
    runs: Any = SimpleNamespace(
        all=lambda: [RunRecord(state)], changed=lambda record: None, counters=RecoveryCounters()
    )
    amender = Amender(None, runs, None, None, lambda: None)  # type: ignore[arg-type]
    amender.lost("c", "stimulus")
    amender.lost("b", "stimulus")
    assert begun == ["b"]
    # It could not be amended: stock, which comes next, must restart it.
    assert "b" in state.participating_workers


def test_a_question_ends_when_a_worker_is_gone():
    async def check():
        class Cluster:
            def __init__(self):
                self.workers, self.asked = {"a": 1, "b": 2}, asyncio.Event()

            async def broadcast(self, **kwargs):
                self.asked.set()
                await asyncio.Event().wait()  # as long as it takes to find out that nobody is there

        cluster: Any = Cluster()
        calls = Calls(cluster)
        question = asyncio.create_task(calls.broadcast({"op": "x"}, ["a", "b"]))
        await cluster.asked.wait()
        del cluster.workers["b"]
        calls.worker_left()
        assert await asyncio.wait_for(question, 60) is None
        for task in calls.unanswered:
            task.cancel()

    asyncio.run(check())


@gen_cluster(**THREE)
async def test_a_join_after_the_barrier(c, s, *workers):
    async with taken_over(s, workers) as (takeover, _):
        d = source(left, N).merge(source(left, 4), on="k", how="inner", shuffle_method="p2p", npartitions=9)
        async with after_the_barrier(c, s, d, 5) as (out, keys):
            victim, kept = whose(s, keys)
            ended = Ended()
            s.add_plugin(ended, name="ended")
            await lose(next(w for w in workers if w.address == victim))
        got = ordered(await c.compute(out))
        want = ordered(whole(left, N).merge(whole(left, 4), on="k", how="inner"))
        pd.testing.assert_frame_equal(got, want.astype(dict(got.dtypes)))
        stats = takeover.statistics()
        assert stats["errors"] == 0, stats["last_error"]
        assert not kept & ended.keys
        assert stats["runs"] == 2
        assert stats["recovery"]["amended"] == 2
        assert stats["recovery"]["restarted"] == 0


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=60, config=THREE["config"])
async def test_the_only_thread_left_is_not_kept_by_the_barrier(c, s, a, b):
    """A worker is lost while the barrier is flushed, by a task on the other one; its inputs then need that thread."""
    async with taken_over(s, [a, b]) as (takeover, _):
        plugin = s.plugins["shuffle"]
        reached, inner = asyncio.Event(), plugin.waits.passes
        first = []

        async def barrier(shuffle_id, run_id):
            if not first:
                first.append(s.tasks["shuffle-barrier-" + shuffle_id].processing_on.address)
                reached.set()
                await until(lambda: len(s.workers) == 1)
            return await inner(shuffle_id, run_id)

        plugin.waits.passes = barrier
        f = c.compute(source(left, N).shuffle("k", npartitions=5))
        await asyncio.wait_for(reached.wait(), 30)
        await lose(next(w for w in (a, b) if w.address != first[0]))
        same_rows(await f)
        stats = went_on(takeover)
        assert stats["recovery"]["amended"] == 1


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, timeout=60, config=THREE["config"])
async def test_inputs_that_run_again_before_the_survivors_hear_of_the_loss(c, s, *workers):
    """The barrier ran on the lost worker: Dask runs what that had split at once, in workers that have flushed."""
    async with taken_over(s, workers) as (takeover, _):
        plugin = s.plugins["shuffle"]
        reached, inner, amend = asyncio.Event(), plugin.waits.passes, plugin.amender._calls.amend
        first = []

        async def barrier(shuffle_id, run_id):
            if not first:
                first.append(s.tasks["shuffle-barrier-" + shuffle_id].processing_on.address)
                await plugin.shuffle_calls.flush(plugin.runs.get(shuffle_id), list(s.workers))
                reached.set()
                await until(lambda: len(s.workers) == 2)
            return await inner(shuffle_id, run_id)

        async def late(record):
            await asyncio.sleep(0.5)
            return await amend(record)

        plugin.waits.passes, plugin.amender._calls.amend = barrier, late
        f = c.compute(source(left, N).shuffle("k", npartitions=5))
        await asyncio.wait_for(reached.wait(), 30)
        await lose(next(w for w in workers if w.address == first[0]))
        same_rows(await f)
        assert went_on(takeover)["recovery"]["amended"] == 1


@gen_cluster(**THREE)
async def test_a_run_that_cannot_be_amended_to_the_end_is_restarted(c, s, *workers):
    async with taken_over(s, workers) as (takeover, _):
        g, d = gate(6)
        f = c.compute(d.shuffle("k", npartitions=7))
        await until(lambda: g.begun == g.first + 3 and transferred(s) >= 1)
        victim = max(workers, key=vouched)
        with mock.patch.object(Owners, "move", side_effect=OSError("no way")) as move:
            await lose(victim)
            await until(lambda: move.called)
        await until(lambda: takeover.statistics()["recovery"]["restarted"] == 1)
        g.go.set()
        same_rows(await f)


@gen_cluster(nthreads=[])
async def test_a_lost_peer_is_disconnected_by_two_runs_at_once(s):
    """While a connect to it is under way, which Dask's pool ends once and no second time."""
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    pool = await ConnectionPool()
    connects = [asyncio.create_task(pool.connect(address)) for _ in range(2)]
    await until(lambda: address in pool._connecting and len(pool._connecting[address]) == 2)
    for _ in range(2):
        PeerCalls(SimpleNamespace(rpc=pool), set(), lambda address: None).disconnect([address])
        await asyncio.sleep(0)  # the connects are being ended
    ends = await asyncio.wait_for(asyncio.gather(*connects, return_exceptions=True), 10)
    assert [type(end) for end in ends] == [CommClosedError] * 2
    await pool.close()
    silent.close()


@gen_cluster(**THREE)
async def test_a_flush_that_comes_late_does_not_close_a_run_that_was_amended(c, s, *workers):
    """The survivors hear of the loss first, then of the flush of before it: what is split again must not wait."""
    async with taken_over(s, workers) as (takeover, _):
        plugin = s.plugins["shuffle"]
        flushing, late, flushed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        inner, amend = s.broadcast, plugin.amender._calls.amend

        async def broadcast(*, msg, workers, **kwargs):
            if isinstance(msg.get("data"), dict) and msg["data"].get("gpurt") == "flush" and not flushing.is_set():
                flushing.set()
                await late.wait()
                answers = await inner(msg=msg, workers=[w for w in workers if w in s.workers], **kwargs)
                flushed.set()
                return answers
            return await inner(msg=msg, workers=workers, **kwargs)

        async def then_flush(record):
            answers = await amend(record)
            late.set()
            await flushed.wait()
            return answers

        s.broadcast, plugin.amender._calls.amend = broadcast, then_flush
        f = c.compute(source(left, N).shuffle("k", npartitions=5))
        await asyncio.wait_for(flushing.wait(), 30)
        barrier = next(ts for ts in s.tasks.values() if str(ts.key).startswith("shuffle-barrier"))
        await lose(max((w for w in workers if w.address != barrier.processing_on.address), key=vouched))
        same_rows(await asyncio.wait_for(f, 20))
        stats = went_on(takeover)
        assert stats["recovery"]["amended"] == 1
        assert stats["recovery"]["transfers_again"] >= 1


FAILS = threading.Event()


def fails_later(i: int) -> pd.DataFrame:
    if FAILS.is_set():
        raise OSError("the file is gone")
    return left(i)


@gen_cluster(**THREE)
async def test_an_input_that_fails_when_it_is_made_again_fails_the_outputs_that_wait_for_it(c, s, *workers):
    FAILS.clear()
    settings = ShuffleSettings(enabled=True, transport="rpc", retain=0.0)
    async with taken_over(s, workers, settings=settings) as (takeover, _):
        async with after_the_barrier(c, s, source(fails_later, N).shuffle("k", npartitions=9)) as (out, keys):
            victim, _kept = whose(s, keys)
            FAILS.set()
            await lose(next(w for w in workers if w.address == victim))
        with pytest.raises(OSError, match="the file is gone"):
            await asyncio.wait_for(c.compute(out), 30)
        assert takeover.statistics()["errors"] == 0, takeover.statistics()["last_error"]
        await until(lambda: not takeover.statistics()["recovery"]["amending"])


class LosesOne(SchedulerPlugin):
    """Has a worker leave as soon as a task has failed."""

    def __init__(self, scheduler, address: str) -> None:
        self.scheduler, self.address = scheduler, address
        self.leaving: asyncio.Task | None = None

    def transition(self, key, start, finish, *args, **kwargs) -> None:
        if finish == "erred" and self.leaving is None:
            self.leaving = asyncio.ensure_future(self.scheduler.remove_worker(self.address, stimulus_id="second"))


@gen_cluster(**THREE)
async def test_a_worker_that_is_lost_when_such_an_input_has_just_failed_leaves_no_output_waiting(c, s, *workers):
    """Dask's restart of a shuffle raises then: it counts on the barrier to have failed, too."""
    FAILS.clear()
    settings = ShuffleSettings(enabled=True, transport="rpc", retain=0.0)
    async with taken_over(s, workers, settings=settings) as (takeover, _):
        async with after_the_barrier(c, s, source(fails_later, N).shuffle("k", npartitions=9)) as (out, keys):
            f = c.compute(out)
            victim, _kept = whose(s, keys)
            second = next(w.address for w in workers if w.address != victim)
            s.add_plugin(LosesOne(s, second), name="loses-one")
            FAILS.set()
            await lose(next(w for w in workers if w.address == victim))
        await until(lambda: second not in s.workers)
        with pytest.raises(OSError, match="the file is gone"):
            await asyncio.wait_for(f, 30)
        assert takeover.statistics()["errors"] == 0, takeover.statistics()["last_error"]
        await until(lambda: not takeover.statistics()["recovery"]["amending"])


LAST = threading.Event()
LAST_BEGAN = threading.Event()


def last_waits(i: int) -> pd.DataFrame:
    if i == N - 1:
        LAST_BEGAN.set()
        assert LAST.wait(60)
    return left(i).add_suffix("_")


# Two threads each: no input may have to wait behind the last one.
@gen_cluster(**THREE | {"nthreads": [("127.0.0.1", 2)] * 3})
async def test_an_input_that_fails_when_it_is_made_again_fails_a_join_whose_other_side_comes_later(c, s, *workers):
    """The outputs wait for the other side's barrier when the input fails. They must not wait for ever."""
    FAILS.clear()
    LAST.clear()
    LAST_BEGAN.clear()
    settings = ShuffleSettings(enabled=True, transport="rpc", retain=0.0)
    async with taken_over(s, workers, settings=settings) as (takeover, _):
        sides = source(fails_later, N), source(last_waits, N)
        f = c.compute(sides[0].merge(sides[1], left_on="k", right_on="k_", shuffle_method="p2p", broadcast=False))
        try:
            await until(lambda: LAST_BEGAN.is_set() and any(one.passed for one in takeover._plugin.runs.all()))
            waits = {ts.processing_on.address for ts in s.tasks.values() if ts.key[-1] == N - 1 and ts.processing_on}
            FAILS.set()
            await lose(next(w for w in workers if w.address not in waits))
            await until(lambda: any(ts.state == "erred" for ts in s.tasks.values()))
            await until(lambda: not takeover.statistics()["recovery"]["amending"])
        finally:
            LAST.set()
        with pytest.raises(OSError, match="the file is gone"):
            await asyncio.wait_for(f, 20)
        assert takeover.statistics()["errors"] == 0, takeover.statistics()["last_error"]


@gen_cluster(**THREE)
async def test_rows_that_cannot_be_made_again_are_missed_by_no_output(c, s, *workers):
    """Scattered inputs are lost with a worker after the barrier. The futures are cancelled then, as with Dask."""
    inputs = [await c.scatter(left(i), workers=[workers[i % 3].address]) for i in range(N)]
    d = dd.from_delayed([delayed(one) for one in inputs], meta=left(0).iloc[:0], verify_meta=False)
    async with taken_over(s, workers) as (takeover, _):
        async with after_the_barrier(c, s, d.shuffle("k", npartitions=9)) as (out, keys):
            victim, _kept = whose(s, keys)
            await lose(next(w for w in workers if w.address == victim))
        with pytest.raises(FutureCancelledError):
            same_rows(await asyncio.wait_for(c.compute(out), 30))
        assert takeover.statistics()["errors"] == 0, takeover.statistics()["last_error"]


@gen_cluster(**THREE)
async def test_an_output_is_made_again_without_inputs_that_are_gone_if_their_rows_are_there(c, s, *workers):
    """The client has let scattered inputs go, so Dask forgets them after the barrier. An output's task fails."""
    failed: list[int] = []
    make = GpurtShuffleRun._get_output_partition

    def fails_once(self, partition_id, *args, **kwargs):
        df = make(self, partition_id, *args, **kwargs)
        if not failed:
            failed.append(partition_id)
            raise ValueError("once")
        return df

    inputs = [await c.scatter(left(i), workers=[workers[i % 3].address]) for i in range(N)]
    d = dd.from_delayed([delayed(one) for one in inputs], meta=left(0).iloc[:0], verify_meta=False)
    async with taken_over(s, workers) as (takeover, _):
        with mock.patch.object(GpurtShuffleRun, "_get_output_partition", fails_once):
            f = c.compute(d.shuffle("k", npartitions=9), retries=2)
            del inputs, d
            same_rows(await asyncio.wait_for(f, 30))
        assert failed
        assert went_on(takeover)["recovery"]["outputs_void"] == 1
