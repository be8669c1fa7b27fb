"""Commands that read recordings and measure."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os

import click

from dask_gpurt.cli.base import Number, gpurt
from dask_gpurt.errors import GpurtError


@gpurt.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--chrome", type=click.Path(dir_okay=False), help="Write Chrome trace events (for ui.perfetto.dev) here.")
@click.option("--damaged", is_flag=True, help="Take what is good of a file that was cut off or damaged.")
def trace(file: str, chrome: str | None, damaged: bool) -> None:
    """Print what a trace FILE holds.

    See dask_gpurt.record and gpurt.trace.path for how to make one.
    """
    from dask_gpurt.observe.trace.chrome import write
    from dask_gpurt.observe.trace.reader import Trace
    from dask_gpurt.observe.trace.summary import summary

    try:
        loaded = Trace.load(file, damaged=damaged)
    except (GpurtError, OSError) as e:
        raise click.ClickException(str(e)) from e
    click.echo(summary(loaded))
    if chrome is not None:
        if os.path.exists(chrome) and os.path.samefile(chrome, file):
            raise click.ClickException(
                f"--chrome is {chrome!r}, which is the trace itself. Remedy: the name of another file"
            )
        try:
            with open(chrome, "w", encoding="utf-8") as out:
                write(loaded, out)
        except OSError as e:
            raise click.ClickException(str(e)) from e
        click.echo(f"Wrote {chrome}; open it at https://ui.perfetto.dev or chrome://tracing")


@gpurt.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--policy", default="stock,inf,gpurt", show_default=True, help="Comma-separated; also package.module:Class."
)
@click.option("--workers", type=click.IntRange(1), help="Instead of as many as recorded.")
@click.option("--threads", type=click.IntRange(1), help="Of each worker, instead of as recorded.")
@click.option("--links", "link", help="1GbE, 10GbE, 25GbE, 100GbE, IB200, or bytes/s@latency such as 1.2GB@0.5ms.")
@click.option("--seed", default=0, show_default=True)
@click.option("--baseline", help="Policy that the others are compared with; the first, unless given.")
@click.option(
    "--gate",
    type=Number(0, min_open=True),
    help="Exit with 1 when a makespan is more than this times the baseline's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def replay(
    file: str,
    policy: str,
    workers: int | None,
    threads: int | None,
    link: str | None,
    seed: int,
    baseline: str | None,
    gate: float | None,
    as_json: bool,
) -> None:
    """Compare policies on a trace, without a cluster.

    The trace FILE is replayed on a simulated cluster under each policy. See dask_gpurt.record and gpurt.trace.path for
    how to make a trace.
    """
    from dask_gpurt.observe.trace.reader import Trace
    from dask_gpurt.simulate import replay as simulated
    from dask_gpurt.simulate.simulation import SimulationError

    names = [name.strip() for name in policy.split(",") if name.strip()]
    if not names or (baseline is not None and baseline not in names):
        raise click.ClickException(f"--policy is {policy!r}; it needs at least one policy, and the baseline among them")
    try:
        trace = Trace.load(file)
        path = None if link is None else simulated.links(link)
        runs = [simulated.replay(trace, n, workers=workers, threads=threads, link=path, seed=seed) for n in names]
    except (GpurtError, SimulationError, OSError) as e:
        raise click.ClickException(str(e)) from e
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(r) | {"error": r.error} for r in runs], indent=2, default=str))
    else:
        click.echo(simulated.table(runs, baseline))
    base = next(r for r in runs if r.policy == (baseline or names[0]))
    worse = [r.policy for r in runs if gate is not None and r.makespan_seconds > gate * base.makespan_seconds]
    if worse:
        raise click.ClickException(f"more than {gate} times the makespan of {base.policy}: {', '.join(worse)}")


@gpurt.group(short_help="Measure this machine with and without the extension.")
def bench() -> None:
    """Measure this machine with and without the extension. Needs the extra: pip install 'dask-gpurt[bench]'."""


@bench.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Run TPC-H on stock Dask and on the extension.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tpch(arguments: tuple[str, ...]) -> None:
    """Run TPC-H on stock Dask and on the extension, every answer checked by DuckDB.

    Starts processes on this machine, and stops them. Writes under ./out. --help lists the options. Exit code 1 when an
    answer differs or a query failed.
    """
    missing = [name for name in ("duckdb", "pyarrow", "pandas") if importlib.util.find_spec(name) is None]
    if missing and not {"-h", "--help"} & set(arguments):
        raise click.ClickException(
            f"{', '.join(missing)} not installed, which the benchmark needs. Remedy: pip install 'dask-gpurt[bench]'"
        )
    from dask_gpurt.bench.tpch.cli import main

    raise SystemExit(main(arguments))


@bench.command("compare")
@click.argument("before", type=click.Path(exists=True, dir_okay=False))
@click.argument("after", type=click.Path(exists=True, dir_okay=False))
def compare_files(before: str, after: str) -> None:
    """Compare two runs, query by query.

    BEFORE and AFTER are what `bench tpch --json` wrote. Exit code 1 when a query is slower in AFTER by more than the
    noise of both runs, or fails there only.
    """
    from dask_gpurt.bench.compare import changes, load

    try:
        found = changes(load(before), load(after))
    except ValueError as e:
        raise click.ClickException(str(e)) from e
    for change in found:
        click.echo(str(change))
    worse = [change for change in found if change.worse]
    click.echo(f"{len(worse)} of {len(found)} worse, {sum(change.better for change in found)} better, beyond the noise")
    if worse:
        raise SystemExit(1)
