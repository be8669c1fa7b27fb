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
    ``with report("run.html"): ...``: what the run did, what it waited for and what to do about it; ``report(run=-1)``
    for a run that is over
`runs`, `compare`
    the newest runs; two of them side by side
`safe`
    have Dask do what a part of the extension did, at once, until it is switched off
`diagnose`
    why a cluster is slow or stuck: five questions, up to the first that finds a cause
`hold`, `release`
    give workers no more tasks and move their data away; let them in again
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dask_gpurt import config as config  # registers the defaults of the ``gpurt`` namespace
from dask_gpurt._version import __version__

if TYPE_CHECKING:
    from dask_gpurt.client.api import attach, detach
    from dask_gpurt.client.diagnose import diagnose
    from dask_gpurt.client.hold import hold, release
    from dask_gpurt.client.local import local_cluster
    from dask_gpurt.client.questions import explain, where
    from dask_gpurt.client.recording import record
    from dask_gpurt.client.reports import report
    from dask_gpurt.client.runs import compare, runs
    from dask_gpurt.client.safe import safe
    from dask_gpurt.client.state import status

#: public name -> the module of `dask_gpurt.client` that has it
_HOMES = {
    "attach": "api",
    "compare": "runs",
    "detach": "api",
    "diagnose": "diagnose",
    "explain": "questions",
    "hold": "hold",
    "local_cluster": "local",
    "record": "recording",
    "release": "hold",
    "report": "reports",
    "runs": "runs",
    "safe": "safe",
    "status": "state",
    "where": "questions",
}

__all__ = [
    "__version__",
    "attach",
    "compare",
    "detach",
    "diagnose",
    "explain",
    "hold",
    "local_cluster",
    "record",
    "release",
    "report",
    "runs",
    "safe",
    "status",
    "where",
]


def __getattr__(name: str) -> Any:
    # Late, so that ``import dask_gpurt`` (every ``dask`` command does it, through the entry point) stays cheap.
    if name == "dask_setup":  # what Dask asks a preload for: ``--preload dask_gpurt`` would do nothing, and not say so
        return importlib.import_module("dask_gpurt.preload").dask_setup
    if name not in _HOMES:
        raise AttributeError(f"module 'dask_gpurt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dask_gpurt.client.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
