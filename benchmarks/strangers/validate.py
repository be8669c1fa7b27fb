"""Is the simulator right about programs that keep data and submit graph after graph?

The recorded graphs run on a real LocalCluster and simulated: tasks sleep for their duration and return that many bytes,
so what is compared is the schedule and its overheads, not how fast this machine computes. What the simulation needs of
the machine (link, messages, the scheduler's and a worker's time per task, the client's per graph) is probed on the same
cluster before each program: the error is not that of a machine that was busier by then.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from dask._task_spec import Task, TaskRef
from distributed import Client, wait

from benchmarks import data
from benchmarks.placement_validate import LARGEST_BYTES, links, work
from benchmarks.strangers import cases
from benchmarks.strangers.live import cluster, fetched
from dask_gpurt.simulate import Cluster, Path, Workload, simulate
from dask_gpurt.simulate.model import SchedulerCost
from dask_gpurt.simulate.policies import PLACEMENT_COST, STOCK

if TYPE_CHECKING:
    import argparse

#: iterative work, and several passes over the same chunks
NAMES = ("svd_vectors", "standardise", "three_passes_persisted", "k_means", "sgd_chains", "gradient_descent")
POLICIES = ("stock", "inf", "gpurt")
#: seconds of work for each worker
WORK_SECONDS = 4.0


def nothing(*args: Any) -> int:
    return 0


def scaled(name: str, workers: int) -> Workload:
    """A program that `workers` workers finish in a few seconds."""
    load = cases.build(name, workers)
    size = min(1.0, LARGEST_BYTES / max(t.nbytes for t in load.tasks.values()))
    factor = WORK_SECONDS * workers / sum(t.seconds for t in load.tasks.values())
    tasks = {
        k: t._replace(seconds=t.seconds * factor, nbytes=max(50, int(t.nbytes * size))) for k, t in load.tasks.items()
    }
    return dataclasses.replace(load, tasks=tasks, jitter=0.0)


@dataclasses.dataclass(frozen=True)
class Probed:
    """What a machine takes for work that is nothing but overhead, in seconds."""

    path: Path
    #: a task after another: there and back, and what worker and scheduler do
    step: float
    #: a task among many
    task: float
    #: a graph of one task, from the client and back
    graph: float

    @staticmethod
    def of(client: Client, run: str) -> Probed:
        addresses = list(client.scheduler_info(n_workers=-1)["workers"])

        def timed(dsk: dict[Any, Any], keys: list[Any]) -> float:
            began = time.perf_counter()
            wait(client.get(dsk, keys, sync=False))
            return time.perf_counter() - began

        n = 40
        chain = {(f"chain{run}", 0): Task((f"chain{run}", 0), nothing)}
        for i in range(1, n):
            chain[f"chain{run}", i] = Task((f"chain{run}", i), nothing, TaskRef((f"chain{run}", i - 1)))
        graphs = [timed({f"one{run}-{i}": Task(f"one{run}-{i}", nothing)}, [f"one{run}-{i}"]) for i in range(9)]
        graph = statistics.median(graphs)
        step = (timed(chain, [(f"chain{run}", n - 1)]) - graph) / (n - 1)
        flat = {(f"flat{run}", i): Task((f"flat{run}", i), nothing) for i in range(400)}
        task = max(0.0, timed(flat, list(flat)) - graph) / len(flat)
        return Probed(links(client, addresses), max(step, 1e-4), task, graph)

    def cluster(self, workers: int, policy: str) -> Cluster:
        # Many tasks at once are bound by the scheduler, which takes a third of its time to take a graph in.
        cost = SchedulerCost(task=self.task * 2 / 3, submitted=self.task / 3, message=self.task / 6)
        rest = max(0.0, self.step - cost.task)
        if policy not in STOCK:  # our price is in what was probed, and `simulate` charges it
            cost = cost.times(1 / PLACEMENT_COST)
        return Cluster(
            workers,
            per_node=workers,
            near=self.path,
            message_seconds=rest / 4,
            overhead_seconds=rest / 2,
            scheduler=cost,
        )

    def load(self, load: Workload) -> Workload:
        """With the client's time for each graph."""
        client = max(0.0, self.graph - self.step)
        return dataclasses.replace(load, steps=[s._replace(seconds=client) for s in load.steps])


def real(client: Client, load: Workload, run: str) -> tuple[float, float]:
    """Share of the produced bytes that was fetched, and seconds."""

    def name(key: Any) -> Any:
        # New prefixes for each run: nothing is known of them, as in the simulation.
        return (f"x{run}{key[0]}", *key[1:]) if isinstance(key, tuple) else f"x{run}{key}"

    graphs = []
    for step in load.steps:
        dsk = {}
        for k in step.keys:
            t = load.tasks[k]
            refs = [TaskRef(name(d)) for d in t.dependencies]
            dsk[name(k)] = Task(name(k), work, t.seconds, t.nbytes, *refs, _data_producer=t.data_producer)
        graphs.append(dsk)
    before = sum(client.run(fetched).values())
    held: dict[Any, Any] = {}
    began = time.perf_counter()
    for step, dsk in zip(load.steps, graphs, strict=True):
        keys = [name(k) for k in step.outputs]
        held |= dict(zip(keys, client.get(dsk, keys, sync=False), strict=True))
        if step.waits:
            wait([held[k] for k in keys])
        for k in step.releases:
            held.pop(name(k), None)
    wait(list(held.values()))
    took = time.perf_counter() - began
    moved = sum(client.run(fetched).values()) - before
    return moved / sum(t.nbytes for t in load.tasks.values()), took


def simulated(load: Workload, probed: Probed, workers: int, policy: str, seed: int) -> tuple[float, float]:
    r = simulate(probed.load(load), probed.cluster(workers, policy), policy, seed)
    return sum(r.bytes_moved.values()) / sum(t.nbytes for t in load.tasks.values()), r.makespan_seconds


def rows(policy: str, names: list[str], workers: int, repeats: int) -> list[dict[str, Any]]:
    out = []
    with cluster(policy, workers, "1GB") as client:
        for name in names:
            load = scaled(name, workers)
            pairs = []
            for i in range(repeats):
                probed = Probed.of(client, f"{name}{i}")
                share, seconds = real(client, load, f"{i}")
                pairs.append((share, seconds, *simulated(load, probed, workers, policy, i), probed))
            error = statistics.median(p[3] / p[1] - 1 for p in pairs)
            out.append(
                {
                    "name": name,
                    "policy": policy,
                    "tasks": len(load.tasks),
                    "graphs": len(load.steps),
                    "real_seconds": round(statistics.median(p[1] for p in pairs), 3),
                    "simulated_seconds": round(statistics.median(p[3] for p in pairs), 3),
                    "seconds_error": round(error, 4),
                    "real_moved_share": round(statistics.median(p[0] for p in pairs), 4),
                    "simulated_moved_share": round(statistics.median(p[2] for p in pairs), 4),
                    "probed": dataclasses.asdict(pairs[-1][4]),
                    "load_average": os.getloadavg()[0],
                }
            )
            print(json.dumps(out[-1]), flush=True)
    return out


def run(args: argparse.Namespace) -> None:
    """``validate`` of the command line."""
    logging.getLogger("distributed").setLevel(logging.ERROR)
    found = [row for policy in args.policies for row in rows(policy, args.names, args.workers, args.repeats)]
    errors = [abs(row["seconds_error"]) for row in found]
    summary = {"median_error": round(statistics.median(errors), 4), "largest_error": max(errors)}
    print(json.dumps(summary))
    if args.out:
        about = data.facts(f"LocalCluster of {args.workers} processes, tasks that sleep; no GPU")
        report = {**about, "benchmark": "strangers_validate", "summary": summary, "rows": found}
        print(data.write_json(args.out, report))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``validate``."""
    parser.add_argument("--names", type=lambda t: t.split(","), default=list(NAMES))
    parser.add_argument("--policies", type=lambda t: t.split(","), default=list(POLICIES))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", help="JSON file to write")
    parser.set_defaults(run=run)
