"""The record of a run: bounded, plain JSON. `made` from what was followed, `run_of` back to a `Run` for its report.

Bounded by rows: `WORKERS` workers (the others as one), `TASKS` tasks, `KINDS` kinds of task, `FETCHES` pairs of
workers, `SKEWED` skewed tasks, `OUTPUTS` sizes of outputs. The largest are kept.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import zlib
from typing import TYPE_CHECKING, Any

from dask_gpurt.model.node_class import key_of
from dask_gpurt.observe.collect.causes import BUSY, CAUSES
from dask_gpurt.observe.collect.fetch_matrix import OTHERS, host_of
from dask_gpurt.observe.report.cost import by_class
from dask_gpurt.observe.report.facts import Fetches, Run, WorkerRun, grown, newest
from dask_gpurt.observe.report.findings import NOTHING, advise
from dask_gpurt.observe.report.tasks import Digest, Kind, Slowness, Task
from dask_gpurt.observe.runs.live import COUNTERS, HELD, TOTALS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dask_gpurt.observe.runs.live import LiveRun, Mark

WORKERS, TASKS, KINDS, FETCHES, SKEWED, OUTPUTS = 32, 300, 25, 25, 10, 100
#: characters of names
NAME = 120
#: key in a heartbeat -> what a report calls it
_SHUFFLE = {
    "shuffle_sent_bytes": "bytes_sent",
    "shuffle_kept_bytes": "bytes_self",
    "shuffle_outputs": "outputs",
    "shuffle_restarts": "restarts",
}
_TIERS = {"write_seconds": "written_seconds"}


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A record in few bytes, and what tables show of it."""

    number: int
    headline: dict[str, Any]
    packed: bytes

    def record(self) -> dict[str, Any]:
        """The record again."""
        out: dict[str, Any] = json.loads(zlib.decompress(self.packed))
        return out


def packed(record: dict[str, Any]) -> Kept:
    """Make a record small."""
    text = json.dumps(record | {"open": False}, separators=(",", ":"), default=str)
    return Kept(record["number"], headline(record), zlib.compress(text.encode(), 1))


def made(
    run: LiveRun, ends: Mapping[str, Mark], counts: Mapping[str, Any], facts: Mapping[str, Any], now: float
) -> dict[str, Any]:
    """The record of a run.

    Parameters
    ----------
    run
        Its rows have been looked up.
    ends
        Address -> mark at the end of the run, or now; of workers that are there.
    counts
        Of the engines, then.
    facts
        What all runs have in common, and ``task_count``.
    now
        Unix time, for a run that goes on.
    """
    workers, fetches, shuffle = _workers(run, ends)
    tasks = run.rows or ()
    digest = Digest.of(tasks)
    seconds = [stop - start for _, _, start, stop, _ in tasks]
    longest = sorted(range(len(tasks)), key=seconds.__getitem__, reverse=True)[:TASKS]
    growth = grown(counts, run.counts)
    sizes = sorted(run.outputs, reverse=True)
    prices = facts.get("prices")
    hosts = ((w["host"], w["node_class"], w["name"]) for w in workers)
    step = max(1, -(-len(sizes) // OUTPUTS))
    stop = max(run.start, now) if run.stop is None else run.stop
    return {
        "number": run.number,
        "name": run.name[:NAME],
        "span": run.span[:NAME],
        "client": run.client,
        "graphs": run.graphs,
        "start": run.start,
        "stop": stop,
        "going": run.stop is None,
        #: not summed up for good yet: figures of workers may still come
        "open": True,
        "outcome": "going on" if run.stop is None else run.outcome,
        #: share of what was asked for that was released before it was there
        "released": run.forgotten / run.asked if run.asked else 0.0,
        "gap_seconds": run.gap_seconds,
        "shared": run.shared,
        "lost": run.lost[:WORKERS],
        "worker_count": len(workers),
        "threads": sum(w["threads"] for w in workers),
        "slot_seconds": sum(w["slots"] for w in workers),
        "busy_seconds": sum(w[BUSY] for w in workers),
        "causes": {cause: sum(w["causes"][cause] for w in workers) for cause in CAUSES},
        "workers": _folded(workers),
        #: before most of the workers are one
        "hosts": None if prices is None else by_class(hosts, prices),
        "fetches": heapq.nlargest(FETCHES, fetches, key=lambda row: row[3]),
        "fetched_bytes": sum(row[2] for row in fetches),
        "shuffle": {**shuffle, "runs": growth.get("shuffle", {}).get("runs", 0)},
        "engines": growth,
        "waits": run.waits.as_json(),
        "skewed": [[*where, s] for where, s in heapq.nlargest(SKEWED, run.skewed.items(), key=lambda item: item[1])],
        "tasks": sorted((list(tasks[i]) for i in longest), key=lambda row: row[2]),
        #: single tasks that are known: the newest
        "known_tasks": len(tasks),
        "kinds": [dataclasses.astuple(kind) for kind in digest.kinds[:KINDS]],
        "slow": [dataclasses.astuple(slow) for slow in digest.slow[:WORKERS]],
        "outputs": sizes[::step],
        "output_count": len(sizes),
        **facts,
    }


def _workers(run: LiveRun, ends: Mapping[str, Mark]) -> tuple[list[dict[str, Any]], list[list[Any]], dict[str, float]]:
    """What each worker did, what it fetched, and what it moved in shuffles, together."""
    workers = []
    fetches: list[list[Any]] = []
    shuffle = dict.fromkeys(_SHUFFLE.values(), 0.0)
    there = ((a, (begin, ends[a])) for a, begin in run.begins.items() if a in ends)
    for address, (begin, end) in itertools.chain(run.left.items(), there):
        ws = end.ws
        totals = {name: max(0.0, now - was) for name, now, was in zip(TOTALS, end.totals, begin.totals, strict=True)}
        # Nothing was submitted: in the gaps of the run, or around it, which is no part of it.
        outside = max(0.0, totals["no_work"] - run.gap_seconds * ws.nthreads)
        totals["no_work"] -= outside
        totals["slots"] -= outside
        counted = {
            name: now - was if now >= was else now
            for name, now, was in zip(COUNTERS, end.counters, begin.counters, strict=True)
        }
        for key, name in _SHUFFLE.items():
            shuffle[name] += counted.pop(key)
        workers.append(
            {
                "address": address,
                "name": str(ws.name),
                "host": host_of(address),
                "node_class": key_of(ws),
                "threads": ws.nthreads,
                "memory_bytes": ws.memory_limit,
                "slots": totals["slots"],
                BUSY: totals[BUSY],
                "causes": {cause: totals[cause] for cause in CAUSES},
                "tiers": {_TIERS.get(key, key): n for key, n in counted.items()}
                | {key: n for key, n in zip(HELD, end.held, strict=True) if n is not None},
            }
        )
        fetches += [
            [source, address, sums["bytes"], sums["seconds"], int(sums["requests"])]
            for source, sums in grown(end.fetched or {}, begin.fetched or {}).items()
            if begin.fetched is not None and sums["requests"]
        ]
    return workers, fetches, shuffle


def _folded(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The workers that lost most time, and all others as one."""
    if len(workers) <= WORKERS:
        return workers
    ordered = sorted(workers, key=lambda w: w[BUSY] - w["slots"] + w["causes"]["no_work"])
    rest = ordered[WORKERS - 1 :]
    tiers: dict[str, float] = {}
    for worker in rest:
        for key, value in worker["tiers"].items():
            tiers[key] = tiers.get(key, 0) + value
    others = {
        "address": OTHERS,
        "name": f"{len(rest)} others",
        "host": OTHERS,
        "node_class": "",
        **{key: sum(w[key] for w in rest) for key in ("threads", "memory_bytes", "slots", BUSY)},
        "causes": {cause: sum(w["causes"][cause] for w in rest) for cause in CAUSES},
        "tiers": tiers,
    }
    return [*ordered[: WORKERS - 1], others]


def run_of(record: Mapping[str, Any]) -> Run:
    """The run that a record is of, for `advise` and for its page."""
    engines = record["engines"]
    scheduler: dict[str, Any] = {"version": record.get("version", ""), "policy": record.get("policy", "")}
    scheduler |= {part: {"fallbacks": growth.get("fallbacks", {})} for part, growth in engines.items()}
    return Run(
        start=record["start"],
        stop=record["stop"],
        workers=tuple(
            WorkerRun(
                *(w["address"], w["name"], w["host"], w["node_class"], w["threads"], w["slots"]),
                *(w[BUSY], w["causes"], w["tiers"]),
            )
            for w in sorted(record["workers"], key=lambda w: (len(w["name"]), w["name"]))
        ),
        slot_seconds=record["slot_seconds"],
        busy_seconds=record["busy_seconds"],
        causes=record["causes"],
        waits=record["waits"],
        tasks=tuple(Task._make(row) for row in record["tasks"]),
        task_count=record["task_count"],
        fetches=tuple(Fetches(*row) for row in record["fetches"]),
        skewed={(prefix, address): seconds for prefix, address, seconds in record["skewed"]},
        outputs=tuple(record["outputs"]),
        scheduler=scheduler,
        placement=engines.get("placement", {}),
        shuffle=record["shuffle"],
        prices=record.get("prices"),
        silent=record.get("silent", {}),
        known=Digest(tuple(Kind(*k) for k in record["kinds"]), tuple(Slowness(*s) for s in record["slow"])),
        worker_count=record["worker_count"],
        hosts=None
        if record["hosts"] is None
        else tuple((kind, price, count) for kind, price, count in record["hosts"]),
        output_count=record["output_count"],
        title=title(record),
        notes=tuple(notes(record)),
    )


def title(record: Mapping[str, Any]) -> str:
    """``run 7, "load": sum``."""
    span = f'"{record["span"]}"' if record["span"] else ""
    return f"run {record['number']}, " + ": ".join(part for part in (span, record["name"]) if part)


def notes(record: Mapping[str, Any]) -> list[str]:
    """What has to be known of a run besides its figures, in sentences."""
    out = []
    if record["going"]:
        out.append("The run is still going on: this is what it did so far.")
    elif record["outcome"] != "finished":
        out.append({"failed": "A task failed."}.get(record["outcome"], f"The run was {record['outcome']}."))
    if record["released"]:
        out.append(f"Of what was asked for, {record['released']:.0%} was released before it was there.")
    if record["graphs"] > 1:
        out.append(f"{record['graphs']:,} graphs, which overlap or follow each other at once, are one run.")
    if record["gap_seconds"] >= 0.1 * (record["stop"] - record["start"]):
        out.append(f"For {record['gap_seconds']:.3g} s between them nothing was submitted.")
    if record["known_tasks"] < record["task_count"]:
        out.append(newest(record["known_tasks"], record["task_count"]))
    if record["lost"]:
        out.append(f"Workers that left in it: {', '.join(record['lost'])}.")
    if record["shared"]:
        out.append("Other runs went on at the same time: what the threads did and what was moved is of all of them.")
    seconds = record["stop"] - record["start"]
    wanted = record["slot_seconds"] - record["causes"]["no_work"]
    if wanted > 1.5 * record["threads"] * seconds and not record["shared"]:
        out.append(
            "The run is shorter than the time between two heartbeats of a worker, so what the threads did includes "
            "what ran just before or after."
        )
    if not record["workers"]:
        out.append("No worker has reported since it began.")
    return out


def headline(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a table of runs shows of one: times in seconds, sizes in bytes; ``busy`` is a share, or None."""
    run = run_of(record)
    found: Sequence[Any] = advise(run)
    first = found[0] if found else None
    wanted = run.wanted_seconds
    return {
        **{key: record[key] for key in ("number", "name", "span", "start", "outcome", "graphs", "task_count")},
        "seconds": run.seconds,
        "threads": record["threads"],
        "busy": run.busy_seconds / wanted if wanted > 0 else None,
        "cause": None if first is None else first.cause,
        "cause_seconds": None if first is None else first.seconds,
        "cause_share": None if first is None else first.share,
        "verdict": verdict(first, wanted),
        "moved_bytes": record["fetched_bytes"] + record["shuffle"]["bytes_sent"],
        "spilled_bytes": sum(w.tiers.get("written_bytes", 0) for w in run.workers),
    }


def verdict(first: Any, wanted: float) -> str:
    """The most expensive finding in words."""
    if first is not None:
        return f"{first.text} That is {first.share:.0%} of the threads' time."
    if wanted <= 0:
        return "No worker has reported what its threads did in it."
    return f"{NOTHING}."
