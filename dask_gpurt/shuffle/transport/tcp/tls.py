"""The socket of a link under TLS, with the certificates and settings of the cluster's own comms.

`Tls` makes the connections of one transport. Contexts come from distributed's `Security`: the same authority, ciphers
and versions as under ``tls://``. Both sides must show a certificate of that authority. As there, names of hosts are not
compared: workers have addresses, and the authority is the cluster's own.

Theory of operation. A `TlsConnection` is a `Connection` whose bytes are sealed on their way to the socket, and opened
on their way from it, by an `ssl.SSLObject` between two buffers in memory. All of it runs in the transport's own
threads, which hold no event loop, and OpenSSL runs without the GIL. Everything above is as without TLS: the proof of
the run's secret, credit, checksums, acknowledgements.

A turn seals `SEALED_BYTES` at most before it writes them, so they are in the cache still. What is short is sealed
together: a record of TLS each would cost more than its bytes. What was taken from the socket and is not opened yet is
invisible to epoll, as what is read ahead is (`more`).

A link that ends without the peer's BYE is lost, so the end of TLS itself (``close_notify``) says nothing more, and is
not sent.

Rejected: `ssl.SSLSocket` (one call of the kernel for each record of 16 KiB when it writes, two when it reads; about a
tenth slower in a first look beside other work, `benchmarks/transport_tls.py --raw` compares them); Arrow Flight (not
measured yet, same script; its Python interface has no settings for ciphers and versions, it compares names of hosts,
and it has no credit of ours); TLS in the kernel (Python's ssl has no interface to it).
"""

from __future__ import annotations

import contextlib
import select
import ssl
from typing import TYPE_CHECKING

from dask_gpurt.shuffle.transport.base import TransportUnavailable
from dask_gpurt.shuffle.transport.tcp.connection import CONNECT_SECONDS, Connection

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from distributed import Security

    from dask_gpurt.shuffle.transport.ioloop import IoLoop

#: seconds that one who has connected to here has for the handshake, before the time for its HELLO begins
HANDSHAKE_SECONDS = 3.0
#: sealed in one go
SEALED_BYTES = 1 << 17
#: read from the socket in one go
OPENED_BYTES = 1 << 18
#: shorter parts are joined before they are sealed
_SHORT = 1 << 11
#: how OpenSSL says what it found -> what to do about it
_REMEDIES = {
    "one range of distributed.comm.tls.min-version, max-version and ciphers on all workers": (
        *("NO_SHARED_CIPHER", "UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE", "VERSION_TOO_LOW"),
        *("TLSV1_ALERT_PROTOCOL_VERSION", "SSLV3_ALERT_HANDSHAKE_FAILURE", "TLSV1_ALERT_INSUFFICIENT_SECURITY"),
    ),
    "none if it is a scan of ports; else see what speaks to the ports of workers without TLS": (
        *("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL"),
        *("RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"),
    ),
    "none if it is a scan of ports; else see whether that worker is overloaded": ("TIMEOUT", "CLOSED"),
}
_OF_CERTIFICATES = (
    "certificates that are valid now, of one authority, on all workers: distributed.comm.tls.ca-file, worker.cert and "
    "worker.key"
)


def _remedy(reason: str) -> str:
    return next((remedy for remedy, reasons in _REMEDIES.items() if reason in reasons), _OF_CERTIFICATES)


class HandshakeFailed(ConnectionError):
    """There is no TLS with this peer; the text says why."""


class Tls:
    """What the connections of one transport have in common.

    Raises
    ------
    TransportUnavailable
        There are no certificates, or contexts that do not check the peer's.
    """

    def __init__(self, security: Security | None, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._contexts: dict[bool, ssl.SSLContext] = {}
        for accepts in (False, True):
            context = None if security is None else _context(security, accepts)
            if context is None or context.verify_mode is not ssl.CERT_REQUIRED:
                raise TransportUnavailable(
                    "TLS between workers needs certificates that both sides check. Remedy: "
                    "distributed.comm.tls.ca-file, worker.cert and worker.key"
                )
            context.options |= ssl.OP_NO_RENEGOTIATION
            self._contexts[accepts] = context
        self._contexts[True].num_tickets = 0  # a link is never resumed
        # One for each thread: links from here live in one, links to here in the other.
        self._scratch = {accepts: memoryview(bytearray(OPENED_BYTES)) for accepts in (False, True)}
        self.handshakes_failed = 0
        self._said: set[str] = set()

    def connection(
        self, loop: IoLoop, sock: socket.socket, failed: Callable[[str], None], peer: str, accepted: bool
    ) -> TlsConnection:
        """A connection with a peer: a worker, or unknown if it connected to here; see `Connection`."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        who = peer or _peer_of(sock)
        sealer = self._contexts[accepted].wrap_bio(incoming, outgoing, server_side=accepted)
        scratch = self._scratch[accepted]

        def refused(reason: str, text: str) -> HandshakeFailed:
            return self._refused(who, reason, text)

        return TlsConnection(loop, sock, failed, accepted, (sealer, incoming, outgoing), scratch, refused)

    def _refused(self, peer: str, reason: str, text: str) -> HandshakeFailed:
        """Count a handshake that failed, and log the first one of each reason."""
        self.handshakes_failed += 1
        said = f"the TLS handshake with {peer} failed: {text}"
        if reason not in self._said:
            self._said.add(reason)
            self._warn(
                f"{said}. A worker that is refused shuffles over Dask's comms, which is slower. "
                f"Remedy: {_remedy(reason)}"
            )
        return HandshakeFailed(said)


def _peer_of(sock: socket.socket) -> str:
    try:
        return f"{sock.getpeername()[0]}, which connected to here,"
    except OSError:
        return "a peer that connected to here"


def _context(security: Security, accepts: bool) -> ssl.SSLContext | None:
    """A context of our own, as distributed makes them; None: it has no certificates."""
    given = security.get_listen_args("worker") if accepts else security.get_connection_args("worker")
    context = given.get("ssl_context")
    return context if isinstance(context, ssl.SSLContext) else None


class TlsConnection(Connection):
    """A socket whose bytes are sealed; made by `Tls.connection`."""

    def __init__(
        self,
        loop: IoLoop,
        sock: socket.socket,
        failed: Callable[[str], None],
        accepted: bool,
        sealer: tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO],
        scratch: memoryview,
        refused: Callable[[str, str], HandshakeFailed],
    ) -> None:
        super().__init__(loop, sock, failed, accepted)
        self.ready = False
        self._sealer, self._incoming, self._outgoing = sealer
        self._scratch, self._refused = scratch, refused
        #: sealed, and not taken by the socket yet
        self._rest = memoryview(b"")
        #: all that came was opened, but for part of a record of TLS
        self._starved = True
        self._accepted = accepted
        #: the handshake may begin
        self._there = accepted
        #: bytes came that only a peer can have sealed whose certificate was checked, and that has checked ours
        self._proved = False
        if not accepted:
            # The peer says nothing before we do, so only this tells that the connection is there.
            self._events = select.EPOLLIN | select.EPOLLOUT
            loop.poll.modify(sock, self._events)

    def connected(self) -> None:
        """The peer has accepted: the handshake may begin."""
        self._there = True
        self._shorten()

    def late(self, now: float) -> str:
        """Why the connection is given up; a handshake has its time, too."""
        if self.ready or not self._there:
            return super().late(now)
        limit = HANDSHAKE_SECONDS if self._accepted else CONNECT_SECONDS
        if now - self._since <= limit:
            return ""
        return str(self._refused("TIMEOUT", f"it was not done within {limit:g} s"))

    @property
    def more(self) -> bool:
        """Whether bytes were taken from the socket that no record has taken."""
        return self.ready and not self._starved and bool(self._incoming.pending or self._sealer.pending())

    def flush(self) -> None:
        """Go on with the handshake, then write what waits.

        Raises
        ------
        OSError
            The connection is gone, or the handshake failed.
        """
        if not self.ready and self._there and not self.closed:
            self._shake_hands()
        super().flush()

    def _shake_hands(self) -> None:
        try:
            while not self.ready:
                try:
                    self._sealer.do_handshake()
                    self.ready, self._proved = True, self._accepted
                except ssl.SSLWantReadError:
                    if not self._feed():
                        break
        except (ssl.SSLError, ConnectionResetError) as e:
            self._collect()
            with contextlib.suppress(OSError):
                self._write_out()  # the alert, which tells the peer why
            raise self._explained(e) from e
        self._collect()

    def _explained(self, error: OSError) -> OSError:
        """The error, or what it means if it answers our part of the handshake."""
        if self._proved:
            return error
        if not isinstance(error, ssl.SSLError):
            return self._refused("CLOSED", "the peer closed the connection")
        text = getattr(error, "verify_message", "") or error.reason or str(error)
        return self._refused(error.reason or "", str(text).lower().replace("_", " "))

    def _collect(self) -> None:
        """Take what OpenSSL wants to send."""
        if self._outgoing.pending:
            sealed = self._outgoing.read()
            self._rest = memoryview(bytes(self._rest) + sealed if self._rest else sealed)

    def _waits(self) -> bool:
        return bool(self._rest) or (self.ready and super()._waits())

    def _send(self, few: Sequence[bytes | memoryview]) -> int:
        if self._rest:
            self._rest = self._rest[self.sock.send(self._rest) :]
            if self._rest or not self.ready:
                return 0
        taken = self._seal(few)
        self._collect()
        return taken

    def _seal(self, few: Sequence[bytes | memoryview]) -> int:
        """Seal the first bytes of these; returns how many."""
        room = SEALED_BYTES
        short: list[bytes | memoryview] = []
        for part in few:
            piece = memoryview(part)[:room]
            room -= len(piece)
            if len(piece) <= _SHORT:
                short.append(piece)
            else:
                self._seal_one(memoryview(b"".join(short)))
                short.clear()
                self._seal_one(piece)
            if not room:
                break
        self._seal_one(memoryview(b"".join(short)))
        return SEALED_BYTES - room

    def _seal_one(self, piece: memoryview) -> None:
        while piece:
            piece = piece[self._sealer.write(piece) :]

    def _receive(self, into: memoryview) -> int:
        got = 0
        try:
            while self.ready and got < len(into):
                try:
                    # With a buffer it returns the count; the stubs know the call without one only.
                    n = int(self._sealer.read(len(into) - got, into[got:]))
                except ssl.SSLWantReadError:
                    if not self._feed():
                        break
                    continue
                if not n:
                    raise ConnectionResetError("closed by the peer")
                self._proved = True
                got += n
        except (ssl.SSLError, ConnectionResetError) as e:
            raise self._explained(e) from e
        if self._outgoing.pending:  # the peer wants new keys
            self._collect()
            self.loop.at_end(self._flush_or_fail)
        if not got:
            raise BlockingIOError
        return got

    def _feed(self) -> bool:
        """Take sealed bytes from the socket; False: there are none."""
        try:
            n = self.sock.recv_into(self._scratch)
        except BlockingIOError:
            self._starved = True
            return False
        if not n:
            raise ConnectionResetError("closed by the peer")
        self._starved = False
        self._incoming.write(self._scratch[:n])
        return True
