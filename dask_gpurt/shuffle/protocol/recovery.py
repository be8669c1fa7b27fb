"""What a lost worker costs: its own shards and outputs. The pure part, for the workers and for the scheduler.

Theory of operation. A run survives the loss of a worker; it is *amended* and goes on under the same run id. Each
amendment has a number, its *epoch*, from 1. The scheduler gives the lost worker's outputs to others (`reassign`) and
tells the survivors (`send_log.SendLog.amend`), which

- send again what they had sent to the lost worker, to the new owners, from the shards they retained;
- forget inputs of which they retained too little (the budget was short); these are split again.

They answer with the inputs they still vouch for. Every other input that is counted as done was done by the lost worker
and is split again (`undone`). So survivors' inputs are not read again, and what they sent each other stays.

An input's rows come from one *attempt* to split it, its epoch. Ids of shards say which (`shard_id`): those of a dead
attempt are void for everybody (`Validity`), so it does not matter how much of it had arrived, nor whether a second
attempt splits its input in the same way. An attempt by a survivor counts, whatever it was sent again.

After the barrier survivors have begun to make their outputs, and theirs are complete. Then an amendment *opens* only
the outputs that are still wanted and whose owner is gone (`lost_outputs`); what an earlier amendment opened and did not
complete stays open. An output that its living owner has handed out, and that is wanted again because what was made of
it is gone, is opened where it is, and *void*: rows that were sent for it before count no more, and all of them are sent
again, the owner's own included. Inputs that are split again are split for the open outputs only: an attempt's *scope*
is what was open in its epoch. So an attempt counts for an amendment unless it is `too_narrow`, its scope less than what
is open; and which attempts count for an output is what was agreed in the epoch that completed it (`Counting`). The open
outputs' tasks wait until every input is vouched for and all have flushed.

A large output may change hands without a loss: it is *bound late*, to a less loaded worker (`rebalance_plan`). That is
an epoch, too. Its old owner hands over the rows it has, under the ids of that epoch, all others only note whose they
are; ledgers say so that what they retain is sent again should the new owner be lost. What an owner has given away does
not count for it any more: of such an output only rows count that got their destination in the epoch of the move or
later (`Validity.since`). When any worker is lost before all has been handed over, it is not known which rows had
arrived. Then the moves under way are void (`State.void`): the outputs stay where they were to go, as long as that
worker lives, and all of their rows are sent again in the new epoch by those who split the inputs.

Invariants
- An attempt is entered in its worker's ledger before the first of its shards is sent, and is checked again after the
  last one was handed over: a task that ends well is vouched for, or was forgotten by an amendment that the scheduler
  has not looked at the task's end before.
- The barrier passes only when all workers have flushed in one epoch, no amendment is under way and, if there were
  any, somebody vouches for every input. So do outputs that were opened after it.
- A ledger has an input's rows under the address of the worker that is to have them, but for those that were not
  retained. The rows that a worker has for itself are retained, too, and are the first to go when the budget is short:
  they are needed for void outputs only.
- Rows for outputs of a lost worker that are not wanted stay retained under its address: they may be wanted later.

A worker that is drained is not lost: it answers, vouches for what it has split, and may even make outputs that it has
begun. Its other outputs get new owners in an epoch in which they are void, as rows that it was sent would have to be
sent again anyway, and its store may be about to go.

Rejected: a new run that adopts the old one's shards (two runs of one shuffle live side by side, and every task under
way must be kept apart), and ids by content instead of attempts (an input need not be split at the same places twice).
Rejected, too: letting an attempt count for a part of what is open. It saves splitting some inputs a second time when
workers are lost in quick succession after the barrier, and costs an agreement for every output instead of one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping

#: amendments of one run; then it is restarted
EPOCHS = 255
#: ids of shards of one input for one worker, of one attempt and epoch
CUTS = 1 << 16
#: outputs of one run that are bound late, at most
MOVES = 8
#: ids of shards that an input may have of one of them
NUMBERS = CUTS // 2 // MOVES


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


def numbered(shard: int) -> int:
    """What a shard is a number of, from its id: input, attempt and epoch."""
    return shard >> 16


def directed(shard: int) -> int:
    """The epoch in which a shard got its destination, from its id."""
    return shard >> 16 & 255


def reassign(
    worker_for: Mapping[int, str],
    there: Collection[str],
    partner: Mapping[int, str] | None = None,
    takers: Collection[str] | None = None,
) -> dict[int, str]:
    """New owners of the outputs whose owner is gone: spread over all that can take them, neighbours together.

    What is sent again of an input is a piece for each row of neighbours with one owner. Were they dealt out in turns,
    every output would be a piece of its own, each with its cost on the event loops.

    Parameters
    ----------
    there
        Addresses of the workers that keep the outputs they own.
    partner
        Owners in a shuffle with the same outputs (the other side of a join); they win.
    takers
        Addresses of the workers that outputs are given to, at least one; None: all that are there.
    """
    partner = partner or {}
    lost = sorted(part for part, owner in worker_for.items() if owner not in there)
    order = sorted(there if takers is None else takers)
    free = [part for part in lost if partner.get(part) not in there]
    moved = {part: order[i * len(order) // len(free)] for i, part in enumerate(free)}
    return {part: moved[part] if part in moved else partner[part] for part in lost}


def lost_outputs(wanted: Iterable[int], worker_for: Mapping[int, str], there: Collection[str]) -> frozenset[int]:
    """Outputs that are wanted and whose owner is gone."""
    return frozenset(part for part in wanted if worker_for[part] not in there)


def too_narrow(scopes: Mapping[int, frozenset[int]], opened: frozenset[int] | None) -> frozenset[int]:
    """Epochs whose attempts cannot count for what is open, as they were split for less.

    Parameters
    ----------
    scopes
        Epoch -> outputs that inputs were split for; others were split for all outputs.
    opened
        None: the barrier has not passed.
    """
    return frozenset(epoch for epoch, scope in scopes.items() if opened is not None and not scope >= opened)


def undone(in_memory: Iterable[Hashable], vouched: Collection[Hashable]) -> set[Hashable]:
    """Transfer tasks that count as done and for whose input no worker vouches."""
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
    """Which attempts count for which output, as one worker knows it; `opened` and `bound` are as in `State`."""

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

    def void(self, again: Collection[int] = ()) -> None:
        """Outputs all of whose rows have to be sent in this epoch: what was being handed over when a worker was lost.

        Parameters
        ----------
        again
            Outputs that their living owner has handed out, and that are wanted again.
        """
        self.bound.update(dict.fromkeys((*self.handing, *again), self.epoch))
        for part in self.handing:
            self.moves.pop(part, None)
        self.handing.clear()
