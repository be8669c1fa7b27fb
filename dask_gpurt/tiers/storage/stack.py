"""`Below`: what a worker has below its memory: the folders of the disk tier, and an object store if one is set.

Opened and closed as one: a worker that cannot have all of it has none of it. A wrong URL is an error at the start, and
leaves no folder behind.

The engine gets the disk itself where there is nothing else, and a `Cascade` over both where there is.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import InstallError, StoreError
from dask_gpurt.tiers.storage.disk.striped import Directories, open_directories
from dask_gpurt.tiers.storage.fallback import Cascade
from dask_gpurt.tiers.threads import run_apart

if TYPE_CHECKING:
    from distributed.diskutils import WorkDir
    from distributed.worker import Worker

    from dask_gpurt.config import TierSettings
    from dask_gpurt.model.events import Sink
    from dask_gpurt.tiers.limits import Limits
    from dask_gpurt.tiers.storage.object.leases import LeaseKeeper
    from dask_gpurt.tiers.storage.object.tier import ObjectTier
    from dask_gpurt.tiers.storage.protocol import StorageTier


#: for the deletion of a folder of the user's choice; distributed's lock lets others purge what is left
RELEASE_SECONDS = 10.0


class Below:
    """The tiers below memory of one worker. Made by `open` only."""

    def __init__(
        self,
        disk: Directories,
        work_dirs: list[WorkDir],
        objects: tuple[ObjectTier, LeaseKeeper] | None,
        *,
        objects_first: bool,
    ) -> None:
        self.disk = disk
        self._work_dirs = work_dirs
        self.objects: ObjectTier | None = None
        #: keeps other processes from deleting what is in `objects`
        self.lease: LeaseKeeper | None = None
        tiers: list[StorageTier] = [disk]
        if objects is not None:
            self.objects, self.lease = objects
            tiers.insert(0 if objects_first else 1, self.objects)
        self.cascade = Cascade(tiers)
        #: what the engine writes to; it closes it
        self.tier: StorageTier = self.cascade if len(tiers) > 1 else disk

    @classmethod
    async def open(cls, worker: Worker, settings: TierSettings, limits: Limits, sink: Sink) -> Below:
        """On the worker's event loop; what takes long is done in threads.

        Raises
        ------
        InstallError
            No folder can be used, or the object store does not answer. Nothing is left behind.
        """
        disk, work_dirs = await asyncio.to_thread(open_directories, worker.local_directory, settings, limits, sink)
        try:
            objects = await asyncio.to_thread(_open_objects, worker, settings)
        except BaseException:
            await asyncio.to_thread(_close_folders, disk, work_dirs)
            raise
        return cls(disk, work_dirs, objects, objects_first=settings.object_use == "first")

    async def abandon(self) -> None:
        """Close all of it, where no engine has it yet."""
        await self.before_close()
        await run_apart(self.tier.close, RELEASE_SECONDS)
        await self.after_close()

    async def before_close(self) -> None:
        """Before the engine closes the tiers."""
        if self.lease is not None and self.objects is not None:
            self.objects.bucket.attempts = 1  # a store that is down must not keep the worker from closing
            await self.lease.stop()

    async def after_close(self) -> None:
        """Give back the locks of the user's folders."""
        for work_dir in self._work_dirs:
            await run_apart(work_dir.release, RELEASE_SECONDS)

    def statistics(self) -> dict[str, Any]:
        """Plain JSON; empty without an object store, where the disk's own figures tell all."""
        if self.objects is None:
            return {}
        out = self.cascade.statistics()
        out["object"].update(self.objects.metrics.to_dict())
        return out


def _close_folders(disk: Directories, work_dirs: list[WorkDir]) -> None:
    disk.close()
    for work_dir in work_dirs:
        work_dir.release()


def _open_objects(worker: Worker, settings: TierSettings) -> tuple[ObjectTier, LeaseKeeper] | None:
    """In a thread. The store must answer once: a wrong URL or missing credentials must not wait for a full disk."""
    url = settings.object_store
    if url is None:
        return None
    from dask_gpurt.tiers.storage.object.client import Bucket
    from dask_gpurt.tiers.storage.object.leases import LeaseKeeper, worker_prefix
    from dask_gpurt.tiers.storage.object.tier import ObjectTier

    bucket = Bucket(url, timeout_seconds=settings.object_timeout)
    prefix = worker_prefix(worker.scheduler.address)
    owner = {"worker": worker.address_safe, "name": str(worker.name), "scheduler": worker.scheduler.address}
    lease = LeaseKeeper(bucket, prefix, owner)
    tier = ObjectTier(bucket, prefix)
    try:
        lease.renew()
        tier.probe()
    except (OSError, StoreError) as e:
        raise InstallError(
            f"gpurt.tiers.object-store is {url!r}, where a test object could not be written and read back: {e}. "
            "Remedy: correct the URL, give credentials in the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...), "
            "or set it to null"
        ) from e
    return tier, lease
