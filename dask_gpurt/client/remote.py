"""What runs on the scheduler and on workers when a client asks them.

Each function imports what it needs when it runs: a client needs neither half of the extension, and a worker only its
own. They return plain values, and say that something is not there instead of raising: a class of this package may not
unpickle in another version of it.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dask.typing import Key
    from distributed import Scheduler, Worker

    from dask_gpurt.extension import GpurtScheduler
    from dask_gpurt.observe.collect.stall_ledger import StallLedger

#: dependents looked at to see which workers are fetching a key
MAX_DEPENDENTS = 1000


def _plugin(scheduler: Scheduler) -> GpurtScheduler | None:
    from dask_gpurt.extension import NAME, GpurtScheduler

    plugin = scheduler.plugins.get(NAME)
    return plugin if isinstance(plugin, GpurtScheduler) else None


# ------------------------------------------------------------------ on the scheduler


def scheduler_status(dask_scheduler: Scheduler) -> dict[str, Any]:
    """What `dask_gpurt.status` shows of the scheduler; empty without the extension."""
    plugin = _plugin(dask_scheduler)
    return {} if plugin is None else plugin.statistics()


def story(dask_scheduler: Scheduler, key: Key) -> dict[str, Any]:
    """What `dask_gpurt.explain` shows of a task: the newest decision about it, or what is known instead."""
    plugin = _plugin(dask_scheduler)
    placement = None if plugin is None else plugin.placement
    if placement is None or placement.engine is None:
        return {"off": True}
    ts = dask_scheduler.tasks.get(key)
    state = None if ts is None else ts.state
    decision = placement.explain(key)
    blamed = None if ts is None else ts.exception_blame
    text = "" if blamed is None else " ".join((blamed.exception_text or "an exception").split())[:200]
    failed = None if blamed is None else {"key": str(blamed.key), "text": text}
    if decision is not None:
        return {**decision, "state": state, "failed": failed}
    if failed is not None and failed["key"] != str(key):
        return {"key": str(key), "kind": "failed", "state": state, "failed": failed}
    if ts is not None and state == "memory" and ts.run_spec is None:
        return {"key": str(key), "kind": "scattered", "state": state}
    if ts is not None and state in ("waiting", "queued", "no-worker", "released"):
        return {"key": str(key), "kind": "waiting", "state": state}
    log = placement.engine.log
    return {"state": state, "matches": log.matches(str(key)), "logged": len(log), "limit": log.limit}


def places(dask_scheduler: Scheduler, keys: Iterable[Any]) -> dict[Any, dict[str, Any]]:
    """What `dask_gpurt.where` shows of keys, without the tiers, which only workers know."""
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


def counted(dask_scheduler: Scheduler, figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A snapshot for a report, with the figures that workers have just given."""
    from dask_gpurt.model.node_class import key_of

    plugin = _plugin(dask_scheduler)
    if plugin is None:
        return {"off": "the extension is not installed on this scheduler"}
    if plugin.ledger is None or plugin.ledger.ledger is None:
        return {"off": "observation is off in this cluster"}
    ledger = plugin.ledger.ledger
    _take_in(dask_scheduler, ledger, figures)
    return {
        "time": time.time(),
        "started": ledger.started,
        "scheduler": plugin.statistics(),
        "details": ledger.details(),
        "prices": plugin.settings.observe.cost_per_hour,
        "workers": {
            ws.address: {
                "name": str(ws.name),
                "host": _host(ws.address),
                "node_class": key_of(ws),
                "threads": ws.nthreads,
            }
            for ws in dask_scheduler.workers.values()
        },
    }


def recorded(
    dask_scheduler: Scheduler, numbers: list[int], figures: dict[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """What is kept of runs, by the numbers that a user gave; ``missing`` instead, if there is no such run."""
    plugin = _plugin(dask_scheduler)
    if plugin is None:
        return {"off": "the extension is not installed on this scheduler"}
    if plugin.runs is None or plugin.ledger is None or plugin.ledger.ledger is None:
        return {"off": "observation is off in this cluster"}
    _take_in(dask_scheduler, plugin.ledger.ledger, figures or {})
    known = plugin.runs.numbers()
    records = []
    for number in numbers:
        if number not in known and not -len(known) <= number < 0:
            return {"missing": number, "known": known, "runs": plugin.runs.number}
        records.append(plugin.runs.find(known[number] if number < 0 else number))
    return {"records": records, "errors": plugin.ledger.ledger.errors}


def progress(dask_scheduler: Scheduler) -> dict[str, Any]:
    """When tasks ended on each worker, see `StallLedger.progress`, and the seconds that it has been ``quiet``."""
    plugin = _plugin(dask_scheduler)
    if plugin is None or plugin.ledger is None or plugin.ledger.ledger is None:
        return {}
    now, workers = time.time(), dask_scheduler.workers
    told = plugin.ledger.ledger.progress()
    return {a: one | {"quiet": now - workers[a].last_seen} for a, one in told.items() if a in workers}


async def listed(dask_scheduler: Scheduler) -> dict[str, Any]:
    """What `dask_gpurt.runs` shows."""
    plugin = _plugin(dask_scheduler)
    if plugin is None:
        return {"off": "the extension is not installed on this scheduler"}
    if plugin.runs is None:
        return {"off": "observation is off in this cluster"}
    runs = plugin.runs
    await runs.refresh()
    return {"runs": runs.headlines(), **runs.statistics()}


def _take_in(scheduler: Scheduler, ledger: StallLedger, figures: dict[str, dict[str, Any]]) -> None:
    """Give the ledger what workers have just said, as their heartbeats do."""
    for address, now in figures.items():
        ws = scheduler.workers.get(address)
        if ws is not None:
            ledger.guarded(ledger.heartbeat, ws, now)


def _host(address: str) -> str:
    from distributed.comm import get_address_host
    from distributed.utils import get_ip

    return get_ip() if address.startswith("inproc://") else get_address_host(address)


def switch_safe(dask_scheduler: Scheduler, parts: list[str], on: bool) -> dict[str, float] | None:
    """Put parts into safe mode, or out of it; those that are in it now, with since when. None: no extension."""
    from dask_gpurt.extension import safe

    plugin = _plugin(dask_scheduler)
    return None if plugin is None else safe.on_scheduler(plugin, parts, on)


def quarantined(dask_scheduler: Scheduler, hold: list[str], release: list[str], why: str) -> dict[str, Any] | None:
    """Take out workers and let others in, by address or name; what is out then. None: no quarantine here."""
    plugin = _plugin(dask_scheduler)
    if plugin is None or plugin.quarantine is None:
        return None
    quarantine = plugin.quarantine
    names = {str(ws.name): ws.address for ws in dask_scheduler.workers.values()}
    addresses = {word: names.get(word, word) for word in (*hold, *release)}
    unknown = [word for word, address in addresses.items() if address not in dask_scheduler.workers]
    absent = [word for word in unknown if word in quarantine.names() and word not in hold]
    if len(absent) < len(unknown):
        return {"unknown": [word for word in unknown if word not in absent], "known": list(dask_scheduler.workers)}
    quarantine.release_names(absent)
    now_held = quarantine.hold([addresses[word] for word in hold], why)
    not_held = [word for word in hold if addresses[word] not in now_held]
    released = quarantine.release([addresses[word] for word in release])
    return {**quarantine.statistics(), "not_held": not_held, "released": [*released, *absent]}


# ------------------------------------------------------------------ on a worker


def follow_safe(dask_worker: Worker, parts: list[str]) -> bool:
    """Have these parts in safe mode, and no others; whether the worker has the extension."""
    from dask_gpurt.extension import safe

    return safe.on_node(dask_worker, parts)


def worker_status(dask_worker: Worker) -> dict[str, Any]:
    """What `dask_gpurt.status` shows of a worker; empty without the extension."""
    from dask_gpurt.extension.worker import on_worker

    parts = on_worker(dask_worker)
    return {} if parts is None else parts.statistics()


def residence(dask_worker: Worker, keys: list[Any]) -> dict[Any, dict[str, Any]]:
    """Where a worker has its copies of keys."""
    from dask_gpurt.extension.worker import on_worker, stock_residence

    parts = on_worker(dask_worker)
    return stock_residence(dask_worker, keys) if parts is None else parts.residence(keys)


def figures(dask_worker: Worker) -> dict[str, Any]:
    """What a report takes from a worker.

    The figures are those of a heartbeat. One of Dask's is not made for this: it would close the worker if it overlapped
    with another one.
    """
    from dask_gpurt.extension.worker import on_worker

    parts = on_worker(dask_worker)
    return {} if parts is None else {"status": parts.statistics(), "figures": parts.heartbeat()}


async def checkup(dask_worker: Worker, leaders: list[str], seconds: float) -> dict[str, Any]:
    """What `dask gpurt doctor` takes from a worker.

    Parameters
    ----------
    leaders
        Addresses of the workers that make the checks which are the same for all workers of a host.
    """
    from dask_gpurt.config import Settings
    from dask_gpurt.doctor.worker import examine
    from dask_gpurt.extension.worker import on_worker
    from dask_gpurt.model.known_as import known_as

    parts = on_worker(dask_worker)
    settings = Settings.load() if parts is None else parts.settings
    tiers = {} if parts is None or parts.runtime is None else parts.runtime.statistics()
    fragmented = tiers.get("device", {}).get("out_of_memory", {}).get("fragmented", 0)
    leads = await known_as(dask_worker) in leaders
    fed = None if parts is None or parts.feed is None else parts.feed.fed()
    return await examine(dask_worker, settings.tiers, leads=leads, seconds=seconds, fragmented=fragmented, fed=fed)


def stack() -> dict[str, str]:
    """The versions of what a process runs on."""
    from dask_gpurt.backends.system import versions

    return versions()
