"""Messages between processes of one host that are not sent but fetched: the receiver reads them where they lie.

The sender makes an `Offer`, the receiver may `accept` it. Then `placed` says where a message lies, `fetch` reads it.

Theory of operation. Through a socket every byte is copied twice, into the kernel and out of it. On one host the kernel
lets a process read the memory of another one of the same user (`process_vm_readv`, what MPI and UCX call CMA): one
copy, by the receiver, in one call, at the speed of `memcpy`. So the record of a message carries no frames but where
they are (``PLACED``). Everything else stays: the link, its order, credit before it is sent, memory from the same pool,
checksums of what was read, the answer. The sender keeps a message's frames until it was answered, as for any other.

Whether it works is tried, not guessed. A sender whose peer says that it is on this host offers (``OFFER``) a secret of
this link and its address. A receiver that reads just that there answers ``PULLS``, and only then messages are placed.
Containers with their own process ids, another user, a kernel that forbids it (Yama, seccomp): no answer, and messages
go through the socket.

All that a sender can gain by lying is that the receiver takes wrong bytes for its message, as it could by sending them.
When a sender lets go of a message because the link was lost while the receiver still reads it, it closes the link
first. So the receiver, which looks after it has read, drops what it has; what gets past that fails its checksum.

Rejected: UCX for this (same call inside; but a second library, context and thread per worker, and half the bandwidth
as it goes through segments of shared memory when error handling is on); memory shared from the start (memory would have
to be taken with its destination known); two threads that share the copy of a long message (1.0 and 0.93 times as fast
with 64 and 8 MiB on two idle cores: the memory is the limit).
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.link.records import LinkRecord, RecordKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: shorter messages go through the socket: what is done for each in Python costs more than the second copy, and many of
#: them share one call (64 KiB: 0.26 GB/s through it, 0.24 fetched)
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


def _address(buffer: object) -> int:
    return int(pa.py_buffer(buffer).address)  # ten times as fast as to ask numpy


def _read(pid: int, into: list[int], spans: list[int]) -> int:
    """Bytes read; address and length in turn, on both sides."""
    count = len(into) // 2
    form = f"<{2 * count}Q"
    n = _readv(pid, struct.pack(form, *into), count, struct.pack(form, *spans), count, 0)
    if n < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(n)


class Offer:
    """A token that a sender lets its receiver read, to see whether it can."""

    def __init__(self) -> None:
        self._token = np.frombuffer(os.urandom(_TOKEN_BYTES), np.uint8).copy()

    def body(self) -> bytes:
        """The body of the OFFER: process, address and content."""
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
        _read(pid, [_address(into), _TOKEN_BYTES], [address, _TOKEN_BYTES])
    except (OSError, ctypes.ArgumentError, OverflowError):
        return 0
    return int(pid) if into.tobytes() == token else 0


def placed(record: LinkRecord, buffers: Sequence[Any]) -> tuple[LinkRecord, bytes] | None:
    """The record, and its body, that says where a message lies; None: send it.

    Raises
    ------
    ValueError, BufferError
        A buffer that is not contiguous.
    """
    if not SMALLEST <= record.length <= LARGEST or any(records.is_device(b) for b in buffers):
        return None
    # Numbers of Python's, here and in `fetch`: messages have few frames mostly, and a call of numpy's costs as much as
    # ten of them.
    spans: list[int] = []
    for buffer in buffers:
        n = records.size_of(buffer)
        spans += (_address(buffer), n) if n else (0, 0)
    body = struct.pack(f"<{len(spans)}Q", *spans)
    return LinkRecord(RecordKind.PLACED, record.run, record.sequence, len(body), len(buffers), record.length), body


def message(record: LinkRecord) -> LinkRecord:
    """The record of a message, from the one that says where it lies."""
    return LinkRecord(RecordKind.DATA, record.run, record.sequence, record.value, record.count)


def fetch(pid: int, data: LinkRecord, body: bytes | memoryview, take: Callable[[int], memoryview]) -> memoryview:
    """Read a message from where it lies, as if it had come whole.

    Parameters
    ----------
    data
        Record of the message, as `message` gives it; granted.
    body
        Of the record that says where it lies.

    Raises
    ------
    WireError
        The lengths do not add up to what was granted.
    OSError
        Not all of it is there any more: the link is lost.
    """
    if len(body) != 16 * data.count:
        raise WireError(f"a placed message of {data.count} frames has {len(body)} bytes")
    spans = struct.unpack(f"<{2 * data.count}Q", body)
    lengths = spans[1::2]
    at = records.table_bytes(data.count)
    # In Python's numbers: those of 64 bits could add up to anything.
    if at + sum(map(records.padded, lengths)) != data.length:
        raise WireError(f"a message's frames do not add up to its {data.length} bytes")
    whole = take(data.length)
    here = _address(whole)
    whole[:at] = struct.pack(f"<{data.count}Q", *lengths).ljust(at, b"\0")
    into: list[int] = []
    source: list[int] = []
    for address, n in zip(spans[::2], lengths, strict=True):
        size = records.padded(n)
        if n < size:
            whole[at + n : at + size] = bytes(size - n)
        if n:
            into += (here + at, n)
            source += (address, n)
        at += size
    total = sum(lengths)
    if total and (n := _read(pid, into, source)) != total:
        raise OSError(f"{n} of {total} bytes of a message were there")
    return whole
