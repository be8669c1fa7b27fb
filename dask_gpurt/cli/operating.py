"""Commands that look after machines and clusters: checks, safe mode, held workers, loading for a user."""

from __future__ import annotations

import functools
import json

import click

from dask_gpurt.cli.base import Unknown, asks, gpurt, show
from dask_gpurt.errors import GpurtError
from dask_gpurt.model.safe_mode import PARTS


@gpurt.command(short_help="Have Dask do the work of a part for now.")
@click.argument("words", metavar="[ADDRESS] on|off", nargs=-1, required=True)
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(PARTS), help="A part; may be repeated (default: all)."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@asks
def safe(words: tuple[str, ...], parts: tuple[str, ...], as_json: bool, timeout: float) -> None:
    """Have Dask do what placement, tiers or shuffle did, at once, until it is switched off.

    ADDRESS is that of the scheduler (tcp://host:port). Nothing is uninstalled, and shuffles go on. Exit code 1 when a
    worker does not answer.
    """
    from dask_gpurt.client.safe import safe as switch

    if words[-1] not in ("on", "off") or len(words) > 2:
        raise click.UsageError(f"{' '.join(words)!r} must end with on or off, after at most one ADDRESS")
    done = switch(words[0] if len(words) == 2 else None, words[-1] == "on", parts=parts or None, timeout=timeout)
    show(done, as_json)
    if done.silent:
        raise SystemExit(1)


@gpurt.command(short_help="Give workers no more tasks, or show which get none.")
@click.argument("address")
@click.argument("workers", nargs=-1)
@click.option("--why", default="as asked", show_default=True, help="What status shows.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@asks
def hold(address: str, workers: tuple[str, ...], why: str, as_json: bool, timeout: float) -> None:
    """Give WORKERS (addresses or names) no more tasks and move their data away; without any, show which get none.

    ADDRESS is that of the scheduler (tcp://host:port). The workers stay in the cluster. Exit code 1 when one of them
    could not be held.
    """
    from dask_gpurt.client.hold import hold as take_out

    done = take_out(address, workers, why=why, timeout=timeout)
    show(done, as_json)
    if done.not_held:
        raise SystemExit(1)


@gpurt.command(short_help="Let held workers have tasks again.")
@click.argument("address")
@click.argument("workers", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@asks
def release(address: str, workers: tuple[str, ...], as_json: bool, timeout: float) -> None:
    """Let WORKERS (addresses or names) have tasks again, whatever was found of them.

    ADDRESS is that of the scheduler (tcp://host:port).
    """
    from dask_gpurt.client.hold import release as let_in

    show(let_in(address, workers, timeout=timeout), as_json)


@gpurt.command(short_help="Check this machine, or each node of a cluster.")
@click.argument("address", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--record", type=click.Path(dir_okay=False), help="Write what the GPU driver says into this file.")
@click.option(
    "--recorded", type=click.Path(exists=True, dir_okay=False), help="Look at a recording instead of the GPU driver."
)
@functools.partial(asks, refusal=Unknown)
def doctor(address: str | None, as_json: bool, record: str | None, recorded: str | None, timeout: float) -> None:
    """Check this machine, or each node of a cluster: what was found, what was expected, the remedy.

    ADDRESS is that of the scheduler (tcp://host:port); without it this machine is looked at. Exit code 0: nothing to
    do, 1: a warning, 2: a failure, or nothing could be looked at.
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


@gpurt.command(short_help="Load the extension in all that this user starts.")
def enable() -> None:
    """Load the extension in every scheduler and worker this user starts, unless they are given other preloads.

    Writes a small YAML file into Dask's configuration directory ($DASK_CONFIG, else ~/.config/dask).
    """
    from dask_gpurt.client import switch

    try:
        path = switch.enable()
    except (GpurtError, OSError) as e:
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

    try:
        path = switch.disable()
    except (GpurtError, OSError) as e:
        raise click.ClickException(str(e)) from e
    click.echo(f"Nothing to do: there is no {switch.file()}" if path is None else f"Disabled: removed {path}")
