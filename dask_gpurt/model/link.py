"""Links: how long it takes to bring bytes from one worker to another.

Links are learned per *class*, not per pair of workers: a cluster of N workers has N^2 pairs, of which most are never
used, but only a handful of kinds.
"""

from __future__ import annotations

import dataclasses
import enum


class LinkClass(enum.Enum):
    """The kinds of path between two workers, nearest first."""

    #: the same process: a reference changes hands
    PROCESS = "process"
    #: two processes of one host: loopback or shared memory
    HOST = "host"
    #: two hosts near one another, where others are far
    RACK = "rack"
    #: two hosts
    NETWORK = "network"


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """``seconds(n) = latency + n / bandwidth``"""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, nbytes: float, fetches: int = 1) -> float:
        """Time to bring `nbytes` in `fetches` requests one after the other."""
        return self.latency_seconds * fetches + nbytes / self.bytes_per_second
