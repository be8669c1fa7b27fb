"""T5: whether a process runs near its GPU, and the links of GPUs and cards have their full width."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dask_gpurt.doctor.check import Check
from dask_gpurt.doctor.finding import fail, na, ok, warn
from dask_gpurt.doctor.gpu import AMD, of_driver, pci_devices
from dask_gpurt.doctor.gpus import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask_gpurt.backends.nvml import Snapshot
    from dask_gpurt.backends.system import System
    from dask_gpurt.doctor.check import Node
    from dask_gpurt.doctor.finding import Verdict

_PCI = "sys/bus/pci/devices"


def cpus_of(text: str) -> set[int]:
    """``0-3,8`` as numbers."""
    out: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        out |= set(range(int(first), int(last or first) + 1))
    return out


def _look(node: Node, snapshot: Snapshot) -> Iterator[Verdict]:
    system = node.system
    gpus = {d.pci: f"GPU {d.index}" for d in visible(node.environ, snapshot)}
    gpus |= {d: f"GPU {d}" for d in pci_devices(system, AMD)}
    if not gpus:
        yield na(snapshot.reason or "no GPU is visible")
        return
    yield from _affinity(system, gpus)
    cards = {os.path.basename(os.path.realpath(path)): name for name, path in _cards(system)}
    for device, name in {**gpus, **cards}.items():
        yield from _width(system, device, name)
    for d in visible(node.environ, snapshot):
        down = [i for i, up in enumerate(d.nvlinks) if not up]
        if down and len(down) < len(d.nvlinks):  # all down: it is not wired
            yield warn(
                f"{len(down)} of {len(d.nvlinks)} NVLinks of GPU {d.index} are down: {', '.join(map(str, down))}",
                expected="all",
                meaning="Transfers between GPUs are slower, and go through PCIe where no link is left",
                remedy="nvidia-smi nvlink --status and --errorcounters; reset the GPU, have the bridge looked at",
            )


def _cards(system: System) -> Iterator[tuple[str, str]]:
    for name in system.names("sys/class/infiniband"):
        yield name, system.path("sys/class/infiniband", name, "device")


def _affinity(system: System, gpus: dict[str, str]) -> Iterator[Verdict]:
    mine = os.sched_getaffinity(0)
    near: set[int] = set()
    for device in gpus:
        near |= cpus_of(system.text(_PCI, device, "local_cpulist") or "")
    nodes = sorted({n for d in gpus if (n := system.number(_PCI, d, "numa_node")) is not None and n >= 0})
    names = ", ".join(gpus.values())
    if not near or not nodes:
        yield ok(f"the system does not say which processors are near {names}")
        return
    bind = f"numactl --cpunodebind={','.join(map(str, nodes))} --membind={','.join(map(str, nodes))} dask worker ..."
    meaning = "Copies between host and GPU cross the link between the sockets"
    if not mine & near:
        yield fail(
            f"this process runs on none of the processors near {names} (NUMA node {nodes})",
            expected="an affinity with processors of that node",
            meaning=meaning,
            remedy=bind,
        )
    elif mine - near:
        yield warn(
            f"{len(mine - near)} of the {len(mine)} processors of this process are far from {names} (node {nodes})",
            expected="processors of that node only",
            meaning=meaning,
            remedy=bind,
        )
    else:
        yield ok(f"near {names} (NUMA node {nodes})")


def _width(system: System, device: str, name: str) -> Iterator[Verdict]:
    """The speed says nothing: idle devices lower it."""
    now, most = (system.number(_PCI, device, f"{which}_link_width") for which in ("current", "max"))
    if not now or not most:
        return
    if now < most:
        yield fail(
            f"{name} ({device}) is linked by {now} of {most} lanes of PCIe",
            expected=f"{most} lanes",
            meaning="Copies to and from it take so much longer",
            remedy="seat the card again, another slot, or the BIOS's bifurcation of that slot",
        )
    else:
        yield ok(f"{name}: {now} lanes")


CHECK = Check(
    id="T5",
    name="NUMA",
    looks_at="local_cpulist, numa_node and lanes of visible GPUs and InfiniBand cards in sysfs, NVLinks, affinity",
    fails_when="fail: no processor in common with the GPU's node, fewer lanes than the device has; warn: some "
    "processors are far, an NVLink is down",
    remedy="numactl, the slot",
    look=of_driver(_look),
)
