"""`dask gpurt doctor ADDRESS` against real processes, some of them sick; and what the comparison of workers says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from distributed import Client, LocalCluster
from distributed.utils_test import gen_cluster

import dask_gpurt
from dask_gpurt.client import remote
from dask_gpurt.client.checkup import checkup
from dask_gpurt.doctor.cluster import compared, grouped
from dask_gpurt.doctor.finding import Finding, State
from tests.cluster.processes import processes

from .test_host import certificate

if TYPE_CHECKING:
    from pathlib import Path

_LATER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
/* The wall clock of this process is five seconds early. */
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int r = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec -= 5;
    return r;
}
"""


def finding(id: str, state: State, found: str = "x", meaning: str = "") -> Finding:
    return Finding(id, id, state, found, "", meaning, "", 0.5)


def test_workers_that_say_the_same_are_one_line() -> None:
    found = grouped(
        {
            "a": [finding("T6", State.FAIL, "14 of 15"), finding("T11", State.OK, "fast")],
            "b": [finding("T6", State.FAIL, "13 of 15")],
            "c": [finding("T6", State.OK)],
            "d": [finding("T6", State.WARN, "2 of 15", "other")],
        },
        of_host=["T11"],
    )
    assert [(f.id, f.state, f.found, f.workers) for f in found] == [
        ("T6", State.FAIL, "2 of 4 workers: 14 of 15 (1 more, in other words or figures)", ("a", "b")),
        ("T6", State.WARN, "1 of 4 workers: 2 of 15", ("d",)),
        ("T11", State.OK, "1 of 1 hosts: fast", ("a",)),
    ]


@gen_cluster(nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_with_a_host_name_leads_its_host_too(s: Any, a: Any, b: Any) -> None:
    """The scheduler has resolved the name, and says who leads."""
    leads = {}

    async def examine(worker: Any, settings: Any, **how: Any) -> dict[str, Any]:
        leads[worker] = how["leads"]
        return {}

    known, a._address = a.address, f"tcp://localhost:{a.port}"
    a.contact_address = a._address
    with mock.patch("dask_gpurt.doctor.worker.examine", examine):
        for worker in (a, b):
            await remote.checkup(worker, [known], 1.0)
    assert leads == {a: True, b: False}


def facts(host: str, mtu: int = 1500) -> dict[str, Any]:
    eth0 = {"name": "eth0", "subnet": "10.0.0.0/24", "mtu": mtu, "megabits_per_second": 0, "host": ""}
    return {"host": host, "interfaces": [eth0], "gpu": ""}


def test_hosts_are_compared() -> None:
    workers = {"tcp://10.0.0.1:1": facts("one", 1400), "tcp://10.0.0.1:2": facts("one", 1400)}
    workers |= {"tcp://127.0.0.1:1": facts("two", 9000)}
    stacks = {worker: {"python": "3.12.1", "lz4": "4"} for worker in workers}
    addresses = [*workers, "tls://10.0.0.9:8786"]
    found = {f.id: f for f in compared(workers, stacks, addresses, 0)}
    assert "1 of 3 workers listen on loopback, such as tcp://127.0.0.1:1, on 2 hosts" in found["T10"].found
    assert "10.0.0.0/24 has MTUs of 1400 (eth0 of one) and 9000 (eth0 of two)" in found["T12"].found
    assert found["tls"].state is State.FAIL
    assert "1 addresses are encrypted" in found["tls"].found
    assert (found["stack"].state, found["stack"].found) == (State.OK, "3 processes have the same versions")
    alone = {"tcp://127.0.0.1:1": facts("one"), "tcp://127.0.0.1:2": facts("one")}
    assert [f.id for f in compared(alone, {}, alone, 0)] == ["stack"]


@pytest.mark.parametrize(("second", "compares"), [("tcp://10.0.0.2:1", False), ("tcp://node-2:1", True)])
def test_bridges_of_hosts_are_no_network(second: str, compares: bool) -> None:
    workers = {"tcp://10.0.0.1:1": facts("one"), second: facts("two")}
    for one, mtu in zip(workers.values(), (1500, 1450), strict=True):
        one["interfaces"].append(
            {"name": "docker0", "subnet": "172.17.0.0/16", "mtu": mtu, "megabits_per_second": 0, "host": ""}
        )
    found = [f.found for f in compared(workers, {}, workers, 0) if f.id == "T12"]
    # A worker whose address is a name may be in any network.
    assert found == ["172.17.0.0/16 has MTUs of 1450 (docker0 of two) and 1500 (docker0 of one)"] * compares


def test_instances_of_a_gpu_are_not_shared() -> None:
    one, other = facts("one"), facts("two")
    workers = {"a": {**one, "gpu": "MIG-1"}, "b": {**one, "gpu": "MIG-1"}, "c": {**one, "gpu": "MIG-2"}}
    workers["d"] = {**other, "gpu": "MIG-1"}
    (found,) = [f for f in compared(workers, {}, [], 0) if f.id == "T15"]
    assert found.found == "2 workers of one share MIG-1: a, b"


def test_versions_are_compared() -> None:
    stacks = {"a": {"lz4": "4.0"}, "b": {"lz4": "4.0"}, "c": {"lz4": "3.9"}, "d": {}}
    (found,) = compared({}, stacks, [], 0)
    assert found.found == "lz4: 3.9 on 1 (such as c), 4.0 on 2 (such as a), not installed on 1 (such as d)"
    assert found.remedy == "pip install lz4==4.0, or the same image for all"


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_with_sick_workers(tmp_path: Path) -> None:
    cc = shutil.which("cc")
    if cc is None:
        pytest.skip("a C compiler is needed for a clock that is wrong")
    (tmp_path / "later.c").write_text(_LATER)
    library = tmp_path / "later.so"
    subprocess.run([cc, "-shared", "-fPIC", "-o", library, tmp_path / "later.c", "-ldl"], check=True)
    other = tmp_path / "other"
    (other / "msgpack-0.0.7.dist-info").mkdir(parents=True)
    (other / "msgpack-0.0.7.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: msgpack\nVersion: 0.0.7\n"
    )
    lacking = tmp_path / "lacking"
    (lacking / "dask_gpurt").mkdir(parents=True)
    (lacking / "dask_gpurt" / "__init__.py").write_text("raise ImportError('not here')\n")
    with processes(tmp_path) as p:
        address = p.scheduler()
        p.worker(address, "--name", "good", "--no-nanny")
        usual = dict(p.env)
        p.env = {**usual, "LD_PRELOAD": str(library)}
        p.worker(address, "--name", "early", "--no-nanny")
        p.env = {**usual, "PYTHONPATH": os.pathsep.join([str(other), *sys.path])}
        p.worker(address, "--name", "other", "--no-nanny")
        p.env = {**usual, "PYTHONPATH": os.pathsep.join([str(lacking), *sys.path])}
        p.worker(address, "--name", "without", "--no-nanny")
        p.env = usual
        stopped, _ = p.worker(address, "--name", "stopped", "--no-nanny")
        with Client(address) as client:
            client.wait_for_workers(5, timeout=60)
            names = {w["name"]: a for a, w in client.scheduler_info(n_workers=-1)["workers"].items()}
            # The clock is known from the second heartbeat on.
            deadline = time.monotonic() + 60
            while abs(client.run(lambda dask_worker: dask_worker.scheduler_delay)[names["early"]]) < 1:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        stopped.send_signal(signal.SIGSTOP)
        try:
            command = [sys.executable, "-m", "dask", "gpurt", "doctor", address, "--json", "--timeout", "8"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        finally:
            stopped.send_signal(signal.SIGCONT)
        assert done.returncode == 2, done.stdout + done.stderr
        found = [Finding(**{**f, "workers": tuple(f["workers"])}) for f in json.loads(done.stdout)["checks"]]

        (clock,) = [f for f in found if f.id == "clock"]
        assert (clock.state, clock.workers) == ("fail", (names["early"],))
        assert clock.found.startswith("1 of 3 workers: the clock is ")
        (versions,) = [f for f in found if f.id == "stack"]
        assert versions.state == "fail"
        assert f"msgpack: 0.0.7 on 1 (such as {names['other']})" in versions.found
        silent = {f.workers: f for f in found if f.id == "answer"}
        assert silent.keys() == {(names["stopped"],), (names["without"],)}
        assert "no answer within 8 s" in silent[names["stopped"],].found
        assert "not here" in silent[names["without"],].found
        assert "install the same version" in silent[names["without"],].remedy
        # Three answered; one of them for the host.
        assert next(f for f in found if f.id == "limits").found.startswith("3 of 3 workers: ")
        assert next(f for f in found if f.id == "T11").found.startswith("1 of 1 hosts: ")


@pytest.mark.cluster
@pytest.mark.slow
def test_another_worker_looks_at_a_host_when_the_first_is_silent(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler()
        running = [p.worker(address, "--no-nanny")[0] for _ in range(2)]
        with Client(address) as client:
            client.wait_for_workers(2, timeout=60)
            pids = client.run(os.getpid)
            leader = list(client.scheduler_info(n_workers=-1)["workers"])[-1]
            os.kill(pids[leader], signal.SIGSTOP)
            try:
                found = {f.id: f for f in checkup(client, timeout=8)}
            finally:
                os.kill(pids[leader], signal.SIGCONT)
        assert {process.pid for process in running} == set(pids.values())
    (other,) = set(pids) - {leader}
    assert (found["answer"].state, found["answer"].workers) == (State.FAIL, (leader,))
    for id in ("T6", "T11", "swap"):
        assert found[id].workers == (other,)


@pytest.mark.cluster
def test_tasks_that_sleep_are_told_from_work(tmp_path: Path) -> None:
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=4, processes=False, dashboard_address=":0", local_directory=str(tmp_path)
        ) as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.attach(client)
        client.gather(client.map(time.sleep, [1.0 + i / 1000 for i in range(8)]))
        (fed,) = [f for f in checkup(client, timeout=20) if f.id == "T4"]
        assert (fed.state, len(fed.workers)) == (State.WARN, 1)
        assert "mostly sleep" in fed.found


@pytest.mark.cluster
def test_with_a_client_and_on_stock_workers(tmp_path: Path) -> None:
    """The extension need not be installed in the cluster; a worker that is asked goes on working."""
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0", local_directory=str(tmp_path)
        ) as cluster,
        Client(cluster) as client,
    ):
        x = client.submit(lambda: sum(range(1000)))
        found = checkup(client, timeout=20)
        assert x.result() == 499500
        assert {f.id for f in found} >= {"T6", "T10", "T11", "T12", "limits", "clock", "stack", "answer"}
        (answers,) = [f for f in found if f.id == "answer"]
        assert answers.found == "2 of 2 workers answered"
        # On a busy machine a check may take longer than its limit, and says so.
        assert [f for f in found if f.state is State.FAIL and "no answer after" not in f.found] == []


@pytest.mark.cluster
def test_certificates_of_a_cluster_with_tls(tmp_path: Path) -> None:
    """One worker's ends in five days; it was told by a file, the others by text."""
    pytest.importorskip("cryptography")
    from distributed import Security, Worker
    from distributed.utils import sync

    good = Security.temporary()
    with LocalCluster(
        n_workers=1,
        processes=False,
        protocol="tls",
        security=good,
        dashboard_address=":0",
        worker_dashboard_address=None,
    ) as cluster:
        path = tmp_path / "ends.pem"
        path.write_text(str(good.tls_worker_cert) + certificate(5))
        ending = Security(
            require_encryption=True,
            tls_ca_file=good.tls_ca_file,
            tls_worker_cert=str(path),
            tls_worker_key=good.tls_worker_key,
        )

        async def start() -> Worker:
            return await Worker(cluster.scheduler_address, security=ending, local_directory=str(tmp_path / "scratch"))

        worker = sync(cluster.loop, start)
        try:
            found = [f for f in checkup(cluster, timeout=20) if f.id == "tls"]
        finally:
            sync(cluster.loop, worker.close)
    assert [(f.state, f.workers) for f in found] == [(State.WARN, (worker.address,))]
    assert f"1 of 2 workers: {path} ends in 5.0 days" in found[0].found


@pytest.mark.cluster
def test_without_workers() -> None:
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        found = checkup(cluster.scheduler_address)
        assert [f.found for f in found if f.state is State.WARN] == ["there is no worker"]
