"""Taking over and giving back."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from types import SimpleNamespace
from typing import Any

import dask.array as da
import pandas as pd
import pytest
from distributed.core import Status
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin
from distributed.shuffle._shuffle import DataFrameShuffleSpec
from distributed.utils_test import captured_logger, gen_cluster

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.errors import InstallError, SeamMismatch
from dask_gpurt.shuffle import probe, seam
from dask_gpurt.shuffle.counters import worker_statistics
from dask_gpurt.shuffle.scheduler import output_tasks
from dask_gpurt.shuffle.scheduler import takeover as takeover_module
from dask_gpurt.shuffle.scheduler.takeover import FAILURES, ShuffleTakeover, swap_plugin
from dask_gpurt.shuffle.spec import GpurtShuffleSpec
from dask_gpurt.shuffle.worker.shard_stores import MemoryShardStore, provide, store_of, withdraw
from tests.shuffle.helpers import ON, held, left, right, source, until

pytestmark = pytest.mark.cluster
TWO = {"client": True, "nthreads": [("127.0.0.1", 1)] * 2, "timeout": 60}
OPS = ("shuffle_barrier", "shuffle_get", "shuffle_get_or_create", "shuffle_restrict_task")


@gen_cluster(**TWO)
async def test_uninstall_restores_stock(c, s, a, b):
    stock = s.plugins["shuffle"]
    handlers = {op: s.handlers[op] for op in OPS}
    takeover = await ShuffleTakeover.install(s, ON)
    assert type(s.plugins["shuffle"]) is not ShuffleSchedulerPlugin
    assert s.extensions["shuffle"] is s.plugins["shuffle"]
    assert all(s.handlers[op].__self__ is s.plugins["shuffle"] for op in OPS)
    await takeover.uninstall()
    assert s.plugins["shuffle"] is s.extensions["shuffle"] is stock
    assert {op: s.handlers[op] for op in OPS} == handlers
    await takeover.uninstall()
    assert len(await c.compute(source(left).shuffle("k"))) == 480
    assert worker_statistics(a)["runs"] == worker_statistics(b)["runs"] == 0
    assert not takeover.statistics()["installed"]
    await (await ShuffleTakeover.install(s, ON)).uninstall()


@gen_cluster(**TWO)
async def test_statistics_are_json(c, s, a, b):
    events = []
    takeover = await ShuffleTakeover.install(s, ON, sink=events.append)
    await c.compute(source(left).shuffle("k"))
    stats = json.loads(json.dumps([takeover.statistics(), worker_statistics(a)]))
    assert stats[0]["runs"] == 1
    assert stats[0]["workers_able"] == 2
    # No store was provided: counted.
    assert stats[1]["fallbacks"] == stats[1]["runs"] == 1
    assert [e.name for e in events] == ["shuffle.installed"]


@gen_cluster(**TWO)
async def test_refused_while_a_shuffle_is_active(c, s, a, b):
    stock = s.plugins["shuffle"]
    stock.active_shuffles["x"] = None
    with pytest.raises(InstallError, match=r"1 shuffles are active.*Remedy"):
        await ShuffleTakeover.install(s, ON)
    assert s.plugins["shuffle"] is stock
    stock.active_shuffles.clear()
    takeover = await ShuffleTakeover.install(s, ON)
    s.plugins["shuffle"].active_shuffles["x"] = None
    with pytest.raises(InstallError, match="cannot uninstall"):
        await takeover.uninstall()
    assert takeover.statistics()["installed"]
    s.plugins["shuffle"].active_shuffles.clear()
    with pytest.raises(InstallError, match="Remedy"):
        await ShuffleTakeover.install(s, ON)
    await takeover.uninstall()
    with pytest.raises(InstallError, match="enabled is false"):
        await ShuffleTakeover.install(s, ShuffleSettings(enabled=False))


@gen_cluster(**TWO)
async def test_another_distributed_is_left_alone(c, s, a, b):
    stock = s.plugins["shuffle"]
    original = ShuffleSchedulerPlugin._retrieve_spec
    try:
        ShuffleSchedulerPlugin._retrieve_spec = lambda self, shuffle_id, more: None
        with pytest.raises(SeamMismatch, match=r"_retrieve_spec\(shuffle_id, more\).*Remedy"):
            await ShuffleTakeover.install(s, ON)
    finally:
        ShuffleSchedulerPlugin._retrieve_spec = original
    assert s.plugins["shuffle"] is stock
    seam.check()


@gen_cluster(**TWO)
async def test_a_failing_swap_changes_nothing(c, s, a, b):
    stock, handlers = s.plugins["shuffle"], {op: s.handlers[op] for op in OPS}

    def make():
        s.handlers["shuffle_get"] = None
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        swap_plugin(s, make)
    assert s.plugins["shuffle"] is s.extensions["shuffle"] is stock
    assert {op: s.handlers[op] for op in OPS} == handlers


@gen_cluster(**TWO)
async def test_reasons_that_are_counted_are_bounded(c, s, a, b, monkeypatch):
    takeover = await ShuffleTakeover.install(s, ON)
    reasons = iter([f"column{i} is object" for i in range(100)] + ["column0 is object"])
    monkeypatch.setattr(takeover, "_reason_for_stock", lambda spec: next(reasons))
    spec = SimpleNamespace(id="x")
    for _ in range(101):
        assert takeover.choose(spec) is spec
    counted = takeover.statistics()["fallbacks"]
    assert (counted["column0 is object"], counted["other reasons"], sum(counted.values())) == (2, 80, 101)


@gen_cluster(**TWO)
async def test_a_worker_that_can_not_means_stock_for_all(c, s, a, b):
    events = []
    takeover = await ShuffleTakeover.install(s, ON, sink=events.append)
    takeover.able[a.address] = "has another version"
    assert len(await c.compute(source(left).shuffle("k"))) == 480
    assert takeover.statistics()["runs"] == 0
    assert takeover.statistics()["fallbacks"] == {"1 workers have not said that they can": 1}
    assert events[-1].name == "shuffle.fallback"
    assert worker_statistics(b)["runs"] == 0


@gen_cluster(**TWO)
async def test_probe_says_why_a_worker_can_not(c, s, a, b):
    assert await probe.probe_workers(s, [a.address]) == {a.address: ""}
    with pytest.raises(SeamMismatch, match="this worker has dask-gpurt"):
        probe.probe("0.0.0")
    b.handlers["run"] = lambda comm, **kwargs: {"status": "error", "exception_text": "no module dask_gpurt"}
    assert (await probe.probe_workers(s, [b.address]))[b.address] == "no module dask_gpurt"

    async def never(comm, **kwargs):
        await asyncio.sleep(60)

    b.handlers["run"] = never
    assert "no answer" in (await probe.probe_workers(s, [b.address], timeout_seconds=0.1))[b.address]


@pytest.mark.parametrize("hangs", [True, False])
def test_a_worker_that_does_not_answer_is_asked_again(monkeypatch, hangs):
    """It was busy, or stopped. Without that all shuffles would be Dask's for as long as it lives."""

    @gen_cluster(**TWO)
    async def check(c, s, a, b):
        async def silent(comm, **kwargs):
            if hangs:
                await asyncio.sleep(60)
            comm.abort()

        stock, b.handlers["run"] = b.handlers["run"], silent
        takeover = await ShuffleTakeover.install(s, ON)
        # What the others said counts. On a busy machine they take their time, too.
        await until(lambda: takeover.able[a.address] == "")
        assert takeover.able[b.address].startswith("no answer")
        assert len(await c.compute(source(left).shuffle("k"))) == 480
        assert takeover.statistics()["runs"] == 0
        b.handlers["run"] = stock
        await until(lambda: takeover.able[b.address] == "")
        assert len(await c.compute(source(left).shuffle("k", npartitions=3))) == 480
        assert takeover.statistics()["runs"] == 1

    monkeypatch.setattr(takeover_module, "probe_workers", functools.partial(probe.probe_workers, timeout_seconds=0.3))
    monkeypatch.setattr(takeover_module, "PAUSE_SECONDS", 0.05)
    check()


@pytest.mark.parametrize("stays", [True, False])
def test_a_lost_connection_is_logged_of_workers_that_stay(monkeypatch, stays):
    """A task that ends its process does so four times, often before the worker was asked. Dask logs that already."""

    @gen_cluster(**TWO)
    async def check(c, s, a, b):
        async def ends(comm, **kwargs):
            comm.abort()

        b.handlers["run"] = ends
        logged = []
        monkeypatch.setattr(takeover_module.logger, "warning", lambda text, *args: logged.append(text % args))
        with captured_logger("distributed.scheduler", level=logging.ERROR) as errors:
            takeover = await ShuffleTakeover.install(s, ON)
            assert takeover.able[b.address].startswith("no answer")
            assert not logged
            if stays:
                await until(lambda: logged)
                assert "the connection ended" in logged[0]
                assert b.address in logged[0]
            else:
                await s.remove_worker(b.address, stimulus_id="test")
                await until(lambda: b.address not in takeover.able)
                await takeover._ask([a.address])
                assert not takeover._unnamed
                assert not logged
        assert "broadcast" not in errors.getvalue()

    monkeypatch.setattr(takeover_module, "PAUSE_SECONDS", 0.05 if stays else 60)
    check()


@gen_cluster(client=True, nthreads=[], timeout=60)
async def test_workers_that_come_later_are_asked(c, s):
    from distributed import Worker

    takeover = await ShuffleTakeover.install(s, ON)
    async with Worker(s.address, nthreads=1) as a:
        await until(lambda: a.address in takeover.able)
        assert a.status is Status.running
        assert len(await c.compute(source(left).shuffle("k"))) == 480
        assert takeover.statistics()["runs"] == 1
    await until(lambda: not takeover.able)


@gen_cluster(**TWO)
async def test_rechunk_stays_stock(c, s, a, b):
    takeover = await ShuffleTakeover.install(s, ON)
    x = da.ones((40, 40), chunks=(4, 40)).rechunk((40, 4), method="p2p")
    assert await c.compute(x.sum()) == 1600
    assert takeover.statistics()["fallbacks"] == {"rechunk": 1}


class NotPandas(pd.DataFrame):
    pass


@gen_cluster(**TWO)
async def test_specs_that_are_not_ours(c, s, a, b, monkeypatch):
    takeover = await ShuffleTakeover.install(s, ON)

    def spec(meta):
        return DataFrameShuffleSpec(
            id="x", disk=True, npartitions=2, column="p", meta=meta, parts_out=2, drop_column=True
        )

    assert type(takeover.choose(spec(left(0)))) is GpurtShuffleSpec
    other = spec(NotPandas(left(0)))
    assert takeover.choose(other) is other
    assert f"meta is {__name__}.NotPandas" in takeover.statistics()["fallbacks"]
    with monkeypatch.context() as patch:  # the scheduler starts without pandas, so it looks at it here
        patch.setattr(seam, "_find_common_type", lambda: None)
        lacking = spec(left(0))
        assert takeover.choose(lacking) is lacking
    assert "pandas.core.dtypes.cast.find_common_type(missing)" in takeover.statistics()["fallbacks"]
    broken = spec(left(0))
    takeover.scheduler = None
    assert takeover.choose(broken) is broken
    takeover.scheduler = s
    assert takeover.statistics()["errors"] == 1
    assert "AttributeError" in takeover.statistics()["last_error"]


@gen_cluster(**TWO)
async def test_stores(c, s, a, b):
    store = MemoryShardStore()
    provide(a, store)
    assert store_of(a) == (store, False)
    plain, is_plain = store_of(b)
    assert is_plain
    assert store_of(b)[0] is plain
    withdraw(a)
    assert store_of(a)[1]
    withdraw(a)
    with pytest.raises(TypeError, match=r"store is int.*Remedy"):
        provide(a, 3)


def test_memory_store_keeps_the_contract():
    class One:
        nbytes, parts = 10, (1, 2)

        def get(self, part):
            return f"row{part}"

    async def check():
        store = MemoryShardStore()
        assert await store.put("r", 2, One())
        assert not await store.put("r", 2, One())
        assert await store.put("r", 1, One())
        assert sum(chunk.nbytes for chunk in held(store)) == 20
        assert await store.take("r", 1) == ["row1", "row1"]
        assert await store.take("r", 9) == []
        assert len(held(store)) == 2
        await store.take("r", 2)
        assert not held(store)
        store.drop("r")
        store.drop("never")
        assert not await store.put("r", 3, One())

    asyncio.run(check())


@gen_cluster(**TWO)
async def test_outputs_go_to_their_worker_at_once(c, s, a, b):
    takeover = await ShuffleTakeover.install(s, ON)
    asked = []
    restrict = s.handlers["shuffle_restrict_task"]
    s.handlers["shuffle_restrict_task"] = lambda **kwargs: asked.append(kwargs) or restrict(**kwargs)
    futures = c.compute(source(left).shuffle("k", npartitions=20).to_delayed())
    assert sum(map(len, await asyncio.gather(*futures))) == 480
    assert takeover.statistics()["pinned"] == 20
    assert not asked
    # So do a join's, of two shuffles or of one with itself.
    for number, other in enumerate((source(right), source(left)), 1):
        merged = source(left).merge(other, on="k", shuffle_method="p2p", broadcast=False)
        assert len(await c.compute(merged)) > 0
        assert takeover.statistics()["pinned"] == 20 + number * merged.npartitions
    assert not asked
    assert not takeover.statistics()["errors"]


@gen_cluster(**TWO)
async def test_an_error_while_pinning_leaves_it_to_stock(c, s, a, b):
    takeover = await ShuffleTakeover.install(s, ON)

    def fails(scheduler, shuffle_id):
        raise ValueError("no such task")

    before, output_tasks.unpack_tasks = output_tasks.unpack_tasks, fails
    try:
        assert len(await c.compute(source(left).shuffle("k", npartitions=20))) == 480
    finally:
        output_tasks.unpack_tasks = before
    stats = takeover.statistics()
    assert (stats["errors"], stats["pinned"]) == (1, 0)
    assert "no such task" in stats["last_error"]


@gen_cluster(**TWO)
async def test_too_many_failures_leave_new_shuffles_to_dask(c, s, a, b):
    events = []
    takeover = await ShuffleTakeover.install(s, ON, sink=events.append)

    async def fails_while_it_is_used(scheduler, *args):
        for _ in range(FAILURES):
            try:
                raise ValueError("no such task")
            except ValueError:
                takeover.failed()

    pin, takeover.pin = takeover.pin, fails_while_it_is_used
    assert takeover.statistics()["retired"] == {}
    # A run that is active when it happens ends as it is.
    assert len(await c.compute(source(left).shuffle("k"))) == 480
    takeover.pin = pin
    stats = takeover.statistics()
    assert stats["runs"] == 1
    assert stats["errors"] == FAILURES
    assert "ValueError: no such task" in stats["last_error"]
    (why,) = stats["retired"].values()
    assert f"{FAILURES} failures" in why
    assert "no such task" in why
    assert [e.name for e in events] == ["shuffle.installed", "shuffle.fallback", "shuffle.retired"]
    runs = [worker_statistics(w)["runs"] for w in (a, b)]
    assert len(await c.compute(source(left).shuffle("k", npartitions=7))) == 480
    assert [worker_statistics(w)["runs"] for w in (a, b)] == runs
    assert takeover.statistics()["runs"] == 1
    assert takeover.statistics()["fallbacks"] == {"switched off": 1}
    x = da.ones((40, 40), chunks=(4, 40)).rechunk((40, 4), method="p2p")
    assert await c.compute(x.sum()) == 1600
    # Installed anew, it is tried again.
    await until(lambda: not s.plugins["shuffle"].active_shuffles)
    await takeover.uninstall()
    again = await ShuffleTakeover.install(s, ON)
    assert len(await c.compute(source(left).shuffle("k", npartitions=5))) == 480
    assert again.statistics()["runs"] == 1


def test_the_end_of_a_worker_awaits_the_newest_plane_once() -> None:
    """Its plugin outlives `detach`, and each attach wrapped its teardown once more, around a plane that was kept."""
    ended: list[str] = []

    async def torn_down(worker: Any) -> None:
        ended.append("stock")

    def last(name: str) -> Any:
        async def stop() -> None:
            ended.append(name)

        return stop

    plugin: Any = SimpleNamespace(teardown=torn_down)
    seam.on_teardown(plugin, last("first"))
    wrapped = plugin.teardown
    seam.on_teardown(plugin, last("second"))
    assert plugin.teardown is wrapped
    asyncio.run(plugin.teardown(None))
    assert ended == ["stock", "second"]
