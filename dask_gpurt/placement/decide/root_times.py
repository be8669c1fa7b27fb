"""`RootTimes`: how long roots take and how large their results are, as moving averages."""

from __future__ import annotations

#: a result and the next task take so long between a worker and the scheduler: two busy event loops, as measured over
#: loopback (`topology.links.SEEDS`)
ROUND_TRIP_SECONDS = 0.005
#: share of a worker's memory mark that the results of roots sent ahead may take
AHEAD_SHARE = 0.025
#: weight of a root in the averages
ROOT_GAIN = 0.05


class RootTimes:
    """Averages over the roots that workers have computed; 0.0: none so far."""

    __slots__ = ("_square", "nbytes", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        #: bytes of a result
        self.nbytes = 0.0
        #: of the square of the seconds
        self._square = 0.0

    def learn(self, seconds: float, nbytes: float) -> None:
        """Take in one root: its seconds and the bytes of its result."""
        gain = ROOT_GAIN if self.seconds or self.nbytes else 1.0
        self.seconds += gain * (seconds - self.seconds)
        self.nbytes += gain * (nbytes - self.nbytes)
        self._square += gain * (seconds * seconds - self._square)

    def found_seconds(self) -> float:
        """Mean seconds of the root that a worker is running at a random moment: a waiting task waits behind it.

        The mean where all roots take about as long. More where a few take much longer, as those take most of the time.
        """
        return max(self.seconds, self._square / self.seconds) if self.seconds else 0.0
