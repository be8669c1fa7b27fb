"""Take a table apart into the buffers of its columns, and put it together again, without a copy.

A column travels *raw* when its type is a validity bitmap and either values of one width, or offsets and letters: its
buffers are cut to the rows and sent as they are. What is nested, dictionary-encoded or an extension travels as an Arrow
IPC stream (`stream`), which copies it once.

`arrays_of` takes buffers from a message: their sizes are compared with what the schema and the number of rows ask for
before anything is made of them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.rows.schema import ByObject

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa


def stream(table: pa.Table) -> pa.Buffer:
    """A table as an Arrow IPC stream; one dictionary per column."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    # A chunked categorical may bring one dictionary per chunk; a stream has one per column.
    options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue()


@functools.lru_cache(maxsize=256)
def layout_of(kind: pa.DataType) -> tuple[int, int] | None:
    """(bits per row of the last buffer, bytes per offset) of a raw type, 0 bits for variable width; None: not raw."""
    import pyarrow as pa

    t = pa.types
    if t.is_large_string(kind) or t.is_large_binary(kind):
        return 0, 8
    if t.is_string(kind) or t.is_binary(kind):
        return 0, 4
    if t.is_primitive(kind) or t.is_decimal(kind) or t.is_fixed_size_binary(kind):
        return kind.bit_width, 0
    return None


def _layouts(schema: pa.Schema) -> tuple[tuple[pa.DataType, tuple[int, int] | None], ...]:
    return tuple((field.type, layout_of(field.type)) for field in schema)


#: type of each column of a schema and how it travels
layouts_of = ByObject(_layouts)


def pieces_of(table: pa.Table) -> list[pa.Array] | None:
    """The columns as arrays; None when one of them is in several pieces, or none. Takes 7 us a column."""
    columns = table.columns
    return None if any(column.num_chunks != 1 for column in columns) else [column.chunk(0) for column in columns]


def dictionary_bytes(table: pa.Table) -> int:
    """Bytes that every slice of a table has, whatever its rows: those of dictionaries, and some of offsets."""
    return int(table.slice(0, 0).nbytes)


def buffers_of(arrays: Sequence[pa.Array], schema: pa.Schema) -> tuple[pa.Buffer | None, ...] | None:
    """The buffers of all columns, cut to the rows; None when a column is not raw."""
    out: list[pa.Buffer | None] = []
    for array, (_, layout) in zip(arrays, layouts_of(schema), strict=True):
        if layout is None or array.offset:
            return None
        n = len(array)
        bits, offset_bytes = layout
        buffers = array.buffers()
        if buffers[1] is None or buffers[-1] is None:
            return None
        out.append(None if array.null_count == 0 else buffers[0].slice(0, (n + 7) // 8))
        if offset_bytes:
            offsets = buffers[1].slice(0, (n + 1) * offset_bytes)
            used = int(np.frombuffer(offsets, dtype=f"<i{offset_bytes}")[-1])
            out += [offsets, buffers[2].slice(0, used)]
        else:
            out.append(buffers[1].slice(0, (n * bits + 7) // 8))
    return tuple(out)


def arrays_of(schema: pa.Schema, rows: int, buffers: Sequence[pa.Buffer | None]) -> list[pa.Array]:
    """The columns of a table of `rows` rows, as views on these buffers.

    Raises
    ------
    WireError
        They are not what the schema needs.
    """
    import pyarrow as pa

    at, arrays = 0, []
    for name, (kind, layout) in zip(schema.names, layouts_of(schema), strict=True):
        if layout is None:
            raise WireError(f"column {name!r}: {kind} does not travel raw")
        bits, offset_bytes = layout
        here = list(buffers[at : at + (3 if offset_bytes else 2)])
        at += len(here)
        validity, *rest = here
        if (
            not offset_bytes
            and validity is None
            and rest
            and rest[0] is not None
            and rest[0].size == (rows * bits + 7) // 8
        ):
            arrays.append(pa.Array.from_buffers(kind, rows, here, 0))  # nearly all, and frames may have hundreds
            continue
        wanted = [(rows + 1) * offset_bytes] if offset_bytes else [(rows * bits + 7) // 8]
        if offset_bytes and len(rest) == 2 and rest[0] is not None and rest[0].size == wanted[0]:
            offsets = np.frombuffer(rest[0], dtype=f"<i{offset_bytes}")
            wanted.append(int(offsets[-1]))
        sizes = [-1 if b is None else b.size for b in rest]
        if sizes != wanted or (validity is not None and validity.size != (rows + 7) // 8):
            raise WireError(f"column {name!r} of {rows} rows has buffers of {sizes} bytes, must have {wanted}")
        arrays.append(pa.Array.from_buffers(kind, rows, here, 0 if validity is None else -1))
    if at != len(buffers):
        raise WireError(f"a shard has {len(buffers)} buffers, its schema needs {at}")
    return arrays
