"""Dask Gateway's part of docs/deploy/services.md: a real gateway on this machine that starts processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .blocks import path_entries, run_python, text

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("dask_gateway")
server = pytest.importorskip("dask_gateway_server")
if not (Path(server.__file__).parent / "proxy" / "dask-gateway-proxy").exists():
    pytest.skip("dask-gateway-server was installed without its proxy", allow_module_level=True)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: beside the page's own lines: one machine, any password
LOCAL = """
c.DaskGateway.backend_class = "dask_gateway_server.backends.local.UnsafeLocalBackend"
c.DaskGateway.authenticator_class = "dask_gateway_server.auth.SimpleAuthenticator"
c.DaskGateway.address = "127.0.0.1:0"
c.Proxy.address = "127.0.0.1:{port}"
c.UnsafeLocalBackend.clusters_directory = {folder!r}
c.UnsafeLocalBackend.inherited_environment = ["PATH", "PYTHONPATH"]
"""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[str]:
    """The address of a gateway with the page's configuration."""
    port = _free_port()
    (tmp_path / "clusters").mkdir()
    # The page's `dask` is that of the image; here it is this interpreter's.
    page = text("gateway-config").replace('["dask", ', f'[{sys.executable!r}, "-m", "dask", ')
    assert page.count(sys.executable) == 2
    (tmp_path / "config.py").write_text(page + LOCAL.format(port=port, folder=str(tmp_path / "clusters")))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dask_gateway_server", "-f", "config.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path_entries())},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while not _answers(f"{address}/api/health"):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return int(reply.status) == 200
    except (OSError, urllib.error.HTTPError):
        return False


def test_attach_to_a_cluster_of_a_gateway(gateway: str, tmp_path: Path) -> None:
    source = (
        text("gateway").replace("https://gateway.example.com", gateway).replace("cluster.scale(4)", "cluster.scale(1)")
    )
    source = source.replace("dask_gpurt.attach", "client.wait_for_workers(1, timeout=60)\ndask_gpurt.attach")
    check = """
assert cluster.security is not None and client.scheduler.address.startswith(("tls://", "gateway://"))
status = dask_gpurt.status(client)
(worker,) = status.workers.values()
assert set(worker["parts"].values()) == {"on"}, worker
assert abs(worker["tiers"]["host_limit_bytes"] / 2**30 - 1.0) < 0.1, worker["tiers"]["host_limit_bytes"]
assert client.submit(sum, [1, 2]).result(timeout=60) == 3
cluster.shutdown()
print("done")
"""
    assert "done" in run_python(source + check, tmp_path, env={"DASK_GATEWAY__AUTH__TYPE": "basic"})
