"""The record of one decision: its layout in a row of `decision_log`, and how it is read.

`pack` and `kept` write it on the hot path. `Detail`, `candidates`, `predicted` and `actual` read it on request.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Any

from dask_gpurt.model.views import TaskView, WorkerView
from dask_gpurt.placement.decide.cost import terms
from dask_gpurt.placement.tables.durations import compute_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dask_gpurt.model.link import Link

# The kinds of decision.
COST = "cost"
GROUP = "root group"
#: a root that runs where its input is, see `decide.root_home`; and one that was not queued, see `decide.tiny_roots`
HOME, TINY = "root at home", "tiny root"
STOCK = "stock"
#: what the cost would have chosen; stock, Dask's own choice, was followed
SHADOW = "shadow"
FALLBACK = "fallback"
#: kinds whose detail is the address of the worker chosen
ROOTS = (GROUP, HOME, TINY)
#: reason of a row that only began when stock's queue assigned the task
QUEUE = "queue"

# The places in a row.
KEY, KIND, TIME, DETAIL, WORKER, ASSIGNED, VICTIM, STOLEN_BYTES, FINISHED, OUTCOME, REPORT = range(11)
# The places in what is kept of a worker's report.
BEGAN, COMPUTE, TRANSFER, NBYTES, REPORTER = range(5)
#: index in the row of a decision by cost from which on it has what `pack` returned: one container less to keep alive
PACKED = 11

#: the one field of a view that is no number, and how many there are
_NEAR, _FIELDS = WorkerView._fields.index("near"), len(WorkerView._fields)
#: the numbers of a task
_TASK = len(TaskView._fields)


@functools.lru_cache(maxsize=512)
def _doubles(n: int) -> struct.Struct:
    return struct.Struct(f"{n}d")


def pack(
    addresses: Sequence[str],
    views: Sequence[WorkerView],
    choice: int,
    task: TaskView,
    far: Link,
    total_bytes: float,
    count: float,
    restricted: bool,
    workers: int,
) -> tuple[Any, ...]:
    """Pack a decision by cost into the tuple that `Detail` reads. On the hot path.

    `addresses` and `views` are of the candidates, `choice` is the index of the chosen one, `total_bytes` and `count`
    are of the inputs, `workers` is how many there are in all.
    """
    numbers: list[Any] = [*task]
    for view in views:
        numbers += view
    # The links go apart, one for all where they are the same; a zero stays in the place of each.
    nears: Any = numbers[_TASK + _NEAR :: _FIELDS]
    if nears.count(nears[0]) == len(nears):
        nears = nears[0]
    else:
        nears = tuple(nears)
    numbers[_TASK + _NEAR :: _FIELDS] = [0.0] * len(views)
    return (
        choice,
        far,
        total_bytes,
        count,
        restricted,
        workers,
        nears,
        _doubles(len(numbers)).pack(*numbers),
        *addresses,
    )


def kept(report: Mapping[str, Any]) -> tuple[float | None, float | None, float | None, int | None, str | None]:
    """What is kept of a worker's report: when the computation began, seconds of it and of transfers, bytes, worker."""
    startstops = report.get("startstops") or ()
    began = next((s["start"] for s in reversed(startstops) if s["action"] == "compute"), None)
    seconds, transfer = compute_seconds(startstops), transfer_seconds(startstops)
    return began, seconds, transfer, report.get("nbytes"), report.get("worker")


def transfer_seconds(startstops: Iterable[Mapping[str, Any]]) -> float | None:
    """Seconds in which at least one reported transfer was under way; None when none was reported."""
    spans = [(s["start"], s["stop"]) for s in startstops if s["action"] == "transfer"]
    if not spans:
        return None
    spans.sort()
    seconds, end = 0.0, spans[0][0]
    for start, stop in spans:
        if stop > end:
            seconds += stop - max(start, end)
            end = stop
    return seconds


class Detail:
    """A decision by cost, read from its row.

    The packed record is the end of the row. In this order: choice; far link; bytes and number of inputs; restricted;
    number of workers; near link (one per candidate where they differ); the numbers of the task and of all views as
    doubles; the addresses of the candidates.
    """

    def __init__(self, row: list[Any]) -> None:
        self.choice: int = row[PACKED]
        self.far: Link = row[PACKED + 1]
        self.total_bytes: float = row[PACKED + 2]
        self.count: float = row[PACKED + 3]
        self.restricted: bool = row[PACKED + 4]
        self.workers: int = row[PACKED + 5]
        self._nears: Link | tuple[Link, ...] = row[PACKED + 6]
        self._numbers: bytes = row[PACKED + 7]
        self._addresses: list[str] = row[PACKED + 8 :]
        self.task = TaskView._make(_doubles(_TASK).unpack_from(self._numbers))
        #: how many workers were compared
        self.candidates = len(self._addresses)

    def address(self, i: int) -> str:
        """Address of candidate `i`."""
        return self._addresses[i]

    def view(self, i: int) -> WorkerView:
        """What was known of candidate `i`."""
        numbers = _doubles(_FIELDS).unpack_from(self._numbers, 8 * (_TASK + _FIELDS * i))
        near = self._nears[i] if isinstance(self._nears, tuple) else self._nears
        return WorkerView._make((*numbers[:_NEAR], near, *numbers[_NEAR + 1 :]))

    def terms(self, i: int) -> dict[str, float]:
        """The terms of the cost of candidate `i`, in seconds, see `cost.terms`."""
        return terms(self.task, self.view(i), self.far)

    @staticmethod
    def finish_seconds(t: dict[str, float]) -> float:
        """Seconds from the decision to the result, by the terms of the cost."""
        return max(t["queue"], t["inputs"], t["read"]) + t["compute"]


def candidates(detail: Detail) -> list[dict[str, Any]]:
    """Describe each candidate: ``address``, ``why`` it was one, ``chosen``, ``idle``, bytes it has and misses, terms.

    ``why``: ``holder`` (has inputs, or is already fetching them), ``neighbour`` (of a holder), ``idle``, ``allowed``
    (by the task's restrictions), ``all`` (a small cluster is compared whole), ``random``.
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


def predicted(detail: Detail) -> dict[str, float]:
    """What was predicted for the chosen worker. ``finish_seconds``: from the decision to the result."""
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


def actual(row: list[Any]) -> dict[str, Any] | None:
    """What came of a decision; None when the task has not been assigned yet.

    ``moved_bytes`` is by the sizes of the inputs that the worker lacked: workers report times only, and a transfer that
    served several tasks is reported with one of them.
    """
    if row[WORKER] is None:
        return None
    began, seconds, transfer, nbytes, worker = row[REPORT] or (None,) * 5
    finish = None if row[FINISHED] is None else row[FINISHED] - row[TIME]
    wait = None
    if began is not None and finish is not None:
        # A worker's clock is known to some milliseconds, by its heartbeats: keep within what is certain.
        wait = min(max(0.0, began - row[TIME]), finish)
    worker = worker or row[WORKER]
    moved = row[STOLEN_BYTES]
    if moved is None and row[KIND] == COST:
        detail = Detail(row)
        if worker == detail.address(detail.choice):
            view = detail.view(detail.choice)
            moved = view.near_bytes + view.far_bytes
    return {
        "worker": worker,
        "stolen_from": row[VICTIM],
        "assigned": row[ASSIGNED],
        "outcome": row[OUTCOME],
        "wait_seconds": wait,
        "transfer_seconds": transfer,
        "compute_seconds": seconds,
        "finish_seconds": finish,
        "moved_bytes": moved,
        "result_bytes": nbytes,
    }
