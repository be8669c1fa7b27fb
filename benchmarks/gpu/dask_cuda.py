"""dask-cuda's local cluster with the extension: who manages device memory, by the class of RMM's resource."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.gpu.target import missing

if TYPE_CHECKING:
    from benchmarks.gpu.target import Target

#: what -> options of LocalCUDACluster
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rmm-async": {"rmm_async": True},
    "rmm-pool": {"rmm_pool_size": "512MiB"},
}


def run(what: str, target: Target) -> dict[str, Any]:
    """`what`: one of `OPTIONS`."""
    missing("dask_cuda", "rmm")
    import dask
    from dask_cuda import LocalCUDACluster
    from distributed import Client

    from tests.cluster.cuda_cases import look

    with (
        dask.config.set({"gpurt.tiers.device": "auto", "distributed.diagnostics.nvml": target.name == "gpu"}),
        LocalCUDACluster(
            CUDA_VISIBLE_DEVICES="0",
            scheduler_kwargs={"preload": ["dask_gpurt.preload"]},
            dashboard_address=None,
            **OPTIONS[what],
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(1, timeout=60)
        values = client.map(target.value, range(8), nbytes=1 << 20)
        good = all(client.gather(client.map(target.is_value, values, range(8))))
        (found,) = client.run(look).values()
    out = {"memory": found["memory"], "data": found["data"], "off": found["off"], "right": good}
    if not good:
        out["problem"] = "a value is not what it was"
    elif found["off"] or found["data"] != "TieredStore" or "FailureCallbackResourceAdaptor" not in found["memory"]:
        out["problem"] = f"the device tier is not there: {found['off'] or found['data']}"
    return out
