"""The shuffle against stock's two, by kind of frame, number of partitions and spread of the keys.

    python -m benchmarks.shuffle --frames mixed --partitions 16 128 --runs 5
    python -m benchmarks.shuffle --frames numeric text wide --partitions 16 --runs 3
    python -m benchmarks.shuffle --frames mixed --partitions 1000 --size 0.2 --runs 3 --variants p2p gpurt
    python -m benchmarks.shuffle --frames mixed --partitions 10000 --inputs 16 --size 0.2 --runs 0 --seconds 300

Each call adds its results to ``benchmarks/results/shuffle.json`` (same frame, keys, partitions and size: replaced), so
that one long sweep can be made of several short calls. Every variant has a cluster of its own, two workers with one
thread: what one leaves of memory must not warm another. They take turns. The input is persisted before the clock
starts; every result is checked by row count and sum. Reported per variant: wall seconds, CPU seconds of both workers,
peak RSS of the larger worker; for ours also the seconds by phase and the bytes moved; ratios are those of the medians,
stock over ours: above 1, ours is better. The first run of every variant, in fresh processes, is kept apart (`first`).

`p2p-unset` is stock's P2P in workers without the nanny's ``MALLOC_TRIM_THRESHOLD_``: part of what ours gains is that
it takes this setting back while it runs.

*Limit* is the same work at bare metal, CPU seconds of one thread without a cluster: hash, sort of the narrow ids, Arrow
gather, IPC stream, decoding; half of the encoded bytes through a loopback socket; and, to compare, polars'
`partition_by`. It takes its turn in every round, in a process of its own, as the speed of a virtual machine changes
from minute to minute; what is said of a variant is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import gc
import json
import logging
import multiprocessing
import os
import socket
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from dask.dataframe.shuffle import partitioning_index
from distributed import wait

from benchmarks import compare, data, shuffle_meters
from dask_gpurt.shuffle.counters import worker_statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed import Client

#: stock's P2P without the nanny's setting of the C allocator
UNSET = "p2p-unset"
_SETTING = "MALLOC_TRIM_THRESHOLD_"
#: spread of the keys: Zipf's exponent, or 0 for uniform
KEYS = {"uniform": 0.0, "zipf": 1.2}
PHASES = ("seconds_partition", "seconds_encode", "seconds_send", "seconds_put", "seconds_assemble")
BYTES = ("bytes_sent", "bytes_self", "messages_sent", "chunks")


def _text(r: np.random.Generator, n: int) -> pd.Series:
    return pd.Series(np.char.add("name-", r.integers(0, 1_000_000, n).astype("U7")), dtype="str")


def _mixed(r: np.random.Generator, n: int) -> dict[str, Any]:
    return {"i": r.integers(0, 1 << 40, n)} | {name: r.random(n) for name in "abcd"} | {"s": _text(r, n)}


def _numeric(r: np.random.Generator, n: int) -> dict[str, Any]:
    return {"i": r.integers(0, 1 << 40, n)} | {name: r.random(n) for name in "abcdefg"}


def _texts(r: np.random.Generator, n: int) -> dict[str, Any]:
    return {f"s{i}": _text(r, n) for i in range(4)}


def _wide(r: np.random.Generator, n: int) -> dict[str, Any]:
    return {f"c{i}": r.random(n) for i in range(200)}


#: name -> (columns beside the key, rows in 1 GB)
FRAMES: dict[str, tuple[Callable[[np.random.Generator, int], dict[str, Any]], int]] = {
    "mixed": (_mixed, shuffle_meters.ROWS_PER_GB),
    "numeric": (_numeric, 14_000_000),
    "text": (_texts, 10_000_000),
    "wide": (_wide, 600_000),
}


def make(i: int, n: int, frame: str, keys: str) -> pd.DataFrame:
    """One input partition."""
    r = np.random.default_rng(i)
    k = r.zipf(KEYS[keys], n) % 10_000_000 if KEYS[keys] else r.integers(0, 10_000_000, n)
    return pd.DataFrame({"k": k, **FRAMES[frame][0](r, n)})


def _loopback(nbytes: int) -> None:
    """So many bytes through a socket to a thread of this process, in steps of 1 MiB."""
    a, b = socket.socketpair()
    block, into = memoryview(bytearray(1 << 20)), memoryview(bytearray(1 << 20))

    def read() -> None:
        while b.recv_into(into):
            pass

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(max(1, nbytes >> 20)):
        a.sendall(block)
    a.close()
    thread.join()
    b.close()


def limit(frame: str, keys: str, n: int, rows: int) -> dict[str, float]:
    """CPU seconds of the plain way, all partitions one by one; see the head of this file."""
    pa.set_cpu_count(1)
    try:
        import polars as pl
    except ImportError:
        pl = None
    steps = ("hash", "partition", "encode", "decode", "loopback")
    sums = dict.fromkeys(steps, 0.0)
    encoded_bytes = 0
    few = min(n, 16)  # the rest are like these
    for i in range(few):
        df = make(i, rows, frame, keys)
        t = [time.process_time()]
        codes = np.asarray(partitioning_index(df[["k"]].astype("f8"), n)).astype("u1" if n < 256 else "u2")
        t.append(time.process_time())
        table = pc.take(
            pa.Table.from_pandas(df, preserve_index=True), pa.array(np.argsort(codes, kind="stable")), boundscheck=False
        )
        t.append(time.process_time())
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        encoded = sink.getvalue()
        t.append(time.process_time())
        out = pa.ipc.open_stream(encoded).read_all().to_pandas()
        t.append(time.process_time())
        if len(out) != rows:
            raise SystemExit(f"limit: {len(out)} rows came out, {rows} went in")
        del table, out, sink
        _loopback(encoded.size // 2)
        t.append(time.process_time())
        encoded_bytes += encoded.size
        for name, seconds in zip(steps, np.diff(t), strict=True):
            sums[name] += float(seconds) * n / few
        if pl is not None:
            polars = pl.from_arrow(pa.Table.from_pandas(df.assign(p=codes)))
            start = time.process_time()
            assert isinstance(polars, pl.DataFrame)
            polars.partition_by("p", maintain_order=True)
            sums["polars_partition_by"] = sums.get("polars_partition_by", 0.0) + (
                (time.process_time() - start) * n / few
            )
    sums["all"] = sum(sums[name] for name in steps)
    return {name: round(seconds, 3) for name, seconds in sums.items()}


@contextlib.contextmanager
def cluster_for(variant: str) -> Iterator[Client]:
    """Two workers of one thread."""
    os.environ.pop(_SETTING, None)  # a nanny leaves it in this process for the next
    environment = dict(dask.config.get("distributed.nanny.pre-spawn-environ"))
    if variant == UNSET:
        del environment[_SETTING]
    with contextlib.ExitStack() as stack:
        with dask.config.set({"distributed.nanny.pre-spawn-environ": environment}):
            client = stack.enter_context(shuffle_meters.two_workers())
        set_there = set(client.run(os.environ.get, _SETTING).values())
        if (set_there == {None}) != (variant == UNSET):
            raise SystemExit(f"{variant}: {_SETTING} is {set_there} in the workers")
        yield client


class DidNotEnd(Exception):
    """A shuffle took longer than `--seconds`."""


def one(
    client: Client, d: Any, variant: str, want: tuple[int, int], n: int, args: argparse.Namespace
) -> dict[str, float]:
    """Shuffle to `n` partitions once, between two looks at the workers.

    Raises
    ------
    DidNotEnd
        It was given up.
    """
    if variant == "gpurt":
        client.run_on_scheduler(shuffle_meters.take_over, transport=args.transport)
    counts = client.run(lambda dask_worker: worker_statistics(dask_worker))
    before = client.run(shuffle_meters.begin)
    start = time.perf_counter()
    out = d.shuffle("k", npartitions=n, shuffle_method="tasks" if variant == "tasks" else "p2p").persist()
    try:
        wait(out, timeout=args.seconds)
    except TimeoutError:
        raise DidNotEnd(f"did not end in {args.seconds:g} s") from None
    wall = time.perf_counter() - start
    after = client.run(shuffle_meters.end)
    got = dask.compute(out.k.sum(), out.k.size)
    if tuple(map(int, got)) != want:
        raise SystemExit(f"{variant}: sum of k and rows are {got}, must be {want}")
    del out
    measured = {
        "wall_seconds": wall,
        "cpu_seconds": sum(after[w][0] - before[w] for w in after),
        "peak_rss_bytes": max(peak for _, peak in after.values()),
    }
    if variant == "gpurt":
        stats = client.run_on_scheduler(shuffle_meters.give_back)
        if stats["runs"] != 1 or stats["fallbacks"]:
            raise SystemExit(f"our shuffle was not what ran: {stats}")
        now = client.run(lambda dask_worker: worker_statistics(dask_worker))
        measured |= {name: sum(now[w][name] - counts[w][name] for w in now) for name in (*PHASES, *BYTES)}
    time.sleep(0.5)
    return measured


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians per variant, their ratios, and whether ours took more memory than p2p."""
    medians = {v: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for v, rs in runs.items()}
    ours, p2p = medians.get("gpurt"), medians.get("p2p")
    out: dict[str, Any] = {"median": medians}
    out["stock_over_gpurt"] = {
        v: {k: m[k] / ours[k] for k in m} for v, m in medians.items() if v != "gpurt" and ours is not None
    }
    if ours is not None and p2p is not None:
        out["peak_rss_not_above_p2p"] = ours["peak_rss_bytes"] <= p2p["peak_rss_bytes"]
    return out


def sweep(
    clients: dict[str, Client], frame: str, keys: str, n: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """All variants on one input; yields what is known after each round, and at the end with the limit."""
    n_inputs = args.inputs or n
    rows = max(1, int(FRAMES[frame][1] * args.size) // n_inputs)
    inputs: dict[str, Any] = {}
    for variant, client in clients.items():
        d = dd.from_map(
            make, list(range(n_inputs)), n=rows, frame=frame, keys=keys, meta=make(0, 3, frame, keys).iloc[:0]
        )
        with client.as_current():
            inputs[variant] = d.persist()
            wait(inputs[variant])
    variant, client = next(iter(clients.items()))
    d = inputs[variant]
    with client.as_current():
        total, size, nbytes = dask.compute(d.k.sum(), d.k.size, d.memory_usage(deep=True).sum())
    want = (int(total), int(size))

    def run(variant: str) -> dict[str, float]:
        with clients[variant].as_current():
            return one(clients[variant], inputs[variant], variant, want, n, args)

    result: dict[str, Any] = {
        "input_bytes": int(nbytes),
        "rows": rows * n_inputs,
        "size": args.size,
        "inputs": n_inputs,
        "first": {},
        "did_not_end": {},
    }
    for variant in args.variants:
        try:
            result["first"][variant] = run(variant)
        except DidNotEnd as e:
            # Not tried again: what it has left running would be measured with the others.
            result["did_not_end"][variant] = str(e)
            clients.pop(variant).cluster.close()
            print(f"{frame} {keys} {n} {variant} {e}")
    ended = [v for v in args.variants if v in result["first"]]
    runs: dict[str, list[dict[str, float]]] = {v: [] for v in ended}
    if not args.runs:  # too long to be run again: the first is all there is
        yield result | {"runs": 0, **summary({v: [result["first"][v]] for v in ended})}
        return
    limits: list[dict[str, float]] = []
    with contextlib.ExitStack() as stack:
        alone = None
        if not args.no_limit and n_inputs == n:
            spawn = multiprocessing.get_context("spawn")
            alone = stack.enter_context(concurrent.futures.ProcessPoolExecutor(1, spawn))
            alone.submit(limit, frame, keys, n, min(rows, 1000)).result()  # imports
        for round_, variant in compare.turns(ended, args.runs):
            runs[variant].append(run(variant))
            print(f"{frame} {keys} {n} {variant}: " + " ".join(f"{k}={v:.4g}" for k, v in runs[variant][-1].items()))
            if all(len(r) == round_ + 1 for r in runs.values()):
                if alone is not None:
                    limits.append(alone.submit(limit, frame, keys, n, rows).result())
                    result |= over_limit(runs, limits)
                result |= {"runs": round_ + 1, **summary(runs), "all_runs": runs}
                yield result


def over_limit(runs: dict[str, list[dict[str, float]]], limits: list[dict[str, float]]) -> dict[str, Any]:
    """CPU seconds of the limit, medians, and each variant's over it."""
    ratios = {v: [r["cpu_seconds"] / bare["all"] for r, bare in zip(rs, limits, strict=True)] for v, rs in runs.items()}
    return {
        "limit_cpu_seconds": {step: statistics.median(bare[step] for bare in limits) for step in limits[0]},
        "cpu_over_limit": {v: statistics.median(rs) for v, rs in ratios.items()},
        "cpu_over_limit_all": ratios,
    }


def prepare() -> None:
    """Set this process up for clusters that are compared: one thread for Arrow, no limit of memory, no warnings."""
    logging.getLogger("distributed.shuffle").setLevel(logging.ERROR)
    pa.set_cpu_count(1)
    dask.config.set(shuffle_meters.UNMANAGED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", nargs="+", default=["mixed"], choices=FRAMES)
    parser.add_argument("--keys", nargs="+", default=["uniform"], choices=KEYS)
    parser.add_argument("--partitions", type=int, nargs="+", default=[16, 128])
    parser.add_argument(
        "--variants", nargs="+", default=list(shuffle_meters.VARIANTS), choices=(*shuffle_meters.VARIANTS, UNSET)
    )
    parser.add_argument("--inputs", type=int, default=0, help="input partitions; 0: as many as output partitions")
    parser.add_argument("--runs", type=int, default=5, help="after the first; 0: the first is all there is")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which a shuffle is given up, and said so")
    parser.add_argument("--size", type=float, default=1.0, help="GB of input in memory, about")
    parser.add_argument("--transport", default="auto", choices=["auto", "rpc", "tcp", "ucx"], help="of ours")
    parser.add_argument("--no-limit", action="store_true", help="leave the bare-metal limit out")
    parser.add_argument("--out", default=os.path.join(data.RESULTS, "shuffle.json"))
    args = parser.parse_args()
    prepare()
    report: dict[str, Any] = data.facts(
        f"{data.cores()} CPU cores, 2 worker processes with one thread, loopback, no GPU"
    )
    results: dict[str, Any] = data.earlier(args.out).get("results", {})
    with contextlib.ExitStack() as stack:
        clients = {variant: stack.enter_context(cluster_for(variant)) for variant in args.variants}
        for frame in args.frames:
            for keys in args.keys:
                for n in args.partitions:
                    facts = {name: report[name] for name in ("when", "commit", "command", "machine")}
                    name = f"{frame} {keys} {n} {args.size:g}GB" + (f" {args.transport}" * (args.transport != "auto"))
                    name += f" from {args.inputs}" * bool(args.inputs)
                    for result in sweep(clients, frame, keys, n, args):
                        results[name] = facts | result | {"load_after": os.getloadavg()[0]}
                        data.write_json(args.out, report | {"results": results})
                    print(json.dumps({k: results[name][k] for k in ("median", "stock_over_gpurt")}, indent=1))
                    print("peak RSS not above p2p's:", results[name].get("peak_rss_not_above_p2p"))
                    gc.collect()


if __name__ == "__main__":
    main()
