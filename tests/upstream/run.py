"""Runs the chosen upstream files stock and with the extension, compares, and writes ``summary.json`` and
``summary.md``.

Run by the Python whose dask and distributed are under test; ``ci/upstream.sh`` prepares one and calls this.
Exit code: 0, every difference is explained; 1, something is not (see `report`); 2, the run could not start.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import signal
import sys
import time
from pathlib import Path

from . import activity, compare, isolate, runner, suites
from .report import Report, SuiteRun

HERE = Path(__file__).resolve().parent
#: With more unlisted differences than this none is run again: each costs up to four processes.
MANY = 40


def say(text: str) -> None:
    """Progress, for the reader of a CI log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="upstream", description="Upstream suites, stock and with the extension")
    p.add_argument("--distributed-src", type=Path, help="checkout of dask/distributed at the installed version")
    p.add_argument("--only", help="run files whose path contains this; * stands for anything, several with commas")
    p.add_argument("--wide", action="store_true", help="also the files that are not about what the extension replaces")
    p.add_argument("--runslow", action="store_true", help="also run upstream's slow tests")
    p.add_argument("--out", type=Path, required=True, help="folder for results")
    p.add_argument("--extension", default="dask_gpurt.preload", help="preload module, default %(default)s")
    p.add_argument("--roles", default="scheduler,worker", help="which servers load it, default %(default)s")
    p.add_argument("--skip-stock", action="store_true", help="reuse the stock results in --out where there are any")
    p.add_argument("--jobs", type=int, default=1, help="files run at the same time, default %(default)s")
    p.add_argument("--limit", type=float, default=0, help="seconds for one file, default 900, with --runslow 1800")
    p.add_argument("--differences", type=Path, default=HERE / "differences.toml", help="list of allowed differences")
    return p.parse_args(argv)


def choose(args: argparse.Namespace, notes: list[str]) -> list[suites.Suite]:
    """The files to run. Raises ValueError where the checkout does not fit what is installed."""
    chosen = []
    for suite in suites.select(args.only, args.wide):
        if suite.needs and importlib.util.find_spec(suite.needs) is None:
            notes.append(f"{suite.path} was not run: all its tests need {suite.needs}, which is not installed.")
        else:
            chosen.append(suite)
    installed = suites.versions()["distributed"]
    if args.distributed_src is not None:
        version = suites.source_version(args.distributed_src)
        if version != installed:
            raise ValueError(
                f"{args.distributed_src} is distributed {version}, but {installed} is installed for {sys.executable}. "
                f"Tests fit only their own version: use a checkout of tag {installed}, or install "
                f"dask=={version} distributed=={version} (--dask-version {version})."
            )
        if not chosen:
            raise ValueError(f"nothing left to run. {notes[-1]}")
        return chosen
    left_out = [s for s in chosen if s.package == "distributed"]
    if left_out:
        notes.append(
            f"{len(left_out)} files of distributed were not run: its wheel has no tests. Give --distributed-src a "
            f"checkout of github.com/dask/distributed at tag {installed}."
        )
    chosen = [s for s in chosen if s.package != "distributed"]
    if not chosen:
        raise ValueError(f"nothing left to run. {notes[-1]}")
    return chosen


def _same_conditions(out: Path, conditions: dict[str, object]) -> bool:
    """Whether the stock results in ``out`` were made under these conditions."""
    path = out / "stock" / "conditions.json"
    return path.exists() and json.loads(path.read_text()) == conditions


def main(argv: list[str] | None = None) -> int:
    """See the module; returns the exit code."""
    start = time.monotonic()
    notes: list[str] = []
    args = _arguments(argv)
    out = args.out.resolve()
    if args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs}: at least 1 file must run at a time")
    chosen = choose(args, notes)
    versions = suites.versions()
    entries = compare.load_entries(args.differences, versions["distributed"], args.extension)
    if importlib.util.find_spec("crick") is not None:
        notes.append("crick is installed: distributed then keeps digests for every span, and memory tests may fail.")

    isolation = isolate.probe()
    if isolation["network"] != "own":
        notes.append(
            f"No network namespace ({isolation['network']}): tests that need fixed ports may fail, jobs set to 1."
        )
        args.jobs = 1
    if isolation["rights"].startswith("root"):
        notes.append(f"Running as {isolation['rights']}: tests that need a read-only folder may fail.")

    if settings := runner.kept_settings():
        notes.append(f"Settings of the extension from the environment, in both modes: {', '.join(settings)}.")

    place = runner.Place(
        out=out,
        root=HERE.parent.parent,
        own_network=isolation["network"] == "own",
        runslow=args.runslow,
        limit_seconds=args.limit or (1800 if args.runslow else 900),
    )
    stock = runner.Mode("stock", None)
    ours = runner.Mode("extension", args.extension, args.roles)
    for package in {s.package for s in chosen}:
        src = args.distributed_src.resolve() if package == "distributed" else None
        suites.make_overlay(package, place.overlay(package), HERE / "pytest-dask.ini", src)
    runner.make_support(place)

    keywords = {s.path: s.keyword for s in suites.SUITES}
    conditions: dict[str, object] = {
        "versions": versions,
        "python": sys.version,
        "runslow": args.runslow,
        "keywords": keywords,
    }
    same = _same_conditions(out, conditions)
    reusable = args.skip_stock and same
    if args.skip_stock and not reusable:
        notes.append("The stock results in --out are missing or of other versions or options: stock was run again.")
    if not same:  # nobody may reuse these later
        for old in (out / "stock").glob("*.*"):
            old.unlink()
    reused = {s for s in chosen if reusable and place.junit(stock, s).exists()}
    (out / "stock").mkdir(parents=True, exist_ok=True)
    (out / "stock" / "conditions.json").write_text(json.dumps(conditions))

    todo = [(m, s) for s in sorted(chosen, key=lambda s: -s.about_seconds) for m in (stock, ours)]
    todo = [(m, s) for m, s in todo if m is ours or s not in reused]
    done: dict[tuple[str, suites.Suite], tuple[dict[str, compare.Result], float | None]] = {}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(runner.run_file, place, m, s): (m, s) for m, s in todo}
        try:
            for future in concurrent.futures.as_completed(futures):
                mode, suite = futures[future]
                results, seconds = done[mode.name, suite] = future.result()
                say(f"{mode.name:9} {suite.path}: {compare.counts(results)} in {seconds:.0f} s")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            runner.end_all()
            raise
    for suite in reused:
        done[stock.name, suite] = compare.read_junit(place.junit(stock, suite)), None

    runs, found, where, ran = [], [], {}, []
    for suite in chosen:
        (before, a), (after, b) = done[stock.name, suite], done[ours.name, suite]
        times = {stock.name: a, ours.name: b}
        runs.append(SuiteRun(suite, before, after, activity.read(place.log(ours, suite)), times))
        for d in compare.differences(before, after):
            found.append(d)
            where[d.test] = suite
        ran += [*before, *after]

    def rerun(d: compare.Difference) -> tuple[str, str]:
        pair = []
        for mode in (stock, ours):
            folder = out / "rerun" / mode.name
            results, _ = runner.run_file(place, mode, where[d.test], d.test, folder)
            if compare.is_crash(results):
                pair.append("crashed")
            else:
                pair.append(results.get(d.test, compare.MISSING).outcome)
        say(f"again     {d.test}: stock {pair[0]}, extension {pair[1]}")
        return pair[0], pair[1]

    unlisted = sum(not any(e.allows(d) for e in entries) for d in found)
    if unlisted > MANY:
        notes.append(f"{unlisted} unlisted differences are too many to be chance: none was run again.")
    verdict = compare.judge(found, entries, ran, rerun if unlisted <= MANY else None)
    report = Report(args.extension, versions, isolation, time.monotonic() - start, runs, verdict, notes)
    (out / "summary.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    (out / "summary.md").write_text(report.markdown() + "\n")
    say("\n" + report.markdown())
    return 0 if report.ok() else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("upstream: ended by SIGTERM"))
    try:
        sys.exit(main())
    except ValueError as e:
        sys.stderr.write(f"upstream: {e}\n")
        sys.exit(2)
