"""Pieces of one output partition to one frame, with the rows, order and dtypes that stock's P2P gives.

Theory of operation. Pieces are ordered by input partition id and joined without being sorted; their tables are views on
received memory, and the conversion to pandas writes each column once into its final place. Columns that pandas would
keep as Arrow memory (text, nullable and Arrow dtypes) are joined first: a frame must not hold on to a whole chunk for
the few rows it has of it, and a column in hundreds of pieces is slow ever after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd
    import pyarrow as pa

    from dask_gpurt.shuffle.chunk import Piece


def assemble(pieces: Iterable[Piece], meta: pd.DataFrame) -> pd.DataFrame:
    """One output partition.

    Parameters
    ----------
    pieces
        (input partition id, rows), any order, each input at most once.
    meta
        Empty frame with the output's columns and dtypes.

    Raises
    ------
    pyarrow.ArrowException
        Pieces whose types have no common one, as stock's P2P raises.
    """
    import pyarrow as pa

    tables = [table for _, table in sorted(pieces, key=lambda piece: piece[0])]
    if not tables:
        return meta.copy()
    table = pa.concat_tables(tables, promote_options="permissive")
    single = len(tables) == 1
    del tables, pieces
    keep = _arrow_columns(meta)
    for i, field in enumerate(table.schema):
        if single or field.name in keep or _is_text(field.type):
            table = table.set_column(i, field, _owned(table.column(i)))
    _, from_arrow = seam.shuffle_tables()
    return _reconciled(from_arrow(meta, table, self_destruct=True), meta)


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


def _owned(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column in memory of its own, in one piece where Arrow can (text with 32-bit offsets joins to 2 GiB)."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type) or not column.num_chunks:
        return column
    joined = column.combine_chunks()  # copies, one piece included
    return joined if isinstance(joined, pa.ChunkedArray) else pa.chunked_array([joined])


def _reconciled(df: pd.DataFrame, meta: pd.DataFrame) -> pd.DataFrame:
    """Dtypes as stock settles them where the data and the meta differ."""
    import pandas as pd

    changes: dict[Any, Any] = {}
    for name, wanted in meta.dtypes.items():
        actual = df[name].dtype
        # A meta need not know the categories of the data.
        if actual == wanted or (isinstance(actual, pd.CategoricalDtype) and isinstance(wanted, pd.CategoricalDtype)):
            continue
        text = isinstance(actual, pd.StringDtype) and isinstance(wanted, pd.StringDtype)
        changes[name] = wanted if text else seam.common_dtype(actual, wanted)
    return df.astype(changes) if changes else df
