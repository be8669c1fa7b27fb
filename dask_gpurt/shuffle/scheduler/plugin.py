"""The scheduler's side: plain ``shuffle``, ``merge``, ``set_index``, ... become our runs without client code.

`ShuffleTakeover.install` replaces the scheduler plugin named ``shuffle``, `ShuffleTakeover.uninstall` puts it back.

Theory of operation. The new plugin is a subclass of Dask's. It overrides one decision, `_retrieve_spec`: which spec the
workers get. Dask's worker plugin stays; it builds the run that the spec says. A shuffle is decided once per run, for
all workers alike, and from what is known before it starts:

- array rechunks keep Dask's run, which only lets go of shards that were sent (`rechunk`);
- a meta that is not a pandas frame keeps Dask's spec, but for device frames (`backends.frames`) where they are allowed;
- so does a shuffle on a cluster with a worker that has not said that it can run ours (no package, another version,
  another distributed): two formats in one run would lose rows or fail.

For our runs the plugin composes what keeps them going: `runs` (what is known of them), `calls` (to their workers),
`recovery` and `reopen` (a worker is lost before and after the barrier), `rebalance`, `barrier` and `barrier_hold`.

Outputs are restricted to their workers when the barrier is reached, where Dask lets each of them run once in any place
first (`ShuffleTakeover.pin`).

An exception in our code leaves the decision to Dask, and is counted (`model.circuit_breaker`). After too many of them
new shuffles are left to Dask altogether; active runs end as they are. A worker that joins *during* a run and lacks the
package cannot take part and fails its tasks of that run. That case is left, since it needs a mixed cluster.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends.frames import provider_of, reason_for_stock
from dask_gpurt.errors import InstallError
from dask_gpurt.model import Event, Sink, null_sink
from dask_gpurt.model.circuit_breaker import Guard, Part
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.probe import probe_workers
from dask_gpurt.shuffle.protocol.messages import OPEN_OUTPUT, BarrierAnswer, OutputOpened
from dask_gpurt.shuffle.scheduler.barrier import Barrier
from dask_gpurt.shuffle.scheduler.barrier_hold import Holder
from dask_gpurt.shuffle.scheduler.calls import Calls
from dask_gpurt.shuffle.scheduler.drain import Drain
from dask_gpurt.shuffle.scheduler.join_filters import JoinFilters
from dask_gpurt.shuffle.scheduler.rebalance import Binder
from dask_gpurt.shuffle.scheduler.recovery import Amender
from dask_gpurt.shuffle.scheduler.reopen import Opener
from dask_gpurt.shuffle.scheduler.restart import for_the_rest, keep_outputs, release_behind_aliases
from dask_gpurt.shuffle.scheduler.runs import PATIENCE, PATIENCE_SECONDS, Runs
from dask_gpurt.shuffle.scheduler.skew import SkewReport
from dask_gpurt.shuffle.spec import GpurtShuffleSpec
from dask_gpurt.shuffle.worker.rechunk import ReleasingRechunkSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable

    from dask.typing import Key
    from distributed.scheduler import Scheduler, TaskState, WorkerState

    from dask_gpurt.config import ShuffleSettings
    from dask_gpurt.shuffle.scheduler.runs import RunRecord

logger = logging.getLogger("distributed.scheduler.gpurt")
#: failures within so many seconds after which new shuffles are left to Dask: a query makes few calls here
FAILURES, FAILURES_SECONDS = 10, 600.0
#: outputs pinned in one turn of the scheduler's loop, about 5 ms
_PIN_TASKS = 500
#: states of a barrier's task that may run again when it is released
_RUNS_AGAIN = ("processing", "queued", "no-worker", "memory")
#: how the stimulus begins by which a barrier is released that its worker has ended for an earlier run: the task was
#: released and sent there once more while the worker still waited for the end of that run's flush
_LATE_ANSWER = ("task-erred-", "task-finished-")
#: the part of our code whose failures are counted, in events and statistics
_PART = "scheduler"


class _SchedulerPlugin(seam.ShuffleSchedulerPlugin):
    """Dask's plugin with our choice of spec, and with recovery for the runs that have it."""

    def __init__(self, scheduler: Scheduler, takeover: ShuffleTakeover) -> None:
        self.takeover = takeover
        failed = takeover.failed
        self.runs = Runs(scheduler, self)
        self.shuffle_calls = Calls(scheduler)
        self.opener = Opener(scheduler, self, self.runs, self.shuffle_calls)
        self.amender = Amender(scheduler, self.runs, self.shuffle_calls, self.opener, failed)
        able = takeover.able
        self.binder = Binder(
            *(scheduler, self.runs, self.shuffle_calls),
            able=lambda address: able.get(address) == "",
            off=lambda: takeover.safe,
        )
        self.drain = Drain(scheduler, self, self.runs, self.amender, failed)
        self.holder = Holder(scheduler, self.runs)
        self.joins = JoinFilters(
            scheduler,
            self.runs,
            self.shuffle_calls,
            off=takeover.no_join_filters,
            moved=lambda tasks: takeover.moved(tasks),
            failed=failed,
        )
        self.waits = Barrier(self.runs, self.shuffle_calls, self.amender, self.binder, self.joins.begin, failed)
        #: the scheduler's handlers besides Dask's, see `seam.swap_plugin`
        self.calls = {OPEN_OUTPUT: self.open_output}
        super().__init__(scheduler)

    # ---- runs begin and end

    def _retrieve_spec(self, shuffle_id: seam.ShuffleId) -> seam.ShuffleSpec:
        spec = self.takeover.choose(super()._retrieve_spec(shuffle_id))
        # Not for a first run: outputs that are not wanted yet may be wanted while it goes on.
        if type(spec) is GpurtShuffleSpec and seam.had_runs(self, shuffle_id):
            try:
                return for_the_rest(self.runs, spec)
            except Exception:
                self.takeover.failed()
        return spec

    def _calculate_worker_for(self, spec: Any) -> Any:
        """As Dask's, but workers that do not run get no outputs as long as there are others."""
        return self.drain.assigned(spec) or super()._calculate_worker_for(spec)

    def _restart_recommendations(self, id: seam.ShuffleId) -> dict[Key, str]:
        recommendations = super()._restart_recommendations(id)
        try:
            release_behind_aliases(self.runs, id, recommendations)
            if any(type(run.run_spec.spec) is GpurtShuffleSpec for run in self._shuffles.get(id, ())):
                keep_outputs(self.runs, id, recommendations)
        except Exception:
            self.takeover.failed()
        return recommendations

    def _restart_shuffle(self, id: seam.ShuffleId, scheduler: Scheduler, *, stimulus_id: str) -> None:
        record = self.runs.get(id)
        if record is None:
            super()._restart_shuffle(id, scheduler, stimulus_id=stimulus_id)
            return
        record.restarting = True
        try:
            super()._restart_shuffle(id, scheduler, stimulus_id=stimulus_id)
        finally:
            record.restarting = False

    def _clean_on_scheduler(self, id: seam.ShuffleId, stimulus_id: str) -> None:
        record = self.runs.get(id)
        super()._clean_on_scheduler(id, stimulus_id)
        if record is not None:
            self.holder.ended(record)
            self.runs.dropped(record)
            self.runs.changed(record)

    def restart(self, scheduler: Scheduler) -> None:
        """All workers are restarted: no run is left."""
        records = self.runs.all()
        super().restart(scheduler)
        for record in records:
            self.runs.dropped(record)

    def recovery_statistics(self) -> dict[str, Any]:
        """Counts; plain JSON values."""
        amending = sum(record.telling is not None for record in self.runs.all())
        return {**dataclasses.asdict(self.runs.counters), "amending": amending}

    # ---- calls of the workers

    async def barrier(self, id: seam.ShuffleId, run_id: int, consistent: bool) -> str | None:
        """A barrier's task waits until all inputs are in place; not consistent: the shuffle has to be restarted.

        Returns
        -------
        str or None
            The value of a `BarrierAnswer` for runs of our kind, else None.
        """
        record = self.runs.get(id)
        if not consistent or record is None:
            others = self._passed_partners(id) if record is not None else []
            await self._dasks_barrier(id, run_id, consistent)
            # What the tasks of a join have taken of the other side is gone as well. Were that found out one side after
            # the other, each would cost the other what was taken of it meanwhile, and they would take turns at it.
            for other in others:
                self._restart_shuffle(other, self.scheduler, stimulus_id=f"gpurt-joined-{other}-{run_id}")
            return None
        if not await self.waits.passes(id, run_id):
            return BarrierAnswer.RUN_AGAIN.value
        if (record := self.runs.of_run(id, run_id)) is not None:
            self.holder.begin(record)
        await self.takeover.pin(id, run_id, self)
        if (record := self.runs.get(id)) is not None:
            # Not awaited: outputs need not wait for what is said about them.
            seam.in_background(self.scheduler, self.takeover.skew.look, record)
        return BarrierAnswer.PASSED.value

    async def _dasks_barrier(self, id: seam.ShuffleId, run_id: int, consistent: bool) -> None:
        """As inherited, but an error waits until a worker that closes has left, which restarts the shuffle."""
        run = self.active_shuffles.get(id)
        try:
            await super().barrier(id, run_id, consistent)
        except RuntimeError as e:
            # It ends its runs before it leaves. Dask's error comes before Dask's restart, and fails the query.
            tries = PATIENCE if seam.ShuffleClosedError.__name__ in str(e) else 0
            while tries and self.active_shuffles.get(id) is run:
                await asyncio.sleep(PATIENCE_SECONDS)
                tries -= 1
            raise

    def _passed_partners(self, shuffle_id: seam.ShuffleId) -> list[seam.ShuffleId]:
        """Shuffles of ours that share outputs with this one, and whose barrier's result is there."""
        barriers = {name: self.runs.barrier_of(name) for name in self.runs.partners(shuffle_id)}
        there = [name for name, barrier in barriers.items() if barrier is not None and barrier.state == "memory"]
        return [name for name in there if self.runs.get(name) is not None]

    def restrict_task(self, id: seam.ShuffleId, run_id: int, key: Key, worker: str) -> dict[str, Any]:
        """The task of an output runs where its rows are not: have it run where they are, or will be."""
        if self._answered(self.amender.place, id, run_id, key):
            return {"status": "OK"}
        return super().restrict_task(id, run_id, key, worker)

    def open_output(self, id: seam.ShuffleId, run_id: int, key: Key) -> dict[str, Any]:
        """A task asks for an output that was handed out before: have it opened again."""
        return OutputOpened(self._answered(self.amender.open_again, id, run_id, key)).to_dict()

    def _answered(self, answer: Callable[[RunRecord, Key], bool], id: seam.ShuffleId, run_id: int, key: Key) -> bool:
        """What is answered for the active run of our kind; False when there is none. Never raises."""
        try:
            record = self.runs.of_run(id, run_id)
            return record is not None and answer(record, key)
        except Exception:
            self.takeover.failed()
            return False

    # ---- tasks and workers

    def update_graph(self, scheduler: Scheduler, *, tasks: Collection[Hashable], **kwargs: Any) -> None:
        """New tasks, none of them on its way yet."""
        self.joins.arrange(tasks)

    def transition(self, key: Key, start: str, finish: str, *args: object, stimulus_id: str, **kwargs: Any) -> None:
        """As Dask's, but for the barriers of runs that go on; and what recovery has to know of tasks."""
        if not self._shuffles:  # no shuffle since the last one was forgotten: every other task comes by here
            return
        try:
            if finish == "released":
                if self.active_shuffles:
                    self.amender.released(key, stimulus_id)
                    if start == "processing":
                        self.opener.left()
                if start in _RUNS_AGAIN and self._runs_again(seam.id_from_key(key), start, stimulus_id):
                    return
            elif finish == "memory" and start == "processing" and self.active_shuffles:
                self.runs.ended(key, kwargs.get("startstops") or ())
                self.opener.made(key)
                self.amender.barrier_ended(seam.id_from_key(key))
        except Exception:
            self.takeover.failed()
        super().transition(key, start, finish, *args, stimulus_id=stimulus_id, **kwargs)

    def _runs_again(self, shuffle_id: seam.ShuffleId | None, start: str, stimulus_id: str) -> bool:
        """Whether a barrier that was released will run again, since its run goes on.

        It has not passed: its worker was lost, or transfers run again. A cancelled query forgets it next, and then the
        run ends. A run of Dask's own goes on if its barrier came to nothing because of an answer of the run before.
        """
        record = self.runs.get(shuffle_id) if shuffle_id else None
        if record is None:
            return shuffle_id in self.active_shuffles and start == "processing" and stimulus_id.startswith(_LATE_ANSWER)
        if record.restarting or (start == "memory" and record.passed):
            return False
        self.runs.changed(record)
        return True

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list[WorkerState]) -> list[WorkerState]:
        """As Dask's, but a run whose outputs are all made keeps no worker: what one has of them leaves with it."""
        busy: set[str] = set()
        for name, run in self.active_shuffles.items():
            record = self.runs.get(name)
            if record is None or not self.holder.over(record):
                busy |= run.participating_workers
        return [ws for ws in workers if ws.address not in busy]

    def log_event(self, topic: str, msg: Any) -> None:
        """An event of the scheduler: a worker may begin no more tasks."""
        self.drain.heard(topic, msg)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Ask a worker that has joined whether it can make our runs."""
        # Not awaited here: the worker answers calls only after its registration, which waits for us, has ended.
        seam.in_background(scheduler, self.takeover.ask, [worker])

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: object) -> None:
        """Amend the runs that can go on without a worker; Dask restarts the others."""
        self.takeover.able.pop(worker, None)
        self.shuffle_calls.worker_left()
        self.holder.lost()
        self.amender.lost(worker, stimulus_id)
        super().remove_worker(scheduler, worker, stimulus_id=stimulus_id, **kwargs)


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
        #: new shuffles are Dask's, and outputs stay where they were planned, see `model.safe_mode`
        self.safe = False
        #: called with tasks whose priority was changed after their graph had come
        self.moved: Callable[[Iterable[TaskState]], None] = lambda tasks: None
        self._sink = sink
        self._stock: seam.ShuffleSchedulerPlugin | None = None
        self._plugin: _SchedulerPlugin | None = None
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
        plugin = self._plugin
        if plugin is None or self.scheduler.plugins.get("shuffle") is not plugin:
            return
        plugin.holder.let_go()
        _refuse_active(plugin, "uninstall")
        seam.swap_plugin(self.scheduler, lambda: self._stock)
        self._sink(Event("shuffle.uninstalled", "stock's plugin named shuffle was put back"))

    async def ask(self, workers: list[str]) -> None:
        """Ask workers whether they can run our spec."""
        if not workers:
            return
        try:
            answers = await probe_workers(self.scheduler, workers, self.settings.codec)
        except Exception as e:
            self.failed()
            answers = dict.fromkeys(workers, repr(e))
        for address, reason in answers.items():
            if address in self.scheduler.workers:
                self.able[address] = reason
                if reason:
                    logger.warning("worker %s cannot run gpurt's shuffle, Dask's is used: %s", address, reason)

    def choose(self, spec: seam.ShuffleSpec) -> seam.ShuffleSpec:
        """The spec for a new run: ours, or the given one. Never raises."""
        try:
            if type(spec) is seam.ArrayRechunkSpec:
                self._fallbacks["rechunk"] += 1
                ours = not (self.safe or self._unable() or self._part.retired)
                return ReleasingRechunkSpec.of(spec) if ours else spec
            reason = self._reason_for_stock(spec)
            if not reason:
                order = seam.order_of_outputs(self.scheduler, spec.id)
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
        self._fallbacks[reason] += 1
        return spec

    async def pin(self, shuffle_id: seam.ShuffleId, run_id: int, plugin: _SchedulerPlugin) -> None:
        """Restrict the outputs of a run to their workers before they run. Never raises.

        Stock lets every output run once wherever it is sent, only to say where it belongs, and again there. A join's
        are restricted when the barriers of both sides have passed: until then outputs may be bound to others. What is
        not plain to see (fused with others, a side that is Dask's own run) is left to that.
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
        enabled = self.settings.device_frames
        if type(spec.meta) is not pd.DataFrame and (why := reason_for_stock(spec.meta, spec.column, enabled)):
            return why
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
            "runs": self._runs,
            "fallbacks": dict(self._fallbacks),
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


def _refuse_active(plugin: seam.ShuffleSchedulerPlugin, what: str) -> None:
    if plugin.active_shuffles:
        raise InstallError(
            f"cannot {what} while {len(plugin.active_shuffles)} shuffles are active "
            f"({', '.join(map(str, list(plugin.active_shuffles)[:3]))}). Remedy: wait until they are done"
        )
