"""ucx: tag-matched messages over shared memory, RDMA or NVLink, host and device buffers alike.

Theory of operation. One thread owns a UCX context (`backends.ucx`), progresses it, sleeps in epoll when there is
nothing to do, and runs the machines of the links. There is no listener: a worker's UCX address is on its card, which
travels over distributed's comms. A link uses four tags. Only those who know the run's secret can compute them, so a
message of a stranger matches no receive::

    knock     sender -> receiver, once: MAC and the sender's UCX address, so that the receiver can answer
    control   sender -> receiver: records, and the table of a message
    data      sender -> receiver: the frames of messages, in order
    answers   receiver -> sender: records

Frames are received into pooled memory after their lengths were compared with what was granted, never into a
user's memory. UCX keeps the order of messages of one tag between two workers; that pairs frames with their records.

Device buffers. What waits for the device or allocates there runs beside the UCX thread (`backends.ucx_device`). A
message is sent when its bytes are in memory that peers may read, and received into memory that is ready. Where the
device has none, the message is refused, and its sender takes the safe way.

A receive that waits for a peer's *answer* belongs to the worker, not to the endpoint, so UCX does not fail it when the
peer dies: endpoints are asked on every tick whether they are alive (keepalive 1 s).
"""

from __future__ import annotations

import collections
import select
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends import ucx as backend
from dask_gpurt.backends.ucx_device import device_side
from dask_gpurt.shuffle.transport.base import Receipt, TransportUnavailable
from dask_gpurt.shuffle.transport.ioloop import IoLoop
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link_ends import LinkTransport
from dask_gpurt.shuffle.transport.ucx.endpoints import Request, UcxInbound, UcxOutbound, nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.backends.ucx_device import DeviceSide
    from dask_gpurt.memory.pages import Pages
    from dask_gpurt.shuffle.transport.base import Header, Peer, Services
    from dask_gpurt.shuffle.transport.link import events as lk
    from dask_gpurt.shuffle.transport.link.records import RunKey

#: seconds that an expected sender has to knock; then it is forgotten
KNOCK_SECONDS = 30.0


class UcxTransport(LinkTransport[UcxOutbound]):
    """Messages over UCX.

    Parameters
    ----------
    device
        What device buffers need; None: that of CUDA, where there is a GPU.

    Raises
    ------
    TransportUnavailable
        No ucxx here, or UCX does not start.
    """

    name = "ucx"

    def __init__(self, services: Services, pool: Pages, device: DeviceSide | None = None) -> None:
        if problem := backend.available():
            raise TransportUnavailable(problem)
        super().__init__(services, pool)
        self.requests: collections.deque[Request] = collections.deque()
        self.closing: collections.deque[tuple[float, Any]] = collections.deque()
        self._inbound: dict[tuple[str, RunKey], UcxInbound] = {}
        #: those of them that have not knocked
        self._knocks: set[UcxInbound] = set()
        self.ucx: backend.UcxWorker
        self.device = device_side() if device is None else device
        self._entered = False
        self._lock = threading.Lock()
        #: runs what waits for the device; made for the first message that lies there
        self._beside: ThreadPoolExecutor | None = None
        self.sending = IoLoop("gpurt-ucx", self._failed)
        ready: Future[bytes] = Future()
        self.sending.call(lambda: self._start(ready))
        try:
            #: what peers need to reach this worker
            self.address = ready.result(60)
        except Exception as e:
            self.sending.stop(nothing)
            raise TransportUnavailable(f"UCX does not start here: {e!r}") from e

    def _start(self, ready: Future[bytes]) -> None:
        try:
            if self.device is not None and self.device.in_use():
                self.enter_device()
            self.ucx = backend.UcxWorker()
            self.sending.poll.register(self.ucx.fileno, select.EPOLLIN)
            self.sending.may_wait = self._progress
            self.sending.on_tick = self._tick
            ready.set_result(self.ucx.address)
        except Exception as e:
            ready.set_exception(e)

    # ---- any thread

    def endpoint_for(self, run: RunKey, sender: str) -> bytes:
        """The UCX address of this worker; a knock of the sender is expected from now on."""

        def expect() -> None:
            secret = self.services.secret_of(run)
            if secret is not None and (sender, run) not in self._inbound and not self._stopped:
                link = self._inbound[sender, run] = UcxInbound(self, run, secret, sender)
                self._knocks.add(link)

        self.sending.call(expect)
        return self.address

    def submit(self, ended: Callable[[Receipt], None], peer: Peer, header: Header, buffers: Sequence[Any]) -> None:
        """Send one message; see `Transport.submit`. One that lies on the device is sent when its bytes are there."""
        if self.device is None or not any(map(records.is_device, buffers)):
            super().submit(ended, peer, header, buffers)
            return
        prepare = self.device.prepare

        def prepared(future: Future[list[Any]]) -> None:
            def send() -> None:
                try:
                    ready = future.result()  # cancelled, where the transport was stopped
                    if not self._stopped:
                        self.enter_device()
                except Exception as e:
                    ended(Receipt(f"the device did not bring the message: {e!r}", lost=self._stopped))
                    return
                self._submit(ended, peer, header, ready)

            self.sending.call(send)

        try:
            self.beside(lambda: prepare(buffers)).add_done_callback(prepared)
        except RuntimeError as e:  # it was stopped meanwhile
            ended(Receipt(repr(e), lost=True))

    def beside(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call that waits for the device, or allocates there, in another thread."""
        with self._lock:
            if self._stopped:
                raise RuntimeError("the transport was stopped")
            if self._beside is None:
                self._beside = ThreadPoolExecutor(2, thread_name_prefix="gpurt-ucx-device")
            return self._beside.submit(call)

    def forget(self, run: RunKey, peer: str | None = None) -> None:
        """End the links of a run; see `Transport.forget`."""

        def end() -> None:
            self._bye(lambda link: link.run == run and peer in (None, link.peer.address))
            self._drop(lambda link: link.run == run and peer in (None, link.expected))

        self.sending.call(end)

    def stop(self) -> None:
        """End everything; returns when the thread has ended."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            beside = self._beside
        if beside is not None:
            beside.shutdown(cancel_futures=True)

        def last() -> None:
            self._bye(lambda link: True)
            self._drop(lambda link: True)
            deadline = time.monotonic() + 0.2
            while time.monotonic() < deadline and self.ucx.progress():
                pass
            self.closing.clear()
            self.ucx.close()
            self.requests.clear()

        self.sending.stop(last)

    def statistics(self) -> dict[str, Any]:
        """Figures as plain JSON values."""
        return super().statistics() | {"links_in": len(self._inbound), "requests": len(self.requests)}

    # ---- UCX thread

    def enter_device(self) -> None:
        """Give this thread the context of the device; a second call does nothing."""
        if not self._entered and self.device is not None:
            self.device.enter()
            self._entered = True

    def connect(self, peer: Peer, header: Header) -> UcxOutbound:
        """Open an endpoint to a peer, and knock."""
        return UcxOutbound(self, peer, header)

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

    def _drop(self, which: Callable[[UcxInbound], bool]) -> None:
        for link in [link for link in self._inbound.values() if which(link)]:
            machine = link.machine
            link.carry_out(machine.bye() if link.endpoint is not None else machine.lost("the run ended"))

    def inbound_closed(self, link: UcxInbound, close: lk.Close) -> None:
        """Forget a link to here that is closed."""
        self._inbound.pop((link.expected, link.run), None)
        if close.violation:
            self.strangers += not link.machine.sender
            self.lost += 1
            self.services.on_loss(self.name, link.expected, close.reason, True)
