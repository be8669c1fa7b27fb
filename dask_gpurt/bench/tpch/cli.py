"""The command: data, DuckDB's answers, clusters, queries, table, verdict, report. ``ci/quickstart.sh`` calls it.

Exit codes: 0 all answers equal; 1 an answer differs or a query failed; 2 wrong arguments or the machine cannot run it;
130 interrupted. Everything that was started is killed on all of them, except what ``--keep-running`` asks for.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import click
import dask.utils

from dask_gpurt.bench import facts as data
from dask_gpurt.bench.progress import Bar
from dask_gpurt.bench.tpch import generate, queries, report, runner, verdict
from dask_gpurt.bench.tpch.clusters import (
    ENGINES,
    ProcessCluster,
    describe,
    memory_limit_bytes,
    parse_engines,
)
from dask_gpurt.bench.tpch.reference import Reference
from dask_gpurt.client import state

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa


#: what can be timed on the same files, for orientation
BESIDE = ("duckdb",)


def parser(prog: str) -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog=prog,
        description="TPC-H in plain dask.dataframe on real processes of this machine, every answer checked by DuckDB.",
    )
    add = out.add_argument
    add("--scale", type=float, default=1.0, help="scale factor, 0.001 to 1000; 1 is 6 million order lines (default 1)")
    add("--queries", default="all", help="such as 1,3,5-7; or all (default)")
    add(
        "--engines",
        default="stock,gpurt",
        help=f"in turn, first is the baseline: {', '.join(ENGINES)} (default stock,gpurt)",
    )
    add("--runs", "--repeat", type=int, default=1, help="runs of each query on each engine; medians (default 1)")
    add("--workers", type=int, default=2, help="worker processes per cluster (default 2)")
    add("--threads", type=int, help="threads per worker (default: cores / workers)")
    add("--memory-limit", help="per worker, such as 2GiB (default: by what is free)")
    add("--data", help="directory of the data at this scale; generated there if missing (default: out/tpch/sf<scale>)")
    add("--out", help="directory for report, logs and scratch (default: out/tpch/run)")
    add(
        "--fuse",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="fuse the steps of a partition by .optimize(), which Dask's compute leaves out (default off: users' code)",
    )
    add("--cold", action="store_true", help="drop the data from the page cache before the first run of each query")
    add(
        "--query-limit",
        type=float,
        metavar="SECONDS",
        help="give a query up after so long, restart its cluster and go on (default: never)",
    )
    add("--beside", choices=BESIDE, help="time DuckDB on the same files too, for orientation")
    add("--price-per-hour", type=float, metavar="PRICE", help="of the machine, in any currency: adds a price per query")
    add("--json", help="write all figures to this file too, after each query")
    add("--kill-worker", type=float, metavar="SECONDS", help="SIGKILL a worker of the last engine so long after start")
    add("--keep-running", action="store_true", help="leave the last engine's cluster up and say how to use and stop it")
    return out


def main(argv: Sequence[str] | None = None, *, prog: str = "dask gpurt bench tpch", folder: str = "out") -> int:
    """Run the command with files under `folder`; returns the exit code."""
    out = parser(prog)
    arguments = out.parse_args(argv)
    try:
        options = check(arguments, folder)
    except ValueError as e:
        out.error(str(e))  # exits with 2
    # A plain kill would leave the processes; as an exception it passes every `finally`. What is ignored stays so: under
    # nohup the end of a terminal must not end us.
    handlers = {signal.SIGTERM: _leave, signal.SIGHUP: _leave, signal.SIGINT: _interrupt}
    previous = {n: signal.signal(n, h) for n, h in handlers.items() if signal.getsignal(n) is not signal.SIG_IGN}
    _interrupted.clear()
    try:
        return run(options)
    except KeyboardInterrupt:
        click.echo("\ninterrupted; everything that was started has been stopped", err=True)
        return 130
    except (OSError, RuntimeError, ValueError) as e:
        click.echo(f"\nerror: {e}", err=True)
        return 2
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


#: set by Ctrl-C and by a kill: an exception that is raised in a finalizer or in a callback may never reach us
_interrupted = threading.Event()


def _leave(number: int, frame: Any) -> None:
    _interrupted.set()
    raise SystemExit(128 + number)


def _interrupt(number: int, frame: Any) -> None:
    _interrupted.set()
    raise KeyboardInterrupt


def check(a: argparse.Namespace, folder: str) -> argparse.Namespace:
    """Arguments with their defaults filled in; files are under `folder`.

    Raises
    ------
    ValueError
        What is wrong, what is allowed, what to do.
    """
    generate.check_scale(a.scale)
    a.numbers = queries.parse(a.queries)
    a.engine_names = parse_engines(a.engines)
    for name in ("runs", "workers"):
        if getattr(a, name) < 1:
            raise ValueError(f"--{name} is {getattr(a, name)}, must be at least 1")
    if a.threads is None:
        a.threads = max(1, data.cores() // a.workers)
    elif a.threads < 1:
        raise ValueError(f"--threads is {a.threads}, must be at least 1")
    for option in ("query_limit", "price_per_hour"):
        value = getattr(a, option)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{option.replace('_', '-')} is {value!r}, must be a number above 0")
    if a.kill_worker is not None and not (math.isfinite(a.kill_worker) and a.kill_worker >= 0):
        raise ValueError(f"--kill-worker is {a.kill_worker}, must be seconds from the start of the queries, 0 or more")
    if a.memory_limit is None:
        a.memory_limit_bytes = memory_limit_bytes(data.free_memory_bytes(), len(a.engine_names), a.workers)
    else:
        try:
            a.memory_limit_bytes = int(dask.utils.parse_bytes(a.memory_limit))
        except (ValueError, OverflowError):
            a.memory_limit_bytes = 0
        if a.memory_limit_bytes <= 0:
            raise ValueError(f"--memory-limit is {a.memory_limit!r}, must be bytes above 0, such as 2GiB")
    a.out = os.path.abspath(a.out or os.path.join(folder, "tpch", "run"))
    a.data = os.path.abspath(a.data or os.path.join(folder, "tpch", f"sf{a.scale:g}"))
    return a


def run(o: argparse.Namespace) -> int:
    """Do what the checked options say."""
    begin = time.monotonic()
    o.header = header(o)
    progress = Bar(_interrupted)
    generate.ensure(o.data, o.scale, progress.line, progress)
    progress.line(f"data: {o.data} (scale {o.scale:g})")
    reference = Reference(o.data, o.scale)
    try:
        expected = reference.answers(o.numbers, progress)
        beside = {o.beside: {q: reference.seconds(q, o.runs) for q in o.numbers}} if o.beside else {}
    finally:
        reference.close()
    progress.line(f"DuckDB's answers to {len(o.numbers)} queries: ready after {time.monotonic() - begin:.1f} s")
    with contextlib.ExitStack() as stack:
        clusters = []
        for engine in o.engine_names:
            cluster = ProcessCluster(
                engine,
                workers=o.workers,
                threads=o.threads,
                memory_limit_bytes=o.memory_limit_bytes,
                directory=os.path.join(o.out, engine),
            )
            stack.callback(cluster.close)
            cluster.launch()
            clusters.append(cluster)
        for cluster in clusters:
            cluster.join()
            runner.warm_up(cluster, o.data)
            progress.line(
                f"{cluster.engine}: scheduler {cluster.address}, {o.workers} workers x {o.threads} thread(s), "
                f"{o.memory_limit_bytes / 2**30:.1f} GiB each; dashboard {cluster.dashboard or '(needs bokeh)'}"
            )
        outcome = measure(o, clusters, expected, beside, progress)
        described = [describe(c) for c in clusters]
        if o.json:
            save(o, outcome, clusters)
        status = {c.engine: status_of(c) for c in clusters if c.engine.startswith("gpurt")}
        tell(o, outcome, described, status, progress)
        progress.line(f"took {time.monotonic() - begin:.0f} s in all")
        if o.keep_running:
            keep(clusters[-1])
    return 0 if outcome.ok else 1


def measure(
    o: argparse.Namespace,
    clusters: list[ProcessCluster],
    expected: dict[int, pa.Table],
    beside: dict[str, dict[int, list[float]]],
    progress: Bar,
) -> runner.Outcome:
    """Run the queries, printing the table's lines as they come."""
    table = report.TextTable(report.columns(o.engine_names, joined=True))
    progress.line("")
    progress.line(table.head())

    def told(number: int, outcome: runner.Outcome) -> None:
        outcome.beside = beside
        progress.line(table.line(report.row(number, outcome.of(number), joined=True)))
        if o.json:
            save(o, outcome, clusters)

    with contextlib.ExitStack() as stack:
        killer = None
        if o.kill_worker is not None:
            killer = stack.enter_context(runner.Killer(clusters[-1], o.kill_worker))
        outcome = runner.run(
            clusters,
            o.data,
            o.scale,
            o.numbers,
            expected,
            runs=o.runs,
            fuse=o.fuse,
            progress=progress,
            cold=o.cold,
            limit_s=o.query_limit,
            done=told,
        )
    for line in report.total_rows(outcome, joined=True):
        progress.line(table.line(line))
    if killer is not None:
        outcome.notes.append(killer.note)
    if not all(t.complete for cell in outcome.cells.values() for t in cell.traffic):
        outcome.notes.append(
            "a worker was lost, and its byte counts since the query's start with it: figures are too low"
        )
    return outcome


def tell(
    o: argparse.Namespace, outcome: runner.Outcome, described: list[dict[str, Any]], status: Any, progress: Bar
) -> None:
    """Differences, the verdict, files."""
    progress.line("")
    for note in outcome.notes:
        progress.line(f"note: {note}")
    for (number, engine), cell in outcome.cells.items():
        for difference in cell.differences:
            progress.line(f"DIFFERENT on {engine}: {difference}")
        for error in cell.errors:
            progress.line(f"ERROR on {engine}, query {number}: {error}")
    for line in verdict.words(outcome):
        progress.line(line)
    path = report.page(outcome, o.header, described, status).write(os.path.join(o.out, "report.html"))
    progress.line(f"report: {path}")
    if o.json:
        progress.line(f"figures: {o.json}")


def header(o: argparse.Namespace) -> dict[str, Any]:
    """What the figures are of: machine, versions, options."""
    where = (
        f"{data.cores()} CPU cores, {o.workers} worker processes x {o.threads} thread(s) per cluster, loopback, "
        "pandas on Arrow; no GPU used"
    )
    return data.facts(where) | {
        "scale": o.scale,
        "runs": o.runs,
        "fused": o.fuse,
        "cold": o.cold,
        "engines": ", ".join(o.engine_names),
        "memory_limit_bytes_per_worker": o.memory_limit_bytes,
        "query_limit_s": o.query_limit,
        "price_per_hour": o.price_per_hour,
    }


def save(o: argparse.Namespace, outcome: runner.Outcome, clusters: list[ProcessCluster]) -> None:
    """Write all figures so far."""
    described = [describe(c) for c in clusters]
    data.write_json(o.json, report.result(outcome, o.header, described))


def status_of(cluster: ProcessCluster) -> dict[str, Any]:
    """``dask_gpurt.status(client).to_dict()`` of a cluster, or why there is none."""
    # A report must not fail on what it only adds; what went wrong is in the report instead.
    try:
        out: dict[str, Any] = state.status(cluster.client).to_dict()
        return out
    except Exception as e:
        return {"not available": repr(e)}


def keep(cluster: ProcessCluster) -> None:
    """Leave this cluster up, and say how to use and stop it."""
    address, dashboard = cluster.address, cluster.dashboard
    groups = " ".join(f"-{pid}" for pid in cluster.pids)
    cluster.leave()
    click.echo(
        f"\nThe {cluster.engine} cluster is left running.\n"
        f"  connect:    from dask.distributed import Client; client = Client({address!r})\n"
        f"  dashboard:  {dashboard or '(needs bokeh)'}\n"
        f"  stop:       kill -TERM -- {groups}"
    )
