"""Stand-ins for a scheduler and its workers: the attributes that the feed reads, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

from dask_gpurt.observe.collect.causes import CAUSES
from dask_gpurt.observe.figures import history
from tests.observe.numbers import HEARTBEAT

MiB = 2**20


class FakeWorkerState:
    def __init__(self, name: Any, figures: dict[str, Any] | None) -> None:
        self.name = name
        self.nthreads = 0
        self.metrics: dict[str, Any] = {"cpu": 1.0} if figures is None else {"cpu": 1.0, "gpurt": figures}


class FakeScheduler:
    def __init__(self) -> None:
        self.workers: dict[str, FakeWorkerState] = {}
        self.address = f"tcp://10.0.0.1:{id(self) % 60000}"

    def add(self, name: Any, figures: dict[str, Any] | None) -> str:
        address = f"tcp://10.0.0.2:{4000 + len(self.workers)}"
        self.workers[address] = FakeWorkerState(name, figures)
        return address


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


#: sent only by workers that have that tier
OPTIONAL = ("device_bytes", "device_limit_bytes", "device_free_bytes", "object_bytes")


def heartbeat(**known: Any) -> dict[str, Any]:
    """All figures of a worker, zero unless given."""
    out: dict[str, Any] = {key: 0 for key in HEARTBEAT if "*" not in key}
    out |= {"disk_limit_bytes": None, "host_limit_bytes": 100 * MiB, "nic_bytes_per_second": None}
    out["fetched"] = {"others": {"bytes": 3 * MiB, "seconds": 0.5, "requests": 2}}
    assert set(known) <= set(out)
    for key in OPTIONAL:
        if key not in known:
            del out[key]
    return out | known


def figures(local: int = 0, moved: int = 0, declined: int = 0, fallbacks: int = 0) -> dict[str, Any]:
    """Statistics of a scheduler."""
    link = {"latency_seconds": 0.005, "bytes_per_second": 4e8, "samples": 0, "dropped": 0}
    return {
        "placement": {
            "decisions": {
                "total": local + moved,
                "local": local,
                "moved": moved,
                "restricted": 0,
                "newest": [[0.1, 0.2, 0]],
            },
            "declined": {"no inputs": declined},
            "fallbacks": {"decide": {"exception": fallbacks}},
            "microseconds": {"median": 25.0, "p99": 60.0, "total": 1e4},
            "exceptions": 0,
            "speeds": {"tcp://10.0.0.2:4000": 1.0},
            "links": {"process": link, "host": {**link, "samples": 7}, "network": link},
        },
        "shuffle": {"runs": 3, "active": 1, "errors": 0, "fallbacks": {"rechunk": 4, "error": 2}},
        "preflight": {"phases": {"passed": 2}, "counts": {"clean": 2}},
        "quarantine": {"counts": {"suspects": 1, "held": 1}},
        "next_use": {"sent": {"hints": 9}, "exceptions": 0},
        "ledger": {
            "slot_seconds": 10.0,
            "busy_seconds": 9.0,
            "causes": {**dict.fromkeys(CAUSES, 0.0), "network": 1.0},
            "waits": {"network": {"count": 3, "p50_seconds": 0.1, "p99_seconds": 0.9}},
            "tasks": 4,
            "output_bytes": [MiB, 2 * MiB, MiB],
            "errors": 0,
        },
    }


def give_feed(scheduler: FakeScheduler, read: Any, monkeypatch: Any) -> tuple[history.Feed, Clock]:
    """A feed that ticks when it is told to."""
    clock = Clock()
    made = history.Feed(scheduler, read, clock)
    monkeypatch.setitem(history._feeds, scheduler, made)
    return made, clock


async def beat(worker: Any) -> None:
    """Make a heartbeat. Dask closes a worker of which one overlaps with another."""
    worker.periodic_callbacks["heartbeat"].stop()
    # One that is under way has no event to wait for.
    while worker.extensions["spans"].digests_total_since_heartbeat:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await worker.heartbeat()
