"""`System`: what the kernel shows of a machine, read below a root; `node_class` makes a `NodeClass` of it.

A recorded tree of ``/proc`` and ``/sys`` is a machine as well: tests, and what people send, are read by the same code.
A file that is missing or cannot be read is an empty text, because containers hide many.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dask_gpurt._version import __version__
from dask_gpurt.model.node_class import NodeClass

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dask_gpurt.model.node_class import Gpu

#: packages whose versions are told
PACKAGES = ("dask", "distributed", "numpy", "pandas", "pyarrow", "cudf-cu12", "cudf-cu13", "ucxx-cu12", "ucxx-cu13")


class System:
    """Files of a machine; `root` is the folder that stands for ``/``."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = Path(root)

    def read(self, path: str) -> str:
        """The text of a file; empty if there is none, or it may not be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """What is in a folder, sorted; nothing if there is none."""
        try:
            return sorted(os.listdir(self.root / path.lstrip("/")))
        except OSError:
            return []

    def cpu(self) -> str:
        """The model; the architecture where the kernel does not tell it."""
        found = re.search(r"^(?:model name|cpu model)\s*:\s*(.+)$", self.read("/proc/cpuinfo"), re.M | re.I)
        return " ".join(found.group(1).split()) if found else platform.machine()

    def cores(self) -> int:
        """Of the machine; 0: unknown."""
        return len(re.findall(r"^processor\s*:", self.read("/proc/cpuinfo"), re.M))

    def memory_bytes(self) -> int:
        """Of the machine; 0: unknown."""
        found = re.search(r"^MemTotal:\s*(\d+) kB", self.read("/proc/meminfo"), re.M)
        return int(found.group(1)) * 1024 if found else 0

    def nics(self) -> tuple[int, ...]:
        """Bits per second of each network card that is a device, not a bridge or a tunnel, and says its speed."""
        speeds = []
        for name in self.names("/sys/class/net"):
            megabits = self.read(f"/sys/class/net/{name}/speed").strip()
            if megabits.isdigit() and int(megabits) > 0 and self.names(f"/sys/class/net/{name}/device"):
                speeds.append(int(megabits) * 10**6)
        return tuple(sorted(speeds))

    def filesystem(self, directory: str) -> str:
        """The type of the file system that a folder is on; empty: unknown."""
        best, kind = "", ""
        for line in self.read("/proc/self/mounts").splitlines():
            fields = line.split()
            if len(fields) < 3:
                continue
            place = re.sub(r"\\(\d{3})", lambda m: chr(int(m.group(1), 8)), fields[1])
            # The last one that is mounted on a place hides those before it.
            if (directory + "/").startswith(place.rstrip("/") + "/") and len(place) >= len(best):
                best, kind = place, fields[2]
        return kind

    def throttled_seconds(self) -> float:
        """For how long the control group of this process was kept from its CPUs so far; 0 without such a limit."""
        for line in self.read("/proc/self/cgroup").splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if controllers == "":
                bases = ["/sys/fs/cgroup"]
            elif "cpu" in controllers.split(","):
                bases = [f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup/cpu"]
            else:
                continue
            for base in bases:
                # In a container the group is often mounted as the root.
                for folder in (base + path.rstrip("/"), base):
                    found = re.search(r"^throttled_(usec|time) (\d+)$", self.read(f"{folder}/cpu.stat"), re.M)
                    if found:
                        return int(found.group(2)) * (1e-6 if found.group(1) == "usec" else 1e-9)
        return 0.0

    def waited_seconds(self) -> float:
        """For how long the calling thread was ready to run and had no CPU so far; 0 where the kernel does not say."""
        fields = self.read("/proc/thread-self/schedstat").split()
        return int(fields[1]) * 1e-9 if len(fields) == 3 else 0.0


def stack(driver: str = "") -> dict[str, str]:
    """The versions of what runs here; what is not installed is left out."""
    out = {"dask-gpurt": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return out | ({"driver": driver} if driver else {})


def node_class(system: System, directory: str, gpus: Sequence[Gpu], versions: Mapping[str, str]) -> NodeClass:
    """The class of a machine; reads files and blocks.

    Parameters
    ----------
    directory
        Where spilled data goes.
    gpus
        As `dask_gpurt.backends.nvml` finds them.
    versions
        As `stack` finds them.
    """
    return NodeClass(
        gpus=tuple(gpus),
        cpu=system.cpu(),
        cores=system.cores(),
        memory_bytes=system.memory_bytes(),
        filesystem=system.filesystem(directory),
        nics=system.nics(),
        stack=tuple(sorted(versions.items())),
    )
