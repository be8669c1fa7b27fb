"""What experiments run on: `Gpu`, or `StandIn` for a rehearsal without one. `get` gives the one that is asked for.

An experiment is one text for both. What differs is here: which module makes arrays and frames, and how memory is taken
and copied. The stand-in is host memory out of RMM (`tests.tiers.device.host_rmm`, `tests.backends.host_frames`) with
the calls of the driver replaced (`tests/cluster/no_driver`, which `environment` puts on the path of its processes). It
rehearses these scripts. It is no GPU: its results say so, and no figure of it is one.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from benchmarks.data import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from dask_gpurt.backends.frames import DeviceFrames
    from dask_gpurt.tiers.device.setup import DeviceMemory

MB = 1 << 20
#: experiments with a device tier, in whose processes the stand-in replaces the calls of the driver
_DRIVEN = ("dask_cuda", "leaving", "oom", "spill", "two_workers")


class Target(Protocol):
    """What an experiment asks of what it runs on."""

    name: str
    #: of data and memory, to what a GPU gets: a rehearsal is small
    scale: float
    #: names of array and frame modules
    arrays: str
    frames: str

    def exercised_on(self) -> str:
        """In words, for results. SystemExit where it is not there."""

    def environment(self, experiment: str) -> dict[str, str]:
        """Of the processes of an experiment."""

    def value(self, i: int, nbytes: int) -> Any:
        """A device value all bytes of which are ``i % 251``."""

    def is_value(self, value: Any, i: int) -> bool:
        """Whether it still is that value, all of it."""

    def frame(self, frame: pd.DataFrame) -> Any:
        """A frame on the device."""

    def table(self, columns: Mapping[str, Any], words: Sequence[str]) -> Any:
        """A frame of arrays of `arrays`; with `words`, its first column has those that it numbers."""

    def device_frames(self) -> DeviceFrames:
        """The shuffle's way with such frames."""

    def view(self, value: Any) -> Any:
        """Another object over the same memory."""

    def malloc(self, nbytes: int) -> int:
        """Device memory, not from RMM."""

    def pinned(self, nbytes: int) -> int:
        """Page-locked memory."""

    def release(self, pointer: int, *, pinned: bool) -> None:
        """Give up what one of the two gave."""

    def register(self, pointer: int, nbytes: int) -> None:
        """Lock the pages of host memory, for the device."""

    def unregister(self, pointer: int) -> None:
        """Give up what `register` did."""

    def copy(self, target: int, source: int, nbytes: int, *, leaves: bool, wait: bool) -> None:
        """Copy between device and host; without `wait` on a stream, `synchronize` waits."""

    def synchronize(self) -> None:
        """Wait for the device."""


class Gpu:
    """The first NVIDIA GPU."""

    name, scale, arrays, frames = "gpu", 1.0, "cupy", "cudf"

    def exercised_on(self) -> str:
        from dask_gpurt.backends import cuda

        found = cuda.probe()
        if found.reason:
            raise SystemExit(f"there is no GPU: {found.reason}. Remedy: --on stand-in, which rehearses the scripts")
        return f"one {found.name} of {found.total_bytes >> 30} GiB"

    def environment(self, experiment: str) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}

    def value(self, i: int, nbytes: int) -> Any:
        import cupy

        return cupy.full(nbytes, i % 251, "u1")

    def is_value(self, value: Any, i: int) -> bool:
        return bool((value == i % 251).all())

    def frame(self, frame: pd.DataFrame) -> Any:
        import cudf

        return cudf.from_pandas(frame)

    def table(self, columns: Mapping[str, Any], words: Sequence[str]) -> Any:
        import cudf

        out = cudf.DataFrame(dict(columns))
        if words:
            first = out.columns[0]
            out[first] = cudf.Series(list(words)).take(out[first]).reset_index(drop=True)
        return out

    def device_frames(self) -> DeviceFrames:
        from dask_gpurt.backends.frames import load

        return load("dask_gpurt.backends.cudf_frames:CudfFrames")

    def view(self, value: Any) -> Any:
        return value.copy(deep=False) if hasattr(value, "to_pandas") else value[:]

    def malloc(self, nbytes: int) -> int:
        from cuda.bindings import runtime

        from dask_gpurt.backends.cuda import checked

        return int(checked(runtime.cudaMalloc(nbytes)))

    def pinned(self, nbytes: int) -> int:
        from cuda.bindings import runtime

        from dask_gpurt.backends.cuda import checked

        return int(checked(runtime.cudaHostAlloc(nbytes, runtime.cudaHostAllocDefault)))

    def release(self, pointer: int, *, pinned: bool) -> None:
        from cuda.bindings import runtime

        from dask_gpurt.backends.cuda import checked

        checked(runtime.cudaFreeHost(pointer) if pinned else runtime.cudaFree(pointer))

    def register(self, pointer: int, nbytes: int) -> None:
        from cuda.bindings import runtime

        from dask_gpurt.backends.cuda import checked

        checked(runtime.cudaHostRegister(pointer, nbytes, runtime.cudaHostRegisterDefault))

    def unregister(self, pointer: int) -> None:
        from cuda.bindings import runtime

        from dask_gpurt.backends.cuda import checked

        checked(runtime.cudaHostUnregister(pointer))

    def copy(self, target: int, source: int, nbytes: int, *, leaves: bool, wait: bool) -> None:
        from cuda.bindings import runtime

        from dask_gpurt.backends.cuda import checked
        from dask_gpurt.backends.device_copies import handle_of, leaving

        kinds = runtime.cudaMemcpyKind
        kind = kinds.cudaMemcpyDeviceToHost if leaves else kinds.cudaMemcpyHostToDevice
        if wait:
            checked(runtime.cudaMemcpy(target, source, nbytes, kind))
        else:
            checked(runtime.cudaMemcpyAsync(target, source, nbytes, kind, handle_of(leaving())))

    def synchronize(self) -> None:
        from cuda.bindings import runtime

        from dask_gpurt.backends.cuda import checked

        checked(runtime.cudaDeviceSynchronize())


class StandIn:
    """Host memory, for rehearsals."""

    name, scale, arrays, frames = "stand-in", 1 / 256, "numpy", "pandas"

    def exercised_on(self) -> str:
        return "a stand-in: host memory, no GPU; a rehearsal of the script and no figure of a GPU"

    def environment(self, experiment: str) -> dict[str, str]:
        before = os.environ.get("PYTHONPATH", "")
        replaced = [os.path.join(ROOT, "tests", "cluster", "no_driver")] if experiment in _DRIVEN else []
        return {
            "PYTHONPATH": os.pathsep.join([*replaced, ROOT, *([before] if before else [])]),
            "CUDA_VISIBLE_DEVICES": "0",
            "DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False",
        }

    def value(self, i: int, nbytes: int) -> Any:
        import rmm.mr

        from tests.tiers.device.host_rmm import Value

        return Value(np.full(nbytes, i % 251, "u1"), rmm.mr.get_current_device_resource())

    def is_value(self, value: Any, i: int) -> bool:
        return bool((value.array() == i % 251).all())

    def frame(self, frame: pd.DataFrame) -> Any:
        from tests.backends.host_frames import HostFrame

        return HostFrame(frame)

    def table(self, columns: Mapping[str, Any], words: Sequence[str]) -> Any:
        import pandas as pd

        out = pd.DataFrame(dict(columns))
        if words:
            first = out.columns[0]
            out[first] = pd.Series(list(words), dtype="str").take(out[first]).reset_index(drop=True)
        return self.frame(out)

    def device_frames(self) -> DeviceFrames:
        from tests.backends.host_frames import HostFrames

        return HostFrames()

    def view(self, value: Any) -> Any:
        return value.view()

    def malloc(self, nbytes: int) -> int:
        return self.pinned(nbytes)

    def pinned(self, nbytes: int) -> int:
        libc = ctypes.CDLL(None)
        libc.aligned_alloc.restype = ctypes.c_void_p
        return int(libc.aligned_alloc(ctypes.c_size_t(4096), ctypes.c_size_t(nbytes)))

    def release(self, pointer: int, *, pinned: bool) -> None:
        ctypes.CDLL(None).free(ctypes.c_void_p(pointer))

    def register(self, pointer: int, nbytes: int) -> None:
        """It is ordinary memory."""

    def unregister(self, pointer: int) -> None:
        """It is ordinary memory."""

    def copy(self, target: int, source: int, nbytes: int, *, leaves: bool, wait: bool) -> None:
        ctypes.memmove(target, source, nbytes)

    def synchronize(self) -> None:
        """Nothing was put off."""


def get(name: str) -> Target:
    """``gpu`` or ``stand-in``."""
    kinds: dict[str, type[Target]] = {"gpu": Gpu, "stand-in": StandIn}
    return kinds[name]()


def memory(limit_bytes: int, pinned_bytes: int, folder: str) -> DeviceMemory:
    """A device tier of so many bytes as a worker has it, with page-locked blocks and a disk below.

    What allocates and copies is taken from `setup`, where the stand-in's processes have replaced it.
    """
    from dask_gpurt.backends import cuda
    from dask_gpurt.backends.rmm_stack import DeviceAllocator
    from dask_gpurt.tiers.storage.disk.tier import DiskTier

    setup: Any = importlib.import_module("dask_gpurt.tiers.device.setup")
    callback = setup.Late()
    allocator = DeviceAllocator(
        callback, limit_bytes, pool=lambda: setup._pool(limit_bytes), cupy=True, free_bytes=cuda.free_bytes
    )
    allocator.install()
    backend = setup.CudaBackend(allocator)
    backend.prepare()
    made: DeviceMemory = setup.DeviceMemory.over(
        backend, allocator, callback, setup.PinnedSlabs(), pinned_bytes, lambda: ""
    )
    made.space.below.append(DiskTier(folder))
    return made


def missing(*names: str) -> None:
    """Raise `NotHere` for modules that are not installed."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        raise NotHere(f"not installed: {', '.join(absent)}")


class NotHere(Exception):
    """A case cannot run here; its result says why. It is not one that passed."""
