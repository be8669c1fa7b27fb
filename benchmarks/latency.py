"""How long tasks wait for messages: chains, loops of submit, many short tasks; stock's two settings and ours in turns.

    python -m benchmarks.latency [--runs 5] [--out FILE]

``submit``: `client.submit(...).result()` in a loop, per task. ``chain``: each task takes the one before, per task.
``chains``: 40 chains side by side. ``many``: 6,000 tasks without inputs. ``tree``: 1,024 of them, then a sum of two by
two. Seconds, and processor seconds of client, scheduler and workers together.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import operator
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import psutil
from distributed import wait

from benchmarks import data
from benchmarks.compare import turns
from benchmarks.strangers.live import cluster
from benchmarks.strangers.sim import POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Client

RESULT = os.path.join(data.RESULTS, "latency.json")


def increment(i: int, *_: Any) -> int:
    return i + 1


def submit(client: Client) -> int:
    for i in range(200):
        client.submit(increment, i, pure=False).result()
    return 200


def chain(client: Client) -> int:
    future = client.submit(increment, 0, pure=False)
    for _ in range(299):
        future = client.submit(increment, future, pure=False)
    future.result()
    return 300


def chains(client: Client) -> int:
    futures = client.map(increment, range(40), pure=False)
    for _ in range(49):
        futures = client.map(increment, futures, pure=False)
    wait(futures)
    return 2000


def many(client: Client) -> int:
    wait(client.map(increment, range(6000), pure=False))
    return 6000


def tree(client: Client) -> int:
    futures = client.map(increment, range(1024), pure=False)
    while len(futures) > 1:
        futures = client.map(operator.add, futures[::2], futures[1::2], pure=False)
    futures[0].result()
    return 2047


SHAPES: tuple[Callable[[Client], int], ...] = (submit, chain, chains, many, tree)


def processor_seconds(client: Client) -> float:
    pids = [os.getpid(), *client.run(os.getpid).values()]
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def once(client: Client, shape: Callable[[Client], int]) -> tuple[float, float]:
    """Microseconds per task: of time, and of processors."""
    spent, began = processor_seconds(client), time.perf_counter()
    tasks = shape(client)
    seconds = time.perf_counter() - began
    return 1e6 * seconds / tasks, 1e6 * (processor_seconds(client) - spent) / tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", help=f"JSON file to write, such as {os.path.relpath(RESULT, data.ROOT)}")
    args = parser.parse_args()
    logging.getLogger("distributed").setLevel(logging.ERROR)
    runs: dict[str, dict[str, list[tuple[float, float]]]] = {s.__name__: {p: [] for p in POLICIES} for s in SHAPES}
    with contextlib.ExitStack() as stack:
        clients = {policy: stack.enter_context(cluster(policy, 2, "1GiB")) for policy in POLICIES}
        for client in clients.values():
            for shape in SHAPES:  # imports, first connections, what is learned
                once(client, shape)
        for _, policy in turns(POLICIES, args.runs):
            for shape in SHAPES:
                runs[shape.__name__][policy].append(once(clients[policy], shape))
    out: dict[str, Any] = {}
    for name, by_policy in runs.items():
        out[name] = {}
        for policy, done in by_policy.items():
            wall, cpu = ([round(x) for x in column] for column in zip(*done, strict=True))
            ratios = [ours[0] / theirs[0] for ours, theirs in zip(by_policy["gpurt"], done, strict=True)]
            out[name][policy] = {
                "us_per_task": wall,
                "median_us": statistics.median(wall),
                "processor_us_per_task": cpu,
                "processor_median_us": statistics.median(cpu),
                "ours_to_this": round(statistics.median(ratios), 3),
            }
        print(
            f"{name:8}",
            "  ".join(
                f"{p}: {r['median_us']:.0f} us ({r['processor_median_us']:.0f} of processors; ours {r['ours_to_this']})"
                for p, r in out[name].items()
            ),
        )
    if args.out:
        exercised = f"three LocalClusters of 2 processes in turns, {data.cores()} cores; loopback, no GPU"
        data.write_json(args.out, {**data.facts(exercised), "benchmark": "latency", "runs": args.runs, "shapes": out})


if __name__ == "__main__":
    main()
