"""Parquet files read once and again, with the read cache on and off, and by stock Dask, in turns.

    python -m benchmarks.read_cache --runs 5

Three clusters of two workers with one thread and 1 GiB each. The cases:

once      another table in each run: nothing may be found, and it must not cost
again     the same columns of one table in each run
other     other columns of one table in each run, of which a part is in the last one's
larger    a table of which not all can be kept, again and again
pressed   the same as *again* while persisted values fill most of what values may take
filtered  the same with a filter that Dask gives to its reader

Tables are written more than `files.SETTLED_SECONDS` before they are read. The first two runs of each case are left out,
as a column is kept with its second read. All three must give the same answer. Besides seconds: the largest resident set
of a worker.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster, wait

import dask_gpurt
from benchmarks import compare, data
from benchmarks.shuffle_meters import begin, end
from dask_gpurt.tiers.read_cache import files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIANTS = ("stock", "off", "on")
#: runs of each case before the clock counts
FIRST = 2
LIMIT = 1 << 30
PARTS = 8
COLUMNS = [f"c{i}" for i in range(6)]


def part(i: int, rows: int) -> pd.DataFrame:
    """Numbers, and a text of which many rows are alike."""
    r = np.random.default_rng(i)
    columns: dict[str, Any] = {name: r.integers(0, 1 << 30, rows) for name in COLUMNS}
    words = np.char.add("name-", r.integers(0, 1_000, rows).astype("U7"))
    return pd.DataFrame(columns | {"s": pd.Series(words, dtype="string[pyarrow]")})


def write(folder: str, name: str, rows: int) -> str:
    """A table of `PARTS` files."""
    path = os.path.join(folder, name)
    os.mkdir(path)
    for i in range(PARTS):
        part(i, rows).to_parquet(os.path.join(path, f"part.{i}.parquet"))
    return path


def total(path: str, columns: list[str], **options: Any) -> Any:
    """The sums of some columns by the text."""
    return dd.read_parquet(path, **options).groupby("s")[columns].sum()


def cases(folder: str, runs: int, rows: int) -> dict[str, Callable[[int], Any]]:
    """Case -> what its run of a number asks for."""
    one, large = write(folder, "one", rows), write(folder, "large", 5 * rows)
    once = [write(folder, f"once-{i}", rows) for i in range(runs + FIRST)]
    return {
        "once": lambda i: total(once[i], COLUMNS[:3]),
        "again": lambda i: total(one, COLUMNS[:3]),
        "other": lambda i: total(one, [COLUMNS[(i + k) % 6] for k in range(3)]),
        "larger": lambda i: total(large, COLUMNS[:3]),
        "pressed": lambda i: total(one, COLUMNS[:3]),
        "filtered": lambda i: total(one, COLUMNS[:3], filters=[("c5", ">", 1 << 29)]),
    }


@contextlib.contextmanager
def cluster(variant: str) -> Iterator[Client]:
    """Two workers of one thread."""
    options: dict[str, Any] = {
        "n_workers": 2,
        "threads_per_worker": 1,
        "memory_limit": LIMIT,
        "dashboard_address": ":0",
    }
    settings = {"tiers.read-cache": 0 if variant == "off" else 0.2}
    made = LocalCluster(**options) if variant == "stock" else dask_gpurt.local_cluster(settings=settings, **options)
    with made as running, Client(running) as client:
        yield client


def peak(client: Client) -> int:
    """The largest resident set of a worker since `begin`."""
    return max(most for _, most in client.run(end).values())


def run(client: Client, ask: Callable[[int], Any], i: int) -> tuple[float, int, str]:
    """Seconds, the peak, and what tells the answer from others."""
    client.run(begin)
    with client.as_current():
        start = time.perf_counter()
        answer = ask(i).compute()
        seconds = time.perf_counter() - start
    return seconds, peak(client), str(int(answer.sort_index().to_numpy().astype("float64").sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=300_000, help="of a file")
    parser.add_argument("--runs", type=int, default=5, help="after the first two")
    parser.add_argument("--cases", nargs="+", default=[], help="only these")
    parser.add_argument("--out", default=os.path.join(data.OUT, "read_cache.json"))
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="gpurt-reads-")
    report: dict[str, Any] = data.facts(
        f"{data.cores()} CPU cores, 2 worker processes with one thread and 1 GiB, loopback, no GPU"
    ) | {"rows": args.rows * PARTS}
    results: dict[str, Any] = {}
    try:
        asked = cases(folder, args.runs, args.rows)
        time.sleep(files.SETTLED_SECONDS + 1)
        for case, ask in asked.items():
            if args.cases and case not in args.cases:
                continue
            with contextlib.ExitStack() as stack:
                clients = {variant: stack.enter_context(cluster(variant)) for variant in VARIANTS}
                held = {}
                if case == "pressed":
                    for variant, client in clients.items():
                        # 45 % of the limit of both; values may take 60.
                        held[variant] = client.persist(da.random.random(int(0.9 * LIMIT / 8), chunks=1 << 21))
                        wait(held[variant])
                seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
                peaks: dict[str, list[int]] = {variant: [] for variant in VARIANTS}
                answers: dict[int, str] = {}
                for i, variant in compare.turns(list(clients), args.runs + FIRST):
                    took, most, answer = run(clients[variant], ask, i)
                    if answers.setdefault(i, answer) != answer:
                        raise SystemExit(f"{case}: {variant} answers {answer}, another one {answers[i]}")
                    if i >= FIRST:
                        seconds[variant].append(took)
                        peaks[variant].append(most)
            median = {variant: statistics.median(s) for variant, s in seconds.items()}
            results[case] = {
                "seconds": seconds,
                "median": median,
                "on_over_off": median["on"] / median["off"],
                "on_over_stock": median["on"] / median["stock"],
                "peak_bytes": {variant: max(p) for variant, p in peaks.items()},
            }
            shown = {k: round(v, 2) for k, v in median.items()}
            most = results[case]["peak_bytes"]
            print(f"{case}: {shown}, on/off {results[case]['on_over_off']:.2f}, peaks {most}", flush=True)
            data.write_json(args.out, report | {"results": results})
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
