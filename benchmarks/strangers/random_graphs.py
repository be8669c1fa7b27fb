"""Random graphs, as they are used to compare schedulers. The seed is the name: ``random-17`` is always the same graph.

The kind, the number of tasks (100 to 1,500), the ratio of moving to computing and the tails of sizes and times are all
drawn. Kinds:

layered     levels of random width; inputs from the level before, now and then from further back
series      series and parallel composition, recursively (fork-join inside fork-join)
fork_join   a few rounds of fan out and join
wavefront   a grid, each cell needs its left and upper neighbours
phases      rounds of many tasks, each round behind one task that needs a part of the one before
trees       several reductions over shared sources
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from dask_gpurt.simulate.model import TaskSpec, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 1000
NAMES = [f"random-{seed}" for seed in range(COUNT)]


class Maker:
    """Draws the tasks of one graph."""

    def __init__(self, rnd: random.Random, workers: int) -> None:
        self.rnd = rnd
        self.workers = workers
        self.tasks: dict[Any, TaskSpec] = {}
        #: mean seconds of a task, and bytes that a 10 GbE link moves in about the time that `ratio` tasks take
        self.seconds = 10 ** rnd.uniform(-2.3, 0.3)
        ratio = 10 ** rnd.uniform(-1.5, 0.7)
        self.nbytes = min(256e6, self.seconds * ratio * 1.25e9)
        self.heavy_times, self.heavy_sizes = rnd.random() < 0.4, rnd.random() < 0.4
        self._kinds: dict[str, tuple[float, float]] = {}

    def add(self, kind: str, inputs: list[Any], shrink: float = 1.0) -> Any:
        """A task of a kind: tasks of a kind are alike, as functions are."""
        if kind not in self._kinds:
            self._kinds[kind] = self.rnd.lognormvariate(0, 0.7), self.rnd.lognormvariate(0, 0.9)
        time, size = self._kinds[kind]
        time *= self.rnd.paretovariate(1.5) / 3 if self.heavy_times else self.rnd.lognormvariate(-0.02, 0.2)
        size *= self.rnd.paretovariate(1.3) / 4 if self.heavy_sizes else self.rnd.lognormvariate(-0.005, 0.1)
        key = (kind, len(self.tasks))
        seconds = min(time * self.seconds, 30 * self.seconds)
        nbytes = int(min(size * shrink * self.nbytes, 2e9)) + 100
        self.tasks[key] = TaskSpec(tuple(dict.fromkeys(inputs)), seconds, nbytes)
        return key

    @property
    def total(self) -> int:
        """Tasks to draw."""
        return round(10 ** self.rnd.uniform(2, math.log10(1500)))


def layered(m: Maker) -> None:
    rnd, left = m.rnd, m.total
    levels: list[list[Any]] = []
    while left > 0:
        width = max(1, min(left, round(m.workers * rnd.lognormvariate(0.7, 0.9))))
        fan = rnd.choice((1, 1, 2, 3, 5))
        near = rnd.random() < 0.6
        level = []
        for i in range(width):
            inputs: list[Any] = []
            if levels:
                before = levels[-1]
                at = i * len(before) // width
                taken = range(min(fan, len(before)))
                inputs += [before[(at + k) % len(before)] if near else rnd.choice(before) for k in taken]
                if len(levels) > 1 and rnd.random() < 0.1:
                    inputs.append(rnd.choice(rnd.choice(levels[:-1])))
            level.append(m.add(f"layer{len(levels)}", inputs))
        levels.append(level)
        left -= width


def series(m: Maker) -> None:
    def grow(inputs: list[Any], n: int, depth: int) -> list[Any]:
        if n <= 2 or depth > 7:
            last = inputs
            for i in range(max(1, n)):
                last = [m.add(f"step{depth}x{i % 3}", last)]
            return last
        if m.rnd.random() < 0.5:
            cut = m.rnd.randint(1, n - 1)
            return grow(grow(inputs, cut, depth + 1), n - cut, depth + 1)
        ways = m.rnd.randint(2, min(12, n))
        out = [k for _ in range(ways) for k in grow(inputs, max(1, (n - 2) // ways), depth + 1)]
        return [m.add(f"join{depth}", out, 0.5)]

    total = m.total
    parts = max(1, total // 150)
    for _ in range(parts):
        grow([m.add("source", [])], total // parts, 0)


def fork_join(m: Maker) -> None:
    total, rounds = m.total, m.rnd.randint(1, 5)
    last: list[Any] = []
    for r in range(rounds):
        length = m.rnd.randint(1, 3)
        ends = []
        for _ in range(max(1, total // rounds // length)):
            at = last
            for k in range(length):
                at = [m.add(f"fork{r}x{k}", at)]
            ends += at
        while len(ends) > 16:
            ends = [m.add(f"partial{r}", ends[i : i + 8], 0.3) for i in range(0, len(ends), 8)]
        last = [m.add(f"join{r}", ends, m.rnd.choice((0.001, 0.3, 2.0)))]


def wavefront(m: Maker) -> None:
    n = max(6, int(m.total**0.5))
    cells: dict[tuple[int, int], Any] = {}
    diagonal = m.rnd.random() < 0.4
    for i in range(n):
        for j in range(n):
            before = [(i - 1, j), (i, j - 1)] + ([(i - 1, j - 1)] if diagonal else [])
            cells[i, j] = m.add("cell", [cells[k] for k in before if k in cells])


def phases(m: Maker) -> None:
    total, rounds = m.total, m.rnd.randint(2, 5)
    chunks: list[Any] = []
    barrier: list[Any] = []
    again = m.rnd.random() < 0.5
    for r in range(rounds):
        n = max(4, total // rounds // 2)
        if not chunks or not again:
            chunks = [m.add(f"source{r}", barrier) for _ in range(n)]
        parts = [m.add(f"use{r}", [c, *barrier], 0.05) for c in chunks]
        while len(parts) > 12:
            parts = [m.add(f"partial{r}", parts[i : i + 8], 0.05) for i in range(0, len(parts), 8)]
        barrier = [m.add(f"barrier{r}", parts, 0.01)]


def trees(m: Maker) -> None:
    n = max(8, m.total // 3)
    sources = [m.add("source", []) for _ in range(n)]
    for t in range(m.rnd.randint(1, 3)):
        level = [m.add(f"map{t}", [x]) for x in sources]
        fan, d = m.rnd.choice((2, 4, 8)), 0
        if m.rnd.random() < 0.3:
            m.rnd.shuffle(level)
        while len(level) > 1:
            level = [m.add(f"sum{t}x{d}", level[i : i + fan], 0.4) for i in range(0, len(level), fan)]
            d += 1


KINDS: dict[str, Callable[[Maker], None]] = {
    "layered": layered,
    "series": series,
    "fork_join": fork_join,
    "wavefront": wavefront,
    "phases": phases,
    "trees": trees,
}


def build(name: str, workers: int) -> Workload:
    """``random-SEED``."""
    rnd = random.Random(int(name.rpartition("-")[2]) * 7919 + 11)
    kind = rnd.choice(list(KINDS))
    m = Maker(rnd, workers)
    KINDS[kind](m)
    used = {d for task in m.tasks.values() for d in task.dependencies}
    outputs = [k for k in m.tasks if k not in used]
    return Workload(f"{name}-{kind}", m.tasks, outputs, jitter=rnd.choice((0.05, 0.1, 0.3)))
