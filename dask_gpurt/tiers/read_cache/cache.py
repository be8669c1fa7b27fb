"""`ReadCache`: the columns that are kept, and for how long. Any thread."""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import threading
from typing import TYPE_CHECKING, Any

from dask_gpurt.tiers.read_cache import files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

logger = logging.getLogger("distributed.worker.gpurt")

#: what is kept stays until so many times as much as may be kept was read without a use of it. A table of up to so many
#: times that size, read again and again, is then found in part. If the least recently used one always left, none of it
#: would be found
STALE = 4
#: sources that are remembered, and names of columns that were read once, some 100 bytes each
MOST_SOURCES, MOST_NAMES = 4_096, 100_000
#: what a column takes beside its data
_OVERHEAD = 2_048
#: failures of ours after which nothing is kept any more
MOST_ERRORS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """What is read: a file, and what of its rows."""

    path: str
    #: row groups, filters and the like, by `files.plain`
    rows: bytes
    #: columns that come with those that were asked for: of the index, as pandas has noted in the file
    with_index: bool
    #: columns that the reader adds to those that were asked for, such as those of a path ``year=2026``
    added: tuple[str, ...] = ()


class _Column:
    __slots__ = ("data", "field", "nbytes")

    def __init__(self, field: pa.Field, data: pa.ChunkedArray) -> None:
        self.field = field
        self.data = data
        self.nbytes: int = _OVERHEAD + data.get_total_buffer_size()


@dataclasses.dataclass(slots=True, eq=False)
class _Known:
    """What is known of one source."""

    stamp: tuple[int, ...]
    #: of its tables' schema
    metadata: dict[bytes, bytes] | None = None
    #: columns that come along
    along: tuple[str, ...] = ()
    #: of each of its tables; None: it was not read yet
    rows: int | None = None
    #: names of columns that were read
    seen: set[str] = dataclasses.field(default_factory=set)
    columns: dict[str, _Column] = dataclasses.field(default_factory=dict)
    #: its tables are not what `names` says; nothing of it is kept
    odd: bool = False

    def names(self, asked: Sequence[str]) -> list[str]:
        """The columns of a table in which these were asked for, in order, as pyarrow's and Dask's readers have them."""
        here = {*asked}
        return [*asked, *(name for name in self.along if name not in here)]


@dataclasses.dataclass(slots=True)
class _Found:
    """What a read needs still."""

    source: Source
    known: _Known
    kept: dict[str, _Column]
    missing: list[str]


def _table(known: _Known, names: Sequence[str], columns: Mapping[str, _Column]) -> pa.Table:
    import pyarrow as pa

    schema = pa.schema([columns[name].field for name in names], metadata=known.metadata)
    return pa.Table.from_arrays([columns[name].data for name in names], schema=schema)


def _index(metadata: Mapping[bytes, bytes] | None) -> tuple[str, ...]:
    """The columns that pandas has noted as the index; a range has none."""
    noted = json.loads((metadata or {}).get(b"pandas", b"{}"))
    return tuple(name for name in noted.get("index_columns", ()) if isinstance(name, str))


class ReadCache:
    """Columns by what they were read from."""

    def __init__(self) -> None:
        #: held for dictionaries only, and for no table
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[Source, _Known] = collections.OrderedDict()
        #: (what is known, column) -> `_asked_bytes` at its last use, in the order of those
        self._used: collections.OrderedDict[tuple[_Known, str], int] = collections.OrderedDict()
        #: of all columns that anybody asked for
        self._asked_bytes = 0
        #: in all `seen`
        self._names = 0
        self._allowance_bytes = 0
        #: of what is kept
        self.kept_bytes = 0
        #: columns found, and their bytes
        self.hits = 0
        self.spared_bytes = 0
        #: columns dropped for others, for want of memory, or as their file had changed
        self.dropped = 0
        self.errors = 0

    @property
    def allowance_bytes(self) -> int:
        """How much may be kept now."""
        return self._allowance_bytes

    def allow(self, nbytes: int) -> int:
        """Keep so much at most; returns the bytes that were dropped for it."""
        with self._lock:
            self._allowance_bytes = nbytes
            before = self.kept_bytes
            if nbytes <= 0:
                self._clear()
            while self.kept_bytes > nbytes and self._used:
                self._drop(*next(iter(self._used)))
            return before - self.kept_bytes

    def forked(self) -> None:
        """In a child of this process: another thread may hold the lock for good, and the memory is not watched."""
        self._lock = threading.Lock()
        self.allow(0)

    def read(
        self,
        path: str,
        describe: Callable[[], Source | None],
        asked: Sequence[str],
        load: Callable[[list[str]], pa.Table],
    ) -> pa.Table:
        """The table that ``load(asked)`` returns, of columns that are kept and of others that are loaded.

        Parameters
        ----------
        path
            The file.
        describe
            Says what is read of it, after the file was looked at; None: something that cannot be kept.
        asked
            Columns.
        load
            Reads some of them.

        Raises
        ------
        Exception
            What `load` raises.
        """
        found = self._guarded(self._find, path, describe, asked)
        if found is None:
            return load(list(asked))
        if not found.missing:
            whole = self._guarded(_table, found.known, found.known.names(asked), found.kept)
            return load(list(asked)) if whole is None else whole
        table = load(found.missing)
        merged = self._guarded(self._merge, path, asked, found, table)
        if merged is not None:
            return merged
        return table if len(found.missing) == len(asked) else load(list(asked))

    def _guarded(self, step: Callable[..., Any], *args: Any) -> Any:
        """What a step of ours returns; None where it fails, and Dask's reader then does it all."""
        try:
            return step(*args)
        except Exception:
            self.errors += 1
            if self.errors in (1, MOST_ERRORS):
                logger.exception("dask-gpurt: columns of a file were not kept; failure %d", self.errors)
            return None

    def _find(self, path: str, describe: Callable[[], Source | None], asked: Sequence[str]) -> _Found | None:
        if self._allowance_bytes <= 0 or self.errors >= MOST_ERRORS or not asked or len({*asked}) < len(asked):
            return None
        stamp = files.stamp(path)
        source = None if stamp is None else describe()
        if stamp is None or source is None:
            return None
        with self._lock:
            known = self._known.get(source)
            if known is None or known.stamp != stamp:
                self._forget(source)
                while len(self._known) >= MOST_SOURCES or self._names > MOST_NAMES:
                    self._forget(next(iter(self._known)))
                known = self._known[source] = _Known(stamp)
            self._known.move_to_end(source)
            if known.odd:
                return None
            kept: dict[str, _Column] = {}
            if known.rows is not None and all(name in known.columns for name in known.along):
                kept = {name: known.columns[name] for name in known.names(asked) if name in known.columns}
            missing = [name for name in asked if name not in kept]
            for name, column in kept.items():
                self.hits += 1
                self.spared_bytes += column.nbytes - _OVERHEAD
                self._asked_bytes += column.nbytes
                self._used[known, name] = self._asked_bytes
                self._used.move_to_end((known, name))
            return _Found(source, known, kept, missing)

    def _merge(self, path: str, asked: Sequence[str], found: _Found, table: pa.Table) -> pa.Table | None:
        """Keep what was loaded, and return the table that was asked for; None: the pieces do not fit."""
        source, known = found.source, found.known
        columns = {name: _Column(table.schema.field(i), table.column(i)) for i, name in enumerate(table.schema.names)}
        stamp = files.stamp(path)
        with self._lock:
            if self._known.get(source) is not known:  # dropped meanwhile
                return None
            if stamp != known.stamp:
                self._forget(source)
                return None  # never columns of two versions
            if known.rows is None:
                known.metadata, known.rows = table.schema.metadata, table.num_rows
                known.along = (*(_index(known.metadata) if source.with_index else ()), *source.added)
            fits = table.schema.names == known.names(found.missing) and table.num_rows == known.rows
            if not fits or table.schema.metadata != known.metadata:
                self._forget_columns(known)
                known.odd = True
                return None
            for name, column in columns.items():
                self._keep(known, name, column)
        return _table(known, known.names(asked), {**columns, **found.kept}) if found.kept else table

    def _keep(self, known: _Known, name: str, column: _Column) -> None:
        """Keep a column that was just read, if it was read before and there is room. Holding the lock."""
        if name in known.columns:
            return
        self._asked_bytes += column.nbytes
        if name not in known.seen:
            known.seen.add(name)
            self._names += 1
            return
        while self.kept_bytes + column.nbytes > self._allowance_bytes:
            oldest = next(iter(self._used), None)
            if oldest is None or self._asked_bytes - self._used[oldest] < STALE * self._allowance_bytes:
                return
            self._drop(*oldest)
        known.columns[name] = column
        self._used[known, name] = self._asked_bytes
        self.kept_bytes += column.nbytes

    def _drop(self, known: _Known, name: str) -> None:
        del self._used[known, name]
        self.kept_bytes -= known.columns.pop(name).nbytes
        self.dropped += 1

    def _forget_columns(self, known: _Known) -> None:
        for name in list(known.columns):
            self._drop(known, name)

    def _forget(self, source: Source) -> None:
        known = self._known.pop(source, None)
        if known is not None:
            self._forget_columns(known)
            self._names -= len(known.seen)

    def _clear(self) -> None:
        self.dropped += len(self._used)
        self._known.clear()
        self._used.clear()
        self._names = self.kept_bytes = 0

    def statistics(self) -> dict[str, int]:
        """Plain JSON."""
        return {
            "kept_bytes": self.kept_bytes,
            "limit_bytes": self._allowance_bytes,
            "columns": len(self._used),
            "hits": self.hits,
            "spared_bytes": self.spared_bytes,
            "dropped": self.dropped,
            "errors": self.errors,
        }
