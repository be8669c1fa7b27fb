"""Turn shards into the frames of a message and back. Pure functions: no I/O, no event loop, no pickle.

`encode` makes a `Parcel` of a shard, `pack` the frames of a message of parcels; `unpack` gives the shards back.

Theory of operation. A *message* carries shards (one input partition's rows for one worker) to one peer. It is a list of
frames; distributed's comm sends each large frame from where it lies and receives it into memory of its own, so payload
bytes are never copied or pickled here::

    frame 0   head   prefix: magic, version, length and xxh3-64 of the rest
                     run tag (xxh3-64 of the shuffle's id), run id, sequence number of the sender, counts
                     schemas: key, length, bytes (only those the peer does not have yet)
                     shards: input id, split, kind, schema key, rows, counts, xxh3-64 of its buffers; then its output
                     ids, rows per output, and (frame, offset, length) of each buffer
    frame 1   blob   all buffers shorter than `SMALL`, at multiples of 64
    frame 2.. a large buffer, or several that follow one another in memory, as those of one gather do: the receiver's
              memory is then one large allocation, which has fewer page faults

A shard is *raw* (the buffers of its columns, one by one; types that are a validity bitmap, offsets and data), a
*stream* (Arrow IPC, self-contained; nested, dictionary and extension types, or more than one batch), or *packed* (of
device frames; see `packed.to_buffers`).

Invariants of `unpack`: nothing is allocated by a number from the message before that number was compared with the bytes
that are there; every byte is covered by a checksum (head by its own, each buffer by its shard's) or compared to zero
(padding of the blob), but for what lies on a device (see `packed`); whatever is wrong raises `WireError`, and then
nothing of the message is used. A checksum is against accidents, not against attackers: the comm under it authenticates
peers.

Rejected: one IPC stream per shard (copies everything once more, into fresh memory, which costs 3-4 x the copy itself);
pickle-5 of the table (pickles whole parents of slices).
"""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.rows import packed
from dask_gpurt.shuffle.rows.arrival import Reader, block_of
from dask_gpurt.shuffle.rows.arrow_buffers import arrays_of, buffers_of, stream
from dask_gpurt.shuffle.rows.partition import Shard
from dask_gpurt.shuffle.rows.schema import known_schema, schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping, Sequence

    import pyarrow as pa

    from dask_gpurt.model import Buffer

MAGIC = b"GPRT"
VERSION = 3
#: buffers shorter than this many bytes travel together in the blob
SMALL = 1 << 16
_ALIGN = 64
_RAW, _STREAM, _PACKED = 0, 1, 2
_PREFIX = struct.Struct("<4sHHQQ")  # magic, version, flags, bytes of the head after the prefix, xxh3-64 of them
_HEAD = struct.Struct("<QqQIII")  # run tag, run id, sequence, schemas, shards, frames
_SCHEMA = struct.Struct("<QI")  # key, bytes
_SHARD = struct.Struct("<qQBQQIIQ")  # input id, split, kind, schema key, rows, outputs, buffers, xxh3-64 of these
_LENGTH = struct.Struct("<q")
_NO_BUFFER = _LENGTH.pack(-1)
_BUFFER = struct.Struct("<IQQ")  # frame, offset, length; frame 0: no buffer there (column without nulls)


@dataclasses.dataclass(slots=True)
class Parcel:
    """One shard made ready to be sent; holds the memory of its rows until it is acknowledged."""

    input_id: int
    kind: int
    schema_key: int
    schema: bytes
    rows: int
    parts: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]
    buffers: tuple[pa.Buffer | packed.OnDevice | None, ...]
    digest: int
    #: bytes of the buffers
    nbytes: int
    #: packs on the device: `pack` finds out where they are by then, and until then there are no buffers
    packs: packed.PackedRows | None = None
    split: int = 0  # see `Shard.split`; entered once all parcels of an input for a worker are made

    def __sizeof__(self) -> int:  # what distributed's send buffer charges its limiter with
        return self.nbytes + self.parts.nbytes + self.lengths.nbytes + 256


def run_tag(shuffle_id: str) -> int:
    """What stands for a shuffle's id in messages."""
    return int(xxhash.xxh3_64_intdigest(shuffle_id.encode()))


def encode(shard: Shard, schema: tuple[int, bytes] | None = None) -> Parcel:
    """Make a shard ready to be sent. Copies nothing when its types allow; any thread.

    Parameters
    ----------
    schema
        `schema_bytes` of the shard's table, when the caller has it already.
    """
    key, raw_schema = schema or schema_bytes(shard.table.schema)
    arrays = shard.arrays
    buffers = None if arrays is None else buffers_of(arrays, (shard.known or schema_of(shard.table.schema)).schema)
    kind = _RAW
    if buffers is None:
        kind, key, raw_schema, buffers = _STREAM, 0, b"", (stream(shard.table),)
    return Parcel(
        input_id=shard.input_id,
        kind=kind,
        schema_key=key,
        schema=raw_schema,
        rows=shard.table.num_rows,
        parts=np.ascontiguousarray(shard.parts, dtype="<u4"),
        lengths=np.ascontiguousarray(shard.lengths, dtype="<u8"),
        buffers=buffers,
        digest=_digest(buffers),
        nbytes=sum(b.size for b in buffers if b is not None),
    )


def encode_packed(shard: Shard) -> Parcel:
    """Make a shard of packs ready to be sent. What is on the device stays there until then. Any thread."""
    rows: packed.PackedRows = shard.table
    parcel = Parcel(
        input_id=shard.input_id,
        kind=_PACKED,
        schema_key=0,
        schema=b"",
        rows=rows.num_rows,
        parts=np.ascontiguousarray(shard.parts, dtype="<u4"),
        lengths=np.ascontiguousarray(shard.lengths, dtype="<u8"),
        buffers=(),
        digest=0,
        nbytes=rows.nbytes,
        packs=rows,
    )
    return parcel if packed.where_they_are(rows) else on_host(parcel)


def on_host(parcel: Parcel) -> Parcel:
    """A parcel whose bytes are in host memory; stages its packs. Any thread."""
    if parcel.packs is None:
        return parcel
    buffers = packed.to_buffers(parcel.packs)
    return dataclasses.replace(
        parcel, packs=None, buffers=buffers, digest=_digest(buffers), nbytes=sum(b.size for b in buffers)
    )


def ready(parcel: Parcel, direct: bool) -> bool:
    """Whether `pack` need not wait for the device: all bytes are on the host or, where they may go so, all there."""
    return parcel.packs is None or (direct and packed.where_they_are(parcel.packs) is not None)


def _as_it_is(parcel: Parcel) -> Parcel:
    """A parcel with its buffers, on the device if all of them are there now."""
    if parcel.packs is None:
        return parcel
    buffers = packed.where_they_are(parcel.packs)
    if buffers is None:  # device memory was short meanwhile
        return on_host(parcel)
    return dataclasses.replace(parcel, buffers=buffers, digest=_digest(buffers))


def schema_bytes(schema: pa.Schema) -> tuple[int, bytes]:
    """(key, IPC bytes) of a schema; the key is their xxh3-64."""
    raw = schema.serialize().to_pybytes()
    return int(xxhash.xxh3_64_intdigest(raw)), raw


def pack(
    tag: int, run_id: int, sequence: int, parcels: Sequence[Parcel], known: frozenset[int] | set[int] = frozenset()
) -> list[Any]:
    """Frames of one message: memoryviews, and the buffers of what is on the device.

    Parameters
    ----------
    tag, run_id
        Of the run; `unpack` compares them.
    sequence
        Number of the message, for people.
    known
        Keys of schemas that the peer has acknowledged in this run; they are left out.
    """
    schemas: dict[int, bytes] = {}
    body = bytearray()
    blob = bytearray()
    large: list[Any] = []
    places: list[list[tuple[int, int, int]]] = []
    parcels = [_as_it_is(p) for p in parcels]
    for p in parcels:
        if p.kind == _RAW and p.schema_key not in known:
            schemas[p.schema_key] = p.schema
        spots = []
        for run in _runs(p.buffers):
            if isinstance(one := run[0], packed.OnDevice):
                large.append(one.buffer)
                spots.append((len(large) + 1, 0, one.size))
                continue
            if (size := sum(b.size for b in run if b is not None)) >= SMALL:
                large.append(_frame(run, size))
            at = 0
            for buffer in run:
                if buffer is None:
                    spots.append((0, 0, 0))
                elif size >= SMALL:
                    spots.append((len(large) + 1, at, buffer.size))
                    at += buffer.size
                else:
                    blob += bytes(-len(blob) % _ALIGN)
                    spots.append((1, len(blob), buffer.size))
                    blob += memoryview(buffer).cast("B")
        places.append(spots)
    n_frames = 2 + len(large)
    body += _HEAD.pack(tag, run_id, sequence, len(schemas), len(parcels), n_frames)
    for key, raw in schemas.items():
        body += _SCHEMA.pack(key, len(raw)) + raw
    for p, spots in zip(parcels, places, strict=True):
        body += _SHARD.pack(p.input_id, p.split, p.kind, p.schema_key, p.rows, len(p.parts), len(spots), p.digest)
        body += p.parts.tobytes() + p.lengths.tobytes()
        for spot in spots:
            body += _BUFFER.pack(*spot)
    head = bytearray(_PREFIX.pack(MAGIC, VERSION, 0, len(body), xxhash.xxh3_64_intdigest(body))) + body
    # Not `bytes`: distributed joins the first frame that is not bytes with its own header and gives later ones memory
    # of their own. So the head is joined, and the payload starts at an aligned address.
    return [memoryview(head), memoryview(blob), *large]


def _runs(buffers: Sequence[Any]) -> Iterator[list[Any]]:
    """Buffers in their order, those together that follow one another in memory.

    A frame is received at a multiple of 8, so what follows the first buffer of a run is as aligned there as here only
    if that first one is at a multiple of 8, too.
    """
    run: list[Any] = []
    end = None
    for buffer in buffers:
        if isinstance(buffer, packed.OnDevice):
            if run:
                yield run
            yield [buffer]
            run, end = [], None
            continue
        if buffer is not None:
            if end is not None and buffer.address != end:
                yield run
                run = []
            end = buffer.address + buffer.size if buffer.address % 8 == 0 or any(run) else -1
        run.append(buffer)
    if run:
        yield run


def _frame(run: Sequence[pa.Buffer | None], size: int) -> memoryview:
    import pyarrow as pa

    some = [buffer for buffer in run if buffer is not None]
    if len(some) == 1:
        return memoryview(some[0]).cast("B")
    # All of them are kept alive by the frame, so it does not matter whether one allocation or several lie there.
    return memoryview(pa.foreign_buffer(some[0].address, size, base=some)).cast("B")


def unpack(
    frames: Sequence[Any],
    tag: int,
    run_id: int,
    schemas: MutableMapping[int, pa.Schema],
    adopt: packed.Adopt | None = None,
) -> list[Shard]:
    """Shards of one message, as views on its frames.

    Parameters
    ----------
    frames
        As they came; the shards keep them alive.
    tag, run_id
        Of the run that receives.
    schemas
        Schemas received in this run, by key; new ones are added.
    adopt
        Makes a pack of a frame that came on the device; None: none may.

    Raises
    ------
    WireError
        Anything that does not parse, is not of this run, or fails a checksum.
    """
    import pyarrow as pa

    if not frames:
        raise WireError("a shuffle message has 0 frames, must have at least 2. Remedy: the sender sends it again")
    reader = Reader(_checked_head(frames[0]))
    got_tag, got_run, _sequence, n_schemas, n_shards, n_frames = reader.unpack(_HEAD)
    if (got_tag, got_run) != (tag, run_id):
        raise WireError(f"a shuffle message is of run {got_tag:x}[{got_run}], must be of {tag:x}[{run_id}]")
    if n_frames != len(frames):
        raise WireError(f"a shuffle message has {len(frames)} frames, its head says {n_frames}")
    new: dict[int, pa.Schema] = {}
    for _ in range(n_schemas):
        key, length = reader.unpack(_SCHEMA)
        raw = reader.take(length)
        if xxhash.xxh3_64_intdigest(raw) != key:
            raise WireError(f"schema {key:x} of a shuffle message fails its checksum")
        new[key] = pa.ipc.read_schema(pa.py_buffer(bytes(raw)))
    blocks = [block_of(f) for f in frames[1:]]
    first = blocks[0] if blocks else b""
    if isinstance(first, packed.OnDevice):
        raise WireError("frame 1 of a shuffle message came on a device, must be in host memory")
    blob = memoryview(first).cast("B")
    used = [0] * len(blocks)
    shards = [_shard(reader, blocks, blob, used, new, schemas, adopt) for _ in range(n_shards)]
    reader.end()
    for i, (block, n) in enumerate(zip(blocks, used, strict=True)):
        if block.size != n:
            raise WireError(f"frame {i + 1} of a shuffle message has {block.size} bytes, {n} are used")
    schemas.update(new)
    return shards


def _shard(
    reader: Reader,
    blocks: Sequence[Any],
    blob: memoryview,
    used: list[int],
    new: Mapping[int, pa.Schema],
    schemas: Mapping[int, pa.Schema],
    adopt: packed.Adopt | None,
) -> Shard:
    """The next shard of a message.

    Parameters
    ----------
    reader
        At the shard's place in the head.
    blocks
        All frames but the head.
    blob
        The first of them.
    used
        Bytes of each that earlier shards had; updated.
    new, schemas
        Schemas by key, of this message and of earlier ones.
    """
    import pyarrow as pa

    input_id, split, kind, key, rows, n_parts, n_buffers, digest = reader.unpack(_SHARD)
    parts = np.frombuffer(reader.take(4 * n_parts), dtype="<u4")
    lengths = np.frombuffer(reader.take(8 * n_parts), dtype="<u8")
    if int(lengths.sum()) != rows or (n_parts and int(lengths.max()) > rows):
        raise WireError(f"input {input_id}: outputs have {int(lengths.sum())} rows, its head says {rows}")
    buffers = _buffers(reader, n_buffers, blocks, blob, used, input_id)
    if _digest(buffers) != digest:
        raise WireError(f"input {input_id}: its buffers fail their checksum")
    try:
        known = apart = None
        if kind == _RAW:
            schema = new.get(key) or schemas.get(key)
            if schema is None:
                raise WireError(f"input {input_id}: schema {key:x} is not known in this run")
            known, arrays = known_schema(schema), arrays_of(schema, rows, buffers)
            table = pa.Table.from_arrays(arrays, schema=schema)
            apart = table, arrays
        elif kind == _STREAM and n_buffers == 1 and buffers[0] is not None:
            table = pa.ipc.open_stream(buffers[0]).read_all()
        elif kind == _PACKED:
            table = packed.from_buffers(lengths, buffers, adopt)
        else:
            raise WireError(f"input {input_id}: kind {kind} with {n_buffers} buffers is not known")
    except MemoryError:  # Arrow's too, which is an ArrowException: says nothing about the bytes
        raise
    except (pa.ArrowException, OSError, IndexError, TypeError, ValueError) as e:  # TypeError: it came on a device
        raise WireError(f"input {input_id}: {e}") from e
    if table.num_rows != rows:
        raise WireError(f"input {input_id}: has {table.num_rows} rows, its head says {rows}")
    nbytes = sum(b.size for b in buffers if b is not None)
    return Shard(input_id, table, parts, lengths, known_bytes=nbytes, known=known, apart=apart, split=split)


def _buffers(
    reader: Reader, count: int, blocks: Sequence[Any], blob: memoryview, used: list[int], input_id: int
) -> list[Any]:
    """The buffers of a shard, see `_shard`; None stands for an absent one."""
    buffers: list[Any] = []
    for frame, offset, length in _BUFFER.iter_unpack(reader.take(_BUFFER.size * count)):
        if frame == 0:
            buffers.append(None)
            continue
        if frame > len(blocks) or offset + length > blocks[frame - 1].size:
            raise WireError(f"input {input_id}: buffer {(frame, offset, length)} is outside the message")
        # Buffers follow one another; what is between them is padding, and zero. So no byte goes unchecked.
        gap = offset - used[frame - 1]
        if not 0 <= gap < _ALIGN or (gap and (frame > 1 or any(blob[offset - gap : offset]))):
            raise WireError(f"input {input_id}: buffer {(frame, offset, length)} does not follow the one before it")
        used[frame - 1] = offset + length
        block = blocks[frame - 1]
        if isinstance(block, packed.OnDevice):
            if length != block.size:
                raise WireError(f"input {input_id}: a buffer is a part of a frame on a device, must be all of it")
            buffers.append(block)
            continue
        buffers.append(block.slice(offset, length))
    return buffers


def _checked_head(head: Buffer) -> memoryview:
    view = memoryview(head).cast("B")
    if len(view) < _PREFIX.size:
        raise WireError(f"the head of a shuffle message has {len(view)} bytes, must have at least {_PREFIX.size}")
    magic, version, flags, length, digest = _PREFIX.unpack_from(view)
    if magic != MAGIC or version != VERSION or flags != 0:
        raise WireError(
            f"a shuffle message starts with {magic!r} version {version} flags {flags}, must be {MAGIC!r} version "
            f"{VERSION} flags 0. Remedy: run one version of dask-gpurt on all workers"
        )
    rest = view[_PREFIX.size :]
    if length != len(rest) or xxhash.xxh3_64_intdigest(rest) != digest:
        raise WireError("the head of a shuffle message fails its checksum")
    return rest


def _digest(buffers: Sequence[Any]) -> int:
    h = xxhash.xxh3_64()
    for buffer in buffers:
        # Lengths are part of it, so that bytes cannot move from one buffer to its neighbour.
        if buffer is None:
            h.update(_NO_BUFFER)
            continue
        h.update(_LENGTH.pack(buffer.size))
        if buffer.size and type(buffer) is not packed.OnDevice:
            h.update(buffer)
    return int(h.intdigest())
