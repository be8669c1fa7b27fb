"""Columns that Arrow cannot hold, through split and assembly."""

from __future__ import annotations

import datetime
import decimal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dask_gpurt.shuffle.rows.assemble import Assembler
from dask_gpurt.shuffle.rows.kinds import PandasRows
from dask_gpurt.shuffle.rows.partition import OutputLayout
from dask_gpurt.shuffle.rows.pickled_columns import TYPES, fixed_in, irregular, table_of, types_of
from dask_gpurt.shuffle.rows.schema import schema_of
from dask_gpurt.shuffle.rows.slices import Slice
from tests.shuffle.helpers import whole

if TYPE_CHECKING:
    from collections.abc import Callable


class Pair:
    """Compares by value; pickled by reference to this module."""

    def __init__(self, x: object) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and other.x == self.x

    def __hash__(self) -> int:
        return hash(self.x)

    def __repr__(self) -> str:
        return f"Pair({self.x})"


class CannotBeMade:
    """Its pickle fails where it is loaded."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return decimal.Decimal, ("not a number at all",)


def objects(values: list[Any]) -> pd.Series:
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        out[i] = value
    return pd.Series(out, dtype=object)


#: values of one partition that Arrow refuses
ODD: dict[str, list[Any]] = {
    "numbers and text": [1, "a", 2.5, None],
    "lists of mixed types": [[1, "a"], [2], [], None],
    "list and number": [[1], 2, None, 3],
    "dict and array": [{"foo": "bar"}, [3], {"foo": "baz"}, None],
    "sets": [{1, "a"}, {2}, set(), None],
    "periods": [pd.Period("2020-01", "M"), pd.Period("2020-01-03", "D"), None, pd.NaT],
    "classes": [Pair(1), Pair("a"), None, Pair((1, 2))],
    "functions": [len, sum, None, print],
    "lambda": [1, None, "a", 3],
    "large numbers": [2**70, -1, None, 0],
    "complex": [1j, 2, 3.5, None],
    "text that is not unicode": ["\udce4", "a", "b", None],
    "text and bytes": ["a", b"a", None, "b"],
    "text and NA": [pd.NA, "a", 2, None],
}

MOMENT = datetime.datetime(2020, 1, 1, 5)
#: values of one partition that Arrow takes for others
CHANGED: dict[str, list[Any]] = {
    "text and bytes": ["a", b"a", None, "b"],
    "dates and moments": [MOMENT.date(), MOMENT, None, MOMENT.date()],
    "times with a zone": [datetime.time(1, tzinfo=datetime.UTC), None, datetime.time(2), datetime.time(3)],
    "some with a zone": [MOMENT.replace(tzinfo=datetime.UTC), MOMENT, None, MOMENT],
    "moments with nanoseconds": [pd.Timestamp(1), None, pd.NaT, pd.Timestamp(1001, tz="UTC")],
    "spans with nanoseconds": [pd.Timedelta(1), None, pd.NaT, pd.Timedelta(1001)],
    "large integers": [2**60 + 1, None, 3, -(2**63)],
}


def shuffled(frames: list[pd.DataFrame], meta: pd.DataFrame | None = None) -> list[pd.DataFrame]:
    """Both outputs of these inputs, by their column ``p``."""
    meta = frames[0].iloc[:0] if meta is None else meta
    rows = PandasRows(meta, "p", True, 1 << 20)
    layout = OutputLayout({0: "a", 1: "b"})
    shards = {
        (address, i): shard for i, frame in enumerate(frames) for address, shard in rows.split(frame, i << 16, layout)
    }
    return [
        rows.assemble([(shard.input_id, Slice.whole(shard.table)) for (at, _), shard in shards.items() if at == a])
        for a in "ab"
    ]


def check(frames: list[pd.DataFrame], meta: pd.DataFrame | None = None) -> list[pd.DataFrame]:
    """The outputs; they have the rows of the inputs, in their order, with values of the same types."""
    outputs = shuffled(frames, meta)
    for part, got in enumerate(outputs):
        want = pd.concat([frame[frame["p"] == part] for frame in frames]).drop(columns="p")
        assert typed(got) == typed(want)
    return outputs


def typed(frame: pd.DataFrame) -> list[list[tuple[str, str]]]:
    rows = frame.reset_index().itertuples(index=False, name=None)
    return [[(type(value).__name__, repr(value)) for value in row] for row in rows]


def frame(values: list[Any], n: int = 4) -> pd.DataFrame:
    return pd.DataFrame({"p": np.arange(n) % 2, "o": objects(values), "x": np.arange(n) * 1.5})


@pytest.mark.parametrize("name", ODD)
def test_values_come_back_as_they_were(name: str) -> None:
    outputs = check([frame(ODD[name]), frame(ODD[name][::-1])])
    assert all(out["o"].dtype == object for out in outputs)


def test_a_lambda_is_carried() -> None:
    outputs = shuffled([frame([lambda: 5, "a", 1, None])])
    assert outputs[0]["o"].iloc[0]() == 5


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1, 2, 3, 4], ["a", "b", None, "d"]),
        (["a", "b", "c", None], [b"a", b"b", b"c", b"d"]),
        ([1, 2, 3, 4], [1, "b", None, [3]]),
        ([True, False, None, True], ["a", "b", "c", "d"]),
        ([datetime.date(2020, 1, 1)] * 4, ["a", None, "c", "d"]),
        ([decimal.Decimal("1.50")] * 4, ["a", None, "c", "d"]),
        ([None] * 4, [1, "a", None, 2]),
    ],
)
def test_partitions_of_different_kinds(first: list[Any], second: list[Any]) -> None:
    check([frame(first), frame(second), frame(first)])
    check([frame(second), frame(first), frame(second)])


@pytest.mark.parametrize("dtype", ["Int64", "int64[pyarrow]"])
def test_large_integers_beside_nulls_stay_where_another_partition_has_text(dtype: str) -> None:
    frames = [frame(["a", None, "b", "c"]), frame([1, 2, 3, 4]).assign(o=pd.array([2**62 + 1, None, 3, None], dtype))]
    for some in (frames, frames[::-1]):
        out = pd.concat(shuffled(some, frames[0].iloc[:0]))["o"]
        assert [value for value in out if type(value) is int] == [2**62 + 1, 3]


def test_large_integers_stay_where_another_partition_has_nulls_or_floats() -> None:
    check([frame([2**60 + 1, 2, 3, 4]), frame([None] * 4)])
    check([frame([2**60 + 1, 2, 3, 4]), frame([1.5, 2.5, 3.5, 4.5])])


def test_columns_of_one_arrow_type_are_not_pickled() -> None:
    regular = pd.DataFrame(
        {
            "t": objects(["a", None, "b"]),
            "b": objects([b"a", None, b"b"]),
            "d": objects([decimal.Decimal(1), None, decimal.Decimal("2.5")]),
            "l": objects([[1], [2, 3], None]),
            "c": pd.Categorical(["a", "b", "a"]),
        }
    )
    table = table_of(regular, pa.Table.from_pandas)
    assert table.equals(pa.Table.from_pandas(regular, preserve_index=True), check_metadata=True)
    assert not schema_of(table.schema).pickled


def test_only_the_column_that_needs_it_is_pickled() -> None:
    data = frame([1, "a", 2, "b"]).assign(t=objects(["a", None, "b", "c"]))
    table = table_of(data, pa.Table.from_pandas)
    assert schema_of(table.schema).pickled == {"o"}
    assert table.schema.field("t").type in (pa.string(), pa.large_string())
    assert table.schema.field("o").type == pa.large_binary()
    assert list(data["o"]) == [1, "a", 2, "b"]  # the user's frame is as it was


@pytest.mark.parametrize("name", [None, "ix"])
def test_an_index_of_objects(name: str | None) -> None:
    values = pd.Index([1, "a", (2, "b"), None], dtype=object, name=name, tupleize_cols=False)
    for out in check([frame([1, 2, 3, 4]).set_index(values)] * 2):
        assert type(out.index) is pd.Index
        assert (out.index.dtype, out.index.name) == (object, name)


def test_a_level_of_an_index() -> None:
    levels = pd.MultiIndex.from_arrays([[1, "a", 2, "b"], [1, 2, 3, 4]], names=["u", None])
    for out in check([frame([1, "a", 2, "b"]).set_index(levels), frame([1, 2, 3, 4]).set_index(levels)]):
        assert out.index.names == ["u", None]
        assert out.index.get_level_values(1).dtype == "int64"


def test_an_index_of_numbers_in_one_partition_and_of_text_in_another() -> None:
    first, second = frame([1, 2, 3, 4]), frame([1, 2, 3, 4]).set_index(pd.Index(list("abcd"), dtype=object))
    check([first, second])


def test_a_column_whose_name_is_a_number() -> None:
    of_numbers = frame([1, "a", 2.5, None]).rename(columns={"o": 0, "x": 1})
    of_dtype = of_numbers.astype({0: pd.CategoricalDtype(pd.Index([1, "a", 2.5], dtype=object))})
    check([of_numbers, of_numbers])
    assert all(out.dtypes[0] == of_dtype.dtypes[0] for out in check([of_dtype, of_dtype]))


def test_categories_of_objects() -> None:
    dtype = pd.CategoricalDtype(pd.Index([1, "a"], dtype=object))
    frames = [pd.DataFrame({"p": [0, 1, 0, 1], "c": pd.Categorical([1, "a", None, 1], dtype=dtype)})] * 2
    outputs = check(frames)
    assert [out["c"].dtype for out in outputs] == [dtype, dtype]
    unknown = frames[0].iloc[:0].assign(c=pd.Categorical([]))
    for out in check(frames, unknown):
        assert set(out["c"].cat.categories) <= {1, "a"}


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("beside", [False, True])
def test_what_arrow_would_make_something_else_of(name: str, beside: bool) -> None:
    """Also beside a column that Arrow refuses, and in an index beside one."""
    more = {"q": objects([len, 1, "a", None])} if beside else {}
    frames = [frame(values).assign(**more) for values in (CHANGED[name], CHANGED[name][::-1])]
    check(frames)
    check([one.set_index(pd.Index(one["o"], dtype=object, name="i")).assign(o=1) for one in frames])


def test_dates_and_moments_of_one_kind_are_not_pickled() -> None:
    regular = pd.DataFrame(
        {
            "d": objects([datetime.date(2020, 1, 1), None, pd.NaT]),
            "t": objects([datetime.time(1), None, datetime.time(2)]),
            "m": objects([datetime.datetime(1, 1, 1), None, pd.NaT]),
            "z": objects([MOMENT.replace(tzinfo=datetime.UTC), None, pd.NaT]),
        }
    )
    assert not schema_of(table_of(regular, pa.Table.from_pandas).schema).pickled


@pytest.mark.parametrize("known", [True, False])
def test_categories_that_are_periods(known: bool) -> None:
    """Arrow reads their codes for periods, and cannot join their tables."""
    months = pd.period_range("2020-01", periods=8, freq="M")
    dtype = pd.CategoricalDtype(months)
    frames = [
        pd.DataFrame({"p": np.arange(4) % 2, "c": pd.Categorical(values, dtype=dtype if known else None)})
        for values in (months[[0, 1, 1, 0]], months[[3, 1, 2, 4]], [None, *months[[5, 6, 7]]])
    ]
    for out in check(frames, frames[0].iloc[:0] if known else frames[0].iloc[:0].assign(c=pd.Categorical([]))):
        assert out["c"].dtype == dtype or not known
        assert out["c"].cat.categories.dtype == months.dtype
    for out in check([one.set_index("c") for one in frames]):
        assert isinstance(out.index, pd.CategoricalIndex)


@pytest.mark.parametrize("known", [True, False])
def test_categories_that_are_intervals(known: bool) -> None:
    """Arrow writes their type and cannot read it."""
    frames = [pd.DataFrame({"p": np.arange(6) % 2, "c": pd.cut(np.arange(6) * 1.5, [-1, 2, 4, 10])})] * 2
    outputs = check(frames, None if known else frames[0].iloc[:0].assign(c=pd.Categorical([])))
    assert not known or [out["c"].dtype for out in outputs] == [frames[0]["c"].dtype] * 2
    check([frame.set_index("c") for frame in frames])
    check([frame.set_index(["c", np.arange(6)]) for frame in frames])


def test_categories_of_numbers_and_of_text() -> None:
    frames = [
        pd.DataFrame({"p": [0, 1, 0, 1], "c": pd.Categorical(values)}) for values in ([1, 2, 1, None], list("abab"))
    ]
    for out in check(frames, frames[0].iloc[:0].assign(c=pd.Categorical([]))):
        assert isinstance(out["c"].dtype, pd.CategoricalDtype)


def test_an_order_that_the_values_do_not_fit_is_not_made_up() -> None:
    ordered = pd.CategoricalDtype(pd.Index([1, "a"], dtype=object), ordered=True)
    more = pd.CategoricalDtype(pd.Index([1, "a", "b"], dtype=object), ordered=True)
    frames = [pd.DataFrame({"p": [0, 1], "c": pd.Categorical(["b", "a"], dtype=more)})]
    assert shuffled(frames, frames[0].iloc[:0].astype({"c": ordered}))[0]["c"].tolist() == ["b"]


def test_what_pickle_cannot_hold_is_named() -> None:
    data = frame([1, "a", threading.Lock(), None])
    with pytest.raises(
        TypeError,
        match=r"column 'o' \(int, str, _thread\.lock, NoneType\): row 2 has a _thread\.lock, .*Remedy: drop the column",
    ):
        shuffled([data])


def test_a_lock_in_an_index_is_named() -> None:
    data = frame([1, 2, 3, 4]).set_index(pd.Index([1, "a", threading.Lock(), 3], dtype=object))
    with pytest.raises(TypeError, match=r"column 'level 0 of the index' \(int, str, _thread\.lock\): row 2"):
        shuffled([data])


def test_a_value_that_cannot_be_made_again_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"column 'o': .* cannot be made again here \(InvalidOperation.*Remedy: install"
    ):
        shuffled([frame([1, "a", CannotBeMade(), None])])


def test_values_that_the_meta_does_not_have_are_an_error() -> None:
    """As in stock: the meta promises numbers."""
    numbers = frame([1, 2, 3, 4]).astype({"o": "int64"})
    assert fixed_in(numbers) == {"p", "o", "x"}
    with pytest.raises(
        TypeError, match=r"column 'o' \(int, str, float\) cannot be held by Arrow \(.*\), and is not of"
    ):
        shuffled([frame([1, "a", 2.5, 3])], numbers.iloc[:0])
    with pytest.raises(pa.ArrowTypeError, match="Field o has incompatible types"):
        shuffled([numbers, frame(list("abcd"))], numbers.iloc[:0])


def test_a_mark_makes_a_schema_another_one() -> None:
    """Equal types, and only one of the tables has pickles in its column of bytes."""
    data = pd.DataFrame({"o": objects([b"a", b"b"])})
    plain = pa.table({"o": pa.array([b"a", b"b"], pa.large_binary())})
    plain = plain.replace_schema_metadata(pa.Table.from_pandas(data).schema.metadata)
    marked = table_of(pd.DataFrame({"o": objects([b"a", "b"])}), pa.Table.from_pandas)
    marked = marked.drop_columns([n for n in marked.column_names if n != "o"])
    schemas = [schema_of(plain.schema), schema_of(marked.schema)]
    assert [known.pickled for known in schemas] == [frozenset(), {"o"}]
    assert irregular(frozenset(schemas[:1])) == frozenset()
    assert irregular(frozenset(schemas)) == {"o"}
    got = Assembler(data.iloc[:0])([(0, Slice.whole(plain)), (1, Slice.whole(marked))])
    assert got["o"].tolist() == [b"a", b"b", b"a", "b"]


def test_types_are_named_in_their_order() -> None:
    assert types_of([1, "a", 2, Pair(1)]) == f"int, str, {Pair.__module__}.Pair"
    many = [type(f"T{i}", (), {"__module__": "builtins"})() for i in range(TYPES + 3)]
    assert types_of(many).endswith("T5 and 3 more types")


def test_a_large_frame_keeps_its_order() -> None:
    def make(i: int) -> pd.DataFrame:
        n = 3000
        values = [(j if j % 3 else f"{i}-{j}") for j in range(n)]
        return pd.DataFrame({"p": np.arange(n) * 7 % 2, "o": objects(values), "i": i})

    frames = [make(i) for i in range(4)]
    outputs = check(frames)
    assert sum(map(len, outputs)) == len(whole(make, 4))
