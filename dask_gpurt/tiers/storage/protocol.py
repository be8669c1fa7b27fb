"""`StorageTier`: what a place for values below the memory they are computed in has to do, whatever the place.

Disk, object store, and on a GPU node the pinned host blocks implement it. `dask_gpurt.testing.check_storage_tier` is
the suite that each of them passes (``tests/conformance``). The engine knows this protocol and nothing else of a tier,
so `fallback` can put several together without a change to the engine.

Reading is the handle's (`handle.Handle.load`, ``load_part``, ``free``): a copy is read where it was written, and may
outlive a change of the order of tiers.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.model.tier import Tier
    from dask_gpurt.tiers.storage.handle import Group, Handle


class StorageTier(Protocol):
    """A place below the memory that tasks compute in. All methods are called in I/O threads and are thread-safe."""

    @property
    def tier(self) -> Tier:
        """What kind of place it is."""

    @property
    def used_bytes(self) -> int:
        """Bytes of copies on it, those being written included."""

    @property
    def limit_bytes(self) -> int | None:
        """Bytes it may take; None: no limit of ours."""

    def write(self, groups: Sequence[Group]) -> Handle:
        """Keep the frames of a value.

        Raises
        ------
        TierFull
            Limit or device full. Nothing is left behind.
        OSError
            Any other failure. Nothing is left behind that `close` or a sweep does not find.
        """

    def probe(self) -> None:
        """Write, read back, compare and delete a few bytes. Raises what went wrong."""

    def close(self) -> None:
        """Delete everything. Does not raise."""


class TierMetrics:
    """What went over the edges of one tier since it was made. Thread-safe: written in I/O threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = dict.fromkeys(
            (
                "written_bytes",
                "writes",
                "write_seconds",
                "read_bytes",
                "reads",
                "read_seconds",
                "retries",
                "write_failures",
                "read_failures",
                "checksum_failures",
            ),
            0,
        )

    def add(self, **amounts: float) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def __getitem__(self, name: str) -> float:
        return self._counts[name]

    def to_dict(self) -> dict[str, Any]:
        """JSON; seconds as floats, all else as integers."""
        with self._lock:
            return {k: v if k.endswith("_seconds") else int(v) for k, v in self._counts.items()}
