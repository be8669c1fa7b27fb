"""`Cascade`: several tiers as one; a value goes to the first that takes it.

The order is the cost of return, cheapest first: a read from a local disk costs a tenth of one from an object store, so
the store is used when the disk is full or fails. With ``gpurt.tiers.object-use: first`` it is the other way round.

A tier whose writes fail is set aside: after each failure as long as it took to fail, and for one second after
`FAILURES` failures in a row, doubling to a minute. A success forgives all. One that knows by its quota or its reserve
that it is full says so at once and for nearly nothing, so it is asked each time. One that hears it from the system has
written a part of the value by then: that is a failure. When none takes the value, the error of the first one that was
asked is raised, and the value stays in memory (`eviction` goes on from there).

Rejected: moving values from disk to the store to make room for ones that are needed sooner. It costs a read and an
upload, and eviction already writes the farthest first.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import TierFull
from dask_gpurt.tiers.backoff import BackOff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.model.tier import Tier
    from dask_gpurt.tiers.storage.handle import Group, Handle
    from dask_gpurt.tiers.storage.protocol import StorageTier

logger = logging.getLogger("distributed.worker.gpurt")

#: in a row, before a tier is set aside
FAILURES = 2


@dataclasses.dataclass(eq=False)
class _Level:
    tier: StorageTier
    #: monotonic seconds
    rest: BackOff = dataclasses.field(default_factory=lambda: BackOff(FAILURES))
    writes: int = 0
    written_bytes: int = 0
    full: int = 0
    failed: int = 0
    skipped: int = 0
    last_error: str = ""


class Cascade:
    """Implements `StorageTier` over others, at least one, which are asked in this order. Thread-safe."""

    def __init__(self, tiers: Sequence[StorageTier], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._levels = [_Level(t) for t in tiers]
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def tier(self) -> Tier:
        """That of the first."""
        return self._levels[0].tier.tier

    @property
    def used_bytes(self) -> int:
        """Bytes on all of them."""
        return sum(level.tier.used_bytes for level in self._levels)

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that all of them may take; None: no limit."""
        limits = [level.tier.limit_bytes for level in self._levels]
        return None if None in limits else sum(n for n in limits if n is not None)

    def write(self, groups: Sequence[Group]) -> Handle:
        """Keep the frames on the first tier that takes them; see `StorageTier.write`."""
        first: OSError | None = None
        try:
            for level in self._levels:
                if self._clock() < level.rest.until:
                    level.skipped += 1
                    continue
                began = self._clock()
                try:
                    handle = level.tier.write(groups)
                except OSError as e:
                    if isinstance(e, TierFull) and e.__cause__ is None:
                        level.full += 1
                    else:
                        self._failed(level, e, began)
                    first = first or e
                else:
                    with self._lock:
                        level.rest.failures = 0
                        level.writes += 1
                        level.written_bytes += handle.nbytes
                    return handle
            raise first or TierFull(
                errno.EAGAIN, "all tiers below memory rest after failed writes. The value stays in memory"
            )
        finally:
            # Its traceback holds this frame, which holds it: the frames of the value would live until the next
            # garbage collection.
            del first

    def _failed(self, level: _Level, error: OSError, began: float) -> None:
        with self._lock:
            now = self._clock()
            level.failed += 1
            level.last_error = str(error)
            first = level.rest.failed(now)
            # A store that does not answer takes minutes to fail, in which tasks wait for room in memory.
            level.rest.until = max(level.rest.until, now + (now - began))
        if first:
            # As text: the log of a worker keeps records, and a traceback holds the frames of the value.
            name, text = level.tier.tier.name.lower(), level.last_error
            logger.warning("the %s tier is set aside after failed writes: %s", name, text)

    def probe(self) -> None:
        """All of them."""
        for level in self._levels:
            level.tier.probe()

    def close(self) -> None:
        """Delete everything on all of them."""
        for level in self._levels:
            level.tier.close()

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Per tier, as plain JSON: what it took, and how often it did not."""
        now = self._clock()
        return {
            level.tier.tier.name.lower(): {
                "used_bytes": level.tier.used_bytes,
                "limit_bytes": level.tier.limit_bytes,
                "writes": level.writes,
                "written_bytes": level.written_bytes,
                "full": level.full,
                "failed_writes": level.failed,
                "skipped_writes": level.skipped,
                "resting_seconds": max(0.0, level.rest.until - now),
                "last_error": level.last_error,
            }
            for level in self._levels
        }
