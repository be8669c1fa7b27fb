"""Messages between hosts that are compressed: what pays, what it costs in credit, and nothing wrong is expanded."""

from __future__ import annotations

import itertools
import random
import types

import numpy as np
import pandas as pd
import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt._version import __version__
from dask_gpurt.config import Settings, ShuffleSettings
from dask_gpurt.errors import ConfigError, CorruptData, WireError
from dask_gpurt.model import compression
from dask_gpurt.shuffle.counters import worker_statistics
from dask_gpurt.shuffle.probe import probe
from dask_gpurt.shuffle.transport import plane
from dask_gpurt.shuffle.transport.base import Header
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.records import RecordKind
from dask_gpurt.shuffle.transport.select import compress, selector
from dask_gpurt.shuffle.transport.select.compress import Squeezer, expanded
from dask_gpurt.shuffle.transport.select.selector import Locality, TransportChooser
from tests.shuffle.helpers import ordered, source, spoil_arrivals, taken_over, whole
from tests.shuffle.invariants import check_books
from tests.shuffle.transport.memory_network import MemoryNetwork, Weather
from tests.shuffle.transport.test_link import RUN, SECRET, Worker

LIMIT = 1 << 24
CODECS = [name for name in ("lz4", "zstd") if name in compression.installed()]
pytestmark = pytest.mark.skipif(len(CODECS) < 2, reason="lz4 and zstandard are not both installed")


def message() -> list[memoryview]:
    """A head, small ones, numbers that compress, numbers that do not, text."""
    r = np.random.default_rng(1)
    text = b" ".join(str(i % 7919).encode() for i in range(60_000))
    few = r.integers(0, 50, 1 << 17)
    return [memoryview(x).cast("B") for x in (b"head" * 20, b"", few, r.random(1 << 16), text)]


def squeezer(setting: str = "auto") -> tuple[Squeezer, dict[str, float]]:
    counted: dict[str, float] = {}
    return Squeezer(setting, counted.update), counted


def pace_of(bytes_per_second: float) -> selector.LinkBandwidth:
    some = selector.LinkBandwidth()
    some.best = bytes_per_second
    return some


@pytest.mark.parametrize("setting", ["auto", *CODECS])
def test_what_goes_in_comes_out(setting):
    frames = message()
    some, counted = squeezer(setting)
    sent, room = some.squeeze(frames, 50e6)
    assert len(sent) == len(frames) + 1
    assert room == counted["bytes_squeezed"] > 1 << 18
    assert records.message_bytes(sent) + room == records.message_bytes(frames)
    assert (sent[4] is frames[3]) is (setting != "zstd")  # random numbers; zstd takes 5 % off them
    # Elsewhere in memory, as it comes.
    got = expanded([memoryview(bytearray(f)) for f in sent], LIMIT)
    assert list(map(bytes, got)) == list(map(bytes, frames))


def test_what_would_not_pay_stays_as_it_is():
    frames = message()
    some, _ = squeezer()
    # Not known, and faster than any codec.
    assert [some.looks(pace_of(x)) for x in (0.0, 1e6, 0.5e9, 1e9, 20e9)] == [False, True, True, False, False]
    assert all(squeezer("lz4")[0].looks(pace_of(x)) for x in (0.0, 20e9))
    sent, room = some.squeeze(frames, 20e9)
    assert room == 0
    assert sent is frames
    assert expanded(frames, LIMIT) is frames
    noise = [memoryview(b"head"), memoryview(random.Random(1).randbytes(1 << 18))]
    for some, _ in map(squeezer, ("auto", *CODECS)):
        assert some.squeeze(noise, 1e6) == (noise, 0)


def test_looks_that_gain_nothing_become_rare(monkeypatch):
    # On a machine that is busy with other things nothing gains: what squeezing takes is measured.
    ticks = itertools.count(0.0, 1e-6)
    monkeypatch.setattr(
        compression, "time", types.SimpleNamespace(thread_time=lambda: next(ticks), perf_counter=lambda: next(ticks))
    )
    some, _ = squeezer()
    slow, noise = pace_of(50e6), [memoryview(b"head"), memoryview(random.Random(1).randbytes(1 << 18))]

    def looks(n: int, frames: list[memoryview]) -> list[int]:
        found = []
        for i in range(n):
            if some.looks(slow):
                found.append(i)
                slow.looked(some.squeeze(frames, slow.best)[1] > 0)
        return found

    assert looks(100, noise) == [0, 1, 4, 11, 26, 57, 88]
    # One that gains, and all are looked at again.
    assert looks(32, message())[1:] == list(range(20, 32))


def test_nothing_is_expanded_that_did_not_come_as_it_was_sent():
    frames = message()
    sent, _ = squeezer("zstd")[0].squeeze(frames, 50e6)
    whole_message = [bytes(f) for f in sent]
    r = random.Random(2)
    spots = [(0, at) for at in range(len(whole_message[0]))]
    spots += [(i, r.randrange(len(whole_message[i]))) for i in (3, 5) for _ in range(200)]
    for i, at in spots:
        spoiled = [bytearray(f) for f in whole_message]
        spoiled[i][at] ^= 1 << r.randrange(8)
        if spoiled[0][:4] != compress.MAGIC:
            # Not an envelope any more: a message without one, whose head does not parse.
            assert expanded(spoiled, LIMIT) is spoiled
            continue
        with pytest.raises(WireError):
            expanded(spoiled, LIMIT)
    for i in (0, 3, 5):
        for cut in (1, len(whole_message[i]) // 2, len(whole_message[i]) - 4):
            with pytest.raises(WireError):
                expanded([f[:-cut] if i == j else f for j, f in enumerate(whole_message)], LIMIT)
        with pytest.raises(WireError):
            expanded([f + b"\0" if i == j else f for j, f in enumerate(whole_message)], LIMIT)
    for some in (whole_message[:-1], [*whole_message, b""]):
        with pytest.raises(WireError, match="frames"):
            expanded(some, LIMIT)
    with pytest.raises(WireError, match="at most"):
        expanded(whole_message, sum(f.nbytes for f in frames) - 1)
    assert list(map(bytes, expanded(whole_message, sum(f.nbytes for f in frames)))) == list(map(bytes, frames))


def test_a_codec_that_is_not_installed(monkeypatch):
    sent, _ = squeezer("lz4")[0].squeeze(message(), 50e6)
    monkeypatch.setitem(compression._PACKAGES, "lz4", "no_such_package")
    monkeypatch.setattr(compression, "_codecs", {})
    with pytest.raises(WireError, match="lz4"):
        expanded(list(sent), LIMIT)
    with pytest.raises(ConfigError, match=r"gpurt\.shuffle\.codec.*no_such_package.*Remedy"):
        squeezer("lz4")
    with pytest.raises(ConfigError, match="no_such_package"):
        probe(__version__, "lz4")  # so its workers get stock's shuffles, and are told why
    # What there is, is used.
    assert squeezer()[0].able(TransportChooser(Locality.REMOTE, ["tcp"]), ["zstd"])
    assert compression.installed() == ["zstd"]


@pytest.mark.parametrize(
    ("setting", "place", "forced", "theirs", "able"),
    [
        ("auto", Locality.REMOTE, "auto", ["lz4", "zstd"], True),
        ("auto", Locality.REMOTE, "tcp", ["lz4", "zstd", "new"], True),
        ("lz4", Locality.REMOTE, "auto", ["lz4"], True),
        ("auto", Locality.REMOTE, "auto", ["lz4"], False),
        ("none", Locality.REMOTE, "auto", ["lz4", "zstd"], False),
        ("auto", Locality.HOST, "auto", ["lz4", "zstd"], False),
        ("auto", Locality.PROCESS, "auto", ["lz4", "zstd"], False),
        ("auto", Locality.REMOTE, "rpc", ["lz4", "zstd"], False),
    ],
)
def test_for_whom(setting, place, forced, theirs, able):
    assert squeezer(setting)[0].able(TransportChooser(place, ["tcp"], forced), theirs) is able
    assert not squeezer(setting)[0].able(TransportChooser(place, ["tcp"], forced), ())


def test_settings():
    assert Settings.load().shuffle.codec == "auto"
    with pytest.raises(ConfigError, match=r"shuffle\.codec.*snappy"):
        Settings.load({"shuffle.codec": "snappy"})


def test_the_fastest_stretch_counts():
    some, now = selector.LinkBandwidth(), 0.0

    def send(bytes_per_second: float, stored: bool = True) -> None:
        nonlocal now
        now += 10.0  # nothing was under way
        for _ in range(2):  # two at a time share the link
            some.began(now)
        now += 2 * selector.STRETCH / bytes_per_second
        for _ in range(2):
            some.ended(selector.STRETCH, now, stored)

    send(1e8, stored=False)
    assert some.best == 0
    send(1e7)
    assert some.best == pytest.approx(1e7, rel=0.6)  # what never came took its time
    send(1e8)
    assert some.best == pytest.approx(1e8, rel=0.01)
    send(1e6)
    assert 9e7 < some.best < 1e8
    for _ in range(100):
        send(1e6)
    assert some.best < 2e7


def test_room_is_credit():
    """What a message is expanded to counts against the receive budget, from before it is sent until it is stored."""
    net = MemoryNetwork(3, Weather())
    a, b = Worker(net, "a", 1 << 16), Worker(net, "b", 1 << 16, store_seconds=5.0)
    ended = []
    body = b"x" * 1000
    frames = [records.xxhash.xxh3_64_digest(body), body]
    cost = records.message_bytes(frames)
    room = b.gate.message_limit - cost
    for _ in range(40):
        a.transport.submit(ended.append, b.peer(), Header(RUN, SECRET, room), frames)
    a.transport.submit(ended.append, b.peer(), Header(RUN, SECRET, room + 1), frames)
    net.run(1000)
    assert [r.problem for r in ended if "too large" not in r.problem] == [""] * 40
    assert sum("too large" in r.problem for r in ended) == 1
    told = b.gate.statistics()
    assert told["held_bytes"] == 0
    # Never more than four of them at a time: so many fit the budget.
    assert b.gate.message_limit <= told["peak_held_bytes"] <= told["budget_bytes"]
    assert len(b.stored) == 40
    check_books(b.gate._arbiter)


def compressible(i: int) -> pd.DataFrame:
    r = np.random.default_rng(i)
    n = 40_000
    return pd.DataFrame({"k": r.integers(0, 1000, n), "v": r.integers(0, 9, n), "s": pd.Series(["text"] * n)})


def same_rows(got: pd.DataFrame, n: int) -> None:
    pd.testing.assert_frame_equal(ordered(got), ordered(whole(compressible, n)).astype(dict(got.dtypes)))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("codec", "transport"), [("auto", "auto"), ("lz4", "tcp"), ("zstd", "tcp"), ("lz4", "ucx"), ("none", "auto")]
)
def test_shuffles_between_hosts(codec, transport, monkeypatch):
    if transport == "ucx":
        pytest.importorskip("ucxx")
    monkeypatch.setattr(plane, "locality_of", lambda ours, theirs: Locality.REMOTE)
    # So slow a network that compressing pays on any machine, however busy it is while `auto` takes its samples.
    monkeypatch.setattr(
        selector.LinkBandwidth, "best", property(lambda self: 1e3, lambda self, value: None), raising=False
    )

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=120)
    async def check(c, s, a, b):
        settings = ShuffleSettings(enabled=True, transport=transport, codec=codec)
        async with taken_over(s, [a, b], settings=settings):
            got = await c.compute(source(compressible).shuffle("k", npartitions=5))
            same_rows(got, 6)
            stats = [worker_statistics(w) for w in (a, b)]
            saved = sum(x["bytes_squeezed"] for x in stats)
            links = [link for x in stats for link in x["transport"]["links"] if link["transport"] != "rpc"]
            if codec == "none":
                assert saved == 0
            else:
                # What came is what was sent, and what it became is what was split.
                assert saved > sum(link["bytes_out"] for link in links) > 0
            assert sum(x["bytes_received"] for x in stats) > 1 << 21
            assert sum(x["resent_safe"] + x["refused"] + x["transport_errors"] + x["uncredited"] for x in stats) == 0
            for x in stats:
                assert x["transport"]["receive"]["held_bytes"] == 0

    check()


def test_a_block_cannot_ask_for_more_memory_than_its_length():
    zstandard = pytest.importorskip("zstandard")
    data = bytes(range(256)) * 4096
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    greedy = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    block = greedy.compress(data) + greedy.flush()
    with pytest.raises(CorruptData, match="cannot be expanded"):
        compression.expand("zstd", memoryview(len(block).to_bytes(4, "little") + block), len(data))
    for n in (1, 1000, 1 << 20, (1 << 20) + 1, 5 << 20):
        frame = memoryview((data * 6)[:n])
        assert compression.expand("zstd", memoryview(b"".join(compression.compress("zstd", frame))), n) == frame


@pytest.mark.cluster
def test_nothing_is_expanded_beyond_the_credit_that_it_cost(monkeypatch):
    monkeypatch.setattr(plane, "locality_of", lambda ours, theirs: Locality.REMOTE)
    direct = plane.Plane._direct

    def without_room(self, name, route, key, peer, frames, room=0):
        return direct(self, name, route, key, peer, frames, 0)

    monkeypatch.setattr(plane.Plane, "_direct", without_room)

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=120)
    async def check(c, s, a, b):
        async with taken_over(s, [a, b], settings=ShuffleSettings(enabled=True, transport="tcp", codec="zstd")):
            same_rows(await c.compute(source(compressible).shuffle("k", npartitions=5)), 6)
            stats = [worker_statistics(w) for w in (a, b)]
            assert sum(x["bytes_squeezed"] for x in stats) > 0
            assert sum(x["refused"] for x in stats) == sum(x["resent_safe"] for x in stats) > 0
            for x in stats:
                assert x["transport"]["receive"]["held_bytes"] == 0

    check()


@pytest.mark.cluster
def test_what_is_spoiled_on_the_way_is_sent_again(monkeypatch):
    monkeypatch.setattr(plane, "locality_of", lambda ours, theirs: Locality.REMOTE)
    spoiled = []

    def spoil(record, body):
        if record.kind is RecordKind.DATA and record.value:
            spoiled.append(record.sequence)
            body[record.length - 200] ^= 4  # in the last frame
        return record, body

    spoil_arrivals(monkeypatch, spoil)

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, timeout=120)
    async def check(c, s, a, b):
        settings = ShuffleSettings(enabled=True, transport="tcp", codec="zstd")
        async with taken_over(s, [a, b], settings=settings):
            same_rows(await c.compute(source(compressible).shuffle("k", npartitions=5)), 6)
            stats = [worker_statistics(w) for w in (a, b)]
            assert len(spoiled) > 0
            assert sum(x["refused"] for x in stats) == sum(x["resent_safe"] for x in stats) == len(spoiled)
            for x in stats:
                assert x["transport"]["receive"]["held_bytes"] == 0

    check()
