"""Failures that a shuffle survives are counted and shown."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle.counters import ShuffleCounters, worker_statistics
from dask_gpurt.shuffle.protocol.histogram import Histogram
from dask_gpurt.shuffle.worker.flushed_buffers import FlushedBuffers
from dask_gpurt.shuffle.worker.scheduler_calls import SchedulerCalls
from tests.shuffle.helpers import left, source, taken_over, until

TWO: dict[str, Any] = {"client": True, "nthreads": [("127.0.0.1", 1)] * 2, "timeout": 120}


@pytest.mark.cluster
@gen_cluster(**TWO)
async def test_what_fails_beside_the_rows(c, s, a, b):
    class Unclosable:
        """A send buffer from before an amendment."""

        async def flush(self) -> None:
            pass

        def raise_on_exception(self) -> None:
            pass

        async def close(self) -> None:
            raise OSError("it does not close")

    def look(self: Any, *args: Any) -> None:
        raise ArithmeticError("cannot be counted")

    init = FlushedBuffers.__init__

    def with_a_buffer(self: Any, *args: Any) -> None:
        init(self, *args)
        self._buffers.append(Unclosable())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Histogram, "look", look)
        patch.setattr(FlushedBuffers, "__init__", with_a_buffer)
        async with taken_over(s, [a, b]):
            assert len(await c.compute(source(left).shuffle("k", npartitions=5))) == 480
            await until(lambda: sum(worker_statistics(w)["runs_closed"] for w in (a, b)) == 2)
        stats = [worker_statistics(w) for w in (a, b)]
    assert sum(x["skew_unknown"] for x in stats) == sum(x["inputs"] for x in stats) == 6
    assert [x["close_errors"] for x in stats] == [1, 1]
    assert all("it does not close" in x["last_error"] or "cannot be counted" in x["last_error"] for x in stats)


def test_a_restart_that_the_scheduler_refuses():
    class Refuses:
        async def shuffle_barrier(self, **kwargs: Any) -> None:
            raise ValueError("no such run")

    counters = ShuffleCounters()
    scheduler: Any = Refuses()
    asyncio.run(SchedulerCalls(scheduler, "x", 1, counters).restart())
    assert counters.restarts_refused == 1
    assert "no such run" in counters.last_error
