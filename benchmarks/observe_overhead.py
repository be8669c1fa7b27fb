"""What does observation cost? Clusters with the extension take turns; in one ``gpurt.observe.enabled`` is false.

Many tiny tasks (where the cost per task shows), graphs of one task each (where the cost per run shows) and some TPC-H
queries (what users run). ``no runs`` is ``on`` without the summaries of single runs. ``off again``, the same
configuration as ``off``, shows the noise of the machine; ``recorded`` writes a trace besides. No page of the dashboard
is open. Beside wall time, the CPU seconds of all processes of a cluster are reported: they are less noisy, and what an
idle core hides is in them.

``python -m benchmarks.observe_overhead --data DIR`` writes benchmarks/results/observe_overhead.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.compare import Case, turns
from benchmarks.data import OUT, RESULTS, cores, facts, write_json
from dask_gpurt.bench.tpch import generate, queries, runner, tables
from dask_gpurt.bench.tpch.clusters import ProcessCluster, close_all

if TYPE_CHECKING:
    from collections.abc import Callable

SWITCH, TRACE = "DASK_GPURT__OBSERVE__ENABLED", "DASK_GPURT__TRACE__PATH"
#: case -> is observation on, is a trace written
CASES = {
    "off": (False, False),
    "on": (True, False),
    "no runs": (True, False),
    "recorded": (True, True),
    "off again": (False, False),
}
GOAL = 1.01


def _tiny(i: int) -> int:
    return i + 1


def _no_runs(dask_scheduler: Any) -> None:
    """On the scheduler: follow no runs from now on."""
    dask_scheduler.plugins["gpurt"].ledger.ledger.observer = None


def cpu_seconds(cluster: ProcessCluster) -> float:
    """Of all processes of a cluster, so far."""
    total = 0.0
    for pid in cluster.pids:
        head = psutil.Process(pid)
        for process in (head, *head.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def measured(
    clusters: dict[str, ProcessCluster], make: Callable[[ProcessCluster], Callable[[], object]], runs: int
) -> dict[str, dict[str, Any]]:
    """Case -> wall and CPU seconds of each round, and the median over the rounds of their ratios to the first case."""
    wall: dict[str, list[float]] = {name: [] for name in clusters}
    cpu: dict[str, list[float]] = {name: [] for name in clusters}
    work = {name: make(cluster) for name, cluster in clusters.items()}
    for _, name in turns(list(clusters), runs):
        used, began = cpu_seconds(clusters[name]), time.perf_counter()
        work[name]()
        wall[name].append(time.perf_counter() - began)
        cpu[name].append(cpu_seconds(clusters[name]) - used)
    first = next(iter(clusters))
    out = {}
    for name in clusters:
        walls, cpus = (Case(name, tuple(table[name])) for table in (wall, cpu))
        out[name] = {
            **walls.to_dict(),
            "ratio": walls.ratio(Case(first, tuple(wall[first]))),
            "cpu_seconds": list(cpus.seconds),
            "cpu_ratio": cpus.ratio(Case(first, tuple(cpu[first]))),
        }
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--data", help="directory of the data at this scale (default: out/tpch/sf<scale>)")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--queries", type=int, nargs="*", default=[6, 14])
    parser.add_argument("--out", default=os.path.join(RESULTS, "observe_overhead.json"))
    o = parser.parse_args()
    directory = o.data or os.path.join(OUT, "tpch", f"sf{o.scale:g}")
    generate.ensure(directory, o.scale, print)
    clusters: dict[str, ProcessCluster] = {}
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for name, (on, recorded) in CASES.items():
                os.environ[SWITCH] = str(on).lower()  # what is started inherits it
                if recorded:
                    os.environ[TRACE] = os.path.join(scratch, "run.trace")
                cluster = clusters[name] = ProcessCluster(
                    "gpurt",
                    workers=2,
                    threads=1,
                    memory_limit_bytes=2 * 2**30,
                    directory=os.path.join(scratch, name.replace(" ", "-")),
                )
                cluster.launch()  # they come up together
                os.environ.pop(TRACE, None)
            for cluster in clusters.values():
                runner.warm_up(cluster.join(), directory)
            clusters["no runs"].client.run_on_scheduler(_no_runs)
            opened = tables.open_tables(directory, o.scale)

            def tiny(cluster: ProcessCluster) -> Callable[[], object]:
                client = cluster.client

                def run() -> None:
                    with client.as_current():
                        client.gather(client.map(_tiny, range(o.tasks), pure=False))

                return run

            def graphs(cluster: ProcessCluster) -> Callable[[], object]:
                client = cluster.client

                def run() -> None:
                    with client.as_current():
                        for i in range(o.graphs):
                            client.submit(_tiny, i, pure=False).result()

                return run

            def tpch(cluster: ProcessCluster) -> Callable[[], object]:
                def run() -> None:
                    with cluster.client.as_current():
                        for number in o.queries:
                            cluster.client.compute(queries.QUERIES[number](opened)).result()

                return run

            for what, make in (("tiny tasks", tiny), ("graphs of one task", graphs), ("TPC-H", tpch)):
                for cluster in clusters.values():
                    make(cluster)()
                results[what] = measured(clusters, make, o.runs)
                said = [
                    f"{n} {c['median_s']:.3f} s {c['ratio'] - 1:+.2%} (CPU {c['cpu_ratio'] - 1:+.2%})"
                    for n, c in results[what].items()
                ]
                print(f"{what}: {', '.join(said)}", flush=True)
        finally:
            close_all(list(clusters.values()))
            os.environ.pop(SWITCH, None)
    result = facts(f"{cores()} CPU cores, 2 worker processes x 1 thread per cluster, loopback; no GPU")
    described = {
        "tasks": o.tasks,
        "graphs": o.graphs,
        "queries": o.queries,
        "scale": o.scale,
        "goal_ratio": GOAL,
        "no_page_open": True,
    }
    noise = {what: abs(cases["off again"]["ratio"] - 1) for what, cases in results.items()}
    recording = {what: cases["recorded"]["ratio"] / cases["on"]["ratio"] for what, cases in results.items()}
    summary = {
        "on_over_off": {what: cases["on"]["ratio"] for what, cases in results.items()},
        "runs_over_no_runs": {what: c["on"]["ratio"] / c["no runs"]["ratio"] for what, c in results.items()},
        "runs_over_no_runs_cpu": {
            what: c["on"]["cpu_ratio"] / c["no runs"]["cpu_ratio"] for what, c in results.items()
        },
        "recorded_over_on": recording,
        "noise": noise,
        "microseconds_of_cpu_per_tiny_task": 1e6
        * (
            statistics.median(results["tiny tasks"]["on"]["cpu_seconds"])
            - statistics.median(results["tiny tasks"]["off"]["cpu_seconds"])
        )
        / o.tasks,
    }
    write_json(o.out, {**result, **described, "summary": summary, "cases": results})
    return 0 if all(cases["on"]["ratio"] <= GOAL for cases in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
