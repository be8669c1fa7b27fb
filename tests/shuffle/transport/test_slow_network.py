"""A network that takes longer for one message than a peer may be silent."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

from dask_gpurt.shuffle.transport.base import Header
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.tcp import cma, connection
from tests.shuffle.helpers import receipt_of
from tests.shuffle.transport.test_transports import RUN, SECRET, Node, eventually, message, nodes, send_all  # noqa: F401


def ticked(node: Node, link: Any, now: float) -> None:
    """Have time pass for a link from here."""
    done = threading.Event()
    node.transport.sending.call(lambda: (link.tick(now), done.set()))
    assert done.wait(20)


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_link_lives_while_its_bytes_get_there(nodes, monkeypatch, kind):  # noqa: F811
    monkeypatch.setattr(cma, "SMALLEST", 1 << 60)
    monkeypatch.setattr(connection, "LOST_SECONDS", 60)
    a, b = nodes(kind, "a"), nodes(kind, "b", budget=256 << 20)
    assert send_all(a, b.peer_for("a"), [message(0, 2)]) == [""]
    a.transport.sending.on_tick = lambda now: None  # time is the test's
    link, sock = a.transport._outbound["b", RUN], next(iter(b.transport._inbound)).connection.sock
    stands, goes_on = threading.Event(), threading.Event()
    b.transport.receiving.call(lambda: (stands.set(), goes_on.wait(60)))
    assert stands.wait(20)
    future = receipt_of(a.transport, b.peer_for("a"), Header(RUN, SECRET), message(1, 32 << 20))

    def step(now: float) -> None:
        """The peer's kernel takes a little of the message; it says nothing itself."""
        before, look = link.connection._acked, link.connection.moves

        def taken() -> bool:
            with contextlib.suppress(BlockingIOError):
                sock.recv(1 << 18)
            look()
            moved: bool = link.connection._acked - before >= connection.MOVED_BYTES
            link.connection._acked = before
            return moved

        eventually(taken)
        ticked(a, link, now)

    try:
        now = time.monotonic()
        for _ in range(8):
            now += lk.SILENCE_SECONDS / 2
            step(now)
            assert not future.done()

        # And is given up when they do not.
        def given_up() -> bool:
            nonlocal now
            now += lk.SILENCE_SECONDS / 2
            ticked(a, link, now)
            return future.done()

        eventually(given_up)
        assert "nothing heard" in future.result().problem
    finally:
        goes_on.set()


def test_a_stopped_peer_whose_kernel_takes_pings_is_given_up(nodes, monkeypatch):  # noqa: F811
    a, b = nodes("tcp", "a"), nodes("tcp", "b")
    assert send_all(a, b.peer_for("a"), [message(0, 2)]) == [""]
    a.transport.sending.on_tick = lambda now: None
    link = a.transport._outbound["b", RUN]
    stands, goes_on = threading.Event(), threading.Event()
    b.transport.receiving.call(lambda: (stands.set(), goes_on.wait(60)))
    assert stands.wait(20)
    try:
        future = receipt_of(a.transport, b.peer_for("a"), Header(RUN, SECRET), message(1, 100))
        now = time.monotonic() + 1
        before = link.connection._acked
        while not future.done() and now < time.monotonic() + 10 * lk.SILENCE_SECONDS:
            now += lk.PING_SECONDS
            ticked(a, link, now)
        assert "nothing heard" in future.result(20).problem
        assert link.connection._acked > before  # it did take them
    finally:
        goes_on.set()
