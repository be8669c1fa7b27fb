"""Threads that plan at the same time: a lookup waits for no token of another, and nothing is lost between two."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import TYPE_CHECKING, Any

import dask.dataframe as dd
from dask.dataframe.dask_expr._expr import MapPartitions

from dask_gpurt.planning import held, meta, seam
from tests.planning.test_held import rows_with

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

#: seconds for what must not wait at all
LONG = 20.0


def test_a_lookup_does_not_wait_for_the_token_of_another_thread(
    kept: held.HeldExpressions, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that makes a token may wait for Dask's lock of tokens, and what holds that may be looking something up.

    The event loop of a scheduler in the client's process is such a thread: it unpickles graphs.
    """
    kept.install()
    t = dd.read_parquet(str(files))
    query = pickle.dumps(t.assign(more=1).expr)
    begun, go, tokens = threading.Event(), threading.Event(), seam._tokenize_deterministic

    def slow(value: Any) -> Any:
        begun.set()
        assert go.wait(LONG)
        return tokens(value)

    monkeypatch.setattr(seam, "_tokenize_deterministic", slow)
    plans = threading.Thread(target=lambda: t[t.text.isin(["a", "b"])], daemon=True)
    reads = threading.Thread(target=pickle.loads, args=(query,), daemon=True)
    try:
        plans.start()
        assert begun.wait(LONG)
        reads.start()
        reads.join(LONG / 4)
        assert not reads.is_alive(), "it waits for the other thread"
    finally:
        go.set()
    plans.join(LONG)
    assert not plans.is_alive()
    assert kept.failed is None


def test_an_expression_is_judged_before_another_thread_can_find_it(
    kept: held.HeldExpressions, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.install()
    t = dd.read_parquet(str(files))
    there: list[bool] = []
    judge = held.HeldExpressions.judge

    def judged(self: held.HeldExpressions, expression: Any, *, new: bool = False) -> bool:
        if new:
            there.append(type(expression)._instances.get(expression._name) is not None)
        return judge(self, expression, new=new)

    monkeypatch.setattr(held.HeldExpressions, "judge", judged)
    query = t.assign(more=7)
    assert query.npartitions == 3
    assert there
    assert not any(there)


def test_two_threads_note_one_expression(kept: held.HeldExpressions, files: Path) -> None:
    """What the first has seen of the empty frame stays, and a frame that is being dropped is no change."""
    kept.install()
    expression = dd.read_parquet(str(files)).assign(more=8).expr
    empty = expression._meta
    meta.note(expression)
    empty["added"] = 1
    assert meta.is_changed(expression)
    del vars(expression)["_meta"]
    assert not meta.is_changed(expression)


def test_let_go_by_another_thread_in_the_middle_of_a_lookup(kept: held.HeldExpressions, files: Path) -> None:
    """Dask asks whether a name is there, and then for it."""
    kept.install()
    name, table = (e := dd.read_parquet(str(files)).assign(one=1).expr)._name, type(e)._instances
    del e
    gc.collect()
    assert name in table
    kept.clear()
    gc.collect()
    assert table[name]._name == name
    gc.collect()
    assert name not in table


def test_uninstalled_by_another_thread_while_an_expression_is_made(
    kept: held.HeldExpressions, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(MapPartitions, "_instances", raising=False)
    kept.install()

    class Argument:
        def __dask_tokenize__(self) -> str:
            kept.uninstall()
            return "argument"

    t = dd.read_parquet(str(files))
    assert t.map_partitions(rows_with, Argument(), meta=t._meta).expr._name
    assert not kept.installed
