"""Choose the transport of a message. Pure: figures in, a name out.

Theory of operation. What can reach a peer is known from its card (`candidates`); which of these is fastest is measured.
Every pair starts from speeds measured before (`PRIOR`, GB/s by place and size of message) and learns from its own
traffic, by trials (`trials`), for each class of sizes on its own. A transport that lost a link is out for
`BACKOFF_SECONDS`, twice as long each time within `BACKOFF_LIMIT`; the safe path is always in.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from dask_gpurt.shuffle.transport.select.trials import Contest, Meter

if TYPE_CHECKING:
    from collections.abc import Iterable

#: always there: distributed's comms
SAFE = "rpc"
INPROC = "inproc"
#: stands for device memory among the ways that are out for a while: the peer had none for a message
DEVICE = "device"
BACKOFF_SECONDS = 5.0
BACKOFF_LIMIT = 300.0
#: where the columns of `PRIOR` end
_COLUMNS = (1 << 18, 1 << 22)
#: bytes of a stretch whose speed counts
STRETCH = 4 << 20
#: share that a fast stretch keeps after another one: a network that has become slow is known after some dozens
FADE = 0.98
#: looks in a row that gained nothing after which the pause between two no longer doubles: samples cost little beside
#: what a slow network takes, and too much where compressing just does not pay
REST = 5


class Locality(enum.Enum):
    """Where a peer is."""

    PROCESS = "same process"
    HOST = "same host"
    REMOTE = "another host"


#: place -> transport -> GB/s for messages below 256 KiB, below 4 MiB, and longer, as `benchmarks/transport.py` has
#: them. What counts is their order; a pair's traffic decides in the end.
# Those of `tls` lie between `tcp` and the safe path: the order of whole shuffles in `benchmarks/transport_tls.py`.
PRIOR: dict[Locality, dict[str, tuple[float, float, float]]] = {
    Locality.HOST: {"ucx": (0.21, 1.4, 2.0), "tcp": (0.28, 2.0, 3.0), "tls": (0.25, 1.8, 3.0), SAFE: (0.16, 1.2, 1.6)},
    Locality.REMOTE: {"ucx": (0.19, 1.1, 1.6), "tcp": (0.26, 1.8, 2.0), "tls": (0.2, 1.3, 1.6), SAFE: (0.17, 1.2, 1.5)},
}


#: ways for device buffers, the better one first
_DEVICE_WAYS = (INPROC, "ucx")
#: device buffers have no choice, and what they take says nothing about the others
_DEVICE = -1
#: all messages, for the bandwidth
_FLOW = ("", 0)


def _size_class(nbytes: int) -> int:
    """Sizes within a factor of four are one class: a mix of longer ones would make a way look slow."""
    return max(0, nbytes.bit_length() - 15) // 2


class LinkBandwidth:
    """Bytes per second of the network to one peer: those of the fastest stretch of the traffic to it lately.

    A stretch is all of the traffic, by the time in which any was under way. What the workers are busy with besides
    makes one slow, never fast. A network that is taken for slower than it is costs processor time, as more is
    compressed (`compress`). Not that of the fastest message (`worker.sender.Sender.fastest`), by which the move of an
    output is priced: of ten under way each looks ten times slower than the network.
    """

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


class TransportChooser:
    """What is known about the ways to one peer.

    Parameters
    ----------
    candidates
        Transports that reach it, besides the safe path.
    forced
        ``auto``, or the only transport to use besides the safe one.
    """

    def __init__(self, place: Locality, candidates: Iterable[str], forced: str = "auto") -> None:
        self.place = place
        self.candidates = tuple(dict.fromkeys([*candidates, SAFE]))
        self.forced = forced
        self._meter = Meter()
        #: of what is long enough to say it
        self.pace = LinkBandwidth()
        self._contests: dict[int, Contest] = {}
        #: transport -> (out until, times lost)
        self._out: dict[str, tuple[float, int]] = {}

    def choose(self, nbytes: int, device: bool, now: float) -> str:
        """The transport for a message of `nbytes`."""
        able = self.candidates
        if self._out:
            able = tuple(c for c in able if c == SAFE or not self._is_out(c, now))
        if device:
            ways = () if self._is_out(DEVICE, now) else _DEVICE_WAYS if self.forced == "auto" else (self.forced,)
            return next((way for way in _DEVICE_WAYS if way in ways and way in able), SAFE)
        if self.forced != "auto":
            return self.forced if self.forced in able else SAFE
        if INPROC in able:
            return INPROC
        size = _size_class(nbytes)
        contest = self._contests.get(size)
        if contest is None:
            contest = self._contests[size] = Contest(self._priors(nbytes), self._meter, size)
        return contest.pick(able, nbytes)

    def _is_out(self, name: str, now: float) -> bool:
        return self._out.get(name, (0.0, 0))[0] > now

    def _priors(self, nbytes: int) -> dict[str, float]:
        column = sum(nbytes >= least for least in _COLUMNS)
        known = PRIOR.get(self.place, {})
        return {name: known.get(name, (0.0, 0.0, 0.0))[column] * 1e9 for name in self.candidates}

    def began(self, name: str, nbytes: int, device: bool, now: float, wire_bytes: int = 0) -> None:
        """Enter a message that is handed over to a transport; `wire_bytes` show the network's bandwidth, or are 0."""
        self._meter.begun((name, _DEVICE if device else _size_class(nbytes)), nbytes, now)
        if wire_bytes:
            self.pace.began(wire_bytes, now)

    def ended(self, name: str, nbytes: int, device: bool, now: float, stored: bool, wire_bytes: int = 0) -> None:
        """Enter that a message is stored, or never will be by this transport."""
        size = _DEVICE if device else _size_class(nbytes)
        self._meter.ended((name, size), nbytes, now, stored)
        if wire_bytes:
            self.pace.ended(wire_bytes, now, stored)
        contest = self._contests.get(size)
        if contest is None:
            return
        if stored:
            contest.ended()
        else:
            contest.give_up(name)

    def lost(self, name: str, now: float) -> None:
        """Enter that a link of this transport was lost, or that the peer has no device memory (`DEVICE`)."""
        until, times = self._out.get(name, (0.0, 0))
        if until <= now:
            if now - until > BACKOFF_LIMIT:  # well for longer than it is ever out: this is another trouble
                times = 0
            self._out[name] = (now + min(BACKOFF_LIMIT, BACKOFF_SECONDS * 2**times), times + 1)
