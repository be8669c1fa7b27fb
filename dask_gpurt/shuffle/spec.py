"""What the scheduler sends to workers so that they make our run. Small, frozen, picklable."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from dask_gpurt.shuffle import seam, stores


@dataclasses.dataclass(frozen=True)
class GpurtShuffleSpec(seam.DataFrameShuffleSpec):
    """Stock's spec with another run. Unpickling it imports this package: the scheduler asks workers first."""

    @classmethod
    def of(cls, spec: Any) -> GpurtShuffleSpec:
        """The same shuffle as a stock spec."""
        return cls(**{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)})

    def create_run_on_worker(self, run_id: int, span_id: str | None, worker_for: dict[int, str], plugin: Any) -> Any:
        from dask_gpurt.shuffle.run import GpurtShuffleRun

        worker = plugin.worker
        store, plain = stores.store_of(worker)
        counters = stores.counters_of(worker)
        if plain:
            counters.add(fallbacks=1)
        return GpurtShuffleRun(
            store=store,
            counters=counters,
            column=self.column,
            meta=self.meta,
            worker_for=worker_for,
            id=self.id,
            run_id=run_id,
            span_id=span_id,
            directory=os.path.join(worker.local_directory, f"shuffle-{self.id}-{run_id}"),
            executor=plugin._executor,
            local_address=worker.address,
            rpc=worker.rpc,
            digest_metric=worker.digest_metric,
            scheduler=worker.scheduler,
            memory_limiter_disk=seam.ResourceLimiter(None),
            memory_limiter_comms=plugin.memory_limiter_comms,
            drop_column=self.drop_column,
            loop=worker.loop,
        )
