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
import logging
import select
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends import ucx as backend
from dask_gpurt.shuffle.transport.base import Receipt, TransportUnavailable
from dask_gpurt.shuffle.transport.quiet_log import QuietLog
from dask_gpurt.shuffle.transport.tcp.ioloop import IoLoop
from dask_gpurt.shuffle.transport.ucx.endpoints import Request, UcxInbound, UcxOutbound, nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.memory.pages import Pages
    from dask_gpurt.shuffle.transport.base import Header, Peer, Services
    from dask_gpurt.shuffle.transport.link import events as lk
    from dask_gpurt.shuffle.transport.link.records import Record, RunKey

logger = logging.getLogger("distributed.worker.gpurt")

#: an expected sender that has not knocked by then is forgotten
KNOCK_SECONDS = 30.0


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
        self.requests: collections.deque[Request] = collections.deque()
        self.closing: collections.deque[tuple[float, Any]] = collections.deque()
        self._outbound: dict[tuple[str, RunKey], UcxOutbound] = {}
        self._inbound: dict[tuple[str, RunKey], UcxInbound] = {}
        self._knocks: set[UcxInbound] = set()
        self.lost = self.errors = self.strangers = 0
        self.last_error = ""
        self._log = QuietLog(logger)
        self._stopped = False
        self.ucx: backend.UcxWorker
        self.loop = IoLoop("gpurt-ucx", self._failed)
        ready: Future[bytes] = Future()
        self.loop.call(lambda: self._start(ready))
        try:
            #: what peers need to reach us
            self.address = ready.result(60)
        except Exception as e:
            self.loop.stop(nothing)
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
                link = self._inbound[sender, run] = UcxInbound(self, run, secret, sender)
                self._knocks.add(link)

        self.loop.call(expect)
        return self.address

    def submit(self, ended: Callable[[Receipt], None], peer: Peer, header: Header, buffers: Sequence[Any]) -> None:
        self.loop.call(lambda: self._submit(ended, peer, header, buffers))

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
        self._log.warning(f"gpurt ucx transport: {text.splitlines()[-1]}")

    # ---- UCX thread

    def arrived(self, record: Record, body: memoryview) -> tuple[Record, memoryview]:
        """What came from the wire, before anybody looks at it; tests replace this."""
        return record, body

    def _submit(self, ended: Callable[[Receipt], None], peer: Peer, header: Header, buffers: Sequence[Any]) -> None:
        if self._stopped:
            ended(Receipt("the transport was stopped", lost=True))
            return
        key = (peer.address, header.run)
        try:
            link = self._outbound.get(key)
            if link is None:
                link = self._outbound[key] = UcxOutbound(self, peer, header)
            link.submit(ended, buffers, header.room)
        except Exception as e:
            # Whatever it was: the message must end.
            self._outbound.pop(key, None)
            self.services.on_loss(self.name, peer.address, repr(e), False)
            ended(Receipt(repr(e), lost=True))  # a second call, if it is one, does nothing

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

    def _end(
        self, out: Callable[[UcxOutbound], bool], inbound: Callable[[UcxInbound], bool] = lambda link: False
    ) -> None:
        for o in [o for o in self._outbound.values() if out(o)]:
            o.carry_out(o.machine.bye())
        for i in [i for i in self._inbound.values() if inbound(i)]:
            i.carry_out(i.machine.bye() if i.endpoint is not None else i.machine.lost("the run ended"))

    def outbound_closed(self, link: UcxOutbound, close: lk.Close) -> None:
        self._outbound.pop((link.peer.address, link.run), None)
        if not close.quiet:
            self.lost += 1
            self.services.on_loss(self.name, link.peer.address, close.reason, close.violation)

    def inbound_closed(self, link: UcxInbound, close: lk.Close) -> None:
        self._inbound.pop((link.expected, link.run), None)
        if close.violation:
            self.strangers += not link.machine.sender
            self.lost += 1
            self.services.on_loss(self.name, link.expected, close.reason, True)
