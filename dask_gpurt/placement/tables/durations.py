"""How long tasks take and how large their results are, per group and per prefix; how slow each worker is.

One model: ``duration = seconds(kind) * slowness(worker)``.

* The *kind* of a task is its group: the tasks of one layer of one collection. Until one of them is done it is its
  prefix. ``read_parquet`` of a table of 25 rows and of one of six million have a prefix in common and no more: by
  prefix alone a worker that read the large table was taken for 24 times too slow, and everything else was moved away
  from it (1.1 GB between two workers in a query of TPC-H in which stock moves nothing).
* ``seconds(kind)`` is the median of the last few durations, each divided by the slowness of its worker. A median,
  because a first call that imports a library, or one straggler, must not decide where a thousand tasks go.
* The first calls on a worker (as many as it has threads) count apart, see `Prefix.learn`: they import, compile and
  touch fresh memory, on all workers at the same time.
* ``slowness(worker)`` is measured over expected, robustly: see `worker_speed`. Only the product of the two is ever
  used, so the scale they share does not matter; `statistics` gives it relative to the median worker.
* Only time spent computing counts. Reading spilled inputs is a matter of memory, not of the processor: counted as
  compute it made every worker that had spilled look slow for good, and sent its data away.
* A kind never seen counts 5 ms, not upstream's 500 ms: a queue that nobody has measured must never justify moving
  bytes. Where tasks usually take longer it counts more, but not more than it takes to go through its inputs at
  `BYTES_PER_SECOND`. Stealing corrects when the guess was too small.
* Only tasks of one group say something of a worker's speed.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.tables.worker_speed import NOISE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distributed.scheduler import TaskState

    from dask_gpurt.placement.tables.workers import WorkerInfo

#: duration assumed for a prefix never seen, in seconds
UNKNOWN_SECONDS = 0.005
#: a task of a prefix never seen counts this share of the usual duration: enough to spread a burst of them over equals,
#: too little to justify moving bytes
GUESS = 0.3
#: a task of a kind never seen is not taken to go through its inputs slower than this, in bytes/s
BYTES_PER_SECOND = 500e6
#: inputs that are looked at for that
GUESSED_BY = 64
#: weight of a task in the usual duration
USUAL_GAIN = 0.02
#: durations kept per prefix
WINDOW = 21
#: prefixes and groups kept, of each; a client that invents a new one for every task must not fill the scheduler
MAX_PREFIXES = 10_000
#: a duration below this says more about the thread pool than about the worker, in seconds
MEASURABLE_SECONDS = 0.002
#: Where the tasks of a prefix take less than this per thread of the cluster, the scheduler cannot hand them out as fast
#: as the workers could run them. Then whatever placement does for a task costs more than it gains, and one task in
#: `BRIEF_SAMPLED` is followed, from so many samples on.
BRIEF_SECONDS, BRIEF_SAMPLED, BRIEF_FROM = 200e-6, 8, 96
#: measurements of a worker before they count
LEAST = 4
#: of the longest of so many durations a longer one is no surprise
FEW = 4
#: measurements after which a worker is known; from then on one in so many tasks of a known kind is learned from
KNOWN, SAMPLED = 32, 4
#: samples of a prefix before it says anything about a worker
JUDGING = 5
#: share of a worker's slowness that is taken off its durations, as a power. With all of it, a mistake made about all
#: workers at once would keep itself alive
EXPLAINED = 0.75
#: noise is not taken for less, learned within about so many durations, and by no single one that is this far off
LEAST_NOISE = 0.1
NOISE_GAIN = 1 / 16
DEVIATION = 1.5


class Prefix:
    """What is known of the tasks with one key prefix, or of those of one group."""

    __slots__ = (
        "_first",
        "_firsts",
        "_samples",
        "_stale",
        "brief",
        "name",
        "noise",
        "output_bytes",
        "prefix",
        "samples",
        "seconds",
        "usual",
    )

    def __init__(self, name: str, usual: Prefix | None = None) -> None:
        #: of the group; where the group is all there is of a prefix, both have one name and are one
        self.name = name
        #: the prefix of a group: what is expected while `seconds` is None. None: this is a prefix
        self.usual = usual
        #: name of the prefix
        self.prefix = usual.name if usual is not None else name
        self._stale = False
        #: median duration in seconds on a worker of slowness 1; None: never seen. Of the prefix of a group:
        #: see `settled`
        self.seconds: float | None = None
        #: of a prefix: how much the logarithm of a duration varies on one worker, as a standard deviation
        self.noise = NOISE
        #: moving average of the result's size
        self.output_bytes = 0.0
        #: how many durations were learned
        self.samples = 0
        #: of a prefix: its tasks are so short that the scheduler is what they wait for; see `BRIEF_SECONDS`
        self.brief = False
        self._samples: list[float] = []
        #: durations of first calls on their workers, and how many there were
        self._first: list[float] = []
        self._firsts = 0

    @property
    def only_first(self) -> bool:
        """Whether all that is known are first calls on their workers, which take longer than those that follow."""
        return not self._samples

    @property
    def spread_seconds(self) -> float:
        """Median absolute deviation of the durations kept; 0 while there are none."""
        middle = self.seconds
        if middle is None or not self._samples:
            return 0.0
        apart = sorted(abs(s - middle) for s in self._samples)
        return apart[len(apart) // 2]

    def varies(self, apart: float) -> None:
        """The logarithm of a duration was so far from the median of its worker."""
        # The mean deviation of a normal distribution is 0.8 of its standard deviation.
        self.noise = max(LEAST_NOISE, self.noise + NOISE_GAIN * (min(1.25 * apart, DEVIATION) - self.noise))

    @property
    def long_seconds(self) -> float:
        """What a long task of this kind takes: the 0.9 quantile of the durations kept, more while they are few."""
        kept = sorted(self._samples)
        return kept[(9 * (len(kept) - 1)) // 10] * (1 + FEW / len(kept)) if kept else 0.0

    def learn(self, seconds: float, nbytes: float, first: bool = False) -> None:
        """Learn from a task.

        Parameters
        ----------
        seconds
            How long it computed, on a worker of slowness 1.
        nbytes
            Of its result.
        first
            It was among the first of its prefix on its worker. Such durations count only until there are others, and of
            them the lower quartile: it is nearest to those that follow.
        """
        self.add(seconds, nbytes, first)
        # One of many moves a median little, and to sort them is most of the price of a finished task.
        if self.samples <= WINDOW or not self.samples & 3:
            self.settled()

    def settled(self) -> float | None:
        """`seconds`, worked out anew if there is more to know it by."""
        if self._stale:
            kept = self._samples
            if kept:
                self.seconds = sorted(kept)[(len(kept) - 1) // 2]
            else:
                kept = self._first
                self.seconds = sorted(kept)[(len(kept) - 1) // 4]
            self._stale = False
        return self.seconds

    def add(self, seconds: float, nbytes: float, first: bool = False) -> None:
        """Learn, but leave `seconds` to `settled`: of most prefixes nobody asks, there are groups for that."""
        if first:
            kept, count = self._first, self._firsts
            self._firsts += 1
        else:
            kept, count = self._samples, self.samples - self._firsts
        if len(kept) < WINDOW:
            kept.append(seconds)
        else:
            kept[count % WINDOW] = seconds
        self._stale = True
        if self.samples:
            self.output_bytes += 0.2 * (nbytes - self.output_bytes)
        else:
            self.output_bytes = nbytes
        self.samples += 1

    def expected(self, first: bool) -> float | None:
        """Seconds to compare a task with; None: too little is known. First calls are compared with first calls."""
        kept = self._first
        if first and len(kept) >= JUDGING:
            return sorted(kept)[(len(kept) - 1) // 2]
        return self.seconds if len(self._samples) >= JUDGING else None


class Durations:
    """All prefixes, and the learning of workers' slowness."""

    def __init__(self) -> None:
        self.prefixes: dict[str, Prefix] = {}
        self.groups: dict[str, Prefix] = {}
        #: moving averages of the duration of all tasks and of its square: their ratio is how long the task is that a
        #: worker is found at, however many short ones there are between
        self._usual = 0.0, 0.0
        #: of the cluster
        self.threads = 1

    @property
    def guess_seconds(self) -> float:
        """Seconds that a task of a kind never seen may take."""
        mean, square = self._usual
        return max(UNKNOWN_SECONDS, GUESS * square / mean) if mean else UNKNOWN_SECONDS

    def guess(self, ts: TaskState) -> float:
        """The same for a TaskState."""
        seconds = self.guess_seconds
        if seconds > UNKNOWN_SECONDS and ts.dependencies:
            nbytes = sum(d.get_nbytes() for d in islice(ts.dependencies, GUESSED_BY))
            seconds = max(UNKNOWN_SECONDS, min(seconds, nbytes / BYTES_PER_SECOND))
        return seconds

    def prefix(self, name: str) -> Prefix:
        found = self.prefixes.get(name)
        if found is None:
            if len(self.prefixes) >= MAX_PREFIXES:
                del self.prefixes[next(iter(self.prefixes))]
            found = self.prefixes[name] = Prefix(name)
        return found

    def kind(self, ts: TaskState) -> Prefix:
        """Where the durations of a TaskState are kept: its group."""
        group = ts.group
        name = group.name
        found = self.groups.get(name)
        if found is None:
            prefix = self.prefix(group.prefix.name)
            if len(self.groups) >= MAX_PREFIXES:
                del self.groups[next(iter(self.groups))]
            found = self.groups[name] = prefix if prefix.name == name else Prefix(name, prefix)
        return found

    def known(self, ts: TaskState) -> Prefix | None:
        """What to expect of a TaskState: its group, or its prefix; None: neither was ever seen."""
        group = ts.group
        found = self.groups.get(group.name)
        if found is None or found.seconds is None:
            found = self.prefixes.get(group.prefix.name)
            if found is None or found.settled() is None:
                return None
        return found

    def known_prefix_seconds(self, name: str) -> float:
        """What a task of a prefix is expected to take, by its name."""
        found = self.prefixes.get(name)
        seconds = None if found is None else found.settled()
        return UNKNOWN_SECONDS if seconds is None else seconds

    def learn(self, kind: Prefix, worker: WorkerInfo, seconds: float, nbytes: float) -> None:
        """A task of this kind computed for so long on that worker."""
        speed = worker.speed
        # This is on the path of every task; once the kind and the worker are known, one in `SAMPLED` is enough.
        if kind.samples > WINDOW and worker.speed_samples > KNOWN:
            worker.passed_over += 1
            if worker.passed_over % SAMPLED:
                return
        name = kind.prefix
        first = speed.is_first(name, worker.ws.nthreads)
        expected = kind.expected(first)
        if expected is not None and seconds > MEASURABLE_SECONDS and expected > MEASURABLE_SECONDS:
            prefix = kind.usual or kind
            apart = speed.observe(name, math.log(seconds / expected), prefix.noise)
            if apart is not None:
                prefix.varies(apart)
            worker.speed_samples += 1
            # One or two long tasks are no evidence: where sizes differ a lot every worker has them. What tasks that run
            # now say of it is judged by the patrol.
            if worker.speed_samples >= LEAST or speed.suspected:
                worker.slowness = speed.slowness
        mean, square = self._usual
        self._usual = mean + USUAL_GAIN * (seconds - mean), square + USUAL_GAIN * (seconds * seconds - square)
        # Not by what is only suspected of the tasks it runs now.
        slowness = speed.measured_slowness(name)
        if slowness != 1.0:
            seconds /= slowness**EXPLAINED
        kind.learn(seconds, nbytes, first)
        if kind.usual is not None:
            kind.usual.add(seconds, nbytes, first)
        prefix = kind.usual or kind
        if not prefix.samples & 15:
            usual = prefix.settled()
            prefix.brief = prefix.samples >= BRIEF_FROM and usual is not None and usual < BRIEF_SECONDS * self.threads


def compute_seconds(startstops: Iterable[Mapping[str, Any]]) -> float | None:
    """Time spent in the last computation, without what overlaps with reading spilled data; None: nothing computed."""
    start = stop = None
    reads: list[tuple[float, float]] | None = None
    for s in startstops:
        action = s["action"]
        if action == "compute":
            start, stop = s["start"], s["stop"]
        elif action == "disk-read":
            if reads is None:
                reads = []
            reads.append((s["start"], s["stop"]))
    if start is None or stop is None:
        return None
    seconds: float = stop - start
    for a, b in reads or ():
        seconds -= max(0.0, min(b, stop) - max(a, start))
    return seconds if seconds > 0.0 else 0.0
