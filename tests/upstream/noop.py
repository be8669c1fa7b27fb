"""A preload that only registers plugins which do nothing.

It is the control of the comparison: a run with it shows what *any* extension that registers a scheduler and a worker
plugin changes in the upstream suites. Each further difference of the real extension is its own doing.
"""

from __future__ import annotations

from typing import Any

from distributed import Scheduler, Worker
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin


class NoopScheduler(SchedulerPlugin):
    """Inherits every hook unchanged."""

    name = "upstream-noop"


class NoopWorker(WorkerPlugin):
    """Inherits every hook unchanged; ``setup`` and ``teardown`` must exist."""

    name = "upstream-noop"

    def setup(self, worker: Any) -> None:
        """Does nothing, by design."""

    def teardown(self, worker: Any) -> None:
        """Does nothing, by design."""


async def dask_setup(server: Any) -> None:
    """Registers one plugin per server, like the real extension."""
    if isinstance(server, Scheduler):
        server.add_plugin(NoopScheduler(), name=NoopScheduler.name)
    elif isinstance(server, Worker):
        await server.plugin_add(NoopWorker(), name=NoopWorker.name)
