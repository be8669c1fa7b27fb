"""`Governor`: whether single decisions are worth having, by predicted and actual times, against stock. Pure.

`ours` says whether placement makes the next decision, `decided` and `finished` report decisions and results. *Stock*
means Dask's own choice; "ours" in a text is placement's.

States and events (`Standing`)::

    TRUSTED --suspicion--> TRIAL --ours is worse--> RETIRED --back-off over--> TRIAL
                             \\--ours is not worse--> TRUSTED

* TRUSTED: placement makes all decisions. Each carries three predictions: the seconds until its result with the choice
  made; the same with the choice of stock's rule among the same candidates; and the bytes moved. A window of finished
  decisions raises *suspicion* when, in the median, (a) tasks take `OFF` times as long as predicted, or (b) they take
  twice as long as predicted for stock's choice, while the prediction for placement's own choice was already worse than
  that. Both only above `NOTABLE_SECONDS`: a millisecond is noise of event loops.
* TRIAL: predictions cannot settle it, as the model behind them may be wrong. So decisions are divided by lot between
  placement and stock, and the *results* are compared: seconds from decision to result plus the bytes moved, priced.
  Tasks of different kinds take different times, hence a rank test within each prefix, pooled (van Elteren). With ranks
  a few stragglers do not decide it.
* RETIRED: stock decides. The back-off doubles with each retirement in a row; a trial that is passed resets it.

Cost: during a trial half of the decisions are stock's, at most `TRIAL` finished decisions per suspicion. After an
unfounded suspicion there is none for `REST_SECONDS`, which doubles as well.
"""

from __future__ import annotations

import enum
import math
import random
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

#: finished decisions per look, in the state TRUSTED
WINDOW = 64
#: suspicious when the median of actual / predicted exceeds this
OFF = 4.0
#: suspicious when the median of actual / predicted for stock's choice exceeds this, ...
WORSE = 2.0
#: ... and our own choice was predicted to take so many times what stock's would
KNOWINGLY = 1.5
#: median difference below which nothing is suspicious, in seconds
NOTABLE_SECONDS = 0.02
#: finished decisions of a trial, both sides together
TRIAL = 96
#: one-sided normal quantile of the test: 1 % of trials of an equally good policy retire it
Z = 2.33
#: and placement must be worse by this factor in the median
RATIO = 1.1
#: seconds until a retired policy is tried again; seconds without suspicion after a trial it passed. Both double.
REST_SECONDS = 30.0
MAX_REST_SECONDS = 3600.0
#: decisions awaiting their result; beyond it new ones are not observed
MAX_OPEN = 100_000
#: results kept per prefix, and prefixes kept
KEPT = 32
MAX_PREFIXES = 256


class Standing(enum.Enum):
    """The state of the policy, see the module."""

    TRUSTED = "trusted"
    TRIAL = "trial"
    RETIRED = "retired"


class Open(NamedTuple):
    """A decision whose task has not finished."""

    prefix: str
    #: whether placement made it, not stock
    ours: bool
    began: float
    #: predicted seconds until the result: with this choice, and with the one of stock's rule
    predicted: float
    stock: float
    moved_bytes: float
    #: seconds that the bytes moved are worth
    price: float


class Governor:
    """Observes decisions, and says whether placement or Dask makes the next one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.standing = Standing.TRUSTED
        #: why the policy is, or was last, on trial or retired; None: never
        self.reason: str | None = None
        #: how often it was tried, and how often it was retired
        self.trials = 0
        self.retirements = 0
        #: decisions left to stock: by lot, and in retirement
        self.lots = 0
        self.left = 0
        self._clock = clock
        self._lot = random.Random(0).random
        #: decisions whose tasks have not finished, by key; read only
        self.open: dict[Hashable, Open] = {}
        #: (log actual / predicted, actual - predicted, log actual / stock, actual - stock, log predicted / stock)
        self._window: deque[tuple[float, float, float, float, float]] = deque(maxlen=WINDOW)
        self._since = 0
        #: prefix -> (ours, stock's) results in the trial
        self._results: dict[str, tuple[list[float], list[float]]] = {}
        self._finished = 0
        self._rest = REST_SECONDS
        self._until = -math.inf
        #: prefix -> newest (actual / predicted, actual seconds, bytes)
        self.prefixes: dict[str, deque[tuple[float, float, float]]] = {}

    def ours(self) -> bool:
        """Whether placement makes the next decision; otherwise stock does."""
        if self.standing is Standing.TRUSTED:
            return True
        if self.standing is Standing.RETIRED:
            if self._clock() < self._until:
                self.left += 1
                return False
            self._try("its time of rest is over")
        if self._lot() < 0.5:
            return True
        self.lots += 1
        return False

    def decided(
        self, key: Hashable, prefix: str, ours: bool, predicted: float, stock: float, moved_bytes: float, price: float
    ) -> None:
        """Note a decision, until its task is `finished`; see `Open`."""
        if len(self.open) < MAX_OPEN:
            self.open[key] = Open(prefix, ours, self._clock(), predicted, stock, moved_bytes, price)

    def moved(self, key: Hashable, moved_bytes: float, price: float) -> None:
        """Note what a decision of stock moves, in bytes and as a price in seconds. Known only after it was made."""
        found = self.open.get(key)
        if found is not None and not found.ours:
            self.open[key] = found._replace(moved_bytes=moved_bytes, price=price)

    def finished(self, key: Hashable, computed: bool) -> str | None:
        """Note that a task left its worker; `computed`: with a result. Return why the policy retires, or None."""
        found = self.open.pop(key, None)
        if found is None or not computed:
            return None
        actual = max(self._clock() - found.began, 1e-6)
        if found.ours:
            kept = self.prefixes.get(found.prefix)
            if kept is None:
                if len(self.prefixes) >= MAX_PREFIXES:
                    del self.prefixes[next(iter(self.prefixes))]
                kept = self.prefixes[found.prefix] = deque(maxlen=KEPT)
            predicted = max(found.predicted, 1e-6)
            kept.append((actual / predicted, actual, found.moved_bytes))
        if self.standing is Standing.TRIAL:
            return self._tried(found, actual)
        if self.standing is Standing.TRUSTED and found.ours:
            self._watch(found, actual)
        return None

    def forget(self) -> None:
        """Drop the decisions that wait for a result: all tasks are gone."""
        self.open.clear()

    # ------------------------------------------------------------------ TRUSTED

    def _watch(self, found: Open, actual: float) -> None:
        predicted, stock = max(found.predicted, 1e-6), max(found.stock, 1e-6)
        self._window.append(
            (
                math.log(actual / predicted),
                actual - predicted,
                math.log(actual / stock),
                actual - stock,
                math.log(predicted / stock),
            )
        )
        self._since += 1
        if self._since < WINDOW // 2 or len(self._window) < WINDOW or self._clock() < self._until:
            return
        self._since = 0
        off, off_seconds, worse, worse_seconds, knowingly = (
            statistics.median(column) for column in zip(*self._window, strict=True)
        )
        if off > math.log(OFF) and off_seconds > NOTABLE_SECONDS:
            self._try(f"tasks take {math.exp(off):.2g} times as long as predicted ({off_seconds:.2g} s more)")
        elif worse > math.log(WORSE) and worse_seconds > NOTABLE_SECONDS and knowingly > math.log(KNOWINGLY):
            self._try(
                f"tasks take {math.exp(worse):.2g} times as long ({worse_seconds:.2g} s more) as predicted for the "
                "workers that stock would have chosen"
            )

    def _try(self, reason: str) -> None:
        self.standing = Standing.TRIAL
        self.reason = reason
        self.trials += 1
        self._finished = 0
        self._results = {}
        self._window.clear()

    # ------------------------------------------------------------------ TRIAL

    def _tried(self, found: Open, actual: float) -> str | None:
        sides = self._results.get(found.prefix)
        if sides is None:
            sides = self._results[found.prefix] = ([], [])
        sides[0 if found.ours else 1].append(actual + found.price)
        self._finished += 1
        if self._finished < TRIAL:
            return None
        z, ratio = compare(self._results)
        if math.isnan(ratio) and self._finished < 8 * TRIAL:
            return None  # no kind of task on both sides yet
        self._results = {}
        now = self._clock()
        if z > Z and ratio > RATIO:
            self.standing = Standing.RETIRED
            self.retirements += 1
            self._until = now + self._rest
            self.reason = (
                f"{self.reason}; in a trial over {self._finished} tasks ours took {ratio:.2g} times as long as stock's "
                f"(z = {z:.1f}). Tried again in {self._rest:g} s"
            )
            self._rest = min(2 * self._rest, MAX_REST_SECONDS)
            return self.reason
        if self.reason is not None and self.retirements:
            self._rest = REST_SECONDS
        self.standing = Standing.TRUSTED
        self._until = now + self._rest
        if not self.retirements:
            self._rest = min(2 * self._rest, MAX_REST_SECONDS)
        return None

    # ------------------------------------------------------------------ statistics

    def statistics(self) -> dict[str, Any]:
        """Plain JSON. ``prefixes``: name -> median actual / predicted, its MAD, median seconds and bytes moved."""
        out: dict[str, Any] = {
            "standing": self.standing.value,
            "reason": self.reason,
            "trials": self.trials,
            "retirements": self.retirements,
            "left_to_stock": self.left,
            "left_by_lot": self.lots,
            "open": len(self.open),
            "prefixes": {},
        }
        for name, kept in self.prefixes.items():
            ratios, seconds, nbytes = (statistics.median(column) for column in zip(*kept, strict=True))
            out["prefixes"][name] = {
                "observed": len(kept),
                "median_ratio": ratios,
                "mad_ratio": statistics.median(abs(k[0] - ratios) for k in kept),
                "median_seconds": seconds,
                "median_moved_bytes": nbytes,
            }
        return out


def compare(results: dict[str, tuple[list[float], list[float]]]) -> tuple[float, float]:
    """(z, ratio): how surely the first side is larger, and the pooled median ratio of the first over the second.

    Wilcoxon's rank sums within each stratum, pooled with van Elteren's weights 1 / (n + 1). (0, NaN) when no stratum
    has both sides.
    """
    score = variance = 0.0
    logs: list[tuple[float, int]] = []
    for ours, stock in results.values():
        m, n = len(ours), len(stock)
        if not m or not n:
            continue
        ordered = sorted([(x, True) for x in ours] + [(x, False) for x in stock])
        rank_sum, at = 0.0, 0
        while at < len(ordered):
            end = at
            while end < len(ordered) and ordered[end][0] == ordered[at][0]:
                end += 1
            rank_sum += (at + end + 1) / 2 * sum(mine for _, mine in ordered[at:end])
            at = end
        weight = 1.0 / (m + n + 1)
        score += weight * (rank_sum - m * (m + n + 1) / 2)
        variance += weight * weight * m * n * (m + n + 1) / 12
        logs.append((math.log(statistics.median(ours) / statistics.median(stock)), min(m, n)))
    if not logs or variance <= 0:
        return 0.0, math.nan
    total = sum(n for _, n in logs)
    return score / math.sqrt(variance), math.exp(sum(x * n for x, n in logs) / total)
