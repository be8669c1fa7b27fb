"""The two plugins that put the engines into a cluster, and nothing else.

::

    GpurtScheduler  (SchedulerPlugin "gpurt")        GpurtWorker  (WorkerPlugin "gpurt", pushed by the former)
      ├── tiers.NextUsePlugin                          ├── tiers.TierRuntime
      ├── placement.PlacementPlugin                    └── hands the runtime's shard store to shuffle
      ├── shuffle.ShuffleTakeover
      └── pushes GpurtWorker to every worker

Here, and only here, the engines meet: they never import each other, what they need of one another is a protocol in
`dask_gpurt.model` and is handed over in this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask_gpurt.extension.parts import NAME
from dask_gpurt.extension.worker import GpurtWorker, WorkerParts, on_worker, stock_residence

if TYPE_CHECKING:
    from dask_gpurt.extension.scheduler import GpurtScheduler

__all__ = ["NAME", "GpurtScheduler", "GpurtWorker", "WorkerParts", "on_worker", "stock_residence"]


def __getattr__(name: str) -> Any:
    # Late: a worker that unpickles its half imports this package, and has no use for the scheduler's.
    if name == "GpurtScheduler":
        from dask_gpurt.extension.scheduler import GpurtScheduler

        return GpurtScheduler
    raise AttributeError(f"module 'dask_gpurt.extension' has no attribute {name!r}")
