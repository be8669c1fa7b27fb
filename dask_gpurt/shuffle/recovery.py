"""What a lost worker costs: its own shards and outputs. The pure part, for the workers and for the scheduler.

Theory of operation. A run survives the loss of a worker; it is *amended* and goes on under the same run id. Each
amendment has a number, its *epoch*, from 1. The scheduler gives the lost worker's outputs to others (`reassign`) and
tells the survivors (`Ledger.amend`), which

- send again what they had sent to the lost worker, to the new owners, from the shards they retained;
- forget inputs of which they retained too little (the budget was short); these are split again.

They answer with the inputs they still vouch for. Every other input that is counted as done was done by the lost worker
and is split again (`undone`). So survivors' inputs are not read again, and what they sent each other stays.

An input's rows come from one *attempt* to split it, its epoch. Ids of shards say which (`shard_id`): those of a dead
attempt are void for everybody (`Validity`), so it does not matter how much of it had arrived, nor whether a second
attempt splits its input in the same way. An attempt by a survivor counts, whatever it was sent again.

After the barrier survivors have begun to make their outputs, and theirs are complete. Then an amendment *opens* only
the outputs that are still wanted and whose owner is gone (`lost_outputs`); what an earlier amendment opened and did not
complete stays open. Inputs that are split again are split for the open outputs only: an attempt's *scope* is what was
open in its epoch. So an attempt counts for an amendment unless it is `too_narrow`, its scope less than what is open;
and which attempts count for an output is what was agreed in the epoch that completed it (`Counting`). The open outputs'
tasks wait until every input is vouched for and all have flushed.

A large output may change hands without a loss: it is *bound late*, to a less loaded worker (`binding`). That is an
epoch, too. Its old owner hands over the rows it has, under the ids of that epoch, all others only note whose they are;
ledgers say so that what they retain is sent again should the new owner be lost. What an owner has given away does not
count for it any more: of such an output only rows count that got their destination in the epoch of the move or later
(`Validity.since`). When any worker is lost before all has been handed over, nobody knows which rows had arrived. Then
the moves under way are void (`State.void`): the outputs stay where they were to go, as long as that worker lives, and
all of their rows are sent again in the new epoch by those who split the inputs. Rows that the old owner had split
itself are not retained anywhere; their inputs are split again then.

Invariants
- An attempt is entered in its worker's ledger before the first of its shards is sent, and is checked again after the
  last one was handed over: a task that ends well is vouched for, or was forgotten by an amendment that the scheduler
  has not looked at the task's end before.
- The barrier passes only when all workers have flushed in one epoch, no amendment is under way and, if there were
  any, somebody vouches for every input. So do outputs that were opened after it.
- A ledger has an input's rows under the address of the worker that is to have them, but for those that nobody retained.
- Rows for outputs of a lost worker that nobody wants stay retained under its address: they may be wanted later.

Rejected: a new run that adopts the old one's shards (two runs of one shuffle live side by side, and every task under
way must be told apart), and ids by content instead of attempts (an input need not be split at the same places twice).
Rejected, too: letting an attempt count for a part of what is open. It saves splitting some inputs a second time when
workers are lost in quick succession after the barrier, and costs an agreement for every output instead of one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

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


def directed(shard: int) -> int:
    """The epoch in which a shard got its destination, from its id."""
    return shard >> 16 & 255


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


def lost_outputs(wanted: Iterable[int], worker_for: Mapping[int, str], there: Collection[str]) -> frozenset[int]:
    """Outputs that are wanted and whose owner is gone."""
    return frozenset(part for part in wanted if worker_for[part] not in there)


def too_narrow(scopes: Mapping[int, frozenset[int]], opened: frozenset[int] | None) -> frozenset[int]:
    """Epochs whose attempts can not count for what is open, as they were split for less.

    Parameters
    ----------
    scopes
        Epoch -> outputs that inputs were split for; others were split for all outputs.
    opened
        None: the barrier has not passed.
    """
    return frozenset(epoch for epoch, scope in scopes.items() if opened is not None and not scope >= opened)


def undone(in_memory: Iterable[Hashable], vouched: Collection[Hashable]) -> set[Hashable]:
    """Transfer tasks that count as done and for whose input nobody vouches."""
    return {key for key in in_memory if key not in vouched}


def agreed(
    vouched: Iterable[tuple[int, int, Hashable]],
    least: Mapping[Hashable, int],
    narrow: Collection[int] = (),
) -> tuple[dict[int, int], set[Hashable]]:
    """(input partition -> the attempt that counts, keys of their tasks) from what all survivors vouch for.

    Parameters
    ----------
    least
        Key of a task whose result was lost with a worker -> the epoch of that loss. A survivor that had not heard of it
        may have split the input again as if nothing had happened, at the epoch of an attempt whose shards went on to
        other owners since; such an attempt does not count.
    narrow
        Attempts that do not count, see `too_narrow`.
    """
    attempts: dict[int, int] = {}
    keys: set[Hashable] = set()
    for partition, attempt, key in vouched:
        if attempt >= least.get(key, 0) and attempt not in narrow:
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
    #: rows count that got their destination in this epoch or later
    since: int = 0

    def valid(self, shard: int) -> bool:
        """Whether rows of a shard with this id count."""
        partition, attempt = origin(shard)
        return directed(shard) >= self.since and (attempt >= self.epoch or self.attempts.get(partition) == attempt)


class Counting:
    """Which attempts count for which output, as one worker knows it.

    Parameters
    ----------
    opened
        As in `State`.
    validity
        What counts for the outputs that are not complete.
    bound
        As in `State`.
    """

    def __init__(
        self, opened: frozenset[int] | None, validity: Validity | None, bound: Mapping[int, int] | None = None
    ) -> None:
        self.opened = opened
        self.validity = validity
        self.bound: Mapping[int, int] = bound or {}
        #: output of this worker that was complete before the latest amendment -> what counts for it
        self._complete: dict[int, Validity | None] = {}

    def amend(self, opened: frozenset[int] | None, mine: Iterable[int]) -> None:
        """An amendment opens outputs; `mine` are this worker's of before it."""
        if opened is not None:
            for part in mine:
                if part not in opened:
                    self._complete.setdefault(part, self.validity)
            for part in opened:
                self._complete.pop(part, None)
        self.opened = opened

    def complete(self) -> None:
        """What was open is complete."""
        self.opened = frozenset()

    def ready(self, part: int) -> bool:
        """Whether an output may be made, once the barrier has passed."""
        return not self.opened or part not in self.opened

    def of(self, part: int) -> Validity | None:
        """What counts for an output; None: everything."""
        validity = self._complete.get(part, self.validity)
        if part not in self.bound:
            return validity
        return dataclasses.replace(validity or Validity(0, {}), since=self.bound[part])


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
    #: of them, those with rows that were this worker's own and are not retained
    unkept: set[str] = dataclasses.field(default_factory=set)


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
    parted
        (rows of some outputs, the rest) of a shard; only called when outputs are bound late.
    """

    def __init__(
        self, budget: Budget, parted: Callable[[S, Collection[int]], tuple[list[S], list[S]]] | None = None
    ) -> None:
        self.budget = budget
        self._parted = parted
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

    def amend(self, epoch: int, lost: Iterable[str], void: Collection[int] = ()) -> list[tuple[int, int, S]]:
        """Enter an amendment; returns (partition, attempt, shard) of what the lost workers had been sent.

        Told twice, the second time has nothing to send. Inputs whose shards for a lost worker were not retained are
        forgotten.

        Parameters
        ----------
        void
            Outputs whose rows are sent again, whoever had them.
        """
        if epoch <= self.epoch:
            return []
        self.epoch = epoch
        self.lost |= set(lost)
        again: list[tuple[int, int, S]] = []
        for partition, entry in list(self._inputs.items()):
            if not entry.others or not (void or entry.others & self.lost):
                continue
            if entry.sent is None or (entry.unkept if void else entry.unkept & self.lost):
                self._drop(entry)
                self._kept.pop(partition, None)
                del self._inputs[partition]
                continue
            # What is left of it is charged in full.
            rest: list[tuple[str, S]] = []
            for address, shard in entry.sent:
                parts = ([shard], []) if address in self.lost else self._of(shard, void)
                again += [(partition, entry.attempt, one) for one in parts[0]]
                rest += [(address, one) for one in parts[1]]
            entry.sent = rest
            entry.others -= self.lost
        return again

    def _of(self, shard: S, parts: Collection[int]) -> tuple[list[S], list[S]]:
        return self._parted(shard, parts) if self._parted is not None and parts else ([], [shard])

    def bound(self, parts: Collection[int], source: str, target: str, own: bool) -> None:
        """Outputs go from one worker to another, which hands over what it has.

        Parameters
        ----------
        own
            This worker is the source. Of what it had for itself nothing is retained.
        """
        for entry in self._inputs.values():
            if own:
                entry.others.add(target)
                entry.unkept.add(target)
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

    def rerouted(self, partition: int, sent: list[tuple[str, S]]) -> None:
        """Where shards that `amend` gave belong now; to this worker itself is not told."""
        entry = self._inputs[partition]
        entry.others |= {address for address, _ in sent}
        if entry.sent is not None:
            entry.sent += sent

    def vouched(self) -> list[tuple[int, int, Hashable]]:
        """(partition, attempt, key of the task) of all inputs that count."""
        return [(partition, entry.attempt, entry.key) for partition, entry in self._inputs.items()]

    def settle(self) -> None:
        """Retain nothing of what was sent so far: the run is over, or memory is short."""
        for entry in self._inputs.values():
            self._drop(entry)
        self._kept.clear()

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
    #: outputs that are opened again and not yet complete; None: the barrier has not passed
    opened: frozenset[int] | None = None
    #: epoch after the barrier -> the outputs that inputs are split for in it
    scopes: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    #: output that was bound late -> the epoch of that, or of its end: older rows do not count for it
    bound: dict[int, int] = dataclasses.field(default_factory=dict)
    #: output that is being handed over -> its old owner; in the order of the moves
    handing: dict[int, str] = dataclasses.field(default_factory=dict)
    #: output that was bound late -> (old owner, new owner), for people
    moves: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def void(self) -> frozenset[int]:
        """What was being handed over when a worker was lost, whose rows have to be sent again in this epoch."""
        parts = frozenset(self.handing)
        self.bound.update(dict.fromkeys(parts, self.epoch))
        self.handing.clear()
        for part in parts:
            self.moves.pop(part, None)
        return parts
