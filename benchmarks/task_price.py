"""What does a task cost that does nothing? CPU time of the scheduler's and of the workers' processes, for each task.

Clusters take turns on the same shapes of tiny tasks, one at a time. Wall time on a busy machine says little, so every
process tells the CPU seconds that it has used (``time.process_time``) before and after. A figure is the median of the
rounds, a ratio the median of the ratios within a round. The client's work is in the wall time only.

Beside ``stock`` and ``gpurt`` (everything on), ``--cases`` may name clusters with one engine off, to see whose price it
is; ``stock again``, the same as ``stock``, shows the noise of the machine.

``python -m benchmarks.task_price`` writes benchmarks/results/task_price.json.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

from distributed import wait

from benchmarks.compare import turns
from benchmarks.data import RESULTS, cores, facts, write_json
from dask_gpurt.bench.tpch.clusters import ProcessCluster, close_all

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from distributed import Client, Future

#: case -> (engine, environment of its processes)
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "stock": ("stock", {}),
    "inf": ("stock", {"DASK_DISTRIBUTED__SCHEDULER__WORKER_SATURATION": "inf"}),
    "gpurt": ("gpurt", {}),
    "no-tiers": ("gpurt", {"DASK_GPURT__TIERS__ENABLED": "false"}),
    "no-placement": ("gpurt", {"DASK_GPURT__PLACEMENT__ENABLED": "false"}),
    "no-shuffle": ("gpurt", {"DASK_GPURT__SHUFFLE__ENABLED": "false"}),
    "no-observe": ("gpurt", {"DASK_GPURT__OBSERVE__ENABLED": "false"}),
    "stock again": ("stock", {}),
}
#: CPU time that we add to an empty task, scheduler and workers together, in microseconds
GOAL_US = 30.0
#: tasks in one chain
CHAIN = 40
COLUMNS = ("scheduler_us", "workers_us", "wall_us")


def _leaf(i: int) -> int:
    return i


def _reads(i: int, inputs: list[int]) -> int:
    return i + 1


def _add(a: int, b: int) -> int:
    return a + b


def empty(client: Client, tasks: int, name: str) -> list[Future]:
    """Independent tasks without inputs."""
    return list(client.map(_leaf, range(tasks), pure=False))


def shared(client: Client, tasks: int, name: str) -> list[Future]:
    """Tasks that read the same five inputs."""
    inputs = client.map(_leaf, range(5), pure=False)
    return list(client.map(_reads, range(tasks), inputs=inputs, pure=False))


def chains(client: Client, tasks: int, name: str) -> list[Future]:
    """Chains of `CHAIN` tasks, whose ends are kept."""
    graph: dict[Any, Any] = {}
    count = max(1, tasks // CHAIN)
    for chain, i in itertools.product(range(count), range(CHAIN)):
        graph[name, chain, i] = (_add, (name, chain, i - 1) if i else chain, 1)
    return list(client.get(graph, [(name, chain, CHAIN - 1) for chain in range(count)], sync=False))


def tree(client: Client, tasks: int, name: str) -> list[Future]:
    """Sums of pairs, down to one result."""
    graph: dict[Any, Any] = {}
    level = [(name, 0, i) for i in range((tasks + 1) // 2)]
    graph.update({key: (_leaf, key[2]) for key in level})
    depth = 0
    while len(level) > 1:
        depth += 1
        above = [(name, depth, i) for i in range(len(level) // 2)]
        graph.update({key: (_add, level[2 * key[2]], level[2 * key[2] + 1]) for key in above})
        level = above + level[2 * len(above) :]
    return list(client.get(graph, level, sync=False))


SHAPES: dict[str, Callable[[Client, int, str], list[Future]]] = {
    "empty": empty,
    "shared": shared,
    "chains": chains,
    "tree": tree,
}


def cpu_seconds(client: Client) -> tuple[float, float]:
    """Of the scheduler, and of all workers, since they began."""
    return client.run_on_scheduler(time.process_time), sum(client.run(time.process_time).values())


def measured(client: Client, shape: str, tasks: int, name: str) -> dict[str, float]:
    """Microseconds per task of one run."""
    client.run(gc.collect)
    client.run_on_scheduler(gc.collect)
    before, began = cpu_seconds(client), time.perf_counter()
    with client.as_current():
        futures = SHAPES[shape](client, tasks, name)
        wait(futures)
    wall = time.perf_counter() - began
    after = cpu_seconds(client)
    del futures
    seconds = (after[0] - before[0], after[1] - before[1], wall)
    # What is left over is freed before anybody else is measured.
    while client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)):
        time.sleep(0.02)
    return {column: s / tasks * 1e6 for column, s in zip(COLUMNS, seconds, strict=True)}


def summary(runs: Mapping[str, list[dict[str, float]]], baseline: str) -> dict[str, dict[str, Any]]:
    """Case -> medians over the rounds, and the added microseconds and ratios within each round."""
    out: dict[str, dict[str, Any]] = {}
    for case, rows in runs.items():
        pairs = list(zip(rows, runs[baseline], strict=True))
        cpu = [(_cpu(a), _cpu(b)) for a, b in pairs]
        out[case] = {
            **{column: round(statistics.median(row[column] for row in rows), 2) for column in COLUMNS},
            "added_cpu_us": round(statistics.median(a - b for a, b in cpu), 2),
            "scheduler_ratio": round(statistics.median(a["scheduler_us"] / b["scheduler_us"] for a, b in pairs), 3),
            "workers_ratio": round(statistics.median(a["workers_us"] / b["workers_us"] for a, b in pairs), 3),
            "wall_ratio": round(statistics.median(a["wall_us"] / b["wall_us"] for a, b in pairs), 3),
            "runs": rows,
        }
    return out


def _cpu(row: Mapping[str, float]) -> float:
    return row["scheduler_us"] + row["workers_us"]


def launched(case: str, directory: str) -> ProcessCluster:
    """A cluster that is starting."""
    engine, more = CASES[case]
    cluster = ProcessCluster(engine, workers=2, threads=1, memory_limit_bytes=2**30, directory=directory)
    known = {key: os.environ.get(key) for key in more}
    os.environ.update(more)  # what is started inherits it
    try:
        cluster.launch()
    finally:
        for key, value in known.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
    return cluster


def require_known(parser: argparse.ArgumentParser, given: Iterable[str], known: Collection[str]) -> None:
    """End with an error where one of the given names is not known."""
    for name in given:
        if name not in known:
            parser.error(f"{name!r} is unknown; there are {', '.join(known)}, separated by commas")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="stock,inf,gpurt,stock again", help=f"of {', '.join(CASES)}; the first is 1")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--tasks", type=int, default=8000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", default=os.path.join(RESULTS, "task_price.json"))
    o = parser.parse_args()
    cases, shapes = o.cases.split(","), o.shapes.split(",")
    require_known(parser, cases, CASES)
    require_known(parser, shapes, SHAPES)
    clusters: dict[str, ProcessCluster] = {}
    results: dict[str, dict[str, dict[str, Any]]] = {}
    serial = itertools.count()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for case in cases:
                clusters[case] = launched(case, os.path.join(scratch, case.replace(" ", "-")))
            for cluster in clusters.values():
                cluster.join()
            for shape in shapes:
                runs: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
                for case in cases:
                    measured(clusters[case].client, shape, o.tasks, f"x{next(serial)}")
                for _, case in turns(cases, o.runs):
                    runs[case].append(measured(clusters[case].client, shape, o.tasks, f"x{next(serial)}"))
                results[shape] = summary(runs, cases[0])
                print(f"{shape}: scheduler us, workers us, wall us per task (ratios to {cases[0]}); added CPU us")
                for case, r in results[shape].items():
                    print(
                        f"  {case:14} {r['scheduler_us']:6.0f} ({r['scheduler_ratio']:.2f})"
                        f" {r['workers_us']:6.0f} ({r['workers_ratio']:.2f})"
                        f" {r['wall_us']:6.0f} ({r['wall_ratio']:.2f})  {r['added_cpu_us']:+7.1f}",
                        flush=True,
                    )
        finally:
            close_all(list(clusters.values()))
    result = facts(f"{cores()} CPU cores, 2 worker processes x 1 thread per cluster, loopback; no GPU")
    write_json(o.out, {**result, "tasks": o.tasks, "runs": o.runs, "goal_added_us": GOAL_US, "shapes": results})
    return 0 if all(r.get("gpurt", {}).get("added_cpu_us", 0.0) <= GOAL_US for r in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
