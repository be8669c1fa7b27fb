"""`Figures`: what the tiers of one worker tell of themselves, for its heartbeats and for `dask_gpurt.status`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dask_gpurt.backends import cuda
from dask_gpurt.memory import reclaim
from dask_gpurt.memory.pages import pages
from dask_gpurt.memory.reuse import reuse
from dask_gpurt.tiers.engine import buffer_roots
from dask_gpurt.tiers.read_cache import seam as reads

if TYPE_CHECKING:
    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.tiers.device.setup import DeviceMemory
    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.shared.worker import SharedCopies
    from dask_gpurt.tiers.storage.stack import Below
    from dask_gpurt.tiers.stores.shard_store import TierShardStore
    from dask_gpurt.tiers.worker.memory_watch import MemoryWatch
    from dask_gpurt.tiers.worker.seam import WorkerSeam

#: figures of a seam, where there is none
_NO_SEAM: dict[str, Any] = {
    **dict.fromkeys(("spilled_keys", "spilled_memory_bytes", "spilled_disk_bytes"), 0),
    **dict.fromkeys(("turn_waits", "turns_passed_by", "lost_keys", "returned_tasks"), 0),
    **dict.fromkeys(("turn_wait_seconds", "input_wait_seconds"), 0.0),
    **{part: {} for part in ("hints", "local_uses", "prefetch")},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """Reads the counters of the parts that a worker's tiers have from the beginning to the end."""

    engine: Engine
    below: Below
    #: None without a device tier
    device: DeviceMemory | None
    #: why there is none although one was asked for
    device_off: str
    shards: TierShardStore
    watch: MemoryWatch
    guard: Guard

    def heartbeat(self, seam: WorkerSeam | None) -> dict[str, float | int | None]:
        """Return what rides on every heartbeat: flat, and none of it costs more than a look."""
        engine, disk, counters = self.engine, self.below.disk, self.engine.counters
        done = counters.cumulative.get
        # Only of tiers that are there: a plot of bytes in an object store that is not set says nothing.
        more: dict[str, float | int | None] = {}
        if self.device is not None:
            space = self.device.space
            more["device_bytes"] = space.device_bytes
            more["device_limit_bytes"] = space.limit_bytes
            more["device_free_bytes"] = space.room_bytes
        if self.below.objects is not None:
            more["object_bytes"] = self.below.objects.used_bytes
        return {
            **more,
            "device_possible": int(self.device is not None or cuda.possible()),
            "host_bytes": engine.resident_bytes,
            "host_limit_bytes": engine.budget_bytes,
            "moving_bytes": engine.moving_bytes,
            "reserved_bytes": engine.gate.reserved_bytes,
            "disk_bytes": disk.used_bytes,
            "disk_limit_bytes": disk.limit_bytes,
            "spilled_keys": len(seam.store.slow) if seam is not None else 0,
            "written_bytes": int(done(("disk-write", "bytes"), 0)),
            "read_bytes": int(done(("disk-read", "bytes"), 0)),
            "write_seconds": done(("disk-write", "seconds"), 0.0),
            "read_seconds": done(("disk-read", "seconds"), 0.0),
            "sync_reads": counters.sync_reads,
            "errors": sum(counters.write_errors.values())
            + sum(counters.read_errors.values())
            + counters.checksum_failures
            + counters.decode_errors,
            "lost": counters.lost,
            "admission_waits": engine.gate.waits,
            "admission_wait_seconds": engine.gate.wait_seconds,
            "memory_alarms": self.watch.alarms,
        }

    def statistics(self, seam: WorkerSeam | None, shared: SharedCopies | None, left_alone: str) -> dict[str, Any]:
        """Return all figures as plain JSON. It looks at each entry.

        There is no `seam` while ``worker.data`` is left to Dask, for the reason `left_alone`, and nothing `shared`
        without an object store that other workers can read.
        """
        out = {
            "enabled": seam is not None,
            "left_alone": left_alone,
            "device_off": self.device_off,
            **self._of_engine(),
            **(_NO_SEAM if seam is None else _of_seam(seam)),
            **self._of_failures(),
            "recycled": pages.statistics(),
            "read_cache": reads.CACHE.statistics(),
        }
        if self.below.objects is not None:
            out["below"] = self.below.statistics()
            out["shared"] = shared.statistics() if shared is not None else {}
        if self.device is not None:
            out["device"] = self.device.statistics()
            if seam is not None and seam.execute.retry_alone is not None:
                out["device"].update(seam.execute.retry_alone.statistics())
            if seam is not None and seam.execute.device_turns is not None:
                turns = seam.execute.device_turns
                out["device"].update(
                    turn_waits=turns.waits, turn_wait_seconds=turns.wait_seconds, turns_passed_by=turns.passed_by
                )
            if seam is not None and seam.store.ahead is not None:
                out["device"].update(seam.store.ahead.statistics())
        return out

    def _of_engine(self) -> dict[str, Any]:
        engine, disk = self.engine, self.below.disk
        return {
            "host_bytes": engine.resident_bytes,
            "host_limit_bytes": engine.budget_bytes,
            "moving_bytes": engine.moving_bytes,
            "loading_bytes": engine.loading_bytes,
            "reserved_bytes": engine.gate.reserved_bytes,
            "disk_bytes": disk.used_bytes,
            "disk_limit_bytes": disk.limit_bytes,
            "disks": disk.statistics(),
            "shard_chunks": len(self.shards),
            "shard_disk_bytes": self.shards.spilled_bytes,
            "entries": engine.states(),
            "admission_wait_seconds": engine.gate.wait_seconds,
            "admission_waits": engine.gate.waits,
            "admission_forced": engine.gate.forced,
            "admission_queue": len(engine.gate),
            "memory_alarms": self.watch.alarms,
            "memory_trims": self.watch.trims,
            "memory_reuse_trims": reuse.trims,
            "evictions": engine.decided_by,
            **engine.counters.to_dict(),
        }

    def _of_failures(self) -> dict[str, Any]:
        parts = self.guard.parts.values()
        return {
            "memory_trim_errors": reclaim.errors,
            "implausible_sizes": self.engine.books.implausible_sizes,
            "unknown_frames": buffer_roots.errors,
            "failed_deletions": self.engine.io.failures,
            "fallbacks": {part.name: part.failures for part in parts if part.failures},
            "retired": {part.name: part.retired for part in parts if part.retired is not None},
            "last_traceback": next((part.last_traceback for part in parts if part.last_traceback), ""),
        }


def _of_seam(seam: WorkerSeam) -> dict[str, Any]:
    spilled, turns = seam.store.spilled_total, seam.turns
    return {
        "spilled_keys": len(seam.store.slow),
        "spilled_memory_bytes": spilled.memory,
        "spilled_disk_bytes": spilled.disk,
        "turn_waits": turns.waits,
        "turn_wait_seconds": turns.wait_seconds,
        "turns_passed_by": turns.passed_by,
        "lost_keys": seam.losses.keys,
        "returned_tasks": seam.inputs.returned_tasks,
        "input_wait_seconds": seam.inputs.wait_seconds,
        "hints": seam.hints.statistics(),
        "local_uses": seam.local.statistics(),
        "prefetch": seam.prefetch.statistics(),
    }
