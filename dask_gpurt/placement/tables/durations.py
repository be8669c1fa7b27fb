"""`Durations`: how long tasks take and how large their results are, per group and per prefix.

`Durations.learn` takes in a finished task. `Durations.known` says what to expect of a task; `Durations.guess` serves
where nothing is known. The model is ``duration = seconds(kind) * slowness(worker)``.

Kinds
-----
* The *kind* of a task is its group: the tasks of one layer of one collection. Until one task of the group is done, its
  prefix stands in.
* A prefix alone is not enough. ``read_parquet`` of a table of 25 rows and of one of six million share only the prefix.
  By prefix, a worker that had read the large table counted as 24 times too slow, and everything else was moved away
  from it: 1.1 GB between two workers, in a query of TPC-H in which Dask itself moves nothing.
* ``seconds(kind)`` is the median of the last few durations, each divided by the slowness of its worker. With a median,
  neither a first call that imports a library nor one straggler decides where a thousand tasks go.
* The first calls on a worker, as many as it has threads, count apart (`Prefix.learn`). They import, compile and touch
  fresh memory, on all workers at the same time.
* Only time spent computing counts. Reading spilled inputs depends on memory, not on the processor. Counted as compute,
  it made every worker that had spilled look slow for good, and sent its data away.

Slowness
--------
* ``slowness(worker)`` is the robust ratio of measured to expected duration, see `worker_speed`. Only the product of the
  two factors is used, so their common scale does not matter. `statistics` reports it relative to the median worker.
* Only tasks of one group are compared with one another to judge a worker.

Unknown kinds
-------------
A kind without measurements counts 5 ms, where Dask assumes 500 ms: a queue that was never measured must not justify
moving bytes. Where tasks usually take longer it counts more, but at most the time to go through its inputs at
`BYTES_PER_SECOND`. Stealing corrects a guess that was too small.
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
#: while fewer than about so many durations are kept, a longer one is no surprise
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
    """Durations and result sizes of the tasks of one key prefix, or of one group."""

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
        #: of the group or prefix. A group that has the name of its prefix shares the object with it
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
        """Whether only first calls on their workers are known, which take longer than those that follow."""
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
        """Update `noise` with the distance of a log duration from the median of its worker."""
        # The mean deviation of a normal distribution is 0.8 of its standard deviation.
        self.noise = max(LEAST_NOISE, self.noise + NOISE_GAIN * (min(1.25 * apart, DEVIATION) - self.noise))

    @property
    def long_seconds(self) -> float:
        """Seconds of a long task of this kind: the 0.9 quantile of the durations kept, raised while they are few."""
        kept = sorted(self._samples)
        return kept[(9 * (len(kept) - 1)) // 10] * (1 + FEW / len(kept)) if kept else 0.0

    def learn(self, seconds: float, nbytes: float, first: bool = False) -> None:
        """Learn from a finished task, and work `seconds` out anew where that is due.

        `seconds` are scaled to a worker of slowness 1. `first`: it was among the first of its prefix on its worker.
        Such durations count only until there are others. Their lower quartile is used, as it is nearest to the
        durations that follow.
        """
        self.add(seconds, nbytes, first)
        # One of many moves a median little, and sorting them is most of the cost of a finished task.
        if self.samples <= WINDOW or not self.samples & 3:
            self.settled()

    def settled(self) -> float | None:
        """`seconds`, worked out anew if durations were added since."""
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
        """As `learn`, but leave `seconds` to `settled`: most prefixes are never read, because their groups are."""
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
        """Seconds to compare a duration with; None: too little is known. First calls are compared with first calls."""
        kept = self._first
        if first and len(kept) >= JUDGING:
            return sorted(kept)[(len(kept) - 1) // 2]
        return self.seconds if len(self._samples) >= JUDGING else None


class Durations:
    """All groups and prefixes; also learns the slowness of workers from the durations."""

    def __init__(self) -> None:
        self.prefixes: dict[str, Prefix] = {}
        self.groups: dict[str, Prefix] = {}
        #: moving averages of the duration of all tasks and of its square. Their ratio is the mean length of the task
        #: that a worker is running at a random moment, however many short tasks there are between
        self._usual = 0.0, 0.0
        #: threads of the cluster
        self.threads = 1

    @property
    def guess_seconds(self) -> float:
        """Seconds that a task of a kind never seen may take."""
        mean, square = self._usual
        return max(UNKNOWN_SECONDS, GUESS * square / mean) if mean else UNKNOWN_SECONDS

    def guess(self, ts: TaskState) -> float:
        """Seconds that this TaskState may take, by `guess_seconds` and the size of its inputs."""
        seconds = self.guess_seconds
        if seconds > UNKNOWN_SECONDS and ts.dependencies:
            nbytes = sum(d.get_nbytes() for d in islice(ts.dependencies, GUESSED_BY))
            seconds = max(UNKNOWN_SECONDS, min(seconds, nbytes / BYTES_PER_SECOND))
        return seconds

    def prefix(self, name: str) -> Prefix:
        """The entry of a key prefix, made on first use. The oldest goes when there are `MAX_PREFIXES`."""
        found = self.prefixes.get(name)
        if found is None:
            if len(self.prefixes) >= MAX_PREFIXES:
                del self.prefixes[next(iter(self.prefixes))]
            found = self.prefixes[name] = Prefix(name)
        return found

    def kind(self, ts: TaskState) -> Prefix:
        """The entry that the durations of a TaskState are learned into: its group's, made on first use."""
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
        """What to expect of a TaskState: the entry of its group, else of its prefix; None: neither has a duration."""
        group = ts.group
        found = self.groups.get(group.name)
        if found is None or found.seconds is None:
            found = self.prefixes.get(group.prefix.name)
            if found is None or found.settled() is None:
                return None
        return found

    def seconds_of(self, ts: TaskState) -> float | None:
        """Seconds that a TaskState is expected to take on a worker of slowness 1; None: not known."""
        kind = self.known(ts)
        return None if kind is None else kind.seconds

    def learn(self, kind: Prefix, worker: WorkerInfo, seconds: float, nbytes: float) -> None:
        """Learn from a task that has computed for so long, as measured, about its `kind` and about its worker."""
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
            # One or two long tasks are no evidence: where sizes differ a lot every worker has them. Tasks that still
            # run are judged by the monitor.
            if worker.speed_samples >= LEAST or speed.suspected:
                worker.slowness = speed.slowness
        mean, square = self._usual
        self._usual = mean + USUAL_GAIN * (seconds - mean), square + USUAL_GAIN * (seconds * seconds - square)
        # By measurements only, not by suspicions from the tasks it runs now.
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
    """Seconds of the last computation, less the overlap with reading spilled data; None: nothing was computed."""
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
