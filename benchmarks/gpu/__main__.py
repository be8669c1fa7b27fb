"""Carry out calls of `plan`, or single cases; each case in a process of its own with a limit of time.

    python -m benchmarks.gpu --call 2 --out OUT                    on a GPU; exit 3 where there is none
    python -m benchmarks.gpu --case oom:storm --on stand-in        a rehearsal without one

What a case found, why it failed, or why it could not run here, is a line as it comes, and one JSON file per call,
``call-2.json``, written again after each case: with hardware, driver, versions, date and what it ran on. Exit: 0
all cases ran and found what they must; 1 one failed; 4 none failed, but some could not run here.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from benchmarks import data
from benchmarks.gpu import runs, shuffle
from benchmarks.gpu.plan import CALLS, Case
from benchmarks.gpu.target import NotHere, Target, get

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


#: cases at a time that do not measure: each is a process or three, and waits for imports most of the time
SIDE_BY_SIDE = max(1, (os.cpu_count() or 1) // 2)


def here(name: str, target: Target) -> dict[str, Any]:
    """Run a case in this process. "problem" in what it returns says what it must not have found."""
    experiment, _, what = name.partition(":")
    module = importlib.import_module(f"benchmarks.gpu.{experiment}")
    target.exercised_on()
    start = time.perf_counter()
    try:
        found: dict[str, Any] = module.run(what, target)
    except NotHere as e:
        return {"not_here": str(e)}
    return {**found, "wall_seconds": round(time.perf_counter() - start, 3)}


def outcome(result: dict[str, Any]) -> str:
    """One word for a result."""
    if "failed" in result or result.get("problem"):
        return "failed"
    return "not here" if "not_here" in result else "ok"


def carry_out(
    cases: Sequence[Case], run: Callable[[Case], dict[str, Any]], seconds: float, after: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """Results in the order of their ends; a case that would pass `seconds` is not begun, and says so.

    Cases that are not `alone` run side by side, `SIDE_BY_SIDE` at a time, before those that are.
    """
    start = time.monotonic()
    out: list[dict[str, Any]] = []
    turn = threading.Lock()

    def one(case: Case) -> None:
        left = seconds - (time.monotonic() - start)
        result = run(case) if left > case.seconds / 2 else {"failed": f"not begun, {left:.0f} s were left"}
        with turn:
            out.append({"case": str(case), "outcome": outcome(result), **result})
            shown = json.dumps({k: v for k, v in out[-1].items() if k != "digests"}, default=str)
            print(shown[: 300 if out[-1]["outcome"] == "ok" else 700], flush=True)
            after(out)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        list(threads.map(one, [case for case in cases if not case.alone]))
    for case in cases:
        if case.alone:
            one(case)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--call", type=int, choices=sorted(CALLS))
    what.add_argument("--case", action="append", help="EXPERIMENT:NAME; several times")
    what.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--on", choices=("gpu", "stand-in"), default="gpu")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it")
    parser.add_argument("--out", default=os.path.join(data.OUT, "gpu"), help="folder for the results")
    args = parser.parse_args(argv)
    target = get(args.on)
    if args.here:
        faulthandler.enable()
        print(json.dumps(here(args.here, target), default=str))
        return 0
    planned = CALLS[args.call] if args.call is not None else [_named(parser, name) for name in args.case]
    name = "cases" if args.call is None else f"call-{args.call}"
    if args.on == "gpu":
        probed = runs.apart(["-m", "benchmarks.gpu", "--here", "machine:name"], 60, target.environment("machine"))
        if "failed" in probed:
            print(probed["failed"], file=sys.stderr)
            return 3
        exercised = probed["name"]
    else:
        exercised = target.exercised_on()
    header = {
        **data.facts(exercised),
        "gpu_versions": data.versions(runs.PACKAGES),
        "on": args.on,
        "gpu": runs.hardware(),
    }
    path = os.path.join(args.out, f"{name}.json")

    def run(case: Case) -> dict[str, Any]:
        this = ["-m", "benchmarks.gpu", "--on", args.on, "--here", str(case)]
        return runs.apart(this, case.seconds, target.environment(case.experiment))

    def write(results: list[dict[str, Any]]) -> None:
        shown = [{k: v for k, v in r.items() if k != "digests"} for r in results]
        unlike = shuffle.agree(results)
        data.write_json(
            path, {**header, "planned": [str(case) for case in planned], "partitions_unlike": unlike, "cases": shown}
        )

    results = carry_out(planned, run, args.seconds, write)
    words = [r["outcome"] for r in results]
    if unlike := shuffle.agree(results):
        words.append("failed")
        print(f"partitions are not those of the first system: {', '.join(unlike)}")
    print(f"{path}: {len(words)} cases, {words.count('ok')} ok, {words.count('failed')} failed, "
          f"{words.count('not here')} could not run here")  # fmt: skip
    return 1 if "failed" in words else 4 if "not here" in words else 0


def _named(parser: argparse.ArgumentParser, name: str) -> Case:
    known = {str(case): case for cases in CALLS.values() for case in cases}
    if name not in known:
        parser.error(f"--case is {name!r}, must be one of {', '.join(known)}")
    return known[name]


if __name__ == "__main__":
    sys.exit(main())
