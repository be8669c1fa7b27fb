"""Nannies of `local_cluster` that start killed workers again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import Client, Status

import dask_gpurt
from dask_gpurt.client import local


@pytest.mark.cluster
def test_workers_killed_together_come_back_however_long_their_start_takes() -> None:
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with (
        # Any start takes longer.
        dask.config.set({"distributed.deploy.lost-worker-timeout": "20 ms"}),
        dask_gpurt.local_cluster(**options) as cluster,
        Client(cluster) as client,
    ):
        pids = client.run(os.getpid).values()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        # With Dask's cluster no nanny is left, and this waits for ever.
        assert client.submit(sum, [1, 2]).result(timeout=120) == 3
        client.wait_for_workers(2, timeout=120)
        assert not set(pids).intersection(client.run(os.getpid).values())


@pytest.mark.parametrize(
    ("status", "of_process", "patience", "stays"),
    [
        (Status.running, Status.starting, 60, True),
        (Status.running, Status.stopped, 60, True),
        (Status.running, Status.starting, -1, False),
        (Status.running, Status.running, 60, False),
        (Status.closed, Status.stopped, 60, False),
        (Status.running, None, 60, False),
    ],
)
def test_a_nanny_stays_while_it_starts_a_worker(
    status: Status, of_process: Status | None, patience: float, stays: bool
) -> None:
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    async def look() -> None:
        process = None if of_process is None else SimpleNamespace(status=of_process)
        nanny = SimpleNamespace(status=status, process=process, close=close)
        cluster = local.GpurtLocalCluster.__new__(local.GpurtLocalCluster)
        cluster.workers, cluster._futures = {0: nanny}, set()
        cluster.scheduler_info = {"workers": {}}
        cluster._close_lost(0, time.monotonic() + patience)
        assert (0 in cluster.workers) is stays
        await asyncio.gather(*cluster._futures)
        cluster.status = Status.closed

    asyncio.run(look())
    assert closed == [True] * (not stays)
