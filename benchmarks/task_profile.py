"""Where does the time of an empty task go? Samples of the event loops of a scheduler and its workers, by part.

A timer of processor time interrupts each process every millisecond of it, and the stack of its main thread, which runs
the event loop, is looked at. A sample counts for the innermost line of this package on the stack, with *own* where that
line's function itself was at work (or a builtin that it called) and *under* where it had called code of others. What is
below none of our lines is ``stock``. Stock Dask under a wrapper of ours counts in *under* alone: an override that
passes on has nearly all of its time there.

``python -m benchmarks.task_profile --cases stock,gpurt --shape chains`` prints microseconds per task. It is for finding
out what to remove; `benchmarks.task_price` measures what it came to.
"""

from __future__ import annotations

import argparse
import collections
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

from benchmarks.task_price import CASES, SHAPES, launched, measured
from dask_gpurt.bench.tpch.clusters import close_all

if TYPE_CHECKING:
    from distributed import Client

#: processor time between two samples, in seconds
EVERY_SECONDS = 0.001


def begin(every: float) -> None:
    """Sample this process from now on. Runs in a scheduler or worker, on its main thread."""
    import gc
    import signal
    import sys
    import time

    counts: dict[tuple[str, str], int] = {}
    collected = [0.0, 0.0]

    def place(frame: Any) -> tuple[str, str]:
        inner = frame
        while frame is not None:
            name = frame.f_code.co_filename
            at = name.rfind("dask_gpurt")
            if at >= 0:
                where = f"{name[at + 11 : -3]}:{frame.f_code.co_name}"
                return where, "own" if frame is inner else "under"
            frame = frame.f_back
        code = inner.f_code
        idle = code.co_name in ("select", "_poll", "poll")
        return "idle" if idle else "stock", "own"

    def sampled(number: int, frame: Any) -> None:
        found = place(frame)
        counts[found] = counts.get(found, 0) + 1

    def collecting(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected[0] = time.perf_counter()
        else:
            collected[1] += time.perf_counter() - collected[0]

    signal.signal(signal.SIGPROF, sampled)
    gc.callbacks.append(collecting)
    signal.setitimer(signal.ITIMER_PROF, every, every)
    sys.modules["gpurt_task_profile"] = (counts, collected, collecting)  # type: ignore[assignment]


def end() -> tuple[dict[tuple[str, str], int], float]:
    """Stop, and return samples by (place, kind), and the seconds of garbage collection."""
    import gc
    import signal
    import sys

    signal.setitimer(signal.ITIMER_PROF, 0)
    noted: Any = sys.modules.pop("gpurt_task_profile")
    counts, collected, collecting = noted
    gc.callbacks.remove(collecting)
    return counts, collected[1]


def profiled(client: Client, shape: str, tasks: int, name: str) -> dict[str, Any]:
    """Samples of the scheduler and of all workers during one run, and what it cost."""
    client.run_on_scheduler(begin, EVERY_SECONDS)
    client.run(begin, EVERY_SECONDS)
    cost = measured(client, shape, tasks, name)
    scheduler, workers = client.run_on_scheduler(end), client.run(end).values()
    every: collections.Counter[tuple[str, str]] = collections.Counter()
    for counts, _ in workers:
        every.update(counts)
    return {
        "cost": cost,
        "scheduler": (collections.Counter(scheduler[0]), scheduler[1]),
        "workers": (every, sum(seconds for _, seconds in workers)),
    }


def show(case: str, runs: list[dict[str, Any]], tasks: int, most: int) -> None:
    """Print one case."""
    for side in ("scheduler", "workers"):
        n = tasks * len(runs)
        counts: collections.Counter[tuple[str, str]] = sum((r[side][0] for r in runs), collections.Counter())
        cost = sum(r["cost"][f"{side}_us"] for r in runs) / len(runs)
        samples = sum(c for (where, _), c in counts.items() if where != "idle") or 1
        each = cost / samples  # a timer may be late: the samples share what was used
        own = sum(c for (where, kind), c in counts.items() if kind == "own" and where not in ("idle", "stock"))
        collecting = sum(r[side][1] for r in runs) / n * 1e6
        print(f"{case} {side}: {cost:.0f} us a task, own lines {own * each:.1f}, collecting garbage {collecting:.1f}")
        rows = collections.Counter({k: c for k, c in counts.items() if k[0] not in ("idle", "stock")})
        for (where, kind), c in rows.most_common(most):
            print(f"    {c * each:6.1f} {kind:5} {where}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="stock,gpurt", help=f"of {', '.join(CASES)}")
    parser.add_argument("--shape", default="chains", choices=list(SHAPES))
    parser.add_argument("--tasks", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--most", type=int, default=40, help="lines printed")
    o = parser.parse_args()
    for case in o.cases.split(","):
        if case not in CASES:
            parser.error(f"{case!r} is unknown; there are {', '.join(CASES)}, separated by commas")
    with tempfile.TemporaryDirectory() as scratch:
        for case in o.cases.split(","):
            cluster = launched(case, os.path.join(scratch, case.replace(" ", "-")))
            try:
                cluster.join()
                measured(cluster.client, o.shape, o.tasks, "warm")
                runs = [profiled(cluster.client, o.shape, o.tasks, f"p{i}-{time.time()}") for i in range(o.runs)]
            finally:
                close_all([cluster])
            show(case, runs, o.tasks, o.most)


if __name__ == "__main__":
    main()
