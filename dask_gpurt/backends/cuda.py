"""CUDA itself: whether there is a usable device, and what it has free.

`probe` and `free_bytes` need a driver. Importing this module loads no vendor library: a nanny may import it.
`has_context` loads and creates nothing either: it is asked on every worker, and with each heartbeat.

kvikio is probed and not used: what it moves past the host would have to be copied there for its checksum all the same.
GPUDirect Storage for spilling was added to, and removed from, spark-rapids; the pinned path is as fast where it was
measured.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: in CUDA_VISIBLE_DEVICES: no device from here on
_HIDE = ("", "-1", "NoDevFiles")


@dataclasses.dataclass(frozen=True)
class Probe:
    """What there is."""

    #: why there is no usable GPU; "" when an allocation on it succeeded
    reason: str
    name: str = ""
    total_bytes: int = 0
    #: "" or why GPUDirect Storage cannot be used
    gds: str = "not probed"
    #: its number in this process
    device: int = 0
    #: it has no memory of its own, as on a system on a chip
    integrated: bool = False


def has_context() -> bool:
    """Whether something in this process computes on a CUDA device: its primary context on some device is active.

    Costs microseconds. Without the driver's library in the process, or before its ``cuInit``, there is none.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)  # only if somebody has loaded it
        count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        if driver.cuDeviceGetCount(ctypes.byref(count)):  # as before cuInit
            return False
        for device in range(count.value):  # an ordinal is the handle of the device
            if driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)):
                return False
            if active.value:
                return True
    except (OSError, AttributeError):
        pass
    return False


def given(environ: Mapping[str, str]) -> list[str] | None:
    """The devices that CUDA_VISIBLE_DEVICES names, up to a word that hides the rest: [] where that is the first.

    None: the variable is not set, and all devices are there.
    """
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return None
    return list(itertools.takewhile(lambda word: word not in _HIDE, (word.strip() for word in setting.split(","))))


@functools.cache
def possible() -> bool:
    """Whether this process could use a CUDA device at all, by what the driver has put into /dev. Loads nothing."""
    if given(os.environ) == []:
        return False
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/nvgpu", "/dev/nvhost-gpu", "/dev/dxg"))


@functools.cache
def probe() -> Probe:
    """Allocate on the current device. Creates a CUDA context: for workers only, never for nannies or the scheduler."""
    try:
        import rmm
        import rmm.mr
        from cuda.bindings import runtime
    except Exception as e:  # a broken installation raises all kinds
        return Probe(f"RMM cannot be imported ({type(e).__name__}: {e})")
    try:
        rmm.DeviceBuffer(size=256, mr=rmm.mr.CudaMemoryResource())
        device = int(checked(runtime.cudaGetDevice()))
        properties = checked(runtime.cudaGetDeviceProperties(device))
        _, total = checked(runtime.cudaMemGetInfo())
    except (MemoryError, RuntimeError) as e:
        return Probe(f"an allocation of 256 bytes failed ({e})")
    name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
    return Probe("", name.strip("\0"), int(total), _probe_gds(), device, bool(properties.integrated))


def _probe_gds() -> str:
    try:
        from kvikio.cufile_driver import get
    except Exception as e:
        return f"kvikio cannot be imported ({type(e).__name__}: {e})"
    try:
        return "" if get("is_gds_available") else "the driver says no"
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def free_bytes() -> int:
    """What the driver has free on the current device: other processes may share it. Not for the event loop."""
    from cuda.bindings import runtime

    free, _ = checked(runtime.cudaMemGetInfo())
    return int(free)


def echo(data: bytes) -> bytes:
    """Copy to the current device and back. MemoryError or RuntimeError when that fails. Not for the event loop."""
    import rmm

    return bytes(rmm.DeviceBuffer.to_device(data).tobytes())


def checked(result: tuple[Any, ...]) -> Any:
    """The values of a call of ``cuda.bindings``; RuntimeError when it failed."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA error {error}")
    return values[0] if len(values) == 1 else tuple(values)
