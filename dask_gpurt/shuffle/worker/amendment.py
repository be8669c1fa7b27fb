"""What a run does when another worker is lost: the acting part of `protocol.recovery`, on a worker.

`Amendment.answer` answers the scheduler's messages. `may_send` and `check_sent` stand before and after the sending of
every input. `settle` waits until all is sent again.

Theory of operation. The scheduler asks in two steps, by distributed's comms (`protocol.messages`):

1. `Amend`: new owners of the lost outputs. The layout changes, what the lost worker was sent is sent again to the new
   owners, in the background; inputs whose split is under way are split again. The answer says which inputs this worker
   vouches for.
2. `Valid`: which attempts count. Between the steps no input is sent: whether an input counts already, by an attempt
   of another worker, is only known then.

Outputs that are bound late (`rebalance_plan`) come by the same two steps: the old owner hands them over in the
background, too (`handover`).

After the barrier there is a third, `Complete`: what was opened may be made. Until then its tasks are sent back to the
scheduler, which has them wait. This worker's other outputs are made all the while. `Reopen` has a run take inputs
again after a flush.

All on the event loop. Layout and epoch change together with the owners; a split that began before is noticed by its
attempt.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol import messages
from dask_gpurt.shuffle.protocol.recovery import Counting, State, Validity
from dask_gpurt.shuffle.worker.handover import Handover, Move

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping

    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.rows.partition import Shard
    from dask_gpurt.shuffle.worker.host import RunHost
    from dask_gpurt.shuffle.worker.message import Outgoing
    from dask_gpurt.shuffle.worker.owners import Owners
    from dask_gpurt.shuffle.worker.peer_calls import PeerCalls
    from dask_gpurt.shuffle.worker.resend import Resender
    from dask_gpurt.shuffle.worker.send_log import SendLog


class Amendment:
    """The amendments of one run on one worker.

    Parameters
    ----------
    void
        Called with outputs whose rows count no more, once all outputs have their new owners.
    reopen
        Has the run take inputs again.
    """

    def __init__(
        self,
        host: RunHost,
        *,
        state: State,
        owners: Owners,
        counting: Counting,
        log: SendLog[Shard],
        peers: PeerCalls,
        resender: Resender,
        handover: Handover,
        void: Callable[[Collection[int]], None],
        reopen: Callable[[], None],
        counters: ShuffleCounters,
    ) -> None:
        self._host = host
        self._owners, self._counting, self._log = owners, counting, log
        self._peers, self._resender, self._handover = peers, resender, handover
        self._void, self._reopen = void, reopen
        self._counters = counters
        #: set while it is known which attempts count
        self._settled = asyncio.Event()
        if not state.epoch or (state.validity is not None and state.validity.epoch == state.epoch):
            self._settled.set()
        #: an amendment has begun, and did not end
        self._half_way = False
        #: sends of rows that have new owners
        self._resending: set[asyncio.Task[None]] = set()

    # ---- inputs

    async def may_send(self, out: Outgoing) -> bool:
        """Enter an input in the log before it is sent; False when it counts already.

        Raises
        ------
        ShuffleClosedError
            It was split for owners that have changed: the task has to run again.
        """
        while not self._settled.is_set():
            await self._settled.wait()
            self._host.raise_if_closed()
        if out.attempt != self._log.epoch:
            raise seam.ShuffleClosedError(f"{self._host} was amended while input {out.partition} was split")
        validity = self._counting.validity
        if validity is not None and out.partition in validity.attempts:
            return False
        nbytes = sum(shard.nbytes for _, shard in out.sent)
        own_nbytes = sum(shard.nbytes for shard in out.own)
        self._log.ran(out.partition, out.key, out.attempt, out.sent, nbytes, out.own, own_nbytes)
        return True

    def check_sent(self, out: Outgoing) -> None:
        """Check an input again after it was sent.

        Raises
        ------
        ShuffleClosedError
            An amendment has forgotten it meanwhile: its task must not end well.
        """
        if not self._log.vouches(out.partition, out.attempt):
            raise seam.ShuffleClosedError(f"{self._host} was amended while input {out.partition} was sent")

    async def settle(self) -> bool:
        """Wait until all is sent that has new owners; False: another worker was lost meanwhile."""
        epoch = self._log.epoch
        while self._resending:
            await asyncio.gather(*self._resending)
            self._resending = {task for task in self._resending if not task.done()}
            if self._log.epoch != epoch:
                return False
        return True

    def close(self) -> None:
        """The run closes: end what is sent again, and what waits for an amendment."""
        for task in self._resending:
            task.cancel()
        self._settled.set()
        self._peers.end()

    # ---- messages of the scheduler

    def answer(self, message: object) -> messages.Ok:
        """Answer one of the messages in `ANSWERS`. What is of another epoch than the latest changes nothing."""
        self._host.raise_if_closed()
        return self.ANSWERS[type(message)](self, message)

    def _on_amend(self, message: messages.Amend) -> messages.Vouched:
        if self._half_way:
            # Asked again it would not do the other half: the scheduler restarts the run.
            raise RuntimeError(f"{self._host} has failed to amend")
        if message.epoch > self._log.epoch:
            self._half_way = True
            self._amend(message)
            self._half_way = False
        return messages.Vouched(self._log.epoch, self._log.vouched())

    def _on_valid(self, message: messages.Valid) -> messages.Ok:
        if message.epoch == self._log.epoch:
            self._counting.validity = Validity(message.epoch, message.attempts)
            self._settled.set()
        return messages.Ok()

    def _on_reopen(self, message: messages.Reopen) -> messages.Ok:
        if message.epoch == self._log.epoch:
            self._reopen()
        return messages.Ok()

    def _on_complete(self, message: messages.Complete) -> messages.Ok:
        if message.epoch == self._log.epoch:
            self._counting.complete()
        return messages.Ok()

    #: how a message is answered, by its class
    ANSWERS: ClassVar[dict[type, Callable[[Amendment, Any], messages.Ok]]] = {
        messages.Amend: _on_amend,
        messages.Valid: _on_valid,
        messages.Reopen: _on_reopen,
        messages.Complete: _on_complete,
    }

    def _amend(self, message: messages.Amend) -> None:
        log, counting, owners = self._log, self._counting, self._owners
        self._settled.clear()
        counting.amend(message.opened, owners.mine())
        before, handing, moved = counting.bound, message.handing, message.moved
        counting.bound = dict(message.bound)
        fresh = {part for part, since in counting.bound.items() if since > before.get(part, 0)}
        moves = self._rebind([part for part in handing if part in fresh], handing, moved)
        void = fresh - set(handing)
        # Where this worker has their rows: a move that is void is seen only here, under the old owner.
        old_owners = {owners.worker_for[part] for part in void}
        owners.move(moved, message.opened)
        self._void(void)
        gone = set(message.lost) - log.lost
        self._peers.disconnect(gone)
        again = log.amend(message.epoch, message.lost, void, old_owners, self._host.local_address in old_owners)
        self._peers.end(gone)
        self._reopen()
        self._counters.add(amendments=1, shards_resent=len(again))
        if again:
            self._begin(self._resender.send_all(message.epoch, self._resender.route(again)))
        if moves:
            self._begin(self._handover.hand_over(message.epoch, moves, log.lost.__contains__))

    def _rebind(self, parts: list[int], handing: Mapping[int, str], moved: Mapping[int, str]) -> list[Move]:
        """Enter outputs that are bound late; returns those that this worker hands over."""
        here = self._host.local_address
        groups: dict[tuple[str, str], list[int]] = {}
        for part in parts:
            groups.setdefault((handing[part], moved[part]), []).append(part)
        for (source, target), some in groups.items():
            self._log.bound(some, source, target, own=source == here)
        places = {part: place for place, part in enumerate(handing)}
        return [Move(part, places[part]) for part in parts if handing[part] == here]

    def _begin(self, sending: Coroutine[Any, Any, None]) -> None:
        self._resending.add(asyncio.create_task(sending))
