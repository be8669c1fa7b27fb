"""Real transports: right answers, credit, strangers, corruption, lost links; two workers in one process."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import os
import select
import signal
import socket
import struct
import threading
import time
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pandas as pd
import pytest
from distributed import Security
from distributed.utils_test import gen_cluster

from dask_gpurt.config import ShuffleSettings
from dask_gpurt.errors import WireError
from dask_gpurt.memory.pages import Pages, system
from dask_gpurt.shuffle.counters import worker_statistics
from dask_gpurt.shuffle.transport import ioloop, link_ends, registry
from dask_gpurt.shuffle.transport.base import Header, Peer, ReceiveGate, Services
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.records import LinkRecord, RecordKind, RunKey
from dask_gpurt.shuffle.transport.planes import PLANES
from dask_gpurt.shuffle.transport.tcp import cma, connection, listener, transport
from dask_gpurt.shuffle.transport.tcp.transport import TcpTransport
from dask_gpurt.shuffle.worker.shard_stores import MemoryShardStore
from tests.shuffle.helpers import left, mixed, ordered, receipt_of, source, spoil_arrivals, taken_over, until, whole

TWO: dict[str, Any] = {"client": True, "nthreads": [("127.0.0.1", 1)] * 2, "timeout": 120}
RUN, SECRET = RunKey(7, 1), bytes(range(16))
try:
    import ucxx  # noqa: F401

    HAS_UCX = True
except ImportError:
    HAS_UCX = False
needs_ucx = pytest.mark.skipif(not HAS_UCX, reason="needs ucxx")
WAYS = ["tcp", "tls", pytest.param("ucx", marks=needs_ucx)]


@functools.cache
def certificates() -> Security:
    return Security.temporary()


def with_transport(name: str, **more: Any) -> ShuffleSettings:
    """The settings that force a way; under TLS, sockets are sealed by themselves."""
    return ShuffleSettings(enabled=True, transport="tcp" if name == "tls" else name, **more)


def cluster_for(way: str) -> dict[str, Any]:
    """For `gen_cluster`: two workers that can use this way."""
    if way not in ("tls", "wss"):
        return TWO
    protocol = {"protocol": way}
    return TWO | {"security": certificates(), "scheduler_kwargs": protocol, "worker_kwargs": protocol}


@pytest.mark.parametrize("nth", [1, 2, 3], ids=["send", "receive", "listen"])
def test_a_transport_that_cannot_be_opened_leaves_nothing_behind(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for want of descriptors, mostly: those that it has opened must not stay."""
    made = []

    def short(real: Any) -> Any:
        def make(*args: Any) -> Any:
            made.append(real)
            if len(made) == nth:
                raise OSError(errno.EMFILE, "x")
            return real(*args)

        return make

    before, threads = sorted(os.listdir("/proc/self/fd")), set(threading.enumerate())
    monkeypatch.setattr(ioloop, "select", SimpleNamespace(epoll=short(select.epoll), EPOLLIN=select.EPOLLIN))
    monkeypatch.setattr(transport, "Listener", short(listener.Listener))
    with pytest.raises(OSError, match="x"):
        Node("tcp", "127.0.0.1:1")
    assert set(threading.enumerate()) <= threads
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


class Node:
    """One end: a transport, and messages kept for `hold_seconds` before they are said to be stored."""

    def __init__(
        self,
        kind: str,
        address: str,
        budget: int = 1 << 22,
        hold_seconds: float = 0.0,
        security: Security | None = None,
    ) -> None:
        self.received: list[bytes] = []
        self.losses: list[tuple[str, str, bool]] = []
        self.gate = ReceiveGate(budget)
        self.hold_seconds = hold_seconds
        self.address = address
        self.refuse = False
        services = Services(
            address=address,
            gate=self.gate,
            secret_of=lambda run: SECRET if run == RUN else None,
            on_message=self.message,
            on_loss=lambda name, peer, reason, violation: self.losses.append((peer, reason, violation)),
            security=security or certificates(),
        )
        pool = Pages(system())
        self.transport: Any
        if kind in ("tcp", "tls"):
            self.transport = TcpTransport(services, "127.0.0.1", pool, tls=kind == "tls")
        else:
            from dask_gpurt.shuffle.transport.ucx.transport import UcxTransport

            self.transport = UcxTransport(services, pool)

    def message(self, run: RunKey, sender: str, frames: list[Any], paid: int, done: Any) -> None:
        assert run == RUN
        text = b"".join(bytes(f) for f in frames)
        if len(text) < 8 or records.xxhash.xxh3_64_digest(text[8:]) != text[:8]:
            done("does not parse")
            return
        self.received.append(text[8:])
        if self.hold_seconds:
            threading.Timer(self.hold_seconds, done, [""]).start()
        else:
            done("")

    def peer_for(self, sender: str) -> Peer:
        return Peer(self.address, self.transport.endpoint_for(RUN, sender), self.gate.message_limit)


def message(i: int, size: int) -> list[bytes]:
    body = f"{i}:".encode().ljust(size, b"x")
    return [records.xxhash.xxh3_64_digest(body), body]


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def nodes():
    made: list[Node] = []

    def make(kind: str, address: str, **kwargs: Any) -> Node:
        made.append(Node(kind, address, **kwargs))
        return made[-1]

    yield make
    for node in made:
        node.transport.stop()
    names = ("gpurt-tcp", "gpurt-tls", "gpurt-ucx")
    assert not [t.name for t in threading.enumerate() if t.name.startswith(names)]


def send_all(node: Node, peer: Peer, messages: list[list[bytes]], secret: bytes = SECRET) -> list[str]:
    futures = [receipt_of(node.transport, peer, Header(RUN, secret), m) for m in messages]
    _done, late = wait(futures, 60)
    assert not late
    return [f.result().problem for f in futures]


@pytest.mark.parametrize("kind", WAYS)
def test_messages_of_all_sizes_arrive(nodes, kind):
    a, b = nodes(kind, "a"), nodes(kind, "b", budget=64 << 20)
    sent = [message(i, n) for i, n in enumerate([2, 63, 64, 65, 4000, 65_536, 1 << 20, (1 << 23) + 1] * 2)]
    assert send_all(a, b.peer_for("a"), sent) == [""] * len(sent)
    assert sorted(b.received) == sorted(m[1] for m in sent)
    assert b.gate.statistics()["held_bytes"] == 0
    assert not a.losses
    assert not b.losses


@pytest.mark.parametrize("kind", ["tcp", "tls"])
@pytest.mark.parametrize("pulls", [True, False])
def test_long_messages_of_one_host_are_read_where_they_lie(nodes, pulls, kind, monkeypatch):
    a, b = nodes(kind, "a"), nodes(kind, "b", budget=64 << 20)
    if not pulls:
        monkeypatch.setattr(cma, "accept", lambda body: 0)
    peer = b.peer_for("a")
    assert send_all(a, peer, [message(0, 2)]) == [""]  # the offer is made with the first
    eventually(lambda: not pulls or a.transport._outbound["b", RUN].machine.pulled)
    sizes = [100, cma.SMALLEST, (1 << 23) + 1]
    assert send_all(a, peer, [message(i, n) for i, n in enumerate(sizes)]) == [""] * 3
    assert sorted(map(len, b.received)) == sorted([2, *sizes])
    assert a.transport.statistics()["placed"] == b.transport.statistics()["pulled"] == 2 * pulls
    assert b.gate.statistics()["held_bytes"] == 0


@pytest.mark.parametrize(("near", "short"), [(1 << 31, True), (-1, False)])
def test_only_a_near_peer_gets_a_short_buffer(nodes, monkeypatch, near, short):
    """The kernel says how far away it is; a buffer that is set does not grow any more."""
    monkeypatch.setattr(connection, "NEAR_MICROSECONDS", near)
    monkeypatch.setattr(connection, "NEAR_BYTES", 1 << 16)
    a, b = nodes("tcp", "a"), nodes("tcp", "b")
    assert send_all(a, b.peer_for("a"), [message(0, 1 << 19)]) == [""]
    sock = a.transport._outbound["b", RUN].connection.sock
    size = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert (size == 1 << 16) == short


def test_what_an_offer_must_be():
    offer = cma.Offer()
    assert cma.accept(offer.body()) == os.getpid()
    pid, address, token = cma._OFFER.unpack(offer.body())
    assert not cma.accept(cma._OFFER.pack(pid, address, bytes(16)))
    assert not cma.accept(cma._OFFER.pack(pid, 8, token))
    assert not cma.accept(cma._OFFER.pack(1 << 40, address, token))
    assert not cma.accept(b"short")


def test_placed_messages_that_lie_are_refused():
    frames = [np.ones(cma.SMALLEST, np.uint8), b"", b"abc"]
    data = LinkRecord(RecordKind.DATA, RUN, 1, records.message_bytes(frames), len(frames))
    record, body = cma.placed(data, frames)
    whole = cma.fetch(os.getpid(), cma.message(record), body, lambda n: memoryview(bytearray(b"x" * n)))
    assert [bytes(f) for f in records.frames_of(data, whole)] == [bytes(f) for f in frames]
    spans = np.frombuffer(body, "<u8").reshape(-1, 2).copy()
    spans[2, 1] = (1 << 64) - 3
    with pytest.raises(WireError):
        cma.fetch(os.getpid(), data, spans.tobytes(), bytearray)
    spans[:] = np.frombuffer(body, "<u8").reshape(-1, 2)
    spans[0, 0] = 8
    with pytest.raises(OSError, match=r"address|bytes of a message"):
        cma.fetch(os.getpid(), data, spans.tobytes(), lambda n: memoryview(bytearray(n)))


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_credit_of_a_message_that_never_came_whole_is_given_back(nodes, monkeypatch, kind):
    monkeypatch.setattr(cma, "SMALLEST", 1 << 60)
    a, b = nodes(kind, "a"), nodes(kind, "b")
    peer = b.peer_for("a")
    assert send_all(a, peer, [message(0, 2)]) == [""]

    def cut():
        link = a.transport._outbound["b", RUN]
        link.connection.write(LinkRecord(RecordKind.DATA, RUN, 2, 1 << 16, 1).pack(), b"half of it")
        link.connection.flush()

    a.transport.sending.call(cut)
    eventually(lambda: b.gate.statistics()["held_bytes"] == 1 << 16)
    a.transport.stop()
    eventually(lambda: b.gate.statistics()["reserved_bytes"] == 0)


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_what_a_sender_has_let_go_of_is_not_taken_for_a_corrupt_message(nodes, kind):
    a, b = nodes(kind, "a"), nodes(kind, "b", budget=64 << 20)
    peer = b.peer_for("a")
    assert send_all(a, peer, [message(0, 2)]) == [""]
    eventually(lambda: a.transport._outbound["b", RUN].machine.pulled)
    stands, goes_on = threading.Event(), threading.Event()
    b.transport.receiving.call(lambda: (stands.set(), goes_on.wait()))
    assert stands.wait(20)
    late = receipt_of(a.transport, peer, Header(RUN, SECRET), message(1, 1 << 20))
    eventually(lambda: a.transport.statistics()["placed"] == 1)
    a.transport.forget(RUN)
    eventually(late.done)
    assert late.result().lost
    goes_on.set()
    eventually(lambda: b.transport.statistics()["links_in"] == 0)
    assert b.transport.statistics()["pulled"] == 0
    assert len(b.received) == 1
    assert b.gate.statistics()["reserved_bytes"] == 0


@pytest.mark.parametrize("smallest", [1, 1 << 60])
def test_a_message_that_finds_no_memory_ends(nodes, monkeypatch, smallest):
    """Placed or sent: it is lost, not waited for, and its credit comes back."""
    monkeypatch.setattr(cma, "SMALLEST", smallest)
    a, b = nodes("tcp", "a"), nodes("tcp", "b")
    peer = b.peer_for("a")
    assert send_all(a, peer, [message(0, 2)]) == [""]
    eventually(lambda: a.transport._outbound["b", RUN].machine.pulled)

    def none_left(nbytes: int) -> memoryview:
        raise MemoryError(nbytes)

    take, b.transport.pool.take = b.transport.pool.take, none_left
    futures = [receipt_of(a.transport, peer, Header(RUN, SECRET), message(i, 1 << 16)) for i in range(3)]
    eventually(lambda: all(f.done() for f in futures))
    assert all(f.result().lost for f in futures)
    eventually(lambda: b.gate.statistics()["reserved_bytes"] == 0)
    assert b.transport.statistics()["errors"] >= 1
    b.transport.pool.take = take
    assert send_all(a, peer, [message(4, 1 << 16)]) == [""]


@pytest.mark.parametrize("kind", WAYS)
def test_many_senders_stay_within_a_tiny_budget(nodes, kind):
    """A receiver that is slow to store: its memory for messages never exceeds its budget, and all of them arrive."""
    hub = nodes(kind, "hub", budget=1 << 18, hold_seconds=0.005)
    senders = [nodes(kind, f"s{i}") for i in range(3)]
    peers = {s.address: hub.peer_for(s.address) for s in senders}
    futures = [
        receipt_of(s.transport, peers[s.address], Header(RUN, SECRET), message(i, 50_000))
        for s in senders
        for i in range(30)
    ]
    wait(futures, 60)
    assert [f.result().problem for f in futures] == [""] * 90
    assert sum(f.result().stall_seconds for f in futures) > 0
    stats = hub.gate.statistics()
    assert stats["peak_held_bytes"] <= stats["peak_reserved_bytes"] <= 1 << 18
    assert stats["held_bytes"] == 0


@pytest.mark.parametrize("kind", WAYS)
def test_without_the_secret_nothing_arrives(nodes, kind, monkeypatch):
    monkeypatch.setattr(lk, "SILENCE_SECONDS", 1.0)
    a, b = nodes(kind, "a"), nodes(kind, "b")
    future = receipt_of(a.transport, b.peer_for("a"), Header(RUN, bytes(16)), message(0, 10))
    eventually(future.done)
    assert future.result(0).lost
    assert b.received == []
    assert b.gate.statistics()["peak_reserved_bytes"] == 0


@pytest.mark.parametrize("kind", WAYS)
def test_a_receiver_that_stops_ends_what_is_under_way(nodes, kind):
    a, b = nodes(kind, "a"), nodes(kind, "b", hold_seconds=30)
    future = receipt_of(a.transport, b.peer_for("a"), Header(RUN, SECRET), message(0, 10))
    eventually(lambda: b.received)
    b.transport.stop()
    assert future.result(15).lost
    eventually(lambda: a.losses)


@pytest.mark.parametrize("kind", WAYS)
def test_a_killed_peer_is_noticed(kind):
    """Another process; how soon is a figure of `benchmarks/transport.py --kill`."""
    from benchmarks.transport_ends import Bench

    bench = Bench("127.0.0.1", "127.0.0.1")
    try:
        future = bench.send_held(kind)
        time.sleep(0.3)
        os.kill(bench.process.pid or 0, signal.SIGKILL)
        bench.process.join()
        assert future.result(30).lost
    finally:
        bench.close()


def test_the_listener_is_bound_to_its_own_address_and_strangers_are_closed(nodes):
    b = nodes("tcp", "b")
    host, port = b.transport.endpoint
    assert host == "127.0.0.1"
    said = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        os.urandom(1000),
        LinkRecord(RecordKind.DATA, RUN, 1, 1 << 40, 1).pack(),
        LinkRecord(RecordKind.HELLO, RUN, 0, 1000).pack() + os.urandom(1000),
        LinkRecord(RecordKind.WANT, RUN, value=1 << 60).pack(),
        struct.pack("?Q", False, 1 << 24),
    ]
    for text in said:
        with socket.create_connection((host, port)) as s:
            s.sendall(text)
            s.settimeout(30)
            start = time.monotonic()
            try:
                while s.recv(1000):  # the challenge, then the end
                    pass
            except ConnectionResetError:
                pass
            assert time.monotonic() - start < 20  # one second, on a machine that has time
    eventually(lambda: b.transport.statistics()["strangers"] == len(said))
    assert b.gate.statistics()["peak_reserved_bytes"] == 0
    assert b.received == []


def test_more_workers_than_may_be_strangers_at_a_time_are_all_served(nodes, monkeypatch):
    monkeypatch.setattr("dask_gpurt.shuffle.transport.tcp.transport.MAX_STRANGERS", 2)
    b = nodes("tcp", "b")
    idle = [socket.create_connection(b.transport.endpoint) for _ in range(3)]
    senders = [nodes("tcp", f"s{i}") for i in range(6)]
    futures = [receipt_of(s.transport, b.peer_for(s.address), Header(RUN, SECRET), message(0, 100)) for s in senders]
    wait(futures, 60)
    assert [f.result().problem for f in futures] == [""] * 6
    eventually(lambda: b.transport.statistics()["strangers"] == len(idle))
    assert b.transport.statistics()["links_in"] == 6
    for s in idle:
        s.close()


class NoDescriptors:
    """A listening socket of a process whose descriptors are all in use, but for those that it closes itself."""

    def __init__(self, sock: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sock = sock
        self.left = 0
        self.calls = 0
        close, open_ = os.close, os.open
        self.spare: set[int] = set()

        def closing(fd: int) -> None:
            self.left += fd in self.spare
            self.spare.discard(fd)
            close(fd)

        def opening(*args: Any) -> int:
            if not self.left:
                raise OSError(errno.EMFILE, "Too many open files")
            self.left -= 1
            self.spare.add(fd := open_(*args))
            return fd

        monkeypatch.setattr(listener, "os", SimpleNamespace(**{**vars(os), "close": closing, "open": opening}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def accept(self) -> Any:
        self.calls += 1
        if not self.left:
            raise OSError(errno.EMFILE, "Too many open files")
        return self.sock.accept()


def in_loop(node: Node, function: Any) -> None:
    """Call it in the receiving thread, and wait."""
    done = threading.Event()
    node.transport.receiving.call(lambda: (function(), done.set()))
    assert done.wait(60)


@pytest.mark.parametrize("reserve", [True, False])
def test_without_descriptors_the_listener_is_quiet(nodes, monkeypatch, caplog, reserve):
    b = nodes("tcp", "b")
    entry = b.transport._listener
    short = NoDescriptors(entry._socket, monkeypatch)
    if reserve:
        short.spare.add(entry._spare)
    else:
        os.close(entry._spare)
        entry._spare = None
    with caplog.at_level("WARNING", "distributed.worker.gpurt"):
        in_loop(b, lambda: setattr(entry, "_socket", short))
        strangers = [socket.create_connection(b.transport.endpoint) for _ in range(30)]
        if reserve:  # each is closed at once
            for s in strangers:
                s.settimeout(30)
                assert s.recv(1) == b""
            deadline = time.monotonic() + 30  # each is counted after it is closed
            while b.transport.statistics()["refused_descriptors"] < 30 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert b.transport.statistics()["refused_descriptors"] == 30
            assert b.transport.statistics()["accept_pauses"] == 0
        else:
            eventually(lambda: b.transport.statistics()["accept_pauses"] >= 2)
            # One call of `accept` per pause, not one per turn of the loop.
            assert short.calls <= b.transport.statistics()["accept_pauses"] + 1
        # It is logged after it is counted, in the transport's thread.
        eventually(lambda: any("ulimit" in r.getMessage() for r in caplog.records))
    assert len([r for r in caplog.records if "ulimit" in r.getMessage()]) == 1
    assert b.transport.statistics()["errors"] >= 1
    # When there are some again, all is as before.
    in_loop(b, lambda: setattr(entry, "_socket", short.sock))
    for s in strangers:
        s.close()
    a = nodes("tcp", "a")
    assert send_all(a, b.peer_for("a"), [message(0, 100)]) == [""]


def test_warnings_are_logged_once_per_period():
    lines: list[str] = []
    now = [0.0]
    log = link_ends.QuietLog(SimpleNamespace(warning=lambda text, *args: lines.append(text % args)), lambda: now[0])
    for _ in range(4000):
        log.warning("short")
    now[0] = link_ends.QUIET_SECONDS
    log.warning("short")
    assert lines == ["short", "short (3999 more warnings since the last one)"]


class Spoils:
    """Changes bytes of what arrives at a transport's receiver, before anybody looks at it."""

    def __init__(self, seed: int, rate: float) -> None:
        self.random = np.random.default_rng(seed)
        self.rate = rate
        self.hits = 0

    def __call__(self, record: LinkRecord, body: memoryview) -> tuple[LinkRecord, memoryview]:
        if record.kind is RecordKind.DATA and self.random.random() < self.rate:
            self.hits += 1
            if self.random.random() < 0.2:
                body = body[: int(self.random.integers(len(body)))]
            else:
                used = records.table_bytes(record.count) + sum(
                    n for n, _ in records.lengths_of(record, body[: 8 * record.count])
                )
                at = int(self.random.integers(min(len(body), used)))
                body[at] ^= 1 << int(self.random.integers(8))
        return record, body


def same_rows(got, make, n) -> None:
    want = ordered(whole(make, n))
    pd.testing.assert_frame_equal(ordered(got), want.astype(dict(got.dtypes)))


@pytest.mark.cluster
@pytest.mark.parametrize("kind", [*WAYS, "auto", "rpc"])
def test_shuffles_are_right_over(kind):
    @gen_cluster(**cluster_for(kind))
    async def check(c, s, a, b):
        async with taken_over(s, [a, b], settings=with_transport(kind)):
            same_rows(await c.compute(source(left).shuffle("k", npartitions=5)), left, 6)
            got = await c.compute(source(mixed).shuffle("k", npartitions=4))
            assert len(got) == 6 * 200
            stats = [worker_statistics(w) for w in (a, b)]
            ways = {link["transport"] for x in stats for link in x["transport"]["links"] if link["messages_out"]}
            assert ways == {"inproc" if kind == "auto" else kind}
            assert sum(x["transport_errors"] + x["resent_safe"] + x["links_lost"] for x in stats) == 0
            if kind == "rpc":
                assert sum(x["uncredited"] for x in stats) == 0
            assert all(x["transport"]["receive"]["held_bytes"] == 0 for x in stats)

    check()


@pytest.mark.cluster
@pytest.mark.parametrize("kind", WAYS)
def test_corrupt_messages_are_sent_again_over_rpc(kind, monkeypatch):
    spoil = Spoils(0, 0.5)

    @gen_cluster(**cluster_for(kind))
    async def check(c, s, a, b):
        spoil_arrivals(monkeypatch, spoil)
        monkeypatch.setattr("dask_gpurt.shuffle.worker.sender.STAGE_BYTES", 1000)
        async with taken_over(s, [a, b], settings=with_transport(kind)):
            same_rows(await c.compute(source(left, 30).shuffle("k", npartitions=5)), left, 30)
            stats = [worker_statistics(w) for w in (a, b)]
            assert spoil.hits > 5
            assert sum(x["refused"] for x in stats) == spoil.hits
            assert sum(x["resent_safe"] for x in stats) == spoil.hits
            links = [link for x in stats for link in x["transport"]["links"]]
            assert {link["peer"] for link in links} == {a.address, b.address}
            assert sum(link["corrupt"] for link in links) == spoil.hits
            assert any(x["transport"]["last_problem"] for x in stats)

    check()


def taken_ports(n: int) -> list[socket.socket]:
    """Sockets that listen on `n` ports in a row of this host."""
    while True:
        some = [socket.socket() for _ in range(n)]
        try:
            some[0].bind(("127.0.0.1", 0))
            some[0].listen()
            first = some[0].getsockname()[1]
            for i, sock in enumerate(some[1:], 1):
                sock.bind(("127.0.0.1", first + i))
                sock.listen()
            return some
        except (OSError, OverflowError):
            for sock in some:
                sock.close()


def test_a_listener_takes_the_first_free_port_of_its_range():
    taken = taken_ports(3)
    first = taken[0].getsockname()[1]
    with pytest.raises(OSError, match=rf"listen-ports is {first}:{first + 2}, and none of these is free.*Remedy"):
        listener.Listener("127.0.0.1", (first, first + 2))
    taken[1].close()
    one = listener.Listener("127.0.0.1", (first, first + 2))
    assert one.endpoint == ("127.0.0.1", first + 1)
    with pytest.raises(OSError, match="none of these is free"):
        listener.Listener("127.0.0.1", (first, first + 2))
    for sock in (one._socket, taken[0], taken[2]):
        sock.close()


@pytest.mark.cluster
def test_a_worker_that_finds_no_port_sends_over_rpc():
    taken = taken_ports(2)
    first = taken[0].getsockname()[1]
    taken[1].close()  # one port for two workers

    @gen_cluster(**TWO)
    async def check(c, s, a, b):
        async with taken_over(s, [a, b], settings=with_transport("tcp", listen_ports=(first, first + 1))):
            same_rows(await c.compute(source(left, 30).shuffle("k", npartitions=5)), left, 30)
            found = [worker_statistics(w)["transport"]["unavailable"] for w in (a, b)]
            assert sum("none of these is free" in why.get("tcp", "") for why in found) == 1

    check()
    taken[0].close()


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_lost_links_are_survived(monkeypatch, kind):
    """Every link is cut after its first message; the rest goes over rpc."""

    @gen_cluster(**cluster_for(kind))
    async def check(c, s, a, b):
        def cut(record, body):
            if record.kind is RecordKind.DATA and record.sequence > 1:
                raise ConnectionResetError("cut")
            return record, body

        spoil_arrivals(monkeypatch, cut)
        monkeypatch.setattr("dask_gpurt.shuffle.worker.sender.STAGE_BYTES", 1000)
        async with taken_over(s, [a, b], settings=with_transport(kind)):
            same_rows(await c.compute(source(left, 20).shuffle("k", npartitions=5)), left, 20)
            stats = [worker_statistics(w) for w in (a, b)]
            assert sum(x["links_lost"] for x in stats) >= 2
            assert sum(x["resent_safe"] for x in stats) >= 2

    check()


class Slow(MemoryShardStore):
    async def put(self, run, chunk_id, chunk):
        import asyncio

        await asyncio.sleep(0.01)
        return await super().put(run, chunk_id, chunk)


def half_on_one_key(i: int) -> pd.DataFrame:
    r = np.random.default_rng(i)
    keys = r.integers(0, 1000, 20_000)
    keys[::2] = 7
    return pd.DataFrame({"k": keys, "v": r.random(20_000), "s": pd.Series(r.integers(0, 9, 20_000)).astype("str")})


@pytest.mark.cluster
@pytest.mark.parametrize("kind", [*WAYS, "rpc"])
def test_receive_memory_stays_within_its_budget(kind):
    """A slow receiver, a tiny budget, and a partition that holds half of all rows."""

    @gen_cluster(**cluster_for(kind))
    async def check(c, s, a, b):
        settings = with_transport(kind, receive_budget=1 << 18)
        async with taken_over(s, [a, b], Slow, settings=settings):
            got = await c.compute(source(half_on_one_key, 8).shuffle("k", npartitions=4))
            same_rows(got, half_on_one_key, 8)
            stats = [worker_statistics(w) for w in (a, b)]
            for x in stats:
                receive = x["transport"]["receive"]
                assert receive["peak_held_bytes"] <= receive["peak_reserved_bytes"] <= 1 << 18
                assert receive["held_bytes"] == 0
            assert max(x["transport"]["receive"]["peak_held_bytes"] for x in stats) > 0
            assert sum(x["uncredited"] + x["resent_safe"] for x in stats) == 0
            links = [link for x in stats for link in x["transport"]["links"]]
            # twice the budget at least, wherever the inputs were split
            assert sum(link["bytes_in"] for link in links) > 1 << 19

    check()


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", "tcp", "ucx"])
def test_nothing_plaintext_on_an_encrypted_cluster(transport):
    with dask.config.set({"distributed.comm.require-encryption": None}):

        @gen_cluster(**TWO)
        async def check(c, s, a, b):
            with dask.config.set({"distributed.comm.require-encryption": True}):
                settings = with_transport(transport)
                async with taken_over(s, [a, b], settings=settings):
                    same_rows(await c.compute(source(left).shuffle("k", npartitions=5)), left, 6)
                    for w in (a, b):
                        stats = worker_statistics(w)["transport"]
                        assert stats["encrypted"]
                        assert stats["transports"] == {}
                        assert {link["transport"] for link in stats["links"]} <= {"rpc", "inproc"}

        check()


@pytest.mark.parametrize(
    ("address", "tcp", "ucx", "tls"),
    [
        ("tcp://127.0.0.1:1", True, True, False),
        ("ws://127.0.0.1:1", True, True, False),
        ("ucxx://127.0.0.1:1", True, True, False),
        ("inproc://127.0.0.1/1/1", False, True, False),
        ("tls://127.0.0.1:1", False, False, True),
        ("wss://127.0.0.1:1", False, False, True),
        ("made-by-a-plugin://127.0.0.1:1", False, False, False),
    ],
)
def test_plaintext_is_opened_beside_known_plaintext_only(address, tcp, ucx, tls):
    async def able(**more: Any) -> dict[str, bool]:
        known = registry.OpenTransports(address, lambda name: None, with_transport("auto", **more), lambda **n: None)
        return {name: known.allowed(name) for name in ("tcp", "ucx", "tls", "other")}

    with dask.config.set({"distributed.comm.require-encryption": None}):
        assert asyncio.run(able()) == {"tcp": tcp, "ucx": ucx, "tls": tls, "other": False}
        assert asyncio.run(able(allow_plaintext_ucx=True)) == {"tcp": tcp, "ucx": True, "tls": tls, "other": False}
    with dask.config.set({"distributed.comm.require-encryption": True}):
        assert asyncio.run(able()) == {"tcp": False, "ucx": False, "tls": tls, "other": False}


@pytest.mark.cluster
@pytest.mark.parametrize("scheme", ["tls", "wss"])
@pytest.mark.parametrize(("transport", "way"), [("tcp", "tls"), ("auto", "inproc"), ("ucx", "rpc"), ("rpc", "rpc")])
def test_an_encrypted_cluster_opens_sockets_under_tls_only(scheme, transport, way):
    @gen_cluster(**cluster_for(scheme))
    async def check(c, s, a, b):
        assert a.address.startswith(f"{scheme}://")
        async with taken_over(s, [a, b], settings=with_transport(transport)):
            same_rows(await c.compute(source(left).shuffle("k", npartitions=5)), left, 6)
            for w in (a, b):
                stats = worker_statistics(w)["transport"]
                assert stats["encrypted"]
                assert set(stats["transports"]) == ({way} if way == "tls" else set())
                assert {link["transport"] for link in stats["links"]} == {way}

    check()


@pytest.mark.cluster
@gen_cluster(**TWO)
async def test_staged_shards_are_inside_the_send_budget(c, s, a, b):
    async with taken_over(s, [a, b]):
        same_rows(await c.compute(source(left).shuffle("k", npartitions=4)), left, 6)
        limiter = PLANES[a].unsent
        assert limiter.limit == ShuffleSettings(enabled=True).receive_budget
        seen = []
        increase = limiter.increase

        def watched(n):
            increase(n)
            seen.append(limiter._acquired)

        limiter.increase = watched
        same_rows(await c.compute(source(left).shuffle("k", npartitions=5)), left, 6)
        assert max(seen) > 0
        await until(lambda: limiter.empty)


@pytest.mark.cluster
@pytest.mark.parametrize("stage_bytes", [1 << 12, 1 << 30])
def test_what_is_staged_never_waits_for_itself(stage_bytes, monkeypatch):
    """Several inputs at a time, and a send budget that one of them fills: staged rows alone are more than it."""
    monkeypatch.setattr("dask_gpurt.shuffle.worker.sender.STAGE_BYTES", stage_bytes)

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 3)] * 2, timeout=120)
    async def check(c, s, a, b):
        async with taken_over(s, [a, b], settings=with_transport("tcp", receive_budget=1 << 16)):
            got = await c.compute(source(half_on_one_key, 12).shuffle("k", npartitions=16))
            same_rows(got, half_on_one_key, 12)
            for w in (a, b):
                limiter = PLANES[w].unsent
                assert limiter.limit == 1 << 16
                await until(lambda limiter=limiter: limiter.empty)

    check()
