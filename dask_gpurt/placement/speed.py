"""How slow one worker is: measured over expected duration, as logarithms, overall and per prefix.

* The median of the last `KEPT` measurements: one straggler among them changes nothing. A worker is not the same for all
  kinds of task (one that has no AVX-512, a shared disk), so the same is kept per prefix, and from `OWN` measurements of
  a prefix on these count for it instead.
* A first measurement is believed by `FIRST`: it is all there is, but it may be a straggler.
* A *suspicion*: tasks that run now and have taken longer than expected already are a lower bound. Waiting for the end
  of a task that takes ten times as long means giving the same worker more of them until then. The suspicion ends with
  the tasks.
* Measurements are forgotten, one per `FORGET_SECONDS`, while no new ones come: a worker that is given no work for
  being slow could otherwise never show that it is slow no longer.
"""

from __future__ import annotations

import math
from collections import deque

#: measurements kept overall, and per prefix
KEPT = 7
#: measurements of a prefix after which they count instead of the overall ones
OWN = 3
#: share of a single measurement that is believed
FIRST = 0.75
#: prefixes kept per worker
MAX_PREFIXES = 64
FORGET_SECONDS = 20.0
#: logarithm of the largest slowness that is believed, either way
BOUND = math.log(64)


def _middle(kept: deque[float]) -> float:
    n = len(kept)
    if n == 1:
        return FIRST * kept[0]
    # As statistics.median, which takes three times as long; this is called for every finished task.
    ordered = sorted(kept)
    half = n // 2
    return ordered[half] if n & 1 else 0.5 * (ordered[half - 1] + ordered[half])


class Speed:
    """Of one worker."""

    __slots__ = ("_all", "_by_prefix", "_own", "_suspected", "measured", "own", "slowness")

    def __init__(self) -> None:
        #: duration over expected duration now, whatever the task; includes a suspicion
        self.slowness = 1.0
        self._all: deque[float] = deque(maxlen=KEPT)
        self._by_prefix: dict[str, deque[float]] = {}
        #: prefix -> log slowness, of those with enough measurements
        self._own: dict[str, float] = {}
        #: the same as factors, with and without suspicions; kept, because each decision asks for some ten of them and
        #: a measurement changes one. Read only
        self.own: dict[str, float] = {}
        self.measured: dict[str, float] = {}
        self._suspected = 0.0

    def observe(self, prefix: str, log_ratio: float) -> None:
        """A task took ``exp(log_ratio)`` times as long as expected."""
        log_ratio = BOUND if log_ratio > BOUND else -BOUND if log_ratio < -BOUND else log_ratio
        self._all.append(log_ratio)
        kept = self._by_prefix.get(prefix)
        if kept is None:
            if len(self._by_prefix) >= MAX_PREFIXES:
                oldest = next(iter(self._by_prefix))
                del self._by_prefix[oldest]
                self._drop(oldest)
            kept = self._by_prefix[prefix] = deque(maxlen=KEPT)
        kept.append(log_ratio)
        if len(kept) >= OWN:
            log = self._own[prefix] = _middle(kept)
            slowness = self.measured[prefix] = math.exp(log)
            self.own[prefix] = slowness if log > self._suspected else math.exp(self._suspected)
        self._settle()

    def suspect(self, log_ratio: float) -> None:
        """Tasks that run now have taken ``exp(log_ratio)`` times as long as expected already; 0: nothing suspicious."""
        suspected = min(max(log_ratio, 0.0), BOUND)
        if suspected != self._suspected:
            self._suspected = suspected
            for prefix, log in self._own.items():
                self.own[prefix] = math.exp(log if log > suspected else suspected)
            self._settle()

    @property
    def suspected(self) -> bool:
        """Whether tasks that run now make it look slow."""
        return self._suspected > 0.0

    def forget_one(self) -> None:
        """No new measurement came for `FORGET_SECONDS`."""
        if self._all:
            self._all.popleft()
        for name, kept in list(self._by_prefix.items()):
            kept.popleft()
            if len(kept) < OWN:
                self._drop(name)
            if not kept:
                del self._by_prefix[name]
        self._settle()

    def __len__(self) -> int:
        """Measurements kept."""
        return len(self._all)

    def for_prefix(self, prefix: str) -> float:
        """Duration over expected duration for tasks with this prefix."""
        own = self.own.get(prefix)
        return self.slowness if own is None else own

    def measured_slowness(self, prefix: str) -> float:
        """As `for_prefix`, without suspicions."""
        own = self.measured.get(prefix)
        return own if own is not None else math.exp(_middle(self._all)) if self._all else 1.0

    def _drop(self, prefix: str) -> None:
        """There are too few measurements of this prefix."""
        self._own.pop(prefix, None)
        self.own.pop(prefix, None)
        self.measured.pop(prefix, None)

    def _settle(self) -> None:
        log = _middle(self._all) if self._all else 0.0
        self.slowness = math.exp(log if log > self._suspected else self._suspected)
