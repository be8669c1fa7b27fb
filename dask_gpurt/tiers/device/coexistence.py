"""Whether a worker has our device tier beside what dask-cuda, or the user, has set up there: `RULES`, read by `decide`.

Two that move values out of one memory by turns make no progress. So there is one. What changes while the worker runs is
looked at with each heartbeat, see `setup.DeviceMemory.look`.

========  ==============================================================================================================
setting   meaning
========  ==============================================================================================================
``auto``  where the device is used anyway: dask-cuda has set the worker up, or something has a CUDA context, now or at
          a later heartbeat. Ours is then the tier unless a rule is against it. Where one is, the other keeps the
          memory, the rest of this package works, and `status` shows why. No context is created, nothing is loaded
          on a worker without one, and what libraries allocate from stays: we stack over it.
``on``    the worker must have it: a context is created, CUDA's asynchronous pool serves where no pool is, CuPy
          allocates through RMM, ``device-limit`` is a limit of the allocator. A worker that cannot have it refuses
          its start, with the remedy. So does `dask_gpurt.local_cluster`, before it starts anything.
``off``   never.
========  ==============================================================================================================

Rejected: refusing the worker under ``auto``. Placement and shuffles need no device tier.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends import cuda, dask_cuda, rocm
from dask_gpurt.backends.dask_cuda import Allocator, Store
from dask_gpurt.errors import InstallError
from dask_gpurt.tiers.threads import call_apart

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
    """Look up `RULES`; `device` is the setting `tiers.device`."""
    if device == "off":
        return Decision("gpurt.tiers.device is off")
    return next((rule.decision for rule in RULES if getattr(setup, rule.field) == rule.value), Decision())


@dataclasses.dataclass(frozen=True)
class Terms:
    """On which one worker has a device tier, or why it has none."""

    decision: Decision
    #: there is something to say where it does not work: a device that is used, or settings that ask for the tier
    wanted: bool = True
    #: nothing uses a device here so far, and that may change
    later: bool = False
    #: the device, where there is one
    found: cuda.Probe | None = None
    #: what was there before us
    setup: DeviceSetup | None = None


async def terms_of(worker: Worker, settings: TierSettings, pending: Iterable[WorkerPlugin]) -> Terms:
    """Ask the settings, then what is here, then the device. Creates a CUDA context only where `tiers.device` is "on".

    `pending` are plugins of this worker that have not run yet.

    Raises
    ------
    InstallError
        The setting is "on", and there cannot be a tier.
    """
    if settings.device == "off" or not settings.enabled:
        return Terms(
            Decision("gpurt.tiers.device is off" if settings.enabled else "gpurt.tiers.enabled is false"), False
        )
    if settings.device == "auto" and not cuda.has_context() and not dask_cuda.is_here(worker, pending):
        return Terms(Decision("nothing uses a CUDA device here"), wanted=False, later=True)
    found = await call_apart(cuda.probe)
    if found.reason:
        return required(Terms(Decision(f"{found.reason}; {rocm.reason()}")), settings)
    setup = dask_cuda.look(worker, pending, device=found.device, integrated=found.integrated)
    return required(Terms(decide(setup, settings.device), found=found, setup=setup), settings)


def required(terms: Terms, settings: TierSettings) -> Terms:
    """The same terms; InstallError if they give no tier where the settings say "on"."""
    if settings.device == "on" and settings.enabled and not terms.decision.works:
        remedy = "" if terms.decision.remedy else ". Remedy: what is missing there"
        raise InstallError(
            f"gpurt.tiers.device is 'on', and there is no tier: {terms.decision}{remedy}, or gpurt.tiers.device: auto "
            "for those workers that can have it"
        )
    return terms


def conflict(worker: Worker, device: int) -> str:
    """What has begun to move device values since this worker got its device tier; "" if nothing has."""
    return str(decide(dask_cuda.look(worker, device=device), "auto"))
