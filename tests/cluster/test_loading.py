"""Each way to load the extension, on real processes as users start them."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, Scheduler, Status, WorkerPlugin
from distributed.spill import SpillBuffer
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster

import dask_gpurt
from dask_gpurt import planning
from dask_gpurt._version import __version__
from dask_gpurt.config import Settings
from dask_gpurt.errors import ConfigError, InstallError
from dask_gpurt.extension import GpurtScheduler, WorkerParts, corrupt, on_worker
from dask_gpurt.extension.delivery import Delivered
from dask_gpurt.model import residence
from dask_gpurt.model.no_hook import ignored
from dask_gpurt.planning.held import HELD
from dask_gpurt.shuffle.transport.planes import PLANES
from tests.versions import needs_pandas_3

from .processes import SCHEDULER_PARTS, processes, together, wait_text

pytestmark = pytest.mark.cluster

PRELOAD = "dask_gpurt.preload"
PLUGINS = Path(__file__).parents[2] / "plugins"


def _work(client: Client) -> None:
    """Touch all three engines: a dependent task, and a shuffle."""
    import dask.dataframe as dd
    import pandas as pd

    assert client.submit(sum, client.map(int, range(50))).result() == sum(range(50))
    df = pd.DataFrame({"a": range(1000), "b": [i % 7 for i in range(1000)]})
    out = dd.from_pandas(df, npartitions=4).shuffle("b").compute()
    assert out.sort_values("a")["b"].tolist() == df["b"].tolist()


def _shows_all(client: Client, workers: int) -> dict[str, Any]:
    got = dask_gpurt.status(client).to_dict()
    assert got["scheduler"]["parts"] == dict.fromkeys(SCHEDULER_PARTS, "on")
    assert len(got["workers"]) == workers
    parts = ("copies", "fetches", "messages", "slots", "tiers")
    assert all(w["parts"] == dict.fromkeys(parts, "on") for w in got["workers"].values()), got["workers"]
    return got


def test_preload_on_the_scheduler_alone_is_enough(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler("--preload", PRELOAD)
        p.worker(address)
        p.worker(address)
        with Client(address) as client:
            client.wait_for_workers(2, timeout=60)
            _work(client)
            got = _shows_all(client, 2)
            assert sum(got["scheduler"]["placement"]["declined"].values()) > 0  # all alike: stock decides
            log = wait_text(p.running[0][1], "dask-gpurt 0")
            assert "took over ledger, preflight, quarantine, workers, next-use, placement, shuffle" in log
        out = subprocess.run(
            [sys.executable, "-m", "dask", "gpurt", "status", address], capture_output=True, text=True, check=True
        ).stdout
        assert "all answer, all with dask-gpurt" in out
        assert "on 2 of 2 workers" in out


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("dask_gpurt/__init__.py", "raise ModuleNotFoundError('no dask_gpurt here')", "no dask_gpurt here"),
        (
            "sitecustomize.py",
            "import sys, types\nsys.modules['dask_gpurt._version'] = types.SimpleNamespace(__version__='99.0')\n",
            "this worker has dask-gpurt 99.0, the scheduler",
        ),
    ],
    ids=["without the package", "another version"],
)
def test_a_worker_with_another_environment_runs_stock(file: str, text: str, says: str, tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with processes(tmp_path / "ours") as ours, processes(tmp_path / "theirs", env) as theirs:
        address = ours.scheduler("--preload", PRELOAD)
        ours.worker(address)
        _, log = theirs.worker(address, "--name", "odd")
        with Client(address) as client:
            client.wait_for_workers(2, timeout=60)
            assert client.submit(os.getpid, workers="odd").result(timeout=60)
            _work(client)
            deadline = time.monotonic() + 60
            while not (status := dask_gpurt.status(client)).scheduler["refused"]:  # it comes with a heartbeat
                assert time.monotonic() < deadline, log.read_text()
            ((odd, why),) = status.scheduler["refused"].items()
            assert says in why
            assert "on 1 of 2 workers" in repr(status)
            text = " ".join(repr(status).split())
            assert f"odd ({odd}) runs without dask-gpurt: " in text
            assert says in text
            shuffle = status.scheduler["shuffle"]
            assert (shuffle["runs"], shuffle["workers_able"], list(shuffle["workers_unable"])) == (0, 1, [odd])
            assert says in shuffle["workers_unable"][odd]
            dask_gpurt.detach(client)
            _work(client)
            assert dask_gpurt.attach(client).scheduler["parts"]["shuffle"] == "on"
            assert client.submit(sum, [1, 2], workers="odd").result(timeout=60) == 3
        assert log.read_text().count("Start worker at") == 1
        assert re.search(rf"worker {odd} runs stock\. .*{says}", ours.running[0][1].read_text())


def test_a_worker_whose_setup_fails_half_way_keeps_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it runs stock, so a detach has nothing to take out of it."""

    def fails(parts: WorkerParts, wanted: bool) -> None:
        if wanted:
            raise RuntimeError("nothing can be said")

    monkeypatch.setattr(WorkerParts, "tell_residence", fails)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        stock = client.run(lambda dask_worker: type(dask_worker.data).__name__)
        dask_gpurt.attach(client)
        assert client.run(lambda dask_worker: type(dask_worker.data).__name__) == stock
        assert client.run(lambda dask_worker: on_worker(dask_worker) is None) == dict.fromkeys(stock, True)
        assert client.submit(sum, [1, 2]).result(timeout=60) == 3
        dask_gpurt.detach(client)


def test_a_socket_that_does_not_close_keeps_no_parts_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        async def stop(self) -> None:
            raise OSError("no such socket")

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        stock = client.run(lambda dask_worker: type(dask_worker.data).__name__)
        dask_gpurt.attach(client)
        for worker in cluster.workers.values():
            monkeypatch.setitem(PLANES, worker, Fails())
        dask_gpurt.detach(client)
        assert client.run(lambda dask_worker: type(dask_worker.data).__name__) == stock


def test_a_value_whose_size_is_no_number_is_an_error_of_its_task() -> None:
    """As with stock Dask, whose worker ends later, when the failed key is released."""

    def liar() -> Any:
        from dask.sizeof import sizeof

        class Liar:
            pass

        sizeof.register(Liar, lambda value: "many")
        return Liar()

    with (
        dask_gpurt.local_cluster(n_workers=1, threads_per_worker=1, memory_limit="400MB", dashboard_address=":0") as c,
        Client(c) as client,
    ):
        pids = client.run(os.getpid)
        future = client.submit(liar)
        with pytest.raises(TypeError):
            future.result(timeout=60)
        assert client.submit(sum, [1, 2]).result(timeout=60) == 3
        future.release()
        deadline = time.monotonic() + 60
        while any(client.run(lambda dask_worker: list(dask_worker.state.tasks)).values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        _work(client)
        assert client.run(os.getpid) == pids


def test_on_workers_it_installs_before_registration(tmp_path: Path) -> None:
    """Without the extension on the scheduler: what is there can only come from the worker's own preload."""
    with processes(tmp_path) as p:
        address = p.scheduler()
        _, log = p.worker(address, "--preload", PRELOAD, "--gpurt-tiers-host-limit", "0.25", "--memory-limit", "1GB")
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            got = dask_gpurt.status(client).to_dict()
            assert not got["installed"]
            (worker,) = got["workers"].values()
            assert worker["tiers"]["host_limit_bytes"] == 250_000_000
            text = log.read_text()
            assert text.index("dask-gpurt 0") < text.index("Registered to")
            assert client.submit(sum, client.map(int, range(50))).result() == sum(range(50))


@pytest.mark.slow
def test_preloads_by_path(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler("--preload", str(PLUGINS / "gpurt_scheduler.py"), "--gpurt-placement-candidates", "4")
        p.worker(address, "--preload", str(PLUGINS / "gpurt_worker.py"))
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            _work(client)
            _shows_all(client, 1)


def test_the_package_itself_is_a_preload() -> None:
    """Dask starts with any module that it can import: one that does nothing would leave a stock cluster unnoticed."""

    async def started() -> None:
        options: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "dashboard": False}
        arguments = ["--gpurt-shuffle-codec", "none"]
        async with Scheduler(preload=["dask_gpurt"], preload_argv=arguments, **options) as scheduler:
            assert scheduler.plugins["gpurt"].settings.shuffle.codec == "none"

    asyncio.run(started())


def test_arguments_of_other_preloads_are_theirs() -> None:
    """Dask gives all preloads the same arguments, and ``dask cuda worker`` has some for a preload of its own."""
    from dask_gpurt.preload import dask_setup

    args = ["--create-cuda-context", "--gpurt-policy", "stock", "more", "--pool=1", "x"]
    with dask_setup.make_context("dask_setup", args, allow_extra_args=False) as context:
        assert context.params["policy"] == "stock"
        assert "problem" not in context.params
        assert context.args == []
    with dask_setup.make_context("dask_setup", ["--gpurt-polcy", "stock"], allow_extra_args=False) as context:
        assert "--gpurt-polcy" in context.params["problem"]


def test_local_cluster_takes_lists_and_mappings(tmp_path: Path) -> None:
    """Settings travel as text; a list once became a folder, and a mapping a cluster without the extension."""
    folders = [str(tmp_path / "a"), str(tmp_path / "b, c")]
    settings = {"tiers": {"directory": folders}, "observe.cost-per-hour": {"*": 1.5}, "trace.path": None}
    with (
        dask_gpurt.local_cluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0", settings=settings
        ) as cluster,
        Client(cluster) as client,
    ):
        (worker,) = dask_gpurt.status(client).workers.values()
        assert [d["directory"].startswith(f) for d, f in zip(worker["tiers"]["disks"], folders, strict=True)]
        plugin = cluster.scheduler.plugins["gpurt"]
        assert plugin.settings.observe.cost_per_hour == {"*": 1.5}
        assert plugin.settings.tiers.directories == tuple(folders)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policy": "no_such_module:X"}, "importing no_such_module failed"),
        ({"tiers.directory": "/proc/none/a"}, "gpurt.tiers.directory is '/proc/none/a', which cannot be used"),
    ],
)
def test_local_cluster_says_what_only_a_child_process_would_find(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        dask_gpurt.local_cluster(settings=settings)


def test_policy_stock_leaves_dask_as_it_was(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler("--preload", PRELOAD, "--gpurt-policy", "stock")
        p.worker(address)
        with Client(address) as client:
            client.wait_for_workers(1, timeout=60)
            _work(client)
            got = dask_gpurt.status(client)
            assert not got.installed
            assert "is not installed" in repr(got)
            names = client.run_on_scheduler(lambda dask_scheduler: sorted(dask_scheduler.plugins))
            assert "gpurt" not in names
            store = client.run(lambda dask_worker: type(dask_worker.data).__name__)
            assert set(store.values()) == {"SpillBuffer"}


def test_local_cluster_in_processes() -> None:
    with (
        dask_gpurt.local_cluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", settings={"tiers.host-limit": 0.5}
        ) as cluster,
        Client(cluster) as client,
    ):
        _work(client)
        _shows_all(client, 2)


def test_on_a_tls_cluster() -> None:
    """Shuffles use sockets under TLS."""
    from distributed.security import Security

    with (
        dask_gpurt.local_cluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", security=Security.temporary(), protocol="tls"
        ) as cluster,
        Client(cluster) as client,
    ):
        assert cluster.scheduler_address.startswith("tls://")
        # A worker is asked whether it can after it has joined; until it has answered, shuffles are stock's.
        while dask_gpurt.status(client).scheduler["shuffle"]["workers_able"] < 2:
            time.sleep(0.05)
        _work(client)
        got = _shows_all(client, 2)
        assert got["scheduler"]["shuffle"]["runs"] == 1
        assert sum(w["shuffle"]["bytes_received"] for w in got["workers"].values()) > 0
        transports = [w["shuffle"]["transport"] for w in got["workers"].values()]
        assert all(t["encrypted"] and set(t["transports"]) == {"tls"} for t in transports)
        assert {link["transport"] for t in transports for link in t["links"] if link["messages_out"]} == {"tls"}


def test_local_cluster_refuses_before_it_starts_anything() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean gpurt\.tiers\.host-limit"):
        dask_gpurt.local_cluster(settings={"tiers.host-limits": 0.5})


def _state(dask_scheduler: Any) -> dict[str, Any]:
    return {
        "attributes": sorted(dask_scheduler.__dict__),
        "plugins": sorted(f"{k}: {type(v).__name__}" for k, v in dask_scheduler.plugins.items()),
        "worker_plugins": sorted(dask_scheduler.worker_plugins),
        "handlers": sorted(dask_scheduler.handlers),
        "stream_handlers": sorted(dask_scheduler.stream_handlers),
        "shuffle": type(dask_scheduler.extensions["shuffle"]).__name__,
    }


def _assert_stock(client: Client, stock: dict[str, Any]) -> None:
    """The scheduler is as it was, but that it ignores messages of workers that it would not know."""
    known = sorted([*stock["stream_handlers"], residence.OP])
    assert client.run_on_scheduler(_state) == stock | {"stream_handlers": known}


def _worker_state(dask_worker: Any) -> dict[str, Any]:
    return {
        "attributes": sorted(dask_worker.__dict__),
        "data": type(dask_worker.data).__name__,
        "transports": [t.name for t in threading.enumerate() if t.name.startswith("gpurt-tcp")],
        "same": dask_worker.data is dask_worker.state.data,
        "plugins": sorted(dask_worker.plugins),
        "handlers": sorted(
            f"{k}: {v.__qualname__}" for k, v in dask_worker.handlers.items() if hasattr(v, "__qualname__")
        ),
        "stream_handlers": sorted(dask_worker.stream_handlers),
        "metrics": sorted(dask_worker.metrics),
    }


def test_attach_and_detach_with_data_in_flight() -> None:
    """What was there stays readable on both sides of both moves, and detach leaves nothing behind."""
    import numpy as np

    with (
        # A share this low spills with room to spare: at 0.6 of 400 MB the nanny ended a worker before we came.
        dask.config.set({"distributed.worker.memory.target": 0.15}),
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit="800MB", dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        # 2 workers, 20 x 20 MB: part of it is spilled by stock already when we come.
        before = client.map(lambda i: np.full(2_500_000, i), range(20), pure=False)
        sums = client.map(lambda x: int(x.sum()), before)
        client.gather(sums)
        assert any(client.run(lambda dask_worker: len(dask_worker.data.slow)).values())
        stock, stock_workers = client.run_on_scheduler(_state), client.run(_worker_state)

        assert dask_gpurt.attach(client).installed
        dask_gpurt.attach(client)  # a second time changes nothing
        _shows_all(client, 2)
        during = client.map(lambda x: x + 1, before)
        assert client.gather(client.map(lambda x: int(x[-1]), during)) == [i + 1 for i in range(20)]
        _work(client)

        dask_gpurt.detach(client)
        dask_gpurt.detach(client)
        assert client.run(_worker_state) == stock_workers
        assert client.gather(client.map(lambda x: int(x[0]), during, pure=False)) == [i + 1 for i in range(20)]
        assert client.gather(client.map(lambda x: int(x[0]), before, pure=False)) == list(range(20))
        _work(client)
        _assert_stock(client, stock)


@pytest.mark.slow
def test_two_who_attach_and_detach_at_once() -> None:
    """They take turns: what one has begun, the other neither finds half done nor takes out."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        Client(cluster, set_as_default=False) as other,
    ):
        stock, stock_workers = client.run_on_scheduler(_state), client.run(_worker_state)
        both = together(lambda: dask_gpurt.attach(client), lambda: dask_gpurt.attach(other))
        assert all(status.installed for status in both)
        _shows_all(client, 2)
        _work(client)

        together(lambda: dask_gpurt.detach(client), lambda: dask_gpurt.detach(other))
        assert client.run(_worker_state) == stock_workers
        _work(client)
        _assert_stock(client, stock)


@needs_pandas_3
def test_planning_follows_what_the_scheduler_agreed_to() -> None:
    planning.forget()  # an earlier test may have had a client
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster, Client(cluster) as client:
        cluster.scheduler.decide_worker_rootish_queuing_enabled = lambda: None
        with pytest.raises(InstallError, match="already overridden"):
            dask_gpurt.attach(client)
        assert not HELD.installed
        del cluster.scheduler.decide_worker_rootish_queuing_enabled
        dask_gpurt.attach(client)
        assert HELD.installed
        dask_gpurt.detach(client)
        assert not HELD.installed


@pytest.mark.parametrize("worker_kwargs", [{"memory_limit": 0}, {"data": dict}])
def test_workers_with_data_of_another_kind(worker_kwargs: dict[str, Any]) -> None:
    """Their task results are left alone; everything else works, and says so."""
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0", **worker_kwargs
        ) as cluster,
        Client(cluster) as client,
    ):
        stock_workers = client.run(_worker_state)
        dask_gpurt.attach(client)
        got = _shows_all(client, 2)
        _work(client)
        for worker in got["workers"].values():
            assert worker["tiers"]["enabled"] is False
            assert "plain dict" in worker["tiers"]["left_alone"]
            assert worker["tiers"]["host_limit_bytes"] > 0
        for said in client.run(lambda dask_worker: on_worker(dask_worker).summary()).values():
            assert re.match(
                r"tiers for shuffles only, host memory up to .* -> disk \(worker.data is a plain dict", said
            )
        dask_gpurt.detach(client)
        assert client.run(_worker_state) == stock_workers
        _work(client)


def test_attach_says_when_policy_is_stock() -> None:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        pytest.raises(ConfigError, match="nothing to attach"),
    ):
        dask_gpurt.attach(client, settings={"policy": "stock"})


def test_a_part_that_cannot_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """All or nothing; with on-error: stock only the failing part stays out."""
    from dask_gpurt.shuffle.scheduler.takeover import ShuffleTakeover

    async def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InstallError("injected")

    monkeypatch.setattr(ShuffleTakeover, "install", refuse)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        stock = client.run_on_scheduler(_state)
        with pytest.raises(InstallError, match="injected"):
            dask_gpurt.attach(client)
        _assert_stock(client, stock)
        got = dask_gpurt.attach(client, settings={"on-error": "stock"}).to_dict()
        assert got["scheduler"]["parts"] == {**dict.fromkeys(SCHEDULER_PARTS, "on"), "shuffle": "off: injected"}
        _work(client)


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1)] * 2,
    scheduler_kwargs={"extensions": {}},
    worker_kwargs={"extensions": {}},
)
async def test_a_scheduler_without_extensions_of_dask(c, s, a, b):
    """It has no shuffles to take over, and no work stealing; all else is there."""
    plugin = GpurtScheduler(Settings.load())
    await plugin.start(s)
    assert plugin.parts is not None
    assert "without distributed's shuffle plugin" in plugin.parts.state["shuffle"]
    assert plugin.parts.state["placement"] == plugin.parts.state["workers"] == "on"
    assert await c.gather(c.map(lambda i: i + 1, range(20))) == list(range(1, 21))
    await plugin.uninstall()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, client_kwargs={"serializers": ["dask", "msgpack"]})
async def test_a_client_without_pickle_gets_what_it_can_read(c, s, a, b):
    """A server hands on the serializers of a client only if the handler's signature has them: also of a wrapped one."""
    plugin = GpurtScheduler(Settings.load())
    await plugin.start(s)
    assert await c.submit(lambda i: i + 1, 1) == 2
    with pytest.raises(TypeError):
        await c.submit(lambda: len)
    await plugin.uninstall()


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_that_leaves_meanwhile_is_no_failure(s, a, b):
    """Neither to attach nor to detach: the other workers have, or have not, what was asked for."""
    connect = s.rpc.connect

    async def connect_to_one(address: str, *args: Any, **kwargs: Any) -> Any:
        if address == b.address:
            raise OSError("it has left")
        return await connect(address, *args, **kwargs)

    s.rpc.connect = connect_to_one
    plugin = GpurtScheduler(Settings.load({"shuffle.enabled": False}))
    await plugin.start(s)
    assert plugin.parts is not None
    assert plugin.parts.state["workers"] == "on"
    assert on_worker(a) is not None
    assert on_worker(b) is None
    await plugin.uninstall()
    assert on_worker(a) is None
    assert plugin.name not in s.worker_plugins


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_that_cannot_be_given_back_is_named_and_kept(s, a, b):
    """It goes on speaking, and an op that the scheduler does not know would remove it with its data."""
    plugin = GpurtScheduler(Settings.load({"shuffle.enabled": False, "transfers.verify": True}))
    await plugin.start(s)
    connect = s.rpc.connect

    async def connect_to_one(address: str, *args: Any, **kwargs: Any) -> Any:
        if address == b.address:
            raise OSError("too many open files")
        return await connect(address, *args, **kwargs)

    s.rpc.connect = connect_to_one
    with captured_logger("distributed.scheduler.gpurt") as log:
        await plugin.uninstall()
    s.rpc.connect = connect
    (said,) = (line for line in log.getvalue().splitlines() if "given back" in line)
    assert b.address in said
    assert "too many open files" in said
    assert a.address not in said
    assert "Remedy: restart them" in said
    for op in (residence.OP, corrupt.OP):
        assert s.stream_handlers[op] is ignored
        b.batched_send({"op": op, "sender": a.address, "keys": ["x"], "disk": [("x", 1.0)]})
    b.log_event("behind", "them")
    await async_poll_for(lambda: s.get_events("behind"), timeout=20)
    assert set(s.workers) == {a.address, b.address}


class Slow(WorkerPlugin):
    """Takes its time to be set up."""

    said: list[str]
    may_go_on: asyncio.Event

    async def setup(self, worker: Any) -> None:
        self.said.append("begins")
        await self.may_go_on.wait()
        self.said.append("is set up")

    async def teardown(self, worker: Any) -> None:
        self.said.append("is torn down")


@gen_cluster(nthreads=[("127.0.0.1", 1)])
async def test_a_detach_while_a_worker_joins(s, a):
    Slow.said, Slow.may_go_on = [], asyncio.Event()
    joins = asyncio.ensure_future(a.plugin_add(Delivered("slow", __version__, pickle.dumps(Slow())), "slow"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert Slow.said == ["begins"]
    detach = asyncio.ensure_future(a.plugin_remove("slow"))
    for _ in range(10):
        await asyncio.sleep(0)
    Slow.may_go_on.set()
    await asyncio.gather(joins, detach)
    assert Slow.said == ["begins", "is set up", "is torn down"]


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_detach_while_a_worker_is_drained(c, s, a, b):
    """It is retired and stays. With a part left there, its next word about its tiers would have ended it."""
    await dask_gpurt.attach(c)
    await c.wait_for_workers(2)
    stock = dict.fromkeys((a, b))
    assert all(on_worker(worker) is not None for worker in stock)
    await c.retire_workers([a.address], close_workers=False, remove=False)
    await async_poll_for(lambda: a.status is Status.closing_gracefully, timeout=30)
    await dask_gpurt.detach(c)
    assert all(on_worker(worker) is None for worker in stock)
    assert all(type(worker.data) is SpillBuffer for worker in stock)
    assert "gpurt" not in a.metrics


def test_kill_a_worker_during_a_merge(tmp_path: Path) -> None:
    """SIGKILL in the middle of shuffles: the result is right, the nanny's new worker has the extension again."""
    import dask.dataframe as dd
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(0)
    left = pd.DataFrame({"k": rng.integers(0, 5000, 200_000), "x": rng.random(200_000)})
    right = pd.DataFrame({"k": np.arange(5000), "y": np.arange(5000) * 2})
    expected = left.merge(right, on="k")["y"].sum()

    with processes(tmp_path) as p:
        address = p.scheduler("--preload", PRELOAD)
        for _ in range(2):
            p.worker(address)
        with Client(address) as client:
            client.wait_for_workers(2, timeout=60)
            a, b = dd.from_pandas(left, npartitions=20), dd.from_pandas(right, npartitions=20)
            slow = a.map_partitions(lambda df: (time.sleep(0.1), df)[1], meta=a._meta)
            future = client.compute(slow.merge(b, on="k", shuffle_method="p2p")["y"].sum())
            pid = client.run(os.getpid, workers=[next(iter(client.scheduler_info()["workers"]))])
            time.sleep(1)
            os.kill(next(iter(pid.values())), signal.SIGKILL)
            assert future.result(timeout=120) == expected
            client.wait_for_workers(2, timeout=60)
            _shows_all(client, 2)
