"""Which rows of a join may be dropped, and which side runs first."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import pytest

from dask_gpurt.shuffle.protocol.join_order import alone_before, reordered
from dask_gpurt.shuffle.protocol.join_plan import DROPS, Join, covers, side_of

JOIN = Join("l", "r", "inner", ["a"], ["b"], False, False)
METAS = {"l": pd.DataFrame({"a": [1], "x": [1.0]}), "r": pd.DataFrame({"b": [1], "y": [1.0]})}
INPUTS = {"l": 8, "r": 2}


@pytest.mark.parametrize("how", ["inner", "left", "right", "outer"])
def test_a_side_drops_rows_only_if_the_join_loses_them(how: Any) -> None:
    left, right = pd.DataFrame({"k": [1, 2], "x": [1, 2]}), pd.DataFrame({"k": [2, 3], "y": [1, 2]})
    want = left.merge(right, how=how)
    drops = DROPS.get(how, (False, False))
    for i, (some, other) in enumerate([(left[left.k == 2], right), (left, right[right.k == 2])]):
        assert some.merge(other, how=how).equals(want) is drops[i]
    join = dataclasses.replace(JOIN, how=how)
    sides = [side_of(join, name, METAS, INPUTS)[0] for name in "lr"]
    assert [side is not None and side.drops for side in sides] == list(drops)


def test_the_side_with_fewer_inputs_builds() -> None:
    small, large = (side_of(JOIN, name, METAS, INPUTS)[0] for name in "rl")
    assert small is not None
    assert large is not None
    assert (small.builds, small.columns, small.partner) == (True, ("b",), "l")
    assert (large.builds, large.columns, large.inputs, large.partner_inputs) == (False, ("a",), 8, 2)
    # Of a left join the right side may be filtered, so only the left side's keys are wanted.
    left_join = dataclasses.replace(JOIN, how="left")
    assert not side_of(left_join, "r", METAS, INPUTS)[0].builds  # type: ignore[union-attr]
    assert side_of(left_join, "l", METAS, {"l": 2, "r": 8})[0].builds  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"how": "outer"}, "outer join"),
        ({"how": "leftanti"}, "leftanti join"),
        ({"left_index": True}, "joined on an index"),
        ({"left_on": ["nowhere"]}, "keys are not columns"),
        ({"left_on": ["a", "x"]}, "keys are not columns"),
        ({"left_on": None}, "keys are not columns"),
        ({"left_on": ["x"]}, "keys of two dtypes"),
    ],
)
def test_reasons_for_no_filter(change: dict[str, Any], why: str) -> None:
    assert side_of(dataclasses.replace(JOIN, **change), "l", METAS, INPUTS) == (None, why)


def test_keys_of_refused_dtypes() -> None:
    metas = {"l": METAS["l"].astype({"a": "category"}), "r": METAS["r"].astype({"b": "category"})}
    assert side_of(JOIN, "l", metas, INPUTS) == (None, "keys of dtype category")


def test_only_the_keys_of_all_inputs_are_used() -> None:
    assert covers([{0, 2}, {1, 2}], 3)
    assert not covers([{0, 2}, {2}], 3)
    assert not covers([], 1)


class Task:
    """As Dask's `TaskState`."""

    def __init__(self, *dependencies: Task, at: int, state: str = "released") -> None:
        self.dependencies = set(dependencies)
        self.dependents: set[Task] = set()
        self.priority: Any = (0, 1, at)
        self.state = state
        for one in dependencies:
            one.dependents.add(self)


def sides(at: list[int]) -> tuple[Task, Task]:
    """Barriers of two inputs and of four, each a root and its transfer, with these places of the roots."""
    chains = [Task(Task(at=2 * i), at=2 * i + 1) for i in at]
    return Task(*chains[:2], at=100), Task(*chains[2:], at=101)


def test_the_small_side_comes_first_and_each_side_keeps_its_order() -> None:
    small, large = sides([4, 5, 0, 1, 2, 3])
    before = [alone_before(small, 100), alone_before(large, 100)]
    assert before[0] is not None
    assert before[1] is not None
    order = [sorted(side, key=lambda ts: ts.priority) for side in before if side]
    for ts, priority in reordered(*before):
        ts.priority = priority
    assert sorted(order[0] + order[1], key=lambda ts: ts.priority) == order[0] + order[1]
    assert [ts.priority[2] for ts in order[0] + order[1]] == [*range(12), 100, 101]
    assert reordered(*before) == []


def test_what_serves_others_or_was_asked_for_before_keeps_its_place() -> None:
    small, large = sides([4, 5, 0, 1, 2, 3])
    shared = Task(at=50)
    for barrier in (small, large):
        for ts in barrier.dependencies:
            ts.dependencies.add(shared)
            shared.dependents.add(ts)
    found = alone_before(small, 100)
    assert found is not None
    assert shared not in found
    assert len(found) == 5
    assert alone_before(small, 3) is None
    done = next(iter(small.dependencies))
    done.state = "memory"
    again = alone_before(small, 100)
    assert again is not None
    assert done not in again
    assert len(again) == 3


def test_priorities_of_two_users_are_not_mixed() -> None:
    small, large = sides([4, 5, 0, 1, 2, 3])
    first, last = alone_before(small, 100), alone_before(large, 100)
    assert first is not None
    assert last is not None
    first[0].priority = (-5, *first[0].priority[1:])
    assert reordered(first, last) == []
