"""tcp-direct: sockets of our own, outside the event loop.

Theory of operation. distributed's comms go through asyncio, which costs more per message than the copy itself. Here two
threads per worker do all of it, however many peers there are, and each socket belongs to one of them::

    gpurt-NAME-send   links from here: connects, writes messages from where they lie (`sendmsg`), reads answers
    gpurt-NAME-recv   the listener and links to here: reads messages into pooled memory, writes answers

A link is one connection, from one sender to one receiver, for one run. `link.events` decides what is said on it,
`endpoints` writes and reads it. The GIL is free during every `sendmsg`, read and wait. On one host messages are not
sent through the socket but read where they lie (`cma`), where the kernel allows that. The kernel sees the loss of a
peer: at once when its process dies (reset), within `LOST_SECONDS` when its host or the network goes (keepalive, user
timeout).

The listener is bound to the worker's own address, never to all. A connection that has not proved itself within a second
is closed and counted. While there are `MAX_STRANGERS` of them, others wait in the kernel's queue: mostly they are
workers of a large cluster that begin a shuffle together, and one that is closed does without this transport for
seconds.

On a cluster under TLS the transport is called ``tls``: the same, with bytes sealed between link and socket (`tls`).

Rejected: a thread per connection (300 threads with 100 peers; and on two cores every further thread only competes).
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle.transport.ioloop import IoLoop
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.link_ends import LinkTransport
from dask_gpurt.shuffle.transport.select.locality import host_token
from dask_gpurt.shuffle.transport.tcp.connection import Connection
from dask_gpurt.shuffle.transport.tcp.endpoints import Pulls, TcpInbound, TcpOutbound
from dask_gpurt.shuffle.transport.tcp.listener import Listener
from dask_gpurt.shuffle.transport.tcp.tls import Tls

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from dask_gpurt.memory.pages import Pages
    from dask_gpurt.shuffle.transport.base import Header, Peer, Services
    from dask_gpurt.shuffle.transport.link.records import RunKey

logger = logging.getLogger("distributed.worker.gpurt")

#: connections that have not proved themselves yet, at most
MAX_STRANGERS = 64


class TcpTransport(LinkTransport[TcpOutbound]):
    """Messages over sockets. No link is opened before it is needed.

    Parameters
    ----------
    host
        The address of this worker; the listener is bound to it.
    tls
        Seal what is sent, with the worker's certificates. The transport is called ``tls`` then.

    Raises
    ------
    TransportUnavailable
        There are no certificates for `tls`.
    OSError
        None of the ports is free.
    """

    name = "tcp"

    def __init__(
        self,
        services: Services,
        host: str,
        pool: Pages,
        ports: tuple[int, int] = (0, 0),
        tls: bool = False,
    ) -> None:
        super().__init__(services, pool)
        self._tls = Tls(services.security, self._warn) if tls else None
        if tls:
            self.name = "tls"
        self.pulls = Pulls()
        self._inbound: set[TcpInbound] = set()
        with contextlib.ExitStack() as undo:  # a thread and its descriptors would stay for good
            self.sending = IoLoop(f"gpurt-{self.name}-send", self._failed)
            undo.callback(self.sending.stop, lambda: None)
            self.receiving = IoLoop(f"gpurt-{self.name}-recv", self._failed)
            undo.callback(self.receiving.stop, lambda: None)
            self._listener = Listener(host, ports)
            undo.pop_all()
        #: (host, port) that peers connect to; they learn the name of this host, too
        self.endpoint = self._listener.endpoint
        self.sending.on_tick = self._tick_outbound
        self.receiving.on_tick = self._tick_inbound
        self.receiving.may_wait = self._look
        self._listener.serve(self.receiving, self._accept, self._failed, self._full)

    # ---- any thread

    def endpoint_for(self, run: RunKey, sender: str) -> list[Any]:
        """(host, port, token of the host)."""
        return [*self.endpoint, host_token()]

    def forget(self, run: RunKey, peer: str | None = None) -> None:
        """End the links of a run; see `Transport.forget`."""
        self.sending.call(lambda: self._bye(lambda link: link.run == run and peer in (None, link.peer.address)))
        self.receiving.call(
            lambda: self._drop(lambda link: link.machine.run == run and peer in (None, link.machine.sender))
        )

    def stop(self) -> None:
        """End everything; returns when the threads have ended."""
        if self._stopped:
            return
        self._stopped = True
        self.sending.stop(lambda: self._bye(lambda link: True))
        self.receiving.stop(self._stop_receiving)

    def statistics(self) -> dict[str, Any]:
        """Figures as plain JSON values."""
        return super().statistics() | {
            "links_in": len(self._inbound),
            "refused_descriptors": self._listener.refused,
            "accept_pauses": self._listener.pauses,
            "placed": self.pulls.placed,
            "pulled": self.pulls.pulled,
            "pulled_bytes": self.pulls.pulled_bytes,
            "buffers_reused": self.pool.reused + self.pool.joined,
            "buffers_fresh": self.pool.fresh,
            "buffers_idle_bytes": self.pool.idle_bytes,
            "handshakes_failed": 0 if self._tls is None else self._tls.handshakes_failed,
        }

    def _warn(self, text: str) -> None:
        self.last_error = text
        logger.warning("gpurt %s transport: %s", self.name, text)

    # ---- the thread of the link

    def connection(self, sock: socket.socket, failed: Callable[[str], None], peer: str, accepted: bool) -> Connection:
        """The connection of a link from here, or of one that was `accepted`, on a socket."""
        loop = self.receiving if accepted else self.sending
        if self._tls is None:
            return Connection(loop, sock, failed, accepted)
        return self._tls.connection(loop, sock, failed, peer, accepted)

    # ---- send thread

    def connect(self, peer: Peer, header: Header) -> TcpOutbound:
        """Begin to connect to a peer."""
        return TcpOutbound(self, peer, header)

    def _tick_outbound(self, now: float) -> None:
        for link in list(self._outbound.values()):
            link.tick(now)

    # ---- receive thread

    def _accept(self, sock: socket.socket) -> None:
        self._inbound.add(TcpInbound(self, sock))

    def _full(self) -> bool:
        return sum(link.machine.state is lk.LinkState.WAITING for link in self._inbound) >= MAX_STRANGERS

    def _look(self) -> bool:
        """Before every wait: some may have proved themselves, or been closed."""
        self._listener.look()
        return True

    def inbound_closed(self, link: TcpInbound, close: lk.Close) -> None:
        """Forget a link to here that is closed."""
        self._inbound.discard(link)
        if not link.machine.sender:
            self.strangers += 1
        elif close.violation:
            self.lost += 1
            self.services.on_loss(self.name, link.machine.sender, close.reason, True)

    def _drop(self, which: Callable[[TcpInbound], bool]) -> None:
        for link in [link for link in self._inbound if which(link)]:
            link.carry_out(link.machine.bye())

    def _tick_inbound(self, now: float) -> None:
        self._listener.tick(now)
        for link in list(self._inbound):
            link.tick(now)

    def _stop_receiving(self) -> None:
        self._drop(lambda link: True)
        self._listener.close()
