"""What `ReadCache` keeps, and that its tables are equal to those that were read."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dask_gpurt.tiers.read_cache import files
from dask_gpurt.tiers.read_cache.cache import MOST_ERRORS, STALE, ReadCache, Source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PANDAS = b'{"index_columns": ["i", {"kind": "range"}]}'
NAMES = ["a", "b", "c", "i"]
#: bytes of a column of a thousand rows: numbers, which of them are there, and what it takes in Python
COLUMN = 8_000 + 125 + 2_048


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SETTLED_SECONDS", 0)


class Reader:
    """A file, read as Dask reads it; counts what it reads."""

    def __init__(self, path: Path, rows: int = 1_000, start: int = 0) -> None:
        self.path = str(path)
        self.loaded: list[list[str]] = []
        self.source = Source(self.path, b"all", with_index=True)
        self.write(rows, start)

    def write(self, rows: int, start: int) -> None:
        columns = {name: pa.array(range(start + i, start + i + rows), pa.int64()) for i, name in enumerate(NAMES)}
        table = pa.table(columns).replace_schema_metadata({b"pandas": PANDAS})
        time.sleep(0.02)  # longer than a tick of a file system's clock: see `files.SETTLED_SECONDS`
        pq.write_table(
            table, self.path, row_group_size=300, compression="none", use_dictionary=False, write_statistics=False
        )

    def load(self, names: list[str]) -> pa.Table:
        self.loaded.append(list(names))
        return self.stock(names)

    def read(self, cache: ReadCache, names: list[str], load: Callable[[list[str]], pa.Table] | None = None) -> pa.Table:
        return cache.read(self.path, lambda: self.source, names, load or self.load)

    def stock(self, names: list[str]) -> pa.Table:
        return pq.ParquetFile(self.path).read(names, use_pandas_metadata=True)


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path / "x.parquet")


@pytest.fixture
def cache() -> ReadCache:
    cache = ReadCache()
    cache.allow(1 << 20)
    return cache


def read(cache: ReadCache, reader: Reader, *names: str) -> pa.Table:
    table = reader.read(cache, list(names))
    assert_same(table, reader.stock(list(names)))
    return table


def assert_same(table: pa.Table, stock: pa.Table) -> None:
    table.validate(full=True)
    assert table.equals(stock, check_metadata=True)
    assert [c.num_chunks for c in table.columns] == [c.num_chunks for c in stock.columns]


def test_a_column_is_kept_when_it_is_read_again(cache: ReadCache, reader: Reader) -> None:
    read(cache, reader, "a", "b")
    assert cache.kept_bytes == 0
    read(cache, reader, "b", "a")
    assert cache.kept_bytes == 3 * COLUMN  # the index came along
    read(cache, reader, "a")
    read(cache, reader, "b", "i", "a")
    assert reader.loaded == [["a", "b"], ["b", "a"]]
    assert cache.statistics()["hits"] == 2 + 3


def test_only_what_is_missing_is_read(cache: ReadCache, reader: Reader) -> None:
    for _ in range(2):
        read(cache, reader, "a", "i")
    read(cache, reader, "c", "a", "b")
    assert reader.loaded[-1] == ["c", "b"]
    read(cache, reader, "b", "c")
    assert reader.loaded[-1] == ["b", "c"]
    read(cache, reader, "c", "b", "a")
    assert len(reader.loaded) == 4


@given(asked=st.lists(st.lists(st.sampled_from(NAMES), unique=True, min_size=1), max_size=12), room=st.integers(0, 50))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_tables_are_those_that_were_read(reader: Reader, asked: list[list[str]], room: int) -> None:
    cache = ReadCache()
    cache.allow(room * 1_000)
    for names in asked:
        read(cache, reader, *names)
        assert 0 <= cache.kept_bytes <= room * 1_000
        assert cache.statistics()["errors"] == 0


@pytest.mark.parametrize("how", ["in place", "another file", "with the time of the old one"])
def test_a_file_that_changed_is_read_again(cache: ReadCache, reader: Reader, how: str, tmp_path: Path) -> None:
    for _ in range(3):
        read(cache, reader, "a")
    assert cache.hits
    before = os.stat(reader.path)
    if how == "another file":
        other = Reader(tmp_path / "other", start=10)
        os.replace(other.path, reader.path)
    else:
        reader.write(1_000, start=10)
    if how == "with the time of the old one":
        os.utime(reader.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(reader.path).st_size == before.st_size
    for _ in range(3):
        assert read(cache, reader, "a")["a"][0].as_py() == 10
    assert cache.kept_bytes == 2 * COLUMN


def test_a_file_that_changes_while_it_is_read_is_not_kept(cache: ReadCache, reader: Reader) -> None:
    def load(names: list[str]) -> pa.Table:
        table = reader.load(names)
        reader.write(1_000, start=len(reader.loaded))
        return table

    for i in range(4):
        assert reader.read(cache, ["a"], load)["a"][0].as_py() == i
    assert cache.kept_bytes == 0


def test_columns_of_two_versions_are_never_in_one_table(cache: ReadCache, reader: Reader) -> None:
    for _ in range(2):
        read(cache, reader, "a")
    changes = iter([True])

    def load(names: list[str]) -> pa.Table:
        if next(changes, False):  # between our look at the file and the read
            reader.write(1_000, start=50)
        return reader.load(names)

    assert_same(reader.read(cache, ["a", "b"], load), reader.stock(["a", "b"]))
    assert reader.loaded[-2:] == [["b"], ["a", "b"]]


def test_a_file_that_has_just_changed_is_not_kept(
    cache: ReadCache, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SETTLED_SECONDS", 60)
    for _ in range(3):
        read(cache, reader, "a")
    assert len(reader.loaded) == 3
    assert files.stamp(reader.path) is None


def test_what_is_no_file_has_no_stamp(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "missing", "", "a\0b"):
        assert files.stamp(str(tmp_path / name)) is None


def test_less_room(cache: ReadCache, reader: Reader) -> None:
    for _ in range(2):
        read(cache, reader, "a", "b")
    read(cache, reader, "a")
    assert cache.allow(2 * COLUMN + 9) == COLUMN
    read(cache, reader, "a")  # what was used last is left
    assert len(reader.loaded) == 2
    assert cache.allow(0) == 2 * COLUMN
    for _ in range(3):
        read(cache, reader, "a")
    assert cache.kept_bytes == 0


def test_who_reads_more_than_fits_in_turns_finds_a_part(tmp_path: Path) -> None:
    many = [Reader(tmp_path / str(i)) for i in range(6)]  # two columns each, with the index
    cache = ReadCache()
    cache.allow(4 * COLUMN)
    for _ in range(8):
        for reader in many:
            read(cache, reader, "a")
    assert sum(len(reader.loaded) for reader in many) <= 8 * 6 - 2 * 6  # two files, six rounds


def test_what_is_not_used_any_more_makes_room(tmp_path: Path) -> None:
    old, new = Reader(tmp_path / "old"), Reader(tmp_path / "new")
    cache = ReadCache()
    cache.allow(2 * COLUMN)
    for _ in range(2):
        read(cache, old, "a")
    for _ in range(STALE + 3):
        read(cache, new, "a")
    assert len(new.loaded) < STALE + 3
    assert cache.kept_bytes == 2 * COLUMN


def test_an_error_of_the_reader_is_its_callers(cache: ReadCache, reader: Reader) -> None:
    def load(names: list[str]) -> pa.Table:
        raise OSError("no such disk")

    for _ in range(MOST_ERRORS + 1):
        with pytest.raises(OSError, match="no such disk"):
            reader.read(cache, ["a"], load)
    assert cache.errors == 0
    read(cache, reader, "a")


def test_an_error_of_ours_is_not(cache: ReadCache, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(files, "stamp", fail)
    for _ in range(MOST_ERRORS + 5):
        read(cache, reader, "a")
    assert cache.errors == MOST_ERRORS


@pytest.mark.parametrize("odd", ["order", "metadata", "more"])
def test_a_reader_that_does_something_else_is_left_alone(cache: ReadCache, reader: Reader, odd: str) -> None:
    def load(names: list[str]) -> pa.Table:
        table = reader.load(names)
        if odd == "order":
            return table.select(table.schema.names[::-1])
        if odd == "metadata":
            return table.replace_schema_metadata({"n": str(len(reader.loaded))})
        return table.append_column("z", table["a"])

    for _ in range(4):
        table = reader.read(cache, ["a", "b"], load)
        assert_same(table.replace_schema_metadata(), load(["a", "b"]).replace_schema_metadata())
    assert cache.kept_bytes == 0


def test_threads(cache: ReadCache, reader: Reader) -> None:
    cache.allow(20_000)
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(60):
                names = [name for k, name in enumerate(NAMES) if (seed + i) >> k & 1] or ["a"]
                assert_same(reader.read(cache, names, reader.stock), reader.stock(names))
                if i % 20 == seed:
                    cache.allow(1_000 * (i % 40))
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    cache.allow(0)
    assert cache.kept_bytes == 0
    assert cache.errors == 0


def test_columns_without_bytes(cache: ReadCache, tmp_path: Path) -> None:
    """What a filter leaves nothing of, for example. They stayed when all else was dropped, and the next drop failed."""
    many = [Reader(tmp_path / str(i), rows=0) for i in range(5)]
    for _ in range(3):
        for reader in many:
            read(cache, reader, "a")
    assert cache.hits
    assert cache.kept_bytes >= 10 * 2_048
    assert cache.allow(0) > 0
    cache.allow(1 << 20)
    assert cache.allow(0) == 0
    assert cache.statistics()["columns"] == cache.kept_bytes == 0


def test_what_was_read_once_is_not_remembered_for_ever(
    cache: ReadCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dask_gpurt.tiers.read_cache.cache.MOST_NAMES", 5)
    many = [Reader(tmp_path / str(i)) for i in range(9)]
    for reader in many:
        read(cache, reader, "a", "b")
    assert len(cache._known) <= 3
    monkeypatch.setattr("dask_gpurt.tiers.read_cache.cache.MOST_SOURCES", 2)
    for reader in many:
        read(cache, reader, "a")
    assert len(cache._known) <= 2
    cache.allow(0)
    assert not cache._known
    assert cache._names == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_while_another_thread_is_at_it(cache: ReadCache, reader: Reader) -> None:
    for _ in range(2):
        read(cache, reader, "a")
    with cache._lock:
        child = os.fork()
        if not child:
            cache.forked()
            right = cache.kept_bytes == 0 and cache.read("", lambda: None, ["a"], lambda names: names) == ["a"]
            os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert cache.kept_bytes


@pytest.mark.parametrize(
    ("left", "right"),
    [([1], [1.0]), ([1], [True]), (["1"], [1]), ([1, [2]], [1, 2]), ([(1, 2)], [[1, 2]]), ({"a": 1}, {"a": 2})],
)
def test_what_differs_has_another_key(left: object, right: object) -> None:
    assert files.plain(left) != files.plain(right)
    assert files.plain(left) == files.plain(left)


def test_what_shows_only_a_part_of_itself_has_no_key() -> None:
    import numpy as np
    import pandas as pd
    import pyarrow.compute as pc

    shown: list[Callable[[], object]] = [
        lambda: np.arange(5_000),
        lambda: pc.field("a").isin(list(range(5_000))),
        lambda: list(range(5_000)),
        lambda: pd.Series([1]),
        object,
        lambda: pa.scalar("text"),
        lambda: float("nan"),  # Dask asks for numpy's very own
    ]
    for make in shown:
        with pytest.raises(files.NotPlain):
            files.plain([make()])
    files.plain([np.float64(1), pd.Timestamp("2026-01-01", tz="UTC"), np.datetime64("2026-01-01")])
