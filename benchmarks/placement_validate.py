"""Is the simulator right? The same graphs on a real LocalCluster and simulated: bytes moved and makespan. Prints JSON.

    python -m benchmarks.placement_validate [--workers 4] [--repeats 3] [--shapes tree,join] [--out FILE]

Real tasks sleep for their duration and return that many bytes. The simulated cluster gets the latency and bandwidth
that a few transfers of the real one have shown. What is compared: bytes fetched by workers as a share of the bytes
produced, and the time from submission to the last output. Medians of the repeats against the median of as many seeds;
real runs differ among themselves, hence their range is told as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import time
from typing import Any

import dask
from dask._task_spec import Task, TaskRef
from distributed import Client, LocalCluster, wait

import dask_gpurt
from benchmarks import data
from dask_gpurt.simulate import Cluster, Path, Workload, simulate
from dask_gpurt.simulate.shapes import build

SHAPES = ("tree", "binop", "stencil", "shared", "fan_out", "rechunk", "chains")
POLICIES = ("stock", "inf", "gpurt")
#: durations of the shapes times this; the largest result has so many bytes
SCALE, LARGEST_BYTES = 0.2, 4_000_000


def work(seconds: float, nbytes: int, *inputs: Any) -> bytes:
    time.sleep(seconds)
    return bytes(nbytes)


def scaled(shape: str, workers: int) -> Workload:
    """A shape that real workers finish in a few seconds."""
    workload, _ = build(shape, workers, "flat", jitter=0.0)
    largest = max(t.nbytes for t in workload.tasks.values())
    factor = min(1.0, LARGEST_BYTES / largest)
    tasks = {
        k: t._replace(seconds=t.seconds * SCALE, nbytes=max(50, int(t.nbytes * factor)))
        for k, t in workload.tasks.items()
    }
    return dataclasses.replace(workload, tasks=tasks)


def fetched(client: Client) -> int:
    """Bytes that workers have fetched from workers since they started."""
    return sum(client.run(lambda dask_worker: sum(t["total"] for t in dask_worker.transfer_incoming_log)).values())


def links(client: Client, addresses: list[str]) -> Path:
    """Latency and bandwidth of a fetch, measured: the time of an empty task with one input elsewhere."""
    took: dict[int, list[float]] = {100: [], LARGEST_BYTES: []}
    for i in range(8):
        for nbytes, times in took.items():
            source, target = addresses[i % len(addresses)], addresses[(i + 1) % len(addresses)]
            there = client.submit(bytes, nbytes, workers=[source], key=f"probe{i}-{nbytes}")
            wait(there)
            for where, sign in ((source, -1), (target, 1)):
                began = time.perf_counter()
                wait(client.submit(len, there, workers=[where], key=f"len{i}-{nbytes}-{sign}"))
                times.append(sign * (time.perf_counter() - began))

    def seconds(nbytes: int) -> float:
        pairs = [a + b for a, b in zip(took[nbytes][::2], took[nbytes][1::2], strict=True)]
        return max(1e-4, statistics.median(pairs))

    latency = seconds(100)
    return Path(latency, LARGEST_BYTES / max(1e-4, seconds(LARGEST_BYTES) - latency))


def real(client: Client, workload: Workload, run: int) -> tuple[float, float]:
    """Share of the produced bytes that was fetched, and seconds."""

    def name(key: Any) -> Any:
        # New prefixes for each run: nothing is known of them, as in the simulation.
        return (f"{key[0]}x{run}", *key[1:]) if isinstance(key, tuple) else f"{key}x{run}"

    dsk = {
        name(k): Task(
            name(k),
            work,
            t.seconds,
            t.nbytes,
            *(TaskRef(name(d)) for d in t.dependencies),
            _data_producer=t.data_producer,
        )
        for k, t in workload.tasks.items()
    }
    before = fetched(client)
    began = time.perf_counter()
    futures = client.get(dsk, [name(k) for k in workload.outputs], sync=False)
    wait(futures)
    took = time.perf_counter() - began
    moved = fetched(client) - before
    client.cancel(futures)
    return moved / sum(t.nbytes for t in workload.tasks.values()), took


def simulated(workload: Workload, workers: int, path: Path, policy: str, seed: int) -> tuple[float, float]:
    cluster = Cluster(workers, per_node=workers, near=path)
    r = simulate(workload, cluster, policy, seed)
    return sum(r.bytes_moved.values()) / sum(t.nbytes for t in workload.tasks.values()), r.makespan_seconds


def cases(workers: int, repeats: int, shapes: list[str], policies: list[str]) -> list[dict[str, Any]]:
    out = []
    for policy in policies:
        measured = {}
        config = {"distributed.scheduler.worker-saturation": "inf"} if policy == "inf" else {}
        with (
            dask.config.set(config),
            LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=None, memory_limit="1 GB"
            ) as cluster,
            Client(cluster) as client,
        ):
            if policy == "gpurt":
                dask_gpurt.attach(client, settings={"tiers.enabled": False, "shuffle.enabled": False})
            path = links(client, list(client.scheduler_info(n_workers=-1)["workers"]))
            for shape in shapes:
                workload = scaled(shape, workers)
                measured[shape] = [real(client, workload, run) for run in range(repeats)]
        for shape, runs in measured.items():
            workload = scaled(shape, workers)
            sims = [simulated(workload, workers, path, policy, seed) for seed in range(max(3, repeats))]
            share, seconds = (statistics.median(r[i] for r in runs) for i in (0, 1))
            sim_share, sim_seconds = (statistics.median(r[i] for r in sims) for i in (0, 1))
            row = {
                "shape": shape,
                "policy": policy,
                "tasks": len(workload.tasks),
                "real_moved_share": round(share, 4),
                "simulated_moved_share": round(sim_share, 4),
                "real_moved_range": [round(min(r[0] for r in runs), 4), round(max(r[0] for r in runs), 4)],
                "simulated_moved_range": [round(min(r[0] for r in sims), 4), round(max(r[0] for r in sims), 4)],
                "moved_error": round(sim_share - share, 4),
                "real_seconds": round(seconds, 3),
                "simulated_seconds": round(sim_seconds, 3),
                "seconds_error": round(sim_seconds / seconds - 1, 4),
                "latency_seconds": round(path.latency_seconds, 5),
                "bytes_per_second": round(path.bytes_per_second),
            }
            out.append(row)
            print(json.dumps(row), flush=True)
    return out


def main() -> None:
    logging.getLogger("distributed").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shapes", type=lambda t: t.split(","), default=list(SHAPES))
    parser.add_argument("--policies", type=lambda t: t.split(","), default=list(POLICIES))
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    rows = cases(args.workers, args.repeats, args.shapes, args.policies)
    summary = {
        "median_absolute_moved_error": round(statistics.median(abs(r["moved_error"]) for r in rows), 4),
        "largest_absolute_moved_error": round(max(abs(r["moved_error"]) for r in rows), 4),
        "median_absolute_seconds_error": round(statistics.median(abs(r["seconds_error"]) for r in rows), 4),
        "largest_absolute_seconds_error": round(max(abs(r["seconds_error"]) for r in rows), 4),
    }
    print(json.dumps(summary))
    if args.out:
        report = {
            **data.facts(f"LocalCluster of {args.workers} processes on loopback, tasks that sleep; no GPU"),
            "benchmark": "placement_validate",
            "summary": summary,
            "cases": rows,
        }
        print(data.write_json(args.out, report))


if __name__ == "__main__":
    main()
