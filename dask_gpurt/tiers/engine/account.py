"""Who owns entries, and the counters of each owner.

The store behind ``worker.data`` and the shuffle's shards live in one engine under one budget, but their spilled bytes
must be told apart: Dask subtracts ``spilled_bytes`` from the bytes of its *tasks*, so shards must not be in it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.model.shards import Buffer
    from dask_gpurt.tiers.engine.entry import Entry

#: a part of a stored value that can be read alone, and its frames
Group = tuple[int, "Sequence[Buffer]"]


class Codec(Protocol):
    """Objects to frames and back. All methods are called in I/O threads."""

    def encode(self, value: Any, parts: Sequence[int] | None) -> list[Group]:
        """Contiguous frames in groups. Any exception means: this object cannot be stored."""

    def decode(self, frames: list[memoryview]) -> Any:
        """The reverse, for the frames of all groups one after the other."""


def _no_parts(entry: Entry) -> Sequence[int] | None:
    return None


def _nobody(entry: Entry) -> None:
    return None


@dataclasses.dataclass(eq=False)
class Account:
    """One owner of entries."""

    name: str
    codec: Codec
    #: called on the loop thread when the last copy of an entry turned out to be unreadable
    on_lost: Callable[[Entry], None] = _nobody
    #: the parts of a value that are still worth writing; None: all
    parts: Callable[[Entry], Sequence[int] | None] = _no_parts
    #: what stands for the value while it is on disk
    shell: Callable[[Any], Any] | None = None
    #: entries that are not in memory (STORED or LOADING)
    stored: int = 0
    #: their bytes in memory, had they been there
    stored_memory_bytes: int = 0
    #: their bytes on disk
    stored_disk_bytes: int = 0
