"""`Tails`: how long single waits were, by cause. A sum of seconds hides whether one slot waited long or all a little.

A wait is the time for which one slot was idle for one cause without a break. Its length goes into a histogram whose
bounds grow by the square root of two, from a millisecond to a quarter of an hour, so that a quantile is right to a
fifth either way, a wait costs one logarithm, and histograms of workers add up. What is shorter than a millisecond is
not counted: it belongs to how tasks are handed from one to the next.

Rejected: reservoirs of lengths (they do not add up over workers and restarts), t-digests (one more dependency for
figures that are read with the eye).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: waits below are not counted, in seconds
SHORTEST = 1e-3
#: the last one takes everything that is longer
BUCKETS = 40


class Tails:
    """Histograms of waits, by cause."""

    def __init__(self) -> None:
        #: cause -> count by bucket
        self.counts: dict[str, list[int]] = {}

    def add(self, cause: str, seconds: float) -> None:
        """One wait has ended."""
        if seconds < SHORTEST:
            return
        counts = self.counts.get(cause)
        if counts is None:
            counts = self.counts[cause] = [0] * BUCKETS
        counts[min(BUCKETS - 1, int(2 * math.log2(seconds / SHORTEST)))] += 1

    def grow(self, growth: Mapping[str, Sequence[int]]) -> None:
        """Add the histograms of others."""
        for cause, more in growth.items():
            counts = self.counts.setdefault(cause, [0] * BUCKETS)
            for i, count in enumerate(more[:BUCKETS]):
                counts[i] += count

    def as_json(self) -> dict[str, list[int]]:
        """Plain values: cause -> counts, without what is zero at the end."""
        return {cause: trimmed(counts) for cause, counts in self.counts.items()}


def trimmed(counts: Sequence[int]) -> list[int]:
    """Without the zeros at the end."""
    last = max((i for i, count in enumerate(counts) if count), default=-1)
    return list(counts[: last + 1])


def grown(now: Mapping[str, Sequence[int]], old: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """What histograms have gained; all of one that has fewer than before, as it was started anew."""
    out: dict[str, list[int]] = {}
    for cause, counts in now.items():
        before = old.get(cause, ())
        if sum(before) > sum(counts):
            before = ()
        more = [max(0, n - (before[i] if i < len(before) else 0)) for i, n in enumerate(counts)]
        if any(more):
            out[cause] = trimmed(more)
    return out


def quantile(counts: Sequence[int], share: float) -> float:
    """The length in seconds that `share` of the waits did not pass; 0 without any.

    The geometric middle of the bucket, so at most a fifth off.
    """
    left = share * sum(counts)
    for i, count in enumerate(counts):
        left -= count
        if count and left <= 1e-9:
            return float(SHORTEST * 2 ** ((i + 0.5) / 2))
    return 0.0


def figures(histograms: Mapping[str, Sequence[int]], causes: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
    """cause -> ``count``, ``p50_seconds``, ``p99_seconds``; those that never were are left out."""
    return {
        cause: {
            "count": sum(counts),
            "p50_seconds": quantile(counts, 0.5),
            "p99_seconds": quantile(counts, 0.99),
        }
        for cause in (histograms if causes is None else causes)
        if (counts := histograms.get(cause)) and sum(counts)
    }
