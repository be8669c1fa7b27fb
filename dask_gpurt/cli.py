"""``dask gpurt``: ask a cluster, check nodes, look at traces, measure, load the extension for a user."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import re
import time
from typing import TYPE_CHECKING, Any

import click
import dask.config

from dask_gpurt._version import __version__
from dask_gpurt.errors import GpurtError, NoAnswer
from dask_gpurt.model.safe_mode import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable

_EXAMPLES = """\b
Examples:
  dask gpurt status tcp://10.0.0.1:8786
  dask gpurt status -v --timeout 30 tcp://10.0.0.1:8786
  dask gpurt top tcp://10.0.0.1:8786
  dask gpurt explain tcp://10.0.0.1:8786 "('sum-1234', 0)"
  dask gpurt where tcp://10.0.0.1:8786 x-1234 y-5678
  dask gpurt report tcp://10.0.0.1:8786 --out run.html
  dask gpurt report tcp://10.0.0.1:8786 --run -1
  dask gpurt compare tcp://10.0.0.1:8786 -2 -1
  dask gpurt status tls://10.0.0.1:8786 --tls-ca-file ca.pem --tls-cert me.pem --tls-key me.key
  DASK_SCHEDULER_ADDRESS=tcp://10.0.0.1:8786 dask gpurt status
  dask gpurt doctor
  dask gpurt doctor tcp://10.0.0.1:8786 --json
  dask gpurt audit --backend cpu
  dask gpurt diagnose tcp://10.0.0.1:8786
  dask gpurt hold tcp://10.0.0.1:8786 worker-7 --why "fan failed"
  dask gpurt release tcp://10.0.0.1:8786 worker-7
  dask gpurt replay run.trace --policy stock,gpurt --workers 64
  dask gpurt bench tpch --scale 1 --runs 5 --json after.json
  dask gpurt bench compare before.json after.json

ADDRESS may be left out where DASK_SCHEDULER_ADDRESS is set, or scheduler-address
in Dask's configuration.
"""

#: of a run
_NUMBER = re.compile(r"-?\d+")


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXAMPLES)
@click.version_option(__version__, prog_name="dask-gpurt")
def gpurt() -> None:
    """dask-gpurt: placement, memory tiers and shuffles."""


def _asks(command: Callable[..., None]) -> Callable[..., None]:
    """A command that asks a cluster: its options, and one line for whatever keeps it from an answer."""

    @functools.wraps(command)
    def run(tls_ca_file: str | None, tls_cert: str | None, tls_key: str | None, **kwargs: Any) -> None:
        given = {"ca-file": tls_ca_file, "client.cert": tls_cert, "client.key": tls_key}
        with dask.config.set({f"distributed.comm.tls.{key}": path for key, path in given.items() if path}):
            try:
                command(**kwargs)
            except (GpurtError, OSError) as e:
                raise click.ClickException(" ".join(str(e).split())) from e

    file = click.Path(exists=True, dir_okay=False, resolve_path=True)
    for option in (
        click.option("--tls-key", type=file, help="Private key of that certificate, in PEM format."),
        click.option("--tls-cert", type=file, help="Certificate of this client, in PEM format."),
        click.option("--tls-ca-file", type=file, help="Certificates of the authority, in PEM format."),
        click.option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True),
            default=10.0,
            show_default=True,
            help="Seconds that the scheduler has to answer, and the workers.",
        ),
    ):
        run = option(run)
    return run


@gpurt.command()
@click.argument("address", required=False)
@click.option("-v", "--verbose", is_flag=True, help="Print all figures after the summary.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_asks
def status(address: str | None, verbose: bool, as_json: bool, timeout: float) -> None:
    """Print in twenty lines what a cluster gained and lost.

    ADDRESS is that of the scheduler (tcp://host:port). Exit code 1 when the extension is not installed there, or a
    worker does not answer.
    """
    from dask_gpurt.client.state import status as get_status

    snapshot = get_status(address, timeout=timeout, verbose=verbose)
    _print(snapshot, as_json)
    if not snapshot.installed or snapshot.silent:
        raise SystemExit(1)


@gpurt.command()
@click.argument("address", required=False)
@click.option(
    "--interval", type=click.FloatRange(min=0), default=2.0, show_default=True, help="Seconds between two looks."
)
@click.option("--times", type=click.IntRange(min=1), help="Looks, instead of until Ctrl-C.")
@_asks
def top(address: str | None, interval: float, times: int | None, timeout: float) -> None:
    """Show the status again and again in the terminal.

    ADDRESS is that of the scheduler (tcp://host:port). Ends with Ctrl-C.
    """
    from dask_gpurt.client.ask import Session, found
    from dask_gpurt.client.state import look

    with contextlib.suppress(KeyboardInterrupt), Session(found(address), timeout) as session:
        for i in itertools.count(1):
            try:
                text = repr(session.ask(look, timeout))
            except NoAnswer as e:
                text = str(e)
            click.clear()
            click.echo(text)
            if times == i:
                return
            click.echo(f"\n{time.strftime('%H:%M:%S')}, again in {interval:g} s; Ctrl-C ends")
            time.sleep(interval)


@gpurt.command()
@click.argument("words", metavar="[ADDRESS] KEY", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_asks
def explain(words: tuple[str, ...], as_json: bool, timeout: float) -> None:
    """Print why a task ran where it ran.

    ADDRESS is that of the scheduler (tcp://host:port). A KEY that is a tuple is given as Python writes it:
    "('x-1234', 0)". Exit code 1 when nothing is known about it.
    """
    from dask_gpurt.client.questions import explain as ask

    address, keys = _split(words)
    if len(keys) != 1:
        raise click.UsageError(f"one key is explained at a time, got {len(keys)}: {' '.join(keys)}")
    _print(ask(address, _key(keys[0]), timeout=timeout), as_json)


@gpurt.command()
@click.argument("words", metavar="[ADDRESS] KEY...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_asks
def where(words: tuple[str, ...], as_json: bool, timeout: float) -> None:
    """Print which workers hold keys, in memory or on disk.

    ADDRESS is that of the scheduler (tcp://host:port). A KEY that is a tuple is given as Python writes it:
    "('x-1234', 0)". Exit code 1 when none of them is known, or a worker does not answer.
    """
    from dask_gpurt.client.questions import where as ask

    address, keys = _split(words)
    answer = ask(address, [_key(key) for key in keys], timeout=timeout)
    _print(answer, as_json)
    if answer.silent:
        raise SystemExit(1)


@gpurt.command()
@click.argument("address", required=False)
@click.option("--out", default="dask-gpurt-report.html", show_default=True, help="The HTML file to write.")
@click.option("--run", type=int, help="Which run, as `runs` shows it; -1: the newest. Without: all since the start.")
@_asks
def report(address: str | None, out: str, run: int | None, timeout: float) -> None:
    """Write an HTML report about a run, or all since the start.

    ADDRESS is that of the scheduler (tcp://host:port). Prints the advice. Exit code 1 when the extension is not
    installed there, or a worker does not answer.
    """
    from dask_gpurt.client.ask import ask
    from dask_gpurt.client.reports import report_now
    from dask_gpurt.client.runs import report_of
    from dask_gpurt.observe.report.findings import advise

    if run is None:
        made = report_now(out, address, timeout=timeout)
    else:
        one = ask(address, report_of, run, timeout, timeout=timeout)
        one.write(out)
        made = one.run
        click.echo("\n".join([made.title, *made.notes]))
    findings = advise(made)
    for finding in findings:
        click.echo(f"{finding.share:6.1%}  {finding.cause}: {finding.text} {finding.remedy}")
    if not findings:
        click.echo("Nothing cost as much as one per cent of the threads' time, and a second of it.")
    click.echo(f"Wrote {out}")
    for worker, why in made.silent.items():
        click.echo(f"No answer from {worker}: {why}", err=True)
    if made.silent:
        raise SystemExit(1)


@gpurt.command(short_help="Have Dask do the work of a part for now.")
@click.argument("words", metavar="[ADDRESS] on|off", nargs=-1, required=True)
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(PARTS), help="A part; may be repeated (default: all)."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_asks
def safe(words: tuple[str, ...], parts: tuple[str, ...], as_json: bool, timeout: float) -> None:
    """Have Dask do what placement, tiers or shuffle did, at once, until it is told otherwise.

    ADDRESS is that of the scheduler (tcp://host:port). Nothing is uninstalled, and shuffles go on. Exit code 1 when a
    worker does not answer.
    """
    from dask_gpurt.client.safe import safe as switch

    if words[-1] not in ("on", "off") or len(words) > 2:
        raise click.UsageError(f"{' '.join(words)!r} must end with on or off, after at most one ADDRESS")
    done = switch(words[0] if len(words) == 2 else None, words[-1] == "on", parts=parts or None, timeout=timeout)
    _print(done, as_json)
    if done.silent:
        raise SystemExit(1)


@gpurt.command(short_help="Say why a cluster is slow or stands.")
@click.argument("address", required=False)
@click.option("--every", is_flag=True, help="Go on after the first cause.")
@click.option(
    "--stall",
    "stall_seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds without the end of a task, while some run, that are a stall.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_asks
def diagnose(address: str | None, every: bool, stall_seconds: float, as_json: bool, timeout: float) -> None:
    """Go through five questions, up to the first that finds a cause: is every node healthy, do the threads have
    something to do, are they fed, does communication hold them up, is another backend better?

    ADDRESS is that of the scheduler (tcp://host:port). Exit code 0: no cause was found, 1: one was.
    """
    from dask_gpurt.client.diagnose import diagnose as go_through

    found = go_through(address, every=every, stall_seconds=stall_seconds, timeout=timeout)
    _print(found, as_json)
    if found.causes:
        raise SystemExit(1)


@gpurt.command(short_help="Give workers no more tasks, or show which get none.")
@click.argument("address")
@click.argument("workers", nargs=-1)
@click.option("--why", default="as asked", show_default=True, help="What status shows.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_asks
def hold(address: str, workers: tuple[str, ...], why: str, as_json: bool, timeout: float) -> None:
    """Give WORKERS (addresses or names) no more tasks and move their data away; without any, show which get none.

    ADDRESS is that of the scheduler (tcp://host:port). The workers stay in the cluster. Exit code 1 when one of them
    could not be held.
    """
    from dask_gpurt.client.hold import hold as take_out

    done = take_out(address, workers, why=why, timeout=timeout)
    _print(done, as_json)
    if done.not_held:
        raise SystemExit(1)


@gpurt.command(short_help="Let held workers have tasks again.")
@click.argument("address")
@click.argument("workers", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_asks
def release(address: str, workers: tuple[str, ...], as_json: bool, timeout: float) -> None:
    """Let WORKERS (addresses or names) have tasks again, whatever was found of them.

    ADDRESS is that of the scheduler (tcp://host:port).
    """
    from dask_gpurt.client.hold import release as let_in

    _print(let_in(address, workers, timeout=timeout), as_json)


@gpurt.command(short_help="Check this machine, or each node of a cluster.")
@click.argument("address", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--record", type=click.Path(dir_okay=False), help="Write what the GPU driver says into this file.")
@click.option(
    "--recorded", type=click.Path(exists=True, dir_okay=False), help="Look at a recording instead of the GPU driver."
)
@_asks
def doctor(address: str | None, as_json: bool, record: str | None, recorded: str | None, timeout: float) -> None:
    """Check this machine, or each node of a cluster: what was found, what was expected, the remedy.

    ADDRESS is that of the scheduler (tcp://host:port); without it this machine is looked at. Exit code 0: nothing to
    do, 1: a warning, 2: a failure.
    """
    from dask_gpurt.doctor import finding

    if address is not None:
        if record or recorded:
            raise click.UsageError("--record and --recorded are for this machine, without ADDRESS")
        from dask_gpurt.client.checkup import checkup

        findings = checkup(address, timeout=timeout)
    else:
        from dask_gpurt.doctor import registry

        findings = registry.look_here(record=record, recorded=recorded)
    click.echo(json.dumps(finding.as_json(findings), indent=2) if as_json else finding.text(findings))
    raise SystemExit(finding.exit_code(findings))


@gpurt.command(short_help="Check the libraries of what is installed.")
@click.option("--backend", type=click.Choice(["cpu", "cuda", "rocm"]), help="Libraries of another one are a failure.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def audit(backend: str | None, as_json: bool) -> None:
    """Check whether what is installed can be loaded: libraries that extensions need, requirements, CUDA and ROCm.

    Exit code 0: nothing to do, 1: a warning, 2: a failure.
    """
    from dask_gpurt.doctor import finding
    from dask_gpurt.doctor.audit import report as look

    findings = look(backend)
    click.echo(json.dumps(finding.as_json(findings), indent=2) if as_json else finding.text(findings))
    raise SystemExit(finding.exit_code(findings))


@gpurt.command()
@click.argument("address", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_asks
def runs(address: str | None, as_json: bool, timeout: float) -> None:
    """Print the newest runs, and what they waited for.

    ADDRESS is that of the scheduler (tcp://host:port).
    """
    from dask_gpurt.client.runs import runs as ask

    _print(ask(address, timeout=timeout), as_json)


@gpurt.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", metavar="[ADDRESS] [FIRST SECOND]", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_asks
def compare(words: tuple[str, ...], as_json: bool, timeout: float) -> None:
    """Print two runs side by side, and what changed.

    ADDRESS is that of the scheduler (tcp://host:port). FIRST and SECOND are numbers of runs, as `runs` shows them;
    -1 is the newest. Without them: the newest and the one before.
    """
    from dask_gpurt.client.runs import compare as ask

    address, numbers = (words[0], words[1:]) if words and not _NUMBER.fullmatch(words[0]) else (None, words)
    for word in numbers:
        if not _NUMBER.fullmatch(word):
            raise click.UsageError(f"{word!r} is not the number of a run, such as 3, or -1 for the newest")
    if len(numbers) not in (0, 2):
        raise click.UsageError(f"two runs are compared, got {len(numbers)}: {' '.join(numbers)}")
    first, second = map(int, numbers or ("-2", "-1"))
    _print(ask(address, first, second, timeout=timeout), as_json)


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
    if missing:
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


def _print(answer: Any, as_json: bool) -> None:
    click.echo(json.dumps(answer.to_dict(), indent=2, default=str) if as_json else repr(answer))


def _split(words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """The address, if the first word is one, and the rest."""
    if len(words) > 1 and re.match(r"[a-z]+://|[\w.-]+:\d+$", words[0]):
        return words[0], words[1:]
    return None, words


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


@gpurt.command(short_help="Load the extension in all that this user starts.")
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


@gpurt.command(short_help="Undo enable.")
def disable() -> None:
    """Undo `enable`. Running clusters are not touched (see dask_gpurt.detach)."""
    from dask_gpurt.client import switch

    path = switch.disable()
    click.echo(f"Nothing to do: there is no {switch.file()}" if path is None else f"Disabled: removed {path}")
