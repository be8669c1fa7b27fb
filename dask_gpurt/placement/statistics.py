"""`of`: the figures of an engine as plain JSON. `PlacementPlugin.statistics` explains them."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.tables.durations import LEAST

if TYPE_CHECKING:
    from dask_gpurt.placement.engine import Engine


def speeds(engine: Engine) -> dict[str, float]:
    """Address -> speed relative to the median worker (2: twice as fast), where it was measured."""
    measured = [w for w in engine.workers.all.items if w.speed_samples]
    usual = statistics.median(w.slowness for w in measured) if measured else 1.0
    return {w.ws.address: usual / w.slowness for w in measured}


def slowness(engine: Engine) -> dict[str, float]:
    """Address -> times that ended tasks took there over those of the median worker, where it was measured.

    Not by tasks that still run, as `speeds`: one that is long by itself (a skewed key) tells nothing of its worker.
    """
    measured = {
        w.ws.address: w.speed.measured_slowness("") if w.speed_samples >= LEAST else 1.0
        for w in engine.workers.all.items
        if w.speed_samples
    }
    # The lower one of two: of two workers the mean would be more than half of the slower one, however slow that is.
    usual = statistics.median_low(measured.values()) if measured else 1.0
    return {address: factor / usual for address, factor in measured.items()}


def of(engine: Engine) -> dict[str, Any]:
    """Counts since the start, facts about links, prefixes and workers, and sizes of the tables."""
    return {
        "decisions": {
            "total": engine.budget.count,
            "moved": engine.decided["moved"],
            "local": engine.decided["local"],
            "restricted": engine.decided["restricted"],
            "logged": len(engine.log),
            **engine.log.calibration(),
        },
        "declined": {str(reason): n for reason, n in engine.declined.items()},
        "prices": engine.steal_cost.given,
        #: blocks cut, root tasks given to the owner of their block, blocks split for idle workers, and root tasks that
        #: were not queued as they are tiny
        "roots": {
            "groups": engine.groups.cut,
            "pulled": engine.groups.pulled,
            "split": engine.groups.split,
            "declined": engine.groups.declined,
            "dissolved": engine.groups.dissolved,
            "at_once": engine.root_dispatch.tiny.given,
            "at_home": engine.root_dispatch.at_home,
        },
        "microseconds": engine.budget.statistics(),
        "governor": engine.governor.statistics(),
        "graph_judge": {
            **engine.graph_judge.statistics(),
            "idle_alarms": engine.idle_alarm.trips,
            "roots_held": not engine.idle_alarm.stage and not engine.retired,
        },
        "links": engine.links.statistics(),
        "zones": engine.zones.statistics(),
        "prefixes": len(engine.durations.prefixes),
        "speeds": speeds(engine),
        "tables": {
            "workers": len(engine.workers.by_address),
            "charges": len(engine.backlog.charges),
            "unknown": sum(map(len, engine.backlog.unknown.values())),
            "roots": len(engine.groups),
            "copies_on_disk": engine.tables.residence.copies,
        },
        "devices": engine.tables.devices.statistics(),
    }
