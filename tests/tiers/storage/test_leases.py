"""Leases and sweeps: what is renewed, what is deleted, and what is somebody else's."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from distributed.utils_test import async_poll_for

from dask_gpurt.tiers.storage.object import client as bucket_module
from dask_gpurt.tiers.storage.object.client import Bucket
from dask_gpurt.tiers.storage.object.leases import (
    RENEW_SECONDS,
    LeaseKeeper,
    expired,
    is_object,
    second_look_seconds,
    sweep,
    sweep_expired,
    worker_prefix,
)
from dask_gpurt.tiers.storage.object.tier import ObjectTier

if TYPE_CHECKING:
    from pathlib import Path

A, B, C = (f"gpurt/c{i}/{i:016x}" for i in range(3))


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "BACK_OFF_SECONDS", 0.01)


def fill(bucket: Bucket, prefix: str, *numbers: int) -> None:
    LeaseKeeper(bucket, prefix, {}).renew()
    for n in numbers:
        bucket.put(f"{prefix}/{n:x}", [b"value"])


def age(folder: Path, prefix: str) -> None:
    old = time.time() - 3600
    for path in (folder / prefix).iterdir():
        os.utime(path, (old, old), follow_symlinks=False)


def sweep_old(bucket: Bucket) -> list[str]:
    """Both looks of a scheduler, without the time between them."""
    return sorted(sweep_expired(bucket, expired(bucket, expire_seconds=60)))


def test_prefixes_are_never_the_same() -> None:
    names = {worker_prefix("tls://10.0.0.1:8786") for _ in range(100)}
    assert len(names) == 100
    assert all(n.startswith("gpurt/tls-10-0-0-1-8786/") and is_object(f"{n}/1f") for n in names)


# ---------------------------------------------------------------------------------------------- renewing


def test_a_lease_is_renewed_also_for_what_was_adopted(tmp_path: Path) -> None:
    async def main() -> None:
        bucket = Bucket(tmp_path.as_uri())
        keeper = LeaseKeeper(bucket, A, {"worker": "w"}, renew_seconds=0.01)
        keeper.renew()
        assert json.loads((tmp_path / A / "lease").read_text())["worker"] == "w"
        keeper.add(C)
        keeper.foster(B, 2)
        keeper.foster(B, -1)
        keeper.start()
        await async_poll_for(lambda: keeper.renewals >= 4, timeout=30)
        assert (tmp_path / B / "lease").exists()
        assert (tmp_path / C / "lease").exists()
        keeper.foster(B, -1)
        assert keeper.fostered == []
        await keeper.stop()

    asyncio.run(main())


class Held:
    """A store whose writes wait, and fail, on demand."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.errors: list[Exception] = []
        self.written: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bucket, name)

    def put(self, name: str, views: Any) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        if self.errors:
            raise self.errors.pop(0)
        self.bucket.put(name, views)
        self.written.append(name)


def test_nothing_is_written_once_it_has_stopped(tmp_path: Path) -> None:
    """A renewal under way at `stop` was still in its thread afterwards, and wrote behind the sweep."""

    async def main() -> None:
        held = Held(Bucket(tmp_path.as_uri()))
        keeper = LeaseKeeper(held, A, {}, renew_seconds=0.001)  # type: ignore[arg-type]
        keeper.foster(B, 1)
        held.gate.clear()
        keeper.start()
        await asyncio.to_thread(held.entered.wait, 30)
        stopping = asyncio.ensure_future(keeper.stop())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not stopping.done()
        held.gate.set()
        await stopping
        assert held.written == [f"{A}/lease"]  # that of the other prefix was not begun any more
        assert keeper.renewals == 0

    asyncio.run(main())


def test_a_renewal_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        held = Held(Bucket(tmp_path.as_uri()))
        keeper = LeaseKeeper(held, A, {}, renew_seconds=0.001)  # type: ignore[arg-type]
        held.gate.clear()
        keeper.start()
        await asyncio.to_thread(held.entered.wait, 30)
        monkeypatch.setattr("dask_gpurt.tiers.storage.object.leases.STOP_SECONDS", 0.05)
        await keeper.stop()
        held.gate.set()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("error", [OSError(5, "EIO"), RuntimeError("whatever"), ValueError("of a library")])
def test_no_failure_ends_the_renewals(error: Exception, tmp_path: Path) -> None:
    """It ended at whatever was no OSError, silently; after a quarter of an hour others deleted the values."""

    async def main() -> None:
        held = Held(Bucket(tmp_path.as_uri()))
        held.errors = [error]
        keeper = LeaseKeeper(held, A, {}, renew_seconds=0.001)  # type: ignore[arg-type]
        keeper.start()
        await async_poll_for(lambda: keeper.renewals >= 2, timeout=30)
        assert keeper.failures == 1
        await keeper.stop()

    asyncio.run(main())


def test_one_prefix_that_cannot_be_renewed_does_not_keep_others_from_it(tmp_path: Path) -> None:
    held = Held(Bucket(tmp_path.as_uri()))
    keeper = LeaseKeeper(held, A, {})  # type: ignore[arg-type]
    keeper.foster(B, 1)
    held.errors = [OSError(5, "EIO")]
    with pytest.raises(OSError, match="EIO"):
        keeper.renew()
    assert held.written == [f"{B}/lease"]
    assert keeper.renewals == 0


# ---------------------------------------------------------------------------------------------- sweeping


def test_expired_prefixes_go_and_live_ones_stay(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path.as_uri())
    for prefix in (A, B, C):
        fill(bucket, prefix, 0)
    bucket.put("somebody-elses", [b"x"])
    age(tmp_path, A)
    age(tmp_path, B)
    age(tmp_path, C)
    fill(bucket, C)  # an old value, but the lease was renewed
    assert sweep_old(bucket) == [A, B]
    assert sorted(bucket.list("")) == [f"{C}/0", f"{C}/lease", "somebody-elses"]
    assert sweep_old(bucket) == []
    assert not (tmp_path / A).exists()


@pytest.mark.parametrize("sign", ["lease", "7"], ids=["it is renewed", "a value is written"])
def test_a_prefix_with_a_sign_of_life_between_two_looks_stays(sign: str, tmp_path: Path) -> None:
    """After an outage of the store all leases are old until their owners have come to renew them."""
    bucket = Bucket(tmp_path.as_uri())
    for prefix in (A, B):
        fill(bucket, prefix, 0)
        age(tmp_path, prefix)
    found = expired(bucket, expire_seconds=60)
    assert sorted(found) == [A, B]
    bucket.put(f"{A}/{sign}", [b"value" if sign == "7" else (tmp_path / A / sign).read_bytes()])
    assert sweep_expired(bucket, found) == [B]
    assert f"{A}/0" in bucket.list("")


def test_the_second_look_waits_for_a_renewal_that_fails_and_the_next(tmp_path: Path) -> None:
    assert second_look_seconds(Bucket(tmp_path.as_uri(), timeout_seconds=30.0)) >= 2 * RENEW_SECONDS + 4 * 2 * 30


def test_what_is_not_ours_is_never_swept(tmp_path: Path) -> None:
    """A folder of somebody that is called gpurt, links, and leases that we did not write."""
    store, home = tmp_path / "store", tmp_path / "home"
    bucket = Bucket(store.as_uri())
    fill(Bucket(home.as_uri()), A, 1)  # it looks like one of ours, but is reached by a link
    (home / "docs").mkdir()
    (home / "docs" / "thesis.tex").write_text("x")
    (store / "gpurt" / "src" / "pkg").mkdir(parents=True)
    (store / "gpurt" / "src" / "pkg" / "main.py").write_text("x")
    (store / "gpurt" / "notes.txt").write_text("x")
    (store / "gpurt" / "clock-0123456789abcdef").write_text("x")
    (store / "gpurt" / "linked").symlink_to(home / "gpurt" / "c0")
    (store / "gpurt" / "c").mkdir()
    (store / "gpurt" / "c" / "w").symlink_to(home)
    (store / "gpurt" / "c" / f"{5:016x}").symlink_to(home / A)
    for i, lease in enumerate(
        ["", "{}", "[]", "\xff", "[" * 8000, '{"renewed": 1, "keeper": "me"}', '{"keeper": "'], 10
    ):
        folder = store / "gpurt" / "c" / f"{i:016x}"
        folder.mkdir()
        (folder / "lease").write_text(lease, "latin-1")
        (folder / "0").write_text("not ours")
    no_lease = store / B
    no_lease.mkdir(parents=True)
    (no_lease / "0").write_text("not ours")
    fill(bucket, C, 1, 2)
    (store / C / "notes.txt").write_text("x")
    (store / C / "7").symlink_to(home / "docs" / "thesis.tex")
    (store / C / "8").mkdir()
    (store / C / "8" / "9").write_text("x")
    theirs = set(tmp_path.rglob("*")) - {store / C / n for n in ("lease", "1", "2")}
    old = time.time() - 3600
    for path in tmp_path.rglob("*"):
        os.utime(path, (old, old), follow_symlinks=False)
    assert sweep_old(bucket) == [C]
    for prefix in (*os.listdir(store / "gpurt"), "", "gpurt", "gpurt/c", "gpurt/c/w", f"gpurt/c/{5:016x}", ".."):
        assert sweep(bucket, prefix) == 0
    assert set(tmp_path.rglob("*")) - {store / "gpurt" / "clock"} == theirs
    assert (home / A / "1").exists()


def test_sweep_keeps_what_was_adopted(s3_url: str) -> None:
    bucket = Bucket(s3_url, timeout_seconds=10)
    fill(bucket, A, 0, 1, 2)
    fill(bucket, B, 0)
    bucket.put(f"{A}/notes.txt", [b"not ours"])
    assert sweep(bucket, A, keep={f"{A}/1"}) == 2
    kept = [f"{B}/0", f"{B}/lease"]
    assert sorted(bucket.list("gpurt")) == [f"{A}/1", f"{A}/lease", f"{A}/notes.txt", *kept]
    assert sweep(bucket, A, keep_lease=True) == 1
    assert sweep(bucket, A) == 1
    assert sorted(bucket.list("gpurt")) == [f"{A}/notes.txt", *kept]


def test_a_sweep_that_fails_leaves_the_lease_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(tmp_path.as_uri(), attempts=1)
    for prefix in (A, B):
        fill(bucket, prefix, 0, 1)
        age(tmp_path, prefix)
    unlink = os.unlink

    def fails(path: str, **kwargs: Any) -> None:
        if path == "1" and broken == [True]:
            raise OSError(5, "EIO")
        unlink(path, **kwargs)

    broken = [True]
    monkeypatch.setattr(os, "unlink", fails)
    with pytest.raises(OSError, match="EIO"):
        sweep_old(bucket)
    assert {n for n in bucket.list("gpurt") if n.endswith("lease")} == {f"{A}/lease", f"{B}/lease"}
    broken.clear()
    assert sweep_old(bucket) == [A, B]
    assert bucket.list("gpurt") == {}


def test_a_worker_deletes_what_came_after_the_scheduler_swept(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path.as_uri())
    tier = ObjectTier(bucket, A)
    fill(bucket, A)
    tier.write([(0, [b"before the scheduler came"])])
    fill(bucket, B)
    tier.move_to(B)
    handle = tier.write([(0, [b"x"])])
    assert handle.name.startswith(B)
    tier.leave_objects = True
    tier.close()
    assert sorted(bucket.list("")) == [handle.name, f"{B}/lease"]  # those are the scheduler's
    assert sweep(bucket, B) == 2
    tier.write([(0, [b"was under way"])])
    tier.close()
    assert bucket.list("") == {}


# ---------------------------------------------------------------------------------------------- files


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    bucket = Bucket((tmp_path / "shared folder").as_uri())
    before = os.umask(0o000)
    try:
        fill(bucket, A, 0)
    finally:
        os.umask(before)
    folder = tmp_path / "shared folder" / A
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder, folder / "lease", folder / "0")] == [0o700, 0o600, 0o600]


def test_no_link_is_followed(tmp_path: Path) -> None:
    bucket = Bucket((tmp_path / "store").as_uri(), attempts=1)
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "0").write_text("x")
    (tmp_path / "store" / "gpurt").symlink_to(secret)
    (tmp_path / "store" / "link").symlink_to(secret / "0")
    os.mkfifo(tmp_path / "store" / "pipe")
    for name in ("gpurt/0", "link", "pipe"):
        with pytest.raises(OSError):
            bucket.read_range(name, 0, 1)
    with pytest.raises(OSError):
        bucket.put("gpurt/1", [b"x"])
    bucket.delete(["gpurt/0", "link", "pipe"])
    assert bucket.list("") == bucket.list("gpurt") == {}
    assert (tmp_path / "store" / "link").is_symlink()
    assert sorted(os.listdir(secret)) == ["0"]
    for name in ("../secret/0", "a/../../secret/0", "/etc/passwd/..", ""):
        with pytest.raises(ValueError, match="no name of an object"):
            bucket.delete([name])


def test_a_write_that_fails_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(tmp_path.as_uri(), attempts=1)

    def full(*_: Any) -> int:
        raise OSError(28, "no space")

    with monkeypatch.context() as m:
        m.setattr(os, "write", full)
        with pytest.raises(OSError, match="no space"):
            bucket.put(f"{A}/0", [b"x"])
    assert bucket.list("") == {}
    # One that was killed leaves a part, which a sweep finds.
    fill(bucket, A)
    (tmp_path / A / "0.0123abcd.part").write_text("half")
    assert sweep(bucket, A) == 2
    assert bucket.list("") == {}
