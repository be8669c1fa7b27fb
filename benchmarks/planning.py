"""What a client's planning of the 22 TPC-H queries costs: Dask's own, and with expressions that are held.

Processor seconds of the thread that builds and optimises a query, in turns; no cluster. *First* is a process that has
not planned the query before, *again* one that has. The names of all plans must be the same.

``python -m benchmarks.planning`` writes benchmarks/results/planning.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import dask.config

from benchmarks.data import OUT, RESULTS, cores, facts, write_json
from dask_gpurt import planning
from dask_gpurt.bench.tpch import generate, queries, tables
from dask_gpurt.planning.held import HELD


def plan(opened: tables.Tables, hold: bool) -> tuple[dict[int, float], dict[int, str]]:
    """Query -> seconds, and -> the name of its plan."""
    seconds: dict[int, float] = {}
    names: dict[int, str] = {}
    with planning.switched(hold):
        for number, query in queries.QUERIES.items():
            began = time.thread_time()
            planned = query(opened).optimize(fuse=False)
            seconds[number] = time.thread_time() - began
            names[number] = str(planned.expr.deterministic_token)
    return seconds, names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--data", help="directory of the data at this scale (default: out/tpch/sf<scale>)")
    parser.add_argument("--runs", type=int, default=5, help="of each kind (default 5)")
    parser.add_argument("--out", default=os.path.join(RESULTS, "planning.json"))
    o = parser.parse_args()
    directory = o.data or os.path.join(OUT, "tpch", f"sf{o.scale:g}")
    generate.ensure(directory, o.scale, print)
    opened = tables.open_tables(directory, o.scale)
    runs: dict[str, list[dict[int, float]]] = {"stock": [], "first": [], "again": []}
    names: list[dict[int, str]] = []
    # As with a client, where shuffles are peer-to-peer.
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        plan(opened, False)  # imports
        for _ in range(o.runs):
            HELD.clear()
            for kind, hold in (("stock", False), ("first", True), ("again", True)):
                seconds, plans = plan(opened, hold)
                runs[kind].append(seconds)
                names.append(plans)
    medians = {
        kind: {q: statistics.median(run[q] for run in all_runs) for q in queries.QUERIES}
        for kind, all_runs in runs.items()
    }
    for q in queries.QUERIES:
        print(f"q{q:02d}  " + "  ".join(f"{kind} {medians[kind][q] * 1e3:6.1f} ms" for kind in medians))
    sums = {kind: sum(medians[kind].values()) for kind in medians}
    same = all(plans == names[0] for plans in names)
    print("sum  " + "  ".join(f"{kind} {seconds:.2f} s" for kind, seconds in sums.items()))
    print(f"first / stock {sums['first'] / sums['stock']:.2f}, again / stock {sums['again'] / sums['stock']:.2f}")
    print(f"the same plans: {same}; {HELD.figures()}")
    result: dict[str, Any] = facts(f"{cores()} CPU cores, one process; no cluster, no GPU")
    write_json(o.out, {**result, "scale": o.scale, "sums": sums, "medians": medians, "same": same, **HELD.figures()})
    return 0 if same and HELD.failed is None else 1


if __name__ == "__main__":
    raise SystemExit(main())
