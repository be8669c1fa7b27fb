"""What users write over frames on two workers, through this package's shuffle: rows equal those of pandas.

Each operation runs on device frames on a cluster, and on the same data as pandas frames in this process, without one.
The rows of both are compared, whatever their order; after `shuffle` the order within each partition, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from benchmarks.gpu.target import get, missing

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.target import Target

PARTS = 6
#: rows of a partition on a GPU
ROWS = 200_000


def left(i: int, rows: int, on: str) -> Any:
    """Numbers, text and times with nulls; `on` "" is pandas."""
    rng = np.random.default_rng(i)
    numbers = rng.integers(0, 1000, rows)
    some = numbers % 5 == 0
    made = pd.DataFrame(
        {
            "k": rng.integers(0, rows // 4, rows),
            "id": np.arange(i * rows, (i + 1) * rows),
            "small": numbers.astype("i1"),
            "x": np.where(some, np.nan, numbers * 0.5),
            "yes": some,
            "text": pd.Series(numbers.astype("U4"), dtype="str").where(~some),
            "when": pd.Series(pd.to_datetime(numbers, unit="h").astype("M8[ns]")).where(~some),
        }
    )
    return get(on).frame(made) if on else made


def right(i: int, rows: int, on: str) -> Any:
    rng = np.random.default_rng(100 + i)
    made = pd.DataFrame({"k": rng.integers(0, rows // 2, rows // 4), "w": rng.random(rows // 4)})
    return get(on).frame(made) if on else made


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "shuffle": lambda a, b: a.shuffle("k", npartitions=7),
    "merge": lambda a, b: a.merge(b, on="k", how="left", broadcast=False),
    "set_index": lambda a, b: a.set_index("k").reset_index(),
    "sort_values": lambda a, b: a.sort_values("k"),
    "groupby": lambda a, b: a.groupby("k").agg({"x": "sum", "id": "max"}, split_out=3).reset_index(),
    "drop_duplicates": lambda a, b: a[["k", "text"]].drop_duplicates(split_out=3),
}


def collections(rows: int, on: str) -> tuple[Any, Any]:
    """Both inputs as Dask frames."""
    import dask.dataframe as dd

    out = []
    for make in (left, right):
        meta = make(0, 40, on).iloc[:0]
        out.append(dd.from_map(make, range(PARTS), rows=rows, on=on, meta=meta))
    return out[0], out[1]


def plain(frame: Any) -> pd.DataFrame:
    """Rows in an order of their own, without the index."""
    frame = pd.DataFrame(frame.to_pandas() if hasattr(frame, "to_pandas") else frame)
    return frame.sort_values(list(frame)).reset_index(drop=True)


def run(what: str, target: Target) -> dict[str, Any]:
    """`what`: one of `OPERATIONS`."""
    import dask
    from distributed import Client

    import dask_gpurt
    from benchmarks.shuffle_meters import give_back

    missing("rmm", target.frames)
    operation, rows = OPERATIONS[what], max(400, int(ROWS * target.scale))
    with dask.config.set({"scheduler": "sync", "dataframe.shuffle.method": "tasks"}):
        want = plain(operation(*collections(rows, "")).compute())
    with (
        dask.config.set({"dataframe.shuffle.method": "p2p"}),
        dask_gpurt.local_cluster(
            settings={"shuffle.device-frames": True},
            n_workers=2,
            threads_per_worker=2,
            dashboard_address=None,
            processes=True,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        parts = client.gather(client.compute(operation(*collections(rows, target.name)).to_delayed()))
        statistics = client.run_on_scheduler(give_back)
    got = plain(pd.concat([part.to_pandas() if hasattr(part, "to_pandas") else part for part in parts]))
    out: dict[str, Any] = {
        "rows": len(got),
        "type": f"{type(parts[0]).__module__}.{type(parts[0]).__name__}",
        "runs": statistics["runs"],
        "fallbacks": dict(statistics["fallbacks"]),
        "errors": statistics["errors"],
    }
    try:
        pd.testing.assert_frame_equal(got[list(want)], want, check_exact=False, rtol=1e-9)
    except AssertionError as e:
        out["problem"] = f"other rows than pandas: {e}"[:600]
    if not statistics["runs"] or statistics["fallbacks"] or statistics["errors"]:
        out["problem"] = f"it was not ours: {out}, {statistics['last_error']}"[:900]
    if what == "shuffle" and not all(np.all(np.diff(_ids(part)) > 0) for part in parts):
        out["problem"] = "rows of a partition are not in the order of the input"
    return out


def _ids(part: Any) -> Any:
    return (part["id"].to_pandas() if hasattr(part, "to_pandas") else part["id"]).to_numpy()
