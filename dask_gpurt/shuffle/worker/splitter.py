"""Split one input partition for its owners; in a task's thread."""

from __future__ import annotations

import dataclasses
import time
import traceback
from typing import Any

import pandas as pd

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.histogram import Histogram
from dask_gpurt.shuffle.protocol.recovery import CUTS, shard_id
from dask_gpurt.shuffle.rows import wire
from dask_gpurt.shuffle.rows.message_cut import cut
from dask_gpurt.shuffle.rows.partition import split
from dask_gpurt.shuffle.worker.amendment import Outgoing
from dask_gpurt.shuffle.worker.sender import SendingRun


class SplittingRun(SendingRun):
    """The part of a run that splits."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._histogram = Histogram(max(self._worker_for, default=-1) + 1)

    def add_partition(self, data: pd.DataFrame, partition_id: int, **kwargs: Any) -> int:
        # As inherited, with a cheaper way to the event loop.
        self.raise_if_closed()
        if self.transferred:
            raise RuntimeError(f"Cannot add more partitions to {self}")
        self.validate_data(data)
        with self._capture_metrics("foreground"):
            with (
                seam.context_meter.meter("p2p-shard-partition-noncpu"),
                seam.context_meter.meter("p2p-shard-partition-cpu", func=seam.thread_time),
            ):
                shards = self._shard_partition(data, partition_id)
            seam.sync(self._loop, self._write_to_comm, shards)
        return self.run_id

    def _shard_partition(self, data: pd.DataFrame, partition_id: int, **kwargs: Any) -> dict[str, Any]:
        if not isinstance(data, pd.DataFrame):
            raise TypeError(
                f"input partition {partition_id} of shuffle {self.id} is a {type(data).__module__}."
                f"{type(data).__name__}, its meta is a pandas.DataFrame. Remedy: make partitions and meta agree"
            )
        start = time.perf_counter()
        out = Outgoing()
        # Before the layout: an amendment in between is then found out.
        out.attempt = self._ledger.epoch
        out.partition, out.key, out.sent, out.own = partition_id, seam.this_key(), [], []
        first_id = shard_id(partition_id, out.attempt, out.attempt)
        shards = list(split(data, self.column, self.drop_column, first_id, self._layout))
        largest, rows = self._histogram.add(shard for _, shard in shards)
        try:
            self._histogram.look(data, self.column, largest, rows)
        except Exception:
            # A user's own type that can not be counted. What is said of the skew then names no value.
            self._counters.add(skew_unknown=1)
            self._counters.last_error = traceback.format_exc()
        middle = time.perf_counter()
        schema = None
        nbytes = 0
        for address, shard in shards:
            mine = out.setdefault(address, [])
            # Every shard and every cut of one has an id of its own; they sort by input first.
            shard = dataclasses.replace(shard, input_id=first_id + len(mine))
            if address == self.local_address:
                mine.append(shard)
                out.own.append(shard)
                continue
            schema = schema or wire.schema_bytes(shard.table.schema)
            out.sent.append((address, shard))
            for piece in cut(shard, self._cut_bytes):
                parcel = wire.encode(piece, schema)
                mine.append(parcel)
                nbytes += parcel.nbytes
        if max(map(len, out.values()), default=0) > CUTS:
            raise OverflowError(f"input partition {partition_id} of {self} is more than {CUTS} messages for one worker")
        self._counters.add(inputs=1, seconds_partition=middle - start, seconds_encode=time.perf_counter() - middle)
        seam.context_meter.digest_metric("p2p-shards", nbytes, "bytes")
        seam.context_meter.digest_metric("p2p-shards", len(out), "count")
        return out
