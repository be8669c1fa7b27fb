"""`Speed`: how slow one worker is, overall and per prefix, from measured over expected durations.

`observe` takes in a duration as a logarithm, `suspect` a task that runs for too long already. `for_prefix` gives the
factor that a duration is multiplied with.

Theory of operation
-------------------
* *Median.* The last `KEPT` measurements count, so one straggler among them changes nothing. A worker is not equally
  fast for all kinds of task (no AVX-512, a shared disk), so the same is kept per prefix.
* *Belief.* A median counts as far as it exceeds what chance does to identical workers (`believed`): the noise of single
  durations over the root of their number. Within `CHANCE` standard errors the worker counts as usual. Far beyond them
  the median counts nearly in full.
* *Faster workers* need `CHANCE_FASTER`. Work goes to a worker that seems fast, while one wrongly taken for slow merely
  idles.
* *Noise* of a prefix is how far its durations are from their own worker's median. So differences between workers are
  not noise, and durations that vary by themselves are no evidence against a worker.
* *Own prefix.* A prefix with `OWN` measurements counts by itself where it differs from the overall slowness beyond
  chance.
* *First measurement.* It is halved: it is all there is, but it may be a straggler.
* *Suspicion.* Tasks that run now and have already taken longer than expected give a lower bound. Waiting for the end of
  a task that takes ten times as long would give the same worker more tasks until then. The suspicion ends with the
  tasks.
* *Forgetting.* While no new measurements come, one is forgotten per `FORGET_SECONDS`. Otherwise a worker that gets no
  work for being slow could never show that it has recovered.
"""

from __future__ import annotations

import math
from collections import deque

#: measurements kept overall, and per prefix
KEPT = 11
#: measurements of a prefix from which on it may count by itself
OWN = 3
#: per cent of the measurements that may contradict a verdict
ASIDE = 30
#: share of a single measurement that is believed
FIRST = 0.5
#: standard errors that count as chance: for a worker that seems slower, and for one that seems faster
CHANCE = 2.25
CHANCE_FASTER = 3.0
#: standard error of a median over that of a mean
_MEDIAN = 1.25
#: noise of the logarithm of a duration before it is measured, as a standard deviation
NOISE = 0.3
#: weight of a measurement in the noise that a worker's measurements have on the whole
NOISE_GAIN = 0.1
#: prefixes kept per worker
MAX_PREFIXES = 64
#: prefixes remembered as having run on a worker
MAX_RAN = 1000
FORGET_SECONDS = 20.0
#: logarithm of the largest slowness that is believed, either way
BOUND = math.log(64)


def believed(middle: float, n: int, noise: float) -> float:
    """What to believe of the median of `n` log ratios with this noise: 0 within chance, nearly all far beyond it.

    The non-negative garrote of Breiman (1995): ``x * (1 - (threshold / x)^2)``.
    """
    threshold = (CHANCE if middle > 0 else CHANCE_FASTER) * _MEDIAN * noise
    rest = middle * middle - threshold * threshold / n
    return rest / middle if rest > 0 else 0.0


def _least(ordered: list[float], usual: float) -> float:
    """How far the sorted log ratios are from `usual` when `ASIDE` per cent of them may contradict."""
    n = len(ordered)
    aside = n * ASIDE // 100
    low = ordered[aside] - usual
    if low <= 0:
        low = ordered[n - 1 - aside] - usual
        if low >= 0:
            return 0.0
    return low if n > 1 else FIRST * low


class _Measured:
    """The measurements of one prefix."""

    __slots__ = ("logs", "middle")

    def __init__(self) -> None:
        self.logs: deque[float] = deque(maxlen=KEPT)
        self.middle = 0.0


class Speed:
    """How slow one worker is."""

    __slots__ = (
        "_all",
        "_by_prefix",
        "_noise",
        "_overall",
        "_own",
        "_ran",
        "_suspected",
        "measured",
        "own",
        "slowness",
    )

    def __init__(self) -> None:
        #: duration over expected duration now, whatever the task; includes a suspicion
        self.slowness = 1.0
        self._all: deque[float] = deque(maxlen=KEPT)
        #: noise of what was measured, whatever the task
        self._noise = NOISE
        #: log slowness, without suspicions
        self._overall = 0.0
        self._by_prefix: dict[str, _Measured] = {}
        #: prefix -> tasks that ran here, counted up to the number of threads
        self._ran: dict[str, int] = {}
        #: prefix -> log slowness, of those with enough measurements
        self._own: dict[str, float] = {}
        #: the same as factors, with and without suspicions; kept, because each decision asks for some ten of them and
        #: a measurement changes one. Read only
        self.own: dict[str, float] = {}
        self.measured: dict[str, float] = {}
        self._suspected = 0.0

    def is_first(self, prefix: str, threads: int) -> bool:
        """Count a task of this prefix. Return whether it is among the first, one per thread, that ran here."""
        ran = self._ran
        count = ran.get(prefix, 0)
        if count >= threads:
            return False
        if not count and len(ran) >= MAX_RAN:
            del ran[next(iter(ran))]
        ran[prefix] = count + 1
        return True

    def observe(self, prefix: str, log_ratio: float, noise: float = NOISE) -> float | None:
        """Learn that a task took ``exp(log_ratio)`` times as long as expected; `noise`: see `Prefix.noise`.

        Returns
        -------
        float or None
            Distance to the worker's median for this prefix, as a logarithm; None: this is the first measurement.
        """
        log_ratio = BOUND if log_ratio > BOUND else -BOUND if log_ratio < -BOUND else log_ratio
        self._all.append(log_ratio)
        self._noise += NOISE_GAIN * (noise - self._noise)
        self._settle()
        kept = self._by_prefix.get(prefix)
        apart = None
        if kept is None:
            if len(self._by_prefix) >= MAX_PREFIXES:
                oldest = next(iter(self._by_prefix))
                del self._by_prefix[oldest]
                self._drop(oldest)
            kept = self._by_prefix[prefix] = _Measured()
        else:
            apart = abs(log_ratio - kept.middle)
        logs = kept.logs
        logs.append(log_ratio)
        ordered = sorted(logs)
        kept.middle = ordered[len(logs) // 2]
        if len(logs) >= OWN:
            # Kept where it does not differ, too: the overall slowness may change by other prefixes.
            self._keep(prefix, self._overall + believed(_least(ordered, self._overall), len(logs), noise))
        return apart

    def suspect(self, log_ratio: float) -> None:
        """Note that running tasks have already taken ``exp(log_ratio)`` times as long as expected; 0: no suspicion."""
        suspected = believed(min(log_ratio, BOUND), 1, self._noise) if log_ratio > 0 else 0.0
        if suspected != self._suspected:
            self._suspected = suspected
            for prefix, log in self._own.items():
                self.own[prefix] = self._at_least_suspected(log)
            self._settle()

    @property
    def suspected(self) -> bool:
        """Whether tasks that run now make the worker look slow."""
        return self._suspected > 0.0

    def forget_one(self) -> None:
        """Forget the oldest measurement, overall and per prefix: none came for `FORGET_SECONDS`."""
        if self._all:
            self._all.popleft()
        for name, kept in list(self._by_prefix.items()):
            kept.logs.popleft()
            if len(kept.logs) < OWN:
                self._drop(name)
            if not kept.logs:
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
        return own if own is not None else math.exp(self._overall) if self._overall else 1.0

    def _keep(self, prefix: str, log: float) -> None:
        """The log slowness for this prefix, without suspicions."""
        self._own[prefix] = log
        self.measured[prefix] = math.exp(log)
        self.own[prefix] = self._at_least_suspected(log)

    def _drop(self, prefix: str) -> None:
        """There are too few measurements of this prefix."""
        self._own.pop(prefix, None)
        self.own.pop(prefix, None)
        self.measured.pop(prefix, None)

    def _settle(self) -> None:
        kept = self._all
        log = self._overall = believed(_least(sorted(kept), 0.0), len(kept), self._noise) if kept else 0.0
        self.slowness = self._at_least_suspected(log)

    def _at_least_suspected(self, log: float) -> float:
        """As a factor. Without a suspicion a worker may be faster than usual."""
        suspected = self._suspected
        if suspected and log < suspected:
            return math.exp(suspected)
        return math.exp(log) if log else 1.0
