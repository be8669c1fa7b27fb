"""Hashes of the keys of a join: the same for keys that pandas' merge takes for equal. Pure.

`exact` says whether a dtype can be hashed, `hashes_of` and `Keys.of` hash the key columns of a partition.

Theory of operation. Two rows match only if each of their key columns is equal, so it is enough that the hash is a
function of what pandas compares. That holds where both sides have the same dtype, and a value of it is a few integers:
numbers, dates, decimals by their memory, text by its bytes. Everything else is refused: objects (``1 == 1.0 == True``),
categoricals (a partition's codes mean what its own categories say), Python text, nested types.

- Nulls: pandas merges null with null. Every null of every kind, NaN included, has one hash. Whether pandas tells NaN
  from NA in some dtype does not matter: hashes that are equal for unequal keys only let rows pass.
- ``-0.0 == 0.0``: the sign of a zero is dropped.
- Text: eight bytes at a time, by unaligned reads of Arrow's memory; of the first `TEXT_BYTES` bytes and the length.

A hash has 32 bits. Collisions let rows pass that do not match.

Rejected: `pandas.util.hash_array` (objects of text one by one, 60 times as long), and Arrow's dictionary encoding
(builds a table of all keys, only to hash each once).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import pyarrow as pa

#: bytes of a text that are hashed, besides its length
TEXT_BYTES = 64
#: rows at a time, so that temporaries stay in the cache
CHUNK_ROWS = 1 << 15

_U64 = np.uint64
_MIX = (_U64(0x9E3779B97F4A7C15), _U64(0xC2B2AE3D27D4EB4F))
_HALF = _U64(32)
#: what every null hashes like
_NULL = _U64(0xA0761D6478BD642F)
_Array = np.ndarray[Any, Any]
#: pandas' own dtypes with a mask
_MASKED = (
    *("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64"),
    *("Float32", "Float64", "Boolean"),
)


def exact(dtype: object) -> bool:
    """Whether keys of a dtype hash alike whenever pandas' merge takes them for equal."""
    import pandas as pd

    if isinstance(dtype, np.dtype):
        return dtype.kind in "iufbMm" and dtype.isnative and dtype.itemsize <= 8
    if isinstance(dtype, pd.StringDtype):
        return dtype.storage == "pyarrow"
    if isinstance(dtype, pd.ArrowDtype):
        return _arrow_kind(dtype.pyarrow_dtype) is not None
    if isinstance(dtype, pd.DatetimeTZDtype):
        return True
    return isinstance(dtype, tuple(getattr(pd, f"{name}Dtype") for name in _MASKED))


def _arrow_kind(kind: pa.DataType) -> str | None:
    """How values of an Arrow type are read: ``text``, ``bits``, ``bool``, ``pair``; None: they are not."""
    import pyarrow as pa

    t = pa.types
    if t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind):
        return "text"
    if t.is_boolean(kind):
        return "bool"
    # No floats: pandas takes 0.0 and -0.0 for equal or not by which other keys are there.
    if t.is_integer(kind) or t.is_date(kind) or t.is_timestamp(kind) or t.is_duration(kind):
        return "bits"
    return "pair" if t.is_decimal128(kind) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one partition."""

    #: uint32, one a row
    hashes: _Array
    #: least and greatest integer that stand for a key; None: keys are not single integers, or some are null
    bounds: tuple[int, int] | None

    @classmethod
    def of(cls, data: pd.DataFrame, columns: Sequence[Any]) -> Keys:
        """Hash the key columns of a partition; their dtypes must be `exact`."""
        return cls(hashes_of(data, columns), bounds_of(data, columns))


def hashes_of(data: pd.DataFrame, columns: Sequence[Any], every: int = 1) -> _Array:
    """`Keys.hashes` of a partition; with `every` n, of each n-th row."""
    series = [data[name] if every == 1 else data[name].iloc[::every] for name in columns]
    parts = [_values(one) for one in series]
    rows = len(series[0])
    out: _Array = np.empty(rows, dtype=np.uint32)
    for begin in range(0, rows, CHUNK_ROWS):
        here = slice(begin, begin + CHUNK_ROWS)
        h: _Array = np.zeros(min(CHUNK_ROWS, rows - begin), dtype=_U64)
        for values, nulls in parts:
            some = values[here]
            if nulls is not None:
                some = np.where(nulls[here], _NULL, some)
            h ^= some
            h *= _MIX[0]
            h ^= h >> _HALF
            h *= _MIX[1]
        out[here] = h >> _HALF
    return out


def bounds_of(data: pd.DataFrame, columns: Sequence[Any]) -> tuple[int, int] | None:
    """See `Keys.bounds`. A twentieth of what hashing takes."""
    if len(columns) != 1 or not len(data):
        return None
    column = data[columns[0]]
    kind = column.dtype
    if isinstance(kind, np.dtype):
        if kind.kind not in "iuM":
            return None
        values, nulls = column.to_numpy(), None
        values = values.view(np.int64) if kind.kind == "M" else values
    else:
        pyarrow_dtype = getattr(kind, "pyarrow_dtype", None)
        if pyarrow_dtype is None or _arrow_kind(pyarrow_dtype) != "bits":
            return None
        values, nulls = _values(column)
        values = values.view(np.int64)
    return None if nulls is not None else (int(values.min()), int(values.max()))


def _values(column: pd.Series) -> tuple[_Array, _Array | None]:
    """(uint64 that stand for the values, which of them are null; None: none)."""
    import pandas as pd

    dtype = column.dtype
    if isinstance(dtype, np.dtype):
        return _plain(column.to_numpy())
    if isinstance(dtype, (pd.StringDtype, pd.ArrowDtype)):
        return _arrow(column.array.__arrow_array__())
    if isinstance(dtype, pd.DatetimeTZDtype):
        return column.array.view("i8").view(_U64), None
    nulls = np.asarray(column.isna())
    numpy_dtype = dtype.numpy_dtype
    values, more = _plain(column.array.to_numpy(dtype=numpy_dtype, na_value=numpy_dtype.type(0)))
    if more is not None:
        nulls = nulls | more
    return values, nulls if nulls.any() else None


def _plain(values: _Array) -> tuple[_Array, _Array | None]:
    if values.dtype.kind == "f":
        values = values.astype(np.float64) + 0.0  # -0.0 becomes 0.0
        nulls = np.isnan(values)
        return values.view(_U64), nulls if nulls.any() else None
    if values.dtype.kind in "Mm":
        return np.ascontiguousarray(values).view(_U64), None
    return values.astype(np.int64, copy=False).view(_U64) if values.dtype.kind != "u" else values.astype(_U64), None


def _arrow(column: pa.Array | pa.ChunkedArray) -> tuple[_Array, _Array | None]:
    chunks = getattr(column, "chunks", [column])
    done = [_chunk(one) for one in chunks]
    if len(done) == 1:
        values, nulls = done[0]
    else:
        values = np.concatenate([np.zeros(0, dtype=_U64), *(one for one, _ in done)])
        known = [np.zeros(len(one), dtype=bool) if nulls is None else nulls for one, nulls in done]
        nulls = np.concatenate(known) if any(nulls is not None for _, nulls in done) else None
    return values, nulls


def _chunk(array: pa.Array) -> tuple[_Array, _Array | None]:
    nulls = np.asarray(array.is_null()) if array.null_count else None
    kind = _arrow_kind(array.type)
    if kind == "text":
        return _text(array), nulls
    if kind == "bool":
        return np.asarray(array.fill_null(False)).astype(_U64), nulls
    buffer, n = array.buffers()[1], len(array)
    if buffer is None or not n:
        return np.zeros(n, dtype=_U64), nulls
    if kind == "pair":
        pairs = np.frombuffer(buffer, dtype=_U64)[2 * array.offset : 2 * (array.offset + n)].reshape(-1, 2)
        return pairs[:, 0] ^ (pairs[:, 1] * _MIX[0]), nulls
    letter = "u" if str(array.type).startswith("uint") else "i"
    dtype = np.dtype(f"{letter}{array.type.bit_width // 8}")
    values, more = _plain(np.frombuffer(buffer, dtype=dtype)[array.offset : array.offset + n])
    if nulls is not None and more is not None:
        more = more | nulls
    return values, nulls if more is None else more


def _text(array: pa.Array) -> _Array:
    """A number for each text, of its first bytes and its length."""
    n = len(array)
    _, offsets_buffer, data = array.buffers()
    out: _Array = np.zeros(n, dtype=_U64)
    if not n or data is None or not data.size:
        return out
    wide = np.int64 if str(array.type).startswith("large") else np.int32
    offsets = np.frombuffer(offsets_buffer, dtype=wide)[array.offset : array.offset + n + 1]
    letters = np.frombuffer(data, dtype=np.uint8)
    if len(letters) < 8:
        letters = np.concatenate([letters, np.zeros(8, dtype=np.uint8)])
    last = len(letters) - 8
    #: the eight bytes from each place on
    words: _Array = np.ndarray(shape=(last + 1,), dtype="<u8", buffer=letters, strides=(1,))
    for begin in range(0, n, CHUNK_ROWS):
        some = offsets[begin : begin + CHUNK_ROWS + 1].astype(np.int64)
        first, lengths = some[:-1], np.diff(some)
        h = lengths.astype(_U64) * _MIX[1]
        for skip in range(0, min(TEXT_BYTES, int(lengths.max())), 8):
            rows: Any = slice(None) if skip < int(lengths.min()) else np.flatnonzero(lengths > skip)
            at = first[rows] + skip
            # A word that would end beyond the last letter is read earlier and shifted.
            start = np.minimum(at, last)
            word = words[start] >> ((at - start) * 8).astype(_U64)
            spare = (8 - np.minimum(lengths[rows] - skip, 8)) * 8
            word = word & (_U64(0xFFFFFFFFFFFFFFFF) >> spare.astype(_U64))
            mixed = (h[rows] ^ word) * _MIX[0]
            h[rows] = mixed ^ (mixed >> _HALF)
        out[begin : begin + CHUNK_ROWS] = h
    return out
