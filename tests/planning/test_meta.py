"""Empty frames of collections that users change in place."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import dask.dataframe as dd
import pandas as pd
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dask_gpurt.planning import held

#: an empty frame that a user changes in place: the collection, the change
CHANGED_META: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "column": (lambda t: t, lambda m: m.__setitem__("more", 1.0)),
    "no column": (lambda t: t, lambda m: m.__delitem__("text")),
    "names": (lambda t: t[["key", "text"]], lambda m: setattr(m, "columns", ["KEY", "TEXT"])),
    "type": (lambda t: t.assign(one=1), lambda m: m.__setitem__("one", m["one"].astype(float))),
    "name": (lambda t: t[["key"]], lambda m: setattr(m.columns, "name", "names")),
    "attribute": (lambda t: t, lambda m: m.attrs.__setitem__("of", "a user")),
    "flag": (lambda t: t, lambda m: setattr(m.flags, "allows_duplicate_labels", False)),
}


@pytest.mark.parametrize("installed", ["before", "after"])
@pytest.mark.parametrize("case", CHANGED_META)
def test_an_empty_frame_that_a_user_changes_in_place(
    kept: held.HeldExpressions, files: Path, case: str, installed: str
) -> None:
    """As with Dask, the change does not outlive the collection."""
    query, change = CHANGED_META[case]
    expected = query(dd.read_parquet(str(files))).compute()
    if installed == "before":
        kept.install()
    first = query(dd.read_parquet(str(files)))
    change(first._meta)
    changed = first._meta.copy()
    kept.install()
    if installed == "before":
        assert query(dd.read_parquet(str(files)))._meta.equals(changed), "the collection is still there"
    more = query(dd.read_parquet(str(files))).reset_index()
    del first, more
    gc.collect()
    second = query(dd.read_parquet(str(files)))
    pd.testing.assert_frame_equal(second._meta, expected[:0], check_index_type=False)
    assert not second._meta.attrs
    pd.testing.assert_frame_equal(second.compute(), expected)
    assert kept.failed is None


def test_attributes_of_files_are_found_again(kept: held.HeldExpressions, tmp_path: Path) -> None:
    frame = pd.DataFrame({"key": [1]})
    frame.attrs["of"] = ["the file"]
    frame.to_parquet(tmp_path / "part.0.parquet")
    kept.install()
    for _ in range(2):
        assert dd.read_parquet(str(tmp_path), filesystem="arrow")._meta.attrs == frame.attrs
    assert not kept.cleared
    assert kept.hits


def test_pandas_may_arrange_an_empty_frame(kept: held.HeldExpressions, files: Path) -> None:
    kept.install()
    for _ in range(2):
        frame = dd.read_parquet(str(files)).assign(one=1, two=2)._meta
        frame.insert(0, "more", 1)
        del frame["more"]
        del frame
    assert not kept.cleared
    assert kept.hits


def test_an_empty_frame_that_is_computed_in_two_steps(kept: held.HeldExpressions, files: Path) -> None:
    """Text becomes categories first, and these are forgotten then."""
    kept.install()
    for _ in range(2):
        assert not dd.read_parquet(str(files)).text.astype("category").cat.known
    assert not kept.cleared
