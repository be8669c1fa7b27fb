"""How fast the network to a peer is, from its traffic. Pure: events and times in, bytes per second out.

The bandwidth is that of the fastest stretch of the traffic lately: all of it, by the time in which any was under way.
What the workers are busy with besides makes a stretch slow, never fast. A network that is taken for slower than it is
costs processor time, as more is compressed (`compress`). Not the fastest message, which `worker.sender.MessageRate`
takes to price the move of an output: of ten under way each looks ten times slower than the network.
"""

from __future__ import annotations

from dask_gpurt.shuffle.transport.select.trials import Meter

#: bytes of a stretch whose speed counts
STRETCH = 4 << 20
#: share that a fast stretch keeps after another one: a network that has become slow is known after some dozens
FADE = 0.98
#: looks in a row that gained nothing after which the pause between two no longer doubles: samples cost little beside
#: what a slow network takes, and too much where compressing just does not pay
REST = 5
_FLOW = ("", 0)


class LinkBandwidth:
    """Bytes per second to one peer, in the fastest stretch lately."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._bytes, self._seconds = 0, 0.0
        #: 0: not known yet
        self.best = 0.0
        self._rest, self._fruitless = 0, 0

    def began(self, nbytes: int, now: float) -> None:
        """Enter a message that is handed over to a transport."""
        self._meter.begun(_FLOW, nbytes, now)

    def ended(self, nbytes: int, now: float, stored: bool) -> None:
        """Enter that a message is stored, or never will be."""
        self._meter.ended(_FLOW, nbytes, now, stored)
        flow = self._meter.flow(_FLOW)
        if flow.nbytes - self._bytes < STRETCH or flow.seconds <= self._seconds:
            return
        self.best = max(FADE * self.best, (flow.nbytes - self._bytes) / (flow.seconds - self._seconds))
        self._bytes, self._seconds = flow.nbytes, flow.seconds

    def turn(self) -> bool:
        """Whether the next message is one to be looked at."""
        self._rest -= self._rest > 0
        return not self._rest

    def looked(self, gained: bool) -> None:
        """Enter that a message was looked at, and whether compressing it gained anything."""
        self._fruitless = 0 if gained else min(self._fruitless + 1, REST)
        self._rest = (1 << self._fruitless) - 1
