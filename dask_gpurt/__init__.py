"""dask-gpurt: placement, memory tiers and shuffles for Dask clusters of GPUs and CPUs.

A cluster gets it by ``dask scheduler --preload dask_gpurt.preload``; user code does not change. From Python:

`local_cluster`
    a `distributed.LocalCluster` with the extension
`attach`, `detach`
    put it into a running cluster, and take it out again
`status`
    what is installed, what it decided, moved and spilled
`explain`, `where`
    why a task ran where it ran; where a key is, in memory or on disk
`record`
    write a run into a file, to be replayed or drawn
`report`
    ``with report("run.html"): ...``: what the run did, what it waited for and what to do about it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt import config as config  # registers the defaults of the ``gpurt`` namespace
from dask_gpurt._version import __version__

if TYPE_CHECKING:
    from dask_gpurt.api import attach, detach, local_cluster, status
    from dask_gpurt.questions import explain, where
    from dask_gpurt.recording import record
    from dask_gpurt.reports import report

__all__ = [
    "__version__",
    "attach",
    "detach",
    "explain",
    "local_cluster",
    "record",
    "report",
    "status",
    "where",
]


def __getattr__(name: str) -> Any:
    # Late, so that ``import dask_gpurt`` (every ``dask`` command does it, through the entry point) stays cheap.
    if name in ("explain", "where"):
        from dask_gpurt import questions

        return getattr(questions, name)
    if name == "report":
        from dask_gpurt.reports import report

        return report
    if name == "record":
        from dask_gpurt import recording

        return recording.record
    if name in __all__:
        from dask_gpurt import api

        return getattr(api, name)
    raise AttributeError(f"module 'dask_gpurt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
