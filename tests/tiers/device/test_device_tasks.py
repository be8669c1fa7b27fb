"""The device tier of live workers beside their tasks: what comes ahead, what waits, and where tasks run."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from distributed import Client, Scheduler, Worker, wait
from distributed.utils_test import async_poll_for, gen_cluster

from dask_gpurt.backends import cuda
from dask_gpurt.backends.dask_cuda import DeviceSetup
from dask_gpurt.config import Settings
from dask_gpurt.extension import GpurtScheduler, on_worker
from dask_gpurt.tiers import runtime as runtime_module
from dask_gpurt.tiers.device import coexistence
from dask_gpurt.tiers.device.coexistence import Decision, Terms
from dask_gpurt.tiers.device.setup import DeviceMemory
from tests.tiers.conftest import HostSlabs

pytest.importorskip("rmm")

from tests.tiers.device import test_device_worker
from tests.tiers.device.host_rmm import Value, pattern
from tests.tiers.device.test_device_worker import (
    BACKENDS,
    BEGAN,
    CONFIG,
    GO_ON,
    KB,
    LIMIT,
    install,
    make,
    open_on_host_memory,
    right,
)

if TYPE_CHECKING:
    from dask_gpurt.config import TierSettings

MB = 1 << 20


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=CONFIG)
async def test_inputs_come_back_to_the_device_ahead_of_their_tasks(c: Client, s: Scheduler, a: Worker) -> None:
    """While a task runs, those of the next ones come into room that is there; no task then brings its own."""
    runtime, _ = await install(a)
    BEGAN.clear()
    GO_ON.clear()
    values = c.map(make, range(6), nbytes=100 * KB, key=[f"v{i}" for i in range(6)])
    await wait(values)
    space = runtime._device_memory.space  # type: ignore[union-attr]
    await asyncio.to_thread(space.spill, 1 << 40)
    assert runtime.statistics()["device"]["below_values"] == 6
    busy = c.submit(hold, key="busy", priority=1)
    await asyncio.to_thread(BEGAN.wait, 30)
    later = c.map(right, values, range(6), key=[f"later-{i}" for i in range(6)])
    await async_poll_for(lambda: runtime.statistics()["device"]["below_values"] == 0, timeout=30)
    GO_ON.set()
    assert all(await c.gather(later))
    await busy
    device = runtime.statistics()["device"]
    assert (device["ahead_started"], device["ahead_in_time"], device["ahead_left_again"]) == (6, 6, 0)
    assert device["ahead_started_bytes"] == 600 * KB
    assert runtime.statistics()["fallbacks"] == {}


def hold() -> None:
    BEGAN.set()
    assert GO_ON.wait(30)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=CONFIG)
async def test_what_came_ahead_of_a_task_that_never_runs_is_forgotten(c: Client, s: Scheduler, a: Worker) -> None:
    runtime, _ = await install(a)
    BEGAN.clear()
    GO_ON.clear()
    value = c.submit(make, 1, nbytes=100 * KB, key="v")
    await wait(value)
    await asyncio.to_thread(runtime._device_memory.space.spill, 1)  # type: ignore[union-attr]
    busy = c.submit(hold, key="busy", priority=1)
    await asyncio.to_thread(BEGAN.wait, 30)
    later = c.submit(right, value, 1, key="later")
    ahead = runtime.store.ahead  # type: ignore[union-attr]
    await async_poll_for(lambda: len(ahead._ahead) == 1 and ahead._coming is None, timeout=30)  # type: ignore[union-attr]
    del later, value
    await async_poll_for(lambda: "v" not in a.data, timeout=30)
    assert not ahead._ahead  # type: ignore[union-attr]
    GO_ON.set()
    await busy


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=CONFIG)
async def test_nothing_comes_ahead_where_there_is_no_room(c: Client, s: Scheduler, a: Worker) -> None:
    runtime, _ = await install(a)
    BEGAN.clear()
    GO_ON.clear()
    values = c.map(make, range(20), nbytes=100 * KB, key=[f"v{i}" for i in range(20)])
    await wait(values)
    # The last value may still be on its way down when its task is done.
    await async_poll_for(lambda: runtime.statistics()["device"]["below_values"] >= 12, timeout=30)
    before = runtime.statistics()["device"]
    busy = c.submit(hold, key="busy", priority=1)
    await asyncio.to_thread(BEGAN.wait, 30)
    later = c.map(right, values, range(20), key=[f"later-{i}" for i in range(20)])
    await async_poll_for(lambda: len(a.state.tasks) >= 41, timeout=30)
    during = runtime.statistics()["device"]
    # At most what was free of the 0.8 that may be kept: no value has left to let another one in.
    assert during["to_and_from_device"]["writes"] == before["to_and_from_device"]["writes"]
    assert during["device_bytes"] <= 0.8 * LIMIT
    GO_ON.set()
    assert all(await c.gather(later))
    await busy
    assert runtime.statistics()["fallbacks"] == {}


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 4)], config=CONFIG)
async def test_tasks_that_do_not_fit_the_device_together_wait_for_each_other(
    c: Client, s: Scheduler, a: Worker
) -> None:
    """Once it is known what such a task returns."""
    with mock.patch.object(test_device_worker, "LIMIT", 7 * MB):
        runtime, backend = await install(a)
    await wait(c.submit(make, 0, 2 * MB, key="make-0"))  # from now on it is known
    values = c.map(make, range(1, 12), nbytes=2 * MB, key=[f"make-{i}" for i in range(1, 12)])
    assert all(await c.gather(c.map(right, values, range(1, 12))))
    device = runtime.statistics()["device"]
    assert device["turn_waits"] > 0
    assert device["turns_passed_by"] == 0
    assert device["failed"] == 0
    assert backend.allocator.peak_bytes() <= 7 * MB
    assert runtime.statistics()["fallbacks"] == {}
    runtime.engine.validate()


async def terms_of(worker: Worker, settings: TierSettings, pending: Any) -> Terms:
    """Only the first worker has a device."""
    if worker.name != 0:
        return Terms(Decision("nothing uses a CUDA device here"), wanted=False)
    return Terms(Decision(), found=cuda.Probe("", "host memory", 1 << 30, device=999), setup=DeviceSetup())


class Frame(Value):
    """A value whose type says that it lies on a device."""

    __module__ = "rmm.stand_in"


def make_frame(i: int, nbytes: int) -> Frame:
    return Frame(pattern(i, nbytes), BACKENDS[-1].allocator.stack.resource)


def slow(frame: Frame, i: int, seconds: float) -> bool:
    time.sleep(seconds)
    return right(frame, i)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1), ("127.0.0.1", 4)], config=CONFIG, timeout=120)
async def test_what_reads_device_values_stays_on_workers_that_can_have_a_device(
    c: Client, s: Scheduler, a: Worker, b: Worker
) -> None:
    """However long its queue is, and idle the others are: the values could not even be rebuilt there."""
    plugin = GpurtScheduler(Settings.load({"shuffle.enabled": False, "tiers.disk-reserve": 0}))
    with (
        mock.patch.object(DeviceMemory, "open", open_on_host_memory),
        mock.patch.object(coexistence, "terms_of", terms_of),
        mock.patch.object(cuda, "possible", return_value=False),
    ):
        await plugin.start(s)
        s.add_plugin(plugin, name=plugin.name)
        parts = on_worker(a)
        assert parts is not None
        for worker in (a, b):
            await worker.heartbeat()
        engine = plugin.placement.engine  # type: ignore[union-attr]
        assert engine is not None
        await async_poll_for(lambda: engine.tables.devices.mixed, timeout=30)
        beat = s.workers[a.address].metrics["gpurt"]
        assert (beat["device_possible"], s.workers[b.address].metrics["gpurt"]["device_possible"]) == (1, 0)
        assert beat["device_limit_bytes"] == 0.8 * LIMIT
        assert 0 < beat["device_free_bytes"] <= 0.8 * LIMIT
        frames = c.map(make_frame, range(5), nbytes=10 * KB, key=[f"frame-{i}" for i in range(5)], workers=[a.address])
        await wait(frames)
        assert s.tasks["frame-0"].type == "rmm.stand_in.Frame"
        reads = [
            c.submit(slow, frame, i, 0.02, key=f"reads-{i}-{n}") for n in range(10) for i, frame in enumerate(frames)
        ]
        assert all(await c.gather(reads))
        assert {tuple(ws.address for ws in s.tasks[f.key].who_has) for f in reads} == {(a.address,)}
        assert engine.tables.residence is plugin.residence
        assert plugin.statistics()["placement"]["devices"]["without"] == 1
        await plugin.uninstall()


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=CONFIG)
async def test_promotion_is_priced_by_what_was_measured(c: Client, s: Scheduler, a: Worker) -> None:
    runtime, _ = await install(a)
    space = runtime._device_memory.space  # type: ignore[union-attr]
    assert space.copies.promotion_rate is None
    values = c.map(make, range(6), nbytes=100 * KB, key=[f"v{i}" for i in range(6)])
    await wait(values)
    for _ in range(3):
        await asyncio.to_thread(space.spill, 1 << 40)
        assert all(await c.gather(c.map(right, values, range(6), pure=False)))
    metrics = space.below[0].metrics
    assert metrics["reads"] >= 18
    assert space.copies.promotion_rate == metrics["read_bytes"] / metrics["read_seconds"]


class Raises:
    """It raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def beside(i: int) -> list[Any]:
    return [make(i, 100 * KB), Raises()]


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=CONFIG)
async def test_a_container_whose_host_member_raises_when_it_comes_back(c: Client, s: Scheduler, a: Worker) -> None:
    """The task got an error of ours, each counted as our failure until we were switched off, and no detach ended."""
    runtime, _ = await install(a)
    value = c.submit(beside, 0, key="v")
    other = c.submit(make, 1, nbytes=100 * KB, key="other")
    await wait([value, other])
    await asyncio.to_thread(runtime._device_memory.space.spill, 1 << 40)  # type: ignore[union-attr]
    for _ in range(3):
        assert isinstance(await c.submit(len, value, pure=False).exception(), ZeroDivisionError)
    assert runtime.statistics()["fallbacks"] == {}
    assert runtime.statistics()["lost_keys"] == 0
    await runtime.uninstall()  # computes it again
    assert await c.submit(len, value, pure=False) == 2
    assert await c.submit(right, other, 1)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=CONFIG)
async def test_too_few_descriptors_to_read_a_device_value_are_not_a_loss(c: Client, s: Scheduler, a: Worker) -> None:
    """The key was given up, though its copy was good: a value that was scattered cannot be computed again."""
    runtime, _ = await install(a)
    space = runtime._device_memory.space  # type: ignore[union-attr]
    space.below.reverse()  # to the disk at once
    value = c.submit(make, 0, nbytes=100 * KB, key="v")
    await wait(value)
    await asyncio.to_thread(space.spill, 1 << 40)
    assert runtime.statistics()["device"]["below_values"] == 1
    (disk,) = runtime._disk.disks
    with mock.patch.object(disk, "read", side_effect=OSError(errno.EMFILE, "x")):
        assert isinstance(await c.submit(right, value, 0, pure=False).exception(), OSError)
    assert await c.submit(right, value, 0, pure=False)
    assert runtime.statistics()["lost_keys"] == 0
    assert runtime.statistics()["fallbacks"] == {}


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=CONFIG)
async def test_what_has_no_task_changes_a_device_value(c: Client, s: Scheduler, a: Worker) -> None:
    """It left the device again by the copy from before, and came back without the change."""
    runtime, _ = await install(a)
    space = runtime._device_memory.space  # type: ignore[union-attr]
    value = c.submit(make, 0, nbytes=100 * KB, key="v")
    await wait(value)
    await asyncio.to_thread(space.spill, 1 << 40)

    def change(dask_worker: Worker) -> None:
        buffer = dask_worker.data["v"].buffer
        ctypes.memset(buffer.ptr, 7, buffer.size)

    await c.run(change)
    await asyncio.to_thread(space.spill, 1 << 40)
    assert runtime.statistics()["device"]["below_values"] == 1
    assert await c.submit(lambda v: bool((v.array() == 7).all()), value)


@pytest.mark.cluster
@pytest.mark.parametrize("hangs", [False, True], ids=["fails", "hangs"])
def test_a_device_that_fails_does_not_keep_a_worker_open(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's close failed half way where the driver refused a call, or waited for good for a box that is held."""
    monkeypatch.setattr(runtime_module, "CLOSE_SECONDS", 0.05)

    def refuses(slabs: HostSlabs, slab: memoryview) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    if not hangs:
        monkeypatch.setattr(HostSlabs, "release", refuses)

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=CONFIG)
    async def test(c: Client, s: Scheduler, a: Worker) -> None:
        runtime, backend = await install(a)
        value = c.submit(make, 0, nbytes=100 * KB, key="v")
        await wait(value)
        space = runtime._device_memory.space  # type: ignore[union-attr]
        await asyncio.to_thread(space.spill, 1 << 40)
        (box,) = space._all()
        if hangs:
            box.lock.acquire()  # by a thread that copies it to a disk, which does not answer
        closing = asyncio.ensure_future(a.close())
        done, _ = await asyncio.wait([closing], timeout=20)
        if hangs:
            box.lock.release()
        assert done
        assert closing.result() == "OK"
        await async_poll_for(lambda: backend.allocator._closed, timeout=30)
        assert runtime._disk.disks[0]._folder.closed

    test()
