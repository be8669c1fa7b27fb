"""Which transport a message takes. Pure: figures in, a name out.

Theory of operation. What can reach a peer is known from its card (`candidates`); which of these is fastest is measured.
Every pair starts from rates measured before (`PRIOR`, GB/s of one stream by place and size of message) and learns from
its own traffic: bytes over the seconds from the hand-over to the acknowledgement. A prior counts as much as
`PRIOR_BYTES` of traffic, so that one slow message does not change the order, and many do.

What slows one way down (a slow network, a busy peer) mostly slows all of them, so the prior of one way is scaled by
what the traffic of the others has shown; else the way that is used would always lose to those that are not. The
evidence counts for a way that was not tried exactly as for the one it came from: were it diluted more, a burst on a
busy machine would send everything to the slower way. To see the exception, one message in `TRY_EVERY` goes by another
way that is not far behind, and one in `RARELY` of those by one that is. A transport that lost a link is out for
`BACKOFF_SECONDS`, twice as long each time; the safe path is always in.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: always there: distributed's comms
SAFE = "rpc"
INPROC = "inproc"
BACKOFF_SECONDS = 5.0
BACKOFF_LIMIT = 300.0
PRIOR_BYTES = 64 << 20
TRY_EVERY = 64
#: of those, for ways that are less than half as fast
RARELY = 8
_SIZES = (1 << 18, 1 << 22)


class Place(enum.Enum):
    """Where a peer is."""

    PROCESS = "same process"
    HOST = "same host"
    REMOTE = "another host"


#: place -> transport -> GB/s for messages below 256 KiB, below 4 MiB, and longer, as `benchmarks/transport.py` has
#: them. What counts is their order; a pair's traffic decides in the end.
PRIOR: dict[Place, dict[str, tuple[float, float, float]]] = {
    Place.HOST: {"ucx": (0.3, 1.1, 1.5), "tcp": (0.43, 2.2, 6.0), SAFE: (0.2, 1.6, 1.5)},
    Place.REMOTE: {"ucx": (0.2, 0.9, 1.2), "tcp": (0.43, 1.3, 1.5), SAFE: (0.2, 1.2, 1.3)},
}


def _bucket(nbytes: int) -> int:
    return sum(nbytes >= size for size in _SIZES)


@dataclasses.dataclass(slots=True)
class _Rate:
    nbytes: float = 0.0
    seconds: float = 0.0


class Chooser:
    """What is known about the ways to one peer.

    Parameters
    ----------
    forced
        ``auto``, or the only transport to use besides the safe one.
    """

    def __init__(self, place: Place, candidates: Iterable[str], forced: str = "auto") -> None:
        self.place = place
        self.candidates = tuple(dict.fromkeys([*candidates, SAFE]))
        self.forced = forced
        self._chosen = 0
        self._rates: dict[tuple[str, int], _Rate] = {}
        #: transport -> (out until, times lost)
        self._out: dict[str, tuple[float, int]] = {}

    def choose(self, nbytes: int, device: bool, now: float) -> str:
        """The transport for a message of `nbytes`."""
        able = [c for c in self.candidates if c == SAFE or self._out.get(c, (0.0, 0))[0] <= now]
        if self.forced != "auto":
            return self.forced if self.forced in able else SAFE
        if INPROC in able:
            return INPROC
        if device:
            return "ucx" if "ucx" in able else SAFE
        best, *others = sorted(able, key=lambda name: -self.rate(name, nbytes))
        self._chosen += 1
        turn, rest = divmod(self._chosen, TRY_EVERY)
        if not others or rest:
            return best
        # One that is far behind is looked at as well, but rarely: at a fifth of the speed, one in 64 costs 6 %.
        near = [name for name in others if 2 * self.rate(name, nbytes) > self.rate(best, nbytes)]
        return near[turn % len(near)] if near else others[turn // RARELY % len(others)] if not turn % RARELY else best

    def rate(self, name: str, nbytes: int) -> float:
        """Expected bytes per second."""
        bucket = _bucket(nbytes)
        prior = self._prior(name, bucket)
        if not prior:
            return 0.0
        expected = took = 0.0
        for (other, at), rate in self._rates.items():
            if at == bucket and other != name and (p := self._prior(other, bucket)):
                expected += (PRIOR_BYTES + rate.nbytes) / p
                took += PRIOR_BYTES / p + rate.seconds
        if took:
            prior *= min(1.0, expected / took)
        own = self._rates.get((name, bucket), _Rate())
        return (PRIOR_BYTES + own.nbytes) / (PRIOR_BYTES / prior + own.seconds)

    def _prior(self, name: str, bucket: int) -> float:
        return PRIOR.get(self.place, {}).get(name, (0.0, 0.0, 0.0))[bucket] * 1e9

    def observe(self, name: str, nbytes: int, seconds: float) -> None:
        """A message of `nbytes` took so long."""
        key = name, _bucket(nbytes)
        rate = self._rates.setdefault(key, _Rate())
        # Old traffic fades, so that a change is seen.
        if rate.nbytes > 16 * PRIOR_BYTES:
            rate.nbytes, rate.seconds = rate.nbytes / 2, rate.seconds / 2
        rate.nbytes += nbytes
        rate.seconds += seconds

    def lost(self, name: str, now: float) -> None:
        """A link of this transport was lost."""
        until, times = self._out.get(name, (0.0, 0))
        if until <= now:
            self._out[name] = (now + min(BACKOFF_LIMIT, BACKOFF_SECONDS * 2**times), times + 1)
