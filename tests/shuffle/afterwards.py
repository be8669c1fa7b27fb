"""A simulated cluster after the barrier: until all wanted outputs are made, each checked as it is made."""

from __future__ import annotations

from dask_gpurt.shuffle.protocol.recovery import lost_outputs, reassign
from tests.shuffle.protocol.worlds import World


class Afterwards(World):
    """Goes on after the barrier: outputs are made, go, are wanted again, and workers are lost.

    Parameters
    ----------
    deaths
        After the barrier; before it there are few.
    """

    def __init__(
        self, seed: int, workers: int, inputs: int, parts: int, budget: int, deaths: int, drains: int = 0
    ) -> None:
        super().__init__(seed, workers, inputs, parts, budget, 0, min(1, drains))
        self.deaths, self.later = self.r.randint(0, 1), deaths
        self.drains_later = drains
        #: outputs that are to be made, and those that nobody wants for now
        self.wanted, self.spare = set(range(parts)), set[int]()
        #: output that was made -> who has the frame
        self.frames: dict[int, str] = {}
        #: outputs that were made since they were opened last
        self.made: set[int] = set()
        self.amended = self.splits_before = 0
        #: as the first of two shuffles that are joined: its outputs go when its barrier has passed, before any is made
        self.bind_late = self.to_bind and seed // 3 % 2 == 1
        self.to_bind &= not self.bind_late
        #: outputs that were opened again where they had been handed out
        self.void = 0
        self.asks = self.r.randint(0, 2)

    def open(self) -> None:
        if self.opened is None:
            super().open()
            return
        r = self.r
        for part, where in list(self.frames.items()):
            if where not in self.workers or r.random() < 0.02:
                # Its holder is lost, or what was made of it was.
                del self.frames[part]
                (self.wanted if r.random() < 0.7 else self.spare).add(part)
        for part in sorted((self.spare | self.wanted) - self.opened):
            if r.random() < 0.2:
                self.spare ^= {part}
                self.wanted ^= {part}
        there = self.keepers()
        # Some of what a drained worker was given it has begun.
        begun = frozenset(p for p in sorted(self.alive(self.wanted - self.made)) if self.drained and r.random() < 0.5)
        gone = lost_outputs(self.wanted, self.worker_for, there) - self.opened - begun
        gone |= lost_outputs(self.opened, self.worker_for, there) | frozenset(self.state.handing)
        again = frozenset(p for p in self.wanted & self.made if self.worker_for[p] in there) - self.opened
        gone |= again
        again |= self.alive(lost_outputs(gone, self.worker_for, there))
        self.state.void(again)
        self.void += len(again)
        self.made -= gone
        self.worker_for.update(reassign({part: self.worker_for[part] for part in gone}, there))
        self.opened |= gone
        self.scopes[self.epoch] = self.opened
        self.amended += 1

    def ask(self, part: int) -> None:
        """An output that was handed out is asked for again, and nobody was lost."""
        self.asks -= 1
        self.frames.pop(part, None)
        self.spare.discard(part)
        self.wanted.add(part)
        self.epoch += 1
        self.state.epoch = self.epoch
        self.open()
        self.phase, self.told = "amend", {}

    def again(self, keys: set[int]) -> bool:
        if self.opened is None:
            return super().again(keys)
        # Results of transfer tasks are not kept after the barrier: one that is not under way may run again.
        missing = set(range(self.inputs)) - keys - self.todo - set(self.running)
        self.todo |= missing
        return bool(missing)

    def complete(self) -> None:
        """One step towards the completion of what is open."""
        if self.phase is None and not self.todo and not self.running:
            _, keys = self.agreed({name: worker.vouched() for name, worker in self.workers.items()})
            if not self.again(keys) and self.flushed:
                self.phase, self.told = "complete", {}
        elif self.phase == "complete":
            left = [w for w in sorted(self.workers) if w not in self.told]
            if left:
                self.told[left[0]] = []
                self.workers[left[0]].counting.complete()
            else:
                self.phase, self.opened = None, frozenset()

    def make(self) -> None:
        assert self.opened is not None
        # As `rebalance` has it: not once anything was opened, or could have been.
        if self.bind_late and self.phase is None and not self.scopes and not self.made:
            self.bind_late = False
            self.bind()
        if self.state.handing and self.phase is None and self.flushed:
            self.state.handing.clear()
        if self.state.handing:
            return
        ready = [p for p in sorted(self.wanted - self.opened) if self.worker_for[p] in self.workers]
        if not ready:
            return
        part = self.r.choice(ready)
        owner = self.worker_for[part]
        assert self.workers[owner].counting.ready(part)
        assert part not in self.workers[owner].taken
        self.check_one(part)
        worker = self.workers[owner]
        worker.taken.add(part)
        worker.stored = {shard: tuple(p for p in parts if p != part) for shard, parts in worker.stored.items()}
        self.made.add(part)
        self.wanted.discard(part)
        self.frames[part] = owner if self.r.random() < 0.8 else self.r.choice(sorted(self.workers))

    def step(self) -> bool:
        """One random event; False when all outputs that are wanted were made."""
        if self.opened is None:
            if not super().step():
                self.opened, self.done = frozenset(), {}
                self.deaths, self.splits_before = self.later, self.splits
                self.drains = self.drains_later
            return True
        choice = self.r.random()
        if self.asks and choice < 0.01 and (some := sorted(self.made - self.opened)):
            self.ask(self.r.choice(some))
        elif choice < 0.05:
            self.make()
        elif choice < 0.3 and self.opened and self.phase in (None, "complete"):
            self.complete()
        else:
            super().step()
            self.done.clear()
        more = self.deaths and len(self.workers) > 1
        return bool(more or (self.asks and self.made) or self.opened or self.wanted)
