"""NVML: which NVIDIA GPUs a node has. It makes no CUDA context, and needs the package ``nvidia-ml-py``."""

from __future__ import annotations

from typing import Any

from dask_gpurt.model.node_class import Gpu


def gpus() -> tuple[tuple[Gpu, ...], str]:
    """All GPUs of the node, a divided one as its MIG instances, and the version of the driver.

    Nothing where NVML cannot be had: not installed, no driver, no GPU. Blocks for some milliseconds.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the library raises all kinds where there is no driver
        return (), ""
    try:
        found: list[Gpu] = []
        for i in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            found += [_gpu(pynvml, part) for part in _instances(pynvml, handle) or [handle]]
        return tuple(found), _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return (), ""
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    model = _text(nvml.nvmlDeviceGetName(handle))  # of an instance it ends in "MIG 1g.10gb"
    return Gpu(vendor="NVIDIA", model=model, memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total))


def _instances(nvml: Any, handle: Any) -> list[Any]:
    """MIG instances of a GPU; none where it is not divided, or cannot be."""
    try:
        mode, _ = nvml.nvmlDeviceGetMigMode(handle)
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if mode else 0
    except nvml.NVMLError:
        return []
    found = []
    for i in range(count):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i))
        except nvml.NVMLError:  # that place is empty
            continue
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
