"""Shadow mode, the governor, faults in every override and giving all back, on live clusters with validation on."""

from __future__ import annotations

import asyncio
import json
import logging
import operator
from typing import Any

import pytest
from distributed import Worker
from distributed.core import Status
from distributed.scheduler import Scheduler
from distributed.utils_test import NO_AMM, gen_cluster, slowinc

from dask_gpurt.config import PlacementSettings
from dask_gpurt.model import circuit_breaker
from dask_gpurt.placement import monitor
from dask_gpurt.placement.bookkeeping import Bookkeeping
from dask_gpurt.placement.engine import Engine
from dask_gpurt.placement.evaluate import governor, shadow_stats
from dask_gpurt.placement.plugin import PlacementPlugin
from dask_gpurt.placement.takeover import fetch_sources
from tests.placement.clusters import EXPECTED, FOUR, install, tree, until
from tests.placement.fakes import SETTINGS

pytestmark = pytest.mark.cluster

SHADOW = PlacementSettings(enabled=True, candidates=16, shadow=True)
FAST_STEALING = {"distributed.scheduler.work-stealing-interval": "10ms"}


class First:
    """A bad policy: the first candidate, whatever it costs."""

    def decide(self, task: Any, workers: Any, far: Any) -> int:
        return 0


def surface(s: Scheduler) -> dict[str, Any]:
    """Everything of a scheduler that a policy could have changed, by identity."""
    # Plain numbers among them change with the work.
    out: dict[str, Any] = {
        f"scheduler.{k}": id(v) if callable(v) or isinstance(v, dict) else None for k, v in s.__dict__.items()
    }
    out["slots"] = {k: id(getattr(s, k)) for k in ("idle", "queued", "saturated", "running", "plugins", "extensions")}
    out["handlers"] = {k: id(getattr(v, "__func__", v)) for k, v in s.stream_handlers.items()}
    out["rpc"] = {k: id(getattr(v, "__func__", v)) for k, v in s.handlers.items()}
    out["callbacks"] = {k: id(v) for k, v in s.periodic_callbacks.items()}
    for name, extension in s.extensions.items():
        out[f"extension.{name}"] = (id(extension), {k: id(v) for k, v in vars(extension).items() if callable(v)})
    out["policies"] = {id(p) for p in s.extensions["amm"].policies}
    out["table"] = id(s._TRANSITIONS_TABLE)
    return out


def test_shadow_mode_changes_nothing() -> None:
    @gen_cluster(client=True, nthreads=FOUR, config=FAST_STEALING)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        before = surface(s)
        plugin = PlacementPlugin(SHADOW)
        await plugin.start(s)
        after = surface(s)
        assert plugin.installed == ("decide_worker_non_rootish",)
        changed = {k for k in after if after[k] != before.get(k)}
        assert changed == {"scheduler.decide_worker_non_rootish"}
        s.add_plugin(plugin)
        # Whatever stock decides is what is done, task by task.
        decided: list[tuple[Any, Any]] = []
        stock = Scheduler.decide_worker_non_rootish

        def watch(self: Any, ts: Any) -> Any:
            ws = stock(self, ts)
            decided.append((ts.key, ws))
            return ws

        with pytest.MonkeyPatch.context() as m:
            m.setattr(Scheduler, "decide_worker_non_rootish", watch)
            plugin.uninstall()
            await plugin.start(s)
            assigned: list[tuple[Any, Any]] = []
            original = plugin.transition

            def transition(key: Any, start: Any, finish: Any, *args: Any, **kwargs: Any) -> None:
                if finish == "processing" and start == "waiting":
                    assigned.append((key, s.tasks[key].processing_on))
                original(key, start, finish, *args, **kwargs)

            m.setattr(plugin, "transition", transition)
            x = await c.scatter(b"x" * 1000, workers=[workers[0].address])
            ys = [c.submit(lambda x, i: i, x, i, pure=False) for i in range(40)]
            await c.gather(ys)
            assert await tree(c) == EXPECTED
        placed = dict(assigned)
        assert all(placed[key] is ws for key, ws in decided)
        assert s.get_comm_cost.__func__ is Scheduler.get_comm_cost
        assert "_get_thief" not in s.extensions["stealing"].__dict__
        stats = plugin.statistics()
        assert stats["shadow"]["agreed"] + stats["shadow"]["differed"] > 20
        assert stats["shadow"]["differed"] > 0, "stock puts all dependents of one key on its holder"
        assert stats["shadow"]["predicted_cost_seconds"] > 0
        assert stats["prices"] == stats["roots"]["pulled"] == stats["decisions"]["moved"] == 0
        assert not stats["fallbacks"]
        stories = [story for key, _ in decided if (story := plugin.explain(key)) is not None]
        assert any(story["kind"] == "shadow" and story["candidates"] for story in stories)
        json.dumps(stats)

    run()


def test_an_exception_in_shadow_mode_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(shadow_stats.ShadowStats, "look", broken)

    @gen_cluster(client=True, nthreads=FOUR)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s, SHADOW)
        assert await tree(c) == EXPECTED
        assert plugin.statistics()["exceptions"] > 0
        assert set(s.workers) == {w.address for w in workers}

    run()


def test_a_bad_policy_is_retired(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    # All tasks go to one worker: it is what the predictions say, and far worse than what stock would do.
    monkeypatch.setattr(governor, "WINDOW", 16)
    monkeypatch.setattr(governor, "TRIAL", 64)

    # Without the active memory manager, which takes the copies away that let stock choose.
    @gen_cluster(
        client=True, nthreads=FOUR, timeout=150, config={"distributed.scheduler.work-stealing": False} | NO_AMM
    )
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s, policy=First())
        assert plugin.engine is not None
        rounds = 0
        while plugin.engine.governor.retirements == 0 and rounds < 60:
            rounds += 1
            xs = await c.scatter(list(range(32)), hash=False, broadcast=True)
            # Long enough to tell the policies apart where each task costs the event loop ten milliseconds.
            ys = [c.submit(slowinc, x, delay=0.05, key=f"slowinc-{rounds}-{i}") for i, x in enumerate(xs)]
            assert await c.gather(ys) == list(range(1, 33))
            del xs, ys
        stats = plugin.statistics()
        assert stats["governor"]["standing"] == "retired", stats["governor"]
        assert stats["governor"]["retirements"] == 1
        left = stats["declined"].get("governor", 0)
        assert await tree(c, 16) == sum(range(1, 17))
        assert plugin.statistics()["declined"]["governor"] > left, "stock decides from now on"
        assert not stats["fallbacks"]

    with caplog.at_level(logging.WARNING, logger="distributed.scheduler.gpurt"):
        run()
    assert sum("the policy retires" in r.message for r in caplog.records) == 1


FAULTS = [
    (Engine, "decide"),
    (Engine, "comm_cost"),
    (Engine, "pull"),
    (Engine, "worth"),
    (Engine, "thief"),
    (Bookkeeping, "entered"),
    (Bookkeeping, "left"),
    (Bookkeeping, "stolen"),
    (Engine, "graph_arrived"),
    (Engine, "worker_added"),
    (Engine, "worker_removed"),
    (Bookkeeping, "restarted"),
    (monitor.Monitor, "round"),
    (fetch_sources.FetchSources, "_shorten"),
]


@pytest.mark.parametrize(("owner", "name"), FAULTS, ids=[n for _, n in FAULTS])
def test_faults_everywhere(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    calls = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        raise ZeroDivisionError(f"{name} is broken")

    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr(circuit_breaker, "LIMIT", 10**6)

    @gen_cluster(client=True, nthreads=FOUR, config=FAST_STEALING, timeout=60)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        if name == "_shorten":
            assert plugin.engine is not None
            for w, trip in zip(workers, (1e-5, 1e-5, 1e-1, 1e-1), strict=True):
                plugin.engine.measured(plugin.engine.workers.by_address[w.address], trip)
        async with Worker(s.address, nthreads=1):
            assert await tree(c) == EXPECTED
            # Something to steal.
            x = await c.scatter(1, workers=[workers[0].address])
            ys = [
                c.submit(slowinc, x, delay=0.02, workers=[workers[0].address], allow_other_workers=True, pure=False)
                for _ in range(12)
            ]
            for y in ys:
                await until(lambda y=y: y.key in s.tasks)  # type: ignore[misc]
                s.tasks[y.key].worker_restrictions = None
            # Root tasks with partners, in one graph.
            graph: dict[Any, Any] = {("root-0", i): (slowinc, i, 0.005) for i in range(40)}
            graph |= {("pair-0", i): (operator.add, ("root-0", 2 * i), ("root-0", 2 * i + 1)) for i in range(20)}
            roots = c.get(graph, [("pair-0", i) for i in range(20)], sync=False)
            if name == "comm_cost":  # it may be that nothing was to be stolen
                s.get_comm_cost(s.tasks[x.key], s.workers[workers[1].address])
            assert sum(await c.gather(ys)) == 24
            assert sum(await c.gather(roots)) == sum(range(1, 41))
        assert set(s.workers) == {w.address for w in workers}, "no worker was lost"
        if name == "restarted":
            await plugin_restart(plugin, s)
        if not calls and name in ("thief", "stolen"):
            pytest.skip("nothing was to be stolen in this run")
        assert calls, f"{name} was never called"
        stats = plugin.statistics()
        assert stats["exceptions"] > 0
        assert f"{name} is broken" in stats["last_traceback"]
        json.dumps(stats)

    run()


async def plugin_restart(plugin: PlacementPlugin, s: Scheduler) -> None:
    plugin.restart(s)


@pytest.mark.parametrize("settings", [SETTINGS, SHADOW], ids=["active", "shadow"])
def test_detach_restores_every_attribute(settings: PlacementSettings) -> None:
    @gen_cluster(client=True, nthreads=FOUR, config=FAST_STEALING)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        before = surface(s)
        plugin = PlacementPlugin(settings)
        await plugin.start(s)
        s.plugins[plugin.name] = plugin
        assert surface(s) != before
        assert await tree(c, 16) == sum(range(1, 17))
        del s.plugins[plugin.name]
        plugin.uninstall()
        assert surface(s) == before
        plugin.uninstall()
        assert surface(s) == before
        assert await tree(c, 16) == sum(range(1, 17))

    run()


def test_workers_fetch_from_near_holders() -> None:
    # Without the active memory manager, which takes away the copies among which is to be chosen.
    @gen_cluster(client=True, nthreads=FOUR, config=NO_AMM)
    async def run(c: Any, s: Scheduler, *workers: Worker) -> None:
        plugin = await install(s)
        assert plugin.engine is not None
        assert plugin.monitor is not None
        plugin.monitor.stop()  # this machine's own round trips do not matter here
        engine = plugin.engine
        engine.zones.by_address.clear()
        engine.zones.round_trips.clear()
        for w, trip in zip(workers, (1e-5, 1e-5, 1e-1, 1e-1), strict=True):
            engine.measured(engine.workers.by_address[w.address], trip)
        assert {n.link_class.value for n in engine.workers.nodes.values()} == {"rack"}
        a, b, near, there = workers
        xs = await c.scatter([bytes([i]) * 1000 for i in range(12)], workers=[a.address, b.address, there.address])
        await c.replicate(xs, 3, workers=[a.address, b.address, there.address])
        await c.gather([c.submit(len, x, workers=[near.address], pure=False) for x in xs])
        assert {t["who"] for t in near.transfer_incoming_log} == {there.address}
        stats = plugin.statistics()
        assert stats["routes_shortened"] == 12
        assert stats["zones"]["zone-1"]["workers"] == 2
        # The near holder dies with the only copy that was named: the worker asks for the others.
        y = (await c.scatter([b"y" * 1000], workers=[a.address, there.address]))[0]
        await c.replicate(y, 2, workers=[a.address, there.address])
        f = c.submit(len, y, workers=[near.address], pure=False)
        await there.close()
        assert await f == 1000
        assert not stats["fallbacks"]

    run()


@pytest.mark.parametrize("begun", [True, False])
def test_a_loose_task_begins_on_a_worker_that_runs_later(begun: bool) -> None:
    # The memory monitor would make the other worker run.
    @gen_cluster(client=True, nthreads=[("", 1)] * 2, config={"distributed.worker.memory.pause": False})
    async def run(c: Any, s: Scheduler, a: Worker, b: Worker) -> None:
        await install(s)
        b.status = Status.paused  # as one that starts: in the books, and not running
        await until(lambda: s.workers[b.address].status is Status.paused)
        f = c.submit(slowinc, 1, delay=5 if begun else 0, key="loose", workers=[a.address], allow_other_workers=True)
        if begun:
            await until(lambda: "loose" in s.tasks and s.tasks["loose"].processing_on is not None)
        else:
            await f
        await a.close()
        await until(lambda: s.tasks["loose"].state == "no-worker")
        b.status = Status.running
        assert await asyncio.wait_for(f.result(), 60) == 2

    run()


def test_a_loose_task_that_this_package_keeps_stays() -> None:
    @gen_cluster(client=True, nthreads=[("", 1)] * 2)
    async def run(c: Any, s: Scheduler, a: Worker, b: Worker) -> None:
        await install(s)
        f = c.submit(slowinc, 1, key="kept", workers=["tcp://127.0.0.1:1"])
        await until(lambda: "kept" in s.tasks and s.tasks["kept"].state == "no-worker")
        ts = s.tasks["kept"]
        s.set_restrictions({"kept": {"gpurt://output-is-not-complete"}})
        ts.loose_restrictions = True
        assert not s.bulk_schedule_unrunnable_after_adding_worker(s.workers[a.address])
        s.set_restrictions({"kept": {"tcp://127.0.0.1:1"}})
        assert s.bulk_schedule_unrunnable_after_adding_worker(s.workers[a.address]) == {"kept": "processing"}
        f.release()

    run()
