"""`ShuffleTakeover`: our shuffle on one scheduler, and for which shuffles it is used.

`ShuffleTakeover.install` replaces the scheduler plugin named ``shuffle``, `ShuffleTakeover.uninstall` puts it back.

Theory of operation. The new plugin (`plugin`) is a subclass of Dask's. Which spec the workers get is asked of `choose`.
Dask's worker plugin stays; it builds the run that the spec says. A shuffle is decided once per run, for all workers
alike, and from what is known before it starts:

- array rechunks keep Dask's run, which only lets go of shards that were sent (`rechunk`);
- a meta that is not a pandas frame keeps Dask's spec, but for device frames (`backends.frames`) where they are allowed;
- so does a shuffle on a cluster with a worker that has not said that it can run ours (no package, another version,
  another distributed): two formats in one run would lose rows or fail.

Outputs are restricted to their workers when the barrier is reached, where Dask lets each of them run once in any place
first (`ShuffleTakeover.pin`).

An exception in our code leaves the decision to Dask, and is counted (`model.circuit_breaker`). After too many of them
new shuffles are left to Dask altogether; active runs end as they are. A worker that joins *during* a run and lacks the
package cannot take part and fails its tasks of that run. That case is left, since it needs a mixed cluster.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends.frames import provider_of, reason_for_stock
from dask_gpurt.errors import InstallError
from dask_gpurt.model import Event, Sink, null_sink
from dask_gpurt.model.circuit_breaker import Guard, Part
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.probe import LOST_CONNECTION, NO_ANSWER, probe_workers
from dask_gpurt.shuffle.scheduler import output_tasks
from dask_gpurt.shuffle.scheduler.plugin import GpurtShufflePlugin
from dask_gpurt.shuffle.scheduler.skew import SkewReport
from dask_gpurt.shuffle.spec import GpurtShuffleSpec
from dask_gpurt.shuffle.worker.rechunk import ReleasingRechunkSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distributed.scheduler import Scheduler, TaskState

    from dask_gpurt.config import ShuffleSettings

logger = logging.getLogger("distributed.scheduler.gpurt")
#: failures within so many seconds after which new shuffles are left to Dask: a query makes few calls here
FAILURES, FAILURES_SECONDS = 10, 600.0
#: that are counted one by one. Some name a column or a number, and each is a label of a metric: a scheduler of weeks
#: must not have ever more of them
MOST_REASONS = 20
#: before a worker that did not answer is asked again: at first, and at most, in seconds
PAUSE_SECONDS, MOST_PAUSE_SECONDS = 1.0, 60.0
#: outputs pinned in one turn of the scheduler's loop, about 5 ms
_PIN_TASKS = 500
#: the calls of workers that distributed's plugin answers
_HANDLERS = ("shuffle_barrier", "shuffle_get", "shuffle_get_or_create", "shuffle_restrict_task")

#: the part of our code whose failures are counted, in events and statistics
_PART = "scheduler"


class ShuffleTakeover:
    """Our shuffle on one scheduler. Make it with `install`.

    Examples
    --------
    >>> takeover = await ShuffleTakeover.install(scheduler, settings.shuffle)  # doctest: +SKIP
    """

    def __init__(self, scheduler: Scheduler, settings: ShuffleSettings, sink: Sink) -> None:
        self.scheduler = scheduler
        self.settings = settings
        #: worker address -> "" when it can run our spec, else why not; absent: not known yet
        self.able: dict[str, str] = {}
        #: workers whose connection ended when they were first asked, of which nothing was logged yet
        self._unnamed: set[str] = set()
        #: new shuffles are Dask's, and outputs stay where they were planned, see `model.safe_mode`
        self.safe = False
        #: called with tasks whose priority was changed after their graph had come
        self.moved: Callable[[Iterable[TaskState]], None] = lambda tasks: None
        self._sink = sink
        self._stock: seam.ShuffleSchedulerPlugin | None = None
        self._plugin: GpurtShufflePlugin | None = None
        #: runs given our spec
        self._runs = 0
        #: runs left to stock, by reason
        self._fallbacks: collections.Counter[str] = collections.Counter()
        #: outputs sent to their worker at once
        self._pinned = 0
        #: what is said of large outputs
        self.skew = SkewReport(sink, self.failed)
        self._guard = Guard("shuffle", logger, sink=sink, limit=FAILURES, window_seconds=FAILURES_SECONDS)

    @classmethod
    async def install(
        cls, scheduler: Scheduler, settings: ShuffleSettings, *, sink: Sink = null_sink
    ) -> ShuffleTakeover:
        """Take over the plugin named ``shuffle``.

        Before the scheduler starts (a preload) or while it runs without an active shuffle.

        Raises
        ------
        InstallError
            Disabled by settings, no stock plugin there, a shuffle is active, or (`SeamMismatch`) a distributed that
            this was not written for. Nothing was changed then.
        """
        if not settings.enabled:
            raise InstallError("gpurt.shuffle.enabled is false, must be true to install the shuffle")
        seam.check()
        stock = scheduler.plugins.get("shuffle")
        if type(stock) is not seam.ShuffleSchedulerPlugin:
            raise InstallError(
                f"the scheduler plugin 'shuffle' is {type(stock).__name__}, must be distributed's "
                "ShuffleSchedulerPlugin. Remedy: uninstall what replaced it, or set gpurt.shuffle.enabled: false"
            )
        _refuse_active(stock, "install")
        self = cls(scheduler, settings, sink)
        self._stock, self._plugin = swap_plugin(scheduler, lambda: GpurtShufflePlugin(scheduler, self))
        if silent := await self._ask(list(scheduler.workers)):
            seam.in_background(scheduler, self._ask_again, silent)
        sink(Event("shuffle.installed", "the plugin named shuffle was taken over", {"workers": len(self.able)}))
        return self

    async def uninstall(self) -> None:
        """Put stock's plugin back. No error when it is back already.

        Raises
        ------
        InstallError
            A shuffle is active.
        """
        plugin = self._plugin
        if plugin is None or self.scheduler.plugins.get("shuffle") is not plugin:
            return
        plugin.holder.let_go()
        _refuse_active(plugin, "uninstall")
        swap_plugin(self.scheduler, lambda: self._stock)
        self._sink(Event("shuffle.uninstalled", "stock's plugin named shuffle was put back"))

    async def ask(self, worker: str) -> None:
        """Ask a worker whether it can run our spec, until it answers or leaves."""
        if silent := await self._ask([worker]):
            await self._ask_again(silent)

    async def _ask_again(self, silent: list[str]) -> None:
        """Ask these until they answer or leave: they may be busy, or stopped. Until then all shuffles are Dask's."""
        pause = PAUSE_SECONDS
        while silent:
            await asyncio.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_SECONDS)
            if self.scheduler.plugins.get("shuffle") is not self._plugin:  # uninstalled
                return
            # Absent: it has left. Another reason or none: it came again, and was asked anew.
            silent = await self._ask([a for a in silent if self.able.get(a, "").startswith(NO_ANSWER)])

    async def _ask(self, workers: list[str]) -> list[str]:
        """Note what workers answer. Returns those that do not.

        A lost connection is logged when the worker is still there the next time: else its process has ended, of which
        Dask's log says all.
        """
        if not workers:
            return []
        try:
            answers = await probe_workers(self.scheduler, workers, self.settings.codec)
        except Exception as e:
            self.failed()
            answers = dict.fromkeys(workers, repr(e))
        silent = []
        self._unnamed &= self.able.keys()  # without those that have left
        for address, reason in answers.items():
            if address not in self.scheduler.workers:
                continue
            before = self.able.get(address)
            self.able[address] = reason
            if reason.startswith(NO_ANSWER):
                silent.append(address)
            if reason.startswith(LOST_CONNECTION) and before is None:
                self._unnamed.add(address)
            elif reason and (before is None or address in self._unnamed):
                self._unnamed.discard(address)
                logger.warning("worker %s cannot run gpurt's shuffle, Dask's is used: %s", address, reason)
            elif before and not reason:
                logger.info("worker %s can run gpurt's shuffle", address)
        return silent

    def choose(self, spec: seam.ShuffleSpec) -> seam.ShuffleSpec:
        """The spec for a new run: ours, or the given one. Never raises."""
        try:
            if type(spec) is seam.ArrayRechunkSpec:
                self._fallbacks["rechunk"] += 1
                ours = not (self.safe or self._unable() or self._part.retired)
                return ReleasingRechunkSpec.of(spec) if ours else spec
            reason = self._reason_for_stock(spec)
            if not reason:
                order = output_tasks.order_of_outputs(self.scheduler, spec.id)
                frames = provider_of(type(spec.meta))
                join = None if self._plugin is None or frames else self._plugin.joins.side(spec.id)
                ours = GpurtShuffleSpec.of(spec, self.settings, order, frames, join)
                self._runs += 1
                return ours
        except Exception:
            self.failed()
            reason = "error"
        message = f"shuffle {spec.id} is left to stock Dask: {reason}"
        self._sink(Event("shuffle.fallback", message, {"shuffle": str(spec.id), "reason": reason}))
        counted = self._fallbacks
        counted[reason if reason in counted or len(counted) < MOST_REASONS else "other reasons"] += 1
        return spec

    async def pin(self, shuffle_id: seam.ShuffleId, run_id: int, plugin: GpurtShufflePlugin) -> None:
        """Restrict the outputs of a run to their workers before they run. Never raises.

        Stock lets every output run once wherever it is sent, only to say where it belongs, and again there. A join's
        are restricted when the barriers of both sides have passed: until then outputs may be bound to others. What is
        not plain to see (fused with others, a side that is Dask's own run) is left to that.
        """
        try:
            state = plugin.active_shuffles.get(shuffle_id)
            if state is None or state.run_id != run_id or type(state.run_spec.spec) is not GpurtShuffleSpec:
                return
            outputs = output_tasks.unpack_tasks(self.scheduler, shuffle_id)
            for first in range(0, len(outputs), _PIN_TASKS):
                for ts, part in outputs[first : first + _PIN_TASKS]:
                    # The loop was let go in between: the run may be over and the task with it.
                    if plugin.active_shuffles.get(shuffle_id) is not state:
                        return
                    if self.scheduler.tasks.get(ts.key) is not ts or seam.is_restricted(ts):
                        continue
                    if (owner := plugin.runs.owner(ts, part)) is not None:
                        seam.restrict(plugin, ts, owner)
                        self._pinned += 1
                await asyncio.sleep(0)
        except Exception:
            self.failed()

    def _reason_for_stock(self, spec: seam.ShuffleSpec) -> str:
        import pandas as pd

        if self.safe:
            return "safe mode"
        if self._part.retired:
            return "switched off"
        if type(spec) is not seam.DataFrameShuffleSpec:
            return f"its spec is {type(spec).__module__}.{type(spec).__name__}"
        if difference := seam.pandas_differs():
            return difference
        enabled = self.settings.device_frames
        if type(spec.meta) is not pd.DataFrame and (why := reason_for_stock(spec.meta, spec.column, enabled)):
            return why
        if output_tasks.is_taken_twice(self.scheduler, spec):
            # Ours hands an output out once, and would be restarted for each further task. Dask's reads its file again.
            return "several tasks take one output"
        unable = self._unable()
        return f"{unable} workers have not said that they can" if unable else ""

    def no_join_filters(self) -> bool:
        """Whether joins have no filter: not asked for, in safe mode, or after too many errors."""
        return self.settings.join_filter != "auto" or self.safe or bool(self._part.retired)

    def _unable(self) -> int:
        """Workers that have not said that they can run a spec of ours."""
        return sum(self.able.get(address, "?") != "" for address in self.scheduler.workers)

    @property
    def _part(self) -> Part:
        """Failures of our code, and why it is switched off."""
        return self._guard.part(_PART)

    def failed(self) -> None:
        """Count the exception that is being handled. Too many switch the shuffle off, see `model.circuit_breaker`."""
        self._guard.failed(_PART)
        logger.warning("gpurt shuffle: left to stock Dask after an error")

    def counts(self) -> dict[str, Any]:
        """``runs`` and ``fallbacks`` of `statistics`, in a microsecond."""
        return {"runs": self._runs, "fallbacks": dict(self._fallbacks)}

    def statistics(self) -> dict[str, Any]:
        """Counts since the installation, and why the shuffle is ``retired`` (by part); plain JSON values."""
        plugin, part = self._plugin, self._part
        return {
            "installed": self.scheduler.plugins.get("shuffle") is plugin,
            **self.counts(),
            "pinned": self._pinned,
            "recovery": {} if plugin is None else plugin.recovery_statistics(),
            "skew": self.skew.statistics(),
            "join_filters": {} if plugin is None else plugin.joins.statistics(),
            "late_binding": {} if plugin is None else plugin.binder.statistics(),
            "errors": sum(part.fallbacks.values()),
            "last_error": part.last_traceback or "",
            "retired": {} if part.retired is None else {part.name: part.retired},
            "active": 0 if plugin is None else len(plugin.active_shuffles),
            "workers_able": sum(reason == "" for reason in self.able.values()),
            "workers_unable": {address: reason for address, reason in self.able.items() if reason},
        }


def swap_plugin(
    scheduler: Scheduler, make: Callable[[], seam.ShuffleSchedulerPlugin]
) -> tuple[seam.ShuffleSchedulerPlugin, seam.ShuffleSchedulerPlugin]:
    """Replace the scheduler plugin named ``shuffle``; returns (what was there, what is there now).

    The plugin sits in three places: `plugins` (transitions), `extensions` (heartbeats of the workers) and `handlers`
    (the workers' calls; those besides distributed's are what a plugin has as ``calls``). All three change or none does.
    """
    before = scheduler.plugins["shuffle"]
    names = list(scheduler.plugins)
    handlers = dict(scheduler.handlers)
    extension = scheduler.extensions.get("shuffle")
    scheduler.remove_plugin("shuffle")
    try:
        after = make()
        if scheduler.plugins.get("shuffle") is not after:
            scheduler.add_plugin(after, name="shuffle")
        # In its place: a new graph is in order before other plugins look at it.
        for name in names[names.index("shuffle") + 1 :]:
            scheduler.plugins[name] = scheduler.plugins.pop(name)
        for name in _HANDLERS:
            scheduler.handlers[name] = getattr(after, name.removeprefix("shuffle_"))
        for name in getattr(before, "calls", ()):
            scheduler.handlers.pop(name, None)
        scheduler.handlers.update(getattr(after, "calls", {}))
        if extension is not None:
            scheduler.extensions["shuffle"] = after
    except BaseException:
        scheduler.plugins["shuffle"] = before
        scheduler.handlers.clear()
        scheduler.handlers.update(handlers)
        if extension is not None:
            scheduler.extensions["shuffle"] = extension
        raise
    return before, after


def _refuse_active(plugin: seam.ShuffleSchedulerPlugin, what: str) -> None:
    if plugin.active_shuffles:
        raise InstallError(
            f"cannot {what} while {len(plugin.active_shuffles)} shuffles are active "
            f"({', '.join(map(str, list(plugin.active_shuffles)[:3]))}). Remedy: wait until they are done"
        )
