"""Values with a checksum on their way between workers: a family of Dask's serializers, and how a peer asks for it.

`register` adds the family `FAMILY` to this process. It has the frames that Dask's own families (`INNER`) make, and
before them one xxh3-64 of their lengths, of all their bytes and of the header that says what they are. Frames are read
in place: nothing is copied, and arrays are as writeable as they were.

Theory of operation. Dask splits and compresses frames after this family made them, and merges and expands them before
it gets them back. So the checksum covers compression and the comm's own cuts as well. Around it stays what Dask adds to
a message, some hundred bytes of keys and positions: what is flipped there mostly does not parse, which `fetches` takes
for corrupt too.

A process that does not know a family fails the task that needs the value. So only a peer that asks gets it: a request
has one key more, `WANTED`, which no task has. Dask leaves out keys that it does not hold, so a worker without this
package, or with another version, answers as if that key had not been there.

Not covered: values in device memory, which a UCX comm sends as they are (Dask's family ``cuda`` comes first there);
workers of one process, between which nothing is serialized; and what clients get, which never ask.

Rejected: a checksum by the comm, which is no public interface; a table of the workers that can, kept by the scheduler,
since another worker may come under the address of one that left.
"""

from __future__ import annotations

import contextvars
import dataclasses
from typing import TYPE_CHECKING, Any

import msgpack
import xxhash
from distributed.protocol.serialize import (
    deserialize,
    families,
    msgpack_decode_default,
    msgpack_encode_default,
    register_serialization_family,
    serialize,
)
from distributed.protocol.utils import msgpack_opts
from distributed.utils import ensure_memoryview

from dask_gpurt.errors import CorruptTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed.comm import Comm

#: with the version: another layout is another family, and another key asks for it
FAMILY = "gpurt-xxh3-1"
WANTED = "gpurt-wants-xxh3-1"
#: Dask's own
INNER = ("dask", "pickle")
_DEVICE = "cuda"


@dataclasses.dataclass
class Fetch:
    """What is found while one answer is deserialized."""

    #: objects whose checksum was right
    verified: int = 0
    #: why one was not
    corrupt: str = ""
    #: one with the right checksum cannot be deserialized: that is the value's own error
    unreadable: bool = False
    #: what the answer comes over
    comm: Comm | None = None


#: of this task, and of the thread in which its answer is deserialized
current: contextvars.ContextVar[Fetch | None] = contextvars.ContextVar("gpurt-fetch", default=None)


def register() -> None:
    """Know the family in this process, for good: answers may be under way when the extension leaves."""
    register_serialization_family(FAMILY, _dumps, _loads)


def serializers(comm: Comm) -> tuple[str, ...]:
    """What an answer over this comm is serialized with, when its peer asked for checksums."""
    by_device = _DEVICE in families and comm.peer_address.startswith("ucx")
    return (_DEVICE, FAMILY, *INNER, "error") if by_device else (FAMILY, *INNER)


def _digest(header: bytes, frames: Sequence[memoryview]) -> int:
    hasher = xxhash.xxh3_64(header)
    for frame in frames:
        hasher.update(frame.nbytes.to_bytes(8, "little"))
        hasher.update(frame)
    return hasher.intdigest()


def _dumps(x: object, context: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[memoryview]]:
    # Collections that Dask takes apart come here one element after the other.
    header, raw = serialize(x, INNER, context=context, iterate_collection=False)
    if header.get("compression"):
        raise NotImplementedError  # Dask would hand back other frames than these
    try:
        frames = [ensure_memoryview(frame) for frame in raw]
    except (TypeError, BufferError) as e:  # not in host memory
        raise NotImplementedError from e
    packed = msgpack.dumps(header, default=msgpack_encode_default, use_bin_type=True)
    return {"inner": packed, "digest": _digest(packed, frames)}, frames


def _loads(header: dict[str, Any], frames: list[Any]) -> Any:
    fetch = current.get()
    packed = header.get("inner")
    views = [ensure_memoryview(frame) for frame in frames]
    if not isinstance(packed, bytes) or _digest(packed, views) != header.get("digest"):
        why = f"a value of {sum(view.nbytes for view in views)} bytes fails its checksum"
        if fetch is not None:
            fetch.corrupt = why
        raise CorruptTransfer(f"{why}. Dask fetches it again")
    if fetch is not None:
        fetch.verified += 1
    try:
        inner = msgpack.loads(packed, object_hook=msgpack_decode_default, use_list=False, **msgpack_opts)
        return deserialize(inner, frames)
    except Exception:
        if fetch is not None:
            fetch.unreadable = True
        raise
