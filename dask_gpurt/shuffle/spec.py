"""What the scheduler sends to workers so that they make our run. Small, frozen, picklable."""

from __future__ import annotations

import dataclasses
import os
import secrets
from typing import TYPE_CHECKING

from dask_gpurt.backends.frames import load
from dask_gpurt.config import ShuffleSettings
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.counters import counters_of
from dask_gpurt.shuffle.protocol.recovery import State
from dask_gpurt.shuffle.transport.link.records import SECRET_BYTES
from dask_gpurt.shuffle.worker import retained, run_lookup, shard_stores

if TYPE_CHECKING:
    from dask_gpurt.shuffle.protocol.join_plan import JoinSide
    from dask_gpurt.shuffle.rows.kinds import RowKind


@dataclasses.dataclass(frozen=True)
class GpurtShuffleSpec(seam.DataFrameShuffleSpec):
    """Stock's spec with another run. Unpickling it imports this package: the scheduler asks workers first."""

    #: settings of the scheduler, so that all workers of a run have the same
    settings: ShuffleSettings = dataclasses.field(default=ShuffleSettings(enabled=True))
    #: what proves to a worker that another one takes part in this run; of no use after it
    secret: bytes = dataclasses.field(default=b"", repr=False)
    #: workers lost in this run so far; the scheduler's own changes with it, every worker gets it as it is then
    state: State = dataclasses.field(default_factory=State, compare=False)
    #: `backends.frames.DeviceFrames` of the partitions, as "package.module:Class"; "": they are pandas'
    frames: str = dataclasses.field(default="", compare=False)
    #: output partitions in the order in which their tasks run; those that are not in it come last
    order: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False)
    #: the join that it is a side of, with the other side's keys once they are known; None: rows of no join are dropped
    join: JoinSide | None = dataclasses.field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        spec: seam.DataFrameShuffleSpec,
        settings: ShuffleSettings,
        order: tuple[int, ...] = (),
        frames: str = "",
        join: JoinSide | None = None,
    ) -> GpurtShuffleSpec:
        """The same shuffle as a stock spec, with a secret of its own."""
        fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
        secret = secrets.token_bytes(SECRET_BYTES)
        return cls(**fields, settings=settings, secret=secret, order=order, frames=frames, join=join)

    def create_run_on_worker(
        self, run_id: int, span_id: str | None, worker_for: dict[int, str], plugin: seam.ShuffleWorkerPlugin
    ) -> seam.ShuffleRun:
        """As inherited, but the run is ours; called by distributed on each worker that takes part."""
        from dask_gpurt.shuffle.transport.plane import plane_of
        from dask_gpurt.shuffle.worker.run import GpurtShuffleRun

        worker = plugin.worker
        store, plain = shard_stores.store_of(worker)
        counters = counters_of(worker)
        if plain:
            counters.add(fallbacks=1)
        plane = plane_of(worker, plugin, self.settings, counters.add)
        run_lookup.install(plugin, GpurtShuffleRun)
        return GpurtShuffleRun(
            rows=self._rows(worker.address),
            store=store,
            counters=counters,
            plane=plane,
            secret=self.secret,
            memory_limit=worker.memory_manager.memory_limit,
            state=self.state,
            join=self.join,
            budget=retained.retained_of(worker, self.settings.retain),
            column=self.column,
            meta=self.meta,
            worker_for={part: worker_for[part] for part in self.order if part in worker_for} | worker_for,
            id=self.id,
            run_id=run_id,
            span_id=span_id,
            directory=os.path.join(worker.local_directory, f"shuffle-{self.id}-{run_id}"),
            executor=seam.executor_of(plugin),
            local_address=worker.address,
            rpc=worker.rpc,
            digest_metric=worker.digest_metric,
            scheduler=worker.scheduler,
            memory_limiter_disk=seam.ResourceLimiter(None),
            memory_limiter_comms=plane.unsent,
            drop_column=self.drop_column,
            loop=worker.loop,
        )

    def _rows(self, local_address: str) -> RowKind:
        """How the partitions are taken apart and put together on a worker."""
        cut_bytes = self.settings.cut_bytes
        if not self.frames:
            from dask_gpurt.shuffle.rows.kinds import PandasRows

            return PandasRows(self.meta, self.column, self.drop_column, cut_bytes)
        from dask_gpurt.shuffle.rows.device_rows import DeviceRows

        return DeviceRows(
            load(self.frames),
            meta=self.meta,
            column=self.column,
            drop_column=self.drop_column,
            cut_bytes=cut_bytes,
            local_address=local_address,
        )
