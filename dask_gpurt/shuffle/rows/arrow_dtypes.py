"""Give columns of pandas' Arrow dtypes back with the dtype that they went in with.

Dask's own P2P goes from Arrow to pandas by the name of a dtype, and some names pandas cannot read back: decimals,
lists, structs, dictionaries. Such a column comes out as Python objects, against its own meta. What follows works on
millions of ``decimal.Decimal``, and the next shuffle turns each of them into Arrow again: 5.7 s for 600,000 rows, three
quarters of all that TPC-H's fifth query did in its transfers. An Arrow column is an Arrow column on both sides, so
there is nothing to convert. This is a difference from Dask on purpose: the meta is what the user was promised.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import pandas as pd
    import pyarrow as pa


def columns(table: pa.Table, meta: pd.DataFrame) -> dict[str, pd.arrays.ArrowExtensionArray]:
    """The columns of `table` that are to be Arrow's in pandas by the meta, ready for a frame.

    Within one kind of type (decimals, text, bytes, dictionaries) values are cast to the meta's if all of them fit; else
    the column keeps the type that the data have, such as decimals of more digits than the meta knows of. A column of
    another kind than the meta's is left to Dask's conversion.
    """
    import pandas as pd
    import pyarrow as pa

    found = {}
    for name, dtype in meta.dtypes.items():
        if not isinstance(dtype, pd.ArrowDtype) or name not in table.column_names:
            continue
        column, wanted = table.column(name), dtype.pyarrow_dtype
        if column.type != wanted:
            if _kind(column.type) is None or _kind(column.type) != _kind(wanted):
                continue
            if pa.types.is_dictionary(column.type):
                # In one piece first: pieces whose words fit narrow codes may have too many of them together.
                column = pa.chunked_array([column.combine_chunks()])
            with contextlib.suppress(pa.ArrowException):
                column = column.cast(wanted)
        found[str(name)] = pd.arrays.ArrowExtensionArray(column)
    return found


def _kind(kind: pa.DataType) -> str | None:
    import pyarrow as pa

    is_a = pa.types
    if is_a.is_string(kind) or is_a.is_large_string(kind):
        return "text"
    if is_a.is_binary(kind) or is_a.is_large_binary(kind):
        return "bytes"
    return "decimal" if is_a.is_decimal(kind) else "dictionary" if is_a.is_dictionary(kind) else None


def without(table: pa.Table, names: Collection[str]) -> pa.Table:
    """The table without these columns, and without pandas' notes on them, which it may be unable to read."""
    table = table.drop_columns(list(names))
    notes = table.schema.pandas_metadata
    if not notes:
        return table
    notes["columns"] = [note for note in notes["columns"] if note["field_name"] not in names]
    metadata = {**(table.schema.metadata or {}), b"pandas": json.dumps(notes).encode()}
    return table.replace_schema_metadata(metadata)


def inserted(
    frame: pd.DataFrame, arrays: Mapping[str, pd.arrays.ArrowExtensionArray], order: Sequence[str], meta: pd.DataFrame
) -> pd.DataFrame:
    """`frame` with these columns in the places that they have in `order`, which may go on with the index."""
    for place, name in enumerate(order):
        if name in arrays:
            frame.insert(place, name, arrays[name])
    if list(frame.columns) == list(meta.columns):
        # Without any column of its own the frame did not know of which type its names are.
        frame.columns = meta.columns
    return frame
