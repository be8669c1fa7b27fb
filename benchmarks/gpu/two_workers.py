"""Two worker processes on one GPU, each allowed 0.8 of it: both finish, and neither starves the other.

dask-cuda cannot put two workers on one GPU, so this is a plain local cluster; without MPS they share the GPU's time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.target import MB

if TYPE_CHECKING:
    from benchmarks.gpu.target import Target


#: bytes that other processes leave free on the device
FREE = 16 << 30


def run(what: str, target: Target) -> dict[str, Any]:
    """`what`: share. Values of both are 1.5 times what is free: `FREE` bytes, the rest is taken before."""
    from distributed import Client, wait

    import dask_gpurt
    from dask_gpurt.backends import cuda

    size = max(MB, int(256 * MB * target.scale))
    taken = None
    if target.name == "gpu" and (more := cuda.free_bytes() - FREE) > 0:
        taken = target.malloc(more)
    total = int(cuda.free_bytes() * 1.5 * (1 if target.name == "gpu" else 0.05))
    each = max(4, total // size // 2)
    settings = {
        "tiers.device": "on",
        "tiers.device-limit": 0.8 if target.name == "gpu" else 0.02,
        "tiers.pinned-limit": int(8 * 1024 * MB * target.scale),
    }
    with (
        dask_gpurt.local_cluster(
            settings=settings, n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])
        start = time.perf_counter()
        made = {}
        for at, address in enumerate(addresses):
            numbers = range(at * each, (at + 1) * each)
            made[address] = numbers, client.map(target.value, numbers, nbytes=size, workers=[address], pure=False)
        wait([f for _, futures in made.values() for f in futures])
        right = {}
        ended = {}
        for address, (numbers, futures) in made.items():
            checks = client.map(target.is_value, futures, numbers, workers=[address], pure=False)
            right[address] = sum(client.gather(checks))
            ended[address] = round(time.perf_counter() - start, 3)
        devices = client.run(_device)
    if taken is not None:
        target.release(taken, pinned=False)
    out: dict[str, Any] = {
        "values_each": each,
        "value_bytes": size,
        "right": list(right.values()),
        "seconds": list(ended.values()),
        "devices": list(devices.values()),
    }
    if any(n != each for n in right.values()):
        out["problem"] = f"of {each} values each, {list(right.values())} are right"
    elif any(device is None or device["out_of_memory"]["exceptions"] for device in devices.values()):
        out["problem"] = "a worker has no device tier, or its callback raised"
    return out


def _device(dask_worker: Any) -> Any:
    from dask_gpurt.extension import on_worker

    parts = on_worker(dask_worker)
    return None if parts is None or parts.runtime is None else parts.runtime.statistics().get("device")
