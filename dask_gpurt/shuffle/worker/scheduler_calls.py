"""What a run asks of the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.messages import OPEN_OUTPUT, BarrierAnswer, OutputOpened

if TYPE_CHECKING:
    from collections.abc import Hashable

    from dask_gpurt.shuffle.counters import ShuffleCounters


class _Scheduler(Protocol):
    """The scheduler's handlers, by distributed's comms; and `OPEN_OUTPUT`."""

    async def shuffle_barrier(self, *, id: str, run_id: int, consistent: bool) -> str | None:
        """The barrier is reached; not consistent: restart the shuffle."""

    async def shuffle_restrict_task(self, *, id: str, run_id: int, key: Hashable, worker: str) -> dict[str, Any]:
        """Have a task run on the owner of its output."""


class SchedulerCalls:
    """Calls of one run to the scheduler. All on the event loop."""

    def __init__(self, scheduler: _Scheduler, shuffle_id: str, run_id: int, counters: ShuffleCounters) -> None:
        self._scheduler = scheduler
        self._id, self._run_id = shuffle_id, run_id
        self._counters = counters

    async def barrier(self, consistent: bool) -> None:
        """Wait until the barrier has passed.

        Raises
        ------
        Reschedule
            Inputs have to be split again first.
        """
        answer = await self._scheduler.shuffle_barrier(id=self._id, run_id=self._run_id, consistent=consistent)
        if answer == BarrierAnswer.RUN_AGAIN.value:
            raise seam.Reschedule

    async def restart(self) -> None:
        """Have the shuffle start anew, as run id + 1."""
        try:
            await self._scheduler.shuffle_barrier(id=self._id, run_id=self._run_id, consistent=False)
        except Exception as e:
            # The scheduler knows no such run: it was restarted or forgotten meanwhile, and the message that closes it
            # here is under way. Then running the task again is right too.
            self._counters.add(restarts_refused=1)
            self._counters.last_error = f"{self._id}[{self._run_id}]: {e!r}"

    async def move_task(self, key: Hashable, owner: str) -> NoReturn:
        """Have the task of an output run on its owner, once the output is complete.

        Raises
        ------
        Reschedule
            Always.
        """
        await self._scheduler.shuffle_restrict_task(id=self._id, run_id=self._run_id, key=key, worker=owner)
        raise seam.Reschedule

    async def open_again(self, key: Hashable) -> bool:
        """Whether the scheduler has an output that was handed out opened again, for its task to wait for."""
        answer = await getattr(self._scheduler, OPEN_OUTPUT)(id=self._id, run_id=self._run_id, key=key)
        return OutputOpened.from_dict(answer).opened
