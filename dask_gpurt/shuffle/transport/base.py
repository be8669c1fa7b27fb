"""What a transport is, and what it asks of the worker it serves.

A `Transport` moves messages (lists of buffers) from this worker to a `Peer`, for one run, and says by a `Receipt` how
each of them ended. It knows nothing of shuffles. `Services` is what it may ask: the secrets of the runs that are here,
credit (`ReceiveGate`), and where messages go. What transports that are made of links share is in `link_ends`.

All of it is thread-safe: a transport has threads of its own and never touches an event loop.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt.errors import GpurtError
from dask_gpurt.shuffle.transport.link.credits import Arbiter

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from distributed import Security

    from dask_gpurt.shuffle.transport.link.records import RunKey


class TransportUnavailable(GpurtError):
    """A transport cannot be used here; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A worker, and where its transport listens."""

    #: address of the worker, as the scheduler knows it
    address: str
    #: what the transport needs to reach it: (host, port), a UCX address, ...
    endpoint: Any
    #: bytes of one message that it takes, at most
    limit: int


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What goes with the buffers of a message."""

    run: RunKey
    secret: bytes
    #: bytes of credit that the message costs beyond its own: what it is expanded to is longer
    room: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Receipt:
    """How a message ended."""

    #: "" when the peer has stored it, else why not
    problem: str = ""
    #: the link was lost: whether the peer has stored the message is not known
    lost: bool = False
    #: seconds that the message was first in its link's queue and had no credit
    stall_seconds: float = 0.0


class Transport(Protocol):
    """Moves messages to peers. Methods are called from any thread and do not block."""

    name: str

    def endpoint_for(self, run: RunKey, sender: str) -> Any:
        """What a sender needs to reach this worker in a run, of types that msgpack has; the sender is now expected."""

    def submit(self, ended: Callable[[Receipt], None], peer: Peer, header: Header, buffers: Sequence[Any]) -> None:
        """Send one message.

        Parameters
        ----------
        ended
            Called once, in any thread, when the message has ended; must not block.
        buffers
            The message; they must not change until it has ended.
        """

    def forget(self, run: RunKey, peer: str | None = None) -> None:
        """End the links of a run, in both directions: with one peer, or all of them."""

    def stop(self) -> None:
        """End everything; returns when the threads have ended."""

    def statistics(self) -> dict[str, Any]:
        """Figures as plain JSON values."""


class ReceiveGate:
    """The receive budget of a worker, which tells links what they were granted. Any thread."""

    def __init__(self, budget: int) -> None:
        self._arbiter = Arbiter(budget)
        self._lock = threading.Lock()
        #: link -> called with its new total of bytes granted
        self._tell: dict[Hashable, Callable[[int], None]] = {}

    @property
    def message_limit(self) -> int:
        """Bytes of one message, at most."""
        return self._arbiter.message_limit

    def open(self, link: Hashable, tell: Callable[[int], None]) -> None:
        """Add a link. `tell` is called with new totals, in any thread, and must not block."""
        with self._lock:
            self._tell[link] = tell
            self._arbiter.open(link)
        self._grant()

    def want(self, link: Hashable, total: int) -> bool:
        """Enter that a sender needs `total` bytes granted in all. False: more than a message may have."""
        with self._lock:
            ok = self._arbiter.want(link, total)
        self._grant()
        return ok

    def arrive(self, link: Hashable, nbytes: int) -> bool:
        """Enter that a message begins to arrive. False: it was not granted, do not receive it."""
        with self._lock:
            return self._arbiter.arrive(link, nbytes)

    def overdraw(self, link: Hashable, nbytes: int) -> None:
        """Enter a message that was not granted and is received all the same."""
        with self._lock:
            self._arbiter.overdraw(link, nbytes)
        self._grant()

    def granted(self, link: Hashable) -> int:
        """Bytes that a link was granted in all."""
        with self._lock:
            return self._arbiter.granted(link)

    def stored(self, link: Hashable, nbytes: int) -> None:
        """Enter that messages were stored, or dropped."""
        with self._lock:
            self._arbiter.stored(link, nbytes)
        self._grant()

    def close(self, link: Hashable) -> None:
        """Remove a link: what was granted to it and has not arrived is free."""
        with self._lock:
            self._tell.pop(link, None)
            self._arbiter.close(link)
        self._grant()

    def _grant(self) -> None:
        with self._lock:
            grants = [(tell, total) for link, total in self._arbiter.grants().items() if (tell := self._tell.get(link))]
        for tell, total in grants:
            tell(total)

    def statistics(self) -> dict[str, int]:
        """Plain JSON values, in bytes."""
        with self._lock:
            a = self._arbiter
            return {
                "budget_bytes": a.budget,
                "reserved_bytes": a.reserved,
                "held_bytes": a.held,
                "peak_reserved_bytes": a.peak_reserved,
                "peak_held_bytes": a.peak_held,
            }


@dataclasses.dataclass(frozen=True)
class Services:
    """What a transport may ask of its worker. Every call from any thread, none blocks."""

    #: address of this worker
    address: str
    gate: ReceiveGate
    #: gives the secret of a run that is here, else None
    secret_of: Callable[[RunKey], bytes | None]
    #: (run, sender's address, frames, bytes of credit it cost, done): stores a message, then calls `done("")` or
    #: `done(why not)`
    on_message: Callable[[RunKey, str, list[Any], int, Callable[[str], None]], None]
    #: (transport, peer's address or "", reason, violation): called when a link is gone that had not ended in order
    on_loss: Callable[[str, str, str, bool], None]
    #: certificates of this worker, and what it asks of those of others; None: there are none
    security: Security | None = None
