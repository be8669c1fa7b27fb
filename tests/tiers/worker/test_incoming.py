"""What is fetched from a peer passes the gate, what peers fetch is limited; records of real workers replay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker, wait
from distributed.core import Status
from distributed.utils_test import async_poll_for, gen_cluster
from distributed.worker import get_data_from_worker

from benchmarks.eviction_record import record
from benchmarks.eviction_replay import Belady, Lru, Ours, moved, replay
from dask_gpurt.config import Settings
from dask_gpurt.tiers.runtime import TierRuntime
from tests.memory_watch import NO_WATCH

pytestmark = pytest.mark.cluster

SIZE = 10_000


def make(i: int) -> bytes:
    return bytes([i]) * SIZE


def add_up(*values: bytes) -> int:
    return sum(v[0] for v in values)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=NO_WATCH)
async def test_fetched_values_pass_the_gate(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    settings = Settings.load({"tiers.disk-reserve": 0}).tiers
    runtimes = [await TierRuntime.install(w, settings) for w in (a, b)]
    gate = runtimes[1].engine.gate
    asked: list[int] = []
    admit = gate.admit

    async def spy(nbytes: int) -> Any:
        asked.append(nbytes)
        return await admit(nbytes)

    gate.admit = spy  # type: ignore[method-assign]
    x = c.map(make, range(3), workers=[a.address], key="x")
    await wait(x)
    asked.clear()
    assert await c.submit(add_up, *x, workers=[b.address], key="sum") == 3
    assert sum(asked) >= 3 * SIZE  # one message or several
    assert gate.reserved_bytes == 0
    for runtime in runtimes:
        runtime.engine.validate()
        await runtime.uninstall()
    assert "gather_dep" not in vars(b)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=NO_WATCH)
async def test_a_paused_worker_reads_for_one_peer_at_a_time(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    """It read for each that asked, into memory that it was short of, and Dask then turned all but one away."""
    runtime = await TierRuntime.install(a, Settings.load({"tiers.disk-reserve": 0}).tiers)
    x = c.map(make, range(4), workers=[a.address], key="x")
    await wait(x)
    runtime.engine.shrink(1 << 60)
    await runtime.engine.idle()
    runtime.engine.shrink(0)
    assert runtime._seam is not None
    inputs, go_on = runtime._seam.inputs, asyncio.Event()
    ensure, asked = inputs.ensure, []

    async def slow(keys: Any) -> Any:
        asked.append(keys)
        if len(asked) == 1:
            await go_on.wait()
        return await ensure(keys)

    inputs.ensure = slow  # type: ignore[method-assign]

    def ask(future: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(get_data_from_worker(b.rpc, [future.key], a.address, who=b.address))

    a.status = Status.paused
    first = ask(x[0])
    await async_poll_for(lambda: asked, timeout=30)
    for future in x[1:3]:
        assert (await asyncio.wait_for(ask(future), 30))["status"] == "busy"
    assert asked == [[x[0].key]]
    a.status = Status.running
    assert (await asyncio.wait_for(ask(x[3]), 30))["status"] == "OK"
    go_on.set()
    assert (await asyncio.wait_for(first, 30))["status"] == "OK"
    assert runtime.statistics()["sync_reads"] == 0
    a.status = Status.paused
    assert (await asyncio.wait_for(ask(x[1]), 30))["status"] == "OK"
    a.status = Status.running
    await runtime.uninstall()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": "200 kB"}, config=NO_WATCH)
async def test_a_record_replays(c: Client, s: Scheduler, a: Worker) -> None:
    runtime = await TierRuntime.install(a, Settings.load({"tiers.disk-reserve": 0}).tiers)
    trace = record(runtime.engine, 10_000)
    x = c.map(make, range(30), key="x")
    await wait(x)
    assert await c.submit(add_up, *x[:20]) == sum(range(20))
    assert await c.gather(c.map(add_up, x)) == [*range(30)]
    await runtime.engine.idle()
    assert trace.dropped == 0
    real = moved(trace.events)
    counted = runtime.statistics()
    assert real.written_bytes >= 15 * SIZE
    assert counted["written"]["ops"] == sum(kind == "write" for _, kind, _, _ in trace.events)
    assert counted["read"]["ops"] == sum(kind in ("load", "read") for _, kind, _, _ in trace.events)
    results = {name: replay(trace.events, p) for name, p in (("lru", Lru()), ("ours", Ours()))}
    results["belady"] = replay(trace.events, Belady(trace.events))
    assert all(r.written_bytes >= 15 * SIZE for r in results.values())
    assert results["belady"].read_bytes <= min(r.read_bytes for r in results.values())
    await runtime.uninstall()
