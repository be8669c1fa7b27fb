"""Random joins with run-time filters against pandas: all kinds, dtypes, nulls, duplicates, empty sides, selectivity.

    python -m benchmarks.join_random --pure 10000 --live 300

The bulk needs no cluster. A side is cut to inputs, and a filter is made of them as the workers make it. The other side
drops what cannot match. pandas' merge of what is left must be pandas' merge of everything, row by row. The rest runs on
one live cluster of two workers and must have the rows that pandas finds. Where they differ, the same join with filters
off must differ in the same way: Dask sends equal keys of some dtypes to two outputs when only some inputs have nulls.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import decimal
import os
import time
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from dask_gpurt.shuffle.protocol.join_plan import Join, side_of
from dask_gpurt.shuffle.rows.join_keys import Keys
from dask_gpurt.shuffle.rows.key_filter import KeyFilter, bits_of, union, words_for

HOWS = ("inner", "left", "right", "outer", "leftsemi")
LETTERS = ("", "a", "b", "é", "abcdefgh", "abcdefghi", "x" * 70 + "1", "x" * 70 + "2", "日本語")
#: dtypes whose keys are filtered, and those that must be refused
EXACT: tuple[Any, ...] = (
    *("int8", "int16", "int32", "int64", "uint8", "uint64", "float32", "float64", "bool"),
    *("datetime64[ns]", "datetime64[us]", "timedelta64[ns]", "datetime64[us, Europe/Berlin]"),
    *("Int8", "Int64", "UInt32", "boolean", "Float64", "string[pyarrow]"),
    pd.StringDtype("pyarrow", na_value=np.nan),
    *map(pd.ArrowDtype, (pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.bool_())),
    *map(pd.ArrowDtype, (pa.string(), pa.large_string(), pa.date32(), pa.timestamp("us"), pa.timestamp("ns", "UTC"))),
    *map(pd.ArrowDtype, (pa.duration("ms"), pa.decimal128(12, 2), pa.decimal128(38, 0))),
)
REFUSED: tuple[Any, ...] = ("object", "category", pd.StringDtype("python"), pd.ArrowDtype(pa.float64()))


@dataclasses.dataclass
class Case:
    """One join."""

    how: str
    left: pd.DataFrame
    right: pd.DataFrame
    left_on: list[str]
    right_on: list[str]


def column(r: np.random.Generator, dtype: Any, n: int, low: int, high: int, nulls: float) -> pd.Series:
    """Values `low` to `high` in a dtype, some of them null."""
    at = r.integers(low, max(low + 1, high), n)
    text = str(dtype)
    values: Any
    if isinstance(dtype, pd.StringDtype) or text in ("object", "category") or "string" in text:
        values = [LETTERS[i % len(LETTERS)] + str(i // len(LETTERS)) * (i > len(LETTERS)) for i in at.tolist()]
    elif "decimal" in text:
        values = [decimal.Decimal(i * 7 - 50) for i in at.tolist()]
    elif "bool" in text:
        values = (at % 2).astype(bool)
    elif "float" in text.lower() or "double" in text:
        values = np.where(at % 5 == 0, np.where(r.random(n) < 0.5, 0.0, -0.0), at / 3 - 4)
    elif "time" in text or "date" in text or "duration" in text:
        values = at.astype("int64") * 86_400_000_000
        if "date32" in text or text.startswith("date"):
            values = pd.to_datetime(values, unit="us")
        if "date32" in text:
            values = [stamp.date() for stamp in values]
        elif "duration" in text:
            values = pd.to_timedelta(at, unit="s")
        elif "timestamp" in text:
            values = pd.to_datetime(at, unit="s", utc="UTC" in text)
    else:
        values = at % 120
    if text.startswith("datetime64") and "," in text:
        out = pd.Series(pd.DatetimeIndex(values).tz_localize("UTC").tz_convert("Europe/Berlin")).astype(dtype)
    else:
        out = pd.Series(values, dtype=dtype)
    numpy_dtype = isinstance(out.dtype, np.dtype)
    if nulls and not (numpy_dtype and out.dtype.kind in "iub") and n:
        out = out.mask(pd.Series(r.random(n) < nulls))
        assert out.dtype == dtype or text == "category", (out.dtype, dtype)
    return out


def make(seed: int) -> Case:
    """The join of a seed."""
    r = np.random.default_rng(seed)
    keys = int(r.choice([1, 1, 1, 2, 3]))
    rows = [int(r.choice([0, 1, 20, 200], p=[0.05, 0.05, 0.3, 0.6])) for _ in range(2)]
    spread = int(r.choice([3, 40, 400]))
    shift = int(r.choice([0, 0, spread // 2, 2 * spread]))
    nulls = float(r.choice([0.0, 0.0, 0.1, 0.5]))
    pool = EXACT if r.random() < 0.93 else REFUSED
    sides: list[dict[str, Any]] = [{}, {}]
    names: list[list[str]] = [[], []]
    for k in range(keys):
        dtype = pool[int(r.integers(len(pool)))]
        for s, side in enumerate("lr"):
            name = f"k{k}" if r.random() < 0.3 else f"{side}k{k}"
            names[s].append(name)
            sides[s][name] = column(r, dtype, rows[s], s * shift, s * shift + spread, nulls)
    frames = [pd.DataFrame(side, index=pd.RangeIndex(n)) for side, n in zip(sides, rows, strict=True)]
    for s, side in enumerate("lr"):
        frames[s][f"{side}v"] = np.arange(rows[s])
    return Case(str(r.choice(HOWS)), frames[0], frames[1], names[0], names[1])


def merged(case: Case, left: pd.DataFrame, right: pd.DataFrame) -> pd.DataFrame:
    """As the task of an output merges."""
    how: Any = case.how
    if how == "leftsemi":
        right, how = right.drop_duplicates(), "inner"
    return left.merge(right, how=how, left_on=case.left_on, right_on=case.right_on)


def keys_of(r: np.random.Generator, frame: pd.DataFrame, columns: tuple[Any, ...]) -> KeyFilter:
    """The filter of a side that is cut to inputs, some of them on one worker and some on another."""
    cuts = np.sort(r.integers(0, len(frame) + 1, 3))
    inputs = [frame.iloc[a:b] for a, b in zip([0, *cuts], [*cuts, len(frame)], strict=True)]
    keys = [Keys.of(one, columns) for one in inputs]
    words = words_for(len(frame))
    bits = union([bits_of([one.hashes for one in keys[w::2]], words) for w in (0, 1)])
    some = [one.bounds for one in keys if len(one.hashes)]
    known = [one for one in some if one is not None]
    if not known or len(known) < len(some):
        return KeyFilter(bits, None)
    return KeyFilter(bits, (min(low for low, _ in known), max(high for _, high in known)))


def pure(seed: int) -> tuple[str, int, int]:
    """Check a join without a cluster: (why no filter, rows looked up, rows dropped).

    Raises
    ------
    AssertionError
        The result is another one.
    """
    case, r = make(seed), np.random.default_rng(seed + 1_000_000_007)
    join = Join("l", "r", case.how, case.left_on, case.right_on, False, False)
    metas = {"l": case.left.iloc[:0], "r": case.right.iloc[:0]}
    sides, why = {}, ""
    for name in "lr":
        sides[name], why = side_of(join, name, metas, {"l": 3, "r": 3})
    if sides["l"] is None or sides["r"] is None:
        return why, 0, 0
    frames = {"l": case.left, "r": case.right}
    left = dict(frames)
    looked = dropped = 0
    for name, other in (("l", "r"), ("r", "l")):
        side, partner = sides[name], sides[other]
        assert side is not None
        assert partner is not None
        if side.drops:
            mask = keys_of(r, frames[other], partner.columns).passing(frames[name], side.columns)
            left[name] = frames[name][mask]
            looked, dropped = looked + len(mask), dropped + int((~mask).sum())
    try:
        want = merged(case, case.left, case.right)
    except (TypeError, ValueError, NotImplementedError, pa.ArrowException) as e:
        return f"pandas cannot: {type(e).__name__}: {e}"[:80], 0, 0
    got = merged(case, left["l"], left["r"])
    pd.testing.assert_frame_equal(got, want, check_dtype=bool(len(left["l"]) and len(left["r"])))
    return "", looked, dropped


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows in one order, whatever order they came in."""
    return frame.sort_values(["lv", "rv"] if "rv" in frame else ["lv"], ignore_index=True)


def switch(mode: str, dask_scheduler: Any = None) -> None:
    """Have the next joins of a cluster filtered, or not; on the scheduler."""
    takeover = dask_scheduler.plugins["shuffle"].takeover
    takeover.settings = dataclasses.replace(takeover.settings, join_filter=mode)


def live(seeds: range, settings: dict[str, str]) -> dict[str, Any]:
    """Joins on one live cluster."""
    import dask
    import dask.dataframe as dd
    from distributed import Client

    import dask_gpurt
    from dask_gpurt.shuffle.counters import worker_statistics

    counts: collections.Counter[str] = collections.Counter()
    os.environ.update(settings)
    dask.config.refresh()
    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        dask_gpurt.local_cluster(**options) as cluster,
        Client(cluster) as client,
        dask.config.set({"dataframe.shuffle.method": "p2p", "dataframe.convert-string": False}),
    ):
        for seed in seeds:
            case, r = make(seed), np.random.default_rng(seed)
            parts = [max(2, int(r.integers(2, 9))) for _ in range(2)]
            frames = [dd.from_pandas(one, npartitions=n) for one, n in zip((case.left, case.right), parts, strict=True)]
            how: Any = case.how
            options = {"left_on": case.left_on, "right_on": case.right_on, "how": how}
            try:
                joined = frames[0].merge(frames[1], broadcast=False, **options)
                got = in_order(joined.compute())
                if how == "leftsemi":  # of the left side's columns alone
                    case.right = case.right[case.right_on]
                want = in_order(merged(case, case.left, case.right)[list(got.columns)])
            except (NotImplementedError, TypeError, ValueError, pa.ArrowException) as e:
                counts[f"not run: {type(e).__name__}"] += 1
                continue
            try:
                pd.testing.assert_frame_equal(got, want, check_dtype=False)
                counts["equal"] += 1
            except AssertionError as e:
                client.run_on_scheduler(switch, "off")
                without = in_order(joined.compute())
                client.run_on_scheduler(switch, "auto")
                try:
                    pd.testing.assert_frame_equal(got, without)
                except AssertionError:
                    raise SystemExit(f"seed {seed}: wrong, and right without filters: {e}") from e
                print(
                    f"seed {seed}: not pandas' rows, with filters and without: {len(got)}, pandas {len(want)}",
                    flush=True,
                )
                counts["as without filters, not as pandas"] += 1
        workers = client.run(lambda dask_worker: worker_statistics(dask_worker))
        status = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.plugins["shuffle"].takeover.statistics())
    for one in workers.values():
        for name in ("join_filters", "join_rows_in", "join_rows_dropped"):
            counts[name] += one[name]
    if not status["join_filters"]["sent"]:
        raise SystemExit(f"no filter was sent in {len(seeds)} joins, so nothing was checked: {status['join_filters']}")
    return {"joins": dict(counts), "scheduler": status["join_filters"], "errors": status["errors"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pure", type=int, default=10_000, help="joins without a cluster")
    parser.add_argument("--live", type=int, default=300, help="joins on a live cluster")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    args = parser.parse_args()
    start = time.monotonic()
    reasons: collections.Counter[str] = collections.Counter()
    looked = dropped = 0
    for seed in range(args.first, args.first + args.pure):
        try:
            why, some, gone = pure(seed)
        except Exception as e:
            raise SystemExit(f"seed {seed}: {type(e).__name__}: {e}") from e
        reasons[why or "filtered"] += 1
        looked, dropped = looked + some, dropped + gone
    print(f"{args.pure} joins equal, {looked} rows looked up, {dropped} dropped, {time.monotonic() - start:.0f} s")
    print(dict(reasons.most_common()))
    if args.live:
        print(live(range(args.first, args.first + args.live), {"DASK_GPURT__SHUFFLE__JOIN_FILTER": "auto"}))


if __name__ == "__main__":
    main()
