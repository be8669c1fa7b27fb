"""Two real racks joined by a slow link: bytes over the wire and wall time, stock and gpurt. Needs root.

    python -m benchmarks.placement_net [--runs 5] [--shape pairs ...] [--out FILE]

Rack A has the scheduler, the client and the workers n1, n2; rack B the workers n3, n4 (one thread each). Within a rack
the network is fast, between them 10 ms away at 100 Mbit/s. Tasks sleep 0.1 s, so that two cores suffice. The inputs are
there before the clock starts.

pairs   16 tasks, each of one input on n1 and one on n2, 1 MB each. Oracle: nothing crosses.
sides   16 tasks, each of one input of 0.3 MB on one side and two of 0.25 MB on the two workers of the other; half of
        them each way round. Oracle: the 0.3 MB cross.
fan     32 tasks of one input of 8 MB on n1. Oracle: it crosses once.
tree    four sums of four arrays of 4 MB, one on each worker. Oracle: one partial sum of each crosses.

Both clusters run all the time and take turns; one round of each is not counted. The oracle's bytes are the arrays' own,
what is counted on the wire includes all headers and the heartbeats of both clusters meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Client, wait

from benchmarks import data
from benchmarks.compare import turns
from benchmarks.net.clusters import Kind, Lab
from benchmarks.net.racks import Racks, prepare, wire_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

MB = 10**6
NAP = 0.1
#: shape -> bytes that have to cross the wire
ORACLE = {"pairs": 0, "sides": 16 * 300_000, "fan": 8 * MB, "tree": 4 * 4 * MB}
PORTS = {"stock": 9786, "gpurt": 9787}


def make(nbytes: int, seed: int) -> Any:
    return np.random.default_rng(seed).random(nbytes // 8)


def use(*arrays: Any) -> float:
    time.sleep(NAP)
    return float(sum(a[0] for a in arrays))


def add(a: Any, b: Any) -> Any:
    time.sleep(NAP)
    return a + b


class Cluster:
    """A client and its workers by name."""

    def __init__(self, address: str) -> None:
        self.client = Client(address, timeout=60)
        self.client.wait_for_workers(4, timeout=60)
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        self.workers = {v["name"]: a for a, v in workers.items()}
        self.count = 0

    def put(self, nbytes: int, on: str) -> Any:
        """An array on a worker, computed there."""
        self.count += 1
        return self.client.submit(make, nbytes, self.count, workers=[self.workers[on]], pure=False)


def pairs(c: Cluster) -> Callable[[], list[Any]]:
    inputs = [(c.put(MB, "n1"), c.put(MB, "n2")) for _ in range(16)]
    wait(inputs)
    return lambda: [c.client.submit(use, a, b, pure=False) for a, b in inputs]


def sides(c: Cluster) -> Callable[[], list[Any]]:
    inputs = []
    for i in range(16):
        one, two = (("n1", "n2"), ("n3", "n4")) if i % 2 else (("n3", "n4"), ("n1", "n2"))
        single = c.put(300_000, one[(i // 2) % 2])
        inputs.append((single, c.put(250_000, two[0]), c.put(250_000, two[1])))
    wait(inputs)
    return lambda: [c.client.submit(use, *three, pure=False) for three in inputs]


def fan(c: Cluster) -> Callable[[], list[Any]]:
    x = c.put(8 * MB, "n1")
    wait(x)
    return lambda: [c.client.submit(lambda a, i: use(a), x, i, key=f"fan-{c.count}-{i}", pure=False) for i in range(32)]


def tree(c: Cluster) -> Callable[[], list[Any]]:
    leaves = [[c.put(4 * MB, f"n{w}") for w in (1, 2, 3, 4)] for _ in range(4)]
    wait(leaves)

    def submit() -> list[Any]:
        out = []
        for a, b, x, y in leaves:
            left, right = c.client.submit(add, a, b, pure=False), c.client.submit(add, x, y, pure=False)
            out.append(c.client.submit(add, left, right, pure=False))
        return out

    return submit


SHAPES: dict[str, Callable[[Cluster], Callable[[], list[Any]]]] = {
    "pairs": pairs,
    "sides": sides,
    "fan": fan,
    "tree": tree,
}


def once(cluster: Cluster, shape: str, switch: str) -> tuple[float, int]:
    """Seconds, and bytes over the wire."""
    # `wait` asks the current client, which is the one made last unless it is named: futures of another client would be
    # waited for on the wrong event loop, which notices them seconds late.
    with cluster.client.as_current():
        return _once(cluster, shape, switch)


def _once(cluster: Cluster, shape: str, switch: str) -> tuple[float, int]:
    submit = SHAPES[shape](cluster)
    time.sleep(0.3)
    before, began = wire_bytes(switch), time.perf_counter()
    futures = submit()
    wait(futures)
    seconds = time.perf_counter() - began
    time.sleep(0.1)
    crossed = wire_bytes(switch) - before
    del submit, futures
    for _ in range(100):
        if not cluster.client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)):
            break
        time.sleep(0.05)
    return seconds, crossed


def inside(args: argparse.Namespace) -> None:
    """Runs on node 0. Prints one line of JSON."""
    clusters = {name: Cluster(f"tcp://{args.inside}:{port}") for name, port in PORTS.items()}
    result: dict[str, Any] = {}
    for shape in args.shape or list(SHAPES):
        seconds: dict[str, list[float]] = {name: [] for name in clusters}
        nbytes: dict[str, list[int]] = {name: [] for name in clusters}
        for r, name in turns(list(clusters), args.runs + 1):
            took, crossed = once(clusters[name], shape, args.switch)
            if r:
                seconds[name].append(took)
                nbytes[name].append(crossed)
        result[shape] = {
            "oracle_bytes": ORACLE[shape],
            **{
                name: {
                    "seconds": seconds[name],
                    "median_s": statistics.median(seconds[name]),
                    "bytes": nbytes[name],
                    "median_bytes": statistics.median(nbytes[name]),
                }
                for name in clusters
            },
        }
        print(
            f"{shape:6s} oracle {ORACLE[shape] / 1e6:4.1f} MB  "
            + "  ".join(
                f"{n}: {statistics.median(nbytes[n]) / 1e6:5.1f} MB {statistics.median(seconds[n]):.2f} s"
                for n in clusters
            ),
            file=sys.stderr,
            flush=True,
        )

    def told(dask_scheduler: Any) -> Any:
        return dask_scheduler.plugins["gpurt-placement"].statistics()

    stats = clusters["gpurt"].client.run_on_scheduler(told)
    keep = ("zones", "links", "stealing", "fallbacks", "declined", "copies", "governor", "decisions")
    print(json.dumps({"shapes": result, "statistics": {k: stats[k] for k in keep}}, default=str))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Builds the racks, starts both clusters, measures from node 0."""
    env = {"DASK_GPURT__TIERS__ENABLED": "False", "DASK_GPURT__SHUFFLE__ENABLED": "False"}
    kinds = {name: Kind(port, name == "gpurt") for name, port in PORTS.items()}
    shapes = [word for shape in args.shape or [] for word in ("--shape", shape)]
    with tempfile.TemporaryDirectory() as folder, Racks() as racks:
        lab = Lab(racks, folder, env)
        with lab.clusters(kinds, (1, 2, 3, 4), "1GiB"):
            return lab.inside("benchmarks.placement_net", "--runs", str(args.runs), *shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="rounds that count; both systems once in each")
    parser.add_argument("--shape", action="append", choices=list(SHAPES))
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--switch", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args)
        return
    prepare("placement_net")
    measured = measure(args)
    report = {
        **data.facts("5 network namespaces on one machine, joined by a user-space wire of 10 ms and 100 Mbit/s"),
        "benchmark": "placement_net",
        "task_seconds": NAP,
        **measured,
    }
    if args.out:
        print(data.write_json(args.out, report))


if __name__ == "__main__":
    main()
