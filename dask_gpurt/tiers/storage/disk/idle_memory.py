"""`IdleMemory`: how much memory of this machine is idle, so that the page cache may have it.

Past the page cache, a spilled value costs the speed of the device twice. Where the machine, or the container around the
worker, has memory to spare, the kernel's cache of files is a tier of its own between memory and disk. It takes nothing
from others: its pages are given up on demand. So `DiskTier` may use it while a good part of the memory is idle, and
goes past it from then on. (A worker on a machine of its own that it is about to fill has none to spare, and there only
direct I/O really frees memory.)

Counted as idle: what the kernel calls available, without pages that were not written to their disk yet, as those cannot
be given up at once. The same for each memory cgroup (v2 or v1) around this process, where the pages of files that it
wrote are charged to it. Where the system gives no such numbers, nothing is idle.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: share of the memory that has to be idle
IDLE_SHARE = 1 / 3
#: of what is idle, the share that may wait to be written to disk: more than the tenth at which Linux begins to write
#: unasked, less than the 15 % from which on it makes writers wait
DIRTY_SHARE = 0.14
#: seconds for which a look holds
_FRESH_SECONDS = 0.05


class Memory(NamedTuple):
    """Memory of a machine or a cgroup, in bytes."""

    total: int
    #: can be had at once
    idle: int
    #: pages of files that have to be written first
    dirty: int


class IdleMemory:
    """Asked before each large write. Thread-safe. `look`: the machine and each cgroup around this process."""

    def __init__(
        self,
        look: Callable[[], list[Memory]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = memories if look is None else look
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: list[Memory] = []
        self._until = 0.0

    def ample(self, nbytes: int) -> bool:
        """Whether so much is idle that `nbytes` in the page cache are no harm."""
        with self._lock:
            now = self._clock()
            if now >= self._until:
                self._seen = self._look()
                self._until = now + _FRESH_SECONDS
            return bool(self._seen) and all(
                m.idle - nbytes >= IDLE_SHARE * m.total and m.dirty + nbytes <= DIRTY_SHARE * m.idle for m in self._seen
            )


def memories(root: str = "/") -> list[Memory]:
    """What the kernel says of the machine and of each cgroup around this process; empty where it does not tell."""
    try:
        machine = _fields(os.path.join(root, "proc/meminfo"))
        total, available = machine["MemTotal:"] * 1024, machine["MemAvailable:"] * 1024
        dirty = (machine["Dirty:"] + machine["Writeback:"]) * 1024
        return [Memory(total, available - dirty, dirty), *_cgroups(root, total)]
    except (OSError, KeyError, ValueError):
        return []


def _cgroups(root: str, total: int) -> Iterator[Memory]:
    """Those with a limit below the machine's memory."""
    with open(os.path.join(root, "proc/self/cgroup")) as f:
        lines = [line.rstrip("\n").split(":", 2) for line in f]
    for _, controllers, path in lines:
        if not controllers:
            top, limit, usage = "sys/fs/cgroup", "memory.max", "memory.current"
            stats = ("inactive_file", "file_dirty", "file_writeback")
        elif "memory" in controllers.split(","):
            top, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            stats = ("total_inactive_file", "total_dirty", "total_writeback")
        else:
            continue
        # In a container the path may be that of the host; then only the top of what is mounted is seen.
        parts = [p for p in path.split("/") if p and p != ".."]
        for depth in range(len(parts), -1, -1):
            folder = os.path.join(root, top, *parts[:depth])
            try:
                bound = int(_text(os.path.join(folder, limit)))
                used = int(_text(os.path.join(folder, usage)))
                stat = _fields(os.path.join(folder, "memory.stat"))
            except (FileNotFoundError, NotADirectoryError, ValueError):
                continue  # not mounted here, or no limit ("max")
            if bound >= total:
                continue
            dirty = stat.get(stats[1], 0) + stat.get(stats[2], 0)
            yield Memory(bound, bound - used + stat.get(stats[0], 0) - dirty, dirty)


def _text(path: str) -> str:
    with open(path) as f:
        return f.read()


def _fields(path: str) -> dict[str, int]:
    """First word of each line -> the number after it."""
    out = {}
    for line in _text(path).splitlines():
        name, number, *_ = line.split()
        out[name] = int(number)
    return out
