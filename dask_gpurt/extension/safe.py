"""Put parts of the extension on a scheduler or a worker into safe mode, see `model.safe_mode`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dask_gpurt.extension.worker import on_worker
from dask_gpurt.model import safe_mode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distributed import Worker

    from dask_gpurt.extension.scheduler import GpurtScheduler


def on_scheduler(plugin: GpurtScheduler, parts: Iterable[str], on: bool) -> dict[str, float]:
    """Switch parts of a scheduler, and those of workers that join from now on.

    Returns
    -------
    Every part in safe mode now, with the Unix time since which it is.
    """
    assert plugin.scheduler is not None
    since = plugin.safe_since
    for part in parts:
        if on:
            since.setdefault(part, time.time())
        else:
            since.pop(part, None)
    safe_mode.keep(plugin.scheduler, since)
    if plugin.placement is not None and plugin.placement.engine is not None:
        plugin.placement.engine.safe = "placement" in since
    if plugin.shuffle is not None:
        plugin.shuffle.safe = "shuffle" in since
    plugin.send_to_new_workers()
    return dict(since)


def on_node(worker: Worker, parts: Iterable[str]) -> bool:
    """Put these parts of a worker into safe mode, and no others; whether it has the extension.

    What is installed there later follows as well.
    """
    safe_mode.keep(worker, parts)
    known = on_worker(worker)
    if known is not None:
        known.follow_safe_mode()
    return known is not None
