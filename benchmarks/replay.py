"""Replay against reality: runs are recorded on real clusters under several policies, and each trace is replayed.

For every workload and policy: recorded and predicted makespan, their difference, and how many predicted seconds a
second of simulating gives. And the ranking: of every two policies whose recorded runs differ by more than their
spread, does the replay say which one is faster? Once from each policy's own traces, and once from those of stock Dask
alone, which is the question that a user has: what would it be under the other policy?

    python -m benchmarks.replay --record out/replay --workloads tree,stencil
    python -m benchmarks.replay --judge out/replay --out benchmarks/results/replay.json

The two steps are apart because the first needs a quiet machine and the second none. Policies take turns on clusters of
processes that are up all the time. Workloads: ``tree`` and ``stencil`` of tasks that sleep (4 workers), ``spill``
(arrays of three times the memory budget, 2 workers), and ``tpch`` (several queries, scale 1, 2 workers). The processes
share this machine's cores; what sleeps does not mind, what computes does.

What the makespan is: from the scheduler's receipt of a graph to the end of its last task, graphs that do not overlap
summed up. What a client does before and between is its own time, in the trace and in the replay.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
from distributed import wait

import dask_gpurt
from benchmarks.compare import turns
from benchmarks.data import OUT, RESULTS, facts, write_json
from dask_gpurt.bench.tpch.clusters import ProcessCluster, close_all
from dask_gpurt.observe.trace.reader import Trace
from dask_gpurt.simulate.replay import Replay, replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Client

#: of TPC-H
SCALE = 1.0
QUERIES = (3, 5, 12, 14)
#: policy of the replay -> engine of the cluster
POLICIES = {"stock": "stock", "inf": "stock-inf", "gpurt": "gpurt"}
#: predicted makespan over recorded, less one
GOAL = 0.15
SPEED_GOAL = 100
#: by which two policies must differ before their order means something: runs of one policy differ by as much
APART = 0.02


def _make(seconds: float, nbytes: int, *inputs: Any) -> bytes:
    time.sleep(seconds)
    return bytes(nbytes)


def _count(*inputs: bytes) -> int:
    return sum(map(len, inputs))


def tree(client: Client, tag: str) -> None:
    """128 leaves of 2 MB, joined by fours."""
    make = dask.delayed(_make, pure=False)
    level = [make(0.04, 2_000_000, dask_key_name=(f"leaf{tag}", i)) for i in range(128)]
    depth = 0
    while len(level) > 1:
        depth += 1
        level = [
            make(0.04, 2_000_000, *level[i : i + 4], dask_key_name=(f"join{depth}{tag}", i // 4))
            for i in range(0, len(level), 4)
        ]
    client.compute(dask.delayed(_count)(level[0])).result()


def stencil(client: Client, tag: str) -> None:
    """10 steps on 24 cells of 2 MB, each from its two neighbours and itself."""
    make = dask.delayed(_make, pure=False)
    row = [make(0.04, 2_000_000, dask_key_name=(f"step0{tag}", i)) for i in range(24)]
    for step in range(1, 10):
        row = [
            make(0.04, 2_000_000, *row[max(i - 1, 0) : i + 2], dask_key_name=(f"step{step}{tag}", i)) for i in range(24)
        ]
    client.compute(dask.delayed(_count)(*row)).result()


def spill(client: Client, tag: str) -> None:
    """Arrays of three times the memory that tasks may hold, read twice."""
    x = client.persist(da.random.default_rng(int(tag)).random((24, 5_000_000), chunks=(1, 2_500_000)))
    wait(x)
    client.compute((x + 1).sum()).result()
    client.compute((x * 2).mean()).result()


def tpch(client: Client, tag: str) -> None:
    """Some of the 22 queries."""
    from dask_gpurt.bench.tpch.generate import ensure
    from dask_gpurt.bench.tpch.queries import QUERIES as EVERY
    from dask_gpurt.bench.tpch.tables import open_tables

    tables = open_tables(ensure(os.path.join(OUT, "tpch", f"sf{SCALE:g}"), SCALE), SCALE)
    for number in QUERIES:
        client.compute(EVERY[number](tables)).result()


#: workload -> (function, keyword arguments of the cluster)
WORKLOADS: dict[str, tuple[Callable[[Client, str], None], dict[str, int]]] = {
    "tree": (tree, {"workers": 4, "threads": 1, "memory_limit_bytes": 2 * 2**30}),
    "stencil": (stencil, {"workers": 4, "threads": 1, "memory_limit_bytes": 2 * 2**30}),
    "spill": (spill, {"workers": 2, "threads": 1, "memory_limit_bytes": 700_000_000}),
    "tpch": (tpch, {"workers": 2, "threads": 1, "memory_limit_bytes": 2 * 2**30}),
}


def trace_path(folder: str, workload: str, policy: str, run: int) -> str:
    return os.path.join(folder, f"{workload}-{policy}-{run}.trace")


def record(workloads: list[str], runs: int, folder: str) -> None:
    """Real runs, the policies taking turns. The first on each cluster is not recorded: it imports."""
    os.makedirs(folder, exist_ok=True)
    for _, shape in itertools.groupby(workloads, key=lambda name: WORKLOADS[name][1]):
        names = list(shape)
        clusters: dict[str, ProcessCluster] = {}
        with tempfile.TemporaryDirectory() as scratch:
            try:
                for policy, engine in POLICIES.items():
                    directory = os.path.join(scratch, policy)
                    clusters[policy] = ProcessCluster(engine, directory=directory, **WORKLOADS[names[0]][1])
                    clusters[policy].launch()
                for name in names:
                    for cluster in clusters.values():
                        client = cluster.join().client if name == names[0] else cluster.client
                        with client.as_current():
                            WORKLOADS[name][0](client, "99")
                    for run, policy in turns(list(POLICIES), runs):
                        client = clusters[policy].client
                        began = time.perf_counter()
                        with client.as_current(), dask_gpurt.record(client, trace_path(folder, name, policy, run)):
                            # What was learned of one run's tasks by their names would help the next one.
                            WORKLOADS[name][0](client, str(run))
                        print(f"{name} {policy} {run}: {time.perf_counter() - began:.2f} s", flush=True)
            finally:
                close_all(list(clusters.values()))


def judge(workloads: list[str], folder: str) -> list[dict[str, Any]]:
    """Replay what was recorded."""
    rows = []
    for name in workloads:
        traces: dict[str, list[Trace]] = {}
        for policy in POLICIES:
            runs = itertools.count()
            traces[policy] = []
            while os.path.exists(path := trace_path(folder, name, policy, next(runs))):
                traces[policy].append(Trace.load(path))
        if not all(traces.values()):
            print(f"{name}: nothing was recorded in {folder}")
            continue
        rows.append(_judged(name, traces))
    return rows


def _judged(name: str, traces: dict[str, list[Trace]]) -> dict[str, Any]:
    policies: dict[str, Any] = {}
    for policy, made in traces.items():
        # The same each time but for what it takes: whatever else the machine does can only add to that.
        same = [min((replay(trace, policy) for _ in range(3)), key=lambda r: r.result.wall_seconds) for trace in made]
        # A trace of stock Dask with another saturation does not know that it is one.
        errors = [one.makespan_seconds / one.recorded_seconds - 1 for one in same]
        policies[policy] = {
            "recorded_seconds": [round(one.recorded_seconds, 4) for one in same],
            "predicted_seconds": [round(one.makespan_seconds, 4) for one in same],
            "median_recorded_seconds": statistics.median(one.recorded_seconds for one in same),
            "median_predicted_seconds": statistics.median(one.makespan_seconds for one in same),
            "median_error": statistics.median(errors),
            "worst_error": max(errors, key=abs),
            "times_real_time": statistics.median(one.speed for one in same),
            "tasks": same[0].result.executed,
            "microseconds_per_task": statistics.median(
                1e6 * one.result.wall_seconds / max(1, one.result.executed) for one in same
            ),
            **_moved(same),
        }
        p = policies[policy]
        print(
            f"{name:8} {policy:6} recorded {p['median_recorded_seconds']:6.2f} s, predicted"
            f" {p['median_predicted_seconds']:6.2f} s, error {p['median_error']:+.1%} (worst {p['worst_error']:+.1%}),"
            f" {p['times_real_time']:.0f} x real time, {p['microseconds_per_task']:.0f} us a task",
            flush=True,
        )
    recorded = {p: policies[p]["recorded_seconds"] for p in POLICIES}
    own = {p: policies[p]["predicted_seconds"] for p in POLICIES}
    from_stock = {p: [replay(trace, p).makespan_seconds for trace in traces["stock"]] for p in POLICIES}
    out = {
        "workload": name,
        "policies": policies,
        "predicted_from_stock_seconds": {p: statistics.median(v) for p, v in from_stock.items()},
        "pairs": _pairs(recorded, own, from_stock),
    }
    print(
        f"{name:8} recorded {_ranking(recorded)}; replays of each {_ranking(own)}; of stock's {_ranking(from_stock)}; "
        + (", ".join(f"{a} before {b}: {own}/{stock}" for a, b, own, stock in out["pairs"]) or "no pair differs"),
        flush=True,
    )
    return out


def _moved(same: list[Replay]) -> dict[str, float]:
    return {
        "predicted_bytes_moved": statistics.median(sum(one.result.bytes_moved.values()) for one in same),
        "predicted_bytes_spilled": statistics.median(one.result.spilled_bytes for one in same),
    }


def _ranking(seconds: dict[str, list[float]]) -> str:
    medians = {p: statistics.median(v) for p, v in seconds.items()}
    return " < ".join(f"{p} {medians[p]:.2f}" for p in sorted(medians, key=medians.__getitem__))


def _pairs(
    recorded: dict[str, list[float]], own: dict[str, list[float]], from_stock: dict[str, list[float]]
) -> list[tuple[str, str, bool, bool]]:
    """(faster, slower, is it so in replays of their own traces, and in those of stock's).

    Of the policies that reality tells apart: one is faster in all rounds, of five or more in all but one, and by
    `APART` or more in the median.
    """
    out = []
    for a, b in itertools.permutations(recorded, 2):
        rounds = list(zip(recorded[a], recorded[b], strict=True))
        wins = sum(x < y for x, y in rounds)
        if wins >= len(rounds) - (len(rounds) >= 5) and statistics.median(x / y for x, y in rounds) < 1 - APART:
            said = (statistics.median(table[a]) <= statistics.median(table[b]) for table in (own, from_stock))
            out.append((a, b, *said))
    return out  # type: ignore[return-value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--record", metavar="FOLDER", help="record real runs into this folder")
    parser.add_argument("--judge", metavar="FOLDER", help="replay what was recorded there")
    parser.add_argument("--out", default=os.path.join(RESULTS, "replay.json"))
    args = parser.parse_args()
    names = args.workloads.split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown or not (args.record or args.judge):
        parser.error(f"needs --record or --judge, and of workloads {', '.join(WORKLOADS)}; not {', '.join(unknown)}")
    if args.record:
        record(names, args.runs, args.record)
    if not args.judge:
        return 0
    rows = judge(names, args.judge)
    good = [
        abs(p["median_error"]) <= GOAL and p["times_real_time"] >= SPEED_GOAL
        for row in rows
        for p in row["policies"].values()
    ]
    result = facts("clusters of processes, 2 CPU cores, loopback, no GPU; then the simulator, one core")
    described = {"goal_error": GOAL, "goal_times_real_time": SPEED_GOAL, "tpch": {"scale": SCALE, "queries": QUERIES}}
    write_json(args.out, {**result, **described, "workloads": rows})
    return 0 if good and all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
