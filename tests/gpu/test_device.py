"""On a real GPU: round trips through every tier, more than the device holds, and frees that wait for their streams.

Skipped without a GPU; with GPURT_REQUIRE_GPU=1 they fail there (``ci/gpu.sh``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dask_gpurt.backends import cuda
from dask_gpurt.backends.device_copies import PinnedSlabs
from dask_gpurt.backends.device_values import CudaBackend
from dask_gpurt.backends.rmm_stack import DeviceAllocator, own_pool
from dask_gpurt.config import Settings
from dask_gpurt.testing import check_storage_tier
from dask_gpurt.tiers.device.box import BoxState
from dask_gpurt.tiers.device.pinned import BlockPool, SlabTier
from dask_gpurt.tiers.device.setup import DeviceMemory, Late
from dask_gpurt.tiers.storage.codec import PickleCodec
from dask_gpurt.tiers.storage.disk.tier import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.gpu

MB = 1 << 20


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Callable[..., DeviceMemory]]:
    """``memory(limit)``: a device tier of so many bytes, with pinned blocks and a disk below."""
    opened: list[DeviceMemory] = []

    def make(limit: int, *, pinned: int = 256 * MB, kind: str = "async") -> DeviceMemory:
        callback = Late()
        allocator = DeviceAllocator(
            callback, limit, pool=lambda: own_pool(kind, limit), cupy=True, free_bytes=cuda.free_bytes
        )
        allocator.install()
        backend = CudaBackend(allocator)
        backend.prepare()
        memory = DeviceMemory.over(backend, allocator, callback, PinnedSlabs(), pinned, lambda: "")
        memory.space.below.append(DiskTier(str(tmp_path / f"disk{len(opened)}")))
        opened.append(memory)
        return memory

    yield make
    for m in opened:
        m.close()


def cupy_value(i: int, nbytes: int) -> Any:
    cupy = pytest.importorskip("cupy")
    return cupy.arange(i, i + nbytes // 8, dtype="i8")


def cudf_value(i: int, nbytes: int) -> Any:
    cudf = pytest.importorskip("cudf")
    n = nbytes // 24
    return cudf.DataFrame({"a": np.arange(i, i + n), "b": np.arange(n) * 0.5, "s": [f"row-{k % 97}" for k in range(n)]})


def numba_value(i: int, nbytes: int) -> Any:
    numba_cuda = pytest.importorskip("numba.cuda")
    return numba_cuda.to_device(np.arange(i, i + nbytes // 8))


def torch_value(i: int, nbytes: int) -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    return torch.arange(i, i + nbytes // 2, device="cuda").to(torch.bfloat16)


def on_host(value: Any) -> Any:
    if hasattr(value, "to_pandas"):
        return value.to_pandas()
    if hasattr(value, "copy_to_host"):
        return value.copy_to_host()
    if type(value).__module__.startswith("torch"):
        return value.float().cpu().numpy()
    return value.get()


MAKERS = [cupy_value, cudf_value, numba_value, torch_value]


def test_the_probe_names_the_device() -> None:
    found = cuda.probe()
    assert found.reason == ""
    assert found.name
    assert found.total_bytes > 1 << 30


def test_pinned_blocks_pass_the_suite_of_tiers() -> None:
    check_storage_tier(
        lambda limit: SlabTier(
            BlockPool(PinnedSlabs(), limit_bytes=limit, block_bytes=4096 if limit else MB, slab_bytes=8 * MB)
        ),
        PickleCodec(),
    )


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("pinned", [256 * MB, 0], ids=["pinned", "disk"])
def test_round_trip(make: Any, pinned: int, memory: Any) -> None:
    m = memory(512 * MB, pinned=pinned)
    value = make(3, 4 * MB)
    assert m.space.backend.owns(value)
    want = on_host(value)
    box = m.space.put("k", value)
    kind = type(value)
    del value
    assert m.space.spill(1) > 0
    assert box.state is BoxState.BELOW
    got = box.get()
    assert type(got) is kind
    np.testing.assert_array_equal(np.asarray(on_host(got)), np.asarray(want))
    m.space.validate()


def cudf_shared(i: int, nbytes: int) -> Any:
    return cudf_value(i, nbytes).copy(deep=False)


def cudf_slice(i: int, nbytes: int) -> Any:
    """The second quarter of a frame of which nothing else is kept."""
    whole = cudf_value(i, 4 * nbytes)
    return whole.iloc[len(whole) // 4 : len(whole) // 2]


def cudf_rich(i: int, nbytes: int) -> Any:
    cudf = pytest.importorskip("cudf")
    value = cudf_value(i, nbytes)
    value["kind"] = (value["a"] % 3).astype("category")
    value["when"] = value["a"].astype("datetime64[ns]")
    value["null"] = value["b"].where(value["a"] % 7 > 0)
    value["list"] = cudf.Series([[k, k + 1] for k in range(len(value))])
    return value.set_index("a")


@pytest.mark.parametrize("make", [cudf_shared, cudf_slice, cudf_rich])
def test_cudf_leaves_while_the_device_is_full(make: Any, memory: Any) -> None:
    """Facts 4 and 5: nothing is allocated from the pool that is full, and what left is free there."""
    cupy = pytest.importorskip("cupy")
    limit = 256 * MB
    m = memory(limit)
    boxes = [m.space.put(i, make(i, 8 * MB)) for i in range(4)]
    want = [on_host(b.get()) for b in boxes]
    before = m.allocator.allocated_bytes()
    rest = cupy.empty(m.allocator.headroom_bytes() - MB, "u1")
    held = cupy.empty(8 * MB, "u1")  # some of them have to leave for it
    assert any(b.state is BoxState.BELOW for b in boxes)
    assert m.oom.exceptions == 0, m.oom.last_error
    assert m.oom.made_bytes >= 7 * MB
    assert m.space.backend.inner.refused == 0
    del rest, held
    for box, value in zip(boxes, want, strict=True):
        got = box.get()
        assert on_host(got).equals(value)
        assert list(got.dtypes) == list(make(0, 1 << 12).dtypes)
    assert m.allocator.allocated_bytes() <= 1.1 * before + 4 * MB
    m.space.validate()


def test_two_workers_on_one_device(tmp_path: Path) -> None:
    """Fact 8: what another process took is not counted as room."""
    import subprocess
    import sys

    cupy = pytest.importorskip("cupy")
    share = cuda.free_bytes() * 6 // 10
    code = (
        "import rmm, rmm.mr, sys; b = rmm.DeviceBuffer(size=int(sys.argv[1]), mr=rmm.mr.CudaMemoryResource());"
        "print(b.size, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(share)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert int(other.stdout.readline()) == share
        total = cuda.probe().total_bytes
        callback = Late()
        limit = int(0.8 * total)
        allocator = DeviceAllocator(
            callback, limit, pool=lambda: own_pool("async", limit), cupy=True, free_bytes=cuda.free_bytes
        )
        allocator.install()
        m = DeviceMemory.over(CudaBackend(allocator), allocator, callback, PinnedSlabs(), 64 * MB, lambda: "")
        m.space.below.append(DiskTier(str(tmp_path / "disk")))
        assert allocator.headroom_bytes() < total - share
        boxes = [m.space.put(i, cupy.full(64 * MB, i % 251, "u1")) for i in range(4)]
        rest = cupy.empty(cuda.free_bytes() - 96 * MB, "u1")
        more = cupy.empty(160 * MB, "u1")  # far below our limit, and there is no memory for it
        assert any(b.state is BoxState.BELOW for b in boxes)
        assert m.oom.fragmented == 0
        del rest, more
        assert all(int(b.get()[-1]) == i % 251 for i, b in enumerate(boxes))
        m.close()
        other.communicate("")


@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("make", [cupy_value, cudf_value])
@pytest.mark.parametrize("kind", ["async", "pool"])
def test_more_than_the_device_holds(times: int, make: Any, kind: str, memory: Any) -> None:
    limit, size = 256 * MB, 16 * MB
    m = memory(limit, kind=kind, pinned=128 * MB)
    n = times * limit // size
    boxes = [m.space.put(i, make(i, size)) for i in range(n)]
    for i, box in enumerate(boxes):
        value = box.get()
        first = on_host(value["a"])[0] if hasattr(value, "columns") else on_host(value)[0]
        assert int(first) == i
        del value
    statistics = m.statistics()
    assert statistics["out_of_memory"]["calls"] > 0
    assert statistics["out_of_memory"]["exceptions"] == 0, statistics["out_of_memory"]["last_error"]
    assert statistics["peak_bytes"] <= limit
    m.space.validate()


def test_a_free_waits_for_the_kernel_that_still_reads(memory: Any) -> None:
    """A kernel on another stream reads a value while it is spilled and its memory is given to somebody else."""
    cupy = pytest.importorskip("cupy")
    m = memory(512 * MB)
    n = 16 * MB
    for _ in range(20):
        box = m.space.put("k", cupy.ones(n // 4, "f4"))
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            result = cupy.zeros((), "f8")
            for _ in range(50):
                result += box.get().sum(dtype="f8")
        m.space.spill(1)
        clobber = [cupy.full(n // 4, 7, "f4") for _ in range(4)]
        stream.synchronize()
        assert float(result) == 50 * (n // 4)
        del clobber
        m.space.remove(box)


def test_too_large_is_a_memory_error(memory: Any) -> None:
    cupy = pytest.importorskip("cupy")
    m = memory(64 * MB)
    with pytest.raises(MemoryError):
        cupy.zeros(128 * MB, "u1")
    assert m.statistics()["out_of_memory"]["given_up"] == 1


@pytest.mark.cluster
@pytest.mark.parametrize("times", [2, 4])
def test_a_cluster_on_more_than_the_device_holds(times: int) -> None:
    pytest.importorskip("cupy")
    import dask.array as da
    from distributed import Client

    import dask_gpurt

    limit = 1 << 30
    share = limit / cuda.probe().total_bytes
    settings = {"tiers.device": "on", "tiers.device-limit": share, "tiers.pinned-limit": 512 * MB}
    Settings.load(settings)
    with (
        dask_gpurt.local_cluster(
            settings=settings, n_workers=1, threads_per_worker=2, processes=True, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):

        def block(block_info: Any = None) -> Any:
            import cupy

            return cupy.full(block_info[None]["chunk-shape"], block_info[None]["chunk-location"][0], "f8")

        n = times * limit // (32 * MB)
        x = da.map_blocks(block, chunks=((4 * MB,) * n,), dtype="f8", meta=np.empty(0)).persist()
        total = float(x.sum().compute())
        assert total == sum(range(n)) * 4 * MB

        def look(dask_worker: Any) -> Any:
            from dask_gpurt.extension import on_worker

            return on_worker(dask_worker).runtime.statistics()  # type: ignore[union-attr]

        (statistics,) = client.run(look).values()
    assert statistics["device"]["below_values"] > 0
    assert statistics["device"]["out_of_memory"]["exceptions"] == 0
    assert statistics["fallbacks"] == {}, statistics["last_traceback"]
