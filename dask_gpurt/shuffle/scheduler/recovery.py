"""The scheduler's side of `protocol.recovery`: a run goes on without a lost worker, or is restarted for what is left.

`Amender.lost` is called when a worker has left, `Amender.drain` when one begins no more tasks, `Amender.open_again`
when a task asks for an output that was handed out. All begin an *epoch* of the runs concerned, which `Amender.amend`
announces to the workers.

Theory of operation. `lost` runs in the same turn of the loop in which the worker has left. Before the barrier, the
worker's outputs get new owners at once, so a worker that joins the run later does not see the old ones. The rest is
done in the background: the survivors get the epoch, and answer what they vouch for. Transfer tasks whose inputs are not
vouched for are released, and all workers get to know which attempts count. The barrier passes when all have flushed and
no epoch has begun meanwhile (`barrier`).

After the barrier it is the same, with what `reopen` adds: only outputs that are wanted get new owners, and their tasks
wait for a completion of their own.

A worker that is drained lives: its outputs are given to others and are void, so all of their rows are sent again, but
what it has split counts. It takes part as before.

What cannot be amended, or fails meanwhile, is restarted by Dask's own means (`Runs.restart`), but for what `restart`
leaves as it is.
"""

from __future__ import annotations

import asyncio
import functools
import traceback
from typing import TYPE_CHECKING

from dask_gpurt.shuffle.protocol.messages import Valid
from dask_gpurt.shuffle.protocol.recovery import EPOCHS, Validity, reassign, undone
from dask_gpurt.shuffle.scheduler.calls import AnswersFailed
from dask_gpurt.shuffle.scheduler.candidates import leaves, running
from dask_gpurt.shuffle.scheduler.output_tasks import output_of
from dask_gpurt.shuffle.scheduler.phases import RunEvent
from dask_gpurt.shuffle.scheduler.restart import NOT_WANTED
from dask_gpurt.shuffle.scheduler.runs import Begun

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from distributed.scheduler import Scheduler, TaskState

    from dask_gpurt.shuffle import seam
    from dask_gpurt.shuffle.scheduler.calls import Calls
    from dask_gpurt.shuffle.scheduler.reopen import Opener
    from dask_gpurt.shuffle.scheduler.runs import RunRecord, Runs

#: states of a barrier's task that has not ended
_BEFORE_ITS_END = ("released", "waiting", "processing", "queued", "no-worker")
#: states of one of which nothing more is to come
_OVER = ("erred", "forgotten")


class Amender:
    """Amends the runs of one scheduler."""

    def __init__(
        self, scheduler: Scheduler, runs: Runs, calls: Calls, after: Opener, failed: Callable[[], None]
    ) -> None:
        self._scheduler = scheduler
        self._runs = runs
        self._calls = calls
        self._after = after
        self._failed = failed
        #: the latest stimulus that released tasks, and their keys
        self._released: tuple[str, list[Hashable]] = ("", [])

    # ---- an epoch begins

    def released(self, key: Hashable, stimulus_id: str) -> None:
        """A task was released. Those that the loss of a worker releases come before the call of `lost`."""
        if self._released[0] != stimulus_id:
            self._released = (stimulus_id, [])
        self._released[1].append(key)

    def lost(self, worker: str, stimulus_id: str) -> None:
        """Amend what can be; the rest is left to Dask's restart, which comes next. Never raises."""
        released = self._released[1] if self._released[0] == stimulus_id else []
        for record in self._runs.all():
            if worker not in record.participants and worker not in record.worker_for.values():
                continue
            # An owner that has not been sent anything yet is as lost; Dask would not know.
            record.participants.add(worker)
            try:
                if self._begin(record, worker, released):
                    # Dask restarts the shuffles in which the worker took part.
                    record.participants.discard(worker)
                    self._runs.counters.amended += 1
                else:
                    self._runs.counters.restarted += 1
            except Exception:
                self._failed()
            self._runs.changed(record)

    def drain(self, record: RunRecord) -> None:
        """Give outputs of workers that leave to others; restart the shuffle where that cannot be."""
        barrier = self._runs.barrier_of(record.id)
        if barrier is None or barrier.state in _OVER or record.failed or not self._runs.current(record):
            return
        workers = self._scheduler.workers
        leaving = {address for address, ws in workers.items() if leaves(ws)}
        if not leaving or leaving.isdisjoint(record.worker_for.values()):
            return
        if not record.owners_there(workers).intersection(barrier.worker_restrictions or workers):
            return  # the user allows no other worker
        if record.passed and barrier.state != "memory":
            # Its end is under way. Not from where that is heard: tasks are being moved there.
            self._runs.listen(barrier.key, functools.partial(self._drain_soon, record))
            return
        begin = self._after.begin if record.passed else self._begin_before_barrier
        begun = begin(record, barrier, None)
        if begun is Begun.EPOCH:
            self._runs.counters.drained += 1
            self.amend(record)
        elif begun is Begun.IMPOSSIBLE and any(ts.state not in NOT_WANTED for ts in barrier.dependents):
            self._runs.restart(record, "a worker that owns outputs begins no more tasks")

    def _drain_soon(self, record: RunRecord, *_: object) -> None:
        self._scheduler.loop.add_callback(self._try_drain, record)

    def _try_drain(self, record: RunRecord) -> None:
        try:
            self.drain(record)
        except Exception:
            self._failed()

    def place(self, record: RunRecord, key: Hashable) -> bool:
        """An output's task asks where it belongs; whether that was answered here."""
        self.drain(record)  # it may be wanted only now, or was taken back from a worker that leaves
        return self._after.place(record, key)

    def open_again(self, record: RunRecord, key: Hashable) -> bool:
        """The task of an output asks for what was handed out before; whether it is opened again."""
        begun, opened = self._after.ask(record, key)
        for one in begun:
            self.amend(one)
        return opened

    def _begin(self, record: RunRecord, worker: str, released: list[Hashable]) -> bool:
        """Begin an epoch without a worker, should there be need; False when the run cannot go on."""
        barrier = self._runs.barrier_of(record.id)
        if barrier is None or record.failed:
            return False
        if record.passed and barrier.state != "memory" and self._after.close(record, barrier):
            # The barrier's task was lost before its end was known: it runs again, as if it had not passed.
            record.happened(RunEvent.BARRIER_LOST)
        begin = self._after.begin if record.passed else self._begin_before_barrier
        begun = begin(record, barrier, worker)
        if begun is Begun.EPOCH:
            record.least.update(dict.fromkeys(released, record.amendments.epoch))
            self.amend(record)
        return begun is not Begun.IMPOSSIBLE

    def barrier_ended(self, shuffle_id: seam.ShuffleId | None) -> None:
        """The task of a barrier has ended well. It has to run again if its run has not passed any more.

        A worker was lost while the answer that it had passed was on its way. Its outputs are about to be sent to
        workers, before their rows are complete.
        """
        record = self._runs.get(shuffle_id) if shuffle_id else None
        barrier = self._runs.barrier_of(record.id) if record is not None else None
        if record is None or barrier is None or record.passed:
            return
        self._after.hold_back(barrier, back=True)
        # Not here: tasks are being moved.
        self._scheduler.loop.add_callback(self._barrier_again, record, barrier)

    def _barrier_again(self, record: RunRecord, barrier: TaskState) -> None:
        try:
            if self._runs.current(record) and not record.passed and barrier.state == "memory":
                stimulus_id = f"gpurt-barrier-again-{record.id}-{record.amendments.epoch}"
                self._scheduler.transitions({barrier.key: "released"}, stimulus_id=stimulus_id)
            self._after.hold_back(barrier, back=False)
        except Exception:
            self._failed()
            self._runs.restart(record, "its barrier cannot run again")

    def _begin_before_barrier(self, record: RunRecord, barrier: TaskState, lost: str | None) -> Begun:
        """The outputs of workers that are lost, or leave, get new owners."""
        if barrier.state not in _BEFORE_ITS_END:
            return Begun.IMPOSSIBLE
        state, worker_for, workers = record.amendments, record.worker_for, self._scheduler.workers
        there = record.owners_there(workers) - {lost}
        takers = running(workers, [a for a in barrier.worker_restrictions or there if a in there])
        needed = [output_of(ts.run_spec, record.id) for ts in barrier.dependents if ts.state != "memory"]
        if not takers or state.epoch >= EPOCHS or not all(part is None or part in worker_for for part in needed):
            return Begun.IMPOSSIBLE
        moved = reassign(worker_for, there, self._runs.partner_owners(record.id), takers)
        if lost is None and not moved:
            return Begun.NOTHING
        if lost is not None:
            state.lost.append(lost)
        state.epoch += 1
        state.void(record.alive(moved, workers))
        worker_for.update(moved)
        record.participants.update(worker_for.values())
        return Begun.EPOCH

    # ---- it is announced to the workers

    def amend(self, record: RunRecord) -> None:
        """Announce the epoch that has begun to the workers, in the background."""
        if record.telling is None:
            record.telling = asyncio.create_task(self._amend(record))
        self._runs.changed(record)

    async def _amend(self, record: RunRecord) -> None:
        state = record.amendments
        try:
            while self._runs.current(record):
                epoch, since = state.epoch, record.version
                if not await self._tell(record, epoch):
                    await record.change(since)
                # Before the barrier, that sees to the rest.
                elif state.epoch == epoch and (state.opened is None or await self._after.complete(record, epoch)):
                    break
        except (AnswersFailed, TimeoutError) as e:
            # One is stopped, or closes; or the query was cancelled meanwhile. It is no error of ours: a few of those
            # leave all shuffles to Dask.
            self._runs.restart(record, f"amending failed: {e}")
        except Exception:
            self._failed()
            self._runs.restart(record, f"amending failed: {traceback.format_exc(limit=1)}")
        finally:
            record.telling = None
            self._runs.changed(record)

    async def _tell(self, record: RunRecord, epoch: int) -> bool:
        """Tell the survivors of an epoch; False when that has to be done again, after a change."""
        state = record.amendments
        answers = await self._calls.amend(record)
        if answers is None or state.epoch != epoch or not self._runs.current(record):
            return False
        attempts, keys = record.agreed(answers)
        state.validity = Validity(epoch, attempts)
        again = self.run_again if state.opened is None else self._after.run_again
        again(record, keys, f"gpurt-amend-{record.id}-{epoch}")
        return await self._calls.tell(record, Valid(epoch, attempts)) is not None

    # ---- transfer tasks before the barrier

    def undone(self, record: RunRecord, keys: set[Hashable]) -> set[Hashable]:
        """Transfer tasks that count as done, and for whose inputs no worker vouches."""
        barrier = self._runs.barrier_of(record.id)
        transfers: Iterable[TaskState] = () if barrier is None else barrier.dependencies
        return undone([ts.key for ts in transfers if ts.state == "memory"], keys)

    def run_again(self, record: RunRecord, keys: set[Hashable], stimulus_id: str) -> int:
        """Have the transfer tasks run again that are `undone`; how many."""
        again = self.undone(record, keys)
        self._runs.counters.transfers_again += len(again)
        if again:
            self._scheduler.transitions(dict.fromkeys(again, "released"), stimulus_id=stimulus_id)
            self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)
        return len(again)
