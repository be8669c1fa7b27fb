"""Credit by distributed's comms: a message that went without credit costs later ones nothing."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from dask_gpurt.shuffle.transport import rpc_credit
from dask_gpurt.shuffle.transport.base import ReceiveGate
from dask_gpurt.shuffle.transport.link.credits import Arbiter
from dask_gpurt.shuffle.transport.link.records import RunKey
from tests.shuffle.invariants import check_books

KEY = RunKey(1, 1)
MiB = 1 << 20


class Peer:
    """A sender and what the receiver knows of it."""

    def __init__(self, receiver: rpc_credit.SafeReceiver, gate: ReceiveGate, name: str) -> None:
        self.receiver, self.name = receiver, name
        self.sender = rpc_credit.SafeSender(gate.message_limit)

    async def ask(self, total: int) -> dict[str, Any]:
        return await self.receiver.answer(KEY, self.name, total)

    async def send(self, nbytes: int) -> Any:
        """What to call when the message is stored; None: it went without credit."""
        await self.sender.credit(nbytes, self.ask)
        stored = self.receiver.arrive(KEY, self.name, nbytes)
        self.sender.granted({"granted": self.receiver.granted(KEY, self.name)})
        return stored


def fill(gate: ReceiveGate) -> int:
    """Somebody else holds the whole budget; returns its bytes."""
    held, each = 0, gate.message_limit
    gate.open("other", lambda total: None)
    while True:
        gate.want("other", held + each)
        if gate.granted("other") < held + each:
            return held
        assert gate.arrive("other", each)
        held += each


def test_a_message_without_credit_leaves_the_budget_whole(monkeypatch):
    async def main() -> None:
        monkeypatch.setattr(rpc_credit, "WANT_SECONDS", 0.02)
        monkeypatch.setattr(rpc_credit, "_ANSWER_SECONDS", 0.01)
        gate = ReceiveGate(64 * MiB)
        runs = {KEY}
        receiver = rpc_credit.SafeReceiver(gate, runs.__contains__)
        held = fill(gate)
        me, you = Peer(receiver, gate, "me"), Peer(receiver, gate, "you")
        for _ in range(8):
            assert await me.send(16 * MiB) is None
            check_books(gate._arbiter)
        gate.stored("other", held)
        gate.close("other")
        monkeypatch.setattr(rpc_credit, "WANT_SECONDS", 600.0)
        for peer in (me, you, me, you):
            stored = await peer.send(16 * MiB)
            assert stored is not None
            stored()
            check_books(gate._arbiter)
        told = gate.statistics()
        assert told["held_bytes"] == 0
        assert told["reserved_bytes"] <= told["budget_bytes"] // 2  # windows alone
        runs.clear()
        receiver.forget(KEY)
        assert gate.statistics()["reserved_bytes"] == 0
        # Nothing is opened again for a run that has ended.
        assert receiver.arrive(KEY, "me", 1000) is None
        assert await me.ask(10**12) == {"status": "OK"}
        assert gate.statistics()["reserved_bytes"] == 0

    asyncio.run(main())


def test_a_message_over_the_limit_uses_nobodys_credit():
    async def main() -> None:
        gate = ReceiveGate(64 * MiB)
        receiver = rpc_credit.SafeReceiver(gate, {KEY}.__contains__)
        me = Peer(receiver, gate, "me")
        (await me.send(16 * MiB))()
        for _ in range(20):
            assert await me.send(17 * MiB) is None
            stored = await me.send(16 * MiB)
            assert stored is not None
            stored()
        check_books(gate._arbiter)

    asyncio.run(main())


def test_a_run_that_leaves_while_its_peer_asks():
    """Asked for more than a message may have, as messages without credit are under way: asked again when they came."""

    async def main() -> None:
        gate = ReceiveGate(64 * MiB)
        runs = {KEY}
        receiver = rpc_credit.SafeReceiver(gate, runs.__contains__)
        asked = asyncio.ensure_future(receiver.answer(KEY, "me", 10**12))
        await asyncio.sleep(0)
        runs.clear()
        receiver.forget(KEY)
        assert await asked == {"status": "OK", "granted": 0}
        check_books(gate._arbiter)
        assert gate.statistics()["reserved_bytes"] == 0

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_books_add_up_whatever_comes_without_credit(seed):
    r = random.Random(seed)
    arbiter = Arbiter(4096)
    sent = dict.fromkeys("abc", 0)  # what both sides count
    held: list[tuple[str, int]] = []
    for link in sent:
        arbiter.open(link)
    for _ in range(3000):
        link, n = r.choice("abc"), r.randrange(1, arbiter.message_limit + 1)
        what = r.random()
        if what < 0.3:
            assert arbiter.want(link, sent[link] + n)
        elif what < 0.6:
            sent[link] += n
            if arbiter.arrive(link, n):
                held.append((link, n))
            else:
                arbiter.overdraw(link, n)
        elif held:
            arbiter.stored(*held.pop(r.randrange(len(held))))
        arbiter.grants()
        check_books(arbiter)
        for name, total in sent.items():
            assert arbiter._accounts[name].arrived == total
    for one in held:
        arbiter.stored(*one)
    for link in sent:
        arbiter.close(link)
    check_books(arbiter)
    assert arbiter.reserved == 0
