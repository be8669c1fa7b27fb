"""`BackOff`: a tier, a folder, a worker's prefix or reading ahead rests after failures in a row. `Patience`: a read is
repeated until an object store delivers.
"""

from __future__ import annotations

import random

#: of the longest rest
LONGEST_SECONDS = 60.0
#: for one read of a store that does not deliver
PATIENCE_SECONDS = 180.0
#: between two attempts: tasks wait
LONGEST_PAUSE_SECONDS = 15.0


def rest_seconds(failures: int) -> float:
    """Seconds to rest after so many failures in a row, one at least: 1, 2, 4, ..., a minute."""
    # Bounded: 2.0 ** 1024 overflows, and that many failures come in a day.
    return min(LONGEST_SECONDS, 2.0 ** min(failures - 1, 6))


class BackOff:
    """Failures in a row of one thing, `patience` of which let it rest, and until when it does. Not thread-safe."""

    __slots__ = ("failures", "patience", "until")

    def __init__(self, patience: int = 1) -> None:
        self.patience = patience
        #: in a row; the caller sets it to 0 after a success
        self.failures = 0
        #: end of the rest, in seconds of the caller's clock
        self.until = 0.0

    def failed(self, now: float) -> bool:
        """Count a failure at this time; whether it is the first one that it rests for."""
        self.failures += 1
        if self.failures >= self.patience:
            self.until = now + rest_seconds(self.failures - self.patience + 1)
        return self.failures == self.patience


class Patience:
    """How long one read is repeated. Most outages of an object store are shorter, and end without a task that fails.

    It ends even where others of the store succeed: it may refuse one object for good.
    """

    __slots__ = ("_failures", "_until")

    def __init__(self, now: float) -> None:
        self._until = now + PATIENCE_SECONDS
        self._failures = 0

    def pause(self, now: float) -> float | None:
        """Count a failure at this time; seconds until the next attempt, None: there is none."""
        if now >= self._until:
            return None
        self._failures += 1
        # Jitter: when a store comes back, its workers must not come all at once.
        return min(LONGEST_PAUSE_SECONDS, rest_seconds(self._failures)) * (0.5 + random.random() / 2)
