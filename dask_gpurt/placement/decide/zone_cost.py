"""What a fetch between zones costs other tasks (`price`), and whether one is under way already (`under_way`).

Within a zone each host has its own link to the switch, and a fetch delays few others. Between zones there is one link
for all: a second on it is lost for every other worker of both zones. So it is priced `FAR` times as high.

An input that many tasks on the other side need has to cross once in any case. The first worker there that fetches it
does so for all tasks still waiting for it, and the price is divided among them. While it is under way, a second fetch
of the same input into the same zone pays in full. After its arrival it is near for the whole zone.

Roots have no price. A second worker does not pull one while an input of it is under way (`under_way`).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.tables.worker_facts import is_running

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dask_gpurt.model.link import Link
    from dask_gpurt.placement.tables.workers import Node, WorkerInfo

#: price of a second between zones, relative to one within
FAR = 4.0
#: waiting tasks that share a price, at most
SHARED = 8
#: fetches that take less are not waited for, in seconds
NOTABLE_SECONDS = 0.05
#: inputs, holders of each and workers of the zone that are looked at
LOOKED = 16


def price(inputs: Iterable[Any], node: Node, by_address: Mapping[str, WorkerInfo]) -> float:
    """Price of a second of fetches that bring missing inputs (TaskStates) into a zone. What it has costs nothing."""
    total = weighted = 0.0
    for d in islice(inputs, LOOKED):
        holders = islice(d.who_has or (), LOOKED)
        if any((w := by_address.get(h.address)) is not None and w.node is node for h in holders):
            continue
        nbytes = 1.0 + max(0, d.nbytes)
        total += nbytes
        waiting = len(getattr(d, "waiters", None) or ())
        if waiting > 1 and not any(d in w.ws.needs_what for w in islice(node.workers.items, LOOKED)):
            nbytes /= min(waiting, SHARED)
        weighted += nbytes
    return FAR * weighted / total if total else FAR


def under_way(inputs: Iterable[Any], info: WorkerInfo, far: Link, by_address: Mapping[str, WorkerInfo]) -> bool:
    """Whether a neighbour in the worker's zone is fetching one of the TaskStates `inputs` from another zone.

    The worker would bring it across a second time now, and get it from the neighbour in a moment.
    """
    ws, node = info.ws, info.node
    for d in islice(inputs, LOOKED):
        holders = d.who_has or ()
        if ws in holders or d in ws.needs_what or far.seconds(max(0, d.nbytes), 1) < NOTABLE_SECONDS:
            continue
        # A paused worker fetches nothing, perhaps for ever.
        if any(d in w.ws.needs_what and is_running(w.ws) for w in islice(node.workers.items, LOOKED)) and not any(
            (w := by_address.get(h.address)) is not None and w.node is node for h in islice(holders, LOOKED)
        ):
            return True
    return False
