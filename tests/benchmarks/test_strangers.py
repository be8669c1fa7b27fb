"""The net of workloads: sets that do not move, recordings that repeat, programs that run as users would run them."""

from __future__ import annotations

from typing import Any

import dask.array as da
import pytest

from benchmarks import task_grain
from benchmarks.strangers import cases, live, naive, patterns, random_graphs, sim
from benchmarks.strangers.__main__ import main
from benchmarks.strangers.catalogue import PROGRAMS, set_of
from benchmarks.strangers.record import workload
from dask_gpurt.simulate import Cluster, simulate
from tests.versions import needs_persist_of_any_client

CHUNK = 16 * 16 * 8


def passes() -> Any:
    x = da.random.default_rng(1).random((64, 16), chunks=(16, 16)).persist()
    mean = x.mean(axis=0).compute()
    x = (x - mean).persist()
    return abs(x).max().compute()


def test_the_sets_do_not_move() -> None:
    assert [set_of(f"random-{i}") for i in range(4)] == ["look", "held", "look", "held"]
    names = [*PROGRAMS, *cases.PAIRS, *patterns.NAMES]
    held = sum(set_of(n) == "held" for n in names)
    assert len(names) > 100
    assert 0.25 < held / len(names) < 0.42
    assert (set_of("svd_vectors"), set_of("moments")) == ("look", "held")


@pytest.mark.parametrize(
    "arguments", [["sim", "--set", "held"], ["sim", "--names", "random-1"], ["live", "--names", "moments"]]
)
def test_the_held_set_is_not_run_by_accident(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "--issue-ends" in capsys.readouterr().err


@needs_persist_of_any_client
def test_a_recording_has_the_graphs_of_a_client() -> None:
    load = workload("passes", passes, CHUNK, 64e6)
    assert [s.waits for s in load.steps] == [False, True, False, True]
    persisted = set(load.steps[0].outputs)
    assert len(persisted) == 4
    # The mean uses the persisted chunks, and does not make them again.
    assert not persisted & set(load.steps[1].keys)
    assert persisted <= {d for k in load.steps[1].keys for d in load.tasks[k].dependencies}
    # The first chunks go when the second ones have been asked for.
    assert persisted <= set(load.steps[2].releases)
    sizes = {load.tasks[k].nbytes for k in persisted}
    assert sizes == {64_000_000}


def test_a_recording_repeats() -> None:
    a, b = (workload("passes", passes, CHUNK, 64e6) for _ in range(2))
    assert a.tasks == b.tasks
    assert a.steps == b.steps


@pytest.mark.parametrize("policy", ["stock", "gpurt"])
def test_a_recording_can_be_simulated(policy: str) -> None:
    load = workload("passes", passes, CHUNK, 64e6)
    result = simulate(load, Cluster(4), policy)
    assert result.executed == sum(len(s.keys) for s in load.steps)


def test_random_graphs_are_what_their_seed_says() -> None:
    a, b = (random_graphs.build("random-6", 16) for _ in range(2))
    assert a == b
    assert random_graphs.build("random-8", 16).tasks != a.tasks


@pytest.mark.parametrize("name", [n for n in patterns.NAMES if n.endswith("fine")])
def test_patterns_are_graphs(name: str) -> None:
    assert 50 < len(patterns.build(name, 8).tasks) < 1000


def test_two_clients_keep_their_keys_apart() -> None:
    load = cases.make("two_clients_pipelines", 4)
    assert {s.client for s in load.steps} == {0, 1}
    parts = [{k for s in load.steps if s.client == c for k in s.keys} for c in (0, 1)]
    assert not parts[0] & parts[1]


def test_a_row_says_which_setting_is_better() -> None:
    run = {
        "seconds": 2.0,
        "moved_bytes": 0,
        "peak_worker_bytes": 10**9,
        "peak_total_bytes": 1,
        "scheduler_us_per_task": 9,
    }
    row = {"name": "x", "workers": 4, "stock": run, "inf": {**run, "seconds": 1.0}, "gpurt": {**run, "seconds": 1.1}}
    assert (sim.ratios(row) or {})["time"] == pytest.approx(1.1)
    assert sim.ratios({**row, "error": "failed"}) is None
    assert "slower" in sim.line({**row, "mix": "flat", "tasks": 1})


def test_answers_are_compared_up_to_rounding() -> None:
    assert live.same(live.numbers([1.0, (2, 3.0)]), [1.0, 2.0, 3.0 + 1e-9])
    assert not live.same([1.0], [1.1])
    assert not live.same([1.0], [1.0, 1.0])


def test_each_naive_program_has_its_advised_one() -> None:
    names = list(naive.programs())
    assert names[:2] == ["many_small_files", "many_small_files_advised"]
    assert len(names) == 2 * len(naive.PAIRS) > 30
    row = {"stock": {"median_s": 3.0}, "gpurt": {"median_s": 2.0}}
    entries = [{"name": name, **row} for name in names[:3]]
    assert naive.pairs(entries) == {
        "many_small_files": {"stock": 3.0, "gpurt": 2.0, "stock_advised": 3.0, "gpurt_advised": 2.0}
    }


def test_the_shortest_grain_that_is_good_enough_lies_between_two() -> None:
    assert task_grain.shortest((1, 2, 4), (0.6, 0.7, 0.8), 0.5) == 1
    assert task_grain.shortest((1, 4), (0.25, 0.75), 0.5) == 2
    assert task_grain.shortest((1, 2, 4), (0.6, 0.4, 0.8), 0.5) == pytest.approx(2.378, abs=0.001)
    assert task_grain.shortest((1, 2), (0.1, 0.2), 0.5) is None


@pytest.mark.parametrize("pattern", ["trivial", "stencil_1d", "fft", "random_nearest"])
def test_a_grain_has_as_many_tasks_as_it_says(pattern: str) -> None:
    tasks, ends = task_grain.graph(pattern, 3, 10)
    assert len(tasks) == 3 * task_grain.WIDTH
    assert set(ends) <= set(tasks)
    assert all(need in tasks for _, _, needs in tasks.values() for need in needs)
