"""`simulate`: one workload, one cluster, one policy, one seed; a `Result`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import dask

from dask_gpurt.simulate import policies
from dask_gpurt.simulate.clock import patched
from dask_gpurt.simulate.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dask_gpurt.config import PlacementSettings
    from dask_gpurt.placement.decide.policy import Policy
    from dask_gpurt.placement.plugin import PlacementPlugin
    from dask_gpurt.simulate.model import Cluster, Result, Workload


#: nothing of these happens on the virtual clock, but reading them must not depend on the caller's cluster
_DEFAULTS: dict[str, Any] = {
    "distributed.worker.memory.terminate": False,
    "distributed.scheduler.dashboard.status.task-stream-length": 1,
}


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Let the scheduler log warnings only."""
    loggers = [logging.getLogger(n) for n in ("distributed.scheduler", "distributed.diskutils")]
    levels = [logger.level for logger in loggers]
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def simulate(
    workload: Workload,
    cluster: Cluster,
    policy: str | Policy = "gpurt",
    seed: int = 0,
    *,
    settings: PlacementSettings | None = None,
    config: Mapping[str, Any] | None = None,
    explain: Iterable[Any] = (),
    timeline: bool = False,
    prepare: Callable[[Simulation, PlacementPlugin | None], None] | None = None,
) -> Result:
    """Run a workload on a simulated cluster, with the real scheduler.

    Parameters
    ----------
    workload, cluster
        What runs, and on what.
    policy
        ``stock``, ``inf`` (stock with ``worker-saturation: inf``), ``random``, ``plan`` (every task pinned to where
        `Workload.plan` says), ``gpurt``, ``package.module:Class``, or an object with a ``decide`` method, see
        `dask_gpurt.placement.decide.policy.Policy`.
    seed
        Of everything left to chance: jitter of durations, the order in which sets are walked, sources of transfers.
        The same arguments give the same result in every process.
    settings
        ``gpurt.placement``; None: as configured.
    config
        Dask's configuration for the scheduler, such as ``{"distributed.scheduler.work-stealing": False}``.
    explain
        Keys whose decisions `Result.stories` shall tell (as `dask_gpurt.explain` does live).
    timeline
        Fill `Result.timeline` and `Result.assigned`.
    prepare
        Called with the simulation and the placement plugin (None with stock) before the work is submitted: for what
        listens (`Simulation.residence`) or looks inside.

    Raises
    ------
    ConfigError
        There is no such policy.
    SimulationError
        The work cannot get done.
    RuntimeError
        An event loop is running in this thread, or another simulation in this process.
    """
    policies.check(policy)
    if asyncio._get_running_loop() is not None:
        raise RuntimeError("simulate() cannot run inside an event loop; use `await asyncio.to_thread(simulate, ...)`")
    began = time.perf_counter()
    config = {**_DEFAULTS, **policies.configuration(policy), **(config or {})}
    with dask.config.set(config), without_log():
        result = asyncio.run(_simulate(workload, cluster, policy, seed, settings, list(explain), timeline, prepare))
    result.wall_seconds = time.perf_counter() - began
    return result


async def _simulate(
    workload: Workload,
    cluster: Cluster,
    policy: str | Policy,
    seed: int,
    settings: PlacementSettings | None,
    explain: list[Any],
    timeline: bool,
    prepare: Callable[[Simulation, PlacementPlugin | None], None] | None,
) -> Result:
    sim = Simulation(workload, cluster, seed)
    sim.keep_timeline = timeline
    sim.result.policy = policy if isinstance(policy, str) else type(policy).__name__
    try:
        with patched(sim.loop, *policies.modules(policy)), sim.loop.running():
            plugin = policies.install(sim, policy, settings)
            if prepare is not None:
                prepare(sim, plugin)
            sim.place_inputs()
            sim.start_ticking()
            sim.begin()
            sim.run()
            result = sim.finish()
            if plugin is not None:
                result.statistics = plugin.statistics()
                result.stories = {str(k): plugin.explain(sim.stable(k)) for k in explain}
    finally:
        # An unstarted scheduler has a few things to let go of: its periodic callbacks and its log handler.
        await sim.scheduler.close()
    return result
