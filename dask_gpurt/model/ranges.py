"""Named ranges for a profiler: what `dask_gpurt.backends` offers and observation uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Ranges(Protocol):
    """Marks stretches of a thread's time in a profiler's timeline."""

    def range(self, name: str) -> AbstractContextManager[object]:
        """``with ranges.range(name)``: the calling thread is in that range, which nests."""
