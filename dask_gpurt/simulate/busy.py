"""`Busy`: the scheduler's one thread. What it is sent is done in order, and takes time on the virtual clock.

A decision is made when a message is begun, with what is known by then. What is sent about it leaves when the message
is done. The time is a constant for each kind of message (`SchedulerCost`), so that a run can be repeated on any
machine. With no cost, everything is done at once.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.simulate.clock import VirtualLoop
    from dask_gpurt.simulate.model import SchedulerCost

_Ts = TypeVarTuple("_Ts")


class Busy:
    """The queue in front of the scheduler."""

    def __init__(self, loop: VirtualLoop, cost: SchedulerCost) -> None:
        self._loop = loop
        #: a policy of this package replaces it by its own
        self.cost = cost
        self._inbox: collections.deque[tuple[float, Callable[..., object], tuple[object, ...]]] = collections.deque()
        self._until = 0.0
        self._draining = False

    @property
    def sends_at(self) -> float:
        """When the scheduler sends what it has to say now: after the work that it is busy with."""
        return max(self._loop.now, self._until)

    def hold(self, seconds: float) -> None:
        """It is busy for so long from now."""
        self._until = self._loop.now + seconds
        self._loop.worked_seconds += seconds

    def arrives(self, seconds: float, function: Callable[[*_Ts], object], *args: *_Ts) -> None:
        """Something to do, which takes so long; what comes meanwhile waits, in order."""
        if not (seconds or self._draining or self._until > self._loop.now):
            function(*args)
            return
        self._inbox.append((seconds, function, args))
        if not self._draining:
            self._draining = True
            self._loop.at(self._until, self._drain)

    def _drain(self) -> None:
        seconds, function, args = self._inbox.popleft()
        self.hold(seconds)
        function(*args)
        if self._inbox:
            self._loop.at(self._until, self._drain)
        else:
            self._draining = False
