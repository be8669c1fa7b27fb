"""What makes room, by the allocator's own count: shared memory, other allocators, marks, blocks that are ready."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.model.tier import Tier
from dask_gpurt.tiers.device.box import BoxState
from dask_gpurt.tiers.device.oom import SpillOnFailure
from dask_gpurt.tiers.device.pinned import BlockPool, SlabTier
from dask_gpurt.tiers.device.space import DeviceSpace
from tests.tiers.conftest import HostSlabs

pytest.importorskip("rmm")

from tests.tiers.device.host_rmm import Elsewhere, HostRmmBackend, pattern
from tests.tiers.device.test_space import KB, Rig

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 100 * KB


def test_a_view_that_leaves_makes_no_room_while_its_memory_is_in_use(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 4 * SIZE)
    whole = rig.space.put("whole", rig.backend.make(0, SIZE))
    view = rig.space.put("view", whole.value.view())
    whole.pins += 1
    assert rig.space.device_bytes == SIZE  # one allocation
    assert rig.oom(SIZE) is False  # the allocator got nothing back: RMM must not try again
    assert view.state is BoxState.BELOW
    assert (rig.oom.made_bytes, rig.oom.given_up, rig.space.left_without_room) == (0, 1, 1)
    assert rig.space.device_bytes == SIZE
    whole.pins -= 1
    assert rig.oom(SIZE) is True
    assert rig.oom.made_bytes == SIZE
    assert rig.space.device_bytes == rig.backend.allocated_bytes() == 0
    for box in (view, whole):
        assert (box.get().array() == pattern(0, SIZE)).all()
    rig.space.validate()
    assert rig.space.device_bytes == 2 * SIZE  # they came back apart


def test_all_views_leave_where_one_alone_makes_no_room(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 2 * SIZE)
    first = rig.backend.make(0, SIZE)
    boxes = [rig.space.put(i, v) for i, v in enumerate([first, first.view(), first.view()])]
    other = rig.backend.make(1, SIZE)
    del first
    rig.backend.make(2, SIZE)  # fails at first
    assert [b.state for b in boxes] == [BoxState.BELOW] * 3
    assert rig.oom.calls == 1
    assert (other.array() == pattern(1, SIZE)).all()


def test_an_object_that_a_user_holds_is_not_counted_as_room(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 2 * SIZE)
    held = rig.backend.make(0, SIZE)
    rig.space.put(0, held)
    rig.space.put(1, rig.backend.make(1, SIZE))
    assert rig.space.make_room(1) == SIZE  # of the other
    assert rig.space.left_without_room == 1


def test_memory_that_came_past_the_allocator_is_said_and_never_spilled_for_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 3 * SIZE, soft=4 * SIZE)
    elsewhere = rig.space.put("elsewhere", Elsewhere(pattern(7, 2 * SIZE)))
    boxes = rig.fill(3, SIZE)
    rig.backend.make(9, SIZE)
    assert elsewhere.state is BoxState.DEVICE
    assert [b.state for b in boxes].count(BoxState.BELOW) == 1
    stats = rig.space.statistics()
    assert (stats["outside_values"], stats["outside_bytes"]) == (1, 2 * SIZE)
    for b in boxes:
        b.pins += 1
    assert rig.oom(SIZE) is False
    # It does count among the kept bytes, and leaves for their limit.
    assert rig.space.device_bytes == 4 * SIZE
    rig.space.balance(SIZE)
    assert elsewhere.state is BoxState.BELOW
    assert (elsewhere.get().array() == pattern(7, 2 * SIZE)).all()


def test_one_failure_makes_room_down_to_the_low_water_mark(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 8 * SIZE)
    boxes = rig.fill(8, SIZE)
    rig.backend.callback = oom = SpillOnFailure(
        rig.space, rig.backend.allocator.headroom_bytes, low_water_bytes=4 * SIZE
    )
    new = [rig.backend.make(i, SIZE) for i in range(20, 24)]
    assert (oom.calls, rig.backend.fences) == (1, 1)
    assert [b.state for b in boxes].count(BoxState.BELOW) == 4
    assert len(new) == 4


def test_values_leave_above_the_high_mark_before_an_allocation_fails(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 10 * SIZE)
    rig.space.high_bytes = 6 * SIZE
    boxes = rig.fill(4, SIZE)
    assert not rig.space.over
    task = rig.backend.make(50, 4 * SIZE)  # of a task at work
    assert rig.space.over
    rig.space.balance()
    assert rig.backend.allocated_bytes() <= 6 * SIZE
    assert rig.oom.calls == 0
    rig.space.spill(1 << 40)
    assert not rig.space.over  # nothing is kept that could leave
    assert all(b.state is BoxState.BELOW for b in boxes)
    del task


class CountedSlabs(HostSlabs):
    """Remembers in which threads slabs were allocated."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.may = threading.Event()
        self.may.set()

    def allocate(self, nbytes: int) -> memoryview:
        self.threads.append(threading.current_thread().name)
        assert self.may.wait(30)
        return super().allocate(nbytes)


def small_pool(slabs: Any, limit: int | None = None) -> BlockPool:
    return BlockPool(slabs, limit_bytes=limit, block_bytes=16 * KB, slab_bytes=64 * KB)


def test_a_failed_allocation_locks_pages_rather_than_to_write_to_a_disk(tmp_path: Path) -> None:
    slabs = CountedSlabs()
    rig = Rig(tmp_path, 4 * SIZE)
    rig.space.below[0] = SlabTier(small_pool(slabs))
    boxes = rig.fill(4, SIZE)
    rig.backend.make(9, SIZE)
    assert slabs.threads == [threading.current_thread().name] * 2
    (gone,) = [b for b in boxes if b.state is BoxState.BELOW]
    assert gone.tier is Tier.HOST
    rig.check(boxes, SIZE)


def test_blocks_are_kept_ready_by_a_thread_of_their_own(tmp_path: Path) -> None:
    slabs = CountedSlabs()
    pool = small_pool(slabs, limit=512 * KB)
    pool.keep_ahead(2 * SIZE)
    until(lambda: pool.free_bytes >= 2 * SIZE)
    rig = Rig(tmp_path, 4 * SIZE)
    rig.space.below[0] = SlabTier(pool)
    boxes = rig.fill(4, SIZE)
    rig.backend.make(9, SIZE)
    (gone,) = [b for b in boxes if b.state is BoxState.BELOW]
    assert gone.tier is Tier.HOST
    until(lambda: pool.free_bytes >= 2 * SIZE)  # again
    assert set(slabs.threads) == {"gpurt-pinned"}
    rig.check(boxes, SIZE)
    rig.space.close()
    assert not [t for t in threading.enumerate() if t.name == "gpurt-pinned"]


def test_a_slab_that_takes_long_delays_none_that_needs_no_slab(tmp_path: Path) -> None:
    slabs = CountedSlabs()
    pool = small_pool(slabs)
    first = pool.take(64 * KB)
    slabs.may.clear()
    slow = threading.Thread(target=pool.take, args=(64 * KB,))
    slow.start()
    until(lambda: len(slabs.threads) == 2)
    pool.give(first[:1])  # neither of these waits for the slab
    assert pool.take(16 * KB) == first[:1]
    slabs.may.set()
    slow.join(30)
    pool.close()


def test_neighbouring_blocks_are_one_target() -> None:
    tier = SlabTier(small_pool(HostSlabs()))
    blocks = tier.pool.take(100 * KB)
    sizes = [p.nbytes for p in tier.span(blocks, 8 * KB, 90 * KB)]
    assert sizes == [56 * KB, 34 * KB]  # two slabs of four blocks
    assert [p.nbytes for p in tier.span(blocks[::-1], 0, 100 * KB)] == [16 * KB] * 6 + [4 * KB]


def test_a_copy_that_fails_is_waited_for_before_its_blocks_are_given_back() -> None:
    tier = SlabTier(small_pool(HostSlabs()))
    ends: list[str] = []

    class Frame:
        nbytes = 10

        def __init__(self, name: str) -> None:
            self.name = name

        def copy_to(self, targets: Any) -> None:
            if self.name == "b":
                raise RuntimeError("the stream is broken")

        def finish(self) -> None:
            ends.append(f"{self.name} {tier.pool.free_bytes // KB}")

    with pytest.raises(RuntimeError, match="the stream is broken"):
        tier.write([(0, [Frame("a"), Frame("b"), Frame("c")])])
    assert ends == ["a 48", "b 48"]
    assert tier.used_bytes == 0
    assert tier.pool.free_bytes == 64 * KB


def test_what_the_driver_has_free_counts_as_well() -> None:
    """Another process on the same device: far below our own limit, nothing is left."""
    backend = HostRmmBackend(10 * SIZE)
    allocator = backend.allocator
    free = [10 * SIZE]
    allocator._free_bytes = lambda: free[0]
    assert allocator.headroom_bytes() == 10 * SIZE
    kept = [backend.make(i, SIZE) for i in range(4)]
    free[0] = SIZE
    assert allocator.headroom_bytes() == SIZE
    del kept[2:]  # the pool keeps what was freed
    assert allocator.headroom_bytes() == 3 * SIZE
    free[0] = 100 * SIZE
    assert allocator.headroom_bytes() == 8 * SIZE
    pool = small_pool(HostSlabs())
    space = DeviceSpace(backend, [SlabTier(pool)], limit_bytes=None)
    boxes = [space.put(i, v) for i, v in enumerate(kept)]
    kept.clear()
    free[0] = -2 * SIZE  # so that the pool has none either
    oom = SpillOnFailure(space, allocator.headroom_bytes)
    pool.give(pool.take(2 * SIZE))  # blocks are ready
    assert oom(SIZE) is True
    assert oom.fragmented == 0  # it is short of memory, and says so
    assert any(b.state is BoxState.BELOW for b in boxes)


def until(condition: Any) -> None:
    """Wait for a thread; with a deadline."""
    deadline = threading.Event()
    for _ in range(3000):
        if condition():
            return
        deadline.wait(0.01)
    raise AssertionError("it did not happen")


class Rows:
    """A `HeldOnDevice` over values of the stand-in; one that is in use leaves without making room."""

    def __init__(self, backend: HostRmmBackend, n: int) -> None:
        self.values = [backend.make(100 + i, SIZE) for i in range(n)]
        self.in_use: list[Any] = []
        self.fails = False

    @property
    def nbytes(self) -> int:
        return SIZE * len(self.values)

    def leave(self, nbytes: int) -> int:
        if self.fails:
            raise MemoryError("of the host")
        left = 0
        while self.values and left < nbytes:
            self.values.pop()
            left += SIZE
        return left


def test_what_others_hold_leaves_after_copies_and_before_values(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 8 * SIZE)
    boxes = rig.fill(4, SIZE)
    rig.space.spill(2 * SIZE)
    clean = [b for b in boxes if b.state is BoxState.BELOW]
    for box in clean:
        box.get()
    rig.space.held = rows = Rows(rig.backend, 4)
    kept = [rig.backend.make(i, 2 * SIZE) for i in (50, 51)]
    assert [b.state for b in clean] == [BoxState.BELOW] * 2  # free of charge
    assert len(rows.values) == 2
    assert rig.space.held_left_bytes == 2 * SIZE
    assert rig.space.fixed_bytes == 6 * SIZE
    kept.append(rig.backend.make(52, 2 * SIZE))
    assert not rows.values
    assert [b.state for b in boxes].count(BoxState.DEVICE) == 2
    kept.append(rig.backend.make(53, SIZE))  # now values leave
    assert [b.state for b in boxes].count(BoxState.DEVICE) == 1
    assert rig.space.statistics()["held_left_bytes"] == 4 * SIZE
    rig.space.held = None
    del kept
    rig.check(boxes, SIZE)


def test_what_is_in_use_makes_no_room_and_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 4 * SIZE)
    rig.space.held = rows = Rows(rig.backend, 4)
    rows.in_use = rows.values[1:]
    assert rig.oom(2 * SIZE) is True
    assert rig.oom.made_bytes == SIZE  # of four that left, the allocator got back one
    assert not rows.values
    assert rig.oom(SIZE) is False  # RMM must not try again


def test_that_others_cannot_let_go_is_no_error_of_an_allocation(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 4 * SIZE)
    boxes = rig.fill(2, SIZE)
    rig.space.held = rows = Rows(rig.backend, 2)
    rows.fails = True
    rig.backend.make(9, SIZE)
    assert [b.state for b in boxes].count(BoxState.BELOW) == 1
    assert (rig.oom.exceptions, rig.space.copies.last_error) == (0, "MemoryError: of the host")
    assert len(rows.values) == 2


def test_the_limit_of_kept_values_is_none_of_what_others_hold(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 10 * SIZE, soft=2 * SIZE)
    boxes = rig.fill(3, SIZE)
    rig.space.held = rows = Rows(rig.backend, 4)
    rig.space.balance()
    assert ([b.state for b in boxes].count(BoxState.BELOW), len(rows.values)) == (1, 4)
    rig.space.high_bytes = 4 * SIZE
    rig.space.balance()
    assert ([b.state for b in boxes].count(BoxState.BELOW), len(rows.values)) == (1, 2)
    rig.space.rests = True
    rig.space.high_bytes = 0
    assert rig.space.balance() == 0
