"""A worker goes; what it had stored on shared storage is read back by others, not computed again."""

# ruff: noqa: ASYNC240
from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from distributed import Client, Nanny, Scheduler, Worker, wait
from distributed.utils_test import NO_AMM, async_poll_for, gen_cluster, gen_test

import dask_gpurt
from dask_gpurt.config import Settings
from dask_gpurt.errors import InstallError
from dask_gpurt.extension import GpurtScheduler, WorkerParts, on_worker
from dask_gpurt.tiers.shared import scheduler as shared_scheduler
from dask_gpurt.tiers.shared.protocol import HEARTBEAT_FIELD, PROTOCOL
from dask_gpurt.tiers.storage.object.client import Bucket
from dask_gpurt.tiers.storage.object.leases import LeaseKeeper, worker_prefix
from tests.conftest import S3_ENVIRONMENT, S3Server
from tests.tiers.conftest import beat

pytest.importorskip("obstore")
pytestmark = pytest.mark.cluster

if TYPE_CHECKING:
    from pathlib import Path

    from dask_gpurt.tiers.runtime import TierRuntime
    from dask_gpurt.tiers.shared.scheduler import SharedCopiesPlugin

CONFIG = {
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.scheduler.allowed-failures": 10,
    # It drops one of two replicas, maybe the one that was stored.
    **NO_AMM,
    # On a busy machine it moves tasks off the worker they prefer: their values are then not among the stored ones.
    "distributed.scheduler.work-stealing": False,
}


def make(i: int, log: str) -> np.ndarray[Any, Any]:
    with open(log, "a") as f:
        f.write(f"{i}\n")
    return np.full(20_000, i)


def runs(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def settings(url: str, **more: Any) -> Settings:
    return Settings.load(
        {"tiers.object-store": url, "tiers.object-use": "first", "tiers.disk-reserve": 0, "placement.enabled": False}
        | more
    )


def runtime_of(worker: Worker) -> TierRuntime:
    parts = on_worker(worker)
    assert parts is not None
    assert parts.runtime is not None
    return parts.runtime


async def extended(s: Scheduler, url: str, **more: Any) -> SharedCopiesPlugin:
    plugin = GpurtScheduler(settings(url, **more))
    await plugin.start(s)
    s.add_plugin(plugin, name=plugin.name)
    shared = plugin.shared_copies
    assert shared is not None
    return shared


async def greeted(shared: SharedCopiesPlugin, n: int) -> None:
    await async_poll_for(lambda: shared.statistics()["workers"] == n, timeout=30)


async def spill(worker: Worker, shared: SharedCopiesPlugin, known: int) -> None:
    runtime = runtime_of(worker)
    runtime.engine.shrink(1 << 60)
    await async_poll_for(lambda: shared.statistics()["known_copies"] >= known, timeout=30)
    runtime.engine.shrink(0)


def check(*workers: Worker) -> None:
    for w in workers:
        runtime_of(w).engine.validate()
        stats = runtime_of(w).statistics()
        assert stats["fallbacks"] == {}, stats["last_traceback"]
        assert stats["shared"]["exceptions"] == 0, stats["shared"]["last_traceback"]


@gen_cluster(client=True, nthreads=[("", 1)] * 3, config=CONFIG)
async def test_spilled_keys_of_a_lost_worker_are_read_back(c: Client, s: Scheduler, *workers: Worker) -> None:
    import tempfile
    from pathlib import Path

    a, b, d = workers
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        shared = await extended(s, Path(folder, "store").as_uri())
        await greeted(shared, 3)
        roots = c.map(make, range(12), log=str(log), workers=[a.address], allow_other_workers=True, pure=False)
        await wait(roots)
        scattered = await c.scatter(np.arange(5000), workers=[a.address])
        on_a = len(a.data)
        before = len(runs(log))
        await spill(a, shared, on_a)
        await a.close()
        assert all(s.tasks[f.key].state == "memory" for f in roots)  # for Dask they were never lost
        assert s.tasks[scattered.key].state == "memory"
        got = await c.gather(c.map(lambda x: int(x.sum()), roots))
        assert got == [20_000 * i for i in range(12)]
        assert (await scattered).sum() == np.arange(5000).sum()
        assert len(runs(log)) == before == 12
        stats = shared.statistics()
        assert stats["adopted_keys"] == on_a >= 2
        assert stats["lost_keys"] == stats["exceptions"] == 0, stats["last_traceback"]
        assert sum(runtime_of(w).statistics()["shared"]["adopted"] for w in (b, d)) == on_a
        check(b, d)

        # Twice over: an heir goes too.
        again = [k for k in b.data if runtime_of(b).store.entry(k).handle is not None]  # type: ignore[union-attr]
        assert again
        await b.close()
        assert await c.gather(c.map(lambda x: int(x.max()), roots)) == list(range(12))
        assert len(runs(log)) == 12
        check(d)

        # What nobody needs any more is deleted, wherever it was written.
        del roots, scattered
        await async_poll_for(lambda: not any(k for k in s.tasks), timeout=30)
        await runtime_of(d).engine.idle()
        left = [p for p in Path(folder, "store").rglob("*") if p.is_file() and p.name != "lease"]
        assert left == []
        # Later their leases too, and they are forgotten.
        assert len(shared._gone) == 2
        shared._expire_seconds = 0
        shared.look()
        assert shared._gone == {}
        await async_poll_for(lambda: len([*Path(folder, "store").rglob("lease")]) == 2, timeout=30)  # both are d's


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=CONFIG)
async def test_a_prefix_whose_heir_has_written_its_key_again_is_forgotten(
    c: Client, s: Scheduler, a: Worker, b: Worker
) -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        shared = await extended(s, Path(folder, "store").as_uri())
        await greeted(shared, 2)
        root = c.submit(np.arange, 20_000, workers=[a.address], allow_other_workers=True, pure=False)
        await wait(root)
        await spill(a, shared, 1)
        of_a = shared._copies[root.key][a.address]
        await a.close()
        await async_poll_for(lambda: root.key in b.data, timeout=30)
        shared._expire_seconds = 0
        shared.look()
        assert len(shared._gone) == 1  # the heir reads the object there
        own = shared._issued[b.address]
        written = of_a._replace(name=of_a.name.replace(of_a.name.rpartition("/")[0], own))
        shared._reported(worker=b.address, prefix=own, copies=[written])
        assert shared.refused_reports == 0
        shared.look()
        assert shared._gone == {}
        assert (await root).sum() == np.arange(20_000).sum()


@gen_cluster(nthreads=[])
async def test_a_restart_keeps_no_prefix(s: Scheduler) -> None:
    """Keys that it had forgotten kept what was below their prefix until the scheduler ended."""
    shared = await extended(s, "memory://")
    prefix = worker_prefix(s.address)
    shared._gone[prefix] = 0.0, {"adopted"}
    shared._expire_seconds = 0
    shared.look()
    assert prefix in shared._gone
    shared.restart(s)
    shared.look()
    assert prefix not in shared._gone


@gen_cluster(nthreads=[])
async def test_what_other_clusters_left_goes_at_the_second_look_only(s: Scheduler) -> None:
    """A scheduler that started as the store came back deleted the values of clusters that were about to renew."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        bucket = Bucket(Path(folder).as_uri())
        live, dead = worker_prefix("tcp://a:1"), worker_prefix("tcp://b:1")
        for prefix in (live, dead):
            LeaseKeeper(bucket, prefix, {}).renew()
            bucket.put(f"{prefix}/0", [b"value"])
            for name in ("0", "lease"):
                os.utime(Path(folder, prefix, name), (0, 0))
        shared = await extended(s, Path(folder).as_uri())
        await async_poll_for(lambda: not shared._sweeps, timeout=30)
        assert {f"{live}/0", f"{dead}/0"} <= set(bucket.list("gpurt"))
        LeaseKeeper(bucket, live, {}).renew()
        shared.look()
        assert not shared._sweeps  # too soon
        shared._look_again_at = 0.0
        shared.look()
        await async_poll_for(lambda: not shared._sweeps, timeout=30)
        assert sorted(bucket.list("gpurt")) == [f"{live}/0", f"{live}/lease"]
        assert shared.statistics()["expired_prefixes"] == 1
        assert shared.statistics()["exceptions"] == 0, shared.statistics()["last_traceback"]


@gen_cluster(nthreads=[])
async def test_a_worker_that_cannot_write_its_lease_does_not_cost_ever_more(s: Scheduler) -> None:
    """It asked for another prefix each second, and all of them were kept until the scheduler ended."""
    shared = await extended(s, "memory://")
    assert shared._look_again is not None
    shared._look_again.stop()
    await async_poll_for(lambda: not shared._sweeps, timeout=30)
    now, asked = [0.0], []
    ws = SimpleNamespace(metrics={"gpurt": {HEARTBEAT_FIELD: PROTOCOL}})
    fake: Any = SimpleNamespace(
        workers={"w": ws}, tasks={}, address=s.address, worker_send=lambda address, message: asked.append(now[0])
    )
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])
    with mock.patch.object(shared_scheduler, "time", clock), mock.patch.object(shared, "_scheduler", fake):
        for _ in range(3600):
            shared._greet(fake)
            shared._reported("w", "")
            now[0] += 1.0
        assert 60 <= len(asked) <= 70  # a rest of a minute, in the end
        assert len(shared._gone) <= 16
        now[0] += 60.0
        shared._greet(fake)
        shared._reported("w", shared._issued["w"])
        shared._reported("w", "")  # it has left, and comes again
        shared._greet(fake)
        assert asked[-2:] == [now[0]] * 2
        await async_poll_for(lambda: not shared._sweeps, timeout=30)
    shared._issued.clear()


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=CONFIG)
async def test_without_a_copy_or_with_a_bad_one_it_is_computed_again(
    c: Client, s: Scheduler, a: Worker, b: Worker
) -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        shared = await extended(s, Path(folder, "store").as_uri())
        await greeted(shared, 2)
        roots = c.map(make, range(9), log=str(log), workers=[a.address], allow_other_workers=True, pure=False)
        await wait(roots)
        await spill(a, shared, len(a.data))
        fresh = c.submit(make, 99, log=str(log), workers=[a.address], allow_other_workers=True)  # in memory only
        await wait(fresh)
        prefix = runtime_of(a)._below.objects.prefix  # type: ignore[union-attr]
        objects = [p for p in Path(folder, "store", prefix).iterdir() if p.name != "lease"]
        bad = objects[::3]
        for i, path in enumerate(bad):
            if i % 2:
                path.unlink()
            else:
                data = bytearray(path.read_bytes())
                data[-7] ^= 1
                path.write_bytes(data)
        await a.close()
        got = await c.gather(c.map(lambda x: int(x.max()), [*roots, fresh]))
        assert got == [*range(9), 99]
        assert 10 <= len(runs(log)) <= 10 + len(bad) + 1
        assert shared.statistics()["exceptions"] == 0
        check(b)


@gen_cluster(client=True, nthreads=[("", 1)], config=CONFIG)
async def test_a_scheduler_that_leaves_while_a_worker_moves(c: Client, s: Scheduler, a: Worker) -> None:
    """The store is slow. The worker then listened to no scheduler, and left its objects for that one to sweep."""
    import tempfile
    import threading
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
        add = LeaseKeeper.add

        def slow(self: LeaseKeeper, prefix: str) -> None:
            begun.set()
            assert go_on.wait(30)
            add(self, prefix)
            ended.set()

        with mock.patch.object(LeaseKeeper, "add", slow):
            shared = await extended(s, Path(folder, "store").as_uri())
            await async_poll_for(begun.is_set, timeout=30)
            shared.stop()
            worker_side = runtime_of(a)._shared
            assert worker_side is not None
            moving = worker_side._moving
            assert moving is not None
            await c.submit(len, "")  # by the same stream: the worker has heard of it
            go_on.set()
            await async_poll_for(ended.is_set, timeout=30)
            await async_poll_for(moving.done, timeout=30)
        assert not worker_side.heard
        await wait(c.map(make, range(6), log=str(Path(folder) / "log"), pure=False))
        runtime_of(a).engine.shrink(1 << 60)
        await runtime_of(a).engine.idle()
        await a.close()
        assert [p.name for p in Path(folder, "store").rglob("*") if p.is_file() and p.name != "lease"] == []


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=CONFIG)
async def test_removal_gives_everything_back(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        stock = s.handlers["unregister"]
        shared = await extended(s, Path(folder, "store").as_uri())
        assert s.handlers["unregister"] is not stock
        await greeted(shared, 2)
        roots = c.map(make, range(6), log=str(log), pure=False)
        await wait(roots)
        await spill(a, shared, 1)
        plugin = s.plugins["gpurt"]
        await plugin.uninstall()  # type: ignore[attr-defined]
        assert s.handlers["unregister"] == stock
        assert "remove_worker" not in vars(s)
        assert await c.gather(c.map(lambda x: int(x.max()), roots)) == list(range(6))
        assert not [p for p in Path(folder, "store").rglob("*") if p.is_file()]
        await a.close()  # stock: what was there is computed again
        assert await c.gather(c.map(lambda x: int(x.min()), roots)) == list(range(6))


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=CONFIG)
async def test_a_worker_that_cannot_take_over_says_so(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    """The scheduler believes what it was told last: a worker without tiers declines, and the key is computed again."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        shared = await extended(s, Path(folder, "store").as_uri())
        for w in (a, b):
            await beat(w)
        shared.look()
        await greeted(shared, 2)
        roots = c.map(make, range(4), log=str(log), workers=[a.address], allow_other_workers=True, pure=False)
        await wait(roots)
        await spill(a, shared, len(a.data))
        runtime = runtime_of(b)
        assert runtime._shared is not None
        runtime._shared.uninstall()
        b.batched_stream.buffer.clear()  # the word that it has left does not come in time
        await a.close()
        assert await c.gather(c.map(lambda x: int(x.max()), roots)) == list(range(4))
        assert len(runs(log)) > 4


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=CONFIG)
async def test_a_worker_does_not_decide_what_is_deleted(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    """It names prefixes and objects of others; the scheduler swept, and let others adopt, whatever it named."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        others = LeaseKeeper(Bucket(store.as_uri()), f"gpurt/other/{1:016x}", {})
        others.renew()
        others._bucket.put(f"gpurt/other/{1:016x}/0", [b"of a running cluster"])
        shared = await extended(s, store.as_uri())
        await greeted(shared, 2)
        root = c.submit(make, 1, log=str(Path(folder) / "log"), workers=[a.address], allow_other_workers=True)
        await wait(root)
        mine, hers = (shared._issued[w.address] for w in (a, b))
        assert runtime_of(a)._below.objects.prefix == mine  # type: ignore[union-attr]
        key = root.key
        for prefix in ("gpurt", f"gpurt/other/{1:016x}", hers, "..", "/"):
            shared._reported(a.address, prefix, [(key, f"{prefix}/0", 1, 1, 1)])
        bad: list[Any] = [
            (key, f"gpurt/other/{1:016x}/0", 1, 1, 1),
            (key, f"{hers}/0", 1, 1, 1),
            (key, f"{mine}/../../other/{1:016x}/0", 1, 1, 1),
            (key, f"{mine}/0", -1, 1, 1),
            (key, f"{mine}/0", float("nan"), 1, 1),
            ([key], f"{mine}/0", 1, 1, 1),
            (key, 0, 1, 1, 1),
            (key,),
            None,
        ]
        shared._reported(a.address, mine, bad)
        stats = shared.statistics()
        assert stats["refused_reports"] == 5 + len(bad)
        assert stats["known_copies"] == stats["exceptions"] == 0, stats["last_traceback"]
        await a.close()
        await async_poll_for(lambda: not shared._sweeps, timeout=30)
        assert (store / f"gpurt/other/{1:016x}/0").exists()
        assert (store / hers / "lease").exists()
        assert await c.submit(lambda x: int(x.max()), root) == 1


@gen_cluster(client=True, nthreads=[("", 1)] * 2, Worker=Nanny, config=CONFIG, timeout=120)
async def test_kill_9_of_a_real_process(c: Client, s: Scheduler, a: Nanny, b: Nanny) -> None:
    """Two processes and a shared folder: one is killed; what it had stored is not computed again."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        shared = await extended(s, Path(folder, "store").as_uri())
        await greeted(shared, 2)
        victim, _ = list(s.workers)
        roots = c.map(make, range(10), log=str(log), workers=[victim], allow_other_workers=True, pure=False)
        await wait(roots)

        async def spill_here(dask_worker: Worker) -> int:
            runtime = runtime_of(dask_worker)
            # Every look at a process that is small enough ends what was asked for, however little was written by then.
            runtime._watch.stop()
            runtime.engine.shrink(1 << 60)
            await runtime.engine.idle()
            return os.getpid()

        held = len(s.workers[victim].has_what)
        pid = (await c.run(spill_here, workers=[victim]))[victim]
        await async_poll_for(lambda: shared.statistics()["known_copies"] >= held, timeout=60)
        os.kill(pid, signal.SIGKILL)
        await async_poll_for(lambda: victim not in s.workers, timeout=60)
        assert await c.gather(c.map(lambda x: int(x.max()), roots)) == list(range(10))
        assert len(runs(log)) == 10
        assert shared.statistics()["adopted_keys"] == held > 0


@gen_cluster(nthreads=[("", 1)], config=CONFIG)
async def test_a_store_that_does_not_answer_at_the_start_is_an_error(s: Scheduler, a: Worker) -> None:
    nobody = {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    with mock.patch.dict(os.environ, nobody), pytest.raises(InstallError, match=r"Remedy: correct the URL"):
        await WorkerParts.install(a, settings("s3://bucket/x"))
    assert on_worker(a) is None
    assert not os.path.exists(os.path.join(a.local_directory, "gpurt-tiers"))


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=CONFIG, timeout=120)
async def test_the_same_in_s3(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    import tempfile
    from pathlib import Path

    pytest.importorskip("moto.server")
    pytest.importorskip("boto3")
    server = S3Server()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(os.environ, {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": server.endpoint}),
        ):
            log = Path(folder) / "log"
            shared = await extended(s, "s3://bucket/some/prefix")
            await greeted(shared, 2)
            roots = c.map(make, range(8), log=str(log), workers=[a.address], allow_other_workers=True, pure=False)
            await wait(roots)
            await spill(a, shared, len(a.data))
            await a.close()
            assert await c.gather(c.map(lambda x: int(x.max()), roots)) == list(range(8))
            assert len(runs(log)) == 8
            assert runtime_of(b).statistics()["below"]["object"]["reads"] > 0
            check(b)
            await s.plugins["gpurt"].uninstall()  # type: ignore[attr-defined]
    finally:
        server.stop()


@gen_test()
async def test_nothing_is_left_in_the_store() -> None:
    """Half of the keys spilled, one worker closed before: the end of the cluster sweeps all."""
    import tempfile
    from pathlib import Path

    tmp_path = Path(tempfile.mkdtemp())
    settings_ = {"tiers.object-store": (tmp_path / "store").as_uri(), "tiers.object-use": "first"}
    async with (
        dask_gpurt.local_cluster(
            settings=settings_,
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            dashboard_address=None,
            asynchronous=True,
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        shared = cluster.scheduler.plugins["gpurt"].shared_copies
        await greeted(shared, 2)
        await client.gather(client.map(make, range(6), log=str(tmp_path / "log"), pure=False))
        futures = client.map(make, range(6), log=str(tmp_path / "log"), pure=False)
        await wait(futures)
        for worker in cluster.workers.values():
            runtime_of(worker).engine.shrink(1 << 60)
            await runtime_of(worker).engine.idle()
        assert [p for p in (tmp_path / "store").rglob("*") if p.is_file()]
        await next(iter(cluster.workers.values())).close()
        assert await client.gather(client.map(lambda x: int(x.max()), futures)) == list(range(6))
    assert [p for p in (tmp_path / "store").rglob("*") if p.is_file()] == []
