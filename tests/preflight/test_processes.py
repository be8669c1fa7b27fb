"""The gate with real processes: what is sick gets no task, and restarts, retirements and adaptive clusters work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client, LocalCluster
from distributed.utils_test import inc

import dask_gpurt
from tests.cluster.processes import arguments, processes, wait_text

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PRELOAD = "dask_gpurt.preload"


def hold(**settings: Any) -> list[str]:
    return ["--preload", PRELOAD, *arguments(preflight="hold", **settings)]


def read_only(folder: Path) -> list[str]:
    """A command before a command, for which a folder is read-only. Permissions alone do not bind root."""
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(folder)]
    if sys.platform != "linux" or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    return prefix


def checks(client: Client) -> dict[str, Any]:
    out: dict[str, Any] = dask_gpurt.status(client).scheduler["preflight"]
    return out


def until(client: Client, **phases: int) -> dict[str, Any]:
    """Wait until so many workers are in each phase."""
    import time

    deadline = time.monotonic() + 120
    while True:
        got = checks(client)
        if all(got["phases"][phase] == count for phase, count in phases.items()):
            return got
        assert time.monotonic() < deadline, got
        time.sleep(0.1)


def test_sick_workers_get_no_task(tmp_path: Path) -> None:
    """One lacks a module, one cannot write where values are spilled to. The third one does all."""
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "only_some_have_it.py").write_text("")
    spill = tmp_path / "spill"
    spill.mkdir()
    lacks, has = os.environ.get("PYTHONPATH", ""), f"{extra}:{os.environ.get('PYTHONPATH', '')}"
    prefix = read_only(spill)
    settings = hold(preflight_imports="['only_some_have_it']", tiers_directory=spill)
    with processes(tmp_path, {"PYTHONPATH": has}) as p:
        address = p.scheduler(*settings)
        p.worker(address, "--name", "lacks", env={"PYTHONPATH": lacks})
        p.worker(address, "--name", "read-only", prefix=prefix)
        p.worker(address, "--name", "sound")
        with Client(address) as client:
            client.wait_for_workers(1, timeout=120)
            shown = until(client, passed=1, held=2)
            assert client.gather(client.map(inc, range(50), pure=False)) == list(range(1, 51))

            def tasks(dask_worker: Any) -> int:
                return len(dask_worker.state.tasks)

            names = {w["name"]: a for a, w in client.scheduler_info(n_workers=-1)["workers"].items()}
            held = {names["lacks"], names["read-only"]}
            assert {a for a, m in shown["workers"].items() if m["kept"]} == held
            assert set(client.run(tasks, workers=list(held)).values()) == {0}
            text = dask_gpurt.status(client).text(verbose=True)
            assert "only_some_have_it" in text
            assert "gets no task" in text
            findings = {f["check"] for f in shown["workers"][names["read-only"]]["findings"]}
            assert "setup" in findings


@pytest.mark.slow
def test_a_restart_checks_again(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler(*hold())
        for _ in range(2):
            p.worker(address)
        with Client(address) as client:
            client.wait_for_workers(2, timeout=120)
            before = until(client, passed=2)["counts"]["clean"]
            client.restart(timeout=120)
            client.wait_for_workers(2, timeout=120)
            assert client.submit(inc, 1).result() == 2
            assert until(client, passed=2, checking=0)["counts"]["clean"] == before + 2
            # A worker that dies comes back by its nanny.
            pid = client.run(os.getpid)
            gone = next(iter(pid))
            os.kill(pid[gone], signal.SIGKILL)
            assert until(client, passed=2, checking=0)["phases"]["held"] == 0
            while gone in client.scheduler_info(n_workers=-1)["workers"]:
                until(client, checking=0)
            client.wait_for_workers(2, timeout=120)
            assert client.gather(client.map(inc, range(20), pure=False)) == list(range(1, 21))
            assert until(client, passed=2, checking=0)["counts"]["clean"] == before + 3


@pytest.mark.slow
def test_a_stock_worker_passes_with_a_warning(tmp_path: Path) -> None:
    """This package is not importable there."""
    hidden = tmp_path / "hidden" / "dask_gpurt"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError('not installed', name='dask_gpurt')")
    with processes(tmp_path) as p:
        address = p.scheduler(*hold())
        _, log = p.worker(address, env={"PYTHONPATH": str(hidden.parent)})
        with Client(address) as client:
            client.wait_for_workers(1, timeout=120)
            assert client.submit(sum, [1, 2]).result() == 3
            (member,) = until(client, passed=1)["workers"].values()
            assert [(f["check"], f["state"]) for f in member["findings"]] == [("setup", "warn")]
        wait_text(log, "runs stock")


@pytest.mark.slow
def test_an_adaptive_cluster(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "scheduler_kwargs": {"preload": [PRELOAD], "preload_argv": [arguments(preflight="hold")]}
    }
    with (
        LocalCluster(n_workers=0, threads_per_worker=1, processes=False, dashboard_address=":0", **options) as cluster,
        Client(cluster) as client,
    ):
        cluster.adapt(minimum=0, maximum=2, interval="100ms", wait_count=1)
        assert client.gather(client.map(inc, range(20), pure=False)) == list(range(1, 21))
        cluster.adapt(minimum=0, maximum=2, interval="100ms", wait_count=1)
        until(client, passed=0, held=0, checking=0)
        assert client.submit(inc, 5, pure=False).result() == 6


def test_a_shuffle_with_a_held_worker(tmp_path: Path) -> None:
    """Outputs are pinned to workers that run."""
    import pandas as pd
    from dask import dataframe as dd

    with processes(tmp_path) as p:
        extra = tmp_path / "extra"
        extra.mkdir()
        (extra / "only_some_have_it.py").write_text("")
        has = {"PYTHONPATH": f"{extra}:{os.environ.get('PYTHONPATH', '')}"}
        address = p.scheduler(*hold(preflight_imports="['only_some_have_it']"))
        p.worker(address, "--no-nanny")
        for _ in range(2):
            p.worker(address, "--no-nanny", env=has)
        with Client(address) as client:
            client.wait_for_workers(2, timeout=120)
            until(client, passed=2, held=1)
            frame = pd.DataFrame({"x": range(1000), "y": range(1000)})
            got = dd.from_pandas(frame, npartitions=8).shuffle("x", npartitions=8).y.sum().compute()
            assert got == frame.y.sum()
