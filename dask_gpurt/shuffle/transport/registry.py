"""Open the transports of a worker: each when a run first needs it, once, off the event loop.

What a cluster encrypts is never sent in plaintext. Sockets without TLS are opened only where the worker's address has a
scheme that is known to be plaintext (`PLAINTEXT`), and ``distributed.comm.require-encryption`` is not set. Any other
scheme counts as encrypted: with ``tls`` and ``wss`` (`CERTIFIED`) the same sockets are opened under TLS, with the
worker's certificates; with that of a plugin none are. The setting ``allow-plaintext-ucx`` permits UCX there. A
transport that cannot be opened is not tried again, and is logged once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import dask
from distributed.comm import get_address_host, parse_address

from dask_gpurt.memory.pages import pages
from dask_gpurt.shuffle.transport.select.locality import candidates

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.config import ShuffleSettings
    from dask_gpurt.shuffle.transport.base import Services, Transport
    from dask_gpurt.shuffle.transport.link.records import RunKey
    from dask_gpurt.shuffle.transport.select.selector import Locality

logger = logging.getLogger("distributed.worker.gpurt")

#: schemes of worker addresses whose comms are not encrypted. An allow-list: a scheme that is not known may be encrypted
PLAINTEXT = frozenset({"inproc", "tcp", "ucx", "ucxx", "ws"})
#: schemes of worker addresses whose workers have certificates, and a host and a port
CERTIFIED = frozenset({"tls", "wss"})


def make(name: str, services: Services, ports: tuple[int, int] = (0, 0)) -> Transport:
    """Make a transport; any thread. Takes milliseconds, tenths of a second for UCX.

    Parameters
    ----------
    ports
        That it may listen on, see `ShuffleSettings.listen_ports`. UCX has settings of its own for that.

    Raises
    ------
    TransportUnavailable
        It cannot be used here.
    """
    if name in ("tcp", "tls"):
        from dask_gpurt.shuffle.transport.tcp.transport import TcpTransport

        host = str(get_address_host(services.address))
        return TcpTransport(services, host, pages, ports=ports, tls=name == "tls")
    from dask_gpurt.shuffle.transport.ucx.transport import UcxTransport

    return UcxTransport(services, pages)


class OpenTransports:
    """The transports of one worker. Methods on the event loop.

    Parameters
    ----------
    services
        Gives what a transport may ask, by its name.
    """

    def __init__(
        self,
        address: str,
        services: Callable[[str], Services],
        settings: ShuffleSettings,
        count: Callable[..., None],
    ) -> None:
        self._scheme: str = parse_address(address)[0]
        self._services = services
        self._settings = settings
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, Transport] = {}
        #: name -> why it cannot be used here
        self.unavailable: dict[str, str] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._closed = False

    @property
    def encrypted(self) -> bool:
        """Whether the network must not see plaintext of this cluster."""
        return self._scheme not in PLAINTEXT or bool(dask.config.get("distributed.comm.require-encryption", False))

    def allowed(self, name: str) -> bool:
        """Whether a transport may be used on this cluster, to send and to receive."""
        if name == "ucx":
            return not self.encrypted or self._settings.allow_plaintext_ucx
        if name == "tls":
            return self.encrypted and self._scheme in CERTIFIED
        return name == "tcp" and not self.encrypted and self._scheme != "inproc"

    def _sealed(self, name: str) -> str:
        return "tls" if name == "tcp" and self.encrypted else name

    @property
    def forced(self) -> str:
        """The only transport to use besides the safe path, or ``auto``."""
        return self._sealed(self._settings.transport)

    def wanted(self, place: Locality) -> list[str]:
        """Transports to open for a peer at this place."""
        names = candidates(place) if self.forced == "auto" else [self.forced]
        return [name for name in map(self._sealed, names) if self.allowed(name)]

    async def get(self, name: str) -> Transport | None:
        """The transport of this name, opened if it is not; None: it is not available here."""
        if name in self._open:
            return self._open[name]
        if name in self.unavailable or self._closed:
            return None
        async with self._opening.setdefault(name, asyncio.Lock()):
            if name in self._open or name in self.unavailable:
                return self._open.get(name)
            try:
                transport = await self._loop.run_in_executor(
                    None, make, name, self._services(name), self._settings.listen_ports
                )
            except Exception as e:
                self.unavailable[name] = repr(e)
                self._count(transport_errors=1)
                logger.warning("gpurt: the %s transport is not available here: %r", name, e)
                return None
            if self._closed:
                await self._loop.run_in_executor(None, transport.stop)
                return None
            self._open[name] = transport
            return transport

    def forget(self, run: RunKey, peer: str | None = None) -> None:
        """End the links of a run; see `Transport.forget`."""
        for transport in self._open.values():
            transport.forget(run, peer)

    async def stop(self) -> None:
        """Close all of them, for good."""
        self._closed = True
        transports, self._open = list(self._open.values()), {}
        for transport in transports:
            await self._loop.run_in_executor(None, transport.stop)

    def statistics(self) -> dict[str, Any]:
        """Plain JSON values, by transport."""
        return {name: t.statistics() for name, t in self._open.items()}
