"""`Record`: what the judge of whole graphs knows of one kind of graph, and its states. `graph_judge` has the rules."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping

    from dask_gpurt.placement.evaluate.graph_verdict import Outcome

#: seconds for which a head is first retired or cleared; doubles each time
REST_SECONDS = 60.0
MAX_REST_SECONDS = 3600.0
#: prefixes named in a text
NAMED = 3

#: kinds of task and threads, both rounded
Head = tuple[int, frozenset[tuple[str, int]]]


class GraphStanding(enum.Enum):
    """The state of a kind of graph, see `graph_judge`."""

    TRUSTED = "trusted"
    TRIAL = "trial"
    RETIRED = "retired"
    CLEARED = "cleared"


class Record:
    """What is known of one head."""

    __slots__ = ("drawn", "name", "pace", "reason", "rest", "results", "runs", "standing", "tasks", "until")

    def __init__(self) -> None:
        self.standing = GraphStanding.TRUSTED
        #: the head in words
        self.name = ""
        #: why it has this standing
        self.reason = ""
        #: episodes judged, and tasks of the newest
        self.runs = 0
        self.tasks = 0
        #: seconds per task of the newest episode that was ours; inf: there was none
        self.pace = math.inf
        #: episodes since the trial began, also those that could not be judged
        self.drawn = 0
        #: stratum -> results of ours, of stock; in a trial
        self.results: dict[Any, tuple[list[Outcome], list[Outcome]]] = {}
        self.rest = REST_SECONDS
        #: when the back-off ends
        self.until = -math.inf

    def on_trial(self, reason: str) -> None:
        """Begin a trial, for this reason."""
        self.standing = GraphStanding.TRIAL
        self.reason = reason
        self.results = {}
        self.drawn = 0

    def decided(self, loses: bool, reason: str, now: float) -> None:
        """End the trial; `loses`: ours does."""
        self.standing = GraphStanding.RETIRED if loses else GraphStanding.CLEARED
        self.reason = f"{reason}. Suspected because {self.reason}" if loses else reason
        self.results = {}
        self.until = now + self.rest
        self.rest = min(2 * self.rest, MAX_REST_SECONDS)

    def said(self, now: float) -> str:
        """Why it has its standing, and for how long, in words."""
        waits = self.standing is GraphStanding.RETIRED and self.until > now
        return self.reason + (f" (for {self.until - now:.0f} s more)" if waits else "")


def head_of(tasks: Mapping[str, int], threads: int) -> Head:
    """The head of a graph, from the number of its tasks by prefix and the threads of all workers."""
    return threads.bit_length(), frozenset((prefix, n.bit_length()) for prefix, n in tasks.items())


def named(tasks: Counter[str]) -> str:
    """The most frequent prefixes in words."""
    names = [name for name, _ in tasks.most_common(NAMED)]
    return ", ".join(names) + (", ..." if len(tasks) > NAMED else "")
