"""The two ends of a TCP link: which bytes a record is on the socket, and what is done when some arrive.

`TcpOutbound` lives in the send thread, `TcpInbound` in the receive thread, so nothing here is locked.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.receiver import ReceiverLink
from dask_gpurt.shuffle.transport.link.records import LinkRecord, RecordKind
from dask_gpurt.shuffle.transport.link.sender import SenderLink
from dask_gpurt.shuffle.transport.link_ends import InboundEnd, InboundOwner, OutboundEnd, OutboundOwner
from dask_gpurt.shuffle.transport.select.locality import host_token
from dask_gpurt.shuffle.transport.tcp import cma

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.memory.pages import Pages
    from dask_gpurt.shuffle.transport.base import Header, Peer, Services
    from dask_gpurt.shuffle.transport.ioloop import IoLoop
    from dask_gpurt.shuffle.transport.tcp.connection import Connection

_NOTHING = memoryview(b"")
_PAD = memoryview(bytes(records.ALIGN))
#: records and bytes read from one link before the others, and the answers so far, get their turn
_RECORDS_AT_ONCE = 32
_BYTES_AT_ONCE = 1 << 20


def _room(record: LinkRecord) -> memoryview:
    """Memory for the body of a record that is no message; most have none."""
    return memoryview(bytearray(record.length)) if record.length else _NOTHING


def _parts(send: lk.Send) -> list[Any]:
    if send.record.kind is not RecordKind.DATA:
        return [send.record.pack() + send.body]
    parts: list[Any] = [send.record.pack() + records.table(send.buffers)]
    for buffer in send.buffers:
        parts.append(buffer)
        if rest := -records.size_of(buffer) % records.ALIGN:
            parts.append(_PAD[:rest])
    return parts


@dataclasses.dataclass(slots=True)
class Pulls:
    """Messages that were read where they lie, see `cma`."""

    #: messages of this worker that were not sent
    placed: int = 0
    #: messages of others that were read
    pulled: int = 0
    pulled_bytes: int = 0


class TcpOwner(InboundOwner, OutboundOwner, Protocol):
    """The transport, as its links see it."""

    services: Services
    pool: Pages
    pulls: Pulls
    sending: IoLoop
    receiving: IoLoop

    def connection(self, sock: socket.socket, failed: Callable[[str], None], peer: str, accepted: bool) -> Connection:
        """The connection of a link from here, or of one that was `accepted`, on a socket."""


class TcpOutbound(OutboundEnd):
    """A link from here; in the send thread."""

    owner: TcpOwner

    def __init__(self, owner: TcpOwner, peer: Peer, header: Header) -> None:
        now = time.monotonic()
        self.owner, self.peer, self.run = owner, peer, header.run
        here = cma.able() and list(peer.endpoint[2:]) == [host_token()]
        self._offer = cma.Offer() if here else None
        self.machine = SenderLink(
            *(header.run, header.secret, owner.services.address, peer.address),
            *(peer.limit, os.urandom(records.NONCE_BYTES), now),
            offer=None if self._offer is None else self._offer.body(),
        )
        sock = socket.socket(socket.AF_INET6 if ":" in peer.endpoint[0] else socket.AF_INET, socket.SOCK_STREAM)
        self.connection = owner.connection(sock, self.lost, peer.address, accepted=False)
        self._connected = False
        owner.sending.on_event[sock.fileno()] = self.event
        code = sock.connect_ex((peer.endpoint[0], peer.endpoint[1]))
        if code not in (0, errno.EINPROGRESS):
            self.connection.close()
            raise OSError(code, os.strerror(code))

    def put(self, send: lk.Send) -> None:
        """Queue a record, or where its message lies."""
        # One that costs room would need a field more; within a host none does.
        if send.record.kind is RecordKind.DATA and self.machine.pulled and not send.record.value:
            placed = cma.placed(send.record, send.buffers)
            if placed is not None:
                self.owner.pulls.placed += 1
                self.connection.write(placed[0].pack() + placed[1])
                return
        self.connection.write(*_parts(send))

    def shut(self) -> None:
        """Close the socket."""
        self.connection.close()

    def event(self, event: int) -> None:
        """The socket is connected, or can be written to or read from."""
        try:
            if not self._connected:  # nothing can be read before the connection is there
                code = self.connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                self._connected = True
                self.connection.connected()
            self.connection.flush()
            while (whole := self.connection.read(_room)) is not None:
                record, body = whole
                self.carry_out(self.machine.receive(record, bytes(body), time.monotonic()))
        except (OSError, WireError) as e:
            self.lost(repr(e))
        except Exception as e:
            # The record is used up. What it was about would never end.
            self.lost(repr(e))
            raise

    def tick(self, now: float) -> None:
        """Time has passed."""
        if late := self.connection.late(now):
            self.lost(late)
        # A long message on a slow network takes longer than a peer may be silent, and PING waits behind it.
        if self.machine.outstanding and self.connection.moves():
            self.machine.moves(now)
        self.carry_out(self.machine.tick(now))


class TcpInbound(InboundEnd):
    """A link to here; in the receive thread."""

    owner: TcpOwner

    def __init__(self, owner: TcpOwner, sock: socket.socket) -> None:
        super().__init__()
        services = owner.services
        self.owner = owner
        self.machine = ReceiverLink(
            services.address, services.secret_of, self.arrive, os.urandom(records.NONCE_BYTES), time.monotonic()
        )
        self.loop = owner.receiving
        self.connection = owner.connection(sock, self.lost, "", accepted=True)
        self._started = False
        self._fresh = True
        #: the sender's process, if its memory can be read
        self._pid = 0
        owner.receiving.on_event[sock.fileno()] = self.event
        self._start()

    def _start(self) -> None:
        """Speak first, as soon as the connection is ready."""
        if self.connection.ready and not self._started:
            self._started = True
            self.machine.begin(time.monotonic())
            self.carry_out(self.machine.start())

    def put(self, send: lk.Send) -> None:
        """Queue a record."""
        self.connection.write(*_parts(send))

    def shut(self) -> None:
        """Close the socket."""
        self.connection.close()

    def _begin(self, record: LinkRecord) -> memoryview | None:
        if record.kind is RecordKind.PLACED and not self._pid:
            raise WireError("a message is placed in memory that this worker cannot read")
        asked = cma.message(record) if record.kind is RecordKind.PLACED else record
        verdict, instructions = self.machine.admit(asked)
        self.carry_out(instructions)
        if verdict is lk.Verdict.NO:
            return None
        self._fresh = verdict is lk.Verdict.YES
        if record.kind is RecordKind.DATA:
            return self.owner.pool.take(record.length)
        return _room(record)

    def offered(self, body: bytes) -> None:
        """Answer an offer if the sender's memory can be read."""
        self._pid = cma.accept(body)
        if self._pid:
            self.put(lk.Send(LinkRecord(RecordKind.PULLS, self.machine.run)))

    def event(self, event: int) -> None:
        """The socket can be written to or read from."""
        self._read()

    def _read(self) -> None:
        try:
            self.connection.flush()
            self._start()
            nbytes = 0
            for _ in range(_RECORDS_AT_ONCE):
                if nbytes >= _BYTES_AT_ONCE or (whole := self.connection.read(self._begin)) is None:
                    break
                record, body = whole
                if record.kind is RecordKind.PLACED:
                    record = cma.message(record)
                    body = cma.fetch(self._pid, record, body, self.owner.pool.take)
                    if self.connection.left:
                        # The sender has let go of it, and what was read may be anything. A wrong checksum would be held
                        # against a healthy worker.
                        raise OSError("the sender has left while its message was read")
                    self.owner.pulls.pulled += 1
                    self.owner.pulls.pulled_bytes += len(body)
                nbytes += len(body)
                self.carry_out(self.machine.receive(record, body, time.monotonic(), fresh=self._fresh))
        except WireError as e:
            self.violated(str(e))
        except OSError as e:
            self.lost(repr(e))
        except Exception as e:
            # As when there is no memory for a message. It has arrived as far as the machine knows, so PONG does not
            # miss it, and its sender would wait for the answer without end.
            self.lost(repr(e))
            raise
        if self.connection.more and not self.connection.closed:
            self.loop.later(self._read)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if late := self.connection.late(now):
            self.lost(late)
        if self._started:
            self.carry_out(self.machine.tick(now))
