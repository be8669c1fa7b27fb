"""Does the report name the cause? Four clusters, each with one known trouble; the first advice must name it.

``python -m benchmarks.advice`` writes benchmarks/results/advice.json and, with ``--reports DIR``, the reports.

============  ==========================================================================================
trouble       how it is made
============  ==========================================================================================
slow worker   tasks sleep five times as long on one of three workers
slow link     one of two workers answers requests for data at 20 MB/s: its ``get_data`` handler waits for
              as long as the bytes would take (a wrapper in the worker, not a network)
spilling      inputs of three times the memory that workers may use for data, read several times
skew          half of all rows have one key; what follows the shuffle takes time by the row
============  ==========================================================================================
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, get_worker, wait

import dask_gpurt
from benchmarks.data import RESULTS, facts, write_json
from dask_gpurt.observe.report.findings import Finding, advise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed import LocalCluster, Worker

SLOW_WORKER = 1
LINK_BYTES_PER_SECOND = 20e6
#: of 12 MB each; the worker may keep 175 MB
BLOCKS = 40
LITTLE = {"tiers.host-limit": 0.25}


@contextlib.contextmanager
def _cluster(workers: int, threads: int, **kwargs: Any) -> Iterator[LocalCluster]:
    kwargs = {"processes": False, "dashboard_address": ":0", **kwargs}
    with dask_gpurt.local_cluster(n_workers=workers, threads_per_worker=threads, **kwargs) as cluster:
        yield cluster


def _work(i: int) -> int:
    time.sleep(0.15 if get_worker().name == SLOW_WORKER else 0.03)
    return i


def slow_worker(path: str) -> list[Finding]:
    with _cluster(3, 1) as cluster, Client(cluster) as client, dask_gpurt.report(path, client) as report:
        client.gather(client.map(_work, range(120), pure=False))
    assert report.run is not None
    return advise(report.run)


async def _throttle(dask_worker: Worker) -> None:
    stock = dask_worker.handlers["get_data"]

    async def get_data(comm: Any, *args: Any, **kwargs: Any) -> Any:
        nbytes = sum(dask_worker.state.tasks[key].nbytes for key in kwargs["keys"] if key in dask_worker.state.tasks)
        await asyncio.sleep(nbytes / LINK_BYTES_PER_SECOND)
        return await stock(comm, *args, **kwargs)

    dask_worker.handlers["get_data"] = get_data


def _block(i: int) -> np.ndarray[Any, Any]:
    return np.full(500_000, float(i))


def _both(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    time.sleep(0.02)
    return float(a[0] + b[0])


def slow_link(path: str) -> list[Finding]:
    with _cluster(2, 1, protocol="tcp://") as cluster, Client(cluster) as client:
        left, right = client.scheduler_info()["workers"]
        client.run(_throttle, workers=[left])
        with dask_gpurt.report(path, client) as report:
            a = client.map(_block, range(12), workers=[left], pure=False)
            b = client.map(_block, range(12), workers=[right], pure=False)
            wait(a + b)
            client.gather(client.map(_both, a, b, pure=False))
    assert report.run is not None
    return advise(report.run)


def _large(i: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).random(1_500_000)  # 12 MB


def spilling(path: str) -> list[Finding]:
    with (
        tempfile.TemporaryDirectory() as directory,
        _cluster(1, 2, processes=True, memory_limit="700 MB", local_directory=directory, settings=LITTLE) as cluster,
        Client(cluster) as client,
        dask_gpurt.report(path, client) as report,
    ):
        blocks = client.map(_large, range(BLOCKS), pure=False)
        wait(blocks)
        for step in (7, 11):
            pairs = [
                client.submit(_both, blocks[i], blocks[(i * step + 5) % BLOCKS], pure=False) for i in range(BLOCKS)
            ]
            client.gather(pairs)
    assert report.run is not None
    return advise(report.run)


def _by_the_row(df: pd.DataFrame) -> pd.DataFrame:
    time.sleep(2e-4 * len(df))
    return df


def skew(path: str) -> list[Finding]:
    rows = 40_000
    key = np.where(np.arange(rows) % 2, 7, np.arange(rows))
    frame = pd.DataFrame({"key": key, "value": np.arange(rows, dtype=float)})
    with _cluster(2, 2) as cluster, Client(cluster) as client:
        ddf = dd.from_pandas(frame, npartitions=16)
        with dask_gpurt.report(path, client) as report:
            shuffled = ddf.shuffle("key")
            got = shuffled.map_partitions(_by_the_row, meta=shuffled._meta).value.sum().compute()
        assert got == frame.value.sum()
    assert report.run is not None
    return advise(report.run)


#: name of the cause that has to come first -> how it is made
TROUBLES: dict[str, Callable[[str], list[Finding]]] = {
    "slow worker": slow_worker,
    "slow link": slow_link,
    "spilling": spilling,
    "skew": skew,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TROUBLES, action="append")
    parser.add_argument("--reports", help="keep the reports in this folder")
    parser.add_argument("--out", default=os.path.join(RESULTS, "advice.json"))
    options = parser.parse_args()
    result = facts("CPU cores of one machine, no GPU; the slow worker and the slow link are made, see the script")
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only or TROUBLES:
            path = os.path.join(options.reports or scratch, f"{name.replace(' ', '-')}.html")
            found = TROUBLES[name](path)
            cases[name] = {
                "right": bool(found) and found[0].cause == name,
                "advice": [{"cause": f.cause, "share": f.share, "text": f.text} for f in found],
            }
            print(f"{name}: {'right' if cases[name]['right'] else 'WRONG'}")
            for f in found:
                print(f"    {f.share:6.1%}  {f.cause}: {f.text}")
    right = sum(case["right"] for case in cases.values())
    print(f"{right} of {len(cases)} named first")
    write_json(options.out, {**result, "right": right, "of": len(cases), "cases": cases})
    return 0 if right == len(cases) else 1


if __name__ == "__main__":
    raise SystemExit(main())
