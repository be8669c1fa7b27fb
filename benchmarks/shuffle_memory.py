"""Memory of the receiver of a shuffle, against the sum of its budgets.

    python -m benchmarks.shuffle_memory --workers 4 --out results.json

Worker processes with a memory limit and the tier store; inputs are made on the way, not persisted. Two cases:

- `incast`: all rows go to one output, so every worker sends to one;
- `half`: one key has half of all rows, the rest is spread over 16 outputs.

Each with a receiver that stores slowly (`--slow` seconds more for every chunk). The bound of a worker is

    before + send budget + receive budget + store budget + one partition being built (its shards and its frame) + input

where *before* is its RSS before the shuffle, *input* one input partition, its ids and its gathered copy, and the send
budget as large as the receive budget. Peak RSS is the kernel's, reset before each run. The run fails when a
worker is above its bound, when what a receiver held or had reserved was ever above its receive budget, or when the rows
are not those that went in.
"""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING, Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
from dask.utils import parse_bytes
from distributed import Client, wait

import dask_gpurt
from benchmarks import data, shuffle_meters
from dask_gpurt.shuffle.counters import worker_statistics

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS = 8


def part(i: int, rows: int, case: str) -> pd.DataFrame:
    """One input partition, about `rows` x 72 bytes."""
    r = np.random.default_rng(i)
    keys = r.integers(0, 100_000, rows)
    if case == "half":
        keys[::2] = 7
    return pd.DataFrame({"k": keys} | {f"c{j}": r.random(rows) for j in range(COLUMNS)})


def slow_down(seconds: float) -> None:
    """On a worker: every chunk takes so much longer to store."""
    import asyncio

    from dask_gpurt.tiers.stores.shard_store import TierShardStore

    put = TierShardStore.put

    async def slowly(self: Any, *args: Any) -> bool:
        await asyncio.sleep(seconds)
        return await put(self, *args)

    TierShardStore.put = slowly  # type: ignore[method-assign, assignment]


def _rss() -> int:
    return int(psutil.Process().memory_info().rss)


def _stored(dask_worker: Any) -> dict[str, int]:
    """What a worker's receive budget saw."""
    receive: dict[str, int] = worker_statistics(dask_worker)["transport"]["receive"]
    return receive


def _rows(df: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"rows": [len(df)], "sum": [int(df["k"].sum())]})


def one(client: Client, case: str, args: argparse.Namespace) -> dict[str, Any]:
    """One shuffle; per worker its peak and its bound."""
    rows = int(args.size * 1e9 / args.inputs / (8 * (COLUMNS + 1)))
    d = dd.from_map(part, list(range(args.inputs)), rows=rows, case=case, meta=part(0, 2, case).iloc[:0])
    before: dict[str, int] = client.run(_rss)
    client.run(shuffle_meters.begin)
    out = d.shuffle("k", npartitions=1 if case == "incast" else 16)
    got = out.map_partitions(_rows, meta={"rows": "i8", "sum": "i8"}).persist()
    wait(got)
    peaks: dict[str, tuple[float, int]] = client.run(shuffle_meters.end)
    receive: dict[str, dict[str, int]] = client.run(_stored)
    counted = got.compute()
    want = sum(int(part(i, rows, case)["k"].sum()) for i in range(args.inputs))
    if int(counted["rows"].sum()) != rows * args.inputs or int(counted["sum"].sum()) != want:
        raise SystemExit(f"{case}: {counted.sum().to_dict()} came out, {rows * args.inputs} rows of sum {want} went in")
    row_bytes = 8 * (COLUMNS + 2)  # with the index
    largest = int(counted["rows"].max()) * row_bytes
    limit = parse_bytes(args.memory_limit)
    budgets = {
        "send": next(iter(receive.values()))["budget_bytes"],
        "receive": next(iter(receive.values()))["budget_bytes"],
        "store": int(args.host_limit * limit),
        "one_partition": 2 * largest,
        "input": 3 * rows * row_bytes,
    }
    workers = []
    for i, address in enumerate(sorted(peaks)):
        bound = before[address] + sum(budgets.values())
        peak = peaks[address][1]
        held = receive[address]["peak_held_bytes"], receive[address]["peak_reserved_bytes"]
        workers.append(
            {"worker": i, "before_bytes": before[address], "peak_rss_bytes": peak, "bound_bytes": bound}
            | {"within": peak <= bound, "peak_held_bytes": held[0], "peak_reserved_bytes": held[1]}
        )
        if max(held) > budgets["receive"]:
            raise SystemExit(f"{case}: {held} bytes held and reserved of {budgets['receive']}")
    return {"rows": rows * args.inputs, "largest_partition_bytes": largest, "budgets": budgets, "workers": workers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--inputs", type=int, default=64)
    parser.add_argument("--size", type=float, default=0.6, help="GB of all inputs")
    parser.add_argument("--memory-limit", default="2GB")
    parser.add_argument("--host-limit", type=float, default=0.1, help="share of it for the tier store")
    parser.add_argument("--slow", type=float, default=0.02)
    parser.add_argument("--out", default="-", help="JSON file; - for standard output")
    args = parser.parse_args()
    logging.getLogger("distributed.shuffle").setLevel(logging.ERROR)
    where = f"{data.cores()} CPU cores, {args.workers} worker processes with one thread, loopback, no GPU"
    report: dict[str, Any] = data.facts(where) | {"arguments": vars(args), "results": {}}
    make: Callable[..., Any] = dask_gpurt.local_cluster
    with (
        dask.config.set({"gpurt.tiers.host-limit": args.host_limit, "logging.distributed": "error"}),
        make(
            n_workers=args.workers, threads_per_worker=1, memory_limit=args.memory_limit, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        client.run(slow_down, args.slow)
        for case in ("incast", "half"):
            result = report["results"][case] = one(client, case, args)
            for w in result["workers"]:
                print(
                    f"{case} worker {w['worker']}: peak {w['peak_rss_bytes'] / 1e6:.0f} MB, bound "
                    f"{w['bound_bytes'] / 1e6:.0f}, before {w['before_bytes'] / 1e6:.0f}, held "
                    f"{w['peak_held_bytes'] / 1e6:.0f} at most of {result['budgets']['receive'] / 1e6:.0f}"
                )
    above = [case for case, r in report["results"].items() if not all(w["within"] for w in r["workers"])]
    data.put(args.out, report)
    if above:
        raise SystemExit(f"above the bound: {above}")


if __name__ == "__main__":
    main()
