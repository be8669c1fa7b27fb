"""`FetchSources`: with several zones, workers fetch inputs from holders in their own zone. See `seam` for the rules.

The message that assigns a task lists all holders of each input. The worker fetches from a random one; only holders on
its own host go first. So the second worker of a rack fetches across the slow link again what the first one has already.
Here the holders in other zones are left out of the list when the worker's own zone has one.

This is safe because the list is a hint. A worker that finds no holder there, or only busy ones, asks the scheduler,
which answers with all of them. Nothing is ever added, and no list becomes empty.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dask_gpurt.model.wrapped import Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.scheduler import Scheduler, TaskState

    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.topology.zones import Zones

logger = logging.getLogger("distributed.scheduler.gpurt")

NAME = "_task_to_msg"


class FetchSources(Wrapped):
    """Overrides how one scheduler lists the holders of inputs in its messages to workers."""

    def __init__(self, scheduler: Scheduler, guard: Guard, zones: Zones) -> None:
        self.guard = guard
        self.zones = zones
        #: lists that were shortened
        self.shortened = 0
        super().__init__(scheduler, NAME)

    def install(self) -> None:
        """Take over, unless something else has."""
        if self._had:
            logger.info("placement: Scheduler.%s is overridden; workers fetch from any holder", NAME)
        else:
            super().install()

    def _wrap(self, stock: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        part, zones = self.guard.part(NAME), self.zones

        def _task_to_msg(ts: TaskState) -> dict[str, Any]:
            msg = stock(ts)
            if self._active and part.retired is None and zones.several:
                try:
                    self._shorten(msg, ts.processing_on.address)
                except Exception:
                    self.guard.failed(NAME)
            return msg

        return _task_to_msg

    def _shorten(self, msg: dict[str, Any], address: str) -> None:
        by_address = self.zones.by_address
        zone = by_address.get(address)
        if zone is None:
            return
        who_has = msg["who_has"]
        for key, holders in who_has.items():
            if len(holders) > 1:
                near = tuple(h for h in holders if by_address.get(h) == zone)
                if 0 < len(near) < len(holders):
                    who_has[key] = near
                    self.shortened += 1

    def uninstall(self) -> None:
        """Restore the scheduler's own method. An override put over it since is left, with a warning."""
        was_active = self._active
        super().uninstall()
        if was_active and NAME in self._place:
            logger.warning("Scheduler.%s was overridden after placement took it over; left as it is", NAME)
