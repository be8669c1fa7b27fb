"""Each way to break a start, on real processes: a message within seconds, in one line, and nothing left open."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import dask
import pytest
from distributed import Client, LocalCluster, Nanny, Scheduler, SpecCluster

import dask_gpurt
from dask_gpurt.client import local
from dask_gpurt.errors import ConfigError, InstallError
from tests.versions import needs_nannies_that_end

from .processes import Processes, processes, wait_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

PRELOAD = "dask_gpurt.preload"
SCHEDULER = ("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
#: no scheduler is there: the start has to end before it is looked for
WORKER = ("worker", "tcp://127.0.0.1:1", "--host", "127.0.0.1", "--no-dashboard", "--nthreads", "1")
#: stands for a port on which the test listens
TAKEN = "taken"
#: an endpoint where nothing listens
AWAY = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_ALLOW_HTTP": "true",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
}

#: way -> (command, arguments after the preload, environment, what the message says); the environment may preload
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, str], str]] = {
    "typo in an argument": (SCHEDULER, ("--gpurt-polcy", "stock"), {}, "No such option"),
    "typo in the environment": (
        *(SCHEDULER, (), {"DASK_GPURT__TIERS__HOST_LIMITS": "0.5"}),
        "Did you mean gpurt.tiers.host-limit?",
    ),
    "typo, preloaded by the configuration": (
        *(SCHEDULER, (), {"DASK_DISTRIBUTED__SCHEDULER__PRELOAD": PRELOAD, "DASK_GPURT__POLCY": "x"}),
        "Did you mean gpurt.policy?",
    ),
    "folder, preloaded by the configuration": (
        *(WORKER, ("--no-nanny",)),
        {"DASK_DISTRIBUTED__WORKER__PRELOAD": PRELOAD, "DASK_GPURT__TIERS__DIRECTORY": "/proc/none"},
        "set gpurt.tiers.directory to a folder that the worker may write to",
    ),
    "typo, of a worker": (WORKER, ("--gpurt-tiers-host-limits", "0.5"), {}, "--gpurt-tiers-host-limit"),
    "out of range": (SCHEDULER, ("--gpurt-tiers-host-limit", "7"), {}, "must be a number > 0 and <= 1"),
    "out of range, of a worker": (WORKER, ("--gpurt-tiers-host-limit", "7"), {}, "must be a number > 0 and <= 1"),
    "policy that is missing": (SCHEDULER, ("--gpurt-policy", "no_such:Policy"), {}, "importing no_such failed"),
    "policy that is none": (SCHEDULER, ("--gpurt-policy", "json:JSONDecoder"), {}, "has no method decide"),
    "trace in a folder that is missing": (SCHEDULER, ("--gpurt-trace-path", "/proc/none/t"), {}, "gpurt.trace.path is"),
    "folder that cannot be made": (WORKER, ("--gpurt-tiers-directory", "/proc/none"), {}, "which cannot be used"),
    "read-only folder": (WORKER, ("--gpurt-tiers-directory", "/proc"), {}, "'/proc', which cannot be used"),
    "object store that is no URL": (SCHEDULER, ("--gpurt-tiers-object-store", "mybucket"), {}, "'s3://bucket/prefix'"),
    "object store away": (
        *(SCHEDULER, ("--gpurt-tiers-object-store", "s3://bucket/x"), AWAY),
        "where the scheduler cannot write a test object",
    ),
    "DASK_GPURT=1": (SCHEDULER, (), {"DASK_GPURT": "1"}, "Error: dask-gpurt: gpurt: is 1, must be a mapping"),
    "port that is taken": (
        *(("scheduler", "--host", "127.0.0.1", "--port", TAKEN, "--no-dashboard"), (), {}),
        "cannot listen (--host 127.0.0.1, --port ",
    ),
    "port that is taken, of a worker": (
        *((*WORKER, "--nanny-port", TAKEN), (), {}),
        "cannot listen (--host 127.0.0.1, --nanny-port ",
    ),
    "TLS without certificates": (
        *(("scheduler", "--host", "tls://127.0.0.1", "--port", "0", "--no-dashboard"), (), {}),
        "give --tls-ca-file, --tls-cert and --tls-key",
    ),
    "TLS without certificates, of a worker": (
        *(("worker", "tls://127.0.0.1:1", "--no-dashboard"), ("--no-nanny",), {}),
        "give --tls-ca-file, --tls-cert and --tls-key",
    ),
    "unsupported Dask": (SCHEDULER, (), {"PYTHONPATH": "renamed"}, "ShuffleSchedulerPlugin._unset_restriction"),
}
#: a worker logs what ended its start, before the command ends
LOGGED_BY_DASK = {"TLS without certificates, of a worker"}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Any, Path]]]:
    """All of them at once: each spends its time on imports."""
    everything: list[Processes] = []
    out = {}
    listening = socket.create_server(("127.0.0.1", 0))
    for way, (command, arguments, env, _) in WAYS.items():
        directory = tmp_path_factory.mktemp("start")
        if "PYTHONPATH" in env:
            (directory / "sitecustomize.py").write_text(
                "from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin as plugin\n"
                "del plugin._unset_restriction\n"
            )
            env = {"PYTHONPATH": os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])}
        p = Processes(directory, env)
        everything.append(p)
        preload = () if PRELOAD in env.values() else ("--preload", PRELOAD)
        own = [str(listening.getsockname()[1]) if a == TAKEN else a for a in command]
        out[way] = p.start(*own, *preload, *arguments)
    yield out
    listening.close()
    for p in everything:
        p.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_command_ends_with_one_line(way: str, started: dict[str, tuple[Any, Path]]) -> None:
    process, log = started[way]
    code = process.wait(90)
    text = log.read_text()
    assert code == 1, text
    if way not in LOGGED_BY_DASK:
        assert "Traceback" not in text
    lines = text.splitlines()
    assert WAYS[way][3] in lines[-1]
    assert sum(WAYS[way][3] in line for line in lines) == 1


def _reasons(error: BaseException) -> list[str]:
    out = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        out.append(str(error))
    return out


def _start(make: Callable[..., Any], asynchronous: bool) -> None:
    """Start a cluster and close it, one way or the other."""

    async def started() -> None:
        async with make(asynchronous=True):
            pass

    if asynchronous:
        asyncio.run(asyncio.wait_for(started(), 60))
    else:
        make().close()


def _loops() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name == "IO loop"}


ONE: dict[str, Any] = {"n_workers": 1, "processes": False, "dashboard_address": ":0"}


def _local_cluster(**kwargs: Any) -> LocalCluster:
    return LocalCluster(**ONE, **kwargs)


def _spec_cluster(asynchronous: bool = False) -> SpecCluster:
    """As dask-jobqueue makes one: the scheduler in this process, workers elsewhere."""
    options = {"preload": [PRELOAD], "dashboard": False, "dashboard_address": ":0", "port": 0}
    return SpecCluster(scheduler={"cls": Scheduler, "options": options}, workers={}, asynchronous=asynchronous)


@pytest.mark.parametrize(
    ("make", "role"),
    [(_local_cluster, "scheduler"), (_local_cluster, "worker"), (_spec_cluster, "scheduler")],
    ids=["local-scheduler", "local-worker", "spec-scheduler"],
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_cluster_of_this_process_raises(make: Callable[..., Any], asynchronous: bool, role: str) -> None:
    """`SystemExit` would end the thread of the event loop, and `LocalCluster()` would never return."""
    wrong = {f"distributed.{role}.preload": [PRELOAD], "gpurt.polcy": "x"}
    with dask.config.set(wrong), pytest.raises(RuntimeError, match=r"dask-gpurt: .*Did you mean gpurt\.policy\?$"):
        _start(make, asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("processes", [False, True], ids=["threads", "nannies"])
def test_local_cluster_says_what_failed_on_a_worker(
    processes: bool, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "require_folders", lambda folders: None)  # which finds it at once
    options = {**ONE, "processes": processes, "settings": {"tiers.directory": "/proc/none"}}
    before = _loops()
    with pytest.raises(InstallError, match=r"^dask-gpurt: cannot use '/proc/none'.*Remedy.*on-error: stock.*\.$") as e:
        _start(lambda **kwargs: dask_gpurt.local_cluster(**options, **kwargs), asynchronous)
    assert e.value.__suppress_context__  # one line, without Dask's errors that it caused
    assert _loops() <= before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"settings": {"trace.path": "/proc/none/t"}}, r"^dask-gpurt: gpurt\.trace\.path is '/proc/none/t'.*Remedy"),
        ({"settings": {"trace.path": "/dev"}}, r"^dask-gpurt: gpurt\.trace\.path is '/dev'.*folder.*Remedy"),
        ({"scheduler_port": "taken"}, r"^the cluster did not start: .*in use"),
        ({"protocol": "tls://"}, r"^the cluster did not start: .*TLS"),
    ],
    ids=["trace", "trace at a folder", "port taken", "TLS without certificates"],
)
def test_local_cluster_says_what_failed_on_the_scheduler(options: dict[str, Any], says: str) -> None:
    import socket

    before = _loops()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        if "scheduler_port" in options:
            options = {"scheduler_port": taken.getsockname()[1], "protocol": "tcp://"}
        with pytest.raises(InstallError, match=says):
            dask_gpurt.local_cluster(**ONE, **options)
    assert _loops() <= before


def test_an_interrupted_start_of_a_local_cluster_is_given_up(tmp_path: Path) -> None:
    """Else it goes on in its thread, and complains of an interpreter that ends."""
    preload = tmp_path / "interrupts.py"
    preload.write_text(
        "import asyncio, os, signal\n"
        "async def dask_setup(scheduler):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    await asyncio.Event().wait()\n"
    )
    before = _loops()
    was = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            dask_gpurt.local_cluster(**ONE, scheduler_kwargs={"preload": [str(preload)]})
    finally:
        signal.signal(signal.SIGINT, was)
    assert _loops() <= before


@pytest.mark.parametrize("folder", ["/proc/none", "a\0b"])
def test_a_folder_that_none_can_make_is_named_at_once(folder: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^gpurt\.tiers\.directory is '.*', which cannot be used: .*Remedy: a folder"
    ):
        dask_gpurt.local_cluster(**ONE, settings={"tiers.directory": folder})


@needs_nannies_that_end
def test_local_cluster_says_why_a_nanny_can_make_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as without room in /dev/shm, or with too many processes of this user."""
    from distributed.process import AsyncProcess

    def refused(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AsyncProcess, "__init__", refused)
    before = _loops()
    with pytest.raises(
        InstallError, match=r"^the cluster did not start: OSError: \[Errno 28\] No space left on device"
    ):
        dask_gpurt.local_cluster(**(ONE | {"processes": True}))
    assert _loops() <= before


@needs_nannies_that_end
def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    """Each worker's process runs it again, and ends when it makes a cluster of its own."""
    script = tmp_path / "script.py"
    script.write_text("import dask_gpurt\ndask_gpurt.local_cluster(n_workers=1, dashboard_address=':0')\n")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "must create clusters below `if __name__" in ended.stderr.splitlines()[-1]


def test_a_nannys_worker_says_why_it_did_not_start(tmp_path: Path) -> None:
    """A preload of the configuration: nothing of ours is in the process of the command."""
    env = {"DASK_DISTRIBUTED__WORKER__PRELOAD": PRELOAD, "DASK_GPURT__TIERS__DIRECTORY": "/proc/none"}
    with processes(tmp_path, env) as p:
        address = p.scheduler()
        process, log = p.worker(address)
        assert process.wait(60) == 1
        assert "InstallError: dask-gpurt: cannot use '/proc/none'" in log.read_text()


OTHER = """
import click

@click.command()
@click.option("--{flag}")
def dask_setup(server, {name}):
    print("OTHER SAW", {name}, flush=True)
"""


def test_beside_preloads_with_arguments_of_their_own(tmp_path: Path) -> None:
    """dask-gateway's on the command line, dask-cuda's in what it gives to workers; ours given twice."""
    gateway, cuda = tmp_path / "gateway_preload.py", tmp_path / "cuda_preload.py"
    gateway.write_text(OTHER.format(flag="dg-api-address", name="dg_api_address"))
    cuda.write_text(OTHER.format(flag="pool", name="pool"))
    worker_env = {
        "DASK_DISTRIBUTED__WORKER__PRELOAD": str([PRELOAD, str(cuda), PRELOAD]),
        "DASK_DISTRIBUTED__WORKER__PRELOAD_ARGV": "['--pool', '1']",
    }
    (tmp_path / "worker").mkdir()
    with processes(tmp_path) as p, processes(tmp_path / "worker", worker_env) as workers:
        address = p.scheduler(
            *("--preload", str(gateway), "--preload", "dask_gpurt.load", "--preload", "dask_gpurt.load"),
            *("--dg-api-address", "http://gateway"),
        )
        wait_text(p.running[0][1], "OTHER SAW http://gateway")
        _, log = workers.worker(address)
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            # The worker writes so only once the scheduler's answer is there, later than the client counts it.
            text = wait_text(log, "Registered to")
            assert "OTHER SAW 1" in text
            # Before it registers: by its own preload, in spite of arguments that are another's.
            assert text.index("dask-gpurt 0") < text.index("Registered to")
            status = dask_gpurt.status(client)
            assert status.scheduler["parts"]["placement"] == "on"
            assert "on 1 of 1 workers" in repr(status)
            assert client.submit(sum, client.map(int, range(50))).result(timeout=60) == sum(range(50))


def test_local_cluster_keeps_the_preloads_of_the_configuration(tmp_path: Path) -> None:
    """Preloads that a server is given win over the configuration's."""
    mine = tmp_path / "local_mine.py"
    mine.write_text("def dask_setup(server):\n    server.seen = True\n")
    config = {
        "distributed.scheduler.preload": str(mine),
        "distributed.worker.preload": [PRELOAD, str(mine)],
        "distributed.worker.preload-argv": [["--gpurt-tiers-host-limit", "0.25"], []],
    }
    with (
        dask.config.set(config),
        dask_gpurt.local_cluster(**ONE, settings={"tiers.disk-limit": "1 GiB"}) as cluster,
    ):
        assert cluster.scheduler.seen
        assert "gpurt" in cluster.scheduler.plugins
        (worker,) = cluster.workers.values()
        assert worker.seen
        assert worker._gpurt.settings.tiers.disk_limit == 2**30
        assert [p.name for p in worker.preloads] == [str(mine), PRELOAD]
        assert worker.preloads[1].argv == ["--gpurt-tiers-host-limit", "0.25", "--gpurt-tiers-disk-limit", "1 GiB"]


def test_a_server_that_did_not_start_raises_each_time() -> None:
    async def start() -> None:
        scheduler = Scheduler(port=0, dashboard_address=":0", preload=[PRELOAD])
        for _ in range(2):
            with pytest.raises(InstallError, match=r"Did you mean gpurt\.policy"):
                await scheduler

    with dask.config.set({"gpurt.polcy": "x"}):
        asyncio.run(start())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gpurt-tiers-host-limit", "0.5", "tcp://127.0.0.1:1"),
        ("--gpurt-tiers-host-limit=0.5", "tcp://127.0.0.1:1"),
        ("--gpurt-tiers-host-limit=0.5",),  # as with --scheduler-file
    ],
)
def test_a_setting_before_the_address_is_named(arguments: tuple[str, ...]) -> None:
    """Dask takes the first of what it does not know for the scheduler's address."""
    from click.testing import CliRunner
    from distributed.cli.dask_worker import main

    done = CliRunner().invoke(main, ["--no-dashboard", "--preload", PRELOAD, *arguments])
    assert done.exit_code == 1
    assert f"Error: {arguments[0]!r} was taken for the scheduler's address. Remedy: the address" in done.output


def test_in_a_click_program_of_the_user_the_error_is_raised() -> None:
    """`SystemExit` is for commands of Dask's."""
    import click
    from click.testing import CliRunner

    @click.command()
    def program() -> None:
        async def start() -> None:
            async with Scheduler(port=0, dashboard_address=":0", preload=[PRELOAD]):
                pass

        with dask.config.set({"gpurt.polcy": "x"}), pytest.raises(RuntimeError) as e:
            asyncio.run(start())
        assert any("Did you mean gpurt.policy?" in text for text in _reasons(e.value))
        click.echo("fine")

    assert CliRunner().invoke(program).output.endswith("fine\n")


def test_a_worker_of_a_nanny_alone() -> None:
    """Without a cluster object: the nanny itself raises the reason."""

    async def start() -> None:
        async with (
            Scheduler(port=0, host="127.0.0.1", dashboard_address=":0") as s,
            Nanny(s.address, preload=[PRELOAD], preload_argv=["--gpurt-policy", "none:X", "--gpurt-x"]),
        ):
            pass

    with pytest.raises(RuntimeError) as e:
        asyncio.run(asyncio.wait_for(start(), 60))
    assert any("--gpurt-x" in text for text in _reasons(e.value)), _reasons(e.value)


SESSION = """
import signal, time
import dask_gpurt

def handler():
    return repr(signal.getsignal(signal.SIGINT))

if __name__ == "__main__":
    with dask_gpurt.local_cluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        with cluster.get_client() as client:
            slow = client.map(time.sleep, [60] * 2, pure=False)
            while len(client.processing()) < 2 or not all(client.processing().values()):
                time.sleep(0.05)
            try:
                print("ready", flush=True)
                client.gather(slow)
            except KeyboardInterrupt:
                client.cancel(slow)
            assert all("_left_to_the_nanny" in h for h in client.run(handler).values())
            dask_gpurt.detach(client)
            assert not any("_left_to_the_nanny" in h for h in client.run(handler).values())
            print(sorted(client.run(lambda x: x + 1, 1).values()), flush=True)
"""


def test_an_interrupted_cell_keeps_its_cluster(tmp_path: Path) -> None:
    """A notebook and a terminal send the signal to the processes of the workers as well."""
    script = tmp_path / "session.py"
    script.write_text(SESSION)
    session = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert session.stdout is not None
        assert session.stdout.readline() == "ready\n"
        os.killpg(session.pid, signal.SIGINT)
        out, err = session.communicate(timeout=120)
    finally:
        session.kill()
    assert (out, session.returncode) == ("[2, 2]\n", 0), err
