"""The workloads on which placement is measured, each with the failing of stock Dask that it stands for.

A shape is a function of a cluster, which gives a workload and the cluster it is meant for (a shape may slow workers
down or take memory from them). Its size follows the number of workers, so that the ideal time stays about the same.
Clusters come in *mixes*, see `MIXES`. `build` puts both together:

>>> workload, cluster = build("tree", workers=8, mix="nodes")
>>> len(workload.tasks)
108
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import itertools
import random
from typing import TYPE_CHECKING, Any

from dask_gpurt.simulate.model import Cluster, Path, Placed, TaskSpec, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

#: chunks before a barrier for which `dask.order` is asked: it keeps for each task behind the barrier a set of those
#: before it, 450 MB for 3,072 of them and more than 23 GiB for 24,000
MOST_ORDERED = 6_000
MB = 10**6
GB = 10**9
Shape = tuple[Workload, Cluster]


def flat(workers: int) -> Cluster:
    """One worker per node, 10 GbE between all."""
    return Cluster(workers)


def nodes(workers: int) -> Cluster:
    """Nodes of eight workers joined by 50 GB/s each (NVLink-like), 10 GbE between nodes."""
    return Cluster(workers, per_node=min(8, max(1, workers // 2)))


def racks(workers: int) -> Cluster:
    """Two racks of nodes with four workers each, 10 GbE; between the racks a quarter of that per node."""
    per_node = min(4, max(1, workers // 4))
    per_rack = max(1, -(-workers // per_node) // 2)
    far = Path(1e-3, 1.25e9)
    return Cluster(
        workers,
        per_node=per_node,
        nodes_per_rack=per_rack,
        near=Path(0.5e-3, 10e9),
        far=far,
        uplink=Path(5e-3, far.bytes_per_second * max(1.0, per_rack / 4)),
    )


MIXES: dict[str, Callable[[int], Cluster]] = {"flat": flat, "nodes": nodes, "racks": racks}


def tree(c: Cluster, per: int = 12, fan: int = 8, size: int = 256 * MB) -> Shape:
    """Neighbouring roots are summed by eights; stock spreads them (dask/distributed#7555)."""
    n = c.workers * per
    tasks: dict[Any, TaskSpec] = {("load", i): TaskSpec((), 0.5, size, True) for i in range(n)}
    sums = []
    for j in range(-(-n // fan)):
        key = ("sum", j)
        tasks[key] = TaskSpec(tuple(("load", i) for i in range(j * fan, min(n, (j + 1) * fan))), 0.1, size // 8)
        sums.append(key)
    return Workload("tree", tasks, sums), c


def deep_tree(c: Cluster, per: int = 12, fan: int = 8, size: int = 256 * MB) -> Shape:
    """As `tree`, down to a single result."""
    n = c.workers * per
    tasks: dict[Any, TaskSpec] = {("load", i): TaskSpec((), 0.5, size, True) for i in range(n)}
    level, depth = [("load", i) for i in range(n)], 0
    while len(level) > 1:
        above = []
        for j in range(0, len(level), fan):
            key = (f"sum{depth}", j // fan)
            tasks[key] = TaskSpec(tuple(level[j : j + fan]), 0.1, size // 8)
            above.append(key)
        level, depth = above, depth + 1
    return Workload("deep_tree", tasks, level), c


def binop(c: Cluster, per: int = 6, size: int = 256 * MB) -> Shape:
    """``(a + b).sum()`` by chunks: partners meet or half of the data moves (dask/distributed#6597)."""
    n = c.workers * per
    tasks: dict[Any, TaskSpec] = {}
    for i in range(n):
        tasks["a", i] = TaskSpec((), 0.4, size, True)
        tasks["b", i] = TaskSpec((), 0.4, size, True)
        tasks["add", i] = TaskSpec((("a", i), ("b", i)), 0.1, size)
        tasks["sum", i] = TaskSpec((("add", i),), 0.05, 10_000)
    return Workload("binop", tasks, [("sum", i) for i in range(n)]), c


def stencil(c: Cluster, per: int = 6, steps: int = 3, size: int = 256 * MB) -> Shape:
    """Each chunk needs its two neighbours at every step: contiguous blocks, or everything moves."""
    n = c.workers * per
    tasks = {("s0", i): TaskSpec((), 0.3, size, True) for i in range(n)}
    for t in range(1, steps + 1):
        for i in range(n):
            inputs = tuple((f"s{t - 1}", j) for j in (i - 1, i, i + 1) if 0 <= j < n)
            tasks[f"s{t}", i] = TaskSpec(inputs, 0.3, size)
    return Workload("stencil", tasks, [(f"s{steps}", i) for i in range(n)]), c


def fan_out(c: Cluster, per: int = 8) -> Shape:
    """Long tasks that all need one small key: holders-only candidates queue on one worker (dask/distributed#8177)."""
    n = c.workers * per
    tasks: dict[Any, TaskSpec] = {"root": TaskSpec((), 0.01, MB)}
    # Twelve groups, so that none is large enough for upstream to take its tasks for roots.
    outputs = [(f"g{i % 12}-x", i) for i in range(n)]
    for key in outputs:
        tasks[key] = TaskSpec(("root",), 1.0, 1000)
    return Workload("fan_out", tasks, outputs), c


def shared(c: Cluster, per: int = 8) -> Shape:
    """A chunk of one's own, and one key that everybody needs (dask/distributed#5325)."""
    n = c.workers * per
    tasks: dict[Any, TaskSpec] = {"params": TaskSpec((), 0.1, 20 * MB)}
    for i in range(n):
        tasks["load", i] = TaskSpec((), 0.3, 200 * MB, True)
        tasks["f", i] = TaskSpec((("load", i), "params"), 0.3, 100_000)
    return Workload("shared", tasks, [("f", i) for i in range(n)]), c


def tiers(c: Cluster, per: int = 16, size: int = 512 * MB) -> Shape:
    """Inputs with two replicas, one in memory and one on disk; stock cannot tell them apart."""
    inputs = {}
    tasks = {}
    for i in range(c.workers * per):
        a, b = i % c.workers, (i * 7 + 3) % c.workers
        inputs["A", i] = Placed(size, {a: "memory", b: "disk"} if a != b else {a: "memory"})
        tasks["f", i] = TaskSpec((("A", i),), 0.05, 10_000)
    return Workload("tiers", tasks, list(tasks), inputs), c


def spill(c: Cluster, per: int = 24, size: int = 512 * MB) -> Shape:
    """Every second worker has an eighth of the memory; chunks are used twice, with a barrier between."""
    n = c.workers * per
    tasks: dict[Any, TaskSpec] = {}
    for i in range(n):
        tasks["load", i] = TaskSpec((), 0.2, size, True)
        tasks["mid", i] = TaskSpec((("load", i),), 0.05, 10_000)
    tasks["bar"] = TaskSpec(tuple(("mid", i) for i in range(n)), 0.05, 10_000)
    for i in range(n):
        tasks["fin", i] = TaskSpec((("load", i), "bar"), 0.05, 10_000)
    memory = tuple((8 if i % 2 else 64) * GB for i in range(c.workers))
    ordered = _spill_order(n) if n > MOST_ORDERED else None
    workload = Workload("spill", tasks, [("fin", i) for i in range(n)], ordered=ordered)
    return workload, dataclasses.replace(c, memory_bytes=memory)


def _spill_order(n: int) -> list[Any]:
    """What `dask.order` makes of `spill`: pairs of a chunk and its first use, the barrier, second uses.

    It goes through chunks in the order in which a set has them; so here in an arbitrary one, each time anew.
    """
    rnd = random.Random(0)
    out: list[Any] = []
    for i in rnd.sample(range(n), n):
        out += [("load", i), ("mid", i)]
    return [*out, "bar", *(("fin", i) for i in rnd.sample(range(n), n))]


def hetero(c: Cluster, per: int = 20) -> Shape:
    """Every second worker is four times slower."""
    workload, _ = chains(c, per=per, length=2, seconds=0.4, size=128 * MB)
    slow = tuple(4.0 if i % 2 else 1.0 for i in range(c.workers))
    return dataclasses.replace(workload, name="hetero"), dataclasses.replace(c, slowness=slow)


def straggler(c: Cluster, per: int = 20) -> Shape:
    """One worker is ten times slower than the others."""
    workload, _ = map_only(c, per=per, seconds=0.5)
    slow = tuple(10.0 if i == 1 else 1.0 for i in range(c.workers))
    return dataclasses.replace(workload, name="straggler"), dataclasses.replace(c, slowness=slow)


def straggler_chains(c: Cluster, per: int = 8) -> Shape:
    """As `straggler`, with chains: what lands on the slow worker stays there."""
    workload, _ = chains(c, per=per, length=4, seconds=0.3, size=64 * MB)
    slow = tuple(10.0 if i == 1 else 1.0 for i in range(c.workers))
    return dataclasses.replace(workload, name="straggler_chains"), dataclasses.replace(c, slowness=slow)


def join(c: Cluster, per: int = 2, size: int = 256 * MB) -> Shape:
    """A shuffle by tasks, in three stages of at most 32 ways: every output needs a part of every input."""
    n = c.workers * per
    ways = next(w for w in range(2, 65) if w**3 >= n) if n > 32 else n
    stages = 3 if n > 32 else 1
    n = ways**stages if stages > 1 else n
    load = {("load", i): TaskSpec((), 0.4, size, True) for i in range(n)}
    tasks: dict[Any, TaskSpec] = dict(load)
    before = [("load", i) for i in range(n)]
    for stage in range(stages):
        stride = ways**stage
        after: list[Any] = []
        for i in range(n):
            tasks[f"split{stage}", i] = TaskSpec((before[i],), 0.05, size)
            for j in range(ways):
                tasks[f"part{stage}", i, j] = TaskSpec(((f"split{stage}", i),), 0.001, size // ways)
        for i in range(n):
            digit = i // stride % ways
            base = i - digit * stride
            parts = tuple((f"part{stage}", base + j * stride, digit) for j in range(ways))
            tasks[f"group{stage}", i] = TaskSpec(parts, 0.05, size)
            after.append((f"group{stage}", i))
        before = after
    for i in range(n):
        tasks["merge", i] = TaskSpec((before[i],), 0.1, size // 16)
    # Everything must change places once, however it is done: of the bytes on a node, those for other nodes.
    network = n * size / c.nodes * (1 - 1 / c.nodes) / c.far.bytes_per_second
    return Workload("join", tasks, [("merge", i) for i in range(n)], network_seconds=network), c


def rechunk(c: Cluster, per: int = 4, size: int = 128 * MB) -> Shape:
    """A square array from blocks of rows to blocks of columns, within groups of 16 blocks."""
    n, ways = c.workers * per, 16
    tasks: dict[Any, TaskSpec] = {}
    for i in range(n):
        tasks["rows", i] = TaskSpec((), 0.3, size, True)
        for j in range(ways):
            tasks["slice", i, j] = TaskSpec((("rows", i),), 0.002, size // ways)
    for g in range(0, n, ways):
        members = range(g, min(n, g + ways))
        for j in range(ways):
            tasks["columns", g + j] = TaskSpec(
                tuple(("slice", i, j) for i in members), 0.1, size * len(members) // ways
            )
            tasks["reduce", g + j] = TaskSpec((("columns", g + j),), 0.2, size // 64)
    return Workload("rechunk", tasks, [k for k in tasks if k[0] == "reduce"]), c


def chains(c: Cluster, per: int = 10, length: int = 4, seconds: float = 0.2, size: int = 128 * MB) -> Shape:
    """Independent chains: nothing needs to move."""
    n = c.workers * per
    tasks: dict[Any, TaskSpec] = {}
    for i in range(n):
        tasks["c0", i] = TaskSpec((), seconds, size, True)
        for s in range(1, length):
            tasks[f"c{s}", i] = TaskSpec(((f"c{s - 1}", i),), seconds, size if s + 1 < length else 10_000)
    return Workload("chains", tasks, [(f"c{length - 1}", i) for i in range(n)]), c


def map_only(c: Cluster, per: int = 20, seconds: float = 0.5) -> Shape:
    """Independent tasks."""
    tasks = {("map", i): TaskSpec((), seconds, 10_000) for i in range(c.workers * per)}
    return Workload("map", tasks, list(tasks)), c


SHAPES: dict[str, Callable[[Cluster], Shape]] = {
    "tree": tree,
    "deep_tree": deep_tree,
    "binop": binop,
    "stencil": stencil,
    "fan_out": fan_out,
    "shared": shared,
    "tiers": tiers,
    "spill": spill,
    "hetero": hetero,
    "straggler": straggler,
    "straggler_chains": straggler_chains,
    "join": join,
    "rechunk": rechunk,
    "chains": chains,
    "map": map_only,
}
#: standard deviation of the logarithm of durations in `build`: equal durations make artificial ties
JITTER = 0.1


def build(name: str, workers: int, mix: str = "nodes", jitter: float = JITTER) -> Shape:
    """A shape on a mix.

    Raises
    ------
    ValueError
        There is no such shape or mix.
    """
    for given, known, what in ((name, SHAPES, "shape"), (mix, MIXES, "mix")):
        if given not in known:
            near = difflib.get_close_matches(given, known, 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{what} is {given!r}, must be one of {', '.join(known)}{hint}")
    workload, cluster = SHAPES[name](MIXES[mix](workers))
    return dataclasses.replace(workload, jitter=jitter, plan=_plan(workload, cluster)), cluster


def _plan(workload: Workload, c: Cluster) -> dict[Any, int]:
    """Contiguous blocks of every prefix, in proportion to the workers' speed; next to inputs that are in memory."""
    ends = list(itertools.accumulate(1 / c.slowness_of(i) for i in range(c.workers)))
    count: dict[Any, int] = {}
    for key in workload.tasks:
        if isinstance(key, tuple):
            count[key[0]] = max(count.get(key[0], 0), key[1] + 1)
    plan = {}
    for key, task in workload.tasks.items():
        placed = next((workload.inputs[d] for d in task.dependencies if d in workload.inputs), None)
        if placed is not None:
            plan[key] = next(i for i, tier in placed.where.items() if tier == "memory")
        elif isinstance(key, tuple):
            plan[key] = bisect.bisect(ends, (key[1] + 0.5) / count[key[0]] * ends[-1])
        else:
            plan[key] = 0
    return plan
