"""T4 on figures made by hand, and on live workers whose tasks sleep, compute, or hold the GIL. No GPU was used."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Any

import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.backends.nvml import Device, Load, Snapshot
from dask_gpurt.backends.system import System
from dask_gpurt.doctor import feed, starved
from dask_gpurt.doctor.feed import NOTES, Fed, Feed
from dask_gpurt.doctor.finding import State
from dask_gpurt.doctor.starved import CHECK
from dask_gpurt.observe.collect.worker import WorkerSlots
from tests.placement.clusters import until

from .trees import NO_GPU, Gpus, Tree, node

if TYPE_CHECKING:
    from pathlib import Path

    from distributed import Worker

    from dask_gpurt.doctor.gpus import Gpu

WELL = Fed(seconds=60, threads=4, busy=200, waiting=5, computed=190, spare=0.4, kinds=("join",))


def said(fed: Fed | None) -> list[tuple[State, str, str, str]]:
    return [(v.state, v.found, v.meaning, v.remedy) for v in CHECK.look(node(fed=fed)) if v.state is not State.OK]


def test_well_fed() -> None:
    assert said(WELL) == []
    assert said(dataclasses.replace(WELL, kernels=0.9, computed=5)) == []  # the GPU works, the processors need not


def test_too_little_to_judge_by() -> None:
    assert [state for state, *_ in said(None)] == [State.NA]
    assert [state for state, *_ in said(dataclasses.replace(WELL, busy=1, computed=0))] == [State.NA]


@pytest.mark.parametrize(
    ("fields", "meaning", "remedy"),
    [
        ({"computed": 20}, "Tasks wait", "--nthreads 16"),
        ({"computed": 55}, "Tasks hold the interpreter's lock", "fewer threads"),
        ({"computed": 55, "spare": 0.02}, "Threads wait for processors", "OMP_NUM_THREADS=1"),
        ({"kernels": 0.1, "link": 0.6}, "Tasks copy", "keep values on the GPU"),
        ({"kernels": 0.1, "link": 0.2, "waiting": 100}, "Inputs come", "UCX"),
        ({"kernels": 0.1, "link": None}, "Kernels are too small", "larger partitions"),
    ],
)
def test_what_is_missing(fields: dict[str, Any], meaning: str, remedy: str) -> None:
    ((state, found, why, what),) = said(dataclasses.replace(WELL, **fields))
    assert state is State.WARN
    assert "4 threads ran tasks for 200 s" in found
    assert "mostly join" in found
    assert why.startswith(meaning)
    assert remedy in what


async def followed(worker: Worker, gpu: Gpu, run: Any) -> Feed:
    """A worker's feed over some work."""
    slots = WorkerSlots(worker)
    slots.install()
    one = Feed(worker, slots.seconds, gpu, System())
    one.start()
    try:
        await asyncio.sleep(3 * feed.EVERY_SECONDS)
        await run()
        await asyncio.sleep(3 * feed.EVERY_SECONDS)
    finally:
        await one.stop()
        slots.uninstall()
    return one


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "EVERY_SECONDS", 0.02)
    monkeypatch.setattr(starved, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(feed, "is_wanted", lambda *_: True)


def spin(i: int) -> int:
    """Hold the interpreter's lock."""
    until, n = time.thread_time() + 0.1, 0
    while time.thread_time() < until:
        n += 1
    return n


@pytest.mark.usefixtures("quickly")
@gen_cluster(client=True, nthreads=[("", 4)])
async def test_tasks_that_sleep(c: Any, s: Any, a: Any) -> None:
    async def run() -> None:
        await c.gather(c.map(time.sleep, [0.5, 0.51, 0.52, 0.53], pure=False))

    fed = (await followed(a, NO_GPU, run)).fed()
    assert fed is not None
    assert 1.5 < fed.busy < 2.5
    assert fed.kinds == ("sleep",)
    spare = dataclasses.replace(fed, spare=1.0)  # whatever else this machine does
    ((state, found, why, remedy),) = said(spare)
    assert state is State.WARN
    assert "mostly sleep" in found
    assert why.startswith("Tasks wait")
    assert "--nthreads 16" in remedy


@pytest.mark.usefixtures("quickly")
@gen_cluster(client=True, nthreads=[("", 4)])
async def test_tasks_that_hold_the_lock(c: Any, s: Any, a: Any) -> None:
    async def run() -> None:
        await c.gather(c.map(spin, range(8), pure=False))

    fed = (await followed(a, NO_GPU, run)).fed()
    assert fed is not None
    assert fed.computed >= 0.8
    assert fed.busy > 2 * 0.8  # four at a time, each waits for the others
    assert 0 <= fed.spare <= 1


@pytest.mark.usefixtures("quickly")
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_recorded_gpu_beside_a_live_ledger(c: Any, s: Any, a: Any) -> None:
    """The load counts while tasks run."""
    gpu = Gpus(Snapshot(devices=(Device(0, "GPU-a", "H200", "0000:3b:00.0", load=Load(0.1, 0.7, 0x40)),)))

    async def run() -> None:
        await c.submit(time.sleep, 1.0)

    one = await followed(a, gpu, run)
    fed = one.fed()
    assert fed is not None
    assert (fed.kernels, fed.link) == (pytest.approx(0.1), pytest.approx(0.7))
    first, second = said(dataclasses.replace(fed, spare=1.0))
    assert first[2].startswith("Tasks copy")
    assert second[2].startswith("Tasks wait")


@pytest.mark.usefixtures("quickly")
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_clocks_are_slowed_when_they_were_for_the_whole_minute(c: Any, s: Any, a: Any) -> None:
    class Hot(Gpus):
        now = 0x64

        def load(self, device: Device) -> Load:
            return Load(clocks=self.now)

    gpu = Hot(Snapshot(devices=(Device(0, "GPU-a", "H200", "0000:3b:00.0"),)))
    slots = WorkerSlots(a)
    one = Feed(a, slots.seconds, gpu, System())
    one.start()
    try:
        running = c.submit(time.sleep, 4)
        assert one.slowed() == ""  # it has just begun
        await until(lambda: len(one._notes) > NOTES and one.slowed())
        assert one.slowed() == "by heat and by heat, in hardware"  # 0x4 is a power cap that somebody has set
        gpu.now = 0
        await until(lambda: one.slowed() == "")
        del running
    finally:
        await one.stop()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_gpu_is_not_asked_for_nothing(c: Any, s: Any, a: Any) -> None:
    class Asked(Gpus):
        times = 0

        def load(self, device: Device) -> Load:
            self.times += 1
            return Load(0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "EVERY_SECONDS", 0.02)
        for wanted in (True, False):
            patch.setattr(feed, "is_wanted", lambda *_, wanted=wanted: wanted)
            gpu = Asked(Snapshot(devices=(Device(0, "GPU-a", "H200", "0000:3b:00.0"),)))

            async def idle() -> None:
                await asyncio.sleep(0.2)

            async def work() -> None:
                await c.submit(time.sleep, 0.3, pure=False)

            await followed(a, gpu, idle)
            assert gpu.times == 0
            fed = (await followed(a, gpu, work)).fed()
            assert fed is not None
            assert (gpu.times > 0, fed.kernels) == (wanted, 0.5 if wanted else None)


def test_what_the_machine_left(tmp_path: Path) -> None:
    tree = Tree(tmp_path, {"proc/stat": "cpu  10 1 20 300 40 0 5 6 7 8\ncpu0 1 2\n"})
    assert feed._processors(tree) == (10 + 1 + 20 + 300 + 40 + 5 + 6, 340)
    assert feed._processors(Tree(tmp_path / "none", {})) == (0, 0)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_worker_that_does_nothing(c: Any, s: Any, a: Any) -> None:
    async def run() -> None: ...

    one = Feed(a, WorkerSlots(a).seconds, NO_GPU, System())
    assert one.fed() is None
    one = await followed(a, NO_GPU, run)
    fed = one.fed()
    assert fed is not None
    assert fed.busy == 0


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_driver_that_raises_does_not_keep_a_worker_from_being_given_back(c: Any, s: Any, a: Any) -> None:
    class Broken(Gpus):
        def load(self, device: Device) -> Load:
            raise AttributeError("module 'pynvml' has no attribute 'nvmlDeviceGetCurrentClocksEventReasons'")

    gpu = Broken(Snapshot(devices=(Device(0, "GPU-a", "H200", "0000:3b:00.0"),)))
    one = Feed(a, WorkerSlots(a).seconds, gpu, System())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "EVERY_SECONDS", 0.02)
        patch.setattr(feed, "is_wanted", lambda *_: True)
        one.start()
        running = c.submit(time.sleep, 1)
        await until(lambda: one._task is not None and one._task.done())
    await one.stop()
    assert one.fed() is None
    del running
