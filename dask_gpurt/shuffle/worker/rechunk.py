"""Dask's own array rechunk, whose shards leave memory as soon as they were sent.

`ReleasingRechunkSpec` takes the place of distributed's spec. `release_sent` changes a run.

Theory of operation. distributed sends shards from ten background tasks per run (``p2p.comm.concurrency``). Between two
messages such a task waits with its local variables set, so each keeps its last message alive. A message of an array
rechunk is all that one input has for one worker. So up to ten messages stay in memory until the run closes, and no
limiter counts them. Measured with chunks of 128 MB on two workers of 1 GiB: each transfer left 128 MB in the worker
that ran it, and the nanny ended a worker that ran the third or fourth one.

The run, its format and its limits stay distributed's. Only the list of shards in a message is emptied, after its
receiver has stored or taken it: until then a retry needs it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dask_gpurt.shuffle import seam


@dataclasses.dataclass(frozen=True)
class ReleasingRechunkSpec(seam.ArrayRechunkSpec):
    """distributed's spec, whose run lets go of what it has sent. Unpickling it imports this package."""

    @classmethod
    def of(cls, spec: seam.ArrayRechunkSpec) -> ReleasingRechunkSpec:
        """The same rechunk as a spec of distributed's."""
        return cls(**{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)})

    def create_run_on_worker(
        self, run_id: int, span_id: str | None, worker_for: dict[Any, str], plugin: seam.ShuffleWorkerPlugin
    ) -> seam.ShuffleRun:
        """Make distributed's run, and have it let go of what it has sent."""
        run = super().create_run_on_worker(run_id, span_id, worker_for, plugin)
        release_sent(run)
        return run


def release_sent(run: seam.ShuffleRun) -> None:
    """Have a rechunk's run empty each message that it has sent."""
    buffer = seam.send_buffer(run)
    send = buffer.send

    async def releasing(address: str, shards: list[tuple[Any, list[Any]]]) -> Any:
        response = await send(address, shards)
        if response["status"] == "OK":
            for _, pieces in shards:
                pieces.clear()
        return response

    buffer.send = releasing
