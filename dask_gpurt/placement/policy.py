"""The choice: the cheapest of a few candidates. Who they are is `candidates`, what they cost is `cost`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.placement.cost import Weights, cost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dask_gpurt.model.link import Link
    from dask_gpurt.model.views import TaskView, WorkerView

#: used when nobody says otherwise
WEIGHTS = Weights()


def choose(task: TaskView, workers: Sequence[WorkerView], far: Link, weights: Weights = WEIGHTS) -> int:
    """Index of the cheapest candidate; among equals the one that holds fewer bytes, then the first.

    Raises
    ------
    ValueError
        No candidates.
    """
    best = -1
    best_cost = best_held = 0.0
    for i, worker in enumerate(workers):
        seconds = cost(task, worker, far, weights)
        if best < 0 or seconds < best_cost or (seconds == best_cost and worker.held_bytes < best_held):
            best, best_cost, best_held = i, seconds, worker.held_bytes
    if best < 0:
        raise ValueError("no candidates to choose from; at least one worker is needed")
    return best
