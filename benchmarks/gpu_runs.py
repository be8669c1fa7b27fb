"""Runs of the GPU benchmarks: each in a process of its own with a limit of time, so that a fault ends only itself."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks import data

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: distributions that decide what a GPU does, of any CUDA version
PACKAGES = ("rmm-cu13", "rmm-cu12", "cudf-cu13", "cudf-cu12", "dask-cuda", "cupy-cuda13x", "ucxx-cu13", "ucxx-cu12")

#: system, workload, size: what one run is
Cell = tuple[str, str, int]


def apart(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a command in a process of its own; what its last line says as JSON, or "failed" and why."""
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its workers, too, end with it
    ) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {"failed": f"not done within {seconds:g} s"}
    lines = out.splitlines()
    if process.returncode or not lines:
        last = (errors.strip().splitlines() or ["nothing was said"])[-1]
        return {"failed": f"exit {process.returncode}: {last[:300]}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def plan(systems: Mapping[str, Sequence[str]], sizes: Sequence[int], runs: int) -> list[Cell]:
    """The runs in their order: a round of everything before the next, and systems in turns.

    Parameters
    ----------
    systems
        Workload to the systems that can do it.
    sizes
        Of each workload.
    runs
        Rounds.
    """
    out: list[Cell] = []
    for r in range(runs):
        for size in sizes:
            for workload, able in systems.items():
                out += [(system, workload, size) for system in (able if r % 2 == 0 else able[::-1])]
    return out


def carry_out(
    cells: Sequence[Cell],
    run: Callable[[Cell], dict[str, Any]],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """Run what fits into `seconds`: none begins that would pass them, had it to take as long as the longest so far."""
    start, longest = clock(), 0.0
    out: list[dict[str, Any]] = []
    for cell in cells:
        began = clock()
        if began - start + longest > seconds:
            break
        system, workload, size = cell
        out.append({"system": system, "workload": workload, "size": size, **run(cell)})
        longest = max(longest, clock() - began)
        print(json.dumps({k: v for k, v in out[-1].items() if k not in ("device", "digests")}), file=sys.stderr)
    return out


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median seconds by workload, size and system, or why there are none."""
    out: dict[str, Any] = {}
    for run in runs:
        place = out.setdefault(f"{run['workload']} x{run['size']}", {}).setdefault(run["system"], [])
        place.append(run.get("seconds"))
    return {
        name: {
            system: statistics.median(s) if s and None not in s else f"failed {s.count(None)} of {len(s)}"
            for system, s in systems.items()
        }
        for name, systems in out.items()
    }


def publish(report: Mapping[str, Any], exercised_on: str, out: str | None) -> None:
    """Print the summary of a report; write it to `out`, with hardware, versions and date."""
    print(json.dumps(report["summary"], indent=1))
    print(f"{len(report['runs'])} of {report['planned_runs']} runs were done")
    if out:
        print(data.write_json(out, {**data.facts(exercised_on), "gpu_versions": data.versions(PACKAGES), **report}))
