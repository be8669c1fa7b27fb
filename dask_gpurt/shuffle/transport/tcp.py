"""tcp-direct: sockets of our own, outside the event loop.

Theory of operation. distributed's comms go through asyncio, which costs more per message than the copy itself. Here two
threads per worker do all of it, however many peers there are, and each socket belongs to one of them::

    gpurt-tcp-send    outbound links: connects, writes messages from where they lie (`sendmsg`), reads answers
    gpurt-tcp-recv    the listener and inbound links: reads messages into pooled memory, writes answers

A link is one connection, from one sender to one receiver, for one run; `link` decides what is said on it. The GIL is
free during every `sendmsg`, `recv_into` and wait. Loss of a peer is seen by the kernel: at once when its process dies
(reset), within `LOST_SECONDS` when its host or the network goes (keepalive, user timeout).

The listener is bound to the worker's own address, never to all; a connection that has not proved itself within a second
is closed and counted; more than `MAX_STRANGERS` of them at a time are closed at once.

Rejected: a thread per connection (300 threads with 100 peers; and on two cores every further thread only competes).
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport import link as lk
from dask_gpurt.shuffle.transport import records
from dask_gpurt.shuffle.transport.base import Receipt
from dask_gpurt.shuffle.transport.ends import InboundEnd, OutboundEnd
from dask_gpurt.shuffle.transport.ioloop import IoLoop
from dask_gpurt.shuffle.transport.link_receiver import ReceiverLink
from dask_gpurt.shuffle.transport.link_sender import SenderLink
from dask_gpurt.shuffle.transport.records import HEADER_BYTES, Kind, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.shuffle.pages import Pages
    from dask_gpurt.shuffle.transport.base import Header, Peer, Services
    from dask_gpurt.shuffle.transport.records import RunKey

logger = logging.getLogger("distributed.worker.gpurt")

#: a peer whose host does not answer for so long is lost
LOST_SECONDS = 5
CONNECT_SECONDS = 5.0
#: connections that have not proved themselves yet, at most
MAX_STRANGERS = 64
_PAD = memoryview(bytes(records.ALIGN))
#: records read from one link before the others get their turn
_RECORDS_AT_ONCE = 8
#: buffers of one `sendmsg`, below the kernel's limit of 1024
_IOV = 512


class _Connection:
    """A socket that belongs to one loop: what waits to be written, and the record that is being read."""

    def __init__(self, loop: IoLoop, sock: socket.socket) -> None:
        self.loop, self.sock = loop, sock
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)
        self._out: collections.deque[memoryview] = collections.deque()
        self._events = select.EPOLLIN
        self.closed = False
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._got = 0
        self.record: Record | None = None
        self.body: memoryview = memoryview(b"")
        loop.poll.register(sock, self._events)

    def write(self, *parts: Any) -> None:
        """Queue bytes; written as far as the socket takes them now, later for the rest.

        Raises
        ------
        OSError
            The connection is gone.
        """
        self._out.extend(memoryview(p).cast("B") for p in parts if memoryview(p).nbytes)
        self.flush()

    def flush(self) -> None:
        while self._out:
            few = [self._out[i] for i in range(min(len(self._out), _IOV))]
            try:
                n = self.sock.sendmsg(few)
            except BlockingIOError:
                break
            while n:
                if n >= len(self._out[0]):
                    n -= len(self._out.popleft())
                else:
                    self._out[0] = self._out[0][n:]
                    n = 0
        wanted = select.EPOLLIN | (select.EPOLLOUT if self._out else 0)
        if wanted != self._events and not self.closed:
            self._events = wanted
            self.loop.poll.modify(self.sock, wanted)

    def read(self, begin: Callable[[Record], memoryview | None]) -> tuple[Record, memoryview] | None:
        """The next record that is there whole, else None.

        Parameters
        ----------
        begin
            Asked for the memory of a record's body when its header is there; None: the link was closed.

        Raises
        ------
        WireError
            What came is not a record.
        OSError
            The connection is gone.
        """
        while not self.closed:
            if self.record is None:
                if not self._fill(self._head):
                    return None
                self.record = record = Record.unpack(self._head)
                self._got = 0
                body = begin(record)
                if body is None:
                    return None
                self.body = body
            if not self._fill(self.body):
                return None
            record, body = self.record, self.body
            self.record, self.body, self._got = None, memoryview(b""), 0
            return record, body
        return None

    def _fill(self, into: memoryview) -> bool:
        while self._got < len(into):
            try:
                n = self.sock.recv_into(into[self._got :])
            except BlockingIOError:
                return False
            if not n:
                raise ConnectionResetError("closed by the peer")
            self._got += n
        return True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.loop.on_event.pop(self.sock.fileno(), None)
        with contextlib.suppress(OSError, ValueError):
            self.loop.poll.unregister(self.sock)
        self.sock.close()
        self._out.clear()


def _parts(send: lk.Send) -> list[Any]:
    parts: list[Any] = [send.record.pack(), send.body]
    if send.record.kind is Kind.DATA:
        parts.append(records.table(send.buffers))
        for buffer in send.buffers:
            parts.append(buffer)
            if rest := -memoryview(buffer).nbytes % records.ALIGN:
                parts.append(_PAD[:rest])
    return parts


class _Outbound(OutboundEnd):
    """A link from here; in the send thread."""

    owner: TcpTransport

    def __init__(self, owner: TcpTransport, peer: Peer, header: Header) -> None:
        now = time.monotonic()
        self.owner, self.peer, self.run = owner, peer, header.run
        self.machine = SenderLink(
            *(header.run, header.secret, owner.services.address, peer.address),
            *(peer.limit, os.urandom(records.NONCE_BYTES), now),
        )
        self._since = now
        sock = socket.socket(socket.AF_INET6 if ":" in peer.endpoint[0] else socket.AF_INET, socket.SOCK_STREAM)
        self.connection = _Connection(owner.sending, sock)
        self.connected = False
        owner.sending.on_event[sock.fileno()] = self.event
        code = sock.connect_ex((peer.endpoint[0], peer.endpoint[1]))
        if code not in (0, errno.EINPROGRESS):
            self.connection.close()
            raise OSError(code, os.strerror(code))

    def put(self, send: lk.Send) -> None:
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
            self.connection.flush()
            while (whole := self.connection.read(lambda r: memoryview(bytearray(r.length)))) is not None:
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
        services = owner.services
        self.owner = owner
        self.machine = ReceiverLink(
            services.address, services.secret_of, self.arrive, os.urandom(records.NONCE_BYTES), time.monotonic()
        )
        self.loop = owner.receiving
        self.connection = _Connection(owner.receiving, sock)
        self._fresh = True
        owner.receiving.on_event[sock.fileno()] = self.event
        self.carry_out(self.machine.start())

    def put(self, send: lk.Send) -> None:
        self.connection.write(*_parts(send))

    def shut(self) -> None:
        self.connection.close()

    def _begin(self, record: Record) -> memoryview | None:
        verdict, instructions = self.machine.admit(record)
        self.carry_out(instructions)
        if verdict is lk.Verdict.NO:
            return None
        self._fresh = verdict is lk.Verdict.YES
        if record.kind is Kind.DATA:
            return self.owner.pool.take(record.length)
        return memoryview(bytearray(record.length))

    def event(self, event: int) -> None:
        try:
            self.connection.flush()
            for _ in range(_RECORDS_AT_ONCE):
                if (whole := self.connection.read(self._begin)) is None:
                    break
                record, body = self.owner.arrived(*whole)
                self.carry_out(self.machine.receive(record, body, time.monotonic(), fresh=self._fresh))
        except WireError as e:
            self.violated(str(e))
        except OSError as e:
            self.lost(repr(e))

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
    """

    name = "tcp"

    def __init__(self, services: Services, host: str, pool: Pages) -> None:
        self.services = services
        self.pool = pool
        self._lock = threading.Lock()
        self._outbound: dict[tuple[str, RunKey], _Outbound] = {}
        self._inbound: set[_Inbound] = set()
        self.strangers = self.lost = self.errors = 0
        self.last_error = ""
        self._stopped = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((host, 0))
            self._listener.listen(128)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise
        #: (host, port) that peers connect to
        self.endpoint: tuple[str, int] = self._listener.getsockname()[:2]
        self.sending = IoLoop("gpurt-tcp-send", self._failed)
        self.receiving = IoLoop("gpurt-tcp-recv", self._failed)
        self.sending.on_tick = self._tick_outbound
        self.receiving.on_tick = self._tick_inbound
        self.receiving.on_event[self._listener.fileno()] = self._accept
        self.receiving.poll.register(self._listener, select.EPOLLIN)

    # ---- any thread

    def endpoint_for(self, run: RunKey, sender: str) -> Any:
        return list(self.endpoint)

    def send(self, peer: Peer, header: Header, buffers: Sequence[Any]) -> Future[Receipt]:
        future: Future[Receipt] = Future()
        self.sending.call(lambda: self._submit(future, peer, header, buffers))
        return future

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
            "buffers_reused": self.pool.reused + self.pool.joined,
            "buffers_fresh": self.pool.fresh,
            "buffers_idle_bytes": self.pool.idle_bytes,
        }

    def _failed(self, text: str) -> None:
        self.errors += 1
        self.last_error = text
        logger.warning("gpurt tcp transport: %s", text.splitlines()[-1])

    # ---- send thread

    def _submit(self, future: Future[Receipt], peer: Peer, header: Header, buffers: Sequence[Any]) -> None:
        if self._stopped:
            future.set_result(Receipt("the transport was stopped", lost=True))
            return
        key = (peer.address, header.run)
        link = self._outbound.get(key)
        try:
            if link is None:
                link = self._outbound[key] = _Outbound(self, peer, header)
            link.submit(future, buffers)
        except Exception as e:
            # Whatever it was: the message must end.
            self._outbound.pop(key, None)
            self.services.on_loss(self.name, peer.address, repr(e), False)
            if not future.done():
                future.set_result(Receipt(repr(e), lost=True))

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

    def _accept(self, event: int) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            if sum(i.machine.state is lk.State.WAITING for i in self._inbound) >= MAX_STRANGERS:
                self.strangers += 1
                sock.close()
                continue
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
        for link in list(self._inbound):
            link.tick(now)

    def _stop_receiving(self) -> None:
        self._drop(lambda i: True)
        self.receiving.on_event.pop(self._listener.fileno(), None)
        self._listener.close()
