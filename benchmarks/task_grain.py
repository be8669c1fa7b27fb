"""How long must a task be? METG(50%): the shortest task at which half of the threads' time is work.

Patterns of Task Bench (Slaughter et al., SC 2020, arXiv 1908.05790), whose measure this is, of tasks that count in
plain Python for so many milliseconds. Efficiency is what the tasks take on an idle worker, over threads x wall time.
Clusters of real processes take turns; the scheduler has a process of its own, and shares the cores with the workers.

The shortest task at which ours takes as long as stock's, up to `PAR`, is printed beside it.

``python -m benchmarks.task_grain`` writes benchmarks/results/task_grain.json.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import tempfile
import time
import uuid
from typing import TYPE_CHECKING, Any

from distributed import wait

from benchmarks.compare import turns
from benchmarks.data import RESULTS, cores, facts, write_json
from benchmarks.strangers.patterns import PATTERNS
from benchmarks.task_price import CASES, launched, require_known
from dask_gpurt.bench.tpch.clusters import ProcessCluster, close_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distributed import Client

THREADS = 2
#: points of a step; one thread has four
WIDTH = 4 * THREADS
#: milliseconds of a task
GRAINS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
#: seconds of work of a run, on all threads
WORK_SECONDS = 0.8
#: of the time of the baseline, up to which ours counts as no slower
PAR = 1.03


def count(turns: int, inputs: Sequence[int]) -> int:
    """A task: it counts."""
    n = 0
    for _ in range(turns):
        n += 1
    return n


def counts_per_ms(client: Client) -> float:
    """How far a worker counts in a millisecond, while nothing else runs."""

    def timed() -> float:
        start = time.perf_counter()
        count(200_000, ())
        return 200_000 / (time.perf_counter() - start) / 1e3

    return statistics.median(client.submit(timed, pure=False).result() for _ in range(5))


def graph(pattern: str, steps: int, turns: int) -> tuple[dict[Any, Any], list[Any]]:
    """`steps` steps of `WIDTH` tasks; the keys of those that nothing reads."""
    name = f"{pattern}-{uuid.uuid4().hex}"
    tasks: dict[Any, Any] = {}
    used: set[Any] = set()
    for t, i in itertools.product(range(steps), range(WIDTH)):
        needs = [(name, t - 1, j) for j in PATTERNS[pattern](t, i, WIDTH)] if t else []
        used.update(needs)
        tasks[name, t, i] = (count, turns, needs)
    return tasks, [key for key in tasks if key not in used]


def seconds(client: Client, pattern: str, grain: float, per_ms: float) -> tuple[float, float]:
    """Wall time of one run, and the work in it, in seconds."""
    steps = max(2, round(WORK_SECONDS * THREADS * 1e3 / grain / WIDTH))
    tasks, ends = graph(pattern, steps, round(grain * per_ms))
    start = time.perf_counter()
    futures = client.get(tasks, ends, sync=False)
    with client.as_current():
        wait(futures)
    wall = time.perf_counter() - start
    del futures
    while client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)):
        time.sleep(0.02)
    return wall, steps * WIDTH * grain / 1e3


def shortest(grains: Sequence[float], values: Sequence[float], least: float) -> float | None:
    """The grain from which on all values reach `least`, between two of them by interpolation; None: the last does not.

    Grains in ascending order, in logarithms.
    """
    if values[-1] < least:
        return None
    for i in range(len(grains) - 2, -1, -1):
        if values[i] < least:
            part = (least - values[i]) / (values[i + 1] - values[i])
            return round(math.exp(math.log(grains[i]) + part * math.log(grains[i + 1] / grains[i])), 3)
    return grains[0]


def summary(runs: Mapping[str, Mapping[float, list[tuple[float, float]]]], cases: Sequence[str]) -> dict[str, Any]:
    """Case -> its efficiency at each grain, METG(50%) in ms, and its time over that of the first case."""
    out: dict[str, Any] = {}
    for case in cases:
        efficiency = [statistics.median(work / (THREADS * wall) for wall, work in runs[case][g]) for g in GRAINS]
        ratios = [
            statistics.median(a[0] / b[0] for a, b in zip(runs[case][g], runs[cases[0]][g], strict=True))
            for g in GRAINS
        ]
        out[case] = {
            "efficiency": [round(e, 3) for e in efficiency],
            "metg50_ms": shortest(GRAINS, efficiency, 0.5),
            "ratio": [round(r, 3) for r in ratios],
            "at_par_from_ms": next((g for i, g in enumerate(GRAINS) if max(ratios[i:]) <= PAR), None),
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="stock,inf,gpurt", help=f"of {', '.join(CASES)}; the first is 1")
    parser.add_argument("--patterns", default="trivial,no_comm,stencil_1d,fft,random_nearest", help="of Task Bench")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", default=os.path.join(RESULTS, "task_grain.json"))
    o = parser.parse_args()
    cases, patterns = o.cases.split(","), o.patterns.split(",")
    require_known(parser, cases, CASES)
    require_known(parser, patterns, PATTERNS)
    clusters: dict[str, ProcessCluster] = {}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for case in cases:
                clusters[case] = launched(case, os.path.join(scratch, case.replace(" ", "-")))
            for cluster in clusters.values():
                cluster.join()
            per_ms = counts_per_ms(clusters[cases[0]].client)
            print(f"{'':16}{'METG(50%)':>10}  efficiency at {', '.join(f'{g:g}' for g in GRAINS)} ms")
            for pattern in patterns:
                runs: dict[str, dict[float, list[tuple[float, float]]]] = {c: {g: [] for g in GRAINS} for c in cases}
                for case in cases:
                    seconds(clusters[case].client, pattern, 8.0, per_ms)
                for _, case in turns(cases, o.runs):
                    for grain in GRAINS:
                        runs[case][grain].append(seconds(clusters[case].client, pattern, grain, per_ms))
                results[pattern] = summary(runs, cases)
                print(pattern)
                for case, r in results[pattern].items():
                    figures = " ".join(f"{e:.2f} ({x:.2f})" for e, x in zip(r["efficiency"], r["ratio"], strict=True))
                    print(f"  {case:14}{r['metg50_ms'] or math.nan:10.2f}  {figures}", flush=True)
        finally:
            close_all(list(clusters.values()))
    where = facts(f"{cores()} CPU cores, {THREADS} worker processes x 1 thread per cluster, loopback; no GPU")
    write_json(o.out, {**where, "grains_ms": GRAINS, "runs": o.runs, "width": WIDTH, "patterns": results})


if __name__ == "__main__":
    main()
