"""Workers tell the scheduler which keys are only on their disks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client, Scheduler, Worker, wait
from distributed.utils_test import async_poll_for, gen_cluster

import dask_gpurt  # noqa: F401  (registers the defaults)
from dask_gpurt.config import Settings
from dask_gpurt.extension import GpurtScheduler, on_worker
from dask_gpurt.model import circuit_breaker
from dask_gpurt.model.residence import OP
from dask_gpurt.model.tier import Tier
from dask_gpurt.tiers.engine.entry import EventLog, State
from dask_gpurt.tiers.stores.task_store import Place
from dask_gpurt.tiers.worker import residency
from dask_gpurt.tiers.worker.residency import ResidenceSender
from tests.memory_watch import NO_WATCH
from tests.tiers.conftest import guard

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 100_000


class Entry:
    def __init__(self, state: State) -> None:
        self.state, self.nbytes = state, SIZE
        #: of a device value
        self.tier: Tier | None = None


class Store:
    #: nothing has measured how fast values come back to it
    device = None

    def __init__(self) -> None:
        self.entries: dict[Any, Entry] = {}
        self.on_device_moved: Callable[[Any], None] = lambda key: None

    def entry(self, key: Any) -> Entry | None:
        return self.entries.get(key)

    def place_of(self, key: Any) -> Place | None:
        entry = self.entries.get(key)
        if entry is None or entry.state is State.LOST:
            return None
        if entry.tier is not None:
            return Place(entry.tier, SIZE, None, entry.tier is Tier.DEVICE)
        here = entry.state in (State.RESIDENT, State.MOVING)
        return Place(Tier.HOST if here else Tier.DISK, SIZE, None, here)

    @property
    def disk(self) -> list[Any]:
        return [k for k, e in self.entries.items() if e.state is State.STORED]

    @property
    def below_device(self) -> list[Any]:
        return [k for k, e in self.entries.items() if e.tier not in (None, Tier.DEVICE)]


class FakeWorker:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.fails = False

    def batched_send(self, message: dict[str, Any]) -> None:
        if self.fails:
            raise OSError("the stream is closed")
        self.sent.append(message)


class Rig:
    def __init__(self) -> None:
        self.worker, self.store, self.log = FakeWorker(), Store(), EventLog()
        self.sender = ResidenceSender(self.worker, self.store, self.log, guard())  # type: ignore[arg-type]

    def move_device(self, key: Any, tier: Tier) -> None:
        self.store.entries.setdefault(key, Entry(State.RESIDENT)).tier = tier
        self.store.on_device_moved(key)

    def move(self, key: Any, after: State | None) -> None:
        if after is None:
            self.store.entries.pop(key, None)
        else:
            self.store.entries[key] = Entry(after)
        self.log.append(key, None, "test", after)


def on_loop(test: Callable[[Rig], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "FLUSH_SECONDS", 0.0)

    async def main() -> None:
        await test(Rig())

    asyncio.run(main())


async def flushed() -> None:
    for _ in range(5):
        await asyncio.sleep(0.001)


def test_only_what_changed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(rig: Rig) -> None:
        rig.move("there already", State.STORED)
        rig.sender.start()
        rig.move("x", State.STORED)
        rig.move("y", State.RESIDENT)
        rig.move("brief", State.STORED)
        rig.move("brief", State.RESIDENT)
        await flushed()
        disk = [item for m in rig.worker.sent for item in m["disk"]]
        assert sorted(disk) == [("there already", float(SIZE)), ("x", float(SIZE))]
        rig.worker.sent.clear()
        rig.move("x", State.LOADING)
        await flushed()
        assert not rig.worker.sent, "still only on disk"
        rig.move("x", State.RESIDENT)
        rig.move("there already", None)
        await flushed()
        assert sorted(k for m in rig.worker.sent for k in m["back"]) == ["there already", "x"]
        assert all(m["op"] == OP for m in rig.worker.sent)

    on_loop(run, monkeypatch)


def test_device_values_are_told_by_the_tier_they_went_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(rig: Rig) -> None:
        rig.move_device("there already", Tier.PINNED)
        rig.sender.start()
        rig.move_device("x", Tier.PINNED)
        rig.move_device("y", Tier.DISK)
        rig.move_device("z", Tier.DEVICE)
        await flushed()
        (message,) = rig.worker.sent
        assert message["pinned"] == [("there already", float(SIZE)), ("x", float(SIZE))]
        assert message["disk"] == [("y", float(SIZE))]
        assert message["back"] == []
        rig.worker.sent.clear()
        rig.move_device("x", Tier.DISK)
        rig.move_device("y", Tier.DEVICE)
        await flushed()
        assert [(m["pinned"], m["disk"], m["back"]) for m in rig.worker.sent] == [([], [("x", float(SIZE))], ["y"])]
        rig.sender.stop()
        rig.move_device("x", Tier.DEVICE)
        await flushed()
        assert len(rig.worker.sent) == 1

    on_loop(run, monkeypatch)


def test_what_is_no_key_of_the_worker_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(rig: Rig) -> None:
        rig.sender.start()
        rig.log.append("a chunk", None, "test", State.STORED)
        await flushed()
        assert not rig.worker.sent

    on_loop(run, monkeypatch)


def test_many_keys_go_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "FLUSH_KEYS", 3)

    async def run(rig: Rig) -> None:
        rig.sender.start()
        for i in range(8):
            rig.move(i, State.STORED)
        await flushed()
        assert [len(m["disk"]) for m in rig.worker.sent] == [3, 3, 2]

    on_loop(run, monkeypatch)


def test_failures_end_it_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "LIMIT", 2)

    async def run(rig: Rig) -> None:
        rig.sender.start()
        rig.worker.fails = True
        for i in range(3):
            rig.move(i, State.STORED)
            await flushed()
        assert rig.sender.statistics()["exceptions"] == 2
        assert rig.sender.statistics()["retired"].startswith("2 failures within 60 s")
        assert not rig.sender.statistics()["on"]
        assert rig.log.listener is None

    on_loop(run, monkeypatch)


def test_after_stop_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(rig: Rig) -> None:
        rig.sender.start()
        rig.move("x", State.STORED)
        rig.sender.stop()
        rig.sender.stop()
        rig.move("y", State.STORED)
        await flushed()
        assert not rig.worker.sent

    on_loop(run, monkeypatch)


def make(i: int) -> bytes:
    return bytes([i % 251]) * SIZE


@pytest.mark.cluster
@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1)] * 2,
    worker_kwargs={"memory_limit": "20 MB"},
    config=NO_WATCH,
    timeout=120,
)
async def test_the_scheduler_knows_what_is_on_disk(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
    plugin = GpurtScheduler(Settings.load({"shuffle.enabled": False, "tiers.disk-reserve": 0}))
    await plugin.start(s)
    s.add_plugin(plugin, name=plugin.name)
    futures = c.map(make, range(600), pure=False)
    await wait(futures)

    def truth() -> dict[Any, set[str]]:
        out: dict[Any, set[str]] = {}
        for w in (a, b):
            parts = on_worker(w)
            assert parts is not None
            for key, entry in parts.residence(list(w.data)).items():
                if entry["tier"] == "disk":
                    out.setdefault(key, set()).add(w.address)
        return out

    def told() -> dict[Any, set[str]]:
        return {k: set(v) for k, v in plugin.residence.on_disk.items()}

    await async_poll_for(lambda: told() and told() == truth(), timeout=60)
    placement = plugin.placement
    assert placement is not None
    assert placement.engine is not None
    assert placement.engine.tables.residence is plugin.residence
    del futures
    await async_poll_for(lambda: not s.tasks and not plugin.residence.on_disk, timeout=60)
    # What cannot be used is counted, and ends nothing.
    s.stream_handlers[OP](worker=a.address, disk=[("x", "much")], back=None)
    news = plugin.statistics()["tier_news"]
    assert news["exceptions"] == 1
    assert "Error" in news["last_traceback"]
    # Taken out, and a message that was under way comes late: the handler is still there.
    await plugin.uninstall()
    s.stream_handlers[OP](worker=a.address, disk=[("late", 1.0)], back=[])
    assert not plugin.residence.on_disk
    assert set(s.workers) == {a.address, b.address}
