"""How far shuffles are, read from the scheduler's own state: nothing is sent or kept for it on workers.

A shuffle has one barrier task. The tasks that the barrier depends on split an input each, those that depend on it
assemble an output each, and their states tell how many have ended. Bytes are what workers report in their heartbeats.
It is the same for Dask's own runs and for those of this package.

`Shuffles.look` is O(inputs + outputs of the active runs) and is called once a second while a page is open, else never.
Runs that have ended stay for a while, as they were seen last: most are shorter than it takes to look at them.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.collect.causes import BARRIER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distributed import Scheduler
    from distributed.scheduler import TaskState

#: runs remembered, the newest
RUNS = 3
#: seconds that a run stays after its end
ENDED_SECONDS = 60.0
#: states of a task that has its result still before it
_AHEAD = frozenset({"waiting", "queued", "processing", "no-worker"})


@dataclasses.dataclass(slots=True)
class Progress:
    """One run."""

    id: str
    run_id: int
    #: input and output partitions, and how many of them are done
    inputs: int = 0
    inputs_done: int = 0
    outputs: int = 0
    outputs_done: int = 0
    #: received by workers from each other
    bytes: int = 0
    workers: int = 0
    active: bool = True
    #: when it was seen to have ended, by the clock of `Shuffles`
    ended: float = 0.0


class Shuffles:
    """The newest runs of one scheduler, oldest first; those that ended stay for `ENDED_SECONDS`. Use on its event loop.

    Parameters
    ----------
    clock
        Seconds; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runs: dict[tuple[str, int], Progress] = {}

    def __iter__(self) -> Any:
        return iter(list(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)

    def look(self, scheduler: Scheduler) -> None:
        """Take in the scheduler's state."""
        plugin = getattr(scheduler, "plugins", {}).get("shuffle")
        active = getattr(plugin, "active_shuffles", {})
        seen = set()
        for shuffle_id, state in list(active.items()):
            barrier = scheduler.tasks.get(f"{BARRIER}{shuffle_id}")
            if barrier is None:
                continue
            key = (str(shuffle_id), int(state.run_id))
            seen.add(key)
            run = self._runs.setdefault(key, Progress(*key))
            _count(run, barrier)
            heartbeats = getattr(plugin, "heartbeats", {}).get(shuffle_id, {}).values()
            run.bytes = max(run.bytes, sum(int((t.get("comm") or {}).get("read", 0)) for t in heartbeats))
            run.workers = len(state.participating_workers)
        for key, run in self._runs.items():
            if key not in seen and run.active:
                run.active, run.ended = False, self._clock()
                newer = any(name == run.id and number > run.run_id for name, number in seen)
                if not newer:  # else it was given up for that one
                    run.inputs_done, run.outputs_done = run.inputs, run.outputs
        old = self._clock() - ENDED_SECONDS
        self._runs = {key: run for key, run in self._runs.items() if run.active or run.ended > old}
        while len(self._runs) > RUNS:
            gone = next((key for key, run in self._runs.items() if not run.active), next(iter(self._runs)))
            del self._runs[gone]


def _count(run: Progress, barrier: TaskState) -> None:
    run.inputs = max(run.inputs, len(barrier.dependencies))
    if barrier.state in _AHEAD:
        run.inputs_done = run.inputs - _ahead(barrier.dependencies)
        run.outputs = max(run.outputs, len(barrier.dependents))
        run.outputs_done = 0
    else:
        # Outputs that are not needed any more are forgotten, so their number falls.
        run.inputs_done = run.inputs
        run.outputs = max(run.outputs, len(barrier.dependents))
        run.outputs_done = run.outputs - _ahead(barrier.dependents)


def _ahead(tasks: Iterable[Any]) -> int:
    return sum(ts.state in _AHEAD for ts in tasks)
