"""Shuffles of device frames beside tasks that need device memory, all under one small limit, over the stand-in."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import numpy as np
import pandas as pd
import pytest
from distributed import Client, wait

pytest.importorskip("rmm")

from dask_gpurt.backends import cuda
from dask_gpurt.client.local import local_cluster
from dask_gpurt.extension import on_worker
from dask_gpurt.tiers.device.setup import DeviceMemory
from tests.backends import host_frames
from tests.backends.host_frames import HostFrame
from tests.backends.lazy_memory import LazyMemory
from tests.shuffle.helpers import source
from tests.shuffle.test_device_frames import host, same_rows_of
from tests.shuffle.test_device_ways import report, statistics
from tests.tiers.device import test_device_worker
from tests.tiers.device.host_rmm import HostRmmBackend
from tests.tiers.device.test_device_worker import KB, make, right
from tests.versions import needs_pandas_3

pytestmark = pytest.mark.cluster
INPUTS, ROWS, OUTPUTS = 24, 10_000, 24
#: device memory of one worker
LIMIT = 1_280_000


def rows(i: int) -> pd.DataFrame:
    rng = np.random.default_rng(i)
    k = rng.integers(0, 1000, ROWS)
    return pd.DataFrame({"k": k, "a": rng.random(ROWS), "t": pd.Series(k).astype("str")})


class Shared(HostRmmBackend):
    """Values and the rows of shuffles in one memory. Its streams are done as far as they are when it is counted."""

    def allocated_bytes(self) -> int:
        host_frames.MEMORY.drain()
        return super().allocated_bytes()


def prepare(limit: int, ucx: bool) -> None:
    """Have this worker find a device, at its next heartbeat."""
    backend = Shared(limit)
    test_device_worker.LIMIT = limit
    test_device_worker.HostRmmBackend = lambda limit: backend  # type: ignore[assignment,misc]
    test_device_worker.BACKENDS.append(backend)
    host_frames.MEMORY = LazyMemory(over=backend.allocator.stack)
    if ucx:
        host_frames.use_ucx()
    DeviceMemory.open = test_device_worker.open_on_host_memory  # type: ignore[method-assign]
    cuda.probe = lambda: cuda.Probe("", "host memory", 1 << 30, device=999)
    cuda.has_context = lambda: True


def device(dask_worker: Any) -> dict[str, Any]:
    found: dict[str, Any] = on_worker(dask_worker).runtime.statistics().get("device", {})  # type: ignore[union-attr]
    return found


@needs_pandas_3
def test_a_shuffle_of_three_times_the_device_memory() -> None:
    """Rows make room for tasks and values, as values do for rows; what does not fit the host goes on to disk."""
    ucx = importlib.util.find_spec("ucxx") is not None  # rows for others lie on the device, too, and come there
    on = {
        "shuffle.transport": "auto" if ucx else "tcp",
        "shuffle.device-frames": True,
        "tiers.device": "auto",
        "tiers.host-limit": 0.002,
    }
    workers = {"n_workers": 2, "threads_per_worker": 2, "memory_limit": "1 GiB", "dashboard_address": ":0"}
    with local_cluster(settings=on, **workers) as lc, Client(lc) as client:
        client.run(prepare, LIMIT, ucx)
        end = time.monotonic() + 60
        while not all(client.run(device).values()):
            assert time.monotonic() < end
            time.sleep(0.05)
        kept = client.map(make, range(8), nbytes=100 * KB, key=[f"kept-{i}" for i in range(8)])
        wait(kept)
        out = client.persist(host(source(rows, INPUTS)).shuffle("k", npartitions=OUTPUTS))
        beside = client.map(make, range(20), nbytes=250 * KB, key=[f"beside-{i}" for i in range(20)])
        got = client.gather(client.compute(out.to_delayed()))
        wait(beside)
        # Where they are: without a device they cannot be sent, and on a busy machine a task may be stolen.
        holders = client.who_has([*kept, *beside])
        for values in (kept, beside):
            looks = [client.submit(right, x, i, workers=list(holders[x.key])) for i, x in enumerate(values)]
            assert all(client.gather(looks))
        devices, reports = client.run(device), client.run(report)
        stats = client.run_on_scheduler(statistics)
        errors = client.run(lambda dask_worker: on_worker(dask_worker).runtime.statistics()["fallbacks"])  # type: ignore[union-attr]
    whole = pd.concat([rows(i) for i in range(INPUTS)])
    assert int(whole.memory_usage().sum()) > 3 * 2 * LIMIT
    assert len(got) == OUTPUTS
    assert all(type(part) is HostFrame for part in got)
    same_rows_of(pd.concat(got), whole)
    assert (stats["runs"], stats["fallbacks"], stats["errors"]) == (1, {}, 0), stats
    for address, one in devices.items():
        assert reports[address]["faults"] == []
        assert reports[address]["error"] == ""
        assert reports[address]["written"] > 0
        assert errors[address] == {}
        assert one["peak_bytes"] <= LIMIT
        assert one["held_left_bytes"] > 0, one
        assert (one["out_of_memory"]["exceptions"], one["failed"]) == (0, 0), one
