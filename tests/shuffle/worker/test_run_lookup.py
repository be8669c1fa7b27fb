"""Runs that a task's thread finds by itself."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pandas as pd
import pytest
from distributed.shuffle import _worker_plugin
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle.worker import run_lookup
from tests.shuffle.helpers import left, ordered, source, taken_over, whole


@dataclasses.dataclass
class Run:
    run_id: int = 3
    closed: bool = False
    _exception: Exception | None = None


class Plugin:
    """What distributed's would do is told."""

    def __init__(self, run, closed=False):
        self.shuffle_runs = SimpleNamespace(_active_runs={"a": run} if run else {}, closed=closed)

    def get_or_create_shuffle(self, shuffle_id):
        return "asked", shuffle_id

    def get_shuffle_run(self, shuffle_id, run_id):
        return "asked", shuffle_id, run_id


def test_what_is_well_is_found():
    run = Run()
    plugin = Plugin(run)
    for _ in range(2):  # installed twice is installed once
        run_lookup.install(plugin, Run)
        assert plugin.get_or_create_shuffle("a") is run
        assert plugin.get_shuffle_run("a", 3) is run
        assert plugin.get_shuffle_run("a", run_id=3) is run
    assert plugin.get_or_create_shuffle("b") == ("asked", "b")
    assert plugin.get_shuffle_run("a", 2) == ("asked", "a", 2)
    assert plugin.get_shuffle_run("a", run_id=4) == ("asked", "a", 4)


@pytest.mark.parametrize(
    "plugin",
    [
        Plugin(None),
        Plugin(SimpleNamespace(run_id=3, closed=False, _exception=None)),
        Plugin(Run(closed=True)),
        Plugin(Run(_exception=RuntimeError("failed"))),
        Plugin(Run(), closed=True),
    ],
    ids=["none", "another kind", "closed", "failed", "the worker is going"],
)
def test_the_rest_is_asked(plugin):
    run_lookup.install(plugin, Run)
    assert plugin.get_or_create_shuffle("a") == ("asked", "a")
    assert plugin.get_shuffle_run("a", 3) == ("asked", "a", 3)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=120)
async def test_each_worker_asks_once(c, s, a, b):
    manager = _worker_plugin._ShuffleRunManager
    create, get = manager.get_or_create, manager.get_with_run_id
    created, gotten = [], []

    async def get_or_create(self, shuffle_id, key):
        created.append(self._plugin.worker.address)
        return await create(self, shuffle_id, key)

    async def get_with_run_id(self, shuffle_id, run_id):
        gotten.append(run_id)
        return await get(self, shuffle_id, run_id)

    async with taken_over(s, (a, b)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager, "get_or_create", get_or_create)
            patch.setattr(manager, "get_with_run_id", get_with_run_id)
            got = await c.compute(source(left, 8).shuffle("k", npartitions=20))
    pd.testing.assert_frame_equal(ordered(got), ordered(whole(left, 8)).astype(dict(got.dtypes)))
    assert sorted(created) == sorted([a.address, b.address])
    # What comes by distributed's comms asks, as the barrier does; not each of the outputs.
    assert len(gotten) < 20
