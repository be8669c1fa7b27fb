"""For processes with this folder on PYTHONPATH: the calls of NVML and CUDA's driver replaced, all above them real.

dask-cuda's command, cluster, nannies, plugins and ``DeviceHostFile`` run as they are, and so do ours: plans, stacks of
RMM, device tier. "Device" memory is ordinary host memory out of RMM's `CallbackMemoryResource`. It is no GPU, and what
is shown with it says nothing of kernels, copies or speed.

======================================  ==============================================================================
replaced                                by
======================================  ==============================================================================
NVML's count, handles, memory, affinity two devices of 1 GiB
RMM's number of the current device      0
``CudaMemoryResource``, as RMM begins   the same under that name, over host memory
``rmm.reinitialize``, the async pool    `PoolMemoryResource` over host memory; managed memory is RMM's own resource,
                                        from which nothing is allocated
our probe, free bytes, pool, copies     of host memory
======================================  ==============================================================================
"""

from __future__ import annotations

import os

# distributed's own metrics of GPUs, by its setting.
os.environ["DASK_DISTRIBUTED__DIAGNOSTICS__NVML"] = "False"

from types import SimpleNamespace
from typing import Any

import pynvml
import rmm
import rmm.mr
from rmm.pylibrmm.memory_resource import _memory_resource

from dask_gpurt.backends import cuda
from dask_gpurt.tiers.device import setup
from tests.tiers.conftest import HostSlabs
from tests.tiers.device.host_rmm import HostRmmBackend, _allocate, _free, host_memory

BYTES = 1 << 30


def _memory(handle: object, *_: object) -> SimpleNamespace:
    if os.environ.get("NO_DRIVER_INTEGRATED"):  # as on a system on a chip
        raise pynvml.NVMLError_NotSupported
    return SimpleNamespace(total=BYTES, free=BYTES, used=0)


_NVML: dict[str, Any] = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "none",
    "nvmlSystemGetCudaDriverVersion_v2": lambda: 0,
    "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"0000:0{handle}:00.0"),
    "nvmlDeviceGetCount": lambda: 2,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
    "nvmlDeviceGetName": lambda handle: "host memory",
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetCpuAffinity": lambda handle, words: [2 ** len(os.sched_getaffinity(0)) - 1] + [0] * (words - 1),
}
for _name, _function in _NVML.items():
    setattr(pynvml, _name, _function)
_memory_resource.getDevice = lambda: 0


def _reinitialize(
    pool_allocator: bool = False,
    managed_memory: bool = False,
    initial_pool_size: int | None = None,
    maximum_pool_size: int | None = None,
    **_: object,
) -> None:
    resource: Any = rmm.mr.ManagedMemoryResource() if managed_memory else host_memory()
    if pool_allocator and not managed_memory:
        resource = rmm.mr.PoolMemoryResource(resource, initial_pool_size, maximum_pool_size)
    rmm.mr.set_current_device_resource(resource)


def _async(initial_pool_size: int | None = None, release_threshold: int | None = None) -> Any:
    return host_memory()


class CudaMemoryResource(rmm.mr.CallbackMemoryResource):
    """What stands for ``cudaMalloc``."""

    def __init__(self) -> None:
        super().__init__(_allocate, _free)


rmm.mr.CudaMemoryResource = CudaMemoryResource
rmm.mr.set_per_device_resource(0, CudaMemoryResource())
rmm.reinitialize = _reinitialize
rmm.mr.CudaAsyncMemoryResource = _async


class _Backend(HostRmmBackend):
    """Over the allocator that `DeviceMemory.open` makes."""

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.fences = 0
        self.on_encode = lambda value: None

    def prepare(self) -> None:
        """There are no streams."""


def _probe() -> cuda.Probe:
    return cuda.Probe("", "host memory", BYTES, integrated=bool(os.environ.get("NO_DRIVER_INTEGRATED")))


_ours: Any = setup
_ours.CudaBackend, _ours.PinnedSlabs, _ours._pool = _Backend, HostSlabs, lambda limit: host_memory()
cuda.probe = _probe  # type: ignore[assignment]
cuda.free_bytes = lambda: BYTES
