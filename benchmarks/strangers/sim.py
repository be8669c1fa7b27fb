"""The net in the simulator: every case under stock's two settings and ours."""

from __future__ import annotations

import dataclasses
import logging
import math
import multiprocessing
import statistics
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from benchmarks import data
from benchmarks.strangers import cases
from benchmarks.strangers.catalogue import SETS
from dask_gpurt.simulate import Cluster, simulate
from dask_gpurt.simulate.model import SchedulerCost
from dask_gpurt.simulate.shapes import MIXES

if TYPE_CHECKING:
    import argparse

POLICIES = ("stock", "inf", "gpurt")
#: how long the scheduler's loop is busy, communication included: a task about 150 us, as upstream's own documents say
#: 100 to 200. Constants, so that a run is the same everywhere; ours takes `policies.PLACEMENT_COST` times as long.
COST = SchedulerCost(task=150e-6, submitted=60e-6, message=20e-6)
#: what the issue allows: time and peak memory relative to stock
SLOWER, FULLER = 1.03, 1.2


def run_case(name: str, workers: int, mixes: list[str], policies: list[str], seed: int) -> list[dict[str, Any]]:
    """One case on some mixes of links under all policies: a row for each mix."""
    logging.getLogger("distributed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    rows = []
    try:
        load = cases.build(name, workers)
    except Exception as e:
        # A case that cannot be made must not cost the others; it is in the table as failed.
        return [{"name": name, "workers": workers, "error": f"{type(e).__name__}: {e}"}]
    built = time.perf_counter() - began
    for mix in mixes:
        row: dict[str, Any] = {"name": name, "workers": workers, "mix": mix, "seed": seed, "tasks": len(load.tasks)}
        row["steps"] = max(1, len(load.steps))
        row["build_seconds"] = round(built, 2)
        cluster: Cluster = dataclasses.replace(MIXES[mix](workers), scheduler=COST)
        for policy in policies:
            try:
                row[policy] = figures(simulate(load, cluster, policy, seed))
            except Exception as e:
                row["error"] = f"{policy}: {type(e).__name__}: {e}"
        rows.append(row)
    return rows


def _case(arguments: tuple[str, int, list[str], list[str], int]) -> list[dict[str, Any]]:
    return run_case(*arguments)


def figures(r: Any) -> dict[str, Any]:
    """What is kept of a run."""
    return {
        "seconds": round(r.makespan_seconds, 4),
        "moved_bytes": sum(r.bytes_moved.values()),
        "between_nodes_bytes": r.between_nodes_bytes,
        "peak_worker_bytes": r.peak_memory_bytes,
        "peak_total_bytes": r.peak_total_bytes,
        "scheduler_us_per_task": round(r.scheduler_seconds / max(1, r.executed) * 1e6, 1),
        "stolen": r.stolen,
        "wall_seconds": round(r.wall_seconds, 2),
        **({"fallbacks": r.statistics.get("fallbacks", {})} if r.statistics else {}),
    }


def ratios(row: dict[str, Any]) -> dict[str, float] | None:
    """Ours to the better of stock's two settings, by each measure; None where a run is missing."""
    if "error" in row or any(p not in row for p in POLICIES):
        return None
    stock, inf, ours = (row[p] for p in POLICIES)
    better = min(stock, inf, key=lambda r: r["seconds"])

    def of(key: str, base: float, least: float) -> float:
        return float(round((ours[key] + least) / (base + least), 3))

    return {
        "time": of("seconds", better["seconds"], 0.0),
        # Of bytes and memory the setting that is better in time is what one would have had.
        "moved": of("moved_bytes", better["moved_bytes"], 1e6),
        "peak": of("peak_worker_bytes", better["peak_worker_bytes"], 1e6),
        "peak_to_queuing": of("peak_worker_bytes", stock["peak_worker_bytes"], 1e6),
        "total": of("peak_total_bytes", better["peak_total_bytes"], 1e6),
        "scheduler": of("scheduler_us_per_task", stock["scheduler_us_per_task"], 1.0),
    }


HEAD = (
    f"{'case':34} {'n':>3} {'mix':5} {'tasks':>5} {'stock s':>8} {'inf s':>8} {'ours s':>8} {'ratio':>6} {'moved':>6} "
    f"{'peak':>5} {'peakq':>5} {'total':>5} {'us/task':>7} {'sched':>5}"
)


def line(row: dict[str, Any]) -> str:
    """A row of the table as text."""
    start = f"{row['name']:34} {row['workers']:3d} {row.get('mix', '-'):5} {row.get('tasks', 0):5d} "
    if "error" in row:
        return start + "failed: " + row["error"][:120]
    seconds = " ".join(f"{row[p]['seconds']:8.3f}" if p in row else f"{'-':>8}" for p in POLICIES)
    r = ratios(row)
    if r is None:
        return start + seconds
    mark = " slower" if r["time"] > SLOWER else ""
    mark += " fuller" if r["peak"] > FULLER and r["peak_to_queuing"] > FULLER else ""
    return (
        f"{start}{seconds} {r['time']:6.3f} {r['moved']:6.2f} {r['peak']:5.2f} {r['peak_to_queuing']:5.2f} "
        f"{r['total']:5.2f} {row['gpurt']['scheduler_us_per_task']:7.0f} {r['scheduler']:5.2f}{mark}"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric mean, worst, and how many are slower or fuller than allowed."""
    found = [(row, r) for row in rows if (r := ratios(row)) is not None]
    if not found:
        return {"cases": len(rows), "failed": sum("error" in r for r in rows)}

    def mean(key: str) -> float:
        return round(math.exp(statistics.fmean(math.log(max(1e-3, r[key])) for _, r in found)), 4)

    worst = max(found, key=lambda p: p[1]["time"])
    fullest = max(found, key=lambda p: min(p[1]["peak"], p[1]["peak_to_queuing"]))
    return {
        "cases": len(rows),
        "failed": sum("error" in r for r in rows),
        "geometric_mean_time": mean("time"),
        "worst_time": worst[1]["time"],
        "worst_case": f"{worst[0]['name']} {worst[0]['workers']} {worst[0]['mix']}",
        f"slower_than_{SLOWER}": sum(r["time"] > SLOWER for _, r in found),
        "geometric_mean_moved": mean("moved"),
        "geometric_mean_peak": mean("peak"),
        "worst_peak": fullest[1]["peak"],
        "fullest_case": f"{fullest[0]['name']} {fullest[0]['workers']} {fullest[0]['mix']}",
        f"fuller_than_{FULLER}_of_both": sum(min(r["peak"], r["peak_to_queuing"]) > FULLER for _, r in found),
        "scheduler_to_stock": mean("scheduler"),
        "stock_us_per_task": round(statistics.median(row["stock"]["scheduler_us_per_task"] for row, _ in found), 1),
        "our_us_per_task": round(statistics.median(row["gpurt"]["scheduler_us_per_task"] for row, _ in found), 1),
    }


def mixes_of(name: str, mixes: list[str]) -> list[str]:
    """Random graphs alternate between the mixes; everything else runs on all."""
    return [mixes[int(name[7:]) // 2 % len(mixes)]] if name.startswith("random-") else mixes


def run(args: argparse.Namespace) -> None:
    """``sim`` of the command line."""
    chosen = args.names or cases.names(args.set, args.randoms)
    print(f"seed {args.seed}; {len(chosen)} cases of the {args.set} set; commit {data.commit()}", flush=True)
    print(HEAD, flush=True)
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    # A few tasks per process: an unstarted scheduler leaves some memory behind. Not concurrent.futures, whose pool
    # stops for good where processes are replaced (CPython 3.11, gh-115634): after 50 cases no row came any more.
    work = [(name, n, mixes_of(name, args.mixes), args.policies, args.seed) for n in args.workers for name in chosen]
    with context.Pool(args.jobs, maxtasksperchild=50) as pool:
        for found in pool.imap(_case, work):
            for row in found:
                rows.append(row)
                print(line(row), flush=True)
    losses = sorted(
        (r for r in rows if (q := ratios(r)) and q["time"] > SLOWER), key=lambda r: -(ratios(r) or {})["time"]
    )
    print(f"\nslower than {SLOWER}, worst first:")
    for row in losses:
        print(line(row))
    for key, value in summary(rows).items():
        print(f"{key:32} {value}")
    print(f"{'wall seconds':32} {time.monotonic() - began:.0f}", flush=True)
    if args.out:
        report = {
            **data.facts("simulated clusters on a virtual clock, the real scheduler; no network, no GPU"),
            "benchmark": "strangers_sim",
            "set": args.set,
            "summary": summary(rows),
            "cases": rows,
        }
        print(data.write_json(args.out, report))
    if any("error" in row for row in rows):
        sys.exit(1)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``sim``."""

    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser.add_argument("--set", choices=SETS, default="look")
    parser.add_argument("--workers", type=numbers, default=[16])
    parser.add_argument("--mixes", type=words, default=["flat", "nodes"])
    parser.add_argument("--names", type=words, help="cases, instead of a set")
    parser.add_argument("--randoms", type=int, default=40, help="random graphs of the set, at most")
    parser.add_argument("--policies", type=words, default=list(POLICIES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--issue-ends", action="store_true", help="needed to run the held set")
    parser.set_defaults(run=run)
