"""`DeviceMemory`: puts the device tier of a worker together (probe, stack, blocks, callback), and takes it apart."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes

from dask_gpurt.backends import cuda, rocm
from dask_gpurt.errors import InstallError
from dask_gpurt.tiers.device.oom import SpillOnFailure
from dask_gpurt.tiers.device.pinned import BlockPool, SlabTier
from dask_gpurt.tiers.device.space import DeviceSpace

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.worker import Worker

    from dask_gpurt.config import TierSettings
    from dask_gpurt.tiers.device.pinned import SlabSource
    from dask_gpurt.tiers.device.space import DeviceBackend

logger = logging.getLogger("distributed.worker.gpurt")

#: share of the allocator's limit that kept values may take; the rest is for tasks at work
_KEPT = 0.8


class DeviceMemory:
    """What is installed on a worker with a device tier."""

    def __init__(
        self, space: DeviceSpace, oom: SpillOnFailure, undo: Callable[[], None], facts: dict[str, Any]
    ) -> None:
        self.space = space
        self.oom = oom
        self._undo = undo
        self._facts = facts

    @classmethod
    def open(
        cls, worker: Worker, settings: TierSettings, host_bytes: int | None, *, serves: bool = True
    ) -> DeviceMemory | None:
        """Probe, and install where an allocation succeeds; None where there is no device. In a thread.

        Parameters
        ----------
        host_bytes
            Budget of values in host memory, of which page-locked blocks may take half.
        serves
            ``worker.data`` is ours; else there are no values that could leave the device.

        Raises
        ------
        InstallError
            Something else moves device values here (dask-cuda's DeviceHostFile, cuDF's own spilling).
        """
        if settings.device != "auto":
            return None
        found = cuda.probe()
        if found.reason:
            logger.info("No device tier: %s; %s", found.reason, rocm.reason())
            return None
        stacked = cuda.conflict(worker)
        if stacked:
            raise InstallError(f"no device tier: {stacked}")
        if not serves:
            logger.info("No device tier: worker.data is left alone")
            return None
        limit = int(found.total_bytes * settings.device_limit)
        # Page-locked memory is host memory: it must leave room for values there.
        pinned = settings.pinned_limit if host_bytes is None else min(settings.pinned_limit, host_bytes // 2)
        callback = _Late()
        try:
            base = cuda.base_resource("async", limit)
        except RuntimeError as e:
            logger.info("CUDA's own memory pool cannot be used (%s); RMM's is", e)
            base = cuda.base_resource("pool", limit)
        stack = cuda.stack_over(base, limit, callback)
        self = cls.over(cuda.CudaBackend(stack), stack, callback, cuda.PinnedSlabs(), pinned, lambda: None)
        self._facts.update(device=found.name, gds=found.gds or "available, not used")
        self._undo = cuda.install(stack)
        logger.info(
            "Device tier: %s up to %s, then up to %s page-locked, then disk",
            found.name,
            format_bytes(limit),
            format_bytes(pinned),
        )
        return self

    @classmethod
    def over(
        cls,
        backend: DeviceBackend,
        stack: cuda.Stack,
        callback: _Late,
        slabs: SlabSource,
        slab_limit_bytes: int,
        undo: Callable[[], None],
    ) -> DeviceMemory:
        """Over a given backend and stack, whose callback is `callback`."""
        limit = stack.limiting.get_allocation_limit()
        tier = SlabTier(BlockPool(slabs, limit_bytes=slab_limit_bytes))
        space = DeviceSpace(backend, [tier], limit_bytes=int(limit * _KEPT))
        oom = SpillOnFailure(space, stack.headroom_bytes)
        callback.target = oom
        return cls(space, oom, undo, {"peak_bytes": stack.peak_bytes})

    def statistics(self) -> dict[str, Any]:
        """Return counts as plain JSON."""
        facts = {name: value() if callable(value) else value for name, value in self._facts.items()}
        return {**self.space.statistics(), "out_of_memory": self.oom.statistics(), **facts}

    def close(self) -> None:
        """Forget all values, and let libraries allocate as before."""
        self.space.close()
        self._undo()


class _Late:
    """The stack wants its callback before there is a space to spill from."""

    def __init__(self) -> None:
        self.target: Callable[[int], bool] | None = None

    def __call__(self, nbytes: int) -> bool:
        return self.target is not None and self.target(nbytes)
