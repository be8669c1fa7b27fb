"""`explain` and `where`: what a user asks about single tasks and keys.

The functions that run on the scheduler or a worker return plain values, and say that something is not there instead
of raising: a class of this package may not unpickle in another version of it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from dask.base import is_dask_collection
from dask.core import flatten
from distributed import Future
from distributed.client import futures_of

from dask_gpurt.client.ask import ask, ask_workers
from dask_gpurt.errors import GpurtError, UnknownKey
from dask_gpurt.extension import NAME, GpurtScheduler, on_worker, stock_residence
from dask_gpurt.observe.answers.explain import Explanation
from dask_gpurt.observe.answers.where import Where

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dask.typing import Key
    from distributed import Client, Scheduler, Worker
    from distributed.deploy import Cluster

#: dependents looked at to see which workers are fetching a key
MAX_DEPENDENTS = 1000


def explain(client: Client | Cluster | str, key: Key) -> Explanation:
    """Why a task ran where it ran: the workers that were compared, with the terms of the cost; the choice; and, when
    the task is finished, what was predicted against what happened.

    The scheduler keeps the newest 10,000 decisions, also those about tasks that are long forgotten.

    Parameters
    ----------
    client
        Of a cluster with the extension; or the cluster, or its scheduler's address. With an asynchronous client the
        result is to be awaited.
    key
        A key, a future, or a collection with one key, such as a `dask.delayed.Delayed`.

    Returns
    -------
    Explanation
        Prints as text, shows as HTML in a notebook; ``.to_dict()`` for programs. Times in seconds.

    Raises
    ------
    UnknownKey
        There is no decision about that key, or none any more.
    GpurtError
        Placement is not on in that cluster.
    TypeError
        A collection with more than one key.
    """
    keys = _keys(key)
    if len(keys) != 1:
        shown = ", ".join(map(repr, keys[:3])) + (", ..." if len(keys) > 3 else "")
        raise TypeError(f"one key is explained at a time, got {len(keys)}: {shown}. Remedy: choose one of them")
    answer: Explanation = ask(client, _explain, keys[0])
    return answer


async def _explain(client: Client, key: Key) -> Explanation:
    answer: dict[str, Any] = await client.run_on_scheduler(_story, key=key)
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


def _story(dask_scheduler: Scheduler, key: Key) -> dict[str, Any]:
    """Runs on the scheduler."""
    plugin = dask_scheduler.plugins.get(NAME)
    placement = plugin.placement if isinstance(plugin, GpurtScheduler) else None
    if placement is None or placement.engine is None:
        return {"off": True}
    ts = dask_scheduler.tasks.get(key)
    state = None if ts is None else ts.state
    story = placement.explain(key)
    if story is not None:
        return {**story, "state": state}
    if ts is not None and state == "memory" and ts.run_spec is None:
        return {"key": str(key), "kind": "scattered", "state": state}
    if ts is not None and state in ("waiting", "queued", "no-worker", "released"):
        return {"key": str(key), "kind": "waiting", "state": state}
    log = placement.engine.log
    return {"state": state, "matches": log.matches(str(key)), "logged": len(log), "limit": log.limit}


def where(client: Client | Cluster | str, keys: Any) -> Where:
    """Which workers hold keys, in memory or on disk, who is fetching them, and who wants them.

    Workers are asked directly, so tiers are those of now. Works without the extension too, with what Dask's own store
    tells.

    Parameters
    ----------
    client
        Or a cluster, or its scheduler's address. With an asynchronous client the result is to be awaited.
    keys
        A key, a future, a collection that was persisted, or a list of these.

    Returns
    -------
    Where
        Prints as text, shows as HTML in a notebook; ``.to_dict()`` for programs, ``where(client, x)[key]`` for one.

    Raises
    ------
    UnknownKey
        The scheduler knows none of the keys.
    """
    answer: Where = ask(client, _where, _keys(keys))
    return answer


async def _where(client: Client, keys: list[Any]) -> Where:
    answer: dict[Any, dict[str, Any]] = await client.run_on_scheduler(_places, keys=keys)
    if all(place["state"] == "unknown" for place in answer.values()):
        shown = ", ".join(map(repr, keys[:3])) + (", ..." if len(keys) > 3 else "")
        raise UnknownKey(
            f"the scheduler knows none of {len(keys)} key{'s' if len(keys) != 1 else ''}: {shown or 'nothing given'}. "
            "Only what is wanted by a future or a persisted collection, or by tasks that wait for it, is kept. "
            "Remedy: give a future, its key, or what client.persist returned"
        )
    holders = sorted({address for place in answer.values() for address in place["holders"]})
    replies = await ask_workers(client, _residence, workers=holders, keys=list(answer)) if holders else {}
    return Where.from_replies(answer, {a: r if isinstance(r, dict) else None for a, r in replies.items()})


def _places(dask_scheduler: Scheduler, keys: Iterable[Any]) -> dict[Any, dict[str, Any]]:
    """Runs on the scheduler."""
    out: dict[Any, dict[str, Any]] = {}
    for key in keys:
        ts = dask_scheduler.tasks.get(key)
        if ts is None:
            nothing: dict[str, Any] = {"state": "unknown", "nbytes": None, "holders": [], "processing": None}
            out[key] = {**nothing, "fetching": [], "clients": [], "waiters": 0}
            continue
        holders = ts.who_has or ()
        fetching = {
            ws.address
            for d in islice(ts.dependents, MAX_DEPENDENTS)
            if (ws := d.processing_on) is not None and ws not in holders and ts in ws.needs_what
        }
        out[key] = {
            "state": ts.state,
            "nbytes": ts.nbytes if ts.nbytes >= 0 else None,
            "holders": sorted(ws.address for ws in holders),
            "processing": None if ts.processing_on is None else ts.processing_on.address,
            "fetching": sorted(fetching),
            "clients": sorted(c.client_key for c in ts.who_wants or ()),
            "waiters": len(ts.waiters or ()),
        }
    return out


def _residence(dask_worker: Worker, keys: list[Any]) -> dict[Any, dict[str, Any]]:
    """Runs on a worker."""
    parts = on_worker(dask_worker)
    return stock_residence(dask_worker, keys) if parts is None else parts.residence(keys)


def _keys(given: Any) -> list[Any]:
    """The keys of what a user gave, each once."""
    if isinstance(given, Future):
        return [given.key]
    if is_dask_collection(given):
        futures = futures_of(given)
        return list(dict.fromkeys([f.key for f in futures] if futures else flatten(given.__dask_keys__())))
    if isinstance(given, (list, set, frozenset)):
        return list(dict.fromkeys(key for one in given for key in _keys(one)))
    return [given]
