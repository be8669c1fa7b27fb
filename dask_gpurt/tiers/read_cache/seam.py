"""Where Dask reads Parquet files: `install` has `CACHE` asked first.

There are two readers. That of pandas' and Dask's default reads a file, or some of its row groups, by a method of an
engine; a subclass, such as cuDF's, is left alone. That of ``filesystem="arrow"`` reads a fragment of a dataset.

They are functions of classes: tasks name them, and there is no object of a worker's own to put ours on. So this changes
classes of the worker's process. Once there, ours stay, and where no worker uses the cache they do what Dask's do: a
graph in this process may name them, and pickle finds a function by its name only while it is there.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import sys
import threading
from typing import Any, cast

from dask_gpurt.errors import SeamMismatch
from dask_gpurt.model.checks import require_call
from dask_gpurt.tiers.read_cache.cache import ReadCache, Source
from dask_gpurt.tiers.read_cache.files import NotPlain, digest, plain

logger = logging.getLogger("distributed.worker.gpurt")

#: of this process
CACHE = ReadCache()
#: modules of Dask that read, the class in them, and its function
_PATHS = ("dask.dataframe.io.parquet.arrow", "ArrowDatasetEngine", "_read_table")
_FRAGMENTS = ("dask.dataframe.dask_expr.io.parquet", "ReadParquetPyarrowFS", "_fragment_to_table")
_lock = threading.Lock()
#: readers that were looked at: ours is in place, or it is not what we know
_done: set[str] = set()
#: the workers of this process that have a cache
_users: set[int] = set()


def install(user: object) -> None:
    """Ask the cache for a worker's reads, as soon as Dask's readers are there: `look` finds them."""
    with _lock:
        _users.add(id(user))
    look()


def uninstall(user: object) -> None:
    """A worker needs it no more. With the last one, all columns are dropped."""
    with _lock:
        _users.discard(id(user))
        if not _users:
            CACHE.allow(0)


def _forked() -> None:
    global _lock
    _lock = threading.Lock()
    _users.clear()
    CACHE.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def look() -> None:
    """Take over the readers that were imported since; cheap. Workers import them with their first task."""
    if len(_done) == 2 or not _users:
        return
    for (module, cls, name), wrap in ((_PATHS, _paths), (_FRAGMENTS, _fragments)):
        # A class that has a name is complete; its module may be half-way through.
        found = getattr(sys.modules.get(module), cls, None)
        if found is None or name in _done:
            continue
        with _lock:
            if name in _done or not _users:
                continue
            _done.add(name)
            try:
                setattr(found, name, wrap(found, vars(found).get(name)))
            except SeamMismatch as e:
                logger.info("columns of Parquet files are not kept: %s", e)


def _paths(engine: Any, stock: Any) -> Any:
    read: Any = getattr(stock, "__func__", None)
    require_call(read, "ArrowDatasetEngine._read_table", *(None,) * 9)

    @functools.wraps(read)
    def read_table(
        cls: Any,
        path: Any,
        fs: Any,
        row_groups: Any,
        columns: Any,
        schema: Any,
        filters: Any,
        partitions: Any,
        partition_keys: Any,
        **kwargs: Any,
    ) -> Any:
        def load(names: list[Any]) -> Any:
            return read(cls, path, fs, row_groups, names, schema, filters, partitions, partition_keys, **kwargs)

        def describe() -> Source | None:
            return _of_path(path, fs, row_groups, columns, schema, filters, partitions, partition_keys, kwargs)

        if CACHE.allowance_bytes <= 0 or cls is not engine or type(path) is not str or type(columns) is not list:
            return load(columns)
        # A name of None is Dask's word for an index without one. Reading by a schema it looks for pandas' name of such,
        # and adds that to the list.
        if None in columns and "__index_level_0__" in getattr(schema, "names", ()):
            return load(columns)
        return CACHE.read(path, describe, [name for name in columns if name is not None], load)

    return classmethod(cast("Any", read_table))


def _of_path(
    path: str,
    fs: Any,
    row_groups: Any,
    columns: list[Any],
    schema: Any,
    filters: Any,
    partitions: Any,
    keys: Any,
    kwargs: dict[str, Any],
) -> Source | None:
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
    from pyarrow.dataset import ParquetFileFormat

    how = dict(kwargs.get("dataset", {}))
    if type(fs) is not LocalFileSystem or how.pop("format", ParquetFileFormat()) != ParquetFileFormat():
        return None
    try:
        # Values of a path are one type where they were asked for, and another one where Dask adds them.
        added = {partition.name: partition.name in columns for partition in partitions or ()}
        rows = plain(row_groups, filters, keys, how, kwargs.get("read"), added)
        for partition in partitions or ():  # up to many thousands
            rows += digest(pickle.dumps((str(partition.keys.dtype), partition.keys.tolist())))
        partitioning = how.get("partitioning")
        unknown = (added and keys is None) or (partitioning and type(partitioning) not in (str, list))
        by_schema = bool(unknown or _by_rows(filters, keys))  # Dask adds no index then
        if by_schema:
            rows += digest(schema.serialize())
    except (NotPlain, AttributeError, LookupError, TypeError, ValueError):  # something odd, which Dask's reader judges
        return None
    along = tuple(name for name, is_asked in added.items() if not is_asked)
    return Source(path, digest(rows), with_index=not by_schema, added=along)


def _by_rows(filters: Any, keys: Any) -> bool:
    """Whether filters are about columns in the file, and not about those of its path only."""
    terms = [term for part in filters or () for term in (part if isinstance(part, list) else [part])]
    return not {term[0] for term in terms} <= {name for name, _ in keys or ()}


def _fragments(_: Any, stock: Any) -> Any:
    read: Any = getattr(stock, "__func__", None)
    require_call(read, "ReadParquetPyarrowFS._fragment_to_table", *(None,) * 4)

    @functools.wraps(read)
    def fragment_to_table(fragment_wrapper: Any, filters: Any, columns: Any, schema: Any) -> Any:
        def load(names: list[Any]) -> Any:
            return read(fragment_wrapper, filters, names, schema)

        # As it came from the scheduler. One that was read before knows the file as it was then.
        packed = getattr(fragment_wrapper, "_fragment_packed", None)
        used = getattr(fragment_wrapper, "_fragment", None) is not None
        if CACHE.allowance_bytes <= 0 or used or type(packed) is not tuple or type(columns) is not list:
            return load(columns)
        path = packed[1] if len(packed) == 5 and type(packed[1]) is str else ""
        return CACHE.read(path, lambda: _of_fragment(packed, filters, schema), columns, load)

    return staticmethod(fragment_to_table)


def _of_fragment(packed: tuple[Any, ...], filters: Any, schema: Any) -> Source | None:
    from pyarrow.fs import LocalFileSystem

    options, path, fs, where, size = packed
    if options is not None or type(pickle.loads(fs)) is not LocalFileSystem:
        return None
    try:
        rows = plain(filters, str(where), size) + digest(schema.serialize())
    except (NotPlain, AttributeError):
        return None
    return Source(path, digest(rows), with_index=False)
