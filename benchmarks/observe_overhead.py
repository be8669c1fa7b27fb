"""What does observation cost? Two clusters with the extension, one with ``gpurt.observe.enabled: false``, take turns.

Many tiny tasks (where the cost per task shows) and some TPC-H queries (what users run). A third case, the same
configuration once more, shows the noise of the machine. No page of the dashboard is open.

``python -m benchmarks.observe_overhead --data DIR`` writes benchmarks/results/observe_overhead.json.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import TYPE_CHECKING, Any

from benchmarks.compare import Case, paired, table
from benchmarks.data import OUT, RESULTS, cores, facts, write_json
from benchmarks.tpch import generate, queries, runner, tables
from benchmarks.tpch.clusters import ProcessCluster, close_all

if TYPE_CHECKING:
    from collections.abc import Callable

SWITCH = "DASK_GPURT__OBSERVE__ENABLED"
CASES = {"off": "false", "on": "true", "off again": "false"}
GOAL = 1.01


def _tiny(i: int) -> int:
    return i + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--data", help="directory of the data at this scale (default: out/tpch/sf<scale>)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--queries", type=int, nargs="*", default=[6, 14])
    parser.add_argument("--out", default=os.path.join(RESULTS, "observe_overhead.json"))
    o = parser.parse_args()
    directory = o.data or os.path.join(OUT, "tpch", f"sf{o.scale:g}")
    generate.ensure(directory, o.scale, print)
    clusters: dict[str, ProcessCluster] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for name, value in CASES.items():
                os.environ[SWITCH] = value  # what is started inherits it
                cluster = clusters[name] = ProcessCluster(
                    "gpurt",
                    workers=2,
                    threads=1,
                    memory_limit_bytes=2 * 2**30,
                    directory=os.path.join(scratch, name.replace(" ", "-")),
                )
                cluster.launch()  # they come up together
            for cluster in clusters.values():
                runner.warm_up(cluster.join(), directory)
            opened = tables.open_tables(directory, o.scale)

            def tiny(cluster: ProcessCluster) -> Callable[[], object]:
                client = cluster.client
                return lambda: client.gather(client.map(_tiny, range(o.tasks), pure=False))

            def tpch(cluster: ProcessCluster) -> Callable[[], object]:
                def run() -> None:
                    with cluster.client.as_current():
                        for number in o.queries:
                            cluster.client.compute(queries.QUERIES[number](opened)).result()

                return run

            results: dict[str, dict[str, Case]] = {}
            for what, make in (("tiny tasks", tiny), ("TPC-H", tpch)):
                for cluster in clusters.values():
                    make(cluster)()
                results[what] = paired({name: make(cluster) for name, cluster in clusters.items()}, o.runs)
                baseline = results[what]["off"]
                said = [f"{n} {c.median:.3f} s {c.ratio(baseline) - 1:+.2%}" for n, c in results[what].items()]
                print(f"{what}: {', '.join(said)}", flush=True)
        finally:
            close_all(list(clusters.values()))
            os.environ.pop(SWITCH, None)
    tables_out: dict[str, Any] = {what: table(cases) for what, cases in results.items()}
    result = facts(f"{cores()} CPU cores, 2 worker processes x 1 thread per cluster, loopback; no GPU")
    described = {"tasks": o.tasks, "queries": o.queries, "scale": o.scale, "goal_ratio": GOAL, "no_page_open": True}
    write_json(o.out, {**result, **described, "cases": tables_out})
    return 0 if all(cases["on"]["ratio"] <= GOAL for cases in tables_out.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
