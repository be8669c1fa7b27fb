"""Safe mode: Dask does what a part did, at once, also in the middle of a shuffle, and on workers that join."""

from __future__ import annotations

import os
import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import dask
import pandas as pd
import pytest
from distributed import Client, Event

import dask_gpurt
from dask_gpurt.errors import GpurtError

from .processes import processes, together
from .test_sick import PRELOAD, gpurt, stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from distributed import LocalCluster, Worker

dd = pytest.importorskip("dask.dataframe")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROWS = 400_000


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with dask_gpurt.local_cluster(
        n_workers=2, threads_per_worker=2, processes=True, dashboard_address=":0", memory_limit="2GiB"
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


def part(i: int, gate: str = "") -> pd.DataFrame:
    if gate:
        Event(gate).wait()
    return pd.DataFrame({"k": range(i, i + ROWS), "v": float(i)})


def shuffled(client: Client, gate: str = "") -> Any:
    """A future of (rows, sum of keys, keys in more than one partition) after a shuffle of 8 partitions."""
    # Of four threads two never wait.
    gates = ["" if i < 6 else gate for i in range(8)]
    frame = dd.from_map(part, range(8), gates, meta=part(0).iloc[:0])
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        out = frame.shuffle("k", npartitions=6, force=True)
    pieces = out.map_partitions(
        lambda p: pd.DataFrame({"n": [len(p)], "s": [int(p.k.sum())], "u": [p.k.nunique()]}),
        meta={"n": int, "s": int, "u": int},
    )
    return client.compute(pieces.sum())


def right(found: Any) -> bool:
    everything = pd.concat(part(i) for i in range(8))
    return tuple(found) == (len(everything), int(everything.k.sum()), everything.k.nunique())


def _messages(dask_worker: Worker) -> dict[str, int]:
    from dask_gpurt.shuffle.counters import worker_statistics

    out: dict[str, int] = {}
    for link in (worker_statistics(dask_worker)["transport"] or {"links": ()})["links"]:
        out[link["transport"]] = out.get(link["transport"], 0) + link["messages_out"]
    return out


def messages(client: Client) -> dict[str, int]:
    """Sent so far, by transport."""
    total: dict[str, int] = {}
    for sent in client.run(_messages).values():
        for name, n in sent.items():
            total[name] = total.get(name, 0) + n
    return total


def nothing_arrives(client: Client) -> bool:
    """Whether no message has arrived for a while: those under way when the way changed are counted by then."""
    before = messages(client)
    for _ in range(4):
        time.sleep(0.5)
        if messages(client) != before:
            return False
    return True


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_all_parts_and_back(client: Client, cluster: LocalCluster) -> None:
    done = dask_gpurt.safe(client)
    assert list(done.since) == ["placement", "tiers", "shuffle"]
    assert sorted(done.acknowledged) == sorted(client.scheduler_info()["workers"])
    assert (done.stock, done.silent) == ([], {})
    assert "2 workers have acknowledged it" in repr(done)
    assert right(shuffled(client).result())
    status = dask_gpurt.status(client)
    assert status.scheduler["shuffle"]["fallbacks"] == {"safe mode": 1}
    assert status.scheduler["shuffle"]["runs"] == 0
    before = status.scheduler["placement"]["decisions"]["total"]
    assert re.search(r"safe mode since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: placement, tiers, shuffle", repr(status))
    assert before == 0
    # A worker that joins follows, and again after a restart.
    cluster.scale(3)
    client.wait_for_workers(3, timeout=60)
    until(lambda: all(w.get("safe") for w in dask_gpurt.status(client).workers.values()))
    client.restart()
    until(lambda: len(client.scheduler_info()["workers"]) == 3)
    until(lambda: all(w.get("safe") for w in dask_gpurt.status(client).workers.values()))
    done = dask_gpurt.safe(client, False)
    assert (done.since, len(done.acknowledged)) == ({}, 3)
    assert repr(done).startswith("safe mode is off")
    assert right(shuffled(client).result())
    status = dask_gpurt.status(client)
    assert status.scheduler["shuffle"]["runs"] == 1
    assert "safe mode" not in "".join(line for line in repr(status).splitlines() if "switched off" in line)
    assert [w["safe"] for w in status.workers.values()] == [[], [], []]


def test_one_part(client: Client) -> None:
    assert list(dask_gpurt.safe(client, parts=["placement"]).since) == ["placement"]
    first = dask_gpurt.safe(client, parts=["placement", "tiers"]).since
    assert list(first) == ["placement", "tiers"]
    assert dask_gpurt.safe(client, False, parts="placement").since == {"tiers": first["tiers"]}
    assert right(shuffled(client).result())
    assert dask_gpurt.status(client).scheduler["shuffle"]["runs"] == 1
    for wrong in (["plcement"], [], "all"):
        with pytest.raises(ValueError, match="must be some of placement, tiers, shuffle, or None for all"):
            dask_gpurt.safe(client, parts=wrong)


def test_in_the_middle_of_a_shuffle(client: Client) -> None:
    """What was sent stays; what comes next takes Dask's comms. And the other way round."""
    future = shuffled(client, "first")
    until(lambda: messages(client).get("tcp", 0) > 0)
    dask_gpurt.safe(client, parts=["shuffle"])
    until(lambda: nothing_arrives(client))
    before = messages(client)
    Event("first").set()
    assert right(future.result())
    after = messages(client)
    assert after["rpc"] > before.get("rpc", 0)
    assert {k: n for k, n in after.items() if k != "rpc"} == {k: n for k, n in before.items() if k != "rpc"}
    assert dask_gpurt.status(client).scheduler["shuffle"]["runs"] == 1
    future = shuffled(client, "second")
    until(lambda: sum(s["shuffle"].get("fallbacks", {}).get("safe mode", 0) for s in [_scheduler(client)]) == 1)
    dask_gpurt.safe(client, False)
    Event("second").set()
    assert right(future.result())


def _scheduler(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = dask_gpurt.status(client).scheduler
    return found


@pytest.mark.slow
def test_a_stopped_worker_is_named_and_told_again(tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        address = p.scheduler(*PRELOAD)
        p.worker(address, "--name", "well", "--no-nanny")
        p.worker(address, "--name", "ill", "--no-nanny")
        with Client(address) as client:
            client.wait_for_workers(2, timeout=60)
            ill = next(a for a, w in client.scheduler_info()["workers"].items() if w["name"] == "ill")
            pid = client.run(os.getpid)[ill]
            with stopped(pid):
                done = gpurt("safe", address, "on", "--timeout", "4")
                assert done.returncode == 1, done.stderr
                assert f"no answer of {ill}: TimeoutError: no answer within 4 s" in done.stdout
                assert "the scheduler and 1 workers have acknowledged it" in done.stdout
            done = gpurt("safe", address, "on")
            assert (done.returncode, "2 workers have acknowledged it" in done.stdout) == (0, True), done.stderr
            done = gpurt("safe", address, "off", "--part", "shuffle", "--json")
            assert '"shuffle"' not in done.stdout
            assert '"placement"' in done.stdout
            wrong = ([address], [address, "maybe"], [address, "x", "on"])
            for done in together(*(partial(gpurt, "safe", *words) for words in wrong)):
                assert done.returncode == 2
                assert "must end with on or off" in done.stderr
            dask_gpurt.detach(client)
            with pytest.raises(GpurtError, match="not installed on this scheduler, so all of it is as in stock Dask"):
                dask_gpurt.safe(client)
