"""The blocks of docs/deploy/local.md, each in a process of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import dask
import pytest

from tests.cluster.processes import processes

from .blocks import run_python, text

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

#: after a block that leaves `client`: all of it is on, and it works
CHECK = """
import dask_gpurt
client.wait_for_workers({workers}, timeout=60)
status = dask_gpurt.status(client).to_dict()
assert set(status["scheduler"]["parts"].values()) == {{"on"}}, status["scheduler"]["parts"]
assert len(status["workers"]) >= {workers}
assert all(set(w["parts"].values()) == {{"on"}} for w in status["workers"].values()), status["workers"]
assert client.submit(sum, [1, 2]).result(timeout=60) == 3
"""
END = "\nclient.close()\ncluster.close()\nprint('done')\n"


@pytest.mark.parametrize("name", ["local-cluster", "local-stock"])
def test_a_local_cluster(name: str, tmp_path: Path) -> None:
    source = text(name).replace("n_workers=2", "n_workers=2, dashboard_address=':0'")
    assert "done" in run_python(source + CHECK.format(workers=2) + END, tmp_path)


@pytest.mark.slow
def test_settings_are_an_argument(tmp_path: Path) -> None:
    source = text("local-settings").replace("n_workers=2", "n_workers=2, dashboard_address=':0'")
    check = """
client = cluster.get_client()
client.wait_for_workers(2, timeout=60)
(limits,) = {w["tiers"]["host_limit_bytes"] for w in dask_gpurt.status(client).workers.values()}
(memory,) = {w["memory_limit"] for w in client.scheduler_info()["workers"].values()}
assert abs(limits - 0.5 * memory) <= 1, (limits, memory)
"""
    assert "done" in run_python("import dask_gpurt\n" + source + check + END, tmp_path)


@pytest.mark.slow
def test_attach(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler()
        p.worker(address)
        source = text("attach", address=address).replace(
            "dask_gpurt.attach", "client.wait_for_workers(1)\ndask_gpurt.attach"
        )
        assert "done" in run_python(source + CHECK.format(workers=1) + "client.close()\nprint('done')\n", tmp_path)


@pytest.mark.slow
def test_asynchronous(tmp_path: Path) -> None:
    source = text("local-async").replace("n_workers=2", "n_workers=2, dashboard_address=':0'")
    out = run_python(source + "\nimport asyncio\nprint('sum', asyncio.run(main()))\n", tmp_path)
    assert "sum 3" in out
    assert "dask-gpurt" in out


@pytest.mark.slow
def test_an_adaptive_cluster_grows_and_its_workers_have_the_extension(tmp_path: Path) -> None:
    source = text("adaptive").replace("n_workers=1", "n_workers=1, dashboard_address=':0'")
    work = """
import threading
from distributed import Event, wait
go = Event("go")
futures = client.map(lambda i: Event("go").wait(timeout=120), range(40), pure=False)
"""
    # The tasks wait until more than one worker is there: nothing here depends on how fast it grows.
    grown = CHECK.replace("assert client.submit(sum, [1, 2]).result(timeout=60) == 3\n", "").format(workers=2)
    assert "done" in run_python(
        source + work + grown + "go.set()\nassert all(client.gather(futures))\n" + END, tmp_path
    )


@pytest.mark.slow
def test_enable_writes_what_a_scheduler_reads(tmp_path: Path) -> None:
    import subprocess
    import sys

    env = {"DASK_CONFIG": str(tmp_path / "config")}
    command = text("enable").strip()
    assert command.startswith("dask ")
    subprocess.run([sys.executable, "-m", *command.split()], env={**os.environ, **env}, check=True, cwd=tmp_path)
    got = dask.config.collect([str(tmp_path / "config")], env={})
    assert got["distributed"]["scheduler"]["preload"] == ["dask_gpurt.preload"]
    with processes(tmp_path, env) as p:
        address = p.scheduler()
        p.worker(address)
        source = f"from distributed import Client\nclient = Client({address!r})\n" + CHECK.format(workers=1)
        run_python(source + "client.close()\n", tmp_path)
