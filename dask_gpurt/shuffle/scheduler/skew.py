"""Say which outputs of a shuffle are far larger than the others, and which were moved for it. On the scheduler."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from dask_gpurt.model import Event, Sink
from dask_gpurt.shuffle.protocol.histogram import add_up, skewed

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.shuffle.scheduler.runs import RunRecord

#: texts that are kept for statistics
LATEST = 8


class SkewReport:
    """What was said about large outputs on one scheduler; `sink` gets events ``shuffle.skew`` and ``shuffle.bound``."""

    def __init__(self, sink: Sink, failed: Callable[[], None]) -> None:
        self._sink = sink
        self._failed = failed
        #: shuffles with outputs far above the mean
        self._skewed = 0
        #: of them all, the most rows of an output over the mean rows
        self._largest_ratio = 0.0
        self._latest: collections.deque[str] = collections.deque(maxlen=LATEST)

    async def look(self, record: RunRecord) -> None:
        """Say which outputs of a run are far larger than the others. Never raises."""
        if record.histograms is None:
            return  # the run was started anew, or its workers did not answer
        try:
            rows, nbytes, values = add_up(record.histograms)
            worker_for, moves = record.worker_for, record.amendments.moves
            large = skewed(rows, nbytes, len(worker_for))
            for part in moves.keys() - {one.part for one in large}:
                source, target = moves[part]
                text = f"output {part} of shuffle {record.id} was moved from {source} to {target}, which had less to do"
                self._sink(Event("shuffle.bound", text, {"shuffle": str(record.id), "part": part, "owner": target}))
            if not large:
                return
            self._skewed += 1
            self._largest_ratio = max(self._largest_ratio, large[0].ratio)
            for one in large:
                owner = worker_for.get(one.part, "")
                text = one.text(str(record.id), owner, values.get(one.part, ""), moves.get(one.part, ("",))[0])
                self._latest.append(text)
                fields = {"shuffle": str(record.id), "owner": owner, "value": values.get(one.part, "")}
                self._sink(Event("shuffle.skew", text, {**fields, **dataclasses.asdict(one)}))
        except Exception:
            self._failed()

    def statistics(self) -> dict[str, Any]:
        """Counts; plain JSON values."""
        return {
            "skewed": self._skewed,
            "largest_ratio": round(self._largest_ratio, 2),
            "latest": list(self._latest),
        }
