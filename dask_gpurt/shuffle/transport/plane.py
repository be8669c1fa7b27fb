"""The data plane of one worker: which way a message takes to a peer, what comes in, and what it cost.

`plane_of` gives the `Plane` of a worker. A run joins it with what receives its messages, sends by `Plane.send`, and
leaves when it closes. `Plane.answer` answers the questions of peers.

Theory of operation. For its first message to a peer a run asks the peer, over distributed's comms, for its *card*: what
listens there, and how large a message may be. That call makes the peer join the run, too, so that a link finds the run
and its secret. `TransportChooser` then picks a transport per message.

What goes wrong on a transport (a link lost, a message refused, a run unknown to the peer) ends in the safe path,
distributed's comms, which has the full semantics: retries, errors with their types, the death of a host. A message that
was stored and whose answer got lost is then there twice, and the run drops the second one by its input ids.

Every path has the same credit: the safe one asks the receiver's gate by a call before it sends (`rpc_credit`). Nothing
is opened before a run needs it (`registry`); all of it is closed with the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
import traceback
import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.model import safe_mode
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.messages import KIND, AskCard, AskCredit, Card
from dask_gpurt.shuffle.transport.base import Header, Peer, Receipt, ReceiveGate, Services
from dask_gpurt.shuffle.transport.inbox import Inbox
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.mailbox import Outcomes
from dask_gpurt.shuffle.transport.peers import LinkTable, NoRoute, Route
from dask_gpurt.shuffle.transport.planes import PLANES
from dask_gpurt.shuffle.transport.registry import OpenTransports
from dask_gpurt.shuffle.transport.rpc_credit import SafeReceiver
from dask_gpurt.shuffle.transport.select.compress import LEAST, Squeezer
from dask_gpurt.shuffle.transport.select.locality import host_token, locality_of, process_token
from dask_gpurt.shuffle.transport.select.selector import DEVICE, INPROC, SAFE, Locality, TransportChooser

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from distributed.worker import Worker

    from dask_gpurt.config import ShuffleSettings
    from dask_gpurt.shuffle.transport.inbox import RunReceiver
    from dask_gpurt.shuffle.transport.link.records import RunKey

    Safe = Callable[[], Awaitable[Any]]
    #: asks the same run on another worker (its address), by distributed's comms; `Plane.answer` answers there
    Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]

logger = logging.getLogger("distributed.worker.gpurt")

#: what other workers ask, by kind; see `Plane.answer`
QUESTIONS = frozenset({AskCard.HEAD[KIND], AskCredit.HEAD[KIND]})
#: peers whose choosers are kept
_PEERS = 4096


class Plane:
    """The data plane of one worker. Made by `plane_of`; methods on the event loop unless said otherwise.

    Parameters
    ----------
    count
        Adds to the counters of the worker's shuffles, by name.
    unsent_bytes
        Bytes that all runs may have split and not yet delivered.
    """

    def __init__(
        self, worker: Worker, settings: ShuffleSettings, count: Callable[..., None], unsent_bytes: int
    ) -> None:
        self.address = worker.address
        self._security = worker.security
        self.settings = settings
        self._count = count
        self._loop = asyncio.get_running_loop()
        self.gate = ReceiveGate(settings.receive_budget)
        #: bytes that were split and are not acknowledged, of all runs: splitting waits while there are more.
        #: distributed's own limit, 1 GiB, lets a slow peer cost this worker the memory of a whole shuffle
        self.unsent = seam.ResourceLimiter(unsent_bytes, metrics_label="p2p-comms-limiter")
        self._runs: dict[RunKey, RunReceiver] = {}
        self._secrets: dict[RunKey, bytes] = {}
        self._routes: dict[tuple[RunKey, str], asyncio.Future[Route]] = {}
        self._choosers: dict[str, TransportChooser] = {}
        self.links = LinkTable()
        self.inbox = Inbox(self._loop, self._runs, self.links, count)
        self._outcomes = Outcomes(self._loop)
        self.closed = False
        #: the next messages take distributed's comms, uncompressed: safe mode
        self.only_safe = "shuffle" in safe_mode.parts_of(worker)
        self.transports = OpenTransports(self.address, self._services, settings, count)
        self._squeezer = Squeezer(settings.codec, count)
        self._safe = SafeReceiver(self.gate, self._runs.__contains__)
        _planes[process_token(), self.address] = self

    def _services(self, name: str) -> Services:
        """What a transport may ask of this worker."""
        return Services(
            address=self.address,
            gate=self.gate,
            secret_of=self._secrets.get,
            on_message=functools.partial(self.inbox.on_message, name=name),
            on_loss=self._on_loss,
            security=self._security,
        )

    # ---- runs

    def join(self, run: RunReceiver, key: RunKey, secret: bytes) -> None:
        """Take in messages for a run from now on; its secret proves to peers that this worker takes part in it."""
        self._runs[key] = run
        self._secrets[key] = secret

    def leave(self, run: RunReceiver, key: RunKey) -> None:
        """End a run: its links close, late messages are refused. Its sends take the safe path: it has no secret."""
        if self._runs.get(key) is not run:
            return
        del self._runs[key]
        self._secrets.pop(key, None)
        self.forget(key)
        for route in [r for r in self._routes if r[0] == key]:
            del self._routes[route]

    def forget(self, key: RunKey, peer: str | None = None) -> None:
        """End the links of a run: with a peer that is lost, or all of them.

        A lost worker may be stopped, with connections that stand. What it was granted and does not send is missing to
        the others, and with a few of those no message would be granted any more.
        """
        self.transports.forget(key, peer)
        self._safe.forget(key, peer)

    # ---- sending

    async def send(
        self,
        ask: Ask,
        key: RunKey,
        peer: str,
        frames: Sequence[Any],
        safe: Safe,
    ) -> Any:
        """Send a message; returns what the safe path's call would, once the peer has stored it or refused it.

        Parameters
        ----------
        ask
            Asks peers for their card, and for credit.
        key, peer
            The run on links, and the address of the worker.
        safe
            Sends it by distributed's comms; what lies on a device it copies to the host.
        """
        try:
            route = await self._route(ask, key, peer)
        except NoRoute as e:
            return e.answer
        device = any(map(records.is_device, frames))
        nbytes = records.message_bytes(frames)
        sent, room, wire = frames, 0, 0
        # Short ones take as long as they do for other reasons than the network.
        if route.squeezes and not device and nbytes >= LEAST and not self.only_safe:
            if self._squeezer.looks(pace := route.chooser.pace):
                try:
                    sent, room = await self._loop.run_in_executor(None, self._squeezer.squeeze, frames, pace.best)
                except Exception:  # short of memory, or the codec's own: it goes as it is
                    self._count(transport_errors=1)
                    self.links.had_problem(peer, traceback.format_exc())
                pace.looked(room > 0)
            wire = nbytes - room
        start = time.monotonic()
        name = SAFE if self.only_safe or key not in self._runs else route.chooser.choose(device, start)
        if name != SAFE:
            counters = self.links.of(peer, name)
            receipt = None
            if wire:
                route.chooser.pace.began(start)
            try:
                receipt = await self._direct(name, route, key, peer, sent, room)
            finally:
                end = time.monotonic()
                if wire:
                    route.chooser.pace.ended(wire, end, receipt is not None and not receipt.problem)
            counters.stall_seconds += receipt.stall_seconds
            if not receipt.problem:
                counters.messages_out += 1
                counters.bytes_out += nbytes - room
                counters.seconds += end - start
                self._count(messages_direct=1, bytes_direct=nbytes - room)
                return {"status": "OK"}
            counters.resent += 1
            self._count(resent_safe=1)
            if receipt.lost and key in self._runs:  # else the run has cut its own links, which says nothing of the way
                route.chooser.lost(name, end, worked=counters.messages_out > 0)
            elif device and not receipt.lost:
                route.chooser.lost(DEVICE, end)
            self.links.had_problem(peer, f"{name}: {receipt.problem}")
            logger.info("message to %s is sent again over %s: %s over %s", peer, SAFE, receipt.problem, name)
        return await self._send_safe(ask, route, peer, nbytes, safe)

    async def meet(self, ask: Ask, key: RunKey, peer: str) -> Any:
        """Learn the ways to a peer, if they are not known; what goes wrong is found out again by the first message."""
        with contextlib.suppress(Exception):
            await self._route(ask, key, peer)
        return {"status": "OK"}

    def takes_device(self, key: RunKey, peer: str) -> bool:
        """Whether a message in device memory would go to a peer as it is."""
        future = self._routes.get((key, peer))
        if self.only_safe or future is None or not future.done() or future.exception() is not None:
            return False
        return future.result().chooser.choose(True, time.monotonic()) != SAFE

    async def _send_safe(self, ask: Ask, route: Route, peer: str, nbytes: int, safe: Safe) -> Any:
        """By distributed's comms, which know no memory but the host's."""
        counters = self.links.of(peer, SAFE)
        start = time.monotonic()
        counters.stall_seconds += await route.safe.credit(
            nbytes, lambda total: ask(peer, AskCredit(self.address, total).to_dict())
        )
        response = await safe()
        route.safe.granted(response)
        counters.messages_out, counters.bytes_out = counters.messages_out + 1, counters.bytes_out + nbytes
        counters.seconds += time.monotonic() - start
        return response

    async def _direct(
        self, name: str, route: Route, key: RunKey, peer: str, frames: Sequence[Any], room: int = 0
    ) -> Receipt:
        """By a transport; never raises."""
        try:
            if name == INPROC:
                return await self._hand_over(key, peer, frames)
            transport = await self.transports.get(name)
            if transport is None:
                return Receipt(self.transports.unavailable.get(name, "not available"), lost=True)
            target = route.targets.get(name)
            if target is None:
                target = route.targets[name] = Peer(peer, route.card.endpoints[name], route.card.limit)
            future, ended = self._outcomes.expect()
            header = dataclasses.replace(route.header, room=room) if room else route.header
            transport.submit(ended, target, header, frames)
            return await future
        except Exception as e:
            self._count(transport_errors=1)
            self.links.had_problem(peer, traceback.format_exc())
            return Receipt(repr(e), lost=True)

    async def _hand_over(self, key: RunKey, peer: str, frames: Sequence[Any]) -> Receipt:
        """To a worker of this process: nothing is copied and no memory is taken there, so no credit is needed."""
        other = _planes.get((process_token(), peer))
        if other is None or other.closed:
            return Receipt("the worker is gone", lost=True)
        future, ended = self._outcomes.expect()

        def done(problem: str) -> None:
            ended(Receipt(problem))

        # It was not compressed, so it has no room to be expanded.
        nbytes = records.message_bytes(frames)
        await self._loop.run_in_executor(
            None, other.inbox.on_message, key, self.address, list(frames), nbytes, done, INPROC
        )
        return await future

    async def _route(self, ask: Ask, key: RunKey, peer: str) -> Route:
        future = self._routes.get((key, peer))
        if future is not None:
            # Mostly it is there: to await it would take a turn of the loop.
            return future.result() if future.done() else await asyncio.shield(future)
        self._routes[key, peer] = future = self._loop.create_future()
        try:
            route = await self._introduce(ask, key, peer)
        except BaseException as e:
            self._routes.pop((key, peer), None)
            future.set_exception(e if isinstance(e, Exception) else ConnectionError(repr(e)))
            future.exception()  # retrieved: perhaps nothing waits for it
            raise
        future.set_result(route)
        if key not in self._runs:  # it has left, with sends under way that go on: nothing removes their routes later
            self._routes.pop((key, peer), None)
        return route

    async def _introduce(self, ask: Ask, key: RunKey, peer: str) -> Route:
        answer = await ask(peer, AskCard(self.address, process_token(), host_token()).to_dict())
        if answer.get("status") != "OK" or "endpoints" not in answer:  # it may be lost
            raise NoRoute(answer)
        card = Card.from_dict(answer)
        chooser = self._choosers.get(peer)
        if chooser is None:
            if len(self._choosers) >= _PEERS:
                self._choosers.pop(next(iter(self._choosers)))
            place = locality_of(card.process, card.host)
            able = [INPROC] if place is Locality.PROCESS else []
            # What the peer permits is not enough: its configuration may be another one.
            ways = [name for name in ("ucx", "tcp", "tls") if card.endpoints.get(name)]
            able += filter(self.transports.allowed, ways)
            chooser = self._choosers[peer] = TransportChooser(place, able, self.transports.forced)
        return Route(card, chooser, Header(key, self._secrets.get(key, b"")), self._squeezer.able(chooser, card.codecs))

    # ---- receiving

    async def answer(self, key: RunKey, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer a peer that asks, over distributed's comms, for this worker's card or for credit.

        Raises
        ------
        WireError
            A field is missing: the peer has another version.
        """
        if asked.get(KIND) == AskCredit.HEAD[KIND]:
            want = AskCredit.from_dict(asked)
            return await self._safe.answer(key, want.sender, want.total)
        question = AskCard.from_dict(asked)
        place = locality_of(question.process, question.host)
        endpoints = {}
        if place is not Locality.PROCESS or self.settings.transport != "auto":
            for name in self.transports.wanted(place):
                transport = await self.transports.get(name)
                if transport is not None:
                    endpoints[name] = transport.endpoint_for(key, question.sender)
        limit, codecs = self.gate.message_limit, self._squeezer.codecs
        return Card(process_token(), host_token(), limit, codecs, endpoints).to_dict()

    def granted(self, key: RunKey, sender: str) -> int:
        """Bytes that a sender may have sent by the safe path, in all; part of every answer."""
        return self._safe.granted(key, sender)

    def arrive(self, key: RunKey, sender: str, nbytes: int) -> Callable[[], None]:
        """Enter a message that came by the safe path; returns what to call when it is stored."""
        counters = self.links.of(sender, SAFE)
        counters.messages_in += 1
        counters.bytes_in += nbytes
        stored = self._safe.arrive(key, sender, nbytes)
        if stored is None:
            self._count(uncredited=1)
            return lambda: None
        return stored

    def _on_loss(self, name: str, peer: str, reason: str, violation: bool) -> None:
        self._count(links_lost=1)
        self.links.had_problem(peer, f"{name}: {reason}")
        logger.info("gpurt %s link with %s ended%s: %s", name, peer, " (violation)" if violation else "", reason)

    # ---- the end, and what was counted

    async def stop(self) -> None:
        """Close everything: the worker closes, or has the extension no more."""
        self.closed = True
        for key, run in list(self._runs.items()):
            self.leave(run, key)
        await self.transports.stop()

    def statistics(self) -> dict[str, Any]:
        """Plain JSON values: per peer and transport, per transport, and the receive budget."""
        return {
            "links": self.links.statistics(),
            "transports": self.transports.statistics(),
            "unavailable": dict(self.transports.unavailable),
            "last_problem": dict(self.links.problems),
            "receive": self.gate.statistics(),
            "encrypted": self.transports.encrypted,
        }


#: (process, address) -> plane: for the hand-over between workers of one process
_planes: weakref.WeakValueDictionary[tuple[str, str], Plane] = weakref.WeakValueDictionary()


def plane_of(
    worker: Worker, plugin: seam.ShuffleWorkerPlugin, settings: ShuffleSettings, count: Callable[..., None]
) -> Plane:
    """The data plane of a worker, made on first use and stopped with the worker's shuffle plugin.

    Parameters
    ----------
    worker
        On whose event loop this is called.
    plugin
        Its shuffle plugin, whose limit of unsent bytes holds if it is lower.
    settings
        Of the shuffle; other ones than before replace the plane.
    """
    plane = PLANES.get(worker)
    if not isinstance(plane, Plane) or plane.closed or plane.settings != settings:
        if isinstance(plane, Plane) and not plane.closed:
            seam.in_background(worker, plane.stop)
        theirs = plugin.memory_limiter_comms.limit
        limit = settings.receive_budget if theirs is None else min(theirs, settings.receive_budget)
        plane = PLANES[worker] = Plane(worker, settings, count, limit)
        seam.on_teardown(plugin, plane.stop)
    return plane
