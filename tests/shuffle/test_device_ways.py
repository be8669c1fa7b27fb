"""The ways of device frames between workers, over the stand-in: in one process, by real UCX, staged over tcp and rpc.

Nothing here is a GPU: blocks are ordinary memory, which UCX is given by the protocol of device memory.
"""

from __future__ import annotations

import collections
import os
import signal
import time
from typing import Any

import numpy as np
import pandas as pd
import pytest
from distributed import Client, futures_of

pytest.importorskip("rmm")

from dask_gpurt.client.local import local_cluster
from dask_gpurt.shuffle.counters import worker_statistics
from dask_gpurt.shuffle.worker.shard_stores import store_of
from tests.backends import host_frames
from tests.backends.host_frames import HostFrame
from tests.backends.lazy_memory import LazyMemory
from tests.shuffle.helpers import same, source, taken_over
from tests.shuffle.test_device_frames import cluster, given_back, host, partitions, settings

pytestmark = pytest.mark.cluster
INPUTS, OUTPUTS = 6, 5


def large(i: int, n: int = 40_000) -> pd.DataFrame:
    """Rows of which each output of each input has more than `packed.SENT_BYTES`."""
    rng = np.random.default_rng(i)
    k = rng.integers(0, 1000, n)
    return pd.DataFrame({"k": k, "a": rng.random(n), "t": pd.Series(k).astype("str")})


def check(got: list[Any], want: list[Any]) -> None:
    assert len(got) == len(want)
    for x, y in zip(want, got, strict=True):
        assert type(y) is HostFrame
        same(x, pd.DataFrame(y))


def links(worker: Any) -> dict[str, int]:
    """Messages sent, by transport."""
    out: dict[str, int] = {}
    for link in (worker_statistics(worker)["transport"] or {"links": ()})["links"]:
        out[link["transport"]] = out.get(link["transport"], 0) + link["messages_out"]
    return {name: n for name, n in out.items() if n}


def test_in_one_process_packs_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = LazyMemory()
    monkeypatch.setattr(host_frames, "MEMORY", memory)

    @cluster()
    async def go(c: Any, s: Any, *workers: Any) -> None:
        stock = await partitions(c, source(large, INPUTS).shuffle("k", npartitions=OUTPUTS))
        async with taken_over(s, workers, settings=settings(transport="auto")) as (takeover, stores):
            got = await partitions(c, host(source(large, INPUTS)).shuffle("k", npartitions=OUTPUTS))
            check(got, stock)
            del got
            await given_back(memory, stores)
            assert [set(links(w)) for w in workers] == [{"inproc"}] * 3
            assert takeover.statistics()["errors"] == 0
            await takeover.uninstall()
        # To the device, in order, into its pack, and into its output: nothing went through the host.
        rows = sum(len(large(i)) for i in range(INPUTS))
        assert 3.5 < memory.copied_bytes / rows / (8 + 8 + 8 + 4 + 2.9) < 4.6

    go()
    assert not memory.faults


def prepare(fail: tuple[int, int] | None) -> None:
    host_frames.use_ucx()
    if fail is not None:
        host_frames.SIDE.fail = lambda number: fail[0] <= number < fail[1]


def pid() -> int:
    return os.getpid()


def report(dask_worker: Any) -> dict[str, Any]:
    side = host_frames.SIDE
    host_frames.MEMORY.drain()
    return {
        "links": links(dask_worker),
        "faults": host_frames.MEMORY.faults,
        "sent": side.sent,
        "received": side.received,
        "error": worker_statistics(dask_worker)["last_error"],
        "written": store_of(dask_worker)[0]._engine.counters.cumulative["disk-write", "bytes"],
    }


def statistics(dask_scheduler: Any) -> dict[str, Any]:
    stats: dict[str, Any] = dask_scheduler.plugins["shuffle"].takeover.statistics()
    return stats


def slowly(i: int) -> pd.DataFrame:
    time.sleep(0.2)
    return large(i)


def transferred(dask_scheduler: Any) -> int:
    tasks = dask_scheduler.tasks.values()
    return sum("shuffle-transfer" in str(ts.key) and ts.state == "memory" for ts in tasks)


def shuffled(client: Client, make: Any) -> Any:
    return client.persist(host(source(make, INPUTS)).shuffle("k", npartitions=OUTPUTS))


def outputs(client: Client, out: Any) -> list[pd.DataFrame]:
    return client.gather(client.compute(out.to_delayed()))


#: transport; from which byte to which the receiver of a process has no device memory; share of memory before the disk
WAYS = {
    "ucx, at times without memory": ("auto", (1 << 20, 3 << 19), 0.6),
    "rpc, most packs on disk": ("rpc", None, 0.002),
}


@pytest.mark.parametrize(
    "way", ["ucx, at times without memory", pytest.param("rpc, most packs on disk", marks=pytest.mark.slow)]
)
def test_between_processes(way: str) -> None:
    """And a worker is killed in the middle of a second shuffle."""
    pytest.importorskip("ucxx")
    transport, fail, share = WAYS[way]
    on = {"shuffle.transport": transport, "shuffle.device-frames": True, "tiers.host-limit": share}
    workers = {"n_workers": 3, "threads_per_worker": 1, "memory_limit": "1 GiB", "dashboard_address": ":0"}
    with local_cluster(settings=on, **workers) as lc, Client(lc) as client:
        client.run(prepare, fail)
        first = outputs(client, shuffled(client, large))
        reports = client.run(report)
        stats = client.run_on_scheduler(statistics)
        out = shuffled(client, slowly)
        while client.run_on_scheduler(transferred) < 2 and not all(f.done() for f in futures_of(out)):
            time.sleep(0.02)
        os.kill(next(iter(client.run(pid).values())), signal.SIGKILL)
        second = outputs(client, out)
        after = client.run_on_scheduler(statistics)
    assert (stats["runs"], stats["fallbacks"], stats["errors"]) == (1, {}, 0), stats
    assert (after["fallbacks"], after["errors"]) == ({}, 0), after
    for one in reports.values():
        assert one["faults"] == []
        assert one["error"] == ""
        assert one["written"] > 0 or share > 0.1
    ways: collections.Counter[str] = collections.Counter()
    for one in reports.values():
        ways.update(one["links"])
    sent, received = (sum(one[what] for one in reports.values()) for what in ("sent", "received"))
    if fail is None:
        assert (set(ways), sent, received) == ({transport}, 0, 0)
    else:
        assert ways["ucx"] > 0
        assert ways["rpc"] > 0  # what was refused
        assert 0 < received <= sent
    whole = pd.concat([large(i) for i in range(INPUTS)])
    for parts in (first, second):
        assert len(parts) == OUTPUTS
        assert sum(map(len, parts)) == len(whole)
        for part in parts:  # its rows are in the order of the inputs
            assert type(part) is HostFrame
            want = whole[whole["k"].isin(part["k"].unique())]
            same(want.astype(dict(part.dtypes)), pd.DataFrame(part))
