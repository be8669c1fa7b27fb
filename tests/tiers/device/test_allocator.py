"""The stack over what is installed: dask-cuda's pools, what replaces ours later, and what else moves device values."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from dask_gpurt.tiers.device import coexistence
from dask_gpurt.tiers.device.box import BoxState
from dask_gpurt.tiers.device.setup import DeviceMemory, Late
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from tests.tiers.conftest import HostSlabs

pytest.importorskip("rmm")

import rmm
import rmm.mr

from dask_gpurt.backends.rmm_stack import DeviceAllocator, chain
from tests.tiers.device.host_rmm import _DEVICES, Elsewhere, HostRmmBackend, host_memory, pattern

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KB = 1 << 10


def refuse(nbytes: int) -> bool:
    return False


def own() -> Any:
    raise AssertionError("a second pool was made")


def installed(device: int) -> Any:
    return rmm.mr.get_per_device_resource(device)


@pytest.mark.parametrize("kind", ["pool", "limited", "tracked"])
def test_it_stacks_over_what_dask_cuda_has_installed(kind: str) -> None:
    device = next(_DEVICES)
    base = host_memory()
    if kind == "pool":
        theirs = rmm.mr.PoolMemoryResource(base, initial_pool_size=64 * KB, maximum_pool_size=64 * KB)
    elif kind == "limited":
        theirs = rmm.mr.LimitingResourceAdaptor(base, 64 * KB)
    else:
        theirs = rmm.mr.TrackingResourceAdaptor(rmm.mr.LimitingResourceAdaptor(base, 64 * KB))
    rmm.mr.set_per_device_resource(device, theirs)
    allocator = DeviceAllocator(refuse, 1 << 20, pool=own, device=device)
    allocator.install()
    assert installed(device) is allocator.stack.resource
    assert any(r is theirs for r in chain(installed(device)))
    assert allocator.limit_bytes == (1 << 20 if kind == "pool" else 64 * KB)  # the lower one holds
    buffer = rmm.DeviceBuffer(size=10 * KB, mr=installed(device))
    assert allocator.allocated_bytes() == 10 * KB
    with pytest.raises(MemoryError):
        rmm.DeviceBuffer(size=60 * KB, mr=installed(device))
    del buffer
    allocator.close()
    assert installed(device) is theirs


def test_where_nothing_is_installed_the_pool_is_our_own() -> None:
    device = next(_DEVICES)
    made: list[Any] = []

    def pool() -> Any:
        made.append(host_memory())
        return made[-1]

    allocator = DeviceAllocator(refuse, 64 * KB, pool=pool, device=device)
    before = installed(device)
    allocator.install()
    assert chain(installed(device))[-1] is made[0]
    allocator.close()
    assert installed(device) is before


def test_a_cupy_that_cannot_be_imported_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cupy.py").write_text("raise RuntimeError('no libnvrtc')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    device = next(_DEVICES)
    rmm.mr.set_per_device_resource(device, theirs := host_memory())
    allocator = DeviceAllocator(refuse, 64 * KB, pool=own, cupy=True, device=device)
    allocator.install()
    assert any(r is theirs for r in chain(installed(device)))
    allocator.close()
    assert installed(device) is theirs


def device_memory(
    limit: int, tmp_path: Path, conflict: Callable[[], str] = lambda: ""
) -> tuple[DeviceMemory, HostRmmBackend, int]:
    callback = Late()
    backend = HostRmmBackend(limit)
    backend.callback = callback
    memory = DeviceMemory.over(backend, backend.allocator, callback, HostSlabs(), 1 << 20, conflict)
    memory.space.below.append(DiskTier(str(tmp_path / "disk")))
    return memory, backend, backend.allocator.device


def test_a_resource_set_after_ours_is_stacked_over_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As dask-cuda's RMMSetup does: it sets a pool of its own, after preloads have run."""
    memory, backend, device = device_memory(400 * KB, tmp_path)
    old = memory.space.put("old", backend.make(0, 100 * KB))
    memory.look()
    assert memory.statistics()["resource_replaced"] == 0
    rmm.mr.set_per_device_resource(device, rmm.mr.LimitingResourceAdaptor(host_memory(), 300 * KB))
    with caplog.at_level(logging.WARNING, "distributed.worker.gpurt"):
        memory.look()
    assert "was replaced after the device tier had begun (1 times so far)" in caplog.text
    assert installed(device) is backend.allocator.stack.resource
    assert memory.allocator.limit_bytes == 300 * KB
    assert memory.space.backend.allocated_bytes() == 100 * KB  # what came from the earlier one counts still
    memory.look()
    memory.look()
    assert memory.statistics()["resource_replaced"] == 1
    # The callback works in the new one: without it, the third would be a MemoryError.
    boxes = [memory.space.put(i, backend.make(i, 100 * KB)) for i in range(1, 6)]
    assert memory.oom.calls >= 1
    for i, box in enumerate([old, *boxes]):
        assert (box.get().array() == pattern(i, 100 * KB)).all()
    memory.close()


def test_what_others_put_over_ours_leaves_it_in_use(tmp_path: Path) -> None:
    memory, backend, device = device_memory(400 * KB, tmp_path)
    tracker = rmm.mr.TrackingResourceAdaptor(installed(device))
    rmm.mr.set_per_device_resource(device, tracker)
    memory.look()
    assert memory.allocator.replaced == 0
    assert installed(device) is tracker
    memory.close()
    assert installed(device) is tracker  # theirs to take away
    rmm.mr.set_per_device_resource(device, host_memory())
    memory.look()  # a heartbeat that was under way while it closed
    assert memory.allocator.replaced == 0
    assert backend.allocated_bytes() == 0


def test_it_stands_aside_while_cudf_spills_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """dask-cuda's CUDFSetup may switch that on after our start."""
    worker: Any = SimpleNamespace(memory_manager=SimpleNamespace(data={}), plugins={})
    other = next(_DEVICES)
    memory, backend, _ = device_memory(400 * KB, tmp_path, lambda: coexistence.conflict(worker, other))
    box = memory.space.put(0, backend.make(0, 300 * KB))
    memory.look()
    assert memory.statistics()["stands_aside"] == ""
    cudf = mock.Mock()
    cudf.get_option.return_value = True
    with mock.patch.dict("sys.modules", {"cudf": cudf}), caplog.at_level(logging.ERROR, "distributed.worker.gpurt"):
        memory.look()
        memory.look()
        assert caplog.text.count("The device tier stands aside") == 1
        assert "cuDF's own spilling is on" in memory.statistics()["stands_aside"]
        with pytest.raises(MemoryError):
            backend.make(1, 300 * KB)
        assert box.state is BoxState.DEVICE
        memory.space.limit_bytes = 100 * KB
        assert memory.space.balance() == 0  # nor by its own limit
        memory.space.limit_bytes = 400 * KB
    memory.look()
    assert memory.statistics()["stands_aside"] == ""
    backend.make(1, 300 * KB)
    assert box.state is BoxState.BELOW
    memory.close()


def test_it_stands_aside_over_managed_memory(tmp_path: Path) -> None:
    """A task may install it; pages of it are the driver's to move."""
    worker: Any = SimpleNamespace(memory_manager=SimpleNamespace(data={}), plugins={})
    where: list[int] = []
    memory, _, device = device_memory(400 * KB, tmp_path, lambda: coexistence.conflict(worker, where[0]))
    where.append(device)
    memory.look()
    assert memory.statistics()["stands_aside"] == ""
    rmm.mr.set_per_device_resource(device, rmm.mr.ManagedMemoryResource())
    memory.look()
    assert "whose pages the driver moves" in memory.statistics()["stands_aside"]
    assert memory.space.rests
    rmm.mr.set_per_device_resource(device, host_memory())
    memory.look()
    assert memory.statistics()["stands_aside"] == ""
    assert not memory.space.rests
    memory.close()


def test_a_cudf_that_is_being_imported_has_no_options_yet() -> None:
    worker: Any = SimpleNamespace(memory_manager=SimpleNamespace(data={}), plugins={})
    with mock.patch.dict("sys.modules", {"cudf": SimpleNamespace()}):
        assert coexistence.conflict(worker, next(_DEVICES)) == ""


def test_memory_that_does_not_come_from_rmm_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory, _, _ = device_memory(400 * KB, tmp_path)
    with caplog.at_level(logging.WARNING, "distributed.worker.gpurt"):
        memory.look()
        assert caplog.text == ""
        memory.space.put(0, Elsewhere(pattern(0, 10 * KB)))
        memory.look()
        memory.look()
    assert caplog.text.count("in memory that does not come from RMM") == 1
    memory.close()
