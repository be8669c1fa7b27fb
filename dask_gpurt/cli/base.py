"""The group `gpurt`, and what its commands share."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from typing import TYPE_CHECKING, Any

import click
import dask.config
from dask.core import validate_key

from dask_gpurt._version import __version__
from dask_gpurt.errors import GpurtError

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

ADDRESS may be left out, but not of hold and release, where DASK_SCHEDULER_ADDRESS
is set, or scheduler-address in Dask's configuration.
"""


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXAMPLES)
@click.version_option(__version__, prog_name="dask-gpurt")
def gpurt() -> None:
    """dask-gpurt: placement, memory tiers and shuffles."""


class Number(click.FloatRange):
    """A `click.FloatRange` that refuses ``nan``, which no comparison finds outside of a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a number {'above' if self.min_open else 'from'} {self.min:g}.", param, ctx)
        return number


class Unknown(click.ClickException):
    """No answer, of a command whose exit code 1 is an answer: a warning."""

    exit_code = 2


def asks(
    command: Callable[..., None], refusal: type[click.ClickException] = click.ClickException
) -> Callable[..., None]:
    """A command that asks a cluster: its options, and one line for whatever keeps it from an answer."""

    @functools.wraps(command)
    def run(tls_ca_file: str | None, tls_cert: str | None, tls_key: str | None, **kwargs: Any) -> None:
        given = {"ca-file": tls_ca_file, "client.cert": tls_cert, "client.key": tls_key}
        with dask.config.set({f"distributed.comm.tls.{key}": path for key, path in given.items() if path}):
            try:
                command(**kwargs)
            except BrokenPipeError:  # such as that of `| head`, which click ends quietly
                raise
            except (GpurtError, OSError, ValueError) as e:  # ValueError: a worker or a path that is none
                raise refusal(" ".join(str(e).split())) from e

    file = click.Path(exists=True, dir_okay=False, resolve_path=True)
    for option in (
        click.option("--tls-key", type=file, help="Private key of that certificate, in PEM format."),
        click.option("--tls-cert", type=file, help="Certificate of this client, in PEM format."),
        click.option("--tls-ca-file", type=file, help="Certificates of the authority, in PEM format."),
        click.option(
            "--timeout",
            type=Number(min=0, min_open=True),
            default=10.0,
            show_default=True,
            help="Seconds that the scheduler has to answer, and the workers.",
        ),
    ):
        run = option(run)
    return run


def show(answer: Any, as_json: bool) -> None:
    click.echo(json.dumps(answer.to_dict(), indent=2, default=str) if as_json else repr(answer))


def split(words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """The address, if the first word is one, and the rest."""
    if len(words) == 1 and re.match(r"[a-z]+://", words[0]):
        raise click.UsageError(f"{words[0]!r} is an address; name a KEY after it")
    if len(words) > 1 and re.match(r"[a-z]+://|([\w.-]+|\[[\w.:%-]+\]):\d+$", words[0]):
        return words[0], words[1:]
    return None, words


def key_of(text: str) -> Any:
    """A key as it was typed: tuples that Dask takes, as Python writes them; all else is text."""
    if text.startswith("("):
        try:
            value = ast.literal_eval(text)
            validate_key(value)
        except (ValueError, SyntaxError, TypeError):
            return text
        if isinstance(value, tuple):
            return value
    return text
