"""How fast links are, learned from the transfers that happen anyway.

One straight line ``seconds = latency * requests + bytes / bandwidth`` per `LinkClass`, fitted by least squares over
decayed sums, so that it follows a network that changes and needs no memory of samples.

* Residuals count relative to the predicted time. Transfers span seven orders of magnitude in size; unweighted, one
  slow gigabyte would outvote a thousand small fetches and the latency would be noise.
* The seed is a pair of pseudo-observations that do not decay. They keep the fit well-posed when all transfers have the
  same size, and are outvoted after about ten real samples.
* Times below `JITTER` count as that long when they are weighed or judged. Otherwise one optimistic fit makes every
  small fetch look like an outlier, and the few that pass outweigh all others.
* A sample that is off by more than a factor of `OUTLIER` is dropped: a paused process, a garbage collection. A run of
  them is not an accident but news, and resets the fit to it.
* Concurrency is the caller's to resolve (see `merge`): what fetched at the same time shared the link.

Upstream's `bandwidth_workers` is not used: it averages the sum of a heartbeat's bandwidths as if it were one
observation (four transfers of 100 MB/s read as 400 MB/s) and knows no latency.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dask_gpurt.model.link import Link, LinkClass

if TYPE_CHECKING:
    from collections.abc import Sequence

#: before anything is measured: what Dask's comms deliver, not what the wire could carry. The latency is that of two
#: busy event loops (5 ms measured over loopback), not of the wire.
SEEDS: dict[LinkClass, Link] = {
    LinkClass.PROCESS: Link(latency_seconds=2e-3, bytes_per_second=10e9),
    LinkClass.HOST: Link(latency_seconds=5e-3, bytes_per_second=1e9),
    LinkClass.RACK: Link(latency_seconds=5e-3, bytes_per_second=400e6),
    LinkClass.NETWORK: Link(latency_seconds=5e-3, bytes_per_second=400e6),
}
#: weight that remains of a sample after the next one; half of it is gone after 69
DECAY = 0.99
#: factor between predicted and measured time above which a sample is not believed
OUTLIER = 10.0
#: so many unbelievable samples in a row are believed
NEWS = 8
#: samples before outliers are judged at all
TRUSTED = 16
#: weight of each of the two pseudo-observations of the seed
PRIOR = 1.0
#: below this a time is jitter of the event loops: neither a weight nor an outlier is made of it, in seconds
JITTER = 2e-3
#: nothing that two event loops take part in is faster
_LATENCY = (1e-4, 1.0)
_BANDWIDTH = (1e5, 1e13)


class LinkFit:
    """The line of one class of link."""

    __slots__ = ("_rejected_run", "_sums", "dropped", "link", "samples", "seed")

    def __init__(self, seed: Link) -> None:
        self.seed = seed
        #: the current estimate
        self.link = seed
        self.samples = 0
        #: samples not believed
        self.dropped = 0
        self._rejected_run = 0
        self._sums = [0.0] * 5

    def observe(self, nbytes: float, seconds: float, requests: int = 1) -> bool:
        """Learn from a transfer; False when it was dropped."""
        if not (math.isfinite(seconds) and math.isfinite(nbytes)) or seconds <= 0 or nbytes < 0 or requests < 1:
            self.dropped += 1
            return False
        predicted = max(JITTER, self.link.seconds(nbytes, requests))
        if self.samples >= TRUSTED and not predicted / OUTLIER < max(JITTER, seconds) < predicted * OUTLIER:
            self._rejected_run += 1
            if self._rejected_run < NEWS:
                self.dropped += 1
                return False
            self._sums = [0.0] * 5
            self.samples = 0
        self._rejected_run = 0
        self.samples += 1
        w = 1.0 / (predicted * predicted)
        s = self._sums
        for i, value in enumerate(
            (requests * requests, requests * nbytes, nbytes * nbytes, requests * seconds, nbytes * seconds)
        ):
            s[i] = s[i] * DECAY + w * value
        self._solve()
        return True

    def _solve(self) -> None:
        rr, rn, nn, rt, nt = self._sums
        latency, bandwidth = self.seed.latency_seconds, self.seed.bytes_per_second
        # Pseudo-observations on the seed's line: an empty fetch, and a fetch so large that its latency does not matter.
        # Their weight is relative to the slower of seed and estimate: relative to the seed alone, a link a hundred
        # times slower than its seed would be learned a thousand samples too late, because each of its (long) transfers
        # weighs little; relative to the estimate alone, the same holds for a faster one.
        w_latency = PRIOR / max(JITTER, latency, self.link.latency_seconds) ** 2
        w_bandwidth = PRIOR * min(bandwidth, self.link.bytes_per_second) ** 2
        rr += w_latency
        rt += w_latency * latency
        nn += w_bandwidth
        nt += w_bandwidth / bandwidth
        det = rr * nn - rn * rn
        a = (rt * nn - nt * rn) / det if det > 0 else -1.0
        b = (nt * rr - rt * rn) / det if det > 0 else -1.0
        # A negative coefficient is noise: hold it at its bound and give the other one the whole.
        if a <= _LATENCY[0]:
            a = _LATENCY[0]
            b = (nt - a * rn) / nn
        if b <= 1 / _BANDWIDTH[1]:
            b = 1 / _BANDWIDTH[1]
            a = (rt - b * rn) / rr
        self.link = Link(
            latency_seconds=min(max(a, _LATENCY[0]), _LATENCY[1]),
            bytes_per_second=min(max(1 / b, _BANDWIDTH[0]), _BANDWIDTH[1]),
        )


class LinkMatrix:
    """A `LinkFit` for every class."""

    def __init__(self, seeds: dict[LinkClass, Link] | None = None) -> None:
        self.fits: dict[LinkClass, LinkFit] = {c: LinkFit((seeds or SEEDS)[c]) for c in LinkClass}

    def link(self, link_class: LinkClass) -> Link:
        return self.fits[link_class].link

    def reseed(self, link_class: LinkClass, seed: Link) -> None:
        """Forget what was learned of a class: its meaning has changed."""
        self.fits[link_class] = LinkFit(seed)

    def observe(self, link_class: LinkClass, nbytes: float, seconds: float, requests: int = 1) -> bool:
        return self.fits[link_class].observe(nbytes, seconds, requests)

    def statistics(self) -> dict[str, dict[str, float]]:
        """By class: latency in seconds, bandwidth in bytes/s, samples used and dropped."""
        return {
            c.value: {
                "latency_seconds": f.link.latency_seconds,
                "bytes_per_second": f.link.bytes_per_second,
                "samples": f.samples,
                "dropped": f.dropped,
            }
            for c, f in self.fits.items()
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One request from one worker to another, as the receiver saw it."""

    start: float
    stop: float
    nbytes: float
    link_class: LinkClass


def merge(transfers: Sequence[Transfer]) -> list[tuple[LinkClass, float, float, int]]:
    """Samples ``(class, bytes, seconds, requests)`` from transfers into one worker.

    Transfers that overlap in time shared the link: together they are one sample with their bytes and the time of their
    union. A group that mixes classes says nothing about any of them and is left out.
    """
    out: list[tuple[LinkClass, float, float, int]] = []
    group: list[Transfer] = []
    end = -math.inf

    def close() -> None:
        if group and len({t.link_class for t in group}) == 1:
            seconds = end - min(t.start for t in group)
            out.append((group[0].link_class, sum(t.nbytes for t in group), seconds, 1))

    for t in sorted(transfers, key=lambda t: t.start):
        if t.start >= end:
            close()
            group = []
            end = t.stop
        group.append(t)
        end = max(end, t.stop)
    close()
    return out
