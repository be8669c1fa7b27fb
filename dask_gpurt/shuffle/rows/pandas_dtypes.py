"""Complete what Arrow's conversion of a table to a frame leaves out of pandas' own dtypes.

Theory of operation. Arrow restores pandas' own dtypes of columns, by their names, but not those of the index: periods
come out as the integers that they are numbered by, intervals as dicts, and integers with nulls as floats, which cannot
hold all of them. Categories that are moments come out without their time zone, and text of an index as what a column is
that has text of another kind. Dask's own P2P hands that on, so rows no longer match those of a frame that was not
shuffled. A shuffle moves rows, it does not change them.

`of` looks at the table before it is converted, `completed` and `with_text_as` change the frame.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.shuffle.rows.pickled_columns import index_names, index_of, noted

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    import pyarrow as pa


@dataclasses.dataclass(frozen=True, slots=True)
class Missing:
    """What the conversion of a table leaves out."""

    #: name of a column -> time zone of its categories
    zones: Mapping[str, str]
    #: level of the index -> its values
    levels: Mapping[int, pd.Index]
    #: level of the index -> time zone of its categories
    level_zones: Mapping[int, str]


def of(table: pa.Table, meta: pd.DataFrame) -> tuple[pa.Table, Missing]:
    """The table to convert, with numbers in place of the levels that need no conversion, and what is missing then.

    Parameters
    ----------
    meta
        Empty frame, of which the dtypes of the index count.
    """
    import pandas as pd
    import pyarrow as pa

    zones = {field.name: zone for field in table.schema if (zone := _zone(field.type)) is not None}
    levels: dict[int, pd.Index] = {}
    names = index_names(table)
    known = len(names) == meta.index.nlevels and all(name in table.column_names for name in names)
    for i, name in enumerate(names if known else ()):
        at = table.schema.get_field_index(name)
        kind = table.schema.field(at).type
        dtype: Any = meta.index.get_level_values(i).dtype
        if not _is_of(kind, dtype):
            # The data may have a mask that the meta knows nothing of.
            dtype = _noted(table.schema, name)
        if _is_of(kind, dtype):
            levels[i] = pd.Index(dtype.__from_arrow__(table.column(at).combine_chunks()), name=meta.index.names[i])
            # Arrow makes dicts of intervals, which cannot be in an index of several levels.
            table = table.set_column(at, pa.field(name, pa.int64()), pa.array(np.arange(len(table))))
    if levels:
        table = noted(table, {names[i] for i in levels}, "int64", "int64")
    return table, Missing(zones, levels, {i: zones[name] for i, name in enumerate(names) if name in zones})


def completed(frame: pd.DataFrame, missing: Missing) -> pd.DataFrame:
    """The frame with what was left out."""
    for at, name in enumerate(map(str, frame.columns)):
        if name in missing.zones and (zoned := _zoned(frame.dtypes.iloc[at], missing.zones[name])) is not None:
            frame.isetitem(at, frame.iloc[:, at].cat.rename_categories(zoned))
    levels = dict(missing.levels)
    for i, zone in missing.level_zones.items():
        level: Any = frame.index.get_level_values(i)
        if (zoned := _zoned(level.dtype, zone)) is not None:
            levels[i] = level.rename_categories(zoned)
    if levels:
        every = [levels.get(i, frame.index.get_level_values(i)) for i in range(frame.index.nlevels)]
        frame.index = index_of(every, frame.index)
    return frame


def with_text_as(index: pd.Index, meta: pd.Index) -> pd.Index:
    """The index with text of the kinds that the meta has. Arrow's conversion gives all text of a table one kind."""
    import pandas as pd

    actual, wanted = _level_dtypes(index), _level_dtypes(meta)
    if len(actual) != len(wanted):
        return index
    kinds = {
        i: b
        for i, (a, b) in enumerate(zip(actual, wanted, strict=True))
        if a != b and isinstance(a, pd.StringDtype) and isinstance(b, pd.StringDtype)
    }
    if not kinds:
        return index
    levels = [index.get_level_values(i) for i in range(index.nlevels)]
    return index_of([at.astype(kinds[i]) if i in kinds else at for i, at in enumerate(levels)], index)


def _level_dtypes(index: pd.Index) -> list[Any]:
    import pandas as pd

    return [level.dtype for level in index.levels] if isinstance(index, pd.MultiIndex) else [index.dtype]


def _zone(kind: pa.DataType) -> str | None:
    """Time zone of the values of a dictionary."""
    import pyarrow as pa

    is_zoned = pa.types.is_dictionary(kind) and pa.types.is_timestamp(kind.value_type)
    return kind.value_type.tz if is_zoned else None


def _is_of(kind: pa.DataType, dtype: Any) -> bool:
    """Whether values of an Arrow type become those of pandas' own dtype as they are."""
    import pandas as pd
    import pyarrow as pa

    if isinstance(dtype, (pd.PeriodDtype, pd.IntervalDtype)):
        return isinstance(kind, pa.BaseExtensionType) and kind.to_pandas_dtype() == dtype
    if isinstance(dtype, pd.ArrowDtype):
        return bool(kind == dtype.pyarrow_dtype)
    if not isinstance(getattr(dtype, "numpy_dtype", None), np.dtype) or isinstance(dtype, np.dtype):
        return False
    return bool(kind == pa.from_numpy_dtype(dtype.numpy_dtype))


def _noted(schema: pa.Schema, field: str) -> Any:
    """The dtype that pandas' notes give a field, if it is one of numbers with a mask or of Arrow; else None."""
    import pandas as pd

    notes = (schema.pandas_metadata or {}).get("columns", ())
    named = [note["numpy_type"] for note in notes if note["field_name"] == field]
    if not named:
        return None
    try:
        dtype = pd.api.types.pandas_dtype(named[0])
    except (TypeError, NotImplementedError):  # some names of Arrow's types cannot be read
        return None
    return dtype if isinstance(dtype, pd.ArrowDtype) or hasattr(dtype, "numpy_dtype") else None


def _zoned(dtype: object, zone: str) -> pd.DatetimeIndex | None:
    """The categories of a dtype in a time zone, if they have none."""
    import pandas as pd

    moments = dtype.categories if isinstance(dtype, pd.CategoricalDtype) else None
    if not isinstance(moments, pd.DatetimeIndex) or moments.tz is not None:
        return None
    return moments.tz_localize("UTC").tz_convert(zone)
