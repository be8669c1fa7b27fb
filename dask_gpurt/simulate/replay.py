"""What would have been: a recorded run under another policy, on another number of workers, over other links.

The graphs of a trace are submitted to one simulated scheduler, as they were in the run: graphs that overlapped with
their distances in time, the others each when those before are finished. The time a client spent between them is the
client's, and counts neither in the recorded nor in the predicted makespan. `Replay.error` says how far the prediction
of the recorded policy is from what was recorded; it is the first thing to look at before a comparison is believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import re
import time
from typing import TYPE_CHECKING

import dask
from dask.utils import format_bytes, parse_bytes

from dask_gpurt.errors import ConfigError
from dask_gpurt.simulate import calibrate, policies
from dask_gpurt.simulate.clock import patched
from dask_gpurt.simulate.model import Cluster, Path, Result
from dask_gpurt.simulate.run import without_log
from dask_gpurt.simulate.simulation import STUCK_SECONDS, Simulation, SimulationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dask_gpurt.observe.trace.reader import Trace
    from dask_gpurt.placement.decide.policy import Policy
    from dask_gpurt.simulate.model import Workload

#: what ``--links`` knows by name: latency of a fetch (two event loops included) and bandwidth of a network card
LINKS = {
    "1GbE": Path(2e-3, 0.11e9),
    "10GbE": Path(1e-3, 1.1e9),
    "25GbE": Path(1e-3, 2.8e9),
    "100GbE": Path(1e-3, 11e9),
    "IB200": Path(0.5e-3, 23e9),
}


@dataclasses.dataclass
class Replay:
    """One trace under one policy."""

    policy: str
    workers: int
    makespan_seconds: float
    #: of each phase, in order
    phases: list[float]
    result: Result
    #: slot-seconds without computing, over all slot-seconds of the phases
    idle_share: float
    #: of it, while tasks waited for inputs from elsewhere, and for the disk
    network_share: float
    disk_share: float
    #: of the recorded run
    recorded_seconds: float
    recorded_policy: str
    #: the same workers, links and policy as recorded
    same: bool

    @property
    def error(self) -> float | None:
        """(predicted - recorded) / recorded; None where something else than the recorded run was predicted."""
        if not self.same or not self.recorded_seconds:
            return None
        return self.makespan_seconds / self.recorded_seconds - 1

    @property
    def speed(self) -> float:
        """Predicted seconds per second of simulating."""
        return self.makespan_seconds / self.result.wall_seconds if self.result.wall_seconds else 0.0


def links(text: str) -> Path:
    """A `Path` from a name in `LINKS`, or ``BANDWIDTH@LATENCY`` such as ``"1.2GB@0.5ms"``.

    Raises
    ------
    ConfigError
        It is neither.
    """
    for name, path in LINKS.items():
        if name.lower() == text.lower():
            return path
    found = re.fullmatch(r"([^@]+)@([0-9.]+) ?(us|ms|s)", text.strip())
    if found:
        with contextlib.suppress(ValueError, OverflowError):  # the latter of infinitely many bytes
            bandwidth = float(parse_bytes(found[1]))
            if bandwidth > 0:
                return Path(float(found[2]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[3]], bandwidth)
    raise ConfigError(
        f"links are {text!r}; allowed are {', '.join(LINKS)}, or bytes per second @ latency, such as '1.2GB@0.5ms'"
    )


_CONFIG = {"distributed.scheduler.dashboard.status.task-stream-length": 1}


def replay(
    trace: Trace,
    policy: str | Policy,
    *,
    workers: int | None = None,
    threads: int | None = None,
    link: Path | None = None,
    seed: int = 0,
) -> Replay:
    """Replay a trace.

    Parameters
    ----------
    policy
        As for `dask_gpurt.simulate.simulate`.
    workers, threads
        How many, and threads of each; None: as recorded. Tasks that were restricted to a worker go to the one of the
        same number, counted around.
    link
        Between nodes; with it every worker is on a node of its own. None: as learned from the recorded transfers.

    Raises
    ------
    TraceError
        Nothing in it can be replayed.
    ConfigError
        There is no such policy.
    SimulationError
        The simulated cluster does not get the work done.
    """
    policies.check(policy)
    calibration = calibrate.Calibration.of(trace)
    load, phases = calibrate.workload(trace, calibration)
    # With our placement come our tiers.
    cluster = calibrate.cluster(trace, calibration, background=policy not in policies.STOCK)
    changed = workers not in (None, cluster.workers) or threads not in (None, cluster.threads) or link is not None
    cluster = _changed(cluster, workers, threads, link)
    if workers is not None:
        load = _folded(load, cluster.workers)
    recorded = str(trace.about.get("config", {}).get("policy", "stock"))
    name = policy if isinstance(policy, str) else type(policy).__name__
    began = time.perf_counter()
    with dask.config.set(_CONFIG | policies.configuration(policy)), without_log(), _without_collection():
        result, spans = asyncio.run(_run(load, phases, cluster, policy, seed, trace.about.get("durations") or {}))
    result.policy = name
    result.wall_seconds = time.perf_counter() - began
    slots = cluster.workers * cluster.threads * sum(spans)
    return Replay(
        policy=name,
        workers=cluster.workers,
        makespan_seconds=sum(spans),
        phases=spans,
        result=result,
        idle_share=1 - min(result.busy_seconds / slots, 1.0) if slots else 0.0,
        network_share=result.network_seconds / slots if slots else 0.0,
        disk_share=result.disk_seconds / slots if slots else 0.0,
        recorded_seconds=sum(p.recorded_seconds for p in phases),
        recorded_policy=recorded,
        same=not changed and name == recorded,
    )


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Do not look for garbage.

    A graph of tasks is a web of cycles that stays until the end. Looking through it over and over finds nothing and
    takes two fifths of a replay's time.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def _changed(cluster: Cluster, workers: int | None, threads: int | None, link: Path | None) -> Cluster:
    if workers is not None and workers != cluster.workers:
        limits = cluster.memory_bytes
        # More of what was recorded: memory as the smallest worker had it, and no worker is slow.
        memory = limits if limits is None or isinstance(limits, int) else min(limits)
        cluster = dataclasses.replace(cluster, workers=workers, memory_bytes=memory, slowness=1.0)
    if threads is not None:
        cluster = dataclasses.replace(cluster, threads=threads)
    if link is not None:
        cluster = dataclasses.replace(cluster, per_node=1, far=link)
    return cluster


def _folded(load: Workload, workers: int) -> Workload:
    """Restrictions and places of data for another number of workers."""
    tasks = {}
    for key, task in load.tasks.items():
        if task.annotations and "workers" in task.annotations:
            where = sorted({w % workers for w in task.annotations["workers"]})
            task = task._replace(annotations={**task.annotations, "workers": where})
        tasks[key] = task
    inputs = {
        key: placed._replace(where={w % workers: tier for w, tier in placed.where.items()})
        for key, placed in load.inputs.items()
    }
    return dataclasses.replace(load, tasks=tasks, inputs=inputs)


async def _run(
    load: Workload,
    phases: Sequence[calibrate.Phase],
    cluster: Cluster,
    policy: str | Policy,
    seed: int,
    known: Mapping[str, float],
) -> tuple[Result, list[float]]:
    sim = Simulation(load, cluster, seed)
    spans: list[float] = []
    try:
        with patched(sim.loop, *policies.modules(policy)), sim.loop.running():
            policies.install(sim, policy, None)
            sim.know(known)
            sim.place_inputs()
            sim.start_ticking()
            for phase in phases:
                begin = sim.loop.now
                left = list(phase.submissions)
                for submission in phase.submissions:
                    sim.loop.at(begin + submission.offset_seconds, _submit, sim, submission, left)
                _until(sim, left)
                spans.append(sim.loop.now - begin)
                if phase.released:
                    sim.release(phase.released)
            result = sim.finish()
    finally:
        await sim.scheduler.close()
    return result, spans


def _submit(sim: Simulation, submission: calibrate.Submission, left: list[calibrate.Submission]) -> None:
    left.remove(submission)
    sim.submit(submission.keys, submission.outputs, ordered=True)


def _until(sim: Simulation, left: list[calibrate.Submission]) -> None:
    """Run until everything was submitted and all outputs are there."""
    began = sim.loop.now
    while left or sim.waiting:
        if not sim.loop.step() or (not sim.loop.pending and sim.loop.now - began > STUCK_SECONDS):
            raise SimulationError(f"the replay is stuck at {sim.loop.now:.3f} s")
        if sim.loop.pending:
            began = sim.loop.now


def table(replays: Sequence[Replay], baseline: str | None = None) -> str:
    """Side by side, as text. Makespans relative to `baseline`, or to the first."""
    base = next((r for r in replays if r.policy == baseline), replays[0])
    head = ["policy", "makespan", "ratio", "idle", "for inputs", "for disk", "node", "rack", "far", "spilled", "read"]
    head += ["stolen", "peak/worker"]
    rows = [head]
    for r in replays:
        moved = r.result.bytes_moved
        rows.append(
            [
                r.policy,
                f"{r.makespan_seconds:.3f} s",
                f"{r.makespan_seconds / base.makespan_seconds:.3f}" if base.makespan_seconds else "-",
                f"{r.idle_share:.0%}",
                *(f"{share:.0%}" for share in (r.network_share, r.disk_share)),
                *(format_bytes(moved[kind]) for kind in ("node", "rack", "far")),
                format_bytes(r.result.spilled_bytes),
                format_bytes(r.result.read_bytes),
                f"{r.result.stolen:,}",
                format_bytes(r.result.peak_memory_bytes),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines += [
        f"recorded: {r.recorded_seconds:.3f} s under {r.recorded_policy}; predicted for the same "
        f"{r.makespan_seconds:.3f} s ({r.error:+.1%})"
        for r in replays
        if r.error is not None
    ]
    return "\n".join(lines)
