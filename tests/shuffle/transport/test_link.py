"""The protocol of the transports in simulation: whatever the network does, each message ends once and none is wrong."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport.base import Header, Peer, ReceiveGate, Services
from dask_gpurt.shuffle.transport.link import events as lk
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.credits import Arbiter
from dask_gpurt.shuffle.transport.link.receiver import ReceiverLink
from dask_gpurt.shuffle.transport.link.records import LinkRecord, RecordKind, RunKey
from dask_gpurt.shuffle.transport.link.sender import SenderLink
from tests.shuffle.helpers import receipt_of
from tests.shuffle.invariants import check_books
from tests.shuffle.transport.memory_network import MemoryNetwork, MemoryTransport, Weather

RUN = RunKey(7, 1)
SECRET = bytes(range(16))
STEPS = ["open", "want", "arrive", "stored", "close"]


class Worker:
    """A worker on the network that stores messages after a while."""

    def __init__(
        self, net: MemoryNetwork, address: str, budget: int, store_seconds: float = 0.1, secret: bytes = SECRET
    ):
        self.net, self.store_seconds = net, store_seconds
        self.stored: list[tuple[str, bytes]] = []
        self.losses: list[str] = []
        self.gate = ReceiveGate(budget)
        services = Services(
            address=address,
            gate=self.gate,
            secret_of=lambda run: secret if run == RUN else None,
            on_message=self.message,
            on_loss=lambda name, peer, reason, violation: self.losses.append(reason),
        )
        self.transport = MemoryTransport(net, services)

    def message(self, run: RunKey, sender: str, frames: list[Any], paid: int, done: Any) -> None:
        assert run == RUN
        text = b"".join(map(bytes, frames))
        # the checksum that every real message carries
        if len(text) < 8 or records.xxhash.xxh3_64_digest(text[8:]) != text[:8]:
            done("does not parse")
            return

        def store() -> None:
            check_books(self.gate._arbiter)
            self.stored.append((sender, text[8:]))
            done("")

        self.net.later(self.net.random.random() * self.store_seconds, store)

    def peer(self) -> Peer:
        return Peer(self.transport.endpoint, self.transport.endpoint, self.gate.message_limit)


def message(sender: str, i: int, size: int) -> list[bytes]:
    body = f"{sender}:{i}:".encode().ljust(size, b"x")
    return [records.xxhash.xxh3_64_digest(body), body]


weather = st.builds(
    Weather,
    lose=st.sampled_from([0.0, 0.0, 0.02]),
    copy=st.sampled_from([0.0, 0.1, 0.5]),
    spoil=st.sampled_from([0.0, 0.0, 0.05]),
    jitter_seconds=st.sampled_from([0.0, 0.01, 1.0]),
)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    weather=weather,
    senders=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    budget=st.sampled_from([4096, 20_000, 100_000]),
    cut=st.booleans(),
)
def test_every_message_ends_once_and_none_is_wrong(seed, weather, senders, sizes, budget, cut):
    net = MemoryNetwork(seed, weather)
    hub = Worker(net, "hub", budget)
    workers = [Worker(net, f"w{i}", budget) for i in range(senders)]
    receipts = []
    for w in workers:
        for i, size in enumerate(sizes):
            sender = w.transport.services.address
            future = receipt_of(w.transport, hub.peer(), Header(RUN, SECRET), message(sender, i, size))
            receipts.append((sender, message(sender, i, size)[1], future))
    if cut:
        net.later(0.5, lambda: net.cut.add(frozenset(("hub", "w0"))))
    net.run(120)
    check_books(hub.gate._arbiter)
    assert hub.gate.statistics()["peak_reserved_bytes"] <= budget
    assert hub.gate.statistics()["held_bytes"] == 0
    for sender, body, future in receipts:
        assert future.done()
        n = hub.stored.count((sender, body))
        receipt = future.result()
        # What was said to be stored is; a copy may be stored under a second link only, and there is none.
        assert n == 1 if not receipt.problem else n <= 1
        if not weather.lose and not weather.spoil and not cut and weather.jitter_seconds < 1:
            reordered = weather.jitter_seconds > 0
            assert not receipt.problem or reordered or "too large" in receipt.problem, receipt
    sent = {(sender, body) for sender, body, _ in receipts}
    assert set(hub.stored) <= sent


def test_fair_weather_delivers_everything_within_a_tiny_budget():
    net = MemoryNetwork(1)
    hub = Worker(net, "hub", 8192, store_seconds=1.0)
    workers = [Worker(net, f"w{i}", 8192) for i in range(5)]
    futures = [
        receipt_of(w.transport, hub.peer(), Header(RUN, SECRET), message(w.transport.endpoint, i, 1000))
        for i in range(40)
        for w in workers
    ]
    net.run(600)
    assert [f.result().problem for f in futures] == [""] * 200
    assert len(hub.stored) == 200
    stats = hub.gate.statistics()
    assert 0 < stats["peak_reserved_bytes"] <= 8192
    assert not hub.losses
    stalls = [f.result().stall_seconds for f in futures]
    assert min(stalls) == 0  # the first of a link has credit
    # Most wait: the receiver stores two at a time, each within a second. No two of one link wait at a time.
    for i in range(5):
        assert 10 < sum(stalls[i::5]) < 600


def test_a_stranger_and_a_wrong_secret_get_nothing():
    net = MemoryNetwork(2)
    hub = Worker(net, "hub", 1 << 20)
    bad = Worker(net, "bad", 1 << 20, secret=bytes(16))
    future = receipt_of(bad.transport, hub.peer(), Header(RUN, bytes(16)), message("bad", 0, 10))
    other = receipt_of(bad.transport, hub.peer(), Header(RunKey(9, 9), SECRET), message("bad", 0, 10))
    net.run(5)
    assert future.result().lost
    assert other.result().lost
    assert not hub.stored
    assert hub.transport.statistics()["strangers"] == 2
    assert hub.gate.statistics()["peak_reserved_bytes"] == 0


def test_a_receiver_without_the_secret_gets_nothing():
    net = MemoryNetwork(3)
    squatter = Worker(net, "hub", 1 << 20, secret=bytes(16))
    w = Worker(net, "w", 1 << 20)
    future = receipt_of(w.transport, squatter.peer(), Header(RUN, SECRET), message("w", 0, 10))
    net.run(5)
    assert future.result().lost
    assert not squatter.stored


def test_a_cut_link_is_noticed_and_later_messages_end():
    net = MemoryNetwork(4)
    hub, w = Worker(net, "hub", 1 << 20), Worker(net, "w", 1 << 20)
    assert receipt_of(w.transport, hub.peer(), Header(RUN, SECRET), message("w", 0, 10))
    net.run(1)
    net.cut.add(frozenset(("hub", "w")))
    future = receipt_of(w.transport, hub.peer(), Header(RUN, SECRET), message("w", 1, 10))
    net.run(lk.SILENCE_SECONDS + 1)
    assert future.result().lost
    assert "nothing heard" in w.losses[0]


# ---- the machines, state by state


def sender() -> SenderLink:
    return SenderLink(RUN, SECRET, "a", "b", 1 << 20, b"n" * 16, 0.0)


def receiver(arrive=lambda n: True) -> ReceiverLink:
    return ReceiverLink("b", lambda run: SECRET, arrive, b"c" * 16, 0.0)


def greet(s: SenderLink, r: ReceiverLink) -> None:
    (challenge,) = r.start()
    (hello,) = s.receive(challenge.record, challenge.body, 0.0)
    r.admit(hello.record)
    welcome, opened = r.receive(hello.record, hello.body, 0.0)
    assert opened == lk.Opened("a")
    s.receive(welcome.record, welcome.body, 0.0)
    assert s.state is r.state is lk.LinkState.OPEN


@pytest.mark.parametrize("state", list(lk.LinkState))
@pytest.mark.parametrize("kind", list(RecordKind))
def test_every_record_in_every_state_of_a_sender(state, kind):
    s = sender()
    s.submit("m", [b"x"], 0.0)
    s.state = state
    out = s.receive(LinkRecord(kind, RUN, sequence=99), b"", 0.0)
    if state is lk.LinkState.CLOSED:
        assert out == []
    elif (state, kind) not in s._TABLE:
        assert s.state is lk.LinkState.CLOSED
        assert lk.Ended("m", out[-1].reason, lost=True) in out
        assert out[-1].violation


@pytest.mark.parametrize("state", [lk.LinkState.WAITING, lk.LinkState.OPEN, lk.LinkState.CLOSED])
@pytest.mark.parametrize("kind", list(RecordKind))
def test_every_record_in_every_state_of_a_receiver(state, kind):
    r = receiver(lambda n: False)
    r.run, r.state = RUN, state
    verdict, out = r.admit(LinkRecord(kind, RUN, sequence=1, length=64, count=1))
    allowed = (state, kind) in r._TABLE and kind is not RecordKind.DATA
    assert (verdict is lk.Verdict.YES) == allowed
    assert bool(out) == (not allowed and state is not lk.LinkState.CLOSED)


def test_more_than_granted_is_not_received():
    s, r = sender(), receiver(lambda n: n <= 128)
    greet(s, r)
    assert r.admit(LinkRecord(RecordKind.DATA, RUN, 1, 128, 1))[0] is lk.Verdict.YES
    verdict, out = r.admit(LinkRecord(RecordKind.DATA, RUN, 2, 192, 1))
    assert verdict is lk.Verdict.NO
    assert out[0].violation
    assert "not granted" in out[0].reason


def test_a_copy_is_answered_as_the_first_one_was():
    s, r = sender(), receiver()
    greet(s, r)
    body = records.table([b"x"]) + b"x".ljust(64, b"\0")
    record = LinkRecord(RecordKind.DATA, RUN, 1, len(body), 1)
    assert r.admit(record)[0] is lk.Verdict.YES
    (deliver,) = r.receive(record, memoryview(body), 0.0)
    assert bytes(deliver.frames[0]) == b"x"
    assert r.admit(record)[0] is lk.Verdict.COPY
    assert r.receive(record, memoryview(body), 0.0, fresh=False) == []  # not stored yet
    (answer,) = r.stored(1)
    assert r.receive(record, memoryview(body), 0.0, fresh=False) == [answer]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "has 0 bytes"),
        (bytes(64), "checksum"),
        (bytes(63), "has 63 bytes"),
    ],
)
def test_what_is_no_record(raw, says):
    with pytest.raises(WireError, match=says):
        LinkRecord.unpack(raw)


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=64, max_size=64), st.integers(0, 511))
def test_no_changed_header_parses(noise, bit):
    good = LinkRecord(RecordKind.DATA, RUN, 3, 4096, 2, 9).pack()
    assert LinkRecord.unpack(good) == LinkRecord(RecordKind.DATA, RUN, 3, 4096, 2, 9)
    changed = bytearray(good)
    changed[bit // 8] ^= 1 << bit % 8
    for raw in (bytes(changed), noise):
        with pytest.raises(WireError):
            LinkRecord.unpack(raw)


def test_tags_differ_by_everything_they_are_made_of():
    tags = {
        records.tag_for(secret, run, a, b, what)
        for secret in (SECRET, bytes(16))
        for run in (RUN, RunKey(7, 2))
        for a, b in (("a", "b"), ("b", "a"), ("ab", ""))
        for what in ("control", "data")
    }
    assert len(tags) == 24


@settings(max_examples=200, deadline=None)
@given(
    budget=st.integers(1024, 10_000),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["open", "want", "arrive", "stored", "close"]), st.integers(0, 3), st.integers(1, 4000)
        ),
        max_size=60,
    ),
)
def test_the_books_of_the_receive_budget(budget, steps):
    """Any order of events keeps the sum within the budget, and nothing is left when all links have ended."""
    a = Arbiter(budget)
    opened, held, told = set(), {}, {}
    for what, link, n in steps:
        if what == "open" and link not in held:
            if link not in opened:
                told[link] = 0
            a.open(link)
            opened.add(link)
        elif link not in opened:
            continue
        elif what == "want":
            assert a.want(link, a.granted(link) + n) == (n <= a.message_limit)
        elif what == "arrive" and a.arrive(link, n):
            held.setdefault(link, []).append(n)
        elif what == "stored" and held.get(link):
            a.stored(link, held[link].pop())
        elif what == "close":
            a.close(link)
            opened.discard(link)
        check_books(a)
        for granted, total in a.grants().items():
            assert total > told.get(granted, 0) or granted not in opened
            told[granted] = total
        check_books(a)
    for link, sizes in held.items():
        for n in sizes:
            a.stored(link, n)
    for link in range(4):
        a.close(link)
    check_books(a)
    assert a.reserved == a.held == 0


def test_a_hello_is_not_replayed():
    """A recorded HELLO proves nothing on another connection: the challenge is another one."""
    said = records.hello(SECRET, RUN, os.urandom(16), b"n" * 16, "a", "b")
    r = receiver()
    r.start()
    r.admit(LinkRecord(RecordKind.HELLO, RUN, length=len(said)))
    (close,) = r.receive(LinkRecord(RecordKind.HELLO, RUN, length=len(said)), said, 0.0)
    assert close.violation
