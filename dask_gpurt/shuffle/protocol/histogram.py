"""How uneven the outputs of a shuffle are, counted while inputs are split. Pure, but for a lock.

Theory of operation. Splitting an input knows the rows of every output; adding them up costs a few microseconds per
shard. After the barrier the scheduler adds the workers' histograms (`add_up`) and tells outputs that are far above the
mean (`skewed`). For the report to name the key, not only the number of an output, the first input in which one output
stands out is looked into once (`value_behind`): the value that most of that output's rows share and the input's other
rows do not. Which column the user shuffled by is not known here, nor needed.

An input that was split twice, since its first split was lost, counts twice: the figures are for people.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.shuffle.protocol.messages import HistogramAnswer

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from dask_gpurt.shuffle.rows.partition import Shard

#: an output is large when it has this many times the mean rows of an output
TIMES_MEAN = 4.0
#: outputs of fewer rows are never worth a word
LEAST_ROWS = 10_000
#: rows looked at to find the value behind a large output
LOOK_ROWS = 4096
#: outputs that are named of one shuffle
MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Large:
    """An output far above the mean."""

    part: int
    rows: int
    nbytes: int
    #: of all rows
    share: float
    #: rows over the mean rows of an output
    ratio: float

    def text(self, shuffle: str, owner: str, value: str, source: str = "") -> str:
        """One line for people; `source` is who had it before it was bound late."""
        why = f"; most have {value}" if value else ""
        done = f"moved from {source} to {owner}, and built whole there" if source else f"built whole by {owner}"
        return (
            f"output {self.part} of shuffle {shuffle} has {self.share:.0%} of all rows: {self.rows:,} rows, about "
            f"{self.nbytes / 1e6:,.0f} MB, {self.ratio:.1f} times the mean{why}; {done}"
        )


class Histogram:
    """Rows by output, of the inputs that one worker has split. `add` and `look` from any thread."""

    def __init__(self, outputs: int) -> None:
        self._rows = np.zeros(outputs, dtype=np.int64)
        self._nbytes = 0
        #: (output, "column = value") that stood out in an input
        self._value: tuple[int, str] | None = None
        self._lock = threading.Lock()

    def add(self, shards: Iterable[Shard]) -> tuple[int, int]:
        """Count the shards of one input; returns (its largest output, or -1; rows of that)."""
        largest, most = -1, 0
        with self._lock:
            for shard in shards:
                lengths = shard.lengths.astype(np.int64)
                self._rows[shard.parts] += lengths
                self._nbytes += shard.nbytes
                at = int(lengths.argmax()) if len(lengths) else 0
                if len(lengths) and lengths[at] > most:
                    largest, most = int(shard.parts[at]), int(lengths[at])
        return largest, most

    def look(self, data: pd.DataFrame, column: str, largest: int, rows: int) -> None:
        """Find what the largest output of an input has in common, once, should it stand out."""
        if self._value is None and rows * len(self._rows) >= TIMES_MEAN * len(data) and rows >= LOOK_ROWS // 4:
            self._value = (largest, "")  # whatever is found: not again
            self._value = (largest, value_behind(data, column, largest))

    def answer(self, rate: float = 0.0) -> HistogramAnswer:
        """For `add_up`; `rate`: bytes per second of messages to other workers."""
        with self._lock:
            return HistogramAnswer(self._rows.tobytes(), self._nbytes, self._value, rate)


def value_behind(data: pd.DataFrame, column: str, part: int) -> str:
    """ "column = value" of the value that distinguishes an output's rows in an input; "" when there is none."""
    # By row numbers: a mask would gather all rows of the output, of every column, before most are dropped.
    inside = data.iloc[np.flatnonzero(np.asarray(data[column] == part))[:LOOK_ROWS]]
    every = data.iloc[:: max(1, len(data) // LOOK_ROWS)]
    best, text = 0.1, ""
    for name in data.columns:
        if name == column:
            continue
        try:
            counts = inside[name].value_counts(normalize=True)
            value, share = counts.index[0], float(counts.iloc[0])
            lift = share - float((every[name] == value).mean())
        except (TypeError, ValueError, IndexError, NotImplementedError):
            continue  # values that cannot be counted or compared: lists, objects of the user's
        if lift > best:
            best, text = lift, f"{name} = {value!r:.60} ({share:.0%})"
    return text


def add_up(answers: Iterable[HistogramAnswer]) -> tuple[np.ndarray[Any, Any], int, dict[int, str]]:
    """(rows by output, bytes in all, output -> what its rows have in common) of all workers."""
    rows: np.ndarray[Any, Any] = np.zeros(0, dtype=np.int64)
    nbytes = 0
    values: dict[int, str] = {}
    for one in answers:
        mine = np.frombuffer(one.rows, dtype=np.int64)
        if len(mine) > len(rows):
            rows = np.concatenate([rows, np.zeros(len(mine) - len(rows), dtype=np.int64)])
        rows[: len(mine)] += mine
        nbytes += one.nbytes
        if one.value:
            part, text = one.value
            if text:
                values.setdefault(int(part), str(text))
    return rows, nbytes, values


def skewed(rows: np.ndarray[Any, Any], nbytes: int, outputs: int) -> list[Large]:
    """Of so many outputs (empty ones included) those far above the mean, the largest first; at most `MOST_NAMED`."""
    total = int(rows.sum())
    if not total or not outputs:
        return []
    mean = total / outputs
    order = np.argsort(rows, kind="stable")[::-1][:MOST_NAMED]
    return [
        Large(int(i), int(rows[i]), int(nbytes * (rows[i] / total)), float(rows[i] / total), float(rows[i] / mean))
        for i in order
        if rows[i] >= max(LEAST_ROWS, TIMES_MEAN * mean)
    ]
