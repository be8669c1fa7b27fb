"""Learn the latency and bandwidth of links from the transfers that workers report.

`certain_inputs` notes what a task has to fetch when it is assigned. `learn_links` compares that with the transfers
reported when the task is done.

A worker reports when a transfer began and ended, from whom it came, and one of the tasks that it served. It does not
report which inputs the transfer carried. So only unambiguous transfers are learned from, and most are skipped. A
transfer is unambiguous when all of these hold:

* everything on its way to the worker when the task was assigned was for that task;
* each source was asked once;
* each input had one holder among the sources.
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

#: inputs remembered per task. With 8, nothing was learned from the columns of a rechunk (12 missing slices each), and
#: it took 10 % longer
MAX_INPUTS = 32


def certain_inputs(ts: TaskState, ws: WorkerState) -> tuple[Any, ...]:
    """The TaskStates on their way to `ws` if all of them are inputs of `ts`, just assigned to it; else ()."""
    needs = ws.needs_what
    deps = ts.dependencies
    if len(needs) <= min(MAX_INPUTS, len(deps)) and all(d in deps for d in needs):
        return tuple(needs)
    return ()


def learn_links(
    links: LinkMatrix,
    by_address: Mapping[str, WorkerInfo],
    info: WorkerInfo,
    inputs: Sequence[Any],
    startstops: Collection[Mapping[str, Any]],
) -> None:
    """Learn from the transfers that a worker reported with a finished task.

    `inputs` is what `certain_inputs` gave when the task was assigned, `startstops` are as the worker reported them:
    ``action``, ``start`` and ``stop`` (Unix seconds), ``source`` (address).
    """
    reported = [s for s in startstops if s["action"] == "transfer"]
    sources: dict[str, list[Any]] = {s["source"]: [] for s in reported}
    if len(sources) != len(reported):
        return  # two requests to one worker: which carried what is unknown
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
