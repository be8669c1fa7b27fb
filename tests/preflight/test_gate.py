"""The gate on a live scheduler with live workers in one process: what is kept back, and what lets go."""

from __future__ import annotations

import asyncio
import logging
import operator
import threading
import warnings
from typing import TYPE_CHECKING, Any

import dask
import pytest
from distributed import Event, Scheduler, Worker, wait
from distributed.core import Status
from distributed.protocol import pickle
from distributed.utils_test import gen_cluster, inc

from dask_gpurt.extension import GpurtScheduler
from dask_gpurt.preflight import gate as gate_module
from dask_gpurt.preflight import judge
from dask_gpurt.preflight.members import Phase
from dask_gpurt.preflight.worker import OP, Preflight

from .clusters import BAD, gated, stub, until, workers

if TYPE_CHECKING:
    from pathlib import Path

    from dask_gpurt.preflight.gate import Gate

CLUSTER: dict[str, Any] = {"client": True, "nthreads": [], "timeout": 120}


def phases(gate: Gate) -> list[str]:
    return sorted(member.phase.value for member in gate.members.values())


def wait_for_event() -> bool:
    return Event("done").wait()


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_no_task_before_it_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    stub(monkeypatch, go)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate, workers(s, tmp_path / "a", tmp_path / "b") as (a, b):
            fs = c.map(inc, range(20))
            await until(lambda: a.status is b.status is Status.running and len(gate.members) == 2)
            await until(lambda: all(m.running for m in gate.members.values()))
            assert not s.running
            assert [ws.status for ws in s.workers.values()] == [Status.init] * 2
            assert await c.run(lambda: 1) == {a.address: 1, b.address: 1}, "calls are answered"
            with pytest.raises(asyncio.TimeoutError):
                await c.wait_for_workers(1, timeout=0.1)
            s.validate_state()
            assert not a.state.tasks
            assert not b.state.tasks
            go.set()
            await c.wait_for_workers(2)
            assert await c.gather(fs) == list(range(1, 21))
            assert phases(gate) == ["passed", "passed"]
            s.validate_state()

    run()


def test_a_worker_that_fails_is_held_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate, workers(s, tmp_path / "good", tmp_path / BAD) as (good, bad):
            await until(lambda: phases(gate) == ["held", "passed"])
            fs = c.map(inc, range(40))
            named = c.submit(inc, 1, workers=[bad.address], allow_other_workers=True, key="loose")
            assert await c.gather(fs) == list(range(1, 41))
            assert await named == 2
            data = await c.scatter(list(range(8)))
            await c.replicate(data)
            await c.rebalance()
            assert set(await c.who_has(data)) == {f.key for f in data}
            assert not bad.data
            assert not bad.state.tasks
            s.validate_state()
            shown = gate.statistics()["workers"]
            assert list(shown) == [bad.address]
            assert shown[bad.address]["kept"] is True
            (finding,) = [f for f in shown[bad.address]["findings"] if f["state"] == "fail"]
            assert (finding["check"], finding["found"], finding["remedy"]) == ("disk", "read-only", "mount it")
            # It leaves like any other.
            await c.retire_workers([bad.address])
            await until(lambda: bad.address not in s.workers)
            assert list(gate.members) == [good.address]

    run()


def test_retired_while_it_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    stub(monkeypatch, go)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate, workers(s, tmp_path / "a", tmp_path / "b") as (a, b):
            await until(lambda: len(gate.members) == 2 and all(m.running for m in gate.members.values()))
            assert list(await c.retire_workers([a.address])) == [a.address]
            await until(lambda: a.address not in s.workers)
            go.set()
            await c.wait_for_workers(1)
            assert await c.submit(inc, 1) == 2
            assert {ws.address for ws in s.running} == {b.address}
            s.validate_state()

    run()


def test_passing_while_it_is_being_retired_does_not_bring_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    stub(monkeypatch, go)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate, workers(s, tmp_path / "a") as (a,):
            await until(lambda: len(gate.members) == 1 and gate.members[a.address].running)
            s.handle_worker_status_change(Status.closing_gracefully, s.workers[a.address], "retire")
            go.set()
            await until(lambda: phases(gate) == ["passed"])
            assert s.workers[a.address].status is Status.closing_gracefully
            assert not s.running
            s.validate_state()

    run()


def test_paused_while_it_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    stub(monkeypatch, go)

    @gen_cluster(**CLUSTER, config={"distributed.worker.memory.monitor-interval": "1h"})  # it would resume them
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate, workers(s, tmp_path / "a", tmp_path / "b") as (a, b):
            await until(lambda: len(gate.members) == 2 and all(m.running for m in gate.members.values()))
            a.status = Status.paused
            b.status = Status.paused
            await until(lambda: [ws.status for ws in s.workers.values()] == [Status.paused] * 2)
            b.status = Status.running
            await until(lambda: gate.members[b.address].running)
            assert not s.running
            go.set()
            await c.wait_for_workers(1)
            await until(lambda: phases(gate) == ["passed", "passed"])
            assert {ws.address for ws in s.running} == {b.address}, "the other one is still paused"
            a.status = Status.running
            await until(lambda: len(s.running) == 2)
            s.validate_state()

    run()


def test_closed_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "close") as gate, workers(s, tmp_path / "good") as (good,):
            await until(lambda: phases(gate) == ["passed"])
            async with workers(s, tmp_path / BAD) as (bad,):
                await until(lambda: bad.status is Status.closed and list(s.workers) == [good.address])
            assert gate.statistics()["counts"]["closed"] == 1
            assert await c.submit(inc, 1) == 2

    run()


def test_with_warn_nothing_is_kept_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    stub(monkeypatch, go)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        stock = s.stream_handlers["worker-status-change"]
        async with gated(s, "warn") as gate, workers(s, tmp_path / BAD) as (bad,):
            assert s.stream_handlers["worker-status-change"] == stock
            assert await c.submit(inc, 1) == 2, "before it was checked"
            assert phases(gate) == ["checking"]
            go.set()
            await until(lambda: phases(gate) == ["passed"])
            shown = gate.statistics()["workers"][bad.address]
            assert (shown["kept"], shown["findings"][0]["check"]) == (False, "disk")
            assert gate.statistics()["counts"]["failed"] == 1
            assert await c.submit(inc, 2) == 3

    run()


def test_with_warn_the_checks_wait_for_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, patience=1.0)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        done = Event("done")
        looks = []
        stock = Preflight._quiet

        async def quiet(self: Preflight) -> bool:
            looks.append(self._worker)
            return await stock(self)

        monkeypatch.setattr(Preflight, "_quiet", quiet)
        async with gated(s, "warn") as gate, workers(s, tmp_path / "a") as (a,):
            f = c.submit(wait_for_event, pure=False)
            await until(lambda: a.state.executing)
            async with workers(s, tmp_path / "b") as (b,):
                await until(lambda: phases(gate) == ["checking", "passed"])
                assert gate.members[a.address].phase is Phase.CHECKING
                await done.set()
                await f
                await until(lambda: phases(gate) == ["passed", "passed"])
                assert (looks.count(a), looks.count(b)) == (1, 1)

    run()


def test_off_checks_nothing_and_tells_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()  # never set: a check would hang
    stub(monkeypatch, go)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "off") as gate, workers(s, tmp_path / "a") as (a,):
            await until(lambda: gate.members[a.address].node is not None)
            assert gate.statistics()["classes"] == {gate.members[a.address].node.key: 1}
            assert gate.members[a.address].attempts == 0
            assert gate.statistics()["phases"] == {}, "none is being checked"
            assert await c.submit(inc, 1) == 2

    run()


def test_without_an_answer_it_passes_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Preflight, "start", lambda self: None)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        clock = Clock()
        async with gated(s, "hold") as gate:
            gate._clock = clock
            async with workers(s, tmp_path / "a") as (a,):
                await until(lambda: gate.members and gate.members[a.address].running)
                clock.now += gate_module.LIMIT_SECONDS - 1
                gate.look()
                assert not s.running
                clock.now += 1  # its own timer finds it
                assert await c.submit(inc, 1) == 2
                (finding,) = gate.statistics()["workers"][a.address]["findings"]
                assert (finding["check"], finding["state"]) == ("answer", "warn")

    run()


def test_tasks_do_not_fail_because_of_the_gate(tmp_path: Path) -> None:
    """Dask fails tasks that wait without a running worker, where a time for that is set."""

    @gen_cluster(**CLUSTER, config={"distributed.scheduler.no-workers-timeout": "30s"})
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate:
            assert gate.limit_seconds == 10

    run()


def test_when_all_are_held_it_says_so_and_lets_them_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub(monkeypatch)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        clock = Clock()
        heard: list[str] = []
        c.subscribe_topic("warn", lambda event: heard.append(pickle.loads(event[1]["message"])))
        async with gated(s, "hold") as gate:
            gate._clock = clock
            async with workers(s, tmp_path / f"a-{BAD}", tmp_path / f"b-{BAD}"):
                f = c.submit(inc, 1)
                await until(lambda: phases(gate) == ["held", "held"])
                # The first of them was all that there was, for a moment.
                await until(lambda: heard and "all 2 workers failed their checks" in heard[-1])
                assert "disk: read-only, expected a writable one. Remedy: mount it" in heard[-1]
                clock.now += gate_module.LIMIT_SECONDS - 1
                gate.look()
                assert not s.running
                clock.now += 1
                assert await f == 2
                assert gate.statistics()["counts"]["let_go"] == 2
                assert set(gate.statistics()["workers"]) == set(s.workers), "what was found stays shown"
                s.validate_state()

    with caplog.at_level(logging.WARNING, "distributed.scheduler.gpurt"):
        run()
    assert "all 2 held workers work now nevertheless" in caplog.text


def test_a_sound_worker_ends_the_countdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        clock = Clock()
        async with gated(s, "hold") as gate:
            gate._clock = clock
            async with workers(s, tmp_path / BAD) as (bad,):
                await until(lambda: phases(gate) == ["held"])
                async with workers(s, tmp_path / "good") as (good,):
                    await until(lambda: phases(gate) == ["held", "passed"])
                    clock.now += 10 * gate_module.LIMIT_SECONDS
                    gate.look()
                    assert gate.members[bad.address].phase is Phase.HELD
                    assert {ws.address for ws in s.running} == {good.address}
                # The last one that worked has left: the time begins anew.
                gate.look()
                assert gate.members[bad.address].phase is Phase.HELD
                clock.now += gate_module.LIMIT_SECONDS
                gate.look()
                assert gate.members[bad.address].phase is Phase.PASSED
                assert await c.submit(inc, 1) == 2

    run()


def test_workers_that_keep_coming_do_not_put_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adaptive cluster replaces what does not work."""
    go = threading.Event()
    go.set()
    stub(monkeypatch, go)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        clock = Clock()
        async with gated(s, "hold") as gate:
            gate._clock = clock
            async with workers(s, tmp_path / BAD):
                await until(lambda: phases(gate) == ["held"])
                clock.now += gate_module.LIMIT_SECONDS - 1
                gate.look()
                go.clear()
                async with workers(s, tmp_path / "late"):
                    await until(lambda: phases(gate) == ["checking", "held"])
                    clock.now += 1
                    assert await c.submit(inc, 1) == 2
                    go.set()
                    await until(lambda: phases(gate) == ["passed", "passed"])

    run()


def test_a_detach_lets_everybody_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    stub(monkeypatch, go)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        stock = s.stream_handlers["worker-status-change"]
        async with gated(s, "hold") as gate, workers(s, tmp_path / "a") as (a,):
            await until(lambda: gate.members and gate.members[a.address].running)
            f = c.submit(inc, 1)
            with dask.annotate(gpurt={"node_class": "h200*"}):
                g = c.submit(inc, 2)
            await until(lambda: g.key in s.tasks)
            await s.plugins["gpurt"].uninstall()
            assert await f == 2
            assert await g == 3, "the annotation means nothing to stock Dask"
            assert s.stream_handlers["worker-status-change"] == stock
            assert OP not in s.handlers
            go.set()

    run()


@gen_cluster(client=True, nthreads=[("", 1)] * 2, timeout=120)
async def test_an_attach_holds_nobody_who_works(c: Any, s: Scheduler, a: Worker, b: Worker) -> None:
    async with gated(s, "hold", **{"preflight-imports": ["no_such_module"]}) as gate:
        assert await c.submit(inc, 1) == 2
        await until(lambda: phases(gate) == ["passed", "passed"])
        assert len(s.running) == 2
        shown = gate.statistics()["workers"]
        assert all(any("no_such_module" in f["found"] for f in m["findings"]) for m in shown.values())


@gen_cluster(**CLUSTER)
async def test_a_worker_without_the_package_passes_another_version_does_not(c: Any, s: Scheduler) -> None:
    async with gated(s, "hold") as gate:
        gate.add_worker(s, _registered(s, "tcp://10.0.0.1:1"))
        gate.refused("tcp://10.0.0.1:1", "ModuleNotFoundError: No module named 'dask_gpurt'", absent=True)
        assert gate.members["tcp://10.0.0.1:1"].phase is Phase.PASSED
        gate.add_worker(s, _registered(s, "tcp://10.0.0.2:1"))
        why = "RuntimeError: this worker has 0.0.9, the scheduler 0.1.0. Remedy: install one version everywhere"
        gate.refused("tcp://10.0.0.2:1", why, absent=False)
        assert gate.members["tcp://10.0.0.2:1"].phase is Phase.HELD
        finding = gate.members["tcp://10.0.0.2:1"].findings["setup"]
        assert finding.found.endswith("the scheduler 0.1.0")
        assert finding.remedy == "install one version everywhere"
        s.workers.clear()


def _registered(s: Scheduler, address: str) -> str:
    import types

    s.workers[address] = types.SimpleNamespace(status=Status.init, extra={})
    return address


def test_a_real_refusal_reaches_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version on the worker is another one: the plugin's own way, through the event log of Dask."""

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate:
            monkeypatch.setattr("dask_gpurt._version.__version__", "0.0.1")
            async with workers(s, tmp_path / "old") as (old,):
                await until(lambda: phases(gate) == ["held"])
                assert "0.0.1" in gate.members[old.address].findings["setup"].found
                assert old.status is Status.running, "it does not know that it is held"
                assert not s.running

    run()


def test_a_slow_worker_computes_again_and_fails(tmp_path: Path) -> None:
    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate:
            node = {
                "version": 1, "gpus": [], "cpu": "x", "cores": 2, "memory_bytes": 0,
                "filesystem": "", "nics": [], "stack": {},
            }  # fmt: skip

            async def report(address: str, seconds: float) -> dict[str, Any]:
                return await gate.answer(address, report={"findings": [], "own_seconds": seconds, "peers": {}})

            names = [f"tcp://10.0.0.{i}:1" for i in range(5)]
            for name in names:
                gate.add_worker(s, _registered(s, name))
                told = await gate.answer(name, node=node)
                assert told["held"] is True
                assert len(told["peers"]) <= 4
                assert name not in told["peers"]
            for name in names[:3]:
                assert await report(name, 0.1) == {}
            assert [await report(names[3], 0.3) for _ in range(judge.ATTEMPTS)] == [{"again": True}] * 2 + [{}]
            assert gate.members[names[3]].phase is Phase.HELD
            assert gate.members[names[3]].findings["speed"].state == "fail"
            # Slow once, as something else ran there: it passes by its best.
            assert [await report(names[4], seconds) for seconds in (0.3, 0.12)] == [{"again": True}, {}]
            assert gate.members[names[4]].phase is Phase.PASSED
            s.workers.clear()

    run()


def test_nonsense_of_a_worker_lets_it_pass_and_is_counted(tmp_path: Path) -> None:
    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate:
            for i, what in enumerate(({"node": {"version": 9}}, {"report": {"findings": [{}]}}, {"report": None})):
                gate.add_worker(s, _registered(s, f"tcp://10.0.1.{i}:1"))
                assert await gate.answer(f"tcp://10.0.1.{i}:1", **what) == {}
            assert phases(gate) == ["passed"] * 3
            assert gate.statistics()["exceptions"] == 3
            assert await gate.answer("tcp://10.9.9.9:1", node={}) == {}, "a stranger"
            s.workers.clear()

    run()


def test_an_exception_in_the_handler_lets_the_message_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate:

            class Broken(dict[str, Any]):
                def get(self, *args: Any) -> Any:
                    raise ZeroDivisionError

            gate.members = Broken()
            async with workers(s, tmp_path / "a"):
                assert await c.submit(inc, 1) == 2
            assert gate.statistics()["exceptions"] >= 1
            gate.members = {}

    run()


def test_checks_that_break_let_it_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_(plan: Any) -> Any:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr("dask_gpurt.preflight.checks.run", run_)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate, workers(s, tmp_path / "a") as (a,):
            assert await c.submit(inc, 1) == 2
            assert "not foreseen" in gate.members[a.address].findings["preflight"].found

    run()


def test_peers_are_probed_and_an_unreachable_one_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate, workers(s, tmp_path / "a", tmp_path / "b") as (a, b):
            await until(lambda: phases(gate) == ["passed", "passed"])
            del b.handlers["echo"]
            b.handlers["echo"] = operator.truediv  # raises
            async with workers(s, tmp_path / "c") as (third,):
                await until(lambda: phases(gate) == ["passed"] * 3)
                links = gate.members[third.address].peers
                assert set(links) == {a.address, b.address}
                assert links[a.address]["bytes_per_second"] > 0
                assert "error" in links[b.address]
                finding = gate.members[third.address].findings["peers"]
                assert (finding.state, b.address in finding.found) == ("warn", True)

    run()


def test_annotations_choose_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)
    monkeypatch.setattr("dask_gpurt.backends.system.System.cpu", lambda self: "Test CPU")

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        async with gated(s, "hold") as gate:
            with dask.annotate(gpurt={"node_class": "cpu.test*"}):
                here = c.submit(inc, 1, key="here")
            with dask.annotate(gpurt={"node_class": ["h200*", "h100*"]}):
                there = c.submit(inc, 2, key="there")
            await until(lambda: "there" in s.tasks and s.tasks["there"].state == "no-worker")
            assert gate.statistics()["waiting"] == {"cpu.test*": 1, "h200*": 1, "h100*": 1}
            async with workers(s, tmp_path / "a") as (a,):
                assert await here == 2
                assert await c.submit(inc, 3) == 4, "without an annotation: anywhere"
                assert s.tasks["there"].state == "no-worker"
                assert gate.statistics()["waiting"] == {"h200*": 1, "h100*": 1}
                monkeypatch.setattr("dask_gpurt.backends.system.System.cpu", lambda self: "Other")
                monkeypatch.setattr("dask_gpurt.backends.nvml.gpus", lambda: ((gate_gpu(),), "580"))
                async with workers(s, tmp_path / "b") as (b,):
                    assert await there == 3
                    assert s.tasks["there"].who_has == {s.workers[b.address]}
                    with dask.annotate(gpurt={"node_class": "h200*"}):
                        fs = c.map(inc, range(100, 110))
                        named = c.submit(inc, 8, workers=[a.address, b.address], key="both")
                        neither = c.submit(inc, 9, workers=[a.address], key="neither")
                    await wait([*fs, named])
                    assert {w for f in fs for w in (await c.who_has(f))[f.key]} == {b.address}
                    assert (await c.who_has(named))["both"] == (b.address,)
                    assert s.tasks["neither"].state == "no-worker", "the user's workers and the class do not meet"
                    del neither
                s.validate_state()
            del there, fs, named, here
            await until(lambda: not s.tasks)
            assert not gate.restrictions._asked, "what is forgotten is not kept"

    run()


def gate_gpu() -> Any:
    from dask_gpurt.model.node_class import Gpu

    return Gpu(vendor="NVIDIA", model="NVIDIA H200", memory_bytes=140 * 2**30)


@pytest.mark.parametrize(
    "value", ["h200*", {"node": "h200*"}, {"node_class": []}, {"node_class": 3}, {"node_class": [""]}]
)
def test_an_annotation_that_cannot_be_used(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)

    @gen_cluster(**CLUSTER)
    async def run(c: Any, s: Scheduler) -> None:
        heard: list[str] = []
        c.subscribe_topic("warn", lambda event: heard.append(pickle.loads(event[1]["message"])))
        async with gated(s, "off"), workers(s, tmp_path / "a"):
            with dask.annotate(gpurt=value):
                f = c.submit(inc, 1)
            assert await f == 2
            await until(lambda: heard)
            assert f"the annotation gpurt is {value!r}, must be a mapping such as" in heard[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()


def test_the_plugin_can_be_sent(tmp_path: Path) -> None:
    from dask_gpurt.config import Settings

    made = GpurtScheduler(Settings.load({"preflight": "close", "preflight-imports": ["numpy"]}))
    assert pickle.loads(pickle.dumps(made)).settings == made.settings
