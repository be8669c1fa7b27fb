"""What the benchmarks of shuffles share: a frame, and what a shuffle cost its workers.

The frame: two int64, four float64, one text column. Peak memory is the kernel's own mark, set back before each run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from distributed import Client, LocalCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS_PER_GB = 15_000_000
VARIANTS = ("p2p", "tasks", "gpurt")
#: Dask's configuration for workers that are compared: nothing is spilled, paused or ended for memory, and no warnings
UNMANAGED: dict[str, Any] = {
    f"distributed.worker.memory.{name}": False for name in ("target", "spill", "pause", "terminate")
} | {"logging.distributed": "error"}


@contextlib.contextmanager
def two_workers(make: Callable[..., Any] = LocalCluster, **options: Any) -> Iterator[Client]:
    """A client of a cluster of two processes with one thread each and no limit of memory."""
    with (
        make(n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address=":0", **options) as cluster,
        Client(cluster) as client,
    ):
        yield client


def make(i: int, n: int) -> pd.DataFrame:
    """One input partition."""
    r = np.random.default_rng(i)
    columns: dict[str, Any] = {"k": r.integers(0, 10_000_000, n), "i": r.integers(0, 1 << 40, n)}
    for name in "abcd":
        columns[name] = r.random(n)
    columns["s"] = pd.Series(np.char.add("name-", r.integers(0, 1_000_000, n).astype("U7")), dtype="str")
    return pd.DataFrame(columns)


def _cpu_seconds() -> float:
    t = os.times()
    return t.user + t.system


def _status(field: str) -> int:
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))


def begin() -> float:
    """On a worker: forget the peak of memory; CPU seconds so far."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    return _cpu_seconds()


def end() -> tuple[float, int]:
    """On a worker: CPU seconds so far, peak RSS in bytes since `begin`."""
    return _cpu_seconds(), _status("VmHWM")


async def take_over(dask_scheduler: Any, **settings: Any) -> None:
    """On the scheduler: have its shuffles be ours, with these settings."""
    from dask_gpurt.config import ShuffleSettings
    from dask_gpurt.shuffle.scheduler.takeover import ShuffleTakeover

    await ShuffleTakeover.install(dask_scheduler, ShuffleSettings(enabled=True, **settings))


async def give_back(dask_scheduler: Any) -> dict[str, Any]:
    """On the scheduler: have them be Dask's again; what ours did."""
    takeover = dask_scheduler.plugins["shuffle"].takeover
    while dask_scheduler.plugins["shuffle"].active_shuffles:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await takeover.uninstall()
    stats: dict[str, Any] = takeover.statistics()
    return stats
