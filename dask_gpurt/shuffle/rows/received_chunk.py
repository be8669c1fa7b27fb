"""What a worker keeps of a message: its shards, addressed by output partition.

Theory of operation. In memory a chunk is the received frames themselves with, for every shard, the ids and row offsets
of its outputs: `get` slices, nothing is decoded, sorted or copied on arrival. Small inputs come many to a message and
stay one chunk, so the store has as many entries as there were messages, not as there were inputs.

`get` gives *pieces*: (input partition id, rows), the rows as a place in their shard's table (`Slice`): slicing a table
makes a new array of every column, which costs more than copying the few rows that a piece has when partitions are many.
Whoever assembles an output sorts pieces by input id, because
messages of several senders interleave. The shards of one input that are large enough to be several are a chunk each,
so that a store gives their memory back as their outputs are taken.

Spilled, a chunk becomes one list of frames per output: a small head, then one Arrow record batch body per piece. The
schemas stay behind in the `shell`; only dictionaries, which no schema holds, make a piece a whole IPC stream.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.errors import CorruptData
from dask_gpurt.memory.malloc import heap
from dask_gpurt.shuffle.rows.arrow_buffers import pieces_of
from dask_gpurt.shuffle.rows.identity_cache import ByObject

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import pyarrow as pa

    from dask_gpurt.model import Buffer, Chunk
    from dask_gpurt.shuffle.rows.partition import Shard

#: (input partition id, its rows for one output)
Piece = tuple[int, "Slice"]
_COUNT = struct.Struct("<I")
# input id, index of the schema or -1 for a stream, bytes, bytes of the input ids in a frame of their own or 0
_PIECE = struct.Struct("<qiQQ")


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
        """Per column: a numpy view on its values, else `Letters` or the Arrow array; empty when not all are simple.

        Simple are columns in one piece, without nulls where there is a numpy dtype of the same values; and text.
        """
        if self._views is None:
            arrays = self._arrays or pieces_of(self.table)
            self._views = () if arrays is None else tuple(_views(arrays, self.schema.kinds))
        return self._views

    def bundle(self, fields: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
        """Several columns of one dtype as the rows of one array, when they lie in memory like that; needs `views`.

        Columns side by side in the schema do, after `gather.gather`: one copy for all of them instead of one each.
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
        """As a table; views."""
        return self.rows.table.slice(self.low, self.high - self.low)

    @property
    def inputs(self) -> np.ndarray[Any, Any] | None:
        """Id of the input partition of each row, where they are of several."""
        inputs = self.rows.inputs
        return None if inputs is None else inputs[self.low : self.high]

    @classmethod
    def whole(
        cls, table: pa.Table, known: KnownSchema | None = None, inputs: np.ndarray[Any, Any] | None = None
    ) -> Slice:
        return cls(Rows(table, known, inputs), 0, table.num_rows)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KnownSchema:
    """A schema that compares by identity: equal schemas with equal notes of pandas are one object, while it is used."""

    schema: pa.Schema
    #: per field, how its values are looked at: a numpy dtype, `_TEXT`, `_BITS`, or None when it is not simple
    kinds: tuple[Any, ...]


def schema_of(schema: pa.Schema) -> KnownSchema:
    return _known(schema, tuple((schema.metadata or {}).items()))


@functools.lru_cache(maxsize=256)
def _known(schema: pa.Schema, metadata: Any) -> KnownSchema:
    return KnownSchema(schema, tuple(_kind(field.type) for field in schema))


#: as `schema_of`, for one and the same object many times
known_schema = ByObject(schema_of)
_TEXT, _BITS = "text", "bits"


def _kind(kind: pa.DataType) -> Any:
    import pyarrow as pa

    t = pa.types
    if t.is_large_string(kind):
        return _TEXT
    if t.is_boolean(kind):
        return _BITS
    if t.is_integer(kind) or t.is_floating(kind) or t.is_duration(kind) or (t.is_timestamp(kind) and not kind.tz):
        return np.dtype(kind.to_pandas_dtype())
    return None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Letters:
    """A column of text taken apart."""

    array: pa.LargeStringArray
    #: where each text ends, after where the first begins; None when there are nulls, or the array begins inside
    offsets: np.ndarray[Any, Any] | None
    letters: np.ndarray[Any, Any]

    @classmethod
    def of(cls, array: pa.LargeStringArray) -> Letters:
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


def _views(arrays: Sequence[pa.Array], kinds: tuple[Any, ...]) -> Iterable[Any]:
    # Not `in`: to numpy, None equals the dtype of doubles.
    if any(kind is None for kind in kinds):
        return ()
    views: list[Any] = []
    for array, kind in zip(arrays, kinds, strict=True):
        if kind is _TEXT:
            views.append(Letters.of(array))
        elif array.null_count:
            return ()
        elif kind is _BITS:
            views.append(array)
        else:
            # Arrow's own conversion takes four times as long.
            data, n = array.buffers()[1], len(array)
            values = np.frombuffer(data, kind, n, array.offset * kind.itemsize) if n else np.empty(0, kind)
            views.append(values)
    return views


class ReceivedChunk:
    """A `model.Chunk` of one message. Immutable; `get` and `encode` may run in any thread.

    Parameters
    ----------
    shards
        At least one.
    nbytes
        Bytes of memory that go with it; None: counted from the shards.
    """

    def __init__(self, shards: Iterable[Shard], nbytes: int | None = None) -> None:
        self._shards = tuple(shards)
        # As memoryviews their items are Python's integers, at a third of the time of numpy's.
        # Ascending, to be searched; their rows lie in the order in which the outputs are made.
        places = [None if (s.parts[1:] >= s.parts[:-1]).all() else np.argsort(s.parts) for s in self._shards]
        self._parts = tuple(
            _items(s.parts if at is None else np.ascontiguousarray(s.parts[at]), "I")
            for s, at in zip(self._shards, places, strict=True)
        )
        self._places = tuple(None if at is None else _items(at.astype(np.int64), "q") for at in places)
        self._offsets = tuple(_items(_offsets(s.lengths), "q") for s in self._shards)
        self._rows = tuple(
            Rows(s.table, s.known, s.inputs, None if s.apart is None else s.arrays) for s in self._shards
        )
        # Two schemas can be equal and differ in what pandas noted in them.
        index: dict[KnownSchema, int] = {}
        self._schema_of = tuple(index.setdefault(rows.schema, len(index)) for rows in self._rows)
        self._schemas: tuple[KnownSchema, ...] = tuple(index)
        self._nbytes = sum(s.nbytes for s in self._shards) if nbytes is None else nbytes

    @property
    def chunk_id(self) -> tuple[int, int]:
        """Sorts and identifies the chunks of one run: no two have rows of the same input for the same output."""
        return min((s.input_id, int(s.parts[0]) if len(s.parts) else -1) for s in self._shards)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def parts(self) -> Collection[int]:
        if not self._shards:
            return ()
        if len(self._parts) == 1:
            return self._parts[0].tolist()
        return sorted(set().union(*self._parts))

    def get(self, part: int) -> list[Piece]:
        """Pieces of one output. KeyError when it has none here."""
        if len(self._parts) > 1:
            return [(input_id, rows) for input_id, _, rows in self._find(part)]
        # Most chunks of a large shuffle, for every output: what `_find` does for one shard.
        parts = self._parts[0] if self._parts else ()
        at = bisect.bisect_left(parts, part)
        if at == len(parts) or parts[at] != part:
            raise KeyError(part)
        if (places := self._places[0]) is not None:
            at = places[at]
        offsets = self._offsets[0]
        return [(self._shards[0].input_id, Slice(self._rows[0], offsets[at], offsets[at + 1]))]

    def _find(self, part: int) -> list[tuple[int, int, Slice]]:
        """(input id, index of its schema, its rows) of one output."""
        found = []
        for i, parts in enumerate(self._parts):
            at = bisect.bisect_left(parts, part)
            if at < len(parts) and parts[at] == part:
                offsets, places = self._offsets[i], self._places[i]
                at = at if places is None else places[at]
                rows = Slice(self._rows[i], offsets[at], offsets[at + 1])
                found.append((self._shards[i].input_id, self._schema_of[i], rows))
        if not found:
            raise KeyError(part)
        return found

    def encode(self, part: int) -> Sequence[Buffer]:
        import pyarrow as pa

        pieces = self._find(part)
        head, bodies = bytearray(_COUNT.pack(len(pieces))), []
        for input_id, index, rows in pieces:
            table = rows.table()
            batches = table.to_batches()
            if len(batches) == 1 and not any(has_dictionary(field.type) for field in table.schema):
                body = batches[0].serialize(heap.pool)
            else:
                sink = pa.BufferOutputStream()
                options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
                with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
                    writer.write_table(table)
                index, body = -1, sink.getvalue()
            inputs = rows.inputs
            head += _PIECE.pack(input_id, index, body.size, 0 if inputs is None else inputs.nbytes)
            bodies.append(memoryview(body).cast("B"))
            if inputs is not None:
                bodies.append(_items(np.ascontiguousarray(inputs), "B"))
        return [bytes(head), *bodies]

    def decode(self, frames: Sequence[Buffer]) -> list[Piece]:
        """Pieces from the frames of `encode`; views on them.

        Raises
        ------
        CorruptData
            The frames are not what `encode` made for this chunk.
        """
        import pyarrow as pa

        try:
            head = memoryview(frames[0]).cast("B")
            (count,) = _COUNT.unpack_from(head)
            if len(head) != _COUNT.size + count * _PIECE.size:
                raise CorruptData(f"the head of a spilled shard has {len(head)} bytes and says {count} pieces")
            pieces = []
            fields = list(_PIECE.iter_unpack(head[_COUNT.size :]))
            wanted = 1 + count + sum(ids > 0 for *_, ids in fields)
            if wanted != len(frames):
                raise CorruptData(f"a spilled shard has {len(frames)} frames, its head says {wanted}")
            rest = iter(frames[1:])
            for input_id, index, size, ids in fields:
                body = pa.py_buffer(next(rest))
                inputs = np.frombuffer(next(rest), dtype=np.int64) if ids else None
                if body.size != size:
                    raise CorruptData(f"a spilled shard has {body.size} bytes, its head says {size}")
                if index < 0:
                    rows = Slice.whole(pa.ipc.open_stream(body).read_all(), None, inputs)
                else:
                    known = self._schemas[index]
                    batch = pa.ipc.read_record_batch(body, known.schema)
                    rows = Slice.whole(pa.Table.from_batches([batch]), known, inputs)
                if inputs is not None and (inputs.nbytes != ids or len(inputs) != rows.high):
                    raise CorruptData(f"a spilled shard has {len(inputs)} input ids for {rows.high} rows")
                pieces.append((input_id, rows))
        except (pa.ArrowException, OSError, IndexError, ValueError, struct.error) as e:
            raise CorruptData(f"a spilled shard does not decode: {e}") from e
        return pieces

    def shell(self) -> Chunk:
        empty = ReceivedChunk((), 0)
        empty._schemas = self._schemas
        return empty


def _items(values: Any, kind: str) -> memoryview:
    return memoryview(values).cast("B").cast(kind)  # type: ignore[call-overload]


def _offsets(lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    out = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def has_dictionary(kind: pa.DataType) -> bool:
    """Whether values of a type are kept, at any depth, as indices into a dictionary."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return pa.types.is_dictionary(kind) or any(has_dictionary(kind.field(i).type) for i in range(kind.num_fields))
