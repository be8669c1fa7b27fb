"""Facts, protocols and small tools that the engines share. It imports nothing else of this package but the errors."""

from __future__ import annotations

from dask_gpurt.model.events import Event, Sink, null_sink
from dask_gpurt.model.link import Link, LinkClass
from dask_gpurt.model.shards import Buffer, Chunk, ShardStore
from dask_gpurt.model.tier import Tier

__all__ = ["Buffer", "Chunk", "Event", "Link", "LinkClass", "ShardStore", "Sink", "Tier", "null_sink"]
