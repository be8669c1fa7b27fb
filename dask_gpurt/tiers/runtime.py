"""`TierRuntime`: engine, store, shard store and watch of one worker, installed and taken out as one.

A worker plugin or a preload calls ``await TierRuntime.install(worker, settings)`` on the worker's event loop, at its
start or while it works, and ``await runtime.uninstall()`` to give everything back. When the worker closes, the files go
without being read.

``worker.data`` is taken over only where it is distributed's own `SpillBuffer`, or dask-cuda's mapping where the device
tier can have its place (`device.coexistence`). Any other mapping is left alone, and only the shards of shuffles are
kept in the tiers. That is no error: it is logged once and shown as ``left_alone`` in `TierRuntime.statistics`, and why
there is no device tier, where one was asked for, as ``device_off``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import traceback
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes
from distributed.core import Status

from dask_gpurt.backends import cuda, dask_cuda
from dask_gpurt.model.circuit_breaker import Guard
from dask_gpurt.model.events import Event, Sink, null_sink
from dask_gpurt.tiers.device import coexistence
from dask_gpurt.tiers.device.coexistence import Terms
from dask_gpurt.tiers.engine.engine import CLOSE_SECONDS, Engine
from dask_gpurt.tiers.limits import Limits, limits_of
from dask_gpurt.tiers.statistics import Figures
from dask_gpurt.tiers.storage.stack import Below
from dask_gpurt.tiers.stores.shard_store import TierShardStore
from dask_gpurt.tiers.threads import call_apart, run_apart
from dask_gpurt.tiers.worker import spill_buffer
from dask_gpurt.tiers.worker.memory_watch import MemoryWatch
from dask_gpurt.tiers.worker.seam import WorkerSeam, pending_plugins

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from dask.typing import Key
    from distributed.worker import Worker

    from dask_gpurt.config import TierSettings
    from dask_gpurt.model.device_memory import HeldOnDevice
    from dask_gpurt.tiers.device.setup import DeviceMemory
    from dask_gpurt.tiers.shared.worker import SharedCopies
    from dask_gpurt.tiers.stores.task_store import TieredStore

logger = logging.getLogger("distributed.worker.gpurt")

_runtimes: weakref.WeakKeyDictionary[Worker, TierRuntime] = weakref.WeakKeyDictionary()
_locks: weakref.WeakKeyDictionary[Worker, asyncio.Lock] = weakref.WeakKeyDictionary()
_ENDING = {Status.closing, Status.closed, Status.failed}


class _CloseHook:
    """Among the worker's extensions, which are closed with it: so our files go even if no plugin is torn down."""

    def __init__(self, runtime: TierRuntime) -> None:
        self._runtime = runtime

    async def close(self) -> None:
        self._runtime.closing = True
        await self._runtime.uninstall()


class TierRuntime:
    """The tiers of one worker. Made by `install` only."""

    def __init__(
        self,
        worker: Worker,
        settings: TierSettings,
        limits: Limits,
        below: Below,
        device: DeviceMemory | None,
        terms: Terms,
        undo: Callable[[], None],
        sink: Sink,
        held: HeldOnDevice | None,
    ) -> None:
        self._worker = worker
        self._settings = settings
        self._limits = limits
        self._below = below
        self._disk = below.disk
        #: switches parts off that fail too often
        self.guard = Guard("tiers", logger, sink=sink)
        self._seam: WorkerSeam | None = None
        self._read_ahead = True
        #: why worker.data is left alone; empty when it is not
        self._left_alone = ""
        self._engine = Engine(below.tier, budget_bytes=limits.budget_bytes, sink=sink)
        self._held = held
        self._device_memory: DeviceMemory | None = None
        if device is not None:
            self._use(device)
        #: reports to the scheduler what of this worker can be had without it
        self._shared: SharedCopies | None = None
        self._engine.counters.listener = self._tell_metric
        self._shards = TierShardStore(self._engine)
        self._watch = MemoryWatch(worker, self._engine, limits)
        #: puts dask-cuda's mapping back, if it had one and our place is empty
        self._undo = undo
        device_off = str(terms.decision) if terms.wanted else ""
        self._figures = Figures(self._engine, below, device, device_off, self._shards, self._watch, self.guard)
        if device_off:
            level = logging.INFO if terms.setup is None else logging.WARNING
            logger.log(level, "No device tier: %s", device_off)
        self._terms = terms
        #: the device tier on its way, where something began to use a device after our start
        self._coming: asyncio.Task[None] | None = None
        self._running = True
        #: it is being taken out: no device tier comes any more
        self._leaves = False
        #: the worker closes, whatever its status is: a scheduler that cannot retire it sets that to running again
        self.closing = False

    # ------------------------------------------------------------------ life

    @classmethod
    async def install(
        cls, worker: Worker, settings: TierSettings, *, sink: Sink = null_sink, held: HeldOnDevice | None = None
    ) -> TierRuntime:
        """Start the tiers of a worker; on one that has them, apply the new settings and return the running ones.

        With ``settings.enabled`` False, or where ``worker.data`` is not distributed's own, it is left alone and only
        the shard store is served.

        Parameters
        ----------
        held
            Device memory beside the values of tasks that leaves, too, when the device is full.

        Raises
        ------
        InstallError
            The folder cannot be written. Nothing was changed.
        SeamMismatch
            This distributed is not one we know. Nothing was changed.
        """
        async with _locks.setdefault(worker, asyncio.Lock()):
            runtime = _runtimes.get(worker)
            if runtime is not None and runtime._running:
                await runtime._apply(settings)
                return runtime
            terms = await coexistence.terms_of(worker, settings, pending_plugins(worker))
            undo = _take_the_place_of_dask_cuda(worker, terms)
            left = _left_alone(worker.memory_manager.data, settings)
            if left is not None and terms.decision.works:
                terms = dataclasses.replace(terms, decision=coexistence.Decision(left.reason, left.remedy))
            limits = limits_of(worker, settings, shards_only=left is not None)
            try:
                below = await Below.open(worker, settings, limits, sink)
            except BaseException:
                undo()
                raise
            try:
                device = None
                if terms.decision.works:
                    device = await call_apart(_open_device, worker, settings, limits.budget_bytes, terms)
            except BaseException:
                await below.abandon()
                undo()
                raise
            runtime = cls(worker, settings, limits, below, device, terms, undo, sink, held)
            try:
                if below.lease is not None:
                    below.lease.start()
                runtime._warn_about_filesystem(sink)
                runtime._take_over_or_leave(settings)
            except BaseException:
                await runtime._stop()
                undo()
                raise
            worker.extensions["gpurt-tiers"] = _CloseHook(runtime)
            _runtimes[worker] = runtime
            return runtime

    def _use(self, device: DeviceMemory) -> None:
        device.space.below.append(self._below.cascade)
        device.space.held = self._held
        self._device_memory = device

    async def uninstall(self) -> None:
        """Give everything back and delete all files. Chunks of running shuffles are lost. Idempotent.

        On a worker that is closing, nothing is read back: its data ends with it.
        """
        async with _locks.setdefault(self._worker, asyncio.Lock()):
            if not self._running:
                return
            self._leaves = True
            if self._coming is not None:  # before the store is given back
                await asyncio.wait([self._coming], timeout=CLOSE_SECONDS)  # its driver may hang
            if self._shared is not None:
                if self._ends():
                    # What is there may be adopted by others; a scheduler that listens sweeps.
                    assert self._below.objects is not None
                    self._below.objects.leave_objects = self._shared.heard
                else:
                    self._shared.uninstall()
            if self._seam is not None:
                if self._ends():
                    self._seam.abandon()
                else:
                    self._watch.stop()  # distributed's own takes over with the first key given back
                    await self._seam.give_back()
                    self._seam = None
            if not self._ends():
                self._undo()
            await self._stop()
            if _runtimes.get(self._worker) is self:
                del _runtimes[self._worker]
            hook = self._worker.extensions.get("gpurt-tiers")
            # While the worker closes it iterates over its extensions; they must not change then.
            if isinstance(hook, _CloseHook) and not self._ends():
                del self._worker.extensions["gpurt-tiers"]

    def _ends(self) -> bool:
        return self.closing or self._worker.status in _ENDING

    async def _stop(self) -> None:
        self._running = False
        self._watch.stop()
        await self._below.before_close()
        if self._device_memory is not None:
            await self._engine.settle()
            await self._close_device(self._device_memory)
        await self._engine.close()
        await self._below.after_close()
        await self._watch.end()

    async def _close_device(self, device: DeviceMemory) -> None:
        """Whatever the driver says: one whose device has failed must not keep a worker from closing, nor its files."""
        error = ""

        def close() -> None:
            nonlocal error
            try:
                device.close()
            except Exception:
                error = traceback.format_exc()

        if not await run_apart(close, CLOSE_SECONDS):
            logger.warning("the device tier did not end within %g s of closing. It is left to itself", CLOSE_SECONDS)
        elif error:
            self.guard.failed("device", detail=error)

    async def _apply(self, settings: TierSettings) -> None:
        if settings.directories != self._settings.directories:
            logger.warning(
                "gpurt.tiers.directory cannot change while the worker runs; it stays %s", self._disk.directory
            )
        if (settings.direct_io, settings.codec) != (self._settings.direct_io, self._settings.codec):
            logger.warning("gpurt.tiers.direct-io and gpurt.tiers.codec stay as they were until the worker restarts")
        if (settings.object_store, settings.object_use) != (self._settings.object_store, self._settings.object_use):
            logger.warning("gpurt.tiers.object-store and object-use cannot change while the worker runs; they stay")
        if settings.device != self._settings.device:
            logger.warning("gpurt.tiers.device stays %s until the worker restarts", self._settings.device)
            settings = dataclasses.replace(settings, device=self._settings.device)
        left = _left_alone(self._data(), settings)
        if left is not None and self._seam is not None:
            # Before the limits: with the lower budget of shards alone, values would go to our disk on their way out.
            if self._shared is not None:
                self._shared.uninstall()
                self._shared = None
            await self._seam.give_back()
            self._seam = None
            self._undo()
        limits = limits_of(self._worker, settings, shards_only=left is not None)
        self._settings, self._limits = settings, limits
        self._disk.limit_bytes = limits.disk_limit_bytes
        self._disk.reserve_bytes = limits.disk_reserve_bytes
        self._engine.budget_bytes = limits.budget_bytes
        self._watch.set_limits(limits)
        if self._seam is not None:
            self._seam.prefetch.share = settings.prefetch
        self._take_over_or_leave(settings)
        self._engine.balance()

    def read_ahead(self, on: bool) -> None:
        """Whether values may be read ahead of their use, as far as the settings permit."""
        self._read_ahead = on
        if self._seam is not None:
            self._seam.prefetch.paused = not on

    def _data(self) -> MutableMapping[Key, Any]:
        """What was ``worker.data`` without us."""
        return self._worker.memory_manager.data if self._seam is None else self._seam.original

    def _take_over_or_leave(self, settings: TierSettings) -> None:
        """Take ``worker.data`` over unless that is done or it has to be left alone; say so once."""
        left = _left_alone(self._data(), settings)
        before, self._left_alone = self._left_alone, "" if left is None else left.reason
        if left is None:
            if self._seam is not None:
                return
            seam = WorkerSeam(self._worker, self._engine, self.guard, prefetch_share=settings.prefetch)
            seam.prefetch.paused = not self._read_ahead
            seam.turns.on_short = self._watch.trim
            if self._device_memory is not None:
                seam.store.use_device(self._device_memory.space)  # before it adopts what is here
            seam.take_over()
            self._seam = seam
            if self._device_memory is not None:
                seam.serve_device(self._device_memory)
            objects, lease = self._below.objects, self._below.lease
            if objects is not None and lease is not None and objects.bucket.shared:
                from dask_gpurt.tiers.shared.worker import SharedCopies

                self._shared = SharedCopies(self._worker, self._engine, seam.store, objects, lease, self.guard)
                self._shared.install()
        elif self._left_alone == before:
            return
        limits = self._limits
        logger.log(
            logging.INFO if left is None else left.level,
            "Memory tiers: %s. Host budget %s, disk %s%s",
            "worker.data taken over"
            if left is None
            else f"shuffles only. {left.reason}. To have the tiers: {left.remedy}",
            _said(limits.budget_bytes),
            self._disk.directory,
            "" if limits.disk_limit_bytes is None else f" up to {format_bytes(limits.disk_limit_bytes)}",
        )

    def _look_for_device(self) -> None:
        """Have a device tier where something has begun to use a device; with every heartbeat until then."""
        if self._terms.later and self._seam is not None and cuda.has_context():
            self._terms = dataclasses.replace(self._terms, later=False)  # once
            self._coming = asyncio.create_task(self._add_device())

    async def _add_device(self) -> None:
        try:
            terms = await coexistence.terms_of(self._worker, self._settings, ())
            device = None
            if terms.decision.works and not self._leaves:
                budget = self._limits.budget_bytes
                device = await call_apart(_open_device, self._worker, self._settings, budget, terms)
        except Exception as e:  # the libraries that it opens raise what they like; stock has no tier either
            self.guard.failed("device")
            terms, device = Terms(coexistence.Decision(f"{type(e).__name__}: {e}")), None
        if device is not None and self._leaves:
            await self._close_device(device)
            return
        self._terms = terms
        self._figures = dataclasses.replace(self._figures, device=device, device_off=str(terms.decision))
        if device is None:
            logger.warning("No device tier: %s", terms.decision)
            return
        self._use(device)
        if self._seam is not None:
            self._seam.store.use_device(device.space)
            self._seam.serve_device(device)

    def _warn_about_filesystem(self, sink: Sink) -> None:
        for message, kind in self._disk.warnings():
            logger.warning("%s", message)
            sink(Event("tiers.filesystem", message, {"filesystem": kind}))

    def _tell_metric(self, label: str, value: float, unit: str) -> None:
        # Writes belong to no task; stock files those of its monitor under the same heading.
        self._worker.digest_metric(("memory-monitor", label, unit), value)

    # ------------------------------------------------------------------ what others use

    @property
    def shard_store(self) -> TierShardStore:
        """Keeps the chunks of shuffles (`dask_gpurt.model.ShardStore`)."""
        return self._shards

    @property
    def store(self) -> TieredStore | None:
        """What stands in for ``worker.data``; None when that was left to Dask."""
        return self._seam.store if self._seam is not None else None

    @property
    def engine(self) -> Engine:
        """For tests and diagnostics."""
        return self._engine

    def heartbeat(self) -> dict[str, float | int | None]:
        """Return what rides on every heartbeat: flat, and none of it costs more than a look."""
        try:
            if self._device_memory is not None:
                self._device_memory.look()
            else:
                self._look_for_device()
        except Exception:  # the libraries that it looks at raise what they like; figures go on
            self.guard.failed("device")
        return self._figures.heartbeat(self._seam)

    def statistics(self) -> dict[str, Any]:
        """Return all figures as plain JSON. It looks at each entry: for heartbeats there is `heartbeat`."""
        return self._figures.statistics(self._seam, self._shared, self._left_alone)

    def io_errors(self) -> Counter[str]:
        """How many reads and writes have failed, by `error_kind`; ``checksum``: copies that were read back wrong."""
        counters = self.engine.counters
        return counters.read_errors + counters.write_errors + Counter(checksum=counters.checksum_failures)

    def protocols(self) -> dict[str, Any]:
        """What a scheduler that sends next uses has to see in ``metrics["gpurt"]``."""
        out = dict(self._seam.hints.heartbeat()) if self._seam is not None else {}
        if self._shared is not None:
            out.update(self._shared.heartbeat())
        return out


def _open_device(worker: Worker, settings: TierSettings, budget_bytes: int | None, terms: Terms) -> DeviceMemory:
    # Late, as other parts that few workers need: importing them all at a start takes as long as a tenth of a worker's.
    from dask_gpurt.tiers.device.setup import DeviceMemory

    return DeviceMemory.open(worker, settings, budget_bytes, terms)


def _left_alone(data: MutableMapping[Key, Any], settings: TierSettings) -> spill_buffer.LeftAlone | None:
    """Return why these data are not taken over; None when they are."""
    if not settings.enabled:
        return spill_buffer.LeftAlone("gpurt.tiers.enabled is false", "set it to true", logging.INFO)
    return spill_buffer.left_alone(data)


def _take_the_place_of_dask_cuda(worker: Worker, terms: Terms) -> Callable[[], None]:
    """On ``dask cuda worker``, where our device tier can be had; returns what undoes it."""
    data = worker.memory_manager.data
    if terms.decision.works and dask_cuda.is_store(data):
        undo = spill_buffer.stand_in(worker)
        logger.info("Memory tiers: in the place of dask-cuda's %s, which was empty", type(data).__name__)
        return undo
    return lambda: None


def _said(nbytes: int | None) -> str:
    return "unlimited" if nbytes is None else str(format_bytes(nbytes))
