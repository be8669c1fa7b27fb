"""Rows of one output as a place in a table that holds rows for several outputs.

`Rows` is such a table with its columns taken apart once for all outputs. `Slice` is a range of its rows. `Piece` is
what a chunk gives for an output: an input id and a slice.

To slice a table makes a new array of every column. That costs more than copying the few rows of a slice when partitions
are many, so assembling copies from the table of all outputs instead.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.shuffle.rows.arrow_buffers import pieces_of
from dask_gpurt.shuffle.rows.schema import Special, schema_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa

    from dask_gpurt.shuffle.rows.schema import KnownSchema, View

#: (input id, its rows for one output)
Piece = tuple[int, "Slice"]


class Rows:
    """A table of rows for several outputs, with its columns taken apart once for all of them. Immutable; any thread.

    Parameters
    ----------
    known
        The table's schema as `schema_of` gives it, when the caller has it already.
    inputs
        Id of the input partition of each row, where they are of several.
    arrays
        The table's columns in one piece each, when the caller has them already.
    """

    __slots__ = ("_arrays", "_bundles", "_views", "inputs", "schema", "table")

    def __init__(
        self,
        table: pa.Table,
        known: KnownSchema | None = None,
        inputs: np.ndarray[Any, Any] | None = None,
        arrays: Sequence[pa.Array] | None = None,
    ) -> None:
        self.table = table
        self._arrays = arrays
        self.inputs = inputs
        self.schema = known or schema_of(table.schema)
        self._views: tuple[Any, ...] | None = None
        self._bundles: dict[tuple[int, ...], np.ndarray[Any, Any] | None] = {}

    @property
    def views(self) -> tuple[Any, ...]:
        """Per column a numpy view on its values, `Letters` (text), or the Arrow array (booleans).

        Empty when a column is not simple. Simple are columns in one piece that are text, or have a numpy dtype of the
        same values and no nulls.
        """
        if self._views is None:
            arrays = self._arrays or pieces_of(self.table)
            self._views = () if arrays is None else tuple(_views(arrays, self.schema.kinds))
        return self._views

    def bundle(self, fields: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
        """View several columns of one dtype as the rows of one array; None when they do not lie in memory like that.

        After `gather.gather`, columns that are neighbours in the schema do. Then one copy serves all of them. Needs
        `views` not to be empty.
        """
        try:
            return self._bundles[fields]
        except KeyError:
            out = self._bundles[fields] = _bundle([self.views[i] for i in fields])
            return out


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """Rows `low` to `high` (exclusive) of some rows."""

    rows: Rows
    low: int
    high: int

    def table(self) -> pa.Table:
        """The rows as a table of views."""
        return self.rows.table.slice(self.low, self.high - self.low)

    @property
    def inputs(self) -> np.ndarray[Any, Any] | None:
        """Id of the input of each row; None when all are of one."""
        inputs = self.rows.inputs
        return None if inputs is None else inputs[self.low : self.high]

    @classmethod
    def whole(
        cls, table: pa.Table, known: KnownSchema | None = None, inputs: np.ndarray[Any, Any] | None = None
    ) -> Slice:
        """All rows of a table."""
        return cls(Rows(table, known, inputs), 0, table.num_rows)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Letters:
    """A column of text taken apart."""

    array: pa.LargeStringArray
    #: where each text ends, after where the first begins; None when there are nulls, or the array begins inside
    offsets: np.ndarray[Any, Any] | None
    letters: np.ndarray[Any, Any]

    @classmethod
    def of(cls, array: pa.LargeStringArray) -> Letters:
        """Take a column apart, as views."""
        _, offsets, letters = array.buffers()
        none = np.empty(0, np.uint8)
        if array.null_count or array.offset or offsets is None:
            return cls(array, None, none)
        return cls(
            array,
            np.frombuffer(offsets, np.int64, len(array) + 1),
            none if letters is None or not letters.size else np.frombuffer(letters, np.uint8),
        )


def _bundle(columns: list[Any]) -> np.ndarray[Any, Any] | None:
    first = columns[0]
    if not all(isinstance(c, np.ndarray) and c.flags.c_contiguous for c in columns):
        return None
    if len(columns) == 1:
        return first.reshape(1, -1)
    at = [c.__array_interface__["data"][0] for c in columns]
    step = at[1] - at[0]
    if step < first.nbytes or step % first.itemsize or any(b - a != step for a, b in pairwise(at)):
        return None
    # Whatever lies between them is not looked at; `Rows.table` keeps all of it.
    return np.lib.stride_tricks.as_strided(first, (len(at), len(first)), (step, first.itemsize), writeable=False)


def _views(arrays: Sequence[pa.Array], kinds: tuple[View, ...]) -> Iterable[Any]:
    views: list[Any] = []
    for array, kind in zip(arrays, kinds, strict=True):
        if kind is Special.TEXT:
            views.append(Letters.of(array))
        elif kind is None or array.null_count:
            return ()
        elif kind is Special.BITS:
            views.append(array)
        else:
            # Arrow's own conversion takes four times as long.
            data, n = array.buffers()[1], len(array)
            values = np.frombuffer(data, kind, n, array.offset * kind.itemsize) if n else np.empty(0, kind)
            views.append(values)
    return views
