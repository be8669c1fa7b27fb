"""Which workers are near one another, before anything was moved between them: by the round trip to the scheduler.

Two racks joined by a slow link look like one network until the first large transfers have crossed it, and by then the
data lies wrong. The kernel knows better: each worker's connection to the scheduler has a smallest round trip, measured
by TCP itself, and workers behind the same slow link share it. A *zone* is a set of workers with about the same one.

* Round trips below `NEAR_SECONDS` are one zone: below that it is the hosts' load that differs, not the way.
* Two zones whose round trips are within a factor of `ALIKE` are one.
* Nothing is concluded from one zone only, and nothing where the kernel does not know it (not Linux, not TCP).

The bandwidth between zones is unknown at first. A single TCP connection moves about a window per round trip, and
windows begin small; `seed` says so, and the first transfers correct it (`links`).

Limits: two remote sites at the same distance look like one. Rejected: asking each worker to probe each other (N^2
connections at start, and the bytes are those that one wants to save); subnets alone (two racks often share one, and one
rack often has several).
"""

from __future__ import annotations

import socket
import struct

from dask_gpurt.model.link import Link

#: round trips below this are one zone
NEAR_SECONDS = 1e-3
#: round trips within this factor are one zone
ALIKE = 1.5
#: bytes per round trip that a connection is expected to move before it has been seen to move any
WINDOW_BYTES = 256 * 1024
#: of the kernel's ``struct tcp_info``: ``tcpi_min_rtt``, an unsigned 32-bit number of microseconds
_MIN_RTT = 148
_UNKNOWN = 0xFFFFFFFF


def round_trip_seconds(sock: socket.socket) -> float | None:
    """The smallest round trip of a TCP connection; None where the kernel does not know it."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None or getattr(sock, "family", None) not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, option, _MIN_RTT + 4)
    except OSError:
        return None
    if len(info) < _MIN_RTT + 4:
        return None
    (microseconds,) = struct.unpack_from("=I", info, _MIN_RTT)
    return None if microseconds in (0, _UNKNOWN) else microseconds * 1e-6


def seed(round_trip: float, usual: Link) -> Link:
    """What to expect of a link with this round trip, where `usual` is one of a link nearby."""
    return Link(
        latency_seconds=usual.latency_seconds + round_trip,
        bytes_per_second=min(usual.bytes_per_second, WINDOW_BYTES / round_trip),
    )


class Zones:
    """The zones of one cluster."""

    def __init__(self) -> None:
        #: zone -> its round trip in seconds, that of the first worker seen
        self.round_trips: dict[str, float] = {}
        #: address -> zone
        self.by_address: dict[str, str] = {}
        #: whether there is more than one zone
        self.several = False

    def add(self, address: str, round_trip: float) -> bool:
        """A worker was measured. Returns whether there are several zones now, for the first time."""
        before = len(self.round_trips)
        round_trip = max(round_trip, NEAR_SECONDS)
        zone = next(
            (z for z, known in self.round_trips.items() if max(known, round_trip) <= ALIKE * min(known, round_trip)),
            None,
        )
        if zone is None:
            zone = next(name for n in range(before + 1) if (name := f"zone-{n}") not in self.round_trips)
            self.round_trips[zone] = round_trip
        self.by_address[address] = zone
        self.several = len(self.round_trips) > 1
        return before == 1 and self.several

    def remove(self, address: str) -> bool:
        """A worker has left, and a zone with its last one. Returns whether there are several no more."""
        zone = self.by_address.pop(address, None)
        if zone is None or zone in self.by_address.values():
            return False
        del self.round_trips[zone]
        before, self.several = self.several, len(self.round_trips) > 1
        return before and not self.several

    @property
    def farthest(self) -> float:
        """The longest round trip, in seconds; that between two zones is about as long."""
        return max(self.round_trips.values(), default=0.0)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Zone -> round trip in seconds, and workers."""
        workers = list(self.by_address.values())
        return {z: {"round_trip_seconds": t, "workers": workers.count(z)} for z, t in self.round_trips.items()}
