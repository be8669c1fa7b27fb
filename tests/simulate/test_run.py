"""Whole simulations: nothing is lost, nothing is repeated, the same again, and the same as a live scheduler."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from dask._task_spec import Task, TaskRef
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.utils_test import gen_cluster

import dask_gpurt.simulate.run as run_module
from dask_gpurt.config import Settings
from dask_gpurt.errors import ConfigError
from dask_gpurt.placement.plugin import PlacementPlugin
from dask_gpurt.simulate import Cluster, Path, Placed, SimulationError, TaskSpec, Workload, model, shapes, simulate
from dask_gpurt.simulate.bounds import bound
from dask_gpurt.simulate.clock import EPOCH, VirtualLoop, patched
from dask_gpurt.simulate.seam import function
from dask_gpurt.simulate.shapes import MIXES, SHAPES, build

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler

    from dask_gpurt.simulate.simulation import Simulation

POLICIES = ("stock", "inf", "random", "plan", "gpurt")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_conservation(shape: str, policy: str) -> None:
    """Every task runs once, no faster than the bound; bytes sent are bytes received; nothing is left behind."""
    workload, cluster = build(shape, 4, "racks")
    seen: list[Simulation] = []
    result = simulate(workload, cluster, policy, 1, timeline=True, prepare=lambda sim, plugin: seen.append(sim))
    (sim,) = seen
    assert sorted(map(str, result.assigned)) == sorted(map(str, workload.tasks))
    # A straggler's second copy, where there was one, may have run to its end as well.
    copies = (result.statistics or {}).get("copies", {}).get("started", 0)
    assert 0 <= result.executed - len(workload.tasks) - result.wasted <= copies
    assert result.makespan_seconds >= bound(workload, cluster, 1).seconds
    durations = workload.durations(1)
    for key, worker, start, stop in result.timeline:
        assert stop - start == pytest.approx(durations[key] * cluster.slowness_of(worker), abs=1e-6)
    assert result.busy_seconds == pytest.approx(sum(stop - start for _, _, start, stop in result.timeline))
    by_worker: dict[int, list[tuple[float, float]]] = {}
    for _, worker, start, stop in result.timeline:
        by_worker.setdefault(worker, []).append((start, stop))
    for spans in by_worker.values():
        spans.sort()
        assert all(b[0] >= a[1] - 1e-9 for a, b in itertools.pairwise(spans)), "one thread, one task"
    # Inputs are complete before a task starts, wherever they were made.
    ends: dict[Any, float] = {}
    for key, _, _, stop in result.timeline:
        ends[key] = min(stop, ends.get(key, stop))
    starts = {key: start for key, _, start, _ in result.timeline}
    for key, task in workload.tasks.items():
        assert all(ends[d] <= starts[key] for d in task.dependencies if d in ends)
    kept = set(workload.outputs) | set(workload.inputs)
    assert set(workload.outputs) <= {sim.names[k] for w in sim.workers for k in w.store.sizes}
    assert all(sim.scheduler.tasks[sim.stable(k)].state == "memory" for k in kept)
    assert sum(w.store.resident_bytes for w in sim.workers) == sim._memory >= 0
    assert result.peak_total_bytes >= result.peak_memory_bytes >= 0
    if policy == "gpurt":
        assert result.statistics["fallbacks"] == {}


def test_a_given_order_is_as_dask_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, _ = build("spill", 4)
    assert asked.ordered is None
    monkeypatch.setattr(shapes, "MOST_ORDERED", 10)
    given, _ = build("spill", 4)
    assert given.ordered is not None
    told: list[list[str]] = []
    for workload in (asked, given):
        order = sorted(workload.order, key=workload.order.__getitem__)
        # Which chunk comes first is arbitrary in both; what of which comes after what is not.
        told.append([k if isinstance(k, str) else k[0] for k in order])
        for i in range(0, order.index("bar"), 2):
            assert (order[i][0], order[i + 1]) == ("load", ("mid", order[i][1]))
    assert told[0] == told[1]
    # Dask's own order is not asked: it would need memory in proportion to the square of the chunks.
    monkeypatch.setattr(model.dask.order, "order", None)
    assert build("spill", 4)[0].order == given.order


def test_what_a_shape_says_of_its_network_is_a_bound() -> None:
    workload, cluster = build("join", 4, "flat")
    least = bound(workload, cluster, 0).network_seconds
    results = [simulate(workload, cluster, p, 0) for p in POLICIES]
    assert 0 < least <= min(r.makespan_seconds for r in results)
    assert min(r.between_nodes_bytes for r in results) >= least * cluster.far.bytes_per_second * cluster.nodes * 0.999


def test_the_same_in_every_process() -> None:
    """Upstream walks over sets; the order must not be that of this process's hash seed."""
    code = (
        "from dask_gpurt.simulate import simulate\n"
        "from dask_gpurt.simulate.shapes import build\n"
        "for shape in ('stencil', 'spill', 'rechunk'):\n"
        "    for policy in ('stock', 'gpurt'):\n"
        "        r = simulate(*build(shape, 8, 'nodes'), policy, 3)\n"
        "        print(shape, policy, r.makespan_seconds, r.bytes_moved, r.events, r.peak_total_bytes, r.stolen)\n"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "4711")
    }
    assert len(texts) == 1
    assert len(texts.pop().splitlines()) == 6


def test_seeds_differ() -> None:
    workload, cluster = build("stencil", 8, "nodes")
    assert len({simulate(workload, cluster, "stock", seed).makespan_seconds for seed in range(3)}) == 3


def test_the_clock_goes_forward_and_is_given_back() -> None:
    workload, cluster = build("tree", 4, "flat")
    times: list[float] = []
    unix: list[float] = []

    def prepare(sim: Simulation, plugin: PlacementPlugin | None) -> None:
        import distributed.scheduler

        sim.residence.append(lambda *a: times.append(sim.loop.now))
        sim.residence.append(lambda *a: unix.append(distributed.scheduler.time()))

    simulate(workload, cluster, "gpurt", prepare=prepare)
    assert times == sorted(times)
    assert unix == [EPOCH + t for t in times]
    import distributed.scheduler
    import distributed.stealing

    assert abs(distributed.scheduler.time() - time.time()) < 60
    assert abs(distributed.stealing.time() - time.time()) < 60


def test_what_decides_has_the_virtual_clock() -> None:
    """The reads that are booked on a disk, the budget, the guard, and what the scheduler's thread has worked."""
    told: list[float] = []

    def look(sim: Simulation, plugin: PlacementPlugin | None) -> None:
        assert plugin is not None
        assert plugin.seam is not None
        assert plugin.engine is not None
        tables, judge = plugin.engine.tables, plugin.engine.graph_judge
        told.extend(clock() for clock in (plugin.seam._clock, tables.residence._clock, tables.budget._clock))
        told.append(judge._loop_seconds())
        sim.busy.hold(0.25)
        told.append(judge._loop_seconds())

    simulate(Workload("w", {"a": TaskSpec()}, ["a"]), Cluster(1), "gpurt", prepare=look)
    assert told == [0.0, 0.0, 0.0, 0.0, 0.25]


def test_one_simulation_at_a_time() -> None:
    workload, cluster = build("map", 2, "flat")

    def again(sim: Simulation, plugin: PlacementPlugin | None) -> None:
        with patched(VirtualLoop()):
            pass

    with pytest.raises(RuntimeError, match="one process for each"):
        simulate(workload, cluster, "stock", prepare=again)


def test_not_inside_an_event_loop() -> None:
    async def inside() -> None:
        with pytest.raises(RuntimeError, match="to_thread"):
            simulate(*build("map", 2, "flat"))

    asyncio.run(inside())


def test_what_a_policy_may_use_of_asyncio() -> None:
    loop = VirtualLoop()
    seen: list[float] = []

    async def later() -> str:
        await asyncio.sleep(3)
        seen.append(asyncio.get_running_loop().time())
        assert await asyncio.get_running_loop().run_in_executor(None, lambda: 7) == 7
        return "done"

    assert loop.complete(later()) == "done"
    assert seen == [3.0]

    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="waits for something"):
        loop.complete(never())


def test_a_callback_that_fails_is_not_hidden() -> None:
    loop = VirtualLoop()
    with loop.running():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.step()


def test_stuck_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that may run on no worker."""
    workload = Workload("nowhere", {"a": TaskSpec(annotations={"workers": ["tcp://10.9.9.9:1"]})}, ["a"])
    with pytest.raises(SimulationError, match=r"nowhere is stuck .* 1 outputs are missing.*no-worker"):
        simulate(workload, Cluster(2), "stock")


def test_links_and_speed_are_learned_as_live() -> None:
    """What workers report lets placement learn the simulated links and speeds."""
    workload, cluster = build("hetero", 16, "nodes")
    r = simulate(workload, cluster, "gpurt", 0)
    speeds = r.statistics["speeds"]
    fast = [s for a, s in speeds.items() if int(a[-1]) % 2 == 0]
    slow = [s for a, s in speeds.items() if int(a[-1]) % 2]
    assert min(fast) > 1.5 * max(slow)
    workload, cluster = build("stencil", 16, "flat")
    r = simulate(workload, cluster, "gpurt", 0)
    network = r.statistics["links"]["network"]
    assert network["samples"] > 10
    assert network["bytes_per_second"] == pytest.approx(1.25e9, rel=0.8)


def test_placed_inputs_and_a_spilled_replica() -> None:
    """A fetch of a spilled input waits for the disk of the worker that has it."""
    cluster = Cluster(2, far=Path(0.0, 1e9), disk_read=1e8, message_seconds=0.0)
    tasks = {"f": TaskSpec(("x", "y"), 1.0, 8, annotations={"workers": [1]})}
    inputs = {"x": Placed(10**8, {0: "disk"}), "y": Placed(8, {1: "memory"})}
    r = simulate(Workload("w", tasks, ["f"], inputs), cluster, "stock")
    assert r.makespan_seconds == pytest.approx(1.0 + 0.1 + 1.0, rel=1e-3)
    assert r.read_bytes == 10**8
    assert r.bytes_moved == {"node": 0, "rack": 10**8, "far": 0}


def test_stealing_is_the_real_one() -> None:
    workload, cluster = build("fan_out", 8, "nodes")
    r = simulate(workload, cluster, "stock")
    still = simulate(workload, cluster, "stock", config={"distributed.scheduler.work-stealing": False})
    assert r.stolen > 20
    assert still.stolen == 0
    assert still.makespan_seconds > 4 * r.makespan_seconds


def test_stories() -> None:
    workload, cluster = build("binop", 4, "racks")
    r = simulate(workload, cluster, "gpurt", explain=[("add", 0)])
    story = r.stories["('add', 0)"]
    assert (story["kind"], story["reason"]) == ("stock", "nothing that stock does not know")
    assert story["actual"]["outcome"] == "memory"
    assert story["actual"]["compute_seconds"] == pytest.approx(workload.durations(0)["add", 0], rel=1e-3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: build("tre", 4), "Did you mean 'tree'"),
        (lambda: build("tree", 4, "node"), "Did you mean 'nodes'"),
        (lambda: Workload("w", {"a": TaskSpec(("b",))}, ["a"]), "needs 'b'"),
        (lambda: Workload("w", {}, ["a"]), "not a task"),
        (lambda: Workload("w", {"a": TaskSpec()}, ["a"], ordered=["a", "a"]), "each of the 1 tasks of w once"),
        (lambda: Cluster(0), "at least 1"),
        (lambda: Cluster(3, slowness=(1.0,)), "1 entries for 3 workers"),
    ],
)
def test_wrong_descriptions(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize(
    "policy", ["stok", "no.such.module:Class", "dask_gpurt.placement.decide.policy:Missing", "os:path"]
)
def test_wrong_policies(policy: str) -> None:
    with pytest.raises(ConfigError):
        simulate(*build("map", 2, "flat"), policy)


def test_plan_needs_a_plan() -> None:
    with pytest.raises(ConfigError, match=r"needs Workload\.plan"):
        simulate(Workload("w", {"a": TaskSpec()}, ["a"]), Cluster(1), "plan")


class Last:
    """A policy for the test below: the last candidate."""

    calls = 0

    def decide(self, task: Any, workers: Any, far: Any) -> int:
        Last.calls += 1
        return len(workers) - 1


class Wrong:
    def decide(self, task: Any, workers: Any, far: Any) -> int:
        return 99


def test_a_policy_object_and_one_by_name() -> None:
    workload, cluster = build("binop", 4, "flat")
    Last.calls = 0
    a = simulate(workload, cluster, Last())
    assert Last.calls > 0
    b = simulate(workload, cluster, f"{__name__}:Last")
    assert a.makespan_seconds == b.makespan_seconds
    assert a.bytes_moved != simulate(workload, cluster, "gpurt").bytes_moved
    r = simulate(workload, cluster, Wrong())
    assert r.statistics["fallbacks"]["decide_worker_non_rootish"]["exception"] > 0
    assert "Wrong.decide gave 99" in r.statistics["last_traceback"]


def test_the_same_decisions_as_a_live_scheduler() -> None:
    """Sixteen tasks, inputs of different sizes on four workers: the same workers live and simulated."""
    sizes = {("x", i): (1_000_000 if i % 3 else 70_000) for i in range(16)}
    homes = {("x", i): (i * 5 + i // 4) % 4 for i in range(16)}
    other = {("y", i): (i * 3 + 1) % 4 for i in range(16)}
    tasks = {("f", i): TaskSpec((("x", i), ("y", i)), 0.01, 8) for i in range(16)}
    inputs = {k: Placed(n, {homes[k]: "memory"}) for k, n in sizes.items()}
    inputs |= {k: Placed(OTHER_BYTES, {w: "memory"}) for k, w in other.items()}
    workload = Workload("live", tasks, list(tasks), inputs)
    cluster = Cluster(4, per_node=4)
    for policy in ("stock", "gpurt"):
        simulated: dict[Any, str] = {}

        def prepare(sim: Simulation, plugin: PlacementPlugin | None, to: dict[Any, str] = simulated) -> None:
            for w in sim.workers:
                stream: Any = sim.scheduler.stream_comms[w.address]
                send = stream.send

                def record(*messages: Any, w: Any = w, send: Any = send) -> None:
                    for m in messages:
                        if m["op"] == "compute-task":
                            to.setdefault(sim.names[m["key"]], w.index)
                    send(*messages)

                stream.send = record

        simulate(workload, cluster, policy, config=QUIET, prepare=prepare)
        live = _live(policy, sizes, homes, other)
        assert {k: simulated[k] for k in tasks} == live, policy
        assert len(set(live.values())) == 4


OTHER_BYTES = 330_000
#: no stealing, and nothing takes the copies away
QUIET = {"distributed.scheduler.work-stealing": False, "distributed.scheduler.active-memory-manager.start": False}


def _live(policy: str, sizes: Any, homes: Any, other: Any) -> dict[Any, int]:
    placed: dict[Any, int] = {}

    class Watch(SchedulerPlugin):
        def transition(self, key: Any, start: Any, finish: Any, *args: Any, **kwargs: Any) -> None:
            if finish == "processing":
                ts = self.scheduler.tasks[key]
                placed.setdefault(key, self.addresses.index(ts.processing_on.address))

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 4, config=QUIET)
    async def live(c: Any, s: Scheduler, *workers: Any) -> None:
        watch = Watch()
        watch.scheduler, watch.addresses = s, [w.address for w in workers]
        held = []
        for where, nbytes in ((homes, sizes), (other, dict.fromkeys(other, OTHER_BYTES))):
            for key, i in where.items():
                data = {key: bytes(nbytes[key])}
                held.append(await c.scatter(data, workers=[workers[i].address], hash=False))
        if policy == "gpurt":
            plugin = PlacementPlugin(Settings.load().placement)
            await plugin.start(s)
            s.add_plugin(plugin)
            assert plugin.engine is not None
            # As on the virtual clock, where a decision takes no time: one that was interrupted would be stock's.
            plugin.engine.budget.decision_seconds = plugin.engine.budget.share = float("inf")
        s.add_plugin(watch)
        dsk = {("f", i): Task(("f", i), function, TaskRef(("x", i)), TaskRef(("y", i))) for i in range(16)}
        await c.gather(c.get(dsk, list(dsk), sync=False))

    live()
    return placed


def test_larger_cluster_is_not_slow() -> None:
    """Events per task stay bounded; what takes 0.1 ms each must not become O(workers)."""
    small, large = (simulate(*build("binop", n, "nodes"), "gpurt") for n in (8, 64))
    assert large.events / large.executed < 1.5 * small.events / small.executed


def test_module_is_documented() -> None:
    import doctest

    import dask_gpurt.simulate

    assert doctest.testmod(dask_gpurt.simulate).failed == 0
    assert set(MIXES) == {"flat", "nodes", "racks"}
    assert run_module.simulate is simulate
