"""The two ends of a UCX link: which records and frames go by which tag, and what is posted for them.

All of it runs in the UCX thread (see `ucx.transport`), so nothing here is locked.
"""

from __future__ import annotations

import dataclasses
import hmac
import os
import time
from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt.backends import ucx as backend
from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.receiver import ReceiverLink
from dask_gpurt.shuffle.transport.link.records import HEADER_BYTES, LinkRecord, RecordKind
from dask_gpurt.shuffle.transport.link.sender import SenderLink
from dask_gpurt.shuffle.transport.link_ends import InboundEnd, InboundOwner, LinkEnd, OutboundEnd, OutboundOwner

if TYPE_CHECKING:
    import collections
    from collections.abc import Callable

    from dask_gpurt.memory.pages import Pages
    from dask_gpurt.shuffle.transport.base import Header, Peer, Services
    from dask_gpurt.shuffle.transport.ioloop import IoLoop
    from dask_gpurt.shuffle.transport.link.records import RunKey

#: a record and what follows it in the same UCX message: the body of a control record, or the table of a message
CONTROL_BYTES = HEADER_BYTES + max(records.MAX_CONTROL, records.table_bytes(records.MAX_FRAMES))
_MAC_BYTES = 32
_KNOCK_BYTES = _MAC_BYTES + 4096


@dataclasses.dataclass(slots=True)
class Request:
    """A send or a receive that UCX has not completed."""

    #: ucxx's
    request: Any
    #: kept alive while UCX uses them
    buffers: Any
    #: called with its error, or None
    then: Callable[[Exception | None], None]


class UcxOwner(InboundOwner, OutboundOwner, Protocol):
    """The transport, as its links see it."""

    services: Services
    pool: Pages
    #: the loop of the UCX thread
    sending: IoLoop
    ucx: backend.UcxWorker
    requests: collections.deque[Request]
    #: (when, endpoint) of those that UCX closes in the background
    closing: collections.deque[tuple[float, Any]]

    def arrived(self, record: LinkRecord, body: memoryview) -> tuple[LinkRecord, memoryview]:
        """A record came from the wire."""


class _UcxEnd(LinkEnd):
    """What both ends of a link share."""

    owner: UcxOwner

    def __init__(self, owner: UcxOwner, run: RunKey, secret: bytes, sender: str, receiver: str) -> None:
        self.owner, self.run, self.secret = owner, run, secret
        self.tags = {
            what: records.tag_for(secret, run, sender, receiver, what)
            for what in ("knock", "control", "data", "answers")
        }
        self.proof = records.mac(secret, "knock", run, b"", b"", sender, receiver)
        self.endpoint: Any = None
        self.closed = False

    def shut(self) -> None:
        """Close the endpoint; a second call does nothing."""
        self.close()

    def post(self, request: Any, buffers: Any, then: Callable[[], None]) -> None:
        """Have `then` called when UCX has completed a request; its error ends the link."""

        def ended(error: Exception | None) -> None:
            if self.closed:
                return
            if error is None:
                then()
            else:
                self.lost(repr(error))

        self.owner.requests.append(Request(request, buffers, ended))

    def write(self, send: lk.Send, tag: int) -> None:
        """Send a record, and the frames of a message."""
        ucx = self.owner.ucx
        head = send.record.pack() + (records.table(send.buffers) if send.buffers else send.body)
        self.post(ucx.send(self.endpoint, head, tag), head, nothing)
        for buffer in send.buffers:
            if records.size_of(buffer):
                flat = buffer if records.is_device(buffer) else memoryview(buffer).cast("B")
                self.post(ucx.send(self.endpoint, flat, self.tags["data"]), (flat, send), nothing)

    def listen(self, tag: int, then: Callable[[LinkRecord, memoryview], None]) -> None:
        """Post the receive for the next record."""
        buffer = memoryview(bytearray(CONTROL_BYTES))

        def arrived() -> None:
            then(LinkRecord.unpack(buffer[:HEADER_BYTES]), buffer[HEADER_BYTES:])
            if not self.closed:
                self.listen(tag, then)

        def guarded() -> None:
            try:
                arrived()
            except WireError as e:
                self.violated(str(e))

        self.post(self.owner.ucx.receive(self.endpoint, buffer, tag), buffer, guarded)

    def close(self) -> None:
        """Close the endpoint."""
        self.closed = True
        if self.endpoint is not None:
            # Only what is alive: UCX has let go of the endpoint of a dead peer, and closing that again is a crash.
            if self.endpoint.alive:
                self.endpoint.close()
            # UCX closes in the background; the object must outlive that.
            self.owner.closing.append((time.monotonic(), self.endpoint))


def nothing() -> None:
    """Do nothing."""


class UcxOutbound(_UcxEnd, OutboundEnd):
    """A link from here."""

    owner: UcxOwner

    def __init__(self, owner: UcxOwner, peer: Peer, header: Header) -> None:
        here = owner.services.address
        _UcxEnd.__init__(self, owner, header.run, header.secret, here, peer.address)
        self.peer = peer
        self.machine = SenderLink(
            *(header.run, header.secret, here, peer.address, peer.limit),
            *(os.urandom(records.NONCE_BYTES), time.monotonic()),
        )
        self.endpoint = owner.ucx.endpoint(bytes(peer.endpoint))
        self.listen(self.tags["answers"], self.arrived)
        knock = self.proof + owner.ucx.address
        self.post(owner.ucx.send(self.endpoint, knock, self.tags["knock"]), knock, nothing)

    def arrived(self, record: LinkRecord, body: memoryview) -> None:
        """An answer came."""
        self.carry_out(self.machine.receive(record, bytes(body[: record.length]), time.monotonic()))

    def put(self, send: lk.Send) -> None:
        """Write a record, and the frames of a message."""
        self.write(send, self.tags["control"])


class UcxInbound(_UcxEnd, InboundEnd):
    """A link to here; expected since its sender has the card of this worker."""

    owner: UcxOwner

    def __init__(self, owner: UcxOwner, run: RunKey, secret: bytes, sender: str) -> None:
        services = owner.services
        _UcxEnd.__init__(self, owner, run, secret, sender, services.address)
        InboundEnd.__init__(self)
        self.loop = owner.sending
        self.expected = sender
        self.since = time.monotonic()
        self.machine = ReceiverLink(
            *(services.address, services.secret_of, self.arrive, os.urandom(records.NONCE_BYTES), self.since, run)
        )

    def knocked(self, nbytes: int) -> None:
        """Open the link: a message of `nbytes` waits on the knock tag."""
        ucx = self.owner.ucx
        buffer = memoryview(bytearray(max(nbytes, 1)))

        def opened() -> None:
            if nbytes > _KNOCK_BYTES or not hmac.compare_digest(bytes(buffer[:_MAC_BYTES]), self.proof):
                self.violated("a knock without the secret")
                return
            self.endpoint = ucx.endpoint(bytes(buffer[_MAC_BYTES:]))
            self.listen(self.tags["control"], self.arrived)
            self.machine.begin(time.monotonic())
            self.carry_out(self.machine.start())

        self.post(ucx.receive_waiting(buffer, self.tags["knock"]), buffer, opened)

    def arrived(self, record: LinkRecord, rest: memoryview) -> None:
        """A record came, with its body or the table of its message."""
        verdict, instructions = self.machine.admit(record)
        self.carry_out(instructions)
        if verdict is lk.Verdict.NO:
            return
        now = time.monotonic()
        if record.kind is not RecordKind.DATA:
            self.carry_out(self.machine.receive(record, bytes(rest[: record.length]), now))
            return
        self._receive_frames(record, rest, fresh=verdict is lk.Verdict.YES)

    def _receive_frames(self, record: LinkRecord, table: memoryview, fresh: bool) -> None:
        """Receive the frames of a message; the machine gets it when all are there.

        The table must be right, or frames and records are out of step: an error closes the link.
        """
        at = records.table_bytes(record.count)
        lengths = records.lengths_of(record, table[:at])
        body = self.owner.pool.take(record.length)
        body[:at] = table[:at]
        frames: list[Any] = []
        requests = []
        for n, device in lengths:
            frame = backend.device_buffer(n) if device else body[at : at + n]
            frames.append(frame)
            if n:
                requests.append((self.owner.ucx.receive(self.endpoint, frame, self.tags["data"]), frame))
            # The filling is not sent.
            body[at + n : at + records.padded(n)] = bytes(records.padded(n) - n)
            at += records.padded(n)
        left = len(requests)
        apart = frames if any(device for _, device in lengths) else None

        def one_more() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                got, whole = self.owner.arrived(record, body)
                self.carry_out(self.machine.receive(got, whole, time.monotonic(), frames=apart, fresh=fresh))

        for request, frame in requests:
            self.post(request, frame, one_more)
        if not requests:
            one_more()

    def put(self, send: lk.Send) -> None:
        """Write a record."""
        self.write(send, self.tags["answers"])
