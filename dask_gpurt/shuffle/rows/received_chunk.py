"""The shards of one message, addressed by output: what a worker stores of what it receives.

`ReceivedChunk` implements `model.Chunk`. `get` gives the pieces of an output, `encode` and `decode` take them through a
lower tier.

Theory of operation. In memory a chunk is the received frames with, for every shard, the ids and row offsets of its
outputs. Nothing is decoded, sorted or copied on arrival. Small inputs come many to a message and stay one chunk, so a
store has as many entries as there were messages. A large shard is a chunk of its own, so that a store gives its memory
back as its outputs are taken.

Pieces come in no order across chunks, as messages of several senders interleave. `assemble` sorts them by input id.

Spilled, a chunk is one list of frames per output: a small head, then one Arrow record batch body per piece. The schemas
stay in memory, in the `shell`. Dictionaries are in no schema, so a piece with one is a whole IPC stream.
"""

from __future__ import annotations

import bisect
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.errors import CorruptData
from dask_gpurt.memory.malloc import heap
from dask_gpurt.shuffle.rows.arrow_buffers import stream
from dask_gpurt.shuffle.rows.schema import has_dictionary
from dask_gpurt.shuffle.rows.slices import Rows, Slice

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dask_gpurt.model import Buffer, Chunk
    from dask_gpurt.shuffle.rows.partition import Shard
    from dask_gpurt.shuffle.rows.schema import KnownSchema
    from dask_gpurt.shuffle.rows.slices import Piece

_COUNT = struct.Struct("<I")
# input id, index of the schema or -1 for a stream, bytes, bytes of the input ids in a frame of their own or 0
_PIECE = struct.Struct("<qiQQ")


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
        self.nbytes = sum(s.nbytes for s in self._shards) if nbytes is None else nbytes

    @property
    def chunk_id(self) -> tuple[int, int]:
        """Sorts and identifies the chunks of one run: no two have rows of the same input for the same output."""
        return min((s.input_id, int(s.parts[0]) if len(s.parts) else -1) for s in self._shards)

    @property
    def parts(self) -> Collection[int]:
        """Outputs that have rows here."""
        if not self._shards:
            return ()
        if len(self._parts) == 1:
            return self._parts[0].tolist()
        return sorted(set().union(*self._parts))

    def get(self, part: int) -> list[Piece]:
        """Pieces of one output.

        Raises
        ------
        KeyError
            It has no rows here.
        """
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
        """The pieces of one output as frames to write."""
        pieces = self._find(part)
        head, bodies = bytearray(_COUNT.pack(len(pieces))), []
        for input_id, index, rows in pieces:
            table = rows.table()
            batches = table.to_batches()
            if len(batches) == 1 and not any(has_dictionary(field.type) for field in table.schema):
                body = batches[0].serialize(heap.pool)
            else:
                index, body = -1, stream(table)
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
        except MemoryError:  # Arrow's too, which is an ArrowException: says nothing about the bytes
            raise
        except (pa.ArrowException, OSError, IndexError, ValueError, struct.error) as e:
            raise CorruptData(f"a spilled shard does not decode: {e}") from e
        return pieces

    def shell(self) -> Chunk:
        """The chunk without rows: what `decode` needs."""
        empty = ReceivedChunk((), 0)
        empty._schemas = self._schemas
        return empty


def _items(values: Any, kind: str) -> memoryview:
    return memoryview(values).cast("B").cast(kind)  # type: ignore[call-overload]


def _offsets(lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    out = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=out[1:])
    return out
