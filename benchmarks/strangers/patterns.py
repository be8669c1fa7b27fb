"""The dependence patterns of Task Bench (Slaughter et al., SC 2020, arXiv 1908.05790), as workloads.

`WIDTH` points per worker, `STEPS` time steps; each point of a step needs some points of the step before.
"""

from __future__ import annotations

import random
import zlib
from typing import TYPE_CHECKING, Any

from dask_gpurt.simulate.model import TaskSpec, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 6
#: bytes of an output and seconds of a task: one for each grain
GRAINS: dict[str, tuple[int, float]] = {"fine": (500_000, 0.02), "coarse": (32_000_000, 0.4)}
#: (step, point, width) -> points of the step before
Pattern = "Callable[[int, int, int], list[int]]"


def _stencil(t: int, i: int, n: int) -> list[int]:
    return [j for j in (i - 1, i, i + 1) if 0 <= j < n]


def _periodic(t: int, i: int, n: int) -> list[int]:
    return sorted({(i - 1) % n, i, (i + 1) % n})


def _butterfly(t: int, i: int, n: int) -> list[int]:
    d = 1 << ((t - 1) % max(1, (n - 1).bit_length()))
    return [j for j in (i - d, i, i + d) if 0 <= j < n]


def _tree(t: int, i: int, n: int) -> list[int]:
    return [i // 2] if t <= (n - 1).bit_length() else [i]


def _nearest(t: int, i: int, n: int, radix: int = 5) -> list[int]:
    return [j for j in range(i - radix // 2, i + radix // 2 + 1) if 0 <= j < n]


def _spread(t: int, i: int, n: int, radix: int = 4) -> list[int]:
    return sorted({(i + k * n // radix + t) % n for k in range(radix)})


def _random_nearest(t: int, i: int, n: int) -> list[int]:
    rnd = random.Random(t * 100_003 + i)
    return [j for j in range(i - 4, i + 5) if 0 <= j < n and (j == i or rnd.random() < 0.5)]


PATTERNS: dict[str, Callable[[int, int, int], list[int]]] = {
    "trivial": lambda t, i, n: [],
    "no_comm": lambda t, i, n: [i],
    "stencil_1d": _stencil,
    "stencil_1d_periodic": _periodic,
    "fft": _butterfly,
    "sweep": lambda t, i, n: [j for j in (i - 1, i) if j >= 0],
    "dom": lambda t, i, n: [j for j in (i - 1, i) if j >= 0],
    "tree": _tree,
    "nearest": _nearest,
    "random_nearest": _random_nearest,
    "spread": _spread,
    "all_to_all": lambda t, i, n: list(range(n)),
}
NAMES = [f"taskbench_{name}_{grain}" for name in PATTERNS for grain in GRAINS]


def build(name: str, workers: int) -> Workload:
    """One pattern; ``taskbench_NAME_GRAIN``."""
    pattern, _, grain = name.removeprefix("taskbench_").rpartition("_")
    nbytes, seconds = GRAINS[grain]
    n = workers * 4 if pattern not in ("all_to_all", "spread") else workers * 2
    if pattern == "all_to_all":
        nbytes //= 8
    depends = PATTERNS[pattern]
    tasks: dict[Any, TaskSpec] = {}
    if pattern == "dom":
        # A wavefront over a triangle: a point needs its left and its upper neighbour.
        n = max(8, int((workers * 40) ** 0.5))
        for i in range(n):
            for j in range(n):
                inputs = [k for k in ((i - 1, j), (i, j - 1)) if min(k) >= 0]
                tasks["cell", i, j] = TaskSpec(tuple(("cell", *k) for k in inputs), seconds, nbytes)
        return Workload(name, tasks, [("cell", n - 1, n - 1)], jitter=0.1)
    for t in range(STEPS):
        for i in range(n):
            needs = tuple((f"step{t - 1}", j) for j in depends(t, i, n)) if t else ()
            tasks[f"step{t}", i] = TaskSpec(needs, seconds, nbytes)
    used = {d for task in tasks.values() for d in task.dependencies}
    if zlib.crc32(pattern.encode()) % 2:
        # Half of the patterns end in one result, the others leave all of them where they are.
        tasks["end", 0] = TaskSpec(tuple(k for k in tasks if k not in used), seconds, 1000)
        return Workload(name, tasks, [("end", 0)], jitter=0.1)
    return Workload(name, tasks, [k for k in tasks if k not in used], jitter=0.1)
