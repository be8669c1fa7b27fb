"""Where Dask reads Parquet files: `install` asks `CACHE` first, `uninstall` gives Dask its functions back.

There are two readers. That of pandas' and Dask's default reads a file, or some of its row groups, by a method of an
engine; a subclass, such as cuDF's, is left alone. That of ``filesystem="arrow"`` reads a fragment of a dataset.

They are functions of classes: tasks name them, and there is no object of a worker's own to put ours on. So this changes
classes of the worker's process, and what it puts there does what Dask's own would do.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import threading
from typing import Any, cast

from dask_gpurt.errors import SeamMismatch
from dask_gpurt.model.checks import require_call
from dask_gpurt.tiers.read_cache.cache import ReadCache, Source
from dask_gpurt.tiers.read_cache.files import NotPlain, plain

logger = logging.getLogger("distributed.worker.gpurt")

#: of this process
CACHE = ReadCache()
#: modules of Dask that read, the class in them, and its function
_PATHS = ("dask.dataframe.io.parquet.arrow", "ArrowDatasetEngine", "_read_table")
_FRAGMENTS = ("dask.dataframe.dask_expr.io.parquet", "ReadParquetPyarrowFS", "_fragment_to_table")
_lock = threading.Lock()
#: what was put in place: class, name, Dask's own, ours
_put: list[tuple[type, str, Any, Any]] = []
#: readers that were looked at: in place, or not what we know
_done: set[str] = set()
#: the workers of this process that have a cache
_users: set[int] = set()


def install(user: object) -> None:
    """Ask the cache for a worker's reads, as soon as Dask's readers are there: `look` finds them."""
    with _lock:
        _users.add(id(user))
    look()


def uninstall(user: object) -> None:
    """A worker needs it no more. With the last one, Dask's functions are put back and all columns are dropped."""
    with _lock:
        _users.discard(id(user))
        if _users:
            return
        for cls, name, stock, ours in _put:
            if vars(cls).get(name) is ours:  # else somebody has wrapped it, and it goes on as Dask's does
                setattr(cls, name, stock)
        _put.clear()
        _done.clear()
        CACHE.allow(0)


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
                stock = vars(found).get(name)
                ours = wrap(found, stock)
            except SeamMismatch as e:
                logger.info("columns of Parquet files are not kept: %s", e)
                continue
            _put.append((found, name, stock, ours))
            setattr(found, name, ours)


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
        source = None
        if cls is engine and type(path) is str and type(columns) is list:
            source = _of_path(path, fs, row_groups, schema, filters, partitions, partition_keys, kwargs)
        # A name of None is Dask's word for an index without one. Reading by a schema it looks for pandas' name of such.
        if source is None or (None in columns and not source.with_index and "__index_level_0__" in schema.names):
            return read(cls, path, fs, row_groups, columns, schema, filters, partitions, partition_keys, **kwargs)

        def load(names: list[str]) -> Any:
            return read(cls, path, fs, row_groups, names, schema, filters, partitions, partition_keys, **kwargs)

        return CACHE.read(source, [name for name in columns if name is not None], load)

    return classmethod(cast("Any", read_table))


def _of_path(
    path: str, fs: Any, row_groups: Any, schema: Any, filters: Any, partitions: Any, keys: Any, kwargs: dict[str, Any]
) -> Source | None:
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
    from pyarrow.dataset import ParquetFileFormat

    if type(fs) is not LocalFileSystem:
        return None
    try:
        named = [(partition.name, list(partition.keys)) for partition in partitions or ()]
        how = dict(kwargs.get("dataset", {}))
        if "format" in how and how.pop("format") != ParquetFileFormat():
            return None
        rows = plain(row_groups, filters, named, keys, how, kwargs.get("read"))
        added = tuple(name for name, _ in named)
        partitioning = how.get("partitioning")
        unknown = (named and keys is None) or (partitioning and type(partitioning) not in (str, list))
        if unknown or _by_rows(filters, keys):
            # Dask reads by a schema then, and adds no index.
            return Source(path, (rows, _digest(schema)), with_index=False, added=added)
        return Source(path, rows, with_index=True, added=added)
    except (NotPlain, AttributeError, TypeError, ValueError):
        return None


def _digest(schema: Any) -> bytes:
    # An older pyarrow cannot hash a schema that has metadata; as text, types of many fields are cut.
    return hashlib.blake2b(schema.serialize(), digest_size=16).digest()


def _by_rows(filters: Any, keys: Any) -> bool:
    """Whether filters are about columns in the file, and not about those of its path only."""
    terms = [term for part in filters or () for term in (part if isinstance(part, list) else [part])]
    return not {term[0] for term in terms} <= {name for name, _ in keys or ()}


def _fragments(_: Any, stock: Any) -> Any:
    read: Any = getattr(stock, "__func__", None)
    require_call(read, "ReadParquetPyarrowFS._fragment_to_table", *(None,) * 4)

    @functools.wraps(read)
    def fragment_to_table(fragment_wrapper: Any, filters: Any, columns: Any, schema: Any) -> Any:
        source = None
        if type(columns) is list:
            source = _of_fragment(getattr(fragment_wrapper, "fragment", fragment_wrapper), filters, schema)
        if source is None:
            return read(fragment_wrapper, filters, columns, schema)
        return CACHE.read(source, columns, lambda names: read(fragment_wrapper, filters, names, schema))

    return staticmethod(fragment_to_table)


def _of_fragment(fragment: Any, filters: Any, schema: Any) -> Source | None:
    from pyarrow.fs import LocalFileSystem

    if type(getattr(fragment, "filesystem", None)) is not LocalFileSystem or fragment.buffer is not None:
        return None
    try:
        groups = [group.id for group in fragment.row_groups]
        rows = plain(groups, filters, str(fragment.partition_expression))
    except (NotPlain, AttributeError, OSError):
        return None
    return Source(fragment.path, (rows, _digest(schema)), with_index=False)
