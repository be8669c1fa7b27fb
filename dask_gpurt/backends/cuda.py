"""CUDA through RMM: the allocator stack, copies, and the codec of device values.

::

    FailureCallbackResourceAdaptor     outermost: below a pool it would be called under the pool's lock
      StatisticsResourceAdaptor        what is allocated now, and its peak
        LimitingResourceAdaptor        bytes that this worker may take
          CudaAsyncMemoryResource | PoolMemoryResource | what a test gives

`stack_over` builds all but the lowest line and runs on every machine: tests put RMM's ``CallbackMemoryResource`` below
it.
`probe` and whatever copies need a driver. Nothing here is imported before a worker wants a device tier, and importing
this module loads no vendor library: a nanny may import it.

Frees are ordered after the last use by waiting for the whole device (`CudaBackend.fence`) before a value is dropped:
the streams that libraries used are not known to us, and an event on the wrong one orders nothing. It is paid once per
round of spilling, which then copies megabytes.

kvikio is probed and not used: GPUDirect Storage for spilling was added to, and removed from, spark-rapids; the
pinned path is as fast where it was measured.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import sys
from typing import TYPE_CHECKING, Any

from dask_gpurt.model.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distributed import Worker

#: modules whose objects are asked whether they are on a device
_LIBRARIES = {"cudf", "cupy", "cupyx", "cuml", "cugraph", "dask_cudf", "numba", "pylibcudf", "rmm", "torch"}


@dataclasses.dataclass(frozen=True)
class Probe:
    """What there is."""

    #: why there is no usable GPU; "" when an allocation on it succeeded
    reason: str
    name: str = ""
    total_bytes: int = 0
    #: "" or why GPUDirect Storage cannot be used
    gds: str = "not probed"


@functools.cache
def probe() -> Probe:
    """Allocate on the current device. Creates a CUDA context: for workers only, never for nannies or the scheduler."""
    try:
        import rmm
        import rmm.mr
        from cuda.bindings import runtime
    except Exception as e:  # a broken installation raises all kinds
        return Probe(f"RMM cannot be imported ({type(e).__name__}: {e})")
    try:
        rmm.DeviceBuffer(size=256, mr=rmm.mr.CudaMemoryResource())
        device = _checked(runtime.cudaGetDevice())
        properties = _checked(runtime.cudaGetDeviceProperties(device))
        _, total = _checked(runtime.cudaMemGetInfo())
    except (MemoryError, RuntimeError) as e:
        return Probe(f"an allocation of 256 bytes failed ({e})")
    name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
    return Probe("", name.strip("\0"), int(total), _probe_gds())


def _probe_gds() -> str:
    try:
        from kvikio.cufile_driver import get
    except Exception as e:
        return f"kvikio cannot be imported ({type(e).__name__}: {e})"
    try:
        return "" if get("is_gds_available") else "the driver says no"
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def conflict(worker: Worker) -> str:
    """What already moves device values on this worker, and must not be stacked upon; "" if nothing does."""
    data = worker.memory_manager.data
    if type(data).__module__.partition(".")[0] == "dask_cuda":
        return (
            f"worker.data is dask-cuda's {type(data).__name__}, which moves device values itself, and it has "
            "no limit of host memory or holds values already. Remedy: load dask_gpurt before the first task, start one "
            "`dask worker` per GPU with CUDA_VISIBLE_DEVICES set, or set gpurt.tiers.device: off"
        )
    cudf = sys.modules.get("cudf")
    if cudf is not None and cudf.get_option("spill"):
        return (
            "cuDF's own spilling is on, which has a failure callback of its own. Remedy: CUDF_SPILL=off (for "
            "dask-cuda: no --enable-cudf-spill), or set gpurt.tiers.device: off"
        )
    return ""


# ---------------------------------------------------------------------------------------------- the stack


@dataclasses.dataclass(frozen=True)
class Stack:
    """RMM resources, put together."""

    #: what libraries allocate from
    resource: Any
    statistics: Any
    limiting: Any

    def allocated_bytes(self) -> int:
        """Now."""
        return int(self.statistics.allocation_counts.current_bytes)

    def peak_bytes(self) -> int:
        """The most at one time so far."""
        return int(self.statistics.allocation_counts.peak_bytes)

    def headroom_bytes(self) -> int:
        """That could still be allocated below the limit."""
        return int(self.limiting.get_allocation_limit()) - int(self.limiting.get_allocated_bytes())


#: Stacks are never given up: buffers from one may live as long as the process. And where resource and buffers became
#: garbage together, in one cycle, the collector would clear the resource first, and freeing the buffers would crash.
_STACKS: list[Stack] = []


def stack_over(base: Any, limit_bytes: int, callback: Callable[[int], bool]) -> Stack:
    """Limit, count, and call back when an allocation fails. The stack lives as long as the process."""
    import rmm.mr

    limiting = rmm.mr.LimitingResourceAdaptor(base, limit_bytes)
    statistics = rmm.mr.StatisticsResourceAdaptor(limiting)
    stack = Stack(rmm.mr.FailureCallbackResourceAdaptor(statistics, callback), statistics, limiting)
    _STACKS.append(stack)
    return stack


def base_resource(kind: str, limit_bytes: int) -> Any:
    """The lowest line of the stack on a real device.

    Parameters
    ----------
    kind
        "async": CUDA's own pool, shared by streams without fragmentation of ours. "pool": RMM's, for drivers that lack
        the former.
    """
    import rmm.mr

    if kind == "async":
        return rmm.mr.CudaAsyncMemoryResource(release_threshold=limit_bytes)
    if kind == "pool":
        aligned = limit_bytes // 256 * 256
        return rmm.mr.PoolMemoryResource(
            rmm.mr.CudaMemoryResource(), initial_pool_size=aligned // 2 // 256 * 256, maximum_pool_size=aligned
        )
    raise ValueError(f"kind is {kind!r}, must be 'async' or 'pool'")


def install(stack: Stack) -> Callable[[], None]:
    """Make RMM, and the libraries that are imported, allocate from it; returns the way back.

    Memory that was allocated before stays with the resource it came from.
    """
    import rmm.mr

    before = rmm.mr.get_current_device_resource()
    rmm.mr.set_current_device_resource(stack.resource)
    undo: list[Callable[[], Any]] = [lambda: rmm.mr.set_current_device_resource(before)]
    try:
        import cupy
        from rmm.allocators.cupy import rmm_cupy_allocator
    except ImportError:
        cupy = None
    if cupy is not None:
        old = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(rmm_cupy_allocator)
        undo.append(lambda: cupy.cuda.set_allocator(old))

    def back() -> None:
        for step in reversed(undo):
            step()

    return back


# ---------------------------------------------------------------------------------------------- bytes


def _checked(result: tuple[Any, ...]) -> Any:
    """The values of a call of ``cuda.bindings``; RuntimeError when it failed."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA error {error}")
    return values[0] if len(values) == 1 else tuple(values)


class DeviceBytes:
    """Contiguous bytes on the device as a frame; see `dask_gpurt.tiers.device.pinned.DeviceFrame`."""

    def __init__(self, pointer: int, nbytes: int, owner: Any) -> None:
        self._pointer = pointer
        self.nbytes = nbytes
        self._owner = owner

    def copy_to(self, offset: int, target: memoryview) -> None:
        """Copy from `offset` on, as much as `target` has room for, into host memory."""
        from cuda.bindings import runtime

        if target.nbytes:
            kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
            _checked(runtime.cudaMemcpy(_address(target), self._pointer + offset, target.nbytes, kind))


def _address(view: memoryview) -> int:
    import numpy

    return int(numpy.frombuffer(view, "u1").__array_interface__["data"][0])


def _to_device(pieces: Sequence[memoryview], pointer: int) -> None:
    from cuda.bindings import runtime

    for piece in pieces:
        if piece.nbytes:
            kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
            _checked(runtime.cudaMemcpy(pointer, _address(piece), piece.nbytes, kind))
            pointer += piece.nbytes


class PinnedSlabs:
    """Page-locked memory from RMM; see `dask_gpurt.tiers.device.pinned.SlabSource`. Needs a driver."""

    tier = Tier.PINNED

    def __init__(self) -> None:
        import rmm.mr

        self._resource = rmm.mr.PinnedHostMemoryResource()
        self._pointers: dict[int, tuple[int, int]] = {}

    def allocate(self, nbytes: int) -> memoryview:
        """A slab of page-locked memory."""
        import ctypes

        pointer = int(self._resource.allocate(nbytes))
        view = memoryview((ctypes.c_ubyte * nbytes).from_address(pointer)).cast("B")
        self._pointers[id(view)] = (pointer, nbytes)
        return view

    def release(self, slab: memoryview) -> None:
        """Give a slab back; nothing may refer to it any more."""
        pointer, nbytes = self._pointers.pop(id(slab))
        slab.release()
        self._resource.deallocate(pointer, nbytes)


# ---------------------------------------------------------------------------------------------- values


class CudaBackend:
    """Implements `dask_gpurt.tiers.device.space.DeviceBackend` for cuDF, CuPy, Numba, RMM and torch.

    Encoding: distributed's "cuda" family, whose frames stay on the device until they are copied into pinned blocks;
    torch tensors, which that family does not know, by their own storage. What neither knows is refused (`owns`).
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def owns(self, value: Any) -> bool:
        """Whether a value lies on the device and can be moved."""
        library = type(value).__module__.partition(".")[0]
        if library not in _LIBRARIES:
            return False
        if library == "torch":
            return bool(getattr(value, "is_cuda", False)) and not value.requires_grad
        return hasattr(value, "__cuda_array_interface__") or library in ("cudf", "pylibcudf", "cupyx")

    def nbytes(self, value: Any) -> int:
        """What a value takes on the device."""
        library = type(value).__module__.partition(".")[0]
        if library == "torch":
            return int(value.untyped_storage().nbytes())
        if library == "cudf":  # whose frames may have a column of any name
            usage = value.memory_usage(deep=True)
            return int(usage.sum() if hasattr(usage, "sum") else usage)
        from dask.sizeof import sizeof

        return int(getattr(value, "nbytes", None) or sizeof(value))

    def encode(self, value: Any, parts: Sequence[int] | None = None) -> list[tuple[int, Sequence[Any]]]:
        """A value as frames, which stay on the device; all in one part."""
        if type(value).__module__.partition(".")[0] == "torch":
            dense = value.contiguous()
            header = {"torch": (str(dense.dtype).partition(".")[2], tuple(dense.shape))}
            frames: list[Any] = [DeviceBytes(dense.data_ptr(), dense.numel() * dense.element_size(), dense)]
        else:
            from distributed.protocol import serialize

            header, given = serialize(value, serializers=("cuda",), on_error="raise")
            frames = [_frame(f) for f in given]
        on_device = [isinstance(f, DeviceBytes) for f in frames]
        return [(0, [pickle.dumps((header, on_device), 5), *frames])]

    def decode(self, frames: list[memoryview]) -> Any:
        """A value on the device again, from its frames."""
        return self.decode_pieces([[f] for f in frames])

    def decode_pieces(self, frames: list[list[memoryview]]) -> Any:
        """The same, from frames that lie in pieces."""
        header, on_device = pickle.loads(b"".join(frames[0]))
        if "torch" in header:
            import torch

            dtype, shape = header["torch"]
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            _to_device(frames[1], tensor.data_ptr())
            return tensor
        import rmm
        from distributed.protocol import deserialize

        values: list[Any] = []
        for pieces, device in zip(frames[1:], on_device, strict=True):
            if not device:
                values.append(bytearray(b"".join(pieces)))
                continue
            buffer = rmm.DeviceBuffer(size=sum(p.nbytes for p in pieces), mr=self.stack.resource)
            _to_device(pieces, buffer.ptr)
            values.append(buffer)
        return deserialize(header, values)

    def fence(self) -> None:
        """Wait until the device has done all that it was given."""
        from cuda.bindings import runtime

        _checked(runtime.cudaDeviceSynchronize())

    def allocated_bytes(self) -> int:
        """Device memory that is allocated by this process through RMM."""
        return self.stack.allocated_bytes()


def _frame(frame: Any) -> Any:
    interface = getattr(frame, "__cuda_array_interface__", None)
    if interface is None:
        return frame
    size = 1
    for n in interface["shape"]:
        size *= n
    return DeviceBytes(int(interface["data"][0] or 0), size * int(interface["typestr"][2:]), frame)
