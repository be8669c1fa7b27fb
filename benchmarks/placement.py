"""Placement on simulated clusters: every shape, three link mixes, several seeds, five policies and the bound.

    python -m benchmarks.placement [--workers 64] [--shapes tree,join] [--mixes nodes] [--seeds 0,1,2]
                                   [--policies stock,gpurt] [--jobs 2] [--out benchmarks/results/placement.json]
    python -m benchmarks.placement --workers 64 --shapes tree --mixes nodes --seeds 0 --policies gpurt --explain sum

The times are virtual: they do not depend on the machine or its load (`scheduler` and `wall` do). Each case runs in a
process of its own pool. The reference of a case is the lower bound (`dask_gpurt.simulate.bounds`), or, where the bound
is loose (nobody comes within 10 %), the best schedule that any policy here found; ``reference`` says which.
``plan`` is a schedule made with hindsight: tasks pinned in contiguous blocks, where the data is.

Claims: at 64 and 1,000 workers ours is within 1.15 of the reference, with no more than 1.2 times the peak memory of
stock, and never slower than the better of the two stock settings by more than 3 %.

``--explain PREFIX`` prints, for every policy that can say it, the decisions about the first tasks with that key prefix:
candidates, the terms of their cost in seconds, the choice, and what came of it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import logging
import math
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from typing import Any, NamedTuple

from benchmarks import data
from dask_gpurt.simulate import simulate
from dask_gpurt.simulate.bounds import bound
from dask_gpurt.simulate.shapes import MIXES, SHAPES, build

POLICIES = ("stock", "inf", "random", "plan", "gpurt")
RESULT = os.path.join(data.RESULTS, "placement.json")
#: chance alone takes minutes at this size and says nothing new
RANDOM_UP_TO = 64
#: seconds between two writes of what there is so far
SAVE_SECONDS = 20.0
#: a bound that nobody comes this near to is loose
TIGHT = 1.10


class Case(NamedTuple):
    workers: int
    mix: str
    shape: str
    seed: int
    policy: str


@functools.lru_cache(maxsize=4)
def _build(shape: str, workers: int, mix: str) -> Any:
    return build(shape, workers, mix)  # with the order of its tasks, which takes long to find


def run_case(case: Case) -> dict[str, Any]:
    """One simulation; plain JSON."""
    logging.getLogger("distributed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    out: dict[str, Any] = dict(case._asdict())
    workload, cluster = _build(case.shape, case.workers, case.mix)
    b = bound(workload, cluster, case.seed)
    out["tasks"] = len(workload.tasks)
    out["bound_seconds"] = round(b.seconds, 4)
    out["bound_by"] = max(("path", "work", "network"), key=lambda k: getattr(b, f"{k}_seconds"))
    try:
        r = simulate(workload, cluster, case.policy, case.seed)
    except Exception as e:
        # One case that fails must not cost the others; it is in the table as failed.
        out["error"] = f"{type(e).__name__}: {e}"
        return out
    out |= {
        "makespan_seconds": round(r.makespan_seconds, 4),
        "near_bytes": r.bytes_moved["node"],
        "between_nodes_bytes": r.between_nodes_bytes,
        "between_racks_bytes": r.bytes_moved["far"],
        "peak_worker_bytes": r.peak_memory_bytes,
        "peak_total_bytes": r.peak_total_bytes,
        "spilled_bytes": r.spilled_bytes,
        "read_bytes": r.read_bytes,
        "stolen": r.stolen,
        "wasted": r.wasted,
        "scheduler_us_per_task": round(r.scheduler_seconds / len(workload.tasks) * 1e6, 1),
        "wall_seconds": round(r.wall_seconds, 2),
    }
    if r.statistics:
        out["fallbacks"] = r.statistics.get("fallbacks", {})
        out["declined"] = r.statistics.get("declined", {})
    return out


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per workers, mix and shape: medians over seeds, by policy, relative to the reference."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if "error" not in row:
            groups.setdefault((row["workers"], row["mix"], row["shape"]), []).append(row)
    out = []
    for (workers, mix, shape), members in groups.items():
        best: dict[int, tuple[float, str]] = {}
        for m in members:
            found = best.get(m["seed"])
            if found is None or m["makespan_seconds"] < found[0]:
                best[m["seed"]] = m["makespan_seconds"], m["policy"]
        nearest = statistics.median(best[m["seed"]][0] / m["bound_seconds"] for m in members)
        tight = nearest <= TIGHT
        entry: dict[str, Any] = {
            "workers": workers,
            "mix": mix,
            "shape": shape,
            "tasks": members[0]["tasks"],
            "seeds": len(best),
            "bound_seconds": round(statistics.median(m["bound_seconds"] for m in members), 3),
            "bound_by": members[0]["bound_by"],
            "reference": "bound" if tight else f"best found ({statistics.mode(p for _, p in best.values())})",
            "policies": {},
        }
        by_policy: dict[str, list[dict[str, Any]]] = {}
        for m in members:
            by_policy.setdefault(m["policy"], []).append(m)
        stock = {m["seed"]: m for m in by_policy.get("stock", [])}
        inf = {m["seed"]: m for m in by_policy.get("inf", [])}
        for policy, runs in by_policy.items():
            ratios = [m["makespan_seconds"] / (m["bound_seconds"] if tight else best[m["seed"]][0]) for m in runs]
            p = entry["policies"][policy] = {
                "makespan_seconds": round(statistics.median(m["makespan_seconds"] for m in runs), 3),
                "to_bound": round(statistics.median(m["makespan_seconds"] / m["bound_seconds"] for m in runs), 3),
                "to_reference": round(statistics.median(ratios), 3),
                "worst_to_reference": round(max(ratios), 3),
                "between_nodes_gb": round(statistics.median(m["between_nodes_bytes"] for m in runs) / 1e9, 2),
                "near_gb": round(statistics.median(m["near_bytes"] for m in runs) / 1e9, 2),
                "peak_worker_gb": round(statistics.median(m["peak_worker_bytes"] for m in runs) / 1e9, 2),
                "peak_total_gb": round(statistics.median(m["peak_total_bytes"] for m in runs) / 1e9, 2),
                "spilled_gb": round(statistics.median(m["spilled_bytes"] for m in runs) / 1e9, 2),
                "scheduler_us_per_task": round(statistics.median(m["scheduler_us_per_task"] for m in runs), 1),
            }
            if all(m["seed"] in stock and m["seed"] in inf for m in runs):
                p["worst_to_better_stock"] = round(
                    max(
                        m["makespan_seconds"]
                        / min(stock[m["seed"]]["makespan_seconds"], inf[m["seed"]]["makespan_seconds"])
                        for m in runs
                    ),
                    3,
                )
            if all(m["seed"] in stock for m in runs):
                p["worst_peak_to_stock"] = round(
                    max(m["peak_worker_bytes"] / max(1, stock[m["seed"]]["peak_worker_bytes"]) for m in runs), 3
                )
        out.append(entry)
    return sorted(out, key=lambda e: (e["workers"], e["mix"], e["shape"]))


def show(entries: list[dict[str, Any]], policies: list[str]) -> str:
    """The table as text: makespan relative to the reference, GB between nodes, GB of the fullest worker."""
    lines = []
    head = f"{'workers':>7} {'mix':5} {'shape':16} {'bound s':>8} "
    lines.append(head + " ".join(f"{p[:20]:>24}" for p in policies) + "  reference")
    for e in entries:
        line = f"{e['workers']:7d} {e['mix']:5} {e['shape']:16} {e['bound_seconds']:8.2f} "
        for policy in policies:
            p = e["policies"].get(policy)
            cell = "-"
            if p is not None:
                cell = f"x{p['to_reference']:.2f} {p['between_nodes_gb']:8.1f}GB {p['peak_worker_gb']:6.1f}GB"
            line += f"{cell:>24} "
        lines.append(f"{line} {e['reference']}")
    return "\n".join(lines)


def misses(entries: list[dict[str, Any]], policy: str = "gpurt") -> list[str]:
    """Where a policy falls short of the claims, worst first."""
    found: list[tuple[float, str]] = []
    for e in entries:
        p = e["policies"].get(policy)
        if p is None:
            continue
        where = f"{e['workers']} workers, {e['mix']}, {e['shape']}"
        for name, limit, said in (
            ("worst_to_reference", 1.15, "of the reference"),
            ("worst_to_better_stock", 1.03, "of the better stock"),
            ("worst_peak_to_stock", 1.2, "of stock's peak memory"),
        ):
            if name in p and p[name] > limit:
                found.append((p[name] / limit, f"x{p[name]:.2f} {said} (limit {limit}): {where}"))
    return [text for _, text in sorted(found, reverse=True)]


def shortfalls(entries: list[dict[str, Any]]) -> dict[str, list[str]]:
    """`misses` of every policy that is not a baseline."""
    policies = dict.fromkeys(p for e in entries for p in e["policies"])
    return {p: misses(entries, p) for p in policies if p not in POLICIES[:-1]}


def report(rows: list[dict[str, Any]], skipped: int) -> dict[str, Any]:
    """The result file; `skipped` cases are not in it."""
    entries = table(rows)
    return {
        **data.facts("simulated clusters on a virtual clock, the real scheduler; no network, no GPU"),
        "benchmark": "placement",
        "skipped": skipped,
        "misses": shortfalls(entries),
        "table": entries,
        "cases": sorted(rows, key=lambda r: tuple(r[k] for k in Case._fields)),
    }


def explain(case: Case, prefix: str, count: int = 3) -> None:
    """Print the decisions about the first tasks with a key prefix."""
    workload, cluster = build(case.shape, case.workers, case.mix)
    keys = [k for k in workload.tasks if str(k[0] if isinstance(k, tuple) else k).startswith(prefix)][:count]
    if not keys:
        names = sorted({str(k[0] if isinstance(k, tuple) else k) for k in workload.tasks})
        raise SystemExit(f"no key of {case.shape} begins with {prefix!r}; prefixes: {', '.join(names)}")
    result = simulate(workload, cluster, case.policy, case.seed, explain=keys)
    if not result.stories:
        print(f"{case.policy} keeps no log of its decisions")
    for key, story in result.stories.items():
        print(f"--- {key} under {case.policy}")
        if story is None:
            print("no longer in the log (the newest 10,000 decisions are kept)")
            continue
        candidates = story.pop("candidates")
        print(json.dumps(story, default=str))
        for c in candidates:
            terms = " ".join(f"{k[:-8]}={v:.4f}" for k, v in c.items() if k.endswith("_seconds"))
            print(f"  {'->' if c['chosen'] else '  '} {c['address']:28} {c['why']:9} {terms}")


def cases(args: argparse.Namespace) -> list[Case]:
    out = [
        Case(n, mix, shape, seed, policy)
        for n in args.workers
        for mix in args.mixes
        for shape in args.shapes
        for seed in args.seeds
        for policy in args.policies
        if not (policy == "random" and n > RANDOM_UP_TO)
    ]
    # Those of one shape together: a process keeps the last few it has built. Small clusters first, they come early.
    return sorted(out, key=lambda c: c.workers)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    def words(known: Any) -> Any:
        def check(text: str) -> list[str]:
            given = text.split(",")
            for word in given:
                if known is not None and word not in known:
                    raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(known)}")
            return given

        return check

    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=numbers, default=[4, 64, 1000])
    parser.add_argument("--mixes", type=words(MIXES), default=list(MIXES))
    parser.add_argument("--shapes", type=words(SHAPES), default=list(SHAPES))
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--policies", type=words(None), default=list(POLICIES))
    parser.add_argument("--jobs", type=int, default=data.cores())
    parser.add_argument("--budget", type=float, default=math.inf, help="start no further case after so many seconds")
    parser.add_argument("--explain", metavar="PREFIX", help="print decisions instead of running the table")
    parser.add_argument("--add", action="store_true", help="keep the cases that --out has already and add to them")
    parser.add_argument("--out", help="JSON file to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    todo = cases(args)
    if args.explain is not None:
        logging.getLogger("distributed").setLevel(logging.ERROR)
        for case in todo:
            explain(case, args.explain)
        return
    rows: list[dict[str, Any]] = data.earlier(args.out).get("cases", []) if args.add else []
    rows = [r for r in rows if "error" not in r]
    have = {tuple(r[k] for k in Case._fields) for r in rows}
    todo = [c for c in todo if tuple(c) not in have]
    began = saved = time.monotonic()
    skipped = 0
    context = multiprocessing.get_context("spawn")
    # A few tasks per process: an unstarted scheduler leaves some memory behind.
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context, max_tasks_per_child=40) as pool:
        waiting = list(reversed(todo))
        running: set[concurrent.futures.Future[dict[str, Any]]] = set()
        while waiting or running:
            while waiting and len(running) < args.jobs:
                if time.monotonic() - began > args.budget:
                    skipped, waiting = len(waiting), []
                    break
                running.add(pool.submit(run_case, waiting.pop()))
            if not running:
                break
            done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                row = future.result()
                rows.append(row)
                if "error" in row:
                    print(f"failed: {row}", file=sys.stderr, flush=True)
            if args.out and time.monotonic() - saved > SAVE_SECONDS:
                saved = time.monotonic()
                data.write_json(args.out, report(rows, len(todo) - len(rows)))
    entries = table(rows)
    names = list(dict.fromkeys((*args.policies, *(r["policy"] for r in rows))))
    print(show(entries, names))
    print("\nper policy: makespan over the reference, GB between nodes, GB of the fullest worker")
    for policy, texts in shortfalls(entries).items():
        print(f"\n{policy}: {len(texts)} claims missed, worst first")
        for text in texts[:25]:
            print("  " + text)
    if skipped:
        print(f"\n{skipped} cases were not run (--budget)")
    if args.out:
        print(data.write_json(args.out, report(rows, skipped)))


if __name__ == "__main__":
    main()
