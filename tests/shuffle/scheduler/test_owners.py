"""Who owns the outputs of a join's second side, when an owner of the first side's has left."""

from __future__ import annotations

import asyncio
import threading

import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import futures_of
from distributed.utils_test import gen_cluster

from dask_gpurt.shuffle import seam
from tests.shuffle.helpers import taken_over, until

pytestmark = pytest.mark.cluster
GO = threading.Event()


def left(i: int) -> pd.DataFrame:
    return pd.DataFrame({"k": range(i * 20, i * 20 + 20), "a": i})


def right(i: int) -> pd.DataFrame:
    GO.wait(60)
    return pd.DataFrame({"k": range(i * 40, i * 40 + 40), "b": i})


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 4)] * 3,
    timeout=60,
    config={"distributed.p2p.comm.retry.delay.min": "100ms"},
)
async def test_an_owner_that_left_while_its_outputs_were_not_wanted_owns_none_of_the_other_side(c, s, *workers):
    GO.set()
    sides = [dd.from_map(f, list(range(n)), meta=f(0).iloc[:0]) for f, n in ((left, 4), (right, 2))]
    GO.clear()
    try:
        async with taken_over(s, workers) as (takeover, _):
            out = c.persist(sides[0].merge(sides[1], on="k", shuffle_method="p2p", npartitions=6))
            kept = {int(f.key[1]): f for f in futures_of(out)}
            del out
            runs = s.plugins["shuffle"].active_shuffles
            await until(lambda: len(runs) == 1)
            (first,) = runs.values()
            await until(lambda: s.tasks[seam.barrier_key(first.id)].state == "memory")
            owner = first.run_spec.worker_for
            (victim, *_) = (w for w in workers if w.address in owner.values())
            for part in [part for part, address in owner.items() if address == victim.address]:
                key = kept.pop(part).key
                await until(lambda key=key: key not in s.tasks)
            await victim.close(executor_wait=False)
            await until(lambda: victim.address not in s.workers)
            assert victim.address in owner.values()  # nothing of it is wanted
            GO.set()
            # Its barrier waited for the worker that is gone, for ever.
            frames = await asyncio.gather(*kept.values())
            assert all((frame.a == frame.k // 20).all() and (frame.b == frame.k // 40).all() for frame in frames)
            assert 0 < sum(map(len, frames)) <= 80
            assert takeover.statistics()["errors"] == 0
    finally:
        GO.set()
