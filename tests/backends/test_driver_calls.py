"""The backends' calls of CUDA: their arguments, their order and what they wait for, on `HostDriver`. No GPU."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rmm")
pytest.importorskip("cuda.bindings")

import rmm

from dask_gpurt.backends import cuda, cudf_values, device_copies, rmm_stack
from dask_gpurt.backends.device_values import CudaBackend
from dask_gpurt.backends.rmm_stack import DeviceAllocator
from dask_gpurt.backends.ucx_device import POOL_LIMIT_BYTES, CudaSide
from dask_gpurt.memory.touched import HUGE_PAGE
from tests.backends.host_driver import FREE, TOTAL, HostDriver
from tests.tiers.device.host_rmm import _DEVICES, host_memory

N = 5000


class Made:
    """Bytes on the "device" that a kernel of a stream will have written, by and by."""

    def __init__(self, driver: HostDriver, number: int, stream: int) -> None:
        self.buffer = rmm.DeviceBuffer(size=N, mr=host_memory())
        ctypes.memset(self.buffer.ptr, 0, N)
        self.stream = stream
        driver.later(stream, lambda: ctypes.memset(self.buffer.ptr, number, N) and None)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.buffer.ptr, False),
            "shape": (N // 4,),
            "typestr": "<i4",
            "stream": self.stream,
            "version": 3,
        }


def read(buffer: Any) -> set[int]:
    return set(ctypes.string_at(buffer.ptr, buffer.size))


def test_what_is_sent_is_there_before(driver: HostDriver) -> None:
    """Kernels of two streams come before the copies, the copies before the return, and nothing else is waited for."""
    side = CudaSide()
    unrelated = Made(driver, 9, 8)
    made = [Made(driver, 1, 5), memoryview(b"host"), Made(driver, 2, 6), Made(driver, 3, 5)]
    out = side.prepare(made)
    assert [read(out[i]) for i in (0, 2, 3)] == [{1}, {2}, {3}]
    assert out[1] is made[1]
    assert driver.events == {}
    assert read(unrelated.buffer) == {0}


def test_what_finds_no_room_is_sent_from_the_host(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    side = CudaSide()
    made = [Made(driver, 1, 5), Made(driver, 2, 6)]
    room_for_one = iter([rmm.DeviceBuffer])

    def full(*args: Any, **kwargs: Any) -> Any:
        for make in room_for_one:
            return make(*args, **kwargs)
        raise MemoryError

    monkeypatch.setattr(rmm, "DeviceBuffer", full)
    first, second = side.prepare(made)
    assert read(first) == {1}
    assert bytes(second) == b"\2" * N
    assert driver.events == {}
    with pytest.raises(MemoryError):
        side.keep([first, second])
    assert driver.events == {}


def test_what_came_leaves_the_memory_of_messages(driver: HostDriver) -> None:
    side = CudaSide()
    came = [side.allocate(N), memoryview(b"host")]
    ctypes.memset(came[0].ptr, 7, N)
    rmm.mr.set_current_device_resource(host_memory())
    kept, host = side.keep(came)
    assert kept.ptr != came[0].ptr
    del came[0]
    assert (read(kept), host) == ({7}, memoryview(b"host"))
    assert driver.events == {}


def test_an_error_of_the_driver_is_raised_and_the_event_is_given_back(driver: HostDriver) -> None:
    side = CudaSide()
    driver.error = 719
    with pytest.raises(RuntimeError, match="719"):
        side.prepare([])
    assert driver.events == {}
    driver.error = 2
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        cuda.free_bytes()


def test_received_memory_is_used_by_nothing_before(driver: HostDriver) -> None:
    ran = []
    driver.later(0, lambda: ran.append(1))
    buffer = CudaSide().allocate(N)
    assert (buffer.size, ran) == (N, [1])
    with pytest.raises(MemoryError):
        CudaSide().allocate(2 * POOL_LIMIT_BYTES)


def test_a_context_is_entered_where_there_is_one(driver: HostDriver) -> None:
    side = CudaSide()
    assert not side.in_use()
    side.enter()
    assert side.in_use()
    assert driver.calls[-2:] == ["cuDeviceGet", "cuDevicePrimaryCtxGetState"]


def test_copies_are_there_once_they_are_waited_for(driver: HostDriver) -> None:
    source = np.arange(N, dtype="u1")
    out = [bytearray(10), bytearray(), bytearray(N - 10)]
    frame = device_copies.DeviceBytes(int(source.ctypes.data), N, source)
    frame.copy_to([memoryview(b) for b in out])
    assert not any(b"".join(out))
    frame.finish()
    assert b"".join(out) == source.tobytes()
    back = np.zeros(N, "u1")
    device_copies.to_device([memoryview(b) for b in out], int(back.ctypes.data))
    assert back.tobytes() == source.tobytes()


def test_page_locked_memory_comes_and_goes(driver: HostDriver) -> None:
    slabs = device_copies.PinnedSlabs()
    slab = slabs.allocate(N)
    assert (slab.nbytes, bytes(slab)) == (N, bytes(N))
    slab[:] = b"x" * N
    ((pointer, nbytes),) = driver.registered.items()
    assert (pointer % HUGE_PAGE, nbytes) == (0, N)
    slabs.release(slab)
    assert driver.registered == {}
    room = device_copies.pinned_room(N)
    assert room.nbytes == N
    assert (
        device_copies.pinned_room(2 * device_copies.STAGING_LIMIT_BYTES).nbytes == 2 * device_copies.STAGING_LIMIT_BYTES
    )
    assert device_copies.pinned_room(0).nbytes == 0


def test_a_block_that_is_looked_at_outlives_its_slab(driver: HostDriver) -> None:
    slabs = device_copies.PinnedSlabs()
    slab = slabs.allocate(N)
    slab[:] = b"x" * N
    view = np.frombuffer(slab, "u1")[10:20]
    slabs.release(slab)
    assert driver.registered == {}
    assert view.tobytes() == b"x" * 10


def test_memory_that_may_not_be_locked_is_none(driver: HostDriver) -> None:
    driver.error = 801
    with pytest.raises(MemoryError, match="5000 bytes of host memory cannot be locked: CUDA error 801"):
        device_copies.PinnedSlabs().allocate(N)
    assert driver.registered == {}


def test_the_probe_and_the_pools(driver: HostDriver) -> None:
    found = cuda.probe()
    assert (found.reason, found.name, found.total_bytes, found.integrated) == ("", "host memory", TOTAL, False)
    assert cuda.free_bytes() == FREE
    for kind in ("async", "pool"):
        assert rmm.DeviceBuffer(size=N, mr=rmm_stack.own_pool(kind, 1 << 24)).size == N
    with pytest.raises(ValueError, match="kind is 'arena'"):
        rmm_stack.own_pool("arena", 1 << 24)
    room = cudf_values.packing_room()
    assert room.buffer.size == cudf_values.ROOM_BYTES


def test_the_fence_waits_for_all_streams(driver: HostDriver) -> None:
    made = [Made(driver, 1, 5), Made(driver, 2, 6)]
    allocator = DeviceAllocator(lambda nbytes: False, 1 << 24, pool=host_memory, device=next(_DEVICES))
    allocator.install()
    backend = CudaBackend(allocator)
    backend.prepare()
    backend.fence()
    assert [read(m.buffer) for m in made] == [{1}, {2}]


def backend_of(driver: HostDriver) -> CudaBackend:
    allocator = DeviceAllocator(lambda nbytes: False, 1 << 24, pool=host_memory, device=next(_DEVICES))
    allocator.install()
    return CudaBackend(allocator)


def array_of_numba(data: np.ndarray[Any, Any]) -> Any:
    """Numba's own array, over ordinary memory."""
    # Numba alone has such arrays, too, but makes none without a driver.
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    arrays = pytest.importorskip("numba.cuda.cudadrv.devicearray")

    address = ctypes.c_void_p(data.ctypes.data)
    memory = SimpleNamespace(size=data.nbytes, device_ctypes_pointer=address, is_managed=False)
    out = arrays.DeviceNDArray(data.shape, data.strides, data.dtype, gpu_data=memory)
    out.data = data
    return out


def copied(frames: Any) -> list[bytes]:
    """Frames as their copies on the host have them."""
    out = []
    for frame in frames:
        target = bytearray(frame.nbytes)
        frame.copy_to([memoryview(target)])
        frame.finish()
        out.append(bytes(target))
    return out


def test_what_a_library_copies_for_its_frames_is_waited_for(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of an array do not lie together: the copy is a kernel on a stream of its own, which only we wait for."""
    data = np.arange(N, dtype="i8")
    every_other = array_of_numba(data[::2])
    copy = array_of_numba(np.zeros(N // 2, "i8"))

    def copy_to_device(source: Any) -> None:
        assert source is every_other
        driver.later(0, lambda: copy.data.__setitem__(slice(None), data[::2]))

    monkeypatch.setattr(copy, "copy_to_device", copy_to_device, raising=False)
    monkeypatch.setattr(sys.modules["numba.cuda"], "device_array", lambda shape, dtype: copy)
    backend = backend_of(driver)
    assert backend.owns(every_other)
    backend.fence()  # as `DeviceSpace`, before it makes values leave
    ((_, (_, frame)),) = backend.encode(every_other)
    assert copied([frame]) == [data[::2].tobytes()]

    driver.calls.clear()
    ((_, (_, frame)),) = backend.encode(array_of_numba(data))
    assert copied([frame]) == [data.tobytes()]
    assert "cudaDeviceSynchronize" not in driver.calls  # nothing was copied before


def test_an_array_of_another_device_of_this_process_is_left_there(driver: HostDriver) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed; ci/gpu/dry.sh makes an environment with it")
    data = np.arange(N)
    backend = CudaBackend(DeviceAllocator(lambda nbytes: False, 1 << 24, pool=None, device=0))
    for device in (0, 1):
        memory = cupy.cuda.UnownedMemory(data.ctypes.data, data.nbytes, data, device_id=device)
        array = cupy.ndarray(data.shape, data.dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))
        assert backend.owns(array) == (device == 0)


def test_a_dtype_that_the_frames_do_not_tell_stays_on_the_device(driver: HostDriver) -> None:
    backend = backend_of(driver)
    times = array_of_numba(np.arange(N).astype("M8[ns]"))
    assert backend.blocks(times) == [(times.data.ctypes.data, 8 * N)]
    assert len(backend.encode(times)) == 1
    with pytest.raises(TypeError, match=r"would come back as one of \|V12"):
        backend.encode(array_of_numba(np.zeros(N, [("a", "i8"), ("b", "f4")])))
    words = array_of_numba(np.full(N, "abc"))
    assert backend.blocks(words) == [(words.data.ctypes.data, 12 * N)]


def test_cupy_allocates_through_rmm_and_gets_its_own_back() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed; ci/gpu/dry.sh makes an environment with it")
    from rmm.allocators.cupy import rmm_cupy_allocator

    before = cupy.cuda.get_allocator()
    allocator = DeviceAllocator(lambda nbytes: False, 1 << 24, pool=host_memory, cupy=True, device=next(_DEVICES))
    allocator.install()
    assert cupy.cuda.get_allocator() is rmm_cupy_allocator
    allocator.close()
    assert cupy.cuda.get_allocator() == before
