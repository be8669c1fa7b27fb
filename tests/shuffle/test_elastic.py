"""Workers that leave in good order, a cluster that is restarted, a disk that is full: in the middle of a shuffle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask.utils import parse_bytes
from distributed import Client
from distributed.utils_test import gen_cluster

from dask_gpurt import local_cluster
from dask_gpurt.shuffle.counters import worker_statistics
from tests.shuffle.helpers import left, source, taken_over, went_on
from tests.shuffle.test_amendment import (
    THREE,
    N,
    after_the_barrier,
    gate,
    same_rows,
    transferred,
    until,
    vouched,
    whose,
)

pytestmark = pytest.mark.cluster


@gen_cluster(**THREE)
async def test_scaled_down_while_inputs_are_split(c, s, *workers):
    async with taken_over(s, workers) as (takeover, _):
        g, d = gate(6)
        f = c.compute(d.shuffle("k", npartitions=7))
        await until(lambda: g.begun == g.first + 3 and transferred(s) >= 1)
        plugin = s.plugins["shuffle"]
        # An adaptive cluster chooses nobody who takes part; a person may.
        (taking_part,) = (set(state.participating_workers) for state in plugin.active_shuffles.values())
        there = plugin.valid_workers_downscaling(s, list(s.workers.values()))
        assert {ws.address for ws in there} == set(s.workers) - taking_part
        assert taking_part
        leaving = max(workers, key=vouched)
        retired = asyncio.create_task(c.retire_workers([leaving.address], close_workers=True))
        await until(
            lambda: s.workers.get(leaving.address) is None or s.workers[leaving.address].status.name != "running"
        )
        g.go.set()
        same_rows(await f)
        await retired
        await until(lambda: leaving.address not in s.workers)
        went_on(takeover)


@gen_cluster(**THREE)
async def test_scaled_down_while_outputs_are_made(c, s, *workers):
    async with taken_over(s, workers) as (takeover, _):
        async with after_the_barrier(c, s, source(left, N).shuffle("k", npartitions=9)) as (out, keys):
            leaving, _kept = whose(s, keys)
            retired = asyncio.create_task(c.retire_workers([leaving], close_workers=True))
            await until(lambda: leaving not in s.workers or s.workers[leaving].status.name != "running")
        same_rows(await c.compute(out))
        await retired
        await until(lambda: leaving not in s.workers)
        same_rows(await c.compute(out))
        stats = takeover.statistics()
        assert stats["errors"] == 0, stats["last_error"]
        assert stats["recovery"]["restarted"] == 0


def part(i: int) -> pd.DataFrame:
    r = np.random.default_rng(i)
    return pd.DataFrame({"k": r.integers(0, 500, 20_000), "v": r.random(20_000)})


def slow_part(i: int) -> pd.DataFrame:
    time.sleep(0.2)
    return part(i)


def same_parts(got: pd.DataFrame, n: int) -> None:
    want = pd.concat([part(i) for i in range(n)])
    got, want = (df.sort_values(["k", "v"], ignore_index=True) for df in (got, want))
    pd.testing.assert_frame_equal(got, want)


def progress(dask_scheduler):
    tasks = dask_scheduler.tasks.values()
    return sum("transfer" in str(ts.key) and ts.state == "memory" for ts in tasks)


def nothing_left(dask_scheduler):
    takeover = dask_scheduler.plugins["shuffle"].takeover.statistics()
    assert not takeover["errors"], takeover["last_error"]
    return not dask_scheduler.tasks and not takeover["active"] and "gpurt-shuffle" not in dask_scheduler.clients


def files(folder) -> list[str]:
    """Of the tiers."""
    found = [os.path.join(root, name) for root, _, names in os.walk(folder) for name in names]
    return [path for path in found if "gpurt-tiers" in path]


def bytes_in(folder) -> int:
    total = 0
    for path in files(folder):
        with contextlib.suppress(FileNotFoundError):  # it has another name while it is written
            total += os.path.getsize(path)
    return total


def test_a_cluster_that_is_restarted_in_the_middle(tmp_path):
    with (
        local_cluster(n_workers=2, threads_per_worker=1, dashboard_address=None, local_directory=str(tmp_path)) as lc,
        Client(lc) as client,
    ):
        d = dd.from_map(slow_part, list(range(16)), meta=part(0).iloc[:0])
        out = client.persist(d.shuffle("k", npartitions=8))
        deadline = time.monotonic() + 60
        while client.run_on_scheduler(progress) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        client.restart(timeout=120)
        client.wait_for_workers(2, timeout=120)
        del out
        deadline = time.monotonic() + 60
        while not client.run_on_scheduler(nothing_left):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not files(tmp_path)
        same_parts(d.shuffle("k", npartitions=8).compute(), 16)


def test_a_disk_that_is_full_in_the_middle(tmp_path):
    """What finds no room there stays in memory."""
    limit = "1 MiB"
    settings = {"tiers.host-limit": 0.001, "tiers.disk-limit": limit}
    with (
        local_cluster(
            settings=settings,
            n_workers=2,
            threads_per_worker=1,
            memory_limit="1 GiB",
            dashboard_address=None,
            local_directory=str(tmp_path),
        ) as lc,
        Client(lc) as client,
    ):
        out = client.persist(dd.from_map(part, list(range(16)), meta=part(0).iloc[:0]).shuffle("k", npartitions=8))
        same_parts(out.compute(), 16)
        deadline = time.monotonic() + 60
        while not (nbytes := bytes_in(tmp_path)):  # written in the background; a file that was just made is empty
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert nbytes <= 2 * parse_bytes(limit)
        assert sum(x["chunks"] for x in client.run(on_worker).values()) > 0


def on_worker(dask_worker):
    return worker_statistics(dask_worker)
