"""The public functions that change a running cluster: `attach`, `detach`."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dask_gpurt import planning
from dask_gpurt.client.ask import ask, ask_scheduler
from dask_gpurt.client.connect import ANSWER_SECONDS
from dask_gpurt.client.state import look
from dask_gpurt.config import Settings
from dask_gpurt.errors import ConfigError, GpurtError, InstallError, NoAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distributed import Client, Scheduler

    from dask_gpurt.client.ask import Asked
    from dask_gpurt.observe.answers.status import Status

#: of each scheduler: whose turn it is. Both functions wait for workers in between, and rely on what they found before
_turns: WeakKeyDictionary[Scheduler, asyncio.Lock] = WeakKeyDictionary()


def attach(client: Asked, *, settings: Mapping[str, Any] | None = None) -> Status:
    """Put the extension into the running cluster of `client`.

    Data that workers hold already is adopted as it is: nothing is read or moved. A second call changes nothing.

    Parameters
    ----------
    client
        A client, a cluster, or a scheduler's address; None: the current client, or else the address in Dask's
        configuration. With an asynchronous client the result is to be awaited.
    settings
        As for `local_cluster`; read together with this process's configuration, not the scheduler's.

    Returns
    -------
    The `status` afterwards.

    Raises
    ------
    InstallError
        The package is missing there, a part could not take over, or a shuffle is running. The cluster is as it was.
    ConfigError
        As for `local_cluster`, or ``gpurt.policy`` is ``stock``.
    NoAnswer
        The scheduler cannot be reached.
    """
    loaded = Settings.load(settings)
    if loaded.policy == "stock":
        raise ConfigError("gpurt.policy is 'stock', so there is nothing to attach. Remedy: set it to 'gpurt'")
    answer: Status = ask(client, _attach_and_look, loaded)
    return answer


async def _attach_and_look(client: Client, settings: Settings) -> Status:
    await _on_scheduler(client, _attach, settings=settings)
    planning.keep()
    return await look(client, ANSWER_SECONDS)


async def _on_scheduler(client: Client, function: Callable[..., Any], **kwargs: Any) -> None:
    """Run one of the functions below there, and raise the text that it returns."""
    try:
        reply = await ask_scheduler(client, function, timeout=math.inf, **kwargs)  # workers may have much to hand over
    except NoAnswer:
        raise
    except GpurtError as e:
        raise InstallError(str(e)) from e
    if reply is not None:
        raise InstallError(reply)


async def _attach(dask_scheduler: Scheduler, settings: Settings) -> str | None:
    """Runs on the scheduler. Failures come back as text: a class of ours may not unpickle in another version."""
    from dask_gpurt.extension import NAME, GpurtScheduler

    async with _turns.setdefault(dask_scheduler, asyncio.Lock()):
        if NAME in dask_scheduler.plugins:
            return None
        plugin = GpurtScheduler(settings)
        try:
            await plugin.start(dask_scheduler)
        except (ConfigError, InstallError) as e:  # ConfigError: a policy that the scheduler cannot import
            return str(e)
        dask_scheduler.add_plugin(plugin, name=plugin.name)
        return None


def detach(client: Asked) -> None:
    """Take the extension out of the running cluster of `client`: every attribute and plugin is Dask's own again.

    Keys stay readable throughout; spilled ones are handed to Dask's own spill buffer. Where the extension is
    not installed, nothing is done. A worker that cannot be reached meanwhile, or that fails, works on with the
    extension until it is restarted; the scheduler's log names it, and its messages are ignored.

    Parameters
    ----------
    client
        As for `attach`.

    Raises
    ------
    InstallError
        A part refused to leave, as while a shuffle is running, or the scheduler cannot import the package; the text
        says which and why.
    NoAnswer
        The scheduler cannot be reached.
    """
    # Of an asynchronous client this is the awaitable.
    return ask(client, _take_out)


async def _take_out(client: Client) -> None:
    await _on_scheduler(client, _detach)
    planning.forget()


async def _detach(dask_scheduler: Scheduler) -> str | None:
    """Runs on the scheduler."""
    from dask_gpurt.extension import NAME, GpurtScheduler

    async with _turns.setdefault(dask_scheduler, asyncio.Lock()):
        plugin = dask_scheduler.plugins.get(NAME)
        if not isinstance(plugin, GpurtScheduler):
            return None
        try:
            await plugin.uninstall()
        except InstallError as e:
            return str(e)
        except ExceptionGroup as e:
            return "; ".join(str(one) for one in e.exceptions)
        return None
