"""ucx: tag-matched messages over shared memory, RDMA or NVLink, host and device buffers alike.

Theory of operation. One thread owns a UCX context (`backends.ucx`), progresses it, sleeps in epoll when there is
nothing to do, and runs the machines of the links. No listener: a worker's UCX address is on its card, which travels
over distributed's comms. A link uses four tags, which only those who know the run's secret can compute, so a message
of a stranger matches no receive::

    knock     sender -> receiver, once: MAC and the sender's UCX address, so that the receiver can answer
    control   sender -> receiver: records, and the table of a message
    data      sender -> receiver: the frames of messages, in order
    answers   receiver -> sender: records

Frames are received into pooled memory after their lengths were compared with what was granted, never into memory of a
user's. UCX keeps the order of messages of one tag between two workers; that is what pairs frames with their records.

A receive that waits for a peer's *answer* belongs to the worker, not to the endpoint, so UCX does not fail it when the
peer dies: endpoints are asked on every tick whether they are alive (keepalive 1 s).
"""

from __future__ import annotations

import collections
import dataclasses
import hmac
import logging
import os
import select
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends import ucx as backend
from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport import link as lk
from dask_gpurt.shuffle.transport import records
from dask_gpurt.shuffle.transport.base import Receipt, TransportUnavailable
from dask_gpurt.shuffle.transport.ends import InboundEnd, OutboundEnd
from dask_gpurt.shuffle.transport.ioloop import IoLoop
from dask_gpurt.shuffle.transport.link_receiver import ReceiverLink
from dask_gpurt.shuffle.transport.link_sender import SenderLink
from dask_gpurt.shuffle.transport.records import HEADER_BYTES, Kind, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.model.pages import Pages
    from dask_gpurt.shuffle.transport.base import Header, Peer, Services
    from dask_gpurt.shuffle.transport.records import RunKey

logger = logging.getLogger("distributed.worker.gpurt")

#: a record and what follows it in the same UCX message: the body of a control record, or the table of a message
CONTROL_BYTES = HEADER_BYTES + max(records.MAX_CONTROL, records.table_bytes(records.MAX_FRAMES))
_MAC_BYTES = 32
_KNOCK_BYTES = _MAC_BYTES + 4096
#: an expected sender that has not knocked by then is forgotten
KNOCK_SECONDS = 30.0


@dataclasses.dataclass(slots=True)
class _Request:
    request: Any
    #: kept alive while UCX uses them
    buffers: Any
    then: Callable[[Exception | None], None]


class _Base:
    """What both ends of a link share; in the UCX thread."""

    def __init__(self, owner: UcxTransport, run: RunKey, secret: bytes, sender: str, receiver: str) -> None:
        self.owner, self.run, self.secret = owner, run, secret
        self.tags = {
            what: records.tag_for(secret, run, sender, receiver, what)
            for what in ("knock", "control", "data", "answers")
        }
        self.proof = records.mac(secret, "knock", run, b"", b"", sender, receiver)
        self.endpoint: Any = None
        self.closed = False

    def post(self, request: Any, buffers: Any, then: Callable[[], None]) -> None:
        def ended(error: Exception | None) -> None:
            if self.closed:
                return
            if error is None:
                then()
            else:
                self.lost(repr(error))

        self.owner.requests.append(_Request(request, buffers, ended))

    def write(self, send: lk.Send, tag: int) -> None:
        ucx = self.owner.ucx
        head = send.record.pack() + (records.table(send.buffers) if send.buffers else send.body)
        self.post(ucx.send(self.endpoint, head, tag), head, _nothing)
        for buffer in send.buffers:
            if records.size_of(buffer):
                flat = buffer if records.is_device(buffer) else memoryview(buffer).cast("B")
                self.post(ucx.send(self.endpoint, flat, self.tags["data"]), (flat, send), _nothing)

    def listen(self, tag: int, then: Callable[[Record, memoryview], None]) -> None:
        """Post the receive for the next record."""
        buffer = memoryview(bytearray(CONTROL_BYTES))

        def arrived() -> None:
            then(Record.unpack(buffer[:HEADER_BYTES]), buffer[HEADER_BYTES:])
            if not self.closed:
                self.listen(tag, then)

        def guarded() -> None:
            try:
                arrived()
            except WireError as e:
                self.violated(str(e))

        self.post(self.owner.ucx.receive(self.endpoint, buffer, tag), buffer, guarded)

    def lost(self, reason: str) -> None:
        raise NotImplementedError

    def violated(self, reason: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True
        if self.endpoint is not None:
            # Only what is alive: UCX has let go of the endpoint of a dead peer, and closing that again is a crash.
            if self.endpoint.alive:
                self.endpoint.close()
            # UCX closes in the background; the object must outlive that.
            self.owner.closing.append((time.monotonic(), self.endpoint))


def _nothing() -> None:
    pass


class _Outbound(OutboundEnd, _Base):
    """A link from here."""

    owner: UcxTransport

    def __init__(self, owner: UcxTransport, peer: Peer, header: Header) -> None:
        ours = owner.services.address
        super().__init__(owner, header.run, header.secret, ours, peer.address)
        self.peer = peer
        self.machine = SenderLink(
            *(header.run, header.secret, ours, peer.address, peer.limit),
            *(os.urandom(records.NONCE_BYTES), time.monotonic()),
        )
        self.endpoint = owner.ucx.endpoint(bytes(peer.endpoint))
        self.listen(self.tags["answers"], self.arrived)
        knock = self.proof + owner.ucx.address
        self.post(owner.ucx.send(self.endpoint, knock, self.tags["knock"]), knock, _nothing)

    def arrived(self, record: Record, body: memoryview) -> None:
        self.carry_out(self.machine.receive(record, bytes(body[: record.length]), time.monotonic()))

    def violated(self, reason: str) -> None:
        self.lost(reason)

    def put(self, send: lk.Send) -> None:
        self.write(send, self.tags["control"])

    def shut(self) -> None:
        self.close()


class _Inbound(InboundEnd, _Base):
    """A link to here; expected since its sender has our card."""

    owner: UcxTransport

    def __init__(self, owner: UcxTransport, run: RunKey, secret: bytes, sender: str) -> None:
        services = owner.services
        super().__init__(owner, run, secret, sender, services.address)
        self.loop = owner.loop
        self.expected = sender
        self.since = time.monotonic()
        self.machine = ReceiverLink(
            *(services.address, services.secret_of, self.arrive, os.urandom(records.NONCE_BYTES), self.since, run)
        )

    def knocked(self, nbytes: int) -> None:
        """A message waits on the knock tag."""
        ucx = self.owner.ucx
        buffer = memoryview(bytearray(max(nbytes, 1)))

        def opened() -> None:
            if nbytes > _KNOCK_BYTES or not hmac.compare_digest(bytes(buffer[:_MAC_BYTES]), self.proof):
                self.violated("a knock without the secret")
                return
            self.endpoint = ucx.endpoint(bytes(buffer[_MAC_BYTES:]))
            self.listen(self.tags["control"], self.arrived)
            self.machine._since = time.monotonic()
            self.carry_out(self.machine.start())

        self.post(ucx.receive_waiting(buffer, self.tags["knock"]), buffer, opened)

    def arrived(self, record: Record, rest: memoryview) -> None:
        verdict, instructions = self.machine.admit(record)
        self.carry_out(instructions)
        if verdict is lk.Verdict.NO:
            return
        now = time.monotonic()
        if record.kind is not Kind.DATA:
            self.carry_out(self.machine.receive(record, bytes(rest[: record.length]), now))
            return
        # From here on the table must be right, or frames and records are out of step: an error closes the link.
        lengths = records.lengths_of(record, rest[: records.table_bytes(record.count)])
        body = self.owner.pool.take(record.length)
        at = records.table_bytes(record.count)
        body[:at] = rest[:at]
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
        any_device = any(device for _, device in lengths)

        def one_more() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                got, whole = self.owner.arrived(record, body)
                self.carry_out(
                    self.machine.receive(
                        *(got, whole, time.monotonic()),
                        frames=frames if any_device else None,
                        fresh=verdict is lk.Verdict.YES,
                    )
                )

        for request, frame in requests:
            self.post(request, frame, one_more)
        if not requests:
            one_more()

    def put(self, send: lk.Send) -> None:
        self.write(send, self.tags["answers"])

    def shut(self) -> None:
        self.close()


class UcxTransport:
    """See the module.

    Raises
    ------
    TransportUnavailable
        No ucxx here.
    """

    name = "ucx"

    def __init__(self, services: Services, pool: Pages) -> None:
        if problem := backend.available():
            raise TransportUnavailable(problem)
        self.services, self.pool = services, pool
        self.requests: collections.deque[_Request] = collections.deque()
        self.closing: collections.deque[tuple[float, Any]] = collections.deque()
        self._outbound: dict[tuple[str, RunKey], _Outbound] = {}
        self._inbound: dict[tuple[str, RunKey], _Inbound] = {}
        self._knocks: set[_Inbound] = set()
        self.lost = self.errors = self.strangers = 0
        self.last_error = ""
        self._stopped = False
        self.ucx: backend.UcxWorker
        self.loop = IoLoop("gpurt-ucx", self._failed)
        ready: Future[bytes] = Future()
        self.loop.call(lambda: self._start(ready))
        try:
            #: what peers need to reach us
            self.address = ready.result(60)
        except Exception as e:
            self.loop.stop(_nothing)
            raise TransportUnavailable(f"UCX does not start here: {e!r}") from e

    def _start(self, ready: Future[bytes]) -> None:
        try:
            self.ucx = backend.UcxWorker()
            self.loop.poll.register(self.ucx.fileno, select.EPOLLIN)
            self.loop.may_wait = self._progress
            self.loop.on_tick = self._tick
            ready.set_result(self.ucx.address)
        except Exception as e:
            ready.set_exception(e)

    # ---- any thread

    def endpoint_for(self, run: RunKey, sender: str) -> Any:
        def expect() -> None:
            secret = self.services.secret_of(run)
            if secret is not None and (sender, run) not in self._inbound and not self._stopped:
                link = self._inbound[sender, run] = _Inbound(self, run, secret, sender)
                self._knocks.add(link)

        self.loop.call(expect)
        return self.address

    def send(self, peer: Peer, header: Header, buffers: Sequence[Any]) -> Future[Receipt]:
        future: Future[Receipt] = Future()
        self.loop.call(lambda: self._submit(future, peer, header, buffers))
        return future

    def close(self, peer: str, run: RunKey | None = None) -> None:
        self.loop.call(lambda: self._end(lambda link: link.peer.address == peer and run in (None, link.run)))

    def forget(self, run: RunKey) -> None:
        self.loop.call(lambda: self._end(lambda link: link.run == run, lambda link: link.run == run))

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True

        def last() -> None:
            self._end(lambda link: True, lambda link: True)
            deadline = time.monotonic() + 0.2
            while time.monotonic() < deadline and self.ucx.progress():
                pass
            self.closing.clear()
            self.ucx.close()
            self.requests.clear()

        self.loop.stop(last)

    def statistics(self) -> dict[str, Any]:
        return {
            "links_out": len(self._outbound),
            "links_in": len(self._inbound),
            "strangers": self.strangers,
            "lost": self.lost,
            "errors": self.errors,
            "last_error": self.last_error,
            "requests": len(self.requests),
        }

    def _failed(self, text: str) -> None:
        self.errors += 1
        self.last_error = text
        logger.warning("gpurt ucx transport: %s", text.splitlines()[-1])

    # ---- UCX thread

    def arrived(self, record: Record, body: memoryview) -> tuple[Record, memoryview]:
        """What came from the wire, before anybody looks at it; tests replace this."""
        return record, body

    def _submit(self, future: Future[Receipt], peer: Peer, header: Header, buffers: Sequence[Any]) -> None:
        if self._stopped:
            future.set_result(Receipt("the transport was stopped", lost=True))
            return
        key = (peer.address, header.run)
        try:
            link = self._outbound.get(key)
            if link is None:
                link = self._outbound[key] = _Outbound(self, peer, header)
            link.submit(future, buffers)
        except Exception as e:
            # Whatever it was: the message must end.
            self._outbound.pop(key, None)
            self.services.on_loss(self.name, peer.address, repr(e), False)
            if not future.done():
                future.set_result(Receipt(repr(e), lost=True))

    def _progress(self) -> bool:
        """Progress and complete; whether there is nothing left to do but wait."""
        busy = self.ucx.progress()
        for _ in range(len(self.requests)):
            r = self.requests.popleft()
            if not r.request.completed:
                self.requests.append(r)
                continue
            busy = True
            error = None
            try:
                r.request.check_error()
            except Exception as e:
                error = e
            r.then(error)
        for link in [*self._knocks] if self._knocks else ():
            if link.closed:
                self._knocks.discard(link)
            elif (nbytes := self.ucx.waiting(link.tags["knock"])) is not None:
                self._knocks.discard(link)
                link.knocked(nbytes)
                busy = True
        return not busy and self.ucx.arm()

    def _tick(self, now: float) -> None:
        if self._outbound or self._inbound:
            self.ucx.keepalive()
        for out in list(self._outbound.values()):
            if not out.endpoint.alive:
                out.lost("the peer's endpoint is gone")
            out.carry_out(out.machine.tick(now))
        for link in list(self._inbound.values()):
            if link in self._knocks:
                if now - link.since > KNOCK_SECONDS:
                    self._knocks.discard(link)
                    link.lost("never came")
                continue
            if link.endpoint is not None and not link.endpoint.alive:
                link.lost("the peer's endpoint is gone")
            link.carry_out(link.machine.tick(now))
        while self.closing and now - self.closing[0][0] > 1.0:
            self.closing.popleft()

    def _end(self, out: Callable[[_Outbound], bool], inbound: Callable[[_Inbound], bool] = lambda link: False) -> None:
        for o in [o for o in self._outbound.values() if out(o)]:
            o.carry_out(o.machine.bye())
        for i in [i for i in self._inbound.values() if inbound(i)]:
            i.carry_out(i.machine.bye() if i.endpoint is not None else i.machine.lost("the run ended"))

    def outbound_closed(self, link: _Outbound, close: lk.Close) -> None:
        self._outbound.pop((link.peer.address, link.run), None)
        if not close.quiet:
            self.lost += 1
            self.services.on_loss(self.name, link.peer.address, close.reason, close.violation)

    def inbound_closed(self, link: _Inbound, close: lk.Close) -> None:
        self._inbound.pop((link.expected, link.run), None)
        if close.violation:
            self.strangers += not link.machine.sender
            self.lost += 1
            self.services.on_loss(self.name, link.expected, close.reason, True)
