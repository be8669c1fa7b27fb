"""Send what a run has for other workers: staged, put into messages, sent until it is acknowledged.

Theory of operation. Parcels for the same outputs of one peer (a group of neighbours) wait until they are worth a
message, charged to the budget for unsent bytes. Then distributed's send buffer takes them over, which sends several at
a time and calls `Sender.send`. A message goes by the worker's `transport.plane.Plane`. Parcels on the device stay
there, if the way to the peer is one for device memory when they are sent; else they are staged. One that the peer
refuses (a
wrong checksum, an unknown schema) is sent again with its schemas. What a worker has for itself goes straight to its
receiver.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
import time
from typing import TYPE_CHECKING

from dask_gpurt.errors import WireError
from dask_gpurt.model.slots import NETWORK, waiting
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.rows import wire
from dask_gpurt.shuffle.worker.message import Batch, Message, groups

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.rows.partition import Shard
    from dask_gpurt.shuffle.rows.wire import Parcel
    from dask_gpurt.shuffle.transport.link.records import RunKey
    from dask_gpurt.shuffle.transport.plane import Plane
    from dask_gpurt.shuffle.worker.host import RunHost
    from dask_gpurt.shuffle.worker.owners import Owners
    from dask_gpurt.shuffle.worker.peer_calls import Answer, PeerCalls

#: bytes of parcels for the same outputs of one peer that are worth a message
STAGE_BYTES = 1 << 21
#: groups of outputs in which parcels for all peers wait, about
STAGED_GROUPS = 16
#: buffers of a message from which on a thread packs it: each takes microseconds, 2 MiB of small inputs can have 50,000
PACKED_BUFFERS = 2048
#: times a message is sent again after the peer refused it
RESENDS = 3
#: bytes of a message that shows how fast messages are
RATED_BYTES = 1 << 18


class Sender:
    """Sends the parcels of one run. All on the event loop, but for the packing of messages of many buffers.

    Parameters
    ----------
    plane
        How messages travel; its budget for unsent bytes is what staged parcels are charged to.
    write
        Hands batches by address to distributed's send buffer; waits while the budget for unsent bytes is used up.
    keep
        Stores the shards (of so many bytes) that this worker has for itself.
    """

    def __init__(
        self,
        host: RunHost,
        *,
        key: RunKey,
        plane: Plane,
        owners: Owners,
        peers: PeerCalls,
        write: Callable[[dict[str, Batch]], Awaitable[None]],
        keep: Callable[[list[Shard], int], Awaitable[None]],
        counters: ShuffleCounters,
    ) -> None:
        self._host, self._key, self._plane = host, key, plane
        self._owners, self._peers = owners, peers
        self._write, self._keep = write, keep
        self._counters = counters
        self._limiter = plane.unsent
        self._cut_bytes = plane.settings.cut_bytes
        #: peer -> keys of the schemas it acknowledged
        self._known: dict[str, set[int]] = {}
        #: (peer, group of its outputs) -> parcels that wait for more
        self._staged: dict[tuple[str, int], Batch] = {}
        #: groups of one peer's outputs. What a message brings stays until the last of its outputs is taken, so rows for
        #: outputs that are made at about the same time travel together
        self._n_groups = owners.layout.groups(STAGED_GROUPS)
        #: calls that hand over what they have taken from `_staged`; set while there is none
        self._handing = 0
        self._handed = asyncio.Event()
        self._handed.set()
        #: the run closes
        self._over = False
        self._sequence = itertools.count(1)
        #: bytes per second of the fastest large message so far; 0: there was none. Not the bytes of all messages by the
        #: time in which any was under way: that counts what else the workers were busy with, and was a tenth of what
        #: moving an output then took
        self.fastest = 0.0

    async def stage(self, parcels: Mapping[str, Sequence[Parcel]], own: list[Shard]) -> None:
        """Have parcels sent, by address, and store what this worker has for itself."""
        self._raise_if_over()
        limiter, staged, layout = self._limiter, self._staged, self._owners.layout
        for address, some in parcels.items():
            for parcel in some:
                place = address, layout.group(address, int(parcel.parts[0]), self._n_groups)
                batch = staged.setdefault(place, Batch())
                batch.append(parcel)
                limiter.increase(sys.getsizeof(parcel))
                if batch.nbytes >= STAGE_BYTES:
                    await self._unstage(list(staged) if limiter.full else [place])
                    self._raise_if_over()
                    layout = self._owners.layout
        if limiter.full:
            # Only sending what is staged makes room.
            await self._unstage(list(staged))
        if own:
            nbytes = sum(shard.nbytes for shard in own)
            self._counters.add(bytes_self=nbytes)
            await self._keep(own, nbytes)

    def _raise_if_over(self) -> None:
        """What is staged after `drop` would be charged to the worker's budget for good."""
        self._host.raise_if_closed()
        if self._over:
            raise seam.ShuffleClosedError(f"{self._host} closes")

    async def flush(self) -> None:
        """Hand all that is staged to the send buffer."""
        await self._unstage(list(self._staged))
        # The buffer is closed next. Another flush, which a loss has overtaken, or a task may wait for room with rows
        # that it has taken: the closed buffer would refuse them, and no later flush would find them.
        # Woken late, it looks again: the flush of a new epoch may have begun in the same turn.
        while self._handing:
            await self._handed.wait()

    async def drop(self) -> None:
        """Forget what is staged: the run closes."""
        self._over = True
        nbytes = sum(batch.nbytes for batch in self._staged.values())
        self._staged.clear()
        await self._limiter.decrease(nbytes)

    async def _unstage(self, places: list[tuple[str, int]]) -> None:
        """Hand what is staged there to the send buffer; what it is charged moves along."""
        full = [(place, batch) for place in places if (batch := self._staged.pop(place, None)) is not None]
        full.reverse()
        self._handing += 1
        self._handed.clear()
        try:
            # All of it first: what is staged cannot be sent, so nothing may wait for room that only it would give.
            await self._limiter.decrease(sum(batch.nbytes for _, batch in full))
            while full:
                place, batch = full[-1]
                with waiting(NETWORK):  # until the budget for unsent bytes has room
                    await self._write({place[0]: batch})
                full.pop()
        except BaseException:
            # Refused, or cancelled. A flush that is tried again must not pass without these rows. What the buffer has
            # taken already is sent twice then, and counts once: receivers drop a second copy by its id.
            self._stage_again(full)
            raise
        finally:
            self._handing -= 1
            if not self._handing:
                self._handed.set()

    def _stage_again(self, full: list[tuple[tuple[str, int], Batch]]) -> None:
        if self._over:
            return  # nothing takes them, nor their charge, out again
        for place, batch in full:
            for parcel in batch.parcels:  # none are left, and none are to be charged, where the buffer has sent it
                self._staged.setdefault(place, Batch()).append(parcel)
                self._limiter.increase(sys.getsizeof(parcel))

    async def send(self, address: str, batches: list[Batch]) -> Answer:
        """Send batches to a peer; the send buffer calls it. Done when the peer has stored them, or is lost."""
        return await self._peers.unless_lost(address, self._send_all(address, batches))

    async def _send_all(self, address: str, batches: list[Batch]) -> Answer:
        response: Answer = {"status": "OK"}
        # A batch that is long enough is a message; only the rest of them share one. Either way what was staged or
        # buffered together may be more than the peer takes in one message.
        long = [batch.parcels for batch in batches if batch.nbytes >= STAGE_BYTES // 2]
        rest = [parcel for batch in batches if batch.nbytes < STAGE_BYTES // 2 for parcel in batch.parcels]
        for parcels in (group for some in (*long, rest) for group in groups(some, self._cut_bytes)):
            response = await self._send_message(address, parcels)
            if response["status"] != "OK":
                return response
        for batch in batches:
            # The buffer's ten tasks keep what they sent last until they have something else to send.
            batch.parcels.clear()
        return response

    async def _send_message(self, address: str, parcels: list[Parcel]) -> Answer:
        known = self._known.setdefault(address, set())
        start = time.perf_counter()
        for _ in range(1 + RESENDS):
            direct = self._plane.takes_device(self._key, address)
            if not all(wire.ready(p, direct) for p in parcels):
                parcels = await self._on_host(parcels)
            if sum(len(p.buffers) for p in parcels) < PACKED_BUFFERS:
                message = self._message(parcels, known)
            else:
                # A copy: other messages change it while the thread reads it.
                message = await self._host.offload(self._message, parcels, frozenset(known))
            began = time.perf_counter()
            response: Answer = await self._plane.send(
                *(self._peers.call, self._key, address, message.frames),
                functools.partial(self._by_comms, address, message, parcels, known),
            )
            seconds = time.perf_counter() - began
            if message.nbytes >= RATED_BYTES and seconds > 0:
                self.fastest = max(self.fastest, message.nbytes / seconds)
            refused = response.get("gpurt-refused")
            self._counters.add(messages_sent=1, bytes_sent=message.nbytes)
            if refused is None:
                break
            known.clear()
        else:
            raise WireError(
                f"{address} refused a message of {self._host} {RESENDS + 1} times: {refused}. Remedy: check that all "
                "workers run the same dask-gpurt, and the network for corruption"
            )
        if response["status"] == "OK":
            known.update(p.schema_key for p in parcels if p.schema)
            self._counters.add(shards_sent=len(parcels))
        self._counters.add(seconds_send=time.perf_counter() - start)
        return response

    def _message(self, parcels: Sequence[Parcel], known: set[int] | frozenset[int]) -> Message:
        """Any thread."""
        frames = wire.pack(self._key.tag, self._key.run_id, next(self._sequence), parcels, known)
        return Message(frames, self._host.local_address)

    async def _on_host(self, parcels: list[Parcel]) -> list[Parcel]:
        return await self._host.offload(lambda: [wire.on_host(p) for p in parcels])

    async def _by_comms(self, address: str, message: Message, parcels: list[Parcel], known: set[int]) -> Answer:
        """Send a message by distributed's comms, which know no memory but the host's."""
        if any(p.packs for p in parcels):
            message = self._message(await self._on_host(parcels), known)
        return await self._peers.call(address, message)

    async def direct(self, addresses: Collection[str]) -> set[str]:
        """Of some workers, those that take rows in device memory; asks them, the first time."""
        others = [a for a in addresses if a != self._host.local_address]
        peers, plane, key = self._peers, self._plane, self._key
        await asyncio.gather(*(peers.unless_lost(a, plane.meet(peers.call, key, a)) for a in others))
        return {a for a in others if plane.takes_device(key, a)}
