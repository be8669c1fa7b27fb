"""How fast links are, learned from the transfers that happen anyway.

``seconds = latency * requests + bytes / bandwidth`` per `LinkClass`. Each of the two figures has its own samples, and
each is an order statistic of the last `WINDOW` of them:

* *Latency* is the median of what small fetches took, less the time of their bytes. Transfers of `LARGE_BYTES` or more
  do not count.
* *Bandwidth* is the upper quantile `FAST` of the rates of large transfers, less the latency. Small fetches do not
  count. A transfer that shared its way with others, or waited for a busy process, looks slow; nothing makes one look
  fast. So the faster samples are nearer to the truth. Larger transfers weigh more, with the root of their size: of a
  small one more is waiting.
* The seed counts as `PRIOR` of evidence. A few samples outvote it, the first one alone does not.
* Nothing is rejected as an outlier: a single odd sample does not move an order statistic, and a run of them is news.
  All that was learned before is out of the window after `WINDOW` samples.
* A rate that is more than `RANGE` times the seed's, or less than its inverse, is believed only of transfers of
  `TELLING_BYTES`, or that took `TELLING_SECONDS`. Shorter ones may say more about one pause than about the wire.
* Concurrency is the caller's to resolve (see `merge`): what fetched at the same time shared the link.

One least-squares line through all sizes does worse. Small fetches that wait for each other raise the slope, then the
negative intercept is cut off, the bandwidth runs to its bound, and true large transfers look like outliers for ever.

Upstream's `bandwidth_workers` is not used: it averages the sum of a heartbeat's bandwidths as if it were one
observation (four transfers of 100 MB/s read as 400 MB/s) and knows no latency.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
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
#: from this size on a transfer says something of the bandwidth, below it of the latency
LARGE_BYTES = 1e6
#: a transfer larger than this weighs no more
HEAVIEST_BYTES = 256e6
#: samples kept of small fetches, and of large transfers
WINDOW = 32
#: quantile of the rates, by weight, that is the bandwidth
FAST = 0.75
#: weight of the seed: four transfers of `LARGE_BYTES`, one of sixteen times that, four small fetches
PRIOR = 4.0
#: factor from the seed's bandwidth beyond which only telling transfers are believed
RANGE = 20.0
TELLING_BYTES = 16e6
TELLING_SECONDS = 0.2
#: the least time that a large transfer is taken to need; below it the clocks of two event loops are compared
SHORTEST_SECONDS = 1e-3
#: at most this share of a large transfer's time is put down to latency
WAITING = 0.5
#: samples after which the figures are worked out at each one; later at every `EVERY`-th
EAGER = 16
EVERY = 8
#: nothing that two event loops take part in answers faster, in seconds
_LATENCY = (1e-4, 1.0)
#: no network that hosts have carries more than 800 Gbit/s, and no copy in memory is much faster, in bytes/s
_BANDWIDTH = (1e5, 1e11)


class LinkFit:
    """The latency and bandwidth of one class of link."""

    __slots__ = (
        "_evidence",
        "_fetches",
        "_latencies",
        "_rates",
        "_transfers",
        "dropped",
        "link",
        "samples",
        "seed",
    )

    def __init__(self, seed: Link) -> None:
        self.seed = seed
        #: the current estimate
        self.link = seed
        self.samples = 0
        #: samples that cannot be: of no time or of negative size
        self.dropped = 0
        #: small fetches and large transfers so far, and the weight of the latter
        self._fetches = 0
        self._transfers = 0
        self._evidence = 0.0
        self._latencies: deque[float] = deque(maxlen=WINDOW)
        #: (bytes/s, weight)
        self._rates: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def observe(self, nbytes: float, seconds: float, requests: int = 1, receivers: int = 1) -> bool:
        """Learn from a transfer; False when it was dropped.

        Parameters
        ----------
        nbytes, seconds
            Its size and how long it took.
        requests
            In how many requests, one after the other, it was made.
        receivers
            How many workers fetched the same value. They share the port of the sender, and are samples of one thing:
            each of them has its share of the weight.
        """
        if (
            not (math.isfinite(seconds) and math.isfinite(nbytes))
            or seconds <= 0
            or nbytes < 0
            or requests < 1
            or receivers < 1
        ):
            self.dropped += 1
            return False
        self.samples += 1
        link, seed = self.link, self.seed
        if nbytes < LARGE_BYTES:
            self._fetches += 1
            self._latencies.append((seconds - nbytes / link.bytes_per_second) / requests)
            if self._fetches <= EAGER or not self._fetches % EVERY:
                self._settle_latency()
            return True
        # The seed's latency is a guess: to take it off could double the rate.
        latency = link.latency_seconds * requests if self._fetches else 0.0
        rate = nbytes / max(seconds - latency, seconds * (1 - WAITING), SHORTEST_SECONDS)
        if nbytes < TELLING_BYTES and seconds < TELLING_SECONDS:
            rate = _within(rate, seed.bytes_per_second / RANGE, seed.bytes_per_second * RANGE)
        weight = math.sqrt(min(nbytes, HEAVIEST_BYTES) / LARGE_BYTES) / receivers
        self._transfers += 1
        self._evidence += weight
        self._rates.append((rate, weight))
        if self._transfers <= EAGER or not self._transfers % EVERY:
            self._settle_bandwidth()
        return True

    def _settle_latency(self) -> None:
        kept = sorted(self._latencies)
        seed = self.seed.latency_seconds
        latency = seed + (kept[len(kept) // 2] - seed) * (self._fetches / (self._fetches + PRIOR))
        self.link = Link(_within(latency, *_LATENCY), self.link.bytes_per_second)

    def _settle_bandwidth(self) -> None:
        kept = sorted(self._rates, reverse=True)
        left = (1 - FAST) * sum([weight for _, weight in kept])
        rate = 0.0
        for faster, weight in kept:
            rate = faster
            left -= weight
            if left < 0:
                break
        # Between logarithms: ten times as fast and ten times as slow are equally far from the seed.
        seed = self.seed.bytes_per_second
        bandwidth = seed * (rate / seed) ** (self._evidence / (self._evidence + PRIOR))
        self.link = Link(self.link.latency_seconds, _within(bandwidth, *_BANDWIDTH))


def _within(value: float, least: float, most: float) -> float:
    return least if value < least else most if value > most else value


class LinkMatrix:
    """A `LinkFit` for every class."""

    def __init__(self, seeds: dict[LinkClass, Link] | None = None) -> None:
        self.fits: dict[LinkClass, LinkFit] = {c: LinkFit((seeds or SEEDS)[c]) for c in LinkClass}

    def link(self, link_class: LinkClass) -> Link:
        """What is known of a class."""
        return self.fits[link_class].link

    def reseed(self, link_class: LinkClass, seed: Link) -> None:
        """Forget what was learned of a class: its meaning has changed."""
        self.fits[link_class] = LinkFit(seed)

    def observe(
        self, link_class: LinkClass, nbytes: float, seconds: float, requests: int = 1, receivers: int = 1
    ) -> bool:
        """See `LinkFit.observe`."""
        return self.fits[link_class].observe(nbytes, seconds, requests, receivers)

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
    #: how many workers fetched the same
    receivers: int = 1


def merge(transfers: Sequence[Transfer]) -> list[tuple[LinkClass, float, float, int]]:
    """Samples ``(class, bytes, seconds, receivers)`` from transfers into one worker.

    Transfers that overlap in time shared the link: together they are one sample with their bytes and the time of their
    union. A group that mixes classes says nothing about any of them and is left out.
    """
    out: list[tuple[LinkClass, float, float, int]] = []
    group: list[Transfer] = []
    end = -math.inf

    def close() -> None:
        if group and len({t.link_class for t in group}) == 1:
            seconds = end - min(t.start for t in group)
            receivers = max(t.receivers for t in group)
            out.append((group[0].link_class, sum(t.nbytes for t in group), seconds, receivers))

    for t in sorted(transfers, key=lambda t: t.start):
        if t.start >= end:
            close()
            group = []
            end = t.stop
        group.append(t)
        end = max(end, t.stop)
    close()
    return out
