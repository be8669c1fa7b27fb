"""On a real GPU: dask-cuda's options beside the device tier. `tests/cluster/test_dask_cuda.py` has them without one."""

from __future__ import annotations

from typing import Any

import pytest

import dask_gpurt
from tests.cluster.cuda_cases import look

pytestmark = pytest.mark.gpu

pytest.importorskip("dask_cuda")

MB = 1 << 20


@pytest.mark.parametrize(
    ("options", "tier", "resource"),
    [
        ({}, True, "CudaMemoryResource"),
        ({"rmm_async": True}, True, "CudaAsyncMemoryResource"),
        ({"rmm_pool_size": "1 GiB"}, True, "PoolMemoryResource"),
        ({"rmm_async": True, "rmm_track_allocations": True}, True, "TrackingResourceAdaptor"),
        ({"device_memory_limit": "64MB"}, True, "CudaMemoryResource"),
        ({"rmm_managed_memory": True}, False, "ManagedMemoryResource"),
        ({"device_memory_limit": 0}, False, "CudaMemoryResource"),
        pytest.param({"enable_cudf_spill": True}, False, "CudaMemoryResource", id="cudf-spill"),
    ],
)
def test_one_manages_device_memory(options: dict[str, Any], tier: bool, resource: str) -> None:
    if "enable_cudf_spill" in options:
        pytest.importorskip("cudf")

    def make(i: int) -> Any:
        import rmm

        return rmm.DeviceBuffer.to_device(bytes([i]) * MB)

    def right(value: Any, i: int) -> bool:
        return bool(value.tobytes() == bytes([i]) * MB)

    with (
        dask_gpurt.local_cluster(
            gpus=1, dashboard_address=None, settings={"tiers.device": "auto"}, **options
        ) as cluster,
        cluster.get_client() as client,
    ):
        values = client.map(make, range(200))
        assert all(client.gather(client.map(right, values, range(200))))
        (got,) = client.run(look).values()
    assert resource in got["memory"], got
    assert (got["data"] == "TieredStore") is ("FailureCallbackResourceAdaptor" in got["memory"]) is tier, got
    assert (got["off"] == "") is tier, got
    if "device_memory_limit" in options and tier:
        assert got["device"]["limit_bytes"] == 64_000_000
        assert got["device"]["to_and_from_device"]["writes"] > 100
