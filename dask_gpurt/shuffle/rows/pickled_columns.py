"""Carry columns that Arrow cannot hold: as a column of bytes, each value pickled.

`table_of` makes the table of an input partition; the schema's metadata names the columns it pickled (`pickled_in`).
`irregular` finds the columns that the tables of one output cannot have in common, `unified` pickles them in all of
them, and `restored` gives the values back.

Theory of operation. Dask's own P2P fails for a column of Python objects without a common Arrow type
(dask/distributed#8310, dask/dask#10014). As bytes such a column is gathered, merged, cut, spilled and sent like any
other. Only a column that Arrow refuses, or of a type that no receiver can read (categories that are intervals), is
pickled, so everything that Dask's P2P can do is done as it does it.

Whether Arrow holds a column is found per input partition. One partition may have numbers and the next one words, or one
may need pickle and the next one not. Where an output joins such tables, the column is pickled in all of them.

What Arrow takes and makes something else of is pickled, too (`_changed`, `arrow_changes`).

Values are pickled one by one, as rows of a column part. What refers to ``__main__`` goes by cloudpickle, as in Dask.
"""

from __future__ import annotations

import functools
import json
import pickle
from typing import TYPE_CHECKING

import cloudpickle
import numpy as np

from dask_gpurt.shuffle.rows import arrow_changes
from dask_gpurt.shuffle.rows.schema import PICKLED, pickled_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import pandas as pd
    import pyarrow as pa

    from dask_gpurt.shuffle.rows.schema import KnownSchema

#: values of any types
Objects = np.ndarray[tuple[int], np.dtype[np.object_]]
#: names of types in an error, at most
TYPES = 6


# ---- an input partition


def fixed_in(meta: pd.DataFrame) -> frozenset[str]:
    """Names of the columns that are never pickled: those whose meta is not of objects, text or categories."""
    import pandas as pd

    def open_to_all(dtype: object) -> bool:
        return dtype == np.dtype(object) or isinstance(dtype, (pd.StringDtype, pd.CategoricalDtype))

    return frozenset(str(name) for name, dtype in meta.dtypes.items() if not open_to_all(dtype))


def table_of(data: pd.DataFrame, convert: Callable[..., pa.Table], fixed: frozenset[str] = frozenset()) -> pa.Table:
    """The table of a frame, with its index; columns of objects that Arrow cannot hold are pickled.

    Parameters
    ----------
    convert
        Dask's conversion of a frame to a table.
    fixed
        See `fixed_in`.

    Raises
    ------
    TypeError
        Neither Arrow nor pickle can hold a value, or the meta does not allow it; names column and types.
    pyarrow.ArrowException
        Arrow cannot hold a column that is not of objects.
    """
    plain, odd, levels = data, set[int](), set[int]()
    while True:
        # Until nothing is left to pickle: what Arrow refuses hides what it would make something else of.
        try:
            table = convert(plain, preserve_index=True)
        except MemoryError:
            raise
        except Exception as e:
            columns, depths = _refused(plain)
            if not columns and not depths:
                raise
            _check_allowed(data, columns, fixed, e)
        else:
            columns, depths = _changed(plain, table, fixed)
            if not columns and not depths:
                break
        plain = plain.copy(deep=False)
        for at in columns:
            plain.isetitem(at, _series(_dumped(data.iloc[:, at].array, str(data.columns[at])), data.index))
        odd.update(columns)
        levels.update(depths)
        if depths:
            plain.index = index_of([_level(data, i, i in levels) for i in range(data.index.nlevels)], data.index)
    table = _with_zones(table, plain)
    if not odd and not levels:
        return table
    return _marked(table, [str(data.columns[at]) for at in sorted(odd)] + [index_names(table)[i] for i in levels])


def _with_zones(table: pa.Table, data: pd.DataFrame) -> pa.Table:
    """The table with the time zones of categories, which pandas below 3 does not hand to Arrow."""
    import pyarrow as pa

    dtypes = list(zip(map(str, data.columns), data.dtypes, strict=True))
    dtypes += [(name, data.index.get_level_values(i).dtype) for i, name in enumerate(index_names(table))]
    for name, dtype in dtypes:
        if getattr(getattr(dtype, "categories", None), "tz", None) is None:
            continue
        at = table.schema.get_field_index(name)
        kind = table.schema.field(at).type
        if kind.value_type.tz is None:
            moments = pa.array(dtype.categories[:0]).type
            chunks = [
                pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(moments), ordered=kind.ordered)
                for chunk in table.column(at).chunks
            ]
            kind = pa.dictionary(kind.index_type, moments, kind.ordered)
            table = table.set_column(at, pa.field(name, kind), pa.chunked_array(chunks, type=kind))
    return table


def unreadable(schema: pa.Schema) -> frozenset[str]:
    """Names of the fields whose type Arrow writes but does not read as it was: dictionaries of pandas' own types.

    Those of intervals cannot be read at all, those of periods are read as periods, which then are the codes.
    """
    import pyarrow as pa

    if _is_readable(schema):
        return frozenset()
    return frozenset(field.name for field in schema if not _is_readable(pa.schema([field])))


def _is_readable(schema: pa.Schema) -> bool:
    import pyarrow as pa

    try:
        return bool(pa.ipc.read_schema(schema.serialize()).equals(schema))
    except MemoryError:
        raise
    except Exception:  # of an extension type's own code: anything
        return False


def _check_allowed(data: pd.DataFrame, odd: Iterable[int], fixed: frozenset[str], cause: Exception) -> None:
    for at in odd:
        if str(data.columns[at]) in fixed:
            raise TypeError(
                f"column {str(data.columns[at])!r} ({types_of(data.iloc[:, at])}) cannot be held by Arrow ({cause}), "
                "and is not of objects by the meta. Remedy: convert the column, or have a meta of dtype object"
            ) from cause


def _level(data: pd.DataFrame, i: int, odd: bool) -> pd.Index | Objects:
    values = data.index.get_level_values(i)
    return _dumped(values, f"level {i} of the index") if odd else values


def _is_of_objects(dtype: object) -> bool:
    import pandas as pd

    # Categories of any type: pyarrow below 22 refuses those that are periods.
    return isinstance(dtype, pd.CategoricalDtype) or (isinstance(dtype, np.dtype) and dtype.kind == "O")


def _refused(data: pd.DataFrame) -> tuple[list[int], list[int]]:
    """(Places of columns, levels of the index) that are of objects and that Arrow refuses."""
    odd = [i for i, dtype in enumerate(data.dtypes) if _is_of_objects(dtype) and _refuses(data.iloc[:, i])]
    levels = [data.index.get_level_values(i) for i in range(data.index.nlevels)]
    return odd, [i for i, level in enumerate(levels) if _is_of_objects(level.dtype) and _refuses(level)]


def _refuses(values: pd.Series | pd.Index) -> bool:
    import pyarrow as pa

    try:
        pa.array(values, from_pandas=True)
    except MemoryError:
        raise
    except Exception:
        return True
    return False


def _changed(data: pd.DataFrame, table: pa.Table, fixed: frozenset[str]) -> tuple[list[int], list[int]]:
    """As `_refused`, of columns that Arrow took, but of which it made something else than they hold."""
    names = index_names(table)
    ways = {field.name: test for field in table.schema if (test := arrow_changes.changes_in(field.type)) is not None}
    unread = unreadable(table.schema)

    def changed(values: pd.Series | pd.Index, name: str) -> bool:
        return name in unread or (name in ways and values.dtype == object and ways[name](values))

    odd = [
        i
        for i, name in enumerate(map(str, data.columns))
        if (name in unread or name in ways.keys() - fixed) and changed(data.iloc[:, i], name)
    ]
    levels = [i for i, name in enumerate(names) if changed(data.index.get_level_values(i), name)]
    return odd, levels


def index_names(table: pa.Table) -> list[str]:
    """Names of the fields that are the levels of the index."""
    return [str(name) for name in (table.schema.pandas_metadata or {}).get("index_columns", [])]


def _marked(table: pa.Table, names: Collection[str]) -> pa.Table:
    """The table with these columns as bytes with 64-bit offsets, and with a note of them."""
    import pyarrow as pa

    for name in names:
        at = table.schema.get_field_index(name)
        table = table.set_column(at, pa.field(name, pa.large_binary()), table.column(at).cast(pa.large_binary()))
    return table.replace_schema_metadata({**(table.schema.metadata or {}), PICKLED: json.dumps(sorted(names)).encode()})


def _dumped(values: Sequence[object], where: str) -> Objects:
    """Pickles of values."""
    dumps = cloudpickle.dumps if cloudpickle.list_registry_pickle_by_value() else _dumps
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        try:
            out[i] = dumps(value)
        except MemoryError:
            raise
        except Exception as e:
            raise TypeError(
                f"column {where!r} ({types_of(values)}): row {i} has a {_name(type(value))}, which neither Arrow nor "
                f"pickle can hold ({type(e).__name__}: {e}). Remedy: drop the column before the shuffle, or turn it "
                "into values that can be pickled"
            ) from e
    return out


def _dumps(value: object) -> bytes:
    try:
        raw = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return bytes(cloudpickle.dumps(value))
    return raw if b"__main__" not in raw else bytes(cloudpickle.dumps(value))


def types_of(values: Iterable[object]) -> str:
    """Names of the types among some values, for people."""
    names = list(dict.fromkeys(_name(kind) for kind in dict.fromkeys(map(type, values))))
    return ", ".join(names[:TYPES]) + (f" and {len(names) - TYPES} more types" if len(names) > TYPES else "")


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ---- an output


@functools.lru_cache(maxsize=64)
def irregular(schemas: frozenset[KnownSchema], fixed: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of the columns that must be pickled in every table for tables of these schemas to be joined.

    Parameters
    ----------
    fixed
        See `fixed_in`: that tables with different types of these cannot be joined is an error.
    """
    out: set[str] = set().union(*(known.pickled for known in schemas))
    fields: dict[str, dict[pa.DataType, pa.Field]] = {}
    for known in schemas:
        for field in known.schema:
            fields.setdefault(field.name, {})[field.type] = field
    for name, kinds in fields.items():
        if name not in out | fixed and len(kinds) > 1 and not _joinable(list(kinds.values())):
            out.add(name)
    return frozenset(out)


def _joinable(fields: list[pa.Field]) -> bool:
    import pyarrow as pa

    is_a = pa.types
    if len({is_a.is_binary(f.type) or is_a.is_large_binary(f.type) for f in fields if not is_a.is_null(f.type)}) > 1:
        return False
    try:
        pa.unify_schemas([pa.schema([field]) for field in fields], promote_options="permissive")
    except pa.ArrowException:
        return False
    return True


def unified(tables: list[pa.Table], names: Collection[str]) -> Iterator[pa.Table]:
    """The tables with these columns pickled; empties the list."""
    tables.reverse()
    while tables:
        table = tables.pop()
        here = pickled_in((table.schema.metadata or {}).items())
        more = [name for name in names if name not in here and name in table.column_names]
        for name in more:
            at = table.schema.get_field_index(name)
            table = table.set_column(at, name, _repickled(table, name))
        yield noted(_marked(table, {*here, *more}), names, "bytes", "object")


def _repickled(table: pa.Table, name: str) -> pa.Array:
    import pyarrow as pa

    column = table.column(name)
    notes = {note["field_name"]: note for note in (table.schema.pandas_metadata or {}).get("columns", ())}
    of_objects = notes.get(name, {}).get("numpy_type") == "object"
    if of_objects and not (pa.types.is_floating(column.type) or isinstance(column.type, pa.BaseExtensionType)):
        values = column.to_pylist()
    else:
        # Integers beside nulls would become floats, which cannot hold all of them.
        values = column.to_pandas(integer_object_nulls=True).astype(object).array
    return pa.array(_dumped(values, name), type=pa.large_binary())


def noted(table: pa.Table, names: Collection[str], pandas_type: str, numpy_type: str) -> pa.Table:
    """The table with pandas' notes of these columns as those of other types."""
    notes = table.schema.pandas_metadata
    if not notes:
        return table
    for note in notes["columns"]:
        if note["field_name"] in names:
            note.update(pandas_type=pandas_type, numpy_type=numpy_type, metadata=None)
    return table.replace_schema_metadata({**table.schema.metadata, b"pandas": json.dumps(notes).encode()})


def restored(
    frame: pd.DataFrame, names: Collection[str], index_names: Sequence[str], meta: pd.DataFrame
) -> pd.DataFrame:
    """The frame with the values of its pickled columns.

    Parameters
    ----------
    frame
        Made from tables that `unified` gave.
    names
        Of the pickled fields.
    index_names
        Of the fields that are levels of its index.
    meta
        Says which columns are categorical.

    Raises
    ------
    TypeError
        A value cannot be made again here; names the column.
    """
    if not names:
        return frame
    for at, name in enumerate(frame.columns):
        if str(name) in names:  # a join's columns may have other names than text, Arrow's have not
            values = _loaded(frame.iloc[:, at], str(name))
            frame.isetitem(at, _as_meta(values, meta.dtypes.get(name), frame.index))
    if any(name in names for name in index_names):
        levels = [frame.index.get_level_values(i) for i in range(frame.index.nlevels)]
        for i, name in enumerate(index_names):
            if name in names:
                levels[i] = _level_of(_loaded(levels[i], name), meta.index.get_level_values(i).dtype)
        frame.index = index_of(levels, frame.index)
    return frame


def index_of(levels: Sequence[pd.Index | Objects], like: pd.Index) -> pd.Index:
    import pandas as pd

    # Not inferred: objects that happen to be numbers or dates in one output are still objects.
    typed = [at if isinstance(at, pd.Index) else pd.Index(at, dtype=object, tupleize_cols=False) for at in levels]
    if isinstance(like, pd.MultiIndex):
        return pd.MultiIndex.from_arrays(typed, names=like.names)
    return typed[0].rename(like.name)


def _level_of(values: Objects, dtype: object) -> pd.Index | Objects:
    import pandas as pd

    categories = isinstance(dtype, pd.CategoricalDtype)
    return pd.Index(_as_meta(values, dtype, pd.RangeIndex(len(values)))) if categories else values


def _series(values: Objects, index: pd.Index) -> pd.Series:
    import pandas as pd

    return pd.Series(values, index=index, dtype=object)


def _loaded(values: Iterable[bytes | None], where: str) -> Objects:
    raw = list(values)
    out = np.empty(len(raw), dtype=object)
    for i, value in enumerate(raw):
        try:
            out[i] = None if value is None else pickle.loads(value)
        except MemoryError:
            raise
        except Exception as e:
            raise TypeError(
                f"column {where!r}: a value that was pickled on another worker cannot be made again here "
                f"({type(e).__name__}: {e}). Remedy: install the module of its class on every worker"
            ) from e
    return out


def _as_meta(values: Objects, dtype: object, index: pd.Index) -> pd.Series:
    """Values as a categorical where the meta has one, and as objects where that would lose an order."""
    import pandas as pd

    plain = _series(values, index)
    if not isinstance(dtype, pd.CategoricalDtype):
        return plain
    found = pd.Index(plain.dropna().unique(), dtype=object)
    if set(found) <= set(dtype.categories):
        return plain.astype(dtype)
    if found.inferred_type in ("period", "interval"):
        found = found.infer_objects()
    return plain if dtype.ordered else plain.astype(pd.CategoricalDtype(found))
