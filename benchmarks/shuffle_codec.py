"""A shuffle between two hosts joined by a slow network: Dask's p2p, ours uncompressed, and ours as it is. Needs root.

    python -m benchmarks.shuffle_codec [--runs 5] [--mbit 1000 100] [--frames mixed numeric text] [--out FILE]

Two network namespaces, 0.2 ms apart, with one worker of one thread each; the scheduler and the client are on the first.
The input is there before the clock starts, and outputs stay. The three clusters run all the time and take turns; one
round of each is not counted. Beside wall time: bytes over the wire, all headers and heartbeats included.

The processes, and the wire itself, share the cores of one machine: what compressing costs is not less than on hosts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from typing import Any

import dask
import dask.dataframe as dd
from distributed import Client, wait

from benchmarks import data
from benchmarks.compare import turns
from benchmarks.net.clusters import Kind, Lab
from benchmarks.net.racks import Racks, prepare, wire_bytes
from benchmarks.shuffle import FRAMES, make
from dask_gpurt.shuffle.counters import worker_statistics

DELAY_MS = 0.2
INPUTS = 16
VARIANTS = {
    "p2p": Kind(9796, False),
    "none": Kind(9797, True, {"DASK_GPURT__SHUFFLE__CODEC": "none"}),
    "auto": Kind(9798, True, {"DASK_GPURT__SHUFFLE__CODEC": "auto"}),
}
#: nodes with a worker, one in each rack
NODES = (1, 3)


def once(client: Client, frame: str, size: float, switch: str) -> dict[str, float]:
    """Seconds, and bytes over the wire, of one shuffle."""
    rows = int(FRAMES[frame][1] * size) // INPUTS
    with client.as_current():
        d = dd.from_map(make, range(INPUTS), n=rows, frame=frame, keys="uniform").persist()
        wait(d)
        want = tuple(map(int, dask.compute(d.k.sum(), d.k.size)))
        before, began = wire_bytes(switch), time.perf_counter()
        out = d.shuffle("k", npartitions=INPUTS, shuffle_method="p2p").persist()
        wait(out)
        seconds = time.perf_counter() - began
        crossed = wire_bytes(switch) - before
        got = tuple(map(int, dask.compute(out.k.sum(), out.k.size)))
        if got != want:
            raise SystemExit(f"sum of k and rows are {got}, must be {want}")
        del d, out
    time.sleep(0.5)
    return {"seconds": seconds, "wire_bytes": crossed}


def inside(args: argparse.Namespace) -> None:
    """Runs on node 0. Prints one line of JSON."""
    clients = {name: Client(f"tcp://{args.inside}:{kind.port}", timeout=60) for name, kind in VARIANTS.items()}
    for client in clients.values():
        client.wait_for_workers(len(NODES), timeout=60)
    result: dict[str, Any] = {}
    for frame in args.frames:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
        for r, name in turns(list(clients), args.runs + 1):
            took = once(clients[name], frame, args.size, args.switch)
            if r:
                runs[name].append(took)
        medians = {n: {k: statistics.median(x[k] for x in some) for k in some[0]} for n, some in runs.items()}
        ratios = {
            n: statistics.median(a["seconds"] / b["seconds"] for a, b in zip(runs[n], runs["auto"], strict=True))
            for n in ("p2p", "none")
        }
        stats = clients["auto"].run(lambda dask_worker: worker_statistics(dask_worker))
        counted = {k: sum(x[k] for x in stats.values()) for k in ("bytes_squeezed", "seconds_squeeze", "resent_safe")}
        result[frame] = {"median": medians, "over_auto": ratios, "all": runs, "auto_so_far": counted}
        told = "  ".join(f"{n} {m['seconds']:.2f} s {m['wire_bytes'] / 1e6:.0f} MB" for n, m in medians.items())
        print(f"{frame:8s} {told}  p2p / auto {ratios['p2p']:.2f}  none / auto {ratios['none']:.2f}", file=sys.stderr)
    print(json.dumps(result))


def measure(args: argparse.Namespace, mbit: float) -> dict[str, Any]:
    """Builds the network, starts the clusters, measures from node 0."""
    with tempfile.TemporaryDirectory() as folder, Racks(DELAY_MS, mbit) as racks:
        lab = Lab(racks, folder, {})
        with lab.clusters(VARIANTS, NODES, "2GiB"):
            run = ["--runs", str(args.runs), "--size", str(args.size), "--frames", *args.frames]
            return lab.inside("benchmarks.shuffle_codec", *run)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="rounds that count; each variant once in each")
    parser.add_argument("--mbit", type=float, nargs="+", default=[1000.0, 100.0], help="of the network")
    parser.add_argument("--size", type=float, default=0.1, help="GB of the frame")
    parser.add_argument("--frames", nargs="+", default=["mixed", "numeric", "text"], choices=list(FRAMES))
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--switch", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args)
        return
    prepare("shuffle_codec")
    report = data.facts("network namespaces on one machine, joined by a user-space wire") | {
        "benchmark": "shuffle_codec",
        "delay_ms": DELAY_MS,
        "gigabytes": args.size,
        "mbit": {},
    }
    for mbit in args.mbit:
        print(f"{mbit:g} Mbit/s", file=sys.stderr)
        report["mbit"][f"{mbit:g}"] = measure(args, mbit)
        if args.out:
            data.write_json(args.out, report)


if __name__ == "__main__":
    main()
