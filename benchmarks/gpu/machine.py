"""Facts of a machine, and what its copies cost: the ceiling that all other figures are compared with."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.target import MB, NotHere, missing
from dask_gpurt.memory.touched import Touched

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.target import Target


def run(what: str, target: Target) -> dict[str, Any]:
    """`what`: name, facts, copies, pinned, ucx_info."""
    known: dict[str, Callable[[Target], dict[str, Any]]] = {
        "name": lambda t: {"name": t.exercised_on()},
        "facts": facts,
        "copies": copies,
        "pinned": pinned,
        "ucx_info": ucx_info,
    }
    return known[what](target)


def facts(target: Target) -> dict[str, Any]:
    """Limits that decide what works: locked memory, /dev/shm, MPS, device nodes."""
    shm = os.statvfs("/dev/shm") if os.path.exists("/dev/shm") else None
    return {
        "name": target.exercised_on(),
        "locked_memory_limit": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE),
        "shm_bytes": 0 if shm is None else shm.f_bsize * shm.f_bavail,
        "mps": os.path.exists(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")),
        "nodes": sorted(name for name in os.listdir("/dev") if "nvidia" in name or name == "infiniband"),
        "cores": len(os.sched_getaffinity(0)),
        "temporary_directory_free_bytes": shutil.disk_usage("/tmp").free,
    }


def copies(target: Target) -> dict[str, Any]:
    """GB/s by direction, kind of host memory, size of a copy, and whether each is waited for."""
    total = int(1024 * MB * target.scale)
    out: dict[str, Any] = {}
    most = min(total, 64 * MB)
    device = target.malloc(most)
    page_locked = target.pinned(most)
    pageable = np.ones(most, "u1")
    for memory, host in (("pinned", page_locked), ("pageable", int(pageable.ctypes.data))):
        for size in (MB, 4 * MB, 64 * MB):
            if size > most:
                continue
            for wait in (True, False):
                for leaves in (True, False):
                    ends = (host, device) if leaves else (device, host)
                    target.copy(*ends, size, leaves=leaves, wait=wait)
                    target.synchronize()
                    start = time.perf_counter()
                    for _ in range(max(1, total // size)):
                        target.copy(*ends, size, leaves=leaves, wait=wait)
                    target.synchronize()
                    seconds = time.perf_counter() - start
                    where, how = "to host" if leaves else "to device", "sync" if wait else "async"
                    way = f"{where}, {memory}, {size // MB} MiB, {how}"
                    out[way] = round(max(1, total // size) * size / seconds / 1e9, 2)
    target.release(device, pinned=False)
    target.release(page_locked, pinned=True)
    return {"gigabytes_per_second": out}


def pinned(target: Target) -> dict[str, Any]:
    """What it costs to lock pages: the reason that slabs are kept ready."""
    size = max(2 * MB, int(64 * MB * target.scale))
    areas: list[Touched] = []

    def locked(*, keep: bool) -> None:
        area = Touched(size)
        target.register(area.address, size)
        if keep:
            areas.append(area)
        else:
            target.unregister(area.address)
            area.end()

    out = {
        "bytes": size,
        "milliseconds": {
            "cudaHostAlloc": _timed(lambda: target.release(target.pinned(size), pinned=True)),
            "as the device tier does it, the same memory again": _timed(lambda: locked(keep=False)),
            "as the device tier does it, other memory each time": _timed(lambda: locked(keep=True)),
        },
    }
    for area in areas:
        target.unregister(area.address)
        area.end()
    return out


def _timed(once: Callable[[], None]) -> list[float]:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    return [round(1000 * s, 3) for s in seconds]


def ucx_info(target: Target) -> dict[str, Any]:
    """Transports that UCX finds for device memory, by its own log: cuda_copy and cuda_ipc have to be among them."""
    missing("ucxx")
    code = "import ucxx._lib.libucxx as l; c = l.UCXContext({}); print(c.info)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise NotHere(f"UCX makes no context: {done.stderr.strip()[-300:]}")
    return {
        "components": re.findall(r"component \d+ +: +(\w+)", done.stdout),
        "info": done.stdout[-2000:],
        "memory": done.stderr[-2000:],
    }
