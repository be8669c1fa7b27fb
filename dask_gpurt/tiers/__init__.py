"""Where data lives: host memory, then disk. `TieredStore` stands in for ``worker.data``."""

from __future__ import annotations

from dask_gpurt.tiers.plugin import TierRuntime
from dask_gpurt.tiers.shards import TierShardStore
from dask_gpurt.tiers.store import TieredStore

__all__ = ["TierRuntime", "TierShardStore", "TieredStore"]
