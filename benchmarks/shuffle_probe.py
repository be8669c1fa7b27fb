"""What it would gain at best to split the probe side of a hot output of a join over two workers.

    python -m benchmarks.shuffle_probe --runs 7

One output of an inner join, as the hottest of `shuffle_skew`: a fifth of six million facts and its share of the keys,
both in the memory of worker A. Either A merges them; or half of the facts and all of the keys go to worker B, which is
idle, both merge a half, and A joins the halves in order, as the user gets one partition. Rows travel by Dask's comms,
or (`moved`) are assumed to be at B already, so that only the results travel: what senders that knew of the split could
save. `numbers`: int64 keys; `text`: keys of text; `many`: every key matches four rows, so results are larger.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import pandas as pd
from dask.dataframe.multi import merge_chunk
from distributed import Client, LocalCluster, wait

from benchmarks import compare, data

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS = 1_280_000
KEYS = 62_500
KINDS = ("numbers", "text", "many")
WAYS = ("whole", "split", "moved")


def probe(kind: str, first: int, last: int) -> pd.DataFrame:
    """Rows of the facts."""
    r = np.random.default_rng(1)
    k = (r.zipf(1.2, ROWS) % KEYS)[first:last]
    frame = pd.DataFrame({"k": k, **{name: r.random(last - first) for name in "abcd"}})
    return frame.assign(k=frame.k.astype("str")) if kind == "text" else frame


def build(kind: str) -> pd.DataFrame:
    """The keys."""
    k = np.arange(KEYS)
    frame = pd.DataFrame({"k": k, "w": k * 0.5})
    if kind == "many":
        return pd.concat([frame] * 4, ignore_index=True)
    return frame.assign(k=frame.k.astype("str")) if kind == "text" else frame


def merged(left: pd.DataFrame, right: pd.DataFrame) -> pd.DataFrame:
    """As the unpack of a join."""
    out = left.iloc[:1].merge(right.iloc[:1], on="k").iloc[:0]
    return merge_chunk(left, right, how="inner", result_meta=out, left_on="k", right_on="k", suffixes=("_x", "_y"))


def half(left: pd.DataFrame, which: int) -> pd.DataFrame:
    at = len(left) // 2
    return left.iloc[at:] if which else left.iloc[:at]


def joined(*halves: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(halves, ignore_index=True)


def once(client: Client, way: str, left: Any, right: Any, halves: Any, rights: Any) -> tuple[float, int]:
    """Seconds, rows."""
    a, b = sorted(client.scheduler_info()["workers"])
    start = time.perf_counter()
    if way == "whole":
        out = client.submit(merged, left, right, workers=[a], pure=False)
    else:
        if way == "split":
            first = client.submit(half, left, 0, workers=[a], pure=False)
            second = client.submit(half, left, 1, workers=[a], pure=False)
            rights = right, right
        else:
            first, second = halves
        parts = [
            client.submit(merged, first, rights[0], workers=[a], pure=False),
            client.submit(merged, second, rights[1], workers=[b], pure=False),
        ]
        out = client.submit(joined, *parts, workers=[a], pure=False)
    wait(out)
    seconds = time.perf_counter() - start
    rows: int = client.submit(len, out, workers=[a], pure=False).result()
    return seconds, rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", default=os.path.join(data.RESULTS, "shuffle_probe.json"))
    args = parser.parse_args(argv)
    dask.config.set({f"distributed.worker.memory.{name}": False for name in ("target", "spill", "pause", "terminate")})
    report = data.facts(f"{data.cores()} CPU cores, 2 worker processes with one thread, loopback, no GPU")
    medians: dict[str, Any] = {}
    every: dict[str, Any] = {}
    with LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address=":0") as cluster:
        client = Client(cluster)
        a, b = sorted(client.scheduler_info()["workers"])
        for kind in KINDS:
            left = client.submit(probe, kind, 0, ROWS, workers=[a])
            right = client.submit(build, kind, workers=[a])
            halves = client.submit(half, left, 0, workers=[a]), client.submit(half, left, 1, workers=[b])
            rights = right, client.submit(build, kind, workers=[b], pure=False)
            wait([left, right, *halves, *rights])
            runs: dict[str, list[float]] = {way: [] for way in WAYS}
            counts = set()
            for r, way in compare.turns(WAYS, args.runs + 1):
                seconds, rows = once(client, way, left, right, halves, rights)
                counts.add(rows)
                if r:
                    runs[way].append(seconds)
            if len(counts) != 1:
                raise SystemExit(f"{kind}: the ways differ in rows: {counts}")
            every[kind] = runs
            medians[kind] = {way: statistics.median(some) for way, some in runs.items()}
            print(kind, counts, medians[kind], flush=True)
            del left, right, halves, rights
        client.close()
    data.write_json(args.out, report | {"rows": ROWS, "keys": KEYS, "median_seconds": medians, "all_runs": every})


if __name__ == "__main__":
    main()
