"""What `graph_judge` and `idle_alarm` are fed with: counts of graphs, of bytes, and of idle threads.

They are pure; this module reads the scheduler for them, when a graph arrives and a few times a second (`monitor`).
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.evaluate.governor import Standing
from dask_gpurt.placement.takeover import seam

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from dask_gpurt.placement.engine import Engine

#: workers looked at per tick, at most; of more, every so many-th
LOOKED_AT = 1024


def graph_arrived(engine: Engine, keys: Collection[Hashable]) -> None:
    """Tell the judge of a graph, before the first transition of its tasks."""
    judge = engine.graph_judge
    if not judge.enabled:
        return
    tasks = engine.scheduler.tasks
    groups = Counter(ts.group for k in keys if (ts := tasks.get(k)) is not None and ts.state == "released")
    prefixes: dict[str, int] = {}
    for group, n in groups.items():
        name = group.prefix.name
        prefixes[name] = prefixes.get(name, 0) + n
    spoiled = None
    if engine.governor.standing is not Standing.TRUSTED:
        spoiled = "the governor had its trial"
    elif not judge.left and engine.at_work:
        spoiled = "older tasks were at work"
    judge.arrived(prefixes, engine.scheduler.total_nthreads, spoiled)


def count_bytes(engine: Engine, ts: Any, ws: Any) -> None:
    """Count the inputs that the worker of a task just assigned has to fetch for it, each once."""
    needs = ws.needs_what
    # An input that is needed by one of the worker's tasks only is fetched for this one.
    engine.graph_judge.moved_bytes += sum(d.get_nbytes() for d in ts.dependencies if needs.get(d) == 1)


def look_round(engine: Engine) -> None:
    """One tick: peak memory and idle threads."""
    judge, alarm = engine.graph_judge, engine.hold_alarm
    engine.look_round()
    if not judge.observing:
        if alarm.stage:
            alarm.reset()
        return
    scheduler = engine.scheduler
    if engine.governor.standing is not Standing.TRUSTED:
        judge.spoil("the governor had its trial")
    infos = engine.workers.all.items
    step = -(-len(infos) // LOOKED_AT)
    fullest = max(info.ws.nbytes / info.mark_bytes for info in infos[::step])
    queued = bool(scheduler.queued)
    if alarm.stage and not queued and not engine.groups.by_key:
        alarm.reset()  # the roots that it was about are done, though other work may go on for ever
    judge.tick(queued or engine.at_work, fullest)
    if not judge.observing or engine.retired:
        alarm.reset()
        return
    done = judge.done
    mean = judge.compute_seconds / done if done else None
    # Looked up at each call, so that a simulator can exchange it.
    if alarm.tick(time.monotonic(), _idle_share(engine) if queued else 0.0, mean):
        judge.alarmed()
        scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=f"gpurt-alarm-{time.time()}")


def _idle_share(engine: Engine) -> float:
    """Share of the threads that have nothing assigned. Slow workers are left out: they are spared on purpose."""
    idle = 0
    infos = engine.workers.idle.items
    step = max(1, -(-len(infos) // LOOKED_AT))
    for info in infos[::step]:
        ws = info.ws
        if seam.is_running(ws) and not engine.speeds.is_slow(info):
            idle += max(0, ws.nthreads - len(ws.processing) + len(ws.long_running))
    return idle * step / max(1, engine.scheduler.total_nthreads)
