"""What a lost worker costs: its own shards and outputs. The pure part, for the workers and for the scheduler.

Theory of operation. A run that has not passed its barrier survives the loss of a worker; it is *amended* and goes on
under the same run id. Each amendment has a number, its *epoch*, from 1. The scheduler gives the lost worker's outputs
to others (`reassign`) and tells the survivors (`Ledger.amend`), which

- send again what they had sent to the lost worker, to the new owners, from the shards they retained;
- forget inputs of which they retained too little (the budget was short); these are split again.

They answer with the inputs they still vouch for. Every other input that is counted as done was done by the lost worker
and is split again (`undone`). So survivors' inputs are not read again, and what they sent each other stays.

An input's rows come from one *attempt* to split it, its epoch. Ids of shards say which (`shard_id`): those of a dead
attempt are void for everybody (`Validity`), so it does not matter how much of it had arrived, nor whether a second
attempt splits its input in the same way. An attempt by a survivor counts, whatever it was sent again.

Invariants
- An attempt is entered in its worker's ledger before the first of its shards is sent, and is checked again after the
  last one was handed over: a task that ends well is vouched for, or was forgotten by an amendment that the scheduler
  has not looked at the task's end before.
- The barrier passes only when all workers have flushed in one epoch, no amendment is under way and, if there were
  any, somebody vouches for every input.

Rejected: a new run that adopts the old one's shards (two runs of one shuffle live side by side, and every task under
way must be told apart), and ids by content instead of attempts (an input need not be split at the same places twice).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

S = TypeVar("S")

#: amendments of one run; then it is restarted
EPOCHS = 255
#: ids of shards of one input for one worker, of one attempt and epoch
CUTS = 1 << 16


def shard_id(partition: int, attempt: int, epoch: int) -> int:
    """Least id of the shards of an input for one worker; the next `CUTS` - 1 are free, too.

    Parameters
    ----------
    attempt
        Epoch in which the input was split.
    epoch
        Epoch in which the shard got its destination.
    """
    return ((partition << 8 | attempt) << 8 | epoch) << 16


def origin(shard: int) -> tuple[int, int]:
    """(input partition, attempt) of a shard's id."""
    return shard >> 32, shard >> 24 & 255


def reassign(
    worker_for: Mapping[int, str], alive: Sequence[str], partner: Mapping[int, str] | None = None
) -> dict[int, str]:
    """New owners of the outputs whose owner is gone: spread over all that are there.

    Parameters
    ----------
    alive
        Addresses of the workers that may own outputs, at least one.
    partner
        Owners in a shuffle with the same outputs (the other side of a join); they win.
    """
    there = set(alive)
    partner = partner or {}
    lost = sorted(part for part, owner in worker_for.items() if owner not in there)
    order = sorted(alive)
    return {part: partner[part] if partner.get(part) in there else order[i % len(order)] for i, part in enumerate(lost)}


def undone(in_memory: Iterable[Hashable], vouched: Collection[Hashable]) -> set[Hashable]:
    """Transfer tasks that count as done and for whose input nobody vouches."""
    return {key for key in in_memory if key not in vouched}


def agreed(
    vouched: Iterable[tuple[int, int, Hashable]], least: Mapping[Hashable, int]
) -> tuple[dict[int, int], set[Hashable]]:
    """(input partition -> the attempt that counts, keys of their tasks) from what all survivors vouch for.

    Parameters
    ----------
    least
        Key of a task whose result was lost with a worker -> the epoch of that loss. A survivor that had not heard of it
        may have split the input again as if nothing had happened, at the epoch of an attempt whose shards went on to
        other owners since; such an attempt does not count.
    """
    attempts: dict[int, int] = {}
    keys: set[Hashable] = set()
    for partition, attempt, key in vouched:
        if attempt >= least.get(key, 0):
            attempts[partition] = max(attempt, attempts.get(partition, 0))
            keys.add(key)
    return attempts, keys


@dataclasses.dataclass(frozen=True)
class Validity:
    """Which attempts count after an amendment."""

    #: attempts of this epoch and later ones count
    epoch: int
    #: input partition -> the older attempt that counts
    attempts: Mapping[int, int]

    def valid(self, shard: int) -> bool:
        """Whether rows of a shard with this id count."""
        partition, attempt = origin(shard)
        return attempt >= self.epoch or self.attempts.get(partition) == attempt


@dataclasses.dataclass
class _Input(Generic[S]):
    """An input that this worker has split."""

    key: Hashable
    attempt: int
    #: what went to other workers; None: not retained
    sent: list[tuple[str, S]] | None
    nbytes: int
    #: the other workers that got rows of it
    others: set[str]


@dataclasses.dataclass
class Budget:
    """Bytes that all runs of one worker may retain together."""

    limit_bytes: int
    used_bytes: int = 0


class Ledger(Generic[S]):
    """The inputs that one worker has split in one run, and what it retains of them.

    Parameters
    ----------
    budget
        Of what is retained; where it is short, the oldest inputs of this run go first.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.epoch = 0
        #: addresses
        self.lost: set[str] = set()
        self._inputs: dict[int, _Input[S]] = {}
        #: inputs of which shards are retained, the oldest first
        self._kept: dict[int, None] = {}

    def ran(self, partition: int, key: Hashable, attempt: int, sent: list[tuple[str, S]], nbytes: int) -> None:
        """An input was split; `sent` are the shards for others, of `nbytes` in all."""
        self._drop(self._inputs.pop(partition, None))
        self._kept.pop(partition, None)
        entry = _Input(key, attempt, sent, nbytes, {address for address, _ in sent})
        self._inputs[partition] = entry
        self.budget.used_bytes += nbytes
        self._kept[partition] = None
        while self._kept and self.budget.used_bytes > self.budget.limit_bytes:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._drop(self._inputs.get(oldest))

    def vouches(self, partition: int, attempt: int) -> bool:
        """Whether this attempt counts, as far as this worker knows."""
        entry = self._inputs.get(partition)
        return entry is not None and entry.attempt == attempt

    def amend(self, epoch: int, lost: Iterable[str]) -> list[tuple[int, int, S]]:
        """Enter an amendment; returns (partition, attempt, shard) of what the lost workers had been sent.

        Told twice, the second time has nothing to send. Inputs whose shards for a lost worker were not retained are
        forgotten.
        """
        if epoch <= self.epoch:
            return []
        self.epoch = epoch
        self.lost |= set(lost)
        again: list[tuple[int, int, S]] = []
        for partition, entry in list(self._inputs.items()):
            if not entry.others & self.lost:
                continue
            if entry.sent is None:
                del self._inputs[partition]
                continue
            # What is left of it is charged in full.
            again += [(partition, entry.attempt, shard) for address, shard in entry.sent if address in self.lost]
            entry.sent = [(address, shard) for address, shard in entry.sent if address not in self.lost]
            entry.others -= self.lost
        return again

    def rerouted(self, partition: int, sent: list[tuple[str, S]]) -> None:
        """Where shards that `amend` gave went now; to this worker itself is not told."""
        entry = self._inputs[partition]
        entry.others |= {address for address, _ in sent}
        if entry.sent is not None:
            entry.sent += sent

    def vouched(self) -> list[tuple[int, int, Hashable]]:
        """(partition, attempt, key of the task) of all inputs that count."""
        return [(partition, entry.attempt, entry.key) for partition, entry in self._inputs.items()]

    def settle(self) -> None:
        """The run is past its barrier: nothing is sent again any more."""
        for entry in self._inputs.values():
            self._drop(entry)

    def _drop(self, entry: _Input[S] | None) -> None:
        if entry is not None and entry.sent is not None:
            self.budget.used_bytes -= entry.nbytes
            entry.sent = None
            entry.nbytes = 0


@dataclasses.dataclass
class State:
    """The amendments of one run, as the scheduler keeps them; goes to every worker that joins the run."""

    epoch: int = 0
    #: addresses of workers that were lost
    lost: list[str] = dataclasses.field(default_factory=list)
    #: None: not amended yet
    validity: Validity | None = None
