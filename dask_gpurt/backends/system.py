"""`System`: what the kernel shows of a machine, read below a root; `node_class` makes a `NodeClass` of it.

A recorded tree of ``/proc`` and ``/sys`` is a machine as well: tests, and what people send, are read by the same code.
A file that is missing or cannot be read is no error, because containers hide many.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import time
from typing import TYPE_CHECKING

from dask_gpurt._version import __version__
from dask_gpurt.model.node_class import NodeClass

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dask_gpurt.model.node_class import Gpu

#: packages whose versions belong to the class of a node
PACKAGES = ("dask", "distributed", "numpy", "pandas", "pyarrow", "cudf-cu12", "cudf-cu13", "ucxx-cu12", "ucxx-cu13")
#: all that results, messages or speed depend on
_ALL = (
    *("dask", "distributed", "dask-gpurt", "msgpack", "cloudpickle", "numpy", "pandas", "pyarrow", "lz4", "zstandard"),
    *("dask-cuda", *(f"{name}-cu{cuda}" for name in ("cudf", "rmm", "ucxx", "libucx") for cuda in (12, 13))),
)


class System:
    """Text files of the kernel, what they say of the machine, and time that passes.

    What is not there, or may not be read, is None or empty.

    Parameters
    ----------
    root
        The folder that stands for ``/``.
    """

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = root

    def path(self, *parts: str) -> str:
        """A path below the root; parts are relative."""
        return os.path.join(self.root, *(p.lstrip("/") for p in parts))

    def text(self, *parts: str) -> str | None:
        """A file's text without white space around it; None: it cannot be read."""
        try:
            with open(self.path(*parts), encoding="utf-8", errors="replace") as f:
                return f.read().strip()
        except OSError:
            return None

    def number(self, *parts: str) -> int | None:
        """The whole number that a file begins with, decimal or 0x hexadecimal; None: there is none."""
        words = (self.text(*parts) or "").split()
        try:
            return int(words[0], 0)
        except (IndexError, ValueError):
            return None

    def names(self, *parts: str) -> list[str]:
        """The sorted names in a folder; empty without it."""
        try:
            return sorted(os.listdir(self.path(*parts)))
        except OSError:
            return []

    def fields(self, *parts: str) -> dict[str, int]:
        """First word of each line (without a colon) to the whole number after it."""
        out = {}
        for line in (self.text(*parts) or "").splitlines():
            words = line.split()
            if len(words) > 1 and words[1].lstrip("-").isdigit():
                out[words[0].rstrip(":")] = int(words[1])
        return out

    def cgroups(self, controller: str) -> list[str]:
        """Folders, relative to the root, of this process's group and those around it that exist, innermost first.

        Version 2 where the controller is not mounted as version 1. In a container the path may be that of the host:
        then only the top is found.
        """
        out: list[str] = []
        for line in sorted((self.text("proc/self/cgroup") or "").splitlines(), key=lambda line: line.startswith("0:")):
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            if not controllers and out:
                continue
            top = "sys/fs/cgroup" + (f"/{controller}" if controllers else "")
            parts = [p for p in path.split("/") if p and p != ".."]
            folders = ["/".join((top, *parts[:depth])) for depth in range(len(parts), -1, -1)]
            out += [folder for folder in folders if os.path.isdir(self.path(folder))]
        return out

    def wait(self, seconds: float) -> float:
        """Let time pass between two looks; the seconds that have passed, which are more on a busy machine."""
        started = time.monotonic()
        time.sleep(seconds)
        return time.monotonic() - started

    def cpu(self) -> str:
        """The model; the architecture where the kernel does not tell it."""
        found = re.search(r"^(?:model name|cpu model)\s*:\s*(.+)$", self.text("proc/cpuinfo") or "", re.M | re.I)
        return " ".join(found.group(1).split()) if found else platform.machine()

    def cores(self) -> int:
        """Of the machine; 0: unknown."""
        return len(re.findall(r"^processor\s*:", self.text("proc/cpuinfo") or "", re.M))

    def memory_bytes(self) -> int:
        """Of the machine; 0: unknown."""
        found = re.search(r"^MemTotal:\s*(\d+) kB", self.text("proc/meminfo") or "", re.M)
        return int(found.group(1)) * 1024 if found else 0

    def nics(self) -> tuple[int, ...]:
        """Bits per second of each network card that is a device, not a bridge or a tunnel, and says its speed."""
        speeds = []
        for name in self.names("sys/class/net"):
            megabits = self.number("sys/class/net", name, "speed") or 0
            if megabits > 0 and self.names("sys/class/net", name, "device"):
                speeds.append(megabits * 10**6)
        return tuple(sorted(speeds))

    def filesystem(self, directory: str) -> str:
        """The type of the file system that a folder is on; empty: unknown."""
        best, kind = "", ""
        for line in (self.text("proc/self/mounts") or "").splitlines():
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
        for line in (self.text("proc/self/cgroup") or "").splitlines():
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
                    found = re.search(r"^throttled_(usec|time) (\d+)$", self.text(folder, "cpu.stat") or "", re.M)
                    if found:
                        return int(found.group(2)) * (1e-6 if found.group(1) == "usec" else 1e-9)
        return 0.0

    def waited_seconds(self) -> float:
        """For how long the calling thread was ready to run and had no CPU so far; 0 where the kernel does not say."""
        fields = (self.text("proc/thread-self/schedstat") or "").split()
        return int(fields[1]) * 1e-9 if len(fields) == 3 else 0.0


def stack(driver: str = "") -> dict[str, str]:
    """The versions of `PACKAGES` and the driver; what is not installed is left out."""
    return {"dask-gpurt": __version__, **_installed(PACKAGES)} | ({"driver": driver} if driver else {})


def versions() -> dict[str, str]:
    """What a process runs on, as far as results, messages or speed depend on it; what is not installed is left out."""
    return _installed(_ALL)


def _installed(names: Sequence[str]) -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in names:
        if version := _version(name):
            out[name] = version
    return out


@functools.cache
def _version(name: str) -> str | None:
    """The installed version of a package when it was first asked for; what is installed later is not what runs."""
    try:
        return importlib.metadata.version(name)  # None where metadata was cut off
    except importlib.metadata.PackageNotFoundError:
        return None


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
