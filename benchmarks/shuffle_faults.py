"""Faults at random moments of shuffles, merges and groupbys: right answers, time, and what was done again.

    python -m benchmarks.shuffle_faults --runs 200 --variants gpurt p2p --seconds 270

Real worker processes under nannies. Every run is one query with one fault at a random moment of it:

- ``kill``, ``kill2``: SIGKILL of one or two worker processes; the nannies start new ones;
- ``stop``: SIGSTOP, and SIGCONT three seconds later;
- ``retire``: the cluster is scaled down by one worker in the middle, and up again;
- ``cancel``: the query is cancelled, everything of it must go, and then it is run undisturbed.

The answer is compared with that of pandas, row by row. Outcomes: ``right``, ``wrong``, ``error`` (an exception that
reached the user), ``hang`` (no answer within `HANG_SECONDS`). Counted besides: tasks that ended more often than in an
undisturbed run, by what they do, and the bytes of their results; files below the scratch folder when all is over. A
fault that came after the answer counts as ``missed``: it costs nothing. The undisturbed time is taken again by every
query that follows a cancelled one, as a machine that others use is not as fast all the time.

With ``--skewed`` two fifths of the rows of the first table have one of two keys, which Dask's hash puts into outputs of
one worker, and moving an output costs nothing, so that shuffles bind outputs late and faults hit that, too.

The same run number has the same query, fault and moment (a share of the undisturbed time) in every variant. ``p2p`` is
stock's shuffle and stock's memory; ``gpurt`` is the whole extension. Results are added to one JSON file, runs that are
in it are not repeated: many short calls make a long one (`--seconds`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.dataframe.shuffle import partitioning_index
from dask.utils import key_split
from distributed import Client, LocalCluster, SchedulerPlugin

from benchmarks import data
from dask_gpurt.client.local import local_cluster
from dask_gpurt.shuffle.protocol import rebalance_plan
from dask_gpurt.shuffle.scheduler import rebalance

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 3
INPUTS = 12
ROWS = 20_000
#: without an answer for so long, a query counts as hanging
HANG_SECONDS = 60.0
KINDS = ("kill", "kill2", "stop", "retire", "cancel")
STOP_SECONDS = 3.0


#: set in the environment of all processes: two keys have many rows
SKEWED = "GPURT_FAULTS_SKEWED"


def part(i: int, seed: int) -> pd.DataFrame:
    """An input partition; as slow as a read from storage."""
    time.sleep(0.03)
    r = np.random.default_rng((seed, i))
    text = pd.Series(r.integers(0, 5000, ROWS).astype("U5"), dtype="str")
    k = r.integers(0, 40_000, ROWS)
    if seed == 1 and os.environ.get(SKEWED):
        every = pd.DataFrame({"k": np.arange(1000)})
        parts = partitioning_index(every.astype("f8"), INPUTS)
        k = np.where(r.random(ROWS) < 0.4, r.choice([every.k[parts == p].iloc[0] for p in (0, 1)], ROWS), k)
    return pd.DataFrame({"k": k, "v": r.integers(0, 1 << 40, ROWS), "s": text})


def slow(df: pd.DataFrame) -> pd.DataFrame:
    time.sleep(0.03)
    return df


def source(seed: int) -> Any:
    return dd.from_map(part, list(range(INPUTS)), seed=seed, meta=part(0, 0).iloc[:0])


def whole(seed: int) -> pd.DataFrame:
    return pd.concat([part(i, seed) for i in range(INPUTS)], ignore_index=True)


def shuffled() -> Any:
    return source(1).shuffle("k", npartitions=INPUTS, shuffle_method="p2p").map_partitions(slow)


def merged() -> Any:
    return source(1).merge(source(2), on="k", how="inner", shuffle_method="p2p").map_partitions(slow)


def grouped() -> Any:
    return source(1).groupby("k").agg({"v": "max", "s": "count"}, split_out=6, shuffle_method="p2p").reset_index()


#: name -> (the query, the answer by pandas)
QUERIES: dict[str, tuple[Callable[[], Any], Callable[[], pd.DataFrame]]] = {
    "shuffle": (shuffled, lambda: whole(1)),
    "merge": (merged, lambda: whole(1).merge(whole(2), on="k")),
    "groupby": (grouped, lambda: whole(1).groupby("k").agg({"v": "max", "s": "count"}).reset_index()),
}


def ordered(df: pd.DataFrame) -> pd.DataFrame:
    return df[sorted(df.columns)].sort_values(sorted(df.columns)).reset_index(drop=True)


class Ended(SchedulerPlugin):
    """Counts executions that ended well, and the bytes of their results, by what the task does."""

    name = "count-ended"

    def __init__(self) -> None:
        self.tasks: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if start == "processing" and finish == "memory":
            name = kind_of(key)
            self.tasks[name] += 1
            self.bytes[name] += int(kwargs.get("nbytes") or 0)


def kind_of(key: Any) -> str:
    """transfer, barrier, output (whatever depends on a barrier comes with it), or input."""
    name = str(key_split(key))
    if "transfer" in name:
        return "transfer"
    if "barrier" in name:
        return "barrier"
    if name.startswith(("slow", "hashjoin", "p2pshuffle", "decideagg", "hash-join", "reset", "shuffle", "agg")):
        return "output"
    return "input"


def count(dask_scheduler: Any) -> dict[str, dict[str, int]]:
    """On the scheduler: what has ended since the last call."""
    plugin = dask_scheduler.plugins.get(Ended.name)
    if plugin is None:
        plugin = Ended()
        dask_scheduler.add_plugin(plugin, name=Ended.name)
    out = {"tasks": dict(plugin.tasks), "bytes": dict(plugin.bytes)}
    plugin.tasks.clear()
    plugin.bytes.clear()
    return out


def state(dask_scheduler: Any) -> tuple[int, int]:
    """On the scheduler: tasks, active shuffles."""
    return len(dask_scheduler.tasks), len(dask_scheduler.plugins["shuffle"].active_shuffles)


def shuffle_numbers(dask_scheduler: Any) -> dict[str, Any]:
    takeover = getattr(dask_scheduler.plugins["shuffle"], "takeover", None)
    return {} if takeover is None else takeover.statistics()


class Bench:
    """One variant's cluster."""

    def __init__(self, variant: str, transport: str, folder: str) -> None:
        self.folder = folder
        kwargs: dict[str, Any] = {
            "n_workers": WORKERS,
            "threads_per_worker": 1,
            "memory_limit": "1 GiB",
            "dashboard_address": None,
            "local_directory": folder,
            "silence_logs": logging.CRITICAL,
        }
        if variant == "p2p":
            self.cluster = LocalCluster(**kwargs)
        else:
            settings = {"shuffle.transport": transport} if transport != "auto" else {}
            self.cluster = local_cluster(settings=settings, **kwargs)
        self.client = Client(self.cluster)
        self.answers = {name: ordered(want()) for name, (_, want) in QUERIES.items()}
        #: when the latest query had its answer
        self.answered = 0.0
        #: query -> (seconds undisturbed, what ended)
        self.calm: dict[str, tuple[float, dict[str, dict[str, int]]]] = {}
        for name in QUERIES:
            for _ in range(2):  # the second is warm
                self.whole_cluster()
                self.client.run_on_scheduler(count)
                seconds, outcome, text = self.query(name, lambda future: None)
                if outcome != "right":
                    raise SystemExit(f"{variant} {name}, undisturbed: {outcome} {text}")
                self.calm[name] = (seconds, self.client.run_on_scheduler(count))

    def close(self) -> None:
        self.client.close()
        self.cluster.close()

    def whole_cluster(self) -> None:
        self.client.wait_for_workers(WORKERS, timeout=120)

    def pids(self) -> list[int]:
        return [n.pid for n in self.cluster.workers.values() if getattr(n, "pid", None)]

    def query(self, name: str, disturb: Callable[[Any], None]) -> tuple[float, str, str]:
        """Seconds, outcome, text of the error."""
        start = time.perf_counter()
        try:
            with self.client.as_current():
                future = self.client.compute(QUERIES[name][0]())
            disturb(future)
            got = future.result(timeout=HANG_SECONDS)
            self.answered = time.perf_counter()
        except TimeoutError as e:
            return time.perf_counter() - start, "hang", repr(e)
        except Exception as e:
            return time.perf_counter() - start, "error", f"{type(e).__name__}: {e}; {e.__cause__!r}"
        seconds = time.perf_counter() - start
        want, got = self.answers[name], ordered(got)
        same = list(got.columns) == list(want.columns) and len(got) == len(want)
        same = same and all((got[c].astype(want[c].dtype) == want[c]).all() for c in want.columns)
        return seconds, "right" if same else "wrong", "" if same else f"{len(got)} rows, not {len(want)}, or others"

    def run(self, number: int) -> dict[str, Any]:
        r = random.Random(number)
        kind = KINDS[number % len(KINDS)]
        name = list(QUERIES)[number // len(KINDS) % len(QUERIES)]
        share = r.random()
        calm, usual = self.calm[name]
        self.whole_cluster()
        pids = self.pids()
        r.shuffle(pids)
        struck = threading.Event()
        moments: list[float] = []
        self.client.run_on_scheduler(count)
        runs = shuffle_stat(self.client)

        def strike(future: Any) -> None:
            moments.append(time.perf_counter())
            if kind in ("kill", "kill2"):
                for pid in pids[: 1 + (kind == "kill2")]:
                    with contextlib.suppress(ProcessLookupError):  # its nanny has restarted it meanwhile
                        os.kill(pid, signal.SIGKILL)
            elif kind == "stop":
                with contextlib.suppress(ProcessLookupError):  # as above, after an earlier run
                    os.kill(pids[0], signal.SIGSTOP)
                    time.sleep(STOP_SECONDS)
                    os.kill(pids[0], signal.SIGCONT)
            elif kind == "retire":
                self.cluster.scale(WORKERS - 1)
            struck.set()

        def disturb(future: Any) -> None:
            timer = threading.Timer(share * calm, strike, args=(future,))
            timer.daemon = True
            timer.start()

        def cancel(future: Any) -> None:
            time.sleep(share * calm)
            future.cancel()

        start = time.perf_counter()
        if kind == "cancel":
            with self.client.as_current():
                future = self.client.compute(QUERIES[name][0]())
            cancel(future)
            del future
            seconds, outcome, text = self.gone(start)
            self.client.run_on_scheduler(count)  # what was cancelled is not done again, but for the first time
            if outcome == "right":
                again, outcome, text = self.query(name, lambda future: None)
                seconds = max(seconds - share * calm, again)
                self.calm[name] = again, usual
        else:
            seconds, outcome, text = self.query(name, disturb)
            struck.wait(HANG_SECONDS)
        counts = self.client.run_on_scheduler(count)
        if kind == "retire":
            self.cluster.scale(WORKERS)
        after = shuffle_stat(self.client)
        more = {
            what: {
                k: max(0, n - usual[what].get(k, 0)) for k, n in counts[what].items() if n - usual[what].get(k, 0) > 0
            }
            for what in counts
        }
        out = {
            "run": number,
            "kind": kind,
            "query": name,
            "moment": round(share, 3),
            "seconds": round(seconds, 2),
            "over_calm": round(seconds / calm, 2),
            "outcome": outcome,
            "missed": outcome == "right" and any(moment > self.answered for moment in moments),
            "tasks_again": more["tasks"],
            "bytes_again": more["bytes"],
            "files_left": self.files_left(),
        }
        if after:
            out["shuffles"] = {k: after[k] - runs.get(k, 0) for k in after}
        if text:
            out["text"] = text[:500]
        if outcome == "hang":
            self.client.restart(timeout=120)
        return out

    def gone(self, start: float) -> tuple[float, str, str]:
        """Wait until nothing of a cancelled query is left on the scheduler."""
        deadline = time.perf_counter() + HANG_SECONDS
        while any(left := self.client.run_on_scheduler(state)):
            if time.perf_counter() > deadline:
                return time.perf_counter() - start, "hang", f"after the cancellation there are {left} tasks, shuffles"
            time.sleep(0.02)
        return time.perf_counter() - start, "right", ""

    def files_left(self) -> int:
        """Files of shards below the scratch folder once the query is over; a few seconds' grace."""
        for _ in range(50):
            found = files(self.folder)
            if not found:
                return 0
            time.sleep(0.1)
        return len(found)


def shuffle_stat(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.run_on_scheduler(shuffle_numbers)
    told = {name: found.get(name, 0) for name in ("runs", "pinned", "errors")} if found else {}
    told |= {"moved": found["late_binding"].get("outputs", 0)} if "late_binding" in found else {}
    return told | {k: v for k, v in found.get("recovery", {}).items() if k != "amending"}


def files(folder: str) -> list[str]:
    found = []
    for root, _, names in os.walk(folder):
        if os.path.basename(root) in ("gpurt-tiers", "storage") or "shuffle-" in root:
            found += [os.path.join(root, n) for n in names]
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    outcomes = collections.Counter(r["outcome"] for r in runs)
    by_kind: dict[str, Any] = {}
    for kind in KINDS:
        some = [r for r in runs if r["kind"] == kind]
        if some:
            by_kind[kind] = {
                "runs": len(some),
                "median_seconds": statistics.median(r["seconds"] for r in some),
                "longest_seconds": max(r["seconds"] for r in some),
                "tasks_again": sum(sum(r["tasks_again"].values()) for r in some),
                "bytes_again": sum(sum(r["bytes_again"].values()) for r in some),
                "transfers_again": sum(r["tasks_again"].get("transfer", 0) for r in some),
                "outputs_again": sum(r["tasks_again"].get("output", 0) for r in some),
                "inputs_again": sum(r["tasks_again"].get("input", 0) for r in some),
            }
    return {
        "runs": len(runs),
        "outcomes": {k: outcomes.get(k, 0) for k in ("right", "wrong", "error", "hang")},
        "missed": sum(r.get("missed", False) for r in runs),
        "longest_seconds": max(r["seconds"] for r in runs),
        "files_left": sum(r["files_left"] for r in runs),
        "tasks_again": sum(sum(r["tasks_again"].values()) for r in runs),
        "bytes_again": sum(sum(r["bytes_again"].values()) for r in runs),
        "shuffles": dict(sum((collections.Counter(r.get("shuffles", {})) for r in runs), collections.Counter())),
        "by_kind": by_kind,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=200, help="run numbers 0 to this")
    parser.add_argument("--variants", nargs="+", default=["gpurt", "p2p"], choices=["gpurt", "p2p"])
    parser.add_argument("--transport", default="auto", choices=["auto", "rpc", "tcp", "ucx"], help="of ours")
    parser.add_argument("--seconds", type=float, default=270.0, help="no new run after so long; 0: no limit")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--skewed", action="store_true", help="two keys have many rows, and outputs are bound late")
    parser.add_argument("--out", default=os.path.join(data.RESULTS, "shuffle_faults.json"))
    args = parser.parse_args(argv)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    # Else the timer of an earlier loss closes a nanny for good while it restarts its worker.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour", "logging.distributed": "critical"})
    if args.skewed:
        os.environ[SKEWED] = "1"
        # The scheduler is in this process.
        rebalance_plan.LEAST_BYTES = 1 << 16
        prices = rebalance_plan.Prices(unpack_per_byte=1.0, move_per_byte=0.0, spill_per_byte=0.0, fixed=0.0)
        rebalance.Binder._prices = lambda self, group, name: prices  # type: ignore[method-assign]
    start = time.perf_counter()
    report = data.earlier(args.out)
    report |= data.facts(f"{data.cores()} CPU cores, {WORKERS} worker processes of one thread under nannies, no GPU")
    report["benchmark"] = "shuffle_faults"
    results: dict[str, Any] = report.setdefault("variants", {})
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        benches: dict[str, Bench] = {}
        names = {v: v if v == "p2p" or args.transport == "auto" else f"{v} {args.transport}" for v in args.variants}
        names = {v: f"{name} skewed" if args.skewed else name for v, name in names.items()}
        for number in range(args.runs):
            if KINDS[number % len(KINDS)] not in args.kinds:
                continue
            for variant in args.variants:
                if args.seconds and time.perf_counter() - start > args.seconds:
                    break
                result = results.setdefault(names[variant], {"summary": {}, "all_runs": []})
                if any(r["run"] == number for r in result["all_runs"]):
                    continue
                if variant not in benches:
                    at = os.path.join(folder, variant)
                    os.makedirs(at)
                    benches[variant] = Bench(variant, args.transport, at)
                one = benches[variant].run(number) | {"commit": report["commit"]}
                print(names[variant], json.dumps(one), flush=True)
                bad += one["outcome"] in ("wrong", "hang")
                result["all_runs"].append(one)
                result["summary"] = summary(result["all_runs"])
                data.write_json(args.out, report)
        for bench in benches.values():
            bench.close()
    for name, result in results.items():
        if result["all_runs"]:
            print(name, json.dumps(result["summary"], indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
