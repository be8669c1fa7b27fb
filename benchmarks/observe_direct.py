"""What observation costs by itself, in microseconds a task: the code that a task passes through, without the rest.

`observe_overhead` compares whole clusters, in which one per cent is less than the noise of a small machine. Here the
hooks are called in a loop as the scheduler and a worker call them for one task: the stall ledger (five transitions),
the trace recorder (the same), the history of runs (a graph whose every key is asked for, its summary included), the
meter of a worker's slots (two changes, a start and an end). The least of `--runs`
loops counts, since whatever else runs can only add. Compare with the time that a task takes in a cluster: a thousand
tiny tasks take a second or more, a millisecond each.

``python -m benchmarks.observe_direct`` writes benchmarks/results/observe_direct.json.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import tempfile
import time
import types
from collections import deque
from typing import TYPE_CHECKING, Any

from benchmarks.data import RESULTS, facts, write_json
from dask_gpurt.observe.collect.scheduler import LedgerPlugin
from dask_gpurt.observe.collect.slots import SlotMeter
from dask_gpurt.observe.runs.recorder import RunRecorder
from dask_gpurt.observe.trace.recorder import TraceRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

TASKS = 5000
#: per task, on the scheduler and on the worker; one per cent of the millisecond that a tiny task takes
GOAL_MICROSECONDS = 10.0


class _Scheduler:
    """As much of a scheduler as the hooks look at: two workers with one thread."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {
            address: types.SimpleNamespace(
                address=address, name=address, host=address, nthreads=1, processing={}, long_running=set(),
                memory_limit=1 << 30, metrics={},
            )
            for address in ("tcp://a:1", "tcp://b:1")
        }  # fmt: skip
        self.queued: deque[Any] = deque()
        self.unrunnable: set[Any] = set()
        self.handlers: dict[str, Any] = {}
        self.plugins: dict[str, Any] = {}
        self.task_prefixes: dict[str, Any] = {}
        self.cumulative_worker_metrics: dict[Any, float] = {}
        self.bandwidth = 1e8
        self.tasks: dict[Any, Any] = {}
        prefix = types.SimpleNamespace(name="f")
        addresses = list(self.workers)
        for i in range(TASKS):
            self.tasks[("f", i)] = types.SimpleNamespace(
                key=("f", i), prefix=prefix, processing_on=self.workers[addresses[i % 2]], state="processing",
                run_spec=types.SimpleNamespace(), dependencies=(), priority=(0, 0, i), who_has=(), nbytes=8,
                worker_restrictions=None, host_restrictions=None, resource_restrictions=None, actor=False,
                _queueable=True, loose_restrictions=False,
            )  # fmt: skip


def _life_of_tasks(plugin: Any, scheduler: _Scheduler) -> None:
    """The transitions of every task, as Dask announces them."""
    startstops = [{"action": "compute", "start": 0.0, "stop": 1.0}]
    for key, ts in scheduler.tasks.items():
        ws = ts.processing_on
        plugin.transition(key, "released", "waiting", stimulus_id="x")
        ws.processing[key] = 1
        plugin.transition(key, "waiting", "processing", stimulus_id="x")
        del ws.processing[key]
        plugin.transition(
            key, "processing", "memory", stimulus_id="x", worker=ws.address, startstops=startstops, nbytes=8
        )
        plugin.transition(key, "memory", "released", stimulus_id="x")
        plugin.transition(key, "released", "forgotten", stimulus_id="x")


class _Nothing:
    """A plugin as Dask's base class is: what calling costs anyway."""

    def transition(self, key: Any, start: Any, finish: Any, *args: Any, stimulus_id: str, **kwargs: Any) -> None:
        pass


def nothing() -> float:
    scheduler = _Scheduler()
    began = time.perf_counter()
    _life_of_tasks(_Nothing(), scheduler)
    return time.perf_counter() - began


def ledger(*, history: bool = False) -> float:
    scheduler = _Scheduler()
    plugin = LedgerPlugin()
    plugin.attach(scheduler)
    runs = None
    if history and plugin.ledger is not None:
        runs = plugin.ledger.observer = RunRecorder(scheduler, plugin.ledger)
    began = time.perf_counter()
    if runs is not None:
        plugin.update_graph(scheduler, client="c", keys=set(scheduler.tasks), annotations={})
    _life_of_tasks(plugin, scheduler)
    if runs is not None and len(runs.headlines()) != 1:
        raise RuntimeError(f"the history did not do its work: {runs.statistics()}")
    seconds = time.perf_counter() - began
    if plugin.ledger is None or plugin.ledger.errors or plugin.ledger.history.tasks_seen != TASKS:
        raise RuntimeError(f"the ledger did not do its work: {plugin.statistics()}")
    return seconds


def recorder() -> float:
    scheduler = _Scheduler()
    with tempfile.TemporaryDirectory() as folder:
        plugin = TraceRecorder(os.path.join(folder, "t"))
        # `open` starts a timer, which wants an event loop.
        plugin._writer = _Sink()  # type: ignore[assignment]
        plugin.scheduler = scheduler
        for ws in scheduler.workers.values():
            plugin._worker(ws)
        began = time.perf_counter()
        plugin.update_graph(scheduler, client="c", keys=list(scheduler.tasks), tasks=list(scheduler.tasks))
        _life_of_tasks(plugin, scheduler)
        seconds = time.perf_counter() - began
        if plugin.errors:
            raise RuntimeError(f"the recorder failed: {plugin.last_error}")
        return seconds


class _Sink:
    """Takes blocks, as the writer's thread does."""

    records = lost = 0

    def put(self, block: list[Any]) -> None:
        self.records += len(block)


def meter() -> float:
    slots = SlotMeter(1)
    began = time.perf_counter()
    for i in range(TASKS):
        slots.state(1, 1, paused=False, waiting=0, constrained=0)
        slots.ended(slots.started(i), 0.001)
        slots.state(1, 0, paused=False, waiting=0, constrained=0)
    return time.perf_counter() - began


def least(work: Callable[[], float], runs: int) -> float:
    """Microseconds per task."""
    gc.disable()
    try:
        return 1e6 * min(work() for _ in range(runs)) / TASKS
    finally:
        gc.enable()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--out", default=os.path.join(RESULTS, "observe_direct.json"))
    o = parser.parse_args()
    base, alone = least(nothing, o.runs), least(ledger, o.runs)
    told = {
        "stall ledger, on the scheduler": alone - base,
        "history of runs, on the scheduler": least(functools.partial(ledger, history=True), o.runs) - alone,
        "trace recorder, on the scheduler": least(recorder, o.runs) - base,
        "slot meter, on the worker": least(meter, o.runs),
    }
    for name, microseconds in told.items():
        print(f"{name}: {microseconds:.1f} us a task")
    described = {"goal_microseconds": GOAL_MICROSECONDS, "tasks": TASKS, "microseconds_per_task": told}
    write_json(o.out, {**facts("one CPU core, no cluster, no GPU"), **described})
    return 0 if all(microseconds <= GOAL_MICROSECONDS for microseconds in told.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
