"""Which workers outputs may be given to, and which keep those that they own. On the scheduler.

`running` is for outputs that get an owner: when a run begins, and when outputs are reopened or moved. `leaves` says
which workers cannot keep what they own.

Theory of operation. Dask pins the outputs of a shuffle to any worker that is connected. A task that is pinned to a
worker which does not run waits for it, for ever if that worker is drained (``retire_workers(remove=False)``) or is held
back before its first task. So only workers that run get outputs.

A worker that stops running while it owns outputs is one of two kinds. One that is paused has too little memory for the
moment, and comes back: its outputs stay, since moving them sends all of their rows again. One that is closing
gracefully, or is in ``init``, will not begin their tasks: they are given to others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed import Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distributed.scheduler import WorkerState

#: what a worker is that begins no task, and is not expected to soon
LEAVING = frozenset({Status.closing_gracefully, Status.init})


def leaves(ws: WorkerState) -> bool:
    """Whether a worker that is there cannot keep the outputs that it owns."""
    return ws.status in LEAVING


def keepers(workers: Mapping[str, WorkerState]) -> set[str]:
    """Addresses of the workers that keep the outputs they own: all that do not leave, or all when every one does."""
    return {address for address, ws in workers.items() if not leaves(ws)} or set(workers)


def running(workers: Mapping[str, WorkerState], allowed: Iterable[str]) -> list[str]:
    """Those of the allowed addresses whose workers are there and run, in their order; all of them when none does."""
    names = list(allowed)
    return [a for a in names if a in workers and workers[a].status is Status.running] or names
