"""A trace is replayed as it was: the same tasks, in the same phases, with what was estimated from it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import dask
import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster

from dask_gpurt import record
from dask_gpurt.cli import gpurt
from dask_gpurt.errors import ConfigError, TraceError
from dask_gpurt.observe.trace.reader import Graph, Trace, TracedTask, TracedWorker, Transfer
from dask_gpurt.simulate import calibrate
from dask_gpurt.simulate.replay import LINKS, links, replay, table

if TYPE_CHECKING:
    from pathlib import Path


def _worker(number: int, host: str = "a", joined: float = 0.0, left: float | None = None) -> TracedWorker:
    return TracedWorker(number, f"tcp://{host}:{number}", host, str(number), 1, 10**9, joined, left)


def _task(number: int, key: Any, start: float, stop: float, worker: int = 0, **more: Any) -> TracedTask:
    given: dict[str, Any] = {
        "dependencies": (),
        "graph": 0,
        "nbytes": 100,
        "runs": 1,
        "assigned_seconds": start - 0.5,
        "finished_seconds": stop + 0.002,
        "priority": (0, 0, number),
    } | more
    return TracedTask(number, key, "p", worker=worker, compute_start_seconds=start, compute_stop_seconds=stop, **given)


def _trace(tasks: list[TracedTask], graphs: list[Graph], workers: int = 2) -> Trace:
    return Trace(
        "t",
        about={"config": {"policy": "stock"}},
        workers={i: _worker(i) for i in range(workers)},
        tasks={t.number: t for t in tasks},
        graphs=graphs,
    )


def _chain(n: int = 10) -> Trace:
    """On one worker, each a second and 10 ms after the last."""
    tasks = [_task(i, ("c", i), 1.01 * i, 1.01 * i + 1, dependencies=(i - 1,) if i else ()) for i in range(n)]
    return _trace(tasks, [Graph(0.0, "c", n, (n - 1,))])


def test_what_is_estimated() -> None:
    found = calibrate.Calibration.of(_chain())
    assert found.overhead_seconds == pytest.approx(0.01)
    assert found.message_seconds == pytest.approx(0.002)
    assert found.slowness == {}


def test_a_slow_worker_is_found_and_its_tasks_are_not_slow_elsewhere() -> None:
    tasks = [_task(i, ("m", i), 10.0 * i, 10.0 * i + (3 if i % 3 == 0 else 1), worker=i % 3) for i in range(30)]
    trace = _trace(tasks, [Graph(0.0, "c", 30, tuple(range(30)))], workers=3)
    found = calibrate.Calibration.of(trace)
    assert found.slowness == pytest.approx({0: 3.0})
    load, _ = calibrate.workload(trace, found)
    assert {round(t.seconds - found.overhead_seconds, 6) for t in load.tasks.values()} == {1.0}
    assert calibrate.cluster(trace, found).slowness == pytest.approx([3.0, 1.0, 1.0])


def test_links_are_learned_from_the_bytes_that_came() -> None:
    tasks = []
    for i in range(0, 200, 2):
        nbytes = 10**6 * (1 + i % 7)
        tasks.append(_task(i, ("a", i), i, i + 0.1, worker=1, nbytes=nbytes))
        moved = Transfer(i + 0.2, i + 0.2 + 0.004 + nbytes / 2e8, 1)
        tasks.append(_task(i + 1, ("b", i), i + 0.5, i + 0.6, dependencies=(i,), transfers=[moved]))
    found = calibrate.Calibration.of(_trace(tasks, [Graph(0.0, "c", 200, (199,))]))
    assert found.link.bytes_per_second == pytest.approx(2e8, rel=0.1)
    assert found.link.latency_seconds == pytest.approx(0.004, rel=0.2)


def test_what_never_finished_is_left_out_with_all_that_waits_for_it() -> None:
    trace = _chain(6)
    trace.tasks[2].runs = 0
    load, phases = calibrate.workload(trace, calibrate.Calibration.of(trace))
    assert set(load.tasks) == {("c", 0), ("c", 1)}
    assert [s.outputs for p in phases for s in p.submissions] == [(("c", 1),)]
    for t in trace.tasks.values():
        t.runs = 0
    with pytest.raises(TraceError, match="nothing to replay"):
        calibrate.workload(trace, calibrate.Calibration.of(trace))


def test_a_trace_that_lost_records_is_replayed_without_them() -> None:
    """The graph's own record came after the block with the record of its last task was dropped."""
    trace = _chain(6)
    del trace.tasks[5]
    _, phases = calibrate.workload(trace, calibrate.Calibration.of(trace))
    assert [s.outputs for p in phases for s in p.submissions] == [(("c", 4),)]
    assert replay(trace, "stock").result.executed == 5


def test_a_recording_that_began_after_the_graph_is_refused() -> None:
    """A prediction of 0 s for a run that was not replayed would pass every gate."""
    trace = _trace([_task(0, "a", 0, 1, graph=None)], [])
    with pytest.raises(TraceError, match="Remedy: begin to record before the work is submitted"):
        replay(trace, "stock")


def test_graphs_that_overlap_are_one_phase_and_others_are_not() -> None:
    tasks = [
        _task(0, "a", 0, 2, graph=0),
        _task(1, "b", 1, 3, worker=1, graph=1),  # submitted while a ran
        _task(2, "c", 10, 11, graph=2),
        _task(3, "a", 20, 21, graph=3),  # the same key once more
    ]
    tasks[0].released_seconds = 5.0
    graphs = [Graph(0.0, "c", 1, (0,)), Graph(0.5, "c", 1, (1,)), Graph(9.0, "c", 1, (2,)), Graph(19.0, "c", 1, (3,))]
    trace = _trace(tasks, graphs)
    load, phases = calibrate.workload(trace, calibrate.Calibration.of(trace))
    assert [[s.offset_seconds for s in p.submissions] for p in phases] == [[0.0, 0.5], [0.0], [0.0]]
    assert [p.recorded_seconds for p in phases] == pytest.approx([3.002, 2.002, 2.002])
    assert phases[0].released == ("a",)
    assert set(load.tasks) == {"a", "b", "c", "a~3"}
    made = replay(trace, "stock")
    assert made.result.executed == 4
    assert len(made.phases) == 3
    # b was submitted half a second late and runs for two.
    assert made.phases[0] == pytest.approx(2.5, abs=0.1)


def _three_phases(released: float, runs: int = 1) -> Trace:
    """A result of the first is used in the second; the third has nothing to do with it."""
    tasks = [
        _task(0, "held", 0, 1, graph=0, runs=runs),
        _task(1, "used", 10, 11, graph=1, dependencies=(0,)),
        _task(2, "else", 20, 21, graph=2),
    ]
    tasks[0].released_seconds = released
    return _trace(tasks, [Graph(0.0, "c", 1, (0,)), Graph(9.5, "c", 1, (1,)), Graph(19.5, "c", 1, (2,))])


def test_what_a_client_held_for_some_graphs_is_let_go_after_them() -> None:
    trace = _three_phases(released=15.0)
    _, phases = calibrate.workload(trace, calibrate.Calibration.of(trace))
    assert [p.released for p in phases] == [(), ("held",), ()]
    assert replay(trace, "stock").result.executed == 3


def test_a_result_that_was_lost_and_made_again_is_still_held() -> None:
    """Its worker was lost, by which it was released; the second run is what the next graph needs."""
    trace = _three_phases(released=0.5, runs=2)
    _, phases = calibrate.workload(trace, calibrate.Calibration.of(trace))
    assert [p.released for p in phases] == [(), (), ()]
    assert replay(trace, "stock").result.executed == 3


def test_a_task_that_was_there_before_and_ran_again_comes_with_the_graph_that_needs_it() -> None:
    """The sources of a persisted frame are released; a graph that is recorded has them computed again."""
    tasks = [
        _task(0, "source", 0, 0, graph=None, data=True, holders=(1,), runs=0),
        _task(1, "part", 0, 1, graph=None, dependencies=(0,)),
        _task(2, "again", 1, 2, graph=None, dependencies=(1,)),
        _task(3, "unused", 0, 1, worker=1, graph=None),
        _task(4, "first", 2, 3, graph=0, dependencies=(2,)),
        _task(5, "second", 10, 11, graph=1, dependencies=(2,)),
    ]
    trace = _trace(tasks, [Graph(0.0, "c", 1, (4,)), Graph(9.0, "c", 1, (5,))])
    _, phases = calibrate.workload(trace, calibrate.Calibration.of(trace))
    assert [[s.keys for s in p.submissions] for p in phases] == [[("part", "again", "first")], [("second",)]]
    for policy in ("stock", "gpurt"):
        assert replay(trace, policy, workers=4).result.executed >= 4


def test_a_worker_that_came_again_takes_its_old_place() -> None:
    trace = _chain()
    trace.workers = {0: _worker(0), 1: _worker(1, left=5.0), 2: _worker(2, joined=6.0), 3: _worker(3, joined=7.0)}
    assert calibrate.places(trace) == {0: 0, 1: 1, 2: 1, 3: 2}
    assert calibrate.cluster(trace, calibrate.Calibration.of(trace)).workers == 3


def test_workers_of_one_host_are_on_one_node() -> None:
    """Those of two hosts join by turns. What one of them hands to its neighbour does not cross the network."""
    trace = _trace(
        [_task(0, "a", 0, 1, worker=0, nbytes=10**6), _task(1, "b", 2, 3, worker=2, dependencies=(0,))],
        [Graph(0.0, "c", 2, (1,))],
    )
    trace.workers = {i: _worker(i, host="ab"[i % 2]) for i in range(4)}
    trace.tasks[0].restrictions = {"workers": [0]}
    trace.tasks[1].restrictions = {"workers": [2]}
    assert calibrate.places(trace) == {0: 0, 2: 1, 1: 2, 3: 3}
    assert replay(trace, "stock").result.bytes_moved == {"node": 10**6, "rack": 0, "far": 0}


def test_restrictions_and_data_fit_fewer_workers() -> None:
    tasks = [
        TracedTask(0, "data", "data", (), (), data=True, holders=(1,), nbytes=50),
        _task(1, "here", 0, 1, worker=1, dependencies=(0,), restrictions={"workers": [1]}),
    ]
    trace = _trace(tasks, [Graph(0.0, "c", 1, (1,))])
    made = replay(trace, "stock", workers=1)
    assert made.workers == 1
    assert made.result.executed == 1
    assert not made.same
    assert made.error is None


def test_a_prediction_of_what_was_recorded_is_near() -> None:
    made = replay(_chain(), "stock")
    assert made.same
    assert made.error == pytest.approx(0.0, abs=0.02)
    # A chain gains nothing by more workers, and nothing moves.
    more = replay(_chain(), "gpurt", workers=8, link=LINKS["1GbE"])
    assert more.makespan_seconds == pytest.approx(made.makespan_seconds, rel=0.02)
    assert sum(more.result.bytes_moved.values()) == 0
    text = table([made, more])
    assert "predicted for the same" in text
    assert "gpurt" in text


@pytest.mark.parametrize(
    ("text", "latency", "bandwidth"),
    [("10gbe", 1e-3, 1.1e9), ("1.2GB@0.5ms", 0.5e-3, 1.2e9), ("100 MB @20us", 20e-6, 1e8), ("1e9@1s", 1.0, 1e9)],
)
def test_links(text: str, latency: float, bandwidth: float) -> None:
    path = links(text)
    assert (path.latency_seconds, path.bytes_per_second) == pytest.approx((latency, bandwidth))


@pytest.mark.parametrize("text", ["", "fast", "10GbE@1ms@2", "much@1ms", "1GB@1h", "0@1ms", "-1GB@1ms", "1e400@1ms"])
def test_links_that_are_not(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed are 1GbE"):
        links(text)


@pytest.mark.cluster
def test_a_recorded_run_is_replayed_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as c,
        record(c, path),
    ):
        data = c.scatter(1)
        parts = [dask.delayed(lambda a, i: a + i, pure=False)(data, i, dask_key_name=("x", i)) for i in range(30)]
        first = c.persist(dask.delayed(sum, pure=False)(parts, dask_key_name="first"))
        assert first.compute() == sum(range(30)) + 30
        assert dask.delayed(lambda x: x * 2, pure=False)(first, dask_key_name="second").compute() == 930
    run = CliRunner().invoke
    shown = run(gpurt, ["replay", str(path), "--policy", "stock,inf,random,gpurt", "--json"])
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.output)
    assert [r["policy"] for r in told] == ["stock", "inf", "random", "gpurt"]
    assert {r["result"]["executed"] for r in told} == {32}
    assert [r["same"] for r in told] == [True, False, False, False]
    wide = run(gpurt, ["replay", str(path), "--policy", "stock,gpurt", "--workers", "8", "--links", "10GbE"])
    assert wide.exit_code == 0, wide.output
    assert "makespan" in wide.output
    closed = run(gpurt, ["replay", str(path), "--policy", "stock", "--gate", "0.5"])
    assert closed.exit_code == 1
    assert "more than 0.5 times" in closed.output
    wrong = run(gpurt, ["replay", str(path), "--policy", "mine"])
    assert wrong.exit_code == 1
    assert "'mine'" in wrong.output
    assert run(gpurt, ["replay", str(path), "--links", "slow"]).exit_code == 1
    (tmp_path / "bad").write_bytes(path.read_bytes()[:-3])
    assert "damaged" in run(gpurt, ["replay", str(tmp_path / "bad")]).output
