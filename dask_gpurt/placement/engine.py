"""`Engine`: decides where tasks run. It reads tables and acts on nothing; its caller catches its exceptions.

`decide` chooses a worker for a task. It goes three steps: classify (does Dask's own choice stand, and why), weigh
(compare some workers by cost), and record (log, governor, statistics). The engine decides by kind of task:

* Tasks with inputs are weighed by `decide.cost` where placement knows something that Dask does not (`knows_more`):
  inputs in several zones, slow workers, inputs on disk, or a user's policy. Otherwise Dask's own choice stands.
* Tasks without inputs are left to Dask while all workers are about equally fast. They are near to nothing, and Dask's
  least-occupied and round-robin rules are right and O(1) on large clusters. But those rules do not know slow workers.
* Root-ish tasks: Dask's queuing keeps the memory bound. `decide.root_dispatch` says which of them a worker gets.
* Actors are left to Dask, which spreads them by number.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from dask_gpurt.model import LinkClass
from dask_gpurt.placement.bookkeeping import Bookkeeping
from dask_gpurt.placement.decide import candidates
from dask_gpurt.placement.decide.decision import Decision, Declined
from dask_gpurt.placement.decide.policy import Cheapest
from dask_gpurt.placement.decide.root_blocks import RootBlocks
from dask_gpurt.placement.decide.root_dispatch import RootDispatch
from dask_gpurt.placement.decide.steal_cost import MAX_PRICED_INPUTS, StealCost
from dask_gpurt.placement.decide.steal_policy import STOCK, StealPolicy, Stock
from dask_gpurt.placement.evaluate import governor_samples
from dask_gpurt.placement.evaluate.decision_log import DecisionLog
from dask_gpurt.placement.evaluate.governor import Governor, Standing
from dask_gpurt.placement.evaluate.graph_judge import GraphJudge
from dask_gpurt.placement.evaluate.graph_samples import GraphSamples
from dask_gpurt.placement.evaluate.idle_alarm import IdleAlarm
from dask_gpurt.placement.evaluate.shadow_stats import ShadowStats
from dask_gpurt.placement.tables.tables import Tables
from dask_gpurt.placement.tables.workers import node_of
from dask_gpurt.topology.links import SEEDS
from dask_gpurt.topology.zones import seed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping

    from distributed.scheduler import Scheduler, TaskState, WorkerState

    from dask_gpurt.config import PlacementSettings
    from dask_gpurt.model.link import Link
    from dask_gpurt.model.views import TaskView
    from dask_gpurt.placement.decide.policy import Policy
    from dask_gpurt.placement.tables.workers import WorkerInfo

#: weight of a decision in a worker's share of network traffic
SHARE_GAIN = 0.2
#: the governor observes every so many-th decision, and all of a trial
OBSERVED = 4


class Engine:
    """Tables and decisions of one scheduler.

    Parameters
    ----------
    policy
        The user's; None: `Cheapest`.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: PlacementSettings,
        policy: Policy | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        # Looked up at each call, so that a simulator can exchange it.
        clock = clock or (lambda: time.monotonic())
        self.scheduler = scheduler
        self.settings = settings
        self.policy: Policy = policy or Cheapest()
        #: a user's policy decides, and sees every task
        self._users = type(self.policy) is not Cheapest
        #: called with the reason when the governor switches the policy off
        self.on_retired: Callable[[str], None] = lambda reason: None
        #: weigh all tasks with inputs, even where Dask knows as much; for tests and benchmarks of the cost
        self.always = False
        #: the bookkeeping failed too often: decisions by wrong sums would be worse than Dask's
        self.untrusted = False
        #: an operator has Dask decide, see `model.safe_mode`
        self.safe = False
        #: the monitor has failed too often: nothing gives out what was held for an owner whose task goes on for hours
        self.unwatched = False
        self._turn = 0
        #: the task, and number of transitions, for which stealing asked last, and whether placement answers
        self._asked: tuple[Hashable, int] | None = None
        self._priced = False

        self.tables = tables = Tables(scheduler, clock)
        self.workers, self.durations, self.links = tables.workers, tables.durations, tables.links
        self.zones, self.speeds = tables.zones, tables.speeds
        self.backlog, self.budget, self.slack = tables.backlog, tables.budget, tables.slack

        self.log = DecisionLog()
        self.governor = Governor(clock)
        #: whole graphs, as `governor` judges decisions; in shadow mode there is nothing to judge
        self.graph_judge = GraphJudge(clock, lambda reason: self.on_retired(reason), enabled=not settings.shadow)
        self.idle_alarm = IdleAlarm()
        #: what would have been decided; filled in shadow mode only
        self.shadowed = ShadowStats(tables, self.log, self.weigh)

        self.groups = RootBlocks(tables.durations.seconds_of)
        self.root_dispatch = RootDispatch(tables, self.groups, lambda: self.retired)
        self.steal_policy = StealPolicy(tables)
        self.steal_cost = StealCost(tables)
        self.books = self._bookkeeping()
        self.samples = GraphSamples(
            tables,
            self.groups,
            self.governor,
            self.graph_judge,
            self.idle_alarm,
            at_work=lambda: self.books.at_work,
            retired=lambda: self.retired,
        )
        #: decisions by result: moved, local, restricted
        self.decided: Counter[str] = Counter()
        #: decisions left to Dask on purpose, by reason
        self.declined: Counter[str] = Counter()
        #: overdue tasks that must not run twice, by reason
        self.forbade: Counter[str] = Counter()

    def _bookkeeping(self) -> Bookkeeping:
        return Bookkeeping(
            self.tables,
            self.groups,
            self.root_dispatch,
            self.log,
            self.governor,
            self.graph_judge,
            on_retired=lambda reason: self.on_retired(reason),
        )

    # ------------------------------------------------------------------ decisions

    def decide(self, ts: TaskState, valid: Collection[WorkerState] | None) -> WorkerState | None:
        """The worker to run a task on, one of `valid` (None: any); None to leave it to Dask."""
        declined = self._classify(ts)
        if declined is not None:
            self.leave(ts, declined)
            return None
        ours = self.governor.ours()
        if not ours and self.retired:
            self.leave(ts, Declined.GOVERNOR)
            return None
        began = time.perf_counter_ns()
        task = self.tables.task_view(ts)
        far = self.links.link(LinkClass.NETWORK)
        self._turn = (self._turn + 1) % OBSERVED
        decision: Decision | Declined = Declined.POLICY
        try:
            decision = self.weigh(ts, valid, began, task, far)
        finally:
            if decision is Declined.POLICY:  # or it raised: that may take as long as an answer
                self.budget.declined((time.perf_counter_ns() - began) * 1e-9)
        if isinstance(decision, Declined):
            self.leave(ts, decision)
            return None
        if not self._turn or self.governor.standing is Standing.TRIAL:
            known = self.durations.known(ts)
            view = decision.view
            # A kind of task without measurements could not be predicted. A task covered by slack may take longer where
            # its inputs are than where Dask would have put it, but not if bytes were moved for it.
            excused = task.slack_seconds and not (view.near_fetches or view.far_fetches)
            # Nor one that waits for event loops, which no decision makes faster.
            if known is not None and not excused and not (known.usual or known).brief:
                governor_samples.report_decision(self.governor, ts, ours, decision)
        if not ours:
            self.leave(ts, Declined.TRIAL)
            return None
        return self._record(ts, decision, valid is not None, began)

    def _classify(self, ts: TaskState) -> Declined | None:
        """Why a task is left to Dask without a look at workers; None: it has to be weighed."""
        if self.safe:
            return Declined.SAFE_MODE
        if self.untrusted:
            return Declined.BOOKKEEPING
        if self.budget.exhausted:
            return Declined.OVER_BUDGET
        if ts.actor:
            return Declined.ACTOR
        if not (ts.dependencies or self.speeds.uneven):
            return Declined.NO_INPUTS
        return Declined.GRAPH_JUDGE if self.graph_judge.stock else None

    def weigh(
        self,
        ts: TaskState,
        valid: Collection[WorkerState] | None,
        began: int,
        task: TaskView,
        far: Link,
        too: WorkerInfo | None = None,
    ) -> Decision | Declined:
        """Compare some workers for a task, of those it may run on (`valid`; None: all).

        Parameters
        ----------
        began
            `time.perf_counter_ns` when the decision began; it is given up when it takes too long.
        too
            A worker that is compared besides the candidates; None: no other.

        Raises
        ------
        IndexError
            The policy chose none of them.
        """
        tables = self.tables
        inputs = candidates.Inputs(ts.dependencies, self.workers.by_address, tables.residence.on_disk)
        abroad = inputs.own_bytes < task.compute_seconds * far.bytes_per_second
        picked = candidates.pick(inputs, self.workers, self.settings.candidates, valid, abroad)
        if not picked:
            return Declined.NO_CANDIDATE
        picked = self.tables.devices.able(ts, picked)
        if too is not None and too not in picked:
            picked.append(too)
        views = candidates.views(picked, inputs, tables, ts.group.prefix.name, disk=True)
        spent = (time.perf_counter_ns() - began) * 1e-9
        if spent > self.budget.decision_seconds:
            self.budget.gave_up(spent)
            return Declined.TOOK_TOO_LONG
        i = self.policy.decide(task, views, far)
        if i is None:
            return Declined.POLICY
        if not 0 <= i < len(picked):
            raise IndexError(
                f"{type(self.policy).__name__}.decide gave {i!r}, must be None or an index of {len(picked)} candidates"
            )
        return Decision(picked, inputs, views, task, far, i)

    def _record(self, ts: TaskState, decision: Decision, restricted: bool, began: int) -> WorkerState:
        info, view = decision.info, decision.view
        if view.read_seconds:
            for address, nbytes in candidates.readers(info, decision.inputs, self.workers.by_address).items():
                self.tables.residence.book(address, nbytes)
        if restricted:
            self.decided["restricted"] += 1
        if view.far_fetches or view.near_fetches:
            self.decided["moved"] += 1
            moved = view.far_bytes + view.near_bytes
            if moved > 0:
                info.far_share += SHARE_GAIN * (view.far_bytes / moved - info.far_share)
        else:
            self.decided["local"] += 1
        self.log.chosen(ts.key, decision, restricted, len(self.workers.all.items))
        self.budget.record((time.perf_counter_ns() - began) * 1e-9)
        return info.ws

    def knows_more(self, ts: TaskState) -> bool:
        """Whether the tables hold a fact that Dask does not know and that may change where a task should run.

        Dask compares the holders of the inputs by queue and missing bytes. Where links and workers are about alike and
        all inputs are in memory, comparing more was not better. In 32 simulated cases, for which nothing was tuned, it
        took the same time in the mean (0.98 of both of Dask's settings) and 8 % more memory.
        """
        if self.always or self._users or self.speeds.uneven:
            return True
        if self.workers.zoned and self._spans_zones(ts):
            return True
        on_disk = self.tables.residence.on_disk
        return bool(on_disk) and any(d.key in on_disk for d in islice(ts.dependencies, candidates.MAX_INPUTS))

    def _spans_zones(self, ts: TaskState) -> bool:
        """Whether the inputs of a task are in several zones. Otherwise Dask, which compares holders, stays in one."""
        by_address = self.workers.by_address
        zone = None
        for d in islice(ts.dependencies, candidates.MAX_INPUTS):
            for ws in islice(d.who_has or (), candidates.WIDE):
                info = by_address.get(ws.address)
                if info is not None:
                    if zone is None:
                        zone = info.node
                    elif info.node is not zone:
                        return True
        return False

    def leave(self, ts: TaskState, reason: Declined) -> None:
        """Count and log a decision that is left to Dask on purpose."""
        self.declined[reason] += 1
        self.log.left(ts.key, reason)

    def comm_cost(self, ts: TaskState, ws: WorkerState) -> float | None:
        """Seconds to bring a task's missing inputs to a worker, see `StealCost`; None to leave it to Dask."""
        if self.retired or len(ts.dependencies) > MAX_PRICED_INPUTS:
            return None
        # Stealing asks for one task and every idle worker in turn: its inputs are looked at once.
        asked = ts.key, self.scheduler.transition_counter
        if asked != self._asked:
            self._asked, self._priced = asked, self.knows_more(ts)
        if not self._priced:
            return None
        return self.steal_cost.comm_cost(ts, ws)

    # ------------------------------------------------------------------ workers and graphs

    def adopt(self) -> None:
        """Add the workers, and the tasks in processing, that are already there."""
        self.durations.threads = self.scheduler.total_nthreads
        for ws in self.scheduler.workers.values():
            info = self.workers.add(ws)
            for ts in ws.processing:
                self.tables.charge(ts, self.durations.kind(ts), info)
            self.workers.refresh(info)

    def worker_added(self, address: str) -> None:
        """Add a worker that has joined."""
        self.workers.add(self.scheduler.workers[address])
        self.durations.threads = self.scheduler.total_nthreads
        self.root_dispatch.workers_changed()
        self.graph_judge.spoil("workers came or left")

    def worker_removed(self, address: str) -> None:
        """Forget a worker that has left."""
        info = self.workers.remove(address)
        if info is not None:
            self.speeds.removed(info)
        if self.zones.remove(address):
            # A worker that was far for a while, or seemed so, must not leave a cluster without hosts for good.
            self.workers.zoned = False
            self.links.reseed(LinkClass.NETWORK, SEEDS[LinkClass.NETWORK])
            for other in self.workers.all.items:
                self.workers.move(other, *node_of(other.address, other.ws.host))
        self.groups.worker_removed(address)
        self.tables.residence.worker_removed(address)
        self.tables.devices.removed(address)
        self.durations.threads = self.scheduler.total_nthreads
        self.root_dispatch.workers_changed(info)
        self.graph_judge.spoil("workers came or left")

    def measured(self, info: WorkerInfo, round_trip: float) -> None:
        """Take in the round trip between the scheduler and a worker, in seconds; regroup workers when zones appear."""
        zones, workers = self.zones, self.workers
        self.root_dispatch.workers_changed()
        if zones.add(info.address, round_trip):
            self.links.reseed(LinkClass.NETWORK, seed(zones.farthest, SEEDS[LinkClass.NETWORK]))
            workers.zoned = True
            for other in workers.all.items:
                if (zone := zones.by_address.get(other.address)) is not None:
                    workers.move(other, zone, LinkClass.RACK)
        elif zones.several:
            workers.move(info, zones.by_address[info.address], LinkClass.RACK)

    def graph_arrived(self, keys: Collection[Hashable]) -> None:
        """Take in a graph. Call before the first transition of its tasks."""
        tasks = self.scheduler.tasks
        # Scattered data and futures of earlier graphs may be among the keys.
        fresh = [ts for k in keys if (ts := tasks.get(k)) is not None and ts.state == "released"]
        self.samples.graph_arrived(fresh)
        if not (self.settings.shadow or self.leaves_roots()):  # blocks that no worker pulls from are only a cost
            self.root_dispatch.graph_arrived(fresh)

    def pull(self, ws: WorkerState, ahead: bool = False) -> TaskState | None:
        """The queued root task that a worker should run: with a free slot (None: the head of the queue), or `ahead`."""
        if self.retired:
            return None
        ts = self.root_dispatch.pull_ahead(ws) if ahead else self.root_dispatch.pull(ws)
        if ts is not None:
            self.log.root(ts.key, ws.address)
        return ts

    def held(self, ts: TaskState) -> bool:
        """Whether a queued root, which an idle worker could run, should be left to its owner."""
        return not (self.retired or self.unwatched or self.idle_alarm.stage) and self.root_dispatch.held(ts)

    def leaves_roots(self) -> bool:
        """Whether root tasks are left to Dask now."""
        return self.retired or self.unwatched or self.idle_alarm.stage > 1

    def thief(
        self,
        ts: TaskState,
        thieves: Collection[WorkerState],
        in_flight: Mapping[WorkerState, int],
        valid: Collection[WorkerState] | None,
    ) -> WorkerState | Stock | None:
        """The worker that may steal a task, see `StealPolicy.choose` for parameters and answer."""
        return STOCK if self.retired else self.steal_policy.choose(ts, thieves, in_flight, valid)

    def worth(self, ws: WorkerState) -> bool:
        """Whether a worker with a free slot should get one of the queued root tasks."""
        if self.retired:
            return True
        if self.root_dispatch.better_left(ws):
            return False
        if not self.speeds.uneven:
            return True
        info = self.workers.by_address.get(ws.address)
        return info is None or self.speeds.worth(info, len(self.scheduler.queued))

    def given(self, ws: WorkerState) -> None:
        """Note that a worker gets a root task by `worth`."""
        if self.speeds.refusing and (info := self.workers.by_address.get(ws.address)) is not None:
            self.speeds.given(info)

    @property
    def retired(self) -> bool:
        """Whether Dask decides everything: safe mode, policy switched off, graph left to it, or bookkeeping failed."""
        return self.safe or self.untrusted or self.graph_judge.stock or self.governor.standing is Standing.RETIRED
