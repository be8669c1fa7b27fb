"""The scheduler's side of `recovery` after the barrier: outputs of a lost worker are opened, completed and let go.

Theory of operation. When a worker is lost after the barrier, the outputs that are still wanted and were its own get new
owners and are *opened*: their tasks wait (`parking`). `recovery` announces that to the survivors, as before the
barrier. Then `complete`, in the background,

1. has transfer tasks run for whose inputs no worker vouches, and waits for them. Nothing in the graph depends on them
   any more: their results are dropped at once, and what they have done is known by asking who vouches for it;
2. has all workers flush; then every open output has all its rows;
3. tells all workers so, and restricts the tasks to the new owners.

Outputs of survivors are made and kept all the while. Another loss meanwhile begins a new epoch, and 1 again.

An output task that is not pinned (a join's, one that was fused) may be sent anywhere at any time. It asks where it
belongs, and is parked when that is open (`place`). If its rows are gone, since it was not wanted when its owner was
lost, the shuffle is restarted; so it is when the barrier's result is lost, and when an input cannot be made again
(scattered data whose only holder was lost): Dask forgets its transfer task, and has the barrier's result, which stays,
depend on the others alone (``has_lost_dependencies``).

An output that was made, and is wanted again though its owner lives (what was made of it was on another worker, say,
which had stolen the task that followed), is opened with the others, all of its rows void. If that is found out only
when its task runs, the task asks for it (`ask`). Then the other side of a join has to be opened, too, since the task
may have taken that.

The outputs of a worker that is drained (`candidates`) are opened as those of a lost one, but void: it lives. One whose
task that worker was given may have been begun there, and is left to it. What it has not begun is taken back by the
plugin; then the task asks where it belongs.

All on the scheduler's event loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.messages import Complete
from dask_gpurt.shuffle.protocol.recovery import EPOCHS, lost_outputs, reassign
from dask_gpurt.shuffle.scheduler.calls import AnswersFailed, FlushFailed
from dask_gpurt.shuffle.scheduler.candidates import keepers, running
from dask_gpurt.shuffle.scheduler.output_tasks import output_of
from dask_gpurt.shuffle.scheduler.parking import Parking
from dask_gpurt.shuffle.scheduler.phases import RunEvent
from dask_gpurt.shuffle.scheduler.restart import NOT_WANTED
from dask_gpurt.shuffle.scheduler.runs import PATIENCE, PATIENCE_SECONDS, Begun, Step

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from distributed.scheduler import Scheduler, TaskState

    from dask_gpurt.shuffle.scheduler.calls import Calls
    from dask_gpurt.shuffle.scheduler.runs import RunRecord, Runs

#: states of a transfer task that will end
_UNDER_WAY = ("waiting", "queued", "no-worker", "processing")
#: how often an output is opened because its task asks for it; then the run is restarted
ASKED = 5


class Opener:
    """Amends the runs of one scheduler whose barrier has passed."""

    def __init__(self, scheduler: Scheduler, plugin: seam.ShuffleSchedulerPlugin, runs: Runs, calls: Calls) -> None:
        self._scheduler = scheduler
        self._plugin = plugin
        self._runs = runs
        self._calls = calls
        #: queued tasks get free slots in the next turn of the loop
        self._filling = False
        self.parking = Parking(scheduler, plugin)

    def left(self) -> None:
        """A task has left its worker without an end, as one that is parked: others get its slot.

        Dask fills slots when tasks end. No end need follow here: an output may wait for inputs that are queued.
        """
        if not self._filling:
            self._filling = True
            # Not here: tasks are being moved.
            self._scheduler.loop.add_callback(self._fill)

    def _fill(self) -> None:
        self._filling = False
        self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=f"gpurt-left-{time.time()}")

    def made(self, key: Hashable) -> None:
        """A task has ended well: notes which output that was."""
        ts = self._scheduler.tasks.get(key)
        if ts is None or len(ts.dependencies) > 2:
            return
        for name, record in self._runs.sources(ts):
            if record is not None and (part := output_of(ts.run_spec, name)) is not None:
                record.made.add(part)

    def ask(self, record: RunRecord, key: Hashable) -> tuple[list[RunRecord], bool]:
        """An output's task asks for what was handed out: (runs that began an epoch, whether it is opened again)."""
        ts = self._scheduler.tasks.get(key)
        part = None if ts is None else output_of(ts.run_spec, record.id)
        if ts is None or part is None:
            return [], False
        records = [one for _, one in self._runs.sources(ts) if one is not None and one.passed]
        if record not in records or len(records) < len(ts.dependencies):
            return [], False
        if any(one.asked[part] >= ASKED or part not in one.worker_for for one in records):
            return [], False
        begun: list[RunRecord] = []
        for one in records:
            if part in (one.amendments.opened or ()):
                continue
            one.made.add(part)
            one.asked[part] += 1
            barrier = self._runs.barrier_of(one.id)
            if barrier is None or self.begin(one, barrier, None) is not Begun.EPOCH:
                return begun, False
            begun.append(one)
        self.parking.park(ts)
        return begun, True

    def begin(self, record: RunRecord, barrier: TaskState, lost: str | None) -> Begun:
        """Open outputs that are wanted again, and those of a lost worker, of a run whose barrier has passed.

        Parameters
        ----------
        lost
            Address; None: no worker was lost. One leaves, or the task of an output asks.
        """
        state, worker_for = record.amendments, record.worker_for
        parts = _parts(record, barrier)
        if parts is None or record.failed or state.epoch >= EPOCHS:
            return Begun.IMPOSSIBLE
        if lost is not None and barrier.has_lost_dependencies:
            return Begun.IMPOSSIBLE  # what it had split cannot be made again
        wanted = {part for ts, part in parts.items() if ts.state not in NOT_WANTED}
        if not all(part in worker_for for part in wanted):
            return Begun.IMPOSSIBLE  # made before the run that is for the rest
        there = record.owners_there(self._scheduler.workers) - {lost}
        opened = state.opened or frozenset()
        # Of what was being handed over, only the workers that split the inputs have all rows. Wanted or not: the owner
        # may live.
        begun = record.alive(_begun(parts, worker_for), self._scheduler.workers)
        gone = lost_outputs(wanted | opened, worker_for, there) - begun | frozenset(state.handing)
        again = frozenset(part for part in wanted & record.made if worker_for[part] in there) - opened
        gone |= again
        again |= record.alive(lost_outputs(gone, worker_for, there), self._scheduler.workers)
        moved = self._new_owners(record, barrier, gone, there)
        if moved is None:
            return Begun.IMPOSSIBLE
        if lost is not None:
            state.lost.append(lost)
            state.opened = opened
        for ts, part in parts.items():
            if part not in gone and worker_for.get(part) not in there:
                seam.unrestrict(self._plugin, ts)  # should it be wanted, it has to ask
        if not gone and (lost is None or not opened):
            return Begun.NOTHING
        worker_for.update(moved)
        record.participants.update(moved.values())
        state.epoch += 1
        state.void(again)
        record.made -= gone
        state.opened = opened | gone
        state.scopes[state.epoch] = state.opened
        self._runs.counters.outputs_void += len(again)
        self._runs.counters.outputs_opened += len(gone - opened)
        record.happened(RunEvent.OUTPUTS_OPENED)
        for ts, part in parts.items():
            if part in gone:
                self.parking.park(ts)
        return Begun.EPOCH

    def _new_owners(
        self, record: RunRecord, barrier: TaskState, gone: frozenset[int], there: set[str]
    ) -> dict[int, str] | None:
        """Owners, of `there`, of the outputs `gone`; None when there are none, or the sides of a join were apart."""
        worker_for, workers = record.worker_for, self._scheduler.workers
        owners = running(workers, there & set(barrier.worker_restrictions or there))
        other = self._runs.partner_owners(record.id)
        moved = {part: worker_for[part] for part in gone if worker_for[part] in there}
        if owners:
            moved |= reassign({part: worker_for[part] for part in gone}, there, other, owners)
        # A partner whose owner leaves follows in its turn.
        staying = keepers(workers)
        apart = (p for p, owner in moved.items() if other.get(p, owner) in staying)
        if len(moved) < len(gone) or any(other.get(p, moved[p]) != moved[p] for p in apart):
            return None
        return moved

    # ---- tasks of outputs

    def close(self, record: RunRecord, barrier: TaskState) -> bool:
        """Undo that a barrier has passed; False when there are outputs, or were."""
        if record.amendments.opened is not None or record.made:
            return False
        self.hold_back(barrier, back=False)
        return True

    def hold_back(self, barrier: TaskState, *, back: bool) -> None:
        """Have the tasks of all outputs wait, or undo that: they are pinned when the barrier passes."""
        for ts in barrier.dependents:
            if back:
                self.parking.park(ts)
            else:
                seam.unrestrict(self._plugin, ts)

    def place(self, record: RunRecord, key: Hashable) -> bool:
        """An output's task asks where it belongs; whether that was answered here."""
        ts = self._scheduler.tasks.get(key)
        part = None if ts is None else output_of(ts.run_spec, record.id)
        if ts is None or part is None:
            return False
        state = record.amendments
        if state.opened and part in state.opened:
            self.parking.park(ts)
            return True
        owner = record.worker_for.get(part)
        if owner in record.owners_there(self._scheduler.workers):
            if state.epoch and seam.is_restricted(ts):
                # Pinned to who had it before an amendment.
                self._scheduler.set_restrictions({key: {owner}})
                return True
            return False
        if state.opened is not None:
            self._runs.restart(record, f"output {part} is wanted, and its owner was lost when it was not")
            return True
        return False

    def _let_go(self, record: RunRecord, barrier: TaskState, opened: frozenset[int]) -> None:
        """Restrict the tasks of outputs that were open to the new owners."""
        stimulus_id = f"gpurt-complete-{record.id}-{record.amendments.epoch}"
        recommendations: dict[Any, Any] = {}
        for ts in barrier.dependents:
            part = output_of(ts.run_spec, record.id)
            if part not in opened or any(part in others for others in self._others(ts, record)):
                continue  # of a join, and open in the other shuffle: that will let it go
            if self.parking.is_parked(ts):
                self._scheduler.set_restrictions({ts.key: {record.worker_for[part]}})
                self.parking.left(ts)
                if ts.state == "no-worker":
                    recommendations[ts.key] = "processing"
        self._scheduler.transitions(recommendations, stimulus_id=stimulus_id)

    def _others(self, ts: TaskState, record: RunRecord) -> Iterator[frozenset[int]]:
        """What is open in the other shuffles that an output's task depends on."""
        for _, other in self._runs.sources(ts):
            if other is not None and other is not record:
                yield other.amendments.opened or frozenset()

    # ---- completing

    def run_again(self, record: RunRecord, keys: set[Hashable], stimulus_id: str) -> int:
        """Have transfer tasks run for whose inputs no worker vouches; how many are not done."""
        barrier = self._runs.barrier_of(record.id)
        missing = [ts for ts in (() if barrier is None else barrier.dependencies) if ts.key not in keys]
        kept = {ts.key: "released" for ts in missing if ts.state == "memory"}
        self._scheduler.transitions(kept, stimulus_id=stimulus_id)
        again = {ts.key: "waiting" for ts in missing if ts.state == "released"}
        self._scheduler.transitions(again, stimulus_id=stimulus_id)
        self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)
        self._runs.counters.transfers_again += len(again)
        return len(missing)

    async def complete(self, record: RunRecord, epoch: int) -> bool:
        """Complete what is open; False when another epoch has begun. True, too, when the run is over.

        Raises
        ------
        AnswersFailed
            It cannot be flushed, or an input cannot be made again.
        """
        barrier = self._runs.barrier_of(record.id)
        failures = 0
        under_way: list[TaskState] = []
        while barrier is not None and not self._over(record, barrier) and record.amendments.epoch == epoch:
            since = record.version
            try:
                step = await self._complete_once(record, barrier, epoch, under_way)
            except FlushFailed as e:
                # One that closes answers with errors until its threads have ended. That it leaves is another epoch.
                failures += not self._calls.closing(record.participants)
                if failures > PATIENCE:
                    raise AnswersFailed(f"cannot be flushed: {e}") from e
                await asyncio.sleep(PATIENCE_SECONDS)
                continue
            if step is Step.DONE:
                return True
            if step is Step.WAIT:
                await record.change(since)
        return self._over(record, barrier)

    async def _complete_once(
        self, record: RunRecord, barrier: TaskState, epoch: int, under_way: list[TaskState]
    ) -> Step:
        """Have transfer tasks run or, where none has to, flush and let the open outputs go.

        Parameters
        ----------
        under_way
            Transfer tasks that were seen to run, kept from one try to the next.

        Raises
        ------
        FlushFailed
            A worker cannot flush.
        AnswersFailed
            An input that counts cannot be split again.
        """

        def same() -> bool:
            return not self._over(record, barrier) and record.amendments.epoch == epoch

        self.parking.wait_on()
        if self._under_way(record, barrier, under_way):
            return Step.WAIT
        answers = await self._calls.amend(record)
        if answers is None or not same():
            return Step.WAIT
        attempts, keys = record.agreed(answers)
        if failed := next((ts for ts in barrier.dependencies if ts.state == "erred" and ts.key not in keys), None):
            return self._fail(record, barrier, failed)
        if barrier.has_lost_dependencies and len(attempts) < record.inputs:
            raise AnswersFailed("an input cannot be made again")
        if self.run_again(record, keys, f"gpurt-open-{record.id}-{epoch}"):
            self._under_way(record, barrier, under_way)
            return Step.WAIT
        problems = await self._calls.flush(record, self._calls.workers_of(record))
        if problems is None or not same():
            return Step.WAIT
        if problems:
            raise FlushFailed(repr(problems[0]))
        reached = await self._calls.tell(record, Complete(epoch))
        if reached is None or not same():
            return Step.WAIT
        opened, record.amendments.opened = record.amendments.opened or frozenset(), frozenset()
        record.happened(RunEvent.OUTPUTS_COMPLETE)
        self._let_go(record, barrier, opened)
        return Step.DONE

    def _fail(self, record: RunRecord, barrier: TaskState, failed: TaskState) -> Step:
        """A transfer task has failed: so do the barrier and all outputs that are not made, as with Dask.

        Dask spares what has a result, here the barrier, and with it the outputs. The outputs
        of a join that wait for the other side would then wait, once that is there, for inputs that nothing makes.
        """
        stimulus_id = f"gpurt-failed-{record.id}-{record.amendments.epoch}"
        self._fail_outputs(barrier, failed, stimulus_id)
        # What a worker has may be complete. If it is not, it comes back, and is parked.
        if any(ts.state == "processing" for ts in barrier.dependents):
            return Step.WAIT
        self._fail_barrier(barrier, failed, stimulus_id)
        return Step.DONE

    def fail(self, shuffle_id: seam.ShuffleId, stimulus_id: str) -> bool:
        """As `_fail`, when a run has ended whose shuffle is to be restarted; False when no transfer task has failed.

        Dask's restart raises where an input has failed and its barrier has not, and leaves the outputs that wait.
        """
        barrier = self._runs.barrier_of(shuffle_id)
        if barrier is None or barrier.state not in ("memory", "waiting"):
            return False
        failed = next((ts for ts in barrier.dependencies if ts.state == "erred"), None)
        if failed is None:
            return False
        running = [ts for ts in barrier.dependents if ts.state == "processing"]
        for ts in running:
            self.parking.park(ts)
        self._scheduler.transitions({ts.key: "released" for ts in running}, stimulus_id=stimulus_id)
        self._fail_outputs(barrier, failed, stimulus_id)
        self._fail_barrier(barrier, failed, stimulus_id)
        return True

    def _fail_outputs(self, barrier: TaskState, failed: TaskState, stimulus_id: str) -> None:
        """Those that no worker has."""
        cause = failed.exception_blame or failed
        recommendations: dict[Any, Any] = {}
        for ts in list(barrier.dependents):
            if ts.state in ("no-worker", "queued"):
                recommendations |= self._scheduler.transition(ts.key, "erred", stimulus_id=stimulus_id, cause=cause.key)
            elif ts.state == "waiting":
                ts.exception_blame = cause
                recommendations[ts.key] = "erred"
        self._scheduler.transitions(recommendations, stimulus_id=stimulus_id)

    def _fail_barrier(self, barrier: TaskState, failed: TaskState, stimulus_id: str) -> None:
        self.hold_back(barrier, back=False)  # should they be tried again
        self._scheduler.transitions({barrier.key: "released"}, stimulus_id=stimulus_id)
        if barrier.state == "released":
            barrier.exception_blame = failed.exception_blame or failed
            self._scheduler.transitions({barrier.key: "erred"}, stimulus_id=stimulus_id)

    def _over(self, record: RunRecord, barrier: TaskState | None) -> bool:
        """Whether there is nothing to complete any more: the run, or its barrier's result, is gone."""
        return barrier is None or barrier.state != "memory" or not self._runs.current(record)

    def _under_way(self, record: RunRecord, barrier: TaskState, some: list[TaskState]) -> bool:
        """Whether a transfer task will end; the end of one wakes who waits for a change of the run."""
        # All are looked at once those seen before have ended: not at the end of every one.
        while some and some[-1].state not in _UNDER_WAY:
            some.pop()
        some += () if some else (ts for ts in barrier.dependencies if ts.state in _UNDER_WAY)
        if not some:
            return False
        self._runs.listen(some[-1].key, record.changed)
        return True


def _parts(record: RunRecord, barrier: TaskState) -> dict[TaskState, int] | None:
    """The tasks of a run's outputs, and which each makes; None when that is not plain, or one has failed."""
    if barrier.state != "memory" or any(ts.state == "erred" for ts in (*barrier.dependencies, *barrier.dependents)):
        return None
    parts: dict[TaskState, int] = {}
    for ts in barrier.dependents:
        part = output_of(ts.run_spec, record.id)
        if part is None:
            return None
        parts[ts] = part
    return parts


def _begun(parts: Mapping[TaskState, int], worker_for: Mapping[int, str]) -> frozenset[int]:
    """Outputs whose tasks were given to their owner, and may be running there. `parts`: task -> its output."""
    there: set[int] = set()
    elsewhere: set[int] = set()
    for ts, part in parts.items():
        ws = ts.processing_on
        if ws is not None and ws.address == worker_for.get(part):
            there.add(part)
        elif ts.state not in NOT_WANTED:
            elsewhere.add(part)
    return frozenset(there - elsewhere)
