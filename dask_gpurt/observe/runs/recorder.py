"""`RunRecorder`: on the scheduler, follows the newest runs and keeps a bounded summary of each.

A run begins when a graph arrives, and ends when all that it was asked for is in memory, failed, or wanted no longer.
That is what a user waits for: ``compute``, ``persist``, a batch of futures. Two graphs are one run when they come from
the same client and the same `distributed.span`, and

* the second arrives before the first has ended, such as ``persist`` and then ``compute``, or many ``submit``; or
* both have the same name, the first took less than `SHORT_SECONDS`, and the second follows within `GAP_SECONDS`: a loop
  of graphs so short that heartbeats cannot tell them apart.

A run takes in no more graphs `LONGEST_SECONDS` after it began, so that a service that always has work gets a run every
ten minutes. Graphs that tasks submit (`distributed.worker_client`) belong to the run that goes on.

A run is summed up (`record.packed`) when every worker has sent a heartbeat since its end. Kept are the newest
`KEPT_RUNS`, of `KEPT_BYTES` at most together; the oldest goes first. While runs are followed, at most `FOLLOWED` at a
time, each takes about 1 kB per worker. One more than that ends the oldest that goes on for longer than
`LONGEST_SECONDS`, if there is one.

Of a graph that asks for more than `FOLLOWED_KEYS` keys a sample is followed.

Cost: a look into a set for each task that ends, some microseconds for a graph, and for each heartbeat; some
milliseconds at the end of a run with many tasks, and for a run that goes on while a table shows it, at most every
`FRESH_SECONDS`.

Rejected: one run per graph (a loop of ``submit`` would drive all else out), spans alone (nobody has to use them, and
the default span is the whole cluster), asking workers at both ends of a run (a message to each for each graph).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.collect.scheduler import LedgerPlugin
from dask_gpurt.observe.collect.stall_ledger import add_skewed
from dask_gpurt.observe.runs import record
from dask_gpurt.observe.runs.live import LiveRun, Mark

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

    from distributed import Scheduler
    from distributed.scheduler import WorkerState

    from dask_gpurt.observe.collect.stall_ledger import StallLedger
    from dask_gpurt.observe.collect.worker_account import Reading

KEPT_RUNS = 100
KEPT_BYTES = 4 * 2**20
FOLLOWED = 16
SHORT_SECONDS = 1.0
GAP_SECONDS = 1.0
LONGEST_SECONDS = 600.0
#: for which workers may be silent after the end of a run, before it is summed up without them
SILENT_SECONDS = 15.0
#: workers up to which it is kept who fetched from whom
FETCHES_WORKERS = 64
#: keys of a graph whose end is awaited, and how many a sweep looks at
FOLLOWED_KEYS, SWEPT = 10_000, 1000
#: for which what tables show of a run that goes on stays as it is
FRESH_SECONDS = 2.0
#: keys looked at for the name of a graph
NAMED_BY = 50
#: workers that left in a run whose figures are kept; the oldest go first. A service may run for weeks beside them
LEFT = 1000
#: dependents looked at to see what a task that failed was for
LOOKED_AT = 200
#: begins the names of clients that tasks have
_NESTED = "Client-worker-"


class RunRecorder:
    """The runs of one scheduler; an `Observer` of its ledger. Use on its event loop.

    Parameters
    ----------
    scheduler, ledger
        Read only.
    counts
        Counters of the engines as nested dicts, cheap to read: ``placement`` and ``shuffle`` where installed.
    facts
        What all runs have in common: ``version``, ``policy``, ``prices``.
    clock
        Unix time; for tests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ledger: StallLedger,
        counts: Callable[[], dict[str, Any]] = dict,
        facts: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._counts = counts
        self._facts = dict(facts or {})
        self._clock = clock
        #: runs so far
        self.number = 0
        #: graphs that belong to no run, as `FOLLOWED` others were followed
        self.unfollowed = 0
        #: oldest first: going on, or not summed up yet
        self._live: list[LiveRun] = []
        #: what is pending in any of them
        self.wanted: set[Hashable] = set()
        #: oldest first
        self._kept: deque[record.Kept] = deque()
        self._kept_bytes = 0
        self._failed_at = 0.0

    @property
    def _names_sources(self) -> bool:
        """Whether it is kept which worker fetched from which."""
        return len(self._scheduler.workers) <= FETCHES_WORKERS

    @property
    def following(self) -> bool:
        """Whether there is a run that heartbeats belong to."""
        return bool(self._live)

    # ------------------------------------------------------------------ events

    def graph_arrived(self, client: str, keys: Collection[Any], spans: Mapping[Any, Any]) -> None:
        """A client has asked for `keys`; `spans` are the annotations of tasks by `distributed.span`."""
        tasks = self._scheduler.tasks
        step = -(-len(keys) // FOLLOWED_KEYS) or 1
        pending = {
            key: None
            for key in itertools.islice(keys, 0, None, step)
            if (ts := tasks.get(key)) is None or ts.state not in ("memory", "erred")
        }
        going = [run for run in self._live if run.stop is None]
        if not pending:
            return
        if going and client.startswith(_NESTED):
            going[-1].graphs += 1
            return
        now = self._clock()
        span, name = _span(spans), self._name(pending)
        run = next((run for run in reversed(self._live) if _joins(run, client, span, name, now)), None)
        if run is not None:
            if run.stop is not None:
                run.reopen(now)
                _share(run, going)
            run.add(pending)
        elif len(self._live) >= FOLLOWED and not self._give_up(now):
            self.unfollowed += 1
            return
        else:
            self.number += 1
            history = self._ledger.history
            run = LiveRun(
                *(self.number, client, span, name, now),
                *(history.tasks_seen, history.outputs_seen, self._counts(), pending),
            )
            _share(run, going)
            self._live.append(run)
        self.wanted.update(pending)

    def _give_up(self, now: float) -> bool:
        """Keep what is known of the longest run, and follow it no more; False: none takes that long.

        Tasks of services go on for weeks. As many as are followed would hide all other runs.
        """
        run = next((run for run in self._live if run.stop is None and _apart(run.start, now) > LONGEST_SECONDS), None)
        if run is None:
            return False
        run.outcome = "followed no more"
        run.pending.clear()
        self.wanted = {key for other in self._live for key in other.pending}
        self._end(run, now)
        self._keep(run)
        return True

    def task_left(self, key: Hashable, finish: str) -> None:
        """A task is no longer assigned to a worker."""
        if finish == "erred":
            # What depends on it fails after this, without a word to the ledger; `_sweep` ends the run then.
            self._failed_at = self._clock()
            for run in self._asking_for(key):
                run.outcome = "failed"
        elif finish != "memory":
            return
        if key not in self.wanted:
            return
        self.wanted.discard(key)
        for run in self._live:
            if key not in run.pending:
                continue
            del run.pending[key]
            if not run.pending:
                self._end(run, self._clock())

    def _asking_for(self, key: Hashable) -> Iterator[LiveRun]:
        """The runs that a task is for: of what depends on it, some is asked for. Looks at `LOOKED_AT` tasks at most."""
        going = [run for run in self._live if run.stop is None and run.outcome == "finished"]
        if not going:
            return
        seen = {key}
        left = [key]
        while left and len(seen) <= LOOKED_AT:
            key = left.pop()
            yield from (run for run in going if key in run.pending)
            ts = self._scheduler.tasks.get(key)
            fresh = [d.key for d in itertools.islice(ts.dependents, LOOKED_AT) if d.key not in seen] if ts else []
            seen.update(fresh)
            left += fresh

    def heard(
        self,
        ws: WorkerState,
        before: Reading,
        now: Reading,
        waits: Mapping[str, Sequence[int]],
        skewed: tuple[tuple[str, str], float] | None,
    ) -> None:
        """A heartbeat was taken in."""
        self._sweep()
        for run in self._live:
            if ws.address in run.ends:
                continue  # it is after the run
            if ws.address not in run.begins:
                begin = Mark.of(ws, before, fetched=self._names_sources)
                run.begins[ws.address] = begin.less(run.left.pop(ws.address, None))
            if waits:
                run.waits.grow(waits)
            if skewed is not None:
                add_skewed(run.skewed, *skewed)
            if run.stop is not None:
                run.ends[ws.address] = Mark.of(ws, now, fetched=self._names_sources)
                self._look_up(run)
        self._seal()

    def worker_left(self, address: str, last: Reading) -> None:
        """A worker has left."""
        for run in self._live:
            begin, end = run.begins.pop(address, None), run.ends.pop(address, None)
            if run.stop is None and len(run.lost) < record.WORKERS:
                run.lost.append(address if begin is None else str(begin.ws.name))
            if begin is not None:
                if len(run.left) >= LEFT:
                    del run.left[next(iter(run.left))]
                run.left[address] = begin, end or Mark.of(begin.ws, last, fetched=self._names_sources)

    def restarted(self) -> None:
        """The scheduler has forgotten all tasks."""
        now = self._clock()
        for run in self._live:
            if run.stop is None:
                run.outcome = "restarted"
                run.pending.clear()
                self._end(run, now)
        self.wanted.clear()

    # ------------------------------------------------------------------ the end of a run

    def _sweep(self) -> None:
        """End the runs whose keys were released, or failed because of others: the ledger does not hear of these.

        From the front: while one key is awaited, so is the run.
        """
        tasks = self._scheduler.tasks
        for run in self._live:
            # At once: a dict keeps the places of what was taken out, and each look for the first would pass them all.
            for key in list(itertools.islice(run.pending, SWEPT)):
                ts = tasks.get(key)
                if ts is None or not ts.who_wants:
                    # What later graphs need is superseded: data that was persisted, and then others made of it.
                    run.forgotten += ts is None or not ts.dependents
                elif ts.state == "erred":
                    run.outcome = "failed"
                elif ts.state != "memory":
                    break
                del run.pending[key]
                if not any(key in other.pending for other in self._live):
                    self.wanted.discard(key)
            if not run.pending and run.stop is None:
                failed = run.outcome == "failed" and self._failed_at >= run.start
                self._end(run, self._failed_at if failed else self._clock())

    def _end(self, run: LiveRun, now: float) -> None:
        if 2 * run.forgotten > run.asked and run.outcome == "finished":
            run.outcome = "cancelled"
        run.stop = max(run.start, now)  # a clock that was set back: a run takes no less than nothing
        history = self._ledger.history
        run.tasks_after, run.outputs_after = history.tasks_seen, history.outputs_seen
        run.counts_after = self._counts()

    def _look_up(self, run: LiveRun) -> None:
        """Take the rows of its tasks out of the history, before others push them out."""
        if run.rows is not None:
            return
        history = self._ledger.history
        after, outputs_after = (
            (history.tasks_seen, history.outputs_seen) if run.stop is None else (run.tasks_after, run.outputs_after)
        )
        run.rows = _newest(history.rows, history.tasks_seen - after, after - run.tasks_before)
        fresh = _newest(history.outputs, history.outputs_seen - outputs_after, outputs_after - run.outputs_before)
        run.outputs = [nbytes for _, nbytes in fresh]

    def _seal(self) -> None:
        """Sum up the runs of which all is known."""
        now, workers = self._clock(), self._scheduler.workers
        for run in [run for run in self._live if run.stop is not None and _apart(run.stop, now) >= GAP_SECONDS]:
            assert run.stop is not None
            # As many first: this is called with each heartbeat, and a look at all workers each time is their square.
            every = len(run.ends) >= len(workers) and all(address in run.ends for address in workers)
            if every or _apart(run.stop, now) > SILENT_SECONDS:
                self._keep(run)

    def _keep(self, run: LiveRun) -> None:
        """Sum it up."""
        self._live.remove(run)
        kept = record.packed(self._record(run))
        self._kept.append(kept)
        self._kept_bytes += len(kept.packed)
        while self._kept and (len(self._kept) > KEPT_RUNS or self._kept_bytes > KEPT_BYTES):
            self._kept_bytes -= len(self._kept.popleft().packed)

    def _record(self, run: LiveRun) -> dict[str, Any]:
        going = run.stop is None
        counts = self._counts() if going else run.counts_after
        self._look_up(run)
        ends = dict(run.ends)
        for address, reading in self._ledger.readings().items():
            begin = run.begins.get(address)
            if begin is not None and address not in ends:
                ends[address] = Mark.of(begin.ws, reading, fetched=self._names_sources)
        tasks = (self._ledger.history.tasks_seen if going else run.tasks_after) - run.tasks_before
        made = record.made(run, ends, counts, self._facts | {"task_count": tasks}, self._clock())
        if going:
            run.rows = None  # there will be more
        return made

    # ------------------------------------------------------------------ reading

    def statistics(self) -> dict[str, Any]:
        """``seen`` so far, ``kept`` of them and ``kept_bytes``, ``followed`` now, ``unfollowed`` graphs."""
        return {
            "seen": self.number,
            "kept": len(self._kept),
            "kept_bytes": self._kept_bytes,
            "followed": len(self._live),
            "unfollowed": self.unfollowed,
        }

    async def refresh(self) -> None:
        """Before `headlines`: one run in each turn of the event loop, as each takes up to 30 ms."""
        self._sweep()
        for run in list(self._live):
            if run in self._live:  # else it was summed up meanwhile
                self._headline(run)
                await asyncio.sleep(0)

    def headlines(self) -> list[dict[str, Any]]:
        """One of each run that is known, newest first; see `record.headline`."""
        self._sweep()
        live = [self._headline(run) for run in self._live]
        return sorted([*(kept.headline for kept in self._kept), *live], key=lambda h: -h["number"])

    def _headline(self, run: LiveRun) -> dict[str, Any]:
        now = self._clock()
        if run.headline is None or now - run.headline[0] >= FRESH_SECONDS or run.headline[1] != run.stop:
            run.headline = now, run.stop, record.headline(self._record(run))
        return run.headline[2]

    def numbers(self) -> list[int]:
        """Of the runs that are known, oldest first."""
        self._sweep()
        return sorted([*(run.number for run in self._live), *(kept.number for kept in self._kept)])

    def find(self, number: int) -> dict[str, Any] | None:
        """The record of a run; None when it is not known, or not any more."""
        self._sweep()
        for kept in self._kept:
            if kept.number == number:
                return kept.record()
        return next((self._record(run) for run in self._live if run.number == number), None)

    def _name(self, keys: Iterable[Any]) -> str:
        """Of what was asked for: the prefixes of some keys."""
        tasks = self._scheduler.tasks
        names = {ts.prefix.name for key in itertools.islice(keys, NAMED_BY) if (ts := tasks.get(key)) is not None}
        return ", ".join(sorted(map(str, names))[:3]) + (", ..." if len(names) > 3 else "")


def _joins(run: LiveRun, client: str, span: str, name: str, now: float) -> bool:
    """Whether a graph belongs to a run."""
    if (run.client, run.span) != (client, span) or _apart(run.start, now) > LONGEST_SECONDS:
        return False
    if run.stop is None:
        return True
    short = (run.stop - run.start - run.gap_seconds) / run.graphs < SHORT_SECONDS
    return short and run.name == name and _apart(run.stop, now) < GAP_SECONDS


def _apart(then: float, now: float) -> float:
    """Seconds between two times, also by a clock that was set back: else a run would stay open for as long."""
    return abs(now - then)


def _share(run: LiveRun, going: list[LiveRun]) -> None:
    """Note that a run begins, or goes on, beside others."""
    if going:
        for one in (run, *going):
            one.shared = True


def _span(annotations: Mapping[Any, Any]) -> str:
    """The name of the span that tasks are in; that of the default one is none."""
    first = next(iter(annotations.values()), None)
    names = first.get("name") if isinstance(first, dict) else None
    return "" if not names or tuple(names) == ("default",) else " / ".join(map(str, names))


def _newest(rows: deque[Any], skipped: int, n: int) -> list[Any]:
    """Of the newest rows, `n` after `skipped` ones; oldest first, as far as they are there still."""
    found = list(itertools.islice(reversed(rows), max(0, skipped), max(0, skipped) + max(0, n)))
    found.reverse()
    return found


def of(scheduler: Scheduler) -> RunRecorder | None:
    """The recorder of a scheduler; None without the extension, or where observation is off."""
    plugin = getattr(scheduler, "plugins", {}).get(LedgerPlugin.name)
    ledger = plugin.ledger if isinstance(plugin, LedgerPlugin) else None
    observer = None if ledger is None else ledger.observer
    return observer if isinstance(observer, RunRecorder) else None
