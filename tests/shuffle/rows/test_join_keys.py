"""No key is lost: whatever pandas merges passes the filter. Bulk: `python -m benchmarks.join_random`."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from benchmarks.join_random import EXACT, REFUSED, column, pure
from dask_gpurt.shuffle.rows.join_keys import TEXT_BYTES, Keys, exact
from dask_gpurt.shuffle.rows.key_filter import MOST_ROWS, MOST_WORDS, KeyFilter, bits_of, found, union, words_for


def test_random_joins_lose_no_row() -> None:
    found = [pure(seed) for seed in range(60)]
    filtered = [(looked, dropped) for why, looked, dropped in found if not why]
    assert len(filtered) > 30
    # A filter that lets all pass would lose none either.
    assert sum(dropped for _, dropped in filtered) > 0.3 * sum(looked for looked, _ in filtered)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("nulls", [0.0, 0.3])
def test_equal_keys_have_one_hash_wherever_they_lie(dtype: object, nulls: float) -> None:
    r = np.random.default_rng(1)
    frame = pd.DataFrame({"k": column(r, dtype, 300, 0, 40, nulls)})
    assert exact(frame.k.dtype)
    hashes = Keys.of(frame, ["k"]).hashes
    # Of slices, of gathered rows, of several pieces of memory.
    order = r.permutation(300)
    assert (Keys.of(frame.iloc[order], ["k"]).hashes == hashes[order]).all()
    assert (Keys.of(frame.iloc[37:211], ["k"]).hashes == hashes[37:211]).all()
    assert (Keys.of(frame.iloc[5::3], ["k"]).hashes == hashes[5::3]).all()
    pieces = pd.concat([frame.iloc[:100], frame.iloc[100:]], ignore_index=True)
    assert (Keys.of(pieces, ["k"]).hashes == hashes).all()
    # As many hashes as keys: a hash that is the same for all would pass this test otherwise.
    keys = [
        None if pd.isna(key) else (len(key.encode()), key[:TEXT_BYTES]) if isinstance(key, str) else key
        for key in frame.k
    ]
    assert len(np.unique(hashes)) == len(set(keys))


@pytest.mark.parametrize("dtype", [*REFUSED, "complex128", pd.ArrowDtype(pa.list_(pa.int8())), "period[D]"], ids=str)
def test_what_does_not_hash_exactly_is_refused(dtype: object) -> None:
    assert not exact(pd.Series([], dtype=dtype).dtype)


def test_nulls_of_all_kinds_are_one_key_and_zeros_are_equal() -> None:
    masked = pd.arrays.FloatingArray(np.array([np.nan, 1.0, 0.0, -0.0]), np.array([False, True, False, False]))
    one, other, zero, minus = Keys.of(pd.DataFrame({"k": masked}), ["k"]).hashes
    assert one == other
    assert zero == minus != one


def test_columns_do_not_change_places() -> None:
    a = Keys.of(pd.DataFrame({"x": [1, 2], "y": [2, 1]}), ["x", "y"]).hashes
    assert a[0] != a[1]


def test_bounds_drop_a_partition_only_if_it_is_outside() -> None:
    keys = Keys.of(pd.DataFrame({"k": [10, 20]}), ["k"])
    none = KeyFilter(bytes(8), keys.bounds)
    assert keys.bounds == (10, 20)
    assert not none.passing(pd.DataFrame({"k": [1, 9]}), ["k"]).any()
    real = KeyFilter(bits_of([keys.hashes], 1), keys.bounds)
    assert real.passing(pd.DataFrame({"k": [1, 20]}), ["k"])[1]
    assert Keys.of(pd.DataFrame({"k": pd.array([1, None], dtype="Int64")}), ["k"]).bounds is None
    assert Keys.of(pd.DataFrame({"k": ["a"]}, dtype="string[pyarrow]"), ["k"]).bounds is None


def test_a_union_holds_what_its_parts_hold_and_little_more() -> None:
    r = np.random.default_rng(2)
    parts = [r.integers(0, 1 << 32, 20_000, dtype=np.uint32) for _ in range(3)]
    words = words_for(60_000)
    keys = KeyFilter(union([bits_of([one], words) for one in parts]), None)
    assert all(keys.holds(one).all() for one in parts)
    assert keys.holds(r.integers(0, 1 << 32, 100_000, dtype=np.uint32)).mean() < 0.05


def test_of_a_sample_all_that_is_there_is_found_and_little_more() -> None:
    r = np.random.default_rng(0)
    hashes = r.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    sample = np.concatenate([hashes[::400], r.integers(0, 1 << 32, 4000, dtype=np.uint32)])
    hits = found(sample, [hashes[:70_000], hashes[70_000:70_000], hashes[70_000:]])
    assert (hits == np.isin(sample, hashes)).all()
    assert hits[:500].all()
    assert not found(sample, []).any()


def test_sizes_are_bounded() -> None:
    assert words_for(0) == words_for(1) == 1
    assert words_for(MOST_ROWS) == MOST_WORDS
    assert words_for(MOST_ROWS + 1) == 0
    largest = np.array([0, (1 << 32) - 1], dtype=np.uint32)
    for words in (1, 2, MOST_WORDS):
        assert KeyFilter(bits_of([largest], words), None).holds(largest).all()
