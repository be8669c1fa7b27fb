"""cuDF's frames as bytes and back, without an allocation from the pool that they lie in.

cuDF's own serialization compacts slices and copies buffers that several objects share: it allocates, and what is packed
because the device is full then fails. Here a frame leaves in one of two ways, `pack` chooses:

* **as it lies**: each buffer of each column is copied where it is, and the tree of columns is in the header;
* **packed**: views of larger buffers (the outputs of a split) would write these again and again. libcudf's
  ``ChunkedPack`` gathers the rows that are seen, chunk by chunk through a buffer that was taken at the start, from
  memory of its own (`PackingRoom`).

Either way dtypes, labels and index come back as they were. What is rare in partitions and has more to it (levels of
rows, frequencies, attributes) is refused with `Refused`; the caller has cuDF's own way for it.

pylibcudf is called by its public names; of cuDF's private ones those that `PRIVATE` lists. Importing this module loads
no vendor library.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends.device_copies import DeviceBytes, begin_to_host, leaving
from dask_gpurt.backends.frames import is_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: names of cuDF that are private, and are used here: (module, class, name)
PRIVATE = (
    ("cudf.core.column", "ColumnBase", "create"),
    ("cudf", "DataFrame", "_from_data"),
    ("cudf", "Series", "_from_column"),
    ("cudf", "Index", "_from_column"),
    ("cudf", "MultiIndex", "_columns"),
)
#: of the buffer that tables are packed through, and of what packing needs besides
ROOM_BYTES = 16 << 20
TEMPORARY_BYTES = 8 << 20
#: a buffer that is longer than its rows need by less than this is no view: allocations are rounded up
_SLACK_BYTES = 4096


class Refused(Exception):
    """This frame has something that is not kept by `pack`."""


def is_frame(value: Any) -> bool:
    """Whether a value of cuDF's holds device memory that `pack` may move."""
    cudf = sys.modules["cudf"]
    if isinstance(value, cudf.Index):
        return not isinstance(value, cudf.RangeIndex)
    return isinstance(value, (cudf.DataFrame, cudf.Series))


def blocks(value: Any) -> list[tuple[int, int]]:
    """The allocations that a frame holds, each with its bytes. No kernel runs."""
    found: dict[int, int] = {}
    for column in _columns(value):
        for span in _spans(column):
            at = int(span.ptr)
            found[at] = max(int(span.size), found.get(at, 0))
    return list(found.items())


def _columns(value: Any) -> list[Any]:
    """The columns of a frame, its index and its categories, as `pylibcudf.Column`. Nothing is copied."""
    cudf = sys.modules["cudf"]
    if isinstance(value, cudf.MultiIndex):
        return [column.to_pylibcudf() for column in value._columns]  # its levels would have to be computed
    if isinstance(value, cudf.RangeIndex):
        return []
    given = value.to_pylibcudf()[0]
    if not isinstance(value, cudf.DataFrame):
        out, dtypes = [given], [value.dtype]
    else:
        out, dtypes = given.columns(), list(value.dtypes)
    for dtype in dtypes:
        if isinstance(dtype, cudf.CategoricalDtype):
            out = [*out, *_columns(dtype.categories)]
    return out if isinstance(value, cudf.Index) else [*out, *_columns(value.index)]


def _spans(column: Any) -> Iterator[Any]:
    """The buffers of a column and those below it."""
    for span in (column.data(), column.null_mask()):
        if span is not None:
            yield span
    for child in column.children():
        yield from _spans(child)


# ---------------------------------------------------------------------------------------------- there


def pack(value: Any) -> tuple[Any, list[Any]]:
    """A frame as a header, for pickle, and device frames.

    Raises
    ------
    Refused
        It has something that would not come back.
    MemoryError
        What packing needs besides is all taken.
    """
    frames: list[Any] = []
    return _pack(value, frames), frames


def _pack(value: Any, frames: list[Any]) -> Any:
    rows: list[Any] = []
    nested: list[tuple[Any, list[Any]]] = []
    shape = _shape(value, rows, nested)
    if any(map(_is_view, rows)):
        table = PackedTable(rows)
        frames.append(table)
        body: Any = table.metadata
    else:
        body = [_tree(column, frames) for column in rows]
    headers = []
    for header, more in nested:
        headers.append((header, len(more)))
        frames += more
    return shape, body, headers


def _shape(value: Any, rows: list[Any], nested: list[tuple[Any, list[Any]]]) -> tuple[Any, ...]:
    """What a frame is besides its columns, which are appended to `rows`."""
    cudf = sys.modules["cudf"]
    if isinstance(value, cudf.RangeIndex):
        return "range", value.start, value.stop, value.step, value.name
    if isinstance(value, cudf.MultiIndex):
        raise Refused("rows have several levels")
    if isinstance(value, cudf.Index):
        if getattr(value, "freq", None) is not None:
            raise Refused("an index with a frequency")
        rows.append(value.to_pylibcudf()[0])
        return "index", _dtype(value.dtype, nested), value.name
    if value.attrs or not value.flags.allows_duplicate_labels:
        raise Refused("a frame with attributes or flags")
    if isinstance(value, cudf.Series):
        rows.append(value.to_pylibcudf()[0])
        return "series", _dtype(value.dtype, nested), value.name, _shape(value.index, rows, nested)
    table, _ = value.to_pylibcudf()
    rows += table.columns()
    dtypes = [_dtype(dtype, nested) for dtype in value.dtypes]
    return "frame", dtypes, value.columns, _shape(value.index, rows, nested)


def _dtype(dtype: Any, nested: list[tuple[Any, list[Any]]]) -> tuple[Any, ...]:
    """A dtype for the header; its categories, which lie on the device, become frames of their own."""
    cudf = sys.modules["cudf"]
    if not isinstance(dtype, cudf.CategoricalDtype):
        return "plain", dtype
    nested.append(pack(dtype.categories))
    return "categorical", len(nested) - 1, dtype.ordered


def _is_view(column: Any) -> bool:
    """Whether a column shows few of the rows in its buffers."""
    import pylibcudf

    if column.offset():
        return True
    data, kind = column.data(), column.type()
    if data is not None and pylibcudf.traits.is_fixed_width(kind):
        return bool(data.size > column.size() * pylibcudf.types.size_of(kind) + _SLACK_BYTES)
    # Text and lists: a view has all offsets. Structs have their rows in their children.
    if kind.id() in (pylibcudf.TypeId.STRING, pylibcudf.TypeId.LIST):
        offsets = column.child(0) if column.num_children() else None
        return offsets is not None and offsets.size() > column.size() + 1
    return any(child.size() > column.size() or _is_view(child) for child in column.children())


def _tree(column: Any, frames: list[Any]) -> tuple[Any, ...]:
    """A column for the header; its buffers become frames, where they lie."""
    have = []
    for span in (column.data(), column.null_mask()):
        have.append(span is not None)
        if span is not None:
            frames.append(DeviceBytes(int(span.ptr), int(span.size), span))
    children = [_tree(child, frames) for child in column.children()]
    return column.type(), column.size(), column.null_count(), column.offset(), *have, children


@dataclasses.dataclass(frozen=True)
class PackingRoom:
    """Device memory to pack through, taken at the start: not from the pool that is full when it is needed."""

    buffer: Any
    temporary: Any
    lock: threading.Lock


@functools.cache
def packing_room() -> PackingRoom:
    """That of this process. Needs a driver."""
    import rmm
    import rmm.mr

    direct = rmm.mr.CudaMemoryResource()
    temporary = rmm.mr.PoolMemoryResource(
        direct, initial_pool_size=TEMPORARY_BYTES, maximum_pool_size=4 * TEMPORARY_BYTES
    )
    return PackingRoom(rmm.DeviceBuffer(size=ROOM_BYTES, mr=direct), temporary, threading.Lock())


class PackedTable:
    """Columns of one length as one frame, packed while it is copied; see `tiers.device.backend.DeviceFrame`."""

    def __init__(self, columns: Sequence[Any]) -> None:
        import pylibcudf

        self._room = packing_room()
        self._table = pylibcudf.Table(columns)
        self._packer: Any = pylibcudf.contiguous_split.ChunkedPack.create(
            self._table, self._room.buffer.size, leaving(), self._room.temporary
        )
        self.nbytes = int(self._packer.get_total_contiguous_size())
        #: for `unpack`
        self.metadata = bytes(self._packer.build_metadata())

    def copy_to(self, targets: Sequence[memoryview]) -> None:
        """Pack and copy. Chunks follow each other on one stream; it returns when the room is free again."""
        packer, self._packer = self._packer, None
        if packer is None:
            raise RuntimeError("a table can be packed once only; pack it again")
        rest = list(targets)
        with self._room.lock:
            try:
                while packer.has_next():
                    nbytes = int(packer.next(self._room.buffer))
                    now, rest = _first(rest, nbytes)
                    begin_to_host(self._room.buffer.ptr, now, leaving())
            finally:
                leaving().synchronize()

    def finish(self) -> None:
        """Do nothing: `copy_to` has waited."""


def _first(targets: list[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """Targets cut in two after so many bytes."""
    now: list[memoryview] = []
    while nbytes:
        target = targets[0]
        if target.nbytes <= nbytes:
            now.append(target)
            targets = targets[1:]
        else:
            now.append(target[:nbytes])
            targets = [target[nbytes:], *targets[1:]]
        nbytes -= now[-1].nbytes
    return now, targets


# ---------------------------------------------------------------------------------------------- and back


def unpack(header: Any, buffers: Sequence[Any]) -> Any:
    """A frame from what `pack` gave, its device frames as `rmm.DeviceBuffer`; they are not copied."""
    import cudf  # noqa: F401

    return _unpack(header, iter(buffers))


def _unpack(header: Any, buffers: Iterator[Any]) -> Any:
    shape, body, headers = header
    if isinstance(body, bytes):
        import pylibcudf

        buffer = pylibcudf.gpumemoryview(next(buffers))
        rows = pylibcudf.contiguous_split.unpack_from_memoryviews(memoryview(body), buffer).columns()
    else:
        rows = [_column(tree, buffers) for tree in body]
    nested = []
    for inner, n in headers:
        nested.append(_unpack(inner, iter([next(buffers) for _ in range(n)])))
    return _build(shape, iter(rows), nested)


def _column(tree: tuple[Any, ...], buffers: Iterator[Any]) -> Any:
    import pylibcudf

    kind, size, null_count, offset, has_data, has_mask, children = tree
    data = pylibcudf.gpumemoryview(next(buffers)) if has_data else None
    mask = pylibcudf.gpumemoryview(next(buffers)) if has_mask else None
    below = [_column(child, buffers) for child in children]
    return pylibcudf.Column(kind, size, data, mask, null_count, offset, below, validate=False)


def _build(shape: tuple[Any, ...], rows: Iterator[Any], nested: Sequence[Any]) -> Any:
    cudf = sys.modules["cudf"]
    kind, *rest = shape
    if kind == "range":
        start, stop, step, name = rest
        return cudf.RangeIndex(start, stop, step, name=name)
    if kind == "index":
        return cudf.Index._from_column(_typed(rest[0], next(rows), nested), name=rest[1])
    if kind == "series":
        column = _typed(rest[0], next(rows), nested)
        return cudf.Series._from_column(column, name=rest[1], index=_build(rest[2], rows, nested))
    dtypes, labels, index = rest
    columns = {i: _typed(dtype, next(rows), nested) for i, dtype in enumerate(dtypes)}
    return cudf.DataFrame._from_data(columns, index=_build(index, rows, nested), columns=labels)


def _typed(described: tuple[Any, ...], column: Any, nested: Sequence[Any]) -> Any:
    """A column of cuDF with exactly the dtype that it had."""
    import cudf
    from cudf.core.column import ColumnBase

    kind, *rest = described
    dtype = rest[0] if kind == "plain" else cudf.CategoricalDtype(nested[rest[0]], ordered=rest[1])
    return ColumnBase.create(column, dtype)


def like(meta: Any, columns: Sequence[Any], index: Any) -> Any:
    """A frame of `pylibcudf.Column` with labels and dtypes of an empty one, and its kind of index. Nothing is copied.

    Numbers keep the type of their column: those of a shuffle may be wider than its meta says.

    cuDF's own ``from_pylibcudf`` infers dtypes, and so loses the names of struct fields, the precision of decimals,
    time zones and which of its two kinds text is.
    """
    import cudf
    import numpy as np
    from cudf.core.column import ColumnBase

    typed = {
        i: ColumnBase.create(column, np.dtype(column.type().typestr) if is_number(dtype) else dtype)
        for i, (column, dtype) in enumerate(zip(columns, meta.dtypes, strict=True))
    }
    rows = cudf.Index._from_column(ColumnBase.create(index, meta.index.dtype), name=meta.index.name)
    return cudf.DataFrame._from_data(typed, index=rows, columns=meta.columns)
