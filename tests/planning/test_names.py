"""What the name of an expression does not tell: no query gets the answer of another one of the same name."""

from __future__ import annotations

import collections
import datetime
import gc
import os
from typing import TYPE_CHECKING, Any

import dask
import dask.dataframe as dd
import fsspec  # type: ignore[import-untyped]
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem, SubTreeFileSystem

from dask_gpurt.planning import files as read_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dask_gpurt.planning import held


def rows_with(frame: pd.DataFrame, values: Any) -> pd.DataFrame:
    return frame[frame.key.isin(list(values))]


def rows_of(frame: pd.DataFrame, texts: Any) -> pd.DataFrame:
    return frame[frame.text.isin(list(texts))]


def row_of(frame: pd.DataFrame, table: Any) -> pd.DataFrame:
    return rows_with(frame, table[0].tolist())


def one_row(part: object) -> pd.DataFrame:
    return pd.DataFrame({"key": [id(part)]})


def noted(frame: pd.DataFrame, rules: dict[str, int]) -> pd.DataFrame:
    return frame.assign(text=", ".join(rules))


def changed_by(frame: pd.DataFrame, **steps: int) -> pd.DataFrame:
    for step, by in steps.items():
        frame = frame.assign(value=frame.value + by if step == "plus" else frame.value * by)
    return frame


class Quantity(str):
    """A text with more in it."""

    unit = ""

    @classmethod
    def of(cls, unit: str) -> Quantity:
        one = cls("length")
        one.unit = unit
        return one


def in_units(frame: pd.DataFrame, quantity: Quantity) -> pd.DataFrame:
    return frame.assign(text=quantity.unit)


def with_more(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[["key", "value"]].assign(more=1)


def default_of(frame: pd.DataFrame, rules: Any) -> pd.DataFrame:
    return frame.assign(value=rules.default_factory())


def type_of(frame: pd.DataFrame, value: Any) -> pd.DataFrame:
    return frame.assign(text=type(value).__name__)


SUM, MAX = ("key", "sum"), ("value", "max")
DAY, WHILE = pd.Timestamp("2020-01-01"), pd.Timedelta("1D")

#: a query, and two arguments of it that have the same name to Dask
ALIKE: dict[str, tuple[Callable[[Any, Any], Any], Any, Any]] = {
    "aggregation": (
        lambda t, a: t.groupby("text").agg(a),
        {"key": "sum", "value": "max"},
        {"value": "max", "key": "sum"},
    ),
    "named aggregation": (
        lambda t, a: t.groupby("text").agg(**a),
        {"a": SUM, "b": MAX},
        {"b": MAX, "a": SUM},
    ),
    "median": (
        lambda t, a: t.groupby("text").agg(a),
        {"key": "median", "value": "max"},
        {"value": "max", "key": "median"},
    ),
    "argument": (lambda t, a: t.map_partitions(noted, a, meta=t._meta), {"x": 1, "y": 2}, {"y": 2, "x": 1}),
    "keyword": (lambda t, a: t.map_partitions(noted, rules=a, meta=t._meta), {"x": 1, "y": 2}, {"y": 2, "x": 1}),
    "values of keywords": (
        lambda t, a: t.map_partitions(changed_by, meta=t._meta, **a),
        {"plus": 1, "times": 2},
        {"plus": 2, "times": 1},
    ),
    "order of keywords": (
        lambda t, a: t.map_partitions(changed_by, meta=t._meta, **a),
        {"plus": 1, "times": 2},
        {"times": 2, "plus": 1},
    ),
    "text": (lambda t, a: t.map_partitions(in_units, a, meta=t._meta), Quantity.of("m"), Quantity.of("km")),
    "array": (
        lambda t, a: t.map_partitions(row_of, a, meta=t._meta),
        np.array([[1, 2], [3, 1]]),
        np.array([[1, 2], [3, 1]]).T,
    ),
    "array of texts": (
        lambda t, a: t.map_partitions(rows_of, a, meta=t._meta),
        np.array(["a-b", "c"], dtype=object),
        np.array(["a", "b-c"], dtype=object),
    ),
    "column of texts": (
        lambda t, a: t[t.text.isin(a)],
        pd.Series(["a-b", "c"], dtype=object),
        pd.Series(["a", "b-c"], dtype=object),
    ),
    "unit of a time": (lambda t, a: t.assign(more=a), DAY.as_unit("ns"), DAY.as_unit("s")),
    "unit of a duration": (lambda t, a: t.assign(more=a), WHILE.as_unit("ns"), WHILE.as_unit("s")),
    "storage of text": (
        lambda t, a: t.astype({"text": a}),
        pd.StringDtype("python"),
        pd.StringDtype("pyarrow"),
    ),
    "categories": (
        lambda t, a: t.astype({"text": a}),
        pd.CategoricalDtype(pd.Index(["a", "b", "c", "x-y", "z"], dtype=object)),
        pd.CategoricalDtype(pd.Index(["a", "b", "c", "x", "y-z"], dtype=object)),
    ),
    "type": (lambda t, a: t.map_partitions(type_of, a, meta=t._meta), "<i8", np.dtype("int64")),
    "default": (
        lambda t, a: t.map_partitions(default_of, a, meta=t._meta),
        collections.defaultdict(int, other=5),
        collections.defaultdict(float, other=5),
    ),
}


@pytest.mark.parametrize("case", ALIKE)
def test_arguments_of_the_same_name(kept: held.HeldExpressions, files: Path, case: str) -> None:
    query, first, second = ALIKE[case]
    t = dd.read_parquet(str(files))
    expected = query(t, second).compute()
    gc.collect()
    kept.install()
    for _ in range(2):
        assert not query(t, first).compute().equals(expected)
        gc.collect()
        pd.testing.assert_frame_equal(query(t, second).compute(), expected)
        # What is built on it has no other name either.
        pd.testing.assert_frame_equal(query(t, second).repartition(npartitions=1).compute(), expected)
        gc.collect()


def test_empty_frames_of_the_same_name(kept: held.HeldExpressions, files: Path) -> None:
    """Dask takes the token of the blocks of a frame, and not which columns they are."""
    first = pd.DataFrame({"key": [1], "value": [1.0], "more": [1]})
    second = pd.DataFrame({"key": [1], "value": [1], "more": [1.0]})
    kept.install()
    t = dd.read_parquet(str(files))
    for _ in range(2):
        for meta in (first, second):
            assert list(t.map_partitions(with_more, meta=meta).dtypes) == list(meta.dtypes)
            gc.collect()


@pytest.mark.parametrize(
    "case", ["aggregation", "named aggregation", "values of keywords", "unit of a time", "storage of text"]
)
def test_the_same_order_is_found_again(kept: held.HeldExpressions, files: Path, case: str) -> None:
    query, first, _ = ALIKE[case]
    kept.install()
    t = dd.read_parquet(str(files))
    expected = query(t, first).reset_index().compute()
    gc.collect()
    made = kept.made
    pd.testing.assert_frame_equal(query(t, first).reset_index().compute(), expected)
    assert kept.made == made


def test_a_delayed_object_under_a_name_of_the_users(kept: held.HeldExpressions, files: Path) -> None:
    kept.install()
    t = dd.read_parquet(str(files))

    def keys(values: list[int]) -> list[int]:
        named = dask.delayed(values, name="values")
        found = t.map_partitions(rows_with, named, meta=t._meta).compute()
        return sorted(set(found.key))

    assert keys([1]) == [1]
    gc.collect()
    assert keys([2, 3]) == [2, 3]


def test_the_token_of_what_is_not_held_is_not_taken_again(kept: held.HeldExpressions) -> None:
    """That of a frame in memory has all of its futures."""
    taken: list[int] = []

    class Part:
        def __dask_tokenize__(self) -> str:
            taken.append(1)
            return "part"

    kept.install()
    with dask.config.set({"dataframe.convert-string": False}):  # else the conversion is in between
        frame = dd.from_map(one_row, [Part()], meta=pd.DataFrame({"key": [1]}))
    before = len(taken)
    assert list(frame[["key"]].columns) == ["key"]
    assert len(taken) == before


@pytest.mark.parametrize("installed", ["before", "after"])
def test_names_of_an_index_that_a_user_changes_in_place(
    kept: held.HeldExpressions, files: Path, installed: str
) -> None:
    """Dask keeps the list in what it knows of the files, and reads by that."""
    if installed == "before":
        kept.install()
    names = ["key"]
    first = dd.read_parquet(str(files), index=names)
    expected = first.compute()
    names[0] = "value"
    kept.install()
    if installed == "after":
        dd.read_parquet(str(files), index=["key"])
    del first
    gc.collect()
    pd.testing.assert_frame_equal(dd.read_parquet(str(files), index=["key"]).compute(), expected)
    assert kept.failed is None


@pytest.mark.parametrize("filesystem", ["fsspec", "arrow"])
def test_files_of_the_same_size_and_time(kept: held.HeldExpressions, tmp_path: Path, filesystem: str) -> None:
    """The types of their columns are other ones."""
    kept.install()
    file = tmp_path / "part.0.parquet"
    columns = [np.arange(5), np.arange(5.0)]
    for _ in range(4):
        pd.DataFrame({"a": columns[0], "b": columns[1]}).to_parquet(file)
        os.utime(file, ns=(10**18, 10**18))
        total = dd.read_parquet(str(tmp_path), filesystem=filesystem).a.sum().compute()
        assert total.dtype == columns[0].dtype
        columns.reverse()
        gc.collect()
    assert kept.failed is None


@pytest.mark.parametrize("filesystem", ["fsspec", "arrow"])
def test_a_filter_on_files_of_the_same_size_and_time(
    kept: held.HeldExpressions, tmp_path: Path, filesystem: str
) -> None:
    """Their values are other ones, and pyarrow knows the smallest and largest of each."""
    kept.install()
    file = tmp_path / "part.0.parquet"
    sizes = set()
    for first in (1, 5, 1):
        pd.DataFrame({"a": [first, first + 1, first + 2, first + 3]}).to_parquet(file)
        os.utime(file, ns=(10**18, 10**18))
        sizes.add(file.stat().st_size)
        assert len(dd.read_parquet(str(tmp_path), filesystem=filesystem).compute()) == 4
        table = dd.read_parquet(str(tmp_path), filesystem=filesystem, filters=[("a", ">", 4)])
        assert len(table.compute()) == first - 1
        del table
        gc.collect()
    assert len(sizes) == 1
    assert kept.failed is None


@pytest.mark.parametrize("depth", [1, 2])
def test_a_filter_on_files_below_a_folder_of_the_same_size_and_time(
    kept: held.HeldExpressions, tmp_path: Path, depth: int
) -> None:
    """Their paths are those below it."""
    kept.install()
    (tmp_path / "below").mkdir()
    system: Any = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    system = system if depth == 1 else SubTreeFileSystem("below", system)
    file = tmp_path / "below" / "part.0.parquet"
    wanted = "below" if depth == 1 else "part.0.parquet"
    for first in (1, 5, 1):
        pd.DataFrame({"a": [first, first + 1, first + 2, first + 3]}).to_parquet(file)
        os.utime(file, ns=(10**18, 10**18))
        table = dd.read_parquet(wanted, filesystem=system, filters=[("a", ">", 4)])
        assert len(table.compute()) == first - 1
        del table
        gc.collect()
    hits = kept.hits
    assert len(dd.read_parquet(wanted, filesystem=system, filters=[("a", ">", 4)]).compute()) == 0
    assert kept.hits > hits, "files that did not change are found again"
    assert kept.failed is None


@pytest.mark.parametrize("time", [None, datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)])
def test_a_filter_on_files_elsewhere_of_the_same_size_and_time(
    kept: held.HeldExpressions, monkeypatch: pytest.MonkeyPatch, time: datetime.datetime | None
) -> None:
    """Some file systems tell no times, and object stores count in seconds."""
    inner = MemoryFileSystem.info
    monkeypatch.setattr(MemoryFileSystem, "info", lambda *args, **kwargs: {**inner(*args, **kwargs), "mtime": time})
    monkeypatch.setattr(read_files, "STORES", frozenset(("py::fsspec+memory",)))
    system = MemoryFileSystem()
    kept.install()
    sizes = set()
    for first in (1, 5, 1):
        with system.open("/elsewhere/part.0.parquet", "wb") as file:
            pd.DataFrame({"a": [first, first + 1, first + 2, first + 3]}).to_parquet(file)
        sizes.add(system.size("/elsewhere/part.0.parquet"))
        table = dd.read_parquet("/elsewhere", filesystem=PyFileSystem(FSSpecHandler(system)))
        assert len(table[table.a > 4].compute()) == first - 1
        del table
        gc.collect()
    system.rm("/elsewhere", recursive=True)
    assert len(sizes) == 1
    assert kept.failed is None


class Elsewhere(MemoryFileSystem):
    """Tells no times of files, and takes the password that it was made with."""

    protocol = "elsewhere"
    cachable = True
    password = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.given = Elsewhere.password

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("elsewhere://", "memory://"))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found = super().info(path, **options)
        return {name: found[name] for name in ("name", "size", "type")}

    def open(self, path: str, *args: Any, **options: Any) -> Any:
        if self.given != Elsewhere.password:
            raise PermissionError(f"{self.given} has ended")
        return super().open(path, *args, **options)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Elsewhere]]:
    monkeypatch.setattr(Elsewhere, "password", "first")
    Elsewhere.clear_instance_cache()
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    yield Elsewhere
    Elsewhere.clear_instance_cache()
    MemoryFileSystem().rm("/shelf", recursive=True)


def test_an_object_store_that_was_made_again(
    kept: held.HeldExpressions, elsewhere: type[Elsewhere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: the one that was held had credentials that had ended."""
    monkeypatch.setattr(read_files, "PACKAGES", frozenset(("tests",)))
    with elsewhere().open("/shelf/part.0.parquet", "wb") as file:
        pd.DataFrame({"a": [1, 2]}).to_parquet(file)
    kept.install()
    for _ in range(2):
        assert dd.read_parquet("elsewhere://shelf").a.sum().compute() == 3
        gc.collect()
    hits = kept.hits
    assert hits
    elsewhere.password = "second"
    elsewhere.clear_instance_cache()
    for _ in range(2):
        assert len(dd.read_parquet("elsewhere://shelf")) == 2
        assert dd.read_parquet("elsewhere://shelf").a.sum().compute() == 3
        gc.collect()
    assert kept.hits > hits
    assert kept.failed is None


def test_rows_of_files_whose_time_is_not_known(kept: held.HeldExpressions, elsewhere: type[Elsewhere]) -> None:
    kept.install()
    sizes = set()
    for texts in (["x" * 10], ["x" * 3] * 2, ["x" * 10]):
        table = pa.table({"s": texts}, schema=pa.schema([pa.field("s", pa.string(), nullable=False)]))
        with elsewhere().open("/shelf/part.0.parquet", "wb") as file:
            pq.write_table(table, file, compression=None, use_dictionary=False, write_statistics=False)
        sizes.add(elsewhere().size("/shelf/part.0.parquet"))
        assert len(dd.read_parquet("elsewhere://shelf")) == len(texts)
        gc.collect()
    assert len(sizes) == 1
    assert kept.figures()["held"] == 0
    assert kept.failed is None
