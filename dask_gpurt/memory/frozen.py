"""Spare Python's garbage collector the objects that a process has before its first task.

`freeze` keeps them out of all collections, `thaw` puts them back. A full collection looks at every object that can be
in a cycle. A worker that has imported what it needs has 165,000 of them, a scheduler 185,000: functions, classes and
tables of modules, which never die. Looking at them takes 0.1 to 0.25 s, and the event loop waits. Thousands of small
tasks cause a few full collections per graph: they were a fifth of the processor time of a scheduler and its client.

What is frozen and becomes garbage in a cycle stays until `thaw`. Hence a process is frozen only while it holds nothing
of its user's: before the first task, and while it is small, as it may be the user's own (`LocalCluster`).

Rejected: freezing again whenever a worker is idle, for modules that tasks import. Results that a client holds, and
globals of its modules, would be frozen too. Rejected: higher thresholds, which leave every collection as slow.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING
from weakref import WeakSet

import psutil

if TYPE_CHECKING:
    from distributed.core import Server

#: A process that takes more bytes may hold data already: it is not frozen. After its imports a worker takes 0.2 GB.
SMALL_BYTES = 1 << 30

#: servers of this process that asked for it
_owners: WeakSet[Server] = WeakSet()


def freeze(owner: Server, tasks: int) -> None:
    """Keep what is there out of all collections until the last owner has called `thaw`.

    Parameters
    ----------
    owner
        A scheduler or worker of this process.
    tasks
        How many it has. What they refer to in cycles would stay as long: with any, nothing is done. Nor is it where
        the process is large, the collector is off, or somebody has frozen objects already.
    """
    if not _owners and (tasks or gc.get_freeze_count() or not gc.isenabled() or _rss() > SMALL_BYTES):
        return
    if not _owners:
        gc.freeze()
    _owners.add(owner)


def thaw(owner: Server) -> None:
    """Let the collector see all objects again, unless another server of this process wants it otherwise."""
    if owner in _owners:
        _owners.discard(owner)
        if not _owners:
            gc.unfreeze()


def _rss() -> int:
    nbytes: int = psutil.Process().memory_info().rss
    return nbytes
