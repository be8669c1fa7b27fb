"""What a trace has of workers from time to time: their memory, and what they report themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import WorkerState

#: ticks between two samples of workers that have nothing to do
IDLE_TICKS = 60
#: of ``ws.metrics``
SAMPLED = ("memory", "cpu", "spilled_bytes", "managed_bytes")


class Rhythm:
    """When to sample: at each tick while tasks run and right after, else now and then."""

    def __init__(self) -> None:
        self._busy = False
        self._idle = -1

    def tick(self, scheduler: Scheduler) -> bool:
        """Whether to sample at this tick."""
        was_busy, self._busy = self._busy, any(ws.processing for ws in scheduler.workers.values())
        self._idle = 0 if was_busy or self._busy else self._idle + 1
        return self._idle % IDLE_TICKS == 0


def figures(ws: WorkerState) -> dict[str, Any]:
    """Of one worker."""
    metrics = ws.metrics
    out: dict[str, Any] = {name: metrics[name] for name in SAMPLED if name in metrics}
    ours = metrics.get("gpurt")
    if isinstance(ours, dict):
        # Without the table of sources: transfers are records of their own.
        out["gpurt"] = {key: value for key, value in ours.items() if key != "fetched"}
    return out


def disk(scheduler: Scheduler) -> dict[str, float]:
    """What Dask's own spilling has written and read so far, over all workers: ``"disk-write bytes"`` and the like."""
    sums: dict[str, float] = {}
    for name, value in scheduler.cumulative_worker_metrics.items():
        if isinstance(name, tuple) and len(name) > 1 and name[-2] in ("disk-write", "disk-read"):
            label = f"{name[-2]} {name[-1]}"
            sums[label] = sums.get(label, 0.0) + float(value)
    return sums
