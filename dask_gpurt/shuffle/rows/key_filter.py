"""`KeyFilter`: which keys a side of a join may have, as a blocked Bloom filter. Pure.

`words_for` sizes it, `bits_of` makes one worker's part of it from hashes (`join_keys`), `union` joins the parts, and
`KeyFilter.passing` says which rows may match. `found` says it of a sample, without a filter.

Theory of operation. A key sets two bits of one 64-bit word: the top bits of its hash name the word, the low twelve the
bits. So looking a key up touches one place of memory. With 12 to 24 bits a key, 1 to 3 of 100 keys that are not there
pass. The least and the greatest key, where keys are single integers, drop whole partitions without a hash.

Invariants
- A key that was put in passes: bits are only ever set, and both sides compute word and bits by the same code.
- The union of parts of one size is the filter of all keys.

Parts are made of kept hashes when all are known, 4 bytes a row, because the right size is known only then. Rejected: a
filter of the largest size that is folded later (its bits lie all over the cache while it is filled).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.shuffle.rows.join_keys import CHUNK_ROWS, bounds_of, hashes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd

#: bits a key, at least, up to `MOST_WORDS`
KEY_BITS = 12
#: 8 MiB; more would leave less than twelve bits of a hash for the two bits
MOST_WORDS = 1 << 20
#: rows of a side beyond which a filter lets too many pass: 8 bits a key
MOST_ROWS = MOST_WORDS * 8

_U64 = np.uint64
_ONE, _SIX, _LOW = _U64(1), _U64(6), _U64(63)
_TABLE = np.uint32(0xFFFF)
_Array = np.ndarray[Any, Any]


def words_for(rows: int) -> int:
    """Words of a filter for so many rows, a power of two; 0: there are too many."""
    if rows > MOST_ROWS:
        return 0
    return min(MOST_WORDS, 1 << (max(1, rows * KEY_BITS // 64) - 1).bit_length())


def bits_of(hashes: Iterable[_Array], words: int) -> bytes:
    """The bits of these hashes in a filter of so many words."""
    out: _Array = np.zeros(words, dtype=_U64)
    shift = _shift(words)
    for some in hashes:
        for begin in range(0, len(some), CHUNK_ROWS):
            h = some[begin : begin + CHUNK_ROWS].astype(_U64)
            bits = (_ONE << (h & _LOW)) | (_ONE << ((h >> _SIX) & _LOW))
            np.bitwise_or.at(out, (h >> shift).astype(np.int64), bits)
    return out.tobytes()


def union(parts: Sequence[bytes]) -> bytes:
    """The filter of what all parts have; they are of one size."""
    out = np.frombuffer(parts[0], dtype=_U64).copy()
    for one in parts[1:]:
        out |= np.frombuffer(one, dtype=_U64)
    return out.tobytes()


def found(sample: _Array, hashes: Iterable[_Array]) -> _Array:
    """Which hashes of a sample are among others, as a mask; some of the rest may be.

    A third of what `bits_of` takes: a table of the sample's low bits leaves few of the others to compare.
    """
    table: _Array = np.zeros(1 << 16, dtype=bool)
    table[sample & _TABLE] = True
    left = [np.zeros(0, dtype=np.uint32)]
    for some in hashes:
        for begin in range(0, len(some), CHUNK_ROWS):
            h = some[begin : begin + CHUNK_ROWS]
            left.append(h[table[h & _TABLE]])
    return np.isin(sample, np.concatenate(left))


def _shift(words: int) -> np.uint64:
    """By how much a hash of 32 bits is shifted to name its word."""
    return _U64(32 - (words.bit_length() - 1))


@dataclasses.dataclass(frozen=True)
class KeyFilter:
    """The keys of one side."""

    #: uint64
    bits: bytes = dataclasses.field(repr=False)
    #: as in `Keys.bounds`, of all partitions
    bounds: tuple[int, int] | None

    def outside(self, data: pd.DataFrame, columns: Sequence[Any]) -> bool:
        """Whether the bounds alone say that no row of a partition of the other side matches."""
        mine = None if self.bounds is None else bounds_of(data, columns)
        return self.bounds is not None and mine is not None and (mine[1] < self.bounds[0] or mine[0] > self.bounds[1])

    def passing(self, data: pd.DataFrame, columns: Sequence[Any]) -> _Array:
        """Rows of a partition of the other side that may match, as a mask."""
        if self.outside(data, columns):
            return np.zeros(len(data), dtype=bool)
        return self.holds(hashes_of(data, columns))

    def holds(self, hashes: _Array) -> _Array:
        """Which of these hashes may be of a key that was put in."""
        words = np.frombuffer(self.bits, dtype=_U64)
        shift = _shift(len(words))
        out: _Array = np.empty(len(hashes), dtype=bool)
        for begin in range(0, len(hashes), CHUNK_ROWS):
            h = hashes[begin : begin + CHUNK_ROWS].astype(_U64)
            word = words.take((h >> shift).astype(np.int64))
            out[begin : begin + CHUNK_ROWS] = (word >> (h & _LOW)) & (word >> ((h >> _SIX) & _LOW)) & _ONE
        return out
