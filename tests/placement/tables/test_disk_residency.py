"""What is known of copies on disk, and that decisions and stealing go by it."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpurt.placement import statistics
from dask_gpurt.placement.decide.steal_cost import MAX_PRICED_INPUTS
from dask_gpurt.placement.tables import disk_residency
from dask_gpurt.placement.tables.disk_residency import PINNED_BYTES_PER_SECOND, READ_BYTES_PER_SECOND, DiskResidency
from dask_gpurt.simulate import simulate
from dask_gpurt.simulate.shapes import build
from tests.placement.fakes import FakeTask, FakeWorker, learn, make_engine


def test_news_and_corrections() -> None:
    r = DiskResidency()
    r.heard("a", [("x", 10.0), ("y", 20.0)], ())
    r.heard("b", [("x", 10.0)], ())
    assert r.on_disk == {"x": {"a": 10.0, "b": 10.0}, "y": {"a": 20.0}}
    r.heard("a", [], ["x", "never heard of"])
    assert r.on_disk == {"x": {"b": 10.0}, "y": {"a": 20.0}}
    r.heard("a", [("y", 21.0)], ())
    assert r.copies == 2
    r.worker_removed("a")
    r.worker_removed("a")
    assert r.on_disk == {"x": {"b": 10.0}}
    assert r.copies == 1
    r.clear()
    assert not r.on_disk
    assert r.copies == 0


def test_the_oldest_news_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_residency, "MAX_KEYS", 3)
    r = DiskResidency()
    r.heard("a", [(i, 1.0) for i in range(5)], ())
    assert list(r.on_disk) == [2, 3, 4]
    assert r.copies == 3


def test_the_oldest_are_forgotten_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one a message with a thousand keys took the scheduler 0.4 s, beside half a million copies."""
    monkeypatch.setattr(disk_residency, "MAX_KEYS", 640)
    r = DiskResidency()
    r.heard("b", [(3, 1.0)], ())
    r.heard("a", [(i, 1.0) for i in range(649)], ())
    assert r.copies == 650
    r.heard("a", [(649, 1.0)], ())
    assert r.copies == 640
    assert list(r.on_disk)[:1] == [10]
    assert len(r._by_worker["a"]) == 640
    assert not r._by_worker["b"]


def test_a_disk_reads_one_after_the_other() -> None:
    now = [100.0]
    r = DiskResidency(lambda: now[0])
    assert r.queue_seconds("a") == 0.0
    r.book("a", READ_BYTES_PER_SECOND)
    r.book("a", READ_BYTES_PER_SECOND)
    assert r.queue_seconds("a") == pytest.approx(2.0)
    assert r.queue_seconds("b") == 0.0
    now[0] += 1.5
    assert r.queue_seconds("a") == pytest.approx(0.5)
    now[0] += 5.0
    assert r.queue_seconds("a") == 0.0


def cluster() -> tuple[Any, FakeWorker, FakeWorker, FakeTask]:
    a, b = FakeWorker(0), FakeWorker(1)
    engine = make_engine([a, b])
    learn(engine, "f", 0.05)
    return engine, a, b, FakeTask("x", nbytes=10**9, on=(a, b))


def test_the_holder_that_has_it_in_memory() -> None:
    for spilled in (0, 1):
        engine, a, b, x = cluster()
        engine.tables.residence.heard((a, b)[spilled].address, [("x", 1e9)], ())
        assert engine.decide(FakeTask("f-0", x), None) is (a, b)[1 - spilled]


def test_where_both_must_read_the_idle_disk() -> None:
    engine, a, b, x = cluster()
    engine.tables.residence.heard(a.address, [("x", 1e9)], ())
    engine.tables.residence.heard(b.address, [("x", 1e9)], ())
    engine.tables.residence.book(a.address, 20e9)
    assert engine.decide(FakeTask("f-0", x), None) is b
    assert engine.tables.residence.queue_seconds(b.address) > 0.4, "the decision makes it read"


def test_fetching_from_a_disk_waits_for_that_disk() -> None:
    a, b = FakeWorker(0), FakeWorker(1)
    engine = make_engine([a, b])
    x = FakeTask("x", nbytes=10**9, on=(a,))
    before = engine.comm_cost(FakeTask("f-0", x), b)
    engine.tables.residence.heard(a.address, [("x", 1e9)], ())
    after = engine.comm_cost(FakeTask("f-1", x), b)
    assert after == pytest.approx(before + 0.5)


def test_stealing_that_asks_for_every_idle_worker_looks_at_the_inputs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [FakeWorker(i) for i in range(10)]
    engine = make_engine(workers)
    asked: list[FakeTask] = []

    def knows_more(ts: FakeTask) -> bool:
        asked.append(ts)
        return True

    monkeypatch.setattr(engine, "knows_more", knows_more)
    inputs = [FakeTask(f"x-{i}", nbytes=10**6, on=(workers[0],)) for i in range(MAX_PRICED_INPUTS + 1)]
    few, many = FakeTask("f-0", *inputs[1:]), FakeTask("f-1", *inputs)
    assert all(engine.comm_cost(few, ws) for ws in workers[1:])
    assert all(engine.comm_cost(many, ws) is None for ws in workers)
    assert asked == [few], "of so many inputs the price is Dask's"


def test_forgotten_with_the_tasks_and_the_worker() -> None:
    engine, a, _, _ = cluster()
    engine.tables.residence.heard(a.address, [("x", 1e9)], ())
    assert statistics.of(engine)["tables"]["copies_on_disk"] == 1
    engine.worker_removed(a.address)
    assert statistics.of(engine)["tables"]["copies_on_disk"] == 0
    engine.tables.residence.heard("b", [("x", 1e9)], ())
    engine.books.restarted()
    assert engine.tables.residence.copies == 0


def test_the_simulated_cluster_reads_nothing_that_is_in_memory() -> None:
    workload, c = build("tiers", workers=8)
    stock, ours = (simulate(workload, c, policy) for policy in ("stock", "gpurt"))
    assert stock.read_bytes > 0
    assert ours.read_bytes == 0
    assert ours.makespan_seconds < 0.5 * stock.makespan_seconds


def test_a_page_locked_copy_costs_a_tenth_of_a_read() -> None:
    r = DiskResidency()
    r.heard("a", [("x", 10.0)], (), [("y", 10.0)])
    assert r.on_disk == {"x": {"a": 10.0}, "y": {"a": 1.0}}
    r.heard("a", [("y", 10.0)], ())  # it went on to the disk
    assert r.on_disk["y"] == {"a": 10.0}
    r.heard("a", (), ["x", "y"])
    assert not r.on_disk


def test_a_copy_in_page_locked_memory_costs_what_its_worker_has_measured() -> None:
    r = DiskResidency()
    r.heard("a", [], (), [("x", 1000.0)])
    assert r.on_disk["x"]["a"] == 1000.0 * READ_BYTES_PER_SECOND / PINNED_BYTES_PER_SECOND
    r.heard("a", [], (), [("x", 1000.0)], READ_BYTES_PER_SECOND / 4)
    assert r.on_disk["x"]["a"] == 4000.0  # a slow link: dearer than the disk
