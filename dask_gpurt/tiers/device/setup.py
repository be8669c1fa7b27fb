"""`DeviceMemory`: puts the device tier of a worker together (probe, stack, blocks, callback), and takes it apart.

Others change what libraries allocate from after us: dask-cuda's ``RMMSetup`` runs after preloads, and a task may do it.
So `look` is called with every heartbeat. It stacks again where our stack was replaced, and stands aside while something
else moves device values (cuDF's own spilling, switched on after our start), see `coexistence`.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes

from dask_gpurt.backends import cuda
from dask_gpurt.backends.device_copies import PinnedSlabs
from dask_gpurt.backends.device_values import CudaBackend
from dask_gpurt.backends.rmm_stack import DeviceAllocator, own_pool
from dask_gpurt.tiers.device import coexistence
from dask_gpurt.tiers.device.containers import WithContainers
from dask_gpurt.tiers.device.oom import SpillOnFailure
from dask_gpurt.tiers.device.pinned import BlockPool, SlabTier
from dask_gpurt.tiers.device.space import DeviceSpace

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.worker import Worker

    from dask_gpurt.config import TierSettings
    from dask_gpurt.tiers.device.backend import DeviceBackend
    from dask_gpurt.tiers.device.coexistence import Terms
    from dask_gpurt.tiers.device.pinned import SlabSource

logger = logging.getLogger("distributed.worker.gpurt")

#: share of `gpurt.tiers.device-limit` that kept values may take; the rest is for tasks at work
_KEPT = 0.8
#: share of it above which values leave before an allocation fails
_HIGH = 0.9
#: share of it that is made free when an allocation fails
_LOW_WATER = 1 / 16
#: bytes of page-locked memory where nothing says how much host memory there is
_PINNED = 1 << 30


class DeviceMemory:
    """What is installed on a worker with a device tier. Made by `open`, or `over` given parts.

    Parameters
    ----------
    callback
        What the allocator calls; goes to `oom` unless the tier stands aside.
    conflict
        Says what else moves device values here; "" if nothing does.
    """

    def __init__(
        self,
        space: DeviceSpace,
        oom: SpillOnFailure,
        allocator: DeviceAllocator,
        callback: Late,
        conflict: Callable[[], str],
    ) -> None:
        self.space = space
        self.oom = oom
        self.allocator = allocator
        self._callback = callback
        self._conflict = conflict
        #: why values do not leave the device for now; "" if they do
        self.stands_aside = ""
        self._said_outside = False
        self._facts: dict[str, Any] = {}

    @classmethod
    def open(cls, worker: Worker, settings: TierSettings, host_bytes: int | None, terms: Terms) -> DeviceMemory:
        """Install on a device. In a thread.

        Parameters
        ----------
        host_bytes
            Budget of values in host memory, of which page-locked blocks may take half.
        terms
            That it works, and what is there.
        """
        found, setup = terms.found, terms.setup
        assert found is not None, "no device was found"
        assert setup is not None, "no device was found"
        share = int(found.total_bytes * settings.device_limit)
        # "auto" must not refuse what would be had without us: what may be allocated is limited by "on" only.
        on = settings.device == "on"
        limit = share if on else found.total_bytes
        if setup.pool_limit_bytes is not None:
            limit = min(limit, setup.pool_limit_bytes)
        # Page-locked memory is host memory, of which values keep half at the least: `Eviction` counts it as the rest of
        # the process, and leaves them that.
        limits = (settings.pinned_limit, None if host_bytes is None else host_bytes // 2)
        pinned = min((n for n in limits if n is not None), default=_PINNED)
        callback = Late()
        allocator = DeviceAllocator(
            *(callback, limit),
            pool=(lambda: _pool(limit)) if on else None,
            cupy=on,
            free_bytes=cuda.free_bytes,
            device=found.device,
        )
        allocator.install()
        try:
            backend = CudaBackend(allocator)
            backend.prepare()
            self = cls.over(
                backend,
                allocator,
                callback,
                PinnedSlabs(),
                pinned,
                functools.partial(coexistence.conflict, worker, found.device),
                full_bytes=min(share, allocator.limit_bytes),
                kept_bytes=setup.device_limit_bytes,
            )
        except BaseException:
            allocator.close()
            raise
        self._facts.update(device=found.name, gds=found.gds or "available, not used", over=setup.allocator.value)
        logger.info(
            "Device tier: %s up to %s, then up to %s page-locked, then disk",
            found.name,
            format_bytes(allocator.limit_bytes),
            format_bytes(pinned),
        )
        return self

    @classmethod
    def over(
        cls,
        backend: DeviceBackend,
        allocator: DeviceAllocator,
        callback: Late,
        slabs: SlabSource,
        slab_limit_bytes: int,
        conflict: Callable[[], str],
        *,
        full_bytes: int | None = None,
        kept_bytes: int | None = None,
    ) -> DeviceMemory:
        """Over a given backend and an installed allocator, whose callback is `callback`.

        Parameters
        ----------
        full_bytes
            Of which the marks are shares; None: the allocator's limit.
        kept_bytes
            That kept values may take in all, such as dask-cuda's limit; None: as much as the allocator's limit allows.
        """
        limit = allocator.limit_bytes if full_bytes is None else full_bytes
        low_water = int(limit * _LOW_WATER)
        pool = BlockPool(slabs, limit_bytes=slab_limit_bytes)
        # What one failed allocation makes leave finds its blocks ready; more would lock host memory in vain.
        pool.keep_ahead(min(2 * low_water, slab_limit_bytes // 2))
        space = DeviceSpace(
            WithContainers(backend),
            [SlabTier(pool)],
            limit_bytes=min(int(limit * _KEPT), limit if kept_bytes is None else kept_bytes),
            high_bytes=int(limit * _HIGH),
        )
        oom = SpillOnFailure(space, allocator.headroom_bytes, low_water_bytes=low_water)
        callback.target = oom
        return cls(space, oom, allocator, callback, conflict)

    def look(self) -> None:
        """Whether all is as it was installed; with every heartbeat. Costs a few attributes."""
        if not self.allocator.look():
            logger.warning(
                "RMM's resource was replaced after the device tier had begun (%d times so far). It is stacked over "
                "what is there now. Remedy: have it set up before dask_gpurt, or by dask_gpurt alone",
                self.allocator.replaced,
            )
        if self.space.outside_seen and not self._said_outside:
            self._said_outside = True
            logger.warning(
                "Results of %s are in memory that does not come from RMM: they count, and leave the device by the "
                "limit of kept values, but make no room for other libraries. Remedy: have them allocate through RMM "
                "(--rmm-allocator-external-lib-list cupy of dask-cuda, rmm.allocators.torch, "
                "NUMBA_CUDA_MEMORY_MANAGER=rmm)",
                ", ".join(sorted(self.space.outside_seen)),
            )
        stands_aside = self._conflict()
        if stands_aside != self.stands_aside:
            self._callback.target = None if stands_aside else self.oom
            self.space.rests = bool(stands_aside)
            if stands_aside:
                logger.error("The device tier stands aside, no value leaves the device: %s", stands_aside)
            else:
                logger.info("The device tier works again")
        self.stands_aside = stands_aside

    def statistics(self) -> dict[str, Any]:
        """Return counts as plain JSON."""
        return {
            **self.space.statistics(),
            "out_of_memory": self.oom.statistics(),
            "peak_bytes": self.allocator.peak_bytes(),
            "resource_replaced": self.allocator.replaced,
            "stands_aside": self.stands_aside,
            **self._facts,
        }

    def close(self) -> None:
        """Forget all values, and let libraries allocate as before."""
        self._callback.target = None
        try:
            self.space.close()
        finally:
            self.allocator.close()


class Late:
    """The stack wants its callback before there is a space to spill from."""

    def __init__(self) -> None:
        self.target: Callable[[int], bool] | None = None

    def __call__(self, nbytes: int) -> bool:
        target = self.target
        return target is not None and target(nbytes)


def _pool(limit_bytes: int) -> Any:
    try:
        return own_pool("async", limit_bytes)
    except RuntimeError as e:
        logger.info("CUDA's own memory pool cannot be used (%s); RMM's is", e)
        return own_pool("pool", limit_bytes)
