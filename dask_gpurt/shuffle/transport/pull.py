"""Messages between processes of one host that are not sent but fetched: the receiver reads them where they lie.

Theory of operation. Through a socket every byte is copied twice, into the kernel and out of it. On one host the kernel
lets a process read the memory of another one of the same user (`process_vm_readv`, what MPI and UCX call CMA): one
copy, by the receiver, in one call, at the speed of `memcpy`. So the record of a message then carries no frames but
where they are (`Kind.PLACED`), and everything else stays: the link, its order, credit before it is sent, memory from
the same pool, checksums of what was read, the answer. The sender keeps a message's frames until it was answered, as for
any other.

Whether it works is tried, not guessed: a sender whose peer says that it is on this host offers (`Kind.OFFER`) a
secret of this link and its address; a receiver that reads just that there answers `Kind.PULLS`, and only then messages
are placed. Containers with their own process ids, another user, a kernel that forbids it (Yama, seccomp): no answer,
and messages go through the socket as ever.

What a sender can gain by lying is that the receiver takes wrong bytes for its message, as it could by sending them. A
sender that lets go of a message because the link was lost while the receiver still reads it: what is read then fails
its checksum, or belongs to a link that is closed.

Rejected: UCX for this (same call inside; but a second library, context and thread per worker, and half the bandwidth
as it goes through segments of shared memory when error handling is on); memory shared from the start (whoever takes
memory would have to know where it goes).
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport import records
from dask_gpurt.shuffle.transport.records import Kind, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: shorter messages go through the socket: what is done for each in Python costs more than the second copy, and many of
#: them share one call (64 KiB: 0.43 GB/s through it, 0.19 fetched)
SMALLEST = 1 << 18
#: and longer ones, as the kernel reads less than 2 GiB in one call
LARGEST = 1 << 30
_TOKEN_BYTES = 16
_OFFER = struct.Struct(f"<QQ{_TOKEN_BYTES}s")


def _call() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):  # no Linux
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes, function.restype = (ctypes.c_int, pointer, count, pointer, count, count), ctypes.c_ssize_t
    return function if struct.calcsize("P") == 8 else None


_readv = _call()


def _address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _read(pid: int, into: np.ndarray[Any, Any], spans: np.ndarray[Any, Any]) -> int:
    """Bytes read; rows of (address, length) on both sides."""
    n = _readv(pid, into.ctypes.data, len(into), spans.ctypes.data, len(spans), 0)
    if n < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(n)


class Offer:
    """What a sender lets its receiver read, to see whether it can."""

    def __init__(self) -> None:
        self._token = np.frombuffer(os.urandom(_TOKEN_BYTES), np.uint8).copy()

    def body(self) -> bytes:
        return _OFFER.pack(os.getpid(), _address(self._token), self._token.tobytes())


def able() -> bool:
    """Whether this system has the call at all."""
    return _readv is not None


def accept(body: bytes) -> int:
    """The process id of a sender whose memory can be read, else 0."""
    if _readv is None or len(body) != _OFFER.size:
        return 0
    pid, address, token = _OFFER.unpack(body)
    into = np.zeros(_TOKEN_BYTES, np.uint8)
    try:
        _read(pid, np.array([[_address(into), _TOKEN_BYTES]], "<u8"), np.array([[address, _TOKEN_BYTES]], "<u8"))
    except (OSError, ctypes.ArgumentError, OverflowError):
        return 0
    return int(pid) if into.tobytes() == token else 0


def placed(record: Record, buffers: Sequence[Any]) -> tuple[Record, bytes] | None:
    """The record, and its body, that says where a message lies; None: send it.

    Raises
    ------
    ValueError, BufferError
        A buffer that is not contiguous.
    """
    if not SMALLEST <= record.length <= LARGEST or any(records.is_device(b) for b in buffers):
        return None
    spans = np.zeros((len(buffers), 2), "<u8")
    for row, buffer in zip(spans, buffers, strict=True):
        if n := memoryview(buffer).nbytes:
            row[:] = _address(buffer), n
    return Record(Kind.PLACED, record.run, record.sequence, spans.nbytes, len(buffers), record.length), spans.tobytes()


def message(record: Record) -> Record:
    """The record of a message, from the one that says where it lies."""
    return Record(Kind.DATA, record.run, record.sequence, record.value, record.count)


def fetch(pid: int, data: Record, body: Any, take: Callable[[int], memoryview]) -> memoryview:
    """Read a message from where it lies, as if it had come whole.

    Parameters
    ----------
    data
        Of the message, as `message` gives it; granted.
    body
        Of the record that says where it lies.

    Raises
    ------
    WireError
        The lengths do not add up to what was granted.
    OSError
        It is no longer there, all of it: the link is to be taken for lost.
    """
    spans = np.frombuffer(body, "<u8").reshape(-1, 2)
    lengths = spans[:, 1]
    sizes = (lengths + np.uint64(records.ALIGN - 1)) // np.uint64(records.ALIGN) * np.uint64(records.ALIGN)
    at = records.table_bytes(data.count)
    # In Python's numbers: those of 64 bits could add up to anything.
    if len(spans) != data.count or at + sum(map(int, sizes)) != data.length or int(lengths.max()) > data.length:
        raise WireError(f"a message's frames do not add up to its {data.length} bytes")
    whole = take(data.length)
    whole[:at] = lengths.tobytes().ljust(at, b"\0")
    starts = at + np.concatenate(([0], np.cumsum(sizes)[:-1])).astype("<u8")
    for start, n, size in zip(starts.tolist(), lengths.tolist(), sizes.tolist(), strict=True):
        if n < size:
            whole[start + n : start + size] = bytes(size - n)
    some = lengths > 0
    if not some.any():
        return whole
    into = np.stack([starts + np.uint64(_address(whole)), lengths], axis=1)[some]
    total = int(lengths.sum())
    if (n := _read(pid, np.ascontiguousarray(into), np.ascontiguousarray(spans[some]))) != total:
        raise OSError(f"{n} of {total} bytes of a message were there")
    return whole
