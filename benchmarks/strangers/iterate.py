"""Programs that submit graph after graph and keep data in between: learning, solvers, simulations."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
from dask import delayed

from benchmarks.strangers.arrays import square, tall, vector
from benchmarks.strangers.catalogue import Scale, program


def nearest(x: Any, centres: Any) -> Any:
    """Sums and counts of the rows of a block by their nearest centre: k rows of columns + 1."""
    which = ((x[:, None, :] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
    k = len(centres)
    sums = np.zeros((k, x.shape[1] + 1))
    np.add.at(sums[:, :-1], which, x)
    sums[:, -1] = np.bincount(which, minlength=k)
    return sums


@program("iterate")
def k_means(s: Scale) -> Any:
    x = tall(s, 4).persist()
    centres = np.random.default_rng(1).random((5, x.shape[1]))
    blocks = x.to_delayed().ravel()
    for _ in range(4):
        parts = [delayed(nearest)(b, centres) for b in blocks]
        total = delayed(sum)([delayed(sum)(parts[i : i + 8]) for i in range(0, len(parts), 8)]).compute()
        centres = total[:, :-1] / np.maximum(1, total[:, -1:])
    return centres.sum()


@program("iterate")
def k_means_array(s: Scale) -> Any:
    x = tall(s, 3).persist()
    centres = np.random.default_rng(1).random((4, x.shape[1]))
    for _ in range(3):
        distances = ((x[:, None, :] - centres[None]) ** 2).sum(axis=2)
        label = distances.argmin(axis=1)
        new = [da.where((label == k)[:, None], x, 0).sum(axis=0) / (label == k).sum() for k in range(len(centres))]
        centres = np.stack(dask.compute(*new))
    return centres.sum()


@program("iterate")
def gradient_descent(s: Scale) -> Any:
    x = tall(s, 4, 16).persist()
    y = (x @ np.ones(16)).persist()
    w = np.zeros(16)
    for _ in range(4):
        w -= 0.05 / len(x) * (x.T @ (x @ w - y)).compute()
    return w.sum()


@program("iterate")
def sgd_chains(s: Scale) -> Any:
    """Each epoch passes a model through the chunks of a few shards in turn, then averages."""

    def passes(model: Any, block: Any) -> Any:
        return model - 1e-3 * block.T @ (block @ model - 1)

    step = delayed(passes)
    x = tall(s, 4, 16).persist()
    blocks = list(x.to_delayed().ravel())
    model = np.zeros(16)
    shards = np.array_split(np.arange(len(blocks)), s.workers)
    for _ in range(2):
        ends = []
        for shard in shards:
            m = model
            for i in shard:
                m = step(m, blocks[i])
            ends.append(m)
        model = delayed(lambda ms: np.mean(ms, axis=0))(ends).compute()
    return model.sum()


@program("iterate")
def admm(s: Scale) -> Any:
    x = tall(s, 3, 16).persist()
    blocks = x.to_delayed().ravel()

    def solved(block: Any, z: Any, u: Any) -> Any:
        return np.linalg.solve(block.T @ block + np.eye(16), block.T @ np.ones(len(block)) + z - u)

    local = delayed(solved)
    z, us = np.zeros(16), [np.zeros(16) for _ in blocks]
    for _ in range(3):
        ws = dask.compute(*[local(b, z, u) for b, u in zip(blocks, us, strict=True)])
        z = np.mean([w + u for w, u in zip(ws, us, strict=True)], axis=0)
        us = [u + w - z for w, u in zip(ws, us, strict=True)]
    return z.sum()


@program("iterate")
def power_iteration(s: Scale) -> Any:
    a = square(s, 3)
    a = (a + a.T).persist()
    v = da.ones(a.shape[0], chunks=s.grain)
    for _ in range(4):
        v = (a @ v).persist()
        v = (v / da.linalg.norm(v)).persist()
    return (v @ (a @ v)).compute()


@program("iterate")
def conjugate_gradient(s: Scale) -> Any:
    a = square(s, 2)
    a = (a + a.T + 4 * a.shape[0] * da.eye(a.shape[0], chunks=s.grain)).persist()
    x = da.zeros(a.shape[0], chunks=s.grain)
    r = p = da.ones(a.shape[0], chunks=s.grain).persist()
    rr = float((r @ r).compute())
    for _ in range(3):
        ap = (a @ p).persist()
        alpha = rr / float((p @ ap).compute())
        x, r = dask.persist(x + alpha * p, r - alpha * ap)
        new = float((r @ r).compute())
        p = (r + new / rr * p).persist()
        rr = new
    return float(x.sum().compute())


@program("iterate")
def heat_equation(s: Scale) -> Any:
    x = square(s, 2).persist()
    for _ in range(3):
        x = x.map_overlap(lambda b: (b + np.roll(b, 1, 0) + np.roll(b, 1, 1)) / 3, depth=1, boundary=0.0).persist()
    return x.mean().compute()


@program("iterate")
def page_rank(s: Scale) -> Any:
    a = square(s, 3).persist()
    a = (a / a.sum(axis=0)).persist()
    rank = np.full(a.shape[0], 1 / a.shape[0])
    for _ in range(4):
        rank = 0.15 / a.shape[0] + 0.85 * (a @ rank).compute()
    return rank.max()


@program("iterate")
def explore_one_frame(s: Scale) -> Any:
    """A notebook: load once, ask many small questions."""
    x = vector(s, 5).persist()
    out = [x.mean().compute(), x.std().compute()]
    y = (x - out[0]) / out[1]
    out.append(abs(y).max().compute())
    y = y[y > 0].persist()
    out.append(y.sum().compute())
    return [*out, da.histogram(x, bins=16, range=(0, 1))[0].compute().sum()]


@program("iterate")
def rolling_window_of_chunks(s: Scale) -> Any:
    """Keep the last few batches, drop the oldest, and reduce them each time."""
    batches: list[Any] = []
    out = 0.0
    for i in range(5):
        batches.append(vector(s, 2, seed=i).persist())
        batches = batches[-3:]
        out += float(sum(b.mean() for b in batches).compute())
    return out


@program("iterate")
def growing_table(s: Scale) -> Any:
    x = tall(s, 1, 16).persist()
    for i in range(4):
        x = da.concatenate([x, tall(s, 1, 16, seed=i + 2)]).persist()
    return x.std(axis=0).compute().sum()


@program("iterate")
def randomised_svd_by_hand(s: Scale) -> Any:
    a = square(s, 3).persist()
    q = da.random.default_rng(5).random((a.shape[1], 8), chunks=(s.grain, 8))
    for _ in range(2):
        q, _ = da.linalg.qr((a @ q).persist())
        q, _ = da.linalg.qr((a.T @ q).persist())
    return float(abs(a @ q).sum().compute())
