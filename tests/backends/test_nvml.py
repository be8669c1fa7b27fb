"""GPUs by NVML, with a stand-in for the library; where there is none, there are no GPUs."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from dask_gpurt.backends import dask_cuda, nvml
from dask_gpurt.model.node_class import Gpu


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


def library(instances: dict[int, list[str]], fails: str = "") -> Any:
    """A ``pynvml`` of two GPUs; `instances` of those that are divided. One function can fail."""
    lib: Any = types.SimpleNamespace(NVMLError=NVMLError, NVMLError_NotSupported=NotSupported, shut=0)

    def shutdown() -> None:
        lib.shut += 1

    def mode(handle: Any) -> tuple[int, int]:
        if handle == 1 and not instances:
            raise NVMLError("not supported")
        return (1, 1) if handle in instances else (0, 0)

    def instance(handle: int, i: int) -> str:
        if i >= len(instances[handle]):
            raise NVMLError("not found")
        return instances[handle][i]

    def memory(handle: Any) -> Any:
        return types.SimpleNamespace(total=10 * 2**30 if isinstance(handle, str) else 80 * 2**30)

    lib.nvmlInit = lambda: None
    lib.nvmlShutdown = shutdown
    lib.nvmlDeviceGetCount = lambda: 2
    lib.nvmlDeviceGetHandleByIndex = lambda i: i
    lib.nvmlDeviceGetName = lambda handle: handle if isinstance(handle, str) else b"NVIDIA A100-SXM4-80GB"
    lib.nvmlDeviceGetMemoryInfo = memory
    lib.nvmlDeviceGetMigMode = mode
    lib.nvmlDeviceGetMaxMigDeviceCount = lambda handle: 7
    lib.nvmlDeviceGetMigDeviceHandleByIndex = instance
    lib.nvmlSystemGetDriverVersion = lambda: "580.1"

    def failing(*args: Any) -> None:
        raise NVMLError("GPU is lost")

    if fails:
        setattr(lib, fails, failing)
    return lib


A100 = Gpu(vendor="NVIDIA", model="NVIDIA A100-SXM4-80GB", memory_bytes=80 * 2**30)


def test_gpus_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = library({})
    monkeypatch.setitem(sys.modules, "pynvml", lib)
    assert nvml.gpus() == ((A100, A100), "580.1")
    assert lib.shut == 1


def test_a_divided_gpu_is_its_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    mig = "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
    monkeypatch.setitem(sys.modules, "pynvml", library({1: [mig, mig]}))
    found, _ = nvml.gpus()
    assert [gpu.model for gpu in found] == [A100.model, mig, mig]
    assert found[1].memory_bytes == 10 * 2**30


def test_a_system_on_a_chip_is_a_gpu_without_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = library({})

    def memory(handle: Any) -> Any:
        raise NotSupported

    lib.nvmlDeviceGetMemoryInfo = memory
    monkeypatch.setitem(sys.modules, "pynvml", lib)
    chip = Gpu(vendor="NVIDIA", model=A100.model, memory_bytes=0)
    assert nvml.gpus() == ((chip, chip), "580.1")


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_an_error_is_no_gpu(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library({}, fails))
    assert nvml.gpus() == ((), "")


def test_a_lost_gpu_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = library({})

    def handle(i: int) -> int:
        if i == 0:
            raise NVMLError("GPU is lost")
        return i

    lib.nvmlDeviceGetHandleByIndex = handle
    monkeypatch.setitem(sys.modules, "pynvml", lib)
    monkeypatch.setattr(nvml, "_device", lambda lib, i: nvml.Device(handle(i), "GPU-b", "A100", "0000:5e:00.0"))
    lib.nvmlSystemGetCudaDriverVersion_v2 = lambda: 13000
    assert nvml.gpus() == ((A100,), "580.1")
    snapshot = nvml.look()
    assert ([d.index for d in snapshot.devices], snapshot.reason) == ([1], "GPU 0: NVML: GPU is lost")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert dask_cuda.visible_gpus() == ([], "GPU 0: NVML: GPU is lost")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert dask_cuda.visible_gpus()[0] == ["GPU-b"]


def test_no_library_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.gpus() == ((), "")


@pytest.mark.parametrize(
    ("setting", "there"), [("1,0", ["1", "0"]), ("-1", []), ("NoDevFiles", []), ("1,-1,0", ["1"]), (" 0 ,", ["0"])]
)
def test_gpus_that_the_environment_hides_are_not_seen(
    setting: str, there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "look", lambda: nvml.Snapshot(devices=(nvml.Device(0, "a", "b", "c"),)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert dask_cuda.visible_gpus() == (there, f"CUDA_VISIBLE_DEVICES is {setting!r}")
