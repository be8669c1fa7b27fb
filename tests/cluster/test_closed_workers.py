"""Workers come and go in one process, as with in-process clusters that adapt: nothing of the extension keeps them."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import weakref
from unittest import mock

import pytest
from distributed import Client, Scheduler, Worker, core
from distributed.protocol.pickle import dumps
from distributed.utils_test import gen_cluster, inc

from dask_gpurt._version import __version__
from dask_gpurt.config import Settings
from dask_gpurt.extension import NAME, GpurtScheduler, GpurtWorker, on_worker
from dask_gpurt.extension.delivery import Delivered
from dask_gpurt.memory import frozen
from dask_gpurt.observe.figures import prometheus
from dask_gpurt.tiers.storage.stack import Below


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[])
async def test_a_worker_that_has_closed_is_not_kept(c: Client, s: Scheduler) -> None:
    plugin = GpurtScheduler(Settings.load({}))
    await plugin.start(s)
    s.add_plugin(plugin, name=NAME)
    closed = []
    for _ in range(3):
        async with Worker(s.address, nthreads=1) as w:
            assert await c.submit(inc, 1, pure=False) == 2
            assert on_worker(w) is not None
            assert len([t for t in asyncio.all_tasks() if t.get_name() == "gpurt-feed"]) == 1
        closed.append(weakref.ref(w))
        del w
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "gpurt-feed"]
    core._expects_comm.cache_clear()  # Dask itself keeps the newest workers in there, by their handlers
    gc.collect()
    assert [ref() for ref in closed[:-1]] == [None, None], "the last one may still be in a frame"
    await plugin.uninstall()


@pytest.mark.cluster
@gen_cluster(nthreads=[])
async def test_a_preloaded_worker_of_a_stock_scheduler_is_not_kept(s: Scheduler) -> None:
    async with Worker(s.address, nthreads=1, preload=["dask_gpurt.preload"]) as w:
        assert [t for t in asyncio.all_tasks() if t.get_name() == "gpurt-feed"]
        figures = prometheus._collector
        assert figures is not None
        assert w in figures.sources
    # No scheduler has sent the plugin, so none is torn down.
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "gpurt-feed"]
    assert w not in figures.sources
    assert w not in frozen._owners


@pytest.mark.cluster
@gen_cluster(nthreads=[])
async def test_a_worker_that_closes_while_it_gets_its_part_is_not_kept(s: Scheduler) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    opened = Below.open

    async def slowly(*args: object) -> Below:
        begun.set()
        await go_on.wait()
        return await opened(*args)  # type: ignore[arg-type]

    w = await Worker(s.address, nthreads=1)
    with tempfile.TemporaryDirectory() as chosen, mock.patch.object(Below, "open", slowly):
        half = Delivered(NAME, __version__, dumps(GpurtWorker(Settings.load({"tiers.directory": chosen}))))
        coming = asyncio.create_task(w.plugin_add(half, NAME))
        await begun.wait()
        await w.close()
        go_on.set()
        await coming
        assert not [name for name in os.listdir(f"{chosen}/dask-gpurt-space") if not name.endswith(".lock")]
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "gpurt-feed"]
    assert on_worker(w) is None
    assert w not in frozen._owners
