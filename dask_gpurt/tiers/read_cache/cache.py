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
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import pyarrow as pa

logger = logging.getLogger("distributed.worker.gpurt")

#: what is kept stays until so many times as much as may be kept was read without a use of it. Whoever reads a table of
#: up to so many times this size in turns then finds a part of it each time; with the least recently used one leaving
#: first, nothing.
STALE = 4
#: reads that are remembered; of each some 300 bytes and 100 for a column
MOST_SOURCES = 4_096
#: failures of ours after which nothing is kept any more
MOST_ERRORS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """What is read: a file, and what of its rows."""

    path: str
    #: row groups, filters and the like, by `files.plain`
    rows: Hashable
    #: columns that come with those that were asked for: of the index, as pandas has noted in the file
    with_index: bool
    #: columns that the reader adds, such as those of a path ``year=2026``
    added: tuple[str, ...] = ()


class _Column:
    __slots__ = ("data", "field", "nbytes")

    def __init__(self, field: pa.Field, data: pa.ChunkedArray) -> None:
        self.field = field
        self.data = data
        self.nbytes: int = data.get_total_buffer_size()


@dataclasses.dataclass(slots=True)
class _Known:
    """What is known of one source."""

    stamp: tuple[int, ...]
    #: of its tables' schema; None: it was not read yet
    metadata: dict[bytes, bytes] | None = None
    index: tuple[str, ...] | None = None
    rows: int = 0
    #: names of columns that were read
    seen: set[str] = dataclasses.field(default_factory=set)
    columns: dict[str, _Column] = dataclasses.field(default_factory=dict)
    #: its tables are not what `names` says; nothing of it is kept
    odd: bool = False

    def names(self, source: Source, asked: Sequence[str]) -> list[str]:
        """The columns of a table in which these were asked for, in order, as pyarrow's and Dask's readers have them."""
        extra = (*(self.index or ()), *source.added)
        return [*asked, *(name for name in extra if name not in asked)]


@dataclasses.dataclass(slots=True)
class _Found:
    """What a read needs still."""

    known: _Known
    kept: dict[str, _Column]
    missing: list[str]
    #: all of it; None: some columns are missing
    table: pa.Table | None = None


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
        self._lock = threading.Lock()
        self._known: collections.OrderedDict[Source, _Known] = collections.OrderedDict()
        #: (source, column) -> `_asked_bytes` at its last use, in the order of those
        self._used: collections.OrderedDict[tuple[Source, str], int] = collections.OrderedDict()
        #: of all columns that anybody asked for
        self._asked_bytes = 0
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
        self._allowance_bytes = nbytes
        if self.kept_bytes <= nbytes:
            return 0
        with self._lock:
            before = self.kept_bytes
            while self.kept_bytes > nbytes:
                self._drop(*next(iter(self._used)))
            if not nbytes:
                self._known.clear()
            return before - self.kept_bytes

    def read(self, source: Source, asked: Sequence[str], load: Callable[[list[str]], pa.Table]) -> pa.Table:
        """The table that ``load(asked)`` returns, of columns that are kept and of others that are loaded.

        Raises
        ------
        Exception
            What `load` raises.
        """
        found = self._guarded(self._find, source, asked)
        if found is None:
            return load(list(asked))
        if not found.missing:
            return found.table
        table = load(found.missing)
        merged = self._guarded(self._merge, source, asked, found, table)
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

    def _find(self, source: Source, asked: Sequence[str]) -> _Found | None:
        if self._allowance_bytes <= 0 or self.errors >= MOST_ERRORS or not asked or len({*asked}) < len(asked):
            return None
        stamp = files.stamp(source.path)
        if stamp is None:
            return None
        with self._lock:
            known = self._known.get(source)
            if known is None or known.stamp != stamp:
                self._forget(source)
                known = self._known[source] = _Known(stamp)
                while len(self._known) > MOST_SOURCES:
                    self._forget(next(iter(self._known)))
            self._known.move_to_end(source)
            if known.odd:
                return None
            names = known.names(source, asked)
            kept = {name: column for name in names if (column := known.columns.get(name)) is not None}
            if known.index is None or any(name not in kept for name in names if name not in asked):
                kept = {}  # what comes along comes with a read of anything
            missing = [name for name in asked if name not in kept]
            found = _Found(known, kept, missing)
            if not missing:
                found.table = _table(known, names, kept)
            for name, column in kept.items():
                self.hits += 1
                self.spared_bytes += column.nbytes
                self._asked_bytes += column.nbytes
                self._used[source, name] = self._asked_bytes
                self._used.move_to_end((source, name))
            return found

    def _merge(self, source: Source, asked: Sequence[str], found: _Found, table: pa.Table) -> pa.Table | None:
        """Keep what was loaded, and return the table that was asked for; None: the pieces do not fit."""
        stamp = files.stamp(source.path)
        with self._lock:
            known = found.known
            if stamp != known.stamp:
                if self._known.get(source) is known:
                    self._forget(source)
                return None  # never columns of two versions
            if known.index is None:
                known.metadata, known.rows = table.schema.metadata, table.num_rows
                known.index = _index(known.metadata) if source.with_index else ()
            fits = table.schema.names == known.names(source, found.missing) and table.num_rows == known.rows
            if not fits or table.schema.metadata != known.metadata:
                known.odd = True
                return None
            for i, name in enumerate(table.schema.names):
                self._keep(source, known, name, _Column(table.schema.field(i), table.column(i)))
            if not found.kept:
                return table
            loaded = {name: _Column(table.schema.field(name), table.column(name)) for name in found.missing}
            return _table(known, known.names(source, asked), {**loaded, **found.kept})

    def _keep(self, source: Source, known: _Known, name: str, column: _Column) -> None:
        """Keep a column that was just read, if it was read before and there is room. Holding the lock."""
        if name in known.columns:
            return
        nbytes = column.nbytes
        self._asked_bytes += nbytes
        if name not in known.seen:
            known.seen.add(name)
            return
        if self._known.get(source) is not known:  # dropped meanwhile
            return
        while self.kept_bytes + nbytes > self._allowance_bytes:
            oldest = next(iter(self._used), None)
            if oldest is None or self._asked_bytes - self._used[oldest] < STALE * self._allowance_bytes:
                return
            self._drop(*oldest)
        known.columns[name] = column
        self.kept_bytes += nbytes
        self._used[source, name] = self._asked_bytes

    def _drop(self, source: Source, name: str) -> None:
        del self._used[source, name]
        self.kept_bytes -= self._known[source].columns.pop(name).nbytes
        self.dropped += 1

    def _forget(self, source: Source) -> None:
        known = self._known.get(source)
        if known is not None:
            for name in list(known.columns):
                self._drop(source, name)
            del self._known[source]

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
