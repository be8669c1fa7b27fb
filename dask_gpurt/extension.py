"""The two plugins that put the engines into a cluster, and nothing else.

::

    GpurtScheduler  (SchedulerPlugin "gpurt")        GpurtWorker  (WorkerPlugin "gpurt", pushed by the former)
      ├── placement.PlacementPlugin                    ├── tiers.TierRuntime
      ├── shuffle.ShuffleTakeover                      └── hands the runtime's shard store to shuffle
      └── pushes GpurtWorker to every worker

Here, and only here, the engines meet: they never import each other, what they need of one another is a protocol in
`dask_gpurt.model` and is handed over below.

All or nothing: parts are installed in order; when one fails, those before it are taken out again (in reverse) before
the error leaves, unless ``gpurt.on-error: stock``, which leaves only the failing part to Dask. Installing twice does
nothing.

Who removes a worker's part: `teardown` of the worker plugin. Dask calls it on three occasions: a detach, a
re-registration under the same name, and the worker's own close. Only on the last is there nothing to give back: the
store dies with its worker, and draining it into Dask's would read every spilled byte for nobody.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import dask
import distributed
from dask.utils import format_bytes
from distributed import Scheduler, SchedulerPlugin, Worker, WorkerPlugin
from distributed.core import Status
from distributed.protocol.pickle import dumps

from dask_gpurt._version import __version__
from dask_gpurt.errors import GpurtError, InstallError
from dask_gpurt.observe import feed, prometheus
from dask_gpurt.observe.dashboard import late
from dask_gpurt.observe.journal import Journal
from dask_gpurt.placement.plugin import PlacementPlugin
from dask_gpurt.shuffle import stores
from dask_gpurt.shuffle.plugin import ShuffleTakeover, worker_statistics
from dask_gpurt.tiers.plugin import TierRuntime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dask_gpurt.config import Settings

#: name of both plugins, and of the entry in ``worker.metrics``
NAME = "gpurt"

scheduler_logger = logging.getLogger("distributed.scheduler.gpurt")
worker_logger = logging.getLogger("distributed.worker.gpurt")


class Parts:
    """What is installed in one process, in order, each with the way to take it out."""

    def __init__(self, settings: Settings, logger: logging.Logger) -> None:
        self.settings = settings
        self.logger = logger
        #: part name -> "on", "off" or "off: why"
        self.state: dict[str, str] = {}
        self._undo: list[tuple[str, Callable[[], Awaitable[None]]]] = []

    async def add(self, name: str, install: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]) -> None:
        """Install one part; `install` returns the way to take it out.

        Raises
        ------
        Exception
            Whatever the part raised; all parts installed so far were taken out. Not with ``on-error: stock``, where the
            part is left to Dask with a warning.
        """
        try:
            undo = await install()
        except Exception as e:
            self.state[name] = f"off: {e}"
            if self.settings.on_error == "stock":
                self.logger.warning("dask-gpurt: %s is left to stock Dask (gpurt.on-error: stock). %s", name, e)
                return
            await self.remove()
            raise
        self.state[name] = "on"
        self._undo.append((name, undo))

    async def remove(self) -> None:
        """Take everything out, last first.

        Raises
        ------
        InstallError
            A part refused to leave (a shuffle is running); it and those below it stay in.
        ExceptionGroup
            Parts failed while leaving; that did not keep the others in.
        """
        failed: list[Exception] = []
        while self._undo:
            name, undo = self._undo[-1]
            try:
                await undo()
                self.state[name] = "off"
            except InstallError:
                raise
            except Exception as e:
                self.logger.exception("dask-gpurt: removing %s failed", name)
                self.state[name] = f"off: removal failed: {e}"
                failed.append(e)
            self._undo.pop()
        if failed:
            raise ExceptionGroup("parts of dask-gpurt could not be removed cleanly", failed)


def _versions() -> str:
    return f"dask {dask.__version__}, distributed {distributed.__version__}"


class GpurtScheduler(SchedulerPlugin):
    """Puts placement and shuffle into a scheduler and sends `GpurtWorker` to its workers.

    Picklable before `start`: `dask_gpurt.attach` sends it from a client.
    """

    name = NAME

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.scheduler: Scheduler | None = None
        self.parts: Parts | None = None
        self.placement: PlacementPlugin | None = None
        self.shuffle: ShuffleTakeover | None = None
        self.journal: Journal | None = None
        #: "on", or why there are no plots
        self.plots = "off"

    async def start(self, scheduler: Scheduler) -> None:
        """Install. Also called by Dask itself after a preload has done it: the second call does nothing.

        Raises
        ------
        InstallError
            A part could not take over; the scheduler is as it was.
        """
        if self.scheduler is not None:
            return
        self.scheduler = scheduler
        self.journal = Journal(scheduler_logger)
        self.parts = Parts(self.settings, scheduler_logger)
        try:
            # The shuffle comes last: it asks the workers whether they can, and it is the one part that may refuse to
            # leave, which it has to do before anything else has left.
            await self.parts.add("workers", self._add_workers)
            if self.settings.placement.enabled:
                await self.parts.add("placement", self._add_placement)
            if self.settings.shuffle.enabled:
                await self.parts.add("shuffle", self._add_shuffle)
        except BaseException:
            self.scheduler = None
            raise
        self._show(scheduler)
        on = [name for name, state in self.parts.state.items() if state == "on"]
        scheduler_logger.info(
            "dask-gpurt %s: policy %s; took over %s; %s", __version__, self.settings.policy, ", ".join(on), _versions()
        )

    def _show(self, scheduler: Scheduler) -> None:
        """Figures for dashboard and Prometheus. Neither is worth an installation: what is missing is told."""
        # By weak reference: both keep what they are given as long as the scheduler, which would then keep itself.
        read = weakref.WeakMethod(self.figures)

        def figures() -> dict[str, Any]:
            method = read()
            return {} if method is None else method()

        prometheus.provide_scheduler(scheduler, figures)
        try:
            feed.provide(scheduler, figures)
            self.plots = late.install(scheduler)
        except Exception as e:
            self.plots = f"not available because {type(e).__name__}: {e}"
        if self.plots != "on":
            scheduler_logger.info("dask-gpurt: plots: %s", self.plots)

    def _hide(self, scheduler: Scheduler) -> None:
        feed.withdraw(scheduler)
        prometheus.withdraw(scheduler)
        self.plots = "off"

    async def close(self) -> None:
        """The scheduler closes."""
        if self.scheduler is not None:
            self._hide(self.scheduler)

    async def _add_placement(self) -> Callable[[], Awaitable[None]]:
        assert self.scheduler is not None
        assert self.journal is not None
        scheduler, plugin = self.scheduler, PlacementPlugin(self.settings.placement, sink=self.journal)
        await plugin.start(scheduler)
        scheduler.plugins[plugin.name] = plugin
        self.placement = plugin

        async def undo() -> None:
            scheduler.plugins.pop(plugin.name, None)
            plugin.uninstall()
            self.placement = None

        return undo

    async def _add_shuffle(self) -> Callable[[], Awaitable[None]]:
        assert self.scheduler is not None
        assert self.journal is not None
        takeover = await ShuffleTakeover.install(self.scheduler, self.settings.shuffle, sink=self.journal)
        self.shuffle = takeover

        async def undo() -> None:
            await takeover.uninstall()
            self.shuffle = None

        return undo

    async def _add_workers(self) -> Callable[[], Awaitable[None]]:
        assert self.scheduler is not None
        scheduler = self.scheduler
        replies = await scheduler.register_worker_plugin(
            None, dumps(GpurtWorker(self.settings)), name=NAME, idempotent=False
        )
        for address, reply in replies.items():
            # Not raised: stock serves that worker, and a cluster with one odd worker must still be usable.
            if isinstance(reply, dict) and reply.get("status") == "error":
                scheduler_logger.warning(
                    "dask-gpurt: worker %s could not install its part and runs stock: %r",
                    address,
                    reply.get("exception"),
                )

        async def undo() -> None:
            if NAME in scheduler.worker_plugins:
                await scheduler.unregister_worker_plugin(None, NAME)

        return undo

    async def uninstall(self) -> None:
        """Give the scheduler and its workers back to stock Dask. A second call does nothing."""
        if self.scheduler is None or self.parts is None:
            return
        scheduler = self.scheduler
        try:
            await self.parts.remove()
        except InstallError:
            raise  # refused: all of it is still in
        except ExceptionGroup:
            self._removed(scheduler)
            raise
        self._removed(scheduler)

    def _removed(self, scheduler: Scheduler) -> None:
        self._hide(scheduler)
        self.scheduler = None
        scheduler.plugins.pop(NAME, None)
        scheduler_logger.info("dask-gpurt %s: removed, Dask is as it was", __version__)

    def figures(self) -> dict[str, Any]:
        """What the engines tell of themselves; plain JSON values."""
        out: dict[str, Any] = {}
        if self.placement is not None:
            out["placement"] = self.placement.statistics()
        if self.shuffle is not None:
            out["shuffle"] = self.shuffle.statistics()
        return out

    def statistics(self) -> dict[str, Any]:
        """Plain JSON values; see `dask_gpurt.status`."""
        out: dict[str, Any] = {
            "version": __version__,
            "policy": self.settings.policy,
            "parts": dict(self.parts.state) if self.parts else {},
            "plots": self.plots,
            **self.figures(),
        }
        if self.journal is not None:
            out["events"] = self.journal.statistics()
        return out


#: what is installed on each worker of this process; a worker preload and the plugin sent by the scheduler share it
_on_worker: weakref.WeakKeyDictionary[Worker, WorkerParts] = weakref.WeakKeyDictionary()


class WorkerParts:
    """The engines on one worker."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker = worker
        self.settings = settings
        self.journal = Journal(worker_logger)
        self.parts = Parts(settings, worker_logger)
        self.runtime: TierRuntime | None = None

    @classmethod
    async def install(cls, worker: Worker, settings: Settings) -> WorkerParts:
        """Install on a worker, or give an installed one the new settings."""
        known = _on_worker.get(worker)
        if known is not None:
            known.settings = settings
            if known.runtime is not None:
                await TierRuntime.install(worker, settings.tiers, sink=known.journal)
            return known
        self = cls(worker, settings)
        await self.parts.add("tiers", self._add_tiers)
        _on_worker[worker] = self
        worker.metrics[NAME] = _heartbeat
        seen = weakref.ref(worker)
        prometheus.provide_worker(worker, lambda: {} if (w := seen()) is None else _heartbeat(w))
        worker_logger.info("dask-gpurt %s: %s; %s", __version__, self.summary(), _versions())
        return self

    async def _add_tiers(self) -> Callable[[], Awaitable[None]]:
        worker = self.worker
        runtime = await TierRuntime.install(worker, self.settings.tiers, sink=self.journal)
        self.runtime = runtime
        stores.provide(worker, runtime.shard_store)

        async def undo() -> None:
            stores.withdraw(worker)
            await runtime.uninstall()
            self.runtime = None

        return undo

    async def uninstall(self) -> None:
        """Give the worker back to stock Dask; every key stays readable throughout."""
        _on_worker.pop(self.worker, None)
        self.worker.metrics.pop(NAME, None)
        prometheus.withdraw(self.worker)
        await self.parts.remove()

    def summary(self) -> str:
        """What this worker has, in a few words."""
        if self.runtime is None:
            return "tiers are off"
        now = self.runtime.statistics()
        limit = now["host_limit_bytes"]
        host = "host memory" if limit is None else f"host memory up to {format_bytes(limit)}"
        return (
            f"tiers {host} -> disk" if now["enabled"] else "worker.data is left to Dask, shuffles are kept by the tiers"
        )

    def heartbeat(self) -> dict[str, Any]:
        """Few figures, and none that costs more than a look; `dask_gpurt.observe.metrics.WORKER` says what they are."""
        tiers = {} if self.runtime is None else self.runtime.heartbeat()
        return {**tiers, **stores.counters_of(self.worker).heartbeat()}

    def statistics(self) -> dict[str, Any]:
        """Plain JSON values; see `dask_gpurt.status`."""
        out: dict[str, Any] = {
            "version": __version__,
            "parts": dict(self.parts.state),
            "shuffle": worker_statistics(self.worker),
            "events": self.journal.statistics(),
        }
        if self.runtime is not None:
            out["tiers"] = self.runtime.statistics()
        return out


def on_worker(worker: Worker) -> WorkerParts | None:
    """What is installed on this worker, if anything."""
    return _on_worker.get(worker)


def _heartbeat(worker: Worker) -> dict[str, Any]:
    """The few figures that ride on every heartbeat into ``WorkerState.metrics["gpurt"]``."""
    parts = _on_worker.get(worker)
    return {} if parts is None else parts.heartbeat()


class GpurtWorker(WorkerPlugin):
    """Puts the tiers into a worker."""

    name = NAME

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    async def setup(self, worker: Worker) -> None:
        """Install, or adopt what a preload installed."""
        try:
            await WorkerParts.install(worker, self.settings)
        except GpurtError as e:
            # The plugin came from the scheduler: a worker that cannot follow must not take the cluster down. A worker
            # that was asked directly (--preload on the worker) ends instead, see preload.py.
            worker_logger.error("dask-gpurt: this worker runs stock. %s", e)
            raise

    async def teardown(self, worker: Worker) -> None:
        """Give the worker back, unless it is closing."""
        parts = _on_worker.get(worker)
        prometheus.withdraw(worker)
        if parts is None or worker.status in (Status.closing, Status.closing_gracefully, Status.closed):
            return
        await parts.uninstall()
