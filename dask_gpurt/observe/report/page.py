"""The page of a `Run`: one HTML file without script, which says first what to do, then why.

Pure: a run in, a page out. What a part that is not installed would have shown is left out, with a line that says so.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.collect import wait_histogram
from dask_gpurt.observe.collect.causes import CAUSES, UNASSIGNED
from dask_gpurt.observe.collect.fetch_matrix import OTHERS
from dask_gpurt.observe.render.html import Page
from dask_gpurt.observe.render.text import bytes_said, seconds_said
from dask_gpurt.observe.report import charts
from dask_gpurt.observe.report.cost import by_class
from dask_gpurt.observe.report.findings import NOTHING, advise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dask_gpurt.observe.report.facts import Run

#: rows of tables that could be long
ROWS = 25


def write(run: Run, path: str) -> str:
    """Write the page about `run` to `path`, in one step; returns `path`."""
    return page(run).write(path)


def page(run: Run) -> Page:
    """The page about `run`."""
    out = Page(f"dask-gpurt: report of {run.title or 'a run'}", style=charts.STYLE)
    began = datetime.fromtimestamp(run.start).astimezone()
    out.text(
        f"From {began:%Y-%m-%d %H:%M:%S %Z}, {seconds_said(run.seconds)} long. dask-gpurt "
        f"{run.scheduler.get('version', '')}, policy {run.scheduler.get('policy', '')}.",
        kind="note",
    )
    for note in run.notes:
        out.text(note, kind="note")
    for address, why in run.silent.items():
        name = run.worker(address)
        said = "" if name == address else f" ({address})"
        out.text(f"No answer from {name}{said}: {why}. What is said of it is what the scheduler knew.", kind="bad")
    _headline(out, run)
    _advice(out, run)
    _ledger(out, run)
    _timeline(out, run)
    _kinds(out, run)
    _tiers(out, run)
    _links(out, run)
    _shuffles(out, run)
    _placement(out, run)
    _fallbacks(out, run)
    _cost(out, run)
    return out


def _headline(out: Page, run: Run) -> None:
    count, threads = run.worker_count or len(run.workers), sum(w.threads for w in run.workers)
    alike = count == len(run.workers) and len({w.threads for w in run.workers}) == 1
    used = run.busy_seconds / run.slot_seconds if run.slot_seconds else 0.0
    values = [
        (seconds_said(run.seconds), "wall time"),
        (f"{count:,} x {threads // count}", "workers x threads")
        if alike
        else (f"{count:,}, {threads:,}", "workers, threads"),
        (f"{run.task_count:,}", "tasks"),
        (f"{used:.0%}", "of the threads' time busy"),
    ]
    cause = max((c for c in CAUSES if c != "no_work"), key=lambda c: run.causes.get(c, 0.0))
    if run.causes.get(cause, 0.0) > 0 and run.slot_seconds > 0:
        values.append((CAUSES[cause][0], f"largest stall, {run.causes[cause] / run.slot_seconds:.0%}"))
    out.drawing(charts.cards(values))


def _advice(out: Page, run: Run) -> None:
    out.heading("Advice")
    findings = advise(run)
    if not findings:
        out.text(f"{NOTHING}.", kind="good")
        return
    out.drawing(
        charts.advice(
            [
                (f.cause, f"{f.share:.1%} of the threads' time ({seconds_said(f.seconds)})", f.text, f.remedy)
                for f in findings
            ]
        )
    )


def _ledger(out: Page, run: Run) -> None:
    out.heading("What the threads did")
    out.text(
        "Every second of every thread is busy or has one cause of idleness. They sum to threads x time; the error of "
        "the sum is in the last line.",
        kind="note",
    )
    rows = [("all workers", run.busy_seconds, run.causes)]
    rows += [(w.title, w.busy_seconds, w.causes) for w in run.workers[: charts.WORKERS]]
    out.drawing(charts.stacks(rows))
    total = run.slot_seconds or 1.0
    waits = wait_histogram.figures(run.waits)
    table: list[list[Any]] = [
        ["busy", f"{run.busy_seconds / total:.1%}", run.busy_seconds, None, None, None, "a task runs"]
    ]
    for cause, (label, about) in CAUSES.items():
        seconds = run.causes.get(cause, 0.0)
        if seconds > 0:
            table.append([label, f"{seconds / total:.1%}", seconds, *_tail(waits.get(cause)), about])
    if UNASSIGNED in waits:
        about = "all waits of a thread that had no task, whatever the cause; their seconds are in the lines above"
        table.append(["without a task", None, None, *_tail(waits[UNASSIGNED]), about])
    accounted = run.busy_seconds + sum(run.causes.values())
    error = abs(accounted - run.slot_seconds) / total
    out.table(
        ["Use", "Share", "Seconds", "Waits", "Median wait", "99 % below", "Meaning"],
        table,
        footer=[["threads x time", "100.0%", run.slot_seconds, None, None, None, f"the sum differs by {error:.2%}"]],
    )


def _tail(waits: Mapping[str, Any] | None) -> list[Any]:
    """How many waits, and how long; empty for causes that have sums only."""
    if waits is None:
        return [None, None, None]
    return [waits["count"], seconds_said(waits["p50_seconds"]), seconds_said(waits["p99_seconds"])]


def _timeline(out: Page, run: Run) -> None:
    out.heading("Tasks over time")
    if not run.tasks:
        out.text("No task ended with a result.", kind="note")
        return
    if len(run.tasks) < run.task_count:
        which = "newest" if run.known is None else "longest"
        out.text(f"The {which} {len(run.tasks):,} of {run.task_count:,} tasks.", kind="note")
    drawn = [w for w in run.workers if w.address != OTHERS]
    if len(drawn) < run.worker_count:
        out.text(f"The {len(drawn)} of {run.worker_count:,} workers that lost most time.", kind="note")
    elif len(drawn) > charts.WORKERS:
        out.text(f"The first {charts.WORKERS} of {len(drawn)} workers.", kind="note")
    out.drawing(charts.timeline(drawn, run.tasks, run.start, run.stop))


def _kinds(out: Page, run: Run) -> None:
    rows = run.digest.kinds
    if not rows:
        return
    out.heading("Kinds of task")
    out.table(
        ["Kind", "Tasks", "Seconds", "Median", "Longest", "Fetching"],
        [
            [k.prefix, k.tasks, k.seconds, seconds_said(k.median), seconds_said(k.longest), seconds_said(k.fetching)]
            for k in rows[:ROWS]
        ],
    )
    if len(rows) > ROWS:
        out.text(f"... and {len(rows) - ROWS} more kinds.", kind="note")


def _tiers(out: Page, run: Run) -> None:
    out.heading("Memory tiers")
    rows = [
        [
            w.title,
            bytes_said(w.tiers.get("host_bytes")),
            bytes_said(w.tiers.get("host_limit_bytes")),
            bytes_said(w.tiers.get("disk_bytes")),
            bytes_said(w.tiers.get("written_bytes")),
            bytes_said(w.tiers.get("read_bytes")),
            seconds_said(w.causes.get("unspill", 0.0)),
            seconds_said(w.causes.get("memory", 0.0)),
        ]
        for w in run.workers[: charts.WORKERS]
        if w.tiers
    ]
    if not rows:
        out.text("No worker answered.", kind="note")
        return
    columns = ["Worker", "In memory", "Budget", "On disk", "Written", "Read", "Waited for reads", "Waited for room"]
    out.table(columns, rows)
    lost = sum(w.tiers.get("lost", 0) for w in run.workers)
    if lost:
        out.text(f"{lost:,.0f} stored values could not be read back and were computed again.", kind="bad")


def _links(out: Page, run: Run) -> None:
    out.heading("Links")
    links = run.scheduler.get("placement", {}).get("links") or {}
    rows = [
        [
            name,
            f"{bytes_said(link['bytes_per_second'])}/s",
            seconds_said(link["latency_seconds"]),
            link["samples"],
        ]
        for name, link in links.items()
        if link.get("samples")
    ]
    if rows:
        out.text("Learned by class of link, since the start of the scheduler:", kind="note")
        out.table(["Class", "Bandwidth", "Latency", "Transfers"], rows)
    if not run.fetches:
        out.text("No task fetched an input from another worker.", kind="note")
        return
    out.text(
        "Inputs of tasks that one worker fetched from another, those that took longest first; transfers may overlap.",
        kind="note",
    )
    out.table(
        ["From", "To", "Bytes", "Seconds", "Requests", "Bandwidth"],
        [
            [
                run.worker(f.source),
                run.worker(f.target),
                bytes_said(f.bytes),
                f.seconds,
                f.requests,
                f"{bytes_said(f.bytes_per_second)}/s",
            ]
            for f in run.fetches[:ROWS]
        ],
    )


def _shuffles(out: Page, run: Run) -> None:
    out.heading("Shuffles")
    part = run.scheduler.get("shuffle")
    if not part:
        out.text("The shuffle engine is not installed.", kind="note")
    moved = run.shuffle
    if moved.get("runs"):
        cells: list[tuple[str, str, Callable[[Any], object]]] = [
            ("Inputs", "inputs", int),
            ("Outputs", "outputs", int),
            ("Sent", "bytes_sent", bytes_said),
            ("Kept on the worker", "bytes_self", bytes_said),
            ("Splitting", "seconds_partition", seconds_said),
            ("Encoding", "seconds_encode", seconds_said),
            ("Sending", "seconds_send", seconds_said),
            ("Assembling", "seconds_assemble", seconds_said),
            ("Restarts", "restarts", int),
        ]
        # Of a run that is over, only what heartbeats bring is known.
        known = [(column, said(moved[key])) for column, key, said in cells if key in moved]
        out.table([column for column, _ in known], [[value for _, value in known]])
    elif not run.outputs:
        out.text("No shuffle ran.", kind="note")
    if run.outputs:
        sizes = sorted(run.outputs)
        median = sizes[len(sizes) // 2]
        skew = sizes[-1] / median if median else float("inf")
        out.text(
            f"{run.output_count or len(sizes):,} outputs, largest first: the largest has {bytes_said(sizes[-1])}, the "
            f"median {bytes_said(median)} ({skew:,.1f} times)."
        )
        out.drawing(charts.histogram(sizes))


def _placement(out: Page, run: Run) -> None:
    out.heading("Placement")
    part = run.scheduler.get("placement")
    if not part or not part.get("installed", True):
        out.text("Placement is left to Dask.", kind="note")
        return
    decided = run.placement.get("decisions", {})
    declined = run.placement.get("declined", {})
    rows: list[list[Any]] = [
        ["local: all inputs were there", decided.get("local", 0)],
        ["moved: some inputs had to be fetched", decided.get("moved", 0)],
        *([f"left to Dask: {reason}", count] for reason, count in sorted(declined.items()) if count),
    ]
    out.table(["Decision", "Tasks"], rows)
    now = part.get("decisions", {})
    if now.get("finished"):
        out.text(
            f"From decision to result, on average of the newest {now['finished']:,}: "
            f"{seconds_said(now['mean_predicted_seconds'])} predicted, {seconds_said(now['mean_actual_seconds'])} "
            "actual; a decision takes "
            f"{part.get('microseconds', {}).get('median', 0.0):.0f} microseconds (median)."
        )


def _fallbacks(out: Page, run: Run) -> None:
    out.heading("Fallbacks to stock Dask, and events")
    rows: list[list[Any]] = []
    for name, reasons in (run.placement.get("fallbacks") or {}).items():
        rows += [[f"placement, {name}", reason, count] for reason, count in reasons.items() if count]
    for reason, count in (run.scheduler.get("shuffle", {}).get("fallbacks") or {}).items():
        rows.append(["shuffle", reason, count])
    for name, count in (run.scheduler.get("events", {}).get("counts") or {}).items():
        rows.append(["event", name, count])
    if rows:
        out.table(["Part", "What", "Times"], rows)
    else:
        out.text("None.", kind="good")


def _cost(out: Page, run: Run) -> None:
    costs = cost(run)
    if costs is None:
        return
    out.heading("Cost")
    total = sum(count * price for _, price, count in costs)
    rows: list[list[Any]] = [
        [
            kind,
            f"{count:,}",
            f"{price:,.2f}",
            f"{count * price:,.2f}",
            f"{count * price * run.seconds / 3600:,.4f}",
        ]
        for kind, price, count in costs
    ]
    hosts = sum(count for _, _, count in costs)
    out.table(
        ["Class of node (of one worker)", "Hosts", "$ per hour of one", "$ per hour", "$ of this run"],
        rows,
        footer=[["all", f"{hosts:,}", "", f"{total:,.2f}", f"{total * run.seconds / 3600:,.4f}"]],
    )
    idle = 1 - run.busy_seconds / run.slot_seconds if run.slot_seconds else 0.0
    out.text(f"Of that, {idle:.0%} was paid for threads that were idle.", kind="note")


def cost(run: Run) -> list[tuple[str, float, int]] | None:
    """(class of node, $ per hour of one, hosts); None when no prices were given."""
    if run.hosts is not None or run.prices is None:
        return None if run.hosts is None else list(run.hosts)
    return by_class(((w.host, w.node_class, w.name) for w in run.workers), run.prices)
