"""Choose the transport of a message. Pure: figures in, a name out.

Theory of operation. What can reach a peer is known from its card, and which of these is faster from measurements
(`benchmarks/transport.py`, without RDMA): memory of the same process, then our own sockets, then UCX, then
distributed's comms (the *safe path*). What lies on a device goes by UCX or by the safe path. A transport that lost a
link is out for `BACKOFF_SECONDS`, twice as long each time within `BACKOFF_LIMIT`; the safe path is always in.
One that has never brought a message to a peer is out `NEVER_WORKED` times as long each time, without a limit: mostly
a firewall drops it, and each new try keeps the messages waiting until it is given up.

Rejected: to learn the order from the traffic, by a few messages another way. Sockets won at every size and place, so
all that it did was to send up to one message in twenty over distributed's comms, and it cost up to 16 % of the speed.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: always there: distributed's comms
SAFE = "rpc"
INPROC = "inproc"
#: stands for device memory among the ways that are out for a while: the peer had none for a message
DEVICE = "device"
BACKOFF_SECONDS = 5.0
BACKOFF_LIMIT = 300.0
NEVER_WORKED = 4
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


#: ways for buffers in host memory, the better one first
_HOST_WAYS: tuple[str, ...] = (INPROC, "tcp", "tls", "ucx")
#: ways for device buffers, the better one first
_DEVICE_WAYS: tuple[str, ...] = (INPROC, "ucx")


class LinkBandwidth:
    """Bytes per second of the network to one peer: those of the fastest stretch of the traffic to it lately.

    A stretch is all of the traffic, by the time in which any was under way. What the workers are busy with besides
    makes one slow, never fast. A network that is taken for slower than it is costs processor time, as more is
    compressed (`compress`). Not that of the fastest message (`worker.sender.Sender.fastest`), by which the move of an
    output is priced: of ten under way each looks ten times slower than the network.
    """

    def __init__(self) -> None:
        #: messages under way, and since when (seconds of any clock)
        self._flying, self._at = 0, 0.0
        #: of the stretch that is under way
        self._bytes, self._seconds = 0, 0.0
        #: 0: not known yet
        self.best = 0.0
        self._rest, self._fruitless = 0, 0

    def began(self, now: float) -> None:
        """Enter a message that is handed over to a transport."""
        self._pass(now)
        self._flying += 1

    def ended(self, nbytes: int, now: float, stored: bool) -> None:
        """Enter that a message is stored, or never will be."""
        self._pass(now)
        self._flying -= 1
        if not stored:
            return
        self._bytes += nbytes
        if self._bytes >= STRETCH and self._seconds > 0:
            self.best = max(FADE * self.best, self._bytes / self._seconds)
            self._bytes, self._seconds = 0, 0.0

    def _pass(self, now: float) -> None:
        if self._flying:
            self._seconds += max(0.0, now - self._at)
        self._at = now

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
        #: of what is long enough to say it
        self.pace = LinkBandwidth()
        #: transport -> (out until, times lost)
        self._out: dict[str, tuple[float, int]] = {}

    def choose(self, device: bool, now: float) -> str:
        """The transport for a message."""
        ways = _DEVICE_WAYS if device else _HOST_WAYS
        if self.forced != "auto":
            ways = tuple(way for way in ways if way == self.forced)
        if device and self._is_out(DEVICE, now):
            return SAFE
        return next((way for way in ways if way in self.candidates and not self._is_out(way, now)), SAFE)

    def _is_out(self, name: str, now: float) -> bool:
        return self._out.get(name, (0.0, 0))[0] > now

    def lost(self, name: str, now: float, worked: bool = True) -> None:
        """Enter that a link of this transport was lost, or that the peer has no device memory (`DEVICE`).

        Parameters
        ----------
        worked
            It has brought a message to this peer before.
        """
        until, times = self._out.get(name, (0.0, 0))
        if until > now:
            return
        if not worked:
            self._out[name] = (now + BACKOFF_SECONDS * NEVER_WORKED**times, times + 1)
            return
        if now - until > BACKOFF_LIMIT:  # well for longer than it is ever out: this is another trouble
            times = 0
        self._out[name] = (now + min(BACKOFF_LIMIT, BACKOFF_SECONDS * 2**times), times + 1)
