"""A transport without sockets, for tests: a network in memory that reorders, copies, delays, loses and spoils.

Theory of operation. `MemoryNetwork` is a simulation on a virtual clock: records wait in a list with the time at which
they arrive, a seeded random generator decides their fate, and `run` plays events in order of time until nothing is
left. The same state machines (`events`) and the same credit (`credits`, behind `base.ReceiveGate`) run in it as over
sockets.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import random
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport.base import Receipt
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.receiver import ReceiverLink
from dask_gpurt.shuffle.transport.link.records import LinkRecord, RecordKind
from dask_gpurt.shuffle.transport.link.sender import SenderLink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.shuffle.transport.base import Header, Peer, Services
    from dask_gpurt.shuffle.transport.link.records import RunKey


@dataclasses.dataclass(frozen=True)
class Weather:
    """Probabilities, per record, of what happens to it; delays in seconds of the virtual clock."""

    lose: float = 0.0
    copy: float = 0.0
    spoil: float = 0.0
    #: a record takes up to so long; more than 0 reorders
    jitter_seconds: float = 0.0


class MemoryNetwork:
    """Where `MemoryTransport`s meet.

    Parameters
    ----------
    seed
        Of all that is random.
    """

    def __init__(self, seed: int = 0, weather: Weather | None = None) -> None:
        self.weather = weather or Weather()
        self.random = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.members: dict[str, MemoryTransport] = {}
        #: pairs of workers between which everything is lost
        self.cut: set[frozenset[str]] = set()

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._count), event))

    def carry(self, a: str, b: str, deliver: Callable[[bytes, bytes], None], head: bytes, body: bytes) -> None:
        """Bring a record from one worker to another, or not."""
        w, r = self.weather, self.random
        if frozenset((a, b)) in self.cut or r.random() < w.lose:
            return
        for _ in range(2 if r.random() < w.copy else 1):
            if r.random() < w.spoil:
                whole = bytearray(head + body)
                whole[r.randrange(len(whole))] ^= 1 << r.randrange(8)
                if r.random() < 0.3:
                    del whole[r.randrange(len(whole)) :]
                head, body = bytes(whole[: len(head)]), bytes(whole[len(head) :])
            self.later(r.random() * w.jitter_seconds, lambda h=head, t=body: deliver(h, t))  # type: ignore[misc]

    def run(self, seconds: float = 60.0) -> None:
        """Play what happens within the next `seconds`, ticks every half of one included."""
        end = self.now + seconds
        while self.now < end:
            until = min(end, self.now + 0.5)
            while self._events and self._events[0][0] <= until:
                self.now, _, event = heapq.heappop(self._events)
                event()
            self.now = until
            for member in list(self.members.values()):
                member.tick()


class MemoryTransport:
    """One worker on a `MemoryNetwork`. Not thread-safe, and nothing happens outside of `MemoryNetwork.run`."""

    name = "memory"

    def __init__(self, network: MemoryNetwork, services: Services) -> None:
        self.network, self.services = network, services
        self.endpoint = services.address
        self._outbound: dict[tuple[str, RunKey], _Out] = {}
        self._inbound: set[_In] = set()
        self.strangers = self.lost = 0
        network.members[services.address] = self

    def endpoint_for(self, run: RunKey, sender: str) -> Any:
        return self.endpoint

    def submit(self, ended: Callable[[Receipt], None], peer: Peer, header: Header, buffers: Sequence[Any]) -> None:
        key = (peer.address, header.run)
        if (out := self._outbound.get(key)) is None:
            out = self._outbound[key] = _Out(self, peer, header)
        out.carry_out(out.machine.submit(ended, buffers, self.network.now, header.room))

    def forget(self, run: RunKey, peer: str | None = None) -> None:
        for (address, key), out in list(self._outbound.items()):
            if key == run and peer in (None, address):
                out.carry_out(out.machine.bye())
        for i in list(self._inbound):
            if i.machine.run == run and peer in (None, i.machine.sender):
                i.carry_out(i.machine.bye())

    def stop(self) -> None:
        for out in list(self._outbound.values()):
            out.carry_out(out.machine.bye())
        for i in list(self._inbound):
            i.carry_out(i.machine.bye())
        self.network.members.pop(self.services.address, None)

    def tick(self) -> None:
        for out in list(self._outbound.values()):
            out.carry_out(out.machine.tick(self.network.now))
        for i in list(self._inbound):
            i.carry_out(i.machine.tick(self.network.now))

    def statistics(self) -> dict[str, Any]:
        return {"strangers": self.strangers, "lost": self.lost, "links_in": len(self._inbound)}

    def connect(self, out: _Out) -> _In:
        i = _In(self, out)
        self._inbound.add(i)
        return i

    def _gone(self, out: _Out, close: lk.Close) -> None:
        self._outbound.pop((out.peer.address, out.machine.run), None)
        if not close.quiet:
            self.lost += 1
            self.services.on_loss(self.name, out.peer.address, close.reason, close.violation)


def _closed(end: _Out | _In) -> None:
    end.carry_out(end.machine.lost("closed by the peer"))


class _Out:
    def __init__(self, owner: MemoryTransport, peer: Peer, header: Header) -> None:
        self.owner, self.peer = owner, peer
        nonce = owner.network.random.randbytes(records.NONCE_BYTES)
        self.machine = SenderLink(
            *(header.run, header.secret, owner.services.address, peer.address, peer.limit, nonce, owner.network.now)
        )
        there = owner.network.members.get(peer.address)
        self.other: _In | None = None
        if there is not None:
            self.other = there.connect(self)
            self.other.carry_out(self.other.machine.start())

    def arrived(self, head: bytes, body: bytes) -> None:
        try:
            record = LinkRecord.unpack(head)
            if len(body) != record.length:
                raise WireError("cut short")
        except WireError as e:
            self.carry_out(self.machine.lost(str(e)))
            return
        self.carry_out(self.machine.receive(record, body, self.owner.network.now))

    def carry_out(self, instructions: list[lk.Instruction]) -> None:
        net = self.owner.network
        for i in instructions:
            if isinstance(i, lk.Send) and self.other is not None:
                body = i.body
                if i.record.kind is RecordKind.DATA:
                    frames = [bytes(b).ljust(records.padded(len(b)), b"\0") for b in map(bytes, i.buffers)]
                    body = records.table(i.buffers) + b"".join(frames)
                net.carry(self.owner.services.address, self.peer.address, self.other.arrived, i.record.pack(), body)
            elif isinstance(i, lk.Ended):
                i.token(Receipt(i.problem, i.lost, i.stall_seconds))
            elif isinstance(i, lk.Close):
                self.owner._gone(self, i)
                if self.other is not None:  # as a socket would
                    net.later(0, functools.partial(_closed, self.other))


class _In:
    def __init__(self, owner: MemoryTransport, out: _Out) -> None:
        self.owner, self.out = owner, out
        self.machine = ReceiverLink(
            *(owner.services.address, owner.services.secret_of),
            lambda n: owner.services.gate.arrive(self, n),
            *(owner.network.random.randbytes(records.NONCE_BYTES), owner.network.now),
        )

    def arrived(self, head: bytes, body: bytes) -> None:
        try:
            record = LinkRecord.unpack(head)
        except WireError as e:
            self.carry_out(self.machine.violation(str(e)))
            return
        verdict, instructions = self.machine.admit(record)
        self.carry_out(instructions)
        if verdict is not lk.Verdict.NO:
            fresh = verdict is lk.Verdict.YES
            self.carry_out(self.machine.receive(record, memoryview(body), self.owner.network.now, fresh=fresh))

    def carry_out(self, instructions: list[lk.Instruction]) -> None:
        net, gate = self.owner.network, self.owner.services.gate
        for i in instructions:
            if isinstance(i, lk.Send):
                a, b = self.owner.services.address, self.out.owner.services.address
                net.carry(a, b, self.out.arrived, i.record.pack(), i.body)
            elif isinstance(i, lk.Opened):
                gate.open(self, lambda total: self.carry_out(self.machine.granted(total)))
            elif isinstance(i, lk.Wanted):
                if not gate.want(self, i.total):
                    self.carry_out(self.machine.violation("more than a message may have"))
            elif isinstance(i, lk.Deliver):
                self._deliver(i)
            elif isinstance(i, lk.Close):
                gate.close(self)
                self.owner._inbound.discard(self)
                if not self.machine.sender:
                    self.owner.strangers += 1
                net.later(0, functools.partial(_closed, self.out))

    def _deliver(self, deliver: lk.Deliver) -> None:
        def done(problem: str) -> None:
            self.owner.services.gate.stored(self, deliver.nbytes)
            self.carry_out(self.machine.stored(deliver.sequence, problem))

        self.owner.services.on_message(self.machine.run, self.machine.sender, deliver.frames, deliver.nbytes, done)
