"""`DiskHandle`: a value on a `DiskTier`: where it is, and how it comes back.

The handle is all that knows a file: its name, where the frames are in it, and what each must hash to. A compaction may
move a value that is in a segment, so its place is asked for at each read.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt.model import compression
from dask_gpurt.tiers.storage.codec import flat
from dask_gpurt.tiers.storage.handle import IoCost, decoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.tiers.storage.disk.frames import Frame
    from dask_gpurt.tiers.storage.disk.segments import Record
    from dask_gpurt.tiers.storage.handle import Codec, Group


class Disk(Protocol):
    """What a handle needs of the tier that made it; `DiskTier` is one."""

    def read(self, handle: DiskHandle, part: int | None = None) -> tuple[tuple[Frame, ...], list[memoryview]]:
        """The frames of a value, or of one part, and their verified bytes as stored."""

    def claim(self, handle: DiskHandle) -> None:
        """One more that needs the copy."""

    def free(self, handle: DiskHandle) -> None:
        """Give the space back. Once per claim."""


@dataclasses.dataclass(frozen=True, slots=True)
class DiskHandle:
    """A value on a `DiskTier`."""

    disk: Disk
    #: the name of its file, or its place in a segment
    place: str | Record
    #: of a file; a segment's record has its own
    file_frames: tuple[Frame, ...]
    #: bytes on disk
    nbytes: int
    #: its file was left in the page cache
    cached: bool = False
    #: of its write
    compressing_seconds: float = dataclasses.field(default=0.0, compare=False, repr=False)
    #: how many have a claim on it; guarded by the lock of the disk
    claims: list[int] = dataclasses.field(default_factory=lambda: [1], compare=False, repr=False)

    @property
    def name(self) -> str:
        """The file it is in now."""
        return self.place if isinstance(self.place, str) else self.place.segment.name

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Where its bytes are in that file now."""
        return self.file_frames if isinstance(self.place, str) else self.place.frames

    def load(self, codec: Codec) -> tuple[Any, IoCost]:
        """See `Handle.load`."""
        buffers, cost = self._read(None)
        start = time.perf_counter()
        value = decoded(codec.decode, buffers)
        cost.codec_seconds += time.perf_counter() - start
        return value, cost

    def load_part(self, part: int) -> tuple[list[memoryview], IoCost]:
        """See `Handle.load_part`."""
        buffers, cost = self._read(part)
        if not buffers:
            raise KeyError(part)
        return buffers, cost

    def _read(self, part: int | None) -> tuple[list[memoryview], IoCost]:
        start = time.perf_counter()
        frames, stored = self.disk.read(self, part)
        middle = time.perf_counter()
        buffers = [
            compression.expand(f.codec, b, f.nbytes) if f.codec else b for f, b in zip(frames, stored, strict=True)
        ]
        nbytes = sum(f.stored_bytes for f in frames) if part is not None else self.nbytes
        return buffers, IoCost(nbytes, middle - start, time.perf_counter() - middle)

    def is_of(self, groups: Sequence[Group]) -> bool:
        """Whether it is a copy of these frames, by their checksums."""
        frames = self.frames
        parts = [(part, flat(buffer)) for part, buffers in groups for buffer in buffers]
        return len(parts) == len(frames) and all(
            (f.part, f.nbytes) == (part, view.nbytes) and f.is_of(view)
            for f, (part, view) in zip(frames, parts, strict=True)
        )

    def again(self) -> DiskHandle:
        """One more claim: it takes one more `free` until the copy goes."""
        self.disk.claim(self)
        return self

    def free(self) -> None:
        """Give up one claim; the last one deletes the copy."""
        self.disk.free(self)
