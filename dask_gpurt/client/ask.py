"""`ask` and `ask_workers`: talk to a cluster with any kind of client, without waiting for ever for a worker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distributed import Client
from distributed.deploy import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distributed import Scheduler

#: seconds that a worker has to answer a question
ANSWER_SECONDS = 10.0


def ask(client: Client | Cluster | str, function: Callable[..., Any], *args: Any) -> Any:
    """Run the coroutine function ``function(client, *args)``.

    Parameters
    ----------
    client
        A client; a scheduler's address or a `Cluster`, to which a client is opened for as long as it takes.

    Returns
    -------
    The result; with an asynchronous client, an awaitable of it.

    Raises
    ------
    TypeError
        `client` is none of these.
    OSError
        No scheduler answers at that address.
    """
    if isinstance(client, (str, Cluster)):
        with Client(client, set_as_default=False) as own:
            return own.sync(function, own, *args)
    if not isinstance(client, Client):
        raise TypeError(
            f"the client is {client!r} ({type(client).__name__}), must be a distributed.Client, a cluster, or the "
            "address of a scheduler such as 'tcp://host:8786'"
        )
    return client.sync(function, client, *args)


async def ask_workers(
    client: Client,
    function: Callable[..., Any],
    *,
    workers: Iterable[str] | None = None,
    timeout: float = ANSWER_SECONDS,
    **kwargs: Any,
) -> dict[str, Any]:
    """Run a function on workers, as `Client.run` does.

    Parameters
    ----------
    workers
        Addresses; None: all.
    timeout
        Seconds that all have to answer; if not all do, each is asked again by itself, for as long.

    Returns
    -------
    Address to what the function returned, or to the exception: its own, or `TimeoutError` for a worker that does not
    answer.
    """
    addresses = None if workers is None else list(workers)
    try:
        answers = await _run(client, function, addresses, timeout, kwargs)
    except TimeoutError:
        # One worker that hangs keeps the answers of all others.
        if addresses is None:
            addresses = await client.run_on_scheduler(_addresses)
        found = await asyncio.gather(*(_ask_worker(client, function, a, timeout, kwargs) for a in addresses))
        return dict(zip(addresses, found, strict=True))
    # The other end of a pooled connection may have closed it just before it was used: a new one is tried, once.
    again = [a for a, answer in answers.items() if isinstance(answer, OSError)]
    found = await asyncio.gather(*(_ask_worker(client, function, a, timeout, kwargs) for a in again))
    return answers | dict(zip(again, found, strict=True))


async def _run(
    client: Client, function: Callable[..., Any], workers: list[str] | None, timeout: float, kwargs: dict[str, Any]
) -> dict[str, Any]:
    run = client.run(function, workers=workers, on_error="return", **kwargs)
    answers: dict[str, Any] = await asyncio.wait_for(run, timeout)
    return answers


async def _ask_worker(
    client: Client, function: Callable[..., Any], address: str, timeout: float, kwargs: dict[str, Any]
) -> Any:
    try:
        return (await _run(client, function, [address], timeout, kwargs))[address]
    except TimeoutError:
        return TimeoutError(f"no answer within {timeout:g} s")
    except Exception as e:  # it has left in the meantime
        return e


def _addresses(dask_scheduler: Scheduler) -> list[str]:
    return list(dask_scheduler.workers)
