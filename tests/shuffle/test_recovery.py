"""The pure part of recovery: ids, owners, the ledger; and simulated clusters that lose workers and messages."""

from __future__ import annotations

import pytest
from worlds import Afterwards, World

from dask_gpurt.shuffle.recovery import CUTS, Budget, Ledger, Validity, agreed, origin, reassign, shard_id, undone


def test_ids_sort_by_input_and_say_their_attempt():
    ids = [shard_id(p, a, e) + k for p in (0, 1, 70_000) for a in (0, 3, 255) for e in (a, 255) for k in (0, CUTS - 1)]
    assert [origin(i) for i in ids] == [
        (p, a) for p in (0, 1, 70_000) for a in (0, 3, 255) for e in (a, 255) for k in (0, 1)
    ]
    assert len({shard_id(p, a, e) // CUTS for p in range(3) for a in range(4) for e in range(4)}) == 48
    assert [origin(i)[0] for i in sorted(ids)] == sorted(origin(i)[0] for i in ids)
    assert max(ids) < 1 << 63


def test_lost_outputs_are_spread_and_follow_the_partner():
    owners = {i: "abc"[i % 3] for i in range(12)}
    moved = reassign(owners, ["b", "c"])
    assert set(moved) == {0, 3, 6, 9}
    assert sorted(moved.values()) == ["b", "b", "c", "c"]
    assert reassign(owners, ["b", "c"], {0: "c", 3: "c", 6: "a", 9: "d"}) == {0: "c", 3: "c", 6: "b", 9: "c"}
    assert reassign(owners, ["a", "b", "c"]) == {}


def test_validity():
    v = Validity(2, {5: 0, 6: 1})
    assert v.valid(shard_id(5, 0, 2))
    assert not v.valid(shard_id(5, 1, 1))
    assert v.valid(shard_id(6, 1, 1) + 7)
    assert not v.valid(shard_id(7, 1, 1))
    assert v.valid(shard_id(7, 2, 2))


def test_undone():
    assert undone(["a", "b", "c"], {"b"}) == {"a", "c"}


def test_the_ledger_gives_what_the_lost_worker_had_once():
    ledger: Ledger[str] = Ledger(Budget(100))
    ledger.ran(0, "t0", 0, [("x", "0x"), ("y", "0y")], 20)
    ledger.ran(1, "t1", 0, [("y", "1y")], 10)
    ledger.ran(2, "t2", 0, [], 0)
    assert ledger.amend(1, ["x"]) == [(0, 0, "0x")]
    ledger.rerouted(0, [("y", "0x'")])
    assert ledger.amend(1, ["x"]) == []
    assert ledger.amend(2, ["y"]) == [(0, 0, "0y"), (0, 0, "0x'"), (1, 0, "1y")]
    assert ledger.vouched() == [(0, 0, "t0"), (1, 0, "t1"), (2, 0, "t2")]


def test_the_budget_drops_the_oldest_and_they_are_forgotten_when_needed():
    ledger: Ledger[str] = Ledger(Budget(25))
    for i in range(4):
        ledger.ran(i, f"t{i}", 0, [("x", f"{i}x")], 10)
    assert ledger.budget.used_bytes == 20
    assert [p for p, _, _ in ledger.amend(1, ["x"])] == [2, 3]
    assert [p for p, _, _ in ledger.vouched()] == [2, 3]
    assert not ledger.vouches(0, 0)
    ledger.ran(0, "t0", 1, [("y", "0y")], 10)
    assert ledger.vouches(0, 1)
    assert not ledger.vouches(0, 0)
    ledger.settle()
    assert ledger.budget.used_bytes == 0


def test_what_was_lost_with_a_worker_counts_from_then_on():
    vouched = [(0, 0, "t0"), (1, 0, "t1"), (1, 2, "t1"), (2, 1, "t2")]
    assert agreed(vouched, {"t1": 2, "t2": 2}) == ({0: 0, 1: 2}, {"t0", "t1"})


@pytest.mark.parametrize("budget", [0, 40, 10**9])
def test_every_output_has_every_input_once_whoever_is_lost(budget):
    lost = saved = bound = 0
    for seed in range(300):
        world = World(seed, workers=4, inputs=12, parts=9 if seed % 5 else 3, budget=budget, deaths=seed % 4)
        for _ in range(100_000):
            if not world.step():
                break
        else:
            raise AssertionError(f"seed {seed}: the barrier was never reached")
        world.check()
        lost += len(world.lost)
        bound += world.bound
        saved += len(world.lost) * world.inputs - (world.splits - world.inputs)
    assert lost > 100
    assert bound > 50
    # A restart splits every input again for every worker lost.
    assert saved > 0 or budget == 0


@pytest.mark.parametrize("budget", [0, 40, 10**9])
def test_outputs_opened_after_the_barrier_are_complete_when_they_are_made(budget):
    amended = finished = splits = inputs = bound = 0
    for seed in range(1000):
        world = Afterwards(seed, workers=5, inputs=12, parts=10 if seed % 5 else 3, budget=budget, deaths=seed % 4)
        for _ in range(100_000):
            if not world.step():
                break
        else:
            raise AssertionError(f"seed {seed}: it was never over")
        amended += world.amended
        finished += not world.restarted
        bound += world.bound
        splits += world.splits - world.splits_before
        inputs += world.amended * world.inputs
    assert amended > 1000
    assert finished > 500
    assert bound > 200
    # A restart splits every input again for every worker lost.
    assert splits < inputs if budget else splits
