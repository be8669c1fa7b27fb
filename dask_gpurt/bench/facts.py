"""What every result carries: the machine, the versions, the commit of a checkout; and how a result is written."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dask.system import cpu_count

from dask_gpurt.observe.output_file import replacing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PACKAGES = ("dask-gpurt", "dask", "distributed", "pandas", "numpy", "pyarrow", "duckdb", "tpchgen-cli")


def machine() -> dict[str, Any]:
    """CPU model, cores usable by this process, memory in bytes, kernel, Python."""
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "memory_bytes": _meminfo("MemTotal"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def cores() -> int:
    """Cores this process may run on; a container, by cgroups v1 or v2, often has fewer than the machine."""
    return cpu_count()


def free_memory_bytes(root: str = "/") -> int:
    """Bytes this process may still take: the machine's available memory or, if less, the container's limit."""
    free = _meminfo("MemAvailable")
    for folder, limit, used, cached in _MEMORY_GROUPS:
        with contextlib.suppress(OSError, ValueError):  # not that version of cgroups, or "max"
            bound, taken = (int(_text(root, folder, name)) for name in (limit, used))
            # The cache of files counts as used, and is given up on demand: without this, the data that a first run
            # has written or read would leave no memory to a second one.
            found = re.search(rf"^{cached} (\d+)$", _text(root, folder, "memory.stat"), re.MULTILINE)
            free = min(free, max(0, bound - taken + (int(found[1]) if found else 0)))
    return free


#: folder of the container's group; its limit, what it uses, and the field of the cache that can be given up; v2 and v1
_MEMORY_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _text(*parts: str) -> str:
    with open(os.path.join(*parts), encoding="utf-8") as f:
        return f.read()


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Package -> installed version, or "not installed"."""
    out = {}
    for name in packages:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def commit() -> str:
    """The commit of the checkout that this file is part of, with "+changes" if the tree differs; else "unknown"."""
    try:
        # Installed, it may lie within another project's checkout, whose commit says nothing here.
        _git("ls-files", "--error-unmatch", os.path.abspath(__file__))
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def facts(exercised_on: str) -> dict[str, Any]:
    """The header of a result.

    Parameters
    ----------
    exercised_on
        In words, what really ran: ``"2 CPU cores, no GPU, loopback"``. A figure must not be read as one of hardware
        that was not there.
    """
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "exercised_on": exercised_on,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "command": " ".join(sys.orig_argv[1:]),
    }


def write_json(path: str, result: Mapping[str, Any]) -> str:
    """Write `result` to `path` in one step (a reader never sees half of it). Returns `path`."""
    if "exercised_on" not in result:
        raise ValueError("a result needs exercised_on; start it from facts(...)")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with replacing(path) as beside, open(beside, "w") as f:
        json.dump(result, f, indent=1, default=str)
        f.write("\n")
    return path


def _git(*args: str) -> str:
    command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.lower().startswith(("model name", "cpu model")):
                    return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass  # not Linux: the next line is all there is
    return platform.processor() or platform.machine()


def _meminfo(field: str) -> int:
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
