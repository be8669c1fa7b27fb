"""What a worker keeps of a message: its shards, addressed by output partition.

Theory of operation. In memory a chunk is the received frames themselves with, for every shard, the ids and row offsets
of its outputs: `get` slices, nothing is decoded, sorted or copied on arrival. Small inputs come many to a message and
stay one chunk, so the store has as many entries as there were messages, not as there were inputs.

`get` gives *pieces*: (input partition id, rows). Whoever assembles an output sorts pieces by input id, because
messages of several senders interleave. An input id is in exactly one chunk of a run, so the smallest one in a chunk
identifies it.

Spilled, a chunk becomes one list of frames per output: a small head, then one Arrow record batch body per piece. The
schemas stay behind in the `shell`; only dictionaries, which no schema holds, make a piece a whole IPC stream.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.errors import CorruptData

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import pyarrow as pa

    from dask_gpurt.model import Buffer, Chunk
    from dask_gpurt.shuffle.partition import Shard

#: (input partition id, its rows for one output)
Piece = tuple[int, "pa.Table"]
_COUNT = struct.Struct("<I")
_PIECE = struct.Struct("<qiQ")  # input id, index of the schema or -1 for a stream, bytes


class ReceivedChunk:
    """A `model.Chunk` of one message. Immutable; `get` and `encode` may run in any thread.

    Parameters
    ----------
    shards
        At least one.
    nbytes
        Bytes of memory that go with it; None: counted from the shards' tables.
    """

    def __init__(self, shards: Iterable[Shard], nbytes: int | None = None) -> None:
        self._shards = tuple(shards)
        self._offsets = tuple(_offsets(s.lengths) for s in self._shards)
        # Two schemas can be equal and differ in what pandas noted in them.
        index: dict[tuple[pa.Schema, Any], int] = {}
        self._schema_of = tuple(index.setdefault(_identity(s.table.schema), len(index)) for s in self._shards)
        self._schemas: tuple[pa.Schema, ...] = tuple(schema for schema, _ in index)
        self._nbytes = sum(s.table.get_total_buffer_size() for s in self._shards) if nbytes is None else nbytes

    @property
    def chunk_id(self) -> int:
        """Sorts and identifies the chunks of one run."""
        return min(s.input_id for s in self._shards)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def parts(self) -> Collection[int]:
        if not self._shards:
            return ()
        return [int(p) for p in np.unique(np.concatenate([s.parts for s in self._shards]))]

    def get(self, part: int) -> list[Piece]:
        """Pieces of one output. KeyError when it has none here."""
        return [(input_id, table) for input_id, _, table in self._find(part)]

    def _find(self, part: int) -> list[tuple[int, int, pa.Table]]:
        """(input id, index of its schema, its rows) of one output."""
        found = []
        for shard, offsets, schema in zip(self._shards, self._offsets, self._schema_of, strict=True):
            at = np.searchsorted(shard.parts, part)
            if at < len(shard.parts) and shard.parts[at] == part:
                low, high = int(offsets[at]), int(offsets[at + 1])
                found.append((shard.input_id, schema, shard.table.slice(low, high - low)))
        if not found:
            raise KeyError(part)
        return found

    def encode(self, part: int) -> Sequence[Buffer]:
        import pyarrow as pa

        pieces = self._find(part)
        head, bodies = bytearray(_COUNT.pack(len(pieces))), []
        for input_id, index, table in pieces:
            batches = table.to_batches()
            if len(batches) == 1 and not any(_has_dictionary(field.type) for field in table.schema):
                body = batches[0].serialize()
            else:
                sink = pa.BufferOutputStream()
                options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
                with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
                    writer.write_table(table)
                index, body = -1, sink.getvalue()
            head += _PIECE.pack(input_id, index, body.size)
            bodies.append(memoryview(body).cast("B"))
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
            if count != len(frames) - 1 or len(head) != _COUNT.size + count * _PIECE.size:
                raise CorruptData(f"a spilled shard has {len(frames)} frames, its head says {count + 1}")
            pieces = []
            fields = _PIECE.iter_unpack(head[_COUNT.size :])
            for (input_id, index, size), frame in zip(fields, frames[1:], strict=True):
                body = pa.py_buffer(frame)
                if body.size != size:
                    raise CorruptData(f"a spilled shard has {body.size} bytes, its head says {size}")
                if index < 0:
                    table = pa.ipc.open_stream(body).read_all()
                else:
                    batch = pa.ipc.read_record_batch(body, self._schemas[index])
                    table = pa.Table.from_batches([batch])
                pieces.append((input_id, table))
        except (pa.ArrowException, OSError, IndexError, struct.error) as e:
            raise CorruptData(f"a spilled shard does not decode: {e}") from e
        return pieces

    def shell(self) -> Chunk:
        empty = ReceivedChunk((), 0)
        empty._schemas = self._schemas
        return empty


def _identity(schema: pa.Schema) -> tuple[pa.Schema, Any]:
    return schema, tuple((schema.metadata or {}).items())


def _offsets(lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    out = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def _has_dictionary(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return pa.types.is_dictionary(kind) or any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))
