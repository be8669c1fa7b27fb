"""Every tier below memory passes the one suite, whether disk, object store, blocks of memory, or several as one."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.testing import check_storage_tier
from dask_gpurt.tiers.device.pinned import BlockPool, SlabTier
from dask_gpurt.tiers.storage.codec import PickleCodec
from dask_gpurt.tiers.storage.disk.quota import Quota
from dask_gpurt.tiers.storage.disk.striped import Directories
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from dask_gpurt.tiers.storage.fallback import Cascade
from tests.tiers.conftest import HostSlabs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def damage_file(handle: Any) -> None:
    """Flip one bit of the last frame of a `DiskHandle`."""
    with open(os.path.join(handle.disk.directory, handle.name), "r+b") as f:
        offset = (handle.frames or handle.place.frames)[-1].offset  # of a file, or of a record in a segment
        f.seek(offset)
        first = f.read(1)
        f.seek(offset)
        f.write(bytes([first[0] ^ 1]))


def disks(tmp_path: Path, **layout: Any) -> Callable[[int | None], DiskTier]:
    count = itertools.count()
    return lambda limit: DiskTier(str(tmp_path / f"disk{next(count)}"), limit_bytes=limit, **layout)


LAYOUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "through the page cache": {"direct_io": "off", "small_bytes": 0},
    "small values in segments": {"small_bytes": 1 << 30},
    "lz4": {"codec": "lz4"},
    "zstd": {"codec": "zstd"},
    "auto": {"codec": "auto"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_disk(tmp_path: Path, layout: str) -> None:
    codec = LAYOUTS[layout].get("codec", "auto")
    if codec != "auto":
        pytest.importorskip({"lz4": "lz4.block", "zstd": "zstandard"}[codec])
    check_storage_tier(disks(tmp_path, **LAYOUTS[layout]), PickleCodec(), damage=damage_file)


def test_several_folders(tmp_path: Path) -> None:
    count = itertools.count()

    def make(limit: int | None) -> Directories:
        quota = Quota(limit)
        return Directories([DiskTier(str(tmp_path / f"d{next(count)}"), quota=quota) for _ in range(2)], quota)

    check_storage_tier(make, PickleCodec(), damage=damage_file)


def test_cascade(tmp_path: Path) -> None:
    make = disks(tmp_path)
    check_storage_tier(
        lambda limit: Cascade([make(20_000), make(limit)]),
        PickleCodec(),
        damage=damage_file,
    )


def objects(url: str) -> Callable[[int | None], Any]:
    pytest.importorskip("obstore")
    from dask_gpurt.tiers.storage.object.client import Bucket
    from dask_gpurt.tiers.storage.object.tier import ObjectTier

    bucket = Bucket(url, timeout_seconds=10)
    count = itertools.count()
    return lambda limit: ObjectTier(bucket, f"conformance/{next(count)}", limit_bytes=limit)


def damage_object(handle: Any) -> None:
    bucket = handle.store.bucket
    data = bytearray(bucket.read_range(handle.name, 0, handle.nbytes))
    data[-1] ^= 1
    bucket.put(handle.name, [bytes(data)])


def test_object_in_memory() -> None:
    check_storage_tier(objects("memory://"), PickleCodec(), damage=damage_object)


def test_object_in_a_folder(tmp_path: Path) -> None:
    check_storage_tier(objects((tmp_path / "shared").as_uri()), PickleCodec(), damage=damage_object)


def test_object_in_s3(s3_url: str) -> None:
    check_storage_tier(objects(s3_url), PickleCodec(), damage=damage_object)


@pytest.mark.parametrize(("block_bytes", "slab_bytes"), [(1 << 20, 64 << 20), (1000, 7000)])
def test_blocks_of_ordinary_memory(block_bytes: int, slab_bytes: int) -> None:
    """The arithmetic of the pinned tier, over memory that is not pinned (`tests/gpu` has the pinned one)."""
    check_storage_tier(
        lambda limit: SlabTier(
            BlockPool(
                HostSlabs(),
                limit_bytes=None if limit is None else limit // 1000 * min(block_bytes, 1 << 20),
                block_bytes=block_bytes,
                slab_bytes=slab_bytes,
            )
        ),
        PickleCodec(),
    )
