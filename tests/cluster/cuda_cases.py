"""What `test_dask_cuda` runs in other processes; `python -m tests.cluster.cuda_cases` starts clusters on one machine.

Standard input is JSON, ``[[name, how, arguments, settings], ...]``, where `how` is "LocalCUDACluster", "local_cluster"
or "await local_cluster". One line of JSON per case is written: what `seen` found on the one worker, or the error of the
start. `no_driver` is on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from distributed import Client, Worker

    from tests.tiers.device.host_rmm import Value

#: of each value; with 1 GiB of "device" memory none of the limits below is met by accident
VALUE_BYTES = 1 << 20


def make(i: int) -> Value:
    """A value in what libraries allocate from."""
    import rmm.mr

    from tests.tiers.device.host_rmm import Value, pattern

    return Value(pattern(i, VALUE_BYTES), rmm.mr.get_current_device_resource())


def right(value: Value, i: int) -> bool:
    """Whether it has come back as it was."""
    from tests.tiers.device.host_rmm import pattern

    return bool((value.array() == pattern(i, VALUE_BYTES)).all())


def look(dask_worker: Worker) -> dict[str, Any]:
    """What is installed on a worker."""
    import rmm.mr

    from dask_gpurt.backends.rmm_stack import chain
    from dask_gpurt.extension import on_worker

    parts = on_worker(dask_worker)
    tiers = {} if parts is None or parts.runtime is None else parts.runtime.statistics()
    return {
        "data": type(dask_worker.data).__name__,
        "memory": [type(r).__name__ for r in chain(rmm.mr.get_current_device_resource())],
        "off": tiers.get("device_off"),
        "left_alone": tiers.get("left_alone"),
        "device": tiers.get("device"),
        "parts": None if parts is None else dict(parts.parts.state),
    }


def seen(client: Client, address: str) -> dict[str, Any]:
    """Compute on a worker, with device values where there is a tier for them, and look at it."""
    on: dict[str, Any] = {"workers": [address], "pure": False}
    sums = client.gather(client.map(np.sum, [np.arange(100)] * 3, **on))
    before = client.run(look, workers=[address])[address]
    good = None
    if before["device"] is not None:
        values = client.map(make, range(100), **on)
        good = all(client.gather(client.map(right, values, range(100), **on)))
    return {**client.run(look, workers=[address])[address], "sums": [int(s) for s in sums], "good": good}


def start(how: str, arguments: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """One cluster with one worker: what was seen, or the error."""
    import dask_gpurt

    common: dict[str, Any] = {"dashboard_address": None, **arguments}
    try:
        if how == "LocalCUDACluster":
            from dask_cuda import LocalCUDACluster

            argv = [f"--gpurt-{key.replace('.', '-')}={value}" for key, value in settings.items()]
            preload = {"preload": ["dask_gpurt.preload"], "preload_argv": [argv]}
            cluster = LocalCUDACluster(n_workers=1, scheduler_kwargs=preload, **common)
        elif how == "await local_cluster":
            return asyncio.run(_awaited(settings, {"gpus": 1, **common}))
        else:
            cluster = dask_gpurt.local_cluster(settings=settings, **{"gpus": 1, **common})
    except Exception as e:
        return {"error": type(e).__name__, "text": str(e), "loops": _loops()}
    with cluster, cluster.get_client() as client:
        client.wait_for_workers(1, timeout=60)
        return {"kind": type(cluster).__name__, **seen(client, next(iter(client.run(int))))}


async def _awaited(settings: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    import dask_gpurt

    async with (
        dask_gpurt.local_cluster(settings=settings, asynchronous=True, **arguments) as cluster,
        cluster.get_client() as client,
    ):
        await client.wait_for_workers(1, timeout=60)
        (got,) = (await client.run(look)).values()
        return {"kind": type(cluster).__name__, **got, "sums": [await client.submit(sum, range(100))] * 3}


def _loops() -> int:
    """Event loops that still run."""
    return sum(thread.name == "IO loop" for thread in threading.enumerate())


if __name__ == "__main__":
    for name, *case in json.load(sys.stdin):
        sys.stdout.write(json.dumps([name, start(*case)]) + "\n")
        sys.stdout.flush()
