"""What a task changes in place stays changed, as with Dask's own spilling; what none changed is not written again."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster, wait

from dask_gpurt.tiers.engine import io_threads, loading
from dask_gpurt.tiers.engine.entry import Entry, State
from dask_gpurt.tiers.engine.io_threads import read_value
from dask_gpurt.tiers.storage.codec import PickleCodec
from tests.tiers.storage.test_faults import LAYOUTS, every_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.tiers.conftest import Rig


async def bring(rig: Rig, key: Any, *, task: Any = "task") -> Any:
    """What a task of that key gets, as `Execute` does it; nothing holds the value afterwards."""
    pinned = await rig.store.ensure([key])
    rig.store.lend(task, pinned)
    return pinned


async def spill(rig: Rig) -> None:
    rig.spill_all()
    await rig.settle()
    rig.engine.shrink(0)
    rig.validate()


async def change(rig: Rig, key: Any, by: float, *, task: Any = "task") -> None:
    pinned = await bring(rig, key, task=task)
    rig.store[key][...] += by
    rig.store.release(pinned)


def slow_writes(rig: Rig) -> tuple[threading.Event, threading.Event]:
    """Writes to the disk are done, which sets the first event, and end after the second is set."""
    begun, go_on = threading.Event(), threading.Event()
    write = rig.disk.write

    def slow(groups: Any) -> Any:
        handle = write(groups)
        begun.set()
        assert go_on.wait(30)
        return handle

    rig.disk.write = slow  # type: ignore[method-assign]
    return begun, go_on


def value_of(rig: Rig, key: Any) -> float:
    return float(rig.store[key].flat[0])


@every_layout
def test_a_change_stays(run_rig: Callable[..., None], layout: str) -> None:
    async def test(rig: Rig) -> None:
        rig.store["x"] = np.zeros(20_000)
        for _ in range(3):
            await spill(rig)
            assert "x" in rig.store.slow
            await change(rig, "x", 1)
        await spill(rig)
        assert value_of(rig, "x") == 3
        assert rig.engine.counters.unchanged == 0
        assert len(rig.disk.files()) == 1

    run_rig(test, **LAYOUTS[layout])


VALUES: dict[str, Any] = {
    "array": np.arange(20_000.0),
    "reversed": np.arange(20_000.0)[::-1],
    "frame": pd.DataFrame({"a": range(5000), "t": ["x", None, "zz", "y"] * 1250}),
    "objects": pd.Series([{"a": i} for i in range(2000)]),
    "text": "words " * 5000,
    "list": [np.ones(5000), b"0" * 9000, {"k": (1, 2.5)}],
}


@every_layout
@pytest.mark.parametrize("kind", VALUES)
def test_what_was_not_changed_is_not_written_again(run_rig: Callable[..., None], kind: str, layout: str) -> None:
    async def test(rig: Rig) -> None:
        rig.store["x"] = VALUES[kind]
        await spill(rig)
        assert "x" in rig.store.slow
        # What pickle makes of an object that it has made itself may be other bytes than the first time.
        rig.store.release(await bring(rig, "x"))
        await spill(rig)
        written = rig.engine.counters.cumulative["disk-write", "count"]
        unchanged = rig.engine.counters.unchanged
        rig.store.release(await bring(rig, "x"))
        await spill(rig)
        assert "x" in rig.store.slow
        assert rig.engine.counters.cumulative["disk-write", "count"] == written
        assert rig.engine.counters.unchanged == unchanged + 1

    run_rig(test, **LAYOUTS[layout])


def test_the_next_to_leave_is_compared_ahead(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        for key in range(4):
            rig.store[key] = np.full(20_000, key)
        await rig.settle()
        await spill(rig)
        for key in (2, 1, 3):
            rig.store.release(await bring(rig, key))
        await rig.settle()
        # Three of them fit, and a fourth would not.
        assert rig.engine.books.victims.first() is rig.store.entry(2)
        assert [rig.store.entry(key).clean for key in (2, 1, 3)] == [True, False, False]
        assert rig.engine.counters.unchanged == 1
        writes = rig.engine.counters.cumulative["disk-write", "count"]
        rig.store.release(await bring(rig, 0))
        assert 2 in rig.store.slow
        await rig.settle()
        assert rig.store.entry(1).clean
        assert rig.engine.counters.cumulative["disk-write", "count"] == writes
        rig.validate()

    run_rig(test, budget=500_000)


def test_a_peer_and_a_new_name_change_nothing(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        rig.store["a"] = np.zeros(20_000)
        await spill(rig)
        rig.store.release(await rig.store.ensure(["a"]))
        await spill(rig)
        rig.store.release(await bring(rig, "a", task="b"))  # which is another name of it
        await spill(rig)
        assert rig.engine.counters.clean_drops == 2
        assert rig.engine.counters.unchanged == 0

    run_rig(test)


def test_all_names_of_a_changed_object(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        rig.store["a"] = np.zeros(20_000)
        await spill(rig)
        pinned = await bring(rig, "a", task="b")
        rig.store["b"] = rig.store["a"]
        rig.store.release(pinned)
        assert rig.store.entry("b").clean
        await change(rig, "b", 1)
        await spill(rig)
        assert set(rig.store.slow) == {"a", "b"}
        assert value_of(rig, "a") == value_of(rig, "b") == 1

    run_rig(test)


def test_a_name_of_what_was_lent_is_compared(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        rig.store["a"] = np.zeros(20_000)
        await spill(rig)
        await change(rig, "a", 1)
        pinned = await bring(rig, "a", task="b")
        rig.store["b"] = rig.store["a"]
        rig.store.release(pinned)
        del rig.store["a"]
        await spill(rig)
        assert value_of(rig, "b") == 1

    run_rig(test)


def test_changed_while_it_is_written(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        begun, go_on = slow_writes(rig)
        rig.store["x"] = np.zeros(20_000)
        rig.spill_all()
        assert rig.store.entry("x").state is State.MOVING
        await rig.engine.offload(begun.wait, 30)
        await change(rig, "x", 1)
        go_on.set()
        await rig.settle()
        await spill(rig)
        assert value_of(rig, "x") == 1

    run_rig(test)


def test_a_name_that_comes_while_the_value_is_compared(
    run_rig: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(rig: Rig) -> None:
        rig.store["a"] = np.zeros(20_000)
        await spill(rig)
        await change(rig, "a", 1)
        begun, go_on = threading.Event(), threading.Event()
        compare = io_threads.is_copy

        def slow(*args: Any) -> bool:
            same = compare(*args)
            begun.set()
            assert go_on.wait(30)
            return same

        monkeypatch.setattr(io_threads, "is_copy", slow)
        rig.spill_all()
        assert rig.store.entry("a").state is State.MOVING
        await rig.engine.offload(begun.wait, 30)
        pinned = await bring(rig, "a", task="b")
        rig.store["b"] = rig.store["a"]
        go_on.set()
        await rig.settle()
        rig.store.release(pinned)
        await spill(rig)
        assert set(rig.store.slow) == {"a", "b"}
        assert value_of(rig, "a") == value_of(rig, "b") == 1

    run_rig(test)


def test_a_name_that_comes_while_a_changed_value_is_written(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        begun, go_on = slow_writes(rig)
        rig.store["a"] = np.zeros(20_000)
        rig.spill_all()
        assert rig.store.entry("a").state is State.MOVING
        await rig.engine.offload(begun.wait, 30)
        rig.engine.shrink(0)  # else the new name is written by itself
        await change(rig, "a", 1)
        pinned = await bring(rig, "a", task="b")
        rig.store["b"] = rig.store["a"]
        go_on.set()
        await rig.settle()
        rig.store.release(pinned)
        await spill(rig)
        assert set(rig.store.slow) == {"a", "b"}
        assert value_of(rig, "a") == value_of(rig, "b") == 1

    run_rig(test)


def test_what_is_changed_by_way_of_a_part_of_it(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        rig.store["x"] = np.zeros(20_000)
        await spill(rig)
        pinned = await rig.store.ensure(["x"])
        rig.store["part"] = rig.store["x"][:10_000]
        assert rig.store.entry("x").clean  # no task that changes anything got it
        await change(rig, "part", 1)  # of which there is no copy
        rig.store.release(pinned)
        await spill(rig)
        assert set(rig.store.slow) == {"x", "part"}
        assert value_of(rig, "x") == value_of(rig, "part") == 1

    run_rig(test)


@pytest.mark.parametrize("when", ["before", "during", "long"])
def test_another_name_is_changed_while_the_first_is_written(run_rig: Callable[..., None], when: str) -> None:
    """The task of it begins before the write does, or meanwhile; it ends before the write does, or after it."""

    async def test(rig: Rig) -> None:
        begun, go_on = slow_writes(rig)
        rig.store["a"] = np.zeros(20_000)
        pinned = await bring(rig, "a", task="b")
        rig.store["b"] = rig.store["a"]
        rig.store.release(pinned)
        if when != "during":
            pinned = await bring(rig, "b")
        rig.engine.shrink(160_000)
        assert rig.store.entry("a").state is State.MOVING
        rig.engine.shrink(0)
        await rig.engine.offload(begun.wait, 30)
        if when == "during":
            pinned = await bring(rig, "b")
        rig.store["b"][...] += 1
        if when == "long":
            go_on.set()
            await rig.settle()
        rig.store.release(pinned)
        go_on.set()
        await rig.settle()
        await spill(rig)
        assert set(rig.store.slow) == {"a", "b"}
        assert value_of(rig, "b") == 1

    run_rig(test)


def test_changed_by_what_has_no_task(run_rig: Callable[..., None]) -> None:
    """``client.run`` reads ``worker.data`` on the loop; a thread of the user's anywhere."""

    async def test(rig: Rig) -> None:
        rig.store["x"] = np.zeros(20_000)
        await spill(rig)
        rig.store["x"][...] += 1
        await spill(rig)
        rig.store.release(await rig.store.ensure(["x"]))

        def add() -> None:
            rig.store["x"][...] += 1

        await rig.engine.offload(add)
        await spill(rig)
        assert value_of(rig, "x") == 2

    run_rig(test)


@pytest.mark.parametrize("reads", [False, True], ids=["before the copy is looked for", "while the copy is read"])
def test_changed_while_another_thread_reads(
    run_rig: Callable[..., None], monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """Its copy is no good then, and goes. The thread got None for the value, or an error."""

    async def test(rig: Rig) -> None:
        loop, on_loop = asyncio.get_running_loop(), threading.get_ident()
        rig.store["x"], rig.store["y"] = np.zeros(20_000), np.zeros(20_000)
        await spill(rig)

        async def load_and_change() -> None:
            await change(rig, "x", 1)
            rig.store.release(await rig.store.ensure(["y"]))  # x is the next to leave, and compared ahead
            await rig.settle()
            assert rig.store.entry("x").handle is None

        def meanwhile() -> None:
            if threading.get_ident() != on_loop and not rig.store.entry("x").in_memory:
                asyncio.run_coroutine_threadsafe(load_and_change(), loop).result(30)

        class Changes(Entry):
            @property
            def value(self) -> Any:
                held = self.__dict__["value"]
                if not reads:
                    meanwhile()
                return held

            @value.setter
            def value(self, value: Any) -> None:
                self.__dict__["value"] = value

        def read(*args: Any) -> Any:
            meanwhile()
            return read_value(*args)

        rig.store.entry("x").__class__ = Changes
        if reads:
            monkeypatch.setattr(loading, "read_value", read)
        assert (await asyncio.to_thread(rig.store.__getitem__, "x"))[0] == 1
        rig.validate()

    run_rig(test, budget=400_000)


def test_a_changed_value_that_cannot_be_written_stays(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        rig.store["x"] = [np.zeros(20_000)]
        await spill(rig)
        pinned = await bring(rig, "x")
        rig.store["x"].append(threading.Lock())
        rig.store.release(pinned)
        await spill(rig)
        await spill(rig)
        assert rig.store.entry("x").state is State.RESIDENT
        assert len(rig.store["x"]) == 2

    run_rig(test)


@pytest.mark.parametrize("changed", [0, 1])
def test_too_little_memory_to_compare_keeps_the_copy(
    run_rig: Callable[..., None], monkeypatch: pytest.MonkeyPatch, changed: int
) -> None:
    """It was deleted, and the write that followed failed as well: the value could leave no more."""

    async def test(rig: Rig) -> None:
        rig.store["x"] = np.zeros(20_000)
        await spill(rig)
        await change(rig, "x", changed)
        files = rig.disk.files()
        asked: list[object] = []

        def encode(self: object, value: object, parts: object = None) -> Any:
            asked.append(value)
            raise MemoryError("no")

        with monkeypatch.context() as patch:
            patch.setattr(PickleCodec, "encode", encode)
            for _ in range(3):
                await spill(rig)
        assert len(asked) == 1, "it rests"
        del asked[:]
        assert rig.disk.files() == files
        assert rig.store.entry("x").state is State.RESIDENT
        assert not rig.store.entry("x").clean
        rig.now += 2
        await spill(rig)
        assert "x" in rig.store.slow
        assert rig.engine.counters.unchanged == 1 - changed
        assert value_of(rig, "x") == changed

    run_rig(test)


def test_a_failed_write_keeps_the_change(run_rig: Callable[..., None]) -> None:
    async def test(rig: Rig) -> None:
        rig.store["x"] = np.zeros(20_000)
        await spill(rig)
        await change(rig, "x", 1)
        write, rig.disk.write = rig.disk.write, lambda groups: fail()  # type: ignore[method-assign]
        await spill(rig)
        assert rig.store.entry("x").state is State.RESIDENT
        assert not rig.store.entry("x").clean
        rig.disk.write = write  # type: ignore[method-assign]
        rig.now += 100
        await spill(rig)
        assert "x" in rig.store.slow
        assert value_of(rig, "x") == 1

    def fail() -> Any:
        raise OSError(5, "no")

    run_rig(test)


class Model:
    def __init__(self) -> None:
        self.rounds, self.table = 0, np.zeros(1_000_000)

    def __sizeof__(self) -> int:
        return self.table.nbytes


def zeros(i: int, mb: int = 8) -> Any:
    return np.full(mb << 17, float(i))


def add_one(x: Any) -> float:
    x += 1
    return float(x[0])


def learn(model: Model) -> int:
    model.rounds += 1
    return model.rounds


@pytest.mark.cluster
def test_on_a_cluster_as_in_stock() -> None:
    import dask

    with (
        dask.config.set({"distributed.scheduler.preload": ["dask_gpurt.preload"]}),
        LocalCluster(n_workers=1, threads_per_worker=1, memory_limit="350MB", dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        made, model = client.submit(zeros, 0), client.submit(Model)
        [scattered] = client.scatter([zeros(0)])
        for n in range(1, 5):
            got = [client.submit(f, x, pure=False).result() for f, x in ((add_one, made), (learn, model))]
            assert [*got, client.submit(add_one, scattered, pure=False).result()] == [n, n, n]
            more = client.map(zeros, range(40), pure=False)
            wait(more)
            assert client.run(lambda dask_worker: len(dask_worker.data.slow))
            del more
