"""`Bookkeeping`: keeps the tables true while the scheduler assigns, moves and finishes tasks.

The plugin calls `entered` and `left` for every task. They are the running cost of this package, so they skip whatever
is known not to be needed. Of tasks so brief that the scheduler is the bottleneck, one in `BRIEF_SAMPLED` is followed.

Rejected: to charge no task while all workers are alike and near, when Dask's own choice stands for every task, and to
learn from a sample of them. It took 1 % off the scheduler's time per task, and needed a second way through all of this.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.decide import candidates
from dask_gpurt.placement.decide.decision import Declined
from dask_gpurt.placement.evaluate import governor_samples
from dask_gpurt.placement.evaluate.decision_record import QUEUE, TINY
from dask_gpurt.placement.evaluate.governor import Standing
from dask_gpurt.placement.tables.durations import BRIEF_SAMPLED, compute_seconds
from dask_gpurt.placement.tables.link_samples import certain_inputs, learn_links

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.decide.root_blocks import RootBlocks
    from dask_gpurt.placement.decide.root_dispatch import RootDispatch
    from dask_gpurt.placement.evaluate.decision_log import DecisionLog
    from dask_gpurt.placement.evaluate.governor import Governor
    from dask_gpurt.placement.evaluate.graph_judge import GraphJudge
    from dask_gpurt.placement.tables.backlog import Charge
    from dask_gpurt.placement.tables.tables import Tables
    from dask_gpurt.placement.tables.workers import WorkerInfo


class Bookkeeping:
    """Keeps the tables, blocks, log and judges of one scheduler up to date.

    `on_retired` is called with the reason when the governor switches the policy off.
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
        on_retired: Callable[[str], None],
    ) -> None:
        self.tables = tables
        self._groups = groups
        self._root_dispatch = dispatch
        self._log = log
        self._governor = governor
        self._graph_judge = graph_judge
        self._on_retired = on_retired
        #: the newest task of which nothing is known that Dask does not know
        self.plain_key: Hashable = None
        #: the newest root that was not queued because it is tiny
        self.tiny_key: Hashable = None
        self._brief = 0

    # ------------------------------------------------------------------ every task

    def entered(self, key: Hashable, queued: bool = False) -> None:
        """Take in a task that was assigned, by placement or by Dask; `queued`: from the queue of roots."""
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
        governor = self._governor
        kind = tables.durations.kind(ts)
        if (kind.usual or kind).brief and info is not None and not governor.open:
            self._brief = (self._brief + 1) % BRIEF_SAMPLED
            if self._brief:
                if (len(ws.processing) - len(ws.long_running) < ws.nthreads) is not info.free:
                    workers.refresh(info)
                return
        if key == self.tiny_key:
            self.tiny_key = None  # it may be assigned again, otherwise
            self._log.root(key, address, TINY)
        row = self._log.assigned(key, address, reason)
        if governor.standing is Standing.TRIAL and key in governor.open:
            governor_samples.report_moved(tables, governor, ts, ws)
        if info is None:
            return
        charge = tables.charge(ts, kind, info, root)
        charge.row = row
        charge.queued = queued
        workers.refresh(info)
        if ws.needs_what:
            self._root_dispatch.assigned(info)
            charge.inputs = certain_inputs(ts, ws)
            self._count_bytes(ts, ws)

    def _count_bytes(self, ts: TaskState, ws: WorkerState) -> None:
        """Count, for the judge, the inputs that a worker has to fetch for a task just assigned, each once."""
        judge = self._graph_judge
        if judge.in_trial:
            needs = ws.needs_what
            # An input that is needed by one of the worker's tasks only is fetched for this one.
            judge.moved_bytes += sum(d.get_nbytes() for d in ts.dependencies if needs.get(d) == 1)

    def left(self, key: Hashable, finish: str, details: Mapping[str, Any]) -> None:
        """Take in a task that is no longer assigned, and is in the state `finish` now.

        `details` are the keywords of the transition: ``worker``, ``startstops``, ``nbytes`` where it has a result.
        """
        if self._graph_judge.left:
            self._graph_judge.finished(finish == "memory")
        tables = self.tables
        backlog = tables.backlog
        charge = backlog.settle(key) if key in backlog.charges else None
        # Also of a task that was never sent, as Dask fails one whose inputs fit into no worker: it would wait for ever.
        if self._governor.open:
            retired = self._governor.finished(key, finish == "memory")
            if retired is not None:
                self._on_retired(retired)
        by_address = tables.workers.by_address
        if charge is None:
            self._left_unfollowed(key, finish, details)
            return
        if charge.row is not None:
            self._log.ended(charge.row, finish, details)
        info = charge.info
        address = info.address
        if by_address.get(address) is not info:
            return
        tables.workers.refresh(info)
        queued = bool(tables.scheduler.queued)
        if queued or self._groups.by_key:
            self._root_dispatch.finished(info)
        startstops = details.get("startstops")
        if finish != "memory" or not startstops or details.get("worker") != address:
            return
        seconds = compute_seconds(startstops)
        if seconds is not None:
            self._learn(charge, seconds, max(0, details.get("nbytes") or 0))
        lateness = self._root_dispatch.lateness
        if queued or lateness.freed:
            lateness.ran(info, startstops, root=charge.queued or charge.root, queued=queued)
        if charge.inputs:
            learn_links(tables.links, by_address, info, charge.inputs, startstops)

    def _left_unfollowed(self, key: Hashable, finish: str, details: Mapping[str, Any]) -> None:
        """Take in the end of a task that was not charged: a brief one, or one of an unknown worker."""
        info = self.tables.workers.by_address.get(details.get("worker", ""))
        if info is not None:
            ws = info.ws
            if (len(ws.processing) - len(ws.long_running) < ws.nthreads) is not info.free:
                self.tables.workers.refresh(info)
            dispatch = self._root_dispatch
            if self._groups.by_key or self.tables.scheduler.queued:
                dispatch.finished(info)
            if dispatch.lateness.freed:
                dispatch.lateness.lost(info)
        self._log.finished(key, finish, details)

    def _learn(self, charge: Charge, seconds: float, nbytes: int) -> None:
        """Learn from a task that has run on the worker it was assigned to."""
        tables, kind, info = self.tables, charge.prefix, charge.info
        first = kind.seconds is None
        tables.durations.learn(kind, info, seconds, nbytes)
        times = BRIEF_SAMPLED if (kind.usual or kind).brief else 1
        judge = self._graph_judge
        judge.compute_seconds += times * seconds
        judge.made_bytes += times * nbytes
        tiny = self._root_dispatch.tiny
        if tiny.times:
            tiny.ran(kind, seconds, times)
        if charge.queued or charge.root:
            self._root_dispatch.root_done(info, seconds, nbytes, owned=charge.root)
        if first:
            tables.backlog.learned(kind)
        tables.speeds.learned(info)

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
        self._groups.clear()
        self._root_dispatch.clear()
        tables.residence.clear()
        tables.workers.clear_charges()

    @property
    def at_work(self) -> bool:
        """Whether any task is assigned. O(workers) where none is."""
        return any(ws.processing for ws in self.tables.scheduler.workers.values())
