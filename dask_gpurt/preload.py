"""``dask scheduler --preload dask_gpurt.preload``: what Dask calls in each kind of process.

On the scheduler this is all a cluster needs: it sends the worker part to every worker that comes. On a worker it
installs before the worker registers, hence before it holds any data. A client (``distributed.client.preload``) keeps
what it has planned (`dask_gpurt.planning`) and sends graphs at once (`model.prompt`). On a nanny there is nothing to
do: a worker's preload is imported in its nanny's process too, so importing this module must not touch a GPU.

Fail closed: Dask logs exceptions of a preload and goes on without it, and a policy that did not load looks exactly
like one that did. So any error here ends the start of the server, unless ``gpurt.on-error: stock``:

* of a ``dask`` command with one line and exit code 1. It checks the settings, and a worker's folders, when it reads
  its arguments, before it opens anything; all else ends it by `SystemExit`;
* elsewhere (`LocalCluster`, a notebook, a worker that a nanny started) by an exception from a plugin, which Dask does
  not swallow. `SystemExit` would end the thread of the event loop, and what waits for the cluster would wait for
  ever.

`dask_gpurt.load` is the same without arguments, for command lines where another preload has some.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click
from distributed import Client, Scheduler, Worker

from dask_gpurt import planning
from dask_gpurt.command import OURS, end_command, in_dask_command, misplaced, shorten_errors
from dask_gpurt.config import Settings
from dask_gpurt.config_schema import leaves, read
from dask_gpurt.errors import ConfigError, GpurtError, InstallError
from dask_gpurt.extension import NAME, WorkerParts, seam
from dask_gpurt.extension.parts import require_folders
from dask_gpurt.model import prompt
from dask_gpurt.observe.dashboard import hook

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distributed.core import Server

logger = logging.getLogger("distributed.preloading.gpurt")


#: what to add to an error of a part
LEAVE_OUT = "To start without the failing part set gpurt.on-error: stock (DASK_GPURT__ON_ERROR=stock)."


async def install(server: Server | Client, overrides: dict[str, Any]) -> None:
    """Install on a scheduler, worker or client; other servers are left alone. A second call changes nothing.

    Raises
    ------
    ConfigError
        Wrong settings.
    InstallError
        A part could not be installed; the text says what to do.
    """
    if not isinstance(server, (Scheduler, Worker, Client)):
        return
    settings = Settings.load(overrides)
    if settings.policy == "stock":
        logger.info("dask-gpurt: gpurt.policy is stock, Dask is left as it was")
        return
    try:
        if isinstance(server, Client):
            planning.keep()
            prompt.graphs(server)
        elif isinstance(server, Worker):
            await WorkerParts.install(server, settings)
        elif NAME not in server.plugins:
            # Late: nannies and workers import this module too.
            from dask_gpurt.extension.scheduler import GpurtScheduler

            plugin = GpurtScheduler(settings)
            await plugin.start(server)
            server.add_plugin(plugin, name=plugin.name)
    except ConfigError:
        raise
    except GpurtError as e:
        text = str(e)
        raise InstallError(text if "on-error" in text else f"{text.rstrip('. ')}. {LEAVE_OUT}") from e


async def setup(server: Server, problem: str | None = None, **options: Any) -> None:
    """Install on a server that is being started, or keep it from starting.

    Parameters
    ----------
    problem
        What is wrong with the arguments.
    **options
        Those that were given, by their names in Python.

    Raises
    ------
    SystemExit
        The process is that of a ``dask`` command, and the installation failed.
    """
    try:
        if problem is not None:
            raise ConfigError(problem)
        await install(server, _given(options))
    except Exception as e:  # all of them: without this Dask would go on as if nothing had been asked
        text = str(e) if isinstance(e, GpurtError) else f"{type(e).__name__}: {e}. {LEAVE_OUT}"
        line = "dask-gpurt: " + " ".join(part.strip() for part in text.splitlines())
        if not isinstance(e, GpurtError):
            logger.error("dask-gpurt: not foreseen", exc_info=e)
        if in_dask_command():
            end_command(line)
        logger.error("%s", line)
        seam.refuse(server, InstallError(line))


#: name of the option in Python -> the setting
_KEYS = {key.replace("-", "_").replace(".", "__"): key for key in leaves()}


def _options() -> list[click.Parameter]:
    """One option per setting, under the same name: ``--gpurt-tiers-host-limit`` for ``gpurt.tiers.host-limit``."""
    out: list[click.Parameter] = []
    for name, key in _KEYS.items():
        node = leaves()[key]
        # All else is read and checked by `config`, whose errors name the setting and what it may be.
        kind: Any = bool if node["type"] == "boolean" else str
        out.append(click.Option(["--gpurt-" + key.replace(".", "-"), name], type=kind, help=node["description"]))
    return out


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from options: those that were given, read as their types."""
    given = {_KEYS[name]: value for name, value in options.items() if value is not None}
    return {key: read(key, value) if isinstance(value, str) else value for key, value in given.items()}


class _Setup(click.Command):
    """`click.Command` that accepts arguments of others, and whose wrong arguments are never only logged.

    Dask reads the arguments twice. A ``dask`` command calls `parse_args` first, where it prints what is raised. There
    an unknown argument of any kind is an error: it may be a misspelt one of Dask's own.

    A server that starts calls `make_context`. Dask logs what is raised there and starts without us, so errors reach the
    callback. Arguments that do not look like ours are for others, as Dask gives all preloads the same ones. ``dask cuda
    worker`` always has some for its own preload.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.allow_extra_args:  # from `make_context`
            return super().parse_args(ctx, args)
        command = click.get_current_context(silent=True)
        wrong = None if command is None else misplaced(command.params)
        if wrong is not None:  # the rest of the arguments is off by one
            raise click.ClickException(wrong)
        try:
            rest = super().parse_args(ctx, args)
            settings = Settings.load(_given(ctx.params))
            if (
                command is not None
                and command.info_name == "worker"
                and "stock" not in (settings.policy, settings.on_error)
            ):
                require_folders(settings.tiers.folders)
        except click.UsageError as e:
            raise click.ClickException(e.format_message()) from e  # in one line, without the usage
        except ConfigError as e:
            raise click.ClickException(f"dask-gpurt: {e}") from e
        return rest

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        extra |= {"ignore_unknown_options": True, "allow_extra_args": True}
        try:
            context = super().make_context(info_name, list(args), parent, **extra)
            wrong = next((a for a in context.args if a.startswith(OURS)), None)
            if wrong is not None:
                raise click.NoSuchOption(wrong.partition("=")[0], ctx=context)
            context.args = []  # Dask would give them to the callback
            return context
        except click.UsageError as e:
            context = click.Context(self, parent, info_name)
            context.params = {"problem": f"{' '.join(args)}: {e.format_message()}"}
            return context


# In the body, as the scheduler builds its dashboard before it calls `dask_setup`; costs nothing elsewhere.
hook.announce()
# Dask opens its sockets before it calls `dask_setup`, too.
shorten_errors()

#: Dask makes the arguments after ``--preload`` into this command's options
dask_setup = _Setup("dask_setup", params=_options(), callback=setup)
