"""Large outputs go to a less loaded worker when all inputs are split; nothing else changes, whoever is lost then."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.dataframe.shuffle import partitioning_index
from distributed import Reschedule, futures_of, wait
from distributed.shuffle._shuffle import DataFrameShuffleSpec
from distributed.utils_test import gen_cluster

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.shuffle.counters import worker_statistics
from dask_gpurt.shuffle.protocol import rebalance_plan
from dask_gpurt.shuffle.protocol.rebalance_plan import Output
from dask_gpurt.shuffle.scheduler import barrier_hold, rebalance
from dask_gpurt.shuffle.scheduler.phases import RunEvent
from dask_gpurt.shuffle.scheduler.runs import Runs
from dask_gpurt.shuffle.spec import GpurtShuffleSpec
from dask_gpurt.shuffle.worker.handover import Handover
from dask_gpurt.shuffle.worker.resend import Resender
from dask_gpurt.shuffle.worker.run import GpurtShuffleRun
from dask_gpurt.shuffle.worker.scheduler_calls import SchedulerCalls
from dask_gpurt.shuffle.worker.sender import Sender
from dask_gpurt.shuffle.worker.shard_stores import MemoryShardStore
from tests.shuffle.helpers import NastyStore, ordered, taken_over, until, whole

pytestmark = pytest.mark.cluster
N = 6
OUTPUTS = 12


class Hashable:
    """Something with the attributes of another thing, to be a key."""

    def __init__(self, of: SimpleNamespace) -> None:
        self.__dict__.update(vars(of))


def options(workers: int):
    return {
        "client": True,
        "nthreads": [("127.0.0.1", 1)] * workers,
        "timeout": 180,
        "config": {"distributed.p2p.comm.retry.delay.min": "100ms"},
    }


def hot_keys(workers: int, outputs: int = OUTPUTS, count: int = 2) -> list[int]:
    """Keys of different outputs of one worker: outputs are given out in ranges."""
    keys = pd.DataFrame({"k": np.arange(1000)})
    parts = partitioning_index(keys.astype("f8"), outputs)  # as Dask casts numbers
    first = [int(keys.k[parts == p].iloc[0]) for p in range(outputs // workers)]
    return first[:count]


def hot(i: int, workers: int = 2, n: int = 3000, outputs: int = OUTPUTS, count: int = 2) -> pd.DataFrame:
    """Half of all rows have one of two keys, or of so many."""
    r = np.random.default_rng(i)
    k = np.where(r.random(n) < 0.5, r.choice(hot_keys(workers, outputs, count), n), r.integers(0, 1000, n))
    return pd.DataFrame({"k": k, "i": i * n + np.arange(n), "s": pd.Series(k).astype("str"), "v": r.random(n)})


def other(i: int) -> pd.DataFrame:
    return pd.DataFrame({"k": np.arange(i * 200, i * 200 + 200), "w": np.arange(200) * 0.5})


def rows(workers: int = 2):
    return dd.from_map(hot, list(range(N)), workers=workers, meta=hot(0).iloc[:0])


def others():
    return dd.from_map(other, list(range(5)), meta=other(0).iloc[:0])


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Moving is free, and worth it for outputs of any size."""
    monkeypatch.setattr(rebalance_plan, "LEAST_BYTES", 100 << 10)
    monkeypatch.setattr(rebalance, "FIXED_SECONDS", 0.0)
    monkeypatch.setattr(
        rebalance.Binder, "_prices", lambda self, *args: rebalance_plan.Prices(1 / 1e6, 1 / 1e9, 1 / 1e9, 0.0)
    )


def held(s, out) -> dict[str, int]:
    """Bytes of outputs by worker."""
    found: dict[str, int] = dict.fromkeys(s.workers, 0)
    for f in futures_of(out):
        (ws,) = s.tasks[f.key].who_has
        found[ws.address] += s.tasks[f.key].nbytes
    return found


def told(takeover):
    stats = takeover.statistics()
    assert stats["errors"] == 0, stats["last_error"]
    return stats


def exact(frames, want) -> None:
    for a, b in zip(frames, want, strict=True):
        pd.testing.assert_frame_equal(a, b)


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("store", [MemoryShardStore, NastyStore])
def test_one_of_two_large_outputs_goes(store, device):
    if device:
        pytest.importorskip("rmm")
        from tests.backends.host_frames import MEMORY, HostFrame

    def source():
        d = rows()
        return d.map_partitions(HostFrame, meta=HostFrame(d._meta)) if device else d

    @gen_cluster(**options(2))
    async def check(c, s, a, b):
        spread, frames = [], []
        for bind in (False, True):
            settings = ShuffleSettings(enabled=True, transport="rpc", late_binding=bind, device_frames=device)
            async with taken_over(s, [a, b], store=store, settings=settings) as (takeover, _):
                out = c.persist(source().shuffle("k", npartitions=OUTPUTS))
                await wait(out)
                sizes = held(s, out).values()
                spread.append(max(sizes) / sum(sizes))
                frames.append(await c.gather(futures_of(out)))
                stats = told(takeover)
                assert stats["late_binding"]["outputs"] == (1 if bind else 0)
                assert stats["recovery"]["amended"] == stats["recovery"]["restarted"] == 0
                assert stats["runs"] == 1
                del out
                await until(lambda: not s.plugins["shuffle"].active_shuffles)
                await takeover.uninstall()
        assert spread[0] > 0.7
        assert spread[1] < 0.6
        exact(*frames)
        assert worker_statistics(a)["outputs_handed"] + worker_statistics(b)["outputs_handed"] == 1

    check()
    assert not device or (MEMORY.copied_bytes and not MEMORY.faults)


@gen_cluster(**options(2))
async def test_several_outputs_go_to_one_worker(c, s, a, b):
    """Each brings rows of every input; none may be taken for those of another."""
    frames: list[list[pd.DataFrame]] = []
    ids: list[int] = []
    encoded = Resender.encoded

    def numbered(self, *args):
        out = encoded(self, *args)
        ids.extend(one.input_id for one in out)
        return out

    for bind in (False, True):
        settings = ShuffleSettings(enabled=True, transport="rpc", late_binding=bind)
        async with taken_over(s, [a, b], settings=settings) as (takeover, _):
            d = dd.from_map(hot, list(range(N)), n=6000, count=4, meta=hot(0).iloc[:0])
            with patch.object(Resender, "encoded", numbered):
                out = c.persist(d.shuffle("k", npartitions=OUTPUTS))
                frames.append(await c.gather(futures_of(out)))
            assert told(takeover)["late_binding"]["outputs"] == (2 if bind else 0)
            del out
            await until(lambda: not s.plugins["shuffle"].active_shuffles)
            await takeover.uninstall()
    exact(*frames)
    assert len(set(ids)) == len(ids) >= 2 * N


@gen_cluster(**options(2))
async def test_what_was_done_is_told(c, s, a, b):
    async with taken_over(s, [a, b]) as (takeover, _):
        d = dd.from_map(hot, list(range(N)), n=20_000, outputs=24, meta=hot(0).iloc[:0])
        out = c.persist(d.shuffle("k", npartitions=24))
        await until(lambda: takeover.statistics()["skew"]["skewed"] == 1)
        latest = told(takeover)["skew"]["latest"]
        moved = [text for text in latest if "moved from" in text]
        assert len(moved) == 1
        assert a.address in moved[0]
        assert b.address in moved[0]
        assert len(latest) > 1
        del out


@gen_cluster(**options(2))
async def test_the_sides_of_a_join_move_together(c, s, a, b):
    async with taken_over(s, [a, b]) as (takeover, _):
        states, begin = [], takeover._plugin.binder.begin

        def seen(record):
            states.append(record.amendments)
            return begin(record)

        takeover._plugin.binder.begin = seen
        d = rows().merge(others(), on="k", how="inner", shuffle_method="p2p", npartitions=OUTPUTS, broadcast=False)
        out = c.persist(d)
        await wait(out)
        sizes = held(s, out).values()
        got = pd.concat(await c.gather(futures_of(out)))
        want = ordered(whole(hot, N).merge(whole(other, 5), on="k"))
        pd.testing.assert_frame_equal(ordered(got), want.astype(dict(got.dtypes)))
        stats = told(takeover)
        assert stats["late_binding"] == {"runs": 1, "outputs": 1, "bytes": stats["late_binding"]["bytes"]}
        assert stats["recovery"]["restarted"] == 0
        assert max(sizes) / sum(sizes) < 0.65
        # A worker that is lost from now on costs no more than else.
        assert all(state.moves and not state.handing for state in states)
        assert worker_statistics(a)["outputs_handed"] + worker_statistics(b)["outputs_handed"] == 2


@gen_cluster(**options(2))
async def test_what_an_earlier_query_made_of_a_join_does_not_move(c, s, a, b):
    """One side was Dask's then, so that nothing moved; the other is still held, and its rows are gone."""
    async with taken_over(s, [a, b]) as (takeover, _):
        choose, left_to_dask, ask = takeover.choose, [True], SchedulerCalls.open_again
        takeover.choose = lambda spec: spec if "w" in spec.meta and left_to_dask else choose(spec)
        d = rows().merge(others(), on="k", how="inner", shuffle_method="p2p", npartitions=OUTPUTS, broadcast=False)
        want = ordered(whole(hot, N).merge(whole(other, 5), on="k"))

        async def later(self: Any, key: Any) -> bool:
            """Were an output moved, its task would be the first; what others ask for has all rows sent once more."""
            joins = [ts for ts in s.tasks.values() if ts.key[0] == key[0]]
            if takeover._plugin.binder.moved and not any(ts.state == "memory" for ts in joins):
                raise Reschedule
            return await ask(self, key)

        held = patch.object(barrier_hold, "LOOK_SECONDS", 60.0)
        with held, patch.object(SchedulerCalls, "open_again", later):
            for _ in range(2):
                f = c.compute(d)
                got, key = ordered(await f), f.key
                pd.testing.assert_frame_equal(got, want.astype(dict(got.dtypes)))
                del f
                await until(lambda key=key: key not in s.tasks)
                left_to_dask.clear()
        assert not takeover._plugin.binder.moved


@gen_cluster(**options(3))
async def test_outputs_stay_where_the_user_wants_them(c, s, *workers):
    async with taken_over(s, workers) as (takeover, _):
        only = [w.address for w in workers[:2]]
        out = c.persist(rows().shuffle("k", npartitions=OUTPUTS), workers=only, allow_other_workers=False)
        await wait(out)
        assert held(s, out)[workers[2].address] == 0
        assert told(takeover)["late_binding"]["outputs"] == 1


def test_what_a_task_took_is_learned():
    runs = Runs(None, None)  # type: ignore[arg-type]
    one = rebalance.Binder(None, runs, None, lambda address: True)  # type: ignore[arg-type]
    assert one._learned == {}
    tasks: Any = [SimpleNamespace(key=key, prefix=SimpleNamespace(name="join")) for key in ("a", "b")]
    one._watch({i: [ts] for i, ts in enumerate(tasks)}, [Output(i, "w", 1e6) for i in range(2)])
    runs.ended("other", [{"action": "compute", "start": 0, "stop": 1}])
    runs.ended("a", [{"action": "compute", "start": 0, "stop": 1}, {"action": "transfer", "start": 1, "stop": 9}])
    assert one._learned == {"join": 1e-6}
    runs.ended("b", [{"action": "compute", "start": 0, "stop": 3}])
    assert one._learned == {"join": 2e-6}
    one._learn("join", 1e6, [{"action": "compute", "start": 3600.0, "stop": 3.0}])  # the clock was set back
    assert one._learned == {"join": 2e-6}
    assert not runs._listeners


def joined_runs(left_state: str):
    """(records of two runs with one output, of which one's barrier has passed; the registry; barriers)."""
    barriers = {
        "left": SimpleNamespace(key="shuffle-barrier-left", state=left_state, dependents=[]),
        "right": SimpleNamespace(key="shuffle-barrier-right", state="processing", dependents=[]),
    }
    output = Hashable(SimpleNamespace(dependencies=list(barriers.values())))
    for barrier in barriers.values():
        barrier.dependents = [output]
    active: dict[str, Any] = {}
    for run_id, name in enumerate(barriers):
        spec = DataFrameShuffleSpec(
            id=name, disk=False, npartitions=1, column="k", meta=hot(0).iloc[:0], parts_out=1, drop_column=True
        )
        run_spec = SimpleNamespace(spec=GpurtShuffleSpec.of(spec, ShuffleSettings(enabled=True)), worker_for={})
        active[name] = SimpleNamespace(id=name, run_id=run_id, run_spec=run_spec, _failed=False)
    scheduler: Any = SimpleNamespace(tasks={barrier.key: barrier for barrier in barriers.values()})
    runs = Runs(scheduler, SimpleNamespace(active_shuffles=active))
    records = {record.id: record for record in runs.all()}
    records["left"].happened(RunEvent.BARRIER_PASSED)
    return records, runs, barriers


def test_a_partner_whose_barrier_does_not_end_is_not_waited_for(monkeypatch):
    """Its worker was lost as it ended, and the only thread left is that of the barrier that asks."""
    now = [100.0]
    monkeypatch.setattr(rebalance, "time", SimpleNamespace(monotonic=lambda: now[0]))
    records, runs, _ = joined_runs("processing")
    one = rebalance.Binder(None, runs, None, bool)  # type: ignore[arg-type]
    for record in records.values():
        record.histograms = []
    assert one.begin(records["right"]) is None
    now[0] += rebalance.PARTNER_SECONDS * 0.9
    assert one.begin(records["right"]) is None
    now[0] += rebalance.PARTNER_SECONDS * 0.2
    assert [one.begin(records["right"]) for _ in range(2)] == [[], []]


def test_shuffles_that_share_some_outputs_stay():
    """The other outputs of the one whose barrier has passed may have been made."""
    records, runs, barriers = joined_runs("memory")
    barriers["left"].dependents = [*barriers["left"].dependents, Hashable(SimpleNamespace(dependencies=[]))]
    one = rebalance.Binder(None, runs, None, bool)  # type: ignore[arg-type]
    planned = []
    one._plan = lambda group: planned.append(group) or rebalance_plan.Plan()  # type: ignore[method-assign,func-returns-value]
    for record in records.values():
        record.histograms = []
    assert one.begin(records["right"]) == []
    assert not planned
    barriers["left"].dependents.pop()
    records["left"].made = {0}  # its outputs are wanted once more
    assert one.begin(records["right"]) == []
    assert not planned
    records["left"].made = set()
    assert one.begin(records["right"]) == []
    assert [{record.id for record in group} for group in planned] == [{"left", "right"}]


@contextlib.contextmanager
def stopped(after: int):
    """Handing over stops when so many shards were sent: (set when it has and a flush waits for it, set to go on)."""
    give, stage, flush = Handover._give, Sender.stage, GpurtShuffleRun.inputs_done
    reached, go, sent = asyncio.Event(), asyncio.Event(), []
    #: runs that hand over, and that flush
    giving, flushing = set(), set()

    async def flushed(self):
        flushing.add(self)
        if self in giving:
            reached.set()
        try:
            await flush(self)
        finally:
            flushing.discard(self)

    async def gives(self, *args):
        giving.add(self._host)
        if self._host in flushing:  # the flush came first
            reached.set()
        try:
            await give(self, *args)
        finally:
            giving.discard(self._host)

    async def staged(self, *args):
        if self._host in giving:
            sent.append(1)
            if len(sent) > after:
                await go.wait()
        await stage(self, *args)

    Handover._give, Sender.stage, GpurtShuffleRun.inputs_done = gives, staged, flushed
    try:
        yield reached, go
    finally:
        Handover._give, Sender.stage, GpurtShuffleRun.inputs_done = give, stage, flush
        go.set()


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("who", ["source", "target", "another"])
@pytest.mark.parametrize("retain", [0.1, 0.0])
def test_a_worker_lost_while_outputs_are_handed_over(who, join, retain):
    @gen_cluster(**options(3))
    async def check(c, s, *workers):
        settings = ShuffleSettings(enabled=True, transport="rpc", retain=retain)
        async with taken_over(s, workers, settings=settings) as (takeover, _):
            d = rows(3).shuffle("k", npartitions=OUTPUTS)
            if join:
                d = rows(3).merge(others(), on="k", shuffle_method="p2p", npartitions=OUTPUTS, broadcast=False)
            with stopped(2) as (reached, go):
                f = c.compute(d)
                await asyncio.wait_for(reached.wait(), 60)
                (move, *_) = next(
                    iter(s.plugins["shuffle"].active_shuffles.values())
                ).run_spec.spec.state.moves.values()
                victim = next(
                    w
                    for w in workers
                    if (w.address == move[0], w.address == move[1])
                    == {"source": (True, False), "target": (False, True), "another": (False, False)}[who]
                )
                # A shuffle whose barrier's result is lost begins anew, as stock has it. Copies are under way.
                barriers = [ts for k, ts in s.tasks.items() if "barrier" in str(k) and ts.state == "memory"]
                await until(lambda: all(len(ts.who_has) == len(workers) for ts in barriers))
                anew = sum({ws.address for ws in ts.who_has} == {victim.address} for ts in barriers)
                await victim.close(executor_wait=False)
                await until(lambda: victim.address not in s.workers)
                go.set()
                got = ordered(await f)
            want = whole(lambda i: hot(i, 3), N)
            if join:
                want = want.merge(whole(other, 5), on="k")
            pd.testing.assert_frame_equal(got, ordered(want).astype(dict(got.dtypes)))
            stats = told(takeover)
            assert stats["late_binding"]["runs"] == 1
            assert stats["recovery"]["amended"] == 1 + join - anew
            assert stats["recovery"]["restarted"] == 0
            assert stats["runs"] == 1 + join + anew

    check()
