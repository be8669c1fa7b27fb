"""Transports between two processes: GB/s and CPU seconds per GB by size of message, and what that is in a real shuffle.

    python -m benchmarks.transport --runs 15 --out results.json
    python -m benchmarks.transport --runs 15 --place netns --out results.json      (as root; makes a veth pair)
    python -m benchmarks.transport --runs 5 --shuffle --out results.json
    python -m benchmarks.transport --runs 5 --kill --out results.json

Parts, each alternating over the transports, medians of the runs:

- messages: one process sends `--bytes` in messages of one size to another, as a run does it (the data plane of a
  worker with one transport forced, and one with `auto`; ten at a time); the receiver checks nothing and drops them
  (what a shuffle does with messages is in `shuffle_meters`). `auto` keeps what it has learned from round to round.
  The transport that `auto` takes mostly has a second turn in every round: how far the same thing is from itself is
  the noise, and a difference below it says nothing. Many short rounds show less of it than few long ones.
- `tls` and `rpc-tls`: the same on a cluster under TLS, over its data plane and over distributed's comms.
- `--sockets`: nothing is read where it lies in the sender's memory, as between hosts.
- `--place netns`: the receiver in a network namespace of its own, over a veth pair.
- `--kill`: how soon a sender knows that its receiver was killed.
- `--shuffle`: the frame of `shuffle_meters` on two workers, with each transport forced, and `auto`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import signal
import statistics
import time
from typing import Any

from benchmarks import compare, data
from benchmarks.transport_ends import LOCAL, SEALED, SIZES, TRANSPORTS, Bench, counted, cpu, namespace

#: what `auto` takes mostly; measured twice
USUAL = "tcp"


def _over(some: list[float], others: list[float]) -> list[float]:
    """Quartiles of the ratios within each round, the median second."""
    ratios = [a / b for a, b in zip(some, others, strict=True)]
    return statistics.quantiles(ratios * 2 if len(ratios) == 1 else ratios, n=4, method="inclusive")


def messages(args: argparse.Namespace) -> dict[str, Any]:
    """Per size and way: GB/s and CPU s/GB, each run and the median; auto against the best in the same round."""
    if args.place == "netns":
        os.environ.setdefault("UCX_TLS", "tcp,self")  # as between two hosts: no shared memory
        where: Any = namespace()
    else:
        where = contextlib.nullcontext((LOCAL, LOCAL))
    again = f"{USUAL} again"
    names = [*args.transports, "auto", *([again] if USUAL in args.transports else [])]
    out: dict[str, Any] = {}
    with where as (there, here):
        bench = Bench(there, here, fetched=not args.sockets)
        for name in (*args.transports, "auto"):
            bench.open(name)
        for label in args.sizes:
            size = SIZES[label]
            total = max(args.bytes, 2 * size)
            rates: dict[str, list[float]] = {t: [] for t in names}
            spent: dict[str, list[float]] = {t: [] for t in names}
            sent = collections.Counter(bench.end.counts("auto"))
            for i, name in compare.turns(names, args.runs + 1):
                before = cpu() + bench.ask("cpu")
                start = time.perf_counter()
                bench.send(USUAL if name == again else name, size, total)
                took = time.perf_counter() - start
                used = cpu() + bench.ask("cpu") - before
                if i:  # the first round faults pages in
                    rates[name].append(total // size * size / took / 1e9)
                    spent[name].append(used / (total / 1e9))
            median = {t: statistics.median(r) for t, r in rates.items()}
            best = max(args.transports, key=lambda t: median[t])
            out[label] = {
                "gb_per_second": median,
                "cpu_seconds_per_gb": {t: statistics.median(c) for t, c in spent.items()},
                "runs": rates,
                "best_forced": best,
                "auto_took": dict(collections.Counter(bench.end.counts("auto")) - sent),
                "auto_over_best": _over(rates["auto"], rates[best]),
                "noise": _over(rates[again], rates[USUAL]) if again in rates else None,
            }
            rounded = {t: round(m, 2) for t, m in median.items()}
            print(label, rounded, {k: out[label][k] for k in ("auto_took", "auto_over_best", "noise")}, flush=True)
        for name in args.transports:
            counts = bench.end.counts(name)
            assert set(counts) == {counted(name)}, (name, counts)
        bench.close()
    return out


def killed(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from SIGKILL of the receiver, which holds messages, until the sender knows that they are lost."""
    out: dict[str, list[float]] = {kind: [] for kind in args.transports}
    for _, kind in compare.turns(list(out), args.runs):
        bench = Bench(LOCAL, LOCAL)
        future = bench.send_held(kind)
        time.sleep(1.0)
        assert not future.done()
        os.kill(bench.process.pid or 0, signal.SIGKILL)
        start = time.perf_counter()
        bench.process.join()  # a process that was not waited for still counts as alive
        receipt = future.result(60)
        out[kind].append(time.perf_counter() - start)
        assert receipt.lost, receipt
        bench.close()
    return {kind: {"seconds": s, "median": statistics.median(s), "max": max(s)} for kind, s in out.items()}


def shuffles(args: argparse.Namespace) -> dict[str, Any]:
    """Wall and CPU seconds of a real shuffle with each transport."""
    import dask
    import dask.dataframe as dd
    from distributed import wait

    from benchmarks import shuffle_meters as small

    def ways(dask_worker: Any) -> Any:
        from dask_gpurt.shuffle.counters import worker_statistics

        stats = worker_statistics(dask_worker)
        return stats["links_lost"] + stats["transport_errors"], stats["transport"]["links"]

    out: dict[str, Any] = {}
    with dask.config.set(small.UNMANAGED), small.two_workers() as client:
        for n in args.partitions:
            rows = int(small.ROWS_PER_GB * args.size) // n
            d = dd.from_map(small.make, list(range(n)), n=rows, meta=small.make(0, 3).iloc[:0]).persist()
            wait(d)
            names = [*(t for t in args.transports if t not in SEALED), "auto"]  # those are in `transport_tls`
            runs: dict[str, list[dict[str, float]]] = {v: [] for v in names}
            for i, name in compare.turns(names, args.runs + 1):
                client.run_on_scheduler(small.take_over, transport=name)
                before = client.run(small.begin)
                start = time.perf_counter()
                result = d.shuffle("k", shuffle_method="p2p").persist()
                wait(result)
                wall = time.perf_counter() - start
                after = client.run(small.end)
                assert len(result) == rows * n
                faults = client.run(ways)
                assert not any(f for f, _ in faults.values()), faults
                if name != "auto":
                    used = {x["transport"] for _, links in faults.values() for x in links if x["messages_out"]}
                    assert name in used, (name, used)
                del result
                client.run_on_scheduler(small.give_back)
                time.sleep(0.3)
                if i:
                    runs[name].append(
                        {"wall_seconds": wall, "cpu_seconds": sum(after[w][0] - before[w] for w in after)}
                    )
            median = {v: {k: statistics.median(r[k] for r in rs) for k in rs[0]} for v, rs in runs.items()}
            out[str(n)] = {"median": median, "runs": runs}
            print(n, {v: {k: round(x, 2) for k, x in m.items()} for v, m in median.items()}, flush=True)
            del d
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--bytes", type=int, default=64 << 20, help="bytes per run; at least two messages")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES), help="of the messages")
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--place", default="host", choices=["host", "netns"])
    parser.add_argument("--sockets", action="store_true", help="long messages of one host go through sockets, too")
    parser.add_argument("--shuffle", action="store_true", help="the real shuffle instead of messages")
    parser.add_argument("--kill", action="store_true", help="how soon a killed peer is noticed, instead of messages")
    parser.add_argument("--size", type=float, default=1.0, help="GB of the shuffle's input")
    parser.add_argument("--partitions", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--out", default="-", help="JSON file; - for standard output")
    args = parser.parse_args()
    where = "a veth pair between two network namespaces" if args.place == "netns" else "loopback and shared memory"
    report = {
        **data.facts(f"{data.cores()} CPU cores, two processes, {where}, no GPU, no RDMA"),
        "load_before": os.getloadavg()[0],
        "arguments": vars(args),
        "results": (shuffles if args.shuffle else killed if args.kill else messages)(args),
    }
    data.put(args.out, report)


if __name__ == "__main__":
    main()
