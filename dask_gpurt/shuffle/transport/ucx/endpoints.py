"""The two ends of a UCX link: which records and frames go by which tag, and what is posted for them.

All of it runs in the UCX thread (see `ucx.transport`), so nothing here is locked.
"""

from __future__ import annotations

import collections
import dataclasses
import hmac
import os
import time
from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.receiver import ReceiverLink
from dask_gpurt.shuffle.transport.link.records import HEADER_BYTES, LinkRecord, RecordKind
from dask_gpurt.shuffle.transport.link.sender import SenderLink
from dask_gpurt.shuffle.transport.link_ends import InboundEnd, InboundOwner, LinkEnd, OutboundEnd, OutboundOwner

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from dask_gpurt.backends.ucx import UcxWorker
    from dask_gpurt.backends.ucx_device import DeviceSide
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
    ucx: UcxWorker
    #: None where there is no device
    device: DeviceSide | None
    requests: collections.deque[Request]
    #: (when, endpoint) of those that UCX closes in the background
    closing: collections.deque[tuple[float, Any]]

    def beside(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call that waits for the device, or allocates there, in another thread."""

    def enter_device(self) -> None:
        """Give the UCX thread the context of the device, once."""


class _UcxEnd(LinkEnd):
    """What both ends of a link share."""

    owner: UcxOwner

    def __init__(self, owner: UcxOwner, run: RunKey, secret: bytes, sender: str, receiver: str) -> None:
        self.owner, self.run = owner, run
        self.tags = {
            what: records.tag_for(secret, run, sender, receiver, what)
            for what in ("knock", "control", "data", "answers")
        }
        self.proof = records.mac(secret, "knock", run, b"", b"", sender, receiver)
        self.endpoint: Any = None
        self.closed = False

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

        self.post(self.owner.ucx.receive(self.endpoint, buffer, tag), buffer, lambda: self.guarded(arrived))

    def guarded(self, call: Callable[[], None]) -> None:
        """Run what a record from the wire sets off: what it raises ends the link, which else would wait for ever."""
        try:
            call()
        except WireError as e:
            self.violated(str(e))
        except Exception as e:
            self.lost(repr(e))

    def shut(self) -> None:
        """Close the endpoint; a second call does nothing."""
        if self.closed:
            return
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
        #: records that came while memory for a message before them is allocated, with what followed them
        self._behind: collections.deque[tuple[LinkRecord, memoryview]] | None = None

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
        if self._behind is not None:
            self._behind.append((record, rest))
            return
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
        if any(device for _, device in lengths):
            self._allocate(record, table, lengths, fresh)
            return
        body = self.owner.pool.take(record.length)
        body[:at] = table[:at]
        frames = []
        for n, _ in lengths:
            frames.append(body[at : at + n])
            # The filling is not sent.
            body[at + n : at + records.padded(n)] = bytes(records.padded(n) - n)
            at += records.padded(n)
        self._expect(frames, lambda: self._whole(record, body, None, fresh))

    def _expect(self, frames: list[Any], then: Callable[[], None]) -> None:
        """Post the receives of a message's frames; `then` when all are there."""
        some = [f for f in frames if records.size_of(f)]
        requests = [(self.owner.ucx.receive(self.endpoint, f, self.tags["data"]), f) for f in some]
        left = len(requests)

        def one_more() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                then()

        for request, frame in requests:
            self.post(request, frame, one_more)
        if not requests:
            one_more()

    def _whole(
        self, record: LinkRecord, body: memoryview, apart: list[Any] | None, fresh: bool, problem: str = ""
    ) -> None:
        """A message is here; with a `problem` it is refused, and its sender takes the safe way."""
        instructions = self.machine.receive(record, body, time.monotonic(), frames=apart, fresh=fresh)
        if problem:
            self.refuse(instructions, problem)
        else:
            self.carry_out(instructions)

    def _allocate(self, record: LinkRecord, table: memoryview, lengths: list[tuple[int, bool]], fresh: bool) -> None:
        """Receive a message of device frames, in memory that another thread allocates.

        That may wait for the device, spill and fail, none of which the UCX thread may: peers would take it for dead.
        Frames match receives by their order alone. So records behind it wait, and where there is no device memory the
        frames are received all the same, into host memory, and the message is refused.
        """
        owner = self.owner
        self._behind = collections.deque()

        def allocate() -> tuple[list[Any], str]:
            problem = "no device here"
            if owner.device is not None:
                try:
                    return [owner.device.allocate(n) if device and n else None for n, device in lengths], ""
                except MemoryError as e:
                    problem = f"no device memory for {record.length} bytes: {e}"
            return [None] * len(lengths), problem

        def allocated(future: Future[tuple[list[Any], str]]) -> None:
            owner.sending.call(lambda: None if self.closed else self.guarded(lambda: post(*future.result())))

        def post(room: list[Any], problem: str) -> None:
            if not problem:
                owner.enter_device()
            frames = [owner.pool.take(n) if r is None else r for r, (n, _) in zip(room, lengths, strict=True)]
            self._expect(frames, lambda: self._keep(record, table, frames, fresh, problem))
            behind, self._behind = self._behind, None
            while behind:
                if self._behind is not None:
                    self._behind.extend(behind)
                    break
                self.arrived(*behind.popleft())

        owner.beside(allocate).add_done_callback(allocated)

    def _keep(self, record: LinkRecord, table: memoryview, frames: list[Any], fresh: bool, problem: str) -> None:
        """Pass a message on that came on the device, out of the memory that it was received into."""
        owner, device = self.owner, self.owner.device
        if problem or device is None:
            self._whole(record, table[:0], frames, fresh, problem)
            return

        def keep() -> tuple[list[Any], str]:
            try:
                return device.keep(frames), ""
            except MemoryError as e:
                return frames, f"no device memory to keep {record.length} bytes in: {e}"

        def kept(future: Future[tuple[list[Any], str]]) -> None:
            def pass_on() -> None:
                apart, why = future.result()
                self._whole(record, table[:0], apart, fresh, why)

            owner.sending.call(lambda: None if self.closed else self.guarded(pass_on))

        owner.beside(keep).add_done_callback(kept)

    def put(self, send: lk.Send) -> None:
        """Write a record."""
        self.write(send, self.tags["answers"])
