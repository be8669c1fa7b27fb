"""Checksums of fetches between workers, on live clusters with a wire that flips bits; see `extension.signed`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from distributed.comm import tcp
from distributed.comm.utils import to_frames
from distributed.protocol import deserialize, serialize
from distributed.utils_test import NO_AMM, async_poll_for, gen_cluster

from dask_gpurt.config import Settings
from dask_gpurt.errors import CorruptTransfer
from dask_gpurt.extension import GpurtScheduler, WorkerParts, on_worker, signed
from dask_gpurt.extension.corrupt import LIMIT
from dask_gpurt.extension.fetches import Fetches
from dask_gpurt.extension.signed import FAMILY, Fetch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.timeout(200)

ON = {"transfers.verify": True}


@contextlib.asynccontextmanager
async def extended(scheduler: Any, **settings: Any) -> AsyncIterator[GpurtScheduler]:
    plugin = GpurtScheduler(Settings.load(ON | settings))
    await plugin.start(scheduler)
    scheduler.add_plugin(plugin, name=plugin.name)
    yield plugin
    await plugin.uninstall()


class Wire:
    """Flips one bit in the longest frame of an answer to a fetch, so many times."""

    def __init__(self) -> None:
        #: of a sender, or any: flips to come
        self.flips = 0
        self.sender = ""
        #: not in the value, but in what Dask and we say about it
        self.names = False
        self.flipped = 0

    def names_at(self, frames: Any) -> int:
        return next(i for i, frame in enumerate(frames) if b"serializer" in bytes(frame))

    async def to_frames(self, msg: Any, **kwargs: Any) -> Any:
        frames = await to_frames(msg, **kwargs)
        if not (isinstance(msg, dict) and msg.get("status") == "OK" and msg.get("data")):
            return frames
        local = kwargs["context"]["sender"].get("address", "")
        if self.flips > 0 and (not self.sender or local == self.sender):
            self.flips -= 1
            self.flipped += 1
            longest = max(range(len(frames)), key=lambda i: memoryview(frames[i]).nbytes)
            if self.names:
                frames[self.names_at(frames)] = bytes(frames[self.names_at(frames)]).replace(
                    b"serializer", b"serialixer"
                )
                return frames
            # A copy: the frame is the memory of the value itself.
            corrupt = bytearray(frames[longest])
            corrupt[len(corrupt) // 2] ^= 4
            frames[longest] = bytes(corrupt)
        return frames


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    found = Wire()
    monkeypatch.setattr(tcp, "to_frames", found.to_frames)
    return found


_wire: list[Wire] = []


@pytest.fixture(autouse=True)
def _shared(wire: Wire) -> Iterator[None]:
    """`gen_cluster` takes no fixtures."""
    _wire[:] = [wire]
    yield
    _wire.clear()


def counts(worker: Any) -> dict[str, int]:
    return on_worker(worker).fetches.statistics()


async def fetched(c: Any, a: Any, b: Any, value: Any, key: str = "x") -> Any:
    """What `b` computes with, of a value that `a` made."""
    x = c.submit(lambda: value, key=key, workers=[a.address], allow_other_workers=False)
    y = c.submit(lambda v: v, x, key=f"{key}-there", workers=[b.address])
    return await c.submit(lambda v: v, y, workers=[b.address])


ARRAY = np.arange(300_000, dtype="i8")


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=NO_AMM)
async def test_without_it_a_flip_is_a_wrong_answer(c: Any, s: Any, a: Any, b: Any) -> None:
    async with extended(s, **{"transfers.verify": False}):
        x = c.submit(lambda: ARRAY, key="x", workers=[a.address])
        await x
        _wire[0].flips = 1
        assert not await c.submit(lambda v: bool((v == ARRAY).all()), x, workers=[b.address])
        assert _wire[0].flipped == 1
        assert counts(b) == {"spared": 0}


@pytest.mark.parametrize("flips", [1, 2, 3])
def test_flips(flips: int) -> None:
    @gen_cluster(client=True, nthreads=[("", 1)] * 2, config=NO_AMM, timeout=120)
    async def test(c: Any, s: Any, a: Any, b: Any) -> None:
        async with extended(s) as plugin:
            x = c.submit(lambda: ARRAY, key="x", workers=[a.address])
            await x
            _wire[0].flips = flips
            _wire[0].sender = a.address
            assert await c.submit(lambda v: bool((v == ARRAY).all()), x, workers=[b.address])
            assert _wire[0].flipped == flips
            got = counts(b)
            assert (got["corrupt"], got["verified"], got["unverified"]) == (flips, 1, 0)
            assert got["reported"] == plugin.corrupt.counts["reports"] == (flips >= LIMIT)
            assert counts(a)["signed"] == flips + 1

    test()


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=NO_AMM, timeout=120)
async def test_an_answer_that_does_not_parse_is_fetched_again(c: Any, s: Any, a: Any, b: Any) -> None:
    """Dask alone hangs there; and the next call over the same comm would fail."""
    async with extended(s):
        x = c.submit(lambda: ARRAY, key="x", workers=[a.address])
        await x
        _wire[0].flips, _wire[0].sender, _wire[0].names = 2, a.address, True
        assert await c.submit(lambda v: bool((v == ARRAY).all()), x, workers=[b.address])
        assert (counts(b)["corrupt"], counts(b)["verified"]) == (2, 1)
        assert await b.rpc(a.address).echo(data=1) == 1


@gen_cluster(client=True, nthreads=[("", 1)] * 3, config=NO_AMM, timeout=120)
async def test_another_holder_serves(c: Any, s: Any, a: Any, b: Any, d: Any) -> None:
    async with extended(s) as plugin:
        x = c.submit(lambda: ARRAY, key="x", workers=[a.address])
        await c.replicate([x], workers=[a.address, b.address])
        _wire[0].flips = 1000
        _wire[0].sender = a.address
        for i in range(4):
            y = c.submit(lambda v, i: bool((v == ARRAY).all()), x, i, workers=[d.address])
            assert await y
            await async_poll_for(lambda: x.key not in d.data or d.state.tasks[x.key].state == "memory", timeout=10)
        assert counts(d)["corrupt"] <= 1
        # One that asks for two values of one worker asks there first; one of them is elsewhere too.
        _wire[0].flips = 0  # what is replicated has no checksum
        w = c.submit(lambda: ARRAY + 1, key="w", workers=[a.address])
        v = c.submit(lambda: ARRAY + 2, key="v", workers=[a.address])
        await c.replicate([v], workers=[a.address, b.address])
        await w
        before = counts(d)["corrupt"]
        _wire[0].flips = 1
        assert await c.submit(lambda v, w: bool((v == w + 1).all()), v, w, workers=[d.address])
        assert counts(d)["corrupt"] - before == 1
        assert plugin.corrupt.counts["recomputed"] == plugin.corrupt.counts["relayed"] == 0


@gen_cluster(client=True, nthreads=[("", 1)] * 3, config=NO_AMM, timeout=120)
async def test_one_holder_whose_link_is_broken_is_relayed(c: Any, s: Any, a: Any, b: Any, d: Any) -> None:
    """Scattered data as well, which cannot be computed again."""
    async with extended(s) as plugin:
        x = await c.scatter(ARRAY, workers=[a.address])
        # Until the relay fetches: then the link that it uses is sound.
        _wire[0].flips = LIMIT
        _wire[0].sender = a.address
        assert await c.submit(lambda v: bool((v == ARRAY).all()), x, workers=[d.address])
        assert plugin.corrupt.counts["reports"] == 1
        assert plugin.corrupt.counts["relayed"] == 1
        assert plugin.corrupt.counts["recomputed"] == 0
        await async_poll_for(lambda: len(s.tasks[x.key].who_has) == 3, timeout=20)
        assert plugin.statistics()["corrupt_fetches"]["senders"] == {a.address: 1}


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=NO_AMM, timeout=120)
async def test_no_other_worker_it_is_computed_again(c: Any, s: Any, a: Any, b: Any) -> None:
    """All that one sender sends is corrupt, for ever: its value is made by the worker that needs it."""
    async with extended(s) as plugin:
        x = c.submit(lambda: ARRAY, key="x", workers=[a.address])
        z = c.submit(lambda v: v + 1, x, key="z")  # on the same worker: no reason to move
        await z
        s.tasks["z"].worker_restrictions = s.tasks["x"].worker_restrictions = None
        _wire[0].flips = 10_000
        _wire[0].sender = a.address
        assert await c.submit(lambda v: bool((v == ARRAY + 1).all()), z, workers=[b.address])
        assert plugin.corrupt.counts["recomputed"] >= 1
        assert plugin.corrupt.counts["exceptions"] == 0
        assert "z" in b.data


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=NO_AMM, timeout=120)
async def test_scattered_data_is_never_given_up(c: Any, s: Any, a: Any, b: Any) -> None:
    async with extended(s) as plugin:
        x = await c.scatter(ARRAY, workers=[a.address])
        _wire[0].flips = LIMIT + 2
        _wire[0].sender = a.address
        assert await c.submit(lambda v: bool((v == ARRAY).all()), x, workers=[b.address])
        assert plugin.corrupt.counts["left"] == 3
        assert counts(b)["corrupt"] == LIMIT + 2


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=NO_AMM)
async def test_results_to_clients_are_unsigned_and_counted(c: Any, s: Any, a: Any, b: Any) -> None:
    async with extended(s):
        x = c.submit(lambda: ARRAY, key="x", workers=[a.address])
        assert (await x == ARRAY).all()
        c.direct_to_workers = True
        assert ((await c.gather(x, direct=True)) == ARRAY).all()
        assert counts(a)["signed"] == 0
        assert counts(a)["unsigned"] == 2


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=NO_AMM)
async def test_with_peers_that_do_not_know_it(c: Any, s: Any, a: Any, b: Any) -> None:
    """A stock peer, in both directions; it gets and sends what it always did, and nothing is logged as unknown."""
    ours = Fetches(a, verify=True)
    ours.install()
    assert await fetched(c, b, a, 1, "there") == 1
    assert await fetched(c, a, b, 2, "back") == 2
    got = ours.statistics()
    assert [got[name] for name in ("verified", "unverified", "corrupt", "signed")] == [0, 1, 0, 0]
    assert ours.counts["unsigned"] >= 1
    ours.uninstall()
    assert "connect" not in vars(a.rpc)
    assert a.handlers["get_data"] == a.get_data


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=NO_AMM)
async def test_a_peer_with_the_tiers_and_without_checksums(c: Any, s: Any, a: Any, b: Any) -> None:
    """As an older version of this package: what asks for checksums is no key there."""
    async with extended(s, **{"transfers.verify": False}):
        ours = Fetches(a, verify=True)
        ours.install()
        assert await fetched(c, b, a, list(range(100)), "x") == list(range(100))
        assert ours.counts["unverified"] == 1
        assert on_worker(b).runtime.guard.parts["get_data"].failures == 0
        ours.uninstall()


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=NO_AMM)
async def test_preloaded_workers_do_what_the_scheduler_says(c: Any, s: Any, a: Any, b: Any) -> None:
    for worker in (a, b):
        await WorkerParts.install(worker, Settings.load({}))
    async with extended(s):
        x = c.submit(lambda: ARRAY, key="x", workers=[a.address])
        await x
        _wire[0].flips = 1
        assert await c.submit(lambda v: bool((v == ARRAY).all()), x, workers=[b.address])
        assert [counts(b)[name] for name in ("verified", "corrupt")] == [1, 1]
    assert "connect" not in vars(b.rpc)
    assert a.handlers["get_data"] == a.get_data


@gen_cluster(client=True, nthreads=[("", 1)], config=NO_AMM)
async def test_preloaded_workers_have_the_parts_that_the_scheduler_says(c: Any, s: Any, a: Any) -> None:
    """Without "copies" there, placement's second copies could leave two values of one task in a graph."""
    own = {"placement.enabled": False, "observe.enabled": False}
    parts = await WorkerParts.install(a, Settings.load(own))
    assert not {"copies", "messages", "slots"} & set(parts.parts.state)
    async with extended(s):
        assert {"copies": "on", "messages": "on", "slots": "on"}.items() <= parts.parts.state.items()
        assert await c.submit(int, 1) == 1
    assert "handle_stimulus" not in vars(a)


VALUES = {
    "array": ARRAY,
    "read only": np.frombuffer(ARRAY.tobytes(), "i8"),
    "fortran": np.asfortranarray(ARRAY.reshape(600, 500)),
    "strided": ARRAY[::3],
    "empty": np.zeros(0),
    "objects": np.array(["a", None, (1, 2)], dtype=object),
    "frame": pd.DataFrame({"a": range(1000), "s": ["x", None] * 500}),
    "tuple": (ARRAY, [ARRAY + 1, {"k": (ARRAY + 2, "s")}]),
    "dict": {"a": ARRAY, ("t", 1): 2},
    "bytes": bytes(100_000),
    "none": None,
    "number": 7,
    "set": {1, 2},
    "large": np.zeros(20_000_000, dtype="u1"),
}


def same(x: Any, y: Any) -> bool:
    if isinstance(x, pd.DataFrame):
        return bool(x.equals(y))
    if isinstance(x, np.ndarray):
        alike = (x.dtype, x.shape, x.flags.writeable) == (y.dtype, y.shape, y.flags.writeable)
        return alike and bool((x == y).all())
    if isinstance(x, (list, tuple)):
        return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[k], y[k]) for k in x)
    return bool(type(x) is type(y) and x == y)


@gen_cluster(client=True, nthreads=[("", 1)] * 2, config=NO_AMM, timeout=120)
async def test_values_of_every_kind(c: Any, s: Any, a: Any, b: Any) -> None:
    """Also compressed by Dask, and longer than what its comms cut."""
    await _every_kind(c, s, a, b)


@gen_cluster(
    client=True,
    nthreads=[("", 1)] * 2,
    config={**NO_AMM, "distributed.comm.compression": "zlib", "distributed.comm.shard": "1MiB"},
    timeout=120,
)
async def test_values_of_every_kind_compressed(c: Any, s: Any, a: Any, b: Any) -> None:
    await _every_kind(c, s, a, b)


async def _every_kind(c: Any, s: Any, a: Any, b: Any) -> None:
    async with extended(s):
        for name, value in VALUES.items():
            x = c.submit(lambda value=value: value, key=name, workers=[a.address])
            await c.submit(lambda v: None, x, key=f"{name} there", workers=[b.address])
            assert same(value, b.data[name]), name
        assert (counts(b)["verified"], counts(b)["corrupt"]) == (len(VALUES), 0)
        assert counts(b)["unverified"] == 0
        assert counts(a)["signed"] == len(VALUES)


def test_every_bit_counts_and_nothing_is_copied() -> None:
    signed.register()
    header, frames = serialize(ARRAY, (FAMILY, "dask", "pickle"))
    assert header["serializer"] == FAMILY
    assert np.shares_memory(np.frombuffer(frames[0], "i8"), ARRAY)
    buffers = [bytearray(frame) for frame in frames]
    got = deserialize(dict(header), buffers)
    assert np.shares_memory(got, np.frombuffer(buffers[0], "i8"))
    assert got.flags.writeable
    for broken in (
        {**header, "inner": header["inner"].replace(b"i8", b"f8")},
        {**header, "digest": header["digest"] ^ 1},
        {key: value for key, value in header.items() if key != "inner"},
    ):
        with pytest.raises(CorruptTransfer, match="fails its checksum"):
            deserialize(broken, [bytes(b) for b in buffers])
    fetch = Fetch()
    token = signed.current.set(fetch)
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(buffers[0]), 100):
        buffers[0][at] ^= 1 << int(at) % 8
        with pytest.raises(OSError, match="a value of 2400000 bytes fails its checksum"):
            deserialize(dict(header), buffers)
        buffers[0][at] ^= 1 << int(at) % 8
    signed.current.reset(token)
    assert fetch.verified == 0
    assert "2400000" in fetch.corrupt


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("it stays")


def _fail() -> None:
    raise RuntimeError("not here")


class Unreadable:
    def __reduce__(self) -> Any:
        return _fail, ()


@pytest.mark.parametrize(("value", "says"), [(Unpicklable(), "Could not serialize"), (Unreadable(), "not here")])
def test_errors_of_values_are_as_they_were(value: object, says: str) -> None:
    """They are no wrong checksums: a value that cannot be sent or read must not be fetched for ever."""
    signed.register()
    for serializers in (("dask", "pickle"), (FAMILY, "dask", "pickle")):
        with pytest.raises((TypeError, RuntimeError), match=says) as raised:
            deserialize(*serialize(value, serializers))
        assert not isinstance(raised.value, OSError)


@gen_cluster(client=True, nthreads=[("", 1)] * 3, config=NO_AMM, timeout=120)
async def test_all_that_every_other_worker_sends_is_corrupt(c: Any, s: Any, a: Any, b: Any, d: Any) -> None:
    """Two holders, each with a broken link to the one that needs the value, which then makes it itself."""
    async with extended(s) as plugin:
        x = c.submit(lambda: ARRAY, key="x", workers=[a.address])
        await c.replicate([x], workers=[a.address, b.address])
        s.tasks["x"].worker_restrictions = None
        _wire[0].flips = 10_000
        assert await c.submit(lambda v: bool((v == ARRAY).all()), x, workers=[d.address])
        assert plugin.corrupt.counts["recomputed"] >= 1
        assert plugin.corrupt.counts["exceptions"] == 0
        assert "x" not in a.data
        assert "x" not in b.data
