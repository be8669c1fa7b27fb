"""Which data plane a worker has. Workers are keyed weakly: many live and die in one process in tests."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.worker import shard_stores

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.config import ShuffleSettings
    from dask_gpurt.shuffle.transport.plane import Plane

_of_worker: weakref.WeakKeyDictionary[Any, Plane] = weakref.WeakKeyDictionary()


def plane_of(worker: Any, plugin: Any, settings: ShuffleSettings, count: Callable[..., None]) -> Plane:
    """The data plane of a worker, made on first use and stopped with the worker's shuffle plugin."""
    # Late: this module is imported for `worker_statistics` on workers that have no run.
    from dask_gpurt.shuffle.transport.plane import Plane

    plane = _of_worker.get(worker)
    if plane is None or plane.closed or plane.settings != settings:
        if plane is not None and not plane.closed:
            seam.in_background(worker, plane.stop)
        theirs = plugin.memory_limiter_comms.limit
        limit = settings.receive_budget if theirs is None else min(theirs, settings.receive_budget)
        plane = _of_worker[worker] = Plane(worker, settings, count, limit)
        seam.on_teardown(plugin, plane.stop)
    return plane


def statistics_of(worker: Any) -> dict[str, Any] | None:
    """`Plane.statistics` of a worker that has one."""
    plane = _of_worker.get(worker)
    return None if plane is None else plane.statistics()


def worker_statistics(worker: Any) -> dict[str, Any]:
    """What the shuffle did on one worker: `shard_stores.Counters` and `Plane.statistics` as plain JSON."""
    return {**shard_stores.counters_of(worker).as_dict(), "transport": statistics_of(worker)}
