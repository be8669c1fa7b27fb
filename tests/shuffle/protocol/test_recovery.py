"""The pure part of recovery: ids, owners, the ledger; and simulated clusters that lose workers and messages."""

from __future__ import annotations

import pytest

from dask_gpurt.shuffle.protocol.recovery import CUTS, Validity, agreed, origin, reassign, shard_id, undone
from dask_gpurt.shuffle.worker.send_log import RetainBudget, SendLog
from tests.shuffle.afterwards import Afterwards
from tests.shuffle.protocol.worlds import World


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


def test_lost_outputs_that_are_neighbours_stay_together():
    owners = dict.fromkeys(range(7), "a") | {7: "b", 8: "c"}
    assert "".join(reassign(owners, ["b", "c"]).values()) == "bbbbccc"
    assert "".join(reassign(owners, ["b", "c"], {1: "c", 3: "a"}).values()) == "bcbbccc"
    assert reassign({0: "a", 1: "a"}, list("bcde")) == {0: "b", 1: "d"}


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
    ledger: SendLog[str] = SendLog(RetainBudget(100))
    ledger.ran(0, "t0", 0, [("x", "0x"), ("y", "0y")], 20)
    ledger.ran(1, "t1", 0, [("y", "1y")], 10)
    ledger.ran(2, "t2", 0, [], 0)
    assert ledger.amend(1, ["x"]) == [(0, 0, "0x")]
    ledger.rerouted(0, "y", "0x'", own=False)
    assert ledger.amend(1, ["x"]) == []
    assert ledger.amend(2, ["y"]) == [(0, 0, "0y"), (0, 0, "0x'"), (1, 0, "1y")]
    assert ledger.vouched() == [(0, 0, "t0"), (1, 0, "t1"), (2, 0, "t2")]


def test_the_budget_drops_the_oldest_and_they_are_forgotten_when_needed():
    ledger: SendLog[str] = SendLog(RetainBudget(25))
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


def numbers(shard: str, parts) -> tuple[list[str], list[str]]:
    """Shards are digits, one for each output."""
    mine, rest = "".join(x for x in shard if int(x) in parts), "".join(x for x in shard if int(x) not in parts)
    return [mine] * bool(mine), [rest] * bool(rest)


def test_rows_of_void_outputs_are_sent_again_by_who_had_them_and_by_their_owner():
    ledger: SendLog[str] = SendLog(RetainBudget(100), numbers)
    ledger.ran(0, "t0", 0, [("x", "12"), ("y", "34")], 20, ["56"], 10)
    assert ledger.amend(1, [], {1}, {"x"}) == [(0, 0, "1")]
    ledger.rerouted(0, "x", "1", own=False)
    assert ledger.amend(2, [], {5}, {"me"}, mine=True) == [(0, 0, "5")]
    ledger.rerouted(0, "", "5", own=True)
    assert ledger.amend(3, [], {5, 1}, {"me", "x"}, mine=True) == [(0, 0, "1"), (0, 0, "5")]
    ledger.rerouted(0, "x", "1", own=False)
    ledger.rerouted(0, "", "5", own=True)
    # Handed over, they are sent again when the new owner is lost.
    ledger.bound({5}, "me", "y", own=True)
    assert sorted(shard for _, _, shard in ledger.amend(4, ["y"])) == ["34", "5"]
    ledger.settle()
    assert ledger.budget.used_bytes == 0


def test_own_rows_give_way_first_and_are_missed_only_when_they_are_void():
    ledger: SendLog[str] = SendLog(RetainBudget(40), numbers)
    ledger.ran(0, "t0", 0, [("x", "1")], 10, ["5"], 10)
    ledger.ran(1, "t1", 0, [("x", "2")], 10, ["6"], 4)
    assert (ledger.budget.used_bytes, ledger.budget.own_bytes) == (24, 4)  # a quarter for them
    ledger.ran(2, "t2", 0, [("x", "3")], 15, ["7"], 4)
    assert (ledger.budget.used_bytes, ledger.budget.own_bytes) == (39, 4)
    assert ledger.amend(1, ["x"]) == [(0, 0, "1"), (1, 0, "2"), (2, 0, "3")]
    assert ledger.amend(2, [], {7}, {"me"}, mine=True) == [(2, 0, "7")]
    assert ledger.vouched() == [(2, 0, "t2")]
    ledger.settle()
    assert (ledger.budget.used_bytes, ledger.budget.own_bytes) == (0, 0)


def test_a_run_whose_outputs_were_made_gives_way_to_others():
    budget = RetainBudget(25)
    first: SendLog[str] = SendLog(budget)
    second: SendLog[str] = SendLog(budget)
    first.ran(0, "t0", 0, [("x", "1")], 20)
    first.idle(True)
    second.ran(0, "t0", 0, [("x", "2")], 20)
    assert second.amend(1, ["x"]) == [(0, 0, "2")]
    assert first.amend(1, ["x"]) == []
    assert first.vouched() == []
    assert budget.used_bytes == 20
    assert not budget.idle


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
@pytest.mark.parametrize("kind", [World, Afterwards])
def test_outputs_of_drained_workers_have_every_input_once(kind, budget):
    drained = 0
    for seed in range(400):
        world = kind(seed, workers=4, inputs=12, parts=9, budget=budget, deaths=seed % 3, drains=1 + seed % 4)
        for _ in range(100_000):
            if not world.step():
                break
        else:
            raise AssertionError(f"seed {seed}: it was never over")
        if kind is World:
            world.check()
            owners = set(world.worker_for.values())
            assert not owners & world.drained or not set(world.workers) - world.drained
        drained += len(world.drained)
    assert drained > 300


@pytest.mark.parametrize("budget", [0, 40, 10**9])
def test_outputs_opened_after_the_barrier_are_complete_when_they_are_made(budget):
    amended = void = splits = inputs = bound = 0
    for seed in range(1000):
        world = Afterwards(seed, workers=5, inputs=12, parts=10 if seed % 5 else 3, budget=budget, deaths=seed % 4)
        for _ in range(100_000):
            if not world.step():
                break
        else:
            raise AssertionError(f"seed {seed}: it was never over")
        amended += world.amended
        void += world.void
        bound += world.bound
        splits += world.splits - world.splits_before
        inputs += world.amended * world.inputs
    assert amended > 1000
    assert void > 500
    assert bound > 200
    # A restart splits every input again for every worker lost.
    assert splits < inputs if budget else splits
