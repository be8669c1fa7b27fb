"""What a run has for other workers: staged, put into messages, sent until it is acknowledged.

Theory of operation. Parcels for the same outputs of one peer (a group of neighbours) wait for each other until they are
worth a message, charged to the budget for unsent bytes; then distributed's send buffer takes them over, which sends
several at a time. A message goes by the worker's `transport.Plane`; one that the peer refused (a wrong checksum, a
schema that it does not know) is sent again with its schemas. What a worker has for itself goes straight to its store.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import WireError
from dask_gpurt.model.slots import NETWORK, waiting
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.rows import wire
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.worker.amendment import AmendedRun, Outgoing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dask_gpurt.shuffle.rows.partition import Shard
    from dask_gpurt.shuffle.rows.wire import Parcel
    from dask_gpurt.shuffle.transport.plane import Plane

#: small parcels for the same outputs of one peer wait for each other until they are this many bytes, or all inputs are
#: split
STAGE_BYTES = 1 << 21
#: groups of outputs in which parcels for all peers wait, about
STAGED_GROUPS = 16
#: times a message is sent again after the peer refused it (checksum, schema not known there)
RESENDS = 3


class Message:
    """The frames of one message, to be sent as they are: not pickled, not compressed, not split."""

    def __init__(self, frames: Sequence[Any], sender: str = "") -> None:
        self.frames = list(frames)
        #: address of the worker that made it
        self.sender = sender
        self.nbytes = sum(memoryview(f).nbytes for f in self.frames)


@seam.dask_serialize.register(Message)  # type: ignore[untyped-decorator]
def _message_to_frames(message: Message) -> tuple[dict[str, Any], list[Any]]:
    return {"sender": message.sender}, message.frames


@seam.dask_deserialize.register(Message)  # type: ignore[untyped-decorator]
def _message_from_frames(header: dict[str, Any], frames: list[Any]) -> Message:
    return Message(frames, str(header.get("sender", "")))


def _as_is(message: Message) -> Any:
    """The message in the form that distributed's comm sends without compressing or splitting its frames."""
    return seam.Serialized(*seam.serialize(message, serializers=("dask",), on_error="raise"))


class Batch:
    """Parcels for one peer that wait together in distributed's send buffer."""

    def __init__(self) -> None:
        self.parcels: list[Parcel] = []
        self.nbytes = 0

    def append(self, parcel: Parcel) -> None:
        self.parcels.append(parcel)
        self.nbytes += sys.getsizeof(parcel)

    def __sizeof__(self) -> int:  # what the send buffer charges its limiter with
        return self.nbytes


def _groups(parcels: list[Parcel], limit_bytes: int) -> Iterator[list[Parcel]]:
    """Parcels that travel together: at most `limit_bytes`, or one that is more than that."""
    group: list[Parcel] = []
    nbytes = 0
    for parcel in parcels:
        size = sys.getsizeof(parcel)
        if group and nbytes + size > limit_bytes:
            yield group
            group, nbytes = [], 0
        group.append(parcel)
        nbytes += size
    if group:
        yield group


class Rate:
    """Bytes per second of the fastest large message so far; 0: there was none.

    Not the bytes of all messages by the time in which any was under way: that counts what else the workers were busy
    with, and was a tenth of what moving an output then took.
    """

    #: of a message, to count
    LEAST_BYTES = 1 << 18

    def __init__(self) -> None:
        self.best = 0.0

    def sent(self, nbytes: int, seconds: float) -> None:
        if nbytes >= self.LEAST_BYTES and seconds > 0:
            self.best = max(self.best, nbytes / seconds)


class SendingRun(AmendedRun):
    """The part of a run that sends.

    Parameters
    ----------
    plane
        How messages travel to other workers.
    """

    def __init__(self, *, plane: Plane, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._plane = plane
        self._tag = wire.run_tag(self.id)
        self._run_key = records.RunKey(self._tag, self.run_id)
        self._cut_bytes = plane.settings.cut_bytes
        #: peer -> keys of the schemas it acknowledged
        self._known: dict[str, set[int]] = {}
        #: (peer, group of its outputs) -> parcels that wait for more
        self._staged: dict[tuple[str, int], Batch] = {}
        #: groups of one peer's outputs. What a message brings stays until the last of its outputs is taken, so rows for
        #: outputs that are made at about the same time travel together
        self._n_groups = self._layout.groups(STAGED_GROUPS)
        self._sequence = 0
        self._rate = Rate()

    async def _keep(self, shards: list[Shard], nbytes: int) -> None:
        """Store what this worker has for itself."""
        raise NotImplementedError

    async def _write_to_comm(self, data: dict[str, Any]) -> None:
        self.raise_if_closed()
        assert isinstance(data, Outgoing)
        if await self._may_send(data):
            await self._stage(data)
            self._check_sent(data)

    async def _stage(self, data: Outgoing) -> None:
        self.raise_if_closed()
        own = data.pop(self.local_address, None)
        limiter = self._comm_buffer.memory_limiter
        for address, parcels in data.items():
            for parcel in parcels:
                place = address, self._layout.group(address, int(parcel.parts[0]), self._n_groups)
                batch = self._staged.setdefault(place, Batch())
                batch.append(parcel)
                limiter.increase(sys.getsizeof(parcel))
                if batch.nbytes >= STAGE_BYTES:
                    await self._unstage(list(self._staged) if limiter.full else [place])
        if limiter.full:
            # Nobody but us can make room by sending what is staged.
            await self._unstage(list(self._staged))
        if own is not None:
            chunk_bytes = sum(shard.nbytes for shard in own)
            self._counters.add(bytes_self=chunk_bytes)
            await self._keep(own, chunk_bytes)

    async def _flush_comm(self) -> None:
        self.raise_if_closed()
        await self._unstage(list(self._staged))
        await super()._flush_comm()

    async def _unstage(self, places: list[tuple[str, int]]) -> None:
        """Hand what is staged there to the send buffer; what it is charged moves along."""
        full = [(place[0], batch) for place in places if (batch := self._staged.pop(place, None)) is not None]
        # All of it first: what is staged can not be sent, so nobody may wait for room that only it would give.
        await self._comm_buffer.memory_limiter.decrease(sum(batch.nbytes for _, batch in full))
        for address, batch in full:
            with waiting(NETWORK):  # until the budget for unsent bytes has room
                await super()._write_to_comm({address: batch})

    async def _send(self, address: str, shards: Any) -> Any:
        self.raise_if_closed()
        if address in self._ledger.lost:
            raise seam.ShuffleClosedError(f"{address} is lost, {self} goes on without it")
        return await self.rpc(address).shuffle_receive(data=shards, shuffle_id=self.id, run_id=self.run_id)

    async def send(self, address: str, shards: list[Batch]) -> Any:
        return await self._unless_lost(address, self._send_all(address, shards))

    async def _send_all(self, address: str, shards: list[Batch]) -> Any:
        response: Any = {"status": "OK"}
        # A batch that is long enough is a message; only the rest of them share one. Either way what was staged or
        # buffered together may be more than the peer takes in one message.
        long = [batch.parcels for batch in shards if batch.nbytes >= STAGE_BYTES // 2]
        rest = [parcel for batch in shards if batch.nbytes < STAGE_BYTES // 2 for parcel in batch.parcels]
        for parcels in (group for some in (*long, rest) for group in _groups(some, self._cut_bytes)):
            response = await self._send_message(address, parcels)
            if response["status"] != "OK":
                return response
        for batch in shards:
            # The buffer's ten tasks keep what they sent last until they have something else to send.
            batch.parcels.clear()
        return response

    async def _send_message(self, address: str, parcels: list[Parcel]) -> Any:
        known = self._known.setdefault(address, set())
        start = time.perf_counter()
        for _ in range(1 + RESENDS):
            self._sequence += 1
            frames = wire.pack(self._tag, self.run_id, self._sequence, parcels, known)
            message = Message(frames, self.local_address)
            began = time.perf_counter()
            response = await self._plane.send(
                *(self, self._run_key, address, message.frames),
                functools.partial(self._retrying, address, message),
            )
            self._rate.sent(message.nbytes, time.perf_counter() - began)
            refused = response.get("gpurt-refused")
            self._counters.add(messages_sent=1, bytes_sent=message.nbytes)
            if refused is None:
                break
            known.clear()
        else:
            raise WireError(
                f"{address} refused a message of {self} {RESENDS + 1} times: {refused}. Remedy: check that all workers "
                "run the same dask-gpurt, and the network for corruption"
            )
        if response["status"] == "OK":
            known.update(p.schema_key for p in parcels if p.schema)
            self._counters.add(shards_sent=len(parcels))
        self._counters.add(seconds_send=time.perf_counter() - start)
        return response

    async def ask(self, address: str, question: dict[str, Any]) -> Any:
        """Ask a peer's run something by distributed's comms; see `transport.Plane.answer`."""
        return await self._retrying(address, question)

    async def _retrying(self, address: str, data: Message | dict[str, Any]) -> Any:
        return await seam.retry(
            functools.partial(self._send, address, _as_is(data) if isinstance(data, Message) else data),
            count=self.RETRY_COUNT,
            delay_min=self.RETRY_DELAY_MIN,
            delay_max=self.RETRY_DELAY_MAX,
            operation=f"P2P send to {address}",
        )
