"""`DecisionLog`: the newest decisions. What was compared, what was chosen and why, and what came of it.

The scheduler's event loop writes (`chosen`, `root`, `left`, `failed`, `assigned`, `finished`).
`story`, `brief`, `matches` and `calibration` read. *Stock* means Dask's own choice.

1. A decision adds a row: by cost, for a root, or left to stock with the reason. When a decision
   fails, the seam adds a row for that, which replaces the incomplete one.
2. When the task is assigned, the row of its key gets the worker. A task that is assigned without a row, or again
   without a new one, came from stock's queue and gets a row that says so.
3. Stealing changes the worker of a row, and finishing completes it.

The rows are in order of age and bounded. The index by key has the newest row of each key. Rows hold keys, addresses and
numbers, never a TaskState or WorkerState: a log must not keep tasks or dead workers alive.

Cost
----
A record is a plain list, written in about two microseconds. The terms of the cost are worked out later, from the views.
Of what the worker reported a few numbers are kept (`decision_record.kept`), which takes 1 us, with 32 transfers 14: its
list would add 12 kB to a row. Making a list of eleven takes 0.07 us, an object with slots 0.6 us, a frozen dataclass
3 us. The numbers of a decision are packed as doubles, not as a tuple per candidate. Containers that stay alive make
Python collect garbage in the middle of every fortieth decision. Floats that stay alive make it ask for memory in every
sixtieth. Both were the 99th percentile of decisions. 10,000 rows with ten candidates each take about 11 MB.
"""

from __future__ import annotations

import statistics
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from dask_gpurt.placement.evaluate import decision_record
from dask_gpurt.placement.evaluate.decision_record import (
    ASSIGNED,
    COST,
    DETAIL,
    FALLBACK,
    FINISHED,
    GROUP,
    KEY,
    KIND,
    OUTCOME,
    QUEUE,
    REPORT,
    REPORTER,
    ROOTS,
    SHADOW,
    STOCK,
    STOLEN_BYTES,
    TIME,
    TRANSFER,
    VICTIM,
    WORKER,
    Detail,
    kept,
    pack,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from dask_gpurt.placement.decide.decision import Decision

#: decisions kept
LIMIT = 10_000
#: finished decisions that `calibration` looks at: it runs on the event loop
CALIBRATED = 1000
#: the newest of those whose figures `calibration` gives one by one
NEWEST = 200
#: keys named as near matches of an unknown one
MATCHES = 3


_time = time.time


class DecisionLog:
    """The newest `limit` decisions of one scheduler. To be used on its event loop only."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        #: by key, oldest first, as `decision_record` describes them
        self._rows: dict[Hashable, list[Any]] = {}

    def __len__(self) -> int:
        return min(len(self._rows), self.limit)

    # ------------------------------------------------------------------ writing, on the hot path

    def chosen(self, key: Hashable, decision: Decision, restricted: bool, workers: int, shadow: bool = False) -> None:
        """Add a decision by cost.

        `restricted`: the task may run on some workers only, of `workers` in all. `shadow`: stock decided, and this is
        what placement would have chosen.
        """
        picked, inputs, views, task, far, choice = decision
        total_bytes, count = inputs.total_bytes, inputs.count
        if inputs.wide:
            for _, nbytes, _ in inputs.wide:
                total_bytes += nbytes
            count += inputs.scale * len(inputs.wide)
        addresses = [w.address for w in picked]
        packed = pack(addresses, views, choice, task, far, total_bytes, count, restricted, workers)
        kind = SHADOW if shadow else COST
        self._add([key, kind, _time(), None, None, None, None, None, None, None, None, *packed])

    def root(self, key: Hashable, address: str, kind: str = GROUP) -> None:
        """Add a root task for which a worker was chosen, as one of the kinds `ROOTS`."""
        self._add([key, kind, _time(), address, None, None, None, None, None, None, None])

    def left(self, key: Hashable, reason: str) -> None:
        """Add a decision that was left to stock on purpose."""
        self._add([key, STOCK, _time(), reason, None, None, None, None, None, None, None])

    def failed(self, key: Hashable, reason: str) -> None:
        """Add a decision that failed, so that stock decided; `reason` is what happened."""
        self._add([key, FALLBACK, _time(), reason, None, None, None, None, None, None, None])

    def assigned(self, key: Hashable, address: str, reason: str = QUEUE) -> list[Any]:
        """Note the worker of a task that entered processing. Return its row; `reason` is for a task without one."""
        row = self._rows.get(key)
        now = _time()
        if row is None or row[WORKER] is not None:
            row = [key, STOCK, now, reason, address, now, None, None, None, None, None]
            self._add(row)
        else:
            row[WORKER] = address
            row[ASSIGNED] = now
        return row

    def stolen(self, key: Hashable, victim: str, thief: str, nbytes: float) -> None:
        """Note that work stealing moved a task, which misses `nbytes` of its inputs where it is now."""
        row = self._rows.get(key)
        if row is not None and row[FINISHED] is None:
            row[VICTIM], row[WORKER], row[ASSIGNED], row[STOLEN_BYTES] = victim, thief, _time(), nbytes

    def finished(self, key: Hashable, outcome: str, report: Mapping[str, Any]) -> None:
        """Complete the row of a task that left processing, whose state is `outcome` now.

        `report` is what its worker reported: ``startstops``, ``nbytes``, ``worker``.
        """
        row = self._rows.get(key)
        if row is not None:
            self.ended(row, outcome, report)

    @staticmethod
    def ended(row: list[Any], outcome: str, report: Mapping[str, Any]) -> None:
        """As `finished`, where the caller has the row of the task."""
        if row[FINISHED] is None:
            row[FINISHED] = max(_time(), row[TIME])  # the clock may have been set back
            row[OUTCOME] = outcome
            if outcome == "memory":
                row[REPORT] = kept(report)

    def restarted(self) -> None:
        """Complete all rows: the scheduler has forgotten all tasks, without transitions."""
        now = _time()
        for row in self._rows.values():
            if row[WORKER] is not None and row[FINISHED] is None:
                row[FINISHED], row[OUTCOME] = now, "forgotten"

    def _add(self, row: list[Any]) -> None:
        rows = self._rows
        key = row[KEY]
        if key in rows:
            del rows[key]  # the newest is last
        rows[key] = row
        if len(rows) > self.limit + (self.limit >> 3):
            # Many at a time: to find the first entry of a dict takes as long as there are deleted ones before it.
            for old in list(islice(rows, len(rows) - self.limit)):
                del rows[old]

    # ------------------------------------------------------------------ reading, on request

    def story(self, key: Hashable) -> dict[str, Any] | None:
        """The newest decision about a key as plain JSON; None when there is none.

        ``kind``, ``reason``, ``time`` (Unix), ``restricted``, ``workers``, ``inputs`` (bytes, count), ``task``
        (compute_seconds, output_bytes), ``candidates`` (see `decision_record.candidates`), ``chosen`` (address),
        ``predicted`` and ``actual`` (times in seconds). What does not apply, or is not known yet, is None.
        """
        row = self._rows.get(key)
        if row is None:
            return None
        kind, detail = row[KIND], row[DETAIL]
        story: dict[str, Any] = {
            "key": str(row[KEY]),
            "kind": kind,
            "reason": None if kind in ROOTS or detail is None else str(detail),
            "time": row[TIME],
            "restricted": None,
            "workers": None,
            "inputs": None,
            "task": None,
            "candidates": [],
            "chosen": detail if kind in ROOTS else None,
            "predicted": None,
            "actual": decision_record.actual(row),
        }
        if kind in (COST, SHADOW):
            found = Detail(row)
            task = found.task
            story["restricted"], story["workers"] = found.restricted, found.workers
            story["inputs"] = {"bytes": found.total_bytes, "count": found.count}
            story["task"] = {"compute_seconds": task.compute_seconds, "output_bytes": task.output_bytes}
            story["candidates"] = decision_record.candidates(found)
            story["chosen"] = found.address(found.choice)
            story["predicted"] = decision_record.predicted(found)
        return story

    def brief(self, key: Hashable) -> tuple[str, str | None, float | None] | None:
        """The newest decision about a key, for a recorder: kind, worker chosen, predicted seconds until it is finished.

        None when there is none; the worker and the seconds are None where stock decided.
        """
        row = self._rows.get(key)
        if row is None:
            return None
        kind, detail = row[KIND], row[DETAIL]
        if kind in ROOTS:
            return kind, detail, None
        if kind != COST:
            return kind, None, None
        found = Detail(row)
        return kind, found.address(found.choice), found.finish_seconds(found.terms(found.choice))

    def matches(self, text: str) -> list[str]:
        """A few keys that begin with a text, newest first: suggestions for a key that is not in the log."""
        out: dict[str, None] = {}
        for row in islice(reversed(self._rows.values()), self.limit):
            known = str(row[KEY])
            if known.startswith(text):
                out[known] = None
                if len(out) >= MATCHES:
                    break
        return list(out)

    def calibration(self) -> dict[str, Any]:
        """How good the predictions were, over the newest decisions by cost whose tasks ran on the chosen worker.

        ``finished``: how many those are, at most `CALIBRATED`; ``mean_predicted_seconds``, ``mean_actual_seconds``:
        from the decision to the result in memory; ``median_ratio``: actual over predicted;
        ``inputs_error_p90_seconds``: 90th percentile of \\|inputs - transfer\\| where a transfer was reported;
        ``newest``: [predicted seconds, actual seconds, bytes of inputs moved] of each, at most `NEWEST`, newest first.
        None where nothing is known.
        """
        predicted: list[float] = []
        actual: list[float] = []
        errors: list[float] = []
        newest: list[list[float]] = []
        for row in reversed(self._rows.values()):
            if row[KIND] != COST or row[OUTCOME] != "memory":
                continue
            found = Detail(row)
            if row[REPORT][REPORTER] != found.address(found.choice):
                continue
            t = found.terms(found.choice)
            predicted.append(found.finish_seconds(t))
            actual.append(row[FINISHED] - row[TIME])
            if len(newest) < NEWEST:
                view = found.view(found.choice)
                newest.append([predicted[-1], actual[-1], view.near_bytes + view.far_bytes])
            transfer = row[REPORT][TRANSFER]
            if transfer is not None:
                errors.append(abs(t["inputs"] - transfer))
            if len(predicted) >= CALIBRATED:
                break
        ratios = [a / p for a, p in zip(actual, predicted, strict=True) if p > 0]
        errors.sort()
        return {
            "finished": len(predicted),
            "mean_predicted_seconds": statistics.fmean(predicted) if predicted else None,
            "mean_actual_seconds": statistics.fmean(actual) if actual else None,
            "median_ratio": statistics.median(ratios) if ratios else None,
            "inputs_error_p90_seconds": errors[min(len(errors) - 1, int(0.9 * len(errors)))] if errors else None,
            "newest": newest,
        }
