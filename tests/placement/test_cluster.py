"""The plugin on real schedulers and workers, with distributed's own validation on."""

from __future__ import annotations

import json
import operator
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Event as Gate
from distributed import Nanny, Worker, get_worker
from distributed.scheduler import Scheduler
from distributed.utils_test import gen_cluster, inc, slowinc

from dask_gpurt.errors import InstallError, SeamMismatch
from dask_gpurt.model import circuit_breaker
from dask_gpurt.placement import engine
from dask_gpurt.placement.bookkeeping import Bookkeeping
from dask_gpurt.placement.decide.root_dispatch import RootDispatch
from dask_gpurt.placement.plugin import PlacementPlugin
from tests.placement.clusters import EXPECTED, FOUR, idle, install, tree, until
from tests.placement.fakes import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask_gpurt.model import Event

pytestmark = pytest.mark.cluster

TWO = [("127.0.0.1", 1)] * 2
OVERRIDES = (
    "decide_worker_non_rootish",
    "get_comm_cost",
    "bulk_schedule_unrunnable_after_adding_worker",
    "_TRANSITIONS_TABLE",
    "stimulus_queue_slots_maybe_opened",
    "decide_worker_rootish_queuing_enabled",
)
#: taken over by parts of their own
OTHERS = ("_generate_taskstates", "_task_to_msg", "request_remove_replicas")


def test_tree_reduction() -> None:
    @gen_cluster(client=True, nthreads=FOUR)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        assert await tree(c) == EXPECTED
        stats = plugin.statistics()
        assert stats["decisions"]["total"] >= 63
        assert stats["decisions"]["moved"] + stats["decisions"]["local"] == stats["decisions"]["total"]
        assert not stats["fallbacks"]
        assert stats["exceptions"] == 0
        assert stats["microseconds"]["median"] > 0
        assert stats["links"]["host"]["samples"] > 0
        assert stats["prefixes"] >= 2
        assert json.loads(json.dumps(stats)) == stats
        await idle(s, plugin)

    run()


def test_dependents_of_a_small_key_spread() -> None:
    # Stock compares holders only: all of these queue on one worker until stealing spreads them.
    @gen_cluster(client=True, nthreads=FOUR, config={"distributed.scheduler.work-stealing": False})
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        x = await c.scatter(b"small", workers=[workers[0].address])

        def where(x: bytes, i: int) -> str:
            import time

            time.sleep(0.05)
            return get_worker().address

        # One group of eight is not root-ish with four threads.
        used = await c.gather([c.submit(where, x, i, pure=False) for i in range(8)])
        assert len(set(used)) > 1
        assert plugin.statistics()["decisions"]["moved"] > 0

    run()


def test_large_data_stays_where_it_is() -> None:
    @gen_cluster(client=True, nthreads=FOUR, config={"distributed.scheduler.work-stealing": False})
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        x = c.submit(bytes, 50_000_000, workers=[workers[2].address], pure=False)
        await x
        sizes = await c.gather([c.submit(len, x, pure=False) for _ in range(4)])
        assert sizes == [50_000_000] * 4
        assert len(s.tasks[x.key].who_has or ()) == 1
        assert plugin.statistics()["decisions"]["local"] == 4

    run()


def where(*args: Any) -> str:
    return get_worker().address


def wait_if_first(i: int) -> int:
    if i == 0:
        Gate("gate").wait()
    return i


def test_worker_restrictions() -> None:
    @gen_cluster(client=True, nthreads=FOUR)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        data = await c.scatter([1, 2, 3, 4], workers=[workers[0].address])
        only = [workers[2].address, workers[3].address]
        out = await c.gather([c.submit(where, *data, workers=only, pure=False) for _ in range(20)])
        assert set(out) <= set(only)
        assert plugin.statistics()["decisions"]["restricted"] == 20
        loose = c.submit(where, *data, workers=["tcp://127.0.0.1:1"], allow_other_workers=True, pure=False)
        assert await loose in s.workers
        strict = c.submit(where, *data, workers=["tcp://127.0.0.1:1"], pure=False)
        await until(lambda: strict.key in s.tasks and s.tasks[strict.key].state == "no-worker")
        assert not plugin.statistics()["fallbacks"]

    run()


def test_a_wish_for_a_worker_does_not_keep_others_idle() -> None:
    """With ``allow_other_workers`` Dask's stealing gives what waits to a worker without work."""

    @gen_cluster(client=True, nthreads=TWO)
    async def run(c: Any, s: Scheduler, a: Worker, b: Worker) -> None:
        plugin = await install(s)
        await c.submit(slowinc, 0, delay=0.1, workers=[a.address])  # how long it takes is known now
        futures = c.map(slowinc, range(20), delay=0.1, workers=[a.address], allow_other_workers=True, pure=False)
        await c.gather(futures)
        assert len(b.data) > 2
        assert not plugin.statistics()["fallbacks"]

    run()


def test_resource_restrictions() -> None:
    nthreads = [("127.0.0.1", 1, {"resources": {"GPU": i % 2}}) for i in range(4)]

    @gen_cluster(client=True, nthreads=nthreads)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        data = await c.scatter(list(range(4)), workers=[workers[0].address])
        out = await c.gather([c.submit(where, *data, resources={"GPU": 1}, pure=False) for _ in range(10)])
        assert set(out) <= {workers[1].address, workers[3].address}
        assert plugin.statistics()["decisions"]["restricted"] == 10

    run()


def test_paused_workers_get_nothing() -> None:
    # Without its memory monitor a worker stays paused.
    @gen_cluster(client=True, nthreads=FOUR, worker_kwargs={"memory_limit": 0})
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        from distributed.core import Status

        plugin = await install(s)
        data = await c.scatter([1, 2], workers=[workers[0].address])
        workers[0].status = Status.paused
        await until(lambda: s.workers[workers[0].address].status == Status.paused)
        out = await c.gather([c.submit(where, *data, pure=False) for _ in range(10)])
        assert workers[0].address not in out
        assert not plugin.statistics()["fallbacks"]
        workers[0].status = Status.running

    run()


def test_inputs_larger_than_a_worker_fail_all_their_tasks() -> None:
    """Dask fails such a task instead of giving it to a worker: those behind it in the queue have their turn."""

    class Large:
        def __sizeof__(self) -> int:
            return 2**32

    # A worker that watched its memory would pause.
    watch = dict.fromkeys((f"distributed.worker.memory.{mark}" for mark in ("target", "spill", "pause")), False)

    # distributed asserts with validation that the head of the queue goes to a worker.
    @gen_cluster(client=True, nthreads=TWO, worker_kwargs={"memory_limit": 2**30}, config=watch, timeout=30)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        s.validate = False
        plugin = await install(s)
        large = c.submit(Large)
        await large
        futures = c.map(lambda x, i: i, [large] * 20, range(20), pure=False)
        results = await c.gather(futures, errors="skip", asynchronous=True)
        assert results == []
        assert {f.status for f in futures} == {"error"}
        assert not plugin.statistics()["fallbacks"]

    run()


@pytest.mark.parametrize("leave", ["safe mode", "uninstall", "no rounds"])
def test_a_root_is_held_no_longer_than_placement_decides(monkeypatch: pytest.MonkeyPatch, leave: str) -> None:
    monkeypatch.setattr(RootDispatch, "_cheap", lambda self: False)
    monkeypatch.setattr(circuit_breaker, "LIMIT", 3)
    # Of six roots each worker has three. One waits behind `gate` for its owner, and the other host has nothing to do.
    hosts = [("127.0.0.1", 1), ("127.0.0.2", 1)]

    @gen_cluster(client=True, nthreads=hosts, config={"distributed.scheduler.worker-saturation": 1.0}, timeout=30)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        s.validate = False  # else distributed asserts that no root waits while a worker is idle
        plugin = await install(s)
        gate = Gate("gate")
        futures = c.map(wait_if_first, range(6), pure=False)
        await until(lambda: len(s.queued) == 1 and s.idle_task_count)
        if leave == "safe mode":
            assert plugin.engine is not None
            plugin.engine.safe = True
        elif leave == "no rounds":
            assert plugin.monitor is not None
            monkeypatch.setattr(plugin.monitor, "_look", None)
        else:
            plugin.uninstall()
        await until(lambda: not s.queued)
        await gate.set()
        assert await c.gather(futures) == list(range(6))

    run()


def test_worker_leaves_during_work() -> None:
    @gen_cluster(client=True, nthreads=FOUR, timeout=60)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        xs = c.map(slowinc, range(40), delay=0.01, pure=False)
        ys = [c.submit(slowinc, x, delay=0.01, pure=False) for x in xs]
        zs = [c.submit(operator.add, a, b, pure=False) for a, b in zip(ys[::2], ys[1::2], strict=True)]
        total = c.submit(sum, zs, pure=False)
        await until(lambda: sum(ts.state == "memory" for ts in s.tasks.values()) > 5)
        await workers[1].close()
        assert await total == sum(range(40)) + 80
        assert plugin.statistics()["tables"]["workers"] == 3
        assert not plugin.statistics()["fallbacks"]
        del xs, ys, zs, total
        await idle(s, plugin)

    run()


def test_stealing_uses_our_prices_and_moves_charges() -> None:
    @gen_cluster(client=True, nthreads=TWO, config={"distributed.scheduler.work-stealing-interval": "20ms"}, timeout=60)
    async def run(c: Any, s: Scheduler, a: Worker, b: Worker) -> None:
        plugin = await install(s)
        assert plugin.engine is not None
        stolen = []
        original = plugin.engine.books.stolen

        def watch(key: Any, victim: str, thief: str) -> None:
            original(key, victim, thief)
            assert plugin.engine is not None
            stolen.append((key, plugin.engine.backlog.charges[key].info.ws.address, thief))

        plugin.engine.books.stolen = watch  # type: ignore[method-assign]
        # All work lands on `a`; once the restrictions are gone `b` may steal.
        await c.submit(slowinc, 0, delay=0.1, workers=[a.address], pure=False)
        x = await c.scatter(1, workers=[a.address])
        fs = [
            c.submit(slowinc, x, delay=0.1, workers=[a.address], allow_other_workers=True, pure=False)
            for _ in range(30)
        ]
        for f in fs:
            await until(lambda f=f: f.key in s.tasks)  # type: ignore[misc]
            s.tasks[f.key].worker_restrictions = None
        await c.gather(fs)
        assert stolen
        assert all(where == thief for _, where, thief in stolen)
        assert plugin.statistics()["prices"] > 0
        del fs, f, x
        await idle(s, plugin)

    run()


def test_seceded_tasks() -> None:
    @gen_cluster(client=True, nthreads=TWO)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        from distributed import worker_client

        plugin = await install(s)

        def outer(x: int) -> int:
            with worker_client() as inner:
                return int(inner.submit(inc, x, pure=False).result())

        x = await c.scatter(1)
        fs = [c.submit(outer, x, pure=False) for _ in range(4)]
        assert await c.gather(fs) == [2] * 4
        del fs, x
        await idle(s, plugin)

    run()


def test_restart() -> None:
    @gen_cluster(client=True, Worker=Nanny, nthreads=TWO, timeout=120)
    async def run(c: Any, s: Scheduler, *nannies: Nanny) -> None:
        plugin = await install(s)
        fs = c.map(slowinc, range(50), delay=0.5, pure=False)
        await until(lambda: plugin.statistics()["tables"]["charges"] > 0)
        await c.restart(timeout=90)  # its own limit is twenty seconds here, for two new processes
        assert plugin.statistics()["tables"] == {
            "workers": 2,
            "charges": 0,
            "unknown": 0,
            "roots": 0,
            "copies_on_disk": 0,
        }
        assert plugin.engine is not None
        assert set(plugin.engine.workers.by_address) == set(s.workers)
        del fs
        assert await tree(c, 8) == sum(range(1, 9))

    run()


def test_attach_to_a_working_cluster() -> None:
    @gen_cluster(client=True, nthreads=TWO)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        fs = c.map(slowinc, range(6), delay=0.2, pure=False)
        await until(lambda: any(ws.processing for ws in s.workers.values()))
        plugin = await install(s)
        n = sum(len(ws.processing) for ws in s.workers.values())
        assert plugin.statistics()["tables"]["charges"] == n > 0
        assert await c.submit(sum, fs) == sum(range(6)) + 6
        del fs
        await idle(s, plugin)

    run()


def test_uninstall_restores_everything() -> None:
    @gen_cluster(client=True, nthreads=TWO)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        before = dict(s.__dict__)
        plugin = await install(s)
        assert set(s.__dict__) - set(before) == {*OVERRIDES, *OTHERS}
        assert plugin.installed == OVERRIDES
        await tree(c, 8)
        plugin.uninstall()
        plugin.uninstall()
        assert set(s.__dict__) == set(before)
        assert s.decide_worker_non_rootish.__func__ is Scheduler.decide_worker_non_rootish
        assert s.get_comm_cost.__func__ is Scheduler.get_comm_cost
        assert plugin.statistics() == {"installed": False}
        assert await tree(c, 8) == sum(range(1, 9)), "hooks still arrive until the plugin is removed"
        await plugin.start(s)  # and on again
        assert await tree(c, 8) == sum(range(1, 9))
        assert sum(plugin.statistics()["declined"].values()) > 0

    run()


def test_mismatch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    @gen_cluster(client=True, nthreads=TWO)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        before = dict(s.__dict__)
        stock = Scheduler.get_comm_cost

        def get_comm_cost(self: Any, ts: Any, ws: Any, now: Any = None) -> Any:
            return stock(self, ts, ws)

        plugin = PlacementPlugin(SETTINGS)
        with monkeypatch.context() as m:
            m.setattr(Scheduler, "get_comm_cost", get_comm_cost)
            with pytest.raises(SeamMismatch, match="get_comm_cost"):
                await plugin.start(s)
        assert s.__dict__.keys() == before.keys()
        assert plugin.statistics() == {"installed": False}
        assert await tree(c, 8) == sum(range(1, 9))

    run()


def test_failing_adoption_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    @gen_cluster(client=True, nthreads=TWO)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        before = dict(s.__dict__)

        def broken(self: Any) -> None:
            raise RuntimeError("strange state")

        monkeypatch.setattr(engine.Engine, "adopt", broken)
        with pytest.raises(InstallError, match="strange state"):
            await PlacementPlugin(SETTINGS).start(s)
        assert s.__dict__.keys() == before.keys()

    run()


def breaking(name: str) -> Callable[[PlacementPlugin], Any]:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError(f"{name} is broken")

    return broken


@pytest.mark.parametrize("name", ["decide", "comm_cost", "entered", "left", "worker_added"])
def test_an_exception_anywhere_does_no_harm(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Bookkeeping if name in ("entered", "left") else engine.Engine, name, breaking(name))

    @gen_cluster(
        client=True, nthreads=FOUR, config={"distributed.scheduler.work-stealing-interval": "10ms"}, timeout=60
    )
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        events: list[Event] = []
        plugin = await install(s, sink=events.append)
        if name == "worker_added":
            async with Worker(s.address):
                pass
            # Stock sees five workers for a moment, we never knew the fifth: nothing else may notice.
        assert await tree(c) == EXPECTED
        x = await c.scatter(1, workers=[workers[0].address])
        if name == "comm_cost":
            assert s.get_comm_cost(s.tasks[x.key], s.workers[workers[1].address]) == 0
        assert set(s.workers) == {w.address for w in workers}, "no worker was lost"
        stats = plugin.statistics()
        assert stats["exceptions"] > 0
        assert f"ZeroDivisionError: {name} is broken" in stats["last_traceback"]
        assert sum(sum(f.values()) for f in stats["fallbacks"].values()) == stats["exceptions"]
        assert events
        assert json.dumps(stats)
        del x

    run()


@pytest.mark.parametrize("name", ["decide", "left"])
def test_retires_in_a_running_cluster(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Bookkeeping if name in ("entered", "left") else engine.Engine, name, breaking(name))
    monkeypatch.setattr(circuit_breaker, "LIMIT", 20)

    @gen_cluster(client=True, nthreads=FOUR, timeout=60)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        assert await tree(c) == EXPECTED
        stats = plugin.statistics()
        (part,) = stats["retired"]
        assert "ZeroDivisionError" in stats["retired"][part]
        assert stats["fallbacks"][part]["exception"] >= circuit_breaker.LIMIT
        assert set(s.workers) == {w.address for w in workers}
        if name == "left":
            assert part == "bookkeeping"
            assert stats["declined"]["bookkeeping retired"] > 0
        else:
            assert stats["fallbacks"][part]["retired"] > 0

    run()


def test_a_second_start_does_nothing_and_a_second_plugin_is_refused() -> None:
    @gen_cluster(client=True, nthreads=TWO)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        before = s.decide_worker_non_rootish
        await plugin.start(s)  # as the scheduler does after a preload has done it
        assert s.decide_worker_non_rootish is before
        with pytest.raises(InstallError, match="already overridden"):
            await PlacementPlugin(SETTINGS).start(s)
        assert await tree(c, 8) == sum(range(1, 9))

    run()
