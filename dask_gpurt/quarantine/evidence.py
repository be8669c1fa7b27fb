"""`Evidence`: who is at fault when data comes wrong, a disk fails, a card reports an error or a worker is slow. Pure.

Theory of operation. A wrong checksum says that something between two workers is at fault, not which of the three it
is. So failures count by pair. A node with `FAILURES` of them that involve `PEERS` other workers is at fault: its memory
or its network card. Else, with `FAILURES` between the same two, the link is. The node that explains the most goes
first, and what it explains is no evidence against its peers.

Errors that a card or a disk reports are a node's own. Single failures are not held against anybody for ever: memory
flips a bit now and then. What is older than `WINDOW_SECONDS` does not count. A worker is slow when all that was
learned for `SLOW_SECONDS` says so, or when the clocks of its card were slowed for as long by heat or lack of power.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: wrong checksums, or errors of a disk, from which somebody is at fault
FAILURES = 3
#: other workers that they involve, from which the node is and not a link
PEERS = 2
WINDOW_SECONDS = 600.0
#: times the usual time of a task, for so long
SLOW = 2.0
SLOW_SECONDS = 60.0


class Cause(enum.StrEnum):
    """What is wrong with a worker."""

    CORRUPTION = "corruption"
    DISK = "disk"
    HARDWARE = "hardware"
    SLOW = "slow"
    #: somebody has said so
    ASKED = "asked"


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A worker that is at fault, or the link between two."""

    worker: str
    cause: Cause
    #: what was seen
    found: str
    remedy: str
    #: the other end, where only the link between the two is known to be bad
    peer: str = ""


class Evidence:
    """What was seen of the workers of one cluster. Times are those of one clock, in seconds."""

    def __init__(self) -> None:
        #: (sender, receiver) -> when a failure was told, the oldest first
        self._pairs: dict[tuple[str, str], collections.deque[float]] = {}
        #: (receiver, sender) -> failures that the receiver has counted so far
        self._counted: dict[tuple[str, str], int] = {}
        #: worker -> when errors of its disk were told
        self._disks: dict[str, collections.deque[float]] = {}
        self._disk_counted: dict[str, int] = {}
        self._hardware: dict[str, str] = {}
        #: worker -> since when it is slow, and how much
        self._slow: dict[str, tuple[float, float]] = {}
        #: worker -> what slows the clocks of its card
        self._clocks: dict[str, str] = {}
        #: what is told again with every heartbeat, and no longer held against a worker: errors of its card, and slowed
        #: clocks until they were well once
        self._pardoned: dict[str, set[str]] = {}
        self._pardoned_clocks: set[str] = set()

    # ------------------------------------------------------------------ what is told

    def corrupt(self, sender: str, receiver: str, times: int, now: float) -> None:
        """Data of `sender` came wrong to `receiver`."""
        if sender != receiver:
            # More than these decide nothing.
            self._pairs.setdefault((sender, receiver), collections.deque(maxlen=8)).extend([now] * min(times, 8))

    def corrupt_so_far(self, sender: str, receiver: str, total: int, now: float, *, there: bool = True) -> None:
        """The same, of a receiver that counts; not held against a sender that is not `there` any more."""
        new = total - self._counted.get((receiver, sender), 0)
        self._counted[receiver, sender] = total
        if new > 0 and there:
            self.corrupt(sender, receiver, new, now)

    def disk_so_far(self, worker: str, total: int, now: float) -> None:
        """A worker counts copies that it read back wrong, and reads and writes that its disk refused."""
        new = total - self._disk_counted.get(worker, 0)
        self._disk_counted[worker] = total
        if new > 0:
            self._disks.setdefault(worker, collections.deque(maxlen=8)).extend([now] * min(new, 8))

    def hardware(self, worker: str, what: str) -> None:
        """The driver of a card reports an error that no program makes; `what` tells it from others."""
        if what not in self._pardoned.get(worker, ()):
            self._hardware[worker] = what

    def clocks(self, worker: str, what: str) -> None:
        """What has slowed the clocks of its card for a minute; empty: nothing does any more."""
        if not what:
            self._clocks.pop(worker, None)
            self._pardoned_clocks.discard(worker)
        elif worker not in self._pardoned_clocks:
            self._clocks[worker] = what

    def has_slow_clocks(self, worker: str) -> bool:
        """Whether they are slowed, by the newest word of that worker."""
        return worker in self._clocks

    def speeds(self, slowness: Mapping[str, float], now: float) -> None:
        """How many times the usual time tasks take on each worker; all of those that are known."""
        for worker in list(self._slow):
            if slowness.get(worker, 1.0) <= SLOW:
                del self._slow[worker]
        for worker, factor in slowness.items():
            if factor > SLOW:
                since, _ = self._slow.get(worker, (now, factor))
                self._slow[worker] = since, factor

    def forget(self, worker: str) -> None:
        """It has left, or starts anew."""
        for pair in [pair for pair in self._pairs if worker in pair]:
            del self._pairs[pair]
        # Only what it has counted. Those who got data of it go on to tell what they have counted so far: of one that
        # comes back under its address all of that would be new.
        for pair in [pair for pair in self._counted if pair[0] == worker]:
            del self._counted[pair]
        for known in (self._disks, self._disk_counted, self._hardware, self._slow, self._clocks, self._pardoned):
            known.pop(worker, None)
        self._pardoned_clocks.discard(worker)

    def pardon(self, worker: str) -> None:
        """What was seen so far is no longer held against it. What it has counted stays counted."""
        for pair in [pair for pair in self._pairs if worker in pair]:
            del self._pairs[pair]
        if what := self._hardware.pop(worker, ""):
            self._pardoned.setdefault(worker, set()).add(what)
        if self._clocks.pop(worker, ""):
            self._pardoned_clocks.add(worker)
        for times in (self._disks, self._slow):
            times.pop(worker, None)

    # ------------------------------------------------------------------ verdicts

    def suspects(self, now: float) -> list[Suspect]:
        """Who is at fault by all that counts now. A worker may be there for several causes."""
        out = [
            Suspect(worker, Cause.HARDWARE, what, "reset or replace the card, then restart the worker")
            for worker, what in self._hardware.items()
        ]
        for worker, times in self._disks.items():
            count = _recent(times, now)
            if count >= FAILURES:
                found = f"{count} errors of its disk in {WINDOW_SECONDS / 60:g} minutes"
                out.append(Suspect(worker, Cause.DISK, found, "check its disk (dmesg, smartctl), or spill elsewhere"))
        for worker, what in self._clocks.items():
            found = f"the clocks of its GPU were slowed {what} for {SLOW_SECONDS:.0f} s"
            out.append(Suspect(worker, Cause.SLOW, found, "cooling, power supply (nvidia-smi -q -d PERFORMANCE)"))
        for worker, (since, factor) in self._slow.items():
            if now - since >= SLOW_SECONDS:
                found = f"its tasks take {factor:.1f} times as long as elsewhere, for {now - since:.0f} s"
                remedy = "look at its clock (thermal throttling), its CPU limit and who else runs there"
                out.append(Suspect(worker, Cause.SLOW, found, remedy))
        return out + self._corrupters(now)

    def _corrupters(self, now: float) -> list[Suspect]:
        pairs = {pair: count for pair, times in self._pairs.items() if (count := _recent(times, now))}
        out = []
        while pairs:
            failures: collections.Counter[str] = collections.Counter()
            peers: collections.defaultdict[str, set[str]] = collections.defaultdict(set)
            for (sender, receiver), count in pairs.items():
                for one, other in ((sender, receiver), (receiver, sender)):
                    failures[one] += count
                    peers[one].add(other)
            bad = [w for w, count in failures.items() if count >= FAILURES and len(peers[w]) >= PEERS]
            if not bad:
                break
            # What it sends is stronger evidence than what it gets: of two alike the sender is taken.
            worst = max(bad, key=lambda w: (failures[w], sum(c for (s, _), c in pairs.items() if s == w)))
            found = f"{failures[worst]} wrong checksums between it and {len(peers[worst])} other workers"
            out.append(Suspect(worst, Cause.CORRUPTION, found, "check its memory (ECC) and its network card"))
            pairs = {pair: count for pair, count in pairs.items() if worst not in pair}
        for (sender, receiver), count in pairs.items():
            if count >= FAILURES:
                found = f"{count} wrong checksums from it to {receiver}"
                remedy = "check the cable, the switch port and the MTU between the two"
                out.append(Suspect(sender, Cause.CORRUPTION, found, remedy, peer=receiver))
        return out


def _recent(times: collections.deque[float], now: float) -> int:
    """How many count; those that do not are dropped."""
    while times and now - times[0] > WINDOW_SECONDS:
        times.popleft()
    return len(times)
