"""`Budget`: limits the time that decisions take on the scheduler's event loop.

`record` adds a decision; `exhausted` says whether Dask should decide now.

A decision is made once per task, so a slow one slows the whole cluster. There are three limits. Each excess is counted,
and Dask decides instead:

* One decision: it is given up when gathering its facts has taken `DECISION_SECONDS` (`late`).
* One second: decisions may take `SHARE` of it. Dask decides for the rest of that second.
* The usual decision: placement rests for `REST_SECONDS` when the median of `WINDOW` decisions exceeds `LIMIT_SECONDS`.
  The median, not the mean: one pause of the process must not count as slowness.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: decisions whose median is taken
WINDOW = 1000
LIMIT_SECONDS = 200e-6
REST_SECONDS = 30.0
#: a decision that has taken so long is left to Dask
DECISION_SECONDS = 10e-3
#: share of any second that decisions may take; a task costs the scheduler several times what its decision does, so
#: that this is reached only when decisions take far longer than they should
SHARE = 0.5


class Budget:
    """Decision times of one scheduler, and whether they exceed a limit."""

    __slots__ = (
        "_clock",
        "_rest_until",
        "_ring",
        "_second",
        "_spent",
        "count",
        "decision_seconds",
        "late",
        "limit_seconds",
        "rests",
        "seconds_full",
        "share",
        "total_seconds",
    )

    def __init__(self, limit_seconds: float = LIMIT_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_seconds = limit_seconds
        #: a decision that has taken so long is given up
        self.decision_seconds = DECISION_SECONDS
        #: of a second; infinite where nothing but decisions is done, in benchmarks and on a virtual clock
        self.share = SHARE
        #: decisions recorded, and their sum
        self.count = 0
        self.total_seconds = 0.0
        #: how often the limit was exceeded
        self.rests = 0
        #: decisions given up because they took too long
        self.late = 0
        #: seconds whose share was used up
        self.seconds_full = 0
        self._clock = clock
        self._rest_until: float | None = None
        #: start of the current second, and what was spent in it
        self._second = 0.0
        self._spent = 0.0
        #: the last WINDOW decisions
        self._ring: deque[float] = deque(maxlen=WINDOW)

    def record(self, seconds: float) -> None:
        """Record a decision that took so many seconds."""
        self._ring.append(seconds)
        self.count += 1
        self._spend(seconds)
        if not self.count % WINDOW and sorted(self._ring)[WINDOW // 2] > self.limit_seconds:
            self.rests += 1
            self._rest_until = self._clock() + REST_SECONDS

    def gave_up(self, seconds: float) -> None:
        """Record a decision given up after so many seconds. It does not count as one that was made."""
        self.late += 1
        self._spend(seconds)

    def declined(self, seconds: float) -> None:
        """Record that a policy has left a decision to Dask, or raised, after so many seconds."""
        self._spend(seconds)

    def _spend(self, seconds: float) -> None:
        self.total_seconds += seconds
        self._spent += seconds
        # The clock is read once per full share, and then per decision.
        if self._spent >= self.share and self._rest_until is None:
            now = self._clock()
            if now - self._second < 1.0:
                self.seconds_full += 1
                self._rest_until = self._second + 1.0
            self._second, self._spent = now, 0.0

    @property
    def exhausted(self) -> bool:
        """Whether Dask should decide now."""
        if self._rest_until is None:
            return False
        now = self._clock()
        if now < self._rest_until:
            return True
        self._rest_until = None
        self._second, self._spent = now, 0.0
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
            "given_up": self.late,
            "full_seconds": self.seconds_full,
            "resting": self.exhausted,
        }
