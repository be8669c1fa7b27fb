"""The blocks of docs/deploy/processes.md: commands of users as processes, units of systemd, hosts over SSH."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from distributed import Client

import dask_gpurt
from tests.cluster.processes import Processes, processes

from .blocks import path_entries, run_python, text
from .test_deploy_local import CHECK, END

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dask_gpurt.observe.answers.status import Status


def _commands(name: str) -> list[list[str]]:
    """The commands of a block, without comments and without ``export`` lines."""
    lines = [line.split("#")[0].strip() for line in text(name).splitlines()]
    return [shlex.split(line) for line in lines if line and not line.startswith("export ")]


def _scheduler(p: Processes, command: list[str]) -> str:
    """Start it as the page says, on a free port."""
    assert command[:2] == ["dask", "scheduler"]
    return p.scheduler(*command[2:])


def _installed(address: str, workers: int) -> Status:
    with Client(address) as client:
        client.wait_for_workers(workers, timeout=60)
        status = dask_gpurt.status(client)
        assert status.installed
        assert all(set(w["parts"].values()) == {"on"} for w in status.workers.values()), status.workers
        return status


@pytest.mark.cluster
def test_commands_and_the_check(tmp_path: Path) -> None:
    scheduler, worker = _commands("commands")
    assert worker[:3] == ["dask", "worker", "tcp://10.0.0.1:8786"]
    with processes(tmp_path) as p:
        address = _scheduler(p, scheduler)
        p.worker(address, *worker[3:])
        assert len(_installed(address, 2).workers) == 2
        run_python(text("check", address=address), tmp_path)


@pytest.mark.slow
@pytest.mark.cluster
def test_settings_on_the_command_line_reach_workers(tmp_path: Path) -> None:
    (scheduler,) = _commands("commands-settings")
    with processes(tmp_path) as p:
        address = _scheduler(p, scheduler)
        p.worker(address, "--memory-limit", "1 GiB")
        (worker,) = _installed(address, 1).workers.values()
        assert worker["tiers"]["host_limit_bytes"] == 2**29


@pytest.mark.cluster
def test_the_environment_of_the_scheduler_is_enough(tmp_path: Path) -> None:
    exports = [line.removeprefix("export ") for line in text("environment").splitlines() if line.startswith("export ")]
    (scheduler,) = _commands("environment")
    with processes(tmp_path, dict(e.split("=", 1) for e in exports)) as p, processes(_folder(tmp_path)) as others:
        address = _scheduler(p, scheduler)
        others.worker(address, "--memory-limit", "1 GiB")
        (worker,) = _installed(address, 1).workers.values()
        assert worker["tiers"]["host_limit_bytes"] == 2**29


def _folder(tmp_path: Path) -> Path:
    (tmp_path / "others").mkdir()
    return tmp_path / "others"


@pytest.mark.slow
@pytest.mark.cluster
def test_the_scheduler_for_gpu_workers(tmp_path: Path) -> None:
    scheduler, worker = _commands("cuda-worker")
    assert worker[:3] == ["dask", "cuda", "worker"]
    assert "--preload" not in worker
    with processes(tmp_path) as p:
        address = _scheduler(p, scheduler)
        p.worker(address)
        _installed(address, 1)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["systemd-scheduler", "systemd-worker"])
def test_units_are_what_systemd_takes(name: str, tmp_path: Path) -> None:
    unit = tmp_path / f"{name}.service"
    # It looks for the executable, which is here under another name.
    source = text(name).replace("/opt/dask/bin/dask ", f"{sys.executable} -m dask ")
    unit.write_text(source.replace("User=dask", f"User={getpass.getuser()}"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if str(unit) in line or unit.name in line]
    assert complaints == []
    unit.write_text(unit.read_text().replace("Restart=on-failure", "Restart=perhaps"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert "restart" in done.stderr.lower(), "systemd-analyze found nothing wrong with a wrong unit"


#: an SSH server that runs what it is asked to, for the one key that it knows, until the client has gone
SERVER = """
import asyncio, asyncssh, contextlib, os, signal

async def handle(process):
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_shell(
        process.command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
    )
    await process.redirect(stdout=child.stdout, stderr=child.stderr)
    gone, ended = asyncio.ensure_future(process.stdin.read()), asyncio.ensure_future(child.wait())
    await asyncio.wait([gone, ended], return_when=asyncio.FIRST_COMPLETED)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    process.exit(await ended)

async def main():
    server = await asyncssh.listen(
        "127.0.0.1", 0, server_host_keys=["key"], authorized_client_keys="key.pub", process_factory=handle
    )
    print(server.get_port(), flush=True)
    await server.wait_closed()

asyncio.run(main())
"""


@pytest.fixture
def ssh_port(tmp_path: Path) -> Iterator[int]:
    """An SSH server on the loopback address, for the key in `tmp_path`."""
    asyncssh = pytest.importorskip("asyncssh")
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(str(tmp_path / "key"))
    key.write_public_key(str(tmp_path / "key.pub"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path_entries())}
    server = subprocess.Popen([sys.executable, "-c", SERVER], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert server.stdout is not None
        yield int(server.stdout.readline())
    finally:
        server.terminate()
        server.wait(10)


@pytest.mark.cluster
@pytest.mark.slow
def test_ssh(ssh_port: int, tmp_path: Path) -> None:
    old, new = (
        '    worker_options={"nthreads": 2},\n',
        (
            '    worker_options={"nthreads": 2},\n'
            f"    connect_options=dict(port={ssh_port}, known_hosts=None, client_keys=['key']),\n"
            f"    remote_python={sys.executable!r},\n"
        ),
    )
    source = text("ssh").replace("10.0.0.1", "127.0.0.1").replace("10.0.0.2", "127.0.0.1")
    assert old in source
    source = source.replace(old, new).replace('preload"]}', 'preload"], "dashboard_address": ":0"}')
    assert "done" in run_python(source + CHECK.format(workers=2) + END, tmp_path)
