"""Which rows of a join may be dropped, and which side runs first."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import pytest
from dask.dataframe.utils import UNKNOWN_CATEGORIES

from dask_gpurt.shuffle.protocol.join_order import (
    FIRST_TASKS,
    UNSENT,
    alone_before,
    first_input,
    known_bytes,
    reordered,
)
from dask_gpurt.shuffle.protocol.join_plan import DROPS, Join, covers, side_of
from dask_gpurt.shuffle.protocol.join_price import pays, worth_asking

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
    # What is known of the sides comes before their inputs.
    known = [side_of(JOIN, name, METAS, INPUTS, {"l"})[0] for name in "lr"]
    assert [side is not None and side.builds for side in known] == [True, False]
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


def test_a_side_whose_inputs_bring_categories_drops_no_rows() -> None:
    known = METAS["l"].assign(c=pd.Categorical(["x"]))
    unknown = METAS["l"].assign(c=pd.Categorical([None], categories=[UNKNOWN_CATEGORIES]))
    sides = [side_of(JOIN, name, {**METAS, "l": unknown}, INPUTS)[0] for name in "lr"]
    assert [(side.drops, side.builds) for side in sides if side is not None] == [(False, False), (True, False)]
    assert side_of(JOIN, "l", {**METAS, "l": known}, INPUTS)[0].drops  # type: ignore[union-attr]
    right_join = dataclasses.replace(JOIN, how="right")
    for name in "lr":
        assert side_of(right_join, name, {**METAS, "l": unknown}, INPUTS) == (None, "categories that are not known")


def test_only_the_keys_of_all_inputs_are_used() -> None:
    assert covers([{0, 2}, {1, 2}], 3)
    assert not covers([{0, 2}, {2}], 3)
    assert not covers([], 1)


class Task:
    """As Dask's `TaskState`."""

    def __init__(self, *dependencies: Task, at: int, state: str = "released") -> None:
        self.dependencies = set(dependencies)
        self.dependents: set[Task] = set()
        self.key = f"task-{at}"
        self.priority: Any = (0, 1, at)
        self.state = state
        self.nbytes = 10
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


def test_one_input_of_each_side_comes_before_all_others() -> None:
    small, large = sides([4, 5, 0, 1, 2, 3])
    first = [first_input(small), first_input(large)]
    assert first[0] is not None
    assert first[1] is not None
    ahead = first[0] + first[1]
    assert sorted(ts.priority[2] for ts in ahead) == [0, 1, 8, 9]
    rest = [[ts for ts in alone_before(side, 100) or () if ts not in ahead] for side in (small, large)]
    for ts, priority in reordered(ahead, *rest):
        ts.priority = priority
    assert sorted(ts.priority[2] for ts in ahead) == [0, 1, 2, 3]
    assert max(ts.priority for ts in rest[0]) < min(ts.priority for ts in rest[1])


def test_an_input_that_others_need_too_or_that_needs_much_is_not_put_first() -> None:
    def chain(tasks: int) -> Task:
        last = Task(at=0)
        for at in range(1, tasks):
            last = Task(last, at=at)
        return last

    assert first_input(Task(chain(FIRST_TASKS), chain(FIRST_TASKS), at=1000)) is not None
    assert first_input(Task(chain(FIRST_TASKS + 1), chain(FIRST_TASKS + 1), at=1000)) is None
    # Another input is not so deep.
    assert first_input(Task(chain(FIRST_TASKS + 1), Task(at=990), at=1000)) is not None
    shared = Task(Task(at=0), at=1)
    assert first_input(Task(Task(shared, at=2), Task(shared, at=3), at=100)) is None
    # But a source that all share may be the values of a condition.
    values = Task(at=0)
    found = first_input(Task(Task(values, at=1), Task(values, at=2), at=100))
    assert found is not None
    assert [ts.priority[2] for ts in found] == [1]
    assert first_input(Task(Task(at=1), at=100)) is None
    scattered = Task(at=0, state="memory")
    assert first_input(Task(Task(scattered, at=1), Task(scattered, at=2), at=100)) is not None


def test_what_was_not_sent_changes_places_and_what_was_begun_does_not() -> None:
    small, large = sides([4, 5, 0, 1, 2, 3])
    roots = {ts.priority[2]: ts for side in (small, large) for one in side.dependencies for ts in one.dependencies}
    for at, ts in roots.items():
        ts.state = "processing" if at in (0, 8) else "queued"
        for transfer in ts.dependents:
            transfer.state = "waiting"
    small.state = large.state = "waiting"
    first, last = alone_before(small, 100, UNSENT), alone_before(large, 100, UNSENT)
    assert first is not None
    assert last is not None
    # The input that a worker has begun is split as soon as it is there.
    assert [len(first), len(last)] == [3, 7]
    assert all(ts.state != "processing" for ts in first + last)
    for ts, priority in reordered(first, last):
        ts.priority = priority
    assert max(ts.priority for ts in first) < min(ts.priority for ts in last)


def test_bytes_are_known_of_inputs_that_are_all_in_memory() -> None:
    small, large = sides([4, 5, 0, 1, 2, 3])
    for one in large.dependencies:
        for ts in one.dependencies:
            ts.state = "memory"
    assert [known_bytes(small), known_bytes(large)] == [None, 40]


def test_a_filter_pays_if_it_saves_more_than_it_costs() -> None:
    price: dict[str, float] = {"hash_seconds": 5e-9, "split_seconds": 100e-9}
    assert pays(400_000, 3_000_000, 0.1, **price)
    assert not pays(400_000, 3_000_000, 1.0, **price)
    assert not pays(3_000_000, 400_000, 0.5, **price)
    assert not pays(400_000, 0, 0.0, **price)
    assert not pays(1000, 3_000_000, 0.1, hash_seconds=200e-9, split_seconds=100e-9)
    assert worth_asking(10_000_000)
    assert not worth_asking(1000)
