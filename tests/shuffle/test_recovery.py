"""The pure part of recovery: ids, owners, the ledger; and a simulated cluster that loses workers and messages."""

from __future__ import annotations

import random

import pytest

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


class Worker:
    """One worker: splits inputs, sends shards (id, parts), stores what it gets."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world
        self.ledger: Ledger[tuple[int, ...]] = Ledger(Budget(world.budget))
        self.validity: Validity | None = None
        self.worker_for = dict(world.worker_for)
        self.ledger.epoch, self.ledger.lost = world.epoch, set(world.lost)
        self.settled = world.epoch == 0
        self.stored: dict[int, tuple[int, ...]] = {}

    def split(self, partition: int) -> tuple[int, int, dict[str, tuple[int, ...]]]:
        by_owner: dict[str, list[int]] = {}
        for part, owner in self.worker_for.items():
            by_owner.setdefault(owner, []).append(part)
        return partition, self.ledger.epoch, {o: tuple(sorted(p)) for o, p in by_owner.items()}

    def finish(self, job: tuple[int, int, dict[str, tuple[int, ...]]]) -> str:
        """The second half of a transfer task: "wait", "again" or "done"."""
        partition, attempt, shards = job
        if not self.settled:
            return "wait"
        if attempt != self.ledger.epoch:
            return "again"
        if self.validity is not None and partition in self.validity.attempts:
            return "done"
        others = [(o, p) for o, p in shards.items() if o != self.name]
        self.ledger.ran(partition, partition, attempt, others, sum(len(p) for _, p in others))
        for owner, parts in shards.items():
            self.send(owner, shard_id(partition, attempt, attempt), parts)
        return "done"

    def send(self, owner: str, shard: int, parts: tuple[int, ...]) -> None:
        if owner == self.name:
            self.stored.setdefault(shard, parts)
        else:
            self.world.network.append((self.name, owner, shard, parts))

    def amend(self) -> list[tuple[int, int, int]]:
        w = self.world
        if w.epoch > self.ledger.epoch:
            self.settled = False
            self.worker_for = dict(w.worker_for)
            counts: dict[tuple[int, str], int] = {}
            for partition, attempt, parts in self.ledger.amend(w.epoch, w.lost):
                by_owner: dict[str, list[int]] = {}
                for part in parts:
                    by_owner.setdefault(self.worker_for[part], []).append(part)
                for owner, some in by_owner.items():
                    k = counts.get((partition, owner), 0)
                    counts[partition, owner] = k + 1
                    self.send(owner, shard_id(partition, attempt, w.epoch) + k, tuple(some))
                    if owner != self.name:
                        self.ledger.rerouted(partition, [(owner, tuple(some))])
        return self.ledger.vouched()  # type: ignore[return-value]


class World:
    """Scheduler and network; every step is chosen at random."""

    def __init__(self, seed: int, workers: int, inputs: int, parts: int, budget: int, deaths: int) -> None:
        self.r = random.Random(seed)
        self.budget = budget
        self.epoch = 0
        self.lost: set[str] = set()
        self.worker_for = {p: f"w{p % workers}" for p in range(parts)}
        #: (sender, receiver, shard, parts): in no order
        self.network: list[tuple[str, str, int, tuple[int, ...]]] = []
        self.workers = {f"w{i}": Worker(f"w{i}", self) for i in range(workers)}
        self.todo = set(range(inputs))
        #: input -> (worker, job)
        self.running: dict[int, tuple[str, tuple[int, int, dict[str, tuple[int, ...]]]]] = {}
        #: input -> where its task's result is; "elsewhere" is a copy that outlives the worker
        self.done: dict[int, str] = {}
        self.inputs, self.parts, self.deaths = inputs, parts, deaths
        #: None, "amend" or "valid", and who was told
        self.phase: str | None = None
        self.told: dict[str, list[tuple[int, int, int]]] = {}
        self.splits = 0
        #: input -> attempts before this epoch do not count: its task's result was lost with a worker
        self.least: dict[int, int] = {}

    def kill(self) -> None:
        name = self.r.choice(sorted(self.workers))
        dead = self.workers.pop(name)
        self.deaths -= 1
        before = set(self.todo)
        # What it had not sent goes with it; of what it had, some arrives late.
        self.network = [m for m in self.network if m[1] != name and (m[0] != name or self.r.random() < 0.5)]
        for i, (worker, _) in list(self.running.items()):
            if worker == name:
                del self.running[i]
                self.todo.add(i)
        for i, where in list(self.done.items()):
            if where == name and self.r.random() < 0.7:  # else another worker had a copy of the result
                del self.done[i]
                self.todo.add(i)
        self.lost.add(name)
        self.epoch += 1
        self.least.update(dict.fromkeys(self.todo - before, self.epoch))
        self.worker_for.update(reassign(self.worker_for, sorted(self.workers)))
        self.phase, self.told = "amend", {}
        assert dead

    def amend(self) -> None:
        left = [w for w in sorted(self.workers) if w not in self.told]
        if left:
            name = self.r.choice(left)
            worker = self.workers[name]
            if self.phase == "amend":
                self.told[name] = worker.amend()
            else:
                worker.validity, worker.settled = self.validity, True
                self.told[name] = []
            return
        if self.phase == "valid":
            self.phase = None
            return
        attempts, keys = agreed([v for vouched in self.told.values() for v in vouched], self.least)
        self.validity = Validity(self.epoch, attempts)
        for i in undone(self.done, keys):
            del self.done[i]
            self.todo.add(i)
        self.phase, self.told = "valid", {}

    def step(self) -> bool:
        """One random event; False when the barrier has passed."""
        r = self.r
        choice = r.random()
        if self.deaths and len(self.workers) > 1 and choice < 0.02:
            self.kill()
        elif self.phase and choice < 0.2:
            self.amend()
        elif self.todo and choice < 0.5:
            i = r.choice(sorted(self.todo))
            name = r.choice(sorted(self.workers))
            self.todo.discard(i)
            self.running[i] = (name, self.workers[name].split(i))
            self.splits += 1
        elif self.running and choice < 0.75:
            i = r.choice(sorted(self.running))
            name, job = self.running[i]
            how = self.workers[name].finish(job)
            if how != "wait":
                del self.running[i]
                if how == "done":
                    self.done[i] = name
                else:
                    self.todo.add(i)
        elif self.network:
            at = r.randrange(len(self.network))
            _, receiver, shard, parts = self.network[at]
            there = self.workers.get(receiver)
            if there is None or r.random() < 0.8:  # else it comes once more
                self.network.pop(at)
            if there is not None:
                there.stored.setdefault(shard, parts)
        flushed = not any(m[0] in self.workers for m in self.network)
        return not (len(self.done) == self.inputs and flushed and self.phase is None)

    def check(self) -> None:
        for part, owner in self.worker_for.items():
            worker = self.workers[owner]
            v = worker.validity
            got = [
                origin(shard)[0]
                for shard, parts in worker.stored.items()
                if part in parts and (v is None or v.valid(shard))
            ]
            assert sorted(got) == list(range(self.inputs)), (part, owner, sorted(got))


@pytest.mark.parametrize("budget", [0, 40, 10**9])
def test_every_output_has_every_input_once_whoever_is_lost(budget):
    lost = saved = 0
    for seed in range(300):
        world = World(seed, workers=4, inputs=12, parts=9, budget=budget, deaths=seed % 4)
        for _ in range(100_000):
            if not world.step():
                break
        else:
            raise AssertionError(f"seed {seed}: the barrier was never reached")
        world.check()
        lost += len(world.lost)
        saved += len(world.lost) * world.inputs - (world.splits - world.inputs)
    assert lost > 100
    # A restart splits every input again for every worker lost.
    assert saved > 0 or budget == 0
