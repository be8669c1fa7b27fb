"""Programs made with delayed: forests, searches, pipelines, map and reduce."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import dask
import numpy as np
from dask import delayed

from benchmarks.strangers.catalogue import Scale, program


def make_block(i: int, n: int) -> Any:
    return np.random.default_rng(i).random(n)


def fit_model(x: Any, *others: Any) -> Any:
    return np.array([x.mean(), *[o.mean() for o in others]])


def blocks(s: Scale, per: float, grain: float = 1.0) -> list[Any]:
    """Chunks made by delayed functions."""
    n = int(s.grain * s.grain * grain)
    return [delayed(make_block, pure=True)(i, n) for i in range(max(2, round(s.workers * per)))]


def tree(values: list[Any], fan: int, function: Any) -> Any:
    """Reduce by a tree."""
    while len(values) > 1:
        values = [function(values[i : i + fan]) for i in range(0, len(values), fan)]
    return values[0]


@program("delayed")
def forest(s: Scale) -> Any:
    """Each tree of a forest is fitted to a sample of the chunks."""
    data = blocks(s, 2)
    rng = np.random.default_rng(0)
    fit = delayed(fit_model)
    models = [fit(*[data[j] for j in rng.choice(len(data), 3, replace=False)]) for _ in range(s.workers * 6)]
    score = delayed(lambda ms: float(sum(m.sum() for m in ms)))
    return score(models).compute()


@program("delayed")
def cross_validation(s: Scale) -> Any:
    folds = blocks(s, 0.5)
    fit, score = delayed(fit_model), delayed(lambda m, x: float(m.sum() * x.mean()))
    out = []
    for c in range(8):
        for i, held in enumerate(folds):
            near = [folds[(i + k) % len(folds)] for k in range(1, 4)]
            out.append(score(fit(*near, np.full(3, c)), held))
    return sum(dask.compute(*out))


@program("delayed")
def grid_search(s: Scale) -> Any:
    x = delayed(make_block, pure=True)(0, s.grain * s.grain)
    scale = [delayed(operator.mul)(x, k) for k in range(1, 4)]
    features = [delayed(operator.add)(z, k) for z in scale for k in range(3)]
    fits = [delayed(fit_model)(f, np.full(4, c)) for f in features for c in range(s.workers)]
    return float(np.max(delayed(lambda ms: max(m.sum() for m in ms))(fits).compute()))


@program("delayed")
def map_reduce(s: Scale) -> Any:
    """Every reducer takes a part of every mapper's output."""
    ways = max(4, min(24, s.workers))
    split = delayed(lambda x: np.array_split(x, ways), pure=True)
    maps = [split(b) for b in blocks(s, 1.5)]
    take = delayed(operator.getitem, pure=True)
    total = delayed(lambda parts: np.concatenate(parts).sum())
    return sum(dask.compute(*[total([take(m, r) for m in maps]) for r in range(ways)]))


@program("delayed")
def tree_of_sums(s: Scale) -> Any:
    return tree(blocks(s, 6), 4, delayed(lambda xs: np.sum(xs, axis=0))).compute().sum()


@program("delayed")
def pairwise_tree_large(s: Scale) -> Any:
    return tree(blocks(s, 4), 2, delayed(lambda xs: xs[0] + xs[-1])).compute().sum()


@program("delayed")
def pipelines_of_stages(s: Scale) -> Any:
    out = []
    for x in blocks(s, 5):
        x = delayed(np.sqrt)(x)
        x = delayed(np.add)(x, 1)
        x = delayed(np.sort)(x)
        out.append(delayed(np.mean)(x))
    return sum(dask.compute(*out))


@program("delayed")
def diamonds(s: Scale) -> Any:
    dot, sin, cos = delayed(np.dot), delayed(np.sin), delayed(np.cos)
    return sum(dask.compute(*[dot(sin(x), cos(x)) for x in blocks(s, 4)]))


@program("delayed")
def all_pairs(s: Scale) -> Any:
    data = blocks(s, 1 if s.workers <= 16 else 0.5)
    dot = delayed(np.dot)
    return sum(dask.compute(*[dot(a, b) for i, a in enumerate(data) for b in data[i:]]))


@program("delayed")
def neighbours_chain(s: Scale) -> Any:
    """Three rounds of work on each chunk and the one beside it."""
    level = blocks(s, 4)
    for _ in range(3):
        level = [delayed(operator.add)(a, b) for a, b in zip(level, level[1:] + level[:1], strict=True)]
    return sum(dask.compute(*[delayed(np.max)(x) for x in level]))


@program("delayed")
def two_phases(s: Scale) -> Any:
    """Sources again behind a barrier, each for one chunk of before."""
    data = blocks(s, 4)
    total = delayed(sum)([delayed(np.sum)(x) for x in data])
    part = delayed(lambda t, i, n: np.full(n, t + i))
    use = delayed(lambda p, x: float((p * x).sum()))
    return sum(dask.compute(*[use(part(total, i, s.grain**2), x) for i, x in enumerate(data)]))


@program("delayed")
def broadcast_parameters(s: Scale) -> Any:
    parameters = delayed(make_block, pure=True)(7, s.grain * s.grain // 2)
    data = blocks(s, 5)
    return sum(dask.compute(*[delayed(np.sum)(delayed(lambda x, p: x[: len(p)] * p)(x, parameters)) for x in data]))


@program("delayed")
def skewed_sizes(s: Scale) -> Any:
    """A few chunks are very large, most are small."""
    rng = np.random.default_rng(3)
    sizes = np.minimum(s.grain**2 * 3, rng.pareto(1.2, s.workers * 6) * s.grain**2 / 6 + 300).astype(int)
    data = [delayed(make_block, pure=True)(i, int(n)) for i, n in enumerate(sizes)]
    halves = [delayed(lambda x: x[::2] + 1)(x) for x in data]
    joined = [delayed(np.concatenate)(halves[i : i + 5]) for i in range(0, len(halves), 5)]
    return sum(dask.compute(*[delayed(np.mean)(x) for x in joined]))


@program("delayed")
def tiny_tasks_shared_inputs(s: Scale) -> Any:
    shared = [delayed(make_block, pure=True)(i, 16) for i in range(5)]
    f = delayed(lambda i, xs: i + float(xs[0][0]), pure=False)
    return sum(dask.compute(*[f(i, shared) for i in range(s.workers * 100)]))


@program("delayed")
def video_frames(s: Scale) -> Any:
    """Decode, use two neighbouring frames, encode in groups, then one index."""
    frames = blocks(s, 6, 0.5)
    motion = [delayed(np.subtract)(b, a) for a, b in itertools.pairwise(frames)]
    groups = [delayed(lambda *xs: np.concatenate(xs)[::4])(*motion[i : i + 12]) for i in range(0, len(motion), 12)]
    return delayed(lambda gs: sum(len(g) for g in gs))(groups).compute()
