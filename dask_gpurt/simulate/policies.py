"""What can be compared: stock Dask in its two settings, chance, and every policy that runs in a live cluster."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from dask_gpurt.config import PlacementSettings, Settings
from dask_gpurt.errors import ConfigError
from dask_gpurt.placement.decide.policy import CLASS, Cheapest, Policy, load
from dask_gpurt.placement.plugin import PlacementPlugin
from dask_gpurt.topology.zones import NEAR_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask.typing import Key
    from distributed import Scheduler
    from distributed.scheduler import TaskState

    from dask_gpurt.placement.engine import Engine
    from dask_gpurt.simulate.simulation import Simulation

#: policies by name; every other one is "package.module:Class"
NAMES = ("stock", "inf", "random", "plan", "gpurt")
#: time for which the scheduler is busy with a task under this package's policies, relative to stock's. A constant: its
#: handlers take 28 to 44 us more per task (processor time on seven graphs of 200 to 3,000 tasks, where stock's take 76
#: to 105), and with the communication that is not simulated stock's scheduler takes 150.
PLACEMENT_COST = 1.25
#: those that are nothing of this package's
STOCK = ("stock", "inf", "random")


def configuration(policy: str | Policy) -> dict[str, Any]:
    """Dask's configuration that belongs to a policy. Everything else is as the caller has set it."""
    return {"distributed.scheduler.worker-saturation": "inf"} if policy == "inf" else {}


def check(policy: str | Policy) -> None:
    """Raises ConfigError for a policy there is not."""
    if isinstance(policy, str) and policy not in NAMES:
        if not CLASS.fullmatch(policy):
            raise ConfigError(
                f"policy is {policy!r}, must be one of {', '.join(map(repr, NAMES))} or 'package.module:Class'"
            )
        load(policy)


def modules(policy: str | Policy) -> list[str]:
    """Modules of a policy's own, whose clock is to be the virtual one."""
    if not isinstance(policy, str):
        name = type(policy).__module__
    elif ":" in policy:
        name = policy.partition(":")[0]
    else:
        return []
    return [name] if name in sys.modules else []


def install(sim: Simulation, policy: str | Policy, settings: PlacementSettings | None) -> PlacementPlugin | None:
    """Put a policy into the scheduler of a simulation; None for those that are not of this package."""
    if isinstance(policy, str) and policy in ("stock", "inf"):
        return None
    if policy == "random":
        _install_random(sim)
        return None
    if policy == "plan":
        missing = [k for k in sim.workload.tasks if k not in sim.workload.plan]
        if missing:
            raise ConfigError(f"policy 'plan' needs Workload.plan; {sim.workload.name} has none for {missing[0]!r}")
        sim.follow_plan = True
        return None
    chooser: Policy | None = policy if not isinstance(policy, str) else load(policy)
    if isinstance(chooser, Cheapest) and policy == "gpurt":
        chooser = None  # what production takes by default
    sim.busy.cost = sim.busy.cost.times(PLACEMENT_COST)
    plugin = PlacementPlugin(settings or Settings.load().placement, policy=chooser)
    # What `Scheduler.add_plugin` and the scheduler's start do. The seam compares, adopts and installs as it does live.
    sim.loop.complete(plugin.start(sim.scheduler))
    sim.scheduler.plugins[plugin.name] = plugin
    if plugin.engine is not None:
        _sound(sim, plugin.engine)
    sim.residence.append(lambda address, key, tier, nbytes: _tell(plugin, address, key, tier, nbytes))
    return plugin


def _sound(sim: Simulation, engine: Engine) -> None:
    """Round trips to the workers, which live come from the kernel when a worker has connected.

    The scheduler is in the first rack, and a switch away from the workers there.
    """
    cluster = sim.cluster
    for worker in sim.workers:
        remote = cluster.rack_of(worker.index) != 0
        info = engine.workers.by_address[worker.address]
        engine.measured(info, 2 * cluster.uplink.latency_seconds if remote else NEAR_SECONDS / 2)


def _tell(plugin: PlacementPlugin, address: str, key: Key, tier: str | None, nbytes: int) -> None:
    """What `tiers.residence` tells live; here at once, there some 20 ms later."""
    if plugin.engine is not None:
        table = plugin.engine.tables.residence
        if tier == "disk":
            table.heard(address, [(key, nbytes)], ())
        elif key in table.on_disk:
            table.heard(address, (), [key])


def _install_random(sim: Simulation) -> None:
    """Any running worker that the task may run on, with equal chances; a queued root: any with a free slot."""
    scheduler: Scheduler = sim.scheduler
    rnd = random.Random(sim.seed)

    def decide(ts: TaskState) -> Any:
        valid = scheduler.valid_workers(ts)
        pool = [ws for ws in (scheduler.workers.values() if valid is None else valid) if ws.status is Status.running]
        return rnd.choice(pool) if pool else None

    def from_idle() -> Any:
        idle = list(scheduler.idle_task_count)
        return rnd.choice(idle) if idle else None

    overrides: dict[str, Callable[..., Any]] = {
        "decide_worker_non_rootish": decide,
        "decide_worker_rootish_queuing_enabled": from_idle,
        "decide_worker_rootish_queuing_disabled": decide,
    }
    for name, ours in overrides.items():
        if not hasattr(type(scheduler), name):
            raise RuntimeError(f"this distributed has no Scheduler.{name} to override")
        setattr(scheduler, name, ours)
