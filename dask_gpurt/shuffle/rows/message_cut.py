"""Cut a large shard into ranges of rows that fit a message. Copies at most offsets of text; any thread.

Theory of operation. A receiver holds a message whole until it is stored, so its budget bounds messages, and a partition
that holds half of all rows must travel in several. A cut is a shard of its own: input ids are `ID_STEP` apart, so that
the cuts of one input sort after one another and before the next input, and every part of the protocol (copies are
dropped by input id, pieces are assembled in its order) holds for cuts without knowing them.

Cuts are at multiples of 64 rows: every bitmap then starts at a whole byte, and all buffers stay views.

The dictionary of a categorical column goes with every cut, whole. So a cut has at least as many bytes of rows as of
dictionaries, whatever the limit: all cuts together are at most about twice the shard.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.shuffle.rows.arrow_buffers import dictionary_bytes, layout_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from dask_gpurt.shuffle.rows.partition import Shard

#: ids of inputs are multiples of this; cuts are counted in between
ID_STEP = 1 << 16
_ROWS = 64


def cut(shard: Shard, limit_bytes: int) -> list[Shard]:
    """The shard in pieces of at most `limit_bytes`, as far as 64 rows and the dictionaries are not more than that."""
    n = shard.table.num_rows
    if shard.nbytes <= limit_bytes or n <= _ROWS:
        return [shard]
    ends = np.cumsum(shard.lengths, dtype=np.int64)
    out: list[Shard] = []
    whole = dictionary_bytes(shard.table)
    for low, high in _ranges(shard.table, 0, n, whole + max(limit_bytes - whole, whole), whole):
        first, last = np.searchsorted(ends, [low, high - 1], side="right")
        edges = np.clip(ends[first : last + 1], low, high)
        out.append(
            dataclasses.replace(
                shard,
                input_id=shard.input_id + min(len(out), ID_STEP - 1),
                table=_rows(shard.table, low, high - low),
                parts=shard.parts[first : last + 1],
                lengths=np.diff(edges, prepend=low).astype(shard.lengths.dtype),
                known_bytes=-1,
                apart=None,
            )
        )
    if len(out) > ID_STEP:  # half a terabyte for one worker in one input: no ids are left for its cuts
        return [shard]
    return out


def _ranges(table: pa.Table, low: int, high: int, limit_bytes: int, whole: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, about even; rows of very different sizes are halved until they fit. `whole` is in each."""
    nbytes = table.slice(low, high - low).nbytes
    if nbytes <= limit_bytes or high - low <= _ROWS:
        yield low, high
        return
    pieces = -(-(nbytes - whole) // max(1, limit_bytes - whole))
    step = max(_ROWS, -(-(high - low) // pieces) // _ROWS * _ROWS)
    for at in range(low, high, step):
        end = min(at + step, high)
        if (at, end) == (low, high):
            yield low, high
        else:
            yield from _ranges(table, at, end, limit_bytes, whole)


def _rows(table: pa.Table, at: int, n: int) -> pa.Table:
    import pyarrow as pa

    columns = []
    for column in table.columns:
        array = column.chunk(0) if column.num_chunks == 1 else None
        columns.append(column.slice(at, n) if array is None or array.offset else _array(array, at, n))
    return pa.Table.from_arrays(columns, schema=table.schema)


def _array(array: pa.Array, at: int, n: int) -> Any:
    """Rows of an array as one that starts at its buffers' start, so that it travels as it is."""
    import pyarrow as pa

    buffers, layout = array.buffers(), layout_of(array.type)
    if layout is None:
        return array.slice(at, n)
    bits, offset_bytes = layout
    if offset_bytes:
        offsets = np.frombuffer(buffers[1], f"<i{offset_bytes}")[at : at + n + 1]
        start, end = int(offsets[0]), int(offsets[-1])
        rest = [pa.py_buffer(offsets - offsets[0]), buffers[2].slice(start, end - start)]
    else:
        rest = [buffers[1].slice(at * bits // 8, (n * bits + 7) // 8)]
    # Not before it is one of these types: a column of nothing but nulls has no bitmap.
    validity = buffers[0].slice(at // 8, (n + 7) // 8) if array.null_count else None
    return pa.Array.from_buffers(array.type, n, [validity, *rest], -1 if validity is not None else 0)
