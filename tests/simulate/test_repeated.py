"""The same graph again and again on one simulated cluster: what the judge of whole graphs does, and what it costs."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

import dask
import pytest

from dask_gpurt.placement.decide.cost import cost
from dask_gpurt.placement.evaluate import idle_alarm
from dask_gpurt.simulate import Cluster, TaskSpec, Workload, policies
from dask_gpurt.simulate.clock import patched
from dask_gpurt.simulate.shapes import build
from dask_gpurt.simulate.simulation import Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.model.link import Link
    from dask_gpurt.model.views import TaskView, WorkerView
    from dask_gpurt.placement.decide.policy import Policy
    from dask_gpurt.placement.plugin import PlacementPlugin

TIMES = 12
#: between two graphs, in seconds
GAP_SECONDS = 1.0


class Worst:
    """The worst of the candidates."""

    def decide(self, task: TaskView, workers: Sequence[WorkerView], far: Link) -> int:
        return max(range(len(workers)), key=lambda i: cost(task, workers[i], far))


def all_on_one(plugin: PlacementPlugin | None) -> None:
    """A broken root placement: one worker owns all roots, the others are given none."""
    assert plugin is not None
    assert plugin.engine is not None
    engine: Any = plugin.engine
    dealt_to = engine.root_dispatch._dealt_to
    engine.root_dispatch._dealt_to = lambda: dealt_to()[:1]
    engine.root_dispatch.held = lambda ts: True
    engine.groups._take = lambda *args: None


def phases(n: int = 48) -> tuple[Workload, Cluster]:
    """Two phases of roots, the second behind a barrier."""
    tasks: dict[Any, TaskSpec] = {}
    for i in range(n):
        tasks["make", i] = TaskSpec((), 0.05, 8_000_000)
        tasks["norm", i] = TaskSpec((("make", i),), 0.05, 100)
    tasks["total", 0] = TaskSpec(tuple(("norm", i) for i in range(n)), 0.001, 100)
    for i in range(n):
        tasks["part", i] = TaskSpec((("total", 0),), 0.05, 8_000_000)
        tasks["use", i] = TaskSpec((("part", i), ("make", i)), 0.05, 100)
    tasks["end", 0] = TaskSpec(tuple(("use", i) for i in range(n)), 0.001, 100)
    return Workload("phases", tasks, [("end", 0)], jitter=0.1), Cluster(4)


def named(key: Any, n: int) -> Any:
    """The key of the n-th repetition; its prefix stays."""
    return (f"{key[0]}-{n}", *key[1:])


@dataclasses.dataclass
class Runs:
    #: of each repetition
    seconds: list[float]
    #: after each repetition
    judged: list[dict[str, Any]]
    statistics: dict[str, Any] | None

    @property
    def stock(self) -> list[int]:
        """Which repetitions were stock's."""
        left = [j["by_lot"] + j["left_to_stock"] for j in self.judged]
        return [n for n, (a, b) in enumerate(zip([0, *left], left, strict=False)) if b > a]


def repeated(
    shape: tuple[Workload, Cluster],
    policy: str | Policy = "gpurt",
    prepare: Callable[[PlacementPlugin | None], None] = lambda plugin: None,
    times: int = TIMES,
) -> Runs:
    """Submit a workload `times` times, each when the one before is done and released."""
    workload, cluster = shape
    tasks = {
        named(k, n): t._replace(dependencies=tuple(named(d, n) for d in t.dependencies))
        for n in range(times)
        for k, t in workload.tasks.items()
    }
    outputs = [[named(k, n) for k in workload.outputs] for n in range(times)]
    load = dataclasses.replace(workload, tasks=tasks, outputs=[k for some in outputs for k in some])
    runs = Runs([], [], None)

    async def run() -> None:
        sim = Simulation(load, cluster, 0)
        try:
            with patched(sim.loop, *policies.modules(policy)), sim.loop.running():
                plugin = policies.install(sim, policy, None)
                prepare(plugin)
                sim.start_ticking()
                for n in range(times):
                    began = sim.loop.now
                    sim.submit([named(k, n) for k in workload.order], outputs[n], ordered=True)
                    sim.run()
                    runs.seconds.append(sim.loop.now - began)
                    sim.release(outputs[n])
                    pause = sim.loop.now + GAP_SECONDS
                    while sim.loop.now < pause:
                        sim.loop.step()
                    if plugin is not None:
                        runs.statistics = plugin.statistics()
                        runs.judged.append(runs.statistics["graph_judge"])
        finally:
            await sim.scheduler.close()

    with dask.config.set(policies.configuration(policy)):
        asyncio.run(run())
    return runs


@pytest.mark.parametrize("shape", ["tree", "binop"])
def test_the_worst_policy_is_retired_within_six_graphs(shape: str) -> None:
    stock = repeated(build(shape, 8, "flat"), "stock", times=3)
    runs = repeated(build(shape, 8, "flat"), Worst())
    last = runs.judged[-1]
    assert last["retirements"] == 1
    retired = next(n for n, j in enumerate(runs.judged) if j["retirements"])
    assert retired <= 5
    assert runs.stock[-(TIMES - retired - 1) :] == list(range(retired + 1, TIMES))
    assert min(runs.seconds[:2]) > 1.2 * max(stock.seconds)
    # Left to stock it takes what stock takes: nothing of ours is in the way.
    assert statistics.median(runs.seconds[-5:]) == pytest.approx(statistics.median(stock.seconds), rel=0.03)
    assert runs.statistics is not None
    assert not runs.statistics["fallbacks"]
    assert runs.statistics["declined"]["graph judge"] > 0
    (why,) = last["switched_off"].values()
    assert "times as long as stock's" in why


def test_a_broken_root_placement_is_noticed_in_the_first_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = statistics.median(repeated(phases(), "stock", times=3).seconds)
    runs = repeated(phases(), prepare=all_on_one)
    assert runs.judged[0]["idle_alarms"] >= 1  # each phase of roots raises its own
    assert max(runs.seconds) < 1.25 * stock
    assert runs.judged[-1]["retirements"] == 1
    assert runs.seconds[-1] == pytest.approx(stock, rel=0.03)
    monkeypatch.setattr(idle_alarm, "SHARE", 1e9)
    assert repeated(phases(), prepare=all_on_one, times=1).seconds[0] > 3 * stock, "what it would have come to"


@pytest.mark.parametrize("shape", ["tree", "stencil", "binop"])
def test_a_good_placement_pays_no_lots(shape: str) -> None:
    runs = repeated(build(shape, 8, "nodes"), times=5)
    last = runs.judged[-1]
    assert last["judged"] == 5
    assert (last["by_lot"], last["left_to_stock"], last["idle_alarms"]) == (0, 0, 0)


def test_a_suspected_good_placement_pays_two_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_gpurt.placement.evaluate.graph_judge.SUSPICIOUS", 0.0)
    runs = repeated(build("stencil", 8, "nodes"))
    assert len(runs.stock) == 2
    (why,) = runs.judged[-1]["cleared"].values()
    assert why.startswith("ours took 0.")
