"""What a fetch between zones costs others.

Within a zone each host has its own link to the switch, and a fetch delays few. Between zones there is one link for all:
a second on it is a second that no other worker of either zone has it. So it is priced `FAR` times as high as elsewhere.

But what is needed by many on the other side has to cross anyway, once: the first worker there that fetches it does so
for all tasks still waiting for it, and its price is divided among them. While it is under way, a second fetch of the
same input into the same zone pays in full; when it has arrived, it is near for all of the zone. Roots, which have no
price, are not pulled by a second worker meanwhile (`under_way`).
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

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
    """Of fetching the TaskStates `inputs` that the zone `node` lacks, per second of their fetches."""
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
    """Whether a neighbour in the zone of a worker is fetching one of the TaskStates `inputs` from another zone.

    The worker would fetch it across a second time now, and next door in a moment.
    """
    ws, node = info.ws, info.node
    for d in islice(inputs, LOOKED):
        holders = d.who_has or ()
        if ws in holders or d in ws.needs_what or far.seconds(max(0, d.nbytes), 1) < NOTABLE_SECONDS:
            continue
        if any(d in w.ws.needs_what for w in islice(node.workers.items, LOOKED)) and not any(
            (w := by_address.get(h.address)) is not None and w.node is node for h in islice(holders, LOOKED)
        ):
            return True
    return False
