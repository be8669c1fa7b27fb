"""`ask`: put a question to a cluster with any kind of client. `ask_scheduler`, `ask_workers`: its parts.

A question is a coroutine function of a client. None of these waits for longer than its timeout, whatever is stopped:
what a sick cluster is asked must not hang with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import warnings
from typing import TYPE_CHECKING, Any

import dask.config
from distributed import Client, default_client
from distributed.utils import LoopRunner, sync

from dask_gpurt import planning
from dask_gpurt.client.connect import ANSWER_SECONDS, opened, within
from dask_gpurt.errors import GpurtError, NoAnswer
from dask_gpurt.observe.answers.snapshot import LACKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import TypeAlias

    from distributed.deploy import Cluster

    #: what a question may be put to; None: the current client, else the address in Dask's configuration
    Asked: TypeAlias = Client | Cluster | str | None

#: share of the timeout after which workers are asked one by one, beside the question to all
_PATIENCE = 0.4


def found(client: Asked) -> Client | Cluster | str:
    """What a question goes to, if `client` is None: the current client, or else the configured address.

    Raises
    ------
    GpurtError
        There is neither, or the client is closed.
    TypeError
        `client` is nothing that can be asked.
    """
    if client is None:
        try:
            return default_client()
        except ValueError:
            client = dask.config.get("scheduler-address", None)
        if not client:
            raise GpurtError(
                "there is no client, and no address of a scheduler. Remedy: give one such as 'tcp://host:8786', or set "
                "DASK_SCHEDULER_ADDRESS, or scheduler-address in Dask's configuration"
            )
    if isinstance(client, Client):
        if client.status == "closed":
            raise GpurtError("the client is closed. Remedy: a new one, or the scheduler's address")
        return client
    if isinstance(client, str) or isinstance(getattr(client, "scheduler_address", None), str):
        return client
    raise TypeError(
        f"the client is {client!r} ({type(client).__name__}), must be a distributed.Client, a cluster, or the "
        "address of a scheduler such as 'tcp://host:8786'"
    )


def checked_seconds(seconds: float, name: str = "timeout") -> None:
    """Refuse what is no number of seconds above 0 with a `ValueError`."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise ValueError(f"{name} is {seconds!r}, must be a number of seconds above 0, and finite")


@contextlib.contextmanager
def after_block(error: BaseException | None, what: str) -> Iterator[None]:
    """The end of a ``with`` block that has raised `error`, or not: what fails here must not take its place."""
    try:
        yield
    except Exception as e:
        if error is None:
            raise
        warnings.warn(f"dask-gpurt: {what}: {e}", stacklevel=4)


def is_asynchronous(client: Client | Cluster | str) -> bool:
    """Whether answers of what `found` returned are to be awaited."""
    return bool(getattr(client, "asynchronous", False))


def ask(client: Asked, function: Callable[..., Any], *args: Any, timeout: float = ANSWER_SECONDS) -> Any:
    """Run the coroutine function ``function(client, *args)``, which limits its own time.

    Parameters
    ----------
    client
        A client. Or a scheduler's address or a cluster, to which a client is opened for as long as it takes. None: see
        `found`.
    timeout
        Seconds to connect to an address.

    Returns
    -------
    The result; with an asynchronous client or cluster, an awaitable of it.

    Raises
    ------
    GpurtError, TypeError
        See `found`.
    ValueError
        `timeout` is no number above 0.
    NoAnswer
        No scheduler answers at that address.
    """
    checked_seconds(timeout)
    planning.late()
    target = found(client)
    if isinstance(target, Client):
        return target.sync(function, target, *args)
    if is_asynchronous(target):
        return _through(target, timeout, function, *args)
    with Session(target, timeout) as session:
        return session.ask(function, *args)


async def _through(target: Cluster | str, timeout: float, function: Callable[..., Any], *args: Any) -> Any:
    async with _opened(target, timeout) as client:
        return await function(client, *args)


def _opened(target: Cluster | str, timeout: float) -> contextlib.AbstractAsyncContextManager[Client]:
    if isinstance(target, str):
        return opened(target, timeout=timeout)
    return opened(target.scheduler_address, timeout=timeout, security=getattr(target, "security", None))


class Session:
    """Several questions in a row from a thread without an event loop of its own; a context manager.

    Parameters
    ----------
    target
        As `found` returns it, and not asynchronous. To an address or a cluster it opens a client.
    timeout
        Seconds to connect to an address.

    Raises
    ------
    NoAnswer
        On entering: no scheduler answers at that address.
    """

    def __init__(self, target: Client | Cluster | str, timeout: float) -> None:
        self._target = target
        self._timeout = timeout
        self._runner: LoopRunner | None = None
        self._open: contextlib.AbstractAsyncContextManager[Client] | None = None
        #: None before it is entered
        self.client: Client | None = target if isinstance(target, Client) else None

    def __enter__(self) -> Session:
        if not isinstance(self._target, Client):
            self._runner = LoopRunner()
            self._runner.start()
            self._open = _opened(self._target, self._timeout)
            try:
                self.client = sync(self._runner.loop, self._open.__aenter__)
            except BaseException:
                self._stop()
                raise
        return self

    @property
    def lost(self) -> bool:
        """Whether the connection to the scheduler is, for good."""
        return self.client is None or self.client.status in ("closing", "closed")

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(client, *args)``."""
        assert self.client is not None
        return sync(self.client.loop, function, self.client, *args)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._runner is None or self._open is None:
            return
        try:
            sync(self._runner.loop, self._open.__aexit__, None, None, None)
        finally:
            self._stop()

    def _stop(self) -> None:
        """Stop the loop; a name that is still looked up keeps its thread for a while."""
        assert self._runner is not None
        with contextlib.suppress(TimeoutError):
            self._runner.stop(timeout=1)


async def ask_scheduler(
    client: Client, function: Callable[..., Any], /, *, timeout: float = ANSWER_SECONDS, **kwargs: Any
) -> Any:
    """Run a function of this package on the scheduler, as `Client.run_on_scheduler` does.

    Raises
    ------
    NoAnswer
        It does not answer within `timeout` seconds, or the connection is lost.
    GpurtError
        This package cannot be imported there.
    """
    _require_open(client)
    return await _limited(client, client.run_on_scheduler(function, **kwargs), timeout)


async def facts_of(client: Client, *, timeout: float = ANSWER_SECONDS, left: float | None = None) -> dict[str, Any]:
    """What the scheduler knows of itself and of all workers; needs nothing of this package there.

    Parameters
    ----------
    left
        Of the timeout, in seconds; None: all of it.

    Raises
    ------
    NoAnswer
        As for `ask_scheduler`.
    """
    _require_open(client)
    facts: dict[str, Any] = await _limited(client, client.scheduler.identity(n_workers=-1), timeout, left)
    return facts


def _require_open(client: Client) -> None:
    if client.status in ("closing", "closed") or client.scheduler is None:
        raise NoAnswer(
            "the connection to the scheduler is lost, and the client closed. Remedy: look whether it still runs"
        )


async def _limited(client: Client, work: Awaitable[Any], timeout: float, left: float | None = None) -> Any:
    where = getattr(client.scheduler, "address", "")
    try:
        return await within(timeout if left is None else left, work)
    except TimeoutError as e:
        if client.status == "connecting":  # again, with refused connections
            raise NoAnswer(
                f"the connection to the scheduler at {where!r} is lost, and there is no new one within {timeout:g} s. "
                "Remedy: look whether it still runs"
            ) from e
        raise NoAnswer(
            f"the scheduler at {where!r} does not answer within {timeout:g} s. Remedy: look whether its process is "
            "stopped, swapped out or busy (py-spy dump); a longer timeout if it is only slow"
        ) from e
    except OSError as e:
        raise NoAnswer(
            f"the connection to the scheduler at {where!r} is lost ({e}). Remedy: look whether it still runs"
        ) from e
    except (ImportError, AttributeError, RuntimeError) as e:
        _require_open(client)  # one that was closed in the middle has lost its parts, and its connections
        if not isinstance(e, ImportError) and not str(e).startswith("Can't get attribute"):
            raise
        raise GpurtError(
            f"the scheduler cannot import dask_gpurt ({e}). Remedy: install the same version of dask-gpurt there"
        ) from e


async def ask_workers(
    client: Client,
    function: Callable[..., Any],
    /,
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
        Seconds that they have to answer. One worker that hangs keeps the answers of all others: after a part of this
        time each is asked by itself too.

    Returns
    -------
    Address to what the function returned, or to the exception: its own, or `TimeoutError` for a worker that does not
    answer.

    Raises
    ------
    NoAnswer
        The scheduler does not say which workers there are.
    """
    _require_open(client)
    addresses = None if workers is None else list(workers)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    every = asyncio.ensure_future(_run(client, function, addresses, kwargs))
    try:
        await asyncio.wait({every}, timeout=_PATIENCE * timeout)
        if not every.done():
            if addresses is None:
                addresses = list((await facts_of(client, timeout=timeout, left=deadline - loop.time()))["workers"])
            left = deadline - loop.time()
            alone = asyncio.gather(*(_ask_worker(client, function, a, left, timeout, kwargs) for a in addresses))
            # A `gather` that is cancelled ends with an exception, which asyncio prints where nothing looks at it.
            alone.add_done_callback(lambda t: t.cancelled() or t.exception())
            await asyncio.wait((every, alone), return_when=asyncio.FIRST_COMPLETED)
            if not every.done() or every.exception() is not None:
                return dict(zip(addresses, await alone, strict=True))
            alone.cancel()
        answers = every.result()
    except NoAnswer:
        raise
    except OSError as e:
        raise NoAnswer(f"the scheduler is lost while workers are asked ({e}). Remedy: look whether it runs") from e
    except (AttributeError, RuntimeError):
        _require_open(client)  # see `_limited`
        raise
    finally:
        if not every.done():
            every.cancel()
            every.add_done_callback(lambda t: t.cancelled() or t.exception())
    # The other end of a pooled connection may have closed it just before it was used: a new one is tried, once.
    again = [a for a, answer in answers.items() if isinstance(answer, OSError)]
    left = deadline - loop.time()
    new = await asyncio.gather(*(_ask_worker(client, function, a, left, timeout, kwargs) for a in again))
    return answers | dict(zip(again, new, strict=True))


def unanswered(answers: Mapping[str, Any]) -> dict[str, str]:
    """Of the answers of `ask_workers`: address to why there is none. A worker without this package has answered."""
    failed = {address: answer for address, answer in answers.items() if isinstance(answer, Exception)}
    # Dask may wrap the exception, so that the text alone says what it was.
    return {a: str(e) for a, e in failed.items() if not any(name in repr(e) for name in LACKING)}


async def _run(
    client: Client, function: Callable[..., Any], workers: list[str] | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    answers: dict[str, Any] = await client.run(function, workers=workers, on_error="return", **kwargs)
    return answers


async def _ask_worker(
    client: Client, function: Callable[..., Any], address: str, seconds: float, timeout: float, kwargs: dict[str, Any]
) -> Any:
    try:
        return (await within(seconds, _run(client, function, [address], kwargs)))[address]
    except TimeoutError:
        return TimeoutError(f"no answer within {timeout:g} s")
    except Exception as e:  # it has left in the meantime
        return e
