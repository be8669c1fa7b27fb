"""Gather plain columns from pandas' memory straight to where they travel from, without a detour by Arrow.

`plan` looks at a frame, `gather` and `gather_each` copy its rows to tables.

Theory of operation. `pyarrow.Table.from_pandas` looks at every value (NaN becomes a null with a bitmap) and at every
name, and Arrow's gather puts each column of each destination in an allocation of its own. For frames of *plain* columns
(integers, floats, booleans, dates and durations of numpy; text that is Arrow memory already; an index of one such
level) neither is needed: the Arrow schema follows from the dtypes alone, so it is made once per kind of frame, from no
rows; and the columns of one destination are gathered side by side into one *block*, which travels as one frame.

What differs from Arrow's own table: NaN and NaT stay what they are instead of becoming nulls. pandas gets the same
values back either way, from a mix of both, too. Everything that is not certainly plain (`plan` gives None) takes the
general way in `partition`.

Blocks come from `memory.pages`, which is warm; fresh memory would cost five times what writing it costs.

Measured (CPU per 0.5 GB of 2 int64, 4 float64, one text column and an index): `from_pandas` took as long as the gather
(75 ms at 16 partitions, 150 ms at 128). One partition of 70 MB, 16 shards, warm memory: 74 ms with Arrow's gather of
text and shard after shard, 49 with text picked as views (`Text`), 36 with column after column (`gather_each`).
Rejected: 32-bit row numbers (160 to 153 ms with Arrow, more with numpy); one
gather for all destinations (84 against 90 ms at 128 partitions, and it holds memory); jemalloc with a long decay (287
against 160 ms at 16 partitions); blocks cut from slabs of numpy memory of 8 MiB (page faults 300 against 120 ms).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.memory.malloc import heap
from dask_gpurt.memory.pages import pages
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.rows.arrow_buffers import layouts_of

if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence

    import pandas as pd
    import pyarrow as pa

#: numpy kinds that are gathered as they are, and the sizes in bytes of their values
_SIZES = {"i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (4, 8), "b": (1,), "M": (8,), "m": (8,)}
_UNITS = ("s", "ms", "us", "ns")


def is_plain(dtype: object) -> bool:
    """Whether columns of a numpy dtype are gathered by numpy; every value of it is one in Arrow."""
    if not isinstance(dtype, np.dtype) or not dtype.isnative or dtype.itemsize not in _SIZES.get(dtype.kind, ()):
        return False
    return dtype.kind not in "Mm" or np.datetime_data(dtype) in [(unit, 1) for unit in _UNITS]


def is_text(dtype: object) -> bool:
    """Whether a dtype is pandas' text kept as Arrow memory."""
    import pandas as pd

    return isinstance(dtype, pd.StringDtype) and dtype.storage == "pyarrow"


class Text:
    """A column of text. Rows are picked as 16-byte views of Arrow's, which hold a short text whole.

    Arrow's own gather of text takes 35 ns a row; to views, pick, and back takes 12 (a million texts of 11 bytes).
    """

    __slots__ = ("_parts", "array")

    def __init__(self, array: pa.Array) -> None:
        self.array = array
        #: (views, the buffers that long ones point to); () where views are not possible
        self._parts: tuple[Any, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all texts."""
        return int(self.array.nbytes)

    def forget(self) -> None:
        """Let go of the views: 16 bytes a row, of one column at a time and not of all."""
        self._parts = None

    def take(self, order: np.ndarray[Any, Any]) -> pa.Array:
        """The texts at these places."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self._parts is None:
            self._parts = self._views()
        if not self._parts:
            return pc.take(self.array, pa.array(order), boundscheck=False, memory_pool=heap.pool)
        views, rest = self._parts
        picked = np.take(views, order, mode="wrap")
        valid = None
        if self.array.null_count:
            valid = pc.take(self.array.is_valid(), pa.array(order), boundscheck=False).buffers()[1]
        short = pa.Array.from_buffers(pa.string_view(), len(order), [valid, pa.py_buffer(picked), *rest])
        return pc.cast(short, self.array.type, memory_pool=heap.pool)

    def _views(self) -> tuple[Any, ...]:
        import pyarrow as pa

        if not len(self.array) or self.array.buffers()[2] is None or self.array.buffers()[2].size >= 1 << 31:
            return ()
        try:
            short = self.array.cast(pa.string_view())
        except pa.ArrowException:  # views hold 32-bit offsets
            return ()
        _, views, *rest = short.buffers()
        # 16 bytes, of a kind that numpy moves as a whole
        return np.frombuffer(views, np.complex128)[short.offset : short.offset + len(short)], rest


@dataclasses.dataclass(frozen=True, slots=True)
class GatherPlan:
    """How the rows of one frame are gathered."""

    #: Arrow schema of the frame, as Arrow's own conversion makes it
    schema: pa.Schema
    #: one per field: values of a fixed width, text, or the index when it is a range
    columns: tuple[np.ndarray[Any, Any] | Text | range, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, about."""
        return sum(8 * len(column) if isinstance(column, range) else column.nbytes for column in self.columns)


def plan(data: pd.DataFrame, drop: str | None, schemas: MutableMapping[Any, pa.Schema]) -> GatherPlan | None:
    """Look at a frame; None when one of its columns is not plain.

    Parameters
    ----------
    drop
        Name of a column to leave out.
    schemas
        Schemas made so far, by kind of frame; a new one is added.
    """
    import pandas as pd
    import pyarrow as pa

    names, index = data.columns, data.index
    if not names.is_unique or isinstance(index, pd.MultiIndex) or not is_plain(index.dtype):
        return None
    dtypes = data.dtypes.array
    if not all(type(name) is str for name in names) or not all(is_plain(t) or is_text(t) for t in dtypes):
        return None
    kind = (tuple(names), names.dtype, names.name, tuple(dtypes), index.dtype, index.name, drop)
    schema = schemas.get(kind)
    if schema is None:
        to_arrow, _ = seam.shuffle_tables()
        empty = data.iloc[:0]
        schema = schemas[kind] = to_arrow(
            empty if drop is None else empty.drop(columns=drop), preserve_index=True
        ).schema
    columns: list[Any] = []
    for name, dtype, values in zip(names, dtypes, seam.columns_of(data), strict=True):
        if name == drop:
            continue
        if is_plain(dtype):
            # Dates and durations may come as pandas' own arrays.
            columns.append(values if isinstance(values, np.ndarray) else values.to_numpy())
            continue
        pieces = pa.chunked_array(values.__arrow_array__())
        want = schema.field(len(columns)).type
        if pieces.type != want or want != pa.large_string():
            return None
        columns.append(Text(pieces.chunk(0) if pieces.num_chunks == 1 else pieces.combine_chunks()))
    columns.append(range(index.start, index.stop, index.step) if isinstance(index, pd.RangeIndex) else index.to_numpy())
    if len(columns) != len(schema):
        return None
    if not all(isinstance(c, (np.ndarray, range, Text)) for c in columns):
        return None
    return GatherPlan(schema, tuple(columns))


def gather(plan: GatherPlan, order: np.ndarray[Any, Any]) -> pa.Table:
    """The rows of a frame with these numbers, in this order; side by side in one block."""
    return gather_each(plan, [order])[0][0]


def gather_each(
    plan: GatherPlan, orders: Sequence[np.ndarray[Any, Any]]
) -> list[tuple[pa.Table, Sequence[pa.Array], int]]:
    """A table for each of several lists of row numbers, each in a block of its own; its columns, its bytes.

    Column by column for all of them, not table by table: every list has rows from all over the frame, so each of its
    columns would be read from memory as many times as there are lists; so it is read once and stays in the cache.
    """
    blocks = [_GatherBlock(plan, order) for order in orders]
    # Text first, its bytes are not known before; Arrow's own memory for it is reused at once, and so is warm.
    for i, column in enumerate(plan.columns):
        if isinstance(column, Text):
            for block in blocks:
                block.text(i, column)
            column.forget()
        elif isinstance(column, np.ndarray) and column.dtype.kind == "b":
            for block in blocks:
                block.taken[i] = [None, np.packbits(column[block.order], bitorder="little")]
    for block in blocks:
        block.allocate()
    for i, column in enumerate(plan.columns):
        for block in blocks:
            block.fill(i, column)
    return [block.table() for block in blocks]


class _GatherBlock:
    """The columns of one table in one block of memory."""

    def __init__(self, plan: GatherPlan, order: np.ndarray[Any, Any]) -> None:
        self.plan, self.order = plan, order
        #: number of a column -> its buffers, where they are not simply as many values as there are rows
        self.taken: dict[int, list[Any]] = {}
        self._arrays: list[pa.Array] = []

    def text(self, i: int, column: Text) -> None:
        n = len(self.order)
        text = column.take(self.order)
        validity, offsets, data = text.buffers()
        ends = np.frombuffer(offsets, dtype=np.int64, count=n + 1)
        self.taken[i] = [None if text.null_count == 0 else np.frombuffer(validity, np.uint8, (n + 7) // 8), ends]
        self.taken[i].append(np.frombuffer(data, np.uint8, int(ends[-1])) if ends[-1] else np.empty(0, np.uint8))

    def allocate(self) -> None:
        """Find the place of every buffer, and memory for all."""
        import pyarrow as pa

        # Widest first would leave no gap; as it is, one comes only after an odd number of narrow values.
        at, spots, n = 0, [], len(self.order)
        for i, column in enumerate(self.plan.columns):
            if i in self.taken:
                sizes = [(b.nbytes, b.itemsize) for b in self.taken[i] if b is not None]
            else:
                width = 8 if isinstance(column, range) else column.dtype.itemsize  # type: ignore[union-attr]
                sizes = [(n * width, width)]
            for size, align in sizes:
                at += -at % align
                spots.append((at, size))
                at += size
        self._places = iter(spots)
        self._memory = pa.py_buffer(pages.take(at))
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)

    def fill(self, i: int, column: np.ndarray[Any, Any] | Text | range) -> None:
        """Write a column to its place; in the order of the schema."""
        import pyarrow as pa

        n, kind = len(self.order), layouts_of(self.plan.schema)[i][0]
        buffers: list[pa.Buffer | None] = []
        if i in self.taken:
            for source in self.taken.pop(i):
                if source is None:
                    buffers.append(None)
                    continue
                at, size = next(self._places)
                self._bytes[at : at + size] = source.view(np.uint8)
                buffers.append(self._memory.slice(at, size))
            self._arrays.append(pa.Array.from_buffers(kind, n, buffers, 0 if buffers[0] is None else -1))
            return
        at, size = next(self._places)
        out = self._bytes[at : at + size]
        if isinstance(column, range):
            np.multiply(self.order, column.step, out=out.view(np.int64))
            out.view(np.int64)[:] += column.start
        elif isinstance(column, np.ndarray):
            # `wrap`: numpy buffers its output where an index out of range may have to raise; none is.
            column.take(self.order, out=out.view(column.dtype), mode="wrap")
        self._arrays.append(pa.Array.from_buffers(kind, n, [None, self._memory.slice(at, size)], 0))

    def table(self) -> tuple[pa.Table, list[pa.Array], int]:
        import pyarrow as pa

        return pa.Table.from_arrays(self._arrays, schema=self.plan.schema), self._arrays, self._memory.size
