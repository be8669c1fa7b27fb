"""What placement would have done, beside what stock did. Counts only.

Both choices are priced by the same model from the same snapshot, so the difference is what the model expects to gain,
not what would have been gained: stock's other choices would have been different too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.model import LinkClass
from dask_gpurt.placement.decide.cost import cost, finish_seconds
from dask_gpurt.placement.decide.policy import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dask_gpurt.model.link import Link
    from dask_gpurt.model.views import TaskView, WorkerView
    from dask_gpurt.placement.engine import Engine
    from dask_gpurt.placement.tables.workers import WorkerInfo


class Shadowed:
    """Decisions compared so far."""

    def __init__(self) -> None:
        #: the same worker; another one
        self.agreed = 0
        self.differed = 0
        #: not compared: no inputs, actor, no candidate, no time
        self.passed = 0
        #: by the model, stock's choice minus ours, summed: cost in seconds, seconds to the result, bytes moved
        self.cost_seconds = 0.0
        self.finish_seconds = 0.0
        self.moved_bytes = 0.0

    def compare(
        self,
        picked: Sequence[WorkerInfo],
        views: Sequence[WorkerView],
        choice: int,
        task: TaskView,
        far: Link,
        stock: Any,
    ) -> None:
        """Stock chose the WorkerState `stock`; the cost would have chosen ``picked[choice]``."""
        if picked[choice].ws is stock:
            self.agreed += 1
            return
        theirs = next((v for w, v in zip(picked, views, strict=True) if w.ws is stock), None)
        if theirs is None:
            self.passed += 1
            return
        ours = views[choice]
        self.differed += 1
        self.cost_seconds += cost(task, theirs, far, WEIGHTS) - cost(task, ours, far, WEIGHTS)
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


def look(engine: Engine, ts: Any, valid: Collection[Any] | None, ws: Any) -> None:
    """Record what the cost would have chosen where stock chose `ws`. Changes nothing that others read."""
    shadowed = engine.shadowed
    if engine.budget.exhausted or ts.actor or not ts.dependencies or ws is None:
        shadowed.passed += 1
        return
    began = time.perf_counter_ns()
    far = engine.links.link(LinkClass.NETWORK)
    by_address = engine.workers.by_address
    weighed = engine.weigh(ts, valid, began, engine.task_view(ts), far, by_address.get(ws.address))
    if isinstance(weighed, str):
        shadowed.passed += 1
        return
    picked, inputs, views, task, far, i = weighed
    shadowed.compare(picked, views, i, task, far, ws)
    n = len(engine.workers.all.items)
    engine.log.chosen(ts.key, picked, views, i, task, far, inputs, valid is not None, n, shadow=True)
    engine.budget.record((time.perf_counter_ns() - began) * 1e-9)
