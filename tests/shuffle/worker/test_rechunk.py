"""Dask's own array rechunk under the takeover: its answers stay, its shards leave memory once they were sent."""

from __future__ import annotations

import asyncio
import types
import weakref
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Status
from distributed.shuffle._rechunk import ArrayRechunkRun, ArrayRechunkSpec
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.scheduler import plugin
from dask_gpurt.shuffle.scheduler.takeover import ShuffleTakeover
from dask_gpurt.shuffle.worker.rechunk import ReleasingRechunkSpec, release_sent
from tests.shuffle.helpers import ON, until

TWO = {"client": True, "nthreads": [("127.0.0.1", 1)] * 2, "timeout": 60}


async def left_alive(release: bool) -> tuple[int, int]:
    """(messages sent, shards alive) with every message sent and the buffer still open."""
    sent = []
    all_sent = asyncio.Event()  # so that each message has a task of its own

    async def send(address: str, shards: list[Any]) -> dict[str, str]:
        assert all(len(pieces) == 4 for _, pieces in shards)
        sent.append(address)
        if len(sent) == 5:
            all_sent.set()
        await all_sent.wait()
        return {"status": "OK"}

    buffer = seam.CommShardsBuffer(send, seam.ResourceLimiter(None), max_message_size=1, concurrency_limit=10)
    if release:
        release_sent(types.SimpleNamespace(_comm_buffer=buffer))
    alive = []
    for i in range(5):
        pieces = [((i, j), ((0, 0), np.zeros(1000))) for j in range(4)]
        alive += [weakref.ref(shard) for _, (_, shard) in pieces]
        await buffer.write({"a": ((i, 0), pieces)})
        del pieces
    await until(lambda: len(sent) == 5 and not buffer.memory_limiter._acquired)
    count = sum(ref() is not None for ref in alive)
    await buffer.close()
    return len(sent), count


def test_shards_that_were_sent_are_let_go():
    assert asyncio.run(left_alive(release=True)) == (5, 0)
    # Why this is needed. If it fails, distributed has mended it, and `rechunk` can go.
    assert asyncio.run(left_alive(release=False)) == (5, 20)


@pytest.mark.cluster
@pytest.mark.parametrize("side", [40, 200])  # shards that travel pickled in one piece, and such as travel as buffers
def test_rechunk_releases_and_stays_right(side, monkeypatch):
    refs: list[weakref.ref[Any]] = []
    shard_partition = ArrayRechunkRun._shard_partition
    at_barrier: list[int] = []
    barrier = ArrayRechunkRun.barrier

    def record(self: Any, data: Any, partition_id: Any) -> Any:
        out = shard_partition(self, data, partition_id)
        refs.extend(weakref.ref(shard) for _, pieces in out.values() for _, (_, shard) in pieces)
        return out

    async def look(self: Any, run_ids: Any) -> int:
        for _ in range(1000):  # the last ones may still be under way
            if not sum(ref() is not None for ref in refs):
                break
            await asyncio.sleep(0.01)
        at_barrier.append(sum(ref() is not None for ref in refs))
        return await barrier(self, run_ids)

    monkeypatch.setattr(ArrayRechunkRun, "_shard_partition", record)
    monkeypatch.setattr(ArrayRechunkRun, "barrier", look)

    @gen_cluster(**TWO)
    async def check(c, s, a, b):
        takeover = await ShuffleTakeover.install(s, ON)
        n = 8 * side
        values = np.arange(n * n).reshape(n, n)
        with dask.config.set({"array.chunk-size": f"{values.nbytes // 8} B"}):  # no inputs are merged before
            x = da.from_array(values, chunks=(side, n)).rechunk((n, side), method="p2p")
            assert (await c.compute(x) == values).all()
        assert takeover.statistics()["fallbacks"] == {"rechunk": 1}
        assert takeover.statistics()["errors"] == 0

    check()
    assert len(refs) == 64
    assert at_barrier == [0]


@gen_cluster(**TWO)
async def test_stock_where_a_worker_cannot(c, s, a, b):
    takeover = await ShuffleTakeover.install(s, ON)
    spec = ArrayRechunkSpec(id="x", disk=True, new=((4,),), old=((2, 2),))
    ours = takeover.choose(spec)
    assert type(ours) is ReleasingRechunkSpec
    assert (ours.id, ours.disk, ours.new, ours.old) == ("x", True, ((4,),), ((2, 2),))
    takeover.able[b.address] = "no such package"
    assert takeover.choose(spec) is spec


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], timeout=60)
async def test_a_barrier_of_an_earlier_run_that_fails_late_does_not_end_the_next(c, s, a):
    takeover = await ShuffleTakeover.install(s, ON)
    plugin = s.plugins["shuffle"]
    broadcast, restarted = s.broadcast, []

    async def restart_meanwhile(*, msg: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if msg["op"] != "shuffle_inputs_done" or restarted:
            return await broadcast(msg=msg, **kwargs)
        # The barrier's task holds one thread of the worker. The other one splits the inputs again, then the task is
        # sent there once more, and the worker takes the call under way for it.
        restarted.append(msg["run_id"])
        barrier = s.tasks[seam.barrier_key(msg["shuffle_id"])]
        first = barrier.run_id
        seam.restart_run(plugin, s, plugin.active_shuffles[msg["shuffle_id"]], "the test says so")
        await until(lambda: barrier.state == "processing" and barrier.run_id != first)
        await until(lambda: a.state.tasks[barrier.key].run_id == barrier.run_id)
        return {a.address: RuntimeError("a worker flushed a run that is over")}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(s, "broadcast", restart_meanwhile)
        x = da.from_array(np.arange(576).reshape(24, 24), chunks=(4, 24)).rechunk((24, 4), method="p2p")
        assert (await c.compute(x) == np.arange(576).reshape(24, 24)).all()
    assert restarted
    assert takeover.statistics()["errors"] == 0


@gen_cluster(**TWO)
async def test_a_worker_that_closes_while_a_barrier_flushes_fails_no_rechunk(c, s, a, b):
    await ShuffleTakeover.install(s, ON)
    broadcast, left = s.broadcast, []

    async def leave(worker: str) -> None:
        await asyncio.sleep(0.3)  # an error that does not wait is there by then
        await s.remove_worker(worker, stimulus_id="leaves")

    async def one_closes(*, msg: dict[str, Any], workers: list[str], **kwargs: Any) -> dict[str, Any]:
        if msg["op"] != "shuffle_inputs_done" or left:
            return await broadcast(msg=msg, workers=workers, **kwargs)
        barrier = s.tasks[seam.barrier_key(msg["shuffle_id"])]
        (worker,) = set(workers) - {barrier.processing_on.address}
        s.workers[worker].status = Status.closing
        left.append(asyncio.create_task(leave(worker)))
        # What a worker answers that has ended its runs and has not closed its stream yet.
        return {w: Exception("ShuffleClosedError('closed')") if w == worker else None for w in workers}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(s, "broadcast", one_closes)
        # As long as it says that it closes, no patience is used up.
        patched.setattr(plugin, "PATIENCE", 1)
        patched.setattr(plugin, "PATIENCE_SECONDS", 0.05)
        x = da.from_array(np.arange(576).reshape(24, 24), chunks=(4, 24)).rechunk((24, 4), method="p2p")
        assert (await c.compute(x) == np.arange(576).reshape(24, 24)).all()
    assert left
