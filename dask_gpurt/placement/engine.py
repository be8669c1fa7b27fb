"""What placement knows and how it comes to know it: tables fed by scheduler events, asked for one decision at a time.

The engine never acts. It reads TaskState and WorkerState objects (public attributes, and `seam` for the private one),
keeps side tables, and answers `decide` and `comm_cost`. Whoever calls it catches its exceptions.

Which tasks it decides:

* tasks with inputs: by `cost`, where something is known that stock Dask does not know (see `knows_more`): near and far
  workers, slow workers, inputs on disk, or a policy of the user's. Else stock decides;
* tasks without inputs: left to stock while all workers are about as fast. There is nothing to be near to, and stock's
  least-occupied and round-robin rules are right and O(1) on large clusters; but they do not know slow workers;
* root-ish tasks: stock's queuing keeps the memory bound; which of them a worker gets is `root_blocks`;
* actors: left to stock, which spreads them by number.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

from dask_gpurt.model import LinkClass
from dask_gpurt.model.views import TaskView
from dask_gpurt.placement import statistics
from dask_gpurt.placement.decide import candidates
from dask_gpurt.placement.decide.fast_path import stays
from dask_gpurt.placement.decide.policy import Cheapest
from dask_gpurt.placement.decide.root_blocks import RootGroups
from dask_gpurt.placement.decide.root_dispatch import Deals
from dask_gpurt.placement.decide.steal_cost import Prices
from dask_gpurt.placement.decide.steal_policy import STOCK, Thieves
from dask_gpurt.placement.evaluate import governor_samples as judge
from dask_gpurt.placement.evaluate import graph_samples
from dask_gpurt.placement.evaluate.decision_log import DecisionLog
from dask_gpurt.placement.evaluate.decision_record import QUEUE
from dask_gpurt.placement.evaluate.governor import Governor, Standing
from dask_gpurt.placement.evaluate.graph_judge import GraphJudge
from dask_gpurt.placement.evaluate.idle_alarm import HoldAlarm
from dask_gpurt.placement.evaluate.shadow_stats import Shadowed
from dask_gpurt.placement.tables.backlog import Charge, Ledger
from dask_gpurt.placement.tables.cluster_speed import Pace
from dask_gpurt.placement.tables.disk_residency import Residence
from dask_gpurt.placement.tables.durations import BRIEF_SAMPLED, Durations, Prefix, compute_seconds
from dask_gpurt.placement.tables.link_samples import certain_inputs, learn_links
from dask_gpurt.placement.tables.overhead_budget import Budget
from dask_gpurt.placement.tables.slack import Slack
from dask_gpurt.placement.tables.workers import WorkerInfo, WorkerTable
from dask_gpurt.placement.takeover import seam
from dask_gpurt.topology.links import SEEDS, LinkMatrix
from dask_gpurt.topology.zones import Zones, seed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping

    from dask_gpurt.config import PlacementSettings
    from dask_gpurt.model.link import Link
    from dask_gpurt.placement.decide.policy import Policy

#: share of a worker's memory limit that task data may fill before more of it overflows: Dask's memory.target
HOST_SHARE = 0.6
#: weight of a decision in a worker's share of network traffic
SHARE_GAIN = 0.2
#: why stock decides where nothing is known that it does not know
PLAIN = "nothing that stock does not know"
#: Where stock decides, one task in so many with inputs to fetch is learned from, once its link has so many samples.
TRANSFERS_SAMPLED, TRANSFERS_FROM = 8, 32
#: the governor observes every so many-th decision, and all of a trial
OBSERVED = 4


class Engine:
    """Tables and decisions of one scheduler."""

    def __init__(
        self,
        scheduler: Any,
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
        self.workers = WorkerTable(HOST_SHARE)
        self.ledger = Ledger()
        self.durations = Durations()
        self.links = LinkMatrix()
        self.zones = Zones()
        self.budget = Budget()
        self.groups = RootGroups()
        self.deals = Deals(self)
        self.slack = Slack(scheduler, self.workers, self.durations)
        #: which copies are on disk; whoever hears of it puts it there
        self.residence = Residence()
        self.log = DecisionLog()
        self.governor = Governor(clock)
        #: whole graphs, as `governor` judges decisions; in shadow mode there is nothing to judge
        self.graph_judge = GraphJudge(clock, lambda reason: self.on_retired(reason), enabled=not settings.shadow)
        self.hold_alarm = HoldAlarm()
        self.speeds = Pace(self.workers, clock)
        self.thieves = Thieves(self)
        #: overdue tasks that must not run twice, by reason
        self.forbade: Counter[str] = Counter()
        #: what would have been decided; filled in shadow mode only
        self.shadowed = Shadowed()
        #: decisions by what they came to
        self.decided: Counter[str] = Counter()
        #: decisions left to stock on purpose, by reason
        self.declined: Counter[str] = Counter()
        self.prices = Prices(self)
        #: of the cost; None: somebody else's policy decides, and sees every task
        self._weights = self.policy.weights if type(self.policy) is Cheapest else None
        #: called with the reason when the governor retires the policy
        self.on_retired: Callable[[str], None] = lambda reason: None
        #: weigh all tasks with inputs, whatever there is to know; for tests and benchmarks of the cost
        self.always = False
        #: the newest task left to stock because nothing is known that stock does not know
        self.plain_key: Hashable = None
        self._turn = 0
        self._brief = 0
        self._transfer = 0
        #: task -> the inputs being fetched for it, of tasks that are not charged
        self._inbound: dict[Hashable, tuple[Any, ...]] = {}
        #: Nothing is decided by what workers have in hand, and nobody keeps books of single tasks.
        self.plain = False

    # ------------------------------------------------------------------ decisions

    def decide(self, ts: Any, valid: Collection[Any] | None) -> Any:
        """The WorkerState to run a task on; None to leave it to stock.

        Parameters
        ----------
        valid
            WorkerStates the task may run on; None: all.
        """
        if self.budget.exhausted:
            return self.leave(ts, "over budget")
        if ts.actor or not (ts.dependencies or self.speeds.uneven):
            return self.leave(ts, "actor" if ts.actor else "no inputs")
        if self.graph_judge.stock:
            return self.leave(ts, "graph judge")
        ours = self.governor.ours()
        if not ours and self.retired:
            return self.leave(ts, "governor")
        began = time.perf_counter_ns()
        self.sum_up()
        task = self.task_view(ts)
        far = self.links.link(LinkClass.NETWORK)
        self._turn = (self._turn + 1) % OBSERVED
        # Where nobody else's policy has a say and nothing is being tried out. One in so many is weighed all the same:
        # the governor must see its share of them, or it would not notice that the policy loses by them.
        if self._turn and self._weights is not None and valid is None and self.governor.standing is Standing.TRUSTED:
            home = stays(self, ts, task, far, self._weights)
            if home is not None:
                info, numbers, nbytes = home
                near = self.links.link(info.node.link_class)
                count, workers = len(ts.dependencies), len(self.workers.all.items)
                self.decided["local"] += 1
                self.log.stayed(ts.key, info, numbers, task, near, far, nbytes, count, workers)
                self.budget.record((time.perf_counter_ns() - began) * 1e-9)
                return info.ws
        weighed = self.weigh(ts, valid, began, task, far)
        if isinstance(weighed, str):
            return self.leave(ts, weighed)
        picked, inputs, views, task, far, i = weighed
        info = picked[i]
        view = views[i]
        if not self._turn or self.governor.standing is Standing.TRIAL:
            known = self.durations.known(ts)
            # What nobody has seen before nobody could have predicted; and what nobody waits for may well take longer at
            # its inputs than where stock would have put it. What was moved must be worth it.
            excused = task.slack_seconds and not (view.near_fetches or view.far_fetches)
            if known is not None and not excused:
                judge.tell(self, ts, ours, weighed)
        if not ours:
            return self.leave(ts, "trial")
        if view.read_seconds:
            for address, nbytes in candidates.readers(info, inputs, self.workers.by_address).items():
                self.residence.book(address, nbytes)
        if valid is not None:
            self.decided["restricted"] += 1
        if view.far_fetches or view.near_fetches:
            self.decided["moved"] += 1
            moved = view.far_bytes + view.near_bytes
            if moved > 0:
                info.far_share += SHARE_GAIN * (view.far_bytes / moved - info.far_share)
        else:
            self.decided["local"] += 1
        self.log.chosen(ts.key, picked, views, i, task, far, inputs, valid is not None, len(self.workers.all.items))
        self.budget.record((time.perf_counter_ns() - began) * 1e-9)
        return info.ws

    def knows_more(self, ts: Any) -> bool:
        """Whether anything is known that stock Dask does not know, and that may change where a task should run.

        Stock compares the holders of the inputs by queue and missing bytes. Where links and workers are about alike and
        all inputs are in memory, comparing more than that was not better: in 32 simulated cases that nothing was tuned
        for it took the same time in the mean (0.98 of stock's both), and 8 % more memory.
        """
        if self.always or self._weights is None or self.speeds.uneven:
            return True
        if self.workers.zoned and self._spans_zones(ts):
            return True
        on_disk = self.residence.on_disk
        return bool(on_disk) and any(d.key in on_disk for d in islice(ts.dependencies, candidates.MAX_INPUTS))

    def _spans_zones(self, ts: Any) -> bool:
        """Whether the inputs of a task are in several zones. Else stock, which looks at their holders, stays in one."""
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

    def task_view(self, ts: Any) -> TaskView:
        """What is expected of a TaskState."""
        known = self.durations.known(ts)
        if known is None or known.seconds is None:
            return TaskView(self._guess(ts), 0.0, self.slack.seconds())
        return TaskView(known.seconds, known.output_bytes, self.slack.seconds())

    def weigh(
        self,
        ts: Any,
        valid: Collection[Any] | None,
        began: int,
        task: TaskView,
        far: Link,
        too: WorkerInfo | None = None,
    ) -> Any:
        """Candidates, inputs, views, task, far link and the choice; or why there is none.

        `too` is looked at besides the candidates.
        """
        workers = self.workers
        residence = self.residence
        inputs = candidates.Inputs(ts.dependencies, workers.by_address, residence.on_disk)
        abroad = inputs.own_bytes < task.compute_seconds * far.bytes_per_second
        picked = candidates.pick(inputs, workers, self.settings.candidates, valid, seam.is_running, abroad)
        if not picked:
            return "no candidate"
        name = ts.group.prefix.name
        if too is not None and too not in picked:
            picked.append(too)
        views = candidates.views(
            picked, inputs, workers, self.links, seam.pending_bytes, self.ledger.reconcile, name, residence
        )
        spent = (time.perf_counter_ns() - began) * 1e-9
        if spent > self.budget.decision_seconds:
            self.budget.gave_up(spent)
            return "took too long"
        i = self.policy.decide(task, views, far)
        if i is None:
            return "policy"
        if not 0 <= i < len(picked):
            raise IndexError(f"{type(self.policy).__name__}.decide gave {i!r}; there are {len(picked)} candidates")
        return picked, inputs, views, task, far, i

    def leave(self, ts: Any, reason: str) -> None:
        """Leave a decision to stock on purpose."""
        self.declined[reason] += 1
        self.log.left(ts.key, reason)

    def comm_cost(self, ts: Any, ws: Any) -> float | None:
        """Seconds to bring a task's missing inputs to a worker, see `Prices`; None to leave it to stock."""
        if not self.knows_more(ts) or self.retired:
            return None
        return self.prices.comm_cost(ts, ws)

    # ------------------------------------------------------------------ events

    def adopt(self) -> None:
        """Take in the workers and the tasks in processing that are already there."""
        self.durations.threads = self.scheduler.total_nthreads
        for ws in self.scheduler.workers.values():
            info = self.workers.add(ws)
            for ts in ws.processing:
                self._charge(ts, self.durations.kind(ts), info)
            self.workers.refresh(info)

    def worker_added(self, address: str) -> None:
        self.workers.add(self.scheduler.workers[address])
        self.durations.threads = self.scheduler.total_nthreads
        self.deals.workers_changed()
        self.graph_judge.spoil("workers came or left")

    def worker_removed(self, address: str) -> None:
        info = self.workers.remove(address)
        if info is not None:
            self.speeds.removed(info)
        self.zones.remove(address)
        self.groups.worker_removed(address)
        self.residence.worker_removed(address)
        self.durations.threads = self.scheduler.total_nthreads
        self.deals.workers_changed(info)
        self.graph_judge.spoil("workers came or left")

    def measured(self, info: WorkerInfo, round_trip: float) -> None:
        """The round trip between the scheduler and a worker is known."""
        zones, workers = self.zones, self.workers
        self.deals.workers_changed()
        if zones.add(info.address, round_trip):
            self.links.reseed(LinkClass.NETWORK, seed(zones.farthest, SEEDS[LinkClass.NETWORK]))
            workers.zoned = True
            for other in workers.all.items:
                if (zone := zones.by_address.get(other.address)) is not None:
                    workers.move(other, zone, LinkClass.RACK)
        elif zones.several:
            workers.move(info, zones.by_address[info.address], LinkClass.RACK)

    def graph_arrived(self, keys: Collection[Hashable]) -> None:
        """Before the first transition of its tasks."""
        graph_samples.graph_arrived(self, keys)
        if not self.leaves_roots():
            self.deals.graph_arrived(keys)

    def pull(self, ws: Any) -> Any:
        """The queued root task that a worker with a free slot should run; None: the head of the queue."""
        if self.retired:
            return None
        ts = self.deals.pull(ws)
        if ts is not None:
            self.log.group(ts.key, ws.address)
        return ts

    def held(self, ts: Any) -> bool:
        """Whether a queued root, which an idle worker could run, should be left to its owner."""
        return not self.retired and not self.hold_alarm.stage and self.deals.held(ts)

    def leaves_roots(self) -> bool:
        """Whether root tasks are left to stock now."""
        return self.retired or self.hold_alarm.stage > 1

    def thief(self, ts: Any, thieves: Collection[Any], in_flight: Mapping[Any, int], valid: Any) -> Any:
        """Who may steal a task, see `Thieves.choose`."""
        return STOCK if self.retired else self.thieves.choose(ts, thieves, in_flight, valid)

    def worth(self, ws: Any) -> bool:
        """Whether a worker with a free slot should get one of the queued root tasks."""
        if self.retired:
            return True
        if self.deals.better_left(ws):
            return False
        if not self.speeds.uneven:
            return True
        info = self.workers.by_address.get(ws.address)
        return info is None or self.speeds.worth(info, len(self.scheduler.queued))

    def restarted(self) -> None:
        """The scheduler has forgotten all tasks, without transitions."""
        self.log.restarted()
        self.governor.forget()
        self.graph_judge.forget()
        self.ledger.forget()
        self._inbound.clear()
        self.groups.clear()
        self.deals.clear()
        self.residence.clear()
        self.workers.clear_charges()

    def entered_processing(self, key: Hashable) -> None:
        """A task was assigned, by whomever."""
        # This and `left_processing` are on the path of every task: what is known not to be needed is not called.
        groups = self.groups
        root = groups.gone(key) if groups.by_key or groups.later else False
        ts = self.scheduler.tasks.get(key)
        ws = None if ts is None else ts.processing_on
        if ws is None:
            return
        address = ws.address
        workers = self.workers
        info = workers.by_address.get(address)
        if info is not None and info.ws is not ws:
            info = None
        reason = QUEUE if key != self.plain_key else PLAIN if ts.dependencies else "no inputs"
        if not root and info is not None and self.plain:
            self._entered_plainly(key, ts, info, reason)
            return
        kind = self.durations.kind(ts)
        if (kind.usual or kind).brief and info is not None and not self.governor.waiting:
            self._brief = (self._brief + 1) % BRIEF_SAMPLED
            if self._brief:
                workers.refresh(info)
                return
        row = self.log.assigned(key, address, reason)
        if self.governor.standing is Standing.TRIAL and self.governor.is_open(key):
            judge.tell_moved(self, ts, ws)
        if info is None:
            return
        charge = self._charge(ts, kind, info, root)
        charge.row = row
        workers.refresh(info)
        if ws.needs_what:
            self.deals.assigned(info)
            charge.inputs = certain_inputs(ts, ws)
            if self.graph_judge.in_trial:
                graph_samples.count_bytes(self, ts, ws)

    def left_processing(self, key: Hashable, finish: str, details: Mapping[str, Any]) -> None:
        """A task is no longer assigned. `details` are the keywords of the transition."""
        if self.graph_judge.left:
            self.graph_judge.finished(finish == "memory")
        charge = self.ledger.settle(key) if self.ledger.charges else None
        by_address = self.workers.by_address
        if charge is None:
            address = self.log.passed(key, finish, details) or details.get("worker", "")
            info = by_address.get(address)
            inputs = self._inbound.pop(key, ()) if self._inbound else ()
        else:
            if charge.row is not None:
                self.log.ended(charge.row, finish, details)
            else:
                self.log.passed(key, finish, details)
            if self.governor.waiting:
                retired = self.governor.finished(key, finish == "memory")
                if retired is not None:
                    self.on_retired(retired)
            info, inputs = charge.info, charge.inputs
            address = info.address
        if info is None or by_address.get(address) is not info:
            return
        self.workers.refresh(info)
        if self.groups.by_key:
            self.deals.finished(info)
        startstops = details.get("startstops")
        if finish != "memory" or not startstops or details.get("worker") != address:
            return
        if charge is not None:
            self._learn(charge.prefix, info, startstops, details, charge.root)
        elif (ts := self.scheduler.tasks.get(key)) is not None:
            kind = self.durations.kind(ts)
            if (kind.usual or kind).brief:
                self._brief = (self._brief + 1) % BRIEF_SAMPLED
                if self._brief:
                    return
            self._learn(kind, info, startstops, details, False)
        if inputs:
            learn_links(self.links, by_address, info, inputs, startstops)

    def _learn(
        self, kind: Prefix, info: WorkerInfo, startstops: Collection[Any], details: Mapping[str, Any], root: bool
    ) -> None:
        """Learn from a task that has run on the worker it was assigned to."""
        seconds = compute_seconds(startstops)
        if seconds is None:
            return
        first = kind.seconds is None
        nbytes = max(0, details.get("nbytes") or 0)
        self.durations.learn(kind, info, seconds, nbytes)
        times = BRIEF_SAMPLED if (kind.usual or kind).brief else 1
        judge = self.graph_judge
        judge.compute_seconds += times * seconds
        judge.made_bytes += times * nbytes
        if root:
            self.deals.root_done(info, seconds, nbytes)
        if first:
            self.ledger.learned(kind)
        self.speeds.learned(info)

    # ------------------------------------------------------------------ tasks of which nothing is to be decided

    def look_round(self) -> None:
        """A few times a second: whether books of single tasks are needed. `decide` begins them at once."""
        plain = not (
            self.always
            or self._weights is None
            or self.settings.shadow
            or self.workers.zoned
            or self.speeds.uneven
            or self.residence.on_disk
            or self.governor.standing is not Standing.TRUSTED
            or self.governor.waiting
        )
        if plain:
            self.plain = True
        else:
            self.sum_up()

    def _entered_plainly(self, key: Hashable, ts: Any, info: WorkerInfo, reason: str) -> None:
        """Stock has assigned a task where all workers are alike and near: the price of this is that of most tasks."""
        self.workers.refresh(info)
        self.log.passing(key, info.address, reason)
        ws = info.ws
        if ws.needs_what:
            self.deals.assigned(info)
            if self.graph_judge.in_trial:
                graph_samples.count_bytes(self, ts, ws)
            self._transfer = (self._transfer + 1) % TRANSFERS_SAMPLED
            if not self._transfer or self.links.fits[info.node.link_class].samples < TRANSFERS_FROM:
                inputs = certain_inputs(ts, ws)
                if inputs:
                    self._inbound[key] = inputs

    def sum_up(self) -> None:
        """Charge what runs now and was assigned while nobody needed to know."""
        if not self.plain:
            return
        self.plain = False
        charges = self.ledger.charges
        for info in self.workers.all.items:
            for ts in info.ws.processing:
                if ts.key not in charges:
                    self._charge(ts, self.durations.kind(ts), info)

    def backlog_seconds(self, info: WorkerInfo) -> float:
        """Work that a worker has in hand, in seconds on a worker of slowness 1."""
        ws = info.ws
        if info.tasks >= len(ws.processing):
            return info.backlog_seconds
        # Not all of it is in the ledger: by prefix, of which the scheduler keeps the numbers.
        known = self.durations.known_prefix_seconds
        return sum(n * known(name) for name, n in ws.task_prefix_count.items())

    @property
    def at_work(self) -> bool:
        """Whether any task is assigned. O(workers) where none is."""
        return any(ws.processing for ws in self.scheduler.workers.values())

    @property
    def retired(self) -> bool:
        """Whether the governor has retired the policy, or the graph is on stock's side: stock decides."""
        return self.graph_judge.stock or self.governor.standing is Standing.RETIRED

    def copy_won(self, key: Hashable, first: str, second: str) -> None:
        """A second copy of a task has finished before the first one."""
        by_address = self.workers.by_address
        to, origin = by_address.get(second), by_address.get(first)
        self.log.stolen(key, first, second, 0.0)
        if to is not None:
            self.ledger.move(key, to)
        self._inbound.pop(key, None)
        if origin is not None and origin is not to:
            self.workers.refresh(origin)

    def stolen(self, key: Hashable, victim: str, thief: str) -> None:
        """Work stealing moved a task."""
        by_address = self.workers.by_address
        to = by_address.get(thief)
        ts = self.scheduler.tasks.get(key)
        if to is None or ts is None or ts.processing_on is not to.ws:
            return
        inputs = islice(ts.dependencies, candidates.MAX_INPUTS)
        self.log.stolen(key, victim, thief, sum(d.get_nbytes() for d in inputs if to.ws not in (d.who_has or ())))
        self.ledger.move(key, to)
        self._inbound.pop(key, None)
        self.workers.refresh(to)
        if (origin := by_address.get(victim)) is not None:
            self.workers.refresh(origin)

    def _charge(self, ts: Any, kind: Prefix, info: WorkerInfo, root: bool = False) -> Charge:
        hint = self._guess(ts) if kind.seconds is None else 0.0
        return self.ledger.charge(ts.key, info, kind, hint, root)

    def _guess(self, ts: Any) -> float:
        """Seconds that a task of a kind never seen may take."""
        hint: float = ts.prefix.duration_average
        return hint if hint >= 0 else self.durations.guess(ts)

    def statistics(self) -> dict[str, Any]:
        """Plain JSON; see `PlacementPlugin.statistics`."""
        return statistics.of(self)
