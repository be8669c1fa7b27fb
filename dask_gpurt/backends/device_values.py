"""`CudaBackend`: device values of cuDF, CuPy, Numba, RMM and torch, as frames and back.

cuDF's objects are packed (`cudf_values`). Others go by distributed's "cuda" family, whose frames stay on the device
until they are copied; torch tensors, which that family does not know, by their own storage. What none of them knows is
refused (`owns`). Importing this module loads no vendor library.

Frees are ordered after the last use by waiting for the whole device (`CudaBackend.fence`) before a value is dropped:
the streams that libraries used are not known to us, and an event on the wrong one orders nothing. It is paid once per
round of spilling, which then copies megabytes. Once more for a value that its library has to copy first, as one whose
rows do not lie one after the other: that copy is begun after the wait, on a stream of the library.

torch, Numba and CuPy have allocators of their own. Unless they are set up to use RMM, their memory is neither limited
nor counted there, and that a value of theirs leaves makes no room for others (`CudaBackend.outside`).
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends import cudf_values
from dask_gpurt.backends.cuda import checked
from dask_gpurt.backends.device_copies import DeviceBytes, extent_of, leaving, to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.backends.rmm_stack import DeviceAllocator

#: modules whose objects are asked whether they are on a device
_LIBRARIES = {"cudf", "cupy", "cupyx", "cuml", "cugraph", "numba", "pylibcudf", "rmm", "torch"}
#: frames of a value that was encoded, by what decodes it
_CUDF, _TORCH, _FAMILY = "cudf", "torch", "family"


def library_of(value: Any) -> str:
    """The top-level module of a value's type."""
    return type(value).__module__.partition(".")[0]


class CudaBackend:
    """Implements `dask_gpurt.tiers.device.backend.DeviceBackend`.

    Parameters
    ----------
    allocator
        What the libraries allocate from; values come back into it.
    """

    def __init__(self, allocator: DeviceAllocator) -> None:
        self._allocator = allocator
        self._device = allocator.device
        #: frames that went by their library's own serialization, as `cudf_values` does not know all about them
        self.refused = 0
        self.allocated_bytes = allocator.allocated_bytes

    def prepare(self) -> None:
        """Take what is needed when memory is short, while it is not: a stream, and room to pack tables."""
        leaving()
        cudf_values.packing_room()

    def owns(self, value: Any) -> bool:
        """Whether a value lies on the device, and comes back to it as it was."""
        library = library_of(value)
        if library not in _LIBRARIES:
            return False
        if library == "torch":
            return _is_plain_tensor(value) and value.device.index == self._device
        if library == "cudf":
            return cudf_values.is_frame(value)
        if not hasattr(type(value), "__cuda_array_interface__"):
            return False
        return library != "cupy" or value.data.device_id == self._device

    def blocks(self, value: Any) -> Sequence[tuple[int, int]]:
        """The allocations that a value holds: address and bytes of each."""
        library = library_of(value)
        if library == "cudf":
            return cudf_values.blocks(value)
        if library == "torch":
            storage = value.untyped_storage()
            return [(storage.data_ptr(), int(storage.nbytes()))]
        if library == "cupy":
            memory = value.data.mem
            return [(memory.ptr, int(memory.size))]
        return [extent_of(value.__cuda_array_interface__)]

    def outside(self, value: object) -> bool:
        """Whether its memory did not come through RMM."""
        library = library_of(value)
        if library == "torch":
            # RMM's is the only pluggable allocator that RAPIDS has users install.
            return bool(sys.modules["torch"].cuda.get_allocator_backend() != "pluggable")
        if library == "numba":
            return os.environ.get("NUMBA_CUDA_MEMORY_MANAGER", "") != "rmm"
        if library == "cupy":
            # Memory that came from elsewhere, such as from RMM, is CuPy's `UnownedMemory`; all else is its own.
            return type(value.data.mem).__name__ != "UnownedMemory"  # type: ignore[attr-defined]
        return False

    def encode(self, value: Any, parts: Sequence[int] | None = None) -> list[tuple[int, Sequence[Any]]]:
        """A value as frames, which stay on the device; all in one part."""
        library = library_of(value)
        if library == "cudf":
            try:
                header, frames = cudf_values.pack(value)
                return [(0, [pickle.dumps((_CUDF, header, None), 5), *frames])]
            except cudf_values.Refused:
                self.refused += 1  # below is cuDF's own way, which may allocate
        if library == "torch":
            # Both are marks beside the memory, which `contiguous` keeps.
            dense = value.resolve_conj().resolve_neg().contiguous()
            header = (str(dense.dtype).partition(".")[2], tuple(dense.shape))
            frame = DeviceBytes(dense.data_ptr(), dense.numel() * dense.element_size(), dense)
            self._wait_for_copies(value, [frame])
            return [(0, [pickle.dumps((_TORCH, header, None), 5), frame])]
        from distributed.protocol import serialize

        if library in ("cupy", "numba"):
            _require_dtype(value)
        header, given = serialize(value, serializers=("cuda",), on_error="raise")
        frames = [_frame(f) for f in given]
        self._wait_for_copies(value, frames)
        on_device = [isinstance(f, DeviceBytes) for f in frames]
        return [(0, [pickle.dumps((_FAMILY, header, on_device), 5), *frames])]

    def _wait_for_copies(self, value: Any, frames: Sequence[Any]) -> None:
        """Wait for the kernels that copied a value for these frames, which came after the caller's `fence`."""
        held = [(at, at + nbytes) for at, nbytes in self.blocks(value)]
        for frame in frames:
            if not isinstance(frame, DeviceBytes) or not frame.nbytes:
                continue
            if not any(begin <= frame.pointer and frame.pointer + frame.nbytes <= end for begin, end in held):
                self.fence()
                return

    def decode(self, frames: list[memoryview]) -> Any:
        """A value on the device again, from its frames."""
        return self.decode_pieces([[f] for f in frames])

    def decode_pieces(self, frames: list[list[memoryview]]) -> Any:
        """The same, from frames that lie in pieces."""
        kind, header, on_device = pickle.loads(b"".join(frames[0]))
        if kind == _CUDF:
            return cudf_values.unpack(header, [self._on_device(pieces) for pieces in frames[1:]])
        if kind == _TORCH:
            import torch

            dtype, shape = header
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
            torch.cuda.current_stream().synchronize()
            to_device(frames[1], tensor.data_ptr())
            return tensor
        from distributed.protocol import deserialize

        values = [
            self._on_device(pieces) if device else bytearray(b"".join(pieces))
            for pieces, device in zip(frames[1:], on_device, strict=True)
        ]
        return deserialize(header, values)

    def _on_device(self, pieces: list[memoryview]) -> Any:
        """A buffer of the allocator with these bytes."""
        import rmm

        buffer = rmm.DeviceBuffer(size=sum(p.nbytes for p in pieces), mr=self._allocator.stack.resource)
        to_device(pieces, buffer.ptr)
        return buffer

    def fence(self) -> None:
        """Wait until the device has done all that it was given."""
        from cuda.bindings import runtime

        checked(runtime.cudaDeviceSynchronize())


def _frame(frame: Any) -> Any:
    interface = getattr(frame, "__cuda_array_interface__", None)
    return frame if interface is None else DeviceBytes(*extent_of(interface), frame)


def _is_plain_tensor(value: Any) -> bool:
    """Whether something of torch is a tensor in device memory that its dtype, shape and bytes say all of."""
    torch = sys.modules["torch"]
    # Subclasses, as of parameters of a model, have more to them; sparse and quantized ones have no bytes of their own.
    return (
        type(value) is torch.Tensor
        and value.is_cuda
        and not value.requires_grad
        and value.layout is torch.strided
        and not value.is_quantized
    )


def _require_dtype(value: Any) -> None:
    """TypeError for a dtype with more to it than the interface says, which is all that the "cuda" family keeps."""
    import numpy

    typestr = value.__cuda_array_interface__["typestr"]
    if numpy.dtype(typestr) != value.dtype:
        raise TypeError(f"an array of {value.dtype} would come back as one of {typestr}")
