"""How partitions change place: a peer-to-peer shuffle behind the plugins named ``shuffle``."""

from __future__ import annotations

from dask_gpurt.shuffle.scheduler.plugin import ShuffleTakeover, worker_statistics
from dask_gpurt.shuffle.worker.shard_stores import MemoryShardStore, provide, store_of, withdraw

__all__ = ["MemoryShardStore", "ShuffleTakeover", "provide", "store_of", "withdraw", "worker_statistics"]
