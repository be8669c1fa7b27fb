"""What is read off dask-cuda's real mapping and plugins; only NVML is replaced, and RMM's memory is host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.backends.dask_cuda import Allocator, DeviceSetup, Store, asked, look
from dask_gpurt.tiers.device.coexistence import decide

pytest.importorskip("dask_cuda", reason="dask-cuda is not installed; bash ci/cuda.sh makes an environment with it")
pytest.importorskip("rmm", reason="RMM is not installed; bash ci/cuda.sh makes an environment with it")

import pynvml
import rmm.mr
from dask_cuda.device_host_file import DeviceHostFile
from dask_cuda.plugins import CUDFSetup, RMMSetup
from dask_cuda.worker_common import worker_data_function

from tests.tiers.device.host_rmm import _DEVICES, host_memory

if TYPE_CHECKING:
    from pathlib import Path

GB = 1 << 30


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(total=GB))


def worker(data: Any, *plugins: Any, memory_limit: int | None = GB) -> Any:
    manager = SimpleNamespace(
        data=data, memory_limit=memory_limit, memory_target_fraction=0.6, memory_spill_fraction=0.7
    )
    state = SimpleNamespace(tasks={})
    return SimpleNamespace(memory_manager=manager, state=state, plugins={str(i): p for i, p in enumerate(plugins)})


def rmm_setup(**options: Any) -> Any:
    names = ("initial_pool_size", "maximum_pool_size", "release_threshold", "log_directory", "external_lib_list")
    flags = ("managed_memory", "async_alloc", "track_allocations")
    return RMMSetup(**{**dict.fromkeys(names), **dict.fromkeys(flags, False), **options})


def data_of(tmp_path: Path, **options: Any) -> Any:
    """What dask-cuda makes ``worker.data`` of, as a worker does."""
    made = worker_data_function(**{"device_memory_limit": "default", "memory_limit": GB, **options})(0)
    if isinstance(made, tuple):
        kind, arguments = made
        return kind(worker_local_directory=str(tmp_path), **arguments)
    return made


@pytest.mark.parametrize(
    ("options", "store", "limit"),
    [
        ({}, Store.EMPTY, int(GB * 0.8)),
        ({"device_memory_limit": "100MB"}, Store.EMPTY, 100_000_000),
        ({"device_memory_limit": "auto"}, Store.EMPTY, GB),
        ({"device_memory_limit": 0}, Store.EMPTY, None),
        ({"device_memory_limit": None}, Store.EMPTY, None),
        ({"device_memory_limit": None, "memory_limit": None}, Store.OTHER, None),
        ({"enable_cudf_spill": True}, Store.EMPTY, int(GB * 0.8)),
    ],
)
def test_its_mapping_and_limit(options: dict[str, Any], store: Store, limit: int | None, tmp_path: Path) -> None:
    setup = look(worker(data_of(tmp_path, **options)), device=next(_DEVICES))
    assert (setup.store, setup.device_limit_bytes, setup.host_limited) == (store, limit, True)
    assert decide(setup, "auto").works is (store is Store.OTHER or limit is not None)


def test_a_mapping_with_keys_is_in_use(tmp_path: Path) -> None:
    for i, limit in enumerate((GB, 0)):
        data = data_of(tmp_path / str(i), device_memory_limit=limit)
        assert type(data) is DeviceHostFile
        w = worker(data)
        data["x"] = 1
        # Its length is 0 where there is no limit of the device: the tasks tell.
        w.state.tasks["x"] = SimpleNamespace(state="memory")
        assert look(w, device=next(_DEVICES)).store is Store.USED
    assert look(worker(data_of(tmp_path), memory_limit=None), device=next(_DEVICES)).host_limited is False


def test_another_class_of_dask_cuda_is_not_touched() -> None:
    kind = type("ProxifyHostFile", (dict,), {"__module__": "dask_cuda.proxify_host_file"})
    setup = look(worker(kind()), device=next(_DEVICES))
    assert setup.store is Store.UNKNOWN
    assert not decide(setup, "auto").works


@pytest.mark.parametrize(
    ("options", "allocator"),
    [
        ({}, Allocator.DRIVER),
        ({"initial_pool_size": "100MB"}, Allocator.POOL),
        ({"async_alloc": True}, Allocator.ASYNC),
        ({"async_alloc": True, "initial_pool_size": 0.5}, Allocator.ASYNC),
        ({"managed_memory": True}, Allocator.MANAGED),
        ({"managed_memory": True, "initial_pool_size": "100MB"}, Allocator.MANAGED),
    ],
)
def test_what_a_plugin_that_is_still_to_run_will_install(options: dict[str, Any], allocator: Allocator) -> None:
    for spill in (False, True):
        coming = [CUDFSetup(spill=spill, spill_stats=0), rmm_setup(**options)]
        setup = look(worker({}), coming, device=next(_DEVICES))
        assert (setup.allocator, setup.cudf_spills) == (allocator, spill)


def test_what_is_installed() -> None:
    def installed(resource: Any) -> Allocator:
        device = next(_DEVICES)
        rmm.mr.set_per_device_resource(device, resource)
        return look(worker({}), device=device).allocator

    pool = rmm.mr.PoolMemoryResource(host_memory(), initial_pool_size=1 << 20, maximum_pool_size=1 << 20)
    assert installed(rmm.mr.CudaMemoryResource()) is Allocator.DRIVER
    assert installed(pool) is Allocator.POOL
    assert installed(rmm.mr.TrackingResourceAdaptor(pool)) is Allocator.POOL
    assert installed(host_memory()) is Allocator.OTHER
    managed = rmm.mr.ManagedMemoryResource()
    assert installed(managed) is Allocator.MANAGED
    assert installed(rmm.mr.LimitingResourceAdaptor(managed, 1 << 20)) is Allocator.MANAGED
    for name in ("CudaAsyncMemoryResource", "SystemMemoryResource", "SamHeadroomMemoryResource", "ArenaMemoryResource"):
        assert hasattr(rmm.mr, name)


def test_the_limit_of_a_pool_holds_for_our_tier() -> None:
    """RMM does not tell it."""

    def limit(**options: Any) -> int | None:
        return look(worker({}, rmm_setup(**options)), device=next(_DEVICES)).pool_limit_bytes

    assert limit() is None
    assert limit(initial_pool_size=GB) is None
    assert limit(initial_pool_size=GB, maximum_pool_size=2 * GB) == 2 * GB
    assert limit(initial_pool_size=GB, maximum_pool_size="2 GB") is None  # has not run yet
    assert limit(maximum_pool_size=2 * GB) is None  # without a pool it says nothing


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, DeviceSetup(Store.EMPTY, device_limit_bytes=1)),
        ({"rmm_async": True, "rmm_pool_size": 0.5}, DeviceSetup(Store.EMPTY, device_limit_bytes=1)),
        ({"device_memory_limit": 0.5}, DeviceSetup(Store.EMPTY, device_limit_bytes=1)),
        ({"device_memory_limit": "0 MiB"}, DeviceSetup(Store.EMPTY)),
        ({"device_memory_limit": None}, DeviceSetup(Store.EMPTY)),
        ({"memory_limit": 0}, DeviceSetup(Store.EMPTY, device_limit_bytes=1, host_limited=False)),
        ({"rmm_managed_memory": True}, DeviceSetup(Store.EMPTY, Allocator.MANAGED, device_limit_bytes=1)),
        ({"enable_cudf_spill": True}, DeviceSetup(Store.EMPTY, cudf_spills=True, device_limit_bytes=1)),
        ({"data": dict}, DeviceSetup(device_limit_bytes=1)),
    ],
)
def test_what_a_cluster_is_asked_for(options: dict[str, Any], expected: DeviceSetup) -> None:
    assert asked(options) == expected
