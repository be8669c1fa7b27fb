"""Facts and protocols that the engines share. Knows nobody; frozen or a Protocol, but for the process's memory."""

from __future__ import annotations

from dask_gpurt.model.events import Event, Sink, null_sink
from dask_gpurt.model.link import Link, LinkClass
from dask_gpurt.model.shards import Buffer, Chunk, ShardStore
from dask_gpurt.model.tier import Tier

__all__ = ["Buffer", "Chunk", "Event", "Link", "LinkClass", "ShardStore", "Sink", "Tier", "null_sink"]
