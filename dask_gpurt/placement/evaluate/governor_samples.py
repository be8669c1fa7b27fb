"""What the governor learns of a decision: the predictions for placement's choice, and for the choice of Dask's rule.

Dask's own decider is not called: it is O(workers) on large clusters. Its rule is applied to the candidates instead,
which is close: holders only, by queue and missing bytes; without inputs, by queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.model import LinkClass
from dask_gpurt.model.views import TaskView
from dask_gpurt.placement.decide import candidates
from dask_gpurt.placement.decide.cost import MOVED, finish_seconds

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.decide.decision import Decision
    from dask_gpurt.placement.evaluate.governor import Governor
    from dask_gpurt.placement.tables.tables import Tables


def report_decision(governor: Governor, ts: TaskState, ours: bool, decision: Decision) -> None:
    """Report a decision to the governor; `ours`: placement's choice is followed, otherwise Dask's."""
    inputs, views, task, far = decision.inputs, decision.views, decision.task, decision.far
    view = decision.view
    predicted, moved = finish_seconds(task, view, far)
    stock = predicted
    if len(views) > 1:
        # Stock compares holders only, by queue and bytes missing; without inputs, by queue.
        holders = [v for v in views if inputs.count - v.near_fetches - v.far_fetches > 0.5] or views
        if len(holders) > 1 or holders[0] is not view:
            theirs = min(holders, key=lambda v: v.queue_seconds * v.slowness + finish_seconds(task, v, far)[1])
            stock = finish_seconds(task, theirs, far)[0]
    governor.decided(ts.key, ts.prefix.name, ours, predicted, stock, view.near_bytes + view.far_bytes, MOVED * moved)


def report_moved(tables: Tables, governor: Governor, ts: TaskState, ws: WorkerState) -> None:
    """Report to the governor what Dask's decision to run `ts` on `ws` moves, in a trial."""
    by_address = tables.workers.by_address
    info = by_address.get(ws.address)
    if info is None or len(ts.dependencies) > candidates.MAX_INPUTS:
        return
    view = candidates.views([info], candidates.Inputs(ts.dependencies, by_address), tables, inbound=False)[0]
    _, moved = finish_seconds(TaskView(0.0, 0.0), view, tables.links.link(LinkClass.NETWORK))
    governor.moved(ts.key, view.near_bytes + view.far_bytes, MOVED * moved)
