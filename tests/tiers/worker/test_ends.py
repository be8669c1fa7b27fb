"""The end of a worker's tiers: what is deleted then, and what the process keeps."""

from __future__ import annotations

import logging
import os
import shutil
from collections import ChainMap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from distributed import WorkerPlugin
from distributed.utils_test import gen_cluster

from dask_gpurt.config import Settings
from dask_gpurt.memory.pages import pages
from dask_gpurt.tiers.runtime import TierRuntime
from dask_gpurt.tiers.storage.disk.direct_io import POOL
from dask_gpurt.tiers.storage.disk.quota import remove_folder
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from tests.tiers.conftest import FaultyOs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from distributed import Client, Scheduler, Worker

    from tests.tiers.conftest import Rig


@pytest.mark.cluster
@gen_cluster(nthreads=[("", 1)] * 2)
async def test_a_worker_that_was_detached_keeps_no_memory_for_later(s: Scheduler, a: Worker, b: Worker) -> None:
    """The allowance for pages that wait stayed, and nobody looked after them: small workers paused for good."""
    before = pages.allowance_bytes  # of other workers in this process
    runtimes = [await TierRuntime.install(w, Settings.load().tiers) for w in (a, b)]
    assert pages.allowance_bytes >= 64 << 20
    a.data["x"] = np.zeros(10 << 20, "u1")
    runtimes[0].engine.shrink(1)
    await runtimes[0].engine.idle()
    runtimes[0].engine.shrink(0)
    store = runtimes[0].store
    assert store is not None
    store.release(await store.ensure(["x"]))  # it is read back, into pages of ours
    chunk = POOL.take()  # as the disk tier does where it goes past the page cache
    POOL.give(chunk)
    await runtimes[0].uninstall()
    assert POOL.take() is not chunk
    assert pages.allowance_bytes >= 64 << 20  # the other worker is in the same process
    await runtimes[1].uninstall()
    assert pages.allowance_bytes == before
    if before == 0:
        assert pages.idle_bytes == 0
        assert a.data["x"].sum() == 0
        del a.data["x"]
        assert pages.idle_bytes == 0


@pytest.mark.cluster
@pytest.mark.parametrize("wraps", [False, True], ids=["a mapping with the values", "a mapping around the store"])
def test_a_mapping_that_a_user_has_put_over_the_store_stays(wraps: bool) -> None:
    """The spill buffer from before came in its place, and what it held was gone while the scheduler counted on it."""

    @gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"memory_limit": "64 GB"})
    async def test(c: Client, s: Scheduler, a: Worker) -> None:
        runtime = await TierRuntime.install(a, Settings.load().tiers)
        x = c.submit(np.arange, 10)
        await x
        theirs: Any = ChainMap({}, a.data) if wraps else dict(a.data)
        a.memory_manager.data = a.state.data = theirs
        y = c.submit(np.add, x, 1)
        await y
        await runtime.uninstall()
        assert a.data is a.state.data is theirs
        assert await c.submit(np.sum, c.submit(np.add, x, y)) == 100
        assert {x.key, y.key} <= set(a.data)

    test()


class SetToRunning(WorkerPlugin):
    """What a scheduler says that could not retire a worker, in the middle of its close."""

    def teardown(self, worker: Worker) -> None:
        worker.handle_worker_status_change("running", "late")


@pytest.mark.cluster
@gen_cluster(nthreads=[("", 1)])
async def test_a_worker_closes_whatever_its_status_is_meanwhile(s: Scheduler, a: Worker) -> None:
    """One with a lifetime closes also where nobody can take its data. Its close failed half way, and it stayed on."""
    await TierRuntime.install(a, Settings.load().tiers)
    await a.plugin_add(SetToRunning(), name="late")
    assert await a.close() == "OK"
    assert a.status.name == "closed"


def test_the_end_of_a_tier_does_not_delete_what_comes_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it for good, so a folder of the same name may be made before it is done."""
    rmtree = shutil.rmtree

    def late(path: str, **kwargs: Any) -> None:
        monkeypatch.undo()
        new = DiskTier(str(tmp_path / "tier"))
        handle = new.write([(0, [bytes(1 << 20)])])
        rmtree(path, **kwargs)
        new.read(handle)
        new.close()

    old = DiskTier(str(tmp_path / "tier"))
    old.write([(0, [b"x"])])
    monkeypatch.setattr(shutil, "rmtree", late)
    old.close()
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_deleted_is_told(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "0").write_text("x")

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(os, "unlink", refuses)
    with caplog.at_level(logging.WARNING, "distributed.worker.gpurt"):
        remove_folder(str(tmp_path / "tier"))
    assert "were not deleted" in caplog.text


def test_a_deletion_that_fails_is_counted(run_rig: Callable[..., None]) -> None:
    faulty = FaultyOs()
    faulty.always["unlink"] = OSError(5, "EIO")

    async def test(rig: Rig) -> None:
        rig.store["a"] = np.ones(1 << 20, "u1")
        rig.spill_all()
        await rig.settle()
        del rig.store["a"]
        await rig.settle()
        assert rig.disk.failed_deletions == 1
        assert rig.disk.used_bytes == 0

        def raises() -> None:
            raise KeyError("whatever")

        rig.engine.io.submit(raises)
        await rig.settle()
        assert rig.engine.io.failures == 1

    run_rig(test, os_layer=faulty)
