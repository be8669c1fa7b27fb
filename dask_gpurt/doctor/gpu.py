"""T1, T2, T14, T15: NVIDIA GPUs: seen, driven, free, and partitioned as expected."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
from typing import TYPE_CHECKING

from dask_gpurt.backends import cuda
from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import fail, na, ok, warn
from dask_gpurt.doctor.gpus import is_wanted, named, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dask_gpurt.backends.nvml import Snapshot
    from dask_gpurt.backends.system import System
    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.finding import Verdict

NVIDIA, AMD = "0x10de", "0x1002"
_PCI = "sys/bus/pci/devices"
#: shares of a device's memory
_FULL, _STRANGERS = 0.95, 0.05
#: a worker, multiprocessing's server, the nanny
_GENERATIONS = 3
_RESET = "nvidia-smi --gpu-reset with nothing running, or a reboot"


def pci_devices(system: System, vendor: str) -> list[str]:
    """Bus ids of display and compute devices of a vendor. Not those that a device lends to virtual machines, as on a
    host for vGPUs: they have a ``physfn``."""
    return [
        d
        for d in system.names(_PCI)
        if system.text(_PCI, d, "vendor") == vendor
        and (system.number(_PCI, d, "class") or 0) >> 16 in (0x03, 0x12)
        and not os.path.lexists(system.path(_PCI, d, "physfn"))
    ]


def of_driver(judge: Callable[[Node, Snapshot], Iterator[Verdict]]) -> Callable[[Node], Iterator[Verdict]]:
    """A check of what the driver says; what is found says so where it was recorded."""

    def look(node: Node) -> Iterator[Verdict]:
        snapshot = node.gpu.look()
        for verdict in judge(node, snapshot):
            yield dataclasses.replace(verdict, found=node.gpu.prefix + verdict.found)

    return look


def _seen(node: Node, snapshot: Snapshot) -> Iterator[Verdict]:
    there, known = pci_devices(node.system, NVIDIA), len(snapshot.devices)
    if not known and (not there or not is_wanted(node.environ, node.system)):
        yield na(f"no NVIDIA GPU for this process ({snapshot.reason or 'none on the PCI bus'})")
        return
    given = node.environ.get("NVIDIA_VISIBLE_DEVICES", "all")
    # In a container sysfs shows the devices of the host, and the driver those that the container was given.
    if len(there) > known and (given == "all" or snapshot.reason or not known):
        yield fail(
            f"{len(there)} NVIDIA GPUs on the PCI bus, {known} known to the driver"
            + (f" ({snapshot.reason})" if snapshot.reason else ""),
            expected="as many",
            meaning="A GPU has fallen off the bus, or there is no driver for it: nothing runs there",
            remedy="look for NVRM and Xid in the kernel log (dmesg), then the driver; in a container --gpus all",
        )
    setting = node.environ.get("CUDA_VISIBLE_DEVICES")
    words = cuda.given(node.environ) or []
    missing = [word for word in words if named(word, snapshot) is None] if known else []
    if missing:
        yield fail(
            f"CUDA_VISIBLE_DEVICES={setting}, and there is no {', '.join(missing)} among {known} devices",
            expected=f"indices below {known}, or UUIDs of nvidia-smi -L",
            meaning="CUDA leaves out that device and all that are named after it",
            remedy="CUDA_VISIBLE_DEVICES with devices of this machine, or unset it",
        )
    names = sorted({d.name for d in snapshot.devices})
    by_bus = node.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if len(names) > 1 and not by_bus and any(word.isdigit() for word in words):
        yield warn(
            f"CUDA_VISIBLE_DEVICES={setting} counts GPUs of several models: {', '.join(names)}",
            expected="CUDA_DEVICE_ORDER=PCI_BUS_ID where models differ, or UUIDs",
            meaning="CUDA counts the fastest first, nvidia-smi and these checks (T4, T5, T14, T15) by the bus: "
            "an index may be another GPU there",
            remedy="CUDA_DEVICE_ORDER=PCI_BUS_ID for all workers, or UUIDs in CUDA_VISIBLE_DEVICES",
        )
    if known:
        yield ok(f"{known} of {len(there) or known} GPUs: {', '.join(names)}")


def _driven(node: Node, snapshot: Snapshot) -> Iterator[Verdict]:
    if not snapshot.devices:
        yield na(snapshot.reason or "no NVIDIA GPU")
        return
    driver, runtime = snapshot.cuda_of_driver, snapshot.cuda_of_runtime
    wheels = {int(m[1]) for d in importlib.metadata.distributions() if (m := re.search(r"-cu(\d\d)$", d.name or ""))}
    newest = max([runtime // 1000, *(wheels if not node.gpu.prefix else ())])
    if driver and newest > driver // 1000:
        yield fail(
            f"driver {snapshot.driver} is for CUDA {_version(driver)}, and what is installed for CUDA {newest}",
            expected="a driver for the same major version, or a newer one",
            meaning="No kernel can be started",
            remedy=f"a newer driver, or the extra cu{driver // 1000} of dask-gpurt",
        )
    elif driver and runtime > driver:
        yield warn(
            f"driver {snapshot.driver} is for CUDA {_version(driver)}, the runtime is {_version(runtime)}",
            expected="a driver that is not older than the runtime",
            meaning="Kernels that are compiled at run time (Numba, CuPy) may not be loaded",
            remedy="a newer driver",
        )
    else:
        yield ok(f"driver {snapshot.driver} for CUDA {_version(driver)}, runtime {_version(runtime)}")
    for d in snapshot.devices:
        name = f"GPU {d.index} ({d.uuid})"
        if d.uncorrected_errors:
            yield fail(
                f"{name} had {d.uncorrected_errors} memory errors that could not be corrected",
                expected="none since the driver was loaded",
                meaning="Results that were on it may be wrong, and tasks on it end with errors",
                remedy=f"{_RESET}; if they come again, have the card replaced",
            )
        if d.remap_failed:
            yield fail(
                f"{name} could not replace a bad row of its memory",
                expected="no failed remapping",
                meaning="Its memory cannot be trusted",
                remedy="drain this node, and have the card replaced",
            )
        elif d.remap_pending:
            yield fail(
                f"{name} will replace a bad row of its memory at the next reset",
                expected="no pending remapping",
                meaning="Until then the bad row is used",
                remedy=f"drain this node, then {_RESET}",
            )


def _version(cuda: int) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "unknown"


def _free(node: Node, snapshot: Snapshot) -> Iterator[Verdict]:
    devices = visible(node.environ, snapshot)
    if not devices:
        yield na(snapshot.reason or "no NVIDIA GPU is visible")
    for d in devices:
        if not d.memory_bytes:
            continue
        strangers = {pid: n for pid, n in d.processes if not _is_ours(node.system, pid)}
        share = sum(strangers.values()) / d.memory_bytes
        if share > _STRANGERS:
            largest = max(strangers, key=lambda pid: strangers[pid])
            yield warn(
                f"GPU {d.index}: other processes hold {share:.0%} of its memory, most of it process {largest}"
                f" ({(node.system.text('proc', str(largest), 'comm') or 'not in this namespace')})",
                expected=f"at most {_STRANGERS:.0%}",
                meaning="Allocations of workers fail earlier than their limit says, and kernels share the device",
                remedy=f"end process {largest}, or another GPU (CUDA_VISIBLE_DEVICES)",
            )
        text = f"GPU {d.index}: {d.used_bytes / 1e9:.1f} of {d.memory_bytes / 1e9:.1f} GB in use"
        if d.used_bytes > _FULL * d.memory_bytes:
            yield warn(
                text,
                expected=f"at most {_FULL:.0%}",
                meaning="CUDA contexts, libraries and kernels need memory outside of the pool, and fail",
                remedy="a lower gpurt.tiers.device-limit, a smaller RMM pool, or the asynchronous allocator",
            )
        else:
            yield ok(text)


def _memory(node: Node) -> Iterator[Verdict]:
    if node.fragmented:
        yield fail(
            f"{node.fragmented} allocations on the GPU failed although there was room for them",
            expected="none",
            meaning="Free blocks of the pool are smaller than what tasks ask for: values are spilled in vain",
            remedy="the asynchronous allocator (rmm_async of dask-cuda, or gpurt.tiers.device), smaller partitions",
        )
    yield from of_driver(_free)(node)


def _is_ours(system: System, pid: int) -> bool:
    """This process, or another one of Dask."""
    for _ in range(_GENERATIONS):
        line = (system.text("proc", str(pid), "cmdline") or "").replace("\0", " ")
        if pid == os.getpid() or "dask" in line or "distributed" in line:
            return True
        if "multiprocessing" not in line:
            return False
        # As nannies start workers: the command line says nothing of Dask, that of the nanny does.
        pid = system.fields("proc", str(pid), "status").get("PPid", 0)
        if pid == os.getppid() > 1:  # a worker of the same LocalCluster, of a program with any name
            return True
    return False


def _partitioned(node: Node, snapshot: Snapshot) -> Iterator[Verdict]:
    able = [d for d in snapshot.devices if d.mig is not None]
    if not able:
        yield na(snapshot.reason or "no GPU that can be partitioned")
        return
    for d in able:
        if d.mig_pending != d.mig:
            yield fail(
                f"MIG of GPU {d.index} is {_on(d.mig)}, and {_on(d.mig_pending)} after the next reset",
                expected="the same now and then",
                meaning="After a reset workers find other devices than now",
                remedy=f"{_RESET}, or nvidia-smi -i {d.index} -mig {int(bool(d.mig))}",
            )
    words = cuda.given(node.environ)
    word = "0" if words is None else next(iter(words), "")
    first = named(word, snapshot)
    if first is not None and first.mig and word not in first.mig_uuids:
        instances = first.mig_uuids
        yield fail(
            f"CUDA_VISIBLE_DEVICES={node.environ.get('CUDA_VISIBLE_DEVICES', 'not set')} is GPU {first.index}, which "
            f"is partitioned into {len(instances)} instances",
            expected="the UUID of an instance",
            meaning="Each worker takes the first instance, all of them the same one"
            if instances
            else "There is no device",
            remedy=f"CUDA_VISIBLE_DEVICES={instances[0]}, another one for each worker"
            if instances
            else f"make instances: nvidia-smi mig -i {first.index} -cgi",
        )
    yield ok(", ".join(f"GPU {d.index} {_on(d.mig)}, {len(d.mig_uuids)} instances" for d in able))


def _on(state: bool | None) -> str:
    return "on" if state else "off"


CHECKS = (
    Check(
        id="T1",
        name="Visible GPUs",
        looks_at="NVIDIA devices on the PCI bus, NVML, CUDA_VISIBLE_DEVICES",
        fails_when="fail: more on the bus than the driver knows, a device that is not there in CUDA_VISIBLE_DEVICES; "
        "warn: indices there of GPUs that differ, without CUDA_DEVICE_ORDER=PCI_BUS_ID",
        remedy="the kernel log, the driver, the variable",
        look=of_driver(_seen),
    ),
    Check(
        id="T2",
        name="GPU driver",
        looks_at="CUDA version of driver, runtime and wheels; memory errors, remapped rows",
        fails_when="fail: runtime or wheels of a newer major version, uncorrected errors, a remapping pending or "
        "failed; warn: runtime of a newer minor version",
        remedy="another driver or extra; a reset; a new card",
        look=of_driver(_driven),
        once_per_host=True,
    ),
    Check(
        id="T14",
        name="GPU memory",
        looks_at="memory in use and processes of visible GPUs (NVML), allocations that failed beside free memory",
        fails_when="fail: an allocation failed although there was room; warn: more than 95 % in use, processes that "
        "are not Dask's hold more than 5 %",
        remedy="the process, a lower limit, the asynchronous allocator",
        look=_memory,
    ),
    Check(
        id="T15",
        name="MIG",
        looks_at="MIG mode now and after a reset, instances, CUDA_VISIBLE_DEVICES; of a cluster, who shares one",
        fails_when="fail: the mode will change, a worker on a partitioned GPU instead of an instance, two on one",
        remedy="the UUID of an instance in CUDA_VISIBLE_DEVICES",
        look=of_driver(_partitioned),
    ),
)
