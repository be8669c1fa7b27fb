"""Programs on dask.dataframe, with shuffles made of tasks, and on xarray."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
from dask.datasets import timeseries

from benchmarks.strangers.arrays import tall
from benchmarks.strangers.catalogue import Scale, program

#: every program here asks for shuffles of tasks: Dask's peer-to-peer shuffle is not simulated
TASKS = {"dataframe.shuffle.method": "tasks"}


def series(s: Scale, per: int = 4, seed: int = 1, start: str = "2000-01-01") -> Any:
    """A frame by time, one partition per day; a partition is about as large as a chunk."""
    rows = max(24, s.grain * s.grain // 5)
    first = pd.Timestamp(start)
    return timeseries(
        start=first,
        end=first + pd.Timedelta(days=s.workers * per),
        freq=f"{86400 * 1000 // rows}ms",
        partition_freq="1D",
        dtypes={"id": int, "x": float, "y": float, "z": float},
        seed=seed,
    )


@program("frames")
def groupby_tree(s: Scale) -> Any:
    return series(s, 6).groupby("id").agg({"x": "mean", "y": "sum"}).compute().y.sum()


@program("frames")
def groupby_split_out(s: Scale) -> Any:
    with dask.config.set(TASKS):
        return series(s, 3).groupby("id").x.sum(split_out=4).sum().compute()


@program("frames")
def groupby_two_results(s: Scale) -> Any:
    df = series(s, 4)
    return [r.sum() for r in dask.compute(df.groupby("id").x.mean(), df.groupby("id").y.max())]


@program("frames")
def rolling_mean(s: Scale) -> Any:
    return series(s, 6).x.rolling(16).mean().max().compute()


@program("frames")
def rolling_time(s: Scale) -> Any:
    return series(s, 5)[["x", "y"]].rolling("30min").sum().mean().compute().sum()


@program("frames")
def resample_days(s: Scale) -> Any:
    return series(s, 6).resample("12h").mean().std().compute().sum()


@program("frames")
def join_small(s: Scale) -> Any:
    df = series(s, 6)
    small = pd.DataFrame({"id": np.arange(900, 1100), "w": np.arange(200.0)})
    return df.merge(small, on="id").w.sum().compute()


@program("frames")
def join_shuffled(s: Scale) -> Any:
    with dask.config.set(TASKS):
        a, b = series(s, 1), series(s, 1, 2)
        return a.merge(b[["id", "x"]].drop_duplicates("id"), on="id").x_y.sum().compute()


@program("frames")
def join_on_index(s: Scale) -> Any:
    a, b = series(s, 4), series(s, 4, 2)
    return a.join(b, rsuffix="_b").x_b.sum().compute()


@program("frames")
def align_and_subtract(s: Scale) -> Any:
    a, b = series(s, 4)[["x", "y"]], series(s, 4, 2, "2000-01-09")[["x", "y"]]
    return (b - a).mean().compute().sum()


@program("frames")
def set_index_tasks(s: Scale) -> Any:
    with dask.config.set(TASKS):
        df = series(s, 2)
        n = df.npartitions
        return df.set_index("x", divisions=list(np.linspace(-1, 1, n + 1))).map_partitions(len).sum().compute()


@program("frames")
def sort_then_reduce(s: Scale) -> Any:
    with dask.config.set(TASKS):
        df = series(s, 2).persist()
        return df.set_index("y").x.cumsum().tail(1).sum()


@program("frames")
def drop_duplicates_tree(s: Scale) -> Any:
    return series(s, 6)[["id"]].drop_duplicates(split_out=1).id.sum().compute()


@program("frames")
def value_counts_quantile(s: Scale) -> Any:
    df = series(s, 5)
    counts, quantile = dask.compute(df.id.value_counts(), df.x.quantile(0.9))
    return counts.sum(), quantile


@program("frames")
def column_chain(s: Scale) -> Any:
    df = series(s, 5).rename(columns={"x": "u"})
    df = df.assign(v=df.u * 2, w=df.y.clip(0)).fillna(0)
    return df[df.v > 0.2].groupby("id").w.mean().compute().sum()


@program("frames")
def repartition_and_describe(s: Scale) -> Any:
    df = series(s, 6)
    return df.repartition(npartitions=df.npartitions // 3)[["x", "y"]].describe().compute().sum().sum()


@program("frames")
def cumulative_by_partition(s: Scale) -> Any:
    df = series(s, 5)
    return (df.x.cumsum() - df.y.cummax()).tail(1).sum()


@program("frames")
def shift_and_correlate(s: Scale) -> Any:
    df = series(s, 5)
    return df.x.corr(df.y.shift(1)).compute()


@program("frames")
def frame_to_array(s: Scale) -> Any:
    x = series(s, 5)[["x", "y", "z"]].to_dask_array(lengths=True)
    return (x.T @ x).compute().sum()


def dataset(s: Scale, per: int = 6) -> Any:
    """Two variables by time and place, one chunk per day."""
    import xarray as xr

    edge = s.grain
    shape = (s.workers * per, edge, edge)
    return xr.Dataset(
        {
            name: (("time", "y", "x"), da.random.default_rng(seed).random(shape, chunks=(1, edge, edge)))
            for seed, name in enumerate(("u", "v"))
        },
        coords={"time": np.arange(shape[0]), "phase": ("time", np.arange(shape[0]) % 6)},
    )


@program("xarray")
def xarray_quadratic_mean(s: Scale) -> Any:
    ds = dataset(s, 5)
    q = ds**2
    q["uv"] = ds.u * ds.v
    return float(q.mean("time").to_array().sum().compute())


@program("xarray")
def xarray_anomalies(s: Scale) -> Any:
    import xarray as xr

    u = dataset(s, 6).u
    with xr.set_options(use_flox=False):
        anomaly = u.groupby("phase") - u.groupby("phase").mean(dim="time")
    return float(abs(anomaly.mean("time")).sum().compute())


@program("xarray")
def xarray_climatology(s: Scale) -> Any:
    import xarray as xr

    with xr.set_options(use_flox=False):
        return float(dataset(s, 6).groupby("phase").std(dim="time").to_array().sum().compute())


@program("xarray")
def xarray_rolling(s: Scale) -> Any:
    return float(dataset(s, 4).u.rolling(time=3).mean().max().compute())


@program("xarray")
def xarray_weighted(s: Scale) -> Any:
    ds = dataset(s, 6)
    w = ds.v.mean("time")
    return float(((ds.u * w).sum("time") / w.sum()).mean().compute())


@program("xarray")
def xarray_detrend(s: Scale) -> Any:
    u = dataset(s, 5).u
    t = u.time - u.time.mean()
    slope = (u * t).sum("time") / (t * t).sum()
    return float((u - slope * t).std().compute())


@program("frames")
def array_to_frame(s: Scale) -> Any:
    import dask.dataframe as dd

    df = dd.from_dask_array(tall(s, 5, 4), columns=list("abcd"))
    return df.groupby((df.a * 10).astype(int)).b.mean().compute().sum()
