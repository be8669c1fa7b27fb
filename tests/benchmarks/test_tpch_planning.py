"""Queries of TPC-H are planned with as many partitions as large data has. Nothing is computed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import dask
import pytest

from dask_gpurt.bench.tpch import generate, queries, tables

if TYPE_CHECKING:
    from pathlib import Path

#: from 16 partitions on, Dask gives a group-by on one key several output partitions
PARTITIONS = 32


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tables.Tables:
    directory: Path = tmp_path_factory.mktemp("tpch")
    opened = tables.open_tables(generate.ensure(str(directory / "data"), 0.001), 0.001)

    def cut(frame: Any) -> Any:
        return frame.repartition(npartitions=PARTITIONS)

    large = {name: cut(getattr(opened, name)) for name in ("lineitem", "orders", "customer", "part", "partsupp")}
    return dataclasses.replace(opened, **large)


@pytest.mark.parametrize("number", [2, 10, 13, 15, 17, 18, 20, 21])
def test_a_join_after_a_group_by_is_planned(many: tables.Tables, number: int) -> None:
    """By named aggregation all but one of them are not, see docs/upstream.md."""
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        assert queries.QUERIES[number](many).optimize().npartitions == 1
