"""Small random work with known answers: shuffles, joins, groupbys, rechunks and delayed graphs, some at once."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = 40
#: seconds that a task may sleep, set for each run
LAG = [0.0]


class Work(NamedTuple):
    """A collection, and what computing it gives."""

    name: str
    collection: Any
    want: Any


def _lag() -> None:
    if LAG[0]:
        time.sleep(random.random() * LAG[0])


def left(i: int) -> pd.DataFrame:
    """Partition `i` of the larger side: key, number, text."""
    _lag()
    r = np.random.default_rng(i)
    text = pd.Series(r.integers(0, 9, 60)).astype("str")
    return pd.DataFrame({"k": r.integers(0, KEYS, 60), "a": r.integers(0, 10**6, 60), "s": text})


def right(i: int) -> pd.DataFrame:
    """Partition `i` of the smaller side; half of its keys are in the larger one."""
    _lag()
    r = np.random.default_rng(1000 + i)
    return pd.DataFrame({"k": r.integers(KEYS // 2, KEYS + 20, 30), "b": r.integers(0, 10**6, 30)})


def _frame(part: Callable[[int], pd.DataFrame], n: int) -> Any:
    return dd.from_map(part, list(range(n)), meta=part(0).iloc[:0])


def _whole(part: Callable[[int], pd.DataFrame], n: int) -> pd.DataFrame:
    return pd.concat([part(i) for i in range(n)])


def _slowly(frame: pd.DataFrame) -> pd.DataFrame:
    _lag()
    return frame


def _shuffle(r: random.Random) -> tuple[Any, Any]:
    n = r.randint(2, 14)
    out = _frame(left, n).shuffle("k", npartitions=r.randint(1, 14))
    return out.map_partitions(_slowly), _whole(left, n)


def _merge(r: random.Random) -> tuple[Any, Any]:
    n, m, how = r.randint(2, 12), r.randint(2, 12), r.choice(["inner", "left", "outer", "right"])
    out = _frame(left, n).merge(_frame(right, m), on="k", how=how, shuffle_method="p2p", npartitions=r.randint(2, 10))
    return out, _whole(left, n).merge(_whole(right, m), on="k", how=how)


def _merge_few(r: random.Random) -> tuple[Any, Any]:
    """A small side that is split long before the other, so that a join filter comes in time."""
    n, m, how = r.randint(8, 16), r.randint(1, 3), r.choice(["inner", "inner", "right"])
    out = _frame(left, n).merge(_frame(right, m), on="k", how=how, shuffle_method="p2p", npartitions=r.randint(3, 8))
    return out, _whole(left, n).merge(_whole(right, m), on="k", how=how)


def _merge_sum(r: random.Random) -> tuple[Any, Any]:
    n, m = r.randint(4, 12), r.randint(4, 12)
    out = _frame(left, n).merge(_frame(right, m), on="k", shuffle_method="p2p").groupby("k").a.sum()
    return out, _whole(left, n).merge(_whole(right, m), on="k").groupby("k").a.sum()


def _set_index(r: random.Random) -> tuple[Any, Any]:
    n = r.randint(3, 10)
    out = _frame(left, n).set_index("k", npartitions=r.randint(2, 8), shuffle_method="p2p")
    return out, _whole(left, n).set_index("k")


def _groupby(r: random.Random) -> tuple[Any, Any]:
    n = r.randint(3, 14)
    out = _frame(left, n).groupby("k").a.max(split_out=r.randint(2, 6), shuffle_method="p2p")
    return out, _whole(left, n).groupby("k").a.max()


def _read_twice(r: random.Random) -> tuple[Any, Any]:
    n = r.randint(4, 10)
    shuffled = _frame(left, n).shuffle("k", npartitions=r.randint(3, 9))
    want = _whole(left, n)
    out = dd.concat([shuffled.map_partitions(_slowly), shuffled.assign(a=shuffled.a + 1)])
    return out, pd.concat([want, want.assign(a=want.a + 1)])


def _chain(r: random.Random) -> tuple[Any, Any]:
    n = r.randint(4, 10)
    out = _frame(left, n).shuffle("k", npartitions=r.randint(3, 9)).shuffle("s", npartitions=r.randint(2, 9))
    return out.shuffle("a"), _whole(left, n)


def _rechunk(r: random.Random) -> tuple[Any, Any]:
    n = r.choice([24, 60])
    want = np.arange(n * n).reshape(n, n)
    out = da.from_array(want, chunks=(n // 6, n)).rechunk((n, n // r.choice([3, 4, 6])), method="p2p") + 1
    return out, want + 1


def _delayed(r: random.Random) -> tuple[Any, Any]:
    values: list[int] = list(range(10))
    nodes = [dask.delayed(v) for v in values]
    add = dask.delayed(_sum, pure=False)
    for _ in range(r.randint(20, 150)):
        at = [r.randrange(max(0, len(nodes) - 30), len(nodes)) for _ in range(r.randint(1, 4))]
        nodes.append(add(*[nodes[i] for i in at]))
        values.append(sum(values[i] for i in at) % 1_000_003)
    last = r.randint(1, 12)
    return dask.delayed(list)(nodes[-last:]), values[-last:]


def _sum(*values: int) -> int:
    _lag()
    return sum(values) % 1_000_003


WORKS: dict[str, Callable[[random.Random], tuple[Any, Any]]] = {
    "shuffle": _shuffle,
    "merge": _merge,
    "merge-few": _merge_few,
    "merge-sum": _merge_sum,
    "set-index": _set_index,
    "groupby": _groupby,
    "read-twice": _read_twice,
    "chain": _chain,
    "rechunk": _rechunk,
    "delayed": _delayed,
}


def make(name: str, r: random.Random) -> Work:
    """One of `WORKS`."""
    return Work(name, *WORKS[name](r))


def check(got: Any, want: Any) -> None:
    """Compare an answer, whatever the order of its rows.

    Raises
    ------
    AssertionError
        It is another one.
    """
    if isinstance(want, np.ndarray):
        np.testing.assert_array_equal(got, want)
    elif isinstance(want, pd.Series):
        pd.testing.assert_series_equal(got.sort_index(), want.sort_index(), check_dtype=False, check_names=False)
    elif isinstance(want, pd.DataFrame):
        pd.testing.assert_frame_equal(_ordered(got)[_ordered(want).columns], _ordered(want), check_dtype=False)
    else:
        assert got == want, (got, want)


def _ordered(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame.reset_index(drop=frame.index.name is None)
    return frame.sort_values(list(frame.columns), ignore_index=True)
