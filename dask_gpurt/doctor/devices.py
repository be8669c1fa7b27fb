"""T3 and T8: whether this process may open the GPUs, and CUDA starts: what a container most often lacks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from dask_gpurt.backends import cuda
from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import fail, na, ok
from dask_gpurt.doctor.gpu import NVIDIA, pci_devices
from dask_gpurt.doctor.gpus import is_wanted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.backends.system import System
    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.finding import Verdict

_KFD = "sys/class/kfd/kfd/topology/nodes"
_SECONDS = 4.0
#: in a process of its own: a driver that hangs or crashes takes nothing with it, and no context is left
_INIT = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
#: what cuInit returns -> meaning, remedy
_ERRORS = {
    100: ("no device", "--gpus all (or a device request) of the container, CUDA_VISIBLE_DEVICES"),
    802: ("the fabric manager is not ready", "start nvidia-fabricmanager of the driver's version"),
    803: (
        "libcuda is of another version than the kernel's driver",
        "remove libcuda and cuda-compat from the image: the container toolkit brings the one of the host",
    ),
    804: ("this GPU cannot run the CUDA compatibility package", "remove cuda-compat from the image, or a newer driver"),
}


def _opened(system: System, name: str) -> str:
    """Why a device cannot be opened; empty: it can."""
    try:
        os.close(os.open(system.path("dev", name), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as e:
        return f"/dev/{name}: {errno.errorcode.get(e.errno or 0, '')} {e.strerror}"
    return ""


def _cannot_open(why: str, remedy: str) -> Verdict:
    return fail(
        why, expected="a device that this user may open", meaning="No work on this GPU is possible", remedy=remedy
    )


def _rocm(node: Node) -> Iterator[Verdict]:
    system = node.system
    nodes = {n: system.fields(_KFD, n, "properties") for n in system.names(_KFD)}
    gpus = {n: fields for n, fields in nodes.items() if fields.get("simd_count")}
    if not gpus:
        yield na("no AMD GPU in the kernel's topology")
        return
    names = ["kfd", *(f"dri/renderD{fields['drm_render_minor']}" for fields in gpus.values())]
    problems = [why for name in names if (why := _opened(system, name))]
    for why in problems:
        yield _cannot_open(
            why,
            "load the amdgpu module; in a container --device /dev/kfd --device /dev/dri"
            if "ENOENT" in why
            else "add this user to the groups video and render (--group-add of the container)",
        )
    # Not renderD128 beside card0: the same device under another name.
    for card in (name for name in system.names("sys/class/drm") if name.startswith("card")):
        errors = system.fields("sys/class/drm", card, "device/ras/umc_err_count").get("ue", 0)
        if errors:
            yield fail(
                f"{card} had {errors} memory errors that could not be corrected",
                expected="none",
                meaning="Results that were on it may be wrong",
                remedy="drain this node, reset the GPU (amd-smi reset --gpureset); if they come again, replace it",
            )
    if not problems:
        yield ok(f"{len(gpus)} AMD GPUs can be opened")


def _cuda(node: Node) -> Iterator[Verdict]:
    system = node.system
    there = pci_devices(system, NVIDIA)
    numbered = [name for name in system.names("dev") if name.startswith("nvidia") and name[6:].isdigit()]
    if cuda.given(node.environ) == []:
        yield na(f"CUDA_VISIBLE_DEVICES={node.environ['CUDA_VISIBLE_DEVICES']} hides all GPUs from this process")
        return
    if "nvidiactl" not in system.names("dev") and (not there or not is_wanted(node.environ, system)):
        yield na("no NVIDIA GPU for this process")
        return
    toolkit = "the NVIDIA container toolkit, and --gpus all (in Kubernetes its device plugin); outside, the driver"
    problems = [
        why for name in ("nvidiactl", "nvidia-uvm", *(numbered or ["nvidia0"])) if (why := _opened(system, name))
    ]
    for why in problems:
        rights = "EPERM" in why or "EACCES" in why
        yield _cannot_open(why, f"{toolkit}; the container's device rules and the user's rights" if rights else toolkit)
    said = _initialised(node)
    if said == 0:
        yield ok(f"{len(numbered)} devices can be opened, cuInit succeeds" if not problems else "cuInit succeeds")
        return
    meaning, remedy = _ERRORS.get(said, ("", toolkit)) if isinstance(said, int) else ("", toolkit)
    yield fail(
        f"cuInit: {said}" + (f" ({meaning})" if meaning else ""),
        expected="0",
        meaning="No CUDA program starts here",
        remedy=remedy,
    )


def _initialised(node: Node) -> int | str:
    """What cuInit returns, or why it cannot be called."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _INIT],
            env=dict(node.environ),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_SECONDS:g} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]
    return int(done.stdout)


CHECKS = (
    Check(
        id="T3",
        name="ROCm",
        looks_at="kfd topology, opening /dev/kfd and /dev/dri/renderD*, RAS counters in sysfs",
        fails_when="fail: a device cannot be opened, uncorrectable errors",
        remedy="the amdgpu module, the groups video and render; a reset",
        look=_rocm,
    ),
    Check(
        id="T8",
        name="CUDA in a container",
        looks_at="opening /dev/nvidiactl, nvidia-uvm and nvidiaN; cuInit in a process of its own",
        fails_when="fail: a device cannot be opened, no libcuda, cuInit is not 0 (803: a libcuda of another version)",
        remedy="the container toolkit, --gpus all, no libcuda in the image",
        look=_cuda,
    ),
)
