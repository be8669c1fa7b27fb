"""``dask scheduler --preload dask_gpurt.preload``: what Dask calls in each kind of process.

On the scheduler this is all a cluster needs: it sends the worker part to every worker that comes. On a worker it
installs before the worker registers, hence before it holds any data. On a nanny and a client there is nothing to do:
a worker's preload is imported in its nanny's process too, so importing this module must not touch a GPU.

Fail closed: Dask logs exceptions of a preload and goes on without it, and a policy that did not load looks exactly
like one that did. So any error here ends the start of the server, unless ``gpurt.on-error: stock``:

* of a ``dask`` command by `SystemExit` with the remedy;
* elsewhere (`LocalCluster`, a notebook, a worker that a nanny started) by an exception from a plugin, which Dask does
  not swallow. `SystemExit` would end the thread of the event loop, and what waits for the cluster would wait for
  ever.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click
from distributed import Scheduler, Worker

from dask_gpurt.config import Settings, leaves, read
from dask_gpurt.errors import ConfigError, GpurtError, InstallError
from dask_gpurt.extension import WorkerParts, seam
from dask_gpurt.observe.dashboard import hook

if TYPE_CHECKING:
    from distributed.core import Server

logger = logging.getLogger("distributed.preloading.gpurt")


#: what to add to an error of a part
LEAVE_OUT = (
    "To start without the failing part set gpurt.on-error: stock (DASK_GPURT__ON_ERROR=stock); to leave Dask as it was "
    "set gpurt.policy: stock."
)


async def install(server: Server, overrides: dict[str, Any]) -> None:
    """Install on a scheduler or worker; other servers are left alone.

    Raises
    ------
    ConfigError
        Wrong settings.
    InstallError
        A part could not be installed; the text says what to do.
    """
    if not isinstance(server, (Scheduler, Worker)):
        return
    settings = Settings.load(overrides)
    if settings.policy == "stock":
        logger.info("dask-gpurt: gpurt.policy is stock, Dask is left as it was")
        return
    try:
        if isinstance(server, Scheduler):
            # Late: nannies and workers import this module too.
            from dask_gpurt.extension.scheduler import GpurtScheduler

            plugin = GpurtScheduler(settings)
            await plugin.start(server)
            server.add_plugin(plugin, name=plugin.name)
        else:
            await WorkerParts.install(server, settings)
    except GpurtError as e:
        raise InstallError(f"{e}\n{LEAVE_OUT}") from e


async def _setup(server: Server, problem: str | None = None, **options: Any) -> None:
    try:
        if problem is not None:
            raise ConfigError(problem)
        given = {_KEYS[name]: value for name, value in options.items() if value is not None}
        await install(server, {key: read(key, v) if isinstance(v, str) else v for key, v in given.items()})
    except Exception as e:  # all of them: without this Dask would go on as if nothing had been asked
        text = str(e) if isinstance(e, GpurtError) else f"{type(e).__name__}: {e}\n{LEAVE_OUT}"
        _refuse(server, f"dask-gpurt: {text}", e)


def _refuse(server: Server, text: str, cause: Exception) -> None:
    """Keep a server from starting; see the module."""
    if click.get_current_context(silent=True) is not None:
        raise SystemExit(text) from cause
    logger.error("%s", text)
    error = InstallError(text)
    error.__cause__ = cause
    seam.refuse(server, error)


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


#: with what our options begin
_OURS = "--gpurt"


class _Setup(click.Command):
    """`click.Command` whose wrong arguments reach its callback: Dask would log them, and start without us.

    Arguments that do not look like ours are for others: Dask gives all preloads the same ones. ``dask cuda worker``
    always has some for its own preload, and its workers would not start.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        extra |= {"ignore_unknown_options": True, "allow_extra_args": True}
        try:
            context = super().make_context(info_name, list(args), parent, **extra)
            wrong = next((a for a in context.args if a.startswith(_OURS)), None)
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

#: Dask makes the arguments after ``--preload`` into this command's options
dask_setup = _Setup("dask_setup", params=_options(), callback=_setup)
