"""``dask gpurt status | explain | where | report | trace | replay | enable | disable``"""

from __future__ import annotations

import ast
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from dask_gpurt._version import __version__
from dask_gpurt.errors import GpurtError

if TYPE_CHECKING:
    from distributed import Client


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dask-gpurt")
def gpurt() -> None:
    """dask-gpurt: placement, memory tiers and shuffles."""


@gpurt.command()
@click.argument("address")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for the scheduler, and for workers.")
def status(address: str, as_json: bool, timeout: float) -> None:
    """Print what is installed on the cluster at ADDRESS (tcp://host:port) and what it has done.

    Exit code 1 when the extension is not installed there.
    """
    from dask_gpurt.client.api import status as get_status

    with _connect(address, timeout) as client:
        snapshot = get_status(client, timeout=timeout)
    _print(snapshot, as_json)
    if not snapshot.installed:
        raise SystemExit(1)


@gpurt.command()
@click.argument("address")
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for the scheduler.")
def explain(address: str, key: str, as_json: bool, timeout: float) -> None:
    """Print why the task KEY ran where it ran, on the cluster at ADDRESS (tcp://host:port).

    A key that is a tuple is given as Python writes it: "('x-1234', 0)". Exit code 1 when nothing is known about it.
    """
    from dask_gpurt.client.questions import explain as ask

    with _connect(address, timeout) as client:
        try:
            answer = ask(client, _key(key))
        except GpurtError as e:
            raise click.ClickException(str(e)) from e
    _print(answer, as_json)


@gpurt.command()
@click.argument("address")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for the scheduler.")
def where(address: str, keys: tuple[str, ...], as_json: bool, timeout: float) -> None:
    """Print which workers of the cluster at ADDRESS (tcp://host:port) hold each KEY, in memory or on disk.

    A key that is a tuple is given as Python writes it: "('x-1234', 0)". Exit code 1 when none of them is known.
    """
    from dask_gpurt.client.questions import where as ask

    with _connect(address, timeout) as client:
        try:
            answer = ask(client, [_key(key) for key in keys])
        except GpurtError as e:
            raise click.ClickException(str(e)) from e
    _print(answer, as_json)


@gpurt.command()
@click.argument("address")
@click.option("--out", default="dask-gpurt-report.html", show_default=True, help="The HTML file to write.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for the scheduler.")
def report(address: str, out: str, timeout: float) -> None:
    """Write an HTML report about all that the cluster at ADDRESS (tcp://host:port) did since its start.

    Prints the advice. Exit code 1 when the extension is not installed there.
    """
    from dask_gpurt.client.reports import report_now
    from dask_gpurt.observe.report.findings import advise

    with _connect(address, timeout) as client:
        try:
            run = report_now(out, client)
        except (GpurtError, OSError) as e:
            raise click.ClickException(str(e)) from e
    for finding in advise(run):
        click.echo(f"{finding.share:6.1%}  {finding.cause}: {finding.text} {finding.remedy}")
    click.echo(f"Wrote {out}")


@gpurt.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--chrome", type=click.Path(dir_okay=False), help="Write Chrome trace events (for ui.perfetto.dev) here.")
@click.option("--damaged", is_flag=True, help="Take what is good of a file that was cut off or damaged.")
def trace(file: str, chrome: str | None, damaged: bool) -> None:
    """Print what the trace FILE holds; see dask_gpurt.record and gpurt.trace.path."""
    from dask_gpurt.observe.trace.chrome import write
    from dask_gpurt.observe.trace.reader import Trace
    from dask_gpurt.observe.trace.summary import summary

    try:
        loaded = Trace.load(file, damaged=damaged)
    except GpurtError as e:
        raise click.ClickException(str(e)) from e
    click.echo(summary(loaded))
    if chrome is not None:
        with open(chrome, "w", encoding="utf-8") as out:
            write(loaded, out)
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
    type=click.FloatRange(0, min_open=True),
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
    """Replay the trace FILE under several policies on a simulated cluster, and print them side by side.

    Needs no cluster. See dask_gpurt.record and gpurt.trace.path for how to make a trace.
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
    except (GpurtError, SimulationError) as e:
        raise click.ClickException(str(e)) from e
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(r) | {"error": r.error} for r in runs], indent=2, default=str))
    else:
        click.echo(simulated.table(runs, baseline))
    base = next(r for r in runs if r.policy == (baseline or names[0]))
    worse = [r.policy for r in runs if gate is not None and r.makespan_seconds > gate * base.makespan_seconds]
    if worse:
        raise click.ClickException(f"more than {gate} times the makespan of {base.policy}: {', '.join(worse)}")


def _connect(address: str, timeout: float) -> Client:
    from distributed import Client  # late: `dask --help` must not pay for it

    try:
        return Client(address, timeout=timeout, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as e:
        raise click.ClickException(f"no scheduler answers at {address!r} within {timeout} s ({e})") from e


def _print(answer: Any, as_json: bool) -> None:
    click.echo(json.dumps(answer.to_dict(), indent=2, default=str) if as_json else repr(answer))


def _key(text: str) -> Any:
    """A key as it was typed: tuples as Python writes them, all else is text."""
    if text.startswith("("):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
        if isinstance(value, tuple):
            return value
    return text


@gpurt.command()
def enable() -> None:
    """Load the extension in every scheduler and worker this user starts, unless they are given other preloads.

    Writes a small YAML file into Dask's configuration directory ($DASK_CONFIG, else ~/.config/dask).
    """
    from dask_gpurt.client import switch

    try:
        path = switch.enable()
    except GpurtError as e:
        raise click.ClickException(str(e)) from e
    click.echo(f"Enabled for this user: wrote {path}")
    click.echo(
        "A --preload on a command line wins over it, also that of dask-gateway or LocalCluster(preload=...). "
        "Remedy: name dask_gpurt.load there as well"
    )


@gpurt.command()
def disable() -> None:
    """Undo `enable`. Running clusters are not touched (see dask_gpurt.detach)."""
    from dask_gpurt.client import switch

    path = switch.disable()
    click.echo(f"Nothing to do: there is no {switch.file()}" if path is None else f"Disabled: removed {path}")
