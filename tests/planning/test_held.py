"""Expressions that live on: plans are the same, answers follow the files, and everything can be let go."""

from __future__ import annotations

import functools
import gc
import importlib
import operator
import pickle
import sys
import weakref
from typing import TYPE_CHECKING, Any

import dask
import dask.config
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._expr import FinalizeCompute, SingletonExpr
from dask.dataframe.dask_expr._expr import Expr

from dask_gpurt import planning, status
from dask_gpurt.errors import NoAnswer
from dask_gpurt.planning import held, meta, named, seam
from tests.planning.conftest import write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def queries(folder: Path) -> dict[str, Any]:
    t = dd.read_parquet(str(folder))
    small = t[t.value > 0][["key", "value"]]
    return {
        "filter": small,
        "join": t.merge(small, on="key", suffixes=("", "_r")),
        "groupby": t.groupby("key").agg({"value": "sum"}).reset_index(),
        "isin": t[t.text.isin(["a", "c"])].assign(more=t.value * 2).drop_duplicates(subset=["key"]),
        "broadcast": t.merge(small.repartition(npartitions=1), on="key", how="left", suffixes=("", "_r")),
        "steps": t.map_partitions(len_of, meta=pd.DataFrame({"n": [1]})).repartition(npartitions=1),
    }


def len_of(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"n": [len(frame)]})


def plan(query: Any) -> str:
    return str(FinalizeCompute(query.expr).optimize()._name)


def plans(folder: Path) -> dict[str, str]:
    return {name: plan(query) for name, query in queries(folder).items()}


def kinds_of_tables() -> set[type]:
    return {type(vars(cls).get("_instances")) for cls in seam._subclasses(Expr)}


def test_the_same_plans_and_answers(kept: held.HeldExpressions, files: Path) -> None:
    theirs = plans(files)
    answers = {name: query.compute() for name, query in queries(files).items()}
    assert kept.install()
    assert plans(files) == theirs
    assert plans(files) == theirs
    for name, query in queries(files).items():
        columns = list(answers[name].columns)
        pd.testing.assert_frame_equal(
            query.compute().sort_values(columns, ignore_index=True),
            answers[name].sort_values(columns, ignore_index=True),
        )
    assert kept.failed is None


def test_planning_is_dasks_where_pandas_does_not_copy_on_write(
    kept: held.HeldExpressions, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kinds_of_tables()
    monkeypatch.setattr(pd, "__version__", "2.3.3")
    assert not kept.install()
    assert "pandas 2.3.3 does not copy on write" in str(kept.failed)
    assert kinds_of_tables() == before


def test_the_second_time_hardly_anything_is_made(kept: held.HeldExpressions, files: Path) -> None:
    kept.install()
    plans(files)
    gc.collect()
    before, empty = kept.made, queries(files)["join"].expr._meta
    plans(files)
    assert kept.made == before
    assert kept.hits > 100
    assert queries(files)["join"].expr._meta is empty


def test_files_that_were_written_again(kept: held.HeldExpressions, files: Path) -> None:
    kept.install()
    first = queries(files)["groupby"].compute()
    assert dict(zip(first["key"], first["value"], strict=True)) == {1: 3, 2: 3, 3: 3}
    write(files, 10)
    second = queries(files)["groupby"].compute()
    assert dict(zip(second["key"], second["value"], strict=True)) == {1: 30, 2: 30, 3: 3}
    (files / "part.2.parquet").unlink()
    assert queries(files)["filter"].npartitions == 2
    frame = pd.read_parquet(files / "part.0.parquet").rename(columns={"text": "other"})
    for i in range(2):
        frame.to_parquet(files / f"part.{i}.parquet")
    assert list(dd.read_parquet(str(files)).columns) == ["key", "value", "other"]


@pytest.mark.parametrize("where", ["configuration", "pandas"])
def test_other_surroundings_let_everything_go(kept: held.HeldExpressions, files: Path, where: str) -> None:
    kept.install()
    plans(files)
    assert kept.figures()["held"]
    if where == "configuration":
        with dask.config.set({"dataframe.shuffle.method": "disk"}):
            theirs = plans(files)
    else:
        with pd.option_context("future.python_scalars", True):
            theirs = plans(files)
    assert kept.cleared == 1
    plans(files)
    assert kept.cleared == 2
    kept.uninstall()
    if where == "configuration":
        with dask.config.set({"dataframe.shuffle.method": "disk"}):
            assert plans(files) == theirs


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("def add(frame):\n    return frame + {}\n", "add"),
        ("class A:\n    @classmethod\n    def add(cls, frame):\n        return frame + {}\n", "A.add"),
        ("class A:\n    @staticmethod\n    def add(frame):\n        return frame + {}\n", "A.add"),
    ],
    ids=["function", "classmethod", "staticmethod"],
)
def test_a_module_that_is_loaded_again(
    kept: held.HeldExpressions, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, name: str
) -> None:
    """The name of an expression tells the name of a function only, so the old one must not be found."""
    (tmp_path / "code").mkdir()
    source = tmp_path / "code" / "of_a_user.py"
    monkeypatch.syspath_prepend(str(source.parent))
    sys.modules.pop("of_a_user", None)
    kept.install()
    answers = []
    for step in (1, 1, 20):
        source.write_text(code.format(step))
        importlib.invalidate_caches()
        module = importlib.import_module("of_a_user")
        module = importlib.reload(module) if step == 20 else module
        t = dd.read_parquet(str(files), columns=["key"])
        add = operator.attrgetter(name)(module)
        answers.append(t.map_partitions(add, meta=pd.DataFrame({"key": [1]})).compute().key.max())
    assert answers == [4, 4, 23]
    assert kept.hits


def test_no_data_lives_longer_than_its_owner(kept: held.HeldExpressions, files: Path) -> None:
    kept.install()
    frame = pd.DataFrame({"key": range(1000), "value": range(1000)})
    t = dd.read_parquet(str(files))
    big = list(range(10_000))

    def closure(part: pd.DataFrame) -> pd.DataFrame:
        return part.assign(n=len(frame))

    made = [
        dd.from_pandas(frame, npartitions=2)[["key"]],
        t.merge(dd.from_pandas(frame, npartitions=1), on="key")[["key"]],
        dd.from_delayed([dask.delayed(pd.DataFrame)({"a": [1]})], meta={"a": int})[["a"]],
        t.map_partitions(closure, meta=pd.DataFrame({"key": [1]}))[["key"]],
        t.map_partitions(lambda part: part, meta=pd.DataFrame({"key": [1]})),
        t[["key"]].map_partitions(len_of),  # without meta: Dask calls the function to find out
        t.key.isin(big),
        t[["key"]].persist()[["key"]],
    ]
    for query in made:
        plan(query)
    gone = [weakref.ref(query.expr) for query in made]
    stays = weakref.ref(t[["key"]].expr)
    del made, query
    gc.collect()
    assert [r() for r in gone] == [None] * len(gone)
    assert stays() is not None


def rows_with(frame: pd.DataFrame, values: Any) -> pd.DataFrame:
    return frame[frame.key.isin(list(values))]


#: what a user may change in place after a query was made of it: the argument, the query, the change
CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1], lambda t, a: t.map_partitions(rows_with, a, meta=t._meta), lambda a: a.append(2)),
    "array": (
        lambda: np.array([1]),
        lambda t, a: t.map_partitions(rows_with, a, meta=t._meta),
        lambda a: a.__setitem__(0, 2),
    ),
    "dict": (
        lambda: {"key": "sum"},
        lambda t, a: t.groupby("text").agg(a),
        lambda a: a.__setitem__("key", "max"),
    ),
    "nested": (
        lambda: {"key": ["sum"]},
        lambda t, a: t.groupby("text").agg(a),
        lambda a: a["key"].append("max"),
    ),
    "partial": (
        lambda: functools.partial(rows_with, values=[1]),
        lambda t, a: t.map_partitions(a, meta=t._meta),
        lambda a: a.keywords["values"].append(2),
    ),
    "names": (lambda: {"key": "k"}, lambda t, a: t.rename(columns=a), lambda a: a.__setitem__("key", "other")),
    "delayed": (
        lambda: {"key": [1]},
        lambda t, a: t[["key"]].isin(a).rename(columns={"key": "there"}),
        lambda a: a["key"].append(2),
    ),
}


@pytest.mark.parametrize("installed", ["before", "after"])
@pytest.mark.parametrize("case", CHANGED)
def test_arguments_that_a_user_changes_in_place(
    kept: held.HeldExpressions, files: Path, case: str, installed: str
) -> None:
    """The query of the old arguments is asked for again: it is not the one whose arguments were changed."""
    given, query, change = CHANGED[case]
    if installed == "before":
        kept.install()
    t = dd.read_parquet(str(files))
    argument = given()
    first = query(t, argument)
    expected = first.compute()
    change(argument)
    kept.install()
    if installed == "after":
        query(t, given())  # Dask finds `first`, which says something else now; it must not live on
    del first
    gc.collect()
    pd.testing.assert_frame_equal(query(t, given()).compute(), expected)


def test_an_argument_that_is_changed_after_its_expression_is_found(kept: held.HeldExpressions, files: Path) -> None:
    """What the expression had computed before it was held must not have the list of the user in it either."""
    t = dd.read_parquet(str(files))
    given = [1]
    first = t.map_partitions(rows_with, given, meta=t._meta)
    expected = first.compute()
    kept.install()
    t.map_partitions(rows_with, [1], meta=t._meta)
    given.append(2)
    del first
    gc.collect()
    pd.testing.assert_frame_equal(t.map_partitions(rows_with, [1], meta=t._meta).compute(), expected)


def test_what_was_made_before_is_held(kept: held.HeldExpressions, files: Path) -> None:
    t = dd.read_parquet(str(files))
    kept.install()
    expression = weakref.ref(t.assign(more=[1][0]).expr)
    del t
    gc.collect()
    assert expression() is not None


def test_an_argument_that_was_changed_before_its_query_was_pickled(kept: held.HeldExpressions, files: Path) -> None:
    """What is unpickled has the name that it had before."""
    t = dd.read_parquet(str(files))
    expected = t.groupby("text").agg({"key": "sum"}).compute()
    given = {"key": "sum"}
    query = t.groupby("text").agg(given)
    given["key"] = "max"
    pickled = pickle.dumps(query)
    del query, t
    gc.collect()
    kept.install()
    read = pickle.loads(pickled)
    assert list(read.compute().columns) == ["key"]
    del read
    gc.collect()
    pd.testing.assert_frame_equal(dd.read_parquet(str(files)).groupby("text").agg({"key": "sum"}).compute(), expected)


def test_wide_tables_are_not_held(kept: held.HeldExpressions, tmp_path: Path) -> None:
    """5,000 expressions with empty frames of 2,000 columns would be gigabytes; some columns of them are held."""
    wide = pd.DataFrame({f"c{i}": [1] for i in range(seam.MOST_COLUMNS + 1)})
    wide.to_parquet(tmp_path / "part.0.parquet")
    kept.install()
    t = dd.read_parquet(str(tmp_path))
    narrow = dd.read_parquet(str(tmp_path), columns=["c0", "c1"])
    steps = narrow.map_partitions(len_of, meta=wide)
    gone = [weakref.ref(e.expr) for e in (t, t[t.c0 > 0], t.assign(more=1), steps)]
    stays = weakref.ref(narrow.expr)
    del t, steps, narrow
    gc.collect()
    assert [r() for r in gone] == [None] * len(gone)
    assert stays() is not None


def test_everything_is_given_back(kept: held.HeldExpressions, files: Path) -> None:
    plans(files)
    kept.install()
    assert kept.install()
    plans(files)
    assert seam.Instances in kinds_of_tables()
    kept.uninstall()
    assert kinds_of_tables() == {weakref.WeakValueDictionary, type(None)}
    kept.uninstall()
    made = kept.made
    plans(files)
    assert kept.made == made
    kept.install()
    plans(files)
    assert kept.made == made  # found again
    planning.forget()
    assert kept.figures()["held"] == 0
    assert kinds_of_tables() == {weakref.WeakValueDictionary, type(None)}


def test_switched_for_a_while(kept: held.HeldExpressions, files: Path) -> None:
    with planning.switched(True):
        plans(files)
        made = kept.made
        with planning.switched(False):
            plans(files)
        assert kept.installed
    assert kept.made == made
    assert not kept.installed
    with planning.switched(True):
        plans(files)
    assert kept.made == made


def test_what_is_held_is_not_found_while_switched_off(kept: held.HeldExpressions, files: Path) -> None:
    """Else a comparison with stock Dask would be one of ours with ours."""
    with planning.switched(True):
        ours = dd.read_parquet(str(files)).expr
        assert dd.read_parquet(str(files)).expr is ours
    with planning.switched(False):
        assert dd.read_parquet(str(files)).expr is not ours
    with planning.switched(True):
        assert dd.read_parquet(str(files)).expr is ours


def test_what_is_imported_later_is_held_from_the_next_question_on(
    kept: held.HeldExpressions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "dask.dataframe")
        assert not planning.keep()

    def ask() -> None:
        with pytest.raises(NoAnswer):
            status("inproc://nobody/1/1")

    assert not kept.installed
    ask()
    assert kept.installed
    with planning.switched(False):
        ask()
        assert not kept.installed, "a comparison with stock Dask would be none"
    assert kept.installed
    planning.forget()
    ask()
    assert not kept.installed, "what was detached stays so"


def test_another_version_of_dask(kept: held.HeldExpressions, monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    monkeypatch.setitem(SingletonExpr.__annotations__, "_instances", "dict[str, Any]")
    assert not kept.install()
    assert "expected a WeakValueDictionary" in str(kept.failed)
    assert seam.Instances not in kinds_of_tables()
    assert plans(files)


@pytest.mark.parametrize("where", ["seam.may_hold", "meta.is_changed", "named.is_untold", "named.alike"])
def test_a_fault_of_ours_costs_the_gain_only(
    kept: held.HeldExpressions, monkeypatch: pytest.MonkeyPatch, files: Path, where: str
) -> None:
    theirs = plans(files)
    kept.install()
    plans(files)

    def fail(*args: Any, **kwargs: Any) -> bool:
        raise KeyError("renamed")

    module, _, name = where.partition(".")
    if name == "alike":
        monkeypatch.setattr(named, "is_untold", lambda expression: True)
    monkeypatch.setattr({"seam": seam, "meta": meta, "named": named}[module], name, fail)
    write(files, 2)
    assert plans(files).keys() == theirs.keys()
    assert "renamed" in str(kept.failed)
    assert kept.figures()["held"] == 0


def test_the_kinds_are_those_of_this_dask() -> None:
    for module, names in seam.KINDS.items():
        there = vars(importlib.import_module(module))
        assert sorted(n for n in names if n not in there) == []
