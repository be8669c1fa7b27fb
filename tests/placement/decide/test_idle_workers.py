"""On live clusters: no worker stays idle behind a task that runs for long, though there are roots that it could run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import dask
import pytest
from dask import delayed
from distributed import Event as Gate
from distributed import get_worker, secede
from distributed.utils_test import gen_cluster

from dask_gpurt.placement.decide.root_dispatch import RootDispatch
from dask_gpurt.placement.evaluate.idle_alarm import IdleAlarm
from dask_gpurt.placement.tables import cluster_speed
from dask_gpurt.placement.tables.durations import Durations
from dask_gpurt.placement.tables.worker_speed import KEPT
from tests.placement.clusters import install, until

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.scheduler import Scheduler

    from dask_gpurt.placement.engine import Engine
    from dask_gpurt.placement.plugin import PlacementPlugin

pytestmark = pytest.mark.cluster

TWO = [("127.0.0.1", 1)] * 2
#: no task moves by stealing, and a thread is given one root ahead
AHEAD = {"distributed.scheduler.work-stealing": False, "distributed.scheduler.worker-saturation": 1.1}
#: and none
EXACT = AHEAD | {"distributed.scheduler.worker-saturation": 1.0}


def root(i: int, name: str) -> int:
    if get_worker().name == 1:
        Gate("begin").wait()
    elif name == "one":
        Gate("end").wait()
    return i


def follow(x: int) -> int:
    return x


def graph(c: Any, name: str, chains: bool = True, n: int = 8) -> list[Any]:
    """Futures of roots, or of chains that begin with one each, of a graph with a priority of its own."""
    tasks = {(name, i): (root, i, name) for i in range(n)}
    keys = list(tasks)
    if chains:
        keys = [(f"after-{name}", i) for i in range(n)]
        tasks |= {key: (follow, (name, key[1])) for key in keys}
    return list(c.get(tasks, keys, sync=False, fifo_timeout=0))


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task counts as one of a second, with a small result."""
    monkeypatch.setattr(Durations, "seconds_of", lambda self, ts: 1.0)
    monkeypatch.setattr(Durations, "learn", lambda *args: None)
    monkeypatch.setattr(RootDispatch, "root_done", lambda *args, **kwargs: None)


async def started(s: Scheduler) -> tuple[PlacementPlugin, Engine]:
    s.validate = False  # else distributed asserts that no root waits while a worker is idle
    plugin = await install(s)
    assert plugin.engine is not None
    plugin.engine.root_dispatch._owned.learn(1.0, 10)
    return plugin, plugin.engine


def test_an_owner_that_is_busy_keeps_no_older_root_from_others(long: None) -> None:
    """Nor theirs, which come after it."""

    @gen_cluster(client=True, nthreads=TWO, config=AHEAD, timeout=30)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin, _ = await started(s)
        assert plugin.monitor is not None
        plugin.monitor.stop()
        begin, end = Gate("begin"), Gate("end")
        futures = [*graph(c, "one"), *graph(c, "two")]
        await begin.set()
        await until(lambda: sum(f.done() for f in futures) == len(futures) - 1)
        await end.set()
        await c.gather(futures)

    run()


def test_a_slow_worker_is_refused_no_longer_than_others_may_take(long: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_speed, "PATIENCE_SECONDS", 0.1)

    @gen_cluster(client=True, nthreads=TWO, config=EXACT, timeout=30)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        _, engine = await started(s)
        begin, end = Gate("begin"), Gate("end")
        futures = [*graph(c, "one", False), *graph(c, "two", False)]
        await until(lambda: len(s.tasks) == len(futures))
        slow = engine.workers.by_address[workers[1].address]
        for _ in range(KEPT):
            slow.speed.observe("root", math.log(32))
        slow.slowness, slow.speed_samples = slow.speed.slowness, KEPT
        engine.speeds.learned(slow)
        await begin.set()
        await until(lambda: sum(f.done() for f in futures) == len(futures) - 1)
        await end.set()
        await c.gather(futures)

    run()


def source(i: int) -> int:
    Gate(f"source-{i}").wait()
    return i


def read(x: int, i: int) -> int:
    return i


def test_roots_that_wait_for_their_input_keep_no_worker_from_later_ones(
    long: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheap = [True]
    monkeypatch.setattr(RootDispatch, "_cheap", lambda self: cheap[0])

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, config=EXACT, timeout=30)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin, engine = await started(s)
        assert plugin.monitor is not None
        plugin.monitor.stop()
        sources = [c.submit(source, i, workers=[workers[i].address], pure=False) for i in range(2)]
        reads = c.map(read, [x for x in sources for _ in range(9)], list(range(18)), pure=False)
        await until(lambda: len(engine.groups.later) == len(reads))
        await Gate("source-0").set()
        await until(lambda: sum(f.done() for f in reads) == 9)
        # Each worker has roots that wait. One is at work on what they wait for, and its later roots are held for it.
        cheap[0] = False
        await Gate("begin").set()
        later = c.map(root, range(18), name="two", pure=False)
        await until(lambda: sum(f.done() for f in later) >= 12)
        await Gate("source-1").set()
        await c.gather([*reads, *later])

    run()


def wait(x: bytes, i: int) -> int:
    Gate("end").wait()
    return i


def test_a_root_begins_when_the_input_that_it_waited_for_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """From another zone, to the worker's neighbour: no end of a task may follow."""
    monkeypatch.setattr(IdleAlarm, "tick", lambda *args: False)

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, config=EXACT, timeout=30)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        _, engine = await started(s)
        await until(lambda: all(w.zoned for w in engine.workers.all.items))
        for w, trip in zip(workers, (1e-5, 2e-2, 2e-2), strict=True):
            engine.zones.remove(w.address)
            engine.measured(engine.workers.by_address[w.address], trip)
        assert engine.workers.zoned
        x = await c.scatter(bytes(10**7), workers=[workers[0].address])
        futures = c.map(wait, [x] * 9, list(range(9)), pure=False)
        await until(lambda: all(ws.processing for ws in s.workers.values()))
        await Gate("end").set()
        await c.gather(futures)

    run()


@pytest.mark.parametrize("held", [True, False])
def test_urgent_roots_of_one_worker_keep_no_other_idle(long: None, monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    """When a graph is first given out, as its first task may take hours."""
    monkeypatch.setattr(RootDispatch, "_cheap", lambda self: not held)

    @gen_cluster(client=True, nthreads=TWO, config=EXACT, timeout=30)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin, _ = await started(s)
        assert plugin.monitor is not None
        plugin.monitor.stop()
        with dask.annotate(priority=10):
            urgent = [delayed(wait, pure=False)(b"", i) for i in range(3)]
        futures = c.compute(urgent + [delayed(wait, pure=False)(b"", i) for i in range(5)], optimize_graph=False)
        await until(lambda: all(ws.processing for ws in s.workers.values()))
        await Gate("end").set()
        await c.gather(futures)

    run()


def test_a_worker_all_of_whose_tasks_have_seceded_is_idle() -> None:
    """To the alarm of idle threads, and to what looks for free workers, while nothing else happens."""

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], timeout=30)
    async def run(c: Any, s: Scheduler, a: Worker) -> None:
        plugin = await install(s)

        def outer() -> None:
            secede()
            Gate("gate").wait()

        future = c.submit(outer)
        ws = s.workers[a.address]
        await until(lambda: ws.long_running)
        assert plugin.engine is not None
        idle = plugin.engine.workers.idle.items
        await until(lambda: [info.ws for info in idle] == [ws])
        await Gate("gate").set()
        await future

    run()
