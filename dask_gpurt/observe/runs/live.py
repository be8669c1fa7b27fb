"""`LiveRun`: one run while it is followed, from its first graph until all workers have reported since its end.

What a worker did in a run is the difference of two of its heartbeats: the last before the run began, and the first
after it ended. So nothing is asked of a worker, and nothing is done for a task. What other runs did between these two
heartbeats and the run counts as well; the seconds in which nothing was submitted do not.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.collect import wait_histogram
from dask_gpurt.observe.collect.causes import BUSY, CAUSES

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from distributed.scheduler import WorkerState

    from dask_gpurt.observe.collect.worker_account import Reading

#: of a worker's account
TOTALS = ("slots", BUSY, *CAUSES)
#: of a heartbeat: what only grows, and what is held at the end
COUNTERS = (
    *("written_bytes", "write_seconds", "read_bytes", "read_seconds", "admission_wait_seconds", "lost"),
    *("memory_alarms", "shuffle_sent_bytes", "shuffle_kept_bytes", "shuffle_outputs", "shuffle_restarts"),
)
HELD = ("host_bytes", "host_limit_bytes", "disk_bytes", "spilled_keys")


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """What one worker had done until a heartbeat, in as little memory as possible."""

    ws: WorkerState
    #: in the order of `TOTALS`
    totals: tuple[float, ...]
    #: in the order of `COUNTERS`, and of `HELD`
    counters: tuple[float, ...]
    held: tuple[float | None, ...]
    #: source -> bytes, seconds, requests; None in large clusters
    fetched: Mapping[str, Any] | None

    @classmethod
    def of(cls, ws: WorkerState, reading: Reading, *, fetched: bool) -> Mark:
        """The mark of a reading."""
        totals, reported = reading.totals, reading.reported
        return cls(
            ws,
            tuple(totals.get(name, 0.0) for name in TOTALS),
            tuple(float(reported.get(name) or 0) for name in COUNTERS),
            tuple(reported.get(name) for name in HELD),
            (reported.get("fetched") or {}) if fetched else None,
        )

    def less(self, earlier: tuple[Mark, Mark] | None) -> Mark:
        """As a begin that has what another worker did at the same address, between two marks, behind it."""
        if earlier is None:
            return self
        begin, end = earlier
        done = [max(0.0, n - was) for n, was in zip(end.totals, begin.totals, strict=True)]
        counted = [n - was if n >= was else n for n, was in zip(end.counters, begin.counters, strict=True)]
        return dataclasses.replace(
            self,
            totals=tuple(n - more for n, more in zip(self.totals, done, strict=True)),
            counters=tuple(n - more for n, more in zip(self.counters, counted, strict=True)),
        )


@dataclasses.dataclass(slots=True, eq=False)
class LiveRun:
    """A run that is going on, or has ended and is not summed up yet."""

    number: int
    client: str
    #: of `distributed.span`: its name; "" without one
    span: str
    #: of what was asked for
    name: str
    #: Unix time
    start: float
    #: tasks and shuffle outputs that had ended before
    tasks_before: int
    outputs_before: int
    #: counts of the engines at the beginning, see `RunRecorder`
    counts: Mapping[str, Any]
    #: keys that were asked for and are not there yet, in order; of very many a sample
    pending: dict[Hashable, None]
    #: keys that were asked for so far, as far as they are followed, and those forgotten before they were computed
    asked: int = 0
    forgotten: int = 0
    graphs: int = 1
    #: Unix time; None: it goes on
    stop: float | None = None
    #: ``finished``, ``failed``, ``cancelled``, ``restarted``, ``followed no more``; while it goes on: what it will be
    outcome: str = "finished"
    #: between graphs, in which there was nothing to do
    gap_seconds: float = 0.0
    #: other runs were going on at the same time
    shared: bool = False
    #: of workers that left in it
    lost: list[str] = dataclasses.field(default_factory=list)
    #: address -> mark, before and after the run
    begins: dict[str, Mark] = dataclasses.field(default_factory=dict)
    ends: dict[str, Mark] = dataclasses.field(default_factory=dict)
    #: both of workers that left in it, or before it was summed up
    left: dict[str, tuple[Mark, Mark]] = dataclasses.field(default_factory=dict)
    waits: wait_histogram.Tails = dataclasses.field(default_factory=wait_histogram.Tails)
    #: (prefix, address) -> slot-seconds that others waited for its tasks
    skewed: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    #: rows of its tasks and sizes of its outputs; None: not looked up yet
    rows: list[tuple[str, str, float, float, float]] | None = None
    outputs: list[int] = dataclasses.field(default_factory=list)
    #: tasks and outputs that had ended at its end; counts then
    tasks_after: int = 0
    outputs_after: int = 0
    counts_after: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: what tables show of it: when that was made (Unix time), the run's stop by then, and what
    headline: tuple[float, float | None, dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.asked = len(self.pending)

    def add(self, keys: dict[Hashable, None]) -> None:
        """A graph more that asks for `keys`."""
        self.graphs += 1
        self.asked += len(keys.keys() - self.pending.keys())  # else what is asked for twice would have to be, too
        self.pending.update(keys)

    def reopen(self, now: float) -> None:
        """Go on after a short gap."""
        assert self.stop is not None
        self.gap_seconds += max(0.0, now - self.stop)
        self.stop = None
        if self.outcome == "cancelled":
            self.outcome = "finished"
        self.rows = None
        self.ends.clear()
