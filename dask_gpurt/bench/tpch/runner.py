"""Runs the queries: engines take turns query by query, every answer is checked, every byte is counted.

All clusters are up for the whole time and idle while another is measured (an idle Dask process costs about 1 % of a
core, and every engine has the same number of them). Taking turns by the query keeps what changes slowly (clocks,
page cache, neighbours) out of the ratio.

What is timed: from the call that builds the query to the answer as a pandas DataFrame in this process; planning is
part of it. What is not: comparing the answer, reading the counters, and the first contact with each cluster (`warm_up`,
which imports what workers need). DuckDB answers first, so that all engines find the files in the page cache.

The engines share this process, and what it has planned for one must not help another: `planning` is on while a query of
the extension is planned, and off for stock. So the first run of a query finds nothing, and later ones do; the file of
figures has each run.

Queries are computed as users do, by ``compute``. In Dask 2026.8 that does not fuse dataframes (docs/upstream.md,
"Dataframes are computed without fusion"): each step of a partition is a task, and work stealing takes some of them to
another worker, with partitions of hundreds of megabytes. ``fuse=True`` calls ``.optimize()`` first, also for stock.
"""

from __future__ import annotations

import contextvars
import dataclasses
import math
import statistics
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import pandas as pd

from dask_gpurt import planning
from dask_gpurt.bench.paired import Case, turns
from dask_gpurt.bench.tpch import answers, generate, queries, tables
from dask_gpurt.bench.tpch.meters import Meters, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from dask_gpurt.bench.progress import Progress
    from dask_gpurt.bench.tpch.answers import Difference
    from dask_gpurt.bench.tpch.clusters import ProcessCluster


@dataclasses.dataclass
class Measured:
    """One query on one engine."""

    query: int
    engine: str
    #: one entry a run
    seconds: list[float] = dataclasses.field(default_factory=list)
    traffic: list[Traffic] = dataclasses.field(default_factory=list)
    differences: list[Difference] = dataclasses.field(default_factory=list)
    #: text of the exception that a run ended with
    errors: list[str] = dataclasses.field(default_factory=list)
    #: there was no answer within the limit; further runs were left out
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """There is an answer, and it is right. What was not run yet is not: figures are written after each query."""
        return bool(self.seconds) and not self.differences and not self.errors

    @property
    def case(self) -> Case | None:
        """None if a run failed: a time that leaves out the failed runs compares with nothing."""
        return Case(self.engine, tuple(self.seconds)) if self.seconds and not self.errors else None

    @property
    def first(self) -> float | None:
        """Seconds of the first run, which finds nothing planned. None if a run failed: that may have been the first."""
        return None if self.case is None else self.seconds[0]

    def warm(self, share: float) -> float | None:
        """The run at `share` (0.5: median) of the runs but the first, by nearest rank; None without such a run."""
        values = [] if self.case is None else sorted(self.seconds[1:])
        return values[max(0, math.ceil(share * len(values)) - 1)] if values else None

    def bytes(self, counter: str) -> int | None:
        """Median over runs of one property of `Traffic`."""
        values = [getattr(t, counter) for t in self.traffic]
        return round(statistics.median(values)) if values else None


@dataclasses.dataclass
class Outcome:
    """All of a benchmark's run."""

    engines: list[str]
    numbers: list[int]
    #: (query, engine) -> what was measured
    cells: dict[tuple[int, str], Measured]
    #: what happened besides, such as a worker killed on purpose
    notes: list[str] = dataclasses.field(default_factory=list)
    #: another program, for orientation -> query -> its seconds, one entry a run
    beside: dict[str, dict[int, list[float]]] = dataclasses.field(default_factory=dict)

    def of(self, number: int) -> dict[str, Measured]:
        """Engine -> what was measured of one query."""
        return {engine: self.cells[number, engine] for engine in self.engines}

    @property
    def ok(self) -> bool:
        return all(cell.ok for cell in self.cells.values())

    @property
    def differences(self) -> list[Difference]:
        return [d for cell in self.cells.values() for d in cell.differences]


def run(
    clusters: Sequence[ProcessCluster],
    directory: str,
    scale: float,
    numbers: Sequence[int],
    expected: dict[int, pa.Table],
    *,
    runs: int,
    progress: Progress,
    done: Callable[[int, Outcome], None] = lambda number, outcome: None,
    fuse: bool = False,
    cold: bool = False,
    limit_s: float | None = None,
) -> Outcome:
    """Run `numbers` on all `clusters`, `runs` times each.

    A query that raises is recorded and does not stop the others. `done` is called after each query with all so far.

    Parameters
    ----------
    cold
        Before the first run of a query on each engine, its data is dropped from the page cache.
    limit_s
        Seconds after which a query is given up, and its cluster restarted; its further runs are left out.
    """
    by_name = {c.engine: c for c in clusters}
    names = list(by_name)
    meters = {name: Meters(c.client) for name, c in by_name.items()}
    opened = tables.open_tables(directory, scale)
    outcome = Outcome(names, list(numbers), {(q, e): Measured(q, e) for q in numbers for e in names})
    steps, step = len(numbers) * runs * len(names), 0
    for number in numbers:
        for r, name in turns(names, runs):
            progress(step, steps, f"q{number:02d} {name}" + (f" run {r + 1}/{runs}" if runs > 1 else ""))
            step += 1
            cell = outcome.cells[number, name]
            if cell.timed_out:
                continue
            if cold and r == 0:
                generate.forget(directory)
            _one(cell, by_name[name], meters[name], opened, expected[number], fuse, limit_s)
            if cell.timed_out:
                outcome.notes.append(f"{name}: no answer to q{number:02d} in {limit_s:g} s; its cluster was restarted")
                warm_up(by_name[name].restart(), directory)
                meters[name] = Meters(by_name[name].client)
        done(number, outcome)
    progress(steps, steps, "done")
    return outcome


def _one(
    cell: Measured,
    cluster: ProcessCluster,
    meters: Meters,
    opened: tables.Tables,
    expected: pa.Table,
    fuse: bool,
    limit_s: float | None,
) -> None:
    meters.start()
    cluster.busy.set()
    start = time.perf_counter()
    try:
        # Current, not just called: dask.dataframe plans peer-to-peer shuffles only if there is a default client.
        with planning.switched(cluster.holds_plans), cluster.client.as_current():
            query = queries.QUERIES[cell.query](opened)
            got = _computed(query.optimize() if fuse else query, limit_s)
    except _TooLong:
        cell.timed_out = True
        cell.errors.append(f"no answer in {limit_s:g} s")
        return
    except Exception as e:
        cell.errors.append(f"{type(e).__name__}: {e}")
        return
    finally:
        cluster.busy.clear()
    seconds = time.perf_counter() - start
    fetched = int(got.memory_usage(deep=True).sum()) if isinstance(got, pd.DataFrame) else 0
    cell.traffic.append(meters.stop(fetched=fetched))
    cell.seconds.append(seconds)
    cell.differences.extend(answers.compare(cell.query, expected, got))


class _TooLong(Exception):
    """A query has no answer in time."""


def _computed(query: Any, limit_s: float | None) -> Any:
    """What ``query.compute()`` returns. It raises `_TooLong` after `limit_s` seconds, and goes on in a thread then."""
    if limit_s is None:
        return query.compute()
    answer: Future[Any] = Future()

    def compute() -> None:
        try:
            answer.set_result(query.compute())
        except Exception as e:
            answer.set_exception(e)

    # In its context there is a current client.
    threading.Thread(target=contextvars.copy_context().run, args=(compute,), daemon=True).start()
    if not wait((answer,), limit_s).done:
        raise _TooLong
    return answer.result()


def warm_up(cluster: ProcessCluster, directory: str) -> None:
    """First contact: imports, connections between workers, threads. Not measured."""
    frame = tables.open_tables(directory, 1.0)
    nations = frame.nation.merge(
        frame.customer[["c_custkey", "c_nationkey"]], left_on="n_nationkey", right_on="c_nationkey"
    )
    with cluster.client.as_current():
        nations.groupby("n_name").c_custkey.count().compute()
    Meters(cluster.client).start()


class Killer:
    """Kills one worker's process of one cluster, to show that answers survive it.

    That is done after `seconds`, or at the first moment after that at which the cluster runs a query.
    """

    def __init__(self, cluster: ProcessCluster, seconds: float) -> None:
        self._cluster = cluster
        self._timer = threading.Timer(seconds, self._kill)
        self._timer.daemon = True
        self._over = threading.Event()
        self._start = 0.0
        #: what was done, once it was
        self.note = f"no worker was killed: the run was over before {seconds:g} s"

    def __enter__(self) -> Killer:
        self._start = time.monotonic()
        self._timer.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._over.set()
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()

    def _kill(self) -> None:
        while not self._cluster.busy.wait(0.05):
            if self._over.is_set():
                return
        try:
            address = self._cluster.kill_worker()
            after = time.monotonic() - self._start
            self.note = (
                f"{self._cluster.engine}: the process of worker {address} was killed (SIGKILL) after {after:.1f} s"
            )
        except Exception as e:
            self.note = f"{self._cluster.engine}: killing a worker failed: {e!r}"
