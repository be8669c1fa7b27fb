"""What no schedule can beat: the largest of three times.

path      the longest chain of tasks, each on the fastest worker, with the messages between scheduler and workers
work      all work spread evenly over all slots, each at its speed
network   bytes that must travel under any schedule over the links they need (`Workload.network_seconds`)

It is loose where moving data and computing cannot overlap, and where tasks are few and long (no worker can run half a
task). There the best schedule that any policy found is what others are compared with; benchmarks/placement.py says
which of the two it used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dask_gpurt.simulate.model import Cluster, Workload


class Bound(NamedTuple):
    """Seconds; `seconds` is the largest."""

    seconds: float
    path_seconds: float
    work_seconds: float
    network_seconds: float


def bound(workload: Workload, cluster: Cluster, seed: int) -> Bound:
    """The lower bound of the makespan, with the durations of this seed."""
    durations = workload.durations(seed)
    slowness = [cluster.slowness_of(i) for i in range(cluster.workers)]
    work = sum(durations.values()) / (sum(1 / s for s in slowness) * cluster.threads)
    path = _longest_path(workload, {k: d * min(slowness) for k, d in durations.items()}, 2 * cluster.message_seconds)
    return Bound(max(path, work, workload.network_seconds), path, work, workload.network_seconds)


def _longest_path(workload: Workload, durations: dict[Any, float], step_seconds: float) -> float:
    """Critical path; every task costs a message to its worker and one back."""
    tasks = workload.tasks
    left = {k: sum(1 for d in t.dependencies if d in tasks) for k, t in tasks.items()}
    dependents: dict[Any, list[Any]] = {}
    for key, task in tasks.items():
        for d in task.dependencies:
            if d in tasks:
                dependents.setdefault(d, []).append(key)
    ready = [k for k, n in left.items() if not n]
    ends = dict.fromkeys(tasks, 0.0)
    longest = 0.0
    while ready:
        key = ready.pop()
        end = ends[key] + durations[key] + step_seconds
        longest = max(longest, end)
        for other in dependents.get(key, ()):
            ends[other] = max(ends[other], end)
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    return longest
