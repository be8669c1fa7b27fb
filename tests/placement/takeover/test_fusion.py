"""Graphs of data frames that come to a live scheduler: which are fused, and what becomes of the same key twice."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import dask.array as da
import dask.dataframe as dd
import pandas as pd
import pytest
from dask._expr import FinalizeCompute
from dask.base import collections_to_expr
from dask.core import flatten
from distributed import Client, Event, LocalCluster
from distributed.utils_test import gen_cluster

from dask_gpurt.placement.decide import steps
from tests.placement.clusters import install, until

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

PARTS = 8


def make(part: int) -> pd.DataFrame:
    return pd.DataFrame({"k": [part % 3] * 10, "x": range(10)})


def make_late(part: int) -> pd.DataFrame:
    Event("go").wait()
    return make(part)


def query(source: Any = make) -> Any:
    d = dd.from_map(source, range(PARTS), meta=make(0).iloc[:0])
    return (d[d.x > 3].assign(y=lambda p: p.x * 2).y + 1).sum()


EXPECTED = PARTS * sum(2 * x + 1 for x in range(4, 10))


def asked(c: Client, *collections: Any) -> list[Any]:
    """As ``dask.compute``, without waiting for the results."""
    expression = FinalizeCompute(collections_to_expr(collections)).optimize()
    return list(c.get(expression, list(flatten(expression.__dask_keys__())), sync=False))


@gen_cluster(client=True)
async def test_a_graph_whose_result_is_waited_for_is_fused(c: Client, s: Scheduler, *workers: Any) -> None:
    plugin = await install(s)
    assert plugin.fusion is not None
    assert await c.gather(asked(c, query())) == [EXPECTED]
    assert plugin.statistics()["fusion"]["graphs"] == 1
    assert plugin.statistics()["fusion"]["spared"] >= 4 * PARTS
    assert plugin.statistics()["last_traceback"] is None
    await until(lambda: not s.tasks)


@gen_cluster(client=True)
async def test_other_graphs_are_left_to_dask(c: Client, s: Scheduler, *workers: Any) -> None:
    plugin = await install(s)
    assert await c.compute(query()) == EXPECTED
    assert await c.submit(sum, [1, 2]) == 3
    assert await c.gather(asked(c, da.ones(10, chunks=5).sum())) == [10]
    assert plugin.statistics()["fusion"]["graphs"] == 0


@gen_cluster(client=True)
async def test_safe_mode_and_removal_end_it(c: Client, s: Scheduler, *workers: Any) -> None:
    plugin = await install(s)
    assert plugin.engine is not None
    plugin.engine.safe = True
    assert await c.gather(asked(c, query())) == [EXPECTED]
    assert plugin.statistics()["fusion"]["graphs"] == 0
    plugin.engine.safe = False
    fusion = plugin.fusion
    assert fusion is not None
    plugin.uninstall()
    assert await c.gather(asked(c, query())) == [EXPECTED]
    assert fusion.graphs == 0
    assert "_generate_taskstates" not in vars(s)
    assert s.stream_handlers["update-graph"] == s.update_graph


@gen_cluster(client=True)
async def test_a_failure_of_ours_leaves_the_graph_to_dask(c: Client, s: Scheduler, *workers: Any) -> None:
    plugin = await install(s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "fused", lambda *args, **kwargs: 1 / 0)
        assert await c.gather(asked(c, query())) == [EXPECTED]
    assert plugin.statistics()["fallbacks"]["fusion"] == {"exception": 1}
    await until(lambda: not s.tasks)
    assert await c.gather(asked(c, query())) == [EXPECTED]
    assert plugin.statistics()["fusion"]["graphs"] == 1


@gen_cluster(client=True)
async def test_the_same_key_from_two_clients(c: Client, s: Scheduler, *workers: Any) -> None:
    """The second graph is fused otherwise: its results have more in common. Stock would keep tasks for good."""
    await install(s)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distributed.scheduler").addHandler(handler)
    try:
        async with Client(s.address, asynchronous=True) as other:
            d = dd.from_map(make_late, range(PARTS), meta=make(0).iloc[:0])
            step = d[d.x > 3].assign(y=lambda p: p.x * 2)
            first = asked(c, step.y.sum())
            await until(lambda: s.tasks)
            second = asked(other, step.y.sum(), step.y.max(), step.k.sum())
            third = other.compute(step.y.sum() + 1)
            await until(lambda: len(s.clients[other.id].wants_what) >= 3)
            await Event("go").set()
            expected = PARTS * sum(2 * x for x in range(4, 10))
            assert await c.gather(first) == [expected]
            assert (await other.gather(second))[:2] == [expected, 18]
            assert await third == expected + 1
            del first, second, third
            await until(lambda: not s.tasks)
    finally:
        logging.getLogger("distributed.scheduler").removeHandler(handler)
    assert not [w for w in warnings if "run_spec" in w]


@gen_cluster(client=True)
async def test_a_step_that_is_held_is_used(c: Client, s: Scheduler, *workers: Any) -> None:
    await install(s)
    calls: list[str] = []
    d = dd.from_map(make, [0], meta=make(0).iloc[:0])
    step = d.x.sum()
    held = c.compute(step)
    await held
    s.add_plugin(_Started(calls))
    assert await c.gather(asked(c, step + 1)) == [46]
    assert not [key for key in calls if key.startswith("make")]


class _Started:
    name = "started"

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if finish == "processing":
            self.calls.append(str(key[0] if isinstance(key, tuple) else key))


def test_compute_of_a_user() -> None:
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster:
        plugin = cluster.sync(install, cluster.scheduler)
        with Client(cluster):
            assert query().compute() == EXPECTED
        assert plugin.statistics()["fusion"]["graphs"] == 1
