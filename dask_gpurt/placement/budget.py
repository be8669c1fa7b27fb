"""How long decisions take, and what happens when they take too long.

Deciding happens on the scheduler's event loop, once per task, so a slow decision slows the whole cluster. When the
median of `WINDOW` decisions exceeds `LIMIT_SECONDS`, placement leaves the decisions to stock for `REST_SECONDS` and
then tries again. The median, not the mean: one pause of the process must not count as slowness.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: decisions per look at the clock's records
WINDOW = 1000
LIMIT_SECONDS = 200e-6
REST_SECONDS = 30.0


class Budget:
    """Records of decision times, bounded."""

    __slots__ = ("_clock", "_rest_until", "_ring", "count", "limit_seconds", "rests", "total_seconds")

    def __init__(self, limit_seconds: float = LIMIT_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_seconds = limit_seconds
        #: decisions recorded, and their sum
        self.count = 0
        self.total_seconds = 0.0
        #: how often the limit was exceeded
        self.rests = 0
        self._clock = clock
        self._rest_until: float | None = None
        #: the last WINDOW decisions
        self._ring: list[float] = []

    def record(self, seconds: float) -> None:
        """One decision took so long."""
        at = self.count % WINDOW
        if len(self._ring) < WINDOW:
            self._ring.append(seconds)
        else:
            self._ring[at] = seconds
        self.count += 1
        self.total_seconds += seconds
        if at == WINDOW - 1 and sorted(self._ring)[WINDOW // 2] > self.limit_seconds:
            self.rests += 1
            self._rest_until = self._clock() + REST_SECONDS

    @property
    def exhausted(self) -> bool:
        """Whether stock should decide now."""
        if self._rest_until is None:
            return False
        if self._clock() < self._rest_until:
            return True
        self._rest_until = None
        return False

    def statistics(self) -> dict[str, float | int | bool]:
        """Microseconds: the total of all decisions; median and 99th percentile of the last `WINDOW`."""
        ordered = sorted(self._ring)
        n = len(ordered)
        return {
            "total": self.total_seconds * 1e6,
            "median": ordered[n // 2] * 1e6 if n else 0.0,
            "p99": ordered[min(n - 1, int(n * 0.99))] * 1e6 if n else 0.0,
            "over_budget": self.rests,
            "resting": self.exhausted,
        }
