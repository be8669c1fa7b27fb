"""The blocks of docs/deploy/services.md: Coiled, Prefect and Dagster, as far as they run without an account."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from distributed import Client
from distributed.security import Security

import dask_gpurt

from .blocks import run_python, text

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["gateway", "coiled"])
def test_attach_over_tls(name: str, tmp_path: Path) -> None:
    """What both pages do once the service has started the cluster."""
    pytest.importorskip("cryptography")
    settings = {"tiers.host-limit": 0.5}
    line = 'dask_gpurt.attach(client, settings={"tiers.host-limit": 0.5})'
    assert text(name).rstrip().endswith(f"client = cluster.get_client()\n{line}")
    from distributed import LocalCluster

    security = Security.temporary()
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, security=security, dashboard_address=":0") as cluster,
        Client(cluster.scheduler_address, security=security) as client,
    ):
        assert cluster.scheduler_address.startswith("tls://")
        assert dask_gpurt.attach(client, settings=settings).installed
        (worker,) = dask_gpurt.status(client).workers.values()
        assert set(worker["parts"].values()) == {"on"}
        memory = next(iter(client.scheduler_info()["workers"].values()))["memory_limit"]
        assert worker["tiers"]["host_limit_bytes"] == pytest.approx(0.5 * memory, rel=0.01)
        assert client.submit(sum, [1, 2]).result(timeout=60) == 3


def test_gateways_configuration() -> None:
    pytest.importorskip("dask_gateway_server")
    from dask_gateway_server.backends.base import ClusterConfig
    from traitlets.config import Config

    config = Config()
    exec(text("gateway-config"), {"c": config})
    loaded = ClusterConfig(config=config)
    assert (loaded.scheduler_cmd, loaded.worker_cmd) == (["dask", "scheduler"], ["dask", "worker"])


@pytest.mark.cluster
@pytest.mark.slow
def test_prefect(tmp_path: Path) -> None:
    pytest.importorskip("prefect_dask")
    # As a file: Prefect looks for the flow's source.
    flow = tmp_path / "flow.py"
    run = """
if __name__ == "__main__":
    print("doubled", doubles(3))
"""
    flow.write_text(text("prefect").replace('"n_workers": 2', '"n_workers": 2, "dashboard_address": ":0"') + run)
    env = {"PREFECT_HOME": str(tmp_path / "prefect"), "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true"}
    source = f"import runpy\nrunpy.run_path({str(flow)!r}, run_name='__main__')"
    assert "doubled [0, 2, 4]" in run_python(source, tmp_path, env=env)


def test_dagster(tmp_path: Path) -> None:
    pytest.importorskip("dagster_dask")
    check = "\nassert numbers.executor_def.name == 'dask'\nprint('loaded')\n"
    assert "loaded" in run_python(text("dagster") + check, tmp_path)
