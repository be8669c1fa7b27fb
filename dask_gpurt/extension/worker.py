"""`WorkerParts`: the worker's half: the tiers, the store for shards of shuffles, and what copies of tasks need.

`GpurtWorker.teardown` removes it. Dask calls that on three occasions: a detach, a re-registration under the same
name, and the worker's own close. On the last there is nothing to give back: the store dies with its worker, and
draining it into Dask's would read every spilled byte for no use. What has to end then ends as well where a preload has
installed the parts and no scheduler has sent the plugin (`WorkerParts.end`).
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes
from distributed import Worker, WorkerPlugin
from distributed.core import Status

from dask_gpurt._version import __version__
from dask_gpurt.backends import cuda, nvtx
from dask_gpurt.backends.system import System
from dask_gpurt.doctor.feed import Feed
from dask_gpurt.doctor.gpus import Driver
from dask_gpurt.errors import GpurtError
from dask_gpurt.extension import interrupts
from dask_gpurt.extension.fetches import Fetches
from dask_gpurt.extension.parts import NAME, Parts, versions
from dask_gpurt.memory import frozen
from dask_gpurt.model import Tier, prompt, safe_mode
from dask_gpurt.observe.collect.worker import WorkerSlots
from dask_gpurt.observe.figures import prometheus
from dask_gpurt.observe.journal import Journal
from dask_gpurt.placement.takeover.worker_copies import WorkerCopies
from dask_gpurt.preflight.worker import Preflight
from dask_gpurt.quarantine.worker import Health
from dask_gpurt.shuffle.counters import corrupt_messages, counters_of, worker_statistics
from dask_gpurt.shuffle.rows import packed
from dask_gpurt.shuffle.transport.planes import PLANES
from dask_gpurt.shuffle.worker import shard_stores
from dask_gpurt.tiers.runtime import TierRuntime
from dask_gpurt.tiers.worker.residency import ResidenceSender

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

    from dask_gpurt.config import Settings

logger = logging.getLogger("distributed.worker.gpurt")

#: Where a worker keeps its `WorkerParts`; a worker preload and the plugin sent by the scheduler share it. An attribute
#: of the worker and not a table keyed by it: the parts refer to the worker, so a weak-keyed table would keep both.
ATTRIBUTE = "_gpurt"
_ENDING = (Status.closing, Status.closed)


class _CloseHook:
    """Among the worker's extensions, which are closed with it."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts

    async def close(self) -> None:
        await self._parts.end()


class WorkerParts:
    """The engines on one worker."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker = worker
        self.settings = settings
        self.journal = Journal(logger)
        self.parts = Parts(settings, logger)
        self.runtime: TierRuntime | None = None
        self.residence_sender: ResidenceSender | None = None
        #: keeps values of losing copies out; None: placement is off
        self.one_result: WorkerCopies | None = None
        #: spares fetches from workers that have left
        self.fetches: Fetches | None = None
        #: sends results early; None: placement is off
        self.results: prompt.PromptStream | None = None
        #: what its slots do; None: observation is off
        self.slots: WorkerSlots | None = None
        #: whether its tasks keep processors and the GPU busy; None: observation is off
        self.feed: Feed | None = None
        #: tells the scheduler of its node, and checks it
        self.preflight: Preflight | None = None
        #: what it has seen of its disk, its peers and its cards
        self.health: Health | None = None
        #: undoes `interrupts.ignore`
        self._heed_interrupts: Callable[[], None] = lambda: None

    @classmethod
    async def install(cls, worker: Worker, settings: Settings) -> WorkerParts:
        """Install on a worker, or give an installed one the new settings."""
        known = on_worker(worker)
        if known is not None:
            known.settings = settings
            # A preload has read the worker's own settings; the scheduler's count.
            if settings.transfers.verify and known.fetches is not None and not known.fetches.verifies:
                await known.parts.add("checksums", known._add_checksums)
            if known.runtime is not None:
                await TierRuntime.install(worker, settings.tiers, sink=known.journal)
            if known.fetches is not None:
                await known._add_what_is_wanted()
            known.follow_safe_mode()
            return known
        self = cls(worker, settings)
        if not self.parts.permitted():
            setattr(worker, ATTRIBUTE, self)
            return self
        # Before the tiers, so that it looks after their waits.
        await self.parts.add("fetches", self._add_fetches)
        await self.parts.add("tiers", self._add_tiers)
        await self._add_what_is_wanted()
        self._heed_interrupts = interrupts.ignore(worker)
        setattr(worker, ATTRIBUTE, self)
        worker.extensions[NAME] = _CloseHook(self)
        self.follow_safe_mode()
        # A new dict: a heartbeat may be waiting half-way through the old one, and an exception there closes the worker.
        worker.metrics = {**worker.metrics, NAME: _heartbeat}
        if settings.observe.enabled:
            seen = weakref.ref(worker)
            prometheus.provide_worker(worker, lambda: {} if (w := seen()) is None else _heartbeat(w))
        frozen.freeze(worker, len(worker.state.tasks))
        logger.info("dask-gpurt %s: %s; %s", __version__, self.summary(), versions())
        return self

    async def _add_what_is_wanted(self) -> None:
        settings = self.settings
        if settings.placement.enabled and self.one_result is None:
            await self.parts.add("copies", self._add_copies)
            await self.parts.add("messages", self._add_messages)
        # After the tiers, so that their waits are inside of what is measured.
        if settings.observe.enabled and self.slots is None:
            await self.parts.add("slots", self._add_slots, wanted=False)

    async def _add_tiers(self) -> Callable[[], Awaitable[None]]:
        worker = self.worker
        runtime = await TierRuntime.install(worker, self.settings.tiers, sink=self.journal, held=packed.shelf)
        self.runtime = runtime
        shard_stores.provide(worker, runtime.shard_store)

        async def undo() -> None:
            self.tell_residence(False)
            shard_stores.withdraw(worker)
            await runtime.uninstall()
            self.runtime = None

        return undo

    def follow_safe_mode(self) -> None:
        """Do what the worker's safe mode says, see `model.safe_mode`."""
        safe = safe_mode.parts_of(self.worker)
        if (way := PLANES.get(self.worker)) is not None:
            way.only_safe = "shuffle" in safe
        if self.runtime is not None:
            self.runtime.read_ahead("tiers" not in safe)

    def tell_residence(self, listens: bool) -> None:
        """The scheduler that this worker has now `listens` for tiers of keys, or does not."""
        if self.residence_sender is not None:
            self.residence_sender.stop()
            self.residence_sender = None
        runtime = self.runtime
        if listens and runtime is not None and runtime.store is not None:
            self.residence_sender = ResidenceSender(self.worker, runtime.store, runtime.engine.log, runtime.guard)
            self.residence_sender.start()

    def prove(self) -> None:
        """Begin to tell the scheduler of this node, and to check it; that scheduler has asked for it."""
        self.stop_proving()
        tiers = {} if self.runtime is None else self.runtime.statistics()
        folders = [disk["directory"] for disk in tiers.get("disks", ())] or [self.worker.local_directory]
        self.preflight = Preflight(self.worker, folders, cuda.echo if "device" in tiers else None)
        self.preflight.start()

    def stop_proving(self) -> None:
        """Stop that."""
        if self.preflight is not None:
            self.preflight.stop()
            self.preflight = None

    def watch(self, wanted: bool) -> None:
        """Tell the scheduler in heartbeats what is wrong with peers, disk and cards, or no more."""
        if self.health is not None:
            self.health.stop()
        self.health = Health(self._corrupt_from, self._disk_errors, self._slowed_clocks) if wanted else None
        if self.health is not None:
            self.health.start(self.worker.handlers)

    def _corrupt_from(self) -> Mapping[str, int]:
        """Peer -> messages of shuffles and fetches from it whose checksum was wrong."""
        messages = Counter(corrupt_messages(self.worker))
        return messages if self.fetches is None else messages + self.fetches.corrupt_from

    def _slowed_clocks(self) -> str:
        return "" if self.feed is None else self.feed.slowed()

    def _disk_errors(self) -> Mapping[str, int]:
        return {} if self.runtime is None else self.runtime.io_errors()

    async def _add_fetches(self) -> Callable[[], Awaitable[None]]:
        fetches = Fetches(self.worker, verify=self.settings.transfers.verify)
        fetches.install()
        self.fetches = fetches

        async def undo() -> None:
            fetches.uninstall()
            self.fetches = None

        return undo

    async def _add_checksums(self) -> Callable[[], Awaitable[None]]:
        # A part of its own: what wraps others' wrappers has to leave before them.
        fetches = self.fetches
        assert fetches is not None
        fetches.verify()

        async def undo() -> None:
            fetches.stop_verifying()

        return undo

    async def _add_copies(self) -> Callable[[], Awaitable[None]]:
        one_result = WorkerCopies(self.worker)
        one_result.install()
        self.one_result = one_result

        async def undo() -> None:
            one_result.uninstall()
            self.one_result = None

        return undo

    async def _add_messages(self) -> Callable[[], Awaitable[None]]:
        self.results = prompt.results(self.worker)

        async def undo() -> None:
            if self.results is not None:
                self.results.uninstall()
            self.results = None

        return undo

    async def _add_slots(self) -> Callable[[], Awaitable[None]]:
        slots = WorkerSlots(self.worker, nvtx.find())
        slots.install()
        feed = Feed(self.worker, slots.seconds, Driver(), System())
        feed.start()
        self.slots, self.feed = slots, feed

        async def undo() -> None:
            await feed.stop()
            slots.uninstall()
            self.slots = self.feed = None

        return undo

    async def end(self) -> None:
        """Stop what would go on for as long as the process, and keep the worker with its data. Idempotent."""
        prometheus.withdraw(self.worker)
        frozen.thaw(self.worker)
        self.stop_proving()
        self.watch(False)
        if self.feed is not None:
            await self.feed.stop()

    async def uninstall(self) -> None:
        """Give the worker back to stock Dask; every key stays readable throughout."""
        await self.end()
        self._heed_interrupts()
        vars(self.worker).pop(ATTRIBUTE, None)
        if self.worker.status not in _ENDING:  # else it may be at work on them, and they must not change
            self.worker.extensions.pop(NAME, None)
        self.worker.metrics = {k: v for k, v in self.worker.metrics.items() if k != NAME}
        try:
            if (way := PLANES.get(self.worker)) is not None:
                # Its sockets and threads. No shuffle of ours runs any more: the scheduler's part would not have left.
                await way.stop()
        finally:
            await self.parts.remove()  # nothing finds them any more

    def summary(self) -> str:
        """What this worker has, in a few words."""
        if self.runtime is None:
            return "tiers are off"
        now = self.runtime.statistics()
        limit = now["host_limit_bytes"]
        host = "host memory" if limit is None else f"host memory up to {format_bytes(limit)}"
        if now["enabled"]:
            return f"tiers {host} -> disk"
        return f"tiers for shuffles only, {host} -> disk ({now['left_alone']})"

    def heartbeat(self) -> dict[str, Any]:
        """Few figures, and none that costs more than a look. `observe.figures.table` says what they are."""
        out: dict[str, Any] = counters_of(self.worker).heartbeat()
        if self.slots is not None:
            out |= self.slots.heartbeat()
        if self.runtime is not None:
            # `protocols` is no figure: it tells the scheduler which messages this worker understands.
            out |= {**self.runtime.heartbeat(), **self.runtime.protocols()}
        if self.health is not None:
            out |= self.health.heartbeat()
        return out

    def statistics(self) -> dict[str, Any]:
        """Plain JSON values; see `dask_gpurt.status`."""
        out: dict[str, Any] = {
            "version": __version__,
            "parts": dict(self.parts.state),
            "shuffle": worker_statistics(self.worker),
            "events": self.journal.statistics(),
            "safe": sorted(safe_mode.parts_of(self.worker)),
        }
        if self.fetches is not None:
            out["fetches"] = self.fetches.statistics()
        if self.one_result is not None:
            out["copies"] = self.one_result.statistics()
        if self.results is not None:
            out["messages_early"] = self.results.early
        if self.slots is not None:
            out["slots"] = self.slots.statistics()
        if self.runtime is not None:
            out["tiers"] = self.runtime.statistics()
        if self.residence_sender is not None:
            out["residence"] = self.residence_sender.statistics()
        return out

    def residence(self, keys: Iterable[Any]) -> dict[Any, dict[str, Any]]:
        """Where this worker has its copies of keys: ``{key: {"tier", "nbytes", "disk_bytes"}}``; others are left out.

        ``tier``: ``memory``, ``disk``, ``object`` or ``lost`` (no readable copy is left), for device values also
        ``device`` and ``pinned``; ``nbytes`` is what the value takes where it is computed with, ``disk_bytes`` what its
        copy below does, None without one. Nothing is read.
        """
        store = None if self.runtime is None else self.runtime.store
        if store is None:
            return stock_residence(self.worker, keys)
        out: dict[Any, dict[str, Any]] = {}
        rest = []
        for key in keys:
            entry = store.entry(key)
            if entry is None:
                rest.append(key)  # an actor, or given back already while the extension leaves
                continue
            place = store.place_of(key)
            if place is None:
                out[key] = {"tier": "lost", "nbytes": entry.nbytes, "disk_bytes": None}
                continue
            memory = place.here and place.tier is Tier.HOST
            tier = "memory" if memory else place.tier.name.lower()
            out[key] = {"tier": tier, "nbytes": place.nbytes, "disk_bytes": place.below_bytes}
        return {**out, **stock_residence(self.worker, rest)}


def stock_residence(worker: Worker, keys: Iterable[Any]) -> dict[Any, dict[str, Any]]:
    """`WorkerParts.residence` for what Dask's own store has. It knows the size of a spilled value only in memory."""
    disk = getattr(worker.data, "disk", ())  # of a plain dict there is none
    out: dict[Any, dict[str, Any]] = {}
    for key in keys:
        if key in worker.data or key in worker.state.actors:
            ts = worker.state.tasks.get(key)
            tier = "disk" if key in disk else "memory"
            out[key] = {"tier": tier, "nbytes": None if ts is None else ts.nbytes, "disk_bytes": None}
    return out


def on_worker(worker: Worker) -> WorkerParts | None:
    """What is installed on this worker, if anything."""
    parts: WorkerParts | None = getattr(worker, ATTRIBUTE, None)
    return parts


def _heartbeat(worker: Worker) -> dict[str, Any]:
    """The few figures that ride on every heartbeat into ``WorkerState.metrics["gpurt"]``."""
    parts = on_worker(worker)
    return {} if parts is None else parts.heartbeat()


class GpurtWorker(WorkerPlugin):
    """Puts the tiers into a worker."""

    name = NAME

    def __init__(
        self,
        settings: Settings,
        *,
        residence: bool = False,
        safe: Collection[str] = (),
        preflight: bool = False,
        quarantine: bool = False,
    ) -> None:
        self.settings = settings
        #: parts that a new worker has in safe mode
        self.safe = frozenset(safe)
        #: the scheduler that sends this listens for tiers of keys; see `model.residence`
        self.residence = residence
        #: and for what workers are and found; see `preflight.worker`
        self.preflight = preflight
        #: and for what they see of disks, peers and cards; see `quarantine.worker`
        self.quarantine = quarantine

    async def setup(self, worker: Worker) -> None:
        """Install, or adopt what a preload installed."""
        if self.safe:
            safe_mode.keep(worker, self.safe)
        try:
            parts = await WorkerParts.install(worker, self.settings)
        except GpurtError as e:
            # The plugin came from the scheduler: a worker that cannot follow must not take the cluster down. A worker
            # that was asked directly (--preload on the worker) ends instead, see preload.py.
            logger.error("dask-gpurt: this worker runs stock. %s", e)
            raise
        try:
            parts.tell_residence(self.residence)
            if parts.fetches is not None:
                # The scheduler that sent this has the same settings, and listens.
                parts.fetches.reports = self.settings.transfers.verify
            if self.preflight:
                parts.prove()
            parts.watch(self.quarantine)
        except Exception:
            await self.teardown(worker)  # else it says that it runs stock, and a detach finds nothing to take out
            raise
        if worker.status in _ENDING:  # it has closed meanwhile, and nothing else ends what came after that
            await parts.uninstall()

    async def teardown(self, worker: Worker) -> None:
        """Give the worker back, unless it is closing."""
        parts = on_worker(worker)
        if parts is None:
            return
        await parts.end()
        if worker.status not in _ENDING:
            await parts.uninstall()
