"""`Barrier`: when the barrier of a shuffle passes. On the scheduler.

Theory of operation. The barrier's task runs on a worker, and its call waits here. All workers flush; the barrier passes
when they have done so in one epoch, no epoch is being announced, each input of an amended run is vouched for, and no
output changes hands. `Barrier.passes` tries (`_once`) until it does. Between two tries it waits for a change of the
run, or of a run that shares outputs with it (`runs`).

The task's thread must not wait here for transfer tasks: it may be the only one left to run them. So the answer is that
the barrier's task has to run again as soon as the task is not ``processing`` any more.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.messages import Reopen
from dask_gpurt.shuffle.scheduler.calls import AnswersFailed, FlushFailed
from dask_gpurt.shuffle.scheduler.phases import RunEvent
from dask_gpurt.shuffle.scheduler.runs import PATIENCE, PATIENCE_SECONDS, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.shuffle.scheduler.calls import Calls
    from dask_gpurt.shuffle.scheduler.rebalance import Binder
    from dask_gpurt.shuffle.scheduler.recovery import Amender
    from dask_gpurt.shuffle.scheduler.runs import RunRecord, Runs


class Barrier:
    """Lets the barriers of one scheduler's runs pass.

    Parameters
    ----------
    reached
        Called with a run whose inputs are all split, before they are flushed.
    """

    def __init__(
        self,
        runs: Runs,
        calls: Calls,
        amender: Amender,
        binder: Binder,
        reached: Callable[[RunRecord], None],
        failed: Callable[[], None],
    ) -> None:
        self._runs = runs
        self._calls = calls
        self._amender = amender
        self._binder = binder
        self._reached = reached
        self._failed = failed

    async def passes(self, shuffle_id: seam.ShuffleId, run_id: int) -> bool:
        """Return True when all inputs of a run are where they belong, False when its task has to run again.

        So it has when its run is dropped meanwhile: a worker may take the answer for one to the next run's barrier.

        Raises
        ------
        KeyError, ValueError, RuntimeError
            As Dask's: the run is not there, is another one, or cannot be flushed.
        """
        record = self._runs.get(shuffle_id)
        if record is None:
            raise KeyError(shuffle_id)
        if record.run.run_id != run_id:
            raise ValueError(f"{run_id=} does not match {record.run}")
        failures = 0
        if self._processing(record):
            self._reached(record)
        while self._processing(record):
            since = record.version
            try:
                step = await self._once(record)
            except FlushFailed as e:
                failures += not self._calls.closing(record.participants)
                if failures > PATIENCE and record.amendments.handing:
                    self._runs.restart(record, f"outputs cannot be handed over: {e}")
                    return False
                if failures > PATIENCE:
                    raise RuntimeError(f"Unexpected error encountered during P2P barrier: {e}") from e
                await asyncio.sleep(PATIENCE_SECONDS)
                continue
            except (TimeoutError, AnswersFailed) as e:
                # A worker that is stopped, or closes and waits for its threads, but is not gone. Dask asks nothing
                # here, so the query must not fail. Such calls follow a loss, so restarts do not go on for ever.
                self._runs.restart(record, str(e))
                return False
            if step is Step.DONE:
                return True
            if step is Step.WAIT:
                await record.change(since)
        return False

    def _processing(self, record: RunRecord) -> bool:
        """Whether a run goes on and its barrier's task is processed."""
        barrier = self._runs.barrier_of(record.id)
        return self._runs.current(record) and barrier is not None and barrier.state == "processing"

    async def _once(self, record: RunRecord) -> Step:
        """Flush, and let the barrier pass if all is in place.

        Raises
        ------
        FlushFailed
            A worker cannot flush.
        """
        if record.telling is not None:
            return Step.WAIT
        state = record.amendments
        epoch, workers = state.epoch, list(record.participants)
        problems, _ = await asyncio.gather(self._calls.flush(record, workers), self._binder.hear(record, workers))
        if problems is None:
            return Step.WAIT  # the lost worker took part: an epoch or a restart is next
        if not self._same(record, epoch) or set(workers) != record.participants:
            return Step.AGAIN
        if problems:
            raise FlushFailed(repr(problems[0]))
        if epoch and not await self._all_vouched(record, epoch):
            return Step.WAIT
        if (step := await self._binder.settled(record)) is not Step.DONE:
            return step
        if not self._same(record, epoch) or record.telling is not None:
            return Step.AGAIN
        if (step := self._bind(record)) is not Step.DONE:
            return step
        state.handing.clear()
        if (barrier := self._runs.barrier_of(record.id)) is not None:
            record.inputs = len(barrier.dependencies)
        record.happened(RunEvent.BARRIER_PASSED)
        # Its partner may wait for the result.
        self._runs.listen(seam.barrier_key(record.id), functools.partial(self._runs.changed, record))
        return Step.DONE

    async def _all_vouched(self, record: RunRecord, epoch: int) -> bool:
        """Whether some worker vouches for every input of an amended run; else their tasks run again."""
        answers = await self._calls.amend(record)
        if answers is None or record.amendments.epoch != epoch or not self._runs.current(record):
            return False
        _, keys = record.agreed(answers)
        if not self._amender.undone(record, keys):
            return True
        # They have flushed, and have to take inputs again before the first of these comes.
        reached = await self._calls.tell(record, Reopen(epoch))
        if reached is not None and record.amendments.epoch == epoch and self._runs.current(record):
            self._amender.run_again(record, keys, f"gpurt-complete-{record.id}-{epoch}")
        return False

    def _bind(self, record: RunRecord) -> Step:
        """Bind outputs late, should that be worth it. Never raises."""
        try:
            moved = self._binder.begin(record)
        except Exception:
            self._failed()
            return Step.DONE
        if moved is None:
            return Step.WAIT
        for one in moved:
            self._amender.amend(one)
        return Step.AGAIN if moved else Step.DONE

    def _same(self, record: RunRecord, epoch: int) -> bool:
        """Whether nothing has happened to a run, and its barrier, since it was looked at."""
        return record.amendments.epoch == epoch and self._processing(record)
