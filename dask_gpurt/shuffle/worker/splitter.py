"""Split one input partition for the owners of its rows, in the thread of its task.

An input may be split twice in one attempt: its task was released after some of its shards were sent, and runs again,
here or on another worker. Receivers drop the second copy of a shard by its id. So equal ids must stand for equal rows,
which nothing can promise: a join's filter came in between, a worker does not cut what it has for itself, packs of
device memory are cut by what earlier ones were like. Therefore every shard has with it what stands for the meaning of
all ids of its input for one worker (`Shard.split`). A receiver that gets two of them has the shuffle restarted.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import traceback
from typing import TYPE_CHECKING, Any

import xxhash

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.histogram import Histogram
from dask_gpurt.shuffle.protocol.recovery import CUTS, shard_id
from dask_gpurt.shuffle.worker.message import Outgoing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    import numpy as np

    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.rows.kinds import RowKind
    from dask_gpurt.shuffle.rows.partition import Shard
    from dask_gpurt.shuffle.rows.wire import Parcel
    from dask_gpurt.shuffle.worker.host import RunHost
    from dask_gpurt.shuffle.worker.join_filter import JoinRows
    from dask_gpurt.shuffle.worker.owners import Owners
    from dask_gpurt.shuffle.worker.send_log import SendLog

logger = logging.getLogger("distributed.worker.gpurt")


class Splitter:
    """Splits the inputs of one run, and counts the rows of its outputs.

    Parameters
    ----------
    direct
        Says which of some workers take rows in device memory; called for partitions that lie there.
    """

    def __init__(
        self,
        host: RunHost,
        *,
        owners: Owners,
        log: SendLog[Shard],
        column: str,
        rows: RowKind,
        join: JoinRows,
        direct: Callable[[Collection[str]], Collection[str]],
        counters: ShuffleCounters,
    ) -> None:
        self._host, self._direct = host, direct
        self._owners, self._log = owners, log
        self._column, self._rows, self._join = column, rows, join
        self._counters = counters
        #: rows of each output in the inputs that were split here
        self.histogram = Histogram(max(owners.worker_for, default=-1) + 1)
        #: columns that were pickled in one of its inputs
        self._pickled: set[str] = set()

    def split(self, data: Any, partition: int) -> Outgoing:
        """Split an input and make its shards ready to be sent.

        Raises
        ------
        TypeError
            It is not a frame like the meta.
        OverflowError
            It is more messages for one worker than there are ids.
        """
        if not self._rows.owns(data):
            raise TypeError(
                f"input partition {partition} of shuffle {self._host.id} is a {type(data).__module__}."
                f"{type(data).__name__}, its meta is a {self._rows.frame}. Remedy: make partitions and meta agree"
            )
        keep = self._join.keep(data)
        start, cpu = time.perf_counter(), time.thread_time()
        # The epoch is read before the layout: so an amendment in between is noticed when the input is sent.
        out = Outgoing(partition, seam.this_key(), self._log.epoch)
        first_id = shard_id(partition, out.attempt, out.attempt)
        layout = self._owners.layout
        direct = () if self._rows.on_host else self._direct(layout.ranges)
        shards = list(self._rows.split(data, first_id, layout, keep=keep, direct=direct))
        self._count(data, shards)
        self._say_pickled(data, shards)
        middle = time.perf_counter()
        nbytes = self._encode(shards, first_id, out, keep)
        end = time.perf_counter()
        self._counters.add(inputs=1, seconds_partition=middle - start, seconds_encode=end - middle)
        self._join.split(partition, data, len(data) if keep is None else int(keep.sum()), time.thread_time() - cpu)
        seam.context_meter.digest_metric("p2p-shards", nbytes, "bytes")
        seam.context_meter.digest_metric("p2p-shards", len(out.parcels) + bool(out.own), "count")
        return out

    def _count(self, data: Any, shards: list[tuple[str, Shard]]) -> None:
        largest, rows = self.histogram.add(shard for _, shard in shards)
        if not self._rows.on_host:
            return
        try:
            self.histogram.look(data, self._column, largest, rows)
        except Exception:
            # A user's own type that cannot be counted: a report of the skew then names no value.
            self._counters.add(skew_unknown=1)
            self._counters.last_error = traceback.format_exc()

    def _say_pickled(self, data: Any, shards: list[tuple[str, Shard]]) -> None:
        known = shards[0][1].known if shards else None
        if known is None or not known.pickled:
            return
        self._counters.add(values_pickled=len(data) * len(known.pickled))
        if new := known.pickled - self._pickled:
            self._pickled |= new
            logger.warning(
                "%s: Arrow cannot hold the values of %s, so they are sent pickled, one by one. Remedy, if that is too "
                "slow: give the column one type before the shuffle",
                self._host,
                ", ".join(map(repr, sorted(new))),
            )

    def _encode(
        self, shards: list[tuple[str, Shard]], first_id: int, out: Outgoing, keep: np.ndarray[Any, Any] | None
    ) -> int:
        """Cut and encode the shards for other workers; returns their bytes."""
        encode = self._rows.encoder()
        nbytes = 0
        for address, shard in shards:
            # Every shard and every cut of one has an id of its own; they sort by input first.
            if address == self._host.local_address:
                out.own.append(dataclasses.replace(shard, input_id=first_id + len(out.own)))
                continue
            parcels = out.parcels.setdefault(address, [])
            shard = dataclasses.replace(shard, input_id=first_id + len(parcels))
            out.sent.append((address, shard))
            for parcel in encode(shard):
                parcels.append(parcel)
                nbytes += parcel.nbytes
        if max(len(out.own), *map(len, out.parcels.values()), 0) > CUTS:
            raise OverflowError(
                f"input partition {out.partition} of {self._host} is more than {CUTS} messages for one worker. "
                "Remedy: use smaller input partitions"
            )
        rows = b"" if keep is None else xxhash.xxh3_64_digest(keep.data)
        split = _meaning(rows, out.own)
        out.own = [dataclasses.replace(shard, split=split) for shard in out.own]
        for parcels in out.parcels.values():
            split = _meaning(rows, parcels)
            for parcel in parcels:
                parcel.split = split
        return nbytes


def _meaning(rows: bytes, shards: Iterable[Shard | Parcel]) -> int:
    """Stands for what the ids of an input mean for one worker, see `Shard.split`.

    Parameters
    ----------
    rows
        Stands for the rows of the input that were split.
    shards
        What was numbered. The rows of one output are in the order of the input, so their counts say which they are.
    """
    meaning = xxhash.xxh3_64(rows)
    for shard in shards:
        meaning.update(len(shard.parts).to_bytes(4, "little"))
        meaning.update(shard.parts.data)
        meaning.update(shard.lengths.data)
    return int(meaning.intdigest()) or 1
