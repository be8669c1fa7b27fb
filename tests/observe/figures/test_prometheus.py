"""Several servers in one process share one collector, which is there only as long as they are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.observe.figures import prometheus
from tests.observe.fakes import FakeScheduler, figures, heartbeat

prometheus_client = pytest.importorskip("prometheus_client")

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    assert prometheus._collector is None
    yield
    left = [] if prometheus._collector is None else list(prometheus._collector.sources)
    for server in left:
        prometheus.withdraw(server)
    assert left == []


def scrape() -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels -> value, as a Prometheus server reads the page."""
    from prometheus_client.parser import text_string_to_metric_families

    out: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(prometheus_client.generate_latest().decode()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            if sample.name.startswith("dask_gpurt_"):
                assert labels not in out.setdefault(sample.name, {}), f"{sample.name} {labels} twice"
                out[sample.name][labels] = sample.value
    return out


def test_two_schedulers_and_a_worker_in_one_process() -> None:
    a, b, w = FakeScheduler(), FakeScheduler(), FakeScheduler()
    assert prometheus.provide_scheduler(a, lambda: figures(local=1))
    assert prometheus.provide_scheduler(b, lambda: figures(local=2))
    assert prometheus.provide_scheduler(b, lambda: figures(local=3))
    assert prometheus.provide_worker(w, lambda: heartbeat(host_bytes=5, disk_bytes=7, written_bytes=9))
    got = scrape()
    assert got["dask_gpurt_placement_decisions_total"][("address", a.address), ("outcome", "local")] == 1
    assert got["dask_gpurt_placement_decisions_total"][("address", b.address), ("outcome", "local")] == 3
    assert got["dask_gpurt_tier_bytes"] == {
        (("address", w.address), ("tier", "host")): 5,
        (("address", w.address), ("tier", "disk")): 7,
    }
    assert got["dask_gpurt_tier_limit_bytes"] == {(("address", w.address), ("tier", "host")): 100 * 2**20}
    assert got["dask_gpurt_tier_written_bytes_total"] == {(("address", w.address),): 9}
    prometheus.withdraw(a)
    assert len(scrape()["dask_gpurt_link_latency_seconds"]) == 3
    for server in (b, w, w):
        prometheus.withdraw(server)
    assert scrape() == {}


def test_a_server_that_fails_does_not_take_the_page_with_it() -> None:
    good, bad = FakeScheduler(), FakeScheduler()

    def fail() -> dict[str, Any]:
        raise RuntimeError("no")

    prometheus.provide_worker(bad, fail)
    prometheus.provide_worker(good, lambda: heartbeat(lost=2))
    got = scrape()
    assert got["dask_gpurt_tier_lost_values_total"] == {(("address", good.address),): 2}
    assert got["dask_gpurt_scrape_errors_total"] == {(): 1}
    assert "python_info" in prometheus_client.generate_latest().decode()
    prometheus.withdraw(good)
    prometheus.withdraw(bad)


def test_a_registry_that_a_program_has_emptied() -> None:
    one, other = FakeScheduler(), FakeScheduler()
    prometheus.provide_scheduler(one, figures)
    prometheus_client.REGISTRY.unregister(prometheus._collector)
    prometheus.withdraw(one)
    prometheus.provide_scheduler(other, figures)
    assert scrape()
    prometheus.withdraw(other)


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    server = FakeScheduler()
    assert not prometheus.provide_worker(server, heartbeat)
    prometheus.withdraw(server)


def test_a_registry_that_refuses_is_told_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prometheus_client.REGISTRY, "register", lambda _: 1 / 0)
    assert not prometheus.provide_worker(FakeScheduler(), heartbeat)
    assert prometheus._collector is None
    assert "does not take the figures" in caplog.text
