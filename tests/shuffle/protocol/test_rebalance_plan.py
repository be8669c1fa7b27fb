"""Which large outputs are bound late."""

from __future__ import annotations

import random

import pytest

from dask_gpurt.shuffle.protocol.rebalance_plan import Output, Prices, Room, choose

MB = 10**6
PRICES = Prices(unpack_per_byte=10 / 1e9, move_per_byte=2 / 1e9, spill_per_byte=4 / 1e9, fixed=0.05)
ONE = Room(1)


def moved(outputs, rooms, prices=PRICES, most=8):
    return {m.part: m.target for m in choose(outputs, rooms, prices, most).moves}


def test_of_two_large_outputs_of_one_worker_one_goes():
    outputs = [Output(0, "a", 100 * MB), Output(1, "a", 90 * MB), Output(2, "b", 5 * MB)]
    plan = choose(outputs, {"a": ONE, "b": ONE}, PRICES, 8)
    assert [(m.source, m.target) for m in plan.moves] == [("a", "b")]
    assert plan.before == pytest.approx(1.9)
    assert plan.after == pytest.approx(1.0)
    assert plan.price == pytest.approx(0.05 + 90 * MB * 2 / 1e9)


def test_what_gains_less_than_it_costs_stays():
    outputs = [Output(0, "a", 100 * MB), Output(1, "a", 90 * MB)]
    rooms = {"a": ONE, "b": ONE}
    assert moved(outputs, rooms)
    assert not moved(outputs, rooms, Prices(10 / 1e9, 11 / 1e9, 0, 0.05))
    assert not moved(outputs, rooms, Prices(10 / 1e9, 2 / 1e9, 0, 0.8))
    assert not moved([Output(0, "a", 100 * MB)], rooms)
    # Threads make several at a time; no time is shorter than that of the largest.
    assert not moved(outputs, {"a": Room(2), "b": ONE})
    assert not moved([Output(i, "ab"[i % 2], 50 * MB) for i in range(8)], rooms)
    assert not moved([Output(i, "a", 3 * MB) for i in range(100)], rooms)
    assert not moved([], rooms)


def test_a_worker_that_can_not_take_it_is_spared():
    outputs = [Output(0, "a", 100 * MB), Output(1, "a", 90 * MB)]
    assert moved(outputs, {"a": ONE, "b": ONE, "c": Room(1, takes=False)}) == {1: "b"}
    assert not moved(outputs, {"a": ONE, "c": Room(1, takes=False)})
    assert moved([*outputs, Output(2, "b", 10 * MB)], {"a": ONE, "b": ONE, "c": ONE}) == {1: "c"}
    bound = [Output(0, "a", 100 * MB, frozenset("a")), Output(1, "a", 90 * MB, frozenset("ab"))]
    assert moved(bound, {"a": ONE, "b": ONE, "c": ONE}) == {1: "b"}
    assert not moved([Output(o.part, "a", o.nbytes, frozenset("a")) for o in outputs], {"a": ONE, "b": ONE})


def test_memory_counts():
    outputs = [Output(0, "a", 100 * MB), Output(1, "a", 90 * MB)]
    cheap = Prices(unpack_per_byte=1 / 1e9, move_per_byte=2 / 1e9, spill_per_byte=4 / 1e9, fixed=0.01)
    assert not moved(outputs, {"a": ONE, "b": ONE}, cheap)
    # They do not fit in the memory of one: both go to who has room, or one does.
    assert moved(outputs, {"a": Room(1, 100 * MB), "b": ONE}, cheap)
    assert not moved(outputs, {"a": Room(1, 100 * MB), "b": Room(1, 10 * MB)}, cheap)


def test_several_workers_may_be_longest_at_a_time():
    outputs = [Output(0, "a", 100 * MB), Output(1, "a", 90 * MB), Output(2, "b", 100 * MB), Output(3, "b", 90 * MB)]
    rooms = dict.fromkeys("abcd", ONE)
    assert sorted(moved(outputs, rooms).values()) == ["c", "d"]
    # One of both moves alone would gain nothing.
    assert not moved(outputs, rooms, most=1)


@pytest.mark.parametrize("seed", range(200))
def test_a_plan_is_never_longer_than_none(seed):
    r = random.Random(seed)
    rooms = {
        f"w{i}": Room(r.randint(1, 4), r.choice([float("inf"), 300 * MB]), r.random() < 0.8)
        for i in range(r.randint(1, 6))
    }
    names = sorted(rooms)
    outputs = [Output(i, r.choice(names[:2]), r.paretovariate(1.1) * 5 * MB) for i in range(r.randint(0, 40))]
    prices = Prices(r.choice([1, 10]) / 1e9, r.choice([1, 5]) / 1e9, 4 / 1e9, 0.02)
    plan = choose(outputs, rooms, prices, 8)
    owners = {o.part: o.owner for o in outputs}
    for move in plan.moves:
        assert owners[move.part] == move.source != move.target
        assert rooms[move.target].takes
    assert len({m.part for m in plan.moves}) == len(plan.moves) <= 8
    assert bool(plan.moves) == (plan.after + plan.price < plan.before)
