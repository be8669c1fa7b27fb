"""What one worker has split in one run, and what it retains of it to send it again; see `protocol.recovery`.

Every input is entered in a `SendLog` before it is sent (`ran`), and every amendment (`amend`, which returns what has to
be sent again). The log says which inputs the worker vouches for (`vouches`, `vouched`). What the logs of a worker
retain is bounded by its `RetainBudget`.

Invariants
- An input's rows are under the address of the worker that is to have them; `own` is what this worker has for itself.
- What is retained of an input is all of what was sent, or nothing; the same goes for own rows. An input of which rows
  are needed that were not retained is forgotten: it is split again.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

S = TypeVar("S")

#: share of the budget for own rows: they are needed only for outputs that are made twice
OWN_SHARE = 0.25


@dataclasses.dataclass
class _Input(Generic[S]):
    """An input that this worker has split."""

    key: Hashable
    attempt: int
    #: what went to other workers; None: not retained
    sent: list[tuple[str, S]] | None
    nbytes: int
    #: what this worker had for itself; None: not retained
    own: list[S] | None
    own_nbytes: int
    #: the other workers that got rows of it
    others: set[str]
    #: of them, those with rows that were this worker's own and are not retained
    unkept: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class RetainBudget:
    """Bytes that all runs of one worker may retain together."""

    limit_bytes: int
    used_bytes: int = 0
    #: of them, what workers had for themselves
    own_bytes: int = 0
    #: logs of runs whose outputs here were all made: they are the first to give way, the oldest first
    idle: dict[SendLog[Any], None] = dataclasses.field(default_factory=dict)


class SendLog(Generic[S]):
    """The inputs that one worker has split in one run, and what it retains of them. On the event loop.

    Parameters
    ----------
    budget
        Of what is retained. When it is short, idle runs give way first, then own rows of this run, then its oldest
        inputs.
    parted
        Divides a shard into (rows of some outputs, the rest); called only when outputs are void or bound late.
    """

    def __init__(
        self,
        budget: RetainBudget,
        parted: Callable[[S, Collection[int]], tuple[list[S], list[S]]] | None = None,
        epoch: int = 0,
        lost: Iterable[str] = (),
    ) -> None:
        self.budget = budget
        self._parted = parted
        self.epoch = epoch
        #: addresses; stays the same set
        self.lost = set(lost)
        self._inputs: dict[int, _Input[S]] = {}
        #: inputs of which shards are retained, and of which own rows are, the oldest first
        self._kept: dict[int, None] = {}
        self._own_kept: dict[int, None] = {}

    def ran(
        self,
        partition: int,
        key: Hashable,
        attempt: int,
        sent: list[tuple[str, S]],
        nbytes: int,
        own: Sequence[S] = (),
        own_nbytes: int = 0,
    ) -> None:
        """Enter an input that was split.

        `sent` are (address, shard) for other workers, `own` shards of this worker itself; each with its bytes. `key` is
        that of the task, `attempt` the epoch in which it was split.
        """
        self._forget(partition)
        entry = _Input(key, attempt, sent, nbytes, list(own), own_nbytes, {address for address, _ in sent})
        self._inputs[partition] = entry
        self._kept[partition] = self._own_kept[partition] = None
        self.budget.used_bytes += nbytes + own_nbytes
        self.budget.own_bytes += own_nbytes
        while self._own_kept and self.budget.own_bytes > OWN_SHARE * self.budget.limit_bytes:
            self._drop_own(next(iter(self._own_kept)))
        while self.budget.used_bytes > self.budget.limit_bytes:
            if idle := next((one for one in self.budget.idle if one is not self), None):
                idle.settle()
            elif self._own_kept:
                self._drop_own(next(iter(self._own_kept)))
            elif self._kept:
                self._drop(next(iter(self._kept)))
            else:
                break

    def vouches(self, partition: int, attempt: int) -> bool:
        """Whether this attempt counts, as far as this worker knows."""
        entry = self._inputs.get(partition)
        return entry is not None and entry.attempt == attempt

    def amend(
        self,
        epoch: int,
        lost: Iterable[str],
        void: Collection[int] = (),
        owners: Collection[str] = (),
        mine: bool = False,
    ) -> list[tuple[int, int, S]]:
        """Enter an amendment; returns (partition, attempt, shard) of what has to be sent again.

        That is what the lost workers had been sent, and the rows of void outputs. The same amendment a second time has
        nothing to send. Inputs whose rows were not retained are forgotten.

        Parameters
        ----------
        void
            Outputs all of whose rows are sent again.
        owners
            Addresses of the workers that had these rows.
        mine
            Whether this worker is one of them.
        """
        if epoch <= self.epoch:
            return []
        self.epoch = epoch
        self.lost |= set(lost)
        again: list[tuple[int, int, S]] = []
        for partition, entry in list(self._inputs.items()):
            needed = entry.others & {*self.lost, *owners}
            if not needed and not mine:
                continue
            if (needed and (entry.sent is None or entry.unkept & needed)) or (mine and entry.own is None):
                self._forget(partition)
                continue
            # What is left of it is charged in full.
            if needed and entry.sent is not None:
                rest: list[tuple[str, S]] = []
                for address, shard in entry.sent:
                    parts = ([shard], []) if address in self.lost else self._of(shard, void)
                    again += [(partition, entry.attempt, one) for one in parts[0]]
                    rest += [(address, one) for one in parts[1]]
                entry.sent = rest
                entry.others -= self.lost
            if mine and entry.own is not None:
                kept: list[S] = []
                for shard in entry.own:
                    out, stay = self._of(shard, void)
                    again += [(partition, entry.attempt, one) for one in out]
                    kept += stay
                entry.own = kept
        return again

    def _of(self, shard: S, parts: Collection[int]) -> tuple[list[S], list[S]]:
        return self._parted(shard, parts) if self._parted is not None and parts else ([], [shard])

    def bound(self, parts: Collection[int], source: str, target: str, own: bool) -> None:
        """Enter outputs that `source` hands over to `target`; `own`: this worker is the source."""
        for entry in self._inputs.values():
            if own:
                entry.others.add(target)
                if entry.own is None or entry.sent is None:
                    entry.unkept.add(target)
                    continue
                # Charged with what was sent from now on: how much of it moves is not known.
                self.budget.own_bytes -= entry.own_nbytes
                entry.nbytes, entry.own_nbytes = entry.nbytes + entry.own_nbytes, 0
                split = [self._of(shard, parts) for shard in entry.own]
                entry.sent += [(target, one) for moved, _ in split for one in moved]
                entry.own = [one for _, rest in split for one in rest]
            elif source in entry.others:
                entry.others.add(target)
                if entry.sent is not None:
                    entry.sent = [one for old in entry.sent for one in self._moved(*old, parts, source, target)]

    def _moved(
        self, address: str, shard: S, parts: Collection[int], source: str, target: str
    ) -> Iterable[tuple[str, S]]:
        if address != source:
            return [(address, shard)]
        mine, rest = self._of(shard, parts)
        return [*((address, one) for one in rest), *((target, one) for one in mine)]

    def rerouted(self, partition: int, address: str, shard: S, own: bool) -> None:
        """Enter where a shard that `amend` returned belongs now; `own`: to this worker."""
        entry = self._inputs[partition]
        if own:
            if entry.own is not None:
                entry.own.append(shard)
            return
        entry.others.add(address)
        if entry.sent is not None:
            entry.sent.append((address, shard))
        else:
            entry.unkept.add(address)

    def vouched(self) -> list[tuple[int, int, Hashable]]:
        """(partition, attempt, key of the task) of all inputs that count."""
        return [(partition, entry.attempt, entry.key) for partition, entry in self._inputs.items()]

    def idle(self, idle: bool) -> None:
        """Enter whether this worker has made all of its outputs."""
        if idle:
            self.budget.idle[self] = None
        else:
            self.budget.idle.pop(self, None)

    def settle(self) -> None:
        """Retain nothing of what was sent so far: the run is over, or memory is short."""
        for partition in list(self._own_kept):
            self._drop_own(partition)
        for partition in list(self._kept):
            self._drop(partition)
        self.idle(False)

    def _forget(self, partition: int) -> None:
        if partition in self._inputs:
            self._drop_own(partition)
            self._drop(partition)
            del self._inputs[partition]

    def _drop(self, partition: int) -> None:
        """Retain nothing of what was sent of an input."""
        entry = self._inputs[partition]
        self._kept.pop(partition, None)
        self.budget.used_bytes -= entry.nbytes
        entry.sent, entry.nbytes = None, 0

    def _drop_own(self, partition: int) -> None:
        entry = self._inputs[partition]
        self._own_kept.pop(partition, None)
        self.budget.used_bytes -= entry.own_nbytes
        self.budget.own_bytes -= entry.own_nbytes
        entry.own, entry.own_nbytes = None, 0
