"""`GraphSamples`: feeds `graph_judge` and `idle_alarm` with counts of graphs, peak memory and idle threads.

Those two are pure. This module reads the scheduler for them, when a graph arrives and a few times a second (`monitor`).
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from dask_gpurt.placement.evaluate.governor import Standing
from dask_gpurt.placement.tables import worker_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from distributed.scheduler import TaskState

    from dask_gpurt.placement.decide.root_blocks import RootBlocks
    from dask_gpurt.placement.evaluate.governor import Governor
    from dask_gpurt.placement.evaluate.graph_judge import GraphJudge
    from dask_gpurt.placement.evaluate.idle_alarm import IdleAlarm
    from dask_gpurt.placement.tables.tables import Tables

#: workers looked at per tick, at most; of more, every so many-th
LOOKED_AT = 1024


class GraphSamples:
    """Reads one scheduler for the judge and the alarm.

    `at_work`: whether any task is assigned. `retired`: whether Dask decides everything now.
    """

    def __init__(
        self,
        tables: Tables,
        groups: RootBlocks,
        governor: Governor,
        judge: GraphJudge,
        alarm: IdleAlarm,
        *,
        at_work: Callable[[], bool],
        retired: Callable[[], bool],
    ) -> None:
        self._tables = tables
        self._groups = groups
        self._governor = governor
        self._judge = judge
        self._alarm = alarm
        self._at_work = at_work
        self._retired = retired

    def graph_arrived(self, fresh: Collection[TaskState]) -> None:
        """Feed a graph, by its tasks that are still to run. Call before their first transition."""
        judge = self._judge
        if not judge.enabled:
            return
        scheduler = self._tables.scheduler
        spoiled = None
        if self._governor.standing is not Standing.TRUSTED:
            spoiled = "the governor had its trial"
        elif not judge.left and self._at_work():
            spoiled = "older tasks were at work"
        judge.arrived(_prefixes(fresh), scheduler.total_nthreads, spoiled)

    def look_round(self) -> None:
        """Feed peak memory and idle threads: one tick of the judge and of the alarm."""
        judge, alarm = self._judge, self._alarm
        if not judge.observing:
            if alarm.stage:
                alarm.reset()
            return
        scheduler = self._tables.scheduler
        if self._governor.standing is not Standing.TRUSTED:
            judge.spoil("the governor had its trial")
        infos = self._tables.workers.all.items
        step = -(-len(infos) // LOOKED_AT)
        fullest = max(info.ws.nbytes / info.mark_bytes for info in infos[::step])
        queued = bool(scheduler.queued)
        if alarm.stage and not queued and not self._groups.by_key:
            alarm.reset()  # the roots that it was about are done, though other work may go on for ever
        judge.tick(queued or self._at_work(), fullest)
        if not judge.observing or self._retired():
            alarm.reset()
            return
        done = judge.done
        mean = judge.compute_seconds / done if done else None
        # Looked up at each call, so that a simulator can exchange it.
        if alarm.tick(time.monotonic(), self._idle_share() if queued else 0.0, mean):
            judge.alarmed()
            scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=f"gpurt-alarm-{time.time()}")

    def _idle_share(self) -> float:
        """Share of the threads that have nothing assigned. Slow workers are left out: they are spared on purpose."""
        tables = self._tables
        idle = 0
        infos = tables.workers.idle.items
        step = max(1, -(-len(infos) // LOOKED_AT))
        for info in infos[::step]:
            ws = info.ws
            if worker_facts.is_running(ws) and not tables.speeds.is_slow(info):
                idle += max(0, ws.nthreads - len(ws.processing) + len(ws.long_running))
        return float(idle * step / max(1, tables.scheduler.total_nthreads))


def _prefixes(tasks: Collection[TaskState]) -> dict[str, int]:
    """How many tasks there are of each prefix."""
    groups = Counter([ts.group for ts in tasks])
    out: dict[str, int] = {}
    for group, n in groups.items():
        name = group.prefix.name
        out[name] = out.get(name, 0) + n
    return out
