"""Join the pieces of one output partition to a frame, with the rows, order and dtypes that Dask's own P2P gives.

`Assembler` makes the outputs of a run. For columns that are all simple it copies by a `Template` (`joined`, `built`),
else Arrow converts (`general`).

Theory of operation. Pieces are ordered by input id and joined without being sorted. Their tables are views on received
memory, and each column is written once, into its final place. Columns that pandas would keep as Arrow memory (text,
nullable and Arrow dtypes) are joined first: a frame must not hold a whole chunk for the few rows it has of it, and a
column in hundreds of pieces is slow ever after.

A large output is built piece by piece (`built`): all columns of a piece are copied, then its memory goes. So the rows
of a hot output are not there twice. Small ones are built column by column (`joined`), which is fewer calls.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_gpurt.memory.malloc import heap
from dask_gpurt.memory.pages import pages
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.rows import arrow_dtypes, gather, pandas_dtypes
from dask_gpurt.shuffle.rows.pickled_columns import fixed_in, index_names, irregular, noted, restored, unified
from dask_gpurt.shuffle.rows.schema import schema_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dask_gpurt.shuffle.rows.schema import KnownSchema
    from dask_gpurt.shuffle.rows.slices import Letters, Piece, Slice


#: outputs of so many bytes are built piece by piece
LARGE_BYTES = 64 << 20
#: bytes of pieces whose memory is given back at a time
GIVE_BACK_BYTES = 32 << 20
#: how the names of numpy's dtypes begin that have a missing value and are plain (see `gather`)
_MISSING = ("float32", "float64", "datetime64[", "timedelta64[")
#: names of pandas' dtypes of numbers with a mask, and of numpy's
_MASKED = frozenset(f"{kind}{bits}" for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)) | {
    "Float32",
    "Float64",
    "boolean",
}
_NUMBERS = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)) | {
    "float32",
    "float64",
    "bool",
}
#: names of Arrow's dtypes of numbers in pandas
_ARROW = frozenset(f"{kind}{bits}[pyarrow]" for kind in ("int", "uint") for bits in (8, 16, 32, 64)) | {
    "float[pyarrow]",
    "double[pyarrow]",
    "bool[pyarrow]",
}


class Assembler:
    """Make the output partitions of one run, like `meta`, an empty frame. Any thread."""

    def __init__(self, meta: pd.DataFrame) -> None:
        self._meta, self._fixed = meta, fixed_in(meta)
        #: schema -> the frame that its data becomes; None: only the general way will do
        self._templates: dict[KnownSchema, Template | None] = {}

    def __call__(self, pieces: list[Piece]) -> pd.DataFrame:
        """Make one output partition.

        Parameters
        ----------
        pieces
            (input id, rows) in any order, the rows of each input in one of them. The list is emptied, so that memory
            goes as it is copied.

        Raises
        ------
        TypeError, pyarrow.ArrowException
            A pickled value cannot be made again here. Pieces of a column with a dtype have no common type, as in Dask's
            own P2P.
        """
        ordered = sorted(pieces, key=lambda piece: piece[0])
        pieces.clear()
        slices = [rows for _, rows in ordered]
        if not slices:
            return self._meta.copy()
        if len(slices) == 1 or all(s.rows.inputs is None for s in slices):
            ordered.clear()
            return self._joined(slices)
        ids = [np.full(s.high - s.low, i, np.int64) if s.inputs is None else s.inputs for i, s in ordered]
        inputs = np.concatenate(ids)
        frame = self._joined(slices)
        # Stable, and all rows of one input are in one slice, in their order: only the inputs change places.
        return frame if (inputs[1:] >= inputs[:-1]).all() else frame.take(np.argsort(inputs, kind="stable"))

    def _joined(self, slices: list[Slice]) -> pd.DataFrame:
        known = slices[0].rows.schema
        if all(s.rows.schema is known and s.rows.views for s in slices):
            if known not in self._templates:
                self._templates[known] = template(known.schema, self._meta)
            if (shape := self._templates[known]) is not None:
                large = sum(s.high - s.low for s in slices) * shape.row_bytes >= LARGE_BYTES
                piecewise = large and all(s.rows.views[i].offsets is not None for s in slices for _, i in shape.text)
                return built(slices, shape) if piecewise else joined(slices, shape)
        schemas = [s.rows.schema for s in slices]
        odd = irregular(frozenset(schemas), self._fixed)
        return general([s.table() for s in slices], self._meta, odd, schemas)


def general(
    tables: list[pa.Table],
    meta: pd.DataFrame,
    pickled: Collection[str] = (),
    schemas: Sequence[KnownSchema] | None = None,
) -> pd.DataFrame:
    """Make a frame of any types, by Arrow. At least one table; empties the list.

    Parameters
    ----------
    pickled
        Columns that the tables cannot have in common unless they are pickled.
    schemas
        Those of the tables, when the caller has them already.
    """
    import pyarrow as pa

    schemas = [schema_of(table.schema) for table in tables] if schemas is None else schemas
    _mark_missing(tables, schemas, meta)
    tables[0] = _note_masks(tables[0], schemas)
    if pickled:
        tables = list(unified(tables, pickled))
    table = pa.concat_tables(tables, promote_options="permissive")
    single = len(tables) == 1
    tables.clear()
    keep = _arrow_columns(meta)
    for i, field in enumerate(table.schema):
        if single or field.name in keep or _is_text(field.type):
            table = table.set_column(i, field, _owned(table.column(i)))
    index = index_names(table)
    regular = meta.drop(columns=[name for name in pickled if name in meta]) if pickled else meta
    as_is = arrow_dtypes.columns(table, regular)
    _, from_arrow = seam.shuffle_tables()
    table, more = pandas_dtypes.of(table, meta)
    if not as_is:
        frame = _reconciled(restored(from_arrow(meta, table, self_destruct=True), pickled, index, meta), meta)
        return pandas_dtypes.completed(frame, more)
    names, table = table.column_names, arrow_dtypes.without(table, as_is)
    rest = restored(from_arrow(meta, table, self_destruct=True), pickled, index, meta)
    rest = _reconciled(rest, meta.drop(columns=list(as_is)))
    return pandas_dtypes.completed(arrow_dtypes.inserted(rest, as_is, names, meta), more)


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """What the data of one schema becomes, where every column is simple (see `slices.Rows.views`)."""

    #: no rows; names, dtypes and order as in the output
    frame: pd.DataFrame
    #: numpy dtype -> (places in the output, fields of the schema) of its columns
    blocks: tuple[tuple[np.dtype[Any], list[int], tuple[int, ...]], ...]
    #: (place in the output, field of the schema) of columns of text
    text: tuple[tuple[int, int], ...]
    #: field of the schema that is the index
    index: int
    index_dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, letters of text excepted."""
        numbers = sum(dtype.itemsize * len(places) for dtype, places, _ in self.blocks)
        return numbers + 8 * len(self.text) + self.index_dtype.itemsize


def template(schema: pa.Schema, meta: pd.DataFrame) -> Template | None:
    """The template of a schema; None when types differ from the meta's or the index is not one plain column."""
    try:
        from pandas.api.internals import create_dataframe_from_blocks  # noqa: F401
    except ImportError:
        return None
    _, from_arrow = seam.shuffle_tables()
    raw = from_arrow(meta, schema.empty_table())
    frame = _reconciled(raw, meta)
    if list(raw.dtypes) != list(frame.dtypes) or list(raw.columns) != list(meta.columns):
        return None
    notes = (schema.pandas_metadata or {}).get("index_columns", [])
    if len(notes) != 1 or not isinstance(notes[0], str) or notes[0] not in schema.names:
        return None
    if schema_of(schema).dtypes.get(notes[0]) != str(frame.index.dtype):
        return None  # a dtype with a mask, or Arrow's: numpy's only as long as there are no nulls
    index = schema.get_field_index(notes[0])
    fields = [i for i in range(len(schema)) if i != index]
    if [schema.names[i] for i in fields] != list(frame.columns) or not gather.is_plain(frame.index.dtype):
        return None
    if type(frame.index) not in (pd.Index, pd.RangeIndex, pd.DatetimeIndex, pd.TimedeltaIndex):
        return None
    blocks: dict[np.dtype[Any], tuple[list[int], list[int]]] = {}
    text = []
    for place, (i, dtype) in enumerate(zip(fields, frame.dtypes, strict=True)):
        if gather.is_text(dtype):
            text.append((place, i))
        elif gather.is_plain(dtype):
            places, sources = blocks.setdefault(dtype, ([], []))
            places.append(place)
            sources.append(i)
        else:
            return None
    for i, dtype in [*zip(fields, frame.dtypes, strict=True), (index, frame.index.dtype)]:
        if schema.field(i).type != (pa.large_string() if gather.is_text(dtype) else pa.from_numpy_dtype(dtype)):
            return None
    return Template(
        frame,
        tuple((d, p, tuple(s)) for d, (p, s) in blocks.items()),
        tuple(text),
        index,
        np.dtype(str(frame.index.dtype)),
    )


def joined(slices: list[Slice], shape: Template) -> pd.DataFrame:
    """Make a frame column by column, in memory of `pages`: each is written once, into its final place."""
    n = sum(s.high - s.low for s in slices)
    blocks: list[np.ndarray[Any, Any]] = []
    for dtype, _, fields in shape.blocks:
        block = _empty((len(fields), n), dtype)
        bundles = [s.rows.bundle(fields) for s in slices]
        if all(b is not None for b in bundles):
            pieces = [b[:, s.low : s.high] for b, s in zip(bundles, slices, strict=True)]  # type: ignore[index]
            np.concatenate(pieces, axis=1, out=block)
        else:
            for out, i in zip(block, fields, strict=True):
                np.concatenate([_values(s, i) for s in slices], out=out)
        blocks.append(block)
    text = [_text([(s.rows.views[i], s.low, s.high) for s in slices]) for _, i in shape.text]
    values = _empty((n,), shape.index_dtype)
    np.concatenate([_values(s, shape.index) for s in slices], out=values)
    return _frame(shape, blocks, text, values)


def built(slices: list[Slice], shape: Template) -> pd.DataFrame:
    """Make a frame piece by piece; empties the list. Columns of text must have offsets."""
    n = sum(s.high - s.low for s in slices)
    blocks = [_empty((len(fields), n), dtype) for dtype, _, fields in shape.blocks]
    values = _empty((n,), shape.index_dtype)
    texts = []
    for _, i in shape.text:
        size = sum(s.rows.views[i].offsets.item(s.high) - s.rows.views[i].offsets.item(s.low) for s in slices)
        ends = _empty((n + 1,), np.dtype(np.int64))
        ends[0] = 0
        texts.append((i, ends, _empty((size,), np.dtype(np.uint8))))
    slices.reverse()
    at = done = 0
    piece: Slice | None
    bundle: np.ndarray[Any, Any] | None = None
    source: Any = None
    while slices:
        piece = slices.pop()
        end = at + piece.high - piece.low
        for (_, _, fields), block in zip(shape.blocks, blocks, strict=True):
            bundle = piece.rows.bundle(fields)
            if bundle is not None:
                block[:, at:end] = bundle[:, piece.low : piece.high]
            else:
                for out, i in zip(block, fields, strict=True):
                    out[at:end] = _values(piece, i)
        values[at:end] = _values(piece, shape.index)
        for i, ends, letters in texts:
            source = piece.rows.views[i]
            first, last, used = source.offsets.item(piece.low), source.offsets.item(piece.high), ends.item(at)
            np.add(source.offsets[piece.low + 1 : piece.high + 1], used - first, out=ends[at + 1 : end + 1])
            letters[used : used + last - first] = source.letters[first:last]
        at = end
        piece = bundle = source = None  # else the last one of them would stay
        if (at - done) * shape.row_bytes >= GIVE_BACK_BYTES:
            # What the pieces leave would wait to be used again, and count as this process's.
            pages.trim()
            done = at
    return _frame(shape, blocks, [_letters(ends, letters) for _, ends, letters in texts], values)


def _frame(
    shape: Template, blocks: list[np.ndarray[Any, Any]], text: list[pa.LargeStringArray], values: np.ndarray[Any, Any]
) -> pd.DataFrame:
    from pandas.api.internals import create_dataframe_from_blocks

    made: list[tuple[Any, Any]] = [
        (block, np.array(places, dtype=np.intp)) for (_, places, _), block in zip(shape.blocks, blocks, strict=True)
    ]
    dtypes = shape.frame.dtypes.array
    for (place, _), array in zip(shape.text, text, strict=True):
        column = dtypes[place].__from_arrow__(pa.chunked_array([array]))
        made.append((column, np.array([place], dtype=np.intp)))
    index = pd.Index(values, name=shape.frame.index.name, copy=False)
    return create_dataframe_from_blocks(made, index=index, columns=shape.frame.columns)


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Uninitialised memory."""
    count = math.prod(shape)
    return np.frombuffer(pages.take(count * dtype.itemsize), dtype=dtype, count=count).reshape(shape)


def _values(rows: Slice, i: int) -> np.ndarray[Any, Any]:
    values = rows.rows.views[i]
    if isinstance(values, np.ndarray):
        return values[rows.low : rows.high]
    return values.slice(rows.low, rows.high - rows.low).to_numpy(zero_copy_only=False)


def _text(pieces: list[tuple[Letters, int, int]]) -> pa.LargeStringArray:
    """Text of several columns as one, in memory of its own."""
    if any(text.offsets is None for text, _, _ in pieces):
        out: pa.LargeStringArray = pa.concat_arrays(
            [text.array.slice(low, high - low) for text, low, high in pieces], memory_pool=heap.pool
        )
        return out
    ends, letters, shifts, lengths = [], [], [], []
    n = used = 0
    for text, low, high in pieces:
        offsets = text.offsets
        first, last = offsets.item(low), offsets.item(high)  # type: ignore[union-attr]
        ends.append(offsets[low + 1 : high + 1])  # type: ignore[index]
        letters.append(text.letters[first:last])
        shifts.append(used - first)
        lengths.append(high - low)
        n += high - low
        used += last - first
    all_ends = _empty((n + 1,), np.dtype(np.int64))
    all_ends[0] = 0
    np.concatenate(ends, out=all_ends[1:])
    all_ends[1:] += np.repeat(shifts, lengths)
    all_letters = _empty((used,), np.dtype(np.uint8))
    np.concatenate(letters, out=all_letters)
    return _letters(all_ends, all_letters)


def _letters(offsets: np.ndarray[Any, Any], letters: np.ndarray[Any, Any]) -> pa.LargeStringArray:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(letters)]
    return pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers, 0)


def _arrow_columns(meta: pd.DataFrame) -> set[str]:
    """Columns whose dtype may keep Arrow memory as it is."""
    import pandas as pd

    numpy_like = (pd.CategoricalDtype, pd.DatetimeTZDtype)
    return {
        str(name)
        for name, dtype in meta.dtypes.items()
        if isinstance(dtype, pd.api.extensions.ExtensionDtype) and not isinstance(dtype, numpy_like)
    }


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_large_string(kind) or pa.types.is_string(kind))


def _mark_missing(tables: list[pa.Table], schemas: Sequence[KnownSchema], meta: pd.DataFrame) -> None:
    """Make nulls of NaN and NaT in columns that do not have one numpy dtype in all tables and in the meta; in place.

    Plain columns come as numpy has them (`gather`), and what is missing there is a value to Arrow. A column that stays
    numpy's does not notice. But NaT cannot be cast to another unit, and pandas' own dtypes take NaN for a number.
    """
    wanted = {str(name): str(dtype) for name, dtype in meta.dtypes.items()}
    kinds: dict[str, set[str]] = {}
    for one in dict.fromkeys(schemas):
        for name, dtype in one.dtypes.items():
            kinds.setdefault(name, {wanted[name]} if name in wanted else set()).add(dtype)
    changing = [name for name, dtypes in kinds.items() if len(dtypes) > 1]
    for i, one in enumerate(schemas):
        for name in changing:
            at = one.schema.get_field_index(name)
            if at >= 0 and one.dtypes.get(name, "").startswith(_MISSING):
                tables[i] = tables[i].set_column(at, one.schema.field(at), _marked(tables[i].column(at)))


def _note_masks(table: pa.Table, schemas: Sequence[KnownSchema]) -> pa.Table:
    """The first of some tables, whose notes count, with the common dtype of columns that have a mask in one of them.

    Numbers of an Arrow dtype count as well. Else what the first input has would say whether large integers beside
    nulls become floats, which cannot hold them.
    """
    kinds: dict[str, dict[str, None]] = {}
    for one in dict.fromkeys(schemas):
        for name, dtype in one.dtypes.items():
            kinds.setdefault(name, {})[dtype] = None
    for name, dtypes in kinds.items():
        if len(dtypes) == 1:
            continue
        masks = [some for some in (_MASKED, _ARROW) if not some.isdisjoint(dtypes)]
        # Of both kinds there is no common dtype but objects.
        if len(masks) == 1 and dtypes.keys() <= masks[0] | _NUMBERS:
            common = str(functools.reduce(seam.common_dtype, map(pd.api.types.pandas_dtype, dtypes)))
            table = noted(table, {name}, common.lower(), common)
    return table


def _marked(column: pa.ChunkedArray) -> pa.ChunkedArray:
    import pyarrow as pa
    import pyarrow.compute as pc

    chunks, kind = [], column.type
    for chunk in column.chunks:
        if pa.types.is_floating(kind):
            missing = pc.is_nan(chunk)
        elif pa.types.is_duration(kind) or (pa.types.is_timestamp(kind) and not kind.tz):
            missing = pc.equal(chunk.view(pa.int64()), np.iinfo(np.int64).min)
        else:
            return column
        chunks.append(pc.if_else(missing, pa.scalar(None, kind), chunk))
    return pa.chunked_array(chunks, type=kind)


def _owned(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column in memory of its own, in one piece where Arrow can (text with 32-bit offsets joins to 2 GiB)."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type) or not column.num_chunks:
        return column
    joined = column.combine_chunks(heap.pool)  # copies, one piece included
    return joined if isinstance(joined, pa.ChunkedArray) else pa.chunked_array([joined])


def _reconciled(df: pd.DataFrame, meta: pd.DataFrame) -> pd.DataFrame:
    """Dtypes as Dask's own P2P settles them where the data and the meta differ; those of text in the index as well."""
    import pandas as pd

    changes: dict[Any, Any] = {}
    for name, wanted in meta.dtypes.items():
        actual = df[name].dtype
        # A meta need not know the categories of the data.
        if actual == wanted or (isinstance(actual, pd.CategoricalDtype) and isinstance(wanted, pd.CategoricalDtype)):
            continue
        text = isinstance(actual, pd.StringDtype) and isinstance(wanted, pd.StringDtype)
        changes[name] = wanted if text else seam.common_dtype(actual, wanted)
    if changes:
        df = df.astype(changes)
    index = pandas_dtypes.with_text_as(df.index, meta.index)
    if index is not df.index:
        df.index = index
    return df
