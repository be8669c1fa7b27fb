"""`dask gpurt explain`, `where` and `report`, against real processes."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client

import dask_gpurt
from dask_gpurt.client.ask import ask_scheduler, ask_workers
from dask_gpurt.errors import GpurtError, NoAnswer

from .processes import processes, together

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster


def gpurt(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dask", "gpurt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(600)  # eight commands, each of which imports distributed
def test_from_the_command_line(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler("--preload", "dask_gpurt.preload")
        p.worker(address, "--no-nanny")
        p.worker(address, "--no-nanny")
        with Client(address) as client:
            client.wait_for_workers(2, timeout=60)
            first, _ = client.scheduler_info()["workers"]
            x = client.submit(bytes, 30_000_000, workers=[first], key="x")
            total = client.submit(len, x, key=("total", 0))
            assert total.result() == 30_000_000

            path = tmp_path / "report.html"
            why, why_x, where, where_x, report, no_story, no_place, no_cluster = together(
                lambda: gpurt("explain", address, "('total', 0)"),
                lambda: gpurt("explain", address, "x", "--json"),
                lambda: gpurt("where", address, "x", "('total', 0)"),
                lambda: gpurt("where", address, "x", "--json"),
                lambda: gpurt("report", address, "--out", str(path)),
                lambda: gpurt("explain", address, "(nope"),
                lambda: gpurt("where", address, "(nope"),
                lambda: gpurt("where", "tcp://127.0.0.1:1", "x", "--timeout", "1"),
            )
            assert why.returncode == 0, why.stderr
            assert f"It ran on {first} because nothing is known that Dask does not know" in why.stdout
            got = json.loads(why_x.stdout)
            assert (got["kind"], got["reason"], got["actual"]["worker"]) == ("stock", "no inputs", first)

            assert where.returncode == 0, where.stderr
            assert "2 keys: 2 memory" in where.stdout
            (copy,) = json.loads(where_x.stdout)["keys"]["x"]["copies"]
            assert (copy["address"], copy["tier"]) == (first, "memory")

            assert report.returncode == 0, report.stderr
            assert f"Wrote {path}" in report.stdout
            assert "What the threads did" in path.read_text()

            for answer in (no_story, no_place):
                assert answer.returncode == 1
                assert "'(nope'" in answer.stderr
                assert "Remedy" in answer.stderr
                assert "Traceback" not in answer.stderr
            assert no_cluster.returncode == 1
            assert "no scheduler answers at 'tcp://127.0.0.1:1'" in no_cluster.stderr


def _fail(client: Client) -> None:
    client.close()
    raise ZeroDivisionError


@pytest.mark.parametrize("what", [dask_gpurt.report, lambda path, client: dask_gpurt.record(client, path)])
def test_the_error_of_a_block_goes_on(what: Any, tmp_path: Path) -> None:
    """Its cluster may be gone with it, so that there is nothing to write; without an error that is one."""
    with dask_gpurt.local_cluster(n_workers=1, processes=False, dashboard_address=":0") as cluster:
        with (
            Client(cluster) as client,
            pytest.warns(UserWarning, match="of a block that raised was not written"),
            pytest.raises(ZeroDivisionError),
            what(str(tmp_path / "out"), client),
        ):
            _fail(client)
        with Client(cluster) as client, pytest.raises(GpurtError), what(str(tmp_path / "out"), client):
            client.close()
    assert not list(tmp_path.iterdir())


def test_workers_that_were_asked_again_leave_no_traceback() -> None:
    said: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        asked_alone = asyncio.Event()

        async def run(function: Any, *, workers: list[str] | None, on_error: str) -> dict[str, Any]:
            if workers is None:
                await asked_alone.wait()
                return {"a": 1, "b": 2}
            asked_alone.set()
            return await asyncio.Event().wait() and {}

        async def identity(n_workers: int) -> dict[str, Any]:
            return {"workers": {"a": {}, "b": {}}}

        scheduler = types.SimpleNamespace(identity=identity, address="tcp://there")
        client: Any = types.SimpleNamespace(status="running", scheduler=scheduler, run=run)
        assert await ask_workers(client, len, timeout=1) == {"a": 1, "b": 2}
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(main())
    assert said == []


@pytest.mark.parametrize("status", ["closing", "closed"])
@pytest.mark.parametrize("question", [ask_scheduler, ask_workers])
def test_a_client_that_is_closed_in_the_middle_is_said_to_be(question: Any, status: str) -> None:
    client: Any = types.SimpleNamespace(status="running", scheduler=object())

    async def run(*args: Any, **kwargs: Any) -> None:
        client.status = status
        if status == "closing":
            raise RuntimeError("ConnectionPool is closed")
        client.scheduler = None
        client.scheduler.broadcast()

    client.run = client.run_on_scheduler = run
    with pytest.raises(NoAnswer, match="the client closed"):
        asyncio.run(question(client, len, timeout=10))


@pytest.mark.parametrize("question", [ask_scheduler, ask_workers])
def test_a_scheduler_that_has_ended_is_not_said_to_be_busy(question: Any) -> None:
    """The client tries to connect again meanwhile, and a question waits for that."""

    async def wait(*args: Any, **kwargs: Any) -> None:
        await asyncio.Event().wait()

    scheduler = types.SimpleNamespace(identity=wait, address="tcp://there")
    client: Any = types.SimpleNamespace(status="connecting", scheduler=scheduler, run=wait, run_on_scheduler=wait)
    with pytest.raises(NoAnswer, match=r"connection to the scheduler at 'tcp://there' is lost, .* 0\.1 s"):
        asyncio.run(question(client, len, timeout=0.1))


def test_a_scheduler_with_an_older_package() -> None:
    """A function that is not there is an error of unpickling."""

    async def run_on_scheduler(function: Any) -> None:
        raise AttributeError("Can't get attribute 'newest' on <module 'dask_gpurt.client.remote'>")

    client: Any = types.SimpleNamespace(status="running", scheduler=object(), run_on_scheduler=run_on_scheduler)
    with pytest.raises(GpurtError, match="install the same version"):
        asyncio.run(ask_scheduler(client, max, timeout=10))
