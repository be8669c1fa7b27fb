"""The runtime on real workers: right answers under pressure, true metrics, adoption and draining, lost data."""

# ruff: noqa: ASYNC230, ASYNC240
from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.delayed import Delayed
from dask.system import CPU_COUNT
from dask.task_spec import Alias
from distributed import Client, LocalCluster, Scheduler, Worker, WorkerPlugin, system, wait
from distributed.client import FutureCancelledError
from distributed.spill import SpillBuffer
from distributed.utils_test import NO_AMM, async_poll_for, gen_cluster

import dask_gpurt  # noqa: F401  (registers the defaults)
from dask_gpurt.config import Settings, TierSettings
from dask_gpurt.errors import InstallError, LostData, SeamMismatch
from dask_gpurt.memory import reclaim
from dask_gpurt.testing import ArrayChunk, check_shard_store
from dask_gpurt.tiers.runtime import TierRuntime
from dask_gpurt.tiers.stores.task_store import TieredStore
from dask_gpurt.tiers.worker import inputs as worker_inputs
from tests.memory_watch import NO_WATCH
from tests.tiers.conftest import beat, handles

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

MB = 1_000_000


def tier_settings(**overrides: Any) -> TierSettings:
    return Settings.load({"tiers.disk-reserve": 0, **{f"tiers.{k}": v for k, v in overrides.items()}}).tiers


class Plugin(WorkerPlugin):
    name = "tiers-under-test"

    def __init__(self, settings: TierSettings) -> None:
        self.settings = settings

    async def setup(self, worker: Worker) -> None:
        self.runtime = await TierRuntime.install(worker, self.settings)

    async def teardown(self, worker: Worker) -> None:
        await self.runtime.uninstall()


def make(i: int, n: int = MB) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).integers(0, 255, n, dtype="u1")


def total(*arrays: Any) -> int:
    return sum(int(a.sum(dtype="i8")) for a in arrays)


def spill_all(runtime: TierRuntime) -> None:
    runtime.engine.shrink(1 << 60)


async def all_stored(runtime: TierRuntime, n: int) -> None:
    spill_all(runtime)
    assert runtime.store is not None
    store = runtime.store
    await async_poll_for(lambda: len(store.slow) >= n, timeout=30)
    runtime.engine.shrink(0)


# ---------------------------------------------------------------------------------------------- pressure


@pytest.mark.timeout(600)
def test_twice_what_memory_may_hold() -> None:
    """Real processes, real pressure: right answers, no synchronous read, no loss, nothing left on disk."""
    with (
        LocalCluster(
            # On Python 3.13 the modules alone take 227 MiB, 41 more than on 3.11.
            n_workers=2,
            threads_per_worker=2,
            processes=True,
            memory_limit="360 MiB",
            dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(Plugin(tier_settings()))
        n, size = 48, 20 * MB
        blocks = client.map(make, range(n), n=size, pure=False)
        wait(blocks)
        sums = client.gather(client.map(total, blocks, blocks[::-1]))
        want = [total(make(i, size)) for i in range(n)]
        assert sums == [a + b for a, b in zip(want, want[::-1], strict=True)]

        def look(dask_worker: Worker) -> dict[str, Any]:
            runtime = dask_worker.plugins["tiers-under-test"].runtime
            runtime.engine.validate()
            return runtime.statistics()

        replies = client.run(look)
        for stats in replies.values():
            assert stats["sync_reads"] == 0
            assert stats["fallbacks"] == {}, stats["last_traceback"]
            assert stats["lost"] == stats["lost_keys"] == 0
        # Of both together: how the work is shared depends on how busy the machine is.
        for direction in ("written", "read"):
            assert sum(stats[direction]["bytes"] for stats in replies.values()) > 100 * MB
        folders = client.run(lambda dask_worker: dask_worker.local_directory).values()
    assert not any(os.path.exists(os.path.join(f, "gpurt-tiers")) for f in folders)


# Without the active memory manager, which may drop what `a` is to read from its disk in the end.
@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 2)] * 2,
    worker_kwargs={"memory_limit": "20 MB"},
    config=NO_WATCH | NO_AMM,
)
async def test_metrics_are_true_and_peers_get_spilled_keys(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    runtimes = [await TierRuntime.install(w, tier_settings()) for w in (a, b)]
    x = c.map(make, range(30), key=[f"x{i}" for i in range(30)], workers=[a.address])
    await wait(x)
    await runtimes[0].engine.idle()
    await beat(a)
    spilled = s.workers[a.address].metrics["spilled_bytes"]
    store = runtimes[0].store
    assert isinstance(store, TieredStore)
    assert spilled == {"memory": store.spilled_total.memory, "disk": store.spilled_total.disk}
    assert 17 * MB < spilled["memory"] < 21 * MB
    assert s.workers[a.address].memory.spilled == spilled["disk"]
    assert s.workers[a.address].memory.managed == sum(e.nbytes for e in map(store.entry, store.memory))
    assert ("memory-monitor", "disk-write", "bytes") in s.cumulative_worker_metrics

    y = c.map(total, x, workers=[b.address])  # every one goes over the wire, most from disk
    assert await c.gather(y) == [total(make(i)) for i in range(30)]
    await runtimes[0].engine.idle()
    for w, runtime in zip((a, b), runtimes, strict=True):
        await beat(w)
        runtime.engine.validate()
        assert runtime.statistics()["sync_reads"] == 0
        assert runtime.statistics()["fallbacks"] == {}
        assert set(runtime.store) == set(w.data)
    assert ("get-data", "disk-read", "seconds") in s.cumulative_worker_metrics
    assert b.state.tasks == {} or all(e.pins == 0 for e in runtimes[1].engine.books.entries)
    assert all(e.pins == 0 for e in runtimes[0].engine.books.entries)
    np.testing.assert_array_equal(await c.gather(x[0]), make(0))

    z = c.map(total, x, workers=[a.address], pure=False)
    await wait(z)
    await beat(a)
    assert any(k[0] == "execute" and "disk-read" in k for k in s.cumulative_worker_metrics)
    # As under stock's buffer, for Dask's fine performance metrics.
    assert any(k[0] == "execute" and "memory-read" in k for k in s.cumulative_worker_metrics)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], worker_kwargs={"memory_limit": "30 MB"}, config=NO_WATCH)
async def test_prometheus_counts(c: Client, s: Scheduler, a: Worker) -> None:
    prometheus = pytest.importorskip("distributed.http.worker.prometheus.core")
    pytest.importorskip("prometheus_client")
    runtime = await TierRuntime.install(a, tier_settings())
    x = c.map(make, range(30))
    await wait(x)
    await runtime.engine.idle()
    families = {f.name: f for f in prometheus.WorkerMetricCollector(a).collect()}
    tasks = {sample.labels["state"]: sample.value for sample in families["dask_worker_tasks"].samples}
    assert tasks["disk"] == len(runtime.store.slow) > 0
    assert tasks["disk"] + tasks["memory"] == 30
    assert any(sample.labels["activity"] == "disk-write" for sample in families["dask_worker_spill_bytes"].samples)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": "100 MB"})
async def test_resident_set_above_the_mark_spills(c: Client, s: Scheduler, a: Worker) -> None:
    runtime = await TierRuntime.install(a, tier_settings())
    a.monitor.get_process_memory = lambda: 50 * MB
    x = c.map(make, range(10))
    await wait(x)
    runtime._watch.look()
    assert runtime._watch.alarms == 0
    assert runtime.engine.moving_bytes == len(runtime.store.slow) == 0
    a.monitor.get_process_memory = lambda: 73 * MB if len(runtime.store.slow) < 10 else 10 * MB
    await async_poll_for(lambda: len(runtime.store.slow) == 10, timeout=30)
    a.monitor.get_process_memory = lambda: 85 * MB
    await async_poll_for(lambda: a.status.name == "paused", timeout=30)  # distributed's own monitor is still there
    a.monitor.get_process_memory = lambda: 10 * MB
    await async_poll_for(lambda: a.status.name == "running", timeout=30)
    assert await c.gather(c.map(total, x)) == [total(make(i)) for i in range(10)]


@gen_cluster(
    nthreads=[("127.0.0.1", 1)],
    worker_kwargs={"memory_limit": "100 MB"},
    config={"distributed.worker.memory.spill": False},
)
async def test_a_worker_that_does_not_spill_is_not_paused_for_what_is_kept(s: Scheduler, a: Worker) -> None:
    """What shuffles keep to send again, and pages, went only where the resident set was watched: it paused for good."""
    kept = [True]
    giver = kept.clear
    reclaim.register(giver)
    try:
        await TierRuntime.install(a, tier_settings())
        a.monitor.get_process_memory = lambda: (85 if kept else 10) * MB
        await async_poll_for(lambda: not kept and a.status.name == "running", timeout=30)
    finally:
        reclaim._givers.remove(giver)


@pytest.mark.parametrize(
    ("config", "memory_limit", "budget", "watched"),
    [
        ({}, "100 MB", 60 * MB, True),
        ({"distributed.worker.memory.target": 0.3}, "100 MB", 30 * MB, True),
        ({"distributed.worker.memory.target": False}, "100 MB", None, True),
        ({"distributed.worker.memory.spill": False}, "100 MB", 60 * MB, False),
        # A plain dict: what is left is the budget of shards.
        (
            {"distributed.worker.memory.target": False, "distributed.worker.memory.spill": False},
            "100 MB",
            15 * MB,
            False,
        ),
        ({}, 0, int(system.MEMORY_LIMIT * min(1, 1 / CPU_COUNT) * 0.6 * 0.25), False),
    ],
)
def test_what_the_user_told_distributed_is_respected(
    config: dict[str, Any], memory_limit: Any, budget: int | None, watched: bool
) -> None:
    @gen_cluster(nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": memory_limit}, config=config)
    async def inner(s: Scheduler, a: Worker) -> None:
        runtime = await TierRuntime.install(a, tier_settings())
        assert runtime.engine.budget_bytes == budget
        assert (runtime._limits.watch_high_bytes is not None) is watched

    inner()


# ---------------------------------------------------------------------------------------------- life


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 2)],
    worker_kwargs={"memory_limit": "20 MB"},
    config=NO_WATCH,
    timeout=120,
)
async def test_adoption_and_draining_with_data(c: Client, s: Scheduler, a: Worker) -> None:
    original, execute, get_data = a.data, a.execute, a.handlers["get_data"]
    assert isinstance(original, SpillBuffer)
    x = c.map(make, range(30))
    await wait(x)
    before = original.spilled_total
    assert before.memory > 10 * MB
    for round_ in range(2):
        reads = original.cumulative_metrics["disk-read", "count"]
        runtime = await TierRuntime.install(a, tier_settings())
        assert original.cumulative_metrics["disk-read", "count"] == reads, "adopted without reading"
        assert a.data is a.state.data is runtime.store
        assert len(a.data) == 30 + 30 * round_
        assert len(original.fast) == 0, "not held twice"
        y = c.map(total, x, pure=False, key=[f"y{round_}-{i}" for i in range(30)])
        assert await c.gather(y) == [total(make(i)) for i in range(30)]
        assert runtime.statistics()["sync_reads"] == 0
        runtime.engine.validate()

        # New keys arrive, and old ones are read and deleted, while it drains.
        draining = asyncio.ensure_future(runtime.uninstall())
        z = c.map(total, x, pure=False)
        w = c.map(make, range(100, 110), pure=False)
        assert await c.gather(z) == [total(make(i)) for i in range(30)]
        await draining
        assert a.data is a.state.data is original
        assert "execute" not in vars(a)
        assert "gather_dep" not in vars(a)
        assert a.execute == execute
        assert a.handlers["get_data"] == get_data
        assert TierRuntime is not None
        assert "gpurt-tiers" not in a.extensions
        assert not os.path.exists(os.path.join(a.local_directory, "gpurt-tiers"))
        assert [total(v) for v in await c.gather(w)] == [total(make(i)) for i in range(100, 110)]
        del z, w
        await async_poll_for(lambda n=30 + 30 * (round_ + 1): len(a.data) == n, timeout=30)
        assert original.spilled_total.disk == sum(v.disk for v in original._slow_uncached.weight_by_key.values())
        x_again = await c.gather(x)
        for i in range(30):
            np.testing.assert_array_equal(x_again[i], make(i))
        if round_ == 0:
            keep = y
    storage = original._slow_uncached.d.directory
    del x, y, keep, x_again
    await async_poll_for(lambda: not a.data, timeout=30)
    assert os.listdir(storage) == []


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": "100 MB"}, config=NO_WATCH)
async def test_second_install_applies_the_new_settings(c: Client, s: Scheduler, a: Worker) -> None:
    runtime = await TierRuntime.install(a, tier_settings())
    assert runtime.engine.budget_bytes == 60 * MB
    x = c.map(make, range(10))
    await wait(x)
    again, third = await asyncio.gather(
        TierRuntime.install(a, tier_settings(**{"host-limit": 0.02, "disk-limit": "100 MB"})),
        TierRuntime.install(a, tier_settings(**{"host-limit": 0.02, "disk-limit": "100 MB"})),
    )
    assert again is runtime is third
    assert runtime.engine.budget_bytes == 2 * MB
    await async_poll_for(lambda: len(runtime.store.slow) >= 8, timeout=30)
    await TierRuntime.install(a, tier_settings(enabled=False))
    assert runtime.store is None
    assert isinstance(a.data, SpillBuffer)
    assert await c.gather(c.map(total, x)) == [total(make(i)) for i in range(10)]
    await TierRuntime.install(a, tier_settings())
    assert a.data is runtime.store
    assert len(a.data) == 20
    await runtime.uninstall()
    await runtime.uninstall()
    assert isinstance(a.data, SpillBuffer)
    new = await TierRuntime.install(a, tier_settings())
    assert new is not runtime


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": "100 MB"})
async def test_shards_only(c: Client, s: Scheduler, a: Worker) -> None:
    runtime = await TierRuntime.install(a, tier_settings(enabled=False))
    assert runtime.store is None
    assert isinstance(a.data, SpillBuffer)
    await check_shard_store(lambda: runtime.shard_store)
    assert runtime.engine.budget_bytes == 15 * MB
    assert await runtime.shard_store.put("other", 1, ArrayChunk({0: np.arange(3)}))
    assert runtime.statistics()["shard_chunks"] > 0


class Foreign(dict):  # type: ignore[type-arg]
    """Somebody else's mapping."""


class DeviceHostFile(dict):  # type: ignore[type-arg]
    __module__ = "dask_cuda.device_host_file"


class MySpillBuffer(SpillBuffer):
    """Distributed's, but with something of the user's in it."""

    def __init__(self, worker_local_directory: str) -> None:
        super().__init__(os.path.join(worker_local_directory, "mine"), target=10 * MB)


#: the process that runs the tests is larger than the workers' limit: it would be paused for good
NO_SPILL = {f"distributed.worker.memory.{name}": False for name in ("target", "spill", "pause")}


@pytest.mark.parametrize(
    ("worker_kwargs", "config", "level", "reason"),
    [
        ({"memory_limit": 0}, {}, "INFO", "plain dict"),
        ({"memory_limit": "100 MB"}, NO_SPILL, "INFO", "plain dict"),
        ({"data": Foreign}, {}, "WARNING", r"test_worker\.Foreign, not distributed's own"),
        ({"data": MySpillBuffer}, {}, "WARNING", r"test_worker\.MySpillBuffer, not distributed's own"),
        ({"data": DeviceHostFile}, {}, "WARNING", r"dask_cuda\.device_host_file\.DeviceHostFile, which manages device"),
    ],
)
def test_other_mappings_are_left_alone(
    worker_kwargs: dict[str, Any], config: dict[str, Any], level: str, reason: str
) -> None:
    """Shards are kept in the tiers all the same, within a budget, whatever `memory_limit` is."""

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], worker_kwargs=worker_kwargs, config=config)
    async def inner(c: Client, s: Scheduler, a: Worker) -> None:
        original, execute, get_data = a.data, a.execute, a.handlers["get_data"]
        x = c.map(make, range(5))
        await wait(x)
        with log_records("distributed.worker.gpurt") as records:
            runtime = await TierRuntime.install(a, tier_settings())
            await TierRuntime.install(a, tier_settings())  # says nothing again
        assert records[-1].levelname == level
        assert len(records) == 1
        assert re.search(
            rf"shuffles only\. .*{reason}.*To have the tiers: (start the worker|gpurt)", records[-1].getMessage()
        )
        assert a.data is a.state.data is original
        assert a.execute == execute
        assert a.handlers["get_data"] == get_data
        assert len(original) == 5
        stats = runtime.statistics()
        assert stats["enabled"] is False
        assert re.search(reason, stats["left_alone"])
        assert runtime.store is None
        assert 0 < stats["host_limit_bytes"] < system.MEMORY_LIMIT
        await check_shard_store(lambda: runtime.shard_store)
        assert await c.gather(c.map(total, x)) == [total(make(i)) for i in range(5)]
        await TierRuntime.install(a, tier_settings(enabled=False))
        assert runtime.statistics()["left_alone"] == "gpurt.tiers.enabled is false"
        await runtime.uninstall()
        assert a.data is a.state.data is original
        assert "gpurt-tiers" not in a.extensions
        assert not os.path.exists(os.path.join(a.local_directory, "gpurt-tiers"))

    inner()


@contextlib.contextmanager
def log_records(name: str) -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment,method-assign]
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": "100 MB"}, config=NO_WATCH)
async def test_unknown_spill_buffer_is_refused_untouched(c: Client, s: Scheduler, a: Worker) -> None:
    original = a.data
    x = c.submit(make, 1)
    await x
    slow = original._slow_uncached
    weights = slow.weight_by_key
    del slow.weight_by_key
    with pytest.raises(SeamMismatch, match=r"_slow_uncached\.weight_by_key does not exist.*Remedy"):
        await TierRuntime.install(a, tier_settings())
    slow.weight_by_key = weights
    assert a.data is a.state.data is original
    assert not os.path.exists(os.path.join(a.local_directory, "gpurt-tiers"))
    assert await c.submit(total, x) == total(make(1))
    runtime = await TierRuntime.install(a, tier_settings())
    assert runtime.statistics()["enabled"] is True
    assert runtime.statistics()["left_alone"] == ""


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_unknown_worker_is_refused_untouched(c: Client, s: Scheduler, a: Worker) -> None:
    async def execute(key: Any) -> None:
        raise AssertionError

    original = a.data
    a.execute = execute
    with pytest.raises(SeamMismatch, match=r"Worker\.execute"):
        await TierRuntime.install(a, tier_settings())
    del a.execute
    a.state.data = {}
    with pytest.raises(SeamMismatch, match="two objects"):
        await TierRuntime.install(a, tier_settings())
    a.state.data = original
    assert a.data is original
    assert await c.submit(total, make(1)) == total(make(1))


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": "20 MB"}, config=NO_WATCH)
async def test_directory_of_the_users_choice(c: Client, s: Scheduler, a: Worker) -> None:
    folder = os.path.join(a.local_directory, "elsewhere")
    runtime = await TierRuntime.install(a, tier_settings(directory=folder))
    x = c.map(make, range(30))
    await wait(x)
    await runtime.engine.idle()
    found = [os.path.join(d, f) for d, _, files in os.walk(folder) for f in files if "lock" not in f]
    assert len(found) == len(handles(runtime.engine)) > 5
    await a.close()
    assert [f for _, _, files in os.walk(folder) for f in files if "lock" not in f] == []


@gen_cluster(nthreads=[("127.0.0.1", 1)])
async def test_directory_that_cannot_be_used(s: Scheduler, a: Worker) -> None:
    blocker = os.path.join(a.local_directory, "file")
    with open(blocker, "w"):
        pass
    original = a.data
    with pytest.raises(InstallError, match=r"gpurt\.tiers\.directory"):
        await TierRuntime.install(a, tier_settings(directory=blocker))
    assert a.data is original


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], worker_kwargs={"memory_limit": "20 MB"}, config=NO_WATCH)
async def test_an_exception_of_ours_is_stocks_decision(c: Client, s: Scheduler, a: Worker) -> None:
    runtime = await TierRuntime.install(a, tier_settings())
    x = c.map(make, range(30))
    await wait(x)
    await all_stored(runtime, 30)

    async def broken(keys: Any) -> Any:
        raise RuntimeError("a bug of ours")

    runtime.store.ensure = broken  # type: ignore[method-assign,union-attr]
    assert await c.gather(c.map(total, x)) == [total(make(i)) for i in range(30)]
    np.testing.assert_array_equal(await x[3], make(3))
    stats = runtime.statistics()
    assert stats["fallbacks"]["execute"] == 30
    assert stats["fallbacks"]["get_data"] >= 1
    assert "a bug of ours" in stats["last_traceback"]
    assert stats["sync_reads"] > 0


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs={"memory_limit": "20 MB"}, config=NO_WATCH)
async def test_a_task_that_is_handed_back_gives_back_its_pins(c: Client, s: Scheduler, a: Worker) -> None:
    runtime = await TierRuntime.install(a, tier_settings())
    x = c.map(make, range(3))
    await wait(x)
    await all_stored(runtime, 3)
    assert runtime._seam is not None
    inputs = runtime._seam.inputs
    real, asked = inputs.must_return, []

    def once(key: Any) -> bool:
        asked.append(key)
        return len(asked) == 1 or real(key)

    inputs.must_return = once  # type: ignore[method-assign]
    assert await c.submit(total, *x) == sum(total(make(i)) for i in range(3))
    assert len(asked) == 2
    assert [e.pins for e in runtime.engine.books.entries] == [0] * 4
    assert runtime.statistics()["fallbacks"] == {}


def test_tasks_that_were_handed_back_and_ran_elsewhere_are_not_remembered_for_good() -> None:
    ts = SimpleNamespace(state="executing", dependencies=[SimpleNamespace(key="x")])
    state = SimpleNamespace(tasks=dict.fromkeys(range(5000), ts), data={}, actors={})
    one = worker_inputs.Inputs(SimpleNamespace(state=state), None, None)  # type: ignore[arg-type]
    assert all(one.must_return(key) for key in range(5000))
    assert len(one._returns) == worker_inputs._REMEMBERED
    # The latest of them are handed back so many times, as before.
    again = [one.must_return(4999) for _ in range(worker_inputs.MAX_RETURNS)]
    assert again == [True] * (worker_inputs.MAX_RETURNS - 1) + [False]
    assert 4999 not in one._returns


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, worker_kwargs={"memory_limit": "512 MB"}, config=NO_WATCH)
async def test_an_input_that_goes_while_a_task_waits_for_room(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    """The query is given up, and asked for again: the state machine then takes the waiting task for its run."""
    runtime = await TierRuntime.install(a, tier_settings())
    assert runtime._seam is not None
    runtime._seam.turns.outputs.learn("y", 8 << 20)
    engine, waits, go_on = runtime.engine, asyncio.Event(), asyncio.Event()
    admit = engine.admit

    async def gate(nbytes: int) -> Any:
        if nbytes == 8 << 20 and not go_on.is_set():
            waits.set()
            await go_on.wait()
        return await admit(nbytes)

    engine.admit = gate  # type: ignore[method-assign]

    def query() -> tuple[Any, Any]:
        x = c.submit(make, 1, key="x", workers=[b.address])
        return x, c.submit(total, x, key="y", workers=[a.address])

    x, y = query()
    await asyncio.wait_for(waits.wait(), 30)
    x.release()
    y.release()
    await async_poll_for(lambda: "x" not in a.data and a.state.tasks["y"].state == "cancelled", timeout=30)
    x, y = query()
    await async_poll_for(lambda: a.state.tasks["y"].state == "executing", timeout=30)
    go_on.set()
    assert await y == total(make(1))
    assert runtime._seam.inputs.returned_tasks == 1
    assert engine.gate.reserved_bytes == 0
    assert runtime.statistics()["fallbacks"] == {}


# ---------------------------------------------------------------------------------------------- loss


def spoil_all(runtime: TierRuntime, keys: Any = None) -> int:
    n = 0
    for handle in handles(runtime.engine):
        entry = next(e for e in runtime.engine.books.entries if e.handle is handle)
        if keys is not None and entry.key not in keys:
            continue
        path = os.path.join(runtime._disk.directory, handle.name)
        with open(path, "r+b") as f:
            f.seek(os.path.getsize(path) // 2)
            byte = f.read(1)[0]
            f.seek(-1, 1)
            f.write(bytes([byte ^ 1]))
        n += 1
    return n


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], worker_kwargs={"memory_limit": "20 MB"}, config=NO_WATCH)
async def test_lost_keys_are_computed_again(c: Client, s: Scheduler, a: Worker) -> None:
    runtime = await TierRuntime.install(a, tier_settings())
    x = c.map(make, range(20))
    x2 = c.map(lambda v: v + 1, x)
    await wait([*x, *x2])
    await all_stored(runtime, 40)
    assert spoil_all(runtime) == 40
    # Several dependents of each lost key, and lost keys that need lost keys.
    y = c.map(total, x, x2, x2[::-1], pure=False)
    z = c.map(total, x2, x, pure=False)
    plus = [(make(i), make(i) + 1) for i in range(20)]
    assert await c.gather(y) == [total(p[0], p[1], q[1]) for p, q in zip(plus, plus[::-1], strict=True)]
    assert await c.gather(z) == [total(*p) for p in plus]
    stats = runtime.statistics()
    assert 20 <= stats["lost_keys"] <= 80
    assert stats["checksum_failures"] == stats["lost"]
    assert stats["sync_reads"] == 0
    assert stats["fallbacks"] == {}, stats["last_traceback"]
    runtime.engine.validate()


@pytest.mark.parametrize("replicas", [1, 2])
def test_lost_keys_two_workers(replicas: int) -> None:
    # Without the active memory manager, which drops the second replicas two seconds after they were made.
    @gen_cluster(
        client=True,
        nthreads=[("127.0.0.1", 2)] * 2,
        worker_kwargs={"memory_limit": "20 MB"},
        config=NO_WATCH | NO_AMM,
    )
    async def inner(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        runtimes = [await TierRuntime.install(w, tier_settings()) for w in (a, b)]
        x = c.map(make, range(20))
        await wait(x)
        if replicas == 2:
            await c.replicate(x, 2)
        for runtime in runtimes:
            await all_stored(runtime, 20 if replicas == 2 else len(runtime.store or ()))
        spoil_all(runtimes[0])
        rounds = [c.map(total, x, x[::-1], pure=False, workers=w) for w in ([a.address], [b.address], None)]
        want = [total(make(i), make(19 - i)) for i in range(20)]
        for y in rounds:
            assert await asyncio.wait_for(c.gather(y), 60) == want
        got = await c.gather(x)
        for i in range(20):
            np.testing.assert_array_equal(got[i], make(i))
        for runtime in runtimes:
            runtime.engine.validate()
            assert runtime.statistics()["fallbacks"] == {}
        assert runtimes[0].statistics()["lost_keys"] >= 1

    inner()


def doubled(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x *= 2  # not as it should be; with stock the result is right all the same
    return x


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], worker_kwargs={"memory_limit": "20 MB"}, config=NO_WATCH)
async def test_a_task_that_changes_its_input_and_returns_it(c: Client, s: Scheduler, a: Worker) -> None:
    """The copy of the input is none of the result, though both are one object. One that renames it shares it."""
    runtime = await TierRuntime.install(a, tier_settings())
    assert runtime.store is not None
    x = c.submit(np.ones, 100_000, key="x")
    await wait(x)
    await all_stored(runtime, 1)
    name = Delayed("name", {"name": Alias("name", "x"), "x": x})
    renamed = c.compute(name, optimize_graph=False)
    await wait(renamed)
    entry = runtime.store.entry("name")
    assert entry is not None
    assert entry.clean
    y = c.submit(doubled, x, key="y")
    await wait(y)
    await all_stored(runtime, 3)
    assert await c.submit(np.sum, y) == 200_000
    await runtime.uninstall()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], worker_kwargs={"memory_limit": "20 MB"}, config=NO_WATCH)
async def test_client_gathers_lost_keys(c: Client, s: Scheduler, a: Worker) -> None:
    runtime = await TierRuntime.install(a, tier_settings())
    x = c.map(make, range(5))
    await wait(x)
    await all_stored(runtime, 5)
    spoil_all(runtime)
    got = await asyncio.wait_for(c.gather(x), 60)
    for i in range(5):
        np.testing.assert_array_equal(got[i], make(i))
    assert runtime.statistics()["lost_keys"] == 5


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], worker_kwargs={"memory_limit": "20 MB"}, config=NO_WATCH)
async def test_scattered_data_that_is_lost_is_an_error(c: Client, s: Scheduler, a: Worker, host: str) -> None:
    """Also where the worker has a name in its address, which the scheduler has resolved: that is no other holder."""
    a._address = a.contact_address = f"tcp://{host}:{a.port}"
    runtime = await TierRuntime.install(a, tier_settings())
    x = await c.scatter(make(1))
    other = c.submit(make, 2)
    await other
    await all_stored(runtime, 2)
    spoil_all(runtime)
    y = c.submit(total, x)
    with pytest.raises(LostData, match="no valid copy"):
        await asyncio.wait_for(y.result(), 60)
    with pytest.raises((LostData, FutureCancelledError)):
        await asyncio.wait_for(x.result(), 60)
    assert await c.submit(total, other) == total(make(2))
    assert a.transfer_outgoing_count == 0, "a request that failed counts for ever"


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], worker_kwargs={"memory_limit": "20 MB"}, config=NO_WATCH)
async def test_tasks_cancelled_while_their_inputs_are_read(c: Client, s: Scheduler, a: Worker) -> None:
    """Releasing, and wanting again, in the window that asynchronous loading opens."""
    runtime = await TierRuntime.install(a, tier_settings())
    x = c.map(make, range(20))
    await wait(x)
    await all_stored(runtime, 20)
    for _ in range(15):
        y = c.map(total, x, x[::-1])
        await asyncio.sleep(0.003)
        for future in y:
            future.release()
        del y
        await asyncio.sleep(0.001)
    y = c.map(total, x, x[::-1])
    assert await asyncio.wait_for(c.gather(y), 60) == [total(make(i), make(19 - i)) for i in range(20)]
    # The same with inputs that go away.
    for i in range(10):
        z = c.map(make, range(1000 + 10 * i, 1010 + 10 * i))
        await wait(z)
        spill_all(runtime)
        r = c.map(total, z)
        await asyncio.sleep(0.002)
        del z, r
    runtime.engine.shrink(0)
    await async_poll_for(lambda: len(a.data) == 40, timeout=30)
    await runtime.engine.idle()
    assert all(e.pins == 0 for e in runtime.engine.books.entries)
    runtime.engine.validate()
    assert runtime.statistics()["fallbacks"] == {}


# ---------------------------------------------------------------------------------------------- crash


@pytest.mark.timeout(600)
def test_kill_in_mid_spill_leaves_nothing(tmp_path: Any) -> None:
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}),
        LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            processes=True,
            memory_limit="400 MiB",
            dashboard_address=None,
            local_directory=str(tmp_path),
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(Plugin(tier_settings()))
        (pid,) = client.run(os.getpid).values()
        x = client.map(make, range(24), n=20 * MB, pure=False)

        def files() -> list[str]:
            return [f for d, _, fs in os.walk(tmp_path) for f in fs if d.endswith("gpurt-tiers")]

        deadline = time.monotonic() + 60
        while not files():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        sums = client.gather(client.map(total, x), errors="raise")
        assert sums == [total(make(i, 20 * MB)) for i in range(24)]
        del x
        deadline = time.monotonic() + 60
        while files():
            assert time.monotonic() < deadline, files()
            time.sleep(0.05)
        folders = [d for d, _, _ in os.walk(tmp_path) if d.endswith("gpurt-tiers")]
        assert len(folders) == 1, "that of the killed process is gone"


def test_array_computation_against_stock() -> None:
    def compute(client: Client) -> np.ndarray[Any, Any]:
        rng = da.random.default_rng(0)
        x = rng.random((2000, 2000), chunks=(500, 500))
        return (x @ x.T + x.T).mean(axis=0).compute()

    results = []
    for ours in (False, True):
        with (
            dask.config.set(NO_WATCH),
            LocalCluster(
                n_workers=2, threads_per_worker=1, processes=False, memory_limit="15 MB", dashboard_address=None
            ) as cluster,
            Client(cluster) as client,
        ):
            if ours:
                client.register_plugin(Plugin(tier_settings()))
            results.append(compute(client))
    np.testing.assert_allclose(results[0], results[1])
