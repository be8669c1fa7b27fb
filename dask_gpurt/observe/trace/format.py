"""The trace file: a header, then blocks of records, each compressed and with its own checksum.

    header   8 bytes  b"GPURTTRC"     2 bytes  version, little endian     6 bytes  zero
    block    4 bytes  length of the compressed part     8 bytes  xxh3-64 of it     the compressed part
             = zlib(msgpack([record, record, ...]))

A record is a list whose first element says what it is (`Kind`). Tasks, workers and prefixes are named once, by a
number, and named by that number afterwards; times are whole microseconds since `Kind.BEGIN`, by the scheduler's clock.
A file that was cut off (the scheduler was killed) is good up to its last whole block, and reading it says so; so is one
with a flipped bit. The last record of a whole file is `Kind.END`.

msgpack, because distributed depends on it already and it packs a block of 4,096 records in a few milliseconds of a
thread that is not the event loop; zlib at its fastest, because it is in the standard library and makes the text of
keys small. Rejected: JSON lines (five times the time), Parquet (one more dependency on the scheduler, and a file that
was cut off cannot be read at all).
"""

from __future__ import annotations

import contextlib
import enum
import operator
import struct
import zlib
from typing import IO, TYPE_CHECKING, Any

import msgpack
import xxhash

from dask_gpurt.errors import TraceError
from dask_gpurt.observe.seam import MAX_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dask.typing import Key

MAGIC = b"GPURTTRC"
#: raised whenever an old reader would misread a new file
VERSION = 1
_HEADER = struct.Struct("<8sH6x")
_BLOCK = struct.Struct("<IQ")
#: bytes of a block, expanded; `pack` makes several of more, so more is damage, or made to fill the reader's memory
MAX_BLOCK_BYTES = 16 * 2**20
#: a file may expand to one whole block and so many times its own length; recorded ones expand about twice
MAX_EXPANSION = 100


class Kind(enum.IntEnum):
    """What a record is; behind it the elements that follow."""

    #: seconds since the epoch; versions, configuration (dict)
    BEGIN = 0
    #: worker, time, address, host, name, threads, memory limit in bytes
    WORKER = 1
    #: worker, time
    WORKER_GONE = 2
    #: prefix, name
    PREFIX = 3
    #: task, key, prefix, priority, dependencies (tasks), restrictions (dict or None)
    TASK = 4
    #: time, client, number of new tasks, wanted tasks
    GRAPH = 5
    #: task, worker, time
    ASSIGNED = 6
    #: task, worker, time, bytes, compute start, compute stop, transfers [[start, stop, worker]],
    #: disk reads [[start, stop]]
    FINISHED = 7
    #: task, time
    RELEASED = 8
    #: task, time, text of the exception
    ERRED = 9
    #: time, worker, figures (dict)
    SAMPLE = 10
    #: task, bytes, holders: data that no task of the trace made (scattered, or there before)
    DATA = 11
    #: task, kind, worker chosen or None, predicted seconds or None
    DECISION = 12
    #: time, records written, records lost
    END = 13
    #: task, time: the scheduler forgot it; its key may come back as another task
    FORGOTTEN = 14


def write_header(file: IO[bytes]) -> None:
    """Begin a file."""
    file.write(_HEADER.pack(MAGIC, VERSION))


def pack(records: list[list[Any]]) -> bytes:
    """One block, or several when one would be too large to be read. Any thread."""
    plain = msgpack.packb(records, use_bin_type=True, default=_plain)
    if len(plain) > MAX_BLOCK_BYTES and len(records) > 1:
        half = len(records) // 2
        return pack(records[:half]) + pack(records[half:])
    body = zlib.compress(plain, 1)
    return _BLOCK.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def _plain(value: Any) -> Any:
    """What msgpack cannot pack: a figure of another type, as a user's `sizeof` may return, or beyond 64 bits.

    One of them must not end a recording.
    """
    with contextlib.suppress(TypeError):
        whole = operator.index(value)
        if abs(whole) <= MAX_SIZE:
            return whole
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)


def read(file: IO[bytes], name: str) -> Iterator[list[list[Any]]]:
    """The blocks of a file, in order.

    Raises
    ------
    TraceError
        Not a trace, a version this package does not know, or a block that is cut off or damaged; blocks before it have
        been given.
    """
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[:8] != MAGIC:
        raise TraceError(
            f"{name} is not a trace: it begins with {head[:8]!r}, not {MAGIC!r}. Remedy: a file that "
            "dask_gpurt.record or gpurt.trace.path wrote"
        )
    _, version = _HEADER.unpack(head)
    if version != VERSION:
        raise TraceError(
            f"{name} is a trace of version {version}, this package reads version {VERSION}. Remedy: use the dask-gpurt "
            "that wrote it"
        )
    at = _HEADER.size
    expanded = 0
    while frame := file.read(_BLOCK.size):
        damaged = f"{name} is damaged or cut off at byte {at:,}{', where it begins' if at == _HEADER.size else ''}"
        if len(frame) < _BLOCK.size:
            raise TraceError(damaged)
        length, digest = _BLOCK.unpack(frame)
        most = MAX_BLOCK_BYTES + MAX_BLOCK_BYTES // 1000 + 64  # what cannot be compressed becomes that much longer
        if length > most:
            raise TraceError(f"{damaged}: a block of {length:,} bytes, at most {most:,} are allowed")
        body = file.read(length)
        if len(body) < length or xxhash.xxh3_64_intdigest(body) != digest:
            raise TraceError(damaged)
        plain = _inflate(body, damaged)
        at += _BLOCK.size + length
        expanded += len(plain)
        if expanded > MAX_BLOCK_BYTES + MAX_EXPANSION * at:
            raise TraceError(f"{damaged}: it expands to more than {MAX_EXPANSION} times its length")
        yield _unpack(plain, damaged)


def _inflate(body: bytes, damaged: str) -> bytes:
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(body, MAX_BLOCK_BYTES)
        # One byte more tells a block that ends here from one that goes on.
        whole = inflater.eof or (not inflater.decompress(inflater.unconsumed_tail, 1) and inflater.eof)
    except zlib.error as e:
        raise TraceError(f"{damaged}: {e}") from e
    if not whole:
        raise TraceError(f"{damaged}: a block that expands to more than {MAX_BLOCK_BYTES:,} bytes, or has no end")
    return plain


def _unpack(plain: bytes, damaged: str) -> list[list[Any]]:
    try:
        # Lists, not arrays as tuples: records are read by position and some are edited while reading.
        records = msgpack.unpackb(plain, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as e:  # a key of a mapping may be unhashable
        raise TraceError(f"{damaged}: {e}") from e
    if not isinstance(records, list) or not all(isinstance(record, list) and record for record in records):
        raise TraceError(f"{damaged}: a block is a list of records, which are lists; this one is not")
    return records


def plain_key(key: Key) -> str | list[Any]:
    """A task's key as msgpack can have it: text, or a list for a tuple of text and numbers; else its `str`."""
    if isinstance(key, tuple) and all(
        type(part) is str or (type(part) is int and abs(part) <= MAX_SIZE) for part in key
    ):
        return list(key)
    return key if type(key) is str else str(key)
