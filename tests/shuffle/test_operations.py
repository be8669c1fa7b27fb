"""What users call, on a cluster with a synchronous client, over both of distributed's comms: stock, ours, pandas."""

from __future__ import annotations

import time

import dask
import pandas as pd
import pytest
from distributed import Client, LocalCluster

from dask_gpurt.shuffle.scheduler.takeover import ShuffleTakeover
from tests.shuffle.helpers import ON, left, ordered, same, source, whole

pytestmark = pytest.mark.cluster

OPERATIONS = {
    "set_index": (lambda d: d.set_index("a"), lambda p: p.set_index("a").sort_index(), False),
    "sort_values": (lambda d: d.sort_values(["k", "a"]), lambda p: p.sort_values(["k", "a"]), False),
    "groupby_split_out": (lambda d: d.groupby("k").a.sum(split_out=3), lambda p: p.groupby("k").a.sum(), True),
    "groupby_apply": (
        lambda d: d.groupby("k")[["a"]].apply(lambda x: x.sum(), meta={"a": "f8"}),
        lambda p: p.groupby("k")[["a"]].apply(lambda x: x.sum()),
        True,
    ),
    "drop_duplicates": (
        lambda d: d[["k", "s"]].drop_duplicates(split_out=3),
        lambda p: p[["k", "s"]].drop_duplicates(),
        True,
    ),
    "value_counts": (lambda d: d.k.value_counts(split_out=2), lambda p: p.k.value_counts(), True),
    "nunique": (lambda d: d.groupby("k").s.nunique(split_out=2), lambda p: p.groupby("k").s.nunique(), True),
}


@pytest.fixture(scope="module", params=["tcp", "inproc"])
def local(request):
    """(client, switch): a cluster whose shuffle is switched between stock and ours. set_index computes as it builds."""

    async def on(dask_scheduler):
        await ShuffleTakeover.install(dask_scheduler, ON)

    async def off(dask_scheduler):
        takeover = dask_scheduler.plugins["shuffle"].takeover
        await takeover.uninstall()
        return takeover.statistics()["runs"]

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, protocol=request.param, dashboard_address=":0"
        ) as lc,
        Client(lc) as client,
    ):
        yield client, (lambda: client.run_on_scheduler(on)), (lambda: client.run_on_scheduler(off))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, local):
    build, want, any_order = OPERATIONS[name]
    client, on, off = local

    def run():
        with dask.config.set({"dataframe.shuffle.method": "p2p"}):
            return dask.compute(*build(source(left, 5)).to_delayed())

    stock = run()
    on()
    ours = run()
    for _ in range(1000):
        if not client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.plugins["shuffle"].active_shuffles)):
            break
        time.sleep(0.02)
    assert off() >= 1
    assert len(stock) == len(ours)
    for x, y in zip(stock, ours, strict=True):
        same(x, y)
    # Dask's default text dtype differs from pandas' in its NA alone.
    out, expected = pd.concat(ours), want(whole(left, 5))
    if any_order:
        drop = name == "drop_duplicates"
        out, expected = ordered(out.reset_index(drop=drop)), ordered(expected.reset_index(drop=drop))
    if "s" in getattr(out, "columns", ()):
        expected = expected.astype({"s": out["s"].dtype})
    same(out, expected)
