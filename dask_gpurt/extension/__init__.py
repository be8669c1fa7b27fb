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

from dask_gpurt.extension.parts import NAME
from dask_gpurt.extension.scheduler import GpurtScheduler
from dask_gpurt.extension.worker import GpurtWorker, WorkerParts, on_worker, stock_residence

__all__ = ["NAME", "GpurtScheduler", "GpurtWorker", "WorkerParts", "on_worker", "stock_residence"]
