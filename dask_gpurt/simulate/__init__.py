"""Placement without a cluster: the real Scheduler and the same policy code, on a virtual clock.

>>> from dask_gpurt.simulate import Cluster, TaskSpec, Workload, simulate
>>> workload = Workload("pair", {"a": TaskSpec((), 1.0, 10**6), "b": TaskSpec(("a",), 1.0, 8)}, ["b"])
>>> result = simulate(workload, Cluster(workers=2), "gpurt")
>>> round(result.makespan_seconds, 1)
2.0

`simulate` runs, `shapes.build` makes the workloads of the benchmarks, `bounds.bound` says what no schedule can beat.
"""

from __future__ import annotations

from dask_gpurt.simulate.model import Cluster, Path, Placed, Result, TaskSpec, Workload
from dask_gpurt.simulate.run import simulate
from dask_gpurt.simulate.simulation import SimulationError

__all__ = ["Cluster", "Path", "Placed", "Result", "SimulationError", "TaskSpec", "Workload", "simulate"]
