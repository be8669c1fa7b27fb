"""`BackOff`: a tier, a folder, a worker's prefix or reading ahead rests after failures in a row."""

from __future__ import annotations

#: of the longest rest
LONGEST_SECONDS = 60.0


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
