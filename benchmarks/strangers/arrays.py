"""Programs on dask.array: linear algebra, overlap, reductions, rechunking, generalised functions."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np

from benchmarks.strangers.catalogue import Scale, program


def square(s: Scale, per: float = 4.0, seed: int = 1) -> Any:
    """A square array with about `per` chunks per worker."""
    n = max(2, round((s.workers * per) ** 0.5))
    return da.random.default_rng(seed).random((n * s.grain, n * s.grain), chunks=s.grain)


def tall(s: Scale, per: int = 5, columns: int = 8, seed: int = 1) -> Any:
    """Many rows, one chunk of columns."""
    rows = s.grain * s.grain // columns
    return da.random.default_rng(seed).random((rows * s.workers * per, columns), chunks=(rows, columns))


def vector(s: Scale, per: int = 6, seed: int = 1) -> Any:
    """One dimension."""
    return da.random.default_rng(seed).random(s.grain * s.grain * s.workers * per, chunks=s.grain * s.grain)


def cube(s: Scale, per: int = 6, seed: int = 1) -> Any:
    """Three dimensions, chunks along all of them."""
    n = max(2, round((s.workers * per) ** (1 / 3)))
    edge = max(4, round((s.grain * s.grain) ** (1 / 3)))
    return da.random.default_rng(seed).random((n * edge,) * 3, chunks=edge)


def definite(s: Scale, per: float = 3.0) -> Any:
    """A symmetric positive definite matrix."""
    x = square(s, per)
    return x + x.T + 4 * x.shape[0] * da.eye(x.shape[0], chunks=s.grain)


@program("linalg")
def svd_tall(s: Scale) -> Any:
    _, w, _ = da.linalg.svd(tall(s))
    return w.compute()


@program("linalg")
def svd_vectors(s: Scale) -> Any:
    u, w, v = da.linalg.svd(tall(s, 4, 16))
    return [np.shape(x) for x in dask.compute(u.sum(axis=1), w, v)]


@program("linalg")
def svd_compressed(s: Scale) -> Any:
    _, w, _ = da.linalg.svd_compressed(square(s), 5, n_power_iter=1, seed=1)
    return w.compute()


@program("linalg")
def svd_compressed_persisted(s: Scale) -> Any:
    x = square(s, 3).persist()
    _, w, _ = da.linalg.svd_compressed(x, 8, n_power_iter=2, compute=True, seed=1)
    return w.compute()


@program("linalg")
def qr_tall(s: Scale) -> Any:
    q, r = da.linalg.qr(tall(s, 6))
    return abs((q @ r).sum(axis=0)).compute()


@program("linalg")
def qr_wide(s: Scale) -> Any:
    x = da.random.default_rng(1).random((s.grain, s.grain * s.workers * 3), chunks=(s.grain, s.grain))
    q, r = da.linalg.sfqr(x)
    return dask.compute(abs(q).sum(), abs(r).sum())


@program("linalg")
def cholesky(s: Scale) -> Any:
    return da.linalg.cholesky(definite(s), lower=True).sum().compute()


@program("linalg")
def lu(s: Scale) -> Any:
    _, low, up = da.linalg.lu(definite(s, 2.0))
    return dask.compute(low.sum(), up.sum())


@program("linalg")
def solve(s: Scale) -> Any:
    a = definite(s, 2.0)
    b = da.random.default_rng(2).random((a.shape[0], 4), chunks=(s.grain, 4))
    return da.linalg.solve(a, b, assume_a="pos").sum().compute()


@program("linalg")
def least_squares(s: Scale) -> Any:
    x = tall(s, 5)
    y = x @ np.arange(x.shape[1]) + 1
    return da.linalg.lstsq(x, y)[0].compute()


@program("linalg")
def normal_equations(s: Scale) -> Any:
    x = tall(s, 6, 32)
    y = x @ np.ones(32)
    beta = da.linalg.solve(x.T @ x, x.T @ y)
    return (x @ beta).sum().compute()


@program("products")
def matmul(s: Scale) -> Any:
    return (square(s, 2.5) @ square(s, 2.5, seed=2)).sum().compute()


@program("products")
def gram(s: Scale) -> Any:
    x = square(s, 2.5)
    return (x @ x.T).sum().compute()


@program("products")
def tensordot_axes(s: Scale) -> Any:
    x = cube(s, 4)
    return da.tensordot(x, x, axes=((0, 1), (0, 1))).sum().compute()


@program("products")
def einsum_batch(s: Scale) -> Any:
    n = s.workers * 3
    a = da.random.default_rng(1).random((n, s.grain, s.grain), chunks=(1, s.grain, s.grain))
    b = da.random.default_rng(2).random((s.grain, s.grain), chunks=s.grain)
    return da.einsum("bij,jk->bik", a, b).sum().compute()


@program("products")
def outer_product(s: Scale) -> Any:
    n = max(3, round((s.workers * 5) ** 0.5))
    v = da.random.default_rng(1).random(s.grain * n, chunks=s.grain)
    return da.outer(v, v + 1).std().compute()


@program("elementwise")
def transpose_sum(s: Scale) -> Any:
    x = square(s, 6)
    return (x + x.T).sum().compute()


@program("elementwise")
def shifted_differences(s: Scale) -> Any:
    a, b = square(s, 3), square(s, 3, 2)
    return (a[1:, 1:] - b[:-1, :-1]).sum().compute()


@program("elementwise")
def vorticity(s: Scale) -> Any:
    n, k = s.grain, s.workers * 5
    rng = da.random.default_rng(1)
    u, v = (rng.random((n, n, k), chunks=(n, n, 1)) for _ in range(2))
    dx, dy = (rng.random((n + 1, n), chunks=(n + 1, n)) for _ in range(2))

    def pad(a: Any) -> Any:
        p = da.pad(a, pad_width=[(0, 1), (0, 0), (0, 0)], mode="wrap")
        return p.rechunk((n + 1, *p.chunks[1:]))

    return (dx[..., None] * pad(u) - dy[..., None] * pad(v)).sum().compute()


@program("elementwise")
def roll_and_add(s: Scale) -> Any:
    x = square(s, 4)
    return (x + da.roll(x, s.grain // 3, axis=0) + da.roll(x, -s.grain // 4, axis=1)).mean().compute()


@program("elementwise")
def broadcast_chain(s: Scale) -> Any:
    x = square(s, 5)
    row, column = x[:1], x[:, :1]
    return da.sqrt(da.where(x > 0.5, x * row, x + column)).sum(axis=0).compute().sum()


@program("elementwise")
def mask_and_mean(s: Scale) -> Any:
    x = vector(s, 5)
    return x[x > 0.4].mean().compute()


@program("elementwise")
def concatenate_stack(s: Scale) -> Any:
    parts = [vector(s, 2, seed) for seed in range(4)]
    return (da.concatenate(parts).std(), da.stack(parts).max(axis=0).sum())[1].compute()


@program("overlap")
def overlap_1d(s: Scale) -> Any:
    x = vector(s, 5)
    return x.map_overlap(lambda b: np.convolve(b, [0.25, 0.5, 0.25], "same"), depth=8).std().compute()


@program("overlap")
def overlap_2d(s: Scale) -> Any:
    x = square(s, 3)
    return x.map_overlap(lambda b: b + np.roll(b, 1, 0), depth=2, boundary="reflect").sum().compute()


@program("overlap")
def overlap_twice(s: Scale) -> Any:
    x = square(s, 1.5)
    for _ in range(2):
        x = x.map_overlap(lambda b: (b + np.roll(b, 1, 1)) / 2, depth=1, boundary="periodic")
    return x.mean().compute()


@program("overlap")
def overlap_sample(s: Scale) -> Any:
    x = square(s, 4)
    y = x.map_overlap(lambda b: b, depth=1)
    middle = x.shape[0] // 2
    return y[middle - s.grain // 2 : middle + s.grain // 2, middle : middle + 10].sum().compute()


@program("overlap")
def gradient_3d(s: Scale) -> Any:
    return sum(abs(g).mean() for g in da.gradient(cube(s, 3))).compute()
