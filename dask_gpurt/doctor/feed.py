"""`Feed`: what the tasks of a worker kept busy in the last minute, its processors and its GPU.

Theory of operation. The worker's ledger knows for how long tasks ran code of their own. Once a second that is noted
beside the processor time of the process, what the whole machine left unused, the kinds of tasks that run, and what the
worker's GPU does. A minute of such notes says whether the tasks' time was work: a thread that is "busy" and computes
nothing waits for something that no ledger of tasks can see. Costs 40 us a second, and a
thread for 50 ms where a GPU is asked.

Processor time is that of the process: workers that share one (``LocalCluster(processes=False)``) look better fed than
they are, never worse.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import operator
import os
import statistics
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from dask.utils import key_split

from dask_gpurt.doctor.gpus import is_wanted, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distributed import Worker

    from dask_gpurt.backends.nvml import Device, Load
    from dask_gpurt.backends.system import System
    from dask_gpurt.doctor.gpus import Gpu

logger = logging.getLogger("distributed.worker.gpurt")

#: notes that are kept, and the time between two
NOTES, EVERY_SECONDS = 60, 1.0
#: why a GPU's clocks are slowed, where that is not as it should be
SLOWED = {0x8: "by its hardware", 0x20: "by heat", 0x40: "by heat, in hardware", 0x80: "by its power supply"}


@dataclasses.dataclass(frozen=True)
class Fed:
    """The last minute of a worker, or less of it. Seconds are those of threads, summed."""

    seconds: float
    threads: int
    #: tasks ran their own code
    busy: float
    #: threads waited for inputs from peers, disks or the host's memory
    waiting: float
    #: of processors: that the process used, and share of the machine's that nobody did
    computed: float
    spare: float
    #: kinds of tasks that ran, the most frequent first
    kinds: tuple[str, ...] = ()
    #: means of the worker's GPU while tasks ran; None: it has none, or it cannot say
    kernels: float | None = None
    link: float | None = None


@dataclasses.dataclass(frozen=True)
class _Note:
    at: float
    busy: float
    waiting: float
    computed: float
    machine: float
    unused: float
    kinds: Counter[str]
    #: of the GPU; None: it was not asked
    load: Load | None


class Feed:
    """Of one worker.

    Parameters
    ----------
    slots
        Gives the seconds of the worker's slots by use (`SlotMeter.seconds`).
    """

    def __init__(self, worker: Worker, slots: Callable[[], Mapping[str, float]], gpu: Gpu, system: System) -> None:
        self._worker = worker
        self._slots = slots
        self._gpu = gpu
        self._system = system
        self._notes: deque[_Note] = deque(maxlen=NOTES + 1)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow it."""
        self._task = asyncio.create_task(self._follow(), name="gpurt-feed")

    async def stop(self) -> None:
        """End that. Raises nothing: a worker that is given back to Dask must not stay because of this."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def _follow(self) -> None:
        try:
            device = await asyncio.to_thread(self._device)
            while True:
                load = None
                # Not while it is idle: a node's workers would ask one driver all the time.
                if device is not None and self._worker.state.executing:
                    load = await asyncio.to_thread(self._gpu.load, device)
                self._notes.append(self._note(load))
                await asyncio.sleep(EVERY_SECONDS)
        except Exception:  # such as a driver's library that lacks a name
            logger.warning("dask-gpurt: what tasks keep busy is not followed any more", exc_info=True)
            self._notes.clear()  # a minute that is over says nothing of now

    def _device(self) -> Device | None:
        """The worker's own; of several that it sees, as dask-cuda's workers do, the first."""
        if not is_wanted(os.environ, self._system):
            return None
        return next(iter(visible(os.environ, self._gpu.look())), None)

    def _note(self, load: Load | None) -> _Note:
        seconds, used = self._slots(), os.times()
        machine, unused = _processors(self._system)
        return _Note(
            time.monotonic(),
            seconds["busy"] + seconds["running"],
            seconds["network"] + seconds["unspill"],
            used.user + used.system + used.children_user + used.children_system,
            machine,
            unused,
            Counter(key_split(ts.key) for ts in self._worker.state.executing),
            load,
        )

    def fed(self) -> Fed | None:
        """The last minute; None: it has just begun."""
        notes = list(self._notes)
        if len(notes) < 2:
            return None
        first, last = notes[0], notes[-1]
        ran = [note for note in notes[1:] if note.kinds]
        loads = [note.load for note in ran if note.load is not None]
        machine = last.machine - first.machine
        return Fed(
            seconds=last.at - first.at,
            threads=self._worker.state.nthreads,
            busy=last.busy - first.busy,
            waiting=last.waiting - first.waiting,
            computed=last.computed - first.computed,
            spare=(last.unused - first.unused) / machine if machine > 0 else 1.0,
            kinds=tuple(kind for kind, _ in sum((note.kinds for note in ran), Counter()).most_common(3)),
            kernels=_mean([load.kernels for load in loads]),
            link=_mean([load.link for load in loads]),
        )

    def slowed(self) -> str:
        """Why the clocks of its GPU were slowed through the last minute, in half of which tasks ran; empty: no."""
        loads = [note.load for note in self._notes if note.load is not None]
        if len(self._notes) <= NOTES or len(loads) < NOTES / 2:
            return ""
        reasons = functools.reduce(operator.and_, (load.clocks for load in loads))
        return " and ".join(text for bit, text in SLOWED.items() if reasons & bit)


def _mean(shares: list[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return statistics.fmean(known) if known else None


def _processors(system: System) -> tuple[float, float]:
    """Time of all processors of the machine, and what of it nobody used, in clock ticks."""
    words = (system.text("proc/stat") or "").partition("\n")[0].split()[1:9]
    ticks = [int(word) for word in words]
    return float(sum(ticks)), float(sum(ticks[3:5]))
