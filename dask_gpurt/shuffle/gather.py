"""The gather without Arrow's detour: plain columns go from pandas' memory straight to where they travel from.

Theory of operation. `pyarrow.Table.from_pandas` looks at every value (NaN becomes a null with a bitmap) and at every
name, and Arrow's gather puts each column of each destination in an allocation of its own. For frames of *plain* columns
(integers, floats, booleans, dates and durations of numpy; text that is Arrow memory already; an index of one such
level) neither is needed: the Arrow schema follows from the dtypes alone, so it is made once per kind of frame, from no
rows; and the columns of one destination are gathered side by side into one *block*, which travels as one frame.

What differs from Arrow's own table: NaN and NaT stay what they are instead of becoming nulls. pandas gets the same
values back either way, from a mix of both, too. Everything that is not certainly plain (`plan` gives None) takes the
general way in `partition`.

Memory comes from Arrow's pool. distributed sets ``MALLOC_TRIM_THRESHOLD_``, which pins glibc's threshold for mappings,
so every numpy array from 128 KiB on is fresh memory; on a virtual machine its page faults cost 0.5 ms per MB (0.1 to
0.3 with the huge pages that numpy asks for from 4 MiB on), five times what writing it costs. Arrow's pool (mimalloc)
keeps memory warm and in huge pages: 0.05 ms per MB, all included.

Measured (CPU per 0.5 GB of 2 int64, 4 float64, one text column and an index): `from_pandas` took as long as the gather
(75 ms at 16 partitions, 150 ms at 128). Rejected: 32-bit row numbers (160 to 153 ms with Arrow, more with numpy); one
gather for all destinations (84 against 90 ms at 128 partitions, and it holds memory); jemalloc with a long decay (287
against 160 ms at 16 partitions); blocks cut from slabs of numpy memory of 8 MiB (page faults 300 against 120 ms).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.shuffle import seam

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    import pandas as pd
    import pyarrow as pa

#: numpy kinds that are gathered as they are, and the sizes in bytes of their values
_SIZES = {"i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (4, 8), "b": (1,), "M": (8,), "m": (8,)}
_UNITS = ("s", "ms", "us", "ns")


def is_plain(dtype: Any) -> bool:
    """Whether columns of a numpy dtype are gathered by numpy; every value of it is one in Arrow."""
    if not isinstance(dtype, np.dtype) or not dtype.isnative or dtype.itemsize not in _SIZES.get(dtype.kind, ()):
        return False
    return dtype.kind not in "Mm" or np.datetime_data(dtype) in [(unit, 1) for unit in _UNITS]


def is_text(dtype: Any) -> bool:
    """Whether a dtype is pandas' text kept as Arrow memory."""
    import pandas as pd

    return isinstance(dtype, pd.StringDtype) and dtype.storage == "pyarrow"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How the rows of one frame are gathered."""

    #: Arrow schema of the frame, as Arrow's own conversion makes it
    schema: pa.Schema
    #: one per field: values of a fixed width, text, or the index when it is a range
    columns: tuple[np.ndarray[Any, Any] | pa.Array | range, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, about."""
        return sum(8 * len(column) if isinstance(column, range) else column.nbytes for column in self.columns)


def plan(data: pd.DataFrame, drop: str | None, schemas: MutableMapping[Any, pa.Schema]) -> Plan | None:
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
    if not names.is_unique or data.attrs or isinstance(index, pd.MultiIndex) or not is_plain(index.dtype):
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
    for name, dtype in zip(names, dtypes, strict=True):
        if name == drop:
            continue
        if is_plain(dtype):
            columns.append(data[name].to_numpy())
            continue
        pieces = pa.chunked_array(data[name].array.__arrow_array__())
        want = schema.field(len(columns)).type
        if pieces.type != want or want != pa.large_string():
            return None
        columns.append(pieces.chunk(0) if pieces.num_chunks == 1 else pieces.combine_chunks())
    columns.append(range(index.start, index.stop, index.step) if isinstance(index, pd.RangeIndex) else index.to_numpy())
    if len(columns) != len(schema):
        return None
    if not all(isinstance(c, (np.ndarray, range, pa.Array)) for c in columns):
        return None
    return Plan(schema, tuple(columns))


def gather(plan: Plan, order: np.ndarray[Any, Any]) -> pa.Table:
    """The rows of a frame with these numbers, in this order; side by side in one block."""
    import pyarrow as pa
    import pyarrow.compute as pc

    n = len(order)
    # Text first, its bytes are not known before; Arrow's own memory for it is reused at once, and so is warm.
    taken: dict[int, list[Any]] = {}
    for i, column in enumerate(plan.columns):
        if isinstance(column, pa.Array):
            text = pc.take(column, pa.array(order), boundscheck=False)
            validity, offsets, data = text.buffers()
            ends = np.frombuffer(offsets, dtype=np.int64, count=n + 1)
            taken[i] = [None if text.null_count == 0 else np.frombuffer(validity, np.uint8, (n + 7) // 8), ends]
            taken[i].append(np.frombuffer(data, np.uint8, int(ends[-1])) if ends[-1] else np.empty(0, np.uint8))
        elif isinstance(column, np.ndarray) and column.dtype.kind == "b":
            taken[i] = [None, np.packbits(column[order], bitorder="little")]
    # Widest first would leave no gap; in the order of the schema a gap comes only after an odd number of narrow values.
    at, spots = 0, []
    for i, column in enumerate(plan.columns):
        width = 8 if isinstance(column, range) else column.dtype.itemsize if i not in taken else 0
        for size, align in (
            [(n * width, width)] if width else [(b.nbytes, b.itemsize) for b in taken[i] if b is not None]
        ):
            at += -at % align
            spots.append((at, size))
            at += size
    memory = pa.allocate_buffer(at)
    block = np.frombuffer(memory, dtype=np.uint8)
    arrays = []
    places = iter(spots)
    for i, (column, field) in enumerate(zip(plan.columns, plan.schema, strict=True)):
        buffers: list[pa.Buffer | None] = []
        if i in taken:
            for source in taken.pop(i):
                if source is None:
                    buffers.append(None)
                    continue
                at, size = next(places)
                block[at : at + size] = source.view(np.uint8)
                buffers.append(memory.slice(at, size))
            arrays.append(pa.Array.from_buffers(field.type, n, buffers, 0 if buffers[0] is None else -1))
            continue
        at, size = next(places)
        out = block[at : at + size]
        if isinstance(column, range):
            np.multiply(order, column.step, out=out.view(np.int64))
            out.view(np.int64)[:] += column.start
        else:
            # `wrap`: numpy buffers its output where an index out of range may have to raise; none is.
            np.take(column, order, out=out.view(column.dtype), mode="wrap")
        arrays.append(pa.Array.from_buffers(field.type, n, [None, memory.slice(at, size)], 0))
    return pa.Table.from_arrays(arrays, schema=plan.schema)
