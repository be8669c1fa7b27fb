"""`WorkerAccount`: the slot-seconds of one worker by cause, settled with each of its heartbeats.

A worker reports U, the seconds in which its slots had no task assigned. The scheduler knows why: V[cause] are its own
integrals since the last heartbeat. The two need not agree, as messages take time:

* U < sum(V): all V are scaled down; the heartbeat was late, so V reaches further than U. What is left of V belongs to
  the next heartbeat. Else each one that is less late would say ``scheduler``, on a cluster without work for ever.
* U > sum(V): the difference is ``scheduler``: slots had a task assigned that had not arrived, or whose result had not
  been taken in.

So the causes always sum to what the worker reported. ``planning`` is the part of ``scheduler`` in which the scheduler
made decisions of this package.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.collect.causes import CAUSES, CENTRAL, CLOCK, LOCAL, UNASSIGNED, heartbeat_key

if TYPE_CHECKING:
    from collections.abc import Mapping

#: cause -> its place in a vector of seconds
INDEX = {name: i for i, name in enumerate(CENTRAL)}
#: uses that a heartbeat has, and their keys there
_USES = tuple((name, heartbeat_key(name)) for name in ("slots", "busy", "running", UNASSIGNED, *LOCAL))
_UNASSIGNED_KEY, _SLOTS_KEY = heartbeat_key(UNASSIGNED), heartbeat_key("slots")
#: seconds per slot by which a heartbeat may be late; what V is above U by more has other reasons, such as a pause
_LATE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What is known of one worker at a moment. Sums since it came; they only grow, while it is not attached anew."""

    #: slot-seconds by cause, and ``busy``, ``slots``
    totals: Mapping[str, float]
    #: its newest heartbeat; empty: none, or it runs without the extension
    reported: Mapping[str, Any]


@dataclasses.dataclass(slots=True)
class WorkerAccount:
    """One worker, as its scheduler sees it."""

    #: threads
    slots: int
    #: the ledger's vector at the last change of `assigned`
    at: list[float]
    #: clock, and seconds that were spent planning, at the last heartbeat
    since: float
    planned: float
    #: tasks assigned that hold a slot
    assigned: int = 0
    #: clock at which a task of it ended last; at first, when it came
    ended: float = 0.0
    #: slot-seconds without an assigned task, by cause, since the last heartbeat
    unassigned: list[float] = dataclasses.field(default_factory=lambda: [0.0] * len(CENTRAL))
    #: what the last heartbeat said, and when by the worker's own clock
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    clock: float = 0.0
    #: the histograms of waits that it had
    waits: Mapping[str, list[int]] = dataclasses.field(default_factory=dict)
    #: all of the last heartbeat
    reported: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: slot-seconds by cause, and ``busy``, ``slots``
    totals: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    def reading(self) -> Reading:
        """All of it as it is now."""
        return Reading(self.totals.copy(), self.reported)

    def is_newer(self, figures: Mapping[str, Any] | None) -> bool:
        """Whether these figures are younger than the last ones; those without a clock always are."""
        clock = None if figures is None else figures.get(CLOCK)
        if clock is not None and clock <= self.clock:
            return False
        self.clock = clock or 0.0
        return True

    def settle(self, figures: Mapping[str, Any] | None, now: float, planned: float) -> float | None:
        """Charge what a heartbeat reports to causes, see the module.

        Parameters
        ----------
        figures
            The heartbeat; None, or without slots: the worker runs without the extension, and nothing is charged.
        now
            Seconds on the ledger's clock.
        planned
            Seconds that the scheduler has spent in decisions of this package so far.

        Returns
        -------
        Slot-seconds that were charged to ``skew``; None when nothing was charged.
        """
        wall, self.since = now - self.since, now
        planning, self.planned = planned - self.planned, planned
        causes, self.unassigned = self.unassigned, [0.0] * len(CENTRAL)
        if figures is None or _UNASSIGNED_KEY not in figures:
            return None
        # It was attached anew. All slots, as each use of them may be more than before: only they always grow.
        if figures.get(_SLOTS_KEY, 0.0) < self.figures.get(_SLOTS_KEY, 0.0):
            self.figures, self.waits = {}, {}
        growth: dict[str, float] = {}
        for name, key in _USES:
            value = float(figures.get(key) or 0.0)
            growth[name] = value - self.figures.get(key, 0.0)
            self.figures[key] = value
        totals = self.totals
        totals["slots"] += growth["slots"]
        # What runs is work until it turns out to be something else; so this may fall a little between two looks.
        totals["busy"] += growth["busy"] + growth["running"]
        for name in LOCAL:
            totals[name] += growth[name]
        idle = max(0.0, growth[UNASSIGNED])
        known = sum(causes)
        scale = min(1.0, idle / known) if known > 0 else 0.0
        for name, seconds in zip(CENTRAL, causes, strict=True):
            totals[name] += seconds * scale
        unknown = idle - known * scale
        early = known - known * scale
        if early > 0:
            kept = (1.0 - scale) * min(1.0, _LATE_SECONDS * self.slots / early)
            self.unassigned = [seconds * kept for seconds in causes]
        waited = causes[INDEX["scheduler"]] * scale + unknown
        own = waited * min(1.0, planning / wall) if wall > 0 else 0.0
        totals["scheduler"] += unknown - own
        totals["planning"] += own
        return causes[INDEX["skew"]] * scale


def as_json(totals: Mapping[str, float]) -> dict[str, Any]:
    """Totals as plain JSON: ``slot_seconds``, ``busy_seconds`` and ``causes``."""
    return {
        "slot_seconds": totals.get("slots", 0.0),
        "busy_seconds": totals.get("busy", 0.0),
        "causes": {name: max(0.0, totals.get(name, 0.0)) for name in CAUSES},
    }
