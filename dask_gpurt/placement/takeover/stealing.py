"""`Stealing`: override which worker steals a task, and move single tasks by work stealing. See `seam` for the rules.

``extension._get_thief`` is the one place between "this task could be moved" and Dask's test whether it pays. The
override answers with a worker, with None (the task stays), or lets *stock*, Dask's own method, choose. Everything after
it is stock: its test, the request to the victim, the confirmation. So a task is only moved when its worker has not
begun it.

Rejected: true seconds in ``get_comm_cost`` (measured: ten times as many moves, see `StealCost.comm_cost`); replacing
``balance`` (a hundred lines of state to keep in step with every release).
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import dask
from distributed.core import Status

from dask_gpurt.placement.decide.steal_policy import MAX_INPUTS, STOCK, Stock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distributed.scheduler import Scheduler, TaskState, WorkerState
    from distributed.stealing import WorkStealing

    from dask_gpurt.model.circuit_breaker import Guard

logger = logging.getLogger("distributed.scheduler.gpurt")

NAME = "stealing._get_thief"
#: attributes of the extension that are used
USED = (
    *("_get_thief", "balance", "in_flight", "in_flight_occupancy", "in_flight_tasks", "key_stealable"),
    "move_task_request",
)
PARAMETERS = ("scheduler", "ts", "potential_thieves", "occupancies")
#: the scheduler's periodic callback of stock's own rounds
CALLBACK = "stealing"
#: waiting tasks that an additional round looks at; after one that looked at more, so many times as many are left out
LOOKED = 2000


class Stealing:
    """Overrides the choice of thieves in one scheduler's stealing extension."""

    def __init__(self, scheduler: Scheduler, guard: Guard) -> None:
        self.scheduler = scheduler
        self.guard = guard
        #: tasks asked for from slow workers
        self.requested = 0
        self._extension: WorkStealing | None = None
        self._ours: Callable[..., object] | None = None
        #: a round of balancing that stock would not have made goes on
        self._additional = False
        #: tasks that this round has looked at, and additional rounds that are left out
        self._looked = self._rest = 0
        self._wanted = bool(dask.config.get("distributed.scheduler.work-stealing"))

    @property
    def installed(self) -> bool:
        """Whether the override is in place."""
        return self._extension is not None

    def install(self, choose: Callable[..., WorkerState | Stock | None]) -> bool:
        """Put ``choose(ts, thieves, in_flight, valid)`` in place; False when there is no stealing or an unknown one."""
        extension = self.scheduler.extensions.get("stealing")
        if extension is None:
            return False
        if any(not hasattr(extension, name) for name in USED) or "_get_thief" in extension.__dict__:
            logger.info("placement: work stealing is overridden or lacks attributes; left as it is: %r", extension)
            return False
        if tuple(inspect.signature(extension._get_thief).parameters) != PARAMETERS:
            logger.info("placement: _get_thief has other parameters in this version; stealing is left as it is")
            return False
        part = self.guard.part(NAME)
        stock = extension._get_thief

        def _get_thief(
            scheduler: Scheduler,
            ts: TaskState,
            potential_thieves: set[WorkerState],
            *,
            occupancies: dict[WorkerState, float],
        ) -> WorkerState | None:
            self._looked += 1
            if part.retired is None:
                try:
                    valid = self.may_steal(ts, potential_thieves)
                    ws = choose(ts, potential_thieves, extension.in_flight_tasks, valid)
                    if ws is None:
                        return None
                    if ws is not STOCK:
                        if ws in potential_thieves and (valid is None or ws in valid):
                            return ws
                        self.guard.failed(NAME, "rejected", f"{ws!r} may not steal {ts!r}")
                except Exception:
                    self.guard.failed(NAME)
            if self._additional and len(ts.dependencies) > MAX_INPUTS:
                # Each round moves what waits for its inputs once more, and it fetches anew. Measured with 128 inputs:
                # 39 s by stock's rounds, 57 s with ten times as many. Rejected: no task without an opinion. Those of
                # unknown duration gain by being moved soon (up to 14 %, 1.5 per mille on the mean of 240 cases).
                return None
            return stock(scheduler, ts, potential_thieves, occupancies=occupancies)

        self._extension, self._ours = extension, _get_thief
        extension._get_thief = _get_thief
        return True

    def uninstall(self) -> None:
        """Restore the extension's own method. An override put over ours since is left, with a warning."""
        extension, self._extension = self._extension, None
        if extension is None:
            return
        if extension.__dict__.get("_get_thief") is self._ours:
            del extension._get_thief
        else:
            logger.warning("stealing._get_thief was overridden after placement took it over; left as it is")

    def may_steal(self, ts: TaskState, thieves: Iterable[WorkerState]) -> set[WorkerState] | None:
        """The workers that may take a task from its worker; None: any.

        A wish for workers (``allow_other_workers``) binds while one of these is a thief, as in stock.
        """
        valid = self.scheduler.valid_workers(ts)
        return None if valid is not None and ts.loose_restrictions and valid.isdisjoint(thieves) else valid

    def request(self, ts: TaskState, thief: WorkerState) -> bool:
        """Ask the worker of a task to give it up for another; False when stealing may not touch it."""
        extension = self._extension
        victim = ts.processing_on
        if extension is None or not self._goes_on() or victim is None:
            return False
        if ts in extension.in_flight or ts not in extension.key_stealable:
            return False
        extension.move_task_request(ts, victim, thief)
        self.requested += 1
        return True

    def balance(self) -> None:
        """Run a round of Dask's balancing now. It moves no tasks with very many inputs.

        Does nothing where the user has switched stealing off or stopped it. It is left out as often as the last one was
        too long: a round looks at every task that waits on a full worker. With 100,000 that may run there only,
        ten rounds a second would leave the event loop no time for anything else.
        """
        if self._extension is None or not self._goes_on():
            return
        if self._rest:
            self._rest -= 1
            return
        self._additional, self._looked = True, 0
        try:
            self._extension.balance()
        finally:
            self._additional, self._rest = False, self._looked // LOOKED

    def worker_removed(self) -> None:
        """Have the extension forget workers that have left.

        It notes each worker that a round looks at, and drops that only when a move ends, and not all. Our rounds look
        more often than they move.
        """
        extension = self._extension
        if extension is not None and not extension.in_flight:
            extension.in_flight_occupancy.clear()
            extension.in_flight_tasks.clear()

    def _goes_on(self) -> bool:
        """Whether the user has neither switched stealing off nor stopped it.

        `WorkStealing.stop` waits until no task is being moved, so it would wait for us. (A simulated scheduler never
        runs, and has no callback.)
        """
        return self._wanted and (
            CALLBACK in self.scheduler.periodic_callbacks or self.scheduler.status is not Status.running
        )

    @property
    def in_flight(self) -> Any:
        """WorkerState -> tasks being moved to it."""
        return {} if self._extension is None else self._extension.in_flight_tasks
