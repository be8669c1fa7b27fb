"""The net on real clusters: every program under stock's two settings and ours, in turns, on one machine.

The clusters run all the time and take turns with each program; the order is reversed every other round, so that a
machine that gets busy does so for all. Per run: seconds, bytes that workers fetched, peak resident memory of the
fullest worker, workers that were replaced, and the answer, which must be stock's up to rounding.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import statistics
import time
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
from distributed import Client, LocalCluster

import dask_gpurt
from benchmarks import data
from benchmarks.compare import turns
from benchmarks.strangers import cases, everyday, naive, ports  # noqa: F401 (everyday adds to the ports)
from benchmarks.strangers.catalogue import PROGRAMS, SETS, Scale
from benchmarks.strangers.sim import FULLER, POLICIES, SLOWER

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

RESULT = os.path.join(data.RESULTS, "strangers_live.json")
#: programs that are given a client, by name
WITH_CLIENT = {**ports.PORTS, **naive.programs()}
#: relative difference of two answers that the order of sums explains
ROUNDING = 1e-6
#: at the start of each cluster, not counted: workers import what they need
WARM = "standardise"
#: a `LocalCluster` closes a nanny for good whose worker is away for longer, also while it restarts; Dask's 15 s are too
#: short on a busy machine
AWAY = "120 s"


class TooLong(Exception):
    """A run has taken longer than it may."""


def _alarm(*args: Any) -> None:
    raise TooLong


def reset_peak() -> int:
    """On a worker: forget its peak of resident memory; its process id."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as f:  # not Linux: a peak since the start
        f.write("5")
    return os.getpid()


def peak() -> tuple[int, int]:
    """On a worker: process id, and peak of resident memory in bytes."""
    with open("/proc/self/status") as f:
        found = next(line for line in f if line.startswith("VmHWM"))
    return os.getpid(), int(found.split()[1]) * 1024


def fetched(dask_worker: Any) -> int:
    """On a worker: bytes it has fetched from others since it started."""
    return sum(t["total"] for t in dask_worker.transfer_incoming_log)


@contextlib.contextmanager
def cluster(policy: str, workers: int, memory: str) -> Iterator[Client]:
    """A client of a cluster of processes with one thread each."""
    kwargs: dict[str, Any] = {
        "n_workers": workers,
        "threads_per_worker": 1,
        "memory_limit": memory,
        "dashboard_address": None,
    }
    config = {"distributed.scheduler.worker-saturation": "inf"} if policy == "inf" else {}
    with dask.config.set(config):
        made = dask_gpurt.local_cluster(**kwargs) if policy == "gpurt" else LocalCluster(**kwargs)
    with made, Client(made) as client:
        yield client


def numbers(answer: Any) -> list[float]:
    """An answer as numbers."""
    if isinstance(answer, (list, tuple)):
        return [x for part in answer for x in numbers(part)]
    if answer is None:
        return []
    return [float(x) for x in np.asarray(answer, dtype=float).ravel()]


def same(a: list[float], b: list[float]) -> bool:
    """Whether two answers are equal up to rounding."""
    return len(a) == len(b) and bool(np.allclose(a, b, rtol=ROUNDING, atol=1e-9, equal_nan=True))


def once(client: Client, name: str, scale: Scale, limit: float) -> dict[str, Any]:
    """One run."""
    before = sum(client.run(fetched).values())
    pids = set(client.run(reset_peak).values())
    out: dict[str, Any] = {}
    signal.alarm(math.ceil(limit))
    began = time.perf_counter()
    try:
        with client.as_current():
            answer = WITH_CLIENT[name](client) if name in WITH_CLIENT else PROGRAMS[name].run(scale)
        out["seconds"] = round(time.perf_counter() - began, 4)
        out["answer"] = numbers(answer)
    except Exception as e:
        # A program that fails under one policy is a finding; the others still have their turn.
        out["error"] = f"{type(e).__name__}: {e}"[:300]
    finally:
        signal.alarm(0)
    if "error" in out:
        client.restart(timeout=60)
    peaks = dict(client.run(peak).values())
    out["moved_bytes"] = max(0, sum(client.run(fetched).values()) - before)
    out["peak_rss_bytes"] = max(peaks.values())
    out["replaced"] = len(pids - set(peaks)) if "error" not in out else 0
    return out


def entry(name: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """All runs of a program: medians, and medians of the ratios within rounds to the better of stock's settings."""
    out: dict[str, Any] = {"name": name, "runs": len(runs["gpurt"])}
    for policy, done in runs.items():
        fine = [r for r in done if "error" not in r]
        out[policy] = {
            "seconds": [r.get("seconds") for r in done],
            "median_s": round(statistics.median(r["seconds"] for r in fine), 4) if fine else None,
            "moved_bytes": round(statistics.median(r["moved_bytes"] for r in done)),
            "peak_rss_bytes": round(statistics.median(r["peak_rss_bytes"] for r in done)),
            "replaced": sum(r["replaced"] for r in done),
            "errors": [r["error"] for r in done if "error" in r],
        }
    rounds = list(zip(*(runs[p] for p in POLICIES), strict=True))
    answers = [r["answer"] for r in runs["stock"] if "answer" in r]
    out["wrong"] = sum(not same(answers[0], r["answer"]) for r in runs["gpurt"] if answers and "answer" in r)
    better = min(("stock", "inf"), key=lambda p: out[p]["median_s"] if out[p]["median_s"] is not None else math.inf)
    pairs = [(r[2], r[POLICIES.index(better)]) for r in rounds if all("seconds" in x for x in r)]
    if pairs:
        ratios = sorted(a["seconds"] / b["seconds"] for a, b in pairs)
        out["better"] = better
        out["ratio"] = round(statistics.median(ratios), 3)
        out["ratio_range"] = [round(ratios[0], 3), round(ratios[-1], 3)]
        # What stock differs from itself by in the same rounds: below that, a ratio says nothing.
        base = [b["seconds"] for _, b in pairs]
        out["noise"] = round(max(base) / min(base), 3)
        out["moved_ratio"] = round((out["gpurt"]["moved_bytes"] + 1e6) / (out[better]["moved_bytes"] + 1e6), 3)
        out["peak_ratio"] = round(out["gpurt"]["peak_rss_bytes"] / out[better]["peak_rss_bytes"], 3)
    return out


def line(e: dict[str, Any]) -> str:
    """A row as text."""
    medians = " ".join(f"{e[p]['median_s'] or math.nan:8.3f}" for p in POLICIES)
    lost = "/".join(str(e[p]["replaced"]) for p in POLICIES)
    text = f"{e['name']:30} {medians}"
    if "ratio" in e:
        low, high = e["ratio_range"]
        text += f" {e['ratio']:6.3f} [{low:5.2f} {high:5.2f}] {e['moved_ratio']:6.2f} {e['peak_ratio']:5.2f}"
        text += f" {e['noise']:5.2f} lost {lost}"
        text += " slower" if e["ratio"] > SLOWER and low > 1 else ""
        text += " fuller" if e["peak_ratio"] > FULLER else ""
    text += " WRONG" if e["wrong"] else ""
    return text + "".join(f" {p}: {error}" for p in POLICIES for error in e[p]["errors"][:1])


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all programs."""
    ratios = [e["ratio"] for e in entries if "ratio" in e]
    return {
        "programs": len(entries),
        "geometric_mean_time": round(math.exp(statistics.fmean(map(math.log, ratios))), 4) if ratios else None,
        "worst_time": max(ratios, default=None),
        f"slower_than_{SLOWER}_in_median": sum(r > SLOWER for r in ratios),
        "slower_in_every_round": sum(e["ratio"] > SLOWER and e["ratio_range"][0] > 1 for e in entries if "ratio" in e),
        f"fuller_than_{FULLER}": sum(e["peak_ratio"] > FULLER for e in entries if "ratio" in e),
        "wrong": sum(e["wrong"] for e in entries),
        "failed_ours": sum(len(e["gpurt"]["errors"]) for e in entries),
        "failed_stock": sum(len(e["stock"]["errors"]) for e in entries),
        "replaced_ours": sum(e["gpurt"]["replaced"] for e in entries),
        "replaced_stock": sum(e["stock"]["replaced"] for e in entries),
    }


def _names(which: str) -> list[str]:
    if which == naive.SET:
        return list(naive.programs())
    return [*ports.PORTS, *(n for n in cases.names(which, 0) if n in PROGRAMS)]


def run(args: argparse.Namespace) -> None:
    """``live`` of the command line."""
    logging.getLogger("distributed").setLevel(logging.ERROR)
    signal.signal(signal.SIGALRM, _alarm)
    chosen = args.names or _names(args.set)
    scale = Scale(args.workers * 2, args.grain)
    entries = []
    head = "stock s, inf s, ours s, ratio [range], moved, peak, noise of stock"
    print(f"{len(chosen)} programs; {head}; commit {data.commit()}", flush=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(dask.config.set({"distributed.deploy.lost-worker-timeout": AWAY}))
        clients = {p: stack.enter_context(cluster(p, args.workers, args.memory)) for p in POLICIES}
        for client in clients.values():
            once(client, WARM, scale, args.limit)
        for name in chosen:
            runs: dict[str, list[dict[str, Any]]] = {p: [] for p in POLICIES}
            for _, policy in turns(POLICIES, args.runs):
                runs[policy].append(once(clients[policy], name, scale, args.limit))
            entries.append(entry(name, runs))
            print(line(entries[-1]), flush=True)
            if args.out:
                report = {
                    **data.facts(f"three LocalClusters of {args.workers} processes in turns; loopback, no GPU"),
                    "benchmark": "strangers_live",
                    "set": args.set,
                    "memory_limit": args.memory,
                    "load_average": os.getloadavg(),
                    "summary": summary(entries),
                    "programs": entries,
                    **({"pairs": naive.pairs(entries)} if args.set == naive.SET else {}),
                }
                data.write_json(args.out, report)
    for key, value in summary(entries).items():
        print(f"{key:32} {value}")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``live``."""
    parser.add_argument("--set", choices=(*SETS, naive.SET), default="look")
    parser.add_argument("--names", type=lambda t: t.split(","), help="programs or ports, instead of a set")
    parser.add_argument("--workers", type=int, default=2, help="processes of each cluster")
    parser.add_argument("--memory", default="1GiB", help="limit of each process")
    parser.add_argument("--grain", type=int, default=700, help="edge of a chunk: 700 is 4 MB")
    parser.add_argument("--runs", type=int, default=3, help="rounds; each policy once in each")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one run, at most")
    parser.add_argument("--out", help=f"JSON file to write, such as {os.path.relpath(RESULT, data.ROOT)}")
    parser.add_argument("--issue-ends", action="store_true", help="needed to run the held set")
    parser.set_defaults(run=run)
