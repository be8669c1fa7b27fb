"""dask-cuda: what it has set up on a worker (`look`) or is asked to (`asked`), and its local cluster.

dask-cuda sets a worker up in three places: ``worker.data`` is a ``DeviceHostFile``, its plugin ``RMMSetup`` changes
what libraries allocate from, and its plugin ``CUDFSetup`` switches cuDF's own spilling on or off. Plugins run after
preloads and before the worker registers. So a preload sees plugins that are still to run (`pending`), and what the
scheduler sends sees what they have done.

dask-cuda is not imported to look: its objects are known by their modules, as a worker without it has none.
`dask_gpurt.tiers.device.coexistence` decides on what is found.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
from typing import TYPE_CHECKING, Any

from dask.utils import parse_bytes

from dask_gpurt.backends import cuda, nvml
from dask_gpurt.backends.rmm_stack import chain
from dask_gpurt.errors import InstallError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableMapping

    from distributed import LocalCluster, Worker, WorkerPlugin


class Allocator(enum.Enum):
    """What libraries allocate device memory from."""

    #: RMM as it begins: ``cudaMalloc``
    DRIVER = "cudaMalloc"
    #: a pool of RMM, such as that of ``--rmm-pool-size``
    POOL = "a pool of RMM"
    #: CUDA's own pool, such as that of ``--rmm-async``
    ASYNC = "CUDA's asynchronous pool"
    #: memory whose pages the driver moves, such as that of ``--rmm-managed-memory``
    MANAGED = "managed memory"
    OTHER = "another resource of RMM"


class Store(enum.Enum):
    """What ``worker.data`` is."""

    #: not of dask-cuda
    OTHER = enum.auto()
    #: a ``DeviceHostFile`` without keys
    EMPTY = enum.auto()
    #: one with keys
    USED = enum.auto()
    #: another class of dask-cuda, as JIT-unspill had one
    UNKNOWN = enum.auto()


@dataclasses.dataclass(frozen=True)
class DeviceSetup:
    """What manages device memory on a worker besides this package."""

    store: Store = Store.OTHER
    allocator: Allocator = Allocator.DRIVER
    cudf_spills: bool = False
    #: device and host share one memory, as on a system on a chip
    integrated: bool = False
    #: of an empty ``DeviceHostFile``: bytes of values that may stay on the device; None: no limit, they never leave
    device_limit_bytes: int | None = None
    #: of an empty ``DeviceHostFile``: values in host memory leave it at some point
    host_limited: bool = True
    #: that the pool of ``RMMSetup`` may take; None: no limit, or one that RMM tells itself
    pool_limit_bytes: int | None = None

    @property
    def device_limited(self) -> bool:
        """Values leave the device at some point, or dask-cuda has no say in it."""
        return self.store is not Store.EMPTY or self.device_limit_bytes is not None


def is_store(data: MutableMapping[Any, Any]) -> bool:
    """Whether a ``worker.data`` is dask-cuda's."""
    return _is_of_dask_cuda(data)


def is_here(worker: Worker, pending: Iterable[WorkerPlugin] = ()) -> bool:
    """Whether dask-cuda has set this worker up, or is about to. Loads nothing."""
    plugins = (*worker.plugins.values(), *pending)
    return is_store(worker.memory_manager.data) or any(map(_is_of_dask_cuda, plugins))


def _is_of_dask_cuda(thing: object) -> bool:
    return type(thing).__module__.partition(".")[0] == "dask_cuda"


def look(worker: Worker, pending: Iterable[WorkerPlugin] = (), *, device: int, integrated: bool = False) -> DeviceSetup:
    """What is set up on this worker now, or will be when `pending` plugins have run. Costs no call of CUDA.

    Parameters
    ----------
    device
        Its number in this process.
    integrated
        What the driver says of it.
    """
    manager, data = worker.memory_manager, worker.memory_manager.data
    store, limit, host_limited = Store.OTHER, None, True
    if is_store(data):
        store = Store.UNKNOWN
        if type(data).__name__ == "DeviceHostFile":
            # Its length is 0 without a limit of device memory, whatever is in it: so the tasks are asked too.
            used = len(data) or any(ts.state == "memory" for ts in worker.state.tasks.values())
            store = Store.USED if used else Store.EMPTY
    if store is Store.EMPTY:
        limit = getattr(getattr(data, "device_buffer", None), "n", None)
        host_limited = bool(manager.memory_limit and (manager.memory_target_fraction or manager.memory_spill_fraction))
    coming = {type(p).__name__: p for p in pending if _is_of_dask_cuda(p)}
    allocator, spills = _planned_allocator(coming.get("RMMSetup")), getattr(coming.get("CUDFSetup"), "spill", None)
    return DeviceSetup(
        store,
        _installed_allocator(device) if allocator is None else allocator,
        _cudf_spills() if spills is None else bool(spills),
        integrated,
        None if limit is None else int(limit),
        host_limited,
        _pool_limit([*worker.plugins.values(), *coming.values()]),
    )


def asked(options: Mapping[str, Any]) -> DeviceSetup:
    """What ``LocalCUDACluster(**options)`` will set up, as far as its arguments say."""
    limit = options.get("device_memory_limit", "default")
    return DeviceSetup(
        Store.OTHER if options.get("data") is not None else Store.EMPTY,
        Allocator.MANAGED if options.get("rmm_managed_memory") else Allocator.DRIVER,
        bool(options.get("enable_cudf_spill")),
        device_limit_bytes=None if _no_limit(limit) else 1,  # how many is for the workers to say
        host_limited=not _no_limit(options.get("memory_limit", "auto")),
    )


def _no_limit(value: float | str | None) -> bool:
    """As dask-cuda reads its limits."""
    if value is None or value in ("auto", "default"):
        return value is None
    return (parse_bytes(value) if isinstance(value, str) else value) == 0


def _planned_allocator(plugin: Any) -> Allocator | None:
    """What an ``RMMSetup`` is about to install; None: nothing."""
    if plugin is None:
        return None
    if plugin.managed_memory:
        return Allocator.MANAGED
    if plugin.async_alloc:
        return Allocator.ASYNC
    return None if plugin.initial_pool_size is None else Allocator.POOL


def _pool_limit(plugins: Iterable[WorkerPlugin]) -> int | None:
    """The limit of a pool, which RMM does not tell. A plugin that has not run may have a share or a text instead."""
    limits = [
        plugin.maximum_pool_size
        for plugin in plugins
        if type(plugin).__name__ == "RMMSetup" and getattr(plugin, "initial_pool_size", None) is not None
    ]
    return min((limit for limit in limits if type(limit) is int), default=None)


#: of RMM: whose pages move between device and host without us
_MANAGED = ("ManagedMemoryResource", "SystemMemoryResource", "SamHeadroomMemoryResource")
_ASYNC = ("CudaAsyncMemoryResource", "CudaAsyncViewMemoryResource", "CudaAsyncManagedMemoryResource")
_POOLS = ("PoolMemoryResource", "ArenaMemoryResource", "BinningMemoryResource", "FixedSizeMemoryResource")


def _installed_allocator(device: int) -> Allocator:
    if "rmm.mr" not in sys.modules:
        return Allocator.DRIVER
    import rmm.mr

    resources = chain(rmm.mr.get_per_device_resource(device))
    names = {base.__name__ for resource in resources for base in type(resource).__mro__}
    for allocator, known in ((Allocator.MANAGED, _MANAGED), (Allocator.ASYNC, _ASYNC), (Allocator.POOL, _POOLS)):
        if names.intersection(known):
            return allocator
    return Allocator.DRIVER if "CudaMemoryResource" in names else Allocator.OTHER


def _cudf_spills() -> bool:
    # While another thread imports it, it has no options yet.
    option = getattr(sys.modules.get("cudf"), "get_option", None)
    return option is not None and bool(option("spill"))


def visible_gpus() -> tuple[list[str], str]:
    """The devices that this process may use, as CUDA_VISIBLE_DEVICES names them; with a reason where there are none."""
    snapshot = nvml.look()
    named = cuda.given(os.environ)
    if named is None and snapshot.reason:  # with one that is lost, CUDA may count the others in another way
        return [], snapshot.reason
    if named is None or not snapshot.devices:
        return [str(d.index) for d in snapshot.devices], snapshot.reason or "NVML finds no device"
    return named, f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}"


def local_cuda_cluster() -> type[LocalCluster]:
    """dask-cuda's ``LocalCUDACluster``.

    Raises
    ------
    InstallError
        dask-cuda cannot be imported.
    """
    try:
        from dask_cuda import LocalCUDACluster
    except Exception as e:  # a broken installation raises all kinds
        raise InstallError(
            f"a cluster of GPUs is dask-cuda's, which cannot be imported ({type(e).__name__}: {e}). "
            'Remedy: pip install "dask-gpurt[cu13]" (or cu12, as the driver is), or leave out gpus='
        ) from e
    cluster: type[LocalCluster] = LocalCUDACluster
    return cluster
