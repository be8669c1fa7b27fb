"""RMM without a GPU: its own resources and adaptors over ordinary host memory, and values that live there.

`rmm.mr.CallbackMemoryResource` calls `aligned_alloc`, so allocation, limits, counting and failure callbacks are those
of RMM itself; only the memory is not a device's, and nothing here says that it is.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import rmm
import rmm.mr

from dask_gpurt.backends.rmm_stack import DeviceAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

_LIBC = ctypes.CDLL(None)
_LIBC.aligned_alloc.restype = ctypes.c_void_p
_LIBC.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_LIBC.free.argtypes = [ctypes.c_void_p]


def _allocate(nbytes: int, stream: Any, _aligned_alloc: Any = _LIBC.aligned_alloc) -> int:
    return int(_aligned_alloc(256, max(256, (nbytes + 255) // 256 * 256)))


def _free(pointer: int, nbytes: int, stream: Any, _c_free: Any = _LIBC.free) -> None:
    _c_free(pointer)


# A buffer that nobody freed dies in the last garbage collection of the interpreter, and calls `_free` then, perhaps
# after that same collection has cleared the function: a segmentation fault after the last test has passed. So the
# functions never die, and need nothing of this module.
for _function in (_allocate, _free):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_function))


def host_memory() -> Any:
    """An RMM resource over the C library's allocator."""
    return rmm.mr.CallbackMemoryResource(_allocate, _free)


class Value:
    """Bytes in a buffer that RMM allocated; `of`: a view of another's."""

    def __init__(self, data: np.ndarray[Any, Any], resource: Any, *, of: Value | None = None) -> None:
        self.nbytes = data.nbytes
        self.buffer: Any
        if of is not None:
            self.buffer = of.buffer
            return
        self.buffer = rmm.DeviceBuffer(size=data.nbytes, mr=resource)
        ctypes.memmove(self.buffer.ptr, data.ctypes.data, data.nbytes)

    def view(self) -> Value:
        """Another value of the same memory."""
        return Value(self.array(), None, of=self)

    def array(self) -> np.ndarray[Any, Any]:
        """A copy of the bytes."""
        return np.frombuffer(ctypes.string_at(self.buffer.ptr, self.nbytes), "u1")


class Elsewhere(Value):
    """Bytes that came past RMM, as those of a library with an allocator of its own."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.nbytes = data.nbytes
        self.data = data

    def array(self) -> np.ndarray[Any, Any]:
        """A copy of the bytes."""
        return self.data.copy()


class LazyFrame:
    """A frame whose copies happen in `finish` only, as those of a stream may: who reads before reads poison."""

    def __init__(self, value: Value) -> None:
        self._value = value
        self.nbytes = value.nbytes
        self._begun: list[list[memoryview]] = []

    def copy_to(self, targets: Sequence[memoryview]) -> None:
        assert sum(t.nbytes for t in targets) == self.nbytes
        for target in targets:
            target[:] = b"\xdb" * target.nbytes
        self._begun.append(list(targets))

    def finish(self) -> None:
        for targets in self._begun:
            data, at = self._value.array(), 0
            for target in targets:
                target[:] = data[at : at + target.nbytes].data
                at += target.nbytes
        self._begun.clear()


#: no test shares what is installed with another
_DEVICES = itertools.count(1000)


class HostRmmBackend:
    """`DeviceBackend` for `Value` and `Elsewhere`, over RMM's own adaptors on ordinary memory."""

    def __init__(self, limit_bytes: int, base: Callable[[], Any] = host_memory) -> None:
        self.callback: Callable[[int], bool] = lambda nbytes: False
        self.allocator = DeviceAllocator(
            lambda nbytes: self.callback(nbytes), limit_bytes, pool=base, device=next(_DEVICES)
        )
        self.allocator.install()
        self.fences = 0
        #: called in each `encode`
        self.on_encode: Callable[[Any], None] = lambda value: None

    def make(self, i: int, nbytes: int) -> Value:
        """A value of which all bytes depend on `i`."""
        return Value(pattern(i, nbytes), self.allocator.stack.resource)

    def owns(self, value: Any) -> bool:
        return isinstance(value, Value)

    def blocks(self, value: Value) -> Sequence[tuple[Hashable, int]]:
        if isinstance(value, Elsewhere):
            return [(id(value.data), value.nbytes)]
        return [(value.buffer.ptr, value.buffer.size)]

    def outside(self, value: Value) -> bool:
        return isinstance(value, Elsewhere)

    def encode(self, value: Value, parts: Sequence[int] | None = None) -> list[tuple[int, Sequence[Any]]]:
        self.on_encode(value)
        return [(0, [pickle.dumps((type(value), value.nbytes)), LazyFrame(value)])]

    def decode(self, frames: list[memoryview]) -> Value:
        return self.decode_pieces([[f] for f in frames])

    def decode_pieces(self, frames: list[list[memoryview]]) -> Value:
        kind, nbytes = pickle.loads(b"".join(frames[0]))
        assert nbytes == sum(p.nbytes for p in frames[1])
        data = np.frombuffer(b"".join(frames[1]), "u1")
        return Elsewhere(data) if kind is Elsewhere else Value(data, self.allocator.stack.resource)

    def fence(self) -> None:
        self.fences += 1

    def allocated_bytes(self) -> int:
        return self.allocator.allocated_bytes()


def pattern(i: int, nbytes: int) -> np.ndarray[Any, Any]:
    """What `HostRmmBackend.make` puts into a value."""
    return np.random.default_rng(i).integers(0, 255, nbytes, dtype="u1")
