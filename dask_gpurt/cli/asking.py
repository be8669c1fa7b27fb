"""Commands that ask a cluster: what it does, did, and why."""

from __future__ import annotations

import contextlib
import itertools
import re
import time

import click

from dask_gpurt.cli.base import Number, asks, gpurt, key_of, show, split
from dask_gpurt.errors import NoAnswer

#: of a run
_NUMBER = re.compile(r"-?\d+")


@gpurt.command()
@click.argument("address", required=False)
@click.option("-v", "--verbose", is_flag=True, help="Print all figures after the summary.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@asks
def status(address: str | None, verbose: bool, as_json: bool, timeout: float) -> None:
    """Print in twenty lines what a cluster gained and lost.

    ADDRESS is that of the scheduler (tcp://host:port). Exit code 1 when the extension is not installed there, or a
    worker does not answer.
    """
    from dask_gpurt.client.state import status as get_status

    snapshot = get_status(address, timeout=timeout, verbose=verbose)
    show(snapshot, as_json)
    if not snapshot.installed or snapshot.silent:
        raise SystemExit(1)


@gpurt.command()
@click.argument("address", required=False)
@click.option(
    "--interval",
    type=Number(min=0, max=86_400),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--times", type=click.IntRange(min=1), help="Looks, instead of until Ctrl-C.")
@asks
def top(address: str | None, interval: float, times: int | None, timeout: float) -> None:
    """Show the status again and again in the terminal.

    ADDRESS is that of the scheduler (tcp://host:port). Ends with Ctrl-C.
    """
    from dask_gpurt.client.ask import Session, found
    from dask_gpurt.client.state import look

    target = found(address)
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as connection:
        session = connection.enter_context(Session(target, timeout))
        for i in itertools.count(1):
            try:
                if session.lost:  # a client stays so, also where a scheduler was started again
                    connection.close()
                    session = connection.enter_context(Session(target, timeout))
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
@asks
def explain(words: tuple[str, ...], as_json: bool, timeout: float) -> None:
    """Print why a task ran where it ran.

    ADDRESS is that of the scheduler (tcp://host:port). A KEY that is a tuple is given as Python writes it:
    "('x-1234', 0)". Exit code 1 when nothing is known about it.
    """
    from dask_gpurt.client.questions import explain as ask

    address, keys = split(words)
    if len(keys) != 1:
        raise click.UsageError(f"one key is explained at a time, got {len(keys)}: {' '.join(keys)}")
    show(ask(address, key_of(keys[0]), timeout=timeout), as_json)


@gpurt.command()
@click.argument("words", metavar="[ADDRESS] KEY...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@asks
def where(words: tuple[str, ...], as_json: bool, timeout: float) -> None:
    """Print which workers hold keys, in memory or on disk.

    ADDRESS is that of the scheduler (tcp://host:port). A KEY that is a tuple is given as Python writes it:
    "('x-1234', 0)". Exit code 1 when none of them is known, or a worker does not answer.
    """
    from dask_gpurt.client.questions import where as ask

    address, keys = split(words)
    answer = ask(address, [key_of(key) for key in keys], timeout=timeout)
    show(answer, as_json)
    if answer.silent:
        raise SystemExit(1)


@gpurt.command()
@click.argument("address", required=False)
@click.option("--out", default="dask-gpurt-report.html", show_default=True, help="The HTML file to write.")
@click.option("--run", type=int, help="Which run, as `runs` shows it; -1: the newest. Without: all since the start.")
@asks
def report(address: str | None, out: str, run: int | None, timeout: float) -> None:
    """Write an HTML report about a run, or all since the start.

    ADDRESS is that of the scheduler (tcp://host:port). Prints the advice. Exit code 1 when the extension is not
    installed there, or a worker does not answer.
    """
    from dask_gpurt.client.ask import ask
    from dask_gpurt.client.reports import report_now
    from dask_gpurt.client.runs import report_of
    from dask_gpurt.observe.report.findings import NOTHING, advise

    if run is None:
        made = report_now(out, address, timeout=timeout)
    else:
        one = ask(address, report_of, run, timeout, timeout=timeout)
        one.write(out)
        made = one.run
        click.echo(made.title)
    for note in made.notes:
        click.echo(note)
    findings = advise(made)
    for finding in findings:
        click.echo(f"{finding.share:6.1%}  {finding.cause}: {finding.text} {finding.remedy}")
    if not findings:
        click.echo(f"{NOTHING}.")
    click.echo(f"Wrote {out}")
    for worker, why in made.silent.items():
        click.echo(f"No answer from {worker}: {why}", err=True)
    if made.silent:
        raise SystemExit(1)


@gpurt.command()
@click.argument("address", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@asks
def runs(address: str | None, as_json: bool, timeout: float) -> None:
    """Print the newest runs, and what they waited for.

    ADDRESS is that of the scheduler (tcp://host:port).
    """
    from dask_gpurt.client.runs import runs as ask

    show(ask(address, timeout=timeout), as_json)


@gpurt.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", metavar="[ADDRESS] [FIRST SECOND]", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@asks
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
    show(ask(address, first, second, timeout=timeout), as_json)


@gpurt.command(short_help="Say why a cluster is slow or stuck.")
@click.argument("address", required=False)
@click.option("--every", is_flag=True, help="Go on after the first cause.")
@click.option(
    "--stall",
    "stall_seconds",
    type=Number(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds without the end of a task, while some run, that are a stall.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@asks
def diagnose(address: str | None, every: bool, stall_seconds: float, as_json: bool, timeout: float) -> None:
    """Go through five questions, up to the first that finds a cause: is every node healthy, do the threads have
    something to do, are they fed, does communication hold them up, is another backend better?

    ADDRESS is that of the scheduler (tcp://host:port). Exit code 0: no cause was found, 1: one was.
    """
    from dask_gpurt.client.diagnose import diagnose as go_through

    found = go_through(address, every=every, stall_seconds=stall_seconds, timeout=timeout)
    show(found, as_json)
    if found.causes:
        raise SystemExit(1)
