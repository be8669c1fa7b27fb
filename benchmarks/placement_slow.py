"""One slow worker among four: wall time over the fluid bound, stock and gpurt. Prints a table, writes JSON.

    python -m benchmarks.placement_slow [--runs 5] [--factor 10] [--out FILE]

Four worker processes with one thread each; the tasks sleep, `factor` times as long on the slow worker, so that
two cores suffice and the machine does not matter. The fluid bound is work / sum of speeds: what no schedule of whole
tasks can beat.

map     one graph of independent tasks of one kind: root tasks, queued by the scheduler
free    as many, of many kinds with few tasks each, arriving together: not queued, placed at once
chain   chains of five tasks, each one small input

Each run begins without any knowledge of the workers' speed (forgotten before it), but the prefixes are the same.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import dask
from distributed import Client, LocalCluster, get_worker, wait

import dask_gpurt
from benchmarks import data
from benchmarks.compare import paired, table

if TYPE_CHECKING:
    from collections.abc import Callable

TASKS = 60
SECONDS = 0.1
WORKERS = 4
LINKS = 5
KINDS = 10


def nap(*args: Any, seconds: float, factor: float) -> int:
    time.sleep(seconds * (factor if get_worker().name == 0 else 1.0))
    return 1


def run_map(client: Client, run: int, factor: float) -> None:
    keys = [f"map-{run}{i:05d}" for i in range(TASKS)]
    wait([*client.map(partial(nap, seconds=SECONDS, factor=factor), range(TASKS), key=keys)])


def _graph(tasks: dict[Any, Any], wanted: list[Any], client: Client) -> None:
    wait(client.get(tasks, wanted, sync=False))


def run_free(client: Client, run: int, factor: float) -> None:
    call = partial(nap, seconds=SECONDS, factor=factor)
    tasks = {(f"free{i % KINDS}-{run:032x}", i): (call, i) for i in range(TASKS)}
    _graph(tasks, list(tasks), client)


def run_chain(client: Client, run: int, factor: float) -> None:
    call = partial(nap, seconds=SECONDS, factor=factor)
    tasks: dict[Any, Any] = {}
    last = []
    for c in range(TASKS // LINKS):
        previous: Any = c
        for i in range(LINKS):
            key = (f"chain{i}-{run:032x}", c)
            tasks[key] = (call, previous)
            previous = key
        last.append(previous)
    _graph(tasks, last, client)


SHAPES: dict[str, Callable[[Client, int, float], None]] = {"map": run_map, "free": run_free, "chain": run_chain}


def forget(dask_scheduler: Any) -> None:
    """Runs on the scheduler: nothing is known of any worker's speed."""
    from dask_gpurt.placement.tables.worker_speed import Speed

    plugin = dask_scheduler.plugins.get("gpurt-placement")
    if plugin is not None and plugin.engine is not None:
        for info in plugin.engine.workers.all.items:
            info.speed, info.slowness, info.speed_samples = Speed(), 1.0, 0
        plugin.engine.speeds.refresh()


def statistics(dask_scheduler: Any) -> dict[str, Any]:
    plugin = dask_scheduler.plugins["gpurt-placement"]
    out: dict[str, Any] = plugin.statistics()
    return out


def measure(shapes: list[str], runs: int, factor: float) -> dict[str, Any]:
    """Both systems side by side, each with its own cluster; they take turns."""
    options: dict[str, Any] = {
        "n_workers": WORKERS,
        "threads_per_worker": 1,
        "processes": True,
        "dashboard_address": None,
        "worker_dashboard_address": None,
        "scheduler_port": 0,
        "memory_limit": "1 GiB",
    }
    fluid = TASKS * SECONDS / (WORKERS - 1 + 1 / factor)
    result: dict[str, Any] = {"factor": factor, "fluid_seconds": fluid, "shapes": {}}
    with (
        LocalCluster(**options) as plain,
        LocalCluster(**options) as extended,
        Client(plain) as stock,
        Client(extended) as ours,
    ):
        dask_gpurt.attach(ours, settings={"tiers.enabled": False, "shuffle.enabled": False})
        clients = {"stock": stock, "gpurt": ours}
        count = 0

        def once(name: str, shape: str) -> None:
            nonlocal count
            count += 1
            # `wait` asks the current client: futures of another one would be waited for on the wrong event loop.
            with clients[name].as_current():
                SHAPES[shape](clients[name], count, factor)

        for shape in shapes:
            cases = {}
            for name in clients:
                cases[name] = partial(once, name, shape)
            seconds: dict[str, Any] = {}
            for client in clients.values():
                client.submit(nap, seconds=0.0, factor=1.0, pure=False).result()

            def prepared(name: str, case: Callable[[], None]) -> None:
                case()
                clients[name].run_on_scheduler(forget)

            for client in clients.values():
                client.run_on_scheduler(forget)
            results = paired({name: partial(prepared, name, case) for name, case in cases.items()}, runs)
            seconds = table(results)
            for case in seconds.values():
                case["over_fluid"] = case["median_s"] / fluid
            result["shapes"][shape] = seconds
            print(
                f"x{factor:g} {shape:6s} fluid {fluid:.2f} s  "
                + "  ".join(f"{n}: {c['median_s']:.2f} s = {c['over_fluid']:.2f}" for n, c in seconds.items()),
                flush=True,
            )
        told = ours.run_on_scheduler(statistics)
        result["statistics"] = {
            k: told[k] for k in ("copies", "stealing", "governor", "speeds", "fallbacks", "declined")
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="rounds; both systems once in each")
    parser.add_argument("--factor", type=float, action="append", help="how many times as long on the slow worker")
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}):
        cases = [measure(args.shape or list(SHAPES), args.runs, f) for f in args.factor or [10.0, 1 / 0.3]]
    report = {
        **data.facts("tasks that sleep; 4 worker processes of one thread on one machine"),
        "benchmark": "placement_slow",
        "tasks": TASKS,
        "task_seconds": SECONDS,
        "cases": cases,
    }
    print(json.dumps(cases[0]["statistics"]["copies"]), json.dumps(cases[0]["statistics"]["stealing"]))
    if args.out:
        print(data.write_json(args.out, report))


if __name__ == "__main__":
    main()
