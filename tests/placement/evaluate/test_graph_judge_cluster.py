"""The judge of whole graphs on live clusters, with distributed's own validation on."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import dask.array as da
import pytest
from distributed import Event as DaskEvent
from distributed.utils_test import gen_cluster, slowinc

from dask_gpurt.placement.evaluate import governor, graph_judge
from tests.placement.clusters import EXPECTED, FOUR, idle, install, tree, until
from tests.placement.fakes import FakeWorker, make_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed import Worker
    from distributed.scheduler import Scheduler

    from dask_gpurt.model.link import Link
    from dask_gpurt.model.views import TaskView, WorkerView

pytestmark = pytest.mark.cluster

NO_STEALING = {"distributed.scheduler.work-stealing": False}


class Fullest:
    """The worker with the longest queue."""

    def decide(self, task: TaskView, workers: Sequence[WorkerView], far: Link) -> int:
        return max(range(len(workers)), key=lambda i: workers[i].queue_seconds)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short graphs are judged, too."""
    monkeypatch.setattr(graph_judge, "NOTABLE_SECONDS", 0.0)
    monkeypatch.setattr(graph_judge, "TASKS_PER_THREAD", 1)


@pytest.mark.usefixtures("at_once")
def test_graphs_that_lose_are_left_to_stock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(governor, "WINDOW", 10**9)  # the other judge is not what is tested

    @gen_cluster(client=True, nthreads=FOUR, config=NO_STEALING, timeout=120)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s, policy=Fullest())
        assert plugin.engine is not None
        judge = plugin.engine.graph_judge
        rounds = 0
        while not judge.retirements and rounds < 40:
            rounds += 1
            xs = await c.scatter(list(range(24)), hash=False, broadcast=True)
            ys = c.map(slowinc, xs, delay=0.05, key=[f"slowinc-{rounds}-{i}" for i in range(24)])
            assert await c.gather(ys) == list(range(1, 25))
            await until(lambda: not judge.observing)
            del xs, ys
        assert judge.retirements == 1, plugin.statistics()["graph_judge"]
        left = plugin.statistics()["declined"].get("graph judge", 0)
        xs = await c.scatter(list(range(24)), hash=False, broadcast=True)
        ys = c.map(slowinc, xs, delay=0.01, key=[f"slowinc-{rounds + 1}-{i}" for i in range(24)])
        assert await c.gather(ys) == list(range(1, 25))
        await until(lambda: not judge.observing)
        stats = plugin.statistics()
        assert stats["declined"]["graph judge"] == left + 24, "stock decides from now on"
        assert stats["graph_judge"]["left_to_stock"] == 1
        assert not stats["fallbacks"]
        assert json.loads(json.dumps(stats)) == stats
        del xs, ys
        await idle(s, plugin)

    with caplog.at_level(logging.WARNING, logger="distributed.scheduler.gpurt"):
        run()
    assert sum("for graphs of slowinc (24 tasks)" in r.message for r in caplog.records) == 1


@pytest.mark.usefixtures("at_once")
def test_on_the_side_of_stock_nothing_is_ours() -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=120)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        assert plugin.engine is not None
        judge = plugin.engine.graph_judge
        judge._until = float("inf")  # as if several kinds of graph had lost
        assert await tree(c) == EXPECTED
        x = da.ones((40, 40), chunks=(2, 20)) + 1
        assert await c.compute(x.sum()) == 3200
        stats = plugin.statistics()
        assert stats["decisions"]["total"] == 0
        assert not any(stats["roots"].values())
        assert stats["stealing"]["opinions"] == {}
        assert not stats["fallbacks"]
        await idle(s, plugin)

    run()


@pytest.mark.usefixtures("at_once")
def test_graphs_on_kept_data_are_judged() -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=120)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        assert plugin.engine is not None
        judge = plugin.engine.graph_judge
        x = c.persist(da.ones((64, 10), chunks=(2, 10)) + 1)
        await c.compute(x.sum())
        for _ in range(3):
            assert await c.compute((x * 2).sum()) == 2560
            await until(lambda: not judge.observing)
        assert judge.judged >= 4
        assert not judge.unjudged

    run()


@pytest.mark.usefixtures("at_once")
def test_what_is_cancelled_is_not_waited_for() -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=120)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        assert plugin.engine is not None
        judge = plugin.engine.graph_judge
        event = DaskEvent("go")

        def wait(i: int) -> int:
            DaskEvent("go").wait()
            return i

        xs = c.map(wait, range(30), pure=False)
        await until(lambda: s.queued or any(w.processing for w in s.workers.values()))
        assert judge.observing
        await c.cancel(xs)
        await event.set()
        await until(lambda: not judge.observing)
        assert judge.judged == 0
        assert sum(judge.unjudged.values()) == 1
        assert await tree(c) == EXPECTED

    run()


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_leaves_spoils_the_comparison() -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=120)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        assert plugin.engine is not None
        judge = plugin.engine.graph_judge
        xs = c.map(slowinc, range(20), delay=0.05, pure=False)
        await until(lambda: judge.observing)
        await workers[0].close()
        assert await c.gather(xs) == list(range(1, 21))
        await until(lambda: not judge.observing)
        assert judge.judged == 0
        assert sum(judge.unjudged.values()) == 1

    run()


def test_shadow_mode_judges_nothing() -> None:
    engine = make_engine([FakeWorker(0)], shadow=True)
    assert not engine.graph_judge.enabled
    assert make_engine([FakeWorker(0)]).graph_judge.enabled
