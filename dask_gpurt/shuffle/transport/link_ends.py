"""What transports that are made of links share: both ends of a link, and the links from here with what went wrong.

`OutboundEnd` and `InboundEnd` carry out what the machines of a link instruct; a `LinkTransport` holds them.

Theory of operation. A machine (`sender`, `receiver`) says *what*: send this, this message ended, close. How bytes are
written and how a connection is closed differs by transport, and is `put` and `shut`. Everything else is the same for
all transports, and is here: messages end, credit is opened, wanted and closed at the gate, messages go to the worker,
and their answers come back into the transport's thread.

All methods run in the thread of the link's loop, unless said otherwise.
"""

from __future__ import annotations

import abc
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from dask_gpurt.shuffle.transport.base import Receipt
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.mailbox import Mailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.memory.pages import Pages
    from dask_gpurt.shuffle.transport.base import Header, Peer, Services
    from dask_gpurt.shuffle.transport.ioloop import IoLoop
    from dask_gpurt.shuffle.transport.link.receiver import ReceiverLink
    from dask_gpurt.shuffle.transport.link.records import RunKey
    from dask_gpurt.shuffle.transport.link.sender import SenderLink

logger = logging.getLogger("distributed.worker.gpurt")
#: between two warnings of one transport, which may come thousands of times per second
QUIET_SECONDS = 30.0


class OutboundOwner(Protocol):
    """What a link from here belongs to."""

    def outbound_closed(self, link: Any, close: lk.Close) -> None:
        """The link is closed, its messages have ended."""


class InboundOwner(Protocol):
    """What a link to here belongs to."""

    services: Services

    def inbound_closed(self, link: Any, close: lk.Close) -> None:
        """The link is closed, nothing more comes from it."""


class LinkEnd(abc.ABC):
    """One end of a link; `put` and `shut` are the transport's."""

    @abc.abstractmethod
    def put(self, send: lk.Send) -> None:
        """Write a record, now or as soon as it goes. Any exception: the link is lost."""

    @abc.abstractmethod
    def shut(self) -> None:
        """Close the connection; a second call does nothing."""

    @abc.abstractmethod
    def lost(self, reason: str) -> None:
        """The connection is gone."""

    @abc.abstractmethod
    def violated(self, reason: str) -> None:
        """The peer did what it must not."""


class OutboundEnd(LinkEnd):
    """The end of a link from here."""

    peer: Peer
    run: RunKey
    machine: SenderLink
    owner: OutboundOwner

    def submit(self, ended: Callable[[Receipt], None], buffers: Sequence[Any], room: int) -> None:
        """Send a message."""
        self.carry_out(self.machine.submit(ended, buffers, time.monotonic(), room))

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self.carry_out(self.machine.lost(reason))

    def violated(self, reason: str) -> None:
        """The receiver did what it must not."""
        self.lost(reason)

    def carry_out(self, instructions: list[lk.Instruction]) -> None:
        """Do what the machine says, in order."""
        for i in instructions:
            if isinstance(i, lk.Send):
                try:
                    self.put(i)
                except Exception as e:
                    self.lost(repr(e))
            elif isinstance(i, lk.Ended):
                if i.lost:
                    # First: a receiver may be about to read the message where it lies, and what it finds there once the
                    # message has ended is anything (`cma`).
                    self.shut()
                i.token(Receipt(i.problem, i.lost, i.stall_seconds))
            elif isinstance(i, lk.Close):
                self.shut()
                self.owner.outbound_closed(self, i)


class InboundEnd(LinkEnd):
    """The end of a link to here."""

    machine: ReceiverLink
    owner: InboundOwner
    #: whose thread this link lives in
    loop: IoLoop
    #: an answer is about to be written, which carries the credit
    _answering = False
    #: bytes that were granted and began to arrive, of a message that is not whole
    _arriving = 0

    def __init__(self) -> None:
        #: messages that are stored, or why not, and were not answered: sequence, bytes, problem
        self._ended: Mailbox[tuple[int, int, str]] = Mailbox(lambda look: self.loop.call(look), self._answer)

    def lost(self, reason: str) -> None:
        """The connection is gone."""
        self.carry_out(self.machine.lost(reason))

    def violated(self, reason: str) -> None:
        """The sender did what it must not."""
        self.carry_out(self.machine.violation(reason))

    def arrive(self, nbytes: int) -> bool:
        """Enter that a message of so many bytes begins to arrive; False: it was not granted."""
        granted = self.owner.services.gate.arrive(self, nbytes)
        self._arriving += granted * nbytes
        return granted

    def offered(self, body: bytes) -> None:
        """The sender says where in its memory a token lies; a transport that cannot read it does nothing."""

    def _tell(self, total: int) -> None:
        """New credit; any thread."""

        def granted() -> None:
            instructions = self.machine.granted(total)
            if not self._answering:
                self.carry_out(instructions)

        self.loop.call(granted)

    def _deliver(self, deliver: lk.Deliver) -> None:
        sequence, nbytes, frames = deliver
        self._arriving -= nbytes

        def done(problem: str) -> None:
            self._ended.put((sequence, nbytes, problem))

        self.owner.services.on_message(self.machine.run, self.machine.sender, frames, nbytes, done)

    def refuse(self, instructions: list[lk.Instruction], problem: str) -> None:
        """Do what the machine says, but for messages to deliver: those are answered by `problem`."""
        for i in instructions:
            if isinstance(i, lk.Deliver):
                self._arriving -= i.nbytes
                self._ended.put((i.sequence, i.nbytes, problem))
            else:
                self.carry_out([i])

    def _answer(self) -> None:
        """Answer what has ended, all of it: the gate is asked once."""
        waiting = self._ended.waiting
        some = [waiting.popleft() for _ in range(len(waiting))]
        # Before the answers, so that they carry the credit that the messages give back.
        self._answering = True
        try:
            self.owner.services.gate.stored(self, sum(nbytes for _, nbytes, _ in some))
        finally:
            self._answering = False
        for sequence, _, problem in some:
            self.carry_out(self.machine.stored(sequence, problem))

    def carry_out(self, instructions: list[lk.Instruction]) -> None:
        """Do what the machine says, in order."""
        gate = self.owner.services.gate
        for i in instructions:
            if isinstance(i, lk.Send):
                try:
                    self.put(i)
                except Exception as e:
                    self.lost(repr(e))
            elif isinstance(i, lk.Opened):
                gate.open(self, self._tell)
            elif isinstance(i, lk.Wanted):
                if not gate.want(self, i.total):
                    self.violated(f"{i.total} bytes wanted, more than a message may have")
            elif isinstance(i, lk.Deliver):
                self._deliver(i)
            elif isinstance(i, lk.Offered):
                self.offered(i.body)
            elif isinstance(i, lk.Close):
                self.shut()
                gate.close(self)
                # What never came whole is never stored: without this its credit would be gone for good.
                gate.stored(self, self._arriving)
                self._arriving = 0
                self.owner.inbound_closed(self, i)


class QuietLog:
    """Log the first warning of each period. Thread-safe."""

    def __init__(self, logger: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._now = now
        self._next = -math.inf
        self._left_out = 0
        self._lock = threading.Lock()

    def warning(self, text: str) -> None:
        """Log it, unless a line of this period was logged. The next line says how many were left out."""
        with self._lock:
            now = self._now()
            if now < self._next:
                self._left_out += 1
                return
            self._next = now + QUIET_SECONDS
            before, self._left_out = self._left_out, 0
        self._logger.warning("%s%s", text, f" ({before} more warnings since the last one)" if before else "")


L = TypeVar("L", bound=OutboundEnd)


class LinkTransport(abc.ABC, Generic[L]):
    """The links from here of one transport, each made for its first message, and what went wrong.

    Parameters
    ----------
    services
        What it may ask of its worker.
    pool
        Where messages are received into.
    """

    name: str
    #: whose thread the links from here live in
    sending: IoLoop

    def __init__(self, services: Services, pool: Pages) -> None:
        self.services, self.pool = services, pool
        self._outbound: dict[tuple[str, RunKey], L] = {}
        #: links to here that did not prove themselves, links lost, errors in a thread of the transport
        self.strangers = self.lost = self.errors = 0
        self.last_error = ""
        self._log = QuietLog(logger)
        self._stopped = False

    @abc.abstractmethod
    def connect(self, peer: Peer, header: Header) -> L:
        """A new link to a peer; in the send thread."""

    # ---- any thread

    def submit(self, ended: Callable[[Receipt], None], peer: Peer, header: Header, buffers: Sequence[Any]) -> None:
        """Send one message; see `Transport.submit`."""
        self.sending.call(lambda: self._submit(ended, peer, header, buffers))

    def statistics(self) -> dict[str, Any]:
        """Figures as plain JSON values."""
        return {
            "links_out": len(self._outbound),
            "strangers": self.strangers,
            "lost": self.lost,
            "errors": self.errors,
            "last_error": self.last_error,
        }

    def _failed(self, text: str) -> None:
        self.errors += 1
        self.last_error = text
        self._log.warning(f"gpurt {self.name} transport: {text.splitlines()[-1]}")

    # ---- send thread

    def _submit(self, ended: Callable[[Receipt], None], peer: Peer, header: Header, buffers: Sequence[Any]) -> None:
        if self._stopped:
            ended(Receipt("the transport was stopped", lost=True))
            return
        key = (peer.address, header.run)
        try:
            link = self._outbound.get(key)
            if link is None:
                link = self._outbound[key] = self.connect(peer, header)
            link.submit(ended, buffers, header.room)
        except Exception as e:
            # Whatever it was: the message must end.
            self._outbound.pop(key, None)
            self.services.on_loss(self.name, peer.address, repr(e), False)
            ended(Receipt(repr(e), lost=True))  # a second call, if it is one, does nothing

    def _bye(self, which: Callable[[L], bool]) -> None:
        for link in [link for link in self._outbound.values() if which(link)]:
            link.carry_out(link.machine.bye())

    def outbound_closed(self, link: L, close: lk.Close) -> None:
        """Forget a link from here that is closed."""
        self._outbound.pop((link.peer.address, link.run), None)
        if not close.quiet:
            self.lost += 1
            self.services.on_loss(self.name, link.peer.address, close.reason, close.violation)
