"""`TaskHistory`: the tasks that have ended, for reports and the search for skew. All of it is bounded."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe import seam

if TYPE_CHECKING:
    from collections.abc import Mapping

#: tasks remembered for timelines
ROWS = 10_000
#: prefixes whose durations are kept; the first seen goes first
PREFIXES = 1000
#: outputs of shuffles whose size is remembered
OUTPUTS = 5000
#: a task is skewed when it takes so many times as long as its prefix's mean, and this much longer in seconds
SKEW_FACTOR = 2.0
SKEW_SECONDS = 0.2
#: siblings that must have ended before a task is called skewed
SIBLINGS = 2
#: prefixes of the tasks that take an output out of a shuffle of dask.dataframe
UNPACK = ("p2pshuffle", "hashjoinp2p")


@dataclasses.dataclass(slots=True)
class PrefixDurations:
    """Durations of the tasks of one prefix, in seconds."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0


class TaskHistory:
    """What is known of the tasks that ended with a result."""

    def __init__(self) -> None:
        self.prefixes: dict[str, PrefixDurations] = {}
        #: (address, prefix, start, stop, seconds of transfers before), newest last; times are Unix
        self.rows: deque[tuple[str, str, float, float, float]] = deque(maxlen=ROWS)
        #: (prefix, bytes) of shuffle outputs
        self.outputs: deque[tuple[str, int]] = deque(maxlen=OUTPUTS)
        self.outputs_seen = 0
        self.tasks_seen = 0

    def ended(self, address: str, name: str, details: Mapping[str, Any]) -> None:
        """Take in a task that has ended with a result.

        Parameters
        ----------
        address
            Of the worker it was assigned to, if `details` name none.
        name
            Its prefix.
        details
            As a scheduler plugin's ``transition`` gets them. Without the times of a computation nothing is kept.
        """
        transfers = 0.0
        begin = end = None
        for s in details.get("startstops") or ():
            if s["action"] == "compute":
                begin, end = s["start"], s["stop"]
            elif s["action"] == "transfer":
                transfers += s["stop"] - s["start"]
        if begin is None or end is None:
            return
        self.tasks_seen += 1
        self.rows.append((details.get("worker") or address, name, begin, end, transfers))
        if name in UNPACK:
            self.outputs_seen += 1
            self.outputs.append((name, max(0, seam.size(details.get("nbytes")) or 0)))
        prefix = self.prefixes.get(name)
        if prefix is None:
            if len(self.prefixes) >= PREFIXES:
                # The oldest: else a scheduler of weeks would learn nothing of what runs now.
                del self.prefixes[next(iter(self.prefixes))]
            prefix = self.prefixes[name] = PrefixDurations()
        seconds = max(0.0, end - begin)
        prefix.count += 1
        prefix.total += seconds
        prefix.longest = max(prefix.longest, seconds)

    def overdue_seconds(self, name: str, seconds: float) -> float:
        """For how long a task that has run for `seconds` has been skewed; not above 0 for one that is not."""
        prefix = self.prefixes.get(name)
        if prefix is None or prefix.count < SIBLINGS:
            return 0.0
        mean = prefix.total / prefix.count
        return seconds - max(SKEW_FACTOR * mean, mean + SKEW_SECONDS)

    def details(self) -> dict[str, Any]:
        """What a report shows of them, as plain JSON."""
        return {
            "rows": list(self.rows),
            "outputs": list(self.outputs),
            "outputs_seen": self.outputs_seen,
            "prefixes": {
                name: {"count": p.count, "seconds": p.total, "longest_seconds": p.longest}
                for name, p in sorted(self.prefixes.items(), key=lambda item: -item[1].total)[:50]
            },
        }
