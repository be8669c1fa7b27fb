"""A balanced min-cut partition of the graph (METIS) as a placement, on simulated clusters. Needs pymetis.

    python -m benchmarks.placement_metis [--workers 64] [--shapes join,stencil] [--mixes nodes,flat] [--out FILE]

The graph is cut into as many parts as there are nodes, each part into as many as the node has workers: vertices weigh
their seconds, edges their bytes. Two ways to use it, both off the hot path:

metis         every task is pinned to the worker of its part
metis roots   only the roots belong to the worker of their part; everything else is decided by the cost, as always

compared with ``gpurt`` (contiguous blocks of roots in priority order, see `dask_gpurt.placement.decide.root_blocks`).
``seconds`` is what the partition took.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import logging
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

from benchmarks import data
from dask_gpurt.placement.decide.root_blocks import Block
from dask_gpurt.simulate import Cluster, Workload, simulate
from dask_gpurt.simulate.bounds import bound
from dask_gpurt.simulate.shapes import MIXES, SHAPES, build

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.placement.decide.root_cuts import Member

#: METIS wants whole numbers
BYTES, SECONDS = 100_000, 1e-3


def cut(keys: Sequence[Any], workload: Workload, parts: int) -> dict[Any, int]:
    """Key -> part, of the subgraph of `keys`."""
    import pymetis

    if parts == 1:
        return dict.fromkeys(keys, 0)
    tasks = workload.tasks
    number = {k: i for i, k in enumerate(keys)}
    edges: list[collections.Counter[int]] = [collections.Counter() for _ in keys]
    for k, i in number.items():
        for d in tasks[k].dependencies:
            j = number.get(d)
            if j is not None:
                weight = 1 + tasks[d].nbytes // BYTES
                edges[i][j] += weight
                edges[j][i] += weight
    starts, ends, weights = [0], [], []
    for e in edges:
        ends += list(e)
        weights += list(e.values())
        starts.append(len(ends))
    _, found = pymetis.part_graph(
        parts, xadj=starts, adjncy=ends, eweights=weights, vweights=[1 + int(tasks[k].seconds / SECONDS) for k in keys]
    )
    return dict(zip(keys, found, strict=True))


def partition(workload: Workload, cluster: Cluster) -> dict[Any, int]:
    """Key -> index of a worker: first among nodes, then within each."""
    keys = list(workload.tasks)
    node_of = cut(keys, workload, cluster.nodes)
    plan = {}
    for node in range(cluster.nodes):
        first = node * cluster.per_node
        size = min(cluster.per_node, cluster.workers - first)
        own = cut([k for k in keys if node_of[k] == node], workload, size)
        plan.update({k: first + i for k, i in own.items()})
    return plan


def roots_of(plan: dict[Any, int]) -> Callable[[Any, Any], None]:
    """For `simulate(prepare=)`: blocks of roots as the partition has them."""

    def prepare(sim: Any, plugin: Any) -> None:
        groups = plugin.engine.groups

        def arrived(tasks: Any, members: Callable[[], Sequence[Member]], is_root: Callable[[Any], bool]) -> None:
            node = {m.address: m.node for m in members()}
            blocks: dict[int, list[Any]] = {}
            ready = (t for t in tasks if t.priority and t.state == "released" and is_root(t))
            for t in sorted(ready, key=lambda t: t.priority):
                blocks.setdefault(plan[sim.names[t.key]], []).append(t.key)
            for i, keys in sorted(blocks.items()):
                address = sim.workers[i].address
                groups._list(Block(keys, address, node[address]))

        groups.arrived = arrived

    return prepare


def case(shape: str, mix: str, workers: int, seeds: Sequence[int]) -> dict[str, Any]:
    workload, cluster = build(shape, workers, mix)
    began = time.process_time()
    plan = partition(workload, cluster)
    seconds = time.process_time() - began
    runs: dict[str, list[Any]] = {"gpurt": [], "metis": [], "metis roots": []}
    for seed in seeds:
        limit = bound(workload, cluster, seed).seconds
        for name, result in (
            ("gpurt", simulate(workload, cluster, "gpurt", seed)),
            ("metis", simulate(dataclasses.replace(workload, plan=plan), cluster, "plan", seed)),
            ("metis roots", simulate(workload, cluster, "gpurt", seed, prepare=roots_of(plan))),
        ):
            runs[name].append((result.makespan_seconds / limit, result.between_nodes_bytes, result.peak_memory_bytes))
    out: dict[str, Any] = {"shape": shape, "mix": mix, "workers": workers, "seeds": len(seeds)}
    out["seconds"] = round(seconds, 3)
    for name, found in runs.items():
        to_bound, moved, peak = (statistics.median(r[i] for r in found) for i in range(3))
        out[name] = {
            "to_bound": round(to_bound, 3),
            "between_nodes_gb": round(moved / 1e9, 2),
            "peak_worker_gb": round(peak / 1e9, 2),
        }
    return out


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("distributed").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--shapes", type=lambda t: t.split(","), default=["join", "rechunk", "stencil"])
    parser.add_argument("--mixes", type=lambda t: t.split(","), default=["nodes", "flat"])
    parser.add_argument("--seeds", type=lambda t: [int(x) for x in t.split(",")], default=[0, 1])
    parser.add_argument("--out", help="JSON file to write")
    args = parser.parse_args()
    for given, known in ((args.shapes, SHAPES), (args.mixes, MIXES)):
        for word in given:
            if word not in known:
                raise SystemExit(f"{word!r} is not one of {', '.join(known)}")
    try:
        import pymetis  # noqa: F401
    except ImportError:
        raise SystemExit("placement_metis needs METIS. Remedy: pip install pymetis") from None
    cases = []
    for shape in args.shapes:
        for mix in args.mixes:
            cases.append(case(shape, mix, args.workers, args.seeds))
            print(json.dumps(cases[-1]), flush=True)
    if args.out:
        report = {
            **data.facts("simulated clusters on a virtual clock, the real scheduler; no network, no GPU"),
            "benchmark": "placement_metis",
            "cases": cases,
        }
        print(data.write_json(args.out, report))


if __name__ == "__main__":
    main()
