"""`explain` and `where`: what a user asks about single tasks and keys."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dask.base import is_dask_collection
from dask.core import flatten, validate_key
from distributed import Future
from distributed.client import futures_of

from dask_gpurt.client import remote
from dask_gpurt.client.ask import ask, ask_scheduler, ask_workers
from dask_gpurt.client.connect import ANSWER_SECONDS
from dask_gpurt.errors import GpurtError, UnknownKey
from dask_gpurt.observe.answers.explain import Explanation
from dask_gpurt.observe.answers.where import Where

if TYPE_CHECKING:
    from collections.abc import Collection

    from dask.typing import Key
    from distributed import Client

    from dask_gpurt.client.ask import Asked

#: keys in one message. More of them would hold up the event loop of the scheduler, some 30 us each
_BATCH = 500
#: seconds until it is asked again whether a graph has arrived
_AGAIN_SECONDS = 0.05


def explain(client: Asked, key: Key, *, timeout: float = ANSWER_SECONDS) -> Explanation:
    """Why a task ran where it ran: the workers that were compared, with the terms of the cost; the choice; and, when
    the task is finished, what was predicted against what happened.

    The scheduler keeps the newest 10,000 decisions, also those about tasks that are long forgotten.

    Parameters
    ----------
    client
        Of a cluster with the extension; or the cluster, or its scheduler's address; None: the current client, or else
        the address in Dask's configuration. With an asynchronous client the result is to be awaited.
    key
        A key, a future, or a collection with one key, such as a `dask.delayed.Delayed`.
    timeout
        Seconds that the scheduler has to answer.

    Returns
    -------
    Explanation
        Prints as text, shows as HTML in a notebook; ``.to_dict()`` for programs. Times in seconds.

    Raises
    ------
    UnknownKey
        There is no decision about that key, or none any more.
    NoAnswer
        The scheduler cannot be reached, or does not answer in time.
    GpurtError
        Placement is not on in that cluster.
    TypeError
        A collection with more than one key.
    """
    keys = _keys(key)
    if len(keys) != 1:
        shown = ", ".join(map(repr, keys[:3])) + (", ..." if len(keys) > 3 else "")
        raise TypeError(f"one key is explained at a time, got {len(keys)}: {shown}. Remedy: choose one of them")
    answer: Explanation = ask(client, _explain, keys[0], timeout, timeout=timeout)
    return answer


async def _explain(client: Client, key: Key, timeout: float) -> Explanation:
    deadline = asyncio.get_running_loop().time() + timeout
    answer: dict[str, Any] = await ask_scheduler(client, remote.story, timeout=timeout, key=key)
    while "matches" in answer and answer["state"] is None and await _under_way(client, (key,), deadline):
        answer = await ask_scheduler(client, remote.story, timeout=timeout, key=key)
    if answer.get("off"):
        raise GpurtError(
            "nothing is known about decisions, because placement is not on in this cluster. Remedy: "
            "dask_gpurt.attach(client), or `dask scheduler --preload dask_gpurt.preload`"
        )
    if "kind" not in answer:
        raise UnknownKey(_unknown(key, answer))
    return Explanation.from_story(answer)


def _unknown(key: Key, answer: dict[str, Any]) -> str:
    state = answer["state"]
    if state is None:
        known = "neither the scheduler nor its log of decisions knows it"
    else:
        known = f"its state is {state!r}, but it was assigned before the log of decisions begins"
    matches = f"; known keys that begin so: {', '.join(map(repr, answer['matches']))}" if answer["matches"] else ""
    return (
        f"there is no decision about {key!r}: {known}{matches}. The log has {answer['logged']:,} decisions of the "
        f"newest {answer['limit']:,} that it keeps. Remedy: give the whole key (future.key), and ask before as many "
        "more tasks have run"
    )


def where(client: Asked, keys: Any, *, timeout: float = ANSWER_SECONDS) -> Where:
    """Which workers hold keys, in memory or on disk, who is fetching them, and who wants them.

    Workers are asked directly, so tiers are those of now. Works without the extension on workers too, with what Dask's
    own store knows. A worker that does not answer is named.

    Parameters
    ----------
    client
        Or a cluster, or its scheduler's address; None: the current client, or else the address in Dask's configuration.
        With an asynchronous client the result is to be awaited.
    keys
        A key, a future, a collection that was persisted, or a list of these.
    timeout
        Seconds that the scheduler has to answer, and then the workers.

    Returns
    -------
    Where
        Prints as text, shows as HTML in a notebook; ``.to_dict()`` for programs, ``where(client, x)[key]`` for one.

    Raises
    ------
    UnknownKey
        The scheduler knows none of the keys.
    NoAnswer
        The scheduler cannot be reached, or does not answer in time.
    """
    answer: Where = ask(client, _where, _keys(keys), timeout, timeout=timeout)
    return answer


async def _where(client: Client, keys: list[Any], timeout: float) -> Where:
    answer: dict[Any, dict[str, Any]] = {}
    replies: dict[str, Any] = {}
    # At least one message: it may be that nothing was given, and that no scheduler answers.
    for i in range(0, len(keys) or 1, _BATCH):
        found = await _places(client, keys[i : i + _BATCH], timeout)
        answer |= found
        holders = sorted({address for place in found.values() for address in place["holders"]})
        # One that did not answer is not waited for again.
        if asked := [address for address in holders if not isinstance(replies.get(address), Exception)]:
            heard = await ask_workers(client, remote.residence, workers=asked, timeout=timeout, keys=list(found))
            for address, reply in heard.items():
                replies[address] = reply if isinstance(reply, Exception) else replies.get(address, {}) | reply
    if all(place["state"] == "unknown" for place in answer.values()):
        shown = ", ".join(map(repr, keys[:3])) + (", ..." if len(keys) > 3 else "")
        raise UnknownKey(
            f"the scheduler knows none of {len(keys)} key{'s' if len(keys) != 1 else ''}: {shown or 'nothing given'}. "
            "Only what is wanted by a future or a persisted collection, or by tasks that wait for it, is kept. "
            "Remedy: give a future, its key, or what client.persist returned"
        )
    return Where.from_replies(answer, replies)


async def _places(client: Client, keys: list[Any], timeout: float) -> dict[Any, dict[str, Any]]:
    """What the scheduler knows of keys, once the graphs that bring them have arrived."""
    deadline = asyncio.get_running_loop().time() + timeout
    found: dict[Any, dict[str, Any]] = await ask_scheduler(client, remote.places, timeout=timeout, keys=keys)
    while unknown := [key for key, place in found.items() if place["state"] == "unknown"]:
        if not await _under_way(client, unknown, deadline):
            break
        found |= await ask_scheduler(client, remote.places, timeout=timeout, keys=unknown)
    return found


async def _under_way(client: Client, keys: Collection[Any], deadline: float) -> bool:
    """Whether it is worth asking again, some time later: the client waits for one of these keys.

    A graph goes another way than a question, which may overtake it.
    """
    pending = any((state := client.futures.get(key)) is not None and state.status == "pending" for key in keys)
    if not pending or asyncio.get_running_loop().time() >= deadline:
        return False
    await asyncio.sleep(_AGAIN_SECONDS)
    return True


def _keys(given: Any) -> list[Any]:
    """The keys of what a user gave, each once."""
    if isinstance(given, Future):
        return [given.key]
    if is_dask_collection(given):
        futures = futures_of(given)
        return list(dict.fromkeys([f.key for f in futures] if futures else flatten(given.__dask_keys__())))
    if isinstance(given, (list, set, frozenset)):
        return list(dict.fromkeys(key for one in given for key in _keys(one)))
    try:
        validate_key(given)
    except TypeError as e:
        raise TypeError(
            f"the key is {given!r} ({type(given).__name__}), must be a key, a future, a collection, or a list of "
            "these. The client comes first"
        ) from e
    return [given]
