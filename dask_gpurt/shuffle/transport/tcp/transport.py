"""tcp-direct: sockets of our own, outside the event loop.

Theory of operation. distributed's comms go through asyncio, which costs more per message than the copy itself. Here two
threads per worker do all of it, however many peers there are, and each socket belongs to one of them::

    gpurt-tcp-send    outbound links: connects, writes messages from where they lie (`sendmsg`), reads answers
    gpurt-tcp-recv    the listener and inbound links: reads messages into pooled memory, writes answers

A link is one connection, from one sender to one receiver, for one run; `events` decides what is said on it. The GIL is
free during every `sendmsg`, read and wait. On one host messages are not sent through the socket but read where they
lie (`cma`), where the kernel allows that. Loss of a peer is seen by the kernel: at once when its process dies
(reset), within `LOST_SECONDS` when its host or the network goes (keepalive, user timeout).

The listener is bound to the worker's own address, never to all; a connection that has not proved itself within a second
is closed and counted; more than `MAX_STRANGERS` of them at a time are closed at once.

Rejected: a thread per connection (300 threads with 100 peers; and on two cores every further thread only competes).
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport.base import Receipt
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.endpoints import InboundEnd, OutboundEnd
from dask_gpurt.shuffle.transport.link.receiver import ReceiverLink
from dask_gpurt.shuffle.transport.link.records import Kind, Record
from dask_gpurt.shuffle.transport.link.sender import SenderLink
from dask_gpurt.shuffle.transport.quiet_log import QuietLog
from dask_gpurt.shuffle.transport.select.locality import host_token
from dask_gpurt.shuffle.transport.tcp import cma
from dask_gpurt.shuffle.transport.tcp.connection import Connection
from dask_gpurt.shuffle.transport.tcp.ioloop import IoLoop
from dask_gpurt.shuffle.transport.tcp.listener import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.memory.pages import Pages
    from dask_gpurt.shuffle.transport.base import Header, Peer, Services
    from dask_gpurt.shuffle.transport.link.records import RunKey

logger = logging.getLogger("distributed.worker.gpurt")

CONNECT_SECONDS = 5.0
#: connections that have not proved themselves yet, at most
MAX_STRANGERS = 64
_NOTHING = memoryview(b"")
_PAD = memoryview(bytes(records.ALIGN))
#: records and bytes read from one link before the others, and the answers so far, get their turn
_RECORDS_AT_ONCE = 32
_BYTES_AT_ONCE = 1 << 20


def _room(record: Record) -> memoryview:
    """For the body of a record that is no message; most have none."""
    return memoryview(bytearray(record.length)) if record.length else _NOTHING


def _parts(send: lk.Send) -> list[Any]:
    if send.record.kind is not Kind.DATA:
        return [send.record.pack() + send.body]
    parts: list[Any] = [send.record.pack() + records.table(send.buffers)]
    for buffer in send.buffers:
        parts.append(buffer)
        if rest := -records.size_of(buffer) % records.ALIGN:
            parts.append(_PAD[:rest])
    return parts


class _Outbound(OutboundEnd):
    """A link from here; in the send thread."""

    owner: TcpTransport

    def __init__(self, owner: TcpTransport, peer: Peer, header: Header) -> None:
        now = time.monotonic()
        self.owner, self.peer, self.run = owner, peer, header.run
        here = cma.able() and owner.pulls and list(peer.endpoint[2:]) == [host_token()]
        self._offer = cma.Offer() if here else None
        self.machine = SenderLink(
            *(header.run, header.secret, owner.services.address, peer.address),
            *(peer.limit, os.urandom(records.NONCE_BYTES), now),
            offer=None if self._offer is None else self._offer.body(),
        )
        self._since = now
        sock = socket.socket(socket.AF_INET6 if ":" in peer.endpoint[0] else socket.AF_INET, socket.SOCK_STREAM)
        self.connection = Connection(owner.sending, sock, self.lost)
        self.connected = False
        owner.sending.on_event[sock.fileno()] = self.event
        code = sock.connect_ex((peer.endpoint[0], peer.endpoint[1]))
        if code not in (0, errno.EINPROGRESS):
            self.connection.close()
            raise OSError(code, os.strerror(code))

    def put(self, send: lk.Send) -> None:
        # One that costs room would need a field more; within a host none does.
        if send.record.kind is Kind.DATA and self.machine.pulled and not send.record.value:
            placed = cma.placed(send.record, send.buffers)
            if placed is not None:
                self.owner.placed += 1
                self.connection.write(placed[0].pack() + placed[1])
                return
        self.connection.write(*_parts(send))

    def shut(self) -> None:
        self.connection.close()

    def event(self, event: int) -> None:
        try:
            if not self.connected:  # nothing can be read before the connection is there
                code = self.connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                self.connected = True
                self.connection.connected()
            self.connection.flush()
            while (whole := self.connection.read(_room)) is not None:
                record, body = whole
                self.carry_out(self.machine.receive(record, bytes(body), time.monotonic()))
        except (OSError, WireError) as e:
            self.lost(repr(e))

    def tick(self, now: float) -> None:
        if not self.connected and now - self._since > CONNECT_SECONDS:
            self.lost(f"no connection within {CONNECT_SECONDS:g} s")
        self.carry_out(self.machine.tick(now))


class _Inbound(InboundEnd):
    """A link to here; in the receive thread."""

    owner: TcpTransport

    def __init__(self, owner: TcpTransport, sock: socket.socket) -> None:
        super().__init__()
        services = owner.services
        self.owner = owner
        self.machine = ReceiverLink(
            services.address, services.secret_of, self.arrive, os.urandom(records.NONCE_BYTES), time.monotonic()
        )
        self.loop = owner.receiving
        self.connection = Connection(owner.receiving, sock, self.lost)
        self._fresh = True
        #: the sender's process, if its memory can be read
        self._pid = 0
        owner.receiving.on_event[sock.fileno()] = self.event
        self.carry_out(self.machine.start())

    def put(self, send: lk.Send) -> None:
        self.connection.write(*_parts(send))

    def shut(self) -> None:
        self.connection.close()

    def _begin(self, record: Record) -> memoryview | None:
        if record.kind is Kind.PLACED and not self._pid:
            raise WireError("a message that can not be read where it lies")
        asked = cma.message(record) if record.kind is Kind.PLACED else record
        verdict, instructions = self.machine.admit(asked)
        self.carry_out(instructions)
        if verdict is lk.Verdict.NO:
            return None
        self._fresh = verdict is lk.Verdict.YES
        if record.kind is Kind.DATA:
            return self.owner.pool.take(record.length)
        return _room(record)

    def offered(self, body: bytes) -> None:
        self._pid = self.owner.pulls and cma.accept(body)
        if self._pid:
            self.put(lk.Send(Record(Kind.PULLS, self.machine.run)))

    def event(self, event: int) -> None:
        self._read()

    def _read(self) -> None:
        try:
            self.connection.flush()
            nbytes = 0
            for _ in range(_RECORDS_AT_ONCE):
                if nbytes >= _BYTES_AT_ONCE or (whole := self.connection.read(self._begin)) is None:
                    break
                record, body = whole
                if record.kind is Kind.PLACED:
                    record = cma.message(record)
                    body = cma.fetch(self._pid, record, body, self.owner.pool.take)
                    self.owner.pulled += 1
                    self.owner.pulled_bytes += len(body)
                nbytes += len(body)
                record, body = self.owner.arrived(record, body)
                self.carry_out(self.machine.receive(record, body, time.monotonic(), fresh=self._fresh))
        except WireError as e:
            self.violated(str(e))
        except OSError as e:
            self.lost(repr(e))
        if self.connection.more and not self.connection.closed:
            self.loop.later(self._read)

    def tick(self, now: float) -> None:
        self.carry_out(self.machine.tick(now))


class TcpTransport:
    """See the module. Nothing is opened before it is needed.

    Parameters
    ----------
    host
        The address of this worker; the listener is bound to it.
    pool
        Where messages are received into.
    pulls
        Whether messages on one host may be read where they lie.
    """

    name = "tcp"

    def __init__(self, services: Services, host: str, pool: Pages, pulls: bool = True) -> None:
        self.services = services
        self.pool = pool
        self.pulls = pulls
        #: messages not sent but placed, and those read where they lay
        self.placed = self.pulled = self.pulled_bytes = 0
        self._lock = threading.Lock()
        self._outbound: dict[tuple[str, RunKey], _Outbound] = {}
        self._inbound: set[_Inbound] = set()
        self.strangers = self.lost = self.errors = 0
        self.last_error = ""
        self._log = QuietLog(logger)
        self._stopped = False
        self._listener = Listener(host)
        #: (host, port) that peers connect to; they learn the name of this host, too
        self.endpoint = self._listener.endpoint
        self.sending = IoLoop("gpurt-tcp-send", self._failed)
        self.receiving = IoLoop("gpurt-tcp-recv", self._failed)
        self.sending.on_tick = self._tick_outbound
        self.receiving.on_tick = self._tick_inbound
        self._listener.serve(self.receiving, self._accept, self._failed)

    # ---- any thread

    def endpoint_for(self, run: RunKey, sender: str) -> Any:
        return [*self.endpoint, host_token()]

    def submit(self, ended: Callable[[Receipt], None], peer: Peer, header: Header, buffers: Sequence[Any]) -> None:
        self.sending.call(lambda: self._submit(ended, peer, header, buffers))

    def close(self, peer: str, run: RunKey | None = None) -> None:
        self.sending.call(lambda: self._bye(lambda o: o.peer.address == peer and run in (None, o.run)))

    def forget(self, run: RunKey) -> None:
        self.sending.call(lambda: self._bye(lambda o: o.run == run))
        self.receiving.call(lambda: self._drop(lambda i: i.machine.run == run))

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self.sending.stop(lambda: self._bye(lambda o: True))
        self.receiving.stop(self._stop_receiving)

    def statistics(self) -> dict[str, Any]:
        return {
            "links_out": len(self._outbound),
            "links_in": len(self._inbound),
            "strangers": self.strangers,
            "lost": self.lost,
            "errors": self.errors,
            "last_error": self.last_error,
            "refused_descriptors": self._listener.refused,
            "accept_pauses": self._listener.pauses,
            "placed": self.placed,
            "pulled": self.pulled,
            "pulled_bytes": self.pulled_bytes,
            "buffers_reused": self.pool.reused + self.pool.joined,
            "buffers_fresh": self.pool.fresh,
            "buffers_idle_bytes": self.pool.idle_bytes,
        }

    def _failed(self, text: str) -> None:
        self.errors += 1
        self.last_error = text
        self._log.warning(f"gpurt tcp transport: {text.splitlines()[-1]}")

    # ---- send thread

    def _submit(self, ended: Callable[[Receipt], None], peer: Peer, header: Header, buffers: Sequence[Any]) -> None:
        if self._stopped:
            ended(Receipt("the transport was stopped", lost=True))
            return
        key = (peer.address, header.run)
        link = self._outbound.get(key)
        try:
            if link is None:
                link = self._outbound[key] = _Outbound(self, peer, header)
            link.submit(ended, buffers, header.room)
        except Exception as e:
            # Whatever it was: the message must end.
            self._outbound.pop(key, None)
            self.services.on_loss(self.name, peer.address, repr(e), False)
            ended(Receipt(repr(e), lost=True))  # a second call, if it is one, does nothing

    def _bye(self, which: Callable[[_Outbound], bool]) -> None:
        for link in [o for o in self._outbound.values() if which(o)]:
            link.carry_out(link.machine.bye())

    def outbound_closed(self, link: _Outbound, close: lk.Close) -> None:
        self._outbound.pop((link.peer.address, link.run), None)
        if not close.quiet:
            self.lost += 1
            self.services.on_loss(self.name, link.peer.address, close.reason, close.violation)

    def _tick_outbound(self, now: float) -> None:
        for link in list(self._outbound.values()):
            link.tick(now)

    # ---- receive thread

    def arrived(self, record: Record, body: memoryview) -> tuple[Record, memoryview]:
        """What came from the wire, before anybody looks at it; tests replace this."""
        return record, body

    def _accept(self, sock: socket.socket) -> None:
        if sum(i.machine.state is lk.State.WAITING for i in self._inbound) >= MAX_STRANGERS:
            self.strangers += 1
            sock.close()
            return
        self._inbound.add(_Inbound(self, sock))

    def inbound_closed(self, link: _Inbound, close: lk.Close) -> None:
        self._inbound.discard(link)
        if not link.machine.sender:
            self.strangers += 1
        elif close.violation:
            self.lost += 1
            self.services.on_loss(self.name, link.machine.sender, close.reason, True)

    def _drop(self, which: Callable[[_Inbound], bool]) -> None:
        for link in [i for i in self._inbound if which(i)]:
            link.carry_out(link.machine.bye())

    def _tick_inbound(self, now: float) -> None:
        self._listener.tick(now)
        for link in list(self._inbound):
            link.tick(now)

    def _stop_receiving(self) -> None:
        self._drop(lambda i: True)
        self._listener.close()
