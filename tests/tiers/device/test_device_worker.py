"""The device tier inside a worker: real RMM over ordinary memory, real tasks, the real state machine."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from distributed import Client, Scheduler, Worker, wait
from distributed.spill import SpillBuffer
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster
from distributed.worker_state_machine import ExecuteFailureEvent

from dask_gpurt.backends import cuda, device_values, rocm
from dask_gpurt.config import Settings
from dask_gpurt.errors import InstallError
from dask_gpurt.extension import GpurtScheduler, on_worker
from dask_gpurt.tiers import runtime as tier_runtime
from dask_gpurt.tiers.device import coexistence
from dask_gpurt.tiers.device.oom import out_of_memory, with_note
from dask_gpurt.tiers.device.setup import DeviceMemory, Late
from dask_gpurt.tiers.runtime import TierRuntime, _left_alone
from tests.tiers.conftest import HostSlabs

pytest.importorskip("rmm")

import rmm.mr

from tests.tiers.device.host_rmm import HostRmmBackend, Value, host_memory, pattern

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dask_gpurt.tiers.device.coexistence import Terms

CONFIG = {"distributed.worker.memory.spill": False, "distributed.worker.memory.pause": False}
KB = 1 << 10
LIMIT = 1000 * KB
BACKENDS: list[HostRmmBackend] = []


def open_on_host_memory(worker: Any, settings: Any, host_bytes: int | None, terms: Terms) -> DeviceMemory:
    """`DeviceMemory.open` over host memory."""
    assert terms.decision.works
    callback = Late()
    backend = HostRmmBackend(LIMIT)
    backend.callback = callback
    BACKENDS.append(backend)
    device = backend.allocator.device
    return DeviceMemory.over(
        *(backend, backend.allocator, callback, HostSlabs(), 64 << 20),
        lambda: coexistence.conflict(worker, device),
    )


@contextlib.contextmanager
def found(reason: str = "", *, context: bool = True) -> Iterator[None]:
    """What a probe of the stand-in says, and whether something uses the device."""
    probe = cuda.Probe(reason, "host memory", 1 << 30, device=999)
    with (
        mock.patch.object(cuda, "probe", return_value=probe),
        mock.patch.object(cuda, "has_context", return_value=context),
    ):
        yield


async def install(worker: Worker, reason: str = "") -> tuple[TierRuntime, HostRmmBackend]:
    settings = Settings.load({"tiers.device": "auto", "tiers.disk-reserve": 0}).tiers
    with mock.patch.object(DeviceMemory, "open", open_on_host_memory), found(reason):
        runtime = await TierRuntime.install(worker, settings)
    return runtime, BACKENDS[-1]


def make(i: int, nbytes: int) -> Value:
    return BACKENDS[-1].make(i, nbytes)


class DeviceHostFile(dict[Any, Any]):
    """Stands for dask-cuda's; tests/backends/test_dask_cuda.py has the real one."""

    __module__ = "dask_cuda.device_host_file"

    def __init__(self) -> None:
        self.device_buffer = mock.Mock(n=LIMIT)


BEGAN, GO_ON = threading.Event(), threading.Event()


def hog() -> int:
    """Holds most of the device until `other` has failed."""
    big = make(0, 600 * KB)
    BEGAN.set()
    assert GO_ON.wait(30)
    return big.nbytes


def other() -> int:
    assert BEGAN.wait(30)
    try:
        return make(1, 600 * KB).nbytes
    except MemoryError:
        GO_ON.set()
        raise


def right(value: Value, i: int) -> bool:
    return bool((value.array() == pattern(i, value.nbytes)).all())


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 2)], config=CONFIG)
async def test_tasks_on_four_times_the_limit(c: Client, s: Scheduler, a: Worker) -> None:
    runtime, backend = await install(a)
    n, size = 40, 100 * KB
    values = c.map(make, range(n), nbytes=size, key=[f"v{i}" for i in range(n)])
    await wait(values)
    assert all(await c.gather(c.map(right, values, range(n))))
    assert backend.allocator.peak_bytes() <= LIMIT
    stats = runtime.statistics()
    assert stats["fallbacks"] == {}, stats["last_traceback"]
    assert stats["device"]["below_values"] > n // 2
    assert stats["device"]["device_bytes"] <= LIMIT
    assert stats["device"]["out_of_memory"]["exceptions"] == 0
    assert stats["host_bytes"] < 100 * KB  # boxes, not values
    runtime.engine.validate()
    del values
    await async_poll_for(lambda: runtime.statistics()["device"]["values"] == 0, timeout=30)
    await async_poll_for(lambda: backend.allocated_bytes() == 0, timeout=30)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 2)], config=CONFIG)
async def test_a_value_whose_copy_is_unreadable_is_computed_again(c: Client, s: Scheduler, a: Worker) -> None:
    runtime, _ = await install(a)
    space = runtime.store.device
    value = c.submit(make, 1, nbytes=100 * KB, key="v")
    await wait(value)
    space.spill(1)
    (box,) = space._all()
    box.handle.alive[0] = False
    assert await c.submit(right, value, 1)
    assert runtime.statistics()["lost_keys"] == 1
    assert await c.submit(right, value, 1, pure=False)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 2)], config=CONFIG)
async def test_two_tasks_that_do_not_fit_together(c: Client, s: Scheduler, a: Worker) -> None:
    runtime, _ = await install(a)
    BEGAN.clear()
    GO_ON.clear()
    assert await c.gather([c.submit(hog, pure=False), c.submit(other, pure=False)]) == [600 * KB] * 2
    device = runtime.statistics()["device"]
    assert (device["retried_alone"], device["succeeded"], device["failed"]) == (1, 1, 0)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 1)], config=CONFIG)
async def test_a_task_too_large_fails_with_a_report_and_the_worker_lives(c: Client, s: Scheduler, a: Worker) -> None:
    runtime, _ = await install(a)
    kept = c.map(make, range(4), nbytes=200 * KB, key=[f"kept-{i}" for i in range(4)])
    await wait(kept)
    error = await c.submit(make, 9, 2 * LIMIT).exception()
    assert isinstance(error, MemoryError)
    (note,) = error.__notes__
    assert "even alone" in note
    assert "Remedy" in note
    assert all(await c.gather(c.map(right, kept, range(4))))
    device = runtime.statistics()["device"]
    assert (device["retried_alone"], device["failed"]) == (1, 1)


@pytest.mark.cluster
@pytest.mark.parametrize("fails", ["spill", "largest"])
def test_a_device_that_fails_while_a_task_waits_to_run_alone_does_not_hide_its_error(fails: str) -> None:
    """Dask's worker knows no exception of `execute` itself: the task never ended."""

    @gen_cluster(client=True, nthreads=[("", 1)], config=CONFIG)
    async def test(c: Client, s: Scheduler, a: Worker) -> None:
        runtime, _ = await install(a)
        assert runtime.store is not None
        with mock.patch.object(runtime.store.device, fails, side_effect=RuntimeError("CUDA error 700")):
            error = await asyncio.wait_for(c.submit(make, 9, 2 * LIMIT).exception(), 20)
        assert isinstance(error, MemoryError)
        assert runtime.statistics()["fallbacks"] == {"execute": 1}

    test()


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (MemoryError("std::bad_alloc: out_of_memory: RMM failure at: x"), True),
        (RuntimeError("P2P s failed during unpack phase: output partition 1: MemoryError: std::bad_alloc: x"), True),
        (MemoryError("Unable to allocate 3 GiB for an array"), False),
        (RuntimeError("x"), False),
    ],
)
def test_want_of_device_memory_is_known_from_the_error(error: Exception, known: bool) -> None:
    event = ExecuteFailureEvent.from_exception(error, key="x", start=0.0, stop=1.0, run_id=1, stimulus_id="s")
    found = out_of_memory(event)
    assert (found is not None) is known
    if known:
        assert "a note" in str(out_of_memory(with_note(event, "a note")).__notes__)  # type: ignore[union-attr]


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 2)], config=CONFIG)
async def test_uninstall_keeps_what_fits_and_recomputes_the_rest(c: Client, s: Scheduler, a: Worker) -> None:
    runtime, _ = await install(a)
    values = c.map(make, range(5), nbytes=100 * KB, key=[f"v{i}" for i in range(5)])
    await wait(values)
    runtime._device_memory.space.spill(300 * KB)  # type: ignore[union-attr]
    await runtime.uninstall()
    assert all(isinstance(a.data[f.key], Value) for f in values)
    assert all(await c.gather(c.map(right, values, range(5))))


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 1)], config=CONFIG)
async def test_without_a_gpu_on_refuses_and_auto_says_nothing(c: Client, s: Scheduler, a: Worker) -> None:
    reason = (await asyncio.to_thread(cuda.probe)).reason
    if not reason:
        pytest.skip("there is a GPU")
    assert "allocation of 256 bytes failed" in reason or "RMM cannot be imported" in reason
    data = a.data
    with pytest.raises(InstallError, match=r"'on', and there is no tier: .*Remedy: .*gpurt.tiers.device: auto"):
        await TierRuntime.install(a, Settings.load({"tiers.device": "on", "tiers.disk-reserve": 0}).tiers)
    assert a.data is a.state.data is data
    with mock.patch.object(cuda, "probe", side_effect=AssertionError("probed")):
        runtime = await TierRuntime.install(a, Settings.load({"tiers.device": "auto", "tiers.disk-reserve": 0}).tiers)
        runtime.heartbeat()
    statistics = runtime.statistics()
    assert statistics["device_off"] == ""
    assert statistics["fallbacks"] == {}
    assert "device" not in statistics
    assert runtime.store is not None  # the other tiers are there


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 1)], config=CONFIG)
async def test_where_a_gpu_is_used_and_rmm_is_not_there_it_says_so(c: Client, s: Scheduler, a: Worker) -> None:
    runtime, _ = await install(a, "RMM cannot be imported")
    assert "RMM cannot be imported" in runtime.statistics()["device_off"]
    assert runtime.store is not None


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 2)], config=CONFIG)
async def test_the_tier_comes_when_something_begins_to_use_the_device(c: Client, s: Scheduler, a: Worker) -> None:
    settings = Settings.load({"tiers.device": "auto", "tiers.disk-reserve": 0}).tiers
    with mock.patch.object(DeviceMemory, "open", open_on_host_memory):
        runtime = await TierRuntime.install(a, settings)
        runtime.heartbeat()
        assert "device" not in runtime.statistics()
        elsewhere = HostRmmBackend(LIMIT)
        BACKENDS.append(elsewhere)
        early = c.submit(make, 7, 100 * KB, key="early")  # kept as a value of host memory
        await wait(early)
        with found():
            runtime.heartbeat()
            runtime.heartbeat()  # while it is on its way
            await async_poll_for(lambda: "device" in runtime.statistics(), timeout=30)
    assert runtime.statistics()["device"]["values"] == 1
    values = c.map(make, range(20), nbytes=100 * KB, key=[f"v{i}" for i in range(20)])
    assert all(await c.gather(c.map(right, values, range(20))))
    assert await c.submit(right, early, 7)
    stats = runtime.statistics()
    assert stats["device"]["values"] == 21
    assert stats["device"]["below_values"] > 0
    assert stats["fallbacks"] == {}, stats["last_traceback"]
    assert stats["device_off"] == ""
    runtime.engine.validate()


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 1)], config=CONFIG)
async def test_a_tier_that_cannot_be_opened_later_leaves_the_worker_alone(c: Client, s: Scheduler, a: Worker) -> None:
    with found(), mock.patch.object(DeviceMemory, "open", side_effect=RuntimeError("a library")):
        with mock.patch.object(cuda, "has_context", return_value=False):
            runtime = await TierRuntime.install(
                a, Settings.load({"tiers.device": "auto", "tiers.disk-reserve": 0}).tiers
            )
        runtime.heartbeat()
        await async_poll_for(lambda: "a library" in runtime.statistics()["device_off"], timeout=30)
        runtime.heartbeat()
    assert runtime.statistics()["fallbacks"] == {"device": 1}
    assert await c.submit(sum, [1, 2]) == 3


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 1)], config=CONFIG)
async def test_a_driver_that_hangs_keeps_no_worker_from_closing(c: Client, s: Scheduler, a: Worker) -> None:
    settings = Settings.load({"tiers.device": "auto", "tiers.disk-reserve": 0}).tiers
    asked, answers = threading.Event(), threading.Event()

    def probe() -> cuda.Probe:
        assert threading.current_thread().daemon, "else it would keep the process from ending"
        asked.set()
        answers.wait(60)
        return cuda.Probe("no answer")

    with mock.patch.object(cuda, "has_context", return_value=False):
        runtime = await TierRuntime.install(a, settings)
    with (
        mock.patch.object(cuda, "has_context", return_value=True),
        mock.patch.object(cuda, "probe", probe),
        mock.patch.object(tier_runtime, "CLOSE_SECONDS", 0.1),
    ):
        runtime.heartbeat()
        await async_poll_for(asked.is_set, timeout=30)
        try:
            await asyncio.wait_for(runtime.uninstall(), 30)
        finally:
            answers.set()
        await async_poll_for(lambda: runtime._coming is not None and runtime._coming.done(), timeout=30)
    assert runtime.statistics()["fallbacks"] == {}
    assert await c.submit(sum, [1, 2]) == 3


def test_a_cpu_worker_loads_no_library_of_cuda() -> None:
    """As started by default: no module, no shared library, and the look at each heartbeat costs next to nothing."""
    code = """
import sys, time
from distributed import LocalCluster

def loaded():
    names = {"cuda", "cudf", "cupy", "numba", "rmm", "pylibcudf", "dask_cuda", "kvikio", "torch", "ucxx"}
    return names & {m.partition(".")[0] for m in sys.modules}

stock = loaded()  # distributed loads RMM where it is installed
from dask_gpurt.backends import cuda
from dask_gpurt.extension import on_worker
with LocalCluster(n_workers=1, processes=False, dashboard_address=None,
                  scheduler_kwargs={"preload": ["dask_gpurt.preload"]}) as cluster, cluster.get_client() as client:
    assert client.submit(sum, [1, 2]).result() == 3
    worker = next(iter(cluster.workers.values()))
    assert on_worker(worker).runtime.store is not None
    on_worker(worker).runtime.heartbeat()
print(sorted(loaded() - stock))
print([line for line in open("/proc/self/maps") if "libcuda.so" in line])
start = time.thread_time()
for _ in range(1000):
    assert not cuda.has_context()
print(time.thread_time() - start < 5)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["[]", "[]", "True"], done.stderr[-3000:]


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 1)], config=CONFIG)
async def test_off_means_that_nothing_is_probed(c: Client, s: Scheduler, a: Worker) -> None:
    with mock.patch.object(cuda, "probe", side_effect=AssertionError("probed")):
        runtime = await TierRuntime.install(a, Settings.load({"tiers.device": "off", "tiers.disk-reserve": 0}).tiers)
        with mock.patch.object(cuda, "has_context", return_value=True):
            runtime.heartbeat()
    assert runtime.statistics()["device_off"] == ""


def test_values_in_host_memory_are_not_taken_for_device_values() -> None:
    import numpy as np
    import pandas as pd

    backend = device_values.CudaBackend(mock.Mock())
    for value in (1, None, b"x", np.ones(3), pd.DataFrame({"a": [1]}), {"k": 1}, Value):
        assert not backend.owns(value)


def test_amd_gpus_are_counted_and_nothing_more(tmp_path: Path) -> None:
    assert rocm.devices(tmp_path / "absent") == 0
    for i, count in enumerate((0, 256, 304)):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "properties").write_text(f"cpu_cores_count 8\nsimd_count {count}\n")
    assert rocm.devices(tmp_path) == 2
    assert "no AMD GPU" in rocm.reason() or "found" in rocm.reason()


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 1)], config=CONFIG, worker_kwargs={"data": DeviceHostFile})
async def test_takes_the_place_of_dask_cudas_mapping(c: Client, s: Scheduler, a: Worker) -> None:
    original = a.data
    runtime, _ = await install(a)
    assert runtime.store is not None
    assert a.data is a.state.data is runtime.store
    values = c.map(make, range(20), nbytes=100 * KB, key=[f"v{i}" for i in range(20)])
    assert all(await c.gather(c.map(right, values, range(20))))
    assert runtime.statistics()["device"]["values"] == 20
    del values
    await async_poll_for(lambda: runtime.statistics()["device"]["values"] == 0, timeout=30)
    await runtime.uninstall()
    assert a.data is a.state.data is original  # it had nothing, and there was nothing to put into it
    assert await c.submit(sum, [1, 2]) == 3


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 1)], config=CONFIG, worker_kwargs={"data": DeviceHostFile})
async def test_tiers_that_the_scheduler_switches_off_give_dask_cudas_mapping_its_place(
    c: Client, s: Scheduler, a: Worker
) -> None:
    original = a.data
    runtime, _ = await install(a)  # as a preload of the worker does
    off = Settings.load({"tiers.enabled": False, "tiers.device": "auto", "tiers.disk-reserve": 0}).tiers
    assert await TierRuntime.install(a, off) is runtime
    assert a.data is a.state.data is original
    assert await c.submit(sum, [1, 2]) == 3
    await runtime.uninstall()
    assert a.data is a.state.data is original


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 1)], config=CONFIG, worker_kwargs={"data": DeviceHostFile})
async def test_values_stay_readable_when_we_leave_a_worker_of_dask_cuda(c: Client, s: Scheduler, a: Worker) -> None:
    runtime, _ = await install(a)
    value = c.submit(make, 1, 100 * KB, key="v")
    await wait(value)
    with captured_logger("distributed.worker.gpurt", level="WARNING") as log:
        await runtime.uninstall()
    assert (
        "holds 1 keys and stays distributed's SpillBuffer, in the place of dask-cuda's DeviceHostFile" in log.getvalue()
    )
    assert type(a.data) is SpillBuffer  # dask-cuda's could not take it without blocking the loop
    assert a.data is a.state.data
    assert await c.submit(right, value, 1)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 1)], config=CONFIG, worker_kwargs={"data": DeviceHostFile})
async def test_leaves_dask_cudas_mapping_where_it_is_used_or_no_device_is(c: Client, s: Scheduler, a: Worker) -> None:
    original = a.data
    runtime, _ = await install(a, "no device")
    assert "DeviceHostFile" in runtime.statistics()["left_alone"]
    assert "no device" in runtime.statistics()["device_off"]
    await runtime.uninstall()
    settings = Settings.load({"tiers.device": "auto", "tiers.disk-reserve": 0}).tiers
    with found(), mock.patch.object(DeviceMemory, "open", side_effect=InstallError("no")), pytest.raises(InstallError):
        await TierRuntime.install(a, settings)
    assert a.data is a.state.data is original  # put back
    x = c.submit(sum, [1, 2], key="x")
    await wait(x)
    runtime, _ = await install(a)
    assert a.data is a.state.data is original
    assert "gpurt.tiers.device: auto or on" in _left_alone(original, runtime._settings).remedy  # type: ignore[union-attr]
    assert "holds keys already" in runtime.statistics()["device_off"]
    assert await x == 3


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], config=CONFIG, timeout=120)
async def test_the_cluster_knows_device_values_as_such(c: Client, s: Scheduler, a: Worker) -> None:
    """Host books and gate, `where` and placement, for values on the device, below it, and in containers."""
    plugin = GpurtScheduler(Settings.load({"shuffle.enabled": False, "tiers.device": "auto", "tiers.disk-reserve": 0}))
    with mock.patch.object(DeviceMemory, "open", open_on_host_memory), found():
        await plugin.start(s)
        s.add_plugin(plugin, name=plugin.name)
    parts = on_worker(a)
    assert parts is not None
    runtime = parts.runtime
    assert runtime is not None
    size = 100 * KB
    values = c.map(make, range(3), nbytes=size, key=[f"make-{i}" for i in range(3)])
    split = c.submit(make_split, 4, size, key="split-0")
    await wait([*values, split])
    here = parts.residence(["make-0", "split-0"])
    assert here["make-0"] == {"tier": "device", "nbytes": size, "disk_bytes": None}
    assert here["split-0"] == {"tier": "device", "nbytes": 2 * size, "disk_bytes": None}
    stats = runtime.statistics()
    assert stats["device"]["device_bytes"] == 5 * size
    assert stats["host_bytes"] < 10 * KB
    # No room in host memory is kept for what will lie on the device.
    seam = runtime._seam
    assert seam is not None
    assert (seam.turns.outputs.expected("make-9") or 0) < KB
    assert (seam.turns.outputs.expected("split-9") or 0) < KB
    space = runtime._device_memory.space  # type: ignore[union-attr]
    await asyncio.to_thread(space.spill, 1 << 40)
    below = parts.residence(["make-0", "split-0"])
    assert (below["make-0"]["tier"], below["make-0"]["nbytes"]) == ("host", size)  # the blocks of this test
    assert below["make-0"]["disk_bytes"] >= size
    await async_poll_for(lambda: set(plugin.residence.on_disk) == {"make-0", "make-1", "make-2", "split-0"}, timeout=30)
    assert plugin.residence.on_disk["make-0"] == {a.address: size / 10}  # ten times as fast as a disk
    story = runtime.engine.log.story("make-0")
    assert story[-1][3] == "to host"
    assert await c.submit(right, values[0], 0)
    assert await c.submit(right_split, split, 4)
    await async_poll_for(lambda: set(plugin.residence.on_disk) == {"make-1", "make-2"}, timeout=30)
    assert parts.residence(["make-0"])["make-0"]["tier"] == "device"
    assert runtime.statistics()["fallbacks"] == {}
    runtime.engine.validate()
    await plugin.uninstall()


def make_split(i: int, nbytes: int) -> dict[int, Any]:
    return {0: make(i, nbytes), 1: make(i + 1, nbytes)}


def right_split(split: dict[int, Value], i: int) -> bool:
    return right(split[0], i) and right(split[1], i + 1)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=CONFIG)
async def test_every_heartbeat_looks_whether_the_resource_is_still_ours(c: Client, s: Scheduler, a: Worker) -> None:
    runtime, backend = await install(a)
    device = backend.allocator.device
    rmm.mr.set_per_device_resource(device, host_memory())
    assert runtime.heartbeat()["device_bytes"] == 0
    assert runtime.statistics()["device"]["resource_replaced"] == 1
    with mock.patch.object(DeviceMemory, "look", side_effect=RuntimeError("a library")):
        assert runtime.heartbeat()["device_bytes"] == 0
    assert runtime.statistics()["fallbacks"] == {"device": 1}
