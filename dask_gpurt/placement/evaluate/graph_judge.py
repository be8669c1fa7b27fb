"""`GraphJudge`: compare whole graphs under placement with the same graphs under stock Dask. Pure; acts on nothing.

`stock` says whether everything is left to Dask now. `arrived`, `finished`, `tick`, `alarmed` and `spoil` report events.
*Stock* means Dask's own choice; "ours" in a text is placement's.

`governor` compares single decisions. Some harm shows in no single decision: roots given to the wrong workers, useless
steals, idle threads, a graph that takes longer although each of its tasks does not. This module sees only results.

Theory of operation
-------------------
An *episode* lasts from the first graph on a cluster without work until all of its tasks are done, together with all
graphs that arrive meanwhile. Its *head* is the kinds of task of the first graph: prefixes with counts rounded to powers
of two, and the number of threads likewise. Tokens in keys do not matter, so a computation that is repeated on new data
has the same head. States and events of a head (`GraphStanding`)::

    TRUSTED --suspicion--> TRIAL --ours loses--> RETIRED --back-off over--> TRIAL
                             \\--ours does not lose--> CLEARED --back-off over--> TRUSTED

* TRUSTED: placement's. An episode raises suspicion when it takes `SUSPICIOUS` times the bound that its own computing
  sets (`_bound`), fills a worker beyond its memory mark, or raises the alarm of idle threads (`idle_alarm`). The first
  episode of a head imports and learns, and raises suspicion only by the alarm.
* TRIAL: episodes go to the side that has fewer results, by lot where both have as many. On stock's side everything is
  stock's: roots, decisions, stealing, copies. Results are compared within *strata*: the same tasks, threads and bytes
  of results. `verdict` decides as soon as it is clear, after `MOST` results of each side in any case. An episode on
  stock's side that has taken `GIVEN_UP` times as long as ours did goes on as ours: stock may be many times slower, and
  what it has taken so far is enough to compare.
* RETIRED: stock's. CLEARED: placement's, not suspected again for a while. Both back-offs double, up to an hour.

When `SEVERAL` heads are retired, and at least as many as are cleared, everything is stock's for a while.

Nothing is concluded from a short episode. Nor from one in which a worker left, a task failed or was cancelled, the side
changed, or the governor had its own trial. A graph that never repeats is never compared: parts of one graph share
workers and memory, so there is no fair comparison between them. There the alarm is the only guard.

Cost: a few additions for each finished task, counting the tasks of each graph, and the rest once per episode. During a
trial half of the episodes are stock's, at most `MOST` per head.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.evaluate.graph_record import (
    MAX_REST_SECONDS,
    REST_SECONDS,
    GraphStanding,
    Head,
    Record,
    head_of,
    named,
)
from dask_gpurt.placement.evaluate.graph_verdict import MOST, Outcome, verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: episodes with fewer tasks per thread, or shorter in seconds, are not judged
TASKS_PER_THREAD = 4
NOTABLE_SECONDS = 1.0
#: an episode is suspicious when it takes so many times the seconds that its tasks need on all threads
SUSPICIOUS = 1.3
#: seconds of an episode for each second that the scheduler's event loop is at work in it: workers and clients handle
#: the same messages, and the loop waits for a processor that it shares. 1.7 to 2.6 with empty tasks, also of stock's
LOOP_SHARE = 2.5
#: times ours' seconds after which an episode on stock's side of a trial is given up. More than `graph_verdict.CLEAR`:
#: what was taken until then counts as a clear result
GIVEN_UP = 1.3
#: episodes of a trial, also those that could not be compared; then it ends
MOST_DRAWN = 4 * MOST
#: heads that lose before everything is left to stock
SEVERAL = 3
#: heads kept; the longest unused is forgotten
MAX_HEADS = 256
#: kinds of task of an episode that are judged one by one; an episode with more is not judged
MAX_KINDS = 1024
#: ticks without anything assigned or queued after which tasks that are missing will not come
QUIET_TICKS = 3


class GraphJudge:
    """Observes episodes, and says whether the present one is left to Dask.

    Parameters
    ----------
    clock
        Seconds, monotonic.
    retired
        Called with the reason when a head, or everything, is left to stock.
    enabled
        False: everything is placement's, and nothing is observed.
    loop_seconds
        Processor seconds of the scheduler's event loop until now.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        retired: Callable[[str], None] = lambda reason: None,
        *,
        enabled: bool = True,
        loop_seconds: Callable[[], float] | None = None,
    ) -> None:
        self.enabled = enabled
        #: whether everything is stock's now. Read on the path of every decision
        self.stock = False
        #: whether this is an episode of a trial: `moved_bytes` are to be counted, which costs something
        self.in_trial = False
        #: tasks of the present episode that are not done; 0: nothing to observe
        self.left = 0
        #: of the present episode, added to by the engine
        self.compute_seconds = 0.0
        self.made_bytes = 0
        self.moved_bytes = 0
        #: since the start: episodes judged, and those left out by reason
        self.judged = 0
        self.unjudged: Counter[str] = Counter()
        #: episodes of stock's by lot, and by verdict
        self.by_lot = 0
        self.left_to_stock = 0
        #: episodes on stock's side that were given up
        self.given_up = 0
        self.trials = 0
        self.retirements = 0
        self.records: dict[Head, Record] = {}
        self._clock = clock
        self._retired = retired
        self._lot = random.Random(0).random
        # Looked up at each call, so that a simulator can exchange it.
        self._loop_seconds = loop_seconds or (lambda: time.thread_time())
        #: the present episode; None: none
        self._head: Head | None = None
        self._tasks: Counter[str] = Counter()
        self._total = 0
        self._threads = 0
        self._began = self._ended = 0.0
        #: when its last graph arrived; the loop's seconds at its begin, and in it
        self._arrived = self._loop_began = self._loop_took = 0.0
        #: why the present episode is not judged; None: it is
        self._spoiled: str | None = None
        self._alarmed = False
        #: seconds after which the present episode, on stock's side of a trial, was given up; None: it was not
        self._given_up: float | None = None
        #: fullest worker, as a share of its memory mark
        self._fullest = 0.0
        self._quiet = 0
        #: everything is stock's until then
        self._until = -math.inf
        self._rest = REST_SECONDS

    @property
    def observing(self) -> bool:
        """Whether there is an episode."""
        return self._head is not None

    @property
    def done(self) -> int:
        """Tasks of the present episode that are done."""
        return self._total - self.left

    # ------------------------------------------------------------------ events

    def arrived(self, tasks: Mapping[str, int], threads: int, spoiled: str | None = None) -> None:
        """Note a graph that has arrived.

        Parameters
        ----------
        tasks
            Prefix -> how many of the graph's tasks are to be run.
        threads
            Of all workers.
        spoiled
            Why this episode must not be judged; None: it may be.
        """
        if not self.enabled:
            return
        n = sum(tasks.values())
        if not n:
            return
        if self._head is not None and not self.left:
            self.close()
        if self._head is None:
            self._begin(head_of(tasks, threads), threads, spoiled is None)
        elif self._outgrown(n):
            stock = self._is_retired(self.records.get(head_of(tasks, threads)), self._clock())
            if stock is not self.stock:
                self.stock = stock
                spoiled = spoiled or "its side changed"
        self._arrived = self._clock()
        self.left += n
        self._total += n
        if len(self._tasks) > MAX_KINDS:
            spoiled = spoiled or "too many kinds of task"
        else:
            for prefix, count in tasks.items():
                self._tasks[prefix] += count
        if spoiled is not None:
            self.spoil(spoiled)

    def finished(self, computed: bool) -> None:
        """Note that a task left processing; `computed`: with a result. Call only while `left` is not 0."""
        self.left -= 1
        if not computed:
            self.spoil("a task had no result")
        if not self.left:
            self._done()

    def spoil(self, reason: str) -> None:
        """Do not judge the present episode, for this reason."""
        if self._spoiled is None:
            self._spoiled = reason

    def alarmed(self) -> None:
        """Note that threads were idle while tasks were queued for other workers."""
        self._alarmed = True

    def tick(self, at_work: bool, fullest: float) -> None:
        """Update the peak of memory, and end the episode if it is over. Call a few times a second.

        Parameters
        ----------
        at_work
            Whether any task is assigned or queued.
        fullest
            Bytes of results over the memory mark, of the worker with the largest share.
        """
        if self._head is None:
            return
        self._fullest = max(self._fullest, fullest)
        if not self.left:
            self.close()
            return
        if self.in_trial and self.stock:
            self._give_up()
        self._quiet = 0 if at_work else self._quiet + 1
        if self._quiet >= QUIET_TICKS:
            self._done()
            self.spoil("tasks were cancelled or cannot run")
            self.close()

    def _give_up(self) -> None:
        record = self.records.get(self._head) if self._head is not None else None
        seconds = self._clock() - self._began
        if record is not None and seconds > max(
            NOTABLE_SECONDS, GIVEN_UP * record.pace * max(self._total, record.tasks)
        ):
            self.stock, self._given_up = False, seconds
            self.given_up += 1

    def forget(self) -> None:
        """End the present episode, unjudged: all tasks are gone."""
        if self._head is not None:
            self.spoil("all tasks were forgotten")
            self.close()

    # ------------------------------------------------------------------ an episode

    def _begin(self, head: Head, threads: int, fair: bool) -> None:
        self._head, self._threads = head, threads
        self._tasks.clear()
        self._total = 0
        self._spoiled, self._alarmed, self._given_up = None, False, None
        self._fullest, self._quiet = 0.0, 0
        self.compute_seconds = 0.0
        self.made_bytes = self.moved_bytes = 0
        self._began = now = self._clock()
        self._loop_began = self._loop_seconds()
        record = self.records.get(head)
        if self._is_retired(record, now):
            self.stock = True
        elif record is not None and fair:
            if record.standing is GraphStanding.RETIRED:
                self._try(record, "its time of rest is over")
            if record.standing is GraphStanding.TRIAL:
                self.in_trial = True
                self.stock = self._by_lot(record)

    def _done(self) -> None:
        self._ended = self._clock()
        self._loop_took = self._loop_seconds() - self._loop_began

    def _outgrown(self, n: int) -> bool:
        """Whether the present episode's side must not hold for `n` tasks more."""
        if not (self.in_trial or self.stock):
            return n > self.left  # the larger decides
        # The graphs that follow belong to what is compared, or was, unless they are more than they ever were.
        record = self.records.get(self._head) if self._head is not None else None
        return record is None or self._total + n > 2 * record.tasks

    def _is_retired(self, record: Record | None, now: float) -> bool:
        return now < self._until or (
            record is not None and record.standing is GraphStanding.RETIRED and now < record.until
        )

    def _by_lot(self, record: Record) -> bool:
        """Whether an episode of a trial is stock's."""
        ours = sum(len(o) for o, _ in record.results.values())
        theirs = sum(len(s) for _, s in record.results.values())
        return theirs < ours if ours != theirs else self._lot() < 0.5

    def close(self) -> None:
        """End the present episode and judge it."""
        head, self._head = self._head, None
        stock, self.stock = self.stock or self._given_up is not None, False
        trial, self.in_trial = self.in_trial, False
        self.left = 0
        if head is None:
            return
        n = self._total
        seconds = self._ended - self._began
        notable = n >= TASKS_PER_THREAD * self._threads and seconds >= NOTABLE_SECONDS
        if notable and self._spoiled is not None:
            self.unjudged[self._spoiled] += 1
        fair = notable and self._spoiled is None
        if not (fair or trial):
            return
        record = self.records.pop(head, None) or Record()
        if len(self.records) >= MAX_HEADS:
            del self.records[next(iter(self.records))]
        self.records[head] = record
        now = self._clock()
        if fair:
            self.judged += 1
            record.runs += 1
            record.tasks = n
            record.name = f"{named(self._tasks)} ({n} tasks)"
            if not stock:
                record.pace = seconds / n
        if self._given_up is not None:
            seconds = self._given_up
        if trial:
            self.by_lot += stock
            self._tried(record, stock, Outcome(seconds / n, self.moved_bytes, self._fullest) if fair else None, now)
        elif stock:
            self.left_to_stock += 1
        elif now >= record.until:
            self._watch(record, seconds)

    def _watch(self, record: Record, seconds: float) -> None:
        bound = self._bound()
        if self._alarmed:
            self._try(record, "threads were idle while tasks were queued for other workers")
        elif record.runs > 1 and seconds > SUSPICIOUS * bound:
            self._try(record, f"it took {seconds:.2g} s, and needs {bound:.2g} s wherever its tasks run")
        elif record.runs > 1 and self._fullest > 1.0:
            self._try(record, f"a worker held {self._fullest:.2g} times what it may before it spills")

    def _bound(self) -> float:
        """Seconds that the present episode needs, wherever its tasks run.

        The most of what its tasks take on all threads, what the scheduler and its messages take, and how long the
        client went on sending graphs. Without the latter two, tasks that do nothing are suspicious: stock gets half.
        """
        return max(
            self.compute_seconds / max(1, self._threads),
            LOOP_SHARE * self._loop_took,
            self._arrived - self._began,
        )

    def _try(self, record: Record, reason: str) -> None:
        record.on_trial(reason)
        self.trials += 1

    def _tried(self, record: Record, stock: bool, outcome: Outcome | None, now: float) -> None:
        record.drawn += 1
        loses: bool | None = None
        if outcome is not None:
            kinds = frozenset((prefix, n.bit_length()) for prefix, n in self._tasks.items())
            stratum = self._threads, kinds, round(math.log2(max(1, self.made_bytes)))
            record.results.setdefault(stratum, ([], []))[stock].append(outcome)
            loses, reason = verdict(list(record.results.values()))
        if loses is None:
            if record.drawn < MOST_DRAWN:
                return
            loses, reason = False, f"no two sides to compare after {record.drawn} graphs"
        rest = record.rest
        record.decided(loses, reason, now)
        if not loses:
            return
        self.retirements += 1
        self._retired(f"for graphs of {record.name}: {record.reason}. Tried again in {rest:g} s")
        standings = Counter(r.standing for r in self.records.values())
        lost = standings[GraphStanding.RETIRED]
        if lost >= SEVERAL and lost >= standings[GraphStanding.CLEARED]:
            self._until = now + self._rest
            self._retired(f"for everything: it lost for {lost} kinds of graph. Tried again in {self._rest:g} s")
            self._rest = min(2 * self._rest, MAX_REST_SECONDS)

    # ------------------------------------------------------------------ statistics

    def statistics(self) -> dict[str, Any]:
        """Plain JSON. ``switched_off``: graphs left to stock, and why; ``on_trial`` and ``cleared`` likewise."""
        now = self._clock()
        said: dict[GraphStanding, dict[str, str]] = {s: {} for s in GraphStanding}
        for r in self.records.values():
            said[r.standing][r.name] = r.said(now)
        switched_off = said[GraphStanding.RETIRED]
        if now < self._until:
            everything = f"several kinds of graph lost (for {self._until - now:.0f} s more)"
            switched_off = {"everything": everything, **switched_off}
        return {
            "standing": "stock" if self.stock else "ours",
            "judged": self.judged,
            "unjudged": dict(self.unjudged),
            "trials": self.trials,
            "retirements": self.retirements,
            "by_lot": self.by_lot,
            "given_up": self.given_up,
            "left_to_stock": self.left_to_stock,
            "kinds": len(self.records),
            "switched_off": switched_off,
            "on_trial": said[GraphStanding.TRIAL],
            "cleared": said[GraphStanding.CLEARED],
        }
