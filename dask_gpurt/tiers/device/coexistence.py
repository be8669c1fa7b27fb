"""Whether a worker has our device tier beside what dask-cuda, or the user, has set up there: `RULES`, read by `decide`.

Two that move values out of one memory by turns make no progress. So there is one: ours where `tiers.device` asks for it
and nothing else was told to, else the other. Where it is the other, the rest of this package works, and `status` shows
the reason. What changes while the worker runs is looked at with each heartbeat, see `setup.DeviceMemory.look`.

Rejected: refusing the worker. Placement and shuffles need no device tier, and ``auto`` says no more than "where it
can be had". `dask_gpurt.local_cluster` refuses, where one call asks for both.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends import cuda, dask_cuda, rocm
from dask_gpurt.backends.dask_cuda import Allocator, Store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distributed import Worker, WorkerPlugin

    from dask_gpurt.backends.dask_cuda import DeviceSetup
    from dask_gpurt.config import TierSettings


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether our device tier works there."""

    #: why it stays off; "" where it works
    reason: str = ""
    remedy: str = ""

    @property
    def works(self) -> bool:
        """It does."""
        return not self.reason

    def __str__(self) -> str:
        return f"{self.reason}. Remedy: {self.remedy}" if self.remedy else self.reason


@dataclasses.dataclass(frozen=True)
class Rule:
    """A setup in which the device tier stays off."""

    #: a field or property of `DeviceSetup`, and what it is
    field: str
    value: Any
    decision: Decision


_KEEP = "or leave it as it is with gpurt.tiers.device: off"

#: the first that fits decides; where none does, the device tier works
RULES = (
    Rule(
        *("cudf_spills", True),
        Decision(
            "cuDF's own spilling is on, which has a failure callback of its own",
            f"no --enable-cudf-spill (LocalCUDACluster: enable_cudf_spill=False), else CUDF_SPILL=off, {_KEEP}",
        ),
    ),
    Rule(
        *("allocator", Allocator.MANAGED),
        Decision(
            "RMM allocates managed memory, whose pages the driver moves between device and host itself",
            f"--rmm-async or --rmm-pool-size in the place of --rmm-managed-memory, {_KEEP}",
        ),
    ),
    Rule(
        *("integrated", True),
        Decision("device and host share one memory here: a value that leaves the one would still fill the other"),
    ),
    Rule(
        *("store", Store.UNKNOWN),
        Decision(
            "worker.data is a class of dask-cuda that is not known here (JIT-unspill had one)",
            f"dask-cuda 26.10 without data= and JIT-unspill, {_KEEP}",
        ),
    ),
    Rule(
        *("store", Store.USED),
        Decision(
            "worker.data is dask-cuda's DeviceHostFile, which moves device values itself, and holds keys already",
            f"install dask_gpurt before the first task, {_KEEP}",
        ),
    ),
    Rule(
        *("device_limited", False),
        Decision(
            "dask-cuda was told that values never leave the device (a device memory limit of 0)",
            f"no --device-memory-limit 0, {_KEEP}",
        ),
    ),
    Rule(
        *("host_limited", False),
        Decision(
            "the worker has no limit of host memory, or spilling is switched off: values that leave the device would "
            "fill it",
            f"a --memory-limit, and distributed.worker.memory.target or .spill, {_KEEP}",
        ),
    ),
)


def decide(setup: DeviceSetup, device: str) -> Decision:
    """Look up `RULES`.

    Parameters
    ----------
    device
        The setting `tiers.device`, "off" or "auto".
    """
    if device == "off":
        return Decision("gpurt.tiers.device is off")
    return next((rule.decision for rule in RULES if getattr(setup, rule.field) == rule.value), Decision())


@dataclasses.dataclass(frozen=True)
class Terms:
    """On which one worker has a device tier, or why it has none."""

    decision: Decision
    #: the settings ask for one
    wanted: bool = True
    #: the device, where there is one
    found: cuda.Probe | None = None
    #: what was there before us
    setup: DeviceSetup | None = None


async def terms_of(worker: Worker, settings: TierSettings, pending: Iterable[WorkerPlugin]) -> Terms:
    """Ask the settings, then the device, then what dask-cuda has set up. Creates a CUDA context if the settings allow.

    Parameters
    ----------
    pending
        Plugins of this worker that have not run yet.
    """
    if settings.device == "off" or not settings.enabled:
        return Terms(
            Decision("gpurt.tiers.device is off" if settings.enabled else "gpurt.tiers.enabled is false"), False
        )
    found = await asyncio.to_thread(cuda.probe)
    if found.reason:
        return Terms(Decision(f"{found.reason}; {rocm.reason()}"))
    setup = dask_cuda.look(worker, pending, device=found.device, integrated=found.integrated)
    return Terms(decide(setup, settings.device), found=found, setup=setup)


def conflict(worker: Worker, device: int) -> str:
    """What has begun to move device values since this worker got its device tier; "" if nothing has."""
    return str(decide(dask_cuda.look(worker, device=device), "auto"))
