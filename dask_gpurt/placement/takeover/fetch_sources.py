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

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.scheduler import Scheduler, TaskState

    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.topology.zones import Zones

logger = logging.getLogger("distributed.scheduler.gpurt")

NAME = "_task_to_msg"


class FetchSources:
    """Overrides how one scheduler lists the holders of inputs in its messages to workers."""

    def __init__(self, scheduler: Scheduler, guard: Guard, zones: Zones) -> None:
        self.scheduler = scheduler
        self.guard = guard
        self.zones = zones
        #: lists that were shortened
        self.shortened = 0
        self._ours: Callable[..., object] | None = None

    def install(self) -> None:
        """Take over, unless something else has."""
        scheduler = self.scheduler
        if NAME in scheduler.__dict__:
            logger.info("placement: Scheduler.%s is overridden; workers fetch from any holder", NAME)
            return
        part = self.guard.part(NAME)
        stock = getattr(type(scheduler), NAME).__get__(scheduler)
        zones = self.zones

        def _task_to_msg(ts: TaskState) -> dict[str, Any]:
            msg = stock(ts)
            if part.retired is None and zones.several:
                try:
                    self._shorten(msg, ts.processing_on.address)
                except Exception:
                    self.guard.failed(NAME)
            return msg

        self._ours = scheduler.__dict__[NAME] = _task_to_msg

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
        ours, self._ours = self._ours, None
        if ours is None:
            return
        if self.scheduler.__dict__.get(NAME) is ours:
            del self.scheduler.__dict__[NAME]
        else:
            logger.warning("Scheduler.%s was overridden after placement took it over; left as it is", NAME)
