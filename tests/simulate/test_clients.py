"""Clients that submit graph after graph, a scheduler that is busy, and what placement is told of round trips."""

from __future__ import annotations

import dataclasses

import pytest

from dask_gpurt.simulate import Cluster, TaskSpec, Workload, simulate
from dask_gpurt.simulate.busy import Busy
from dask_gpurt.simulate.clock import VirtualLoop
from dask_gpurt.simulate.model import SchedulerCost, Step
from dask_gpurt.simulate.shapes import racks

MB = 10**6


def loaded(clients: int = 1) -> Workload:
    """A chunk for each of 8 tasks is persisted, used twice, and let go of."""
    tasks: dict[object, TaskSpec] = {}
    steps = []
    for c in range(clients):
        chunks = [(f"load-{c}", i) for i in range(8)]
        tasks |= {k: TaskSpec((), 0.5, MB) for k in chunks}
        steps.append(Step(chunks, chunks, waits=False, client=c))
        for turn in range(2):
            uses = [(f"use{turn}-{c}", i) for i in range(8)]
            tasks |= {k: TaskSpec((d,), 0.25, 1000) for k, d in zip(uses, chunks, strict=True)}
            steps.append(Step(uses, uses, [*uses, *(chunks if turn else ())], client=c))
    return Workload("loaded", tasks, [k for s in steps for k in s.outputs], steps=steps)


@pytest.mark.parametrize("policy", ["stock", "inf", "gpurt"])
def test_what_is_persisted_is_computed_once(policy: str) -> None:
    result = simulate(loaded(), Cluster(4), policy)
    assert result.executed == 24
    assert result.peak_total_bytes >= 8 * MB
    # 8 chunks of half a second on 4 workers, then twice a quarter of a second for each of them
    assert 2.0 <= result.makespan_seconds < 2.6


def test_the_client_waits_for_what_it_computes() -> None:
    load = loaded()
    think = dataclasses.replace(load, steps=[s._replace(seconds=1.0) for s in load.steps])
    longer = (
        simulate(think, Cluster(4), "stock").makespan_seconds - simulate(load, Cluster(4), "stock").makespan_seconds
    )
    # The second step is submitted while the chunks are still loading, so that second costs nothing.
    assert 2.0 <= longer < 2.2


def test_two_clients_share_the_cluster() -> None:
    one, two = (simulate(loaded(n), Cluster(4), "stock") for n in (1, 2))
    assert two.executed == 2 * one.executed
    assert one.makespan_seconds * 1.5 < two.makespan_seconds < one.makespan_seconds * 2.3


def test_what_is_let_go_of_leaves_memory() -> None:
    load = loaded()
    kept = dataclasses.replace(load, steps=[s._replace(releases=()) for s in load.steps])
    again = [("again", i) for i in range(8)]
    more = {k: TaskSpec((), 0.1, MB) for k in again}

    def peak(base: Workload) -> int:
        steps = (*base.steps, Step(again, again))
        w = dataclasses.replace(base, tasks={**base.tasks, **more}, outputs=[*base.outputs, *again], steps=steps)
        return simulate(w, Cluster(4), "stock").peak_total_bytes

    assert peak(kept) >= 16 * MB
    assert peak(load) < 10 * MB


def test_a_step_of_unknown_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="'b', which is not one of its tasks"):
        Workload("w", {"a": TaskSpec()}, ["a"], steps=[Step(["b"], ["a"])])


def test_a_busy_scheduler_shows_and_repeats() -> None:
    tasks = {("t", i): TaskSpec((), 0.01, 100) for i in range(200)}
    load = Workload("many", tasks, list(tasks))
    cost = SchedulerCost(task=1e-3, submitted=5e-4, message=1e-4)
    free = simulate(load, Cluster(16), "stock").makespan_seconds
    busy = [simulate(load, Cluster(16, scheduler=cost), "stock").makespan_seconds for _ in range(2)]
    assert free < 0.2
    assert busy[0] == busy[1]
    assert 0.3 <= busy[0] < 0.4  # 200 tasks of 1 ms one after the other, after 0.1 s to take in the graph


def test_placement_pays_for_its_decisions() -> None:
    tasks = {("t", i): TaskSpec((), 0.01, 100) for i in range(200)}
    load = Workload("many", tasks, list(tasks))
    cluster = Cluster(16, scheduler=SchedulerCost(task=1e-3))
    stock, ours = (simulate(load, cluster, p).makespan_seconds for p in ("stock", "gpurt"))
    assert ours > 1.2 * stock


def test_placement_learns_zones_as_it_does_live() -> None:
    tasks = {("t", i): TaskSpec((), 0.01, 100) for i in range(20)}
    load = Workload("few", tasks, list(tasks))
    assert len(simulate(load, racks(16), "gpurt").statistics["zones"]) == 2
    assert len(simulate(load, Cluster(16), "gpurt").statistics["zones"]) == 1


def test_what_takes_no_time_waits_for_a_busy_scheduler_too() -> None:
    """It is one thread: what comes while it works on a task is done after that, however little it is."""
    loop = VirtualLoop()
    busy = Busy(loop, SchedulerCost(task=1.0))
    done: list[tuple[str, float]] = []
    busy.arrives(1.0, lambda: done.append(("task", loop.now)))
    loop.at(0.5, busy.arrives, 0.0, lambda: done.append(("message", loop.now)))
    loop.at(3.0, busy.arrives, 0.0, lambda: done.append(("idle", loop.now)))
    while loop.step():
        pass
    assert done == [("task", 0.0), ("message", 1.0), ("idle", 3.0)]
