"""Graphs of data frames that come to a live scheduler: which are fused, and what becomes of the same key twice."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import dask
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
    from collections.abc import Iterator

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


async def make_async(part: int) -> pd.DataFrame:
    return make(part)


@gen_cluster(client=True)
async def test_coroutine_functions_are_awaited(c: Client, s: Scheduler, *workers: Any) -> None:
    plugin = await install(s)
    assert await c.gather(asked(c, query(make_async), query())) == [EXPECTED, EXPECTED]
    assert plugin.fusion is not None
    assert plugin.fusion.statistics()["graphs"] == 1  # the other query's steps


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


@contextlib.contextmanager
def no_collision() -> Iterator[None]:
    """Dask does not warn of keys with two meanings."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("distributed.scheduler").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("distributed.scheduler").removeHandler(handler)
    assert not [w for w in warnings if "run_spec" in w]


def late() -> Any:
    """A frame whose partitions wait for the event ``go``."""
    d = dd.from_map(make_late, range(PARTS), meta=make(0).iloc[:0])
    return d[d.x > 3].assign(y=lambda p: p.x * 2)


TOTAL = PARTS * sum(2 * x for x in range(4, 10))


@gen_cluster(client=True)
async def test_the_same_key_from_two_clients(c: Client, s: Scheduler, *workers: Any) -> None:
    """The second graph is made otherwise: its results have more in common. Stock would keep tasks for good."""
    await install(s)
    with no_collision():
        async with Client(s.address, asynchronous=True) as other:
            step = late()
            first = asked(c, step.y.sum())
            await until(lambda: s.tasks)
            second = asked(other, step.y.sum(), step.y.max(), step.k.sum())
            third = other.compute(step.y.sum() + 1)
            await until(lambda: len(s.clients[other.id].wants_what) >= 3)
            await Event("go").set()
            assert await c.gather(first) == [TOTAL]
            assert (await other.gather(second))[:2] == [TOTAL, 18]
            assert await third == TOTAL + 1
            del first, second, third
            await until(lambda: not s.tasks)


@gen_cluster(client=True)
async def test_removed_while_a_fused_graph_runs(c: Client, s: Scheduler, *workers: Any) -> None:
    plugin = await install(s)
    with no_collision():
        first = asked(c, late().y.sum())
        await until(lambda: s.tasks)
        plugin.uninstall()
        second = c.compute(late().y.sum())
        third = asked(c, late().y.sum(), late().y.max())
        await until(lambda: len(s.clients[c.id].wants_what) == 2)
        await Event("go").set()
        assert await c.gather([*first, second, *third]) == [TOTAL, TOTAL, TOTAL, 18]
        del first, second, third
        await until(lambda: not s.tasks)
    assert await c.submit(int, pure=False) == 0
    assert "_generate_taskstates" not in vars(s)


@gen_cluster(client=True)
async def test_removed_and_put_back_while_a_fused_graph_runs(c: Client, s: Scheduler, *workers: Any) -> None:
    """Each time the one before was covered for good, and each graph went through all of them."""
    plugin = await install(s)
    with no_collision():
        first = asked(c, late().y.sum())
        await until(lambda: s.tasks)
        for _ in range(3):
            plugin.uninstall()
            await plugin.start(s)
        ours = vars(s)["_generate_taskstates"]
        assert ours.__wrapped__ == type(s)._generate_taskstates.__get__(s)
        second = c.compute(late().y.sum())
        third = asked(c, late().y.sum(), late().y.max())
        await until(lambda: len(s.clients[c.id].wants_what) == 2)
        await Event("go").set()
        assert await c.gather([*first, second, *third]) == [TOTAL, TOTAL, TOTAL, 18]
        del first, second, third
        await until(lambda: not s.tasks)
    plugin.uninstall()
    assert "_generate_taskstates" not in vars(s)


@gen_cluster(client=True)
async def test_graphs_side_by_side_with_common_steps_end_it(c: Client, s: Scheduler, *workers: Any) -> None:
    """Dask runs what they share once. That is found out once, and from then on Dask's way holds for a while."""
    plugin = await install(s)
    assert plugin.fusion is not None
    first = asked(c, late().y.sum())
    await until(lambda: s.tasks)
    others = [asked(c, late().y.max()), asked(c, late().k.sum())]
    await until(lambda: len(s.clients[c.id].wants_what) == 3)
    assert plugin.statistics()["fusion"]["graphs"] == 1
    await Event("go").set()
    assert await c.gather([*first, *others[0]]) == [TOTAL, 18]
    del first, others
    await until(lambda: not s.tasks)
    assert await c.gather(asked(c, query())) == [EXPECTED]
    assert plugin.statistics()["fusion"]["graphs"] == 1
    assert plugin.statistics()["fusion"]["shared"] == 1
    plugin.fusion._again = 0.0  # later
    await until(lambda: not s.tasks)
    assert await c.gather(asked(c, query())) == [EXPECTED]
    assert plugin.statistics()["fusion"]["graphs"] == 2


@gen_cluster(client=True)
async def test_futures_that_share_steps_with_a_fused_graph_end_it(c: Client, s: Scheduler, *workers: Any) -> None:
    plugin = await install(s)
    first = asked(c, late().y.sum())
    await until(lambda: s.tasks)
    second = c.compute(late().y.max())
    await until(lambda: len(s.clients[c.id].wants_what) == 2)
    assert plugin.statistics()["fusion"]["shared"] == 1
    await Event("go").set()
    assert await c.gather([*first, second]) == [TOTAL, 18]


@gen_cluster(client=True)
async def test_wishes_for_single_steps_are_kept(c: Client, s: Scheduler, *workers: Any) -> None:
    """Retries are for each step, and a function says for each key where it may run."""
    plugin = await install(s)
    for wish in ({"retries": 2}, {"workers": lambda key: []}):
        with dask.annotate(**wish):
            assert await c.gather(asked(c, query())) == [EXPECTED]
        await until(lambda: not s.tasks)
    assert plugin.statistics()["fusion"]["graphs"] == 0
    with dask.annotate(priority=2, workers=[s.workers[a].address for a in s.workers]):
        assert await c.gather(asked(c, query())) == [EXPECTED]
    assert plugin.statistics()["fusion"]["graphs"] == 1


@gen_cluster(client=True)
async def test_keys_that_are_asked_for_stay(c: Client, s: Scheduler, *workers: Any) -> None:
    await install(s)
    expression = FinalizeCompute(collections_to_expr((query(),))).optimize()
    inner = next(e for e in expression.walk() if type(e).__name__ == "GT")
    (found,) = await c.gather(c.get(expression, [(inner._name, 0)], sync=False))
    assert found.tolist() == [x > 3 for x in range(10)]


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
