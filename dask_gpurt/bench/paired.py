"""Paired measurement: cases take turns, so that a machine that warms up or gets busy does so for all of them.

A figure is the median of its runs, a comparison is the median of the ratios within each round (not the ratio of
medians: a round shares its minute). The order is reversed every other round, so none is always first.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Case:
    """All runs of one case, in seconds, in order of the rounds."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratio(self, baseline: Case) -> float:
        """Median over rounds of this case's time over the baseline's; below 1 is faster."""
        return statistics.median(a / b for a, b in zip(self.seconds, baseline.seconds, strict=True))

    @property
    def spread(self) -> float:
        """Slowest minus fastest run over the median: the noise of this case. 0 for a single run, which tells none."""
        return (max(self.seconds) - min(self.seconds)) / self.median

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": list(self.seconds),
            "median_s": self.median,
            "min_s": min(self.seconds),
            "max_s": max(self.seconds),
        }


def turns(names: Sequence[str], runs: int) -> Iterator[tuple[int, str]]:
    """(round, name) in the order to run them.

    Raises
    ------
    ValueError
        No run, or no case.
    """
    if runs < 1:
        raise ValueError(f"runs is {runs!r}, must be at least 1")
    if not names:
        raise ValueError("no case was given to compare")
    for r in range(runs):
        for name in names if r % 2 == 0 else reversed(names):
            yield r, name


def geometric_mean(values: Iterable[float]) -> float:
    """Of ratios, where it is the mean that does not depend on which side is the baseline. NaN if empty."""
    logs = [math.log(v) for v in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan
