"""`StealPolicy`: a second opinion on which worker may steal a waiting task.

`choose` answers with a worker, with None (the task stays), or with `STOCK`: let Dask's work stealing choose. *Stock*
means Dask's own choice.

Dask moves a task when occupancies differ enough. Its unit is prefix mean times count, plus bytes at one bandwidth. It
knows neither the speed of a worker nor the cost of a link, and `steal_cost` explains why seconds must not be mixed into
that unit. So this opinion, in seconds, comes before Dask's own test, and a task moves only when both agree.

1. A worker without a free thread is no thief. The exceptions are a slow victim (`busy`), as tasks that wait there are
   better off in the queue of a fast worker, and a task whose inputs are sent in next to no time (`LIGHT`): of those a
   thief gets what its threads have to do until the next round of balancing. One only, of many short tasks that wait
   behind one small input, would leave it idle for most of the round. More is not needed: the next round knows better.
2. At home the task counts as the last in the queue; elsewhere it needs its inputs first. Moving is charged once more as
   what it costs other tasks, as in `cost`.
3. A task of unknown duration is left to Dask: there is nothing to compare. So is one at a worker that is paused, as it
   begins nothing, for how long is not known; unless the worker is slow as well (`busy`).
4. A task whose inputs take longer to send than moving it can gain stays (`steal_gain`).
5. Where tasks that run have all threads of the victim, and take much longer than expected, they are taken to go on for
   as long again: how much longer is not known, it may be for hours. Nor may a task wait behind one that waits for it.

The time is bounded. At most `THIEVES` workers are compared, and one round of balancing may take `ROUND_SECONDS` in all;
then nothing more is stolen in it.
"""

from __future__ import annotations

import math
import operator
import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import dask
from dask.utils import parse_timedelta

from dask_gpurt.model import LinkClass
from dask_gpurt.model.views import TaskView
from dask_gpurt.placement.decide import candidates
from dask_gpurt.placement.decide.cost import MOVED, finish_seconds
from dask_gpurt.placement.decide.steal_gain import StealGain
from dask_gpurt.placement.tables import worker_facts
from dask_gpurt.placement.tables.devices import reads_device_values

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.tables.durations import Prefix
    from dask_gpurt.placement.tables.tables import Tables
    from dask_gpurt.placement.tables.workers import WorkerInfo

#: thieves compared for one task
THIEVES = 8
#: inputs above which Dask decides
MAX_INPUTS = 64
#: of the time of a task: what sending its inputs takes at most where a worker may queue it
LIGHT = 0.1
#: beyond what is expected of a task that runs before it counts as late, in seconds: heartbeats are as far apart
LATE_SECONDS = 0.5
#: time of one round of balancing, and what counts as one round
ROUND_SECONDS = 0.02
ROUND = 0.2


_address = operator.attrgetter("address")


class Stock:
    """Type of `STOCK`, the answer "let Dask decide"."""


STOCK = Stock()


class StealPolicy:
    """Second opinions on stealing, for one scheduler."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        #: opinions by what they were: allowed, home (cheaper there), busy (no free thread anywhere),
        #: disk (its inputs are on the disk there), slack (there is other work for longer than it takes there), time,
        #: gain (its inputs take longer to send than can be gained)
        self.opinions: Counter[str] = Counter()
        self._gain = StealGain(tables)
        #: seconds between Dask's rounds of balancing
        self._interval = parse_timedelta(dask.config.get("distributed.scheduler.work-stealing-interval"), default="ms")
        self._round = 0.0
        self._spent = 0.0

    def choose(
        self,
        ts: TaskState,
        thieves: Collection[WorkerState],
        in_flight: Mapping[WorkerState, int],
        valid: Collection[WorkerState] | None = None,
        *,
        busy: bool = False,
    ) -> WorkerState | Stock | None:
        """The WorkerState to move a task to, None to leave it where it is, or `STOCK`.

        Parameters
        ----------
        ts
            The waiting task.
        thieves
            WorkerStates that Dask considers.
        in_flight
            WorkerState -> tasks being moved to it, less those being moved from it.
        valid
            WorkerStates the task may run on; None: all.
        busy
            Whether workers without a free thread are considered too.
        """
        tables = self._tables
        victim = ts.processing_on
        home = None if victim is None else tables.workers.by_address.get(victim.address)
        prefix = tables.durations.known(ts)
        if (
            home is None
            or prefix is None
            or prefix.seconds is None
            or len(ts.dependencies) > MAX_INPUTS
            or not (busy or worker_facts.is_running(home.ws))
        ):
            # Dask would give it to any worker; where that may be one that cannot read its inputs, it stays.
            return None if tables.devices.mixed and reads_device_values(ts) else STOCK
        late = self._late_seconds(home)
        on_disk = tables.residence.on_disk
        if not late and on_disk and any(home.address in on_disk.get(d.key, ()) for d in ts.dependencies):
            # Its worker's disk must read for it in any case; elsewhere the value has to be sent as well.
            self.opinions["disk"] += 1
            return None
        began = time.perf_counter()
        if began - self._round > ROUND:
            self._round, self._spent = began, 0.0
        elif self._spent > ROUND_SECONDS:
            self.opinions["time"] += 1
            return None
        try:
            return self._choose(ts, thieves, in_flight, valid, home, prefix, busy, late)
        finally:
            self._spent += time.perf_counter() - began

    def _choose(
        self,
        ts: TaskState,
        thieves: Collection[WorkerState],
        in_flight: Mapping[WorkerState, int],
        valid: Collection[WorkerState] | None,
        home: WorkerInfo,
        prefix: Prefix,
        busy: bool,
        late: float,
    ) -> WorkerState | None:
        tables = self._tables
        far = tables.links.link(LinkClass.NETWORK)
        # At Dask's bandwidth, which contains what packing and unpacking take at both ends.
        bandwidth = min(tables.scheduler.bandwidth, far.bytes_per_second)
        seconds = prefix.seconds or 0.0
        light = sum(d.get_nbytes() for d in ts.dependencies) < LIGHT * seconds * bandwidth
        lasting = math.inf if busy else self._interval if light else 0.0
        free = self._free(ts, thieves, in_flight, valid, home, seconds, lasting)
        if tables.devices.mixed and reads_device_values(ts):
            free = [w for w in tables.devices.able(ts, [home, *free]) if w is not home]
        if not free:
            self.opinions["busy"] += 1
            return None
        name = ts.prefix.name
        task = TaskView(seconds, prefix.output_bytes)
        views = candidates.views(free, candidates.Inputs(ts.dependencies, tables.workers.by_address), tables, name)
        best, best_seconds, sent_bytes = None, 0.0, 0.0
        for info, view in zip(free, views, strict=True):
            finish, moved = finish_seconds(task, view, far)
            elsewhere = finish + MOVED * moved
            coming = in_flight.get(info.ws, 0)
            if lasting and coming > 0:
                elsewhere += coming * task.compute_seconds * info.slowness / info.ws.nthreads
            if best is None or elsewhere < best_seconds:
                best, best_seconds, sent_bytes = info, elsewhere, view.near_bytes + view.far_bytes
        slowness = home.speed.for_prefix(name)
        # Of brief tasks only some are charged, see `durations`. Dask's occupancy has them all.
        backlog = home.backlog_seconds
        if (prefix.usual or prefix).brief and home.ws.occupancy > backlog:
            backlog = home.ws.occupancy
        backlog += min(0, in_flight.get(home.ws, 0)) * task.compute_seconds
        at_home = max(backlog * home.slowness / home.ws.nthreads, task.compute_seconds * slowness) + late
        if at_home <= tables.slack.seconds():
            self.opinions["slack"] += 1
            return None
        if best is None or best_seconds >= at_home:
            self.opinions["home"] += 1
            return None
        sending = sent_bytes / bandwidth
        if not late and sending > task.compute_seconds * slowness:
            gain = self._gain.seconds(ts, home.ws)
            if gain is not None and sending > (gain + _may_follow(ts, best.ws) * task.compute_seconds) * slowness:
                self.opinions["gain"] += 1
                return None
        self.opinions["allowed"] += 1
        return best.ws

    def _late_seconds(self, home: WorkerInfo) -> float:
        """For how long all threads of a worker have been late with what they run; 0: some are not, or not by much."""
        ws, charges = home.ws, self._tables.backlog.charges
        late = []
        for ts, seconds in ws.executing.items():
            if seconds > LATE_SECONDS and ts.processing_on is ws and ts not in ws.long_running:
                charge = charges.get(ts.key)
                expected = 0.0 if charge is None else charge.seconds * home.speed.measured_slowness(ts.prefix.name)
                if seconds - expected > LATE_SECONDS:
                    late.append(seconds - expected)
        return min(late) if late and len(late) >= ws.nthreads else 0.0

    def _free(
        self,
        ts: TaskState,
        thieves: Collection[WorkerState],
        in_flight: Mapping[WorkerState, int],
        valid: Collection[WorkerState] | None,
        home: WorkerInfo,
        seconds: float,
        lasting: float,
    ) -> list[WorkerInfo]:
        """At most `THIEVES` workers other than `home` that may take a task of so many seconds, see `choose`.

        They have a free thread, or what they have and what comes lasts for less than `lasting`.
        """
        tables = self._tables
        by_address = tables.workers.by_address
        # Sets are in another order in every process; the same events must give the same decisions.
        pool: list[Any]
        if len(thieves) > THIEVES:
            # Those that have inputs first, then some that are idle.
            near = {h for d in ts.dependencies for h in islice(d.who_has or (), THIEVES) if h in thieves}
            idle = tables.workers.idle.items
            start = int(tables.workers.random() * len(idle))
            some = (idle[(start + i) % len(idle)].ws for i in range(min(len(idle), 4 * THIEVES)))
            pool = [*sorted(near, key=_address)[:THIEVES], *(w for w in some if w in thieves and w not in near)]
        else:
            pool = sorted(thieves, key=_address)
        free = []
        for ws in pool:
            info = by_address.get(ws.address)
            if (
                info is not None
                and info is not home
                and worker_facts.is_running(ws)
                and (valid is None or ws in valid)
                and (
                    len(ws.processing) - len(ws.long_running) + (coming := in_flight.get(ws, 0)) < ws.nthreads
                    or info.backlog_seconds + max(0, coming) * seconds < lasting * ws.nthreads
                )
            ):
                free.append(info)
                if len(free) >= THIEVES:
                    break
        return free


def _may_follow(ts: TaskState, ws: WorkerState) -> int:
    """How many more tasks may go to a worker once the inputs of this one are there: half of the others that wait."""
    missing = [d for d in ts.dependencies if ws not in (d.who_has or ())]
    return max(0, min((len(d.waiters or ()) for d in missing), default=0) - 1) // 2
