"""`ShadowStats`: what placement would have done, beside what Dask did (stock). Counts only.

Both choices are priced by the same model from the same snapshot. The difference is what the model expects to gain, not
what would have been gained: Dask's other choices would have been different too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dask_gpurt.model import LinkClass
from dask_gpurt.placement.decide.cost import cost, finish_seconds
from dask_gpurt.placement.decide.decision import Declined

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.decide.decision import Decision
    from dask_gpurt.placement.evaluate.decision_log import DecisionLog
    from dask_gpurt.placement.tables.tables import Tables

    Weigh = Callable[..., Decision | Declined]


class ShadowStats:
    """Counts of the decisions compared so far; `weigh` is `Engine.weigh`."""

    def __init__(self, tables: Tables, log: DecisionLog, weigh: Weigh) -> None:
        self._tables = tables
        self._log = log
        self._weigh = weigh
        #: the same worker; another one
        self.agreed = 0
        self.differed = 0
        #: not compared: no inputs, actor, no candidate, no time
        self.passed = 0
        #: by the model, stock's choice minus ours, summed: cost in seconds, seconds to the result, bytes moved
        self.cost_seconds = 0.0
        self.finish_seconds = 0.0
        self.moved_bytes = 0.0

    def look(self, ts: TaskState, valid: Collection[WorkerState] | None, ws: WorkerState | None) -> None:
        """Compare what the cost would choose, of `valid` (None: all), with `ws`, which Dask chose (None: none).

        Only the log and the budget change.
        """
        tables = self._tables
        if tables.budget.exhausted or ts.actor or not ts.dependencies or ws is None:
            self.passed += 1
            return
        began = time.perf_counter_ns()
        far = tables.links.link(LinkClass.NETWORK)
        by_address = tables.workers.by_address
        decision = self._weigh(ts, valid, began, tables.task_view(ts), far, by_address.get(ws.address))
        if isinstance(decision, Declined):
            self.passed += 1
            return
        self.compare(decision, ws)
        self._log.chosen(ts.key, decision, valid is not None, len(tables.workers.all.items), shadow=True)
        tables.budget.record((time.perf_counter_ns() - began) * 1e-9)

    def compare(self, decision: Decision, stock: WorkerState) -> None:
        """Count a decision, where Dask chose `stock` and the cost would have chosen the decision's worker."""
        picked, views, task, far = decision.picked, decision.views, decision.task, decision.far
        if decision.info.ws is stock:
            self.agreed += 1
            return
        theirs = next((v for w, v in zip(picked, views, strict=True) if w.ws is stock), None)
        if theirs is None:
            self.passed += 1
            return
        ours = decision.view
        self.differed += 1
        self.cost_seconds += cost(task, theirs, far) - cost(task, ours, far)
        self.finish_seconds += finish_seconds(task, theirs, far)[0] - finish_seconds(task, ours, far)[0]
        self.moved_bytes += theirs.near_bytes + theirs.far_bytes - ours.near_bytes - ours.far_bytes

    def statistics(self) -> dict[str, float]:
        """Counts; and what the model expects to gain, as sums over the decisions that differ."""
        return {
            "agreed": self.agreed,
            "differed": self.differed,
            "passed": self.passed,
            "predicted_cost_seconds": self.cost_seconds,
            "predicted_finish_seconds": self.finish_seconds,
            "predicted_moved_bytes": self.moved_bytes,
        }
