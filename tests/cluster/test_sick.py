"""What is asked of a sick cluster answers in limited time, and says who did not answer. Real processes, some stopped.

No test measures time. Where something must be known at once, the timeout is so long that a command that waited for it
would not end before the test does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import dask.config
import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster
from distributed.security import Security

import dask_gpurt
from dask_gpurt.cli import gpurt as commands
from dask_gpurt.errors import GpurtError, InstallError, NoAnswer
from dask_gpurt.observe.answers.summary import LINES, WIDTH

from .processes import processes, together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Each command imports distributed, which takes long on a machine with other work.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PRELOAD = ("--preload", "dask_gpurt.preload")
#: seconds that no test lasts
NEVER = "1000"


def gpurt(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dask", "gpurt", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=150, env={**os.environ, **(env or {})}
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a command failed with."""
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_stopped_worker_is_named_and_the_others_answer(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler(*PRELOAD)
        p.worker(address, "--name", "well", "--no-nanny")
        p.worker(address, "--name", "ill", "--no-nanny")
        with Client(address) as client:
            client.wait_for_workers(2, timeout=60)
            workers = client.scheduler_info()["workers"]
            ill = next(a for a, w in workers.items() if w["name"] == "ill")
            x = client.submit(bytes, 1000, workers=["ill"], key="x")
            y = client.submit(bytes, 1000, workers=["well"], key="y")
            assert len(x.result()) == len(y.result()) == 1000
            pid = client.run(os.getpid)[ill]
            with stopped(pid):
                path = tmp_path / "sick.html"

                def report() -> Any:
                    with dask_gpurt.report(str(path), client, timeout=4) as made:
                        pass
                    return made.run

                got, story, places, run = together(
                    lambda: dask_gpurt.status(client, timeout=4),
                    lambda: dask_gpurt.explain(client, "x", timeout=4),
                    lambda: dask_gpurt.where(client, ["x", "y"], timeout=4),
                    report,
                )
                assert got.silent == {ill: "no answer within 4 s"}
                assert list(got.having) == [a for a in workers if a != ill]
                text = repr(got)
                assert f"ill ({ill}): no answer within 4 s" in text
                assert f"look at ill ({ill})" in text
                assert len(text.splitlines()) <= LINES
                assert story.worker == ill
                assert (places["x"].copies[0].tier, places["y"].copies[0].tier) == ("unknown", "memory")
                assert f"no answer from {ill}" in repr(places)

                assert list(run.silent) == [ill]
                assert f"No answer from ill ({ill})" in path.read_text()

                done, report_done, where_done = together(
                    lambda: gpurt("status", address, "--timeout", "4"),
                    lambda: gpurt("report", address, "--timeout", "4", "--out", str(path)),
                    lambda: gpurt("where", address, "x", "--timeout", "4"),
                )
                assert done.returncode == 1, done.stderr
                assert f"ill ({ill}): no answer within 4 s" in done.stdout
                assert done.stderr == ""
                assert (report_done.returncode, f"No answer from {ill}" in report_done.stderr) == (1, True)
                assert (where_done.returncode, f"no answer from {ill}" in where_done.stdout) == (1, True)
            assert dask_gpurt.status(client).silent == {}


@pytest.mark.slow
def test_a_stopped_scheduler_ends_every_question(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler(*PRELOAD)
        p.worker(address, "--no-nanny")
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            with stopped(p.running[0][0].pid):

                def refused(ask: Callable[[], Any]) -> None:
                    with pytest.raises(NoAnswer, match="does not answer within 1 s"):
                        ask()

                asks: tuple[Callable[[], Any], ...] = (
                    lambda: dask_gpurt.status(client, timeout=1),
                    lambda: dask_gpurt.explain(client, "x", timeout=1),
                    lambda: dask_gpurt.where(client, "x", timeout=1),
                    lambda: dask_gpurt.report(str(tmp_path / "r.html"), client, timeout=1).__enter__(),
                    lambda: dask_gpurt.record(client, tmp_path / "run.trace", timeout=1).__enter__(),
                )
                together(*(partial(refused, ask) for ask in asks))
                with pytest.raises(NoAnswer, match="it accepts connections, and says nothing for 1 s"):
                    dask_gpurt.status(address, timeout=1)
                commands = (("status", address), ("explain", address, "x"), ("where", address, "x"))
                for done in together(*(partial(gpurt, *command, "--timeout", "1") for command in commands)):
                    line = one_line(done)
                    assert "it accepts connections, and says nothing for 1 s. Remedy: " in line
            assert dask_gpurt.status(client, timeout=60).installed


def test_a_wrong_address_is_one_line_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening: refused
        closed = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        wrong = (
            (closed, "nothing listens there"),
            ("tcp://no.such.host.invalid:8786", "the host 'no.such.host.invalid' is not known"),
            ("nonsense://host:1", "nonsense"),
            ("tcp://host", "port"),
            ("tls://127.0.0.1:8786", "tls:// needs certificates, and there are none"),
        )
        answers = together(*(partial(gpurt, "status", address, "--timeout", NEVER) for address, _ in wrong))
        for (address, says), done in zip(wrong, answers, strict=True):
            line = one_line(done)
            assert line.startswith(f"Error: no scheduler answers at '{address}': ")
            assert says in line
            assert "Remedy: " in line
        commands = (("explain", closed, "x"), ("where", closed, "x"), ("report", closed))
        for done in together(*(partial(gpurt, *command, "--timeout", NEVER) for command in commands)):
            assert "nothing listens there" in one_line(done)
        with pytest.raises(NoAnswer, match="nothing listens there"):
            dask_gpurt.record(closed, tmp_path / "run.trace").__enter__()
        env = {"DASK_SCHEDULER_ADDRESS": closed}
        *configured, without = together(
            partial(gpurt, "status", "--timeout", NEVER, env=env),
            partial(gpurt, "where", "x", "--timeout", NEVER, env=env),
            partial(gpurt, "status"),
        )
        for done in configured:
            assert f"'{closed}': nothing listens there" in one_line(done)
    assert "there is no client, and no address" in one_line(without)


@pytest.mark.parametrize("scheme", ["ws", "wss"])
def test_an_address_of_websockets(scheme: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        says = "nothing listens there" if scheme == "ws" else "wss:// needs certificates, and there are none"
        with pytest.raises(NoAnswer, match=says):
            dask_gpurt.status(f"{scheme}://127.0.0.1:{taken.getsockname()[1]}", timeout=3)


def test_a_name_that_no_host_can_have() -> None:
    with pytest.raises(NoAnswer, match="is not known"):
        dask_gpurt.status(f"tcp://{'x' * 70}:8786", timeout=3)


def test_a_host_with_two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As localhost has in most files of hosts: what is said is not that something else listens there."""
    stock = socket.getaddrinfo

    def both(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "both.invalid":
            return stock(host, *args, **kwargs)
        return [one for place in ("::1", "127.0.0.1") for one in stock(place, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening: refused
        with pytest.raises(NoAnswer, match="nothing listens there"):
            dask_gpurt.status(f"tcp://both.invalid:{taken.getsockname()[1]}", timeout=3)


def test_a_host_to_which_no_way_leads() -> None:
    # No connection goes to many hosts at once, so this is unreachable on each machine.
    with pytest.raises(NoAnswer, match=r"no way leads there \(Network is unreachable\)"):
        dask_gpurt.status("tcp://224.0.0.1:8786", timeout=3)


def test_something_else_than_a_scheduler(tmp_path: Path) -> None:
    import http.server
    import threading

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(NoAnswer, match="Remedy: "):
            dask_gpurt.status(f"tcp://127.0.0.1:{server.server_address[1]}", timeout=2)
        server.shutdown()


def test_tls_by_options_and_by_configuration(tmp_path: Path) -> None:
    made = Security.temporary()
    files = {}
    for name, text in (
        ("ca-file", made.tls_ca_file),
        ("cert", made.tls_client_cert),
        ("key", made.tls_client_key),
    ):
        files[name] = tmp_path / f"{name}.pem"
        files[name].write_text(text)
    options = [word for name, path in files.items() for word in (f"--tls-{name}", str(path))]
    with processes(tmp_path) as p:
        address = p.scheduler("--protocol", "tls", *options, *PRELOAD)
        assert address.startswith("tls://")
        done = gpurt("status", address, *options, "--timeout", "60")
        assert done.returncode == 0, done.stderr
        assert "on 0 of 0 workers" in done.stdout
        plain = address.replace("tls://", "tcp://")
        line = one_line(gpurt("status", plain, "--timeout", NEVER))
        assert f"it speaks TLS. Remedy: {address} with --tls-ca-file, --tls-cert and --tls-key" in line
        other = tmp_path / "other"
        other.mkdir()
        stranger = Security.temporary()
        for name, text in (
            ("ca-file", stranger.tls_ca_file),
            ("cert", stranger.tls_client_cert),
            ("key", stranger.tls_client_key),
        ):
            (other / f"{name}.pem").write_text(text)
        theirs = [word for name in files for word in (f"--tls-{name}", str(other / f"{name}.pem"))]
        assert "TLS failed: " in one_line(gpurt("status", address, *theirs, "--timeout", NEVER))
        with dask.config.set(
            {
                "distributed.comm.tls.ca-file": str(files["ca-file"]),
                "distributed.comm.tls.client.cert": str(files["cert"]),
                "distributed.comm.tls.client.key": str(files["key"]),
                "scheduler-address": address,
            }
        ):
            assert dask_gpurt.status().installed


def test_an_address_and_an_asynchronous_client_do_for_every_question(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler(*PRELOAD)
        p.worker(address, "--no-nanny")
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=60)
            x = client.submit(bytes, 10, key="x")
            x.result()
            with dask.config.set({"scheduler-address": address}):
                assert dask_gpurt.status().installed
                assert dask_gpurt.explain(None, "x").kind == "stock"
                with dask_gpurt.report(str(tmp_path / "none.html")):
                    client.submit(bytes, 12).result()
            assert len(dask_gpurt.where(address, "x").places) == 1
            with dask_gpurt.report(str(tmp_path / "address.html"), address) as made:
                client.submit(bytes, 11).result()
            assert made.run is not None
            assert made.run.task_count == 1
            with dask_gpurt.record(address, tmp_path / "address.trace") as recorded:
                client.submit(bytes, 13).result()
            assert recorded.summary["records"] > 0

            async def questions() -> Any:
                async with Client(address, asynchronous=True, set_as_default=False) as own:
                    assert (await dask_gpurt.status(own)).installed
                    assert (await dask_gpurt.explain(own, "x")).kind == "stock"
                    assert len((await dask_gpurt.where(own, "x")).places) == 1
                    async with dask_gpurt.report(str(tmp_path / "async.html"), own) as made:
                        await own.submit(bytes, 14)
                    with pytest.raises(TypeError, match="async with"), dask_gpurt.report("never.html", own):
                        pass
                    return made.run

            run = asyncio.run(questions())
            assert run.task_count == 1
        with pytest.raises(GpurtError, match="the client is closed"):
            dask_gpurt.status(client)


def test_an_asynchronous_cluster(tmp_path: Path) -> None:
    async def questions() -> None:
        async with LocalCluster(n_workers=1, processes=False, asynchronous=True, dashboard_address=":0") as cluster:
            assert (await dask_gpurt.attach(cluster)).installed
            assert (await dask_gpurt.status(cluster)).silent == {}
            async with dask_gpurt.report(str(tmp_path / "run.html"), cluster) as made:
                pass
            assert made.run is not None
            await dask_gpurt.detach(cluster)

    asyncio.run(questions())


def test_a_cluster_of_this_process_that_is_closed() -> None:
    """Dask tries its address until the time is over."""
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        pass
    with pytest.raises(NoAnswer, match="nothing listens there in this process"):
        dask_gpurt.status(cluster, timeout=1)
    with pytest.raises(NoAnswer, match="does not match host"):
        dask_gpurt.status("inproc://192.0.2.9/1/1", timeout=1)


@pytest.mark.slow
def test_top_looks_again(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler(*PRELOAD)
        done = gpurt("top", address, "--interval", "0", "--times", "2", "--timeout", "60")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("on 0 of 0 workers") == 2
        with stopped(p.running[0][0].pid):
            assert "says nothing for 1 s" in one_line(gpurt("top", address, "--timeout", "1"))


@pytest.mark.slow
def test_top_finds_a_scheduler_that_was_started_again(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler(*PRELOAD)
        port = address.rpartition(":")[2]
        command = [sys.executable, "-m", "dask", "gpurt", "top", address, "--interval", "0.2"]
        shown = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert shown.stdout is not None
        try:
            lines = iter(shown.stdout)
            next(line for line in lines if "on 0 of 0 workers" in line)
            p.running[0][0].kill()
            p.running[0][0].wait()
            next(line for line in lines if "nothing listens there" in line)
            again = ("--host", "127.0.0.1", "--port", port, "--dashboard-address", "127.0.0.1:0", *PRELOAD)
            p.start("scheduler", *again)
            next(line for line in lines if "on 0 of 0 workers" in line)
            shown.send_signal(signal.SIGINT)
            assert shown.wait(60) == 0
        finally:
            shown.kill()
            shown.wait()


def test_the_text_fits(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler()
        done = gpurt("status", address, "--timeout", "60")
        assert done.returncode == 1
        assert done.stderr == ""
        lines = done.stdout.splitlines()
        assert lines[0] == "dask-gpurt is not installed on this scheduler"
        assert "dask_gpurt.attach(client)" in lines[-1]
        assert len(lines) <= LINES
        assert max(map(len, lines)) <= WIDTH


def test_a_worker_without_the_package_has_answered(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "dask_gpurt").mkdir(parents=True)
    (theirs / "dask_gpurt/__init__.py").write_text("raise ModuleNotFoundError('no dask_gpurt here')")
    env = {"PYTHONPATH": os.pathsep.join([str(theirs), os.environ.get("PYTHONPATH", "")])}
    with processes(tmp_path) as p:
        address = p.scheduler(*PRELOAD)
        p.start("worker", address, "--name", "odd", "--no-nanny", "--no-dashboard", env=env)
        p.worker(address, "--name", "well", "--no-nanny")
        with Client(address) as client:
            client.wait_for_workers(2, timeout=60)
            assert client.submit(len, "abc", workers=["odd"]).result() == 3
            with dask_gpurt.report(str(tmp_path / "block.html"), client) as made:
                pass
            assert made.run is not None
            assert made.run.silent == {}
            assert dask_gpurt.status(client).silent == {}
        for more in ([], ["--run", "-1"]):
            done = CliRunner().invoke(commands, ["report", address, "--out", str(tmp_path / "run.html"), *more])
            assert done.exit_code == 0, done.output
            if not more:
                assert "Nothing is known of what workers without dask-gpurt did: odd (tcp://" in done.output
                assert "without dask-gpurt did" in (tmp_path / "run.html").read_text()


def test_a_scheduler_without_the_package(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "dask_gpurt").mkdir(parents=True)
    (theirs / "dask_gpurt/__init__.py").write_text("raise ModuleNotFoundError('no dask_gpurt here')")
    env = {"PYTHONPATH": os.pathsep.join([str(theirs), os.environ.get("PYTHONPATH", "")])}
    with processes(theirs, env) as p:
        address = p.scheduler()
        p.worker(address, "--name", "odd", "--no-nanny")
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            got = dask_gpurt.status(client)
            assert not got.installed
            assert got.silent == {}
            lines = repr(got).splitlines()
            assert lines[0] == "dask-gpurt: the scheduler cannot import dask_gpurt (no dask_gpurt here)"
            assert lines[-1].endswith("install the same version of dask-gpurt there")
            for ask in (dask_gpurt.explain, dask_gpurt.where):
                with pytest.raises(GpurtError, match=r"the scheduler cannot import dask_gpurt .* Remedy: install"):
                    ask(client, "x")
            for change in (dask_gpurt.attach, dask_gpurt.detach):
                with pytest.raises(InstallError, match=r"the scheduler cannot import dask_gpurt .* Remedy: install"):
                    change(client)
        assert "the scheduler cannot import" in one_line(gpurt("report", address))


@pytest.mark.parametrize("change", [dask_gpurt.attach, dask_gpurt.detach])
def test_a_scheduler_that_was_killed_is_not_changed(change: Callable[[Client], Any], tmp_path: Path) -> None:
    with processes(tmp_path) as p, Client(p.scheduler(), timeout=5) as client:
        p.running[0][0].kill()
        with pytest.raises(GpurtError, match=r"connection to the scheduler|the client is closed"):
            change(client)
