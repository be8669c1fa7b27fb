"""After the outputs were made: what is lost then costs its own part, for as long as the query goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import SimpleNamespace
from unittest import mock

import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Client, SchedulerPlugin, futures_of
from distributed.utils_test import gen_cluster

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.shuffle.counters import ShuffleCounters
from dask_gpurt.shuffle.scheduler import barrier_hold
from dask_gpurt.shuffle.scheduler.barrier_hold import HOLDER
from dask_gpurt.shuffle.worker.output_builder import Absent, OutputBuilder
from dask_gpurt.shuffle.worker.owners import Owners
from tests.shuffle.helpers import left, ordered, source, taken_over, went_on, whole
from tests.shuffle.test_amendment import (
    GATES,
    NO_DROPS,
    THREE,
    Ended,
    N,
    after_the_barrier,
    gate,
    gated,
    lose,
    same_rows,
    until,
    vouched,
    whose,
)

pytestmark = pytest.mark.cluster
#: one thread may wait
TWICE = THREE | {"nthreads": [("127.0.0.1", 2)] * 3}
GOES_ON: list[threading.Event] = []
BEGUN: list[threading.Event] = []


def last(frame, which):
    """What is made of an output; not before it is let go."""
    BEGUN[which].set()
    assert GOES_ON[which].wait(120)
    return len(frame)


@contextlib.asynccontextmanager
async def all_made(c, s, workers, d):
    """(outputs, their keys, the task that is made of them, the worker that it runs on): all outputs are in memory."""
    GOES_ON.append(threading.Event())
    BEGUN.append(threading.Event())
    out = c.persist(d)
    keys = [f.key for f in futures_of(out)]
    end = c.submit(last, futures_of(out)[0], len(GOES_ON) - 1, pure=False)
    try:
        await until(lambda: all(k in s.tasks and s.tasks[k].state == "memory" for k in keys))
        await until(BEGUN[-1].is_set)
        yield out, keys, end, s.tasks[end.key].processing_on.address
    finally:
        GOES_ON[-1].set()


def barrier_of(s):
    (key,) = (key for key in s.tasks if str(key).startswith("shuffle-barrier-"))
    return s.tasks[key]


@pytest.mark.parametrize("retain", [0.1, 0.0])
def test_an_output_that_its_owner_handed_out_is_opened_where_it_is(retain):
    """It was copied to another worker, as for a task that was stolen, and lost there."""

    @gen_cluster(**(THREE | NO_DROPS))
    async def check(c, s, *workers):
        settings = ShuffleSettings(enabled=True, transport="rpc", retain=retain)
        async with taken_over(s, workers, settings=settings) as (takeover, _):
            async with after_the_barrier(c, s, source(left, N).shuffle("k", npartitions=9)) as (out, keys):
                victim, kept = whose(s, keys)
                (lost,) = (w for w in workers if w.address == victim)
                split = vouched(lost)
                gone = sorted(kept)[0]
                (owner,) = (ws.address for ws in s.tasks[gone].who_has)
                await s.gather_on_worker(victim, {gone: [owner]})
                await s.delete_worker_data(owner, [gone], "test")
                ended = Ended()
                s.add_plugin(ended, name="ended")
                await lose(lost)
            same_rows(await c.compute(out))
            stats = went_on(takeover)
            assert stats["recovery"]["outputs_void"] == 1
            assert not (kept - {gone}) & ended.keys
            # The rows that survivors had for themselves were retained, too.
            assert sum("transfer" in str(k) for k in ended.keys) == (split if retain else N)

    check()


@gen_cluster(**(TWICE | NO_DROPS))
async def test_a_worker_lost_after_the_last_output_costs_its_own_part(c, s, *workers):
    async with taken_over(s, workers) as (takeover, _):
        plugin = s.plugins["shuffle"]
        async with all_made(c, s, workers, source(left, N).shuffle("k", npartitions=9)) as (out, keys, end, where):
            lost = next(w for w in workers if w.address != where)
            split = vouched(lost)
            kept = {k for k in keys if any(ws.address != lost.address for ws in s.tasks[k].who_has)}
            assert len(kept) < len(keys)
            assert not barrier_of(s).waiters
            # It keeps no worker that is to be closed in good order.
            assert len(plugin.valid_workers_downscaling(s, list(s.workers.values()))) == 3
            ended = Ended()
            s.add_plugin(ended, name="ended")
            await lose(lost)
            await until(lambda: lost.address not in s.workers and all(s.tasks[k].state == "memory" for k in keys))
            assert not kept & ended.keys
            assert sum("transfer" in str(k) for k in ended.keys) == split
        same_rows(await c.compute(out))
        assert await end > 0
        went_on(takeover)
        await until(lambda: not plugin.active_shuffles)
        assert HOLDER not in s.clients


@gen_cluster(**THREE)
async def test_nothing_is_held_for_a_client_that_has_left(c, s, *workers, monkeypatch):
    """Else a cluster that closes before the next look warns of a result that it has lost."""
    monkeypatch.setattr(barrier_hold, "LOOK_SECONDS", 600)
    async with taken_over(s, workers):
        async with Client(s.address, asynchronous=True, set_as_default=False) as client:
            same_rows(await client.compute(source(left, N).shuffle("k", npartitions=9)))
            assert HOLDER in s.clients
        await until(lambda: HOLDER not in s.clients and not s.tasks)


@gen_cluster(**(TWICE | NO_DROPS))
async def test_copies_that_the_memory_manager_drops_are_made_again(c, s, *workers):
    """Once the outputs are made nothing waits for the barrier; whoever has the only copy may be lost then."""
    async with taken_over(s, workers) as (takeover, _):
        async with all_made(c, s, workers, source(left, N).shuffle("k", npartitions=9)) as (out, keys, end, _):
            barrier = barrier_of(s)
            await until(lambda: len(barrier.who_has) == 3)
            s.extensions["amm"].run_once()
            await until(lambda: len(barrier.who_has) == 1)
            (left_over,) = (ws.address for ws in barrier.who_has)
            await until(lambda: len(barrier.who_has) == 3)
            await lose(next(w for w in workers if w.address == left_over))
            await until(lambda: left_over not in s.workers and all(s.tasks[k].state == "memory" for k in keys))
        same_rows(await c.compute(out))
        assert await end > 0
        assert went_on(takeover)["runs"] == 1


@gen_cluster(**TWICE)
async def test_the_first_side_of_a_join_survives_the_worker_that_had_its_barrier(c, s, *workers):
    """While the other side is still split."""
    async with taken_over(s, workers) as (takeover, _):
        g, _ = gate(0)
        d = dd.from_map(gated, [0, 1], gate=len(GATES) - 1, meta=left(0).iloc[:0])  # two threads wait
        f = c.compute(source(left, 4).merge(d, on="k", how="inner", shuffle_method="p2p"))
        barriers = "shuffle-barrier-"
        await until(lambda: any(str(k).startswith(barriers) and ts.state == "memory" for k, ts in s.tasks.items()))
        (first,) = (ts for k, ts in s.tasks.items() if str(k).startswith(barriers) and ts.state == "memory")
        holder = next(iter(first.who_has)).address
        await until(lambda: len(first.who_has) == 3)
        await lose(next(w for w in workers if w.address == holder))
        await until(lambda: holder not in s.workers)
        assert first.state == "memory"
        g.go.set()
        got = ordered(await f)
        want = ordered(whole(left, 4).merge(whole(left, 2), on="k", how="inner"))
        pd.testing.assert_frame_equal(got, want.astype(dict(got.dtypes)))
        stats = takeover.statistics()
        assert stats["errors"] == 0, stats["last_error"]
        assert stats["runs"] == 2
        assert stats["recovery"]["restarted"] == 0


@gen_cluster(**THREE)
async def test_a_copy_of_a_barrier_that_is_lost_meanwhile_is_dropped(c, s, *workers):
    """Else its worker takes the number of the old run, which it was never told to drop, for that of the next."""
    async with taken_over(s, workers) as (takeover, _):
        g, _ = gate(0)
        slow = dd.from_map(gated, list(range(2)), gate=len(GATES) - 1, meta=left(0).iloc[:0])
        copies, late = [], []

        def keep(address, keys, *, stimulus_id):
            """Ask one, and keep back what it says of its copy."""
            if copies:
                return
            copies.append((keys[0], next(w for w in workers if w.address == address)))
            send = copies[0][1].batched_stream.send
            patch.setattr(
                copies[0][1].batched_stream,
                "send",
                lambda *msgs: late.extend(msgs) if any(m.get("keys") == keys for m in msgs) else send(*msgs),
            )
            ask(address, keys, stimulus_id=stimulus_id)

        ask = s.request_acquire_replicas
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(s, "request_acquire_replicas", keep)
            f = c.compute(source(left, 4).merge(slow, on="k", how="inner", shuffle_method="p2p"))
            await until(lambda: late)
            ((key, receiver),) = copies
            assert key in receiver.data
            (holder,) = (ws.address for ws in s.tasks[key].who_has)
            await lose(next(w for w in workers if w.address == holder))
            await until(lambda: len(s.workers) == 2)
            patch.undo()
            receiver.batched_stream.send(*late)
            # Dropped, until it has that of another run, which the scheduler knows of.
            await until(
                lambda: (
                    key not in receiver.data or receiver.address in {ws.address for ws in s.tasks[key].who_has or ()}
                )
            )
        g.go.set()
        got = ordered(await f)
        want = ordered(whole(left, 4).merge(whole(left, 2), on="k", how="inner"))
        pd.testing.assert_frame_equal(got, want.astype(dict(got.dtypes)))
        assert takeover.statistics()["errors"] == 0


@gen_cluster(**(TWICE | NO_DROPS))
async def test_a_copy_that_the_scheduler_has_lost_sight_of_ends_with_its_run(c, s, *workers):
    """However that came about. Else its outputs of the next run take the number of the old run, and fail."""
    async with taken_over(s, workers) as (takeover, _), contextlib.AsyncExitStack() as stack:
        d = source(left, N).shuffle("k", npartitions=9)
        async with all_made(c, s, workers, d) as (out, _keys, end, _where):
            barrier = barrier_of(s)
            await until(lambda: len(barrier.who_has) == 3)
            receiver = next(w for w in workers if w.state.tasks[barrier.key].state == "memory")
            held, send = [], receiver.batched_stream.send

            def late(*msgs):
                held.extend(msg for msg in msgs if msg["op"] == "release-worker-data")
                send(*(msg for msg in msgs if msg["op"] != "release-worker-data"))

            with mock.patch.object(receiver.batched_stream, "send", late):
                with mock.patch.object(barrier_hold.Holder, "_without", return_value=[]):
                    s.request_remove_replicas(receiver.address, [barrier.key], stimulus_id="test")
                    await until(lambda: held)
                await until(lambda: s.workers[receiver.address] in barrier.who_has)
            assert [msg["key"] for msg in held] == [barrier.key]
            stack.enter_context(mock.patch.object(barrier_hold.Holder, "_without", return_value=[]))
            send(*held)
            await until(lambda: s.workers[receiver.address] not in barrier.who_has)
            assert barrier.key in receiver.data
        assert await end > 0
        del out, end
        await until(lambda: not s.tasks)
        same_rows(await c.compute(d))
        assert takeover.statistics()["runs"] == 2
        assert takeover.statistics()["errors"] == 0


@gen_cluster(**(TWICE | NO_DROPS))
async def test_a_worker_that_fetches_a_barrier_is_not_given_it_besides(c, s, *workers):
    """Dask's state machine ends a worker where a value is dropped that is still on its way there."""
    async with taken_over(s, workers) as (takeover, _):
        slow, asked = [], []

        def late(worker):
            stock = worker.handlers["get_data"]

            async def get_data(comm, keys=(), who="", **kwargs):
                if any(str(key).startswith("shuffle-barrier-") for key in keys):
                    asked.append(who)
                    receiver = next(w for w in workers if w.address == who)
                    if not slow:
                        slow.append(receiver)
                        # Until the value came another way, was used and dropped; or for long enough to have done so.
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(dropped.wait(), 3)
                return await stock(comm, keys=keys, who=who, **kwargs)

            return get_data

        dropped = asyncio.Event()
        for w in workers:
            w.handlers["get_data"] = late(w)
        f = c.compute(source(left, N).shuffle("k", npartitions=9))
        await until(lambda: slow)
        while not f.done() and not dropped.is_set():
            await asyncio.sleep(0.2)
            states = [ts.state for key, ts in slow[0].state.tasks.items() if str(key).startswith("shuffle-barrier-")]
            if not {"flight", "memory"} & set(states):
                dropped.set()
        same_rows(await f)
        await asyncio.sleep(0.2)
        assert len(s.workers) == 3
        assert asked.count(slow[0].address) == 1
        assert takeover.statistics()["errors"] == 0


@gen_cluster(**TWICE)
async def test_a_run_that_is_held_does_not_keep_the_plugin(c, s, *workers):
    async with taken_over(s, workers) as (takeover, _):
        async with all_made(c, s, workers, source(left, N).shuffle("k", npartitions=9)) as (out, *_rest):
            assert takeover.statistics()["active"] == 1
            await takeover.uninstall()
            assert HOLDER not in s.clients
        same_rows(await c.compute(out))


def test_a_run_is_held_no_longer_than_that(monkeypatch):
    monkeypatch.setattr(barrier_hold, "HOLD_SECONDS", 0.0)

    @gen_cluster(**TWICE)
    async def check(c, s, *workers):
        async with taken_over(s, workers):
            async with all_made(c, s, workers, source(left, N).shuffle("k", npartitions=9)) as (out, _, end, _where):
                await until(lambda: not s.plugins["shuffle"].active_shuffles)
                assert end.status == "pending"
                assert HOLDER not in s.clients
            same_rows(await c.compute(out))

    check()


@gen_cluster(**(TWICE | NO_DROPS))
async def test_a_barrier_that_nothing_waits_for_is_not_made_again(c, s, *workers, monkeypatch):
    monkeypatch.setattr(barrier_hold, "COPIES", 1)  # only one worker has it when that is lost
    async with taken_over(s, workers) as (takeover, _):
        async with all_made(c, s, workers, source(left, N).shuffle("k", npartitions=9)) as (out, keys, _, where):
            lost = next(w for w in workers if w.address != where)
            barrier = barrier_of(s)
            there = [k for k in keys if lost.address in {ws.address for ws in s.tasks[k].who_has}]
            await s.gather_on_worker(where, {k: [lost.address] for k in there})
            if lost.address not in {ws.address for ws in barrier.who_has}:
                await s.gather_on_worker(lost.address, {barrier.key: [next(iter(barrier.who_has)).address]})
            for ws in [ws for ws in barrier.who_has if ws.address != lost.address]:
                await s.delete_worker_data(ws.address, [barrier.key], "test")
            ended = Ended()
            s.add_plugin(ended, name="ended")
            await lose(lost)
            await until(lambda: lost.address not in s.workers)
            assert barrier.state in ("released", "forgotten")
            assert not [ts for ts in s.tasks.values() if "transfer" in str(ts.key) and ts.state != "released"]
        same_rows(await c.compute(out))
        assert not any("transfer" in str(k) for k in ended.keys)
        assert takeover.statistics()["errors"] == 0


def test_nothing_is_taken_of_an_output_that_is_open():
    async def check():
        opened = {3}

        async def settle():
            pass

        async def take(part):
            opened.discard(1)
            bound[1] = 7  # an amendment, while the store reads
            return ["rows"]

        bound: dict[int, int] = {}
        outputs = OutputBuilder(
            SimpleNamespace(raise_if_closed=lambda: None),  # type: ignore[arg-type]
            sync=None,  # type: ignore[arg-type]
            rows=None,  # type: ignore[arg-type]
            owners=Owners("a", dict.fromkeys(range(9), "a"), None),
            counting=SimpleNamespace(  # type: ignore[arg-type]
                ready=lambda part: part not in opened, bound=bound, of=lambda part: f"validity of {part}"
            ),
            receiver=SimpleNamespace(settle=settle, take=take),  # type: ignore[arg-type]
            scheduler=None,  # type: ignore[arg-type]
            lost=set(),
            made_all=lambda all: None,
            counters=ShuffleCounters(),
        )
        outputs._taken.add(2)
        assert await outputs._take(3) is Absent.OPEN
        assert await outputs._take(2) is Absent.TAKEN
        with pytest.raises(Exception, match="void while it was taken"):
            await outputs._take(1)
        assert await outputs._take(4) == ("validity of 4", ["rows"])

    asyncio.run(check())


@gen_cluster(**THREE)
async def test_a_barrier_whose_worker_is_lost_after_it_passed_runs_again(c, s, *workers):
    """Its result is under way: outputs are pinned, none is made."""
    async with taken_over(s, workers) as (takeover, _):
        pin, first = takeover.pin, []

        async def pinned(shuffle_id, run_id, plugin):
            await pin(shuffle_id, run_id, plugin)
            if not first:
                first.append(s.tasks["shuffle-barrier-" + shuffle_id].processing_on.address)
                await lose(next(w for w in workers if w.address == first[0]))
                await until(lambda: first[0] not in s.workers)

        takeover.pin = pinned
        same_rows(await c.compute(source(left, N).shuffle("k", npartitions=9)))
        stats = takeover.statistics()
        assert first
        assert stats["errors"] == 0, stats["last_error"]
        assert stats["runs"] == 1
        assert stats["recovery"]["restarted"] == 0
        assert stats["recovery"]["amended"] == 1


@pytest.mark.parametrize("copied", [False, True])
@gen_cluster(**THREE)
async def test_a_worker_is_lost_while_the_answer_that_the_barrier_has_passed_is_under_way(
    c, s, *workers, copied, monkeypatch
):
    """What the barrier's task was answered is out of date when it ends: outputs wait until it has passed again."""
    async with taken_over(s, workers) as (takeover, _):
        plugin = takeover._plugin
        pin, amend, first = takeover.pin, plugin.shuffle_calls.amend, []
        barriers = []

        async def amended(record):
            if first and len(first) == 1:
                # The barrier's task ends before anything is heard of the epoch.
                first.append(record.id)
                barrier = s.tasks["shuffle-barrier-" + record.id]
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(until(lambda: barrier.key in barriers), 2 if copied else 0.2)
            return await amend(record)

        async def pinned(shuffle_id, run_id, plugin):
            await pin(shuffle_id, run_id, plugin)
            if first:
                return
            barrier = s.tasks["shuffle-barrier-" + shuffle_id]
            if copied:  # else the loss of a transfer's result has the barrier's task wait
                await s.replicate([ts.key for ts in barrier.dependencies])
            lost = next(w for w in workers if w.address != barrier.processing_on.address)
            first.append(lost.address)
            await lose(lost)
            await until(lambda: lost.address not in s.workers)

        class Heard(SchedulerPlugin):
            def transition(self, key, start, finish, *args, **kwargs):
                if finish == "memory" and key.startswith("shuffle-barrier"):
                    barriers.append(key)

        monkeypatch.setattr(takeover, "pin", pinned)
        monkeypatch.setattr(plugin.shuffle_calls, "amend", amended)
        s.add_plugin(Heard(), name="heard")
        same_rows(await asyncio.wait_for(c.compute(source(left, N).shuffle("k", npartitions=9)), 60))
        stats = takeover.statistics()
        assert len(first) == 2
        assert stats["errors"] == 0, stats["last_error"]
        assert stats["runs"] == 1
        assert stats["recovery"]["restarted"] == 0
        assert stats["recovery"]["amended"] == 1
        assert len(barriers) == 2 or not copied
