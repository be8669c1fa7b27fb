"""Outputs of one shuffle that several tasks ask for, or that are asked for one after the other."""

from __future__ import annotations

import asyncio
from typing import Any

import dask
import numpy as np
import pytest
from distributed.utils_test import gen_cluster

from tests.shuffle.helpers import left, source, taken_over, until, whole

pytestmark = pytest.mark.cluster

TWO = {"client": True, "nthreads": [("127.0.0.1", 1)] * 2, "timeout": 120}
SHUFFLED = {"dataframe.shuffle.method": "p2p"}


@pytest.mark.parametrize("how", ["in one graph", "in two", "the second later"])
@gen_cluster(**TWO)
async def test_arrays_of_one_shuffled_frame(c: Any, s: Any, a: Any, b: Any, how: str) -> None:
    """Each is fused with the tasks that take the outputs, so an output has two of them."""
    want = whole(left, 6)[["k", "a"]].sum().to_numpy()
    async with taken_over(s, [a, b]) as (takeover, _):
        with dask.config.set(SHUFFLED):
            frame = source(left).shuffle("k", npartitions=4)
            both = frame[["k", "a"]].to_dask_array()
            if how == "in one graph":
                got, rows = await asyncio.wait_for(asyncio.gather(*c.compute([both.sum(axis=0), frame.size])), 60)
                assert rows == len(whole(left, 6)) * frame._meta.shape[1]
            else:
                first = c.persist(both[:, :1])
                if how == "the second later":
                    await until(lambda: s.plugins["shuffle"].active_shuffles)
                second = c.persist(both[:, 1])
                one, two = c.compute([first.sum(axis=0), second.sum()])
                got = np.array([(await asyncio.wait_for(one, 60))[0], await asyncio.wait_for(two, 60)])
    np.testing.assert_allclose(got.astype(float), want.astype(float))
    assert takeover.statistics()["errors"] == 0


@gen_cluster(**TWO)
async def test_outputs_that_are_asked_for_one_after_the_other(c: Any, s: Any, a: Any, b: Any) -> None:
    """Each may find a run for those before it alone, which is restarted: that is no cause that comes again."""
    async with taken_over(s, [a, b]) as (_, _):
        with dask.config.set(SHUFFLED):
            parts = source(left).shuffle("k", npartitions=24).to_delayed()
            kept = []
            rows = 0
            for part in parts:
                kept.append(c.compute(part))
                rows += len(await asyncio.wait_for(kept[-1], 60))
    assert rows == len(whole(left, 6))
