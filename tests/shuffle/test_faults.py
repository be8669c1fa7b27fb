"""Lost workers, copies of messages, outputs asked for twice, corruption on the way: a right result or a clear error."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from unittest import mock

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster, SchedulerPlugin
from distributed.utils_test import gen_cluster

from dask_gpurt.errors import LostData
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.counters import worker_statistics
from dask_gpurt.shuffle.rows import wire
from dask_gpurt.shuffle.rows.assemble import Assembler
from dask_gpurt.shuffle.scheduler import reopen
from dask_gpurt.shuffle.worker import output_builder, sender
from dask_gpurt.shuffle.worker.message import Message
from dask_gpurt.shuffle.worker.run import GpurtShuffleRun
from dask_gpurt.shuffle.worker.shard_stores import MemoryShardStore
from tests.shuffle.helpers import (
    NastyStore,
    drained,
    held,
    left,
    mixed,
    ordered,
    right,
    source,
    taken_over,
    until,
    whole,
)

pytestmark = pytest.mark.cluster
TWO = {"client": True, "nthreads": [("127.0.0.1", 1)] * 2, "timeout": 120}


def same_rows(parts, make, n) -> None:
    want = ordered(whole(make, n))
    got = ordered(pd.concat(parts)) if isinstance(parts, list) else ordered(parts)
    pd.testing.assert_frame_equal(got, want.astype(dict(got.dtypes)))


PRELOAD = """
async def dask_setup(server):
    from dask_gpurt.config import ShuffleSettings
    from dask_gpurt.shuffle.scheduler.takeover import ShuffleTakeover
    await ShuffleTakeover.install(server, ShuffleSettings(enabled=True))
"""


def part(i: int) -> pd.DataFrame:
    r = np.random.default_rng(i)
    return pd.DataFrame({"k": r.integers(0, 500, 2000), "v": r.random(2000)})


def slow_part(i: int) -> pd.DataFrame:
    time.sleep(0.1)
    return part(i)


def slow(df: pd.DataFrame) -> pd.DataFrame:
    time.sleep(0.1)
    return df


@pytest.mark.parametrize("phase", ["transfer", "unpack"])
def test_worker_killed(phase, tmp_path):
    (tmp_path / "takeover_preload.py").write_text(PRELOAD)

    def progress(dask_scheduler):
        tasks = [t for t in dask_scheduler.tasks.values() if t.state == "memory"]
        names = [
            "transfer" if "transfer" in str(t.key) else "slow" if str(t.key).startswith("('slow-") else ""
            for t in tasks
        ]
        return names.count("transfer"), names.count("slow")

    def recovered(dask_scheduler):
        stats = dask_scheduler.plugins["shuffle"].takeover.statistics()
        assert not stats["errors"], stats["last_error"]
        # Went on without the worker, or was restarted (as stock's when the new worker has not yet said what it can), or
        # ran again: that it does when all outputs had been made and some were lost.
        recovery = stats["recovery"]
        return recovery["amended"] + recovery["restarted"] + stats["runs"] - 1

    config = {
        "distributed.scheduler.preload": [str(tmp_path / "takeover_preload.py")],
        "distributed.p2p.comm.retry.delay.min": "100ms",
    }
    with (
        dask.config.set(config),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as lc,
        Client(lc) as client,
    ):
        d = dd.from_map(slow_part, list(range(16)), meta=part(0).iloc[:0])
        result = client.persist(d.shuffle("k", npartitions=8).map_partitions(slow))
        deadline = time.monotonic() + 60
        while True:
            transferred, unpacked = client.run_on_scheduler(progress)
            # Transfers are forgotten after the barrier, which may come between two looks.
            if unpacked >= 3 or (phase == "transfer" and transferred >= 3):
                break
            assert time.monotonic() < deadline, (transferred, unpacked)
            time.sleep(0.01)
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        same_rows(result.compute(), part, 16)
        assert client.run_on_scheduler(recovered) >= 1


@gen_cluster(**TWO)
async def test_every_message_delivered_twice(c, s, a, b):
    async with taken_over(s, [a, b]) as (_, stores):
        for w in (a, b):
            inner = w.handlers["shuffle_receive"]

            async def twice(*args, inner=inner, **kwargs):
                if isinstance(kwargs["data"], dict):  # a question, not a message
                    return await inner(*args, **kwargs)
                first, second = await asyncio.gather(inner(*args, **kwargs), inner(*args, **kwargs))
                assert first["status"] == second["status"] == "OK"
                return await inner(*args, **kwargs)

            w.handlers["shuffle_receive"] = twice
        got = await c.compute(source(left).shuffle("k", npartitions=5))
        same_rows(got, left, 6)
        await drained(stores)
        counts = [worker_statistics(w) for w in (a, b)]
        assert sum(x["duplicates"] for x in counts) == 2 * sum(x["shards_sent"] for x in counts) > 0


@gen_cluster(**TWO)
async def test_every_input_split_twice_by_its_worker(c, s, a, b):
    """As when its task is released, and comes back to the worker: both copies of a shard are in one message."""
    add = GpurtShuffleRun.add_partition

    def twice(self, *args, **kwargs):
        add(self, *args, **kwargs)
        return add(self, *args, **kwargs)

    with mock.patch.object(GpurtShuffleRun, "add_partition", twice):
        async with taken_over(s, [a, b]):
            same_rows(await c.compute(source(left).shuffle("k", npartitions=5)), left, 6)
            counts = [worker_statistics(w) for w in (a, b)]
            assert sum(x["duplicates"] for x in counts) > sum(x["inputs"] for x in counts) / 2


class SlowStore(MemoryShardStore):
    """Room comes late."""

    waiting = 0

    async def put(self, run, chunk_id, chunk):
        self.waiting += 1
        await asyncio.sleep(0.2)
        self.waiting -= 1
        return await super().put(run, chunk_id, chunk)


@gen_cluster(**TWO)
async def test_an_input_that_is_split_again_in_another_way_restarts_the_shuffle(c, s, a, b):
    """The ids of its shards are the same, their rows are not."""
    split, write = GpurtShuffleRun._shard_partition, GpurtShuffleRun._write_to_comm
    before: list[int] = []

    def half(self, data, partition_id, **kwargs):
        first = partition_id == 3 and not before
        return split(self, data.iloc[: len(data) // 2] if first else data, partition_id)

    async def then_again(self, data):
        await write(self, data)
        if data.partition == 3 and not before:
            before.append(self.run_id)
            raise seam.ShuffleClosedError("the task runs again")

    async with taken_over(s, [a, b]) as (takeover, stores):
        with (
            mock.patch.object(GpurtShuffleRun, "_shard_partition", half),
            mock.patch.object(GpurtShuffleRun, "_write_to_comm", then_again),
        ):
            same_rows(await c.compute(source(left, 12).shuffle("k", npartitions=4)), left, 12)
        assert takeover.statistics()["runs"] == 2
        assert takeover.statistics()["errors"] == 0
        assert "split twice, in different ways" in str([worker_statistics(w) for w in (a, b)])
        await drained(stores)


@gen_cluster(**TWO)
async def test_a_copy_is_not_acknowledged_before_the_first_is_stored(c, s, a, b):
    from dask_gpurt.shuffle.rows.partition import OutputLayout, split

    async with taken_over(s, [a, b], SlowStore) as (_, stores):
        f = c.compute(dd.from_map(slow_part, list(range(20)), meta=part(0)).shuffle("k", npartitions=4))
        active = a.plugins["shuffle"].shuffle_runs._active_runs
        await until(lambda: active)
        (run,) = active.values()
        ((_, shard),) = split(
            part(0).assign(p=run._owners.layout.part_of[0]),
            "p",
            True,
            10**6,
            OutputLayout({int(run._owners.layout.part_of[0]): "x"}),
        )
        frames = [bytes(x) for x in wire.pack(run._key.tag, run.run_id, 1, [wire.encode(shard)])]
        first = asyncio.create_task(run.receive(Message(frames)))
        second = asyncio.create_task(run.receive(Message(frames)))
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        assert run._receiver._arrivals[10**6] is None
        assert (await first)["status"] == (await second)["status"] == "OK"
        await f.cancel()
        await drained(stores)


@gen_cluster(**TWO)
async def test_output_asked_for_again_is_opened_again_instead_of_being_empty(c, s, a, b):
    """The task fails after its shards were taken from the store, and is retried."""
    failed = []
    assemble = Assembler.__call__

    def fails_once(self, pieces):
        df = assemble(self, pieces)
        if len(df) and not failed:
            failed.append(1)
            raise MemoryError("once")
        return df

    Assembler.__call__ = fails_once
    try:
        async with taken_over(s, [a, b], NastyStore) as (takeover, stores):
            got = await c.compute(source(left).shuffle("k", npartitions=3), retries=2)
            same_rows(got, left, 6)
            await drained(stores)
            assert failed
            stats = takeover.statistics()
            assert stats["runs"] == 1
            assert stats["recovery"]["outputs_void"] == 1
            assert sum(worker_statistics(w)["inputs"] for w in (a, b)) == 6  # all rows were retained
    finally:
        Assembler.__call__ = assemble


@pytest.mark.parametrize("refused", [False, True])
def test_both_sides_of_a_join_are_opened_or_restarted_at_once(refused, monkeypatch):
    """Else the sides take turns: each costs the other side what was taken of it meanwhile."""
    if refused:
        monkeypatch.setattr(reopen, "ASKED", 0)
    gen_cluster(**TWO)(check_both_sides)(refused)


async def check_both_sides(c, s, a, b, refused):
    failed = []
    assemble = Assembler.__call__

    def fails_once(self, pieces):
        df = assemble(self, pieces)
        if "b" in df.columns and "a" not in df.columns and len(df) and not failed:  # the left side was taken before
            failed.append(1)
            raise MemoryError("once")
        return df

    Assembler.__call__ = fails_once
    try:
        async with taken_over(s, [a, b]) as (takeover, _):
            joined = source(left).merge(source(right), on="k", how="inner", npartitions=3, shuffle_method="p2p")
            got = await c.compute(joined, retries=2)
            want = whole(left, 6).merge(whole(right, 6), on="k", how="inner")
            pd.testing.assert_frame_equal(ordered(got), ordered(want).astype(dict(got.dtypes)))
            assert failed
            assert takeover.statistics()["runs"] == (4 if refused else 2)
            assert takeover.statistics()["recovery"]["outputs_void"] == (0 if refused else 2)
            assert sum(worker_statistics(w)["restarts"] for w in (a, b)) == refused
    finally:
        Assembler.__call__ = assemble


@pytest.mark.parametrize("refused", [False, True])
def test_outputs_of_many_threads_fail_at_once(refused, monkeypatch):
    """One restart serves all threads of a worker, and an output counts only what it asks for itself."""
    if refused:
        monkeypatch.setattr(reopen, "ASKED", 0)
    gen_cluster(**TWO | {"nthreads": [("127.0.0.1", 12)] * 2})(check_many_threads)(refused)


async def check_many_threads(c, s, a, b, refused):
    came, all_there = [], threading.Event()
    assemble = Assembler.__call__

    def fails_at_first(self, pieces):
        df = assemble(self, pieces)
        if all_there.is_set():
            return df
        came.append(1)
        if len(came) == 24:
            all_there.set()
        assert all_there.wait(60)
        raise MemoryError("once")

    with mock.patch.object(Assembler, "__call__", fails_at_first):
        async with taken_over(s, [a, b]) as (takeover, _):
            got = await c.compute(source(left).shuffle("k", npartitions=24), retries=3)
            same_rows(got, left, 6)
            restarts = [worker_statistics(w)["restarts"] for w in (a, b)]
            assert (max(restarts) > output_builder.RESTARTS) if refused else not any(restarts)
            assert takeover.statistics()["runs"] == (2 if refused else 1)


@gen_cluster(**TWO)
async def test_a_retry_never_gets_the_frame_of_the_failed_try(c, s, a, b):
    """The frame lives on (here: in a list), and was changed in place by the task that failed."""
    alive = []

    def fails_once(df):
        alive.append(df)
        df["k"] = -1
        raise ValueError("once")

    unpack = GpurtShuffleRun._get_output_partition

    def patched(self, *args, **kwargs):
        df = unpack(self, *args, **kwargs)
        if len(df) and not alive:
            fails_once(df)
        return df

    GpurtShuffleRun._get_output_partition = patched
    try:
        async with taken_over(s, [a, b]) as (takeover, stores):
            same_rows(await c.compute(source(left).shuffle("k", npartitions=3), retries=2), left, 6)
            assert alive
            assert takeover.statistics()["recovery"]["outputs_void"] == 1
            await drained(stores)
    finally:
        GpurtShuffleRun._get_output_partition = unpack


class LosesOnce(MemoryShardStore):
    """A tier that could not read a shard back, the first time it is asked for any."""

    lost = 0

    async def take(self, run, part):
        if not type(self).lost:
            type(self).lost += 1
            raise LostData("the disk is gone")
        return await super().take(run, part)


@gen_cluster(**TWO)
async def test_lost_shards_restart_the_shuffle(c, s, a, b):
    LosesOnce.lost = 0
    async with taken_over(s, [a, b], LosesOnce) as (takeover, stores):
        same_rows(await c.compute(source(left).shuffle("k", npartitions=3)), left, 6)
        assert takeover.statistics()["runs"] == 2
        await drained(stores)


class LosesAlways(MemoryShardStore):
    async def take(self, run, part):
        raise LostData("the disk is gone")


@gen_cluster(**TWO)
async def test_lost_for_good_is_an_error_with_its_reason(c, s, a, b):
    async with taken_over(s, [a, b], LosesAlways) as (_, stores):
        f = c.compute(source(left).shuffle("k", npartitions=3))
        with pytest.raises(RuntimeError, match="unpack phase") as e:
            await f
        assert "the disk is gone" in str(e.value.__cause__)
        # Runs are bounded, and each of the three outputs of one may ask for its restart.
        assert sum(worker_statistics(w)["restarts"] for w in (a, b)) <= 3 * output_builder.RESTARTS
        await f.cancel()
        await drained(stores)


def corrupt(rate: float, monkeypatch) -> list[int]:
    """Flip a byte of some messages as they are sent."""
    rng = np.random.default_rng(0)
    hits: list[int] = []
    pack = wire.pack

    def bad(*args, **kwargs):
        frames = pack(*args, **kwargs)
        if rng.random() < rate:
            frame = bytearray(frames[0] if not len(frames[1]) else frames[int(rng.integers(2))])
            frame[int(rng.integers(len(frame)))] ^= 16
            hits.append(1)
            i = 0 if len(frame) == len(frames[0]) else 1
            frames[i] = memoryview(frame)
        return frames

    monkeypatch.setattr(wire, "pack", bad)
    return hits


def test_corrupted_messages_are_sent_again(monkeypatch):
    hits = corrupt(0.4, monkeypatch)
    monkeypatch.setattr(sender, "STAGE_BYTES", 1000)
    monkeypatch.setattr(sender, "RESENDS", 30)

    @gen_cluster(**TWO)
    async def check(c, s, a, b):
        async with taken_over(s, [a, b]) as (_, stores):
            same_rows(await c.compute(source(left, 20).shuffle("k", npartitions=5)), left, 20)
            await drained(stores)
        assert hits
        assert sum(worker_statistics(w)["refused"] for w in (a, b)) == len(hits)

    check()


def test_a_wire_that_always_corrupts_is_an_error(monkeypatch):
    corrupt(1.0, monkeypatch)

    @gen_cluster(**TWO)
    async def check(c, s, a, b):
        async with taken_over(s, [a, b]) as (_, stores):
            f = c.compute(source(left).shuffle("k", npartitions=5))
            with pytest.raises(Exception, match=r"refused a message|barrier phase"):
                await f
            await f.cancel()
            await drained(stores)

    check()


@gen_cluster(**TWO)
async def test_cancelled_queries_leave_nothing(c, s, a, b):
    async with taken_over(s, [a, b], SlowStore) as (_, stores):
        f = c.compute(dd.from_map(slow_part, list(range(20)), meta=part(0)).shuffle("k", npartitions=4))
        await until(lambda: any(store.waiting or held(store) for store in stores))
        await f.cancel()
        del f
        await until(lambda: not s.tasks and not s.plugins["shuffle"].active_shuffles)
        await until(lambda: all(x["runs_closed"] == x["runs"] for x in map(worker_statistics, (a, b))))
        await until(lambda: not any(store.waiting for store in stores))
        await drained(stores)


@gen_cluster(**TWO)
async def test_a_failing_store_fails_the_query_not_the_rows(c, s, a, b):
    class Full(MemoryShardStore):
        async def put(self, run, chunk_id, chunk):
            raise OSError(28, "no space left")

    async with taken_over(s, [a, b], Full):
        with pytest.raises(Exception, match=r"phase|no space left"):
            await c.compute(source(mixed).shuffle("k", npartitions=5))


@gen_cluster(**TWO)
async def test_memory_of_a_run_is_gone_when_its_outputs_are(c, s, a, b):
    import pyarrow as pa

    before = pa.total_allocated_bytes()
    async with taken_over(s, [a, b]) as (_, stores):
        out = c.persist(dd.from_map(part, list(range(20)), meta=part(0)).shuffle("k", npartitions=4))
        await out
        await drained(stores)
        await until(lambda: not a.plugins["shuffle"].shuffle_runs._runs)
        # Arrow owns the memory of the outputs' columns (24 bytes a row); the received shards were as much again.
        await until(lambda: pa.total_allocated_bytes() < before + 1.2 * 24 * 20 * 2000)
        del out
        await until(lambda: pa.total_allocated_bytes() < before + (1 << 16))


class Leave(SchedulerPlugin):
    """Another worker of the rechunk is lost as soon as its transfer is done, and the alias of that is not."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.left = 0

    def transition(self, key, start, finish, *args, worker=None, **kwargs):
        if "rechunk-merge-rechunk-transfer" in str(key) and finish == "memory" and not self.left:
            self.left += 1
            self.leaving = asyncio.ensure_future(self.leave(worker))

    async def leave(self, holder):
        (run,) = self.scheduler.plugins["shuffle"].active_shuffles.values()
        await until(lambda: run.participating_workers > {holder})
        await self.scheduler.remove_worker(min(run.participating_workers - {holder}), stimulus_id="leaves")


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4, timeout=60)
async def test_a_rechunk_whose_transfer_is_behind_an_alias_is_restarted_whole(c, s, *workers):
    """Dask's own restart leaves the transfer in memory, with the number of the run that has ended."""
    async with taken_over(s, workers) as (takeover, _):
        plugin = Leave(s)
        s.add_plugin(plugin)
        x = da.ones((24, 24), chunks=(4, 24)).rechunk((24, 4), method="p2p")
        assert (await c.compute(x)).sum() == 24 * 24
        assert plugin.left
        assert takeover.statistics()["errors"] == 0
