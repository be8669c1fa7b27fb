"""Device memory management over real RMM, on ordinary memory (see `host_rmm`): limits, OOM, spilling, retries."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.errors import LostData, TierFull
from dask_gpurt.tiers.device.box import TABLE, BoxState
from dask_gpurt.tiers.device.oom import RetryAlone, SpillOnFailure
from dask_gpurt.tiers.device.pinned import BlockPool, SlabTier
from dask_gpurt.tiers.device.space import DeviceSpace
from dask_gpurt.tiers.engine.entry import IllegalMove
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from tests.tiers.conftest import HostSlabs

pytest.importorskip("rmm")

from tests.tiers.device.host_rmm import HostRmmBackend, host_memory, pattern

if TYPE_CHECKING:
    from pathlib import Path

KB = 1 << 10


class Rig:
    def __init__(
        self,
        tmp_path: Path,
        limit: int,
        *,
        blocks: int | None = None,
        soft: int | None = None,
        below: Any = None,
        base: Any = host_memory,
    ) -> None:
        self.backend = HostRmmBackend(limit, base)
        pool = BlockPool(HostSlabs(), limit_bytes=blocks, block_bytes=16 * KB, slab_bytes=256 * KB)
        pool.give(pool.take((4 << 20) if blocks is None else blocks))  # ready for those that may not wait for a slab
        self.slabs = SlabTier(pool)
        self.disk = DiskTier(str(tmp_path / "disk"), small_bytes=0)
        self.space = DeviceSpace(self.backend, below or [self.slabs, self.disk], limit_bytes=soft)
        self.oom = SpillOnFailure(self.space, self.backend.allocator.headroom_bytes)
        self.backend.callback = self.oom

    def fill(self, n: int, nbytes: int) -> list[Any]:
        return [self.space.put(i, self.backend.make(i, nbytes)) for i in range(n)]

    def check(self, boxes: list[Any], nbytes: int) -> None:
        for i, box in enumerate(boxes):
            assert (box.get().array() == pattern(i, nbytes)).all(), i
        self.space.validate()


def test_what_a_task_left_behind_while_others_left_is_waited_for(tmp_path: Path) -> None:
    """It had a value between the choice of victims and its turn, and its kernels still write."""
    size = 100 * KB
    rig = Rig(tmp_path, 8 * size)
    first, second = rig.fill(2, size)
    behind: list[Any] = []

    def fence() -> None:
        while behind:
            behind.pop()()

    def used(value: Any) -> None:
        if value is first.value:
            changed = second.value
            second.pins += 1
            assert rig.space.touch(second)
            second.lent = True
            behind.append(lambda: ctypes.memset(changed.buffer.ptr, 7, size))
            second.pins -= 1

    rig.backend.fence = fence  # type: ignore[method-assign]
    rig.space.backend.fence = fence  # type: ignore[method-assign]
    rig.backend.on_encode = used
    assert rig.space.spill(2 * size) == 2 * size
    assert set(second.get().array()) == {7}
    rig.check([first], size)


@pytest.mark.parametrize("times", [2, 4])
def test_more_than_the_limit_leaves_and_comes_back(times: int, tmp_path: Path) -> None:
    n, size = 8 * times, 100 * KB
    rig = Rig(tmp_path, 8 * size)
    boxes = rig.fill(n, size)  # allocations fail on the way, and are made possible
    assert rig.oom.calls >= n - 8
    assert rig.backend.allocator.peak_bytes() <= 8 * size
    assert rig.space.device_bytes == rig.backend.allocated_bytes() <= 8 * size
    rig.check(boxes, size)
    rig.check(boxes, size)
    stats = rig.space.statistics()
    assert n - 8 <= stats["to_and_from_device"]["writes"] <= n  # each at most once: copies stay valid
    assert stats["to_and_from_device"]["reads"] >= n - 8
    assert stats["below"]["host"]["written_bytes"] >= (n - 8) * size
    assert rig.backend.fences > 0
    assert rig.oom.exceptions == rig.oom.reentered == 0
    for box in boxes:
        rig.space.remove(box)
    assert rig.slabs.used_bytes == rig.backend.allocated_bytes() == 0
    rig.space.close()


def test_what_a_task_changed_in_place_leaves_with_the_change(tmp_path: Path) -> None:
    size = 100 * KB
    rig = Rig(tmp_path, 4 * size)
    [box] = rig.fill(1, size)
    assert rig.space.spill(size)
    used = rig.slabs.used_bytes
    ctypes.memset(box.get().buffer.ptr, 7, size)
    box.lent = True
    assert not box.clean
    assert rig.space.spill(size)
    assert box.state is BoxState.BELOW
    assert rig.slabs.used_bytes == used  # the old copy is gone
    assert (box.get().array() == 7).all()
    rig.space.validate()
    rig.space.close()


def test_blocks_first_then_the_disk(tmp_path: Path) -> None:
    size = 100 * KB
    rig = Rig(tmp_path, 4 * size, blocks=512 * KB)  # four values of seven blocks each
    boxes = rig.fill(12, size)
    assert rig.slabs.used_bytes > 0
    assert len(rig.disk.files()) >= 3
    rig.check(boxes, size)
    rig.space.close()
    assert rig.disk.files() == []


def test_a_damaged_copy_on_disk_is_lost_and_never_a_wrong_value(tmp_path: Path) -> None:
    size = 50 * KB
    rig = Rig(tmp_path, 2 * size)
    rig.space.below.remove(rig.slabs)
    boxes = rig.fill(4, size)
    below = next(b for b in boxes if b.state is BoxState.BELOW)
    path = tmp_path / "disk" / below.handle.name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(LostData, match="could not be read"):
        below.get()
    rig.space.close()


def test_too_large_for_the_device_is_a_memory_error(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 300 * KB)
    boxes = rig.fill(3, 100 * KB)
    with pytest.raises(MemoryError):
        rig.backend.make(9, 400 * KB)
    assert all(b.state is BoxState.BELOW for b in boxes)  # all was tried
    assert rig.oom.given_up == 1
    rig.check(boxes, 100 * KB)


def test_pinned_values_stay(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 300 * KB)
    boxes = rig.fill(3, 100 * KB)
    boxes[0].pins += 1
    rig.backend.make(9, 200 * KB)
    assert [b.state for b in boxes] == [BoxState.DEVICE, BoxState.BELOW, BoxState.BELOW]
    for b in boxes:
        b.pins += 1
    keep = boxes[0].get()
    with pytest.raises(MemoryError):
        rig.backend.make(9, 250 * KB)
    assert boxes[0].get() is keep


def test_farthest_use_leaves_first_and_clean_ones_before_all(tmp_path: Path) -> None:
    size = 100 * KB
    rig = Rig(tmp_path, 4 * size)
    boxes = rig.fill(4, size)
    for box, use in zip(boxes, [(5,), (9,), (1,), (7,)], strict=True):
        box.next_use = lambda use=use: use
    order = []
    for _ in range(4):
        before = {b.key for b in boxes if b.state is BoxState.DEVICE}
        rig.space.spill(1)
        order.append(next(iter(before - {b.key for b in boxes if b.state is BoxState.DEVICE})))
    assert order == [1, 3, 0, 2]
    boxes[2].get()  # clean now, and used next
    boxes[1].get()
    fresh = rig.space.put("fresh", rig.backend.make(5, size))
    rig.space.spill(1)
    assert boxes[1].state is BoxState.BELOW
    assert fresh.state is boxes[2].state is BoxState.DEVICE
    rig.space.spill(1)
    assert boxes[2].state is BoxState.BELOW  # free of charge, unlike the fresh one
    assert fresh.state is BoxState.DEVICE


def test_a_soft_limit_makes_values_leave_before_an_allocation_fails(tmp_path: Path) -> None:
    size = 100 * KB
    rig = Rig(tmp_path, 10 * size, soft=4 * size)
    boxes = rig.fill(8, size)
    assert rig.oom.calls == 0
    rig.space.balance()
    assert rig.space.device_bytes <= 4 * size
    rig.space.balance(2 * size)
    assert rig.space.device_bytes <= 2 * size
    rig.check(boxes, size)


def test_the_callback_is_not_entered_twice_by_one_thread(tmp_path: Path) -> None:
    """Packing a value may allocate; when that fails too, it is skipped, and another leaves."""
    size = 100 * KB
    rig = Rig(tmp_path, 4 * size)
    boxes = rig.fill(4, size)
    packed: list[Any] = []

    def allocate_while_packing(value: Any) -> None:
        if not packed:
            packed.append(1)
            rig.backend.make(99, size)  # fails: all is taken, and the callback is busy

    rig.backend.on_encode = allocate_while_packing
    value = rig.backend.make(50, size)
    assert rig.oom.reentered == 1
    assert sum(b.state is BoxState.BELOW for b in boxes) == 1
    assert boxes[0].state is BoxState.DEVICE
    del value
    rig.check(boxes, size)


def test_a_box_that_another_thread_holds_is_passed_over(tmp_path: Path) -> None:
    size = 100 * KB
    rig = Rig(tmp_path, 4 * size)
    boxes = rig.fill(4, size)
    with boxes[0].lock, boxes[1].lock:
        rig.backend.make(50, size)  # would hang if it waited
    assert [b.state for b in boxes] == [BoxState.DEVICE, BoxState.DEVICE, BoxState.BELOW, BoxState.DEVICE]


def test_what_cannot_be_packed_stays_and_is_not_tried_again(tmp_path: Path) -> None:
    size = 100 * KB
    rig = Rig(tmp_path, 4 * size)
    boxes = rig.fill(4, size)
    bad = boxes[0].value

    def refuse(value: Any) -> None:
        if value is bad:
            raise TypeError("cannot be packed")

    rig.backend.on_encode = refuse
    for i in range(6):
        rig.backend.make(i, size)
    assert boxes[0].unspillable
    assert rig.space.copies.unspillable == 1
    assert "cannot be packed" in rig.space.copies.last_error
    rig.check(boxes, size)


def test_nothing_below_takes_it(tmp_path: Path) -> None:
    class Full:
        used_bytes = 0

        def write(self, groups: Any) -> Any:
            raise TierFull("full")

    rig = Rig(tmp_path, 400 * KB, below=[Full()])
    boxes = rig.fill(4, 100 * KB)
    with pytest.raises(MemoryError):
        rig.backend.make(9, 100 * KB)
    assert all(b.state is BoxState.DEVICE for b in boxes)
    assert rig.space.copies.metrics["write_failures"] == 4
    rig.check(boxes, 100 * KB)


def test_an_exception_in_our_callback_does_not_travel_through_rmm(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 400 * KB)
    rig.fill(4, 100 * KB)

    def broken() -> int:
        raise RuntimeError("ours")

    rig.backend.callback = SpillOnFailure(rig.space, broken)
    with pytest.raises(MemoryError):
        rig.backend.make(9, 100 * KB)
    assert rig.backend.callback.exceptions == 1
    assert "ours" in rig.backend.callback.last_error


def test_room_that_cannot_be_used_ends_the_attempts(tmp_path: Path) -> None:
    """Fragmentation: the count says that there is room, and allocation fails; RMM itself would try for ever."""
    rig = Rig(tmp_path, 4000 * KB)
    rig.fill(30, 100 * KB)
    oom = SpillOnFailure(rig.space, lambda: 1 << 40)
    answers = [oom(10 * KB) for _ in range(31)]
    assert answers == [True] * 30 + [False]
    assert (oom.fragmented, oom.given_up) == (31, 1)


def test_a_pool_in_pieces_takes_as_many_values_as_come(tmp_path: Path) -> None:
    """Every second block is free: there is room by the count each time, and no piece that is long enough."""
    import rmm.mr

    size, n = 64 * KB, 128
    rig = Rig(
        tmp_path,
        n * size,
        base=lambda: rmm.mr.PoolMemoryResource(host_memory(), initial_pool_size=n * size, maximum_pool_size=n * size),
    )
    boxes = rig.fill(n, size)
    for box in boxes[::2]:
        rig.space.remove(box)
    left = boxes[1::2]
    longer = [rig.space.put(i, rig.backend.make(i, 2 * size)) for i in range(40)]
    assert rig.oom.fragmented > 8
    assert rig.oom.given_up == 0
    assert all((box.get().array() == pattern(2 * i + 1, size)).all() for i, box in enumerate(left))
    rig.check(longer, 2 * size)


def test_a_pool_below_the_limit(tmp_path: Path) -> None:
    """RMM's own pool, with the callback outside of it."""
    size = 100 * KB
    import rmm.mr

    rig = Rig(
        tmp_path,
        8 * size,
        base=lambda: rmm.mr.PoolMemoryResource(host_memory(), initial_pool_size=8 * size, maximum_pool_size=8 * size),
    )
    boxes = rig.fill(24, size)
    assert rig.oom.calls > 0
    rig.check(boxes, size)


def test_many_threads_allocate_at_once(tmp_path: Path) -> None:
    """Tasks make, read and drop values while all fight for a limit of a quarter; every value is right."""
    size, n, threads = 40 * KB, 160, 8
    rig = Rig(tmp_path, n // 4 * size, blocks=2 << 20)
    boxes: dict[int, Any] = {}
    failures: list[str] = []

    def work(k: int) -> None:
        for i in range(k, n, threads):
            boxes[i] = rig.space.put(i, rig.backend.make(i, size))
            for j in (i, (i * 7) % (i + 1)):
                box = boxes.get(j)
                if box is None:
                    continue
                try:
                    if not (box.get().array() == pattern(j, size)).all():
                        failures.append(f"{j} is wrong")
                except LostData:
                    if box.state is not BoxState.GONE:
                        failures.append(f"{j} is lost")
            if i % 5 == 4:
                rig.space.remove(boxes.pop(i))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    assert failures == []
    assert rig.oom.exceptions == 0, rig.oom.last_error
    assert rig.backend.allocator.peak_bytes() <= n // 4 * size
    gc.collect()
    for i, box in boxes.items():
        assert (box.get().array() == pattern(i, size)).all()
    rig.space.validate()
    rig.space.close()
    assert rig.backend.allocated_bytes() == 0


# ---------------------------------------------------------------------------------------------- alone, and the report


def test_a_task_that_fails_is_run_again_alone(tmp_path: Path) -> None:
    async def main() -> None:
        size = 100 * KB
        rig = Rig(tmp_path, 8 * size)
        boxes = rig.fill(4, size)
        running = 3
        neighbour = rig.backend.make(77, 4 * size)  # of another task that runs
        retry = RetryAlone(rig.space, lambda: running, wait_seconds=30)

        async def run() -> Any:
            assert running == 0
            try:
                return await asyncio.to_thread(rig.backend.make, 5, 7 * size)
            except MemoryError as e:
                return e

        first = await asyncio.to_thread(_caught, lambda: rig.backend.make(5, 7 * size))
        assert isinstance(first, MemoryError)
        again = asyncio.ensure_future(retry.again(run, _failed, _noted))
        entered = asyncio.ensure_future(retry.enter())
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not again.done()
        late = asyncio.ensure_future(retry.enter())
        del neighbour
        running = 0
        value = await again
        assert (value.array() == pattern(5, 7 * size)).all()
        await asyncio.gather(entered, late)
        assert retry.statistics() == {"retried_alone": 1, "succeeded": 1, "failed": 0}
        del value
        rig.check(boxes, size)

    asyncio.run(main())


def test_the_report_names_who_holds_the_memory(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(tmp_path, 1000 * KB)
        boxes = [rig.space.put(f"key-{i}", rig.backend.make(i, n * KB)) for i, n in enumerate((100, 300, 200))]
        boxes[1].pins += 1
        retry = RetryAlone(rig.space, lambda: 0)

        async def run() -> Any:
            return await asyncio.to_thread(_caught, lambda: rig.backend.make(9, 900 * KB))

        error = await retry.again(run, _failed, _noted)
        assert isinstance(error, MemoryError)
        (note,) = error.__notes__
        assert "300.00 kiB  key-1  (in use)" in note
        assert "key-0" not in note  # it has left
        assert "Remedy: smaller partitions" in note
        assert retry.failed == 1

    asyncio.run(main())


def test_a_task_that_waits_for_another_does_not_wait_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        rig = Rig(tmp_path, 1000 * KB)
        retry = RetryAlone(rig.space, lambda: 1, wait_seconds=0.05)

        async def run() -> Any:
            await retry.enter()  # what the one that runs alone waits for
            return 7

        assert await retry.again(run, _failed, _noted) == 7

    asyncio.run(main())


def _caught(call: Any) -> Any:
    try:
        return call()
    except MemoryError as e:
        return e


def _failed(outcome: Any) -> bool:
    return isinstance(outcome, MemoryError)


def _noted(outcome: Any, note: str) -> Any:
    outcome.add_note(note)
    return outcome


def test_blocks_grow_lazily_and_are_used_again() -> None:
    pool = BlockPool(HostSlabs(), limit_bytes=10_000, block_bytes=1000, slab_bytes=3000)
    assert pool.allocated_bytes == 0
    a = pool.take(2500)
    assert (len(a), pool.allocated_bytes, len(pool._free)) == (3, 3000, 0)
    b = pool.take(1)
    assert (len(b), pool.allocated_bytes) == (1, 6000)
    pool.give(a)
    c = pool.take(3000)
    assert pool.allocated_bytes == 6000
    d = pool.take(4000)
    assert pool.allocated_bytes == 9000
    e = pool.take(1001)  # the last slab is smaller
    assert pool.allocated_bytes == 10_000
    with pytest.raises(TierFull, match="all 10000 bytes"):
        pool.take(1)
    assert len({*b, *c, *d, *e}) == 10
    assert pool.take(0) == []
    pool.close()
    assert pool.allocated_bytes == 0


def test_a_system_without_memory_for_a_slab_is_a_full_tier() -> None:
    class None_(HostSlabs):
        def allocate(self, nbytes: int) -> memoryview:
            raise MemoryError("cudaHostAlloc")

    with pytest.raises(TierFull, match="cudaHostAlloc"):
        BlockPool(None_(), limit_bytes=None).take(1)
    with pytest.raises(ValueError, match="block_bytes is 0"):
        BlockPool(HostSlabs(), limit_bytes=None, block_bytes=0)


def test_blocks_from_several_threads_never_overlap() -> None:
    pool = BlockPool(HostSlabs(), limit_bytes=None, block_bytes=100, slab_bytes=1000)
    taken: set[tuple[int, int]] = set()
    lock = threading.Lock()

    def work(_: int) -> None:
        for i in range(50):
            blocks = pool.take(100 * (i % 7))
            with lock:
                assert not taken & set(blocks)
                taken.update(blocks)
            if i % 2:
                with lock:
                    taken.difference_update(blocks)
                pool.give(blocks)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


def test_moves_are_those_of_the_table(tmp_path: Path) -> None:
    events = {event for _, event in TABLE}
    for state in BoxState:
        for event in events:
            rig = Rig(tmp_path / f"{state.value}-{event}", 400 * KB)
            (box,) = rig.fill(1, 100 * KB)
            box.state = state
            after = TABLE.get((state, event))
            if after is None:
                with pytest.raises(IllegalMove, match=f"is {state.value}, where '{event}' is not allowed"):
                    rig.space._move(box, event)
                assert box.state is state
            else:
                rig.space._move(box, event, b"")
                assert box.state is after
