"""A cluster under TLS as a site starts it: certificates in files, a range of ports for the shuffle's listeners."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from distributed import Client

import dask_gpurt
from tests.shuffle.helpers import left, ordered, source, whole
from tests.shuffle.transport.certificates import Authority
from tests.shuffle.transport.test_transports import taken_ports

from .processes import processes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def shuffled(address: str, security: Any, workers: int) -> list[Any]:
    """Shuffle on it; the data plane's figures of each worker."""
    with Client(address, security=security) as client:
        client.wait_for_workers(workers, timeout=120)
        while (got := dask_gpurt.status(client)).scheduler["shuffle"]["workers_able"] < workers:
            time.sleep(0.1)
        rows = source(left, 20).shuffle("k", npartitions=7, shuffle_method="p2p").compute()
        want = ordered(whole(left, 20))
        pd.testing.assert_frame_equal(ordered(rows), want.astype(dict(rows.dtypes)))
        got = dask_gpurt.status(client)
        assert got.scheduler["shuffle"]["runs"] == 1
        return [w["shuffle"]["transport"] for w in got.workers.values()]


def test_certificates_in_files_and_a_range_of_ports(tmp_path: Path) -> None:
    security = Authority().member()
    files = {"ca-file": security.tls_ca_file, "cert": security.tls_worker_cert, "key": security.tls_worker_key}
    options = []
    for name, text in files.items():
        (tmp_path / f"{name}.pem").write_text(str(text))
        options += [f"--tls-{name}", str(tmp_path / f"{name}.pem")]
    free = taken_ports(2)
    first = free[0].getsockname()[1]
    for sock in free:
        sock.close()
    # The graph holds functions of these tests, and the processes begin in another folder.
    root = str(Path(__file__).parents[2])
    env = {"DASK_GPURT__SHUFFLE__LISTEN_PORTS": f"{first}:{first + 1}", "PYTHONPATH": root}
    with processes(tmp_path, env) as p:
        address = p.scheduler("--protocol", "tls", *options, "--preload", "dask_gpurt.preload")
        for _ in range(2):
            p.worker(address, "--protocol", "tls", "--no-nanny", *options)
        transports = shuffled(address, security, 2)
        assert all(t["encrypted"] and set(t["transports"]) == {"tls"} for t in transports)
        assert {x["transport"] for t in transports for x in t["links"] if x["messages_out"]} == {"tls"}
        listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=False).stdout
        assert not listening or all(f":{port} " in listening for port in (first, first + 1))
        command = [sys.executable, "-m", "dask", "gpurt", "status", address, *options, "--timeout", "60"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=150, env={**os.environ})
        assert " sent by tls, " in " ".join(said.stdout.split())


@pytest.mark.slow
def test_workers_of_an_older_certificate_shuffle_over_rpc(tmp_path: Path) -> None:
    """One worker whose data plane checks by another authority, as after its files were changed: right rows, no hang."""
    security = Authority().member()
    stranger = Authority("another cluster").member()
    with dask_gpurt.local_cluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", security=security, protocol="tls"
    ) as cluster:
        with Client(cluster) as client:

            def change(dask_worker: Any) -> None:
                dask_worker.security = stranger

            (one, _) = client.run(lambda dask_worker: None)
            client.run(change, workers=[one])
        transports = shuffled(cluster.scheduler_address, security, 2)
        assert sum(t["transports"].get("tls", {}).get("handshakes_failed", 0) for t in transports) >= 2
        assert {x["transport"] for t in transports for x in t["links"] if x["messages_out"]} == {"rpc"}
        with Client(cluster) as client:
            assert "TLS handshakes failed" in " ".join(str(dask_gpurt.status(client)).split())
