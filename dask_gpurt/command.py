"""``dask`` commands: whether this process is one, and how it ends with one line instead of a traceback.

`in_dask_command` tells, `end_command` ends it, and `shorten_errors` has failures of Dask's own to open its sockets
end in one line with the remedy. Those come before Dask calls any preload, so the line is made when the interpreter is
about to print the traceback (`sys.excepthook`). Errors that `reason` does not know are printed as ever.
"""

from __future__ import annotations

import asyncio
import errno
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

#: the package of Dask's own commands
_COMMANDS = "distributed.cli"
#: options of Dask's commands that say where a server listens
_PLACES = ("host", "port", "worker_port", "nanny_port")
#: with what our options begin
OURS = "--gpurt"
#: how distributed's error begins where TLS is asked for and a file of it is not
_NO_CONTEXT = "TLS expects a `ssl_context`"


def in_dask_command() -> bool:
    """Whether this process is a ``dask`` command, such as ``dask scheduler``, and not a user's own click program."""
    context = click.get_current_context(silent=True)
    callback = None if context is None else context.command.callback
    # Of a module that is run by ``python -m`` the name is __main__.
    spec = getattr(callback, "__globals__", {}).get("__spec__")
    return spec is not None and spec.parent == _COMMANDS


def end_command(line: str) -> None:
    """End the process with exit code 1, and this line as the last one on stderr.

    asyncio reports an exception that ends the loop once more for each task that it went through.
    """
    ending = SystemExit(f"Error: {line}")

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if context.get("exception") is not ending:
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(report)
    raise ending


def shorten_errors() -> None:
    """Have this process print one line instead of a traceback for what `reason` knows, if it is a ``dask`` command."""
    context = click.get_current_context(silent=True)
    if context is None or not in_dask_command() or getattr(sys.excepthook, "of_gpurt", False):
        return
    before = sys.excepthook

    def print_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = reason(error, context.params)
        if line is None:
            before(kind, error, trace)
        else:
            click.echo(f"Error: dask {context.info_name}: {line}", err=True)

    print_one_line.of_gpurt = True  # type: ignore[attr-defined]
    sys.excepthook = print_one_line


def misplaced(options: Mapping[str, object]) -> str | None:
    """What to do about an option of ours that ``dask worker`` took for the scheduler's address, as it was the first."""
    address = options.get("scheduler")
    if not (isinstance(address, str) and address.startswith(OURS)):
        return None
    return (
        f"{address!r} was taken for the scheduler's address. Remedy: the address before all --gpurt options, as in "
        "dask worker tcp://HOST:8786 --preload dask_gpurt.preload ...; with --scheduler-file give settings in the "
        "environment, such as DASK_GPURT__TIERS__HOST_LIMIT=0.5"
    )


def reason(error: BaseException, options: Mapping[str, object]) -> str | None:
    """Why Dask could not open a socket, and the remedy, as one line; None for any other error.

    Parameters
    ----------
    options
        Of the command, by their names in Python.
    """
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            asked = [f"--{name.replace('_', '-')} {options[name]}" for name in _PLACES if options.get(name)]
            where = f" ({', '.join(asked)})" if asked else ""
            return (
                f"cannot listen{where}: {' '.join(str(cause).split())}. Remedy: end what listens there, or choose "
                "another port; 0 lets the system choose"
            )
        if isinstance(cause, TypeError) and str(cause).startswith(_NO_CONTEXT):
            return (
                "TLS is asked for, and there is no certificate. Remedy: give --tls-ca-file, --tls-cert and --tls-key, "
                "or set distributed.comm.tls in Dask's configuration"
            )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from, or while."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
