"""What the transfers that workers report say of links.

A worker reports when a transfer began and ended and from whom it came, with one of the tasks that it served, but not
which inputs it carried. So only those are learned from of which it is certain, and most are skipped: all that was on
its way to the worker when the task was assigned was for that task, each source was asked once, and each input had one
holder among the sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.model import LinkClass
from dask_gpurt.topology.links import Transfer, merge

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.placement.tables.workers import WorkerInfo
    from dask_gpurt.topology.links import LinkMatrix

#: inputs remembered per task. With 8 the columns of a rechunk (12 missing slices each) taught nothing, and it took 10 %
#: longer
MAX_INPUTS = 32


def certain_inputs(ts: TaskState, ws: WorkerState) -> tuple[Any, ...]:
    """The TaskStates on their way to a worker if they are all for the task just assigned to it; else ()."""
    needs = ws.needs_what
    if len(needs) <= MAX_INPUTS:
        deps = ts.dependencies
        if all(d in deps for d in needs):
            return tuple(needs)
    return ()


def learn_links(
    links: LinkMatrix,
    by_address: Mapping[str, WorkerInfo],
    info: WorkerInfo,
    inputs: Sequence[Any],
    startstops: Collection[Mapping[str, Any]],
) -> None:
    """Learn from the transfers reported with a task that has run on the worker `info`.

    Parameters
    ----------
    inputs
        What `certain_inputs` gave when it was assigned.
    startstops
        As the worker reported them: ``action``, ``start``, ``stop``, ``source``.
    """
    reported = [s for s in startstops if s["action"] == "transfer"]
    sources: dict[str, list[Any]] = {s["source"]: [] for s in reported}
    if len(sources) != len(reported):
        return  # two requests to one worker: no telling which carried what
    for d in inputs:
        held = [h.address for h in d.who_has or () if h.address in sources]
        if len(held) != 1:
            return  # came with another task's transfer, or could have come from either of two
        sources[held[0]].append(d)
    transfers = []
    for s in reported:
        source = by_address.get(s["source"])
        carried = sources[s["source"]]
        if source is None or not carried:
            return
        link_class = info.node.link_class if source.node is info.node else LinkClass.NETWORK
        # All holders but the source have fetched it, as far as can be known.
        receivers = max(1, max(len(d.who_has or ()) for d in carried) - 1)
        transfers.append(Transfer(s["start"], s["stop"], sum(d.get_nbytes() for d in carried), link_class, receivers))
    for link_class, nbytes, seconds, receivers in merge(transfers):
        links.observe(link_class, nbytes, seconds, receivers=receivers)
