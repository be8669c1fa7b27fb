"""Facts and protocols that the engines share. Knows nobody; everything here is frozen or a Protocol."""

from __future__ import annotations

from dask_gpurt.model.events import Event, Sink, null_sink
from dask_gpurt.model.link import Link, LinkClass
from dask_gpurt.model.shards import Buffer, Chunk, ShardStore
from dask_gpurt.model.tier import Tier

__all__ = ["Buffer", "Chunk", "Event", "Link", "LinkClass", "ShardStore", "Sink", "Tier", "null_sink"]
