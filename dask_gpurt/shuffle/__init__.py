"""How partitions change place: a peer-to-peer shuffle behind the plugins named ``shuffle``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle.counters import worker_statistics
from dask_gpurt.shuffle.worker.shard_stores import MemoryShardStore, provide, store_of, withdraw

if TYPE_CHECKING:
    from dask_gpurt.shuffle.scheduler.takeover import ShuffleTakeover

__all__ = ["MemoryShardStore", "ShuffleTakeover", "provide", "store_of", "withdraw", "worker_statistics"]


def __getattr__(name: str) -> Any:
    # Late: it is the scheduler's, and brings all that a run needs; a worker imports that with its first run.
    if name == "ShuffleTakeover":
        from dask_gpurt.shuffle.scheduler.takeover import ShuffleTakeover

        return ShuffleTakeover
    raise AttributeError(f"module 'dask_gpurt.shuffle' has no attribute {name!r}")
