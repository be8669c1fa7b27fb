"""Peers that are lost to a run while their connections stand: their processes are stopped."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dask_gpurt.shuffle.transport.base import Header, ReceiveGate
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.link.records import LinkRecord, RecordKind
from dask_gpurt.shuffle.transport.rpc_credit import SafeReceiver
from tests.shuffle.helpers import receipt_of
from tests.shuffle.transport.test_transports import RUN, SECRET, WAYS, Node, eventually, message, nodes, send_all  # noqa: F401


def wants_and_stops(node: Node, hub: Node) -> None:
    """Have a sender ask for credit for its longest message, and send nothing."""
    done = threading.Event()

    def ask() -> None:
        link = node.transport._outbound[hub.address, RUN]
        total = hub.gate.granted(next(i for i in inbound(hub) if i.machine.sender == node.address))
        link.put(lk.Send(LinkRecord(RecordKind.WANT, RUN, value=total + hub.gate.message_limit)))
        done.set()

    node.transport.sending.call(ask)
    assert done.wait(20)


def inbound(hub: Node) -> list[Any]:
    links = hub.transport._inbound
    return list(links.values() if isinstance(links, dict) else links)


@pytest.mark.parametrize("kind", WAYS)
def test_what_lost_senders_were_granted_is_there_for_the_others(nodes, kind):  # noqa: F811
    hub = nodes(kind, "hub", budget=1 << 20)
    senders = [nodes(kind, f"s{i}") for i in range(3)]
    peers = {s.address: hub.peer_for(s.address) for s in senders}
    for s in senders:
        assert send_all(s, peers[s.address], [message(0, 2)]) == [""]
    *stopped, lives = senders
    before = hub.gate.statistics()["reserved_bytes"]
    for s in stopped:
        wants_and_stops(s, hub)
    eventually(lambda: hub.gate.statistics()["reserved_bytes"] >= before + 2 * hub.gate.message_limit - 1000)
    future = receipt_of(lives.transport, peers[lives.address], Header(RUN, SECRET), message(1, 250_000))
    eventually(lambda: lives.transport._outbound["hub", RUN].machine._stalled_since is not None)
    assert not future.done()
    for s in stopped:
        hub.transport.forget(RUN, s.address)
    assert future.result(20).problem == ""
    eventually(lambda: [i.machine.sender for i in inbound(hub)] == [lives.address])
    # In the other direction, too, and nothing else.
    lives.transport.forget(RUN, "another")
    assert send_all(lives, peers[lives.address], [message(2, 10)]) == [""]
    lives.transport.forget(RUN, "hub")
    eventually(lambda: not lives.transport.statistics()["links_out"])


def test_the_safe_path_forgets_a_lost_sender_only() -> None:
    async def check() -> None:
        gate = ReceiveGate(1 << 16)
        receiver = SafeReceiver(gate, lambda run: True)
        for sender in ("a", "b"):
            await receiver.answer(RUN, sender, 100)
        receiver.forget(RUN, "a")
        assert receiver.granted(RUN, "a") == 0
        assert receiver.granted(RUN, "b") >= 100
        receiver.forget(RUN)
        assert gate.statistics()["reserved_bytes"] == 0

    asyncio.run(check())
