"""Copies between device and host memory, and page-locked host memory. All of it needs a driver.

Copies are begun on a stream and waited for once: `DeviceBytes.copy_to` begins, ``finish`` waits. What leaves the device
takes a stream of its own, beside the kernels that run; the caller has waited for the work that made the bytes. What
comes takes the stream that its memory was allocated on, as such memory may be used on no other before that is waited
for.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends.cuda import checked
from dask_gpurt.memory.touched import Touched
from dask_gpurt.model.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: page-locked memory for messages that go through the host, at its start and at most
STAGING_BYTES = 16 << 20
STAGING_LIMIT_BYTES = 256 << 20


@functools.cache
def leaving() -> Any:
    """The stream of copies to the host: `rmm.pylibrmm.stream.Stream`. Made once, before memory is short."""
    from rmm.pylibrmm.stream import CudaStreamFlags, Stream

    return Stream(flags=CudaStreamFlags.NON_BLOCKING)


def handle_of(stream: Any) -> int:
    """A stream as ``cuda.bindings`` takes it."""
    return int(stream.__cuda_stream__()[1])


def extent_of(interface: dict[str, Any]) -> tuple[int, int]:
    """(address, bytes) of an array, by its ``__cuda_array_interface__``."""
    import numpy

    nbytes = math.prod(map(int, interface["shape"])) * numpy.dtype(interface["typestr"]).itemsize
    return int(interface["data"][0] or 0), nbytes


def begin_to_host(pointer: int, targets: Sequence[memoryview], stream: Any) -> None:
    """Begin to copy from `pointer` on into `targets`, in their order."""
    from cuda.bindings import runtime

    kind, handle = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost, handle_of(stream)
    for target in targets:
        if target.nbytes:
            checked(runtime.cudaMemcpyAsync(_address(target), pointer, target.nbytes, kind, handle))
            pointer += target.nbytes


def to_device(pieces: Iterable[memoryview], pointer: int) -> None:
    """Copy `pieces` one after the other to `pointer`, which was allocated on RMM's default stream; wait for it."""
    from cuda.bindings import runtime
    from rmm.pylibrmm.stream import DEFAULT_STREAM

    kind, handle = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice, handle_of(DEFAULT_STREAM)
    try:
        for piece in pieces:
            if piece.nbytes:
                checked(runtime.cudaMemcpyAsync(pointer, _address(piece), piece.nbytes, kind, handle))
                pointer += piece.nbytes
    finally:
        DEFAULT_STREAM.synchronize()


def _address(view: memoryview) -> int:
    import numpy

    return int(numpy.frombuffer(view, "u1").__array_interface__["data"][0])


class DeviceBytes:
    """Contiguous bytes on the device as a frame; see `dask_gpurt.tiers.device.backend.DeviceFrame`."""

    def __init__(self, pointer: int, nbytes: int, owner: Any) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self._owner = owner

    def copy_to(self, targets: Sequence[memoryview]) -> None:
        """Begin to fill `targets`."""
        begin_to_host(self.pointer, targets, leaving())

    def finish(self) -> None:
        """Wait for the copies."""
        leaving().synchronize()


class PinnedSlabs:
    """Page-locked memory; see `dask_gpurt.tiers.device.pinned.SlabSource`.

    ``cudaHostAlloc`` faults page after page in one thread: 64 MiB took it 22 to 31 ms on the host of an H200, which is
    twenty times as long as to fill it from the device. Huge pages that are touched and then registered took 9 ms.
    """

    tier = Tier.PINNED

    def __init__(self) -> None:
        #: slab -> the memory it is of
        self._areas: dict[int, Touched] = {}

    def allocate(self, nbytes: int) -> memoryview:
        """A slab of page-locked memory; MemoryError or OSError where there is none, or it may not be locked."""
        from cuda.bindings import runtime

        area = Touched(nbytes)
        try:
            checked(runtime.cudaHostRegister(area.address, nbytes, runtime.cudaHostRegisterDefault))
        except RuntimeError as e:
            area.end()
            raise MemoryError(f"{nbytes} bytes of host memory cannot be locked: {e}") from e
        self._areas[id(area.view)] = area
        return area.view

    def release(self, slab: memoryview) -> None:
        """Give a slab back; nothing may use it any more."""
        from cuda.bindings import runtime

        area = self._areas.pop(id(slab))
        checked(runtime.cudaHostUnregister(area.address))
        area.end()


@functools.cache
def _pinned_pool() -> Any:
    import rmm.mr

    return rmm.mr.PoolMemoryResource(
        rmm.mr.PinnedHostMemoryResource(), initial_pool_size=STAGING_BYTES, maximum_pool_size=STAGING_LIMIT_BYTES
    )


def pinned_room(nbytes: int) -> memoryview:
    """Page-locked memory for a message that goes through the host; ordinary memory where there is no more of it."""
    import ctypes

    import numpy

    if not nbytes:
        return memoryview(b"")
    try:
        pool = _pinned_pool()
        pointer = int(pool.allocate(nbytes))
    except MemoryError:
        return numpy.empty(nbytes, "u1").data
    room = (ctypes.c_ubyte * nbytes).from_address(pointer)
    weakref.finalize(room, pool.deallocate, pointer, nbytes)
    return memoryview(room).cast("B")
