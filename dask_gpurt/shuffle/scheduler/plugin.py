"""The scheduler's side: plain ``shuffle``, ``merge``, ``set_index``, ... become our runs without client code.

Theory of operation. The scheduler plugin named ``shuffle`` is replaced by a subclass that overrides one decision,
`_retrieve_spec`: which spec the workers get. Stock's worker plugin stays; it builds whatever run the spec says. A
shuffle is decided once per run, for all workers alike, and from what is known before it starts:

- array rechunks keep stock's run, which only lets go of shards that were sent (`rechunk`);
- a meta that is not a pandas frame keeps stock's spec;
- so does a shuffle on a cluster with a worker that has not said that it can run ours (no package, another version,
  another distributed): two formats in one run would lose rows or fail.

Outputs are restricted to their workers when the barrier is reached, where stock lets each of them run once in any place
first (`ShuffleTakeover.pin`).

Whatever else goes wrong in our decision keeps stock's spec too, and is counted. A worker that joins *during* a run and
lacks the package can not take part and fails its tasks of that run; that case is left, since it needs a mixed cluster.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import traceback
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import InstallError
from dask_gpurt.model import Event, Sink, null_sink
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.counters import counters_of
from dask_gpurt.shuffle.protocol.histogram import add_up, skewed
from dask_gpurt.shuffle.scheduler.co_shuffles import joined
from dask_gpurt.shuffle.scheduler.recovery import Amender
from dask_gpurt.shuffle.spec import GpurtShuffleSpec
from dask_gpurt.shuffle.transport.plane import statistics_of
from dask_gpurt.shuffle.worker.rechunk import ReleasingRechunkSpec
from dask_gpurt.shuffle.worker.scheduler_calls import AGAIN

if TYPE_CHECKING:
    from dask_gpurt.config import ShuffleSettings

logger = logging.getLogger("distributed.scheduler.gpurt")
#: outputs pinned in one turn of the scheduler's loop, about 5 ms
_PIN_TASKS = 500


class _SchedulerPlugin(seam.ShuffleSchedulerPlugin):
    """Stock's plugin with our choice of spec."""

    def __init__(self, scheduler: Any, takeover: ShuffleTakeover) -> None:
        self.takeover = takeover
        self.amender = Amender(scheduler, self, takeover.failed, lambda address: takeover.able.get(address) == "")
        super().__init__(scheduler)

    def _retrieve_spec(self, shuffle_id: Any) -> Any:
        spec = self.takeover.choose(super()._retrieve_spec(shuffle_id))
        if type(spec) is GpurtShuffleSpec:
            try:
                return self.amender.for_the_rest(spec)
            except Exception:
                self.takeover.failed()
        return spec

    async def barrier(self, id: Any, run_id: int, consistent: bool) -> str | None:
        ours = self.amender.ours(self.active_shuffles.get(id))
        others = joined(self, id) if ours and not consistent else []
        if not consistent or not ours:
            await super().barrier(id, run_id, consistent)
            # What the tasks of a join have taken of the other side is gone as well. Were that found out one side after
            # the other, each would cost the other what was taken of it meanwhile, and they would take turns at it.
            for other in others:
                self._restart_shuffle(other, self.scheduler, stimulus_id=f"gpurt-joined-{other}-{run_id}")
            return None
        if not await self.amender.barrier(id, run_id):
            return AGAIN
        if (state := self.active_shuffles.get(id)) is not None and state.run_id == run_id:
            self.amender.holder.begin(id, state)
        await self.takeover.pin(id, run_id, self)
        if (state := self.active_shuffles.get(id)) is not None:
            # Not awaited: outputs need not wait for what is said about them.
            self.scheduler._ongoing_background_tasks.call_soon(self.takeover.look_at_skew, state, self.amender)
        return None

    def restrict_task(self, id: Any, run_id: int, key: Any, worker: str) -> Any:
        if worker == AGAIN:
            return {"status": "OK", "gpurt": self.amender.place(self.active_shuffles.get(id), run_id, key, True)}
        if self.amender.place(self.active_shuffles.get(id), run_id, key):
            return {"status": "OK"}
        return super().restrict_task(id, run_id, key, worker)

    def _restart_recommendations(self, id: Any) -> Any:
        recommendations = super()._restart_recommendations(id)
        if any(map(self.amender.ours, self._shuffles.get(id, ()))):
            try:
                self.amender.keep_outputs(id, recommendations)
            except Exception:
                self.takeover.failed()
        return recommendations

    def _restart_shuffle(self, id: Any, scheduler: Any, *, stimulus_id: str) -> None:
        self.amender.restarting.add(id)
        try:
            super()._restart_shuffle(id, scheduler, stimulus_id=stimulus_id)
        finally:
            self.amender.restarting.discard(id)

    def transition(self, key: Any, start: Any, finish: Any, *args: Any, stimulus_id: str, **kwargs: Any) -> None:
        if not self._shuffles:  # no shuffle since the last one was forgotten: every other task comes by here
            return
        if finish == "released" and self.active_shuffles:
            self.amender.released(key, stimulus_id)
        elif finish == "memory" and start == "processing" and self.active_shuffles:
            self.amender.binder.ended(key, kwargs.get("startstops") or ())
            self.amender.made(key)
        of = seam.id_from_key(key) if finish == "released" and start in ("processing", "queued", "no-worker") else None
        # A barrier that has not passed and will run again, since the run goes on: its worker was lost, or transfers run
        # again. A cancelled query forgets it next, and then the run ends.
        if of and of not in self.amender.restarting and self.amender.ours(self.active_shuffles.get(of)):
            return
        super().transition(key, start, finish, *args, stimulus_id=stimulus_id, **kwargs)

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        # As inherited, but a run whose outputs are all made keeps nobody: what a worker has of them, leaves with it.
        busy: set[str] = set()
        for name, state in self.active_shuffles.items():
            if not self.amender.holder.over(name, state):
                busy |= state.participating_workers
        return [ws for ws in workers if ws.address not in busy]

    def add_worker(self, scheduler: Any, worker: str) -> None:
        # Not awaited here: the worker answers calls only after its registration, which waits for us, has ended.
        scheduler._ongoing_background_tasks.call_soon(self.takeover.ask, [worker])

    def remove_worker(self, scheduler: Any, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        self.takeover.able.pop(worker, None)
        self.amender.holder.lost()
        self.amender.lost(worker, stimulus_id)
        super().remove_worker(scheduler, worker, stimulus_id=stimulus_id, **kwargs)


class ShuffleTakeover:
    """Our shuffle on one scheduler. Make it with `install`.

    Examples
    --------
    >>> takeover = await ShuffleTakeover.install(scheduler, settings.shuffle)  # doctest: +SKIP
    """

    def __init__(self, scheduler: Any, settings: ShuffleSettings, sink: Sink) -> None:
        self.scheduler = scheduler
        self.settings = settings
        #: worker address -> "" when it can run our spec, else why not; absent: not known yet
        self.able: dict[str, str] = {}
        self._sink = sink
        self._stock: Any = None
        self._plugin: Any = None
        #: runs given our spec
        self._runs = 0
        #: runs left to stock, by reason
        self._fallbacks: collections.Counter[str] = collections.Counter()
        #: outputs sent to their worker at once
        self._pinned = 0
        #: shuffles with outputs far above the mean
        self._skewed = 0
        #: of them all, the most rows of an output over the mean rows
        self._largest_ratio = 0.0
        #: what was said about the latest ones
        self._skews: collections.deque[str] = collections.deque(maxlen=8)
        self._errors = 0
        self._last_error = ""

    @classmethod
    async def install(cls, scheduler: Any, settings: ShuffleSettings, *, sink: Sink = null_sink) -> ShuffleTakeover:
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
        self._stock, self._plugin = seam.swap_plugin(scheduler, lambda: _SchedulerPlugin(scheduler, self))
        await self.ask(list(scheduler.workers))
        sink(Event("shuffle.installed", "the plugin named shuffle was taken over", {"workers": len(self.able)}))
        return self

    async def uninstall(self) -> None:
        """Put stock's plugin back. No error when it is back already.

        Raises
        ------
        InstallError
            A shuffle is active.
        """
        if self.scheduler.plugins.get("shuffle") is not self._plugin:
            return
        self._plugin.amender.holder.let_go()
        _refuse_active(self._plugin, "uninstall")
        seam.swap_plugin(self.scheduler, lambda: self._stock)
        self._sink(Event("shuffle.uninstalled", "stock's plugin named shuffle was put back"))

    async def ask(self, workers: list[str]) -> None:
        """Ask workers whether they can run our spec."""
        if not workers:
            return
        try:
            answers = await seam.probe_workers(self.scheduler, workers, self.settings.codec)
        except Exception as e:
            self.failed()
            answers = dict.fromkeys(workers, repr(e))
        for address, reason in answers.items():
            if address in self.scheduler.workers:
                self.able[address] = reason
                if reason:
                    logger.warning("worker %s can not run gpurt's shuffle, stock's is used: %s", address, reason)

    def choose(self, spec: Any) -> Any:
        """The spec for a new run: ours, or the given one. Never raises."""
        try:
            if type(spec) is seam.ArrayRechunkSpec:
                self._fallbacks["rechunk"] += 1
                return spec if self._unable() else ReleasingRechunkSpec.of(spec)
            reason = self._reason_for_stock(spec)
            if not reason:
                order = seam.order_of_outputs(self.scheduler, spec.id)
                ours = GpurtShuffleSpec.of(spec, self.settings, order)
                self._runs += 1
                return ours
        except Exception:
            self.failed()
            reason = "error"
        message = f"shuffle {spec.id} is left to stock Dask: {reason}"
        self._sink(Event("shuffle.fallback", message, {"shuffle": str(spec.id), "reason": reason}))
        self._fallbacks[reason] += 1
        return spec

    async def pin(self, shuffle_id: Any, run_id: int, plugin: Any) -> None:
        """Restrict the outputs of a run to their workers before they run. Never raises.

        Stock lets every output run once wherever it is sent, only to say where it belongs, and again there. What is
        not a plain unpack task (fused with others, a join's) is left to that.
        """
        try:
            state = plugin.active_shuffles.get(shuffle_id)
            if state is None or state.run_id != run_id or type(state.run_spec.spec) is not GpurtShuffleSpec:
                return
            outputs = seam.unpack_tasks(self.scheduler, shuffle_id)
            for first in range(0, len(outputs), _PIN_TASKS):
                for ts, part in outputs[first : first + _PIN_TASKS]:
                    # The loop was let go in between: the run may be over and the task with it.
                    if plugin.active_shuffles.get(shuffle_id) is not state:
                        return
                    if self.scheduler.tasks.get(ts.key) is ts and part in state.run_spec.worker_for:
                        plugin._set_restriction(ts, state.run_spec.worker_for[part])
                        self._pinned += 1
                await asyncio.sleep(0)
        except Exception:
            self.failed()

    async def look_at_skew(self, state: Any, amender: Amender) -> None:
        """Say which outputs of a run are far larger than the others. Never raises."""
        told = amender.binder.told(state)
        if told is None:
            return  # the run is over, or was started anew: there is nothing to be said about it
        try:
            rows, nbytes, values = add_up(told)
            worker_for, moves = state.run_spec.worker_for, state.run_spec.spec.state.moves
            large = skewed(rows, nbytes, len(worker_for))
            for part in moves.keys() - {one.part for one in large}:
                source, target = moves[part]
                text = f"output {part} of shuffle {state.id} was moved from {source} to {target}, which had less to do"
                self._sink(Event("shuffle.bound", text, {"shuffle": str(state.id), "part": part, "owner": target}))
            if not large:
                return
            self._skewed += 1
            self._largest_ratio = max(self._largest_ratio, large[0].ratio)
            for one in large:
                owner = worker_for.get(one.part, "")
                text = one.text(str(state.id), owner, values.get(one.part, ""), moves.get(one.part, ("",))[0])
                self._skews.append(text)
                fields = {"shuffle": str(state.id), "owner": owner, "value": values.get(one.part, "")}
                self._sink(Event("shuffle.skew", text, {**fields, **dataclasses.asdict(one)}))
        except Exception:
            self.failed()

    def _reason_for_stock(self, spec: Any) -> str:
        import pandas as pd

        if type(spec) is not seam.DataFrameShuffleSpec:
            return f"its spec is {type(spec).__module__}.{type(spec).__name__}"
        if type(spec.meta) is not pd.DataFrame:
            return f"meta is {type(spec.meta).__module__}.{type(spec.meta).__name__}"
        unable = self._unable()
        return f"{unable} workers have not said that they can" if unable else ""

    def _unable(self) -> int:
        """Workers that have not said that they can run a spec of ours."""
        return sum(self.able.get(address, "?") != "" for address in self.scheduler.workers)

    def failed(self) -> None:
        """Count the exception that is being handled."""
        self._errors += 1
        self._last_error = traceback.format_exc()
        logger.warning("gpurt shuffle: left to stock Dask after an error")

    def statistics(self) -> dict[str, Any]:
        """Counts since the installation; plain JSON values."""
        return {
            "installed": self.scheduler.plugins.get("shuffle") is self._plugin,
            "runs": self._runs,
            "fallbacks": dict(self._fallbacks),
            "pinned": self._pinned,
            "recovery": {} if self._plugin is None else self._plugin.amender.statistics(),
            "skew": {
                "skewed": self._skewed,
                "largest_ratio": round(self._largest_ratio, 2),
                "latest": list(self._skews),
            },
            "late_binding": {} if self._plugin is None else self._plugin.amender.binder.statistics(),
            "errors": self._errors,
            "last_error": self._last_error,
            "active": len(self._plugin.active_shuffles) if self._plugin is not None else 0,
            "workers_able": sum(reason == "" for reason in self.able.values()),
            "workers_unable": {address: reason for address, reason in self.able.items() if reason},
        }


def _refuse_active(plugin: Any, what: str) -> None:
    if plugin.active_shuffles:
        raise InstallError(
            f"can not {what} while {len(plugin.active_shuffles)} shuffles are active "
            f"({', '.join(map(str, list(plugin.active_shuffles)[:3]))}). Remedy: wait until they are done"
        )


def worker_statistics(worker: Any) -> dict[str, Any]:
    """What the shuffle did on one worker, see `counters.ShuffleCounters` and `Plane.statistics`; plain JSON values."""
    return {**counters_of(worker).as_dict(), "transport": statistics_of(worker)}
