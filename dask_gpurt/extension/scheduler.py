"""`GpurtScheduler`: the scheduler's half: installs the engines there and sends `GpurtWorker` to the workers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import traceback
from typing import TYPE_CHECKING, Any

from distributed import Scheduler, SchedulerPlugin

from dask_gpurt._version import __version__
from dask_gpurt.errors import InstallError, StoreError
from dask_gpurt.extension import delivery, shown
from dask_gpurt.extension.corrupt import CorruptFetches
from dask_gpurt.extension.parts import NAME, Parts, versions
from dask_gpurt.extension.worker import GpurtWorker
from dask_gpurt.memory import frozen
from dask_gpurt.model import residence
from dask_gpurt.model.no_hook import ignored
from dask_gpurt.observe.collect.scheduler import LedgerPlugin
from dask_gpurt.observe.journal import Journal
from dask_gpurt.observe.output_file import replaceable
from dask_gpurt.observe.runs.recorder import RunRecorder
from dask_gpurt.observe.trace.recorder import TraceRecorder
from dask_gpurt.placement.decide import policy
from dask_gpurt.placement.plugin import PlacementPlugin
from dask_gpurt.placement.tables.disk_residency import DiskResidency
from dask_gpurt.preflight.gate import Gate
from dask_gpurt.preflight.members import Mode
from dask_gpurt.quarantine.scheduler import Mode as QuarantineMode
from dask_gpurt.quarantine.scheduler import Quarantine
from dask_gpurt.shuffle.scheduler.takeover import ShuffleTakeover
from dask_gpurt.tiers.hints.scheduler import NextUsePlugin
from dask_gpurt.tiers.shared.scheduler import SharedCopiesPlugin
from dask_gpurt.tiers.storage.object.client import Bucket
from dask_gpurt.tiers.storage.object.leases import worker_prefix
from dask_gpurt.tiers.storage.object.tier import ObjectTier

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable

    from distributed.scheduler import TaskState

    from dask_gpurt.config import Settings

logger = logging.getLogger("distributed.scheduler.gpurt")


class GpurtScheduler(SchedulerPlugin):
    """Puts placement and shuffle into a scheduler and sends `GpurtWorker` to its workers.

    Picklable before `start`: `dask_gpurt.attach` sends it from a client.
    """

    name = NAME
    transition = ignored

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.scheduler: Scheduler | None = None
        self.parts: Parts | None = None
        self.next_use: NextUsePlugin | None = None
        self.shared_copies: SharedCopiesPlugin | None = None
        self.gate: Gate | None = None
        self.quarantine: Quarantine | None = None
        self.placement: PlacementPlugin | None = None
        #: what workers tell of their tiers; here because they may speak before placement is there
        self.residence = DiskResidency()
        #: of their messages, those that could not be used
        self.news_exceptions = 0
        self.news_traceback = ""
        self.shuffle: ShuffleTakeover | None = None
        self.trace: TraceRecorder | None = None
        #: what becomes of fetches that fail their checksums; None: nothing is checked
        self.corrupt: CorruptFetches | None = None
        self.journal: Journal | None = None
        self.ledger: LedgerPlugin | None = None
        #: the newest runs; None without the ledger
        self.runs: RunRecorder | None = None
        #: part in safe mode -> Unix time since which; see `extension.safe`
        self.safe_since: dict[str, float] = {}
        #: "on", or why there are no plots, and no figures for Prometheus
        self.plots = self.metrics = "off"

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
        self.journal = Journal(logger)
        self.parts = Parts(self.settings, logger)
        try:
            if not self.parts.permitted():
                return
            if self.settings.observe.enabled:
                await self.parts.add("ledger", self._add_ledger, wanted=False)
            # Before the workers' part, which speaks to it. Where it only warns it is not worth an installation.
            holds = Mode(self.settings.preflight).holds
            await self.parts.add("preflight", self._add_gate, wanted=holds)
            if QuarantineMode(self.settings.quarantine) is not QuarantineMode.OFF:
                await self.parts.add("quarantine", self._add_quarantine, wanted=False)
            await self.parts.add("workers", self._add_workers)
            # After the workers' part, hence removed before it: no hint is sent to a worker without it.
            if self.settings.tiers.enabled:
                await self.parts.add("next-use", self._add_next_use)
            if self.settings.tiers.enabled and self.settings.tiers.object_store is not None:
                await self.parts.add("shared-copies", self._add_shared_copies)
            if self.settings.placement.enabled:
                await self.parts.add("placement", self._add_placement)
            if self.settings.trace.path is not None:
                await self.parts.add("trace", self._add_trace)
            # The shuffle comes last: it asks the workers whether they can, and it is the one part that may refuse to
            # leave, which it has to do before anything else has left.
            if self.settings.shuffle.enabled and "shuffle" not in scheduler.plugins:
                # As with `extensions={}`: a scheduler that was started without has no shuffles to take over.
                self.parts.state["shuffle"] = "off: this scheduler was started without distributed's shuffle plugin"
                logger.warning("dask-gpurt: shuffle is %s", self.parts.state["shuffle"])
            elif self.settings.shuffle.enabled:
                await self.parts.add("shuffle", self._add_shuffle)
        except BaseException:
            self.scheduler = None
            raise
        if self.settings.observe.enabled:
            self.plots, self.metrics = shown.show(self.figures, scheduler)
        frozen.freeze(scheduler, len(scheduler.tasks))
        on = [name for name, state in self.parts.state.items() if state == "on"]
        logger.info(
            "dask-gpurt %s: policy %s; took over %s; %s", __version__, self.settings.policy, ", ".join(on), versions()
        )

    async def _add_ledger(self) -> Callable[[], Awaitable[None]]:
        assert self.scheduler is not None
        plugin = LedgerPlugin(self._planning_seconds)
        plugin.attach(self.scheduler)
        self.ledger = plugin
        assert plugin.ledger is not None
        facts = {
            "version": __version__,
            "policy": self.settings.policy,
            "prices": self.settings.observe.cost_per_hour,
        }
        self.runs = plugin.ledger.observer = RunRecorder(self.scheduler, plugin.ledger, self._counts, facts)

        async def undo() -> None:
            plugin.detach()
            self.ledger = self.runs = None

        return undo

    def _counts(self) -> dict[str, Any]:
        """What is counted of single runs: cheap, as it is read with each graph."""
        out: dict[str, Any] = {}
        if self.placement is not None:
            out["placement"] = self.placement.counts()
        if self.shuffle is not None:
            out["shuffle"] = self.shuffle.counts()
        return out

    def _planning_seconds(self) -> float:
        """Spent in decisions of ours so far."""
        engine = None if self.placement is None else self.placement.engine
        return 0.0 if engine is None else engine.budget.total_seconds

    async def _add_gate(self) -> Callable[[], Awaitable[None]]:
        assert self.journal is not None
        gate = Gate(Mode(self.settings.preflight), self.settings.preflight_imports, sink=self.journal)
        return await self._plug("gate", gate)

    async def _add_quarantine(self) -> Callable[[], Awaitable[None]]:
        assert self.journal is not None
        mode = QuarantineMode(self.settings.quarantine)
        return await self._plug("quarantine", Quarantine(mode, self._slowness, sink=self.journal))

    def _slowness(self) -> dict[str, float]:
        """How many times the usual time tasks take on each worker, where that is learned."""
        return {} if self.placement is None else self.placement.slowness()

    async def _add_next_use(self) -> Callable[[], Awaitable[None]]:
        assert self.journal is not None
        return await self._plug("next_use", NextUsePlugin(sink=self.journal))

    async def _add_shared_copies(self) -> Callable[[], Awaitable[None]]:
        assert self.scheduler is not None
        assert self.journal is not None
        url = self.settings.tiers.object_store
        assert url is not None
        bucket = Bucket(url, timeout_seconds=self.settings.tiers.object_timeout)
        await asyncio.to_thread(_require_answer, bucket, worker_prefix(self.scheduler.address))
        return await self._plug("shared_copies", SharedCopiesPlugin(bucket, sink=self.journal))

    async def _plug(
        self, attribute: str, plugin: NextUsePlugin | SharedCopiesPlugin | Gate | Quarantine
    ) -> Callable[[], Awaitable[None]]:
        """Start a plugin of the scheduler, and keep it under this name."""
        assert self.scheduler is not None
        scheduler = self.scheduler
        await plugin.start(scheduler)
        scheduler.plugins[plugin.name] = plugin
        setattr(self, attribute, plugin)

        async def undo() -> None:
            scheduler.plugins.pop(plugin.name, None)
            plugin.stop()
            setattr(self, attribute, None)

        return undo

    def _hide(self, scheduler: Scheduler) -> None:
        shown.hide(scheduler)
        self.plots = self.metrics = "off"

    async def close(self) -> None:
        """The scheduler closes."""
        if self.scheduler is not None:
            frozen.thaw(self.scheduler)
            self._hide(self.scheduler)

    async def _add_placement(self) -> Callable[[], Awaitable[None]]:
        assert self.scheduler is not None
        assert self.journal is not None
        scheduler = self.scheduler
        plugin = PlacementPlugin(self.settings.placement, policy=policy.load(self.settings.policy), sink=self.journal)
        await plugin.start(scheduler)
        if plugin.engine is not None:
            plugin.engine.tables.residence = self.residence  # one table for all who decide
        scheduler.plugins[plugin.name] = plugin
        self.placement = plugin

        async def undo() -> None:
            scheduler.plugins.pop(plugin.name, None)
            plugin.uninstall()
            self.placement = None

        return undo

    def _heard(
        self,
        worker: str = "",
        disk: Any = (),
        back: Any = (),
        pinned: Any = (),
        pinned_rate: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Take in where a worker keeps its keys. Raises nothing: an exception here would end the worker's stream."""
        if self.scheduler is None or worker not in self.scheduler.workers:
            return
        try:
            self.residence.heard(worker, disk, back, pinned, pinned_rate)
        except Exception:
            self.residence.clear()
            self.news_exceptions += 1
            self.news_traceback = traceback.format_exc()
            if self.news_exceptions in (1, 10, 100, 1000):
                logger.exception("dask-gpurt: news of %s about its tiers could not be used: %r, %r", worker, disk, back)

    async def _add_shuffle(self) -> Callable[[], Awaitable[None]]:
        assert self.scheduler is not None
        assert self.journal is not None
        takeover = await ShuffleTakeover.install(self.scheduler, self.settings.shuffle, sink=self.journal)
        takeover.moved = self._moved
        self.shuffle = takeover

        async def undo() -> None:
            await takeover.uninstall()
            self.shuffle = None

        return undo

    def _moved(self, tasks: Iterable[TaskState]) -> None:
        """The shuffle has put roots of a graph in another order: placement follows."""
        if self.placement is not None and self.placement.engine is not None:
            self.placement.engine.groups.moved(tasks)

    async def _add_trace(self) -> Callable[[], Awaitable[None]]:
        assert self.scheduler is not None
        assert self.settings.trace.path is not None
        scheduler = self.scheduler
        recorder = TraceRecorder(self.settings.trace.path, decision=self.decision)
        try:
            replaceable(recorder.path)  # of a folder or a device it would make a sibling
            recorder.open(scheduler, dataclasses.asdict(self.settings))
        except (OSError, ValueError) as e:
            raise InstallError(
                f"gpurt.trace.path is {self.settings.trace.path!r}, where no new file can be made: {e}. Remedy: a path "
                "in a directory that exists and that the scheduler may write to"
            ) from e
        if recorder.path != self.settings.trace.path:
            logger.info("dask-gpurt: %s exists; recording into %s", self.settings.trace.path, recorder.path)
        scheduler.add_plugin(recorder, name=recorder.name)
        self.trace = recorder

        async def undo() -> None:
            scheduler.plugins.pop(recorder.name, None)
            writer = recorder.stop()
            if writer is not None:
                await asyncio.to_thread(writer.close, recorder.last)
            self.trace = None

        return undo

    def decision(self, key: Hashable) -> tuple[str, str | None, float | None] | None:
        """The newest decision about a task, for a trace: its kind, the worker chosen, the seconds predicted."""
        return None if self.placement is None else self.placement.decision(key)

    async def _add_workers(self) -> Callable[[], Awaitable[None]]:
        assert self.scheduler is not None
        scheduler = self.scheduler
        corrupt = CorruptFetches(scheduler)
        if self.settings.transfers.verify:
            corrupt.start()
            self.corrupt = corrupt
        if self.settings.placement.enabled:
            # Before any worker can speak.
            scheduler.stream_handlers[residence.OP] = self._heard
        await delivery.send(scheduler, NAME, self._packed())

        async def undo() -> None:
            self.corrupt = None
            await delivery.take_back(scheduler, NAME)
            corrupt.stop()
            # It stays known for ever: an unknown op would remove the worker that sent it, with its data. Messages may
            # be under way, and a worker that could not be given back sends them for as long as it lives.
            if scheduler.stream_handlers.get(residence.OP) == self._heard:
                scheduler.stream_handlers[residence.OP] = ignored

        return undo

    def _packed(self) -> bytes:
        """The workers' half, as it travels."""
        half = GpurtWorker(
            self.settings,
            residence=self.settings.placement.enabled,
            safe=self.safe_since,
            preflight=self.gate is not None,
            quarantine=self.quarantine is not None,
        )
        return delivery.pack(half, __version__)

    def send_to_new_workers(self) -> None:
        """Have workers that join from now on get their half as it is now; those that are here keep theirs."""
        if self.scheduler is not None and NAME in self.scheduler.worker_plugins:
            self.scheduler.worker_plugins[NAME] = self._packed()

    def log_event(self, topic: str, msg: Any) -> None:
        """Dask calls this with each event. Workers that come later and run stock say so in one."""
        if topic == delivery.REFUSED and isinstance(msg, dict):
            worker, why = str(msg.get("worker")), str(msg.get("why"))
            logger.warning("dask-gpurt: worker %s runs stock. %s", worker, why)
            if self.gate is not None:
                self.gate.refused(worker, why, absent=bool(msg.get("absent")))

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """Dask calls this when a worker leaves."""
        if self.corrupt is not None:
            self.corrupt.forget(worker)

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
        frozen.thaw(scheduler)
        self._hide(scheduler)
        self.scheduler = None
        scheduler.plugins.pop(NAME, None)
        logger.info("dask-gpurt %s: removed, Dask is as it was", __version__)

    def figures(self) -> dict[str, Any]:
        """What the engines tell of themselves; plain JSON values."""
        parts: dict[str, Any] = {
            "preflight": self.gate,
            "quarantine": self.quarantine,
            "next_use": self.next_use,
            "shared_copies": self.shared_copies,
            "placement": self.placement,
            "shuffle": self.shuffle,
            "ledger": self.ledger,
            "runs": self.runs,
            "trace": self.trace,
        }
        news = {"exceptions": self.news_exceptions, "last_traceback": self.news_traceback}
        return {"tier_news": news} | {name: part.statistics() for name, part in parts.items() if part is not None}

    def statistics(self) -> dict[str, Any]:
        """Plain JSON values; see `dask_gpurt.status`."""
        out: dict[str, Any] = {
            "version": __version__,
            "policy": self.settings.policy,
            "parts": dict(self.parts.state) if self.parts else {},
            "plots": self.plots,
            "metrics": self.metrics,
            "refused": shown.refused(self.scheduler),
            "safe": dict(self.safe_since),
            **self.figures(),
        }
        for name, part in (("corrupt_fetches", self.corrupt), ("events", self.journal)):
            if part is not None:
                out[name] = part.statistics()
        return out


def _require_answer(bucket: Bucket, prefix: str) -> None:
    """Raise unless a test object can be written and read back. Blocks.

    Each worker looks for itself as well, but a worker that cannot have its tiers runs stock, and so would all of them.
    """
    attempts, bucket.attempts = bucket.attempts, 1  # at a start somebody waits
    try:
        ObjectTier(bucket, prefix).probe()
    except (OSError, StoreError) as e:
        raise InstallError(
            f"gpurt.tiers.object-store is {bucket.url!r}, where the scheduler cannot write a test object: {e}. "
            "Remedy: correct the URL, give credentials in the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...), "
            "or set it to null"
        ) from e
    finally:
        bucket.attempts = attempts
