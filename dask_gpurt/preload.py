"""``dask scheduler --preload dask_gpurt.preload``: what Dask calls in each kind of process.

On the scheduler this is all a cluster needs: it sends the worker part to every worker that comes. On a worker it
installs before the worker registers, hence before it holds any data. On a nanny and a client there is nothing to do:
a worker's preload is imported in its nanny's process too, so importing this module must not touch a GPU.

Fail closed: Dask logs exceptions of a preload and goes on without it, and a policy that did not load looks exactly
like one that did. So an error here is `SystemExit` with the remedy, which ends the process, unless
``gpurt.on-error: stock``.
"""

from __future__ import annotations

import logging
from typing import Any

import click
from distributed import Scheduler, Worker

from dask_gpurt.config import Settings, leaves
from dask_gpurt.errors import ConfigError, GpurtError
from dask_gpurt.extension import GpurtScheduler, WorkerParts
from dask_gpurt.observe.dashboard import hook

logger = logging.getLogger("distributed.preloading.gpurt")


async def install(server: Any, overrides: dict[str, Any]) -> None:
    """Install on a scheduler or worker; other servers are left alone.

    Raises
    ------
    SystemExit
        Wrong settings, or a part that could not be installed; the text says what to do.
    """
    if not isinstance(server, (Scheduler, Worker)):
        return
    try:
        settings = Settings.load(overrides)
    except ConfigError as e:
        raise SystemExit(f"dask-gpurt: {e}") from e
    if settings.policy == "stock":
        logger.info("dask-gpurt: gpurt.policy is stock, Dask is left as it was")
        return
    try:
        if isinstance(server, Scheduler):
            plugin = GpurtScheduler(settings)
            await plugin.start(server)
            server.add_plugin(plugin, name=plugin.name)
        else:
            await WorkerParts.install(server, settings)
    except GpurtError as e:
        raise SystemExit(
            f"dask-gpurt: {e}\nTo start without the failing part set gpurt.on-error: stock"
            " (DASK_GPURT__ON_ERROR=stock); to leave Dask as it was set gpurt.policy: stock."
        ) from e


async def _setup(server: Any, **options: Any) -> None:
    await install(server, {key.replace("__", "."): value for key, value in options.items() if value is not None})


def _options() -> list[click.Parameter]:
    """One option per setting, under the same name: ``--gpurt-tiers-host-limit`` for ``gpurt.tiers.host-limit``."""
    out: list[click.Parameter] = []
    for key, node in leaves().items():
        types = node["type"] if isinstance(node["type"], list) else [node["type"]]
        kind: Any = str
        if "boolean" in types:
            kind = bool
        elif "number" in types:
            kind = float
        elif types == ["integer"]:
            kind = int
        flag = "--gpurt-" + key.replace(".", "-")
        out.append(click.Option([flag, key.replace("-", "_").replace(".", "__")], type=kind, help=node["description"]))
    return out


# In the body, as the scheduler builds its dashboard before it calls `dask_setup`; costs nothing elsewhere.
hook.announce()

#: Dask makes the arguments after ``--preload`` into this command's options
dask_setup = click.Command("dask_setup", params=_options(), callback=_setup)
