"""The RMM resources that a worker's libraries allocate from, put together, watched, and taken apart.

::

    FailureCallbackResourceAdaptor     outermost: below a pool it would be called under the pool's lock
      StatisticsResourceAdaptor        what is allocated now, and its peak
        LimitingResourceAdaptor        bytes that this worker may take
          what was there               a pool of dask-cuda, of the user, or else one of our own

`stack_over` builds all but the lowest line. `DeviceAllocator` installs a stack over the current resource of a device,
and notices with each `look` when something else was installed instead (dask-cuda's ``RMMSetup`` runs after preloads):
it then stacks again, over that. Both run on every machine: tests put RMM's ``CallbackMemoryResource`` below.

What is free is the lesser of two counts: our own limit, and what the driver says, as another process may share the GPU.
A pool keeps what was freed, so the driver's count alone says too little: what the pool held at its peak is added.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from rmm.mr import DeviceMemoryResource, LimitingResourceAdaptor, StatisticsResourceAdaptor


@dataclasses.dataclass(frozen=True)
class Stack:
    """RMM resources, put together."""

    #: what libraries allocate from
    resource: DeviceMemoryResource
    statistics: StatisticsResourceAdaptor
    limiting: LimitingResourceAdaptor

    @property
    def limit_bytes(self) -> int:
        """That may be allocated in all."""
        return int(self.limiting.get_allocation_limit())

    def allocated_bytes(self) -> int:
        """Now."""
        return int(self.statistics.allocation_counts.current_bytes)

    def peak_bytes(self) -> int:
        """The most at one time so far."""
        return int(self.statistics.allocation_counts.peak_bytes)

    def headroom_bytes(self) -> int:
        """That could still be allocated below the limit."""
        return self.limit_bytes - int(self.limiting.get_allocated_bytes())


#: Stacks are never given up: buffers from one may live as long as the process. And where resource and buffers became
#: garbage together, in one cycle, the collector would clear the resource first, and freeing the buffers would crash.
_STACKS: list[Stack] = []


def stack_over(base: DeviceMemoryResource, limit_bytes: int, callback: Callable[[int], bool]) -> Stack:
    """Limit, count, and call back when an allocation fails. The stack lives as long as the process."""
    import rmm.mr

    limiting = rmm.mr.LimitingResourceAdaptor(base, limit_bytes)
    statistics = rmm.mr.StatisticsResourceAdaptor(limiting)
    stack = Stack(rmm.mr.FailureCallbackResourceAdaptor(statistics, callback), statistics, limiting)
    _STACKS.append(stack)
    return stack


def chain(resource: DeviceMemoryResource) -> list[DeviceMemoryResource]:
    """A resource and all that it allocates from, outermost first."""
    out = [resource]
    while (upstream := getattr(out[-1], "get_upstream", None)) is not None:
        out.append(upstream())
    return out


def own_pool(kind: str, limit_bytes: int) -> Any:
    """The lowest line of the stack on a device that has no pool yet.

    Parameters
    ----------
    kind
        "async": CUDA's own pool, shared by streams without fragmentation of ours. "pool": RMM's, for drivers that lack
        the former.
    """
    import rmm.mr

    if kind == "async":
        # What is spilled goes back to the driver beyond half of the limit: another worker may share the GPU.
        return rmm.mr.CudaAsyncMemoryResource(release_threshold=limit_bytes // 2)
    if kind == "pool":
        aligned = limit_bytes // 256 * 256
        return rmm.mr.PoolMemoryResource(
            rmm.mr.CudaMemoryResource(), initial_pool_size=aligned // 2 // 256 * 256, maximum_pool_size=aligned
        )
    raise ValueError(f"kind is {kind!r}, must be 'async' or 'pool'")


class DeviceAllocator:
    """What the libraries of this process allocate from on one device. Thread-safe, but for `install` and `close`.

    Parameters
    ----------
    callback
        Called with the bytes of an allocation that failed; True: try again.
    limit_bytes
        That this worker may take; a lower limit that is there already holds instead.
    pool
        Gives the pool of our own, for a device where nothing but ``cudaMalloc`` is installed; None: the stack is over
        that then.
    cupy
        Have CuPy allocate through RMM, where it is installed; else it keeps its own pool.
    free_bytes
        What the driver has free; None: it is not asked.
    device
        Its number in this process.
    """

    def __init__(
        self,
        callback: Callable[[int], bool],
        limit_bytes: int,
        *,
        pool: Callable[[], Any] | None,
        cupy: bool = False,
        free_bytes: Callable[[], int] | None = None,
        device: int = 0,
    ) -> None:
        self._callback = callback
        self._limit_bytes = limit_bytes
        self._pool = pool
        self._cupy = cupy
        self._free_bytes = free_bytes
        self.device = device
        self._before: DeviceMemoryResource | None = None
        self._undo_cupy: Callable[[], None] = _nothing
        #: ours so far, the one in use last: what was allocated from an earlier one still counts
        self.stacks: list[Stack] = []
        #: times something else was installed in our place
        self.replaced = 0
        self._lock = threading.Lock()
        self._closed = False

    @property
    def stack(self) -> Stack:
        """The one in use."""
        return self.stacks[-1]

    def install(self) -> None:
        """Stack over what is installed.

        Memory that was allocated before stays with the resource it came from.
        """
        import rmm.mr

        self._before = rmm.mr.get_per_device_resource(self.device)
        bare = type(self._before) is rmm.mr.CudaMemoryResource
        self._over(self._pool() if bare and self._pool is not None else self._before)
        if self._cupy:
            self._undo_cupy = _use_rmm_in_cupy()

    def _over(self, base: DeviceMemoryResource) -> None:
        import rmm.mr

        limits = [int(r.get_allocation_limit()) for r in chain(base) if hasattr(r, "get_allocation_limit")]
        self.stacks.append(stack_over(base, min([self._limit_bytes, *limits]), self._callback))
        rmm.mr.set_per_device_resource(self.device, self.stack.resource)

    def look(self) -> bool:
        """Whether our stack is still what libraries allocate from; where it is not, stack over what is there now.

        Costs no call of CUDA. What others put over our stack (a log, a tracker) leaves it in use.
        """
        import rmm.mr

        with self._lock:
            now = rmm.mr.get_per_device_resource(self.device)
            ours = self.stack.resource
            if self._closed or now is ours or any(r is ours for r in chain(now)):
                return True
            self.replaced += 1
            self._over(now)
            return False

    @property
    def limit_bytes(self) -> int:
        """That may be allocated in all."""
        return self.stack.limit_bytes

    def allocated_bytes(self) -> int:
        """Now, by this process through RMM."""
        return sum(s.allocated_bytes() for s in self.stacks)

    def peak_bytes(self) -> int:
        """The most at one time so far; at most that much where a stack was replaced."""
        return sum(s.peak_bytes() for s in self.stacks)

    def headroom_bytes(self) -> int:
        """That could still be allocated: below the limit, and by what the driver and the pool have free."""
        below_limit = self.stack.headroom_bytes()
        if self._free_bytes is None:
            return below_limit
        base = chain(self.stack.limiting.get_upstream())
        held = max([self.peak_bytes(), *(int(r.pool_size()) for r in base if hasattr(r, "pool_size"))])
        return min(below_limit, self._free_bytes() + max(0, held - self.allocated_bytes()))

    def close(self) -> None:
        """Have libraries allocate as before, unless something else was installed meanwhile."""
        import rmm.mr

        with self._lock:
            self._closed = True
            self._undo_cupy()
            if self.stacks and rmm.mr.get_per_device_resource(self.device) is self.stack.resource:
                back = self._before if len(self.stacks) == 1 else self.stack.limiting.get_upstream()
                rmm.mr.set_per_device_resource(self.device, back)


def _nothing() -> None:
    """Do nothing."""


def _use_rmm_in_cupy() -> Callable[[], None]:
    """Have CuPy allocate through RMM, where it is installed; returns the way back."""
    try:
        import cupy
        from rmm.allocators.cupy import rmm_cupy_allocator
    except Exception:  # a broken installation raises all kinds, and nothing allocates through it
        return _nothing
    old = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(rmm_cupy_allocator)
    return lambda: cupy.cuda.set_allocator(old)
