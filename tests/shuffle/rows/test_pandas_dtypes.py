"""What Arrow's conversion to pandas leaves out: dtypes of the index, and time zones of categories."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tests.shuffle.rows.test_pickled_columns import check, shuffled
from tests.versions import needs_pandas_3

BIG = 2**62 + 1
LEVELS: dict[str, pd.Index] = {
    "periods": pd.PeriodIndex(["2020-01", None, "2020-03", "2020-04"], freq="M"),
    "intervals": pd.interval_range(0, 4),
    "intervals of dates": pd.interval_range(pd.Timestamp("2020"), periods=4),
    "integers with nulls": pd.Index([BIG, None, 3, 4], dtype="Int64"),
    "integers of Arrow": pd.Index([BIG, None, 3, 4], dtype="int64[pyarrow]"),
    "text of Arrow": pd.Index(["a", None, "b", "c"], dtype=pd.ArrowDtype(pa.string())),
    "categories in a zone": pd.CategoricalIndex(pd.date_range("2020", periods=4, tz="Europe/Paris")),
}


def frame(index: pd.Index) -> pd.DataFrame:
    return pd.DataFrame({"p": np.arange(4) % 2, "x": np.arange(4) * 1.5}, index=index)


@pytest.mark.parametrize("beside", [False, True], ids=["plain", "beside an Arrow column"])
@pytest.mark.parametrize("name", LEVELS)
def test_an_index_is_as_it_was(name: str, beside: bool) -> None:
    index = LEVELS[name].rename("i")
    frames = [frame(index[order]) for order in ([0, 1, 2, 3], [3, 2, 1, 0])]
    if beside:
        frames = [one.assign(a=pd.array(range(4), dtype="int64[pyarrow]")) for one in frames]
    for out in check(frames):
        assert (type(out.index), out.index.dtype, out.index.name) == (type(index), index.dtype, "i")


TEXT = ("str", "string[python]", "string[pyarrow]")


@needs_pandas_3
@pytest.mark.parametrize("several", [False, True], ids=["index", "levels"])
@pytest.mark.parametrize(("kind", "other"), list(itertools.permutations(TEXT, 2)))
def test_text_of_an_index_beside_text_of_another_kind(kind: str, other: str, several: bool) -> None:
    index = pd.Index(["a", None, "b", "c"], dtype=kind, name="i")
    if several:
        index = pd.MultiIndex.from_arrays([index, range(4), pd.Index(list("wxyz"), dtype=other, name="j")])
    one = frame(index).assign(t=pd.array(["x", None, "y", "z"], dtype=other))
    for out in check([one, one[::-1].assign(p=one["p"].to_numpy())]):
        for i in range(index.nlevels):
            assert out.index.get_level_values(i).dtype == index.get_level_values(i).dtype
        assert out["t"].dtype == other


def test_levels_of_an_index_are_as_they_were() -> None:
    index = pd.MultiIndex.from_arrays([*LEVELS.values(), range(4)], names=[None, *"abcdefg"])
    for out in check([frame(index)] * 3):
        assert out.index.names == index.names
        for i in range(index.nlevels):
            assert out.index.get_level_values(i).dtype == index.get_level_values(i).dtype


def test_an_index_of_another_dtype_than_the_metas_is_left_to_arrow() -> None:
    frames = [frame(pd.Index([1, 2, 3, 4])), frame(pd.Index([5, 6, 7, 8]))]
    meta = frame(LEVELS["integers with nulls"]).iloc[:0].set_index(pd.Index([], dtype="Float64"))
    assert [out.index.dtype for out in check(frames, meta)] == [np.dtype("int64")] * 2


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_categories_keep_their_time_zone(ordered: bool, known: bool) -> None:
    days = pd.date_range("2020-03-28", periods=5, tz="Europe/Paris")
    frames = [
        pd.DataFrame({"p": np.arange(4) % 2, "c": pd.Categorical(values, days if known else None, ordered=ordered)})
        for values in ([days[0], None, days[2], days[1]], days[:4] if known or ordered else days[1:])
    ]
    if ordered and not known:  # Arrow joins only tables with one order
        frames = frames[1:]
    meta = frames[0].iloc[:0] if known else frames[0].iloc[:0].assign(c=pd.Categorical([], ordered=ordered))
    for out in check(frames, meta):
        assert out["c"].cat.categories.dtype == days.dtype
        assert out["c"].cat.ordered == ordered


@pytest.mark.parametrize(
    ("first", "second", "want"),
    [
        (pd.array([BIG, 1]), pd.array([BIG, None], "Int64"), "Int64"),
        (pd.array([1, 2], "Int8"), pd.array([BIG, None], "Int64"), "Int64"),
        (np.array([True, False]), pd.array([True, None], "boolean"), "boolean"),
        (pd.array([5, None], "Int64"), np.array([1.5, np.nan]), "Float64"),
        (np.array([BIG, 1]), pd.array([BIG, None], "int64[pyarrow]"), "int64[pyarrow]"),
        (np.array([2**63, 1], "u8"), pd.array([2**63, None], "uint64[pyarrow]"), "uint64[pyarrow]"),
        (pd.array([1, None], "int8[pyarrow]"), pd.array([BIG, None], "int64[pyarrow]"), "int64[pyarrow]"),
        (np.array([1.5, np.nan]), pd.array([5, None], "double[pyarrow]"), "double[pyarrow]"),
        (np.array([True, False]), pd.array([True, None], "bool[pyarrow]"), "bool[pyarrow]"),
    ],
)
def test_numbers_with_a_mask_in_some_partitions(first: object, second: object, want: str) -> None:
    """Whichever comes first: large integers beside nulls are not floats."""
    first, second = (pd.DataFrame({"p": [0, 0], "o": values}) for values in (first, second))
    for frames in ([first, second], [second, first]):
        out = shuffled(frames, frames[0].iloc[:0])[0]
        assert out["o"].dtype == want
        pd.testing.assert_series_equal(out["o"], pd.concat([one["o"] for one in frames]))


@pytest.mark.parametrize(
    ("first", "want"),
    [
        *((first, "Int64") for first in ("int64", "int8", "Int8", "Int64")),
        *((first, "int64[pyarrow]") for first in ("int64", "int8", "int8[pyarrow]")),
    ],
)
def test_levels_with_a_mask_that_the_meta_knows_nothing_of(first: str, want: str) -> None:
    """Also where an output has no null."""
    numbers = frame(pd.Index([1, 2, 3, 4], dtype=first))
    masked = frame(pd.Index([BIG, None, 3, None], dtype=want))
    for out in (*shuffled([numbers, masked]), *shuffled([masked, numbers], numbers.iloc[:0])):
        assert out.index.dtype == want
        assert set(out.index.dropna()) <= {1, 2, 3, 4, BIG}
    for out in shuffled([masked], numbers.iloc[:0]):
        assert out.index.dtype == want
