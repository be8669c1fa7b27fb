"""`verdict`: whether placement loses against stock, from the results of whole graphs under both. Pure functions.

*Stock* means Dask's own choice; "ours" is placement's. The comparison is lexicographic: time; where that is even, bytes
moved; where they are even too, memory. It ranks within each stratum, pooled (`governor.compare`), so that one slow run
decides nothing. `verdict` is called after each result and checks in this order:

1. `FEW` results of each side, and one side's are all better than the other's, by `CLEAR`: decided.
2. `SOME`, and the rank test says that ours is slower by `SLOWER`, or ours is not slower in the median: decided.
3. `MOST`: decided by the rank test, with a smaller difference; undecided means that ours does not lose.

Repeated looks make it likelier that an equally good placement is found to lose. That costs nothing: stock is as good
there. How often ours is found to lose, by its time relative to stock's and by the noise of single runs (simulated, in
the tests):

=====  =====  =====  =====  =====  =====
noise    1.3    1.1   1.05    1.0    0.9
=====  =====  =====  =====  =====  =====
  2 %  100 %  100 %   97 %    1 %    0 %
  5 %  100 %   98 %   65 %    8 %    0 %
 10 %  100 %   69 %   36 %   12 %    0 %
 20 %   84 %   46 %   33 %   18 %    7 %
=====  =====  =====  =====  =====  =====
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

from dask_gpurt.placement.evaluate.governor import compare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: results of each side
FEW, SOME, MOST = 2, 4, 8
#: ratio of medians that decides at once, when all of one side are better than all of the other
CLEAR = 1.25
#: ratio of medians from which a difference counts, at `SOME` and at `MOST`
SLOWER, SLIGHTLY = 1.05, 1.03
#: one-sided normal quantile of the rank test, 5 %
Z = 1.64
#: bytes moved and memory count from this ratio, ...
MORE = 1.2
#: ... from so many bytes moved, ...
NOTABLE_BYTES = 100e6
#: ... and from this share of the mark at which a worker begins to spill
NOTABLE_SHARE = 0.5


class Outcome(NamedTuple):
    """The result of one episode."""

    seconds_per_task: float
    moved_bytes: float
    #: bytes of results over the memory mark, of the worker with the largest share, at its peak
    fullest: float


#: results of ours, and of stock, that may be compared with one another
Sides = tuple[list[Outcome], list[Outcome]]


def verdict(strata: Sequence[Sides]) -> tuple[bool | None, str]:
    """Whether placement loses, and why in words; None: more results are needed."""
    both = [sides for sides in strata if sides[0] and sides[1]]
    pairs = sum(min(len(ours), len(stock)) for ours, stock in both)
    if pairs < FEW:
        return None, ""
    z, ratio = _compare(both, lambda o: o.seconds_per_task)
    said = f"ours took {ratio:.2f} times as long as stock's, {pairs} graphs of each"
    if ratio > CLEAR and all(_slowest(stock) < _fastest(ours) for ours, stock in both):
        return True, said
    if ratio < 1 / CLEAR and all(_slowest(ours) < _fastest(stock) for ours, stock in both):
        return _dearer(both, faster=True) or (False, said)
    if pairs < SOME:
        return None, ""
    last = pairs >= MOST
    if z > Z and ratio > (SLIGHTLY if last else SLOWER):
        return True, said
    if last or ratio <= 1.0:
        return _dearer(both, faster=ratio < 1 / SLIGHTLY) or (False, said)
    return None, ""


def _dearer(both: Sequence[Sides], faster: bool) -> tuple[bool, str] | None:
    """(True, why) when ours costs too many bytes or too much memory; None: it does not.

    What is faster may move more bytes, and may use more memory while no worker is near to spilling.
    """
    if not faster:
        z, ratio = _compare(both, lambda o: o.moved_bytes)
        if z > Z and ratio > MORE and _median(both, lambda o: o.moved_bytes) > NOTABLE_BYTES:
            return True, f"as fast as stock, but it moved {ratio:.2f} times the bytes"
    z, ratio = _compare(both, lambda o: o.fullest)
    share = _median(both, lambda o: o.fullest)
    if z > Z and ratio > MORE and share > (1.0 if faster else NOTABLE_SHARE):
        return True, f"not slower than stock, but the fullest worker held {ratio:.2f} times as much"
    return None


def _compare(both: Sequence[Sides], of: Callable[[Outcome], float]) -> tuple[float, float]:
    results = {
        str(i): ([max(of(o), 1e-9) for o in ours], [max(of(o), 1e-9) for o in stock])
        for i, (ours, stock) in enumerate(both)
    }
    z, ratio = compare(results)
    return (0.0, 1.0) if math.isnan(ratio) else (z, ratio)


def _median(both: Sequence[Sides], of: Callable[[Outcome], float]) -> float:
    return statistics.median(of(o) for ours, _ in both for o in ours)


def _fastest(outcomes: Sequence[Outcome]) -> float:
    return min(o.seconds_per_task for o in outcomes)


def _slowest(outcomes: Sequence[Outcome]) -> float:
    return max(o.seconds_per_task for o in outcomes)
