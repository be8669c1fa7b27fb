"""Where data lives: host memory, then disk. `TieredStore` stands in for ``worker.data``."""

from __future__ import annotations

from dask_gpurt.tiers.runtime import TierRuntime
from dask_gpurt.tiers.stores.shard_store import TierShardStore
from dask_gpurt.tiers.stores.task_store import TieredStore

__all__ = ["TierRuntime", "TierShardStore", "TieredStore"]
