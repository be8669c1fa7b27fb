"""What a restart of a shuffle leaves as it is, and what Dask's leaves that must go. On the scheduler.

Dask restarts a shuffle by releasing its outputs, its barrier and its transfer tasks. `keep_outputs` takes outputs that
are in memory out of that, and `for_the_rest` gives the new run a spec for the outputs that are still to be made.
`release_behind_aliases` adds transfer tasks that Dask does not see, also of array rechunks, which are Dask's own in all
else (docs/upstream.md).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.scheduler.output_tasks import output_of

if TYPE_CHECKING:
    from dask.typing import Key

    from dask_gpurt.shuffle.scheduler.runs import Runs
    from dask_gpurt.shuffle.spec import GpurtShuffleSpec

#: states of the task of an output that nothing waits for, or that was made
NOT_WANTED = ("memory", "released", "forgotten")


def keep_outputs(runs: Runs, shuffle_id: seam.ShuffleId, recommendations: dict[Key, str]) -> None:
    """Take outputs that are in memory out of the recommendations of a restart."""
    barrier = runs.barrier_of(shuffle_id)
    if barrier is None or any(output_of(ts.run_spec, shuffle_id) is None for ts in barrier.dependents):
        return
    for ts in barrier.dependents:
        if ts.state == "memory" and recommendations.pop(ts.key, None) is not None:
            runs.counters.outputs_kept += 1


def release_behind_aliases(runs: Runs, shuffle_id: seam.ShuffleId, recommendations: dict[Key, str]) -> None:
    """Release the transfers whose results the barrier gets by another name, as of fused array graphs.

    Their results are the number of the run that has ended: with one left in memory, the barrier of the next run fails.
    """
    barrier = runs.barrier_of(shuffle_id)
    for ts in () if barrier is None else barrier.dependencies:
        while ts.key in recommendations and isinstance(ts.run_spec, seam.Alias) and len(ts.dependencies) == 1:
            (ts,) = ts.dependencies
            recommendations[ts.key] = "released"


def for_the_rest(runs: Runs, spec: GpurtShuffleSpec) -> GpurtShuffleSpec:
    """The spec of a shuffle's next run, for the outputs that are still to be made."""
    wanted = _wanted(runs, spec)
    fields: dict[str, Any] = {"parts_out": wanted}
    return spec if wanted is None else dataclasses.replace(spec, **fields)


def _wanted(runs: Runs, spec: GpurtShuffleSpec) -> tuple[int, ...] | None:
    """Outputs that are still to be made; None: all, or which is not known."""
    barrier = runs.barrier_of(spec.id)
    parts: set[int] = set()
    for ts in () if barrier is None else barrier.dependents:
        part = output_of(ts.run_spec, spec.id)
        if part is None:
            return None
        if ts.state not in NOT_WANTED:
            parts.add(part)
    every = set(spec.output_partitions)
    return tuple(sorted(parts & every)) if parts and parts < every else None
