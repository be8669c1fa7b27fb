"""`key_of`: the class of a worker's node, as plots and reports show it and prices name it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask_gpurt.model.node_class import EXTRA

if TYPE_CHECKING:
    from distributed.scheduler import WorkerState

#: the class of a worker that has not told its own
UNKNOWN = "unknown"


def key_of(ws: WorkerState | None) -> str:
    """The key that a worker told (`dask_gpurt.model.node_class`); `UNKNOWN` of one that runs stock, for example."""
    told = (getattr(ws, "extra", None) or {}).get(EXTRA) or {}
    return str(told.get("key", UNKNOWN))
