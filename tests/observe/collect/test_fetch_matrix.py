"""Which links were used: bounded on the worker, put together on the scheduler, and a nominal speed only where known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
from distributed.utils_test import gen_cluster

from dask_gpurt.config import Settings
from dask_gpurt.extension.worker import WorkerParts, on_worker
from dask_gpurt.observe.collect import fetch_matrix
from dask_gpurt.observe.collect.causes import CLOCK, WAITS
from dask_gpurt.observe.collect.worker import WorkerSlots
from tests.observe.fakes import OPTIONAL, beat
from tests.observe.numbers import HEARTBEAT, unknown

if TYPE_CHECKING:
    import pytest


def _row(n: float, seconds: float = 1.0, requests: int = 1) -> dict[str, float]:
    return {"bytes": n, "seconds": seconds, "requests": requests}


def test_few_sources_are_told_one_by_one() -> None:
    assert fetch_matrix.reported({}) == {}
    assert fetch_matrix.reported({"tcp://a:1": [3.0, 0.5, 2.0]}) == {
        "tcp://a:1": {"bytes": 3, "seconds": 0.5, "requests": 2}
    }


def test_many_sources_are_told_by_host_and_the_smallest_as_one() -> None:
    sources = {
        f"tcp://10.0.0.{host}:{port}": [float(host), 1.0, 1.0] for host in range(40) for port in range(1000, 1003)
    }
    sources[fetch_matrix.OTHERS] = [5.0, 1.0, 1.0]
    found_rows = fetch_matrix.reported(sources)
    assert len(found_rows) == fetch_matrix.MOST_SOURCES + 1
    assert found_rows["host 10.0.0.39"] == {"bytes": 3 * 39, "seconds": 3.0, "requests": 3}
    assert "host 10.0.0.0" not in found_rows
    for unit, i in (("bytes", 0), ("seconds", 1), ("requests", 2)):  # nothing is lost
        assert sum(row[unit] for row in found_rows.values()) == sum(values[i] for values in sources.values())


def test_the_matrix_of_a_small_cluster_has_a_row_per_worker() -> None:
    a, b, c = "tcp://10.0.0.1:1", "tcp://10.0.0.1:2", "tcp://10.0.0.2:1"
    got = fetch_matrix.matrix(
        [
            ("a", a, {"fetched": {b: _row(8, 2), c: _row(4)}, "nic_bytes_per_second": 1e9}),
            ("b", b, {"fetched": {"tcp://left:1": _row(5), fetch_matrix.OTHERS: _row(1)}, "nic_bytes_per_second": 1e9}),
            ("c", c, {"fetched": {a: _row(7)}, "nic_bytes_per_second": 4e9}),
        ]
    )
    assert got.names == ["a", "b", "c", fetch_matrix.OTHERS]
    assert not got.by_host
    cells = {(got.names[cell.source], got.names[cell.target]): cell for cell in got.cells}
    assert {pair: cell.bytes for pair, cell in cells.items()} == {
        ("b", "a"): 8,
        ("c", "a"): 4,
        (fetch_matrix.OTHERS, "b"): 6,
        ("a", "c"): 7,
    }
    assert cells["b", "a"].within_host
    assert cells["b", "a"].nominal is None
    assert cells["b", "a"].bytes_per_second == 4
    assert cells["c", "a"].nominal == 1e9, "the slower of the two ends"
    assert cells[fetch_matrix.OTHERS, "b"].nominal is None


def test_one_end_without_a_known_speed_makes_it_unknown() -> None:
    a, b = "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"
    (cell,) = fetch_matrix.matrix(
        [("a", a, {"fetched": {b: _row(8)}, "nic_bytes_per_second": 1e9}), ("b", b, {})]
    ).cells
    assert cell.nominal is None
    assert not cell.within_host


def test_the_matrix_of_a_large_cluster_has_a_row_per_host() -> None:
    workers: list[tuple[str, str, dict[str, Any]]] = []
    for i in range(20):
        source = f"tcp://10.0.0.{(i + 1) % 4}:{i}" if i % 2 else f"host 10.0.0.{(i + 1) % 4}"
        workers.append((str(i), f"tcp://10.0.0.{i % 4}:{i}", {"fetched": {source: _row(1)}}))
    got = fetch_matrix.matrix(workers)
    assert got.by_host
    assert got.names == [f"10.0.0.{i}" for i in range(4)]
    assert {(cell.source, cell.target): cell.bytes for cell in got.cells} == {((i + 1) % 4, i): 5 for i in range(4)}


def test_a_hundred_hosts_are_bounded_and_nothing_is_lost() -> None:
    workers = [
        (str(i), f"tcp://10.0.1.{i}:1", {"fetched": {f"tcp://10.0.1.{(i * 7 + k) % 100}:1": _row(i) for k in range(9)}})
        for i in range(100)
    ]
    got = fetch_matrix.matrix(workers)
    assert len(got.names) == fetch_matrix.HOSTS + 1
    assert got.names[-1] == fetch_matrix.OTHERS
    assert len(got.cells) <= len(got.names) ** 2
    assert sum(cell.bytes for cell in got.cells) == sum(9 * i for i in range(100))
    assert sum(cell.requests for cell in got.cells) == 900


def test_the_nominal_speed_is_that_of_the_card_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    address, stats = type("Address", (), {}), type("Stats", (), {})
    fast, slow, six = address(), address(), address()
    fast.address, slow.address, six.address = "10.9.9.9", "127.0.0.1", "fe80::7%eth7"
    known, unknown = stats(), stats()
    known.speed, unknown.speed = 10_000, 0
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth7": [fast, six], "lo": [slow]})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth7": known, "lo": unknown})
    assert fetch_matrix.nominal_bytes_per_second("10.9.9.9") == 1.25e9
    assert fetch_matrix.nominal_bytes_per_second("fe80::7") == 1.25e9
    assert fetch_matrix.nominal_bytes_per_second("127.0.0.1") is None
    assert fetch_matrix.nominal_bytes_per_second("10.1.1.1") is None
    assert fetch_matrix.nominal_bytes_per_second("no such host.invalid") is None


class _Worker:
    """What the meter of a worker looks at."""

    def __init__(self) -> None:
        self.address = "tcp://127.0.0.1:1"
        self.execute = self.handle_stimulus = print
        self.state = type("State", (), {"nthreads": 1, "executing": set()})()
        self.transfer_incoming_log: list[dict[str, Any]] = []
        self.digests_total: dict[Any, float] = {}


def test_heartbeats_count_each_transfer_once() -> None:
    worker = _Worker()
    slots = WorkerSlots(worker)
    assert slots.heartbeat()["fetched"] == {}
    worker.transfer_incoming_log += [
        {"who": "tcp://a:1", "total": 10, "start": 1.0, "stop": 1.5},
        {"who": "tcp://b:1", "total": 1, "start": 1.0, "stop": 1.5},
    ]
    slots.heartbeat()
    worker.transfer_incoming_log.append({"who": "tcp://a:1", "total": 5, "start": 2.0, "stop": 2.5})
    del worker.transfer_incoming_log[0]  # Dask forgets the oldest
    for _ in range(2):
        found_rows = slots.heartbeat()["fetched"]
        assert found_rows == {
            "tcp://a:1": {"bytes": 15, "seconds": 1.0, "requests": 2},
            "tcp://b:1": {"bytes": 1, "seconds": 0.5, "requests": 1},
        }


@gen_cluster(client=True, nthreads=[("", 1)] * 2)
async def test_a_fetch_reaches_the_scheduler_with_a_heartbeat(c: Any, s: Any, a: Any, b: Any) -> None:
    for worker in (a, b):
        await WorkerParts.install(worker, Settings.load())
    x = c.submit(bytes, 1000, workers=[a.address], key="x")
    assert await c.submit(len, x, workers=[b.address]) == 1000
    for worker in (a, b):
        await beat(worker)
    found_rows = {address: ws.metrics["gpurt"] for address, ws in s.workers.items()}
    assert found_rows[a.address]["fetched"] == {}
    assert list(found_rows[b.address]["fetched"]) == [a.address]
    assert found_rows[b.address]["fetched"][a.address]["bytes"] >= 1000
    patterns = ["next_use", CLOCK, *HEARTBEAT]
    for figures in found_rows.values():
        keys = {key.split(".")[0] for key in HEARTBEAT} - set(OPTIONAL)
        assert keys == set(figures) - {"next_use", CLOCK, WAITS}
        assert unknown(figures, patterns) == []
    (cell,) = fetch_matrix.matrix((ws.name, ws.address, ws.metrics["gpurt"]) for ws in s.workers.values()).cells
    assert cell.within_host
    for worker in (a, b):
        await on_worker(worker).uninstall()  # type: ignore[union-attr]
