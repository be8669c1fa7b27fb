"""`status`: what is installed on a cluster, and what it has done so far."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.client import remote
from dask_gpurt.client.ask import ask, ask_scheduler, ask_workers, facts_of
from dask_gpurt.client.connect import ANSWER_SECONDS
from dask_gpurt.errors import GpurtError, NoAnswer
from dask_gpurt.observe.answers.snapshot import Member
from dask_gpurt.observe.answers.status import Status

if TYPE_CHECKING:
    from distributed import Client

    from dask_gpurt.client.ask import Asked

#: the metric of a worker that was sent its part and runs stock; see `dask_gpurt.extension.delivery`
_REFUSED = "gpurt-refused"


def status(client: Asked = None, *, timeout: float = ANSWER_SECONDS, verbose: bool = False) -> Status:
    """What is installed on a cluster, what it has done so far, and what to do first.

    Workers are asked directly, so the figures are those of now. A worker that does not answer or runs without the
    extension is named.

    Parameters
    ----------
    client
        A client, a cluster, or the address of a scheduler. None: the current client, or else the address in Dask's
        configuration. With an asynchronous client or cluster the result is to be awaited.
    timeout
        Seconds that the scheduler and the workers have to answer; as many before, to connect to an address.
    verbose
        Print all figures after the summary.

    Returns
    -------
    Status
        Prints as text of at most twenty lines, shows as HTML in a notebook; ``.to_dict()`` for programs.

    Raises
    ------
    NoAnswer
        The scheduler cannot be reached, or does not answer in time.
    """
    answer: Status = ask(client, _status, timeout, verbose, timeout=timeout)
    return answer


async def _status(client: Client, timeout: float, verbose: bool) -> Status:
    return dataclasses.replace(await look(client, timeout), verbose=verbose)


async def look(client: Client, timeout: float) -> Status:
    """`status` with an asynchronous client."""
    identity, scheduler, workers = await asyncio.gather(
        facts_of(client, timeout=timeout),
        _ask_scheduler(client, timeout),
        ask_workers(client, remote.worker_status, timeout=timeout),
    )
    return Status(
        scheduler=scheduler if isinstance(scheduler, dict) else {},
        workers={a: reply if isinstance(reply, dict) else {"error": repr(reply)} for a, reply in workers.items()},
        address=str(identity["address"]),
        missing="" if isinstance(scheduler, dict) else str(scheduler),
        members=_members(identity),
    )


async def _ask_scheduler(client: Client, timeout: float) -> dict[str, Any] | GpurtError:
    """The scheduler's part; or the error, where the package is missing there."""
    try:
        answer: dict[str, Any] = await ask_scheduler(client, remote.scheduler_status, timeout=timeout)
    except NoAnswer:
        raise
    except GpurtError as e:
        return e
    return answer


def _members(identity: dict[str, Any]) -> dict[str, Member]:
    workers: dict[str, dict[str, Any]] = identity["workers"]
    # Of the scheduler's clock; ours may differ.
    newest = max((w["last_seen"] for w in workers.values()), default=time.time())
    return {
        address: Member(
            name=str(w["name"]),
            threads=int(w["nthreads"]),
            memory_bytes=int(w["metrics"].get("memory") or 0),
            memory_limit_bytes=int(w["memory_limit"] or 0),
            quiet_seconds=max(0.0, newest - w["last_seen"]),
            refused=str(w["metrics"].get(_REFUSED, "")),
        )
        for address, w in workers.items()
    }
