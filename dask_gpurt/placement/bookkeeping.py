"""`Bookkeeping`: keeps the tables true while the scheduler assigns, moves and finishes tasks.

The plugin calls `entered` and `left` for every task. They are the running cost of this package, so they skip whatever
is known not to be needed.

Theory of operation
-------------------
Sums over the tasks assigned to each worker (`tables.backlog`) are needed only where placement decides by them: with
several zones, slow workers, data on disk, or a user's policy. Where all workers are alike and near, Dask's own choice
stands for every task (`plain`), and tasks are not charged. A task then costs one entry in the log, and its duration is
learned when it is done. `look_round` checks a few times a second which of the two applies. A decision that needs the
sums before that calls `sum_up`, which charges all running tasks.

Of tasks so brief that the scheduler is the bottleneck, one in `BRIEF_SAMPLED` is followed.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.decide import candidates
from dask_gpurt.placement.decide.decision import Declined
from dask_gpurt.placement.evaluate import governor_samples
from dask_gpurt.placement.evaluate.decision_record import QUEUE
from dask_gpurt.placement.evaluate.governor import Standing
from dask_gpurt.placement.tables.durations import BRIEF_SAMPLED, JUDGING, compute_seconds
from dask_gpurt.placement.tables.link_samples import certain_inputs, learn_links

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.decide.root_blocks import RootBlocks
    from dask_gpurt.placement.decide.root_dispatch import RootDispatch
    from dask_gpurt.placement.evaluate.decision_log import DecisionLog
    from dask_gpurt.placement.evaluate.governor import Governor
    from dask_gpurt.placement.evaluate.graph_judge import GraphJudge
    from dask_gpurt.placement.tables.durations import Prefix
    from dask_gpurt.placement.tables.tables import Tables
    from dask_gpurt.placement.tables.workers import WorkerInfo

#: Where tasks are not charged, one in so many with inputs to fetch is learned from, once its link has so many samples.
TRANSFERS_SAMPLED, TRANSFERS_FROM = 8, 32
#: durations learned per worker between two rounds of the monitor (0.1 s), of kinds that are known
LEARNED_PER_ROUND = 2


class Bookkeeping:
    """Keeps the tables, blocks, log and judges of one scheduler up to date.

    Parameters
    ----------
    tables, groups, dispatch, log, governor, graph_judge
        Updated.
    decides
        Whether placement decides even where Dask knows as much: for a user's policy, shadow mode and tests.
    on_retired
        Called with the reason when the governor switches the policy off.
    """

    def __init__(
        self,
        tables: Tables,
        groups: RootBlocks,
        dispatch: RootDispatch,
        log: DecisionLog,
        governor: Governor,
        graph_judge: GraphJudge,
        *,
        decides: Callable[[], bool],
        on_retired: Callable[[str], None],
    ) -> None:
        self.tables = tables
        self._groups = groups
        self._root_dispatch = dispatch
        self._log = log
        self._governor = governor
        self._graph_judge = graph_judge
        self._decides = decides
        self._on_retired = on_retired
        #: Dask's own choice stands for every task, and tasks are not charged
        self.plain = False
        #: the newest task of which nothing is known that Dask does not know
        self.plain_key: Hashable = None
        #: task -> the inputs being fetched for it, of tasks that are not charged
        self._inbound: dict[Hashable, tuple[TaskState, ...]] = {}
        self._brief = 0
        self._transfer = 0

    # ------------------------------------------------------------------ every task

    def entered(self, key: Hashable) -> None:
        """Take in a task that was assigned, by placement or by Dask."""
        groups = self._groups
        root = groups.gone(key) if groups.by_key or groups.later else False
        tables = self.tables
        ts = tables.scheduler.tasks.get(key)
        ws = None if ts is None else ts.processing_on
        if ws is None:
            return
        address = ws.address
        workers = tables.workers
        info = workers.by_address.get(address)
        if info is not None and info.ws is not ws:
            info = None
        reason = QUEUE if key != self.plain_key else Declined.PLAIN if ts.dependencies else Declined.NO_INPUTS
        if self.plain and not root and info is not None:
            self._entered_plainly(key, ts, info, reason)
            return
        governor = self._governor
        kind = tables.durations.kind(ts)
        if (kind.usual or kind).brief and info is not None and not governor.waiting:
            self._brief = (self._brief + 1) % BRIEF_SAMPLED
            if self._brief:
                workers.refresh(info)
                return
        row = self._log.assigned(key, address, reason)
        if governor.standing is Standing.TRIAL and governor.is_open(key):
            governor_samples.report_moved(tables, governor, ts, ws)
        if info is None:
            return
        charge = tables.charge(ts, kind, info, root)
        charge.row = row
        workers.refresh(info)
        if ws.needs_what:
            self._root_dispatch.assigned(info)
            charge.inputs = certain_inputs(ts, ws)
            self._count_bytes(ts, ws)

    def _entered_plainly(self, key: Hashable, ts: TaskState, info: WorkerInfo, reason: str) -> None:
        self.tables.workers.refresh(info)
        self._log.passing(key, info.address, reason)
        ws = info.ws
        if ws.needs_what:
            self._root_dispatch.assigned(info)
            self._count_bytes(ts, ws)
            self._transfer = (self._transfer + 1) % TRANSFERS_SAMPLED
            if not self._transfer or self.tables.links.fits[info.node.link_class].samples < TRANSFERS_FROM:
                inputs = certain_inputs(ts, ws)
                if inputs:
                    self._inbound[key] = inputs

    def _count_bytes(self, ts: TaskState, ws: WorkerState) -> None:
        """Count, for the judge, the inputs that a worker has to fetch for a task just assigned, each once."""
        judge = self._graph_judge
        if judge.in_trial:
            needs = ws.needs_what
            # An input that is needed by one of the worker's tasks only is fetched for this one.
            judge.moved_bytes += sum(d.get_nbytes() for d in ts.dependencies if needs.get(d) == 1)

    def left(self, key: Hashable, finish: str, details: Mapping[str, Any]) -> None:
        """Take in a task that is no longer assigned.

        Parameters
        ----------
        key
            Of the task.
        finish
            Its new state.
        details
            The keywords of the transition: ``worker``, ``startstops``, ``nbytes`` where it has a result.
        """
        if self._graph_judge.left:
            self._graph_judge.finished(finish == "memory")
        tables = self.tables
        charge = tables.backlog.settle(key) if tables.backlog.charges else None
        by_address = tables.workers.by_address
        if charge is None:
            address = self._log.passed(key, finish, details) or details.get("worker", "")
            info = by_address.get(address)
            inputs = self._inbound.pop(key, ()) if self._inbound else ()
        else:
            if charge.row is not None:
                self._log.ended(charge.row, finish, details)
            else:
                self._log.passed(key, finish, details)
            if self._governor.waiting:
                retired = self._governor.finished(key, finish == "memory")
                if retired is not None:
                    self._on_retired(retired)
            info, inputs = charge.info, charge.inputs
            address = info.address
        if info is None or by_address.get(address) is not info:
            return
        tables.workers.refresh(info)
        if self._groups.by_key:
            self._root_dispatch.finished(info)
        startstops = details.get("startstops")
        if finish != "memory" or not startstops or details.get("worker") != address:
            return
        seconds = compute_seconds(startstops)
        if seconds is None:
            return
        nbytes = max(0, details.get("nbytes") or 0)
        if charge is not None:
            self._learn(charge.prefix, info, seconds, nbytes, charge.root)
        elif (ts := tables.scheduler.tasks.get(key)) is not None:
            self._learn_some(tables.durations.kind(ts), info, seconds, nbytes)
        if inputs:
            learn_links(tables.links, by_address, info, inputs, startstops)

    def _learn(self, kind: Prefix, info: WorkerInfo, seconds: float, nbytes: int, root: bool = False) -> None:
        """Learn from a task that has run on the worker it was assigned to."""
        tables = self.tables
        first = kind.seconds is None
        tables.durations.learn(kind, info, seconds, nbytes)
        self._count(kind, seconds, nbytes)
        if root:
            self._root_dispatch.root_done(info, seconds, nbytes)
        if first:
            tables.backlog.learned(kind)
        tables.speeds.learned(info)

    def _learn_some(self, kind: Prefix, info: WorkerInfo, seconds: float, nbytes: int) -> None:
        """As `_learn`, where tasks are not charged: from a smaller share the more tasks there are in a second."""
        if (kind.usual or kind).brief:
            self._brief = (self._brief + 1) % BRIEF_SAMPLED
            if self._brief:
                return
        elif kind.samples >= JUDGING and info.learned >= LEARNED_PER_ROUND:
            self._count(kind, seconds, nbytes)
            return
        info.learned += 1
        self._learn(kind, info, seconds, nbytes)

    def _count(self, kind: Prefix, seconds: float, nbytes: int) -> None:
        """Count a finished task for the judge of whole graphs."""
        times = BRIEF_SAMPLED if (kind.usual or kind).brief else 1
        judge = self._graph_judge
        judge.compute_seconds += times * seconds
        judge.made_bytes += times * nbytes

    # ------------------------------------------------------------------ tasks that move without a transition

    def stolen(self, key: Hashable, victim: str, thief: str) -> None:
        """Move a stolen task from the address `victim` to the address `thief`."""
        tables = self.tables
        by_address = tables.workers.by_address
        to = by_address.get(thief)
        ts = tables.scheduler.tasks.get(key)
        if to is None or ts is None or ts.processing_on is not to.ws:
            return
        inputs = islice(ts.dependencies, candidates.MAX_INPUTS)
        missing = sum(d.get_nbytes() for d in inputs if to.ws not in (d.who_has or ()))
        self._moved(key, victim, to, missing)
        tables.workers.refresh(to)

    def copy_won(self, key: Hashable, first: str, second: str) -> None:
        """Move a task whose copy on the address `second` has finished before the one on `first`."""
        to = self.tables.workers.by_address.get(second)
        if to is not None:
            self._moved(key, first, to, 0.0)

    def _moved(self, key: Hashable, victim: str, to: WorkerInfo, missing: float) -> None:
        tables = self.tables
        self._log.stolen(key, victim, to.address, missing)
        tables.backlog.move(key, to)
        self._inbound.pop(key, None)
        origin = tables.workers.by_address.get(victim)
        if origin is not None and origin is not to:
            tables.workers.refresh(origin)

    def restarted(self) -> None:
        """Drop all tasks: the scheduler has forgotten them, without transitions."""
        tables = self.tables
        self._log.restarted()
        self._governor.forget()
        self._graph_judge.forget()
        tables.backlog.forget()
        self._inbound.clear()
        self._groups.clear()
        self._root_dispatch.clear()
        tables.residence.clear()
        tables.workers.clear_charges()

    # ------------------------------------------------------------------ plain or not

    def look_round(self) -> None:
        """Check whether sums are needed. Called a few times a second; a decision that cannot wait calls `sum_up`."""
        tables = self.tables
        needed = (
            tables.workers.zoned
            or tables.speeds.uneven
            or tables.residence.on_disk
            or self._governor.standing is not Standing.TRUSTED
            or self._governor.waiting
            or self._decides()
        )
        if needed:
            self.sum_up()
        else:
            self.plain = True

    def sum_up(self) -> None:
        """Charge the tasks that were assigned while no sums were needed. O(tasks assigned), once."""
        if not self.plain:
            return
        self.plain = False
        tables = self.tables
        charges = tables.backlog.charges
        for info in tables.workers.all.items:
            for ts in info.ws.processing:
                if ts.key not in charges:
                    tables.charge(ts, tables.durations.kind(ts), info)

    @property
    def at_work(self) -> bool:
        """Whether any task is assigned. O(workers) where none is."""
        return any(ws.processing for ws in self.tables.scheduler.workers.values())
