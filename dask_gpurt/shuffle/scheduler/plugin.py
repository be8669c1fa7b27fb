"""`GpurtShufflePlugin`: Dask's scheduler plugin named ``shuffle``, with recovery for the runs that have our spec.

`takeover` puts it in the place of Dask's and chooses the spec of each run. Dask's own runs go on as inherited. For ours
the plugin composes what keeps them going: `runs` (what is known of them), `calls` (to their workers), `recovery` and
`reopen` (a worker is lost before and after the barrier), `rebalance`, `barrier` and `barrier_hold`. Here is what Dask
calls: which part answers, and what is Dask's after that.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from dask_gpurt.shuffle import seam
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
from dask_gpurt.shuffle.spec import GpurtShuffleSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable

    from dask.typing import Key
    from distributed.scheduler import Scheduler, TaskState, WorkerState

    from dask_gpurt.shuffle.scheduler.runs import RunRecord
    from dask_gpurt.shuffle.scheduler.skew import SkewReport

#: states of a barrier's task that may run again when it is released
_RUNS_AGAIN = ("processing", "queued", "no-worker", "memory")
#: how the stimulus begins by which a barrier is released that its worker has ended for an earlier run: the task was
#: released and sent there once more while the worker still waited for the end of that run's flush
_LATE_ANSWER = ("task-erred-", "task-finished-", "reschedule-")


class Takeover(Protocol):
    """What is used of `takeover.ShuffleTakeover`, which makes the plugin."""

    able: dict[str, str]
    safe: bool
    moved: Callable[[Iterable[TaskState]], None]
    skew: SkewReport

    def choose(self, spec: seam.ShuffleSpec) -> seam.ShuffleSpec: ...
    async def pin(self, shuffle_id: seam.ShuffleId, run_id: int, plugin: GpurtShufflePlugin) -> None: ...
    async def ask(self, worker: str) -> None: ...
    def no_join_filters(self) -> bool: ...
    def failed(self) -> None: ...


class GpurtShufflePlugin(seam.ShuffleSchedulerPlugin):
    """Dask's plugin with our choice of spec, and with recovery for the runs that have it."""

    def __init__(self, scheduler: Scheduler, takeover: Takeover) -> None:
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
        #: the scheduler's handlers besides Dask's, see `swap_plugin`
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

    def _unset_restriction(self, ts: TaskState) -> None:
        super()._unset_restriction(ts)
        self.opener.parking.left(ts)

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
        try:
            if self.opener.fail(id, stimulus_id):
                return
        except Exception:
            self.takeover.failed()
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
            # Not here: its tasks may be about to be forgotten.
            self.scheduler.loop.add_callback(self.runs.forget)

    def restart(self, scheduler: Scheduler) -> None:
        """All workers are restarted: no run is left."""
        records = self.runs.all()
        super().restart(scheduler)
        for record in records:
            self.runs.dropped(record)
        self.runs.forget()

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
            while tries and run is not None and self.active_shuffles.get(id) is run:
                await asyncio.sleep(PATIENCE_SECONDS)
                tries -= not self.shuffle_calls.closing(run.participating_workers)
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

        It has not passed: its worker was lost, or transfers run again. A run of Dask's own goes on if its barrier came
        to nothing because of an answer of the run before. The run ends where no task waits for the barrier any more:
        the query was cancelled, or failed. Tasks of an earlier query may keep the barrier known all the same.
        """
        barrier = self.runs.barrier_of(shuffle_id) if shuffle_id else None
        if shuffle_id is None or barrier is None or not (barrier.waiters or barrier.who_wants):
            return False
        record = self.runs.get(shuffle_id)
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

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """What it wanted is released already."""
        self.holder.unwanted()

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Ask a worker that has joined whether it can make our runs."""
        # Not awaited here: the worker answers calls only after its registration, which waits for us, has ended.
        seam.in_background(scheduler, self.takeover.ask, worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: object) -> None:
        """Amend the runs that can go on without a worker; Dask restarts the others."""
        self.takeover.able.pop(worker, None)
        self.shuffle_calls.worker_left()
        self.holder.lost()
        self.amender.lost(worker, stimulus_id)
        super().remove_worker(scheduler, worker, stimulus_id=stimulus_id, **kwargs)
