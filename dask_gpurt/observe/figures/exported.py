"""The figures that leave a process: what each is called, its unit, and what it means.

One table feeds three readers, so that they cannot disagree: the heartbeat of a worker (`WORKER` keys), the
Prometheus collectors (family and labels) and docs/metrics.md (``python -m dask_gpurt.observe.figures.exported``). What
only `dask_gpurt.status` tells is in `status_only`; a test holds both against a live cluster: a number that
is in neither fails it.

A figure of the scheduler is found by a dotted path in its statistics; ``*`` stands for every key at that level, which
then is the value of the next label. A path that is not there, or has no number, gives no sample: a part that is not
installed has no figures rather than zeros.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Any, Literal

from dask_gpurt.observe.collect.causes import BUSY, CAUSES, LOCAL, UNASSIGNED, heartbeat_key
from dask_gpurt.observe.figures import status_only

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: after the namespace that Dask's configuration gives (``distributed.dashboard.prometheus.namespace``)
SUBSYSTEM = "gpurt"


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One figure."""

    #: key in the heartbeat of a worker, or path in the statistics of the scheduler
    key: str
    #: counter: only grows while its server lives; gauge: as it is now
    kind: Literal["counter", "gauge"]
    #: Prometheus name after ``dask_gpurt_``; several figures may share it, told apart by labels
    family: str
    #: bytes, seconds or a count
    unit: str
    about: str
    #: label -> value; ``*``: the key that the next ``*`` of the path met
    labels: tuple[tuple[str, str], ...] = ()

    def samples(self, tree: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
        """(label values, number) in `tree`, without booleans and what is not finite."""
        for met, number in _walk(tree, self.key.split("."), ()):
            keys = iter(met)
            yield tuple(next(keys) if text == "*" else text for _, text in self.labels), number


def _walk(node: Any, path: list[str], met: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    if not path:
        if isinstance(node, (int, float)) and not isinstance(node, bool) and math.isfinite(node):
            yield met, node
        return
    if not isinstance(node, dict):
        return
    head, rest = path[0], path[1:]
    if head == "*":
        for key, child in node.items():
            yield from _walk(child, rest, (*met, str(key)))
    elif head in node:
        yield from _walk(node[head], rest, met)


_HOST, _DISK = (("tier", "host"),), (("tier", "disk"),)
_DEVICE, _OBJECT = (("tier", "device"),), (("tier", "object"),)
_FETCH = "Shuffle bytes"
_SLOT = "Threads x time by use: busy, or the cause of idleness; unassigned: explained by the scheduler's stall_seconds"
_SOURCE = (("source", "*"),)
_ROWS = ", for the 32 sources with most bytes (hosts, where workers are more), and the others as one"

#: what rides on a worker's heartbeat; each costs a look at an attribute
WORKER: tuple[Figure, ...] = (
    Figure("host_bytes", "gauge", "tier_bytes", "bytes", "Held by the tiers", _HOST),
    Figure("disk_bytes", "gauge", "tier_bytes", "bytes", "Held by the tiers", _DISK),
    Figure("device_bytes", "gauge", "tier_bytes", "bytes", "Held by the tiers", _DEVICE),
    Figure("object_bytes", "gauge", "tier_bytes", "bytes", "Held by the tiers", _OBJECT),
    Figure("host_limit_bytes", "gauge", "tier_limit_bytes", "bytes", "Budget of a tier; none: no sample", _HOST),
    Figure("disk_limit_bytes", "gauge", "tier_limit_bytes", "bytes", "Budget of a tier; none: no sample", _DISK),
    Figure("moving_bytes", "gauge", "tier_moving_bytes", "bytes", "Being written from host memory to disk"),
    Figure("reserved_bytes", "gauge", "tier_reserved_bytes", "bytes", "Host memory promised to reads under way"),
    Figure("spilled_keys", "gauge", "tier_spilled_keys", "count", "Task results that are not in host memory"),
    Figure("written_bytes", "counter", "tier_written_bytes", "bytes", "Written to disk by the tiers"),
    Figure("read_bytes", "counter", "tier_read_bytes", "bytes", "Read from disk by the tiers"),
    Figure("write_seconds", "counter", "tier_write_seconds", "seconds", "Spent in writes to disk, without encoding"),
    Figure("read_seconds", "counter", "tier_read_seconds", "seconds", "Spent in reads from disk, without decoding"),
    Figure("sync_reads", "counter", "tier_sync_reads", "count", "Values read on the caller's thread"),
    Figure("errors", "counter", "tier_errors", "count", "Failed writes, reads, checksums and rebuilds"),
    Figure("lost", "counter", "tier_lost_values", "count", "Stored values that could not be read back, so recomputed"),
    Figure("admission_waits", "counter", "tier_admission_waits", "count", "Reads that waited for room in host memory"),
    Figure("admission_wait_seconds", "counter", "tier_admission_wait_seconds", "seconds", "Spent in those waits"),
    Figure("memory_alarms", "counter", "tier_memory_alarms", "count", "Times that process memory passed its limit"),
    Figure("shuffle_sent_bytes", "counter", "shuffle_bytes", "bytes", f"{_FETCH} by way", (("way", "sent"),)),
    Figure("shuffle_received_bytes", "counter", "shuffle_bytes", "bytes", f"{_FETCH} by way", (("way", "received"),)),
    Figure("shuffle_kept_bytes", "counter", "shuffle_bytes", "bytes", f"{_FETCH} by way", (("way", "kept"),)),
    Figure("shuffle_active_runs", "gauge", "shuffle_active_runs", "count", "Shuffles open on this worker"),
    Figure("shuffle_outputs", "counter", "shuffle_outputs", "count", "Output partitions assembled"),
    Figure("shuffle_restarts", "counter", "shuffle_restarts", "count", "Whole shuffles that this worker started over"),
    Figure(
        heartbeat_key("slots"),
        "counter",
        "slot_wall_seconds",
        "seconds",
        "Threads x time; the sum of all uses, running included",
    ),
    Figure(
        heartbeat_key("running"),
        "gauge",
        "slot_running_seconds",
        "seconds",
        "Work so far of the tasks that have not ended",
    ),
    *(
        Figure(heartbeat_key(use), "counter", "slot_seconds", "seconds", _SLOT, (("use", use),))
        for use in (BUSY, *LOCAL, UNASSIGNED)
    ),
    *(
        Figure(f"fetched.*.{unit}", "gauge", f"fetched_{unit}", unit if unit != "requests" else "count", about, _SOURCE)
        for unit, about in (
            ("bytes", f"Inputs fetched from another worker{_ROWS}"),
            ("seconds", f"Spent in these fetches{_ROWS}"),
            ("requests", f"Number of these fetches{_ROWS}"),
        )
    ),
    Figure(
        "nic_bytes_per_second",
        "gauge",
        "nic_bytes_per_second",
        "bytes per second",
        "Nominal speed of the network card that the worker listens on; unknown: no sample",
    ),
)

_CLASS = (("link_class", "*"),)

#: what a scheduler tells
SCHEDULER: tuple[Figure, ...] = (
    Figure(
        "placement.decisions.local",
        "counter",
        "placement_decisions",
        "count",
        "Tasks placed: local needs no input from elsewhere, moved fetches some",
        (("outcome", "local"),),
    ),
    Figure(
        "placement.decisions.moved",
        "counter",
        "placement_decisions",
        "count",
        "Tasks placed: local needs no input from elsewhere, moved fetches some",
        (("outcome", "moved"),),
    ),
    Figure(
        "placement.declined.*",
        "counter",
        "placement_declined",
        "count",
        "Tasks left to Dask's own placement on purpose, by reason",
        (("reason", "*"),),
    ),
    Figure(
        "placement.fallbacks.*.*",
        "counter",
        "placement_fallbacks",
        "count",
        "Times that a part of placement gave way to Dask, by part and reason",
        (("part", "*"), ("reason", "*")),
    ),
    Figure(
        "placement.microseconds.median",
        "gauge",
        "placement_decision_median_microseconds",
        "microseconds",
        "Median time of the last thousand decisions",
    ),
    Figure(
        "placement.links.*.latency_seconds",
        "gauge",
        "link_latency_seconds",
        "seconds",
        "Learned time of a request of no bytes, by class of link",
        _CLASS,
    ),
    Figure(
        "placement.links.*.bytes_per_second",
        "gauge",
        "link_bytes_per_second",
        "bytes per second",
        "Learned bandwidth, by class of link",
        _CLASS,
    ),
    Figure(
        "placement.links.*.samples",
        "counter",
        "link_samples",
        "count",
        "Transfers that a class of link was learned from; 0: still the assumed figures",
        _CLASS,
    ),
    Figure("shuffle.runs", "counter", "shuffle_runs", "count", "Shuffles run by the engine"),
    Figure("shuffle.active", "gauge", "shuffle_runs_active", "count", "Shuffles under way, Dask's own included"),
    Figure(
        "shuffle.fallbacks.*",
        "counter",
        "shuffle_fallbacks",
        "count",
        "Shuffles left to Dask, by reason; rechunking of arrays always is",
        (("reason", "*"),),
    ),
    Figure("ledger.slot_seconds", "counter", "ledger_slot_seconds", "seconds", "Threads x time of all workers"),
    Figure(
        "ledger.causes.*",
        "counter",
        "stall_seconds",
        "seconds",
        "Idle threads x time of all workers, by cause; with the busy time the sum is ledger_slot_seconds",
        (("cause", "*"),),
    ),
    Figure(
        "ledger.waits.*.p99_seconds",
        "gauge",
        "wait_p99_seconds",
        "seconds",
        "99 of 100 waits of a single thread were shorter, since the start, by cause; unassigned: it had no task",
        (("cause", "*"),),
    ),
    Figure("ledger.tasks", "counter", "tasks", "count", "Tasks that ended with a result"),
    Figure("ledger.errors", "counter", "ledger_errors", "count", "Times that the stall ledger itself failed"),
    Figure(
        "placement.decisions.restricted",
        "counter",
        "placement_restricted",
        "count",
        "Tasks placed that may run on some workers only",
    ),
    Figure(
        "placement.microseconds.total",
        "counter",
        "placement_decision_microseconds",
        "microseconds",
        "Time of all decisions",
    ),
    Figure(
        "placement.microseconds.p99",
        "gauge",
        "placement_decision_p99_microseconds",
        "microseconds",
        "99th percentile of the last thousand decisions",
    ),
    Figure(
        "placement.exceptions",
        "counter",
        "placement_exceptions",
        "count",
        "Exceptions in placement; Dask decided instead",
    ),
    Figure(
        "placement.speeds.*",
        "gauge",
        "worker_speed",
        "ratio",
        "Speed of a worker relative to the median worker, for the same tasks",
        (("worker", "*"),),
    ),
    Figure("shuffle.errors", "counter", "shuffle_errors", "count", "Exceptions in the choice of a shuffle's engine"),
    Figure("next_use.sent.hints", "counter", "next_use_hints", "count", "Next uses of keys told to workers"),
    Figure("next_use.exceptions", "counter", "next_use_exceptions", "count", "Exceptions while next uses were told"),
)

#: what the collectors count of themselves
OWN: tuple[Figure, ...] = (
    Figure("errors", "counter", "scrape_errors", "count", "Times that the figures of a server could not be read"),
)


def full_name(figure: Figure, namespace: str = "dask") -> str:
    """The name as Prometheus shows it."""
    parts = [*([namespace] if namespace else []), SUBSYSTEM, figure.family]
    return "_".join(parts) + ("_total" if figure.kind == "counter" else "")


def markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m dask_gpurt.observe.figures.exported > docs/metrics.md`; do not edit.",
        "",
        "With `prometheus_client` installed these are part of the `/metrics` page that Dask's scheduler and workers",
        "serve. Each sample has the label `address`, the server it is from: several may live in one process. The first",
        "part of the names is `distributed.dashboard.prometheus.namespace`.",
        "",
        "A part that is not installed has no samples. Counters start at zero with their server.",
    ]
    sections = (
        ("Workers", "The key is the one in `WorkerState.metrics['gpurt']`, which each heartbeat brings.", WORKER),
        ("Scheduler", "The key is the path in `dask_gpurt.status(client).scheduler`.", SCHEDULER),
        ("The collector itself", "One sample for each process.", OWN),
    )
    for title, about, figures in sections:
        lines += ["", f"## {title}", "", about, "", "| Name | Kind | Unit | Key | Meaning |", "|---|---|---|---|---|"]
        for figure in figures:
            labels = ",".join(f'{name}="{value}"' for name, value in figure.labels)
            name = full_name(figure) + (f"{{{labels}}}" if labels else "")
            lines.append(f"| `{name}` | {figure.kind} | {figure.unit} | `{figure.key}` | {figure.about} |")
    told = (
        ("Only in status: workers", "In `dask_gpurt.status(client).workers[address]`.", status_only.WORKER),
        ("Only in status: scheduler", "In `dask_gpurt.status(client).scheduler`.", status_only.SCHEDULER),
    )
    for title, about, rows in told:
        lines += ["", f"## {title}", "", about, "", "| Key | Unit | Meaning |", "|---|---|---|"]
        lines += [f"| `{key}` | {unit} | {meaning} |" for key, unit, meaning in rows]
    lines += ["", "## Causes of idle slots", "", "The values of the labels `cause` and `use`.", ""]
    lines += ["| Cause | Meaning |", "|---|---|"]
    lines += [f"| `{cause}` ({label}) | {meaning} |" for cause, (label, meaning) in CAUSES.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
