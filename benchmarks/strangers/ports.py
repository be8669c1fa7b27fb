"""Programs for real clusters only: after coiled/benchmarks, scaled to two workers of 1 GiB, and Dask's own P2P.

They use a client's own methods, sleep, spill, or shuffle peer to peer, which the simulator does not know. They have no
part in the sets' hashes of `catalogue`: all of them are looked at.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
from dask import delayed
from dask.datasets import timeseries
from distributed import as_completed, wait

if TYPE_CHECKING:
    from collections.abc import Callable

PORTS: dict[str, Callable[[Any], object]] = {}
COLUMNS: dict[str, type] = {str(i): float for i in range(100)}


def port(function: Callable[[Any], object]) -> Callable[[Any], object]:
    """Register a function of a client under its name."""
    PORTS[function.__name__] = function
    return function


def uniform(shape: Any, chunks: Any, seed: int = 42) -> Any:
    return da.random.default_rng(seed).random(shape, chunks=chunks)


def frame(nbytes: float, dtypes: dict[str, type], partition: int = 8 << 20, seed: int = 1) -> Any:
    """A frame of about so many bytes in partitions of 8 MiB, with an integer column to join on."""
    rows = max(1, partition // (8 * (len(dtypes) + 1)))
    n = max(2, int(nbytes / partition))
    end = pd.Timestamp("2000-01-01") + pd.Timedelta(seconds=rows * n)
    df = timeseries("2000-01-01", end, freq="1s", partition_freq=f"{rows}s", dtypes=dtypes, seed=seed)
    df["predicate"] = df["0"] * 1e6
    return df.astype({"predicate": "int"})


def nap(x: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return x


@port
def sum_of_slow_squares(client: Any) -> Any:
    x = da.zeros((1130 * 8, 1130 * 16), chunks=(1130, 1130)).map_blocks(nap, 0.02, dtype=float)
    return da.sum(x, axis=1).sum().compute()


@port
def join_large(client: Any) -> Any:
    a, b = frame(200e6, COLUMNS), frame(200e6, COLUMNS, seed=2)
    return a.merge(b, on="predicate").map_partitions(lambda x: x)[["1_x", "2_y"]].sum().compute().to_numpy()


@port
def join_large_with_small(client: Any) -> Any:
    small = frame(20e6, COLUMNS, seed=2).compute()
    joined = frame(600e6, COLUMNS).merge(small, on="predicate").map_partitions(lambda x: x)
    return joined[["1_x", "2_y"]].sum().compute().to_numpy()


@port
def set_index_persisted(client: Any) -> Any:
    df = frame(300e6, COLUMNS).persist()
    return df.set_index("0").map_partitions(lambda x: x)[["1", "predicate"]].sum().compute().to_numpy()


@port
def spill_and_sum(client: Any) -> Any:
    x = uniform((18_000, 18_000), "16MiB").persist()
    wait(x)
    return x.sum().compute()


@port
def product_that_spills(client: Any) -> Any:
    a = uniform((7500, 7500), (1500, 1500))
    return (a @ a.T).sum().compute()


@port
def one_input_for_many(client: Any) -> Any:
    root = delayed(lambda n: "x" * n)(2**20, dask_key_name="root")
    parts = [delayed(lambda *a: None)(root, i) for i in range(2000)]
    return len(client.gather(client.compute(parts)))


@port
def uneven_sleepers(client: Any) -> Any:
    naps = np.random.RandomState(42).lognormal(1, 1.3, 200) / 60
    return sum(client.gather(client.map(nap, [1.0] * len(naps), [min(n, 1.0) for n in naps], pure=False)))


@port
def zarr_residuals(client: Any) -> Any:
    z = da.from_zarr(_zarr())
    return (z - z.mean(axis=0)).sum().compute()


@port
def zarr_filtered_mean(client: Any) -> Any:
    z = da.from_zarr(_zarr())
    return z[z > 100].mean().compute()


def _zarr() -> str:
    path = os.path.join(tempfile.gettempdir(), "gpurt-strangers.zarr")
    if not os.path.exists(path):
        with dask.config.set(scheduler="synchronous"):
            da.random.default_rng(0).integers(0, 256, size=(300, 300, 300), chunks=50).to_zarr(path)
    return path


@port
def rechunk_tiles_p2p(client: Any) -> Any:
    return uniform((9000, 9000), "4MiB").rechunk((-1, "8MiB")).sum().compute()


@port
def rechunk_swap_axes_p2p(client: Any) -> Any:
    with dask.config.set({"array.rechunk.method": "p2p"}):
        return uniform((9000, 9000), (-1, "4MiB")).rechunk(("4MiB", -1)).sum().compute()


@port
def job_queue(client: Any) -> Any:
    draw = random.Random(1)

    def job(i: int, seconds: float) -> int:
        ballast = "x" * 20_000_000
        time.sleep(seconds)
        return i * len(ballast) // 20_000_000

    return sum(client.gather(client.map(job, range(100), [draw.uniform(0, 0.3) for _ in range(100)])))


@port
def map_many(client: Any) -> Any:
    futures = client.map(lambda i: i + 1, range(6000), pure=False)
    wait(futures)
    return sum(client.gather(futures[:100]))


@port
def map_many_shared_inputs(client: Any) -> Any:
    shared = client.map(lambda i: i, range(5), pure=False)
    futures = client.map(lambda i, deps: i + 1, range(4000), deps=shared, pure=False)
    wait(futures)
    return sum(client.gather(futures[:100]))


@port
def one_after_the_other(client: Any) -> Any:
    return sum(client.submit(lambda i: i + 1, i, pure=False).result() for i in range(60))


@port
def as_they_complete(client: Any) -> Any:
    xs = client.map(lambda i: np.full(1_000_000, float(i)), range(40), pure=False)
    ys = client.map(lambda x: nap(x + 1, 0.03), xs, pure=False)
    zs = client.map(lambda y: nap(float(y[0]), 0.03), ys, pure=False)
    done = as_completed(zs, with_results=True)
    del xs, ys, zs
    return sum(result for _, result in done)


@port
def merge_repeatedly(client: Any) -> Any:
    kw = {"freq": "30s", "partition_freq": "2D", "seed": 1}
    a, b = timeseries("2020-01-01", "2020-03-01", **kw), timeseries("2020-01-01", "2020-02-01", **kw)
    out = 0.0
    for _ in range(2):
        m = a.merge(b)
        out += float((m.x + m.y).mean().compute())
    return out


@port
def sleeping_phases(client: Any) -> Any:
    """Sources again behind a barrier; what takes time is sleep, so two cores suffice."""
    chunks = [delayed(lambda i: nap(np.ones(1_000_000), 0.05), pure=False)(i) for i in range(48)]
    total = delayed(sum)([delayed(lambda x: nap(x.sum(), 0.05))(x) for x in chunks])
    parts = [delayed(lambda t, i: nap(np.full(1_000_000, t), 0.05))(total, i) for i in range(48)]
    uses = [delayed(lambda p, x: nap(float((p * x).sum()), 0.05))(p, x) for p, x in zip(parts, chunks, strict=True)]
    return delayed(sum)(uses).compute()
