"""`TierPlugin`: what the tiers' two parts on the scheduler have in common (`hints.scheduler`, `shared.scheduler`).

Each belongs to one scheduler, looks at its workers now and then, and speaks only with those that understand. A worker
says so in its heartbeats: ``metrics["gpurt"]`` has a field per protocol. Others must never get a message of ours, as an
unknown op closes them.

A failure is counted (`circuit_breaker`) and raises nothing into the scheduler. After too many the part stops, and the
tiers go on without it.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import TYPE_CHECKING

from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from dask_gpurt.model.circuit_breaker import Guard
from dask_gpurt.model.events import Sink, null_sink

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.scheduler import Scheduler, WorkerState

logger = logging.getLogger("distributed.scheduler.gpurt")

#: entry of ``worker.metrics`` with a field per protocol
HEARTBEAT_NAME = "gpurt"


def speaks(ws: WorkerState, field: str, protocol: int) -> bool:
    """Say whether the last heartbeat of a worker named this protocol."""
    ours = ws.metrics.get(HEARTBEAT_NAME)
    return isinstance(ours, dict) and ours.get(field) == protocol


def unsay(scheduler: Scheduler, field: str) -> None:
    """Forget what workers said of this protocol so far: where its part has left since, they do not listen any more."""
    for ws in scheduler.workers.values():
        ours = ws.metrics.get(HEARTBEAT_NAME)
        if isinstance(ours, dict):
            ours.pop(field, None)


class TierPlugin(SchedulerPlugin):
    """A part of the tiers on one scheduler.

    Parameters
    ----------
    part
        Its name in events and log lines.
    look
        Called at the start, and every `look_seconds` from then on, while it is on a scheduler.
    stop
        Called when it is switched off after too many failures.
    sink
        Receives ``tiers.fallback`` and ``tiers.retired``.
    """

    idempotent = True

    def __init__(
        self,
        part: str,
        *,
        look: Callable[[Scheduler], None],
        look_seconds: float,
        stop: Callable[[], None],
        sink: Sink = null_sink,
    ) -> None:
        self._sink = sink
        self._guard = Guard("tiers", logger, sink=sink)
        self.part = self._guard.part(part, on_retired=stop)
        self._scheduler: Scheduler | None = None
        self._look = look
        self._look_seconds = look_seconds
        self._look_again: PeriodicCallback | None = None

    @abstractmethod
    def _prepare(self, scheduler: Scheduler) -> None:
        """Look up what is relied on, then begin. Raises `SeamMismatch`, with nothing changed."""

    async def start(self, scheduler: Scheduler) -> None:
        """Begin. A second call for the same scheduler does nothing.

        Raises
        ------
        SeamMismatch
            This distributed is not what it was written for.
        """
        if self._scheduler is not None:
            return
        self._prepare(scheduler)
        self._scheduler = scheduler
        self._look_again = PeriodicCallback(self.look, self._look_seconds * 1000)
        self._look_again.start()
        self.look()

    def _end(self) -> Scheduler | None:
        """Look at workers no longer; the scheduler that this was on, None if it had ended before."""
        scheduler, self._scheduler = self._scheduler, None
        if self._look_again is not None:
            self._look_again.stop()
            self._look_again = None
        return scheduler

    def look(self) -> None:
        """Look at the workers of the scheduler."""
        if self._scheduler is not None:
            try:
                self._look(self._scheduler)
            except Exception:
                self._failed("look")

    def _failed(self, where: str) -> None:
        self._guard.failed(self.part.name, where)
