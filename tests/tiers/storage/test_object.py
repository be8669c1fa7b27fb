"""The object tier against moto's S3 server, a shared folder and its own failures."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dask_gpurt.errors import ConfigError, CorruptData, LostData, TierFull
from dask_gpurt.tiers.engine.engine import Engine
from dask_gpurt.tiers.storage.codec import PickleCodec
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from dask_gpurt.tiers.storage.fallback import FAILURES, Cascade
from dask_gpurt.tiers.storage.object import client as bucket_module
from dask_gpurt.tiers.storage.object.format import plan
from dask_gpurt.tiers.stores.task_store import StoredCopy, TieredStore
from tests.tiers.conftest import FaultyOs

pytest.importorskip("obstore")

from dask_gpurt.tiers.storage.object.client import Bucket
from dask_gpurt.tiers.storage.object.remote import PART_BYTES
from dask_gpurt.tiers.storage.object.tier import ObjectTier

if TYPE_CHECKING:
    from pathlib import Path

CODEC = PickleCodec()
MB = 1_000_000


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "BACK_OFF_SECONDS", 0.01)


def tier_at(url: str, **options: Any) -> ObjectTier:
    return ObjectTier(Bucket(url, timeout_seconds=options.pop("timeout_seconds", 10.0)), "gpurt/c/w", **options)


def array(i: int, n: int = MB) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).integers(0, 255, n, dtype="u1")


# ---------------------------------------------------------------------------------------------- objects


def test_a_large_object_goes_up_in_parts(s3_server: Any, s3_url: str) -> None:
    tier = tier_at(s3_url)
    value = [array(0, PART_BYTES), array(1, PART_BYTES + 5), array(2, 3)]
    handle = tier.write(CODEC.encode(value))
    import boto3

    (listed,) = boto3.client("s3", endpoint_url=s3_server.endpoint).list_objects_v2(Bucket="bucket")["Contents"]
    assert listed["Key"] == "some/prefix/gpurt/c/w/0"
    assert listed["Size"] == handle.nbytes
    assert listed["ETag"].strip('"').endswith("-3")  # S3's mark of an object that came in three parts
    got = handle.load(CODEC)[0]
    assert all((g == v).all() for g, v in zip(got, value, strict=True))
    metrics = tier.metrics.to_dict()
    assert metrics["written_bytes"] == handle.nbytes
    assert metrics["writes"] == 1
    assert metrics["retries"] == 0
    assert metrics["write_seconds"] > 0


def test_a_large_object_is_read_in_requests_that_are_repeated_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request had to bring all of it within its timeout: over a slow line no large value ever came back."""
    monkeypatch.setattr(bucket_module, "READ_BYTES", 1000, raising=False)
    tier = tier_at(tmp_path.as_uri())
    value = [array(0, 2500), array(1, 1000), array(2, 0), array(3, 1001), array(4, 3)]
    handle = tier.write(CODEC.encode(value))
    fill, asked = tier.bucket._store.fill, []

    def slow(name: str, start: int, buffers: Any) -> int:
        asked.append((start, sum(b.nbytes for b in buffers)))
        if asked[-1][1] > 1000 or len(asked) == 3:
            raise TimeoutError("the operation timed out")
        return fill(name, start, buffers)

    monkeypatch.setattr(tier.bucket._store, "fill", slow)
    got = handle.load(CODEC)[0]
    assert all((g == v).all() for g, v in zip(got, value, strict=True))
    assert asked[2] == asked[3]
    assert tier.metrics["retries"] == 1
    assert tier.metrics["reads"] == 1
    ends = [start + n for start, n in dict.fromkeys(asked)]
    assert [start for start, _ in dict.fromkeys(asked)][1:] == ends[:-1]


@pytest.mark.parametrize("size", [0, 1000, 5000])
def test_an_object_that_ends_before_a_request_begins_is_damaged(
    size: int, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 answers that with an error, as it does where it is down."""
    monkeypatch.setattr(bucket_module, "READ_BYTES", 1000, raising=False)
    tier = tier_at(s3_url)
    handle = tier.write(CODEC.encode(array(0, 10_000)))
    tier.bucket.put(handle.name, [bytes(tier.bucket.read_range(handle.name, 0, size)) if size else b""])
    with pytest.raises(CorruptData, match="ends before"):
        handle.load(CODEC)
    assert tier.metrics["retries"] == 0


def test_nothing_of_a_key_or_value_is_in_a_name(tmp_path: Path) -> None:
    tier = tier_at(tmp_path.as_uri())
    tier.write(CODEC.encode("secret"))
    assert tier.files() == ["0"]


def test_a_server_that_is_gone_and_comes_back(s3_server: Any, s3_url: str) -> None:
    tier = tier_at(s3_url, timeout_seconds=2.0)
    handle = tier.write(CODEC.encode(array(0)))
    s3_server.stop()
    with pytest.raises(OSError, match="cannot write after 4 attempts"):
        tier.write(CODEC.encode(array(1)))
    with pytest.raises(OSError, match="cannot read after 4 attempts"):
        handle.load(CODEC)
    assert tier.used_bytes == handle.nbytes
    counts = tier.metrics.to_dict()
    assert counts["write_failures"] == counts["read_failures"] == 1
    assert counts["retries"] >= 6
    s3_server.restart()
    assert (handle.load(CODEC)[0] == array(0)).all()
    tier.write(CODEC.encode(array(1))).free()


def test_a_server_killed_in_the_middle_leaves_nothing_half_written(s3_server: Any, s3_url: str) -> None:
    """Uploads in parts are cut at a random point; no object is visible that was not complete."""
    tier = tier_at(s3_url, timeout_seconds=2.0)
    value = array(0, 5 * PART_BYTES)
    before = tier.metrics["writes"]
    threading.Timer(0.15, s3_server.stop).start()
    outcomes = []
    while len(outcomes) < 20:
        try:
            outcomes.append(tier.write(CODEC.encode(value)))
        except OSError as e:
            outcomes.append(e)
            break
    assert isinstance(outcomes[-1], OSError)
    s3_server.restart()
    good = outcomes[:-1]
    layout = plan(CODEC.encode(value))[0]
    assert tier.metrics["writes"] - before == len(good)
    assert set(tier.files()) >= {h.name.rpartition("/")[2] for h in good}
    for name in tier.files():  # also one whose answer was lost is whole
        copy = tier.adopt(f"{tier.prefix}/{name}", layout.nbytes, layout.digest)
        assert (copy.load(CODEC)[0] == value).all()


class SlowServer:
    """Accepts connections and never answers: a store that is stuck, not one that is gone."""

    def __init__(self) -> None:
        import socket

        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen(50)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"


def test_a_server_that_never_answers_fails_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.conftest import S3_ENVIRONMENT

    server = SlowServer()
    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setenv(name, value)
    tier = tier_at("s3://bucket/x", timeout_seconds=0.2)
    done = threading.Event()
    errors: list[BaseException] = []

    def write() -> None:
        try:
            tier.write(CODEC.encode(1))
        except OSError as e:
            errors.append(e)
        done.set()

    threading.Thread(target=write, daemon=True).start()
    assert done.wait(60), "a write to a stuck server never ends"
    assert len(errors) == 1
    assert tier.used_bytes == 0
    server.socket.close()


@pytest.mark.parametrize("change", ["flip", "truncate", "empty", "swap", "missing", "head"])
def test_every_damage_is_noticed(change: str, tmp_path: Path) -> None:
    tier = tier_at(tmp_path.as_uri())
    handle = tier.write(CODEC.encode(array(0, 5000)))
    other = tier.write(CODEC.encode(array(1, 5000)))
    path = tmp_path / handle.name
    data = bytearray(path.read_bytes())
    if change == "flip":
        data[-100] ^= 4
        path.write_bytes(data)
    elif change == "head":
        data[30] ^= 4
        path.write_bytes(data)
    elif change == "truncate":
        path.write_bytes(data[:-1])
    elif change == "empty":
        path.write_bytes(b"")
    elif change == "swap":
        path.write_bytes((tmp_path / other.name).read_bytes())
    else:
        path.unlink()
    # By the worker that wrote it, and by one that adopts it and knows only its name; the latter alone reads the head.
    for copy in (handle, tier.adopt(handle.name, handle.nbytes, handle.digest)):
        if change == "head" and copy.layout is not None:
            continue  # nobody looks at it
        with pytest.raises((CorruptData, OSError)):
            copy.load(CODEC)
    if change != "missing":
        assert tier.metrics["checksum_failures"] + tier.metrics["read_failures"] >= 1


def test_a_refusal_is_not_repeated(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path.as_uri())
    calls = []

    def denied() -> None:
        calls.append(1)
        raise PermissionError("no")

    with pytest.raises(PermissionError, match="may not write"):
        bucket._repeat("write", "x", denied)
    with pytest.raises(FileNotFoundError):
        bucket.read_range("absent", 0, 5)
    assert len(calls) == 1
    assert bucket.metrics["retries"] == 0


@pytest.mark.parametrize("url", ["nonsense://x", "just a word", "s3://"])
def test_a_wrong_url_says_what_is_allowed(url: str) -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        Bucket(url)


# ---------------------------------------------------------------------------------------------- cascade


class Broken:
    """A tier that fails on demand. (No tier of ours: only the failures of one.)"""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.error: BaseException | None = None
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, groups: Any) -> Any:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.inner.write(groups)


def test_a_full_disk_overflows_into_the_store(tmp_path: Path) -> None:
    disk = DiskTier(str(tmp_path / "disk"), limit_bytes=35_000, small_bytes=0)
    store = tier_at((tmp_path / "store").as_uri())
    cascade = Cascade([disk, store])
    handles = [cascade.write(CODEC.encode(array(i, 10_000))) for i in range(5)]
    assert disk.used_bytes + store.used_bytes == cascade.used_bytes
    assert (len(disk.files()), len(store.files())) == (2, 3)
    assert all((h.load(CODEC)[0] == array(i, 10_000)).all() for i, h in enumerate(handles))
    handles[0].free()  # room on the disk again: it comes first
    cascade.write(CODEC.encode(array(9, 10_000)))
    assert len(disk.files()) == 2
    stats = cascade.statistics()
    assert (stats["disk"]["full"], stats["disk"]["writes"], stats["object"]["writes"]) == (3, 3, 3)


def test_a_disk_that_the_system_calls_full_is_set_aside(tmp_path: Path) -> None:
    """Its own quota does not know, so a part of each value was written there before it went to the store."""
    now, system = [0.0], FaultyOs()
    disk = DiskTier(str(tmp_path / "disk"), small_bytes=0, os_layer=system)
    system.always["pwritev"] = OSError(errno.EDQUOT, "Disk quota exceeded")
    cascade = Cascade([disk, tier_at((tmp_path / "store").as_uri())], clock=lambda: now[0])
    before = system.calls["open"]
    for i in range(FAILURES + 5):
        cascade.write(CODEC.encode(array(i, 10_000)))
    assert system.calls["open"] - before == FAILURES
    stats = cascade.statistics()
    assert (stats["disk"]["failed_writes"], stats["disk"]["full"]) == (FAILURES, 0)
    assert (stats["disk"]["skipped_writes"], stats["object"]["writes"]) == (5, FAILURES + 5)
    system.always.clear()
    now[0] += 60.0
    cascade.write(CODEC.encode(array(9, 10_000)))
    assert cascade.statistics()["disk"]["writes"] == 1


def test_a_failing_tier_is_set_aside_and_tried_again(tmp_path: Path) -> None:
    now = [0.0]
    bad = Broken(DiskTier(str(tmp_path / "a"), small_bytes=0))
    good = DiskTier(str(tmp_path / "b"), small_bytes=0)
    cascade = Cascade([bad, good], clock=lambda: now[0])
    bad.error = OSError(5, "EIO")
    for _ in range(FAILURES + 5):
        cascade.write([(0, [b"x"])])
    assert bad.asked == FAILURES  # then it rests
    assert len(good.files()) == FAILURES + 5
    rests = []
    for _ in range(8):
        now[0] += 61.0
        asked = bad.asked
        cascade.write([(0, [b"x"])])
        rests.append(bad.asked - asked)
    assert rests == [1] * 8
    bad.error = None
    now[0] += 61
    cascade.write([(0, [b"x"])])
    assert len(bad.inner.files()) == 1
    cascade.write([(0, [b"x"])])
    assert len(bad.inner.files()) == 2


def test_a_store_that_takes_minutes_to_fail_is_not_asked_at_once_again(tmp_path: Path) -> None:
    """Tasks wait for room while a write is under way."""
    now = [0.0]

    class Stuck(Broken):
        def write(self, groups: Any) -> Any:
            now[0] += 120.0
            return super().write(groups)

    stuck = Stuck(DiskTier(str(tmp_path / "a"), small_bytes=0))
    stuck.error = OSError(5, "EIO")
    cascade = Cascade([stuck, DiskTier(str(tmp_path / "b"), small_bytes=0)], clock=lambda: now[0])
    for _ in range(5):
        cascade.write([(0, [b"x"])])
        now[0] += 20.0
    assert stuck.asked == 1
    now[0] += 30.0
    cascade.write([(0, [b"x"])])
    assert stuck.asked == 2


def test_what_a_failed_write_may_have_left_is_deleted_in_one_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_at((tmp_path / "store").as_uri())
    asked: list[str] = []

    def down(what: str) -> Any:
        def fail(*args: Any) -> None:
            asked.append(what)
            raise OSError(5, "EIO")

        return fail

    monkeypatch.setattr(
        tier.bucket,
        "_store",
        types.SimpleNamespace(errors=(OSError,), denied=(), put=down("put"), delete=down("delete")),
    )
    with pytest.raises(OSError, match="cannot write after 4 attempts"):
        tier.write(CODEC.encode(1))
    assert asked == ["put"] * 4 + ["delete"]
    assert (tier.used_bytes, tier.failed_deletions) == (0, 1)


def test_when_all_fail_the_first_answer_counts_and_nothing_is_kept(tmp_path: Path) -> None:
    full = DiskTier(str(tmp_path / "a"), limit_bytes=10)
    bad = Broken(DiskTier(str(tmp_path / "b")))
    bad.error = OSError(5, "EIO")
    cascade = Cascade([full, bad], clock=lambda: 0.0)
    for _ in range(FAILURES):
        with pytest.raises(TierFull, match="limit of 10"):
            cascade.write([(0, [b"x" * 100])])
    assert cascade.used_bytes == 0
    both = Cascade([bad], clock=lambda: 0.0)
    for _ in range(FAILURES):
        with pytest.raises(OSError, match="EIO"):
            both.write([(0, [b"x"])])
    with pytest.raises(TierFull, match="all tiers"):
        both.write([(0, [b"x"])])


def test_store_down_values_stay_in_memory_and_leave_when_it_is_back(
    s3_server: Any, s3_url: str, tmp_path: Path
) -> None:
    async def main() -> None:
        now = [0.0]
        disk = DiskTier(str(tmp_path / "disk"), limit_bytes=1000)
        cascade = Cascade([disk, tier_at(s3_url, timeout_seconds=2.0)], clock=lambda: now[0])
        engine = Engine(cascade, budget_bytes=3 * MB, clock=lambda: now[0])
        store = TieredStore(engine)
        s3_server.stop()
        for i in range(8):
            store[i] = array(i)
        await engine.idle()
        assert engine.states()["stored"] == 0
        assert cascade.statistics()["object"]["failed_writes"] >= FAILURES
        assert sum(engine.counters.write_errors.values()) >= 1
        assert all((store[i] == array(i)).all() for i in range(8))
        s3_server.restart()
        for _ in range(10):
            now[0] += 120.0
            engine.eviction.on_timer()
            await engine.idle()
        assert engine.resident_bytes <= 3 * MB
        entries = await store.ensure(range(8))
        assert all((store[i] == array(i)).all() for i in range(8))
        store.release(entries)
        engine.validate()
        await engine.close()
        assert cascade.used_bytes >= 0

    asyncio.run(main())


def test_an_object_that_is_gone_is_a_lost_key_and_no_wrong_answer(tmp_path: Path) -> None:
    async def main() -> None:
        tier = tier_at(tmp_path.as_uri())
        engine = Engine(tier, budget_bytes=None)
        lost: list[Any] = []
        store = TieredStore(engine, on_lost=lost.append)
        store["a"], store["b"] = array(0), array(1)
        engine.shrink(1 << 40)
        await engine.idle()
        engine.shrink(0)
        # An I/O thread holds what it wrote last until it takes up something else; as long it could be revived.
        barrier = threading.Barrier(engine.io.threads)
        await asyncio.gather(
            *(asyncio.wrap_future(engine.io._writers.submit(barrier.wait)) for _ in range(engine.io.threads))
        )
        for name in tier.files():
            os.unlink(tmp_path / tier.prefix / name)
        entries = await store.ensure(["a", "b"])
        await asyncio.sleep(0)
        assert sorted(lost) == ["a", "b"]
        with pytest.raises(LostData):
            store["a"]
        store.release(entries)
        await engine.close()

    asyncio.run(main())


def test_an_adopted_copy_is_read_by_a_store_that_never_wrote_it(tmp_path: Path) -> None:
    async def main() -> None:
        writer, reader = tier_at(tmp_path.as_uri()), ObjectTier(Bucket(tmp_path.as_uri()), "gpurt/c/other")
        many = [array(i, 10) for i in range(400)]  # an index larger than what is read at once
        handle = writer.write(CODEC.encode(many))
        freed: list[Any] = []
        engine = Engine(reader, budget_bytes=None)
        store = TieredStore(engine)
        store["k"] = StoredCopy(4000, reader.adopt(handle.name, handle.nbytes, handle.digest, on_free=freed.append))
        assert len(store.slow) == 1
        assert store.spilled_total == (4000, handle.nbytes)
        entries = await store.ensure(["k"])
        assert all((g == v).all() for g, v in zip(store["k"], many, strict=True))
        store.release(entries)
        engine.validate()
        del store["k"]
        await engine.idle()
        assert writer.files() == []
        assert len(freed) == 1
        assert reader.used_bytes == 0
        await engine.close()

    asyncio.run(main())
