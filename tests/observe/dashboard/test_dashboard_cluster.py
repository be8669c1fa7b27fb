"""The pages as a scheduler serves them: with the preload, without, attached late, detached, and without Bokeh."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import dask
import pytest
from distributed import Client, LocalCluster

import dask_gpurt
from dask_gpurt.observe.collect.causes import CLOCK, LOCAL, UNASSIGNED, WAITS
from dask_gpurt.observe.dashboard import hook
from tests.cluster.processes import SCHEDULER_PARTS, processes
from tests.observe.fakes import OPTIONAL
from tests.observe.numbers import HEARTBEAT

pytest.importorskip("bokeh")

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

PRELOAD = "dask_gpurt.preload"
PLOTS = {
    "/individual-stall-causes",
    "/individual-shuffle-progress",
    "/individual-tier-history",
    "/individual-tier-occupancy",
    "/individual-placement-accuracy",
    "/individual-worker-speeds",
    "/individual-link-matrix",
    "/individual-tier-disk-rates",
    "/individual-placement-decisions",
    "/individual-link-estimates",
    "/individual-shuffle-traffic",
}


def get(base: str, path: str) -> str:
    with urllib.request.urlopen(base + path) as reply:
        assert reply.status == 200
        return str(reply.read().decode())


def base_of(client: Client) -> str:
    port = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.http_server.port)
    return f"http://127.0.0.1:{port}"


def listed(base: str) -> set[str]:
    return set(json.loads(get(base, "/individual-plots.json")).values())


def status_of(client: Client) -> dict[str, Any]:
    return dict(dask_gpurt.status(client).to_dict()["scheduler"])


def test_pages_metrics_and_heartbeats_with_the_preload(tmp_path: Path) -> None:
    prometheus = pytest.importorskip("prometheus_client.parser")
    with processes(tmp_path) as p:
        address = p.scheduler("--preload", PRELOAD)
        p.worker(address, "--preload", PRELOAD, "--preload-nanny", PRELOAD)
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            base = base_of(client)
            assert listed(base) >= PLOTS
            assert status_of(client)["plots"] == "on"
            page = get(base, "/gpurt")
            for path in (*PLOTS, "/gpurt"):
                assert f'"{path.strip("/")}"' in page  # in the menu
                assert "bokeh" in get(base, path)
            assert "cdn." not in page
            # Nothing of the dashboard is on a worker or its nanny.
            heavy = "__import__('sys').modules.get('bokeh')"
            for nanny in (False, True):
                (module,) = client.run(eval, heavy, nanny=nanny).values()
                assert module is None
            assert client.submit(sum, client.map(int, range(9))).result() == 36
            (figures,) = client.run_on_scheduler(
                lambda dask_scheduler: [ws.metrics["gpurt"] for ws in dask_scheduler.workers.values()]
            )
            assert "next_use" not in figures  # the version of a protocol, where it is spoken: no figure
            assert figures.pop(CLOCK) > 0  # orders them, for the ledger
            assert set(figures.pop(WAITS)) <= {*LOCAL, UNASSIGNED}  # histograms, for the ledger
            assert set(figures) == {key.split(".")[0] for key in HEARTBEAT} - set(OPTIONAL)
            assert figures.pop("fetched") == {}
            assert all(v is None or type(v) in (int, float) for v in figures.values())
            scraped = {
                sample.name: sample.value
                for family in prometheus.text_string_to_metric_families(get(base, "/metrics"))
                for sample in family.samples
                if sample.labels.get("outcome", "local") == "local"
            }
            assert scraped["dask_gpurt_placement_declined_total"] > 0  # one worker: nothing to decide
            assert scraped["dask_gpurt_scrape_errors_total"] == 0
            assert "dask_scheduler_workers" in scraped  # Dask's own are still there


def test_worker_metrics(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with processes(tmp_path) as p:
        address = p.scheduler("--preload", PRELOAD)
        p.start(
            *("worker", address, "--host", "127.0.0.1", "--nthreads", "1", "--dashboard-address", "127.0.0.1:0"),
            *("--local-directory", str(tmp_path / "scratch"), "--no-nanny"),
        )
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            (port,) = client.run(lambda dask_worker: dask_worker.http_server.port).values()
            (worker,) = client.scheduler_info()["workers"]
            text = get(f"http://127.0.0.1:{port}", "/metrics")
            assert f'dask_gpurt_tier_bytes{{address="{worker}",tier="host"}}' in text
            assert "dask_worker_tasks" in text


def test_stock_schedulers_list_nothing_of_ours(tmp_path: Path) -> None:
    with processes(tmp_path) as p, Client(p.scheduler()) as client:
        base = base_of(client)
        assert not listed(base) & PLOTS
        with pytest.raises(urllib.error.HTTPError):
            get(base, "/gpurt")


@pytest.mark.slow
def test_attach_and_detach(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler()
        p.worker(address, "--no-nanny")
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            base = base_of(client)
            assert not listed(base) & PLOTS
            for _ in range(2):
                dask_gpurt.attach(client)
                assert status_of(client)["plots"] == "on"
                assert listed(base) >= PLOTS
                for path in (*PLOTS, "/gpurt"):
                    assert "bokeh" in get(base, path)
                assert get(base, "/status").count('"gpurt"') == 1  # the menu of Dask's own pages, once
                assert "dask_gpurt_" in get(base, "/metrics")
                dask_gpurt.detach(client)
                # The pages stay, and say that nothing is installed.
                assert "bokeh" in get(base, "/gpurt")
                assert "dask_gpurt_" not in get(base, "/metrics")
                assert not client.run_on_scheduler(
                    lambda dask_scheduler: "gpurt-feed" in dask_scheduler.periodic_callbacks
                )


def test_without_bokeh_everything_else_works(tmp_path: Path) -> None:
    """A package of that name that cannot be imported stands for none."""
    (tmp_path / "path" / "bokeh").mkdir(parents=True)
    (tmp_path / "path" / "bokeh" / "__init__.py").write_text("raise ModuleNotFoundError('No module named bokeh')")
    import os

    path = os.pathsep.join([str(tmp_path / "path"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with processes(tmp_path, {"PYTHONPATH": path}) as p:
        address = p.scheduler("--preload", PRELOAD)
        p.worker(address, "--no-nanny")
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            assert client.submit(sum, client.map(int, range(9))).result() == 36
            got = status_of(client)
            assert got["parts"] == dict.fromkeys(SCHEDULER_PARTS, "on")
            assert got["plots"].startswith("not available because this scheduler has no dashboard")
            log = p.running[0][1].read_text()
            assert log.count("no plots") == 1
            assert "Traceback" not in log


def test_pages_are_announced_again_after_a_reset_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask's own test tools reset it: whether a stock cluster had our pages depended on the tests before."""
    monkeypatch.setattr("dask_gpurt.client.local.GpurtLocalCluster", lambda **kwargs: dask.config.get(hook.ROUTES))
    with dask.config.set({hook.ROUTES: ["distributed.http.scheduler.info"]}):
        assert dask_gpurt.local_cluster() == ["distributed.http.scheduler.info", hook.__name__]


@pytest.mark.slow
def test_two_clusters_in_one_process() -> None:
    """The second has no extension, but a process has one list of pages: they say so. Nothing is registered twice."""
    ours: dict[str, Any] = {"n_workers": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with (
        dask_gpurt.local_cluster(**ours) as one,
        LocalCluster(**ours) as two,
        dask_gpurt.local_cluster(**ours) as three,
    ):
        for cluster in (one, two, three):
            base = f"http://127.0.0.1:{cluster.scheduler.http_server.port}"
            for path in (*PLOTS, "/gpurt"):
                get(base, path)
        assert three.scheduler.plugins["gpurt"].plots == "on"
    from dask_gpurt.observe.figures import history, prometheus

    deadline = time.monotonic() + 20
    while prometheus._collector is not None and time.monotonic() < deadline:
        time.sleep(0.05)  # workers of a cluster close after it
    assert prometheus._collector is None
    assert not [f for f in history._feeds if f is one.scheduler]
