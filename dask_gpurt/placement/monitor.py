"""`Monitor`: looks at all workers a few times a second and acts where no event comes, as on tasks that do not end.

`start` and `stop` switch the rounds on and off; `round` makes one. *Stock* means Dask's own behaviour. Each round, in
this order:

0. *Zones*: measure the round trip of each new worker, see `topology.zones`.
1. *Suspicions*: heartbeats carry the run time of each running task. Compared with the usual time of such tasks, it
   gives a lower bound of the worker's slowness, see `worker_speed`.
2. *Stealing*: while workers are idle and no root is queued, run stock's own balancing. By itself that happens once a
   second, which is longer than the end of most graphs: a cross-validation of 1.4 s takes 0.95 s.
3. *Rescue*: ask back tasks that wait on a slow worker and would be done sooner in the queue of a faster one, by means
   of work stealing. Stock only sees that the slow worker has little to do.
4. *Stragglers*: start a second copy of overdue tasks on idle workers, see `straggler_policy`.
5. *The queue*: fill slots again when a slow worker was refused a root task, or one was held for its owner for long or
   waits for an input that comes from another zone, and as soon as stock decides.

Before them, the bookkeeping and the judge of *whole graphs* get their look, see `graph_samples`.

A round walks over all workers. Rounds are `ROUND_SECONDS` apart on small clusters, and in proportion on large ones, so
that they take about one percent of the event loop. A round stops after `LIMIT_SECONDS`, and the next one goes on there.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import statistics
import time
from typing import TYPE_CHECKING, Any

from tornado.ioloop import PeriodicCallback

from dask_gpurt.model import LinkClass
from dask_gpurt.model.views import TaskView
from dask_gpurt.placement.decide import candidates, straggler_policy
from dask_gpurt.placement.decide.cost import finish_seconds
from dask_gpurt.placement.decide.steal_policy import STOCK
from dask_gpurt.placement.tables import worker_facts
from dask_gpurt.placement.tables.durations import JUDGING, LEAST, MEASURABLE_SECONDS
from dask_gpurt.placement.tables.worker_speed import FORGET_SECONDS
from dask_gpurt.topology.zones import round_trip_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.scheduler import TaskState

    from dask_gpurt.placement.engine import Engine
    from dask_gpurt.placement.tables.workers import WorkerInfo
    from dask_gpurt.placement.takeover.seam import Seam
    from dask_gpurt.placement.takeover.speculation import Speculation
    from dask_gpurt.placement.takeover.stealing import Stealing

NAME = "patrol"
#: key of the periodic callback
CALLBACK = "gpurt-patrol"
ROUND_SECONDS = 0.1
#: a round of so many workers takes one percent of the time between rounds, about
PER_WORKER_SECONDS = 5e-4
LIMIT_SECONDS = 0.01
#: run time beyond the expected from which a task is evidence about its worker, in seconds
NOTABLE_SECONDS = 0.05
#: and its ratio to the time of a long task of its kind
SURPRISE = 1.5
#: tasks asked back, and copies started, per round
MOVES = 16
#: tasks of one slow worker that are looked at per round: it may have thousands in hand
LOOKED = 4 * MOVES
#: tasks of one slow worker of which the last are sought in each round; of more, more rarely
MANY = 4096
#: idle workers looked at for one task
IDLE = 8
#: rounds in which the round trip of a new worker is asked for, and then only every so many-th: ``inproc://`` has none
SOUNDINGS = 32


class Monitor:
    """The rounds of one scheduler; `clock`: seconds since the epoch, None for `time.time`."""

    def __init__(
        self,
        engine: Engine,
        guard: Seam,
        stealing: Stealing,
        copies: Speculation | None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.engine = engine
        self.guard = guard
        self.stealing = stealing
        #: None: no second copies
        self.copies = copies
        self.rounds = 0
        # Looked up at each call, so that a simulator can exchange it.
        self._clock = clock or (lambda: time.time())
        #: where the next round goes on: among all workers, and among the slow ones
        self._at = self._slow_at = 0
        self._callback: PeriodicCallback | None = None

    def start(self) -> None:
        """Begin the rounds. Without an event loop (a simulated scheduler) the caller calls `round`."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        self.guard.part(NAME, self._switched_off)
        scheduler = self.engine.scheduler
        self._callback = PeriodicCallback(self.go, self.interval_seconds() * 1000)
        scheduler.periodic_callbacks[CALLBACK] = self._callback
        self._callback.start()

    def stop(self) -> None:
        """End the rounds. Safe to call twice."""
        if self._callback is not None:
            self._callback.stop()
            callbacks = self.engine.scheduler.periodic_callbacks
            if callbacks.get(CALLBACK) is self._callback:
                del callbacks[CALLBACK]
            self._callback = None

    def interval_seconds(self) -> float:
        """Seconds between two rounds."""
        return max(ROUND_SECONDS, len(self.engine.workers.all) * PER_WORKER_SECONDS)

    def go(self) -> None:
        """Make one round, and count what it raises."""
        part = self.guard.parts.get(NAME)
        if part is not None and part.retired is not None:
            return
        try:
            self.round()
            if self._callback is not None:
                self._callback.callback_time = self.interval_seconds() * 1000
        except Exception:
            self.guard.failed(NAME)

    def _switched_off(self) -> None:
        """Leave the roots to Dask: what is held relies on these rounds."""
        self.engine.unwatched = True
        self._fill_slots()

    def _fill_slots(self) -> None:
        scheduler = self.engine.scheduler
        if scheduler.queued and scheduler.idle_task_count:
            scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=f"gpurt-patrol-{self._clock()}")

    def round(self) -> None:
        """Make one round."""
        self.rounds += 1
        engine = self.engine
        workers = engine.workers.all.items
        if workers:
            engine.samples.look_round()
        scheduler = engine.scheduler
        if not workers or engine.retired:
            # Until just now it was held for its owner, whose task may go on for hours: no event would give it out.
            self._fill_slots()
            return
        began = time.perf_counter()
        now = self._clock()
        overdue: list[tuple[float, Any, WorkerInfo]] = []
        at = self._at if self._at < len(workers) else 0
        for n in range(len(workers)):
            if at >= len(workers):
                at = 0
            self._look(workers[at], now, overdue)
            at += 1
            if not n & 15 and time.perf_counter() - began > LIMIT_SECONDS:
                break
        self._at = at
        engine.speeds.refresh()
        if engine.workers.idle.items and scheduler.idle and not scheduler.queued:
            self.stealing.balance()
        if engine.speeds.uneven:
            self._rescue()
        if overdue and self.copies is not None and engine.workers.idle.items:
            self._stragglers(overdue)
        if not scheduler.queued:
            engine.speeds.nothing_queued()
        elif engine.speeds.refusing or engine.root_dispatch.impatient():
            scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=f"gpurt-patrol-{now}")

    # ------------------------------------------------------------------ 1: suspicions

    def _look(self, info: WorkerInfo, now: float, overdue: list[tuple[float, Any, WorkerInfo]]) -> None:
        ws = info.ws
        engine = self.engine
        engine.tables.devices.look(ws)
        engine.workers.refresh(info)
        if not info.zoned:
            self._sound(info)
        late: list[float] = []
        running = 0
        if ws.executing and ws.processing:
            since = max(0.0, now - ws.last_seen)
            kinds = engine.durations.groups
            for ts, seconds in ws.executing.items():
                if ts.processing_on is not ws:
                    continue
                # By its group only: of another table the same prefix may take a hundred times as long.
                prefix = kinds.get(ts.group.name)
                if prefix is None or prefix.seconds is None or prefix.samples < JUDGING:
                    continue
                running += 1
                run = seconds + since
                usual = prefix.seconds
                # Where such tasks differ by themselves, a long one is no evidence. A worker beyond its memory mark
                # waits for its disk, which is no evidence about its processor.
                known = prefix.samples >= 2 * JUDGING
                if known and run - usual > NOTABLE_SECONDS and ws.nbytes <= info.mark_bytes:
                    usual = max(usual, MEASURABLE_SECONDS, prefix.long_seconds)
                    if run > SURPRISE * usual and run - usual > NOTABLE_SECONDS:
                        late.append(math.log(run / usual))
                if (
                    run > straggler_policy.TIMES * prefix.seconds
                ):  # the least of what makes it overdue, and cheap to know
                    bound = straggler_policy.overdue_seconds(prefix)
                    if bound is not None and run > bound and ts not in ws.long_running:
                        overdue.append((run, ts, info))
        speed = info.speed
        if late:
            speed.suspect(statistics.median(late + [0.0] * (running - len(late))))
        elif speed.suspected:
            speed.suspect(0.0)
        if info.looked_samples != info.speed_samples:
            info.looked_samples, info.looked_at = info.speed_samples, now
        elif abs(now - info.looked_at) > FORGET_SECONDS and len(speed):  # negative: the clock was set back
            speed.forget_one()
            info.looked_at = now
        slowness = speed.slowness if speed.suspected or info.speed_samples >= LEAST else 1.0
        if info.slowness != slowness:
            info.slowness = slowness
            engine.speeds.learned(info)

    def _sound(self, info: WorkerInfo) -> None:
        """Measure the round trip of a new worker; where that fails for long, try only in every so many-th round."""
        if info.address in self.engine.zones.by_address:
            info.zoned = True
            return
        info.asked += 1
        if info.asked > SOUNDINGS and self.rounds % SOUNDINGS:
            return
        sock = worker_facts.connection(self.engine.scheduler, info.address)
        if sock is not None and (trip := round_trip_seconds(sock)) is not None:
            self.engine.measured(info, trip)

    # ------------------------------------------------------------------ 2: rescue

    def _rescue(self) -> None:
        engine = self.engine
        moves = 0
        slow, start = engine.speeds.slow, self._slow_at
        began = time.perf_counter()
        for n in range(len(slow)):
            self._slow_at = (start + n) % len(slow)
            if time.perf_counter() - began > LIMIT_SECONDS:
                return  # where half of thousands of workers are slow, each with a queue, it would be seconds
            home = slow[self._slow_at]
            ws = home.ws
            if len(ws.processing) - len(ws.long_running) <= ws.nthreads:
                continue
            if self.rounds % (1 + len(ws.processing) // MANY):
                continue  # all of them are looked at to find the last: of 100,000 in every 25th round
            others = [w.ws for w in {**dict.fromkeys(self._some(home, idle=True)), **dict.fromkeys(self._some(home))}]
            if not others:
                continue
            waiting = (t for t in ws.processing if t not in ws.executing and t not in ws.long_running)
            # The task that its worker would run last goes first.
            for ts in heapq.nlargest(LOOKED, waiting, key=lambda t: t.priority):
                if moves >= MOVES:
                    return
                valid = self.stealing.may_steal(ts, others)
                thief = engine.steal_policy.choose(ts, others, self.stealing.in_flight, valid, busy=True)
                if thief is not None and thief is not STOCK and self.stealing.request(ts, thief):
                    moves += 1
        self._slow_at = 0

    def _some(self, home: WorkerInfo, idle: bool = False) -> list[WorkerInfo]:
        """A few other workers: those with a free thread (`idle`), or faster ones."""
        workers = self.engine.workers
        items = workers.idle.items if idle else workers.all.items
        if not items:
            return []
        start = int(self.engine.workers.random() * len(items))
        found = []
        for i in range(min(len(items), 4 * IDLE)):
            info = items[(start + i) % len(items)]
            if info is not home and (idle or info.slowness < home.slowness) and worker_facts.is_running(info.ws):
                found.append(info)
                if len(found) >= IDLE:
                    break
        return found

    # ------------------------------------------------------------------ 3: stragglers

    def _stragglers(self, overdue: list[tuple[float, Any, WorkerInfo]]) -> None:
        engine = self.engine
        overdue.sort(key=lambda o: -o[0])
        at_work = sum(min(len(info.ws.processing), info.ws.nthreads) for info in engine.workers.all.items)
        spare = engine.graph_judge.left <= at_work
        began = time.perf_counter()
        weighed = 0
        for run, ts, info in overdue:
            # Tasks that must not run twice may go on for ever: they are not counted, or no other would have its turn.
            weighed += self._copy(run, ts, info, spare)
            if weighed >= MOVES or time.perf_counter() - began > LIMIT_SECONDS:
                return

    def _copy(self, run: float, ts: TaskState, home: WorkerInfo, spare: bool) -> bool:
        """Start a second copy of an overdue task if that pays; False if there must be none, or is one already."""
        engine, copies = self.engine, self.copies
        if copies is None or ts.key in copies.copies or ts in copies.failed or ts.state != "processing":
            return False
        reason = straggler_policy.forbidden(ts)
        if reason is None and copies.gained[ts.prefix.name] <= -straggler_policy.LOSSES:
            reason = "copies have lost"
        if reason is not None:
            engine.forbade[reason] += 1
            return False
        free = [
            info
            for info in self._some(home, idle=True)
            if len(info.ws.processing)
            - len(info.ws.long_running)
            + copies.per_worker[info.address]
            + self.stealing.in_flight.get(info.ws, 0)
            < info.ws.nthreads
        ]
        valid = self.stealing.may_steal(ts, {info.ws for info in free})
        free = [info for info in free if valid is None or info.ws in valid]
        # With the home, which has the inputs and runs the task: of others none may be left.
        free = [info for info in engine.tables.devices.able(ts, [home, *free]) if info is not home]
        prefix = engine.durations.known(ts)
        if not free or prefix is None or prefix.seconds is None:
            return True
        name = ts.prefix.name
        views = candidates.views(
            free, candidates.Inputs(ts.dependencies, engine.workers.by_address), engine.tables, name
        )
        far = engine.links.link(LinkClass.NETWORK)
        task = TaskView(prefix.seconds, prefix.output_bytes)
        # Not beyond a memory mark: a task that is late as it takes more memory than others would fill a second worker.
        ends = [
            (finish_seconds(task, view, far)[0], i)
            for i, view in enumerate(views)
            if view.near_bytes + view.far_bytes + task.output_bytes <= view.room_bytes
        ]
        if not ends:
            return True
        there, best = min(ends)
        here = prefix.seconds * home.speed.measured_slowness(name)
        if straggler_policy.pays(run, here, there, spare and not straggler_policy.named_by_program(ts)):
            copies.start(ts, free[best].ws)
        return True
