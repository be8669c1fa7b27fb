"""cuDF's own objects over ordinary memory, for what can be known without a GPU: nothing here runs a kernel."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.backends import device_copies, device_values
from dask_gpurt.backends.device_values import CudaBackend
from dask_gpurt.backends.rmm_stack import DeviceAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest


class HostSpan:
    """Bytes in ordinary memory, by the protocol that cuDF takes for device memory."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = np.ascontiguousarray(data)
        self.ptr = int(self.data.ctypes.data)
        self.size = int(self.data.nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.ptr, False), "shape": (self.size,), "strides": None, "typestr": "|u1", "version": 3}


def plain(data: np.ndarray[Any, Any], *, valid: Sequence[bool] | None = None, size: int = -1, offset: int = 0) -> Any:
    """A `pylibcudf.Column` of numbers or times; with `size` or `offset` a view of them."""
    import pylibcudf as plc

    names = {"i4": "INT32", "i8": "INT64", "f8": "FLOAT64", "u1": "UINT8", "b1": "BOOL8"}
    name = names.get(data.dtype.str[1:]) or {"M": "TIMESTAMP", "m": "DURATION"}[data.dtype.kind] + "_NANOSECONDS"
    mask = None
    if valid is not None:
        bits = np.packbits(np.array(valid, dtype=bool), bitorder="little")
        mask = HostSpan(np.pad(bits, (0, 64 - len(bits) % 64)))
    rows = len(data) - offset if size < 0 else size
    nulls = 0 if valid is None else rows - sum(valid[offset : offset + rows])
    kind = plc.DataType(getattr(plc.TypeId, name))
    return plc.Column(kind, rows, HostSpan(data), mask, nulls, offset, [], validate=False)


def text(words: Sequence[str], *, size: int = -1, offset: int = 0) -> Any:
    """A `pylibcudf.Column` of text."""
    import pylibcudf as plc

    ends = np.cumsum([0, *(len(w.encode()) for w in words)]).astype("i4")
    chars = HostSpan(np.frombuffer("".join(words).encode(), "u1"))
    rows = len(words) - offset if size < 0 else size
    return plc.Column(plc.DataType(plc.TypeId.STRING), rows, chars, None, 0, offset, [plain(ends)], validate=False)


def lists(lengths: Sequence[int]) -> Any:
    """A `pylibcudf.Column` of lists of numbers."""
    import pylibcudf as plc

    ends = np.cumsum([0, *lengths]).astype("i4")
    children = [plain(ends), plain(np.arange(int(ends[-1])))]
    return plc.Column(plc.DataType(plc.TypeId.LIST), len(lengths), None, None, 0, 0, children, validate=False)


def typed(column: Any, dtype: Any) -> Any:
    """A column of cuDF."""
    from cudf.core.column import ColumnBase

    return ColumnBase.create(column, dtype)


def content(value: Any) -> list[tuple[Any, ...]]:
    """All buffers of a frame, with the shape of its columns: equal for equal frames."""
    from dask_gpurt.backends import cudf_values

    return [_content(column) for column in cudf_values._columns(value)]


def _content(column: Any) -> tuple[Any, ...]:
    spans = [None if s is None else ctypes.string_at(s.ptr, s.size) for s in (column.data(), column.null_mask())]
    children = [_content(child) for child in column.children()]
    return str(column.type().id()), column.size(), column.offset(), column.null_count(), spans, children


def backend_on_host(monkeypatch: pytest.MonkeyPatch, device: int) -> CudaBackend:
    """`CudaBackend` whose copies are of ordinary memory; all else of it is as on a device."""
    from tests.tiers.device.host_rmm import host_memory

    def begin_to_host(pointer: int, targets: Sequence[memoryview], stream: Any) -> None:
        for target in targets:
            target[:] = ctypes.string_at(pointer, target.nbytes)
            pointer += target.nbytes

    def to_device(pieces: Sequence[memoryview], pointer: int) -> None:
        for piece in pieces:
            ctypes.memmove(pointer, bytes(piece), piece.nbytes)
            pointer += piece.nbytes

    class Stream:
        def synchronize(self) -> None:
            """Nothing was put off."""

    monkeypatch.setattr(device_copies, "begin_to_host", begin_to_host)
    monkeypatch.setattr(device_copies, "leaving", Stream)
    monkeypatch.setattr(device_values, "to_device", to_device)
    monkeypatch.setattr(CudaBackend, "fence", lambda self: None)
    allocator = DeviceAllocator(lambda nbytes: False, 1 << 24, pool=host_memory, device=device)
    allocator.install()
    return CudaBackend(allocator)
