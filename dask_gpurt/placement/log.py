"""The newest decisions: what was compared, what was chosen and why, and what came of it.

A record is a plain list, written in about two microseconds on the scheduler's event loop. Everything that can be worked
out later is: the cost terms from the views that the decision was made from, the times from what the worker reported.
Making a list of eleven takes 0.07 us, an object with slots 0.6 us, a frozen dataclass 3 us. What a decision leaves
behind is packed as doubles, not a tuple per candidate: containers that stay alive are what makes Python collect garbage
in the middle of every fortieth decision, and floats that stay alive what makes it ask for memory in every sixtieth;
both were their 99th percentile. 10,000 rows with ten candidates each take about 14 MB.

1. A decision adds a row: by cost, for the owner of a root group, or left to stock with the reason. One that failed is
   told by the seam and adds a row of its own, which replaces the half-made one.
2. The task is assigned: the row of its key gets the worker. A task that is assigned without a row, or again without a
   new one, came from stock's queue and gets a row that says so.
3. Stealing moves it, finishing ends it.

The rows are in order of age and bounded; the index by key has the newest row of each key. Rows hold keys, addresses and
numbers, never a TaskState or WorkerState: a log must not keep tasks or dead workers alive.
"""

from __future__ import annotations

import functools
import statistics
import struct
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from dask_gpurt.model.views import TaskView, WorkerView
from dask_gpurt.placement.cost import terms
from dask_gpurt.placement.durations import compute_seconds
from dask_gpurt.placement.policy import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from dask_gpurt.model.link import Link
    from dask_gpurt.placement.candidates import Inputs
    from dask_gpurt.placement.workers import WorkerInfo

#: decisions kept
LIMIT = 10_000
#: finished decisions that `calibration` looks at: it runs on the event loop
CALIBRATED = 1000
#: the newest of those whose figures `calibration` gives one by one
NEWEST = 200
#: keys named as near matches of one that is not known
MATCHES = 3

# The kinds of decision.
COST = "cost"
GROUP = "root group"
STOCK = "stock"
#: what the cost would have chosen; stock decided
SHADOW = "shadow"
FALLBACK = "fallback"
#: reason of a row that only began when stock's queue assigned the task
QUEUE = "queue"

# The places in a row.
_KEY, _KIND, _TIME, _DETAIL, _WORKER, _ASSIGNED, _VICTIM, _STOLEN_BYTES, _FINISHED, _OUTCOME, _REPORT = range(11)

#: the one field of a view that is no number, and how many are
_NEAR, _NUMBERS = WorkerView._fields.index("near"), len(WorkerView._fields) - 1

_time = time.time


@functools.lru_cache(maxsize=512)
def _doubles(n: int) -> struct.Struct:
    return struct.Struct(f"{n}d")


class DecisionLog:
    """The newest `limit` decisions of one scheduler. Use on its event loop."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        #: decisions ever written
        self.written = 0
        self._rows: deque[list[Any]] = deque()
        self._by_key: dict[Hashable, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    # ------------------------------------------------------------------ writing, on the hot path

    def chosen(
        self,
        key: Hashable,
        picked: Iterable[WorkerInfo],
        views: Sequence[WorkerView],
        choice: int,
        task: TaskView,
        far: Link,
        inputs: Inputs,
        restricted: bool,
        workers: int,
        shadow: bool = False,
    ) -> None:
        """A decision by cost; `workers` is how many there are in all."""
        total_bytes, count = inputs.total_bytes, inputs.count
        if inputs.wide:
            for _, nbytes, _ in inputs.wide:
                total_bytes += nbytes
            count += inputs.scale * len(inputs.wide)
        # See `_Detail`, which takes it apart.
        near: Any = views[0][_NEAR]
        nears = near
        numbers: list[Any] = []
        for view in views:
            numbers += view[:_NEAR]
            numbers += view[_NEAR + 1 :]
            if view[_NEAR] is not near:
                nears = tuple(v[_NEAR] for v in views)
        addresses = [w.address for w in picked]
        detail = (
            choice,
            task,
            far,
            total_bytes,
            count,
            restricted,
            workers,
            nears,
            _doubles(len(numbers)).pack(*numbers),
            *addresses,
        )
        self._add([key, SHADOW if shadow else COST, _time(), detail, None, None, None, None, None, None, None])

    def group(self, key: Hashable, address: str) -> None:
        """A queued root task goes to the worker that owns its group."""
        self._add([key, GROUP, _time(), address, None, None, None, None, None, None, None])

    def left(self, key: Hashable, reason: str) -> None:
        """A decision was left to stock on purpose."""
        self._add([key, STOCK, _time(), reason, None, None, None, None, None, None, None])

    def failed(self, key: Hashable, reason: str) -> None:
        """A decision failed, and stock decided; `reason` is what happened."""
        self._add([key, FALLBACK, _time(), reason, None, None, None, None, None, None, None])

    def assigned(self, key: Hashable, address: str) -> None:
        """A task went to processing on a worker."""
        row = self._by_key.get(key)
        now = _time()
        if row is None or row[_WORKER] is not None:
            self._add([key, STOCK, now, QUEUE, address, now, None, None, None, None, None])
        else:
            row[_WORKER], row[_ASSIGNED] = address, now

    def stolen(self, key: Hashable, victim: str, thief: str, nbytes: float) -> None:
        """Work stealing moved a task, which misses `nbytes` of its inputs where it is now."""
        row = self._by_key.get(key)
        if row is not None and row[_FINISHED] is None:
            row[_VICTIM], row[_WORKER], row[_ASSIGNED], row[_STOLEN_BYTES] = victim, thief, _time(), nbytes

    def finished(self, key: Hashable, outcome: str, report: Mapping[str, Any]) -> None:
        """A task left processing for the state `outcome`; `report` is what the scheduler was told with it."""
        row = self._by_key.get(key)
        if row is not None and row[_FINISHED] is None:
            row[_FINISHED] = _time()
            row[_OUTCOME] = outcome
            if outcome == "memory":
                row[_REPORT] = (report.get("startstops") or (), report.get("nbytes"), report.get("worker"))

    def restarted(self) -> None:
        """The scheduler has forgotten all tasks, without transitions."""
        now = _time()
        for row in self._rows:
            if row[_WORKER] is not None and row[_FINISHED] is None:
                row[_FINISHED], row[_OUTCOME] = now, "forgotten"

    def _add(self, row: list[Any]) -> None:
        rows, by_key = self._rows, self._by_key
        if len(rows) >= self.limit:
            old = rows.popleft()
            if by_key.get(old[_KEY]) is old:
                del by_key[old[_KEY]]
        rows.append(row)
        by_key[row[_KEY]] = row
        self.written += 1

    # ------------------------------------------------------------------ reading, when somebody asks

    def story(self, key: Hashable) -> dict[str, Any] | None:
        """The newest decision about a key as plain JSON; None when there is none.

        ``kind``, ``reason``, ``time`` (Unix), ``restricted``, ``workers``, ``inputs`` (bytes, count), ``task``
        (compute_seconds, output_bytes), ``candidates`` (see `_candidates`), ``chosen`` (address), ``predicted`` and
        ``actual`` (times in seconds). What does not apply, or is not known yet, is None.
        """
        row = self._by_key.get(key)
        if row is None:
            return None
        kind, detail = row[_KIND], row[_DETAIL]
        story: dict[str, Any] = {
            "key": str(row[_KEY]),
            "kind": kind,
            "reason": detail if kind in (STOCK, FALLBACK) else None,
            "time": row[_TIME],
            "restricted": None,
            "workers": None,
            "inputs": None,
            "task": None,
            "candidates": [],
            "chosen": detail if kind == GROUP else None,
            "predicted": None,
            "actual": _actual(row),
        }
        if kind in (COST, SHADOW):
            found = _Detail(detail)
            task = found.task
            story["restricted"], story["workers"] = found.restricted, found.workers
            story["inputs"] = {"bytes": found.total_bytes, "count": found.count}
            story["task"] = {"compute_seconds": task.compute_seconds, "output_bytes": task.output_bytes}
            story["candidates"] = _candidates(found)
            story["chosen"] = found.address(found.choice)
            story["predicted"] = _predicted(found)
        return story

    def brief(self, key: Hashable) -> tuple[str, str | None, float | None] | None:
        """The newest decision about a key, for a recorder: kind, worker chosen, predicted seconds until it is finished.

        None when there is none; the worker and the seconds are None where stock decided.
        """
        row = self._by_key.get(key)
        if row is None:
            return None
        kind, detail = row[_KIND], row[_DETAIL]
        if kind == GROUP:
            return kind, detail, None
        if kind != COST:
            return kind, None, None
        found = _Detail(detail)
        return kind, found.address(found.choice), found.finish_seconds(found.terms(found.choice))

    def matches(self, text: str) -> list[str]:
        """A few keys that begin with a text, newest first; for those who ask for one that is not here."""
        out: dict[str, None] = {}
        for row in reversed(self._rows):
            known = str(row[_KEY])
            if known.startswith(text):
                out[known] = None
                if len(out) >= MATCHES:
                    break
        return list(out)

    def calibration(self) -> dict[str, Any]:
        """How good the predictions were, over the newest decisions by cost whose tasks ran where they were put.

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
        for row in reversed(self._rows):
            if row[_KIND] != COST or row[_OUTCOME] != "memory":
                continue
            found = _Detail(row[_DETAIL])
            if row[_REPORT][2] != found.address(found.choice):
                continue
            t = found.terms(found.choice)
            predicted.append(found.finish_seconds(t))
            actual.append(row[_FINISHED] - row[_TIME])
            if len(newest) < NEWEST:
                view = found.view(found.choice)
                newest.append([predicted[-1], actual[-1], view.near_bytes + view.far_bytes])
            transfer = transfer_seconds(row[_REPORT][0])
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


def transfer_seconds(startstops: Iterable[Mapping[str, Any]]) -> float | None:
    """Time in which at least one reported transfer was under way; None when none was reported."""
    spans = sorted((s["start"], s["stop"]) for s in startstops if s["action"] == "transfer")
    if not spans:
        return None
    seconds, end = 0.0, spans[0][0]
    for start, stop in spans:
        if stop > end:
            seconds += stop - max(start, end)
            end = stop
    return seconds


class _Detail:
    """The record of a decision by cost, taken apart.

    Packed it is a tuple: choice, task, far link, bytes and number of inputs, restricted, workers in all, the near link
    (one for each candidate where they differ), the other numbers of all views as doubles, the candidates' addresses.
    """

    def __init__(self, packed: tuple[Any, ...]) -> None:
        self.choice: int = packed[0]
        self.task: TaskView = packed[1]
        self.far: Link = packed[2]
        self.total_bytes: float = packed[3]
        self.count: float = packed[4]
        self.restricted: bool = packed[5]
        self.workers: int = packed[6]
        self._nears: Link | tuple[Link, ...] = packed[7]
        self._numbers: bytes = packed[8]
        self._addresses: tuple[str, ...] = packed[9:]
        #: how many
        self.candidates = len(self._addresses)

    def address(self, i: int) -> str:
        return self._addresses[i]

    def view(self, i: int) -> WorkerView:
        numbers = _doubles(_NUMBERS).unpack_from(self._numbers, 8 * _NUMBERS * i)
        near = self._nears[i] if isinstance(self._nears, tuple) else self._nears
        return WorkerView._make((*numbers[:_NEAR], near, *numbers[_NEAR:]))

    def terms(self, i: int) -> dict[str, float]:
        return terms(self.task, self.view(i), self.far, WEIGHTS)

    @staticmethod
    def finish_seconds(t: dict[str, float]) -> float:
        """From the decision to the result, by the terms of the cost."""
        return max(t["queue"], t["inputs"], t["read"]) + t["compute"]


def _candidates(detail: _Detail) -> list[dict[str, Any]]:
    """Each candidate: ``address``, ``why`` it was one, ``chosen``, ``idle``, bytes of inputs it has and misses, terms.

    ``why``: ``holder`` (has inputs, or is already fetching them), ``neighbour`` (of a holder), ``idle``, ``allowed``
    (by the task's restrictions), ``all`` (in a small cluster everybody is compared), ``random``.
    """
    out = []
    for i in range(detail.candidates):
        view = detail.view(i)
        missing = view.near_bytes + view.far_bytes
        fetches = view.near_fetches + view.far_fetches
        if detail.count - fetches > 0.5:  # counts are floats when a sample of the inputs stands for all
            why = "holder"
        elif view.near_fetches:
            why = "neighbour"
        elif not view.queue_seconds:
            why = "idle"
        elif detail.restricted:
            why = "allowed"
        else:
            why = "all" if detail.candidates >= detail.workers else "random"
        t = detail.terms(i)
        out.append(
            {
                "address": detail.address(i),
                "why": why,
                "chosen": i == detail.choice,
                "idle": not view.queue_seconds,
                "has_bytes": max(0.0, detail.total_bytes - missing),
                "missing_bytes": missing,
                "missing_inputs": fetches,
                "fetching": view.pending_seconds > 0,
                "slowness": view.slowness,
                **{f"{name}_seconds": seconds for name, seconds in t.items()},
                "total_seconds": max(max(t["queue"], t["inputs"]) + t["hidden"], t["read"])
                + t["compute"]
                - t["excused"]
                + t["overflow"]
                + t["moved"],
            }
        )
    return out


def _predicted(detail: _Detail) -> dict[str, float]:
    """What the choice expected. ``finish_seconds``: from the decision to the result."""
    view = detail.view(detail.choice)
    t = detail.terms(detail.choice)
    return {
        "wait_seconds": max(t["queue"], t["inputs"]),
        "queue_seconds": t["queue"],
        "inputs_seconds": t["inputs"],
        "compute_seconds": t["compute"],
        "finish_seconds": detail.finish_seconds(t),
        "moved_bytes": view.near_bytes + view.far_bytes,
    }


def _actual(row: list[Any]) -> dict[str, Any] | None:
    """What came of a decision; None when the task was not assigned yet.

    ``moved_bytes`` is by the sizes of the inputs that the worker lacked: workers report times only, and a transfer that
    served several tasks is reported with one of them.
    """
    if row[_WORKER] is None:
        return None
    startstops, nbytes, worker = row[_REPORT] or ((), None, None)
    began = next((s["start"] for s in reversed(startstops) if s["action"] == "compute"), None)
    finish = None if row[_FINISHED] is None else row[_FINISHED] - row[_TIME]
    wait = None
    if began is not None and finish is not None:
        # A worker's clock is set by its heartbeats, to some milliseconds: not more than is certain.
        wait = min(max(0.0, began - row[_TIME]), finish)
    worker = worker or row[_WORKER]
    moved = row[_STOLEN_BYTES]
    if moved is None and row[_KIND] == COST:
        detail = _Detail(row[_DETAIL])
        if worker == detail.address(detail.choice):
            view = detail.view(detail.choice)
            moved = view.near_bytes + view.far_bytes
    return {
        "worker": worker,
        "stolen_from": row[_VICTIM],
        "assigned": row[_ASSIGNED],
        "outcome": row[_OUTCOME],
        "wait_seconds": wait,
        "transfer_seconds": transfer_seconds(startstops),
        "compute_seconds": compute_seconds(startstops),
        "finish_seconds": finish,
        "moved_bytes": moved,
        "result_bytes": nbytes,
    }
