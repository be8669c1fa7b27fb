"""The data plane under TLS: certificates checked by both sides, nothing readable on the wire, failures that end well.

That it does what the other ways do is in `test_transports`, which runs over it as over the others.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from typing import Any

import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle.counters import worker_statistics
from dask_gpurt.shuffle.transport import registry
from dask_gpurt.shuffle.transport.base import Header, Peer, TransportUnavailable
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.records import LinkRecord, RecordKind
from dask_gpurt.shuffle.transport.tcp import cma, tls
from tests.shuffle.helpers import left, receipt_of, source, taken_over

from .certificates import DAY, Authority
from .test_transports import (  # noqa: F401
    RUN,
    SECRET,
    Node,
    cluster_for,
    eventually,
    message,
    nodes,
    same_rows,
    send_all,
    with_transport,
)

HEADER = Header(RUN, SECRET)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def stranger() -> Authority:
    return Authority("another cluster")


def failures(node: Node) -> int:
    return int(node.transport.statistics()["handshakes_failed"])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "TLS handshake" in r.getMessage()]


def context(authority: Authority, **of_member: Any) -> ssl.SSLContext:
    """As a peer has it that connects."""
    made: ssl.SSLContext = authority.member(**of_member).get_connection_args("worker")["ssl_context"]
    return made


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        # OpenSSL names the authority that is not known, or what is missing, by what the peer sent.
        ("another authority", ("unable to get local issuer certificate", "self-signed certificate")),
        ("expired", ("certificate has expired",)),
    ],
)
def test_a_wrong_certificate_is_refused(nodes, authority, stranger, caplog, who, what, says):  # noqa: F811
    good = authority.member()
    bad = stranger.member() if what == "another authority" else authority.member(lasts=-DAY)
    a = nodes("tls", "a", security=bad if who == "sender" else good)
    b = nodes("tls", "b", security=bad if who == "receiver" else good)
    peer = b.peer_for("a")
    with caplog.at_level("WARNING", "distributed.worker.gpurt"):
        for _ in range(3):
            receipt = receipt_of(a.transport, peer, HEADER, message(0, 10)).result(30)
            assert receipt.lost
            assert "TLS handshake" in receipt.problem
        eventually(lambda: failures(a) == failures(b) == 3)
    assert b.received == []
    assert b.gate.statistics()["peak_reserved_bytes"] == 0
    eventually(lambda: b.transport.statistics()["strangers"] == 3)
    # One line on each side, however often; the one that has checked the certificate says what is wrong with it.
    lines = warnings(caplog)
    assert len(lines) == 2
    assert any(text in line for text in says for line in lines)
    assert all("Remedy: certificates that are valid now, of one authority, on all workers" in line for line in lines)


def test_who_has_no_certificate_learns_nothing(nodes, authority):  # noqa: F811
    b = nodes("tls", "b", security=authority.member())
    naked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    naked.check_hostname = False
    naked.load_verify_locations(cadata=authority.pem)
    said = b""
    with (
        socket.create_connection(b.transport.endpoint, 30) as sock,
        contextlib.suppress(ssl.SSLError, ConnectionError),
        naked.wrap_socket(sock) as sealed,
    ):
        said = sealed.recv(1000)
    assert said == b""
    eventually(lambda: failures(b) == 1)
    eventually(lambda: b.transport.statistics()["strangers"] == 1)


def test_who_has_a_certificate_still_needs_the_secret(nodes, authority):  # noqa: F811
    b = nodes("tls", "b", security=authority.member())
    with (
        socket.create_connection(b.transport.endpoint, 30) as sock,
        context(authority).wrap_socket(sock) as sealed,
    ):
        assert len(sealed.recv(1000)) == records.HEADER_BYTES + records.NONCE_BYTES  # the challenge
        sealed.sendall(LinkRecord(RecordKind.DATA, RUN, 1, 1 << 20, 1).pack())
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert sealed.recv(1000) == b""
    eventually(lambda: b.transport.statistics()["strangers"] == 1)
    assert failures(b) == 0
    assert b.gate.statistics()["peak_reserved_bytes"] == 0


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", LinkRecord(RecordKind.HELLO, RUN, 0, 100).pack() + bytes(100), b"\0" * 1000]
)
def test_who_speaks_plaintext_is_not_answered_in_it(nodes, caplog, said):  # noqa: F811
    b = nodes("tls", "b")
    with caplog.at_level("WARNING", "distributed.worker.gpurt"):
        heard = b""
        with socket.create_connection(b.transport.endpoint, 30) as sock:
            sock.sendall(said)
            try:
                while text := sock.recv(1000):
                    heard += text
            except ConnectionResetError:
                pass
        eventually(lambda: failures(b) == 1)
    assert records.MAGIC not in heard
    assert len(heard) <= 7  # an alert
    assert len(warnings(caplog)) == 1
    assert "Remedy: none if it is a scan of ports" in warnings(caplog)[0]


@pytest.mark.parametrize("said", [b"", bytes.fromhex("1603010200010001fc0303")])
def test_a_handshake_that_stalls_has_its_time(nodes, monkeypatch, said):  # noqa: F811
    monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(lk, "HELLO_SECONDS", 100)
    b = nodes("tls", "b")
    with socket.create_connection(b.transport.endpoint, 30) as sock:
        sock.sendall(said)
        assert sock.recv(1000) == b""
    eventually(lambda: failures(b) == 1)
    eventually(lambda: b.transport.statistics()["strangers"] == 1)
    assert b.transport.statistics()["links_in"] == 0


def test_a_receiver_that_never_answers_the_handshake_is_given_up(nodes, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setattr(tls, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(lk, "SILENCE_SECONDS", 100)
    a = nodes("tls", "a")
    with caplog.at_level("WARNING", "distributed.worker.gpurt"), socket.create_server(("127.0.0.1", 0)) as silent:
        receipt = receipt_of(a.transport, Peer("b", [*silent.getsockname()], 1 << 20), HEADER, message(0, 9)).result(30)
    assert receipt.lost
    assert "not done within 0.5 s" in receipt.problem
    assert failures(a) == 1
    assert "that worker is overloaded" in warnings(caplog)[0]


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_a_receiver_without_tls_is_given_up(nodes, said):  # noqa: F811
    a = nodes("tls", "a")
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def answer() -> None:
            sock, _ = plain.accept()
            with sock:
                heard.append(sock.recv(1 << 16))
                sock.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        receipt = receipt_of(a.transport, Peer("b", [*plain.getsockname()], 1 << 20), HEADER, message(0, 9)).result(30)
        thread.join()
    assert receipt.lost
    assert failures(a) == 1
    assert records.MAGIC not in heard[0]


@pytest.mark.parametrize(
    ("wants", "version", "cipher"),
    [
        ({"tls_min_version": ssl.TLSVersion.TLSv1_3}, "TLSv1.3", ""),
        ({"tls_max_version": ssl.TLSVersion.TLSv1_2}, "TLSv1.2", ""),
        (
            {"tls_max_version": ssl.TLSVersion.TLSv1_2, "tls_ciphers": "ECDHE-ECDSA-CHACHA20-POLY1305"},
            "TLSv1.2",
            "ECDHE-ECDSA-CHACHA20-POLY1305",
        ),
    ],
)
def test_versions_and_ciphers_are_the_clusters(nodes, authority, wants, version, cipher, monkeypatch):  # noqa: F811
    security = authority.member(**wants)
    a, b = nodes("tls", "a", security=security), nodes("tls", "b", security=security, budget=64 << 20)
    monkeypatch.setattr(cma, "accept", lambda body: 0)
    sent = [message(i, n) for i, n in enumerate([2, 16_384, (1 << 23) + 1])]
    assert send_all(a, b.peer_for("a"), sent) == [""] * 3
    assert sorted(b.received) == sorted(m[1] for m in sent)
    sealer = a.transport._outbound["b", RUN].connection._sealer
    assert sealer.version() == version
    assert not cipher or sealer.cipher()[0] == cipher


def test_versions_that_do_not_meet_are_refused(nodes, authority, caplog):  # noqa: F811
    a = nodes("tls", "a", security=authority.member(tls_max_version=ssl.TLSVersion.TLSv1_2))
    b = nodes("tls", "b", security=authority.member(tls_min_version=ssl.TLSVersion.TLSv1_3))
    with caplog.at_level("WARNING", "distributed.worker.gpurt"):
        assert receipt_of(a.transport, b.peer_for("a"), HEADER, message(0, 10)).result(30).lost
        eventually(lambda: failures(a) == failures(b) == 1)
    assert all("Remedy: one range of distributed.comm.tls.min-version" in line for line in warnings(caplog))
    assert b.received == []


@pytest.mark.parametrize("given", [None, "none"])
def test_without_certificates_it_is_not_available(given, monkeypatch):
    from distributed import Security

    security = None if given is None else Security()
    services = type("Services", (), {"security": security, "address": "tls://127.0.0.1:1"})()
    with pytest.raises(TransportUnavailable, match=r"Remedy: distributed\.comm\.tls\.ca-file"):
        registry.make("tls", services)  # type: ignore[arg-type]
    assert not [t for t in threading.enumerate() if t.name.startswith("gpurt-tls")]


def test_a_context_that_does_not_check_the_peer_is_not_used(authority):
    security = authority.member()

    class Careless:
        def get_listen_args(self, role: str) -> dict[str, Any]:
            given = security.get_listen_args(role)
            given["ssl_context"].verify_mode = ssl.CERT_OPTIONAL
            return given

        get_connection_args = security.get_connection_args

    with pytest.raises(TransportUnavailable, match="that both sides check"):
        tls.Tls(Careless(), print)  # type: ignore[arg-type]


class Wire:
    """Between two nodes: hears all that goes to the receiver, and may change it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.heard = bytearray()
        self.spoil_at: int | None = None
        self.server = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self.server]
        threading.Thread(target=self._accept, daemon=True).start()

    def peer(self) -> Peer:
        return Peer(self.node.address, [*self.server.getsockname()[:2]], self.node.gate.message_limit)

    def _accept(self) -> None:
        try:
            while True:
                near, _ = self.server.accept()
                far = socket.create_connection(self.node.transport.endpoint)
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()
        except OSError:
            return

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while text := bytearray(source.recv(1 << 16)):
                if self.spoil_at is not None and len(self.heard) + len(text) > self.spoil_at:
                    text[max(0, self.spoil_at - len(self.heard))] ^= 1
                    self.spoil_at = None
                self.heard += text
                target.sendall(text)
        except OSError:
            pass
        for sock in (source, target):
            sock.close()

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


@pytest.mark.parametrize(("kind", "readable"), [("tls", False), ("tcp", True)])
def test_nothing_can_be_read_on_the_wire(nodes, kind, readable):  # noqa: F811
    a, b = nodes(kind, "a"), nodes(kind, "b", budget=64 << 20)
    wire = Wire(b)
    bodies = [f"{i}: ".encode() + b"Salary " * n for i, n in enumerate([20, 1000, 150_000])]
    sent = [[records.xxhash.xxh3_64_digest(body), body] for body in bodies]
    assert send_all(a, wire.peer(), sent) == [""] * 3
    assert sorted(b.received) == sorted(bodies)
    wire.close()
    assert len(wire.heard) > sum(map(len, bodies))
    for text in (b"Salary", records.MAGIC + bytes([records.VERSION])):
        assert (text in wire.heard) == readable


def test_what_is_changed_on_the_wire_is_never_delivered(nodes):  # noqa: F811
    a, b = nodes("tls", "a"), nodes("tls", "b", budget=64 << 20)
    wire = Wire(b)
    wire.spoil_at = 300_000
    futures = [receipt_of(a.transport, wire.peer(), HEADER, message(i, 100_000)) for i in range(8)]
    receipts = [f.result(30) for f in futures]
    assert any(r.lost for r in receipts)
    stored = {m[1] for m, r in zip((message(i, 100_000) for i in range(8)), receipts, strict=True) if not r.problem}
    assert stored <= set(b.received)
    assert set(b.received) <= {message(i, 100_000)[1] for i in range(8)}
    eventually(lambda: bool(a.losses or b.losses))
    eventually(lambda: b.gate.statistics()["reserved_bytes"] == 0)
    assert failures(a) == failures(b) == 0  # the handshake was right
    wire.close()


def test_many_links_share_the_threads(nodes, monkeypatch):  # noqa: F811
    """Several senders at a time, long and short messages; each byte arrives once."""
    hub = nodes("tls", "hub", budget=1 << 26)
    monkeypatch.setattr(cma, "accept", lambda body: 0)
    senders = [nodes("tls", f"s{i}") for i in range(5)]
    peers = {s.address: hub.peer_for(s.address) for s in senders}
    sent = [(s, message(100 * j + i, n)) for j, s in enumerate(senders) for i, n in enumerate([5, 70_000, 2_000_000])]
    futures = [receipt_of(s.transport, peers[s.address], HEADER, m) for s, m in sent]
    assert [f.result(60).problem for f in futures] == [""] * len(sent)
    assert sorted(hub.received) == sorted(m[1] for _, m in sent)


@pytest.mark.cluster
def test_a_shuffle_goes_on_over_rpc_where_certificates_are_wrong(stranger, caplog, monkeypatch):
    """One worker's files were changed for another cluster's, and its comms are open since before."""
    monkeypatch.setattr("dask_gpurt.shuffle.worker.sender.STAGE_BYTES", 1000)
    monkeypatch.setattr("dask_gpurt.shuffle.transport.select.selector.BACKOFF_SECONDS", 0.1)

    @gen_cluster(**cluster_for("tls"))
    async def check(c, s, a, b):
        b.security = stranger.member()
        async with taken_over(s, [a, b], settings=with_transport("tls")):
            start = time.monotonic()
            same_rows(await c.compute(source(left, 30).shuffle("k", npartitions=5)), left, 30)
            assert time.monotonic() - start < 60  # no handshake is waited for until a timeout ends it
            stats = [worker_statistics(w) for w in (a, b)]
            assert sum(x["resent_safe"] for x in stats) > 0
            assert all(x["transport"]["transports"]["tls"]["handshakes_failed"] > 0 for x in stats)
            links = [link for x in stats for link in x["transport"]["links"]]
            assert not any(link["messages_in"] for link in links if link["transport"] == "tls")
            assert all(x["transport"]["receive"]["held_bytes"] == 0 for x in stats)

    with caplog.at_level("WARNING", "distributed.worker.gpurt"):
        check()
    lines = warnings(caplog)
    assert 2 <= len(lines) <= 6  # per worker and reason, not per message
    assert all("Remedy: " in line for line in lines)
