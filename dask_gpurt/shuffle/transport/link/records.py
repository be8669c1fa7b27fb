"""Records: what travels on a link. Pure functions, fixed sizes, no pickle.

`LinkRecord` packs and unpacks a header. `table`, `lengths_of` and `frames_of` are for the body of a message; `mac`,
`hello` and `read_hello` prove who is on the link.

Theory of operation. A *link* goes from one sender to one receiver and serves one run. Everything on it is a record: a
header of `HEADER_BYTES`, then `length` bytes of body::

    header   magic, version, kind, flags, count, sequence, run tag, run id, length, value, xxh3-64 of all of that
    body     DATA: `count` lengths of 8 bytes, filled to 64; then the frames, each filled to 64 bytes
             CHALLENGE, HELLO, WELCOME: nonces, addresses and MACs; REFUSED: text; OFFER, PLACED: addresses in the
             sender's memory; others: none

So the one number that decides an allocation, `length`, is checked by the header's own checksum before it is used, and
by its receiver against what it has granted. Frames lie at multiples of 64, so that a body that is received into one
buffer gives frames that numpy and Arrow may use as they are.

A run's secret comes from the scheduler. The first record of a sender carries an HMAC-SHA256 over both nonces, both
addresses and the run; the answer carries one, too, so a stranger who took over a dead worker's port learns nothing and
gets nothing. The MACs authenticate who is on the link. What follows on it is protected by checksums against accidents,
not against an attacker who can rewrite packets on the wire: that needs a TLS cluster, where links are under TLS.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import hmac
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from dask_gpurt.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.model import Buffer

MAGIC = b"GPTL"
VERSION = 2
HEADER_BYTES = 64
#: frames of one message, at most
MAX_FRAMES = 1024
#: bytes of a body that is not DATA, at most
MAX_CONTROL = 1024
NONCE_BYTES = 16
SECRET_BYTES = 16
ALIGN = 64
_FIELDS = struct.Struct("<4sBBHIQQqQQ4x")  # 52 bytes, filled to 56
_DIGEST = struct.Struct("<Q")
_HEADER = struct.Struct(_FIELDS.format + "Q")
_LENGTHS = [struct.Struct(f"<{n}Q") for n in range(9)]
_DIGEST_AT = HEADER_BYTES - _DIGEST.size
_MAC_BYTES = 32
#: the top bit of a frame's length: this frame lies in device memory
_DEVICE = 1 << 63


class RecordKind(enum.IntEnum):
    """What a record is."""

    CHALLENGE = 1  #: receiver: its nonce
    HELLO = 2  #: sender: nonce, address, MAC
    WELCOME = 3  #: receiver: MAC; `value` = bytes granted so far
    DATA = 4  #: sender: one message; `value` = bytes of credit that it costs beyond its length
    ACK = 5  #: receiver: message `sequence` is stored
    REFUSED = 6  #: receiver: message `sequence` was not used, and why
    WANT = 7  #: sender: needs `value` bytes granted in all
    GRANT = 8  #: receiver: `value` bytes granted in all
    PING = 9  #: sender: `sequence` messages were sent
    PONG = 10  #: receiver: all up to `sequence` were answered, `count` others are missing, `value` bytes granted
    BYE = 11  #: the link ends in order
    OFFER = 12  #: sender: where in its memory a token lies (`cma`)
    PULLS = 13  #: receiver: it has read the token, messages may stay where they are
    PLACED = 14  #: sender: one message of `value` bytes; `count` times address and length


#: `RecordKind(n)`, four times as fast
_KINDS = {int(kind): kind for kind in RecordKind}
#: plain numbers, as a look at a member of an enumeration costs as much as a call
_DATA, _PLACED = int(RecordKind.DATA), int(RecordKind.PLACED)


class RunKey(NamedTuple):
    """Stands for one run of one shuffle on a link. A tuple, as it is hashed and compared several times per message."""

    #: `wire.run_tag` of the shuffle's id
    tag: int
    run_id: int


@dataclasses.dataclass(slots=True)
class LinkRecord:
    """A header. Never changed; not frozen because making a frozen one costs three times as much."""

    kind: RecordKind
    run: RunKey
    sequence: int = 0
    #: bytes of the body
    length: int = 0
    #: frames of a message
    count: int = 0
    value: int = 0

    def pack(self) -> bytes:
        """The header as bytes."""
        tag, run_id = self.run
        head = _FIELDS.pack(
            MAGIC, VERSION, self.kind, 0, self.count, self.sequence, tag, run_id, self.length, self.value
        )
        return head + _DIGEST.pack(xxhash.xxh3_64_intdigest(head))

    @classmethod
    def unpack(cls, raw: Buffer) -> LinkRecord:
        """Parse and check a header.

        Raises
        ------
        WireError
            Not 64 bytes, another magic or version, a wrong checksum, or a body longer than its kind allows.
        """
        view = memoryview(raw)
        if view.nbytes != HEADER_BYTES:
            raise WireError(f"a record's header has {view.nbytes} bytes, must have {HEADER_BYTES}")
        magic, version, kind, _flags, count, sequence, tag, run_id, length, value, digest = _HEADER.unpack(view)
        if xxhash.xxh3_64_intdigest(view[:_DIGEST_AT]) != digest:
            raise WireError("a record's header fails its checksum")
        if magic != MAGIC or version != VERSION:
            raise WireError(f"a record is {magic!r} version {version}, must be {MAGIC!r} version {VERSION}")
        known = _KINDS.get(kind)
        if known is None:
            raise WireError(f"a record's kind is {kind}, must be 1 to {max(RecordKind)}")
        if kind == _DATA:
            if not (1 <= count <= MAX_FRAMES and length >= table_bytes(count)):
                raise WireError(f"a message has {count} frames in {length} bytes, must have 1 to {MAX_FRAMES} frames")
        elif kind == _PLACED:
            if not (1 <= count <= MAX_FRAMES and length == 16 * count and value):
                raise WireError(f"a placed message has {count} frames in {length} bytes, must have 16 bytes for each")
        elif length > MAX_CONTROL:
            raise WireError(f"a record of kind {known.name} has {length} bytes, must have at most {MAX_CONTROL}")
        return cls(known, RunKey(tag, run_id), sequence, length, count, value)


def table_bytes(count: int) -> int:
    """Bytes before the first frame."""
    return padded(8 * count)


def padded(n: int) -> int:
    """`n` bytes, filled to a multiple of `ALIGN`."""
    return (n + ALIGN - 1) // ALIGN * ALIGN


def is_device(buffer: object) -> bool:
    """Whether a buffer lies in device memory."""
    return type(buffer) is not memoryview and hasattr(buffer, "__cuda_array_interface__")


def size_of(buffer: Any) -> int:
    """Bytes of a host or device buffer."""
    kind = type(buffer)
    if kind is memoryview:  # almost all are
        return int(buffer.nbytes)
    if kind is bytes:
        return len(buffer)
    if is_device(buffer):
        interface = buffer.__cuda_array_interface__
        n = int(str(interface["typestr"])[2:])
        for extent in interface["shape"]:
            n *= int(extent)
        return n
    return memoryview(buffer).nbytes


def message_bytes(buffers: Sequence[Any]) -> int:
    """Bytes of the body of a message: what it costs in credit."""
    total = (8 * len(buffers) + ALIGN - 1) // ALIGN * ALIGN
    for b in buffers:
        total += (size_of(b) + ALIGN - 1) // ALIGN * ALIGN
    return total


def table(buffers: Sequence[Any]) -> bytes:
    """The lengths before the frames."""
    lengths = [size_of(b) | (_DEVICE if is_device(b) else 0) for b in buffers]
    return _lengths(len(lengths)).pack(*lengths).ljust(table_bytes(len(lengths)), b"\0")


def _lengths(count: int) -> struct.Struct:
    return _LENGTHS[count] if count < len(_LENGTHS) else struct.Struct(f"<{count}Q")


def lengths_of(record: LinkRecord, raw: Buffer) -> list[tuple[int, bool]]:
    """(bytes, lies on a device) of every frame, from the table of a message.

    Raises
    ------
    WireError
        The lengths do not add up to the record's.
    """
    view = memoryview(raw).cast("B")
    if len(view) < 8 * record.count:
        raise WireError(f"a message's table has {len(view)} bytes, must have {8 * record.count}")
    values = _lengths(record.count).unpack_from(view)
    lengths = [(v & ~_DEVICE, v >= _DEVICE) for v in values]
    total = table_bytes(record.count)
    for n, _ in lengths:
        total += padded(n)
    if total != record.length:
        raise WireError(f"a message's frames do not add up to its {record.length} bytes")
    return lengths


def frames_of(record: LinkRecord, body: memoryview) -> list[memoryview]:
    """The frames of a message that lies in one buffer; views.

    Raises
    ------
    WireError
        The lengths do not add up to the body's, or frames say that they lie elsewhere.
    """
    if len(body) != record.length:
        raise WireError(f"a message has {len(body)} bytes, its header says {record.length}")
    low, at = 8 * record.count, table_bytes(record.count)
    out = []
    for n, device in lengths_of(record, body):
        if device:
            raise WireError("a message over a link of host memory says that a frame lies in device memory")
        if low != at:
            _check_filling(body[low:at])
        low = at + n
        out.append(body[at:low])
        at += padded(n)
    if low != at:
        _check_filling(body[low:at])
    return out


def _check_filling(between: memoryview) -> None:
    """Refuse filling that is not zero: a message is as it was sent."""
    if bytes(between).strip(b"\0"):
        raise WireError("the filling between a message's frames is not zero")


def mac(secret: bytes, role: str, run: RunKey, challenge: bytes, nonce: bytes, sender: str, receiver: str) -> bytes:
    """The proof of one side (its role) that it knows the run's secret."""
    parts = [
        role.encode(),
        struct.pack("<Qq", run.tag, run.run_id),
        challenge,
        nonce,
        sender.encode(),
        receiver.encode(),
    ]
    # Every part with its length, so that no byte can move to its neighbour.
    text = b"".join(struct.pack("<I", len(p)) + p for p in parts)
    return hmac.new(secret, b"dask-gpurt link 1" + text, hashlib.sha256).digest()


def hello(secret: bytes, run: RunKey, challenge: bytes, nonce: bytes, sender: str, receiver: str) -> bytes:
    """Body of a HELLO."""
    return nonce + mac(secret, "sender", run, challenge, nonce, sender, receiver) + sender.encode()


def read_hello(secret: bytes, run: RunKey, challenge: bytes, body: bytes, receiver: str) -> tuple[bytes, str]:
    """(nonce, address) of a sender that knows the secret.

    Raises
    ------
    WireError
        It does not.
    """
    nonce, given = body[:NONCE_BYTES], body[NONCE_BYTES : NONCE_BYTES + _MAC_BYTES]
    try:
        sender = body[NONCE_BYTES + _MAC_BYTES :].decode()
    except UnicodeDecodeError:
        raise WireError("a sender's address is not UTF-8") from None
    if not hmac.compare_digest(given, mac(secret, "sender", run, challenge, nonce, sender, receiver)):
        raise WireError("a sender does not know the secret of its run")
    return nonce, sender


def tag_for(secret: bytes, run: RunKey, sender: str, receiver: str, what: str) -> int:
    """A 64-bit tag that only those who know the run's secret can compute."""
    return int.from_bytes(mac(secret, f"tag {what}", run, b"", b"", sender, receiver)[:8], "little")
