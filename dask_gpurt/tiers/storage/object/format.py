"""The layout of an object in an object store, which describes itself: where the frames of a value lie.

::

    header   magic "GPRO", version, number of frames, bytes of payload        (24 bytes)
    index    per frame: part, length, xxh3-64                                 (24 bytes each)
    digest   xxh3-64 of header and index                                      (8 bytes)
    payload  the frames, one after the other

Unlike a file of the disk tier, whose handle never leaves its process, an object may be read by a worker that knows
nothing but its name (`shared.worker`), so the head carries its own checksum.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING

import numpy
import xxhash

from dask_gpurt.errors import CorruptData
from dask_gpurt.tiers.storage.codec import flat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.tiers.storage.handle import Group

MAGIC = b"GPRO"
VERSION = 1
_HEADER = struct.Struct("<4sHHQQ")
_INDEX = struct.Struct("<qQQ")
_DIGEST = struct.Struct("<Q")
#: heads up to this size are read in one request
USUAL_HEAD_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stored value."""

    part: int
    #: from the beginning of the object
    offset: int
    nbytes: int
    #: xxh3-64
    digest: int


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where the frames are."""

    frames: tuple[Frame, ...]
    #: of the whole object
    nbytes: int
    #: xxh3-64 of header and index, and through it of all frames
    digest: int

    def of_part(self, part: int) -> tuple[Frame, ...]:
        """Frames of one part, in order. KeyError when it has none."""
        frames = tuple(f for f in self.frames if f.part == part)
        if not frames:
            raise KeyError(part)
        return frames


def head_size(n_frames: int) -> int:
    """Bytes before the payload."""
    return _HEADER.size + _INDEX.size * n_frames + _DIGEST.size


def plan(groups: Sequence[Group]) -> tuple[Layout, bytes, list[memoryview]]:
    """The layout, the head, and flat views of the frames (nothing is copied)."""
    flattened = [(part, flat(buffer)) for part, buffers in groups for buffer in buffers]
    offset = head = head_size(len(flattened))
    frames = []
    for part, view in flattened:
        frames.append(Frame(part, offset, view.nbytes, xxhash.xxh3_64_intdigest(view)))
        offset += view.nbytes
    index = _HEADER.pack(MAGIC, VERSION, 0, len(frames), offset - head) + b"".join(
        _INDEX.pack(f.part, f.nbytes, f.digest) for f in frames
    )
    digest = xxhash.xxh3_64_intdigest(index)
    return (
        Layout(tuple(frames), offset, digest),
        index + _DIGEST.pack(digest),
        [view for _, view in flattened],
    )


def parse(data: memoryview, name: str) -> Layout | int:
    """The layout that the beginning of an object describes, or the number of bytes that are needed to tell.

    Raises
    ------
    CorruptData
        It is not one of ours, or was damaged.
    """
    if data.nbytes < _HEADER.size:
        raise CorruptData(f"{name} ends after {data.nbytes} bytes, before its header does")
    magic, version, _, n_frames, payload = _HEADER.unpack_from(data)
    # A damaged count must not make us ask for exabytes.
    if magic != MAGIC or version != VERSION or n_frames > 1 << 32:
        raise CorruptData(f"{name} does not begin with the header of a stored value")
    size = head_size(n_frames)
    if data.nbytes < size:
        return size
    end = size - _DIGEST.size
    digest = xxhash.xxh3_64_intdigest(data[:end])
    if _DIGEST.unpack_from(data, end)[0] != digest:
        raise CorruptData(f"the index of {name} is not what was written")
    offset = size
    frames = []
    for i in range(n_frames):
        part, nbytes, frame_digest = _INDEX.unpack_from(data, _HEADER.size + i * _INDEX.size)
        frames.append(Frame(part, offset, nbytes, frame_digest))
        offset += nbytes
    if offset - size != payload:
        raise CorruptData(f"the lengths in the index of {name} do not add up")
    return Layout(tuple(frames), offset, digest)


def allocate(frames: Sequence[Frame]) -> list[memoryview]:
    """Fresh, writeable memory for frames; each of its own, so that a value that keeps one does not keep all."""
    return [numpy.empty(f.nbytes, "u1").data for f in frames]


def verify(frames: Sequence[Frame], buffers: Sequence[memoryview], name: str) -> None:
    """CorruptData when a checksum differs."""
    for i, (frame, buffer) in enumerate(zip(frames, buffers, strict=True)):
        if xxhash.xxh3_64_intdigest(buffer) != frame.digest:
            raise CorruptData(f"checksum of frame {i} ({frame.nbytes} bytes at {frame.offset}) of {name} differs")
