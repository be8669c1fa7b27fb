"""Send rows again, to a worker that did not have them.

`Resender.send` copies, cuts and encodes the rows of one shard for their new owner. `Resender.route` finds the new
owners of what the log of sends gave back, `Resender.send_all` sends it.

Theory of operation. Rows go by input and attempt, under the epoch in which they got their new destination
(`recovery.shard_id`). The ids of one input, attempt and epoch for one worker are numbered; who sends keeps count. Two
workers that split an input in one attempt would number its rows in different ways; `Shard.split` tells them apart.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from dask_gpurt.shuffle.protocol.recovery import CUTS, shard_id
from dask_gpurt.shuffle.rows.partition import Shard, by_owner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dask_gpurt.shuffle.rows.kinds import RowKind
    from dask_gpurt.shuffle.rows.wire import Parcel
    from dask_gpurt.shuffle.worker.host import RunHost
    from dask_gpurt.shuffle.worker.owners import Owners
    from dask_gpurt.shuffle.worker.send_log import SendLog
    from dask_gpurt.shuffle.worker.sender import Sender


class Routed(NamedTuple):
    """Rows of an input that have a new destination."""

    partition: int
    attempt: int
    address: str
    shard: Shard


class Resender:
    """Sends rows of one run again. All on the event loop, but for the encoding."""

    def __init__(self, host: RunHost, *, owners: Owners, log: SendLog[Shard], sender: Sender, rows: RowKind) -> None:
        self._host, self._owners, self._log, self._sender = host, owners, log, sender
        self._rows = rows
        #: what stands for this worker's way to number rows
        self._split = xxhash.xxh3_64_intdigest(host.local_address.encode()) or 1

    def route(self, again: Iterable[tuple[int, int, Shard]]) -> list[Routed]:
        """Shards of lost workers or void outputs, (input, attempt, shard), by the owners of their outputs; views.

        An output that was not opened still belongs to the lost worker. Its rows are not sent but stay retained.
        """
        out: list[Routed] = []
        for partition, attempt, shard in again:
            for address, piece in by_owner(shard, self._owners.worker_for.__getitem__):
                if address not in self._log.lost:
                    out.append(Routed(partition, attempt, address, piece))
                self._log.rerouted(partition, address, piece, own=address == self._host.local_address)
        return out

    async def send_all(self, epoch: int, routed: list[Routed]) -> None:
        """Send what `route` gave. An error ends the run: without these rows the outputs of new owners are wrong."""
        counts: dict[tuple[int, str], int] = {}
        try:
            for partition, attempt, address, shard in routed:
                if address in self._log.lost:
                    continue  # lost since; sent again by the amendment that said so
                number = counts.get((partition, address), 0)
                first_id = shard_id(partition, attempt, epoch)
                counts[partition, address] = await self.send(shard, address, first_id, number, CUTS, self._split)
        except Exception as e:
            self._host.fail(e)

    async def send(self, shard: Shard, address: str, first_id: int, number: int, limit: int, split: int = 0) -> int:
        """Stage the rows of a shard for a worker, which may be this one; returns the next free number.

        Parameters
        ----------
        first_id
            `recovery.shard_id` of the input, attempt and epoch.
        number
            The next free number of this input for this worker.
        limit
            Numbers are below this one.
        split
            See `Shard.split`; 0: no other worker has these numbers.

        Raises
        ------
        OverflowError
            There are not enough numbers.
        """
        shard = dataclasses.replace(shard, split=split)
        own: list[Shard] = []
        parcels: list[Parcel] = []
        if address == self._host.local_address:
            own = [await self._host.offload(self._rows.copied, shard, first_id + number)]
        else:
            parcels = await self._host.offload(self.encoded, shard, first_id + number)
        end = number + len(own) + len(parcels)
        if end > limit:
            raise OverflowError(
                f"an input of {self._host} has {end} messages for {address}, must have at most {limit}. Remedy: use "
                "smaller input partitions"
            )
        await self._sender.stage({address: parcels}, own)
        return end

    def encoded(self, shard: Shard, first_id: int) -> list[Parcel]:
        """A shard in memory of its own, cut and encoded, with ids from `first_id` on; any thread."""
        parcels = self._rows.encoder()(self._rows.copied(shard, first_id))
        for parcel in parcels:
            parcel.split = shard.split
        return parcels
