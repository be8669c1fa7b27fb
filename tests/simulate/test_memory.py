"""A worker's memory: what is spilled, when, and that the sums are right."""

from __future__ import annotations

import random

import pytest

from dask_gpurt.simulate.clock import VirtualLoop
from dask_gpurt.simulate.memory import DISK, MEMORY, Store
from dask_gpurt.simulate.model import Cluster, TaskSpec, Workload
from dask_gpurt.simulate.run import simulate


def run(loop: VirtualLoop) -> None:
    while loop.step():
        pass


def test_the_least_recently_used_goes_and_comes_back() -> None:
    loop = VirtualLoop()
    told: list[tuple[str, str | None, int]] = []
    store = Store(loop, 100, write=10, read=20, resides=lambda *a: told.append(a))
    assert store.put("a", 60) == 0
    assert store.put("b", 40) == 0
    store.use(["a"])  # now b is the older one
    assert store.put("c", 30) == pytest.approx(4.0)  # 40 bytes at 10 B/s
    assert store.settled_at == pytest.approx(4.0)
    assert store.where("b") == MEMORY, "it is still being written"
    run(loop)
    assert {k: store.where(k) for k in "abc"} == {"a": MEMORY, "b": DISK, "c": MEMORY}
    assert (store.resident_bytes, store.on_disk_bytes, store.peak_bytes) == (90, 40, 130)
    began, loaded = store.use(["b"])
    # Read at 20 B/s; then a (older than c now? no: a was used before c came) is written to make room.
    assert began == pytest.approx(4.0)
    assert loaded == pytest.approx(4.0 + 2.0 + 6.0)
    run(loop)
    assert store.where("a") == DISK
    assert (store.spilled_bytes, store.read_bytes) == (100, 40)
    assert told[0] == ("a", MEMORY, 60)
    assert ("b", DISK, 40) in told


def test_inputs_of_running_tasks_stay() -> None:
    loop = VirtualLoop()
    store = Store(loop, 100, write=10, read=20)
    store.put("a", 90)
    store.pin(["a"])
    store.put("b", 50)
    run(loop)
    assert store.where("a") == MEMORY
    assert store.where("b") == DISK
    store.unpin(["a"])
    store.put("c", 90)
    run(loop)
    assert store.where("a") == DISK


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_right_whatever_happens(seed: int) -> None:
    rnd = random.Random(seed)
    loop = VirtualLoop()
    total = 0

    def changed(nbytes: int) -> None:
        nonlocal total
        total += nbytes
        assert total >= 0

    store = Store(loop, 1000, write=500, read=900, changed=changed)
    pinned: list[str] = []
    for step in range(400):
        key = str(rnd.randrange(40))
        what = rnd.random()
        if what < 0.5:
            store.put(key, rnd.randrange(1, 200))
        elif what < 0.7:
            store.use([key])
        elif what < 0.8:
            store.drop(key)
        elif what < 0.9 or not pinned:
            store.pin([key])
            pinned.append(key)
        else:
            store.unpin([pinned.pop()])
        if step % 3 == 0:
            loop.step()
        in_memory = sum(n for k, n in store.sizes.items() if store.where(k) == MEMORY)
        assert store.resident_bytes == in_memory == total
        assert store.on_disk_bytes >= 0
    store.unpin(pinned)
    run(loop)
    store.put("last", 1)
    run(loop)
    assert store.resident_bytes <= 1000
    for key in list(store.sizes):
        store.drop(key)
    assert store.resident_bytes == total == 0


def test_in_the_background_nobody_waits_until_memory_is_a_quarter_over() -> None:
    loop = VirtualLoop()
    uses = {"a": (3,), "b": (1,), "c": None, "d": (2,)}
    store = Store(loop, 100, 10.0, 10.0, in_background=True, next_use=uses.get)
    for key in ("a", "b"):
        assert store.put(key, 50) == 0.0
    assert store.settled_at == 0.0
    # 25 over the limit: written, and nobody waits. Of a and b, a is used later.
    assert store.put("d", 20) == 0.0
    assert store.settled_at == 0.0
    assert store.spilled_bytes == 50
    # Now tasks wait for the write of a. c is used by nobody, but the newest leaves last.
    assert store.put("c", 40) == 0.0
    assert store.settled_at == pytest.approx(5.0)
    run(loop)
    assert store.where("a") == DISK
    assert store.resident_bytes <= 110
    # d went too, then c for a that comes back, and b for e; a keeps its copy, and leaves without a second write.
    began, done = store.use(["a"])
    assert (began, done) == (loop.now, pytest.approx(loop.now + 5.0))
    assert store.put("e", 60) == loop.now
    assert store.where("a") == DISK
    assert store.spilled_bytes == 50 + 20 + 40 + 50


@pytest.mark.parametrize("in_background", [False, True])
def test_waiting_for_room_counts_as_waiting_for_the_disk(in_background: bool) -> None:
    """Ten results of 2 s of writing each do not fit, one at a time: the slot that does not compute waits for the disk.

    But after the last task, when no other is there to wait.
    """
    tasks = {("a", i): TaskSpec((), 1.0, 100_000_000, True) for i in range(10)}
    cluster = Cluster(1, memory_bytes=100_000_000, disk_write=50e6, spill_in_background=in_background)
    made = simulate(Workload("w", tasks, list(tasks)), cluster, "stock")
    assert made.busy_seconds == pytest.approx(10)
    assert made.disk_seconds == pytest.approx(18, abs=0.1)
    assert made.network_seconds == 0
