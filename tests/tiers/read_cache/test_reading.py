"""Frames of Dask's two readers with the cache, beside those without: all of a frame is compared."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import time
from typing import TYPE_CHECKING, Any

import cloudpickle
import dask
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dask_gpurt.tiers.read_cache import files, seam
from dask_gpurt.tiers.read_cache.cache import ReadCache

dd = pytest.importorskip("dask.dataframe")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

READERS = ["fsspec", "arrow"]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(files, "SETTLED_SECONDS", 0)
    monkeypatch.setattr(seam, "CACHE", ReadCache())
    with dask.config.set(scheduler=as_a_worker):
        yield


def as_a_worker(dsk: Any, keys: Any, **_: Any) -> Any:
    """Compute with tasks that came in a message."""
    tasks = dict(dsk.__dask_graph__() if hasattr(dsk, "__dask_graph__") else dsk)
    return dask.get(cloudpickle.loads(cloudpickle.dumps(tasks)), keys)


@contextlib.contextmanager
def kept(room: int = 1 << 24) -> Iterator[ReadCache]:
    user = object()
    seam.install(user)
    seam.CACHE.allow(room)
    try:
        yield seam.CACHE
    finally:
        seam.uninstall(user)


def frame(index: pd.Index | None = None) -> pd.DataFrame:
    n = 60
    whole = np.arange(n)
    return pd.DataFrame(
        {
            "k": whole % 3,
            "x": whole * 0.5,
            "text": [None if i % 7 == 0 else f"text {i}" for i in range(n)],
            "when": pd.Timestamp("2026-01-01", tz="Europe/Zurich") + pd.to_timedelta(whole, "h"),
            "day": [datetime.date(2026, 1, 1 + i % 28) for i in range(n)],
            "money": [decimal.Decimal(i) / 4 for i in range(n)],
            "kind": pd.Categorical([f"c{i % 4}" for i in range(n)]),
            "many": [[i] * (i % 3) for i in range(n)],
            "maybe": pd.array([None if i % 5 == 0 else i for i in range(n)], "Int64"),
        },
        index=index,
    )


INDEXES = {
    "range": None,
    "named": pd.Index(range(100, 160), name="id"),
    "no name": pd.Index([f"r{i}" for i in range(60)]),
    "times": pd.date_range("2026-01-01", periods=60, name="t"),
}


def write(path: Path, data: pd.DataFrame, **how: Any) -> str:
    dd.from_pandas(data, npartitions=3).to_parquet(path, **how)
    return str(path)


def asked(table: Any) -> Iterator[Callable[[], Any]]:
    """What users ask of a table, each as a function that computes it."""
    for columns in (["x"], ["text", "k"], ["k", "x"], ["money", "kind", "when"], ["many", "maybe", "day"]):
        yield lambda c=columns: table[c].compute()
    yield lambda: table.x.compute()
    yield lambda: table.compute()
    yield lambda: table[table.x > 10].compute()
    yield lambda: table[(table.x > 10) & (table.k == 1)].text.compute()
    yield lambda: table[table.k.isin([0, 2])].x.compute()
    yield lambda: table.reset_index().compute()
    yield lambda: table.index.compute()
    yield lambda: len(table)
    yield lambda: table.groupby("k").x.sum().compute()


def assert_same(ours: Any, stock: Any) -> None:
    if isinstance(stock, pd.DataFrame):
        pd.testing.assert_frame_equal(ours, stock)
    elif isinstance(stock, pd.Series):
        pd.testing.assert_series_equal(ours, stock)
    elif isinstance(stock, pd.Index):
        pd.testing.assert_index_equal(ours, stock)
    else:
        assert ours == stock


def compare(open_it: Callable[[], Any]) -> dict[str, int]:
    stock = [ask() for ask in asked(open_it())]
    with kept() as cache:
        for _ in range(3):
            for ask, expected in zip(asked(open_it()), stock, strict=True):
                assert_same(ask(), expected)
        found = cache.statistics()
    assert found["errors"] == 0
    return found


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("backend", [None, "pyarrow"])
def test_indexes_and_types(tmp_path: Path, reader: str, index: str, backend: str | None) -> None:
    path = write(tmp_path / "t", frame(INDEXES[index]))
    how = {} if backend is None else {"dtype_backend": backend}
    assert compare(lambda: dd.read_parquet(path, filesystem=reader, **how))["hits"] > 50


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("how", [{"index": False}, {"index": "k"}, {"columns": ["k", "x", "text"]}])
def test_what_the_call_asks_for(tmp_path: Path, reader: str, how: dict[str, Any]) -> None:
    path = write(tmp_path / "t", frame(INDEXES["named"]))
    table = dd.read_parquet(path, filesystem=reader, **how)
    stock = [table.x.compute(), table[["text"]].compute(), table.compute()]
    with kept() as cache:
        for _ in range(3):
            again = dd.read_parquet(path, filesystem=reader, **how)
            for ours, expected in zip(
                [again.x.compute(), again[["text"]].compute(), again.compute()], stock, strict=True
            ):
                assert_same(ours, expected)
        assert cache.hits


FILTERS: list[Any] = [
    [("x", ">", 5.0)],
    [[("x", ">", 5.0)], [("k", "==", 1)]],
    [("k", "in", {0, 2}), ("text", "!=", "text 9")],
    [("when", ">=", pd.Timestamp("2026-01-02", tz="Europe/Zurich"))],
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("index", ["range", "pandas' range", "named", "no name"])
@pytest.mark.parametrize("filters", FILTERS)
def test_filters(tmp_path: Path, reader: str, index: str, filters: Any) -> None:
    path = tmp_path / "t"
    if index == "pandas' range":  # Dask writes one as a column
        path.mkdir()
        for i in range(3):
            frame()[20 * i : 20 * i + 20].drop(columns="money").reset_index(drop=True).to_parquet(
                path / f"part.{i}.parquet"
            )
    else:
        write(path, frame(INDEXES[index]))

    def ask() -> list[Any]:
        table = dd.read_parquet(str(path), filesystem=reader, filters=filters)
        return [table.x.compute(), table[["text"]].compute(), table.compute(), len(table)]

    stock = ask()
    with kept() as cache:
        for _ in range(3):
            for ours, expected in zip(ask(), stock, strict=True):
                assert_same(ours, expected)
        assert cache.errors == 0
        # Dask looks for pandas' own name of such an index while it reads.
        assert bool(cache.hits) or (index, reader) == ("no name", "fsspec")


@pytest.mark.parametrize("reader", READERS)
def test_folders_for_values_of_a_column(tmp_path: Path, reader: str) -> None:
    path = write(tmp_path / "t", frame(), partition_on="k")

    def read() -> Any:
        table = dd.read_parquet(path, filesystem=reader)
        return table.assign(k=table.k.astype("int64"))

    assert compare(read)["hits"] > 0


@pytest.mark.parametrize("split", [True, "infer"])
def test_row_groups(tmp_path: Path, split: Any) -> None:
    pq.write_table(pa.Table.from_pandas(frame()), tmp_path / "t.parquet", row_group_size=17)
    assert compare(lambda: dd.read_parquet(str(tmp_path / "t.parquet"), split_row_groups=split))["hits"] > 50


def test_several_files_in_one_partition(tmp_path: Path) -> None:
    path = write(tmp_path / "t", frame())
    assert compare(lambda: dd.read_parquet(path, blocksize="1 GiB", aggregate_files=True))["hits"] > 50


@pytest.mark.parametrize(
    ("reader", "options"),
    [*((reader, {}) for reader in READERS), ("fsspec", {"split_blocks": True, "self_destruct": True})],
)
def test_who_changes_a_frame_changes_nothing_kept(tmp_path: Path, reader: str, options: dict[str, Any]) -> None:
    path = write(tmp_path / "t", frame()[["k", "x", "maybe"]])
    stock = dd.read_parquet(path, filesystem=reader).compute()

    def spoil(part: pd.DataFrame) -> pd.DataFrame:
        def change() -> None:
            part["x"] += 1

        def change_some() -> None:
            part.loc[:, "k"] = -1

        def change_nulls() -> None:
            part["maybe"].array[:] = 0

        def change_below() -> None:
            part["x"].to_numpy()[:] = 7

        for step in (change_some, change, change_nulls, change_below):
            with contextlib.suppress(ValueError, TypeError):  # read-only, as it is without the cache
                step()
        return part

    with kept() as cache:
        for _ in range(3):
            table = dd.read_parquet(path, filesystem=reader, **({"arrow_to_pandas": options} if options else {}))
            table.map_partitions(spoil, meta=table._meta).compute()
            assert_same(dd.read_parquet(path, filesystem=reader).compute(), stock)
        assert cache.hits


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t", frame())
    table = dd.read_parquet(path)
    with kept():
        for _ in range(3):
            table.x.compute()
        (tmp_path / "t" / "part.1.parquet").unlink()
        with pytest.raises(FileNotFoundError):
            table.x.compute()


def test_a_folders_value_that_is_asked_for_is_another_column(tmp_path: Path) -> None:
    """Where it is not, Dask adds it as a category. What had come second was returned for both."""
    for k in "ab":
        (tmp_path / f"k={k}").mkdir()
        for i in range(2):
            pd.DataFrame({"x": np.arange(2.0)}).to_parquet(tmp_path / f"k={k}" / f"{i}.parquet")

    def ask(columns: list[str]) -> Any:
        table = dd.read_parquet(str(tmp_path), filters=[("x", ">", -1)], blocksize="1GiB", aggregate_files=True)
        return table[columns].compute()

    stock = ask(["x"]), ask(["x", "k"])
    with kept() as cache:
        for room in (1 << 24, 6_000, 1 << 24):  # in between not all files are kept
            cache.allow(room)
            for _ in range(3):
                assert_same(ask(["x"]), stock[0])
            assert_same(ask(["x", "k"]), stock[1])
        assert cache.hits


def test_a_fragment_that_knows_the_file_as_it_was_is_left_alone(tmp_path: Path) -> None:
    import pyarrow.dataset as ds
    from dask.dataframe.dask_expr.io.parquet import FragmentWrapper, ReadParquetPyarrowFS

    def write_columns(*names: str) -> None:
        time.sleep(0.02)
        table = pa.table({name: np.arange(1_000) + 1_000_000 * (name == "y") for name in names})
        pq.write_table(table, tmp_path / "t.parquet", compression="none", use_dictionary=False)

    def fragment() -> Any:
        (one,) = ds.dataset(str(tmp_path / "t.parquet")).get_fragments()
        return one

    def read(wrapper: Any) -> int:
        schema = pa.schema([("x", pa.int64()), ("y", pa.int64())])
        first: int = ReadParquetPyarrowFS._fragment_to_table(wrapper, None, ["x"], schema)["x"][0].as_py()
        return first

    write_columns("x", "y")
    with kept():
        old = cloudpickle.loads(cloudpickle.dumps(FragmentWrapper(fragment(), None)))
        assert read(old) == 0
        write_columns("y", "x")
        for _ in range(3):
            assert read(old) == 1_000_000  # as Dask reads it
            assert read(cloudpickle.loads(cloudpickle.dumps(FragmentWrapper(fragment(), None)))) == 0


def test_the_functions_stay_and_do_what_dasks_do(tmp_path: Path) -> None:
    from dask.dataframe.dask_expr.io.parquet import ReadParquetPyarrowFS
    from dask.dataframe.io.parquet.arrow import ArrowDatasetEngine

    def here() -> list[Any]:
        return [vars(ArrowDatasetEngine)["_read_table"], vars(ReadParquetPyarrowFS)["_fragment_to_table"]]

    path = write(tmp_path / "t", frame())
    stock = dd.read_parquet(path).compute()
    with kept(), kept():
        ours = here()
    assert not seam._users
    assert here() == ours
    for _ in range(3):
        assert_same(dd.read_parquet(path).compute(), stock)
    assert seam.CACHE.statistics()["columns"] == 0
    # A graph of this process may name them, and goes to others by name, where this package need not be.
    for named in (ReadParquetPyarrowFS._fragment_to_table, ArrowDatasetEngine):
        assert cloudpickle.loads(cloudpickle.dumps(named)) is named
        assert b"gpurt" not in cloudpickle.dumps(named)


def test_others_may_wrap_the_functions_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed once more over theirs, ours kept what theirs had made, and returned it as what is in the file."""
    from dask.dataframe.io.parquet.arrow import ArrowDatasetEngine

    path = write(tmp_path / "t", frame()[["x"]])
    with kept():
        pass
    below = vars(ArrowDatasetEngine)["_read_table"].__func__

    def more(cls: Any, *args: Any, **kwargs: Any) -> Any:
        table = below(cls, *args, **kwargs)
        at = table.schema.get_field_index("x")
        return table if at < 0 else table.set_column(at, "x", pa.compute.add(table["x"], 100))

    monkeypatch.setattr(ArrowDatasetEngine, "_read_table", classmethod(more))
    for room in (1, 1 << 24, 1 << 24):
        with kept(room):
            for _ in range(3):
                assert dd.read_parquet(path).x.min().compute() == 100


def test_a_reader_that_is_not_what_we_know_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from dask.dataframe.io.parquet.arrow import ArrowDatasetEngine

    other = classmethod(lambda cls, path: path)
    monkeypatch.setattr(ArrowDatasetEngine, "_read_table", other)
    monkeypatch.setattr(seam, "_done", set())
    with kept():
        assert vars(ArrowDatasetEngine)["_read_table"] is other
