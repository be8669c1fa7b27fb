"""A simulated cluster that loses workers and messages while it shuffles; every step is chosen at random.

Workers may also be drained: they live, make what they have begun, and own nothing more.

Once all inputs are in place some outputs may be bound late, that is, go to another worker, whose old owner then hands
over their rows one by one.

`World` ends at the barrier; `afterwards` goes on. The
workers' and the scheduler's decisions are those of `recovery`; what is simulated is who acts when.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from dask_gpurt.shuffle.protocol.recovery import (
    CUTS,
    Counting,
    State,
    Validity,
    agreed,
    origin,
    reassign,
    shard_id,
    too_narrow,
    undone,
)
from dask_gpurt.shuffle.worker.send_log import RetainBudget, SendLog

if TYPE_CHECKING:
    from collections.abc import Collection


def parted(parts: tuple[int, ...], some: Collection[int]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    mine, rest = tuple(p for p in parts if p in some), tuple(p for p in parts if p not in some)
    return [mine] * bool(mine), [rest] * bool(rest)


class Worker:
    """One worker: splits inputs, sends shards (id, parts), stores what it gets."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world
        self.ledger: SendLog[tuple[int, ...]] = SendLog(RetainBudget(world.budget), parted)
        self.counting = Counting(world.opened, world.validity, dict(world.state.bound))
        #: (epoch, output, new owner, its place among the moves) that this worker has to hand over
        self.giving: list[tuple[int, int, str, int]] = []
        self.worker_for = dict(world.worker_for)
        self.ledger.epoch, self.ledger.lost = world.epoch, set(world.lost)
        self.settled = world.epoch == 0 or (world.validity is not None and world.validity.epoch == world.epoch)
        self.stored: dict[int, tuple[int, ...]] = {}
        #: outputs that it has handed out
        self.taken: set[int] = set()

    def split(self, partition: int) -> tuple[int, int, dict[str, tuple[int, ...]]]:
        by_owner: dict[str, list[int]] = {}
        for part, owner in self.worker_for.items():
            if self.counting.opened is None or part in self.counting.opened:
                by_owner.setdefault(owner, []).append(part)
        return partition, self.ledger.epoch, {o: tuple(sorted(p)) for o, p in by_owner.items()}

    def finish(self, job: tuple[int, int, dict[str, tuple[int, ...]]]) -> str:
        """The second half of a transfer task: "wait", "again" or "done"."""
        partition, attempt, shards = job
        if not self.settled:
            return "wait"
        if attempt != self.ledger.epoch:
            return "again"
        validity = self.counting.validity
        if validity is not None and partition in validity.attempts:
            return "done"
        others = [(o, p) for o, p in shards.items() if o != self.name]
        own = [p for o, p in shards.items() if o == self.name]
        self.ledger.ran(partition, partition, attempt, others, sum(len(p) for _, p in others), own, sum(map(len, own)))
        for owner, parts in shards.items():
            self.send(owner, shard_id(partition, attempt, attempt), parts)
        return "done"

    def send(self, owner: str, shard: int, parts: tuple[int, ...]) -> None:
        if owner == self.name:
            self.stored.setdefault(shard, parts)
        else:
            self.world.network.append((self.name, owner, shard, parts))

    def vouched(self) -> list[tuple[int, int, int]]:
        return self.ledger.vouched()  # type: ignore[return-value]

    def amend(self) -> list[tuple[int, int, int]]:
        w = self.world
        if w.epoch > self.ledger.epoch:
            self.settled = False
            self.counting.amend(w.opened, [part for part, owner in self.worker_for.items() if owner == self.name])
            old, self.counting.bound = self.counting.bound, dict(w.state.bound)
            void = {p for p, epoch in w.state.bound.items() if epoch > old.get(p, 0)}
            for slot, (part, source) in enumerate(w.state.handing.items()):
                if part in void:
                    void.discard(part)
                    self.ledger.bound({part}, source, w.worker_for[part], source == self.name)
                    if source == self.name:
                        self.giving.append((w.state.bound[part], part, w.worker_for[part], slot))
            owners = {self.worker_for[part] for part in void}
            self.taken -= void
            self.worker_for = dict(w.worker_for)
            counts: dict[tuple[int, str], int] = {}
            for partition, attempt, parts in self.ledger.amend(w.epoch, w.lost, void, owners, self.name in owners):
                by_owner: dict[str, list[int]] = {}
                for part in parts:
                    by_owner.setdefault(self.worker_for[part], []).append(part)
                for owner, some in by_owner.items():
                    if owner not in w.lost:
                        k = counts.get((partition, owner), 0)
                        counts[partition, owner] = k + 1
                        self.send(owner, shard_id(partition, attempt, w.epoch) + k, tuple(some))
                    self.ledger.rerouted(partition, owner, tuple(some), owner == self.name)
        return self.vouched()

    def give(self) -> None:
        """Hand over one output."""
        epoch, part, owner, slot = self.giving.pop(self.world.r.randrange(len(self.giving)))
        if self.counting.bound[part] != epoch:
            return  # void
        mine = sorted(shard for shard, parts in self.stored.items() if part in parts)
        counts: dict[tuple[int, int], int] = {}
        for shard in mine:
            self.stored[shard] = tuple(p for p in self.stored[shard] if p != part)
            k = counts[origin(shard)] = counts.get(origin(shard), CUTS // 2 + slot * 1000 - 1) + 1
            self.send(owner, shard_id(*origin(shard), epoch) + k, (part,))


class World:
    """Scheduler and network; every step is chosen at random."""

    def __init__(
        self, seed: int, workers: int, inputs: int, parts: int, budget: int, deaths: int, drains: int = 0
    ) -> None:
        self.r = random.Random(seed)
        #: workers that are yet to be drained, and those that were
        self.drains, self.drained = drains, set[str]()
        self.budget = budget
        #: what was bound late; `epoch` and the rest are the world's own
        self.state = State()
        self.validity: Validity | None = None
        self.opened: frozenset[int] | None = None
        self.scopes: dict[int, frozenset[int]] = {}
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
        #: outputs are to be bound late when all inputs are in place
        self.to_bind = seed % 3 == 1
        self.bound = 0

    def bind(self) -> None:
        """Some outputs go to another worker."""
        self.to_bind = False
        some = self.r.sample(sorted(self.worker_for), self.r.randint(1, min(4, len(self.worker_for))))
        moves = {p: self.r.choice(sorted(self.keepers())) for p in some}
        # As `rebalance` has it: an owner may have rows of before that do not count.
        moves = {p: to for p, to in moves.items() if to != self.worker_for[p] and p not in self.state.bound}
        if not moves:
            return
        self.bound += 1
        self.epoch += 1
        self.state.bound.update(dict.fromkeys(moves, self.epoch))
        self.state.handing = {p: self.worker_for[p] for p in moves}
        self.worker_for.update(moves)
        self.phase, self.told = "amend", {}

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
        self.state.epoch = self.epoch
        self.open()
        self.phase, self.told = "amend", {}
        assert dead

    def drain(self) -> None:
        """A worker lives on, but owns no outputs that it has not begun."""
        self.drains -= 1
        name = self.r.choice(sorted(self.workers))
        self.drained.add(name)
        if self.r.random() < 0.2:
            self.drained.discard(self.r.choice(sorted(self.drained)))  # one comes back
        self.epoch += 1
        self.state.epoch = self.epoch
        self.open()
        self.phase, self.told = "amend", {}

    def keepers(self) -> set[str]:
        """Workers that keep their outputs."""
        return set(self.workers) - self.drained or set(self.workers)

    def alive(self, parts: Collection[int]) -> frozenset[int]:
        """Of these outputs, those whose owner was not lost."""
        return frozenset(part for part in parts if self.worker_for[part] in self.workers)

    def open(self) -> None:
        """Give the outputs of who is lost, or drained, to others."""
        moved = reassign(self.worker_for, self.keepers())
        self.state.void(self.alive(moved))
        self.worker_for.update(moved)

    def amend(self) -> None:
        left = [w for w in sorted(self.workers) if w not in self.told]
        if left:
            name = self.r.choice(left)
            worker = self.workers[name]
            if self.phase == "amend":
                self.told[name] = worker.amend()
            else:
                worker.counting.validity, worker.settled = self.validity, True
                self.told[name] = []
            return
        if self.phase == "valid":
            self.phase = None
            return
        attempts, keys = self.agreed(self.told)
        self.validity = Validity(self.epoch, attempts)
        self.again(keys)
        self.phase, self.told = "valid", {}

    def again(self, keys: set[int]) -> bool:
        """Whether there are inputs to be split again."""
        missing = undone(self.done, keys)
        for i in missing:
            del self.done[i]
            self.todo.add(i)
        return bool(missing)

    def agreed(self, told: dict[str, list[tuple[int, int, int]]]) -> tuple[dict[int, int], set[int]]:
        narrow = too_narrow(self.scopes, self.opened)
        return agreed([v for vouched in told.values() for v in vouched], self.least, narrow)  # type: ignore[return-value]

    def step(self) -> bool:
        """One random event; False when the barrier has passed."""
        r = self.r
        choice = r.random()
        if r.random() < 0.003:  # it is at its memory limit
            self.workers[r.choice(sorted(self.workers))].ledger.settle()
        if self.deaths and len(self.workers) > 1 and choice < 0.02:
            self.kill()
        elif self.drains and r.random() < 0.02:
            self.drain()
        elif self.phase in ("amend", "valid") and choice < 0.2:
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
        elif r.random() < 0.1 and (givers := [n for n, w in sorted(self.workers.items()) if w.giving]):
            self.workers[r.choice(givers)].give()
        elif self.network:
            at = r.randrange(len(self.network))
            _, receiver, shard, parts = self.network[at]
            there = self.workers.get(receiver)
            message = self.network[at]
            if there is None or r.random() < 0.8:  # else it comes once more
                self.network.pop(at)
                if r.random() < 0.1:  # a copy that nobody waits for
                    self.network.append(("", *message[1:]))
            if there is not None:
                there.stored.setdefault(shard, parts)
        if not (len(self.done) == self.inputs and self.flushed and self.phase is None):
            return True
        if self.to_bind:
            self.bind()
            return True
        self.state.handing.clear()
        return False

    @property
    def flushed(self) -> bool:
        return not any(m[0] in self.workers for m in self.network) and not any(w.giving for w in self.workers.values())

    def check(self) -> None:
        for part in self.worker_for:
            self.check_one(part)

    def check_one(self, part: int) -> None:
        """The owner has every input's rows for an output once."""
        owner = self.worker_for[part]
        worker = self.workers[owner]
        v = worker.counting.of(part)
        got = [
            origin(shard)[0]
            for shard, parts in worker.stored.items()
            if part in parts and (v is None or v.valid(shard))
        ]
        assert sorted(got) == list(range(self.inputs)), (part, owner, sorted(got))
