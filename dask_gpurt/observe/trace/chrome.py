"""A trace as Chrome's trace events, which https://ui.perfetto.dev and chrome://tracing show.

A process per worker; in it one row per thread with the tasks, rows for transfers and for reads of spilled inputs, and
counters of its memory. Dask does not say which of its threads ran a task, so tasks are laid on the first row that is
free when they begin; with as many rows as threads that always works out, up to the clocks' error.

Times are rounded to whole microseconds before boxes are laid on rows: of two boxes of one row that overlap by a single
microsecond, Perfetto drops one. Beside what the format says, `check` knows this and the other reasons for which
Perfetto leaves out what it was given.
"""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask_gpurt.observe.trace.reader import Trace


def events(trace: Trace) -> list[dict[str, Any]]:
    """The events, times in microseconds since the begin of the trace."""
    out: list[dict[str, Any]] = []
    for w in trace.workers.values():
        name = f"{w.name} {w.address}" if w.name != w.address else w.address
        out.append({"ph": "M", "name": "process_name", "pid": w.number, "args": {"name": name}})
        out.append({"ph": "M", "name": "process_sort_index", "pid": w.number, "args": {"sort_index": w.number}})
    spans: list[tuple[float, float, int, str, str, dict[str, Any]]] = []
    for t in trace.tasks.values():
        if t.worker is None or t.compute_start_seconds is None or t.compute_stop_seconds is None:
            continue
        args: dict[str, Any] = {"key": str(t.key), "bytes": t.nbytes, "dependencies": len(t.dependencies)}
        if t.decision is not None:
            args["decision"], _, args["predicted seconds"] = t.decision
        spans.append((t.compute_start_seconds, t.compute_stop_seconds, t.worker, "compute", t.prefix, args))
        inputs = f"inputs of {t.prefix}"
        for x in t.transfers:
            source = trace.workers.get(x.source) if x.source is not None else None
            came = {"for": str(t.key), "from": source.address if source else "a worker that has left"}
            spans.append((x.start_seconds, x.stop_seconds, t.worker, "transfer", inputs, came))
        spans += [(a, b, t.worker, "disk read", inputs, {"for": str(t.key)}) for a, b in t.disk_reads]
    #: (worker, kind) -> (number of the row, microsecond from which it is free again) of each of its rows
    rows: dict[tuple[int, str], list[tuple[int, int]]] = {}
    numbers = 0
    for start, stop, worker, kind, name, args in sorted(spans, key=lambda span: span[:2]):
        at = max(0, round(start * 1e6))
        took = max(round(stop * 1e6) - at, 1)
        free = rows.setdefault((worker, kind), [])
        place = next((i for i, (_, until) in enumerate(free) if until <= at), len(free))
        if place == len(free):
            free.append((numbers, 0))
            label = {"name": f"{kind} {place}"}
            out.append({"ph": "M", "name": "thread_name", "pid": worker, "tid": numbers, "args": label})
            numbers += 1
        row = free[place][0]
        free[place] = (row, at + took)
        event = {"ph": "X", "name": name, "cat": kind, "pid": worker, "tid": row, "ts": at, "dur": took, "args": args}
        out.append(event)
    for s in trace.samples:
        if s.worker is not None and "memory" in s.figures:
            at = round(s.seconds * 1e6)
            out.append({"ph": "C", "name": "memory", "pid": s.worker, "ts": at, "args": {"bytes": s.figures["memory"]}})
    return out


def write(trace: Trace, file: IO[str]) -> None:
    """The JSON document."""
    json.dump({"traceEvents": events(trace), "displayTimeUnit": "ms", "otherData": trace.about}, file)
