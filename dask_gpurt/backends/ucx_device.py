"""The device's side of UCX: context, ordering and memory of the buffers that it sends and receives.

`DeviceSide` is what the ucx transport asks for; `CudaSide` has it for CUDA. Importing this module loads no vendor
library. Why each of them is needed:

* UCX knows no streams. What is sent must be there before (`DeviceSide.prepare`), and what is received into must not be
  in use by earlier work of the stream that allocates in order (`DeviceSide.allocate`).
* UCX asks for events of the current context in its own thread. A thread without one has crashed there
  (`DeviceSide.enter`). A context takes hundreds of megabytes of the device, so it is entered only where this process
  has one.
* Memory of CUDA's asynchronous pool cannot be opened by another process: UCX would copy it through the host, at 0.02 to
  0.6 GB/s on an H200, where a pool of ``cudaMalloc`` had 250. So messages are sent from, and received into, a small
  pool of that kind. They do not stay in it (`DeviceSide.keep`): it has to have room for those that come after.

Calls that wait or allocate are for threads that may: an allocation that fails calls back, and may spill.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt.backends import device_copies
from dask_gpurt.backends.cuda import checked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_DEVICE_NODE = "/dev/nvidiactl"
#: of the pool that messages are sent from and received into, at its start and at most
POOL_BYTES = 32 << 20
POOL_LIMIT_BYTES = 1 << 30


class DeviceSide(Protocol):
    """What the ucx transport asks of a device."""

    def in_use(self) -> bool:
        """Whether this process computes on the device."""

    def enter(self) -> None:
        """Give the calling thread the context of the device."""

    def prepare(self, buffers: Sequence[Any]) -> list[Any]:
        """The buffers of a message as they may be sent: wait until their bytes are there. Host buffers pass."""

    def allocate(self, nbytes: int) -> Any:
        """Memory that may be received into at once; MemoryError when there is none."""

    def keep(self, buffers: Sequence[Any]) -> list[Any]:
        """What was received into such memory, in memory for values; MemoryError when there is none."""


def has_device() -> bool:
    """Whether there is a GPU here whose memory UCX could send from. Touches none."""
    return os.path.exists(_DEVICE_NODE)


def _on_device(buffer: Any) -> bool:
    return type(buffer) is not memoryview and hasattr(buffer, "__cuda_array_interface__")


class CudaSide:
    """`DeviceSide` for the first device of this process. Its calls need a driver."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._lock = threading.Lock()

    def in_use(self) -> bool:
        """Whether this process has a CUDA context. Creates none."""
        try:
            from cuda.bindings import driver
        except ImportError:
            return False
        error, device = driver.cuDeviceGet(0)
        if int(error) != 0:  # CUDA was never initialised here
            return False
        error, _flags, active = driver.cuDevicePrimaryCtxGetState(device)
        return int(error) == 0 and bool(active)

    def enter(self) -> None:
        """Make the device's primary context that of the calling thread."""
        from cuda.bindings import runtime

        checked(runtime.cudaSetDevice(0))
        checked(runtime.cudaFree(0))

    def _pooled(self) -> Any:
        import rmm.mr

        with self._lock:
            if self._pool is None:
                self._pool = rmm.mr.PoolMemoryResource(
                    rmm.mr.CudaMemoryResource(), initial_pool_size=POOL_BYTES, maximum_pool_size=POOL_LIMIT_BYTES
                )
            return self._pool

    def allocate(self, nbytes: int) -> Any:
        """Memory of the pool, which no earlier work uses any more."""
        import rmm
        from rmm.pylibrmm.stream import DEFAULT_STREAM

        buffer = rmm.DeviceBuffer(size=nbytes, mr=self._pooled())
        DEFAULT_STREAM.synchronize()
        return buffer

    def prepare(self, buffers: Sequence[Any]) -> list[Any]:
        """Copies of what lies on the device, after the work that made it: in the pool, else in host memory."""

        def copy(pointer: int, nbytes: int, default: Any) -> Any:
            try:
                return _copied(pointer, nbytes, default, self._pooled())
            except MemoryError:
                room = device_copies.pinned_room(nbytes)
                device_copies.begin_to_host(pointer, [room], default)
                return room

        return _copies(buffers, copy)

    def keep(self, buffers: Sequence[Any]) -> list[Any]:
        """Copies in the memory that values are allocated from."""
        return _copies(buffers, lambda pointer, nbytes, default: _copied(pointer, nbytes, default, None))


def _copied(pointer: int, nbytes: int, stream: Any, resource: Any) -> Any:
    """Begin to copy within the device; MemoryError when `resource` has no room."""
    import rmm
    from cuda.bindings import runtime

    copy = rmm.DeviceBuffer(size=nbytes) if resource is None else rmm.DeviceBuffer(size=nbytes, mr=resource)
    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    checked(runtime.cudaMemcpyAsync(copy.ptr, pointer, nbytes, kind, device_copies.handle_of(stream)))
    return copy


def _copies(buffers: Sequence[Any], copy: Callable[[int, int, Any], Any]) -> list[Any]:
    """`copy` of each buffer on the device, which begins it on RMM's default stream; returns when all are there."""
    from cuda.bindings import runtime
    from rmm.pylibrmm.stream import DEFAULT_STREAM

    out = list(buffers)
    default = device_copies.handle_of(DEFAULT_STREAM)
    # Waits without spinning, and is the only wait: what other streams do comes before it on the default one.
    event = checked(runtime.cudaEventCreateWithFlags(runtime.cudaEventBlockingSync | runtime.cudaEventDisableTiming))
    try:
        for stream in {_stream_of(b, default) for b in out if _on_device(b)} - {default}:
            checked(runtime.cudaEventRecord(event, stream))
            checked(runtime.cudaStreamWaitEvent(default, event, 0))
        try:
            for i, buffer in enumerate(buffers):
                if _on_device(buffer):
                    out[i] = copy(*device_copies.extent_of(buffer.__cuda_array_interface__), DEFAULT_STREAM)
        finally:  # copies that were begun read buffers that may go when this returns, or raises
            checked(runtime.cudaEventRecord(event, default))
            checked(runtime.cudaEventSynchronize(event))
    finally:
        checked(runtime.cudaEventDestroy(event))
    return out


def _stream_of(buffer: Any, default: int) -> int:
    """The stream whose work made a buffer, by its own word; else the default one."""
    stream = buffer.__cuda_array_interface__.get("stream")
    return default if stream is None else int(stream)


@functools.cache
def device_side() -> DeviceSide | None:
    """That of this process; None where there is no GPU. Touches none."""
    return CudaSide() if has_device() else None
