"""Microseconds per placement decision, stock and ours, by number of workers. Prints JSON.

    python -m benchmarks.placement_decide [N ...]

A real `Scheduler` that is not started (no sockets, no event loop traffic), with WorkerStates made by hand. Two cases:

ordinary    a task with four inputs of 64 MB, each on another worker; `left`: where placement leaves it to Dask at once
everywhere  the same plus an input that has a replica on every worker

Each worker has two tasks of the prefixes in flight, so that queues and occupancies are what they are in a busy cluster.
``hooks`` is what our transition hook adds when a task is assigned and when it finishes, both together.

``submit`` is a graph of roots, three per worker, and sums of four of them, handed to an idle cluster: seconds that the
event loop is blocked, with the first deal of slots; ``floor`` is the same with a decider that costs nothing (the first
idle worker), so what is left when it is taken away are decisions.

Claims: at most 20 us median and 50 us p99 added per decision, and no growth with the number of workers; a widely held
input and the submission at least 20 times faster than stock on 10,000 workers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import statistics
import time
from typing import Any

import dask
from dask._task_spec import Task, TaskRef
from distributed import Scheduler
from distributed.core import Status
from distributed.scheduler import ClientState, WorkerState

from benchmarks import data
from dask_gpurt.config import PlacementSettings
from dask_gpurt.placement.plugin import PlacementPlugin

PER_HOST = 8
TASKS = 50
#: of calls
BATCHES = 10
#: share of the floor of a submission below which a difference says nothing
NOISE = 0.05


class _Recorder:
    """Stands in for the comm to a worker."""

    def send(self, *messages: Any) -> None:
        pass

    def closed(self) -> bool:
        return True


def fn(*args: Any) -> None:
    return None


def make_scheduler(n: int) -> Scheduler:
    scheduler = Scheduler(dashboard=False, dashboard_address=":0", port=0)
    for pc in scheduler.periodic_callbacks.values():
        pc.stop()
    for i in range(n):
        host = i // PER_HOST
        address = f"tcp://10.{host >> 16 & 255}.{host >> 8 & 255}.{host & 255}:{20000 + i % PER_HOST}"
        ws = WorkerState(
            address=address,
            status=Status.running,
            pid=0,
            nthreads=1,
            memory_limit=64 << 30,
            name=i,
            local_directory="",
            nanny=None,
            server_id=address,
            scheduler=scheduler,
        )
        scheduler.workers[address] = ws
        scheduler.running.add(ws)
        known = scheduler.host_info.setdefault(ws.host, {"addresses": set(), "nthreads": 0})
        known["addresses"].add(address)
        known["nthreads"] += 1
        scheduler.total_memory += ws.memory_limit
        scheduler.total_nthreads += 1
        scheduler.aliases[i] = address
        scheduler.check_idle_saturated(ws)
        scheduler.stream_comms[address] = _Recorder()
        for known_plugin in list(scheduler.plugins.values()):
            known_plugin.add_worker(scheduler=scheduler, worker=address)
    scheduler.clients["bench"] = ClientState("bench")
    return scheduler


def submit(scheduler: Scheduler, dsk: dict[Any, Task], order: dict[Any, int] | None = None) -> None:
    scheduler._create_taskstate_from_graph(
        start=time.time(),
        dsk=dsk,
        keys=set(dsk),
        ordered=order or dask.order.order(dsk=dsk),
        client="bench",
        annotations_by_type={},
        global_annotations=None,
        stimulus_id="bench",
        submitting_task=None,
        span_metadata={"collections": []},
        user_priority=0,
    )


def prepare(n: int) -> tuple[Scheduler, list[Any], list[Any]]:
    """A busy scheduler, and tasks ready to be decided: ordinary ones, and ones with the input that is everywhere."""
    s = make_scheduler(n)
    addresses = list(s.workers)
    submit(s, {(f"busy{p}", i): Task((f"busy{p}", i), fn, i) for p in range(2) for i in range(n)})
    own = 4 * TASKS
    s.update_data(
        who_has={("own", i): [addresses[i * 7919 % n]] for i in range(own)},
        nbytes={("own", i): 64 << 20 for i in range(own)},
        client="bench",
    )
    s.update_data(who_has={"wide": addresses}, nbytes={"wide": 1000}, client="bench")
    plain, wide = {}, {}
    for i in range(TASKS):
        refs = [TaskRef(("own", 4 * i + j)) for j in range(4)]
        plain["plain", i] = Task(("plain", i), fn, *refs)
        wide["wider", i] = Task(("wider", i), fn, TaskRef("wide"), *refs)
    s.decide_worker_non_rootish = lambda ts: None  # park them in no-worker
    s.is_rootish = lambda ts: False
    submit(s, plain)
    submit(s, wide)
    del s.decide_worker_non_rootish, s.is_rootish
    return s, [s.tasks[k] for k in plain], [s.tasks[k] for k in wide]


def measure(call: Any, tasks: list[Any], calls: int) -> dict[str, float]:
    """Microseconds per call: medians over batches of each batch's median, 99th percentile and mean.

    Over batches, so that what else the machine does for a moment spoils one of them and not the percentile.
    """
    batches = []
    size = max(10, calls // BATCHES)
    for _ in range(BATCHES):
        times = []
        for i in range(size):
            ts = tasks[i % len(tasks)]
            began = time.perf_counter_ns()
            call(ts)
            times.append((time.perf_counter_ns() - began) / 1e3)
        times.sort()
        batches.append((times[size // 2], times[int(size * 0.99)], sum(times) / size))
    median, p99, mean = (statistics.median(b[i] for b in batches) for i in range(3))
    return {"median_us": round(median, 1), "p99_us": round(p99, 1), "mean_us": round(mean, 1)}


async def case(n: int) -> dict[str, Any]:
    s, plain, wide = prepare(n)
    few = max(100, min(2000, 200_000 // n))
    out: dict[str, Any] = {
        "workers": n,
        "ordinary": {"stock": measure(s.decide_worker_non_rootish, plain, 5000)},
        "everywhere": {"stock": measure(s.decide_worker_non_rootish, wide, few)},
    }
    plugin = PlacementPlugin(PlacementSettings(enabled=True, candidates=16))
    await plugin.start(s)
    decide = s.decide_worker_non_rootish
    # Nothing but decisions is done here, one after the other.
    assert plugin.engine is not None
    plugin.engine.budget.share = plugin.engine.budget.decision_seconds = float("inf")
    # Links and workers are alike here, so by itself placement leaves every such task to Dask; then it weighs them all.
    out["ordinary"]["left"] = measure(decide, plain, 5000)
    plugin.engine.always = True
    out["ordinary"]["ours"] = measure(decide, plain, 5000)
    out["everywhere"]["ours"] = measure(decide, wide, 5000)
    counted = plugin.statistics()
    assert counted["decisions"]["total"] == 10_000, counted
    assert sum(counted["declined"].values()) == 5_000, counted
    assert not counted["fallbacks"], counted
    engine = plugin.engine
    assert engine is not None
    busy = [ts for ws in list(s.workers.values())[:1000] for ts in ws.processing]
    compute = [{"action": "compute", "start": 0.0, "stop": 0.1}]

    def hooks(ts: Any) -> None:
        plugin.transition(
            ts.key,
            "processing",
            "memory",
            stimulus_id="bench",
            startstops=compute,
            nbytes=1,
            worker=ts.processing_on.address,
        )
        plugin.transition(ts.key, "waiting", "processing", stimulus_id="bench")

    out["hooks"] = measure(hooks, busy, 5000)
    plugin.uninstall()
    return out


async def submission(n: int, which: str) -> float:
    """Seconds to submit three roots per worker and their sums; `which`: stock, ours, or floor (nothing is decided)."""
    s = make_scheduler(n)
    plugin = PlacementPlugin(PlacementSettings(enabled=True, candidates=16))
    if which == "ours":
        await plugin.start(s)
        s.plugins[plugin.name] = plugin
    if which == "floor":
        idle = s.idle_task_count
        s.decide_worker_rootish_queuing_enabled = lambda: next(iter(idle), None)
    roots = [("load", i) for i in range(3 * n)]
    dsk = {k: Task(k, fn, k[1], _data_producer=True) for k in roots}
    for i in range(0, 3 * n, 4):
        dsk["sum", i] = Task(("sum", i), fn, *(TaskRef(k) for k in roots[i : i + 4]))
    order = dask.order.order(dsk=dsk)
    gc.collect()
    began = time.perf_counter()
    submit(s, dsk, order)
    for _ in range(3):
        await asyncio.sleep(0)  # the first deal
    seconds = time.perf_counter() - began
    busy = sum(len(ws.processing) for ws in s.workers.values())
    assert busy >= n, f"{busy} tasks are out on {n} workers"
    if which == "ours":
        assert not plugin.statistics()["fallbacks"], plugin.statistics()["fallbacks"]
        plugin.uninstall()
    await s.close()
    return seconds


async def submissions(n: int) -> dict[str, float]:
    out = {f"{which}_seconds": round(await submission(n, which), 3) for which in ("floor", "ours", "stock")}
    # What decisions take is the difference to the floor, which is known to a few percent.
    least = max(1e-3, NOISE * out["floor_seconds"])
    decided = {w: max(least, out[f"{w}_seconds"] - out["floor_seconds"]) for w in ("ours", "stock")}
    return {
        **out,
        "tasks": 3 * n + -(-3 * n // 4),
        "times_faster": round(out["stock_seconds"] / out["ours_seconds"], 1),
        "decisions_times_faster": round(decided["stock"] / decided["ours"], 1),
    }


def main() -> None:
    logging.getLogger("distributed").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("workers", type=int, nargs="*", default=[10, 100, 1000, 10_000], help="sizes of the cluster")
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    sizes = args.workers
    with dask.config.set({"distributed.scheduler.active-memory-manager.start": False}):
        cases = [{**asyncio.run(case(n)), "submit": asyncio.run(submissions(n))} for n in sizes]
    report = {
        **data.facts("one CPU core; a real scheduler with workers that exist only in its tables"),
        "benchmark": "placement_decide",
        "cases": cases,
    }
    print(json.dumps(report, indent=1))
    if args.out:
        print(data.write_json(args.out, report))


if __name__ == "__main__":
    main()
