"""Programs on dask.array, second part: reductions, scans, several passes, rechunking, transforms."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np

from benchmarks.strangers.arrays import cube, square, tall, vector
from benchmarks.strangers.catalogue import Scale, program


@program("reductions")
def sum_thin_columns(s: Scale) -> Any:
    rows = s.grain * s.grain
    x = da.zeros((rows, s.workers * 12), chunks=(-1, 1))
    return da.sum(x, axis=1).sum().compute()


@program("reductions")
def sum_all_axes(s: Scale) -> Any:
    x = cube(s, 8)
    return dask.compute(x.sum(axis=0).std(), x.sum(axis=(1, 2)).max(), x.mean())


@program("reductions")
def deep_reduction(s: Scale) -> Any:
    return vector(s, 12).sum(split_every=2).compute()


@program("reductions")
def argmax_axis(s: Scale) -> Any:
    return square(s, 5).argmax(axis=0).sum().compute()


@program("reductions")
def moments(s: Scale) -> Any:
    x = vector(s, 6)
    return dask.compute(x.mean(), x.var(), da.moment(x, 3), x.min(), x.max())


@program("reductions")
def keepdims_normalise(s: Scale) -> Any:
    x = square(s, 4)
    return ((x - x.mean(axis=0, keepdims=True)) / x.std(axis=0, keepdims=True)).sum().compute()


@program("passes")
def standardise(s: Scale) -> Any:
    x = tall(s, 6)
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    return (z**2).sum().compute()


@program("passes")
def residual_sum(s: Scale) -> Any:
    x = cube(s, 6)
    return (x - x.mean(axis=0)).sum().compute()


@program("passes")
def clip_then_scale(s: Scale) -> Any:
    x = vector(s, 6)
    low, high = x.min(), x.max()
    y = (x - low) / (high - low)
    return da.where(y > y.mean(), y, 0).sum().compute()


@program("passes")
def three_passes_persisted(s: Scale) -> Any:
    x = square(s, 5).persist()
    mean = x.mean(axis=0).compute()
    std = (x - mean).std(axis=0).compute()
    return ((x - mean) / std).max().compute()


@program("passes")
def covariance(s: Scale) -> Any:
    x = tall(s, 6, 16)
    return da.cov(x.T).sum().compute()


@program("passes")
def correlation_two_arrays(s: Scale) -> Any:
    x, y = vector(s, 4), vector(s, 4, 2)
    dx, dy = x - x.mean(), y - y.mean()
    return ((dx * dy).mean() / (x.std() * y.std())).compute()


@program("scans")
def cumsum_sequential(s: Scale) -> Any:
    return da.cumsum(vector(s, 6)).max().compute()


@program("scans")
def cumsum_blelloch(s: Scale) -> Any:
    return da.cumsum(square(s, 4), axis=0, method="blelloch").max().compute()


@program("scans")
def cumprod_axis(s: Scale) -> Any:
    return da.cumprod(square(s, 5), axis=0).sum().compute()


@program("scans")
def diff_chain(s: Scale) -> Any:
    return da.diff(da.diff(vector(s, 6))).std().compute()


@program("order")
def percentiles(s: Scale) -> Any:
    return da.percentile(vector(s, 6), [5, 50, 95]).compute()


@program("order")
def histogram(s: Scale) -> Any:
    return da.histogram(vector(s, 8), bins=64, range=(0, 1))[0].compute()


@program("order")
def top_of_each_row(s: Scale) -> Any:
    return da.topk(square(s, 4), 3, axis=1).sum().compute()


@program("order")
def unique_values(s: Scale) -> Any:
    x = da.random.default_rng(1).integers(0, 1000, size=s.grain**2 * s.workers * 6, chunks=s.grain**2)
    return da.unique(x).sum().compute()


@program("rechunk")
def rechunk_rows_to_columns(s: Scale) -> Any:
    with dask.config.set({"array.rechunk.method": "tasks"}):
        return square(s, 3).rechunk((-1, s.grain)).rechunk((s.grain, -1)).sum().compute()


@program("rechunk")
def rechunk_tiles_to_rows(s: Scale) -> Any:
    with dask.config.set({"array.rechunk.method": "tasks"}):
        return square(s, 5).rechunk((s.grain // 4, -1)).sum(axis=1).max().compute()


@program("rechunk")
def rechunk_uneven(s: Scale) -> Any:
    with dask.config.set({"array.rechunk.method": "tasks"}):
        x = vector(s, 6)
        return x.rechunk(int(s.grain**2 * 0.7)).std().compute()


@program("rechunk")
def reshape_and_reduce(s: Scale) -> Any:
    with dask.config.set({"array.rechunk.method": "tasks"}):
        x = cube(s, 4)
        return x.reshape((x.shape[0] * x.shape[1], x.shape[2])).sum(axis=0).max().compute()


@program("transforms")
def fft_two_axes(s: Scale) -> Any:
    with dask.config.set({"array.rechunk.method": "tasks"}):
        n = max(3, round((s.workers * 3) ** 0.5))
        x = da.random.default_rng(1).random((n * s.grain, n * s.grain), chunks=(s.grain, -1))
        y = da.fft.fft(x, axis=1).rechunk((-1, s.grain))
        return abs(da.fft.fft(y, axis=0)).mean().compute()


@program("transforms")
def gufunc_rows(s: Scale) -> Any:
    x = tall(s, 6, 16)
    median = da.apply_gufunc(lambda b: np.median(b, axis=-1), "(i)->()", x, output_dtypes=float)
    return median.sum().compute()


@program("transforms")
def gufunc_pairs(s: Scale) -> Any:
    x, y = tall(s, 4, 16), tall(s, 4, 16, 2)
    norms = da.apply_gufunc(lambda a, b: ((a - b) ** 2).sum(axis=-1), "(i),(i)->()", x, y, output_dtypes=float)
    return (norms / norms.max()).mean().compute()


@program("transforms")
def apply_along(s: Scale) -> Any:
    return da.apply_along_axis(np.sort, 1, tall(s, 4, 8)[:: s.grain]).sum().compute()


@program("transforms")
def pyramid(s: Scale) -> Any:
    x = square(s, 6)
    total = x.mean()
    for _ in range(3):
        x = da.coarsen(np.mean, x, {0: 2, 1: 2}, trim_excess=True)
        total = total + x.std()
    return total.compute()
