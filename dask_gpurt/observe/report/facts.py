"""`Run`: what happened on a cluster between two snapshots, as plain facts. Reports and advice are made from it alone.

A snapshot (see `dask_gpurt.client.reports`) is plain JSON and cumulative: it counts from the start of the scheduler
and of each worker. A run is the difference of two snapshots, or one by itself. A counter that is smaller than before
belongs to a worker that was restarted, and counts from zero. Of a worker that left in between only the slots are
known: they are in the totals of the scheduler's ledger.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from dask_gpurt.observe.collect import wait_histogram
from dask_gpurt.observe.collect.causes import CAUSES
from dask_gpurt.observe.collect.task_history import ROWS
from dask_gpurt.observe.report.tasks import Digest, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: workers that a note names
NAMED = 10


@dataclasses.dataclass(frozen=True)
class Fetches:
    """What one worker fetched from another."""

    source: str
    target: str
    bytes: float
    #: may overlap
    seconds: float
    requests: int

    @property
    def bytes_per_second(self) -> float:
        """0 where no time was measured."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class WorkerRun:
    """One worker."""

    address: str
    name: str
    host: str
    #: the key of its `dask_gpurt.model.node_class.NodeClass`
    node_class: str
    threads: int
    slot_seconds: float
    busy_seconds: float
    #: cause -> slot-seconds
    causes: Mapping[str, float]
    #: ``written_bytes``, ``read_bytes``, ``written_seconds``, ... of the tiers in the run; what is held, at its end
    tiers: Mapping[str, float]

    @property
    def title(self) -> str:
        """Its name; a number alone would not say that it is one."""
        return f"worker {self.name}" if self.name.isdigit() else self.name


@dataclasses.dataclass(frozen=True)
class Run:
    """All of it. Times in seconds."""

    start: float
    stop: float
    #: of very many some are summed up as one
    workers: tuple[WorkerRun, ...]
    slot_seconds: float
    busy_seconds: float
    causes: Mapping[str, float]
    #: cause -> histogram of single waits, see `dask_gpurt.observe.collect.wait_histogram`
    waits: Mapping[str, Sequence[int]]
    #: in order of their start; the newest only, when there were many
    tasks: tuple[Task, ...]
    #: tasks that ended, including those that `tasks` no longer has
    task_count: int
    fetches: tuple[Fetches, ...]
    #: (prefix, address) -> slot-seconds that others waited for a skewed task of it
    skewed: Mapping[tuple[str, str], float]
    #: bytes of each output of shuffles
    outputs: tuple[int, ...]
    #: the scheduler's statistics at the end, by part
    scheduler: Mapping[str, Any]
    #: local, moved, declined by reason, fallbacks by part and reason; in the run
    placement: Mapping[str, Any]
    #: bytes and counts of the engine's shuffles, over all workers; in the run
    shuffle: Mapping[str, float]
    #: what a host costs an hour: number, or pattern of its address, class or worker's name -> number; None: unknown
    prices: float | Mapping[str, float] | None
    #: address of a worker that did not answer at the end -> why; its figures are those of its last heartbeat
    silent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: of all tasks, where `tasks` has the longest only; None: `tasks` has all that are known
    known: Digest | None = None
    #: workers, including those that are summed up as one; 0: `workers` has each
    worker_count: int = 0
    #: (class of node, $ per hour of one, hosts), of all workers; None: no prices were given, or `workers` has each
    hosts: tuple[tuple[str, float, int], ...] | None = None
    #: outputs of shuffles, including those that `outputs` no longer has; 0: `outputs` has all
    output_count: int = 0
    #: which run it is, in words; "": what a block or a whole cluster did
    title: str = ""
    #: what else has to be known of it, each a sentence
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def digest(self) -> Digest:
        """Kinds of task, and which workers are slow."""
        return Digest.of(self.tasks) if self.known is None else self.known

    @property
    def seconds(self) -> float:
        """Between the two snapshots."""
        return self.stop - self.start

    @property
    def wanted_seconds(self) -> float:
        """Slot-seconds in which something had been submitted."""
        return max(0.0, self.slot_seconds - self.causes.get("no_work", 0.0))

    def worker(self, address: str) -> str:
        """How a worker is called; one that has left has only its address."""
        return next((w.title for w in self.workers if w.address == address), address)


def from_snapshots(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> Run:
    """The run between two snapshots; all since the start of the cluster when there is only one."""
    old: Mapping[str, Any] = before or {}
    scheduler, old_scheduler = after["scheduler"], old.get("scheduler") or {}
    every = grown(scheduler.get("ledger", {}), old_scheduler.get("ledger", {}))
    details, old_details = after["details"], old.get("details") or {}
    start = old.get("time") or after["started"]
    workers = []
    fetches: list[Fetches] = []
    shuffle: defaultdict[str, float] = defaultdict(float)
    for address, facts in after["workers"].items():
        status, old_status = facts["status"], (old.get("workers", {}).get(address) or {}).get("status", {})
        workers.append(_worker_run(address, facts, every.get("workers", {}).get(address, {}), old_status))
        fetches += _fetches(address, status, old_status)
        for key, value in grown(status.get("shuffle", {}), old_status.get("shuffle", {})).items():
            if isinstance(value, (int, float)):
                shuffle[key] += value
    rows = details.get("rows", ())
    if before is not None:  # by number: the times are of workers' clocks, which may be seconds off on a busy machine
        rows = rows[max(0, len(rows) - int(every.get("tasks", 0))) :]
    known = tuple(sorted((Task(*row) for row in rows), key=lambda task: task.start))
    fresh = details.get("outputs_seen", 0) - old_details.get("outputs_seen", 0)
    outputs = [nbytes for _, nbytes in details.get("outputs", ())][-fresh:] if fresh > 0 else []
    return Run(
        start=start,
        stop=after["time"],
        workers=tuple(sorted(workers, key=lambda w: (len(w.name), w.name))),
        slot_seconds=every.get("slot_seconds", 0.0),
        busy_seconds=every.get("busy_seconds", 0.0),
        causes={cause: every.get("causes", {}).get(cause, 0.0) for cause in CAUSES},
        waits=wait_histogram.grown(details.get("waits", {}), old_details.get("waits", {})),
        tasks=known,
        task_count=int(every.get("tasks", 0)),
        fetches=tuple(sorted(fetches, key=lambda f: -f.seconds)),
        skewed=_skewed(details, old_details),
        outputs=tuple(outputs),
        scheduler=scheduler,
        placement=grown(
            *(
                {k: facts.get("placement", {}).get(k, {}) for k in ("decisions", "declined", "fallbacks")}
                for facts in (scheduler, old_scheduler)
            )
        ),
        shuffle=dict(shuffle),
        prices=after.get("prices"),
        silent=after.get("silent", {}),
        notes=_notes(after, len(known), int(every.get("tasks", 0))),
    )


def _worker_run(address: str, facts: Mapping[str, Any], ledger: Mapping[str, Any], old: Mapping[str, Any]) -> WorkerRun:
    """One worker: what the snapshot says of it, what the ledger has charged to it, and its status before."""
    now = facts["status"].get("tiers", {})
    held = ("host_bytes", "host_limit_bytes", "disk_bytes", "spilled_keys")
    return WorkerRun(
        address=address,
        name=facts["name"],
        host=facts["host"],
        node_class=facts.get("node_class", ""),
        threads=facts["threads"],
        slot_seconds=ledger.get("slot_seconds", 0.0),
        busy_seconds=ledger.get("busy_seconds", 0.0),
        causes=ledger.get("causes", {}),
        tiers=_flat_tiers(now, old.get("tiers", {})) | {key: now[key] for key in held if now.get(key) is not None},
    )


def newest(known: int, tasks: int) -> str:
    """What has to be said where single tasks are known of the newest alone."""
    return f"Of single tasks the newest {known:,} of {tasks:,} are known: kinds of task are of these."


def _notes(after: Mapping[str, Any], known: int, tasks: int) -> tuple[str, ...]:
    # All that are kept, else these are all: by clocks that differ some may seem to be of another time.
    full = len(after["details"].get("rows", ())) >= ROWS
    said = (newest(known, tasks),) if full and known < tasks else ()
    workers, without = after["workers"], [a for a in after.get("without", ()) if a in after["workers"]]
    if not without:
        return said
    names = [f"{workers[address]['name']} ({address})" for address in without[:NAMED]]
    more = f" and {len(without) - NAMED:,} more" if len(without) > NAMED else ""
    return (*said, f"Nothing is known of what workers without dask-gpurt did: {', '.join(names)}{more}.")


def _fetches(address: str, status: Mapping[str, Any], old: Mapping[str, Any]) -> list[Fetches]:
    fetched, old_fetched = (s.get("slots", {}).get("fetched", {}) for s in (status, old))
    return [
        Fetches(source, address, sums["bytes"], sums["seconds"], int(sums["requests"]))
        for source, sums in grown(fetched, old_fetched).items()
        if sums["requests"]
    ]


def _skewed(details: Mapping[str, Any], old: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    skewed = {(name, address): seconds for name, address, seconds in details.get("skewed", ())}
    for name, address, seconds in old.get("skewed", ()):
        if (name, address) in skewed:
            skewed[name, address] -= seconds
    return {key: seconds for key, seconds in skewed.items() if seconds > 0}


#: kinds of failed writes: a full disk; the limit of spilled data, or a quota of the user
_NO_ROOM = ("ENOSPC", "EDQUOT")


def _flat_tiers(now: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, float]:
    tiers = grown(now, old)
    written, read = tiers.get("written", {}), tiers.get("read", {})
    return {
        "written_bytes": written.get("bytes", 0),
        # Without encoding, as of a run that is over: heartbeats have no more.
        "written_seconds": written.get("io_seconds", 0.0),
        "read_bytes": read.get("bytes", 0),
        "read_seconds": read.get("io_seconds", 0.0),
        "admission_wait_seconds": tiers.get("admission_wait_seconds", 0.0),
        "lost": tiers.get("lost", 0),
        "memory_alarms": tiers.get("memory_alarms", 0),
        "no_room": sum(tiers.get("write_errors", {}).get(kind, 0) for kind in _NO_ROOM),
    }


def grown(now: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Nested counters less what they were; one that has fallen has started over. What is no number stays as it is."""
    out: dict[str, Any] = {}
    for key, value in now.items():
        before = old.get(key)
        if isinstance(value, dict):
            out[key] = grown(value, before if isinstance(before, dict) else {})
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            was = before if isinstance(before, (int, float)) else 0
            out[key] = value - was if value >= was else value
        else:
            out[key] = value
    return out
