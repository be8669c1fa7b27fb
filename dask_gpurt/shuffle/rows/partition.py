"""Split one input partition by output partition: one narrow sort of ids, one gather per destination.

`split` yields (worker, `Shard`). `OutputLayout` says which worker gets which outputs. `by_owner` and `separate` divide
shards again when outputs change their owner.

Theory of operation. Dask has assigned every row its output in a column (``_partitions``). Those ids are used as they
are and never rehashed, because Dask elides later shuffles on the strength of them. `OutputLayout` permutes the ids to
*codes*: each worker owns one contiguous range of codes, in the order in which it will make its outputs. A stable
argsort of the codes orders the rows by destination worker, within it by output, within that by their old order. So each
destination is one gather, and each output in it is one slice. Codes are one byte wide up to 255 outputs, which makes
the argsort a counting sort: 0.03 s per GB where int64 takes 0.63 s.

Rows of outputs that are not asked for (filtered ``parts_out``) get the highest code and fall off the end.

What is gathered for a destination has memory of its own, in several shards when it is large. So rows that wait here do
not hold the memory of all the others.

Equal to Dask's own P2P, row by row: that keeps rows with ``frame.merge(worker codes, how="inner")`` and sorts by id;
both keep the order of the input. Ids that are not integers (a user's own ``_partitions`` column) go through the same
merge, on the ids alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.memory.malloc import heap
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.rows import gather
from dask_gpurt.shuffle.rows.arrow_buffers import dictionary_bytes, pieces_of
from dask_gpurt.shuffle.rows.pickled_columns import table_of
from dask_gpurt.shuffle.rows.schema import known_schema, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import pandas as pd
    import pyarrow as pa

    from dask_gpurt.shuffle.rows.schema import KnownSchema


class OutputLayout:
    """Which worker gets which output partitions, as ranges of codes. Made once per run.

    Parameters
    ----------
    worker_for
        Output id to worker address, for the outputs that are asked for. Those of one worker come in the order in which
        it will make them, if that is known: neighbours travel and lie together, and their memory is free when the last
        of them is made.
    """

    #: worker address -> (first code, one past the last)
    ranges: dict[str, tuple[int, int]]
    #: code -> output partition id, uint32
    part_of: np.ndarray[Any, Any]
    #: output id -> code; ids that are not asked for have `unwanted`
    code_of: np.ndarray[Any, Any]
    #: number of outputs, and the code of rows to drop
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
        """Number of groups to send the rows for one worker in, for about `limit` groups of all workers."""
        return max(1, min(SHARDS, limit // max(1, len(self.ranges))))

    def group(self, address: str, part: int, groups: int) -> int:
        """Number of the group of neighbouring outputs that an output of a worker is in, of `groups`."""
        begin, end = self.ranges.get(address, (0, 1))  # the output may have changed its owner since
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
class RowOrder:
    """Rows of one input partition in the order of their destinations."""

    #: row numbers by code, stable; rows that are not asked for are left out
    order: np.ndarray[Any, Any]
    #: offsets[c]:offsets[c + 1] are the places in `order` of code c; length outputs + 1
    offsets: np.ndarray[Any, Any]


def locate(data: pd.DataFrame, column: str, layout: OutputLayout, keep: np.ndarray[Any, Any] | None = None) -> RowOrder:
    """Order the rows of a frame by destination, from its column of output partition ids; `keep` is a mask of rows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ids = data[column]
    rows = None
    if getattr(ids.dtype, "kind", "O") in "iu" and isinstance(ids.dtype, np.dtype):
        codes = layout.codes(ids.to_numpy())
    else:
        rows, codes = _merged(ids, layout)
    if keep is not None:
        # What is left out here is neither sorted nor gathered.
        inside = np.flatnonzero(keep if rows is None else keep[rows])
        rows, codes = (inside if rows is None else rows[inside]), codes[inside]
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
    return RowOrder(order if rows is None else rows[order], offsets)


def _merged(ids: pd.Series, layout: OutputLayout) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Row numbers and codes for ids of any other dtype, by the merge that Dask's own P2P makes, errors included."""
    import pandas as pd

    left = pd.DataFrame({"ids": ids.array, "row": np.arange(len(ids))})
    wanted = np.sort(layout.part_of).astype(np.int64)
    right = pd.Series(layout.code_of[wanted], index=wanted, name="code")
    both = left.merge(right, left_on="ids", right_index=True, how="inner")
    return both["row"].to_numpy(), both["code"].to_numpy()


#: shards that a worker's rows of one input are cut to, at most
SHARDS = 8
#: bytes of a shard, at least, where they are several
SHARD_BYTES = 1 << 19
#: bytes of a shard per column, at least: a column costs 10 us per shard from here to the output
COLUMN_BYTES = 10 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """Rows of one input partition for neighbouring outputs of one worker, in the order of its layout.

    When the rows for a worker are many they are several shards with different outputs, each in memory of its own. So
    memory can be given back while the rest still waits.
    """

    #: `protocol.recovery.shard_id`: sorts by input
    input_id: int
    #: of device frames: `packed.PackedRows`
    table: pa.Table
    #: ids of the outputs that have rows, uint32, in the order of the rows
    parts: np.ndarray[Any, Any]
    #: rows of each of them, uint64, same length
    lengths: np.ndarray[Any, Any]
    #: id of the input partition of each row, int64, where several were merged (see `coalesce`); `input_id` is the least
    inputs: np.ndarray[Any, Any] | None = None
    #: bytes of the rows, for the event loop, where to ask the table takes too long; -1: not known
    known_bytes: int = -1
    #: the table's schema, if it was looked up already: that takes as long as a few columns do
    known: KnownSchema | None = None
    #: a table and its columns, one array each, if they are known; holds only while `table` is this one
    apart: tuple[pa.Table, Sequence[pa.Array]] | None = None
    #: stands for what the ids of its input mean for this worker, see `worker.splitter`; 0: it is the only one of its id
    split: int = 0

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
    data: pd.DataFrame,
    column: str,
    drop_column: bool,
    input_id: int,
    layout: OutputLayout,
    fixed: frozenset[str] = frozenset(),
    keep: np.ndarray[Any, Any] | None = None,
) -> Iterator[tuple[str, Shard]]:
    """Yield (worker address, shard), one or several in a row for every worker that gets rows.

    Parameters
    ----------
    column
        Name of the column of output ids.
    drop_column
        Whether to leave that column out of the shards.
    fixed
        Columns that are not pickled, see `pickled_columns.fixed_in`.
    keep
        A mask of the rows that are wanted; None: all.

    Raises
    ------
    TypeError, pyarrow.ArrowException
        See `pickled_columns.table_of`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = locate(data, column, layout, keep)
    if not len(rows.order):
        return
    if data.attrs:  # no output has them: Dask's merge drops them
        data = data.copy(deep=False)
        data.attrs = {}
    plain = gather.plan(data, column if drop_column else None, layout.schemas)
    if plain is None:
        to_arrow, _ = seam.shuffle_tables()
        table = _prepared(table_of(data.drop(columns=column) if drop_column else data, to_arrow, fixed))
    # Every shard has the dictionaries, whole: at least as many bytes of rows go with them.
    whole = dictionary_bytes(table) if plain is None else 0
    row_bytes = (table.nbytes - whole if plain is None else plain.nbytes) / len(data)
    least_bytes = max(SHARD_BYTES, COLUMN_BYTES * data.shape[1], whole)
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
    import pandas as pd
    import pyarrow as pa

    wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    if pd.__version__.startswith(("2.0.", "2.1.")):
        del wide[pa.string()]  # these make no column of text with 64-bit offsets
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


def copied(shard: Shard, input_id: int) -> Shard:
    """A shard in memory of its own, under another id; any thread."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = pa.array(np.arange(shard.table.num_rows))
    table = pc.take(shard.table, rows, boundscheck=False, memory_pool=heap.pool)
    # `apart` is of the other table, and would keep its memory for as long as the copy lives.
    return dataclasses.replace(shard, input_id=input_id, table=table, apart=None)


def by_owner(shard: Shard, owner_of: Callable[[int], Any]) -> Iterable[tuple[Any, Shard]]:
    """Divide a shard into (owner, shard) of neighbouring outputs with one owner, as views."""
    owners = [owner_of(part) for part in shard.parts.tolist()]
    if owners.count(owners[0]) == len(owners):  # as it mostly is: this runs on the event loop, for all that is retained
        return [(owners[0], shard)]
    ends = np.concatenate([[0], np.cumsum(shard.lengths, dtype=np.int64)])
    out: list[tuple[Any, Shard]] = []
    at = 0
    for owner, some in itertools.groupby(owners):
        first, at = at, at + len(list(some))
        one = dataclasses.replace(
            shard,
            table=shard.table.slice(int(ends[first]), int(ends[at] - ends[first])),
            parts=shard.parts[first:at],
            lengths=shard.lengths[first:at],
            known_bytes=-1,
            apart=None,
        )
        out.append((owner, one))
    return out


def separate(shard: Shard, parts: Collection[int]) -> tuple[list[Shard], list[Shard]]:
    """Divide a shard into (shards of these outputs, shards of the rest), as views; `parts` is best a set."""
    pieces = list(by_owner(shard, parts.__contains__))
    return [one for mine, one in pieces if mine], [one for mine, one in pieces if not mine]
