"""Workers held by hand and for bad data, with real processes and shuffles under way, from Python and the shell."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import dask
import pandas as pd
import pytest
from distributed import Client, Event

import dask_gpurt
from dask_gpurt.errors import GpurtError
from tests.cluster.test_safe_mode import right, shuffled, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import LocalCluster, Worker

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with (
        dask_gpurt.local_cluster(
            n_workers=4,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",
            memory_limit="2GiB",
            settings={"quarantine": "on", "transfers.verify": True},
        ) as cluster,
    ):
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client
        held = dask_gpurt.hold(client).held
        if held:
            dask_gpurt.release(client, held)


def gpurt(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dask", "gpurt", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_from_the_command_line(client: Client) -> None:
    address = client.scheduler.address
    first, second = list(client.scheduler_info()["workers"])[:2]
    done = gpurt("hold", address, first, "--why", "its fan has failed")
    assert done.returncode == 0, done.stderr
    assert "1 workers get no tasks (gpurt.quarantine is on)" in done.stdout
    assert f"{first}, since " in done.stdout
    assert "its fan has failed" in done.stdout
    told = json.loads(gpurt("hold", address, "--json").stdout)
    assert list(told["held"]) == [first]
    again = gpurt("hold", address, first)
    assert again.returncode == 0
    assert "held and gets no task: asked: its fan has failed" in repr(dask_gpurt.status(client))
    wrong = gpurt("release", address, "nobody")
    assert wrong.returncode == 1
    assert "no worker nobody. Must be an address or a name of one of: tcp://" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert f"{first} gets tasks again" in gpurt("release", address, first).stdout
    assert not dask_gpurt.hold(client).held
    assert dask_gpurt.hold(client, [second], why="test").held[second]["cause"] == "asked"


def test_in_the_middle_of_a_shuffle(client: Client) -> None:
    """Its outputs go to others; what waits there is taken back; every row arrives once."""
    gate = f"gate-{time.time()}"
    # Of four threads none has more than one of the two inputs that wait.
    future = shuffled(client, gate)
    until(lambda: bool(dask_gpurt.status(client).scheduler["shuffle"]["active"]))
    bad = next(iter(client.scheduler_info()["workers"]))
    dask_gpurt.hold(client, [bad], why="test")
    time.sleep(0.2)
    Event(gate, client=client).set()
    assert right(future.result(timeout=120))
    assert list(dask_gpurt.hold(client).held) == [bad]
    assert right(shuffled(client).result(timeout=120))
    until(lambda: not dask_gpurt.hold(client).held[bad]["only_here"])


def _flipped(frame: Any) -> Any:
    out = bytearray(frame)  # a copy: the frame is the memory of the value itself
    out[len(out) // 2] ^= 4
    return out


def _spoil_fetches(dask_worker: Worker) -> None:
    """One bit is another in each of the next eight large values that others fetch from this worker."""
    from distributed.comm import tcp

    stock, left = tcp.to_frames, iter(range(8))

    async def to_frames(msg: Any, **kwargs: Any) -> Any:
        frames = await stock(msg, **kwargs)
        if isinstance(msg, dict) and msg.get("status") == "OK" and msg.get("data") and next(left, None) is not None:
            longest = max(range(len(frames)), key=lambda i: memoryview(frames[i]).nbytes)
            frames[longest] = _flipped(frames[longest])
        return frames

    tcp.to_frames = to_frames


def test_a_worker_that_sends_bad_data_is_found_and_held(client: Client, cluster: LocalCluster) -> None:
    """Every result is right, and the worker gets no more tasks."""
    workers = list(client.scheduler_info()["workers"])
    bad = workers[0]
    client.run(_spoil_fetches, workers=[bad])
    values = [client.submit(pd.Series, range(i, i + 5000), workers=[bad], pure=False) for i in range(12)]
    futures = [client.submit(pd.Series.sum, v, workers=[w], pure=False) for v in values for w in workers[1:]]
    assert client.gather(futures) == [sum(range(i, i + 5000)) for i in range(12) for _ in workers[1:]]
    until(lambda: list(dask_gpurt.hold(client).held) == [bad])
    why = dask_gpurt.hold(client).held[bad]
    assert why["cause"] == "corruption"
    assert "other workers" in why["found"]
    assert "mend" in repr(dask_gpurt.status(client))
    client.restart()


def test_off_says_how_to_have_it() -> None:
    with (
        dask_gpurt.local_cluster(
            n_workers=1, processes=False, dashboard_address=None, settings={"quarantine": "off"}
        ) as cluster,
        Client(cluster) as client,
        pytest.raises(GpurtError, match=r"with gpurt\.quarantine: alarm or on"),
    ):
        dask_gpurt.hold(client)


def test_a_word_that_is_no_mode() -> None:
    with dask.config.set({"gpurt.quarantine": "maybe"}), pytest.raises(GpurtError, match=r"gpurt\.quarantine"):
        dask_gpurt.local_cluster(n_workers=1, processes=False, dashboard_address=None)
