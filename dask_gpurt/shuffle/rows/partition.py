"""Split one input partition by output partition: one narrow sort of ids, one gather per destination.

Theory of operation. Dask has assigned every row its output partition in a column (``_partitions``). Those ids are
taken as they are, never rehashed: dask elides later shuffles because it knows them. `Layout` permutes them so that each
worker owns one contiguous range of *codes*, in the
order in which it will make its outputs; a stable argsort of the codes (one byte wide up to 255 outputs: a counting
sort, 0.03 s per GB where int64 takes 0.63 s) then orders the rows by destination worker, within it by output partition,
within it by their old order. So each destination's rows are one gather, and each output partition in it is one slice.

Rows of outputs nobody asked for (filtered ``parts_out``) get the highest code and fall off the end.

What is gathered for a destination has memory of its own (in a few shards when it is large, see `Shard`), so that what
stays on this worker, and what waits to be sent to one peer, does not hold the memory of all the others.

Equal to stock, row by row: stock keeps the rows with ``frame.merge(worker codes, how="inner")`` and then sorts by id;
both keep the order of the input. Ids that are not integers (a user's own ``_partitions`` column) go through that same
merge, on the ids alone.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.memory.malloc import heap
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.rows import gather
from dask_gpurt.shuffle.rows.arrow_buffers import pieces_of
from dask_gpurt.shuffle.rows.received_chunk import known_schema, schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pandas as pd
    import pyarrow as pa

    from dask_gpurt.shuffle.rows.received_chunk import KnownSchema


class Layout:
    """Which worker gets which output partitions, as ranges of codes. Made once per run.

    Parameters
    ----------
    worker_for
        Output partition id to worker address; only outputs that somebody wants. Those of one worker in the order in
        which it will make them, as far as that is known: neighbours travel and lie together, and memory is free when
        the last of them is made.
    """

    #: worker address -> (first code, one past the last)
    ranges: dict[str, tuple[int, int]]
    #: code -> output partition id, uint32
    part_of: np.ndarray[Any, Any]
    #: output partition id -> code; ids nobody wants have `unwanted`
    code_of: np.ndarray[Any, Any]
    #: number of wanted outputs, and the code of rows to drop
    unwanted: int
    #: Arrow schemas of the kinds of plain frames seen so far (see `gather.plan`)
    schemas: dict[Any, pa.Schema]

    def __init__(self, worker_for: Mapping[int, str]) -> None:
        by_worker: dict[str, list[int]] = {}
        for part, address in worker_for.items():
            by_worker.setdefault(address, []).append(int(part))
        self.ranges = {}
        self.schemas = {}
        order: list[int] = []
        for address, parts in by_worker.items():
            self.ranges[address] = (len(order), len(order) + len(parts))
            order += parts
        self.part_of = np.array(order, dtype=np.uint32)
        self.unwanted = n = len(order)
        # 8 and 16 bits are what numpy's stable sort does as a radix sort
        dtype = np.uint8 if n < 256 else np.uint16 if n < 65536 else np.uint32
        self.code_of = np.full(max(order, default=-1) + 1, n, dtype=dtype)
        self.code_of[self.part_of] = np.arange(n, dtype=dtype)

    def groups(self, limit: int) -> int:
        """In how many groups to send the rows for one worker, when there may be about `limit` of all workers."""
        return max(1, min(SHARDS, limit // max(1, len(self.ranges))))

    def group(self, address: str, part: int, groups: int) -> int:
        """Which of a worker's groups of neighbouring outputs an output is in, or begins; a name, no more."""
        begin, end = self.ranges.get(address, (0, 1))  # its outputs may have gone to another worker since
        return round((int(self.code_of[part]) - begin) * groups / (end - begin))

    def codes(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Codes of integer ids; `unwanted` for every id that is not an output of this run."""
        import pyarrow as pa
        import pyarrow.compute as pc

        n = len(self.code_of)
        if not len(ids) or not n:
            return np.full(len(ids), self.unwanted, dtype=self.code_of.dtype)
        if ids.min() >= 0 and ids.max() < n:
            codes = pc.take(
                pa.array(self.code_of), pa.array(np.ascontiguousarray(ids)), boundscheck=False, memory_pool=heap.pool
            )
            return np.frombuffer(codes.buffers()[1], dtype=self.code_of.dtype, count=len(ids))
        inside = (ids >= 0) & (ids < n)
        out = np.full(len(ids), self.unwanted, dtype=self.code_of.dtype)
        out[inside] = self.code_of[ids[inside]]
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of one input partition go."""

    #: row numbers of the wanted rows, by code, stable
    order: np.ndarray[Any, Any]
    #: offsets[c]:offsets[c + 1] are the places in `order` of code c; length outputs + 1
    offsets: np.ndarray[Any, Any]


def locate(data: pd.DataFrame, column: str, layout: Layout) -> Rows:
    """Order the rows of a frame by destination, from its column of output partition ids."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ids = data[column]
    rows = None
    if getattr(ids.dtype, "kind", "O") in "iu" and isinstance(ids.dtype, np.dtype):
        codes = layout.codes(ids.to_numpy())
    else:
        rows, codes = _merged(ids, layout)
    # Arrow's sort is stable and, for codes this narrow, a counting sort; what it returns are row numbers as uint64.
    at = pc.array_sort_indices(pa.array(codes), memory_pool=heap.pool)
    if len(codes) < 8 * layout.unwanted:  # few rows for many outputs: a count is cheaper than a search for each
        offsets = np.zeros(layout.unwanted + 1, dtype=np.int64)
        np.cumsum(np.bincount(codes, minlength=layout.unwanted + 1)[:-1], out=offsets[1:])
    else:
        sorted_codes = pc.take(pa.array(codes), at, boundscheck=False, memory_pool=heap.pool).to_numpy()
        offsets = np.searchsorted(sorted_codes, np.arange(layout.unwanted + 1, dtype=codes.dtype)).astype(np.int64)
    # numpy copies indices that cannot be written to, at every gather; whether these can is up to Arrow.
    order = np.require(np.frombuffer(at.buffers()[1], dtype=np.int64, count=len(at)), requirements="W")
    order = order[: offsets[-1]]
    return Rows(order if rows is None else rows[order], offsets)


def _merged(ids: pd.Series, layout: Layout) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Row numbers and codes for ids of any other dtype: by the merge that stock makes, errors included."""
    import pandas as pd

    left = pd.DataFrame({"ids": ids.array, "row": np.arange(len(ids))})
    wanted = np.sort(layout.part_of).astype(np.int64)
    right = pd.Series(layout.code_of[wanted], index=wanted, name="code")
    both = left.merge(right, left_on="ids", right_index=True, how="inner")
    return both["row"].to_numpy(), both["code"].to_numpy()


#: a worker's rows of one input are cut to at most so many shards, of at least so many bytes
SHARDS = 8
SHARD_BYTES = 1 << 19
#: and of at least so many per column: each costs 10 us a shard, from here to the output
COLUMN_BYTES = 10 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Rows of one input partition for output partitions of one worker that are neighbours in its layout, in its order.

    All rows for a worker when they are few; else one of several shards with different outputs, each in memory of its
    own: what was unpacked can then be given back while the rest still waits.
    """

    #: id of the input partition
    input_id: int
    table: pa.Table
    #: ids of the outputs that have rows, uint32, in the order of the rows
    parts: np.ndarray[Any, Any]
    #: rows of each of them, uint64, same length
    lengths: np.ndarray[Any, Any]
    #: id of the input partition of each row, int64, where several were merged (see `coalesce`); `input_id` is the least
    inputs: np.ndarray[Any, Any] | None = None
    #: bytes of the rows, so that nobody has to ask the table on the event loop; -1: not known
    known_bytes: int = -1
    #: the table's schema as `received_chunk.schema_of` gives it, where that is known already: finding it takes as long
    #: as a few columns do
    known: KnownSchema | None = None
    #: a table and its columns, one array each, where that is known; holds for `table` only if it is that one
    apart: tuple[pa.Table, Sequence[pa.Array]] | None = None

    @property
    def arrays(self) -> Sequence[pa.Array] | None:
        """The table's columns in one piece each; None when one is not."""
        if self.apart is not None and self.apart[0] is self.table:
            return self.apart[1]
        return pieces_of(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return int(self.table.nbytes) if self.known_bytes < 0 else self.known_bytes


def split(
    data: pd.DataFrame, column: str, drop_column: bool, input_id: int, layout: Layout
) -> Iterator[tuple[str, Shard]]:
    """Yield (worker address, shard), one or several in a row for every worker that gets rows.

    Raises
    ------
    pyarrow.ArrowException
        Data that Arrow cannot hold, as stock's P2P raises.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = locate(data, column, layout)
    if not len(rows.order):
        return
    plain = gather.plan(data, column if drop_column else None, layout.schemas)
    if plain is None:
        to_arrow, _ = seam.shuffle_tables()
        table = _prepared(to_arrow(data.drop(columns=column) if drop_column else data, preserve_index=True))
    row_bytes = (table.nbytes if plain is None else plain.nbytes) / len(data)
    least_bytes = max(SHARD_BYTES, COLUMN_BYTES * data.shape[1])
    known = schema_of(table.schema) if plain is None else known_schema(plain.schema)
    counts = np.diff(rows.offsets)
    places: list[tuple[str, int, int]] = []
    orders: list[np.ndarray[Any, Any]] = []
    for address, (begin, end) in layout.ranges.items():
        for first, last in pairwise(_cuts(rows.offsets[begin : end + 1], begin, row_bytes, least_bytes)):
            order = rows.order[int(rows.offsets[first]) : int(rows.offsets[last])]
            if len(order):
                places.append((address, first, last))
                orders.append(order)
    tables: Iterator[tuple[pa.Table, Sequence[pa.Array] | None, int]]
    if plain is None:
        taken = (pc.take(table, pa.array(order), boundscheck=False, memory_pool=heap.pool) for order in orders)
        tables = ((some, None, int(some.nbytes)) for some in taken)
    else:
        tables = iter(gather.gather_each(plain, orders))
    for (address, first, last), (gathered, arrays, nbytes) in zip(places, tables, strict=True):
        here = counts[first:last]
        some = np.flatnonzero(here)
        parts, lengths = layout.part_of[first:last][some], here[some].astype(np.uint64)
        apart = None if arrays is None else (gathered, arrays)
        yield address, Shard(input_id, gathered, parts, lengths, known_bytes=nbytes, known=known, apart=apart)


def _cuts(offsets: np.ndarray[Any, Any], first: int, row_bytes: float, least_bytes: int) -> list[int]:
    """Codes at which the rows of one worker are cut to shards of about the same size; first and last included."""
    low, high = int(offsets[0]), int(offsets[-1])
    n = min(SHARDS, len(offsets) - 1, int((high - low) * row_bytes / least_bytes))
    inner = np.searchsorted(offsets, [low + (high - low) * i // n for i in range(1, n)]).tolist() if n > 1 else []
    return [first + at for at in sorted({0, *inner, len(offsets) - 1})]


def _prepared(table: pa.Table) -> pa.Table:
    """Columns in one piece each where that is possible; dictionary indices 32 bits wide.

    Pieces of a column gather several times slower than one. Text in more than one piece gets 64-bit offsets first: a
    gather across pieces joins them, and 2 GiB of text overflow 32 bits. Categoricals come with indices as narrow as
    their own partition allows; the union of all partitions' categories may need more (dask/distributed#8489).
    """
    import pyarrow as pa

    wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    for i, field in enumerate(table.schema):
        column, kind = table.column(i), field.type
        if pa.types.is_dictionary(kind) and kind.index_type != pa.int32():
            kind = pa.dictionary(pa.int32(), kind.value_type, kind.ordered)
            column = pa.chunked_array([_widened(chunk) for chunk in column.chunks], type=kind)
        elif column.num_chunks > 1 and kind in wide:
            kind = wide[kind]
            column = column.cast(kind)
        if column is not table.column(i):
            table = table.set_column(i, field.with_type(kind), column)
    return table.combine_chunks(heap.pool)


def _widened(array: pa.DictionaryArray) -> pa.DictionaryArray:
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(
        array.indices.cast(pa.int32()), array.dictionary, ordered=array.type.ordered, safe=False
    )
