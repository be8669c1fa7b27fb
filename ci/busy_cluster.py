"""Eight named workers on one machine, with work that does not fit into their memory: what pictures are taken of.

Joins spill and shuffle, arrays are fetched from worker to worker, and one worker takes longer than the others.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from distributed import Client, get_worker

import dask_gpurt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import LocalCluster

NAMES = ("alder", "ash", "beech", "cedar", "elm", "fir", "maple", "oak")
#: takes twice as long as the others
SLOW = "oak"
#: of each worker, and the share of it that the tiers may use for results
MEMORY, SHARE = "1 GB", 0.06


@contextlib.contextmanager
def cluster_of_eight() -> Iterator[LocalCluster]:
    """A cluster with a dashboard, whose workers have the names above."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
        dask_gpurt.local_cluster(
            n_workers=0,
            threads_per_worker=1,
            memory_limit=MEMORY,
            local_directory=scratch,
            dashboard_address="127.0.0.1:0",
            settings={"tiers.host-limit": SHARE},
        ) as cluster,
    ):
        for name in NAMES:
            (cluster.worker_spec[name],) = cluster.new_worker_spec().values()
        cluster.scale(len(NAMES))
        cluster.wait_for_workers(len(NAMES))
        yield cluster


def _orders(i: int, rows: int = 200_000) -> pd.DataFrame:
    r = np.random.default_rng(i)
    return pd.DataFrame({"customer": r.integers(0, 40_000, rows), "price": r.random(rows), "tax": r.random(rows)})


def _customers(i: int, rows: int = 5_000) -> pd.DataFrame:
    r = np.random.default_rng(100 + i)
    return pd.DataFrame({"customer": np.arange(i * rows, (i + 1) * rows), "country": r.integers(0, 30, rows)})


def _readings(i: int) -> Any:
    time.sleep(0.08 if get_worker().name == SLOW else 0.04)
    return np.full(700_000, float(i))


def round_of_work(client: Client) -> None:
    """A join that spills, and sums of arrays that lie on other workers."""
    import dask.dataframe as dd

    orders = dd.from_map(_orders, range(96)).persist()
    joined = orders.merge(dd.from_map(_customers, range(8)), on="customer", shuffle_method="p2p")
    assert len(joined.groupby("country").price.sum().compute()) == 30
    arrays = client.map(_readings, range(32), pure=False)
    sums = client.map(np.add, arrays, arrays[5:] + arrays[:5])
    assert sum(client.gather(client.map(np.max, sums))) == 2 * sum(range(32))


@contextlib.contextmanager
def busy(client: Client) -> Iterator[None]:
    """Rounds of work in the background, one after the other."""
    stop, failed = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            with client.as_current():
                while not stop.is_set():
                    round_of_work(client)
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(120)
    for error in failed:
        raise error
