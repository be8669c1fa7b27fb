"""What placement knows and how it comes to know it: tables fed by scheduler events, asked for one decision at a time.

The engine never acts. It reads TaskState and WorkerState objects (public attributes, and `seam` for the private one),
keeps side tables, and answers `decide` and `comm_cost`. Whoever calls it catches its exceptions.

Which tasks it decides:

* tasks with inputs: yes, by `cost`;
* tasks without inputs: left to stock. There is nothing to be near to, and stock's least-occupied and round-robin rules
  are right and O(1) on large clusters;
* root-ish tasks: stock's queuing keeps the memory bound; which of them a worker gets is `groups`;
* actors: left to stock, which spreads them by number.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

from dask_gpurt.model import LinkClass
from dask_gpurt.model.views import TaskView
from dask_gpurt.placement import candidates, seam
from dask_gpurt.placement.budget import Budget
from dask_gpurt.placement.durations import UNKNOWN_SECONDS, Durations, compute_seconds
from dask_gpurt.placement.groups import Member, RootGroups
from dask_gpurt.placement.ledger import Charge, Ledger
from dask_gpurt.placement.log import DecisionLog
from dask_gpurt.placement.policy import WEIGHTS, Cheapest
from dask_gpurt.placement.residence import READ_BYTES_PER_SECOND, Residence
from dask_gpurt.placement.slack import Slack
from dask_gpurt.placement.workers import WorkerInfo, WorkerTable
from dask_gpurt.topology.links import LinkMatrix, Transfer, merge

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

    from dask_gpurt.config import PlacementSettings
    from dask_gpurt.placement.policy import Policy
    from dask_gpurt.placement.workers import Node

#: share of a worker's memory limit that task data may fill before more of it overflows: Dask's memory.target
HOST_SHARE = 0.6
#: inputs remembered per task for learning links from their transfer
MAX_LEARNED_INPUTS = 8
#: a task with more inputs costs too much to price for every thief; stock prices it
MAX_PRICED_INPUTS = 64
#: a task of a prefix never seen counts this share of the usual duration: enough to spread a burst of them over equals,
#: too little to justify moving bytes
GUESS = 0.3
#: weight of a task in the usual duration
USUAL_GAIN = 0.02
#: tasks per thread up to which a worker that waits for inputs gets one more
MAX_AHEAD = 4
#: weight of a root in the averages over roots
ROOT_GAIN = 0.05
#: share of the workers that may be idle while one with no memory left is not given roots
MOSTLY = 0.75
#: a worker that takes so many times as long as usual is not waited for
SLOW = 1.5
#: weight of a decision in a worker's share of network traffic
SHARE_GAIN = 0.2


def _natural(text: str) -> list[Any]:
    """A sort key: text with its numbers as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


class Engine:
    """Tables and decisions of one scheduler."""

    def __init__(self, scheduler: Any, settings: PlacementSettings, policy: Policy | None = None) -> None:
        self.scheduler = scheduler
        self.settings = settings
        self.policy: Policy = policy or Cheapest()
        self.workers = WorkerTable(HOST_SHARE)
        self.ledger = Ledger()
        self.durations = Durations()
        self.slack = Slack(scheduler, self.workers, self.durations)
        self.links = LinkMatrix()
        self.budget = Budget()
        self.groups = RootGroups()
        #: which copies are on disk; whoever hears of it puts it there
        self.residence = Residence()
        self.log = DecisionLog()
        #: moving averages of the duration of all tasks and of its square: their ratio is how long the task is that a
        #: worker is found at, however many short ones there are between
        self._usual = 0.0, 0.0
        #: moving averages over roots: seconds, bytes of result
        self._root = 0.0, 0.0
        #: workers that may be waiting for inputs with all they have
        self._fetching: dict[WorkerInfo, None] = {}
        #: roots that a worker was not given because it would have spilled their results
        self.spared = 0
        #: workers in the order of `_dealt_to`; None: to be sorted anew
        self._members: list[WorkerInfo] | None = None
        #: decisions by what they came to
        self.decided: Counter[str] = Counter()
        #: decisions left to stock on purpose, by reason
        self.declined: Counter[str] = Counter()
        #: prices given to work stealing
        self.priced = 0
        self._asked: tuple[Hashable, int] | None = None
        self._located: list[tuple[Collection[Any], int, set[Node], float]] = []

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
        deps = ts.dependencies
        if not deps or ts.actor:
            return self.leave(ts, "actor" if ts.actor else "no inputs")
        began = time.perf_counter_ns()
        workers = self.workers
        residence = self.residence
        inputs = candidates.Inputs(deps, workers.by_address, residence.on_disk)
        picked = candidates.pick(inputs, workers, self.settings.candidates, valid, seam.is_running)
        if not picked:
            return self.leave(ts, "no candidate")
        prefix = self.durations.prefixes.get(ts.prefix.name)
        if prefix is None or prefix.seconds is None:
            task = TaskView(self._guess(ts), 0.0, self.slack.seconds())
        else:
            task = TaskView(prefix.seconds, prefix.output_bytes, self.slack.seconds())
        views = candidates.views(
            picked, inputs, workers, self.links, seam.pending_bytes, self.ledger.reconcile, residence
        )
        far = self.links.link(LinkClass.NETWORK)
        i = self.policy.decide(task, views, far)
        if i is None:
            return self.leave(ts, "policy")
        if not 0 <= i < len(picked):
            raise IndexError(f"{type(self.policy).__name__}.decide gave {i!r}; there are {len(picked)} candidates")
        info, view = picked[i], views[i]
        if view.read_seconds:
            for address, nbytes in candidates.readers(info, inputs, workers.by_address).items():
                residence.book(address, nbytes)
        if valid is not None:
            self.decided["restricted"] += 1
        if view.far_fetches or view.near_fetches:
            self.decided["moved"] += 1
            moved = view.far_bytes + view.near_bytes
            if moved > 0:
                info.far_share += SHARE_GAIN * (view.far_bytes / moved - info.far_share)
        else:
            self.decided["local"] += 1
        self.log.chosen(ts.key, picked, views, i, task, far, inputs, valid is not None, len(workers.all.items))
        self.budget.record((time.perf_counter_ns() - began) * 1e-9)
        return info.ws

    def leave(self, ts: Any, reason: str) -> None:
        """Leave a decision to stock on purpose."""
        self.declined[reason] += 1
        self.log.left(ts.key, reason)

    def comm_cost(self, ts: Any, ws: Any) -> float | None:
        """Seconds to bring a task's missing inputs to a worker, for work stealing; None to leave it to stock.

        Stealing compares this with occupancies, which contain inbound bytes at the one bandwidth of stock. Pricing
        moves in true seconds beside that made every move look profitable on fast links: simulated at 64 workers, it
        stole ten times as much and tripled the time of a stencil. So the slowest kind of link in use is priced at
        stock's bandwidth, and what was learned is used for what stock cannot know: how much less a neighbour costs,
        and the latency of each fetch.
        """
        by_address = self.workers.by_address
        info = by_address.get(ws.address)
        deps = ts.dependencies
        if info is None or info.ws is not ws or len(deps) > MAX_PRICED_INPUTS:
            return None
        self.priced += 1
        # Stealing asks for one task and every idle worker in turn; what does not depend on the worker is kept. The
        # counter bounds how stale it gets: replicas may appear without a transition, and this is only an estimate.
        asked = (ts.key, self.scheduler.transition_counter)
        if self._asked != asked:
            self._asked = asked
            self._located = [
                (
                    holders,
                    d.get_nbytes(),
                    {w.node for h in islice(holders, candidates.WIDE) if (w := by_address.get(h.address)) is not None},
                    self._reading_seconds(d, holders),
                )
                for d in deps
                if (holders := d.who_has)
            ]
        node = info.node
        near = self.links.link(node.link_class)
        far = near if len(self.workers.nodes) == 1 else self.links.link(LinkClass.NETWORK)
        near_bytes = far_bytes = near_fetches = far_fetches = 0
        reading = 0.0
        for holders, nbytes, nodes, read in self._located:
            if ws in holders:
                continue
            reading += read
            if node in nodes:
                near_bytes += nbytes
                near_fetches += 1
            else:
                far_bytes += nbytes
                far_fetches += 1
        # Whoever asks for a value on a disk waits for that disk, which has its own tasks to read for.
        seconds = reading + near.latency_seconds * near_fetches + far.latency_seconds * far_fetches
        discount = min(1.0, far.bytes_per_second / near.bytes_per_second)
        # That bandwidth is a mean over all transfers: where most come from neighbours it is far above the network's.
        bandwidth = min(self.scheduler.bandwidth, far.bytes_per_second)
        return float(seconds + (far_bytes + near_bytes * discount) / bandwidth)

    def _reading_seconds(self, d: Any, holders: Collection[Any]) -> float:
        """Until a disk has read a value; 0 when some holder has it in memory."""
        disk = self.residence.on_disk.get(d.key)
        if disk is None or len(disk) < len(holders):
            return 0.0
        return min(self.residence.queue_seconds(a) + n / READ_BYTES_PER_SECOND for a, n in disk.items())

    # ------------------------------------------------------------------ events

    def adopt(self) -> None:
        """Take in the workers and the tasks in processing that are already there."""
        for ws in self.scheduler.workers.values():
            info = self.workers.add(ws)
            for ts in ws.processing:
                self._charge(ts, info)
            self.workers.refresh(info)

    def worker_added(self, address: str) -> None:
        self.workers.add(self.scheduler.workers[address])
        self._members = None

    def worker_removed(self, address: str) -> None:
        removed = self.workers.remove(address)
        if removed is not None:
            self._fetching.pop(removed, None)
        self.groups.worker_removed(address)
        self.residence.worker_removed(address)
        self._members = None

    def graph_arrived(self, keys: Collection[Hashable]) -> None:
        """Before the first transition of its tasks."""
        s = self.scheduler
        tasks = s.tasks
        known: dict[Any, bool] = {}

        def is_root(ts: Any) -> bool:
            if ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions:
                return False
            group = ts.group
            answer = known.get(group)
            if answer is None:
                answer = known[group] = s.is_rootish(ts)
            return answer

        self.groups.arrived([ts for k in keys if (ts := tasks.get(k)) is not None], self._dealt_to(), is_root)

    def _dealt_to(self) -> list[Member]:
        """The workers in the order in which blocks of roots are dealt: neighbours together, hosts by number."""
        if self._members is None:
            ordered = sorted(self.workers.all.items, key=lambda w: (_natural(w.node.name), _natural(w.address)))
            self._members = ordered
        return [Member(w.address, w.node.name, w.ws.nthreads / w.slowness) for w in self._members]

    def may_take(self, owner: str, left: int) -> bool:
        """Whether a worker on another node should take half of the roots that `owner` has `left`."""
        if left > 1:
            return True
        info = self.workers.by_address.get(owner)
        return info is None or not self._at_work(info)

    def held(self, ts: Any) -> bool:
        """Whether a queued root, which an idle worker could run, should be left to its owner."""
        owner = self.groups.owner(ts.key)
        info = None if owner is None else self.workers.by_address.get(owner)
        if info is None:
            return False
        return self._at_work(info) or all(
            (w := self.workers.by_address.get(ws.address)) is not None and self._too_full(w)
            for ws in islice(self.scheduler.idle_task_count, 2 * candidates.WIDE)
        )

    def _too_full(self, info: WorkerInfo) -> bool:
        """Whether a worker would spill the result of one more root, and the others have run them all before that.

        Never where hardly anybody is at work: somebody must go on, and their next finished task deals again.
        """
        seconds, nbytes = self._root
        over = info.ws.nbytes + info.reserved_bytes + nbytes - info.mark_bytes
        if over <= 0:
            return False
        workers = self.workers
        if len(workers.idle.items) > MOSTLY * len(workers.all.items):
            return False
        s = self.scheduler
        rest = len(s.queued) * seconds / max(1, s.total_nthreads)
        return min(over, nbytes) * WEIGHTS.overflow_seconds_per_byte > rest

    def hungry(self) -> list[Any]:
        """Workers whose slots are taken by tasks that wait for inputs, while a thread is free."""
        if not self._fetching:
            return []
        return [info.ws for info in list(self._fetching) if self._starves(info)]

    def _starves(self, info: WorkerInfo) -> bool:
        ws = info.ws
        needs, processing, threads = ws.needs_what, ws.processing, ws.nthreads
        if not needs or len(processing) > MAX_AHEAD * threads:
            self._fetching.pop(info, None)
            return False
        runnable = 0
        for ts in processing:
            deps = ts.dependencies
            if len(deps) <= MAX_PRICED_INPUTS and not any(d in needs for d in deps):
                runnable += 1
                if runnable >= threads:
                    return False
        return True

    def _at_work(self, info: WorkerInfo) -> bool:
        """Whether a worker will soon ask for more: its next finished task deals slots again."""
        ws = info.ws
        return info.slowness < SLOW and seam.is_running(ws) and len(ws.processing) > len(ws.long_running)

    def pull(self, ws: Any) -> Any:
        """The queued root task that a worker with a free slot should run; None: the head of the queue."""
        scheduler = self.scheduler
        info = self.workers.by_address.get(ws.address)
        node = None if info is None else info.node.name
        if info is not None and self._too_full(info):
            self.spared += 1
            return None
        ts = self.groups.pull(ws.address, scheduler.tasks, scheduler.queued.peek(), node, self.may_take)
        if ts is not None:
            self.log.group(ts.key, ws.address)
        return ts

    def restarted(self) -> None:
        """The scheduler has forgotten all tasks, without transitions."""
        self.log.restarted()
        self.ledger.forget()
        self.groups.clear()
        self.residence.clear()
        self._fetching.clear()
        self.workers.clear_charges()

    def entered_processing(self, key: Hashable) -> None:
        """A task was assigned, by whomever."""
        root = self.groups.gone(key)
        ts = self.scheduler.tasks.get(key)
        ws = None if ts is None else ts.processing_on
        if ws is None:
            return
        self.log.assigned(key, ws.address)
        info = self.workers.by_address.get(ws.address)
        if info is None or info.ws is not ws:
            return
        charge = self._charge(ts, info, root)
        self.workers.refresh(info)
        needs = ws.needs_what
        if needs:
            self._fetching[info] = None
        if needs and len(needs) <= MAX_LEARNED_INPUTS:
            # Only when all that is inbound is for this task will the transfers that the worker reports with it have
            # carried its inputs and nothing else; their size is not reported.
            deps = ts.dependencies
            if all(d in deps for d in needs):
                charge.inputs = tuple(needs)

    def left_processing(self, key: Hashable, finish: str, details: Mapping[str, Any]) -> None:
        """A task is no longer assigned. `details` are the keywords of the transition."""
        self.log.finished(key, finish, details)
        charge = self.ledger.settle(key)
        if charge is None:
            return
        info = charge.info
        address = info.ws.address
        if self.workers.by_address.get(address) is not info:
            return
        self.workers.refresh(info)
        startstops = details.get("startstops")
        if finish != "memory" or not startstops or details.get("worker") != address:
            return
        seconds = compute_seconds(startstops)
        if seconds is not None:
            prefix = self.durations.prefix(charge.prefix.name)
            first = prefix.seconds is None
            self.durations.learn(prefix, info, seconds, max(0, details.get("nbytes") or 0))
            if charge.root:
                mean, size = self._root
                nbytes = max(0, details.get("nbytes") or 0)
                gain = ROOT_GAIN if size or mean else 1.0
                self._root = mean + gain * (seconds - mean), size + gain * (nbytes - size)
            mean, square = self._usual
            self._usual = mean + USUAL_GAIN * (seconds - mean), square + USUAL_GAIN * (seconds * seconds - square)
            if first:
                self.ledger.learned(prefix)
        if charge.inputs:
            self._learn_links(info, charge, startstops)

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
        self.workers.refresh(to)
        if (origin := by_address.get(victim)) is not None:
            self.workers.refresh(origin)

    def _charge(self, ts: Any, info: WorkerInfo, root: bool = False) -> Charge:
        prefix = self.durations.prefix(ts.prefix.name)
        return self.ledger.charge(ts.key, info, prefix, self._guess(ts), root)

    def _guess(self, ts: Any) -> float:
        """Seconds that a task whose prefix was never seen may take."""
        hint: float = ts.prefix.duration_average
        if hint >= 0:
            return hint
        mean, square = self._usual
        return max(UNKNOWN_SECONDS, GUESS * square / mean) if mean else UNKNOWN_SECONDS

    def _learn_links(self, info: WorkerInfo, charge: Charge, startstops: Collection[Mapping[str, Any]]) -> None:
        """Learn from a task's transfers if it is certain what each of them carried; most are not, and are skipped."""
        reported = [s for s in startstops if s["action"] == "transfer"]
        sources: dict[str, list[Any]] = {s["source"]: [] for s in reported}
        if len(sources) != len(reported):
            return  # two requests to one worker: no telling which carried what
        for d in charge.inputs:
            held = [h.address for h in d.who_has or () if h.address in sources]
            if len(held) != 1:
                return  # came with another task's transfer, or could have come from either of two
            sources[held[0]].append(d)
        transfers = []
        for s in reported:
            source = self.workers.by_address.get(s["source"])
            carried = sources[s["source"]]
            if source is None or not carried:
                return
            link_class = info.node.link_class if source.node is info.node else LinkClass.NETWORK
            transfers.append(Transfer(s["start"], s["stop"], sum(d.get_nbytes() for d in carried), link_class))
        for link_class, nbytes, seconds, requests in merge(transfers):
            self.links.observe(link_class, nbytes, seconds, requests)

    # ------------------------------------------------------------------ statistics

    def statistics(self) -> dict[str, Any]:
        """Plain JSON; see `PlacementPlugin.statistics`."""
        measured = [w for w in self.workers.all.items if w.speed_samples]
        usual = statistics.median(w.slowness for w in measured) if measured else 1.0
        return {
            "decisions": {
                "total": self.budget.count,
                "moved": self.decided["moved"],
                "local": self.decided["local"],
                "restricted": self.decided["restricted"],
                "logged": len(self.log),
                **self.log.calibration(),
            },
            "declined": dict(self.declined),
            "prices": self.priced,
            #: blocks cut, root tasks handed to the owner of their block, blocks split for idle workers
            "roots": {
                "groups": self.groups.cut,
                "pulled": self.groups.pulled,
                "split": self.groups.split,
                "spared": self.spared,
            },
            "microseconds": self.budget.statistics(),
            "links": self.links.statistics(),
            "prefixes": len(self.durations.prefixes),
            #: address -> speed relative to the median worker (2: twice as fast)
            "speeds": {w.ws.address: usual / w.slowness for w in measured},
            "tables": {
                "workers": len(self.workers.by_address),
                "charges": len(self.ledger.charges),
                "unknown": sum(map(len, self.ledger.unknown.values())),
                "roots": len(self.groups),
                "copies_on_disk": self.residence.copies,
            },
        }
