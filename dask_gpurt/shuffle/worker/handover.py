"""Give another worker the rows of outputs that were bound late: the old owner's part of `rebalance_plan`.

Theory of operation. Rows are taken from the store and sent as shards of the epoch in which the output was bound, by
input and attempt (`recovery.shard_id`), in their order. The number of a shard keeps apart what several old owners, or
several outputs, send to the new owner of one input: every move of a run has numbers of its own, above those that a
resend uses.

What was taken is sent piece by piece inside the budget for unsent bytes, and goes when it was encoded. So a worker
holds one output more than its store does, as when it makes one.

Invariants
- An output is taken in the same turn of the loop in which its move was seen not to be void. Were it void, rows of a
  later epoch could lie in the store by then, and this worker be the owner again.
- No barrier passes before all is handed over and acknowledged (`Amendment.settle`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dask_gpurt.errors import LostData
from dask_gpurt.shuffle.protocol.recovery import CUTS, NUMBERS, Counting, origin, shard_id
from dask_gpurt.shuffle.rows.partition import Shard

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    import pyarrow as pa

    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.rows.slices import Piece
    from dask_gpurt.shuffle.worker.host import RunHost
    from dask_gpurt.shuffle.worker.owners import Owners
    from dask_gpurt.shuffle.worker.receiver import Receiver
    from dask_gpurt.shuffle.worker.resend import Resender


class Move(NamedTuple):
    """An output that this worker hands over."""

    part: int
    #: its number among the moves of the run, from 0
    place: int


class Handover:
    """Hands over outputs of one run; `restart` has the shuffle start anew, when rows are lost. On the event loop."""

    def __init__(
        self,
        host: RunHost,
        *,
        owners: Owners,
        counting: Counting,
        receiver: Receiver,
        resender: Resender,
        restart: Callable[[], Awaitable[None]],
        counters: ShuffleCounters,
    ) -> None:
        self._host, self._owners, self._counting = host, owners, counting
        self._receiver, self._resender, self._restart = receiver, resender, restart
        self._counters = counters

    async def hand_over(self, epoch: int, moves: Iterable[Move], lost: Callable[[str], bool]) -> None:
        """Give the new owners the rows of outputs that this worker had, bound in `epoch`. An error ends the run."""
        try:
            for part, place in moves:
                await self._receiver.settle()
                if self._counting.bound.get(part) != epoch or self._host.closed:
                    continue  # a worker was lost meanwhile
                taken = await self._receiver.take(part)
                pieces = [piece for some in taken for piece in some]
                taken.clear()
                await self._give(part, pieces, epoch, CUTS // 2 + place * NUMBERS, lost)
                self._counters.add(outputs_handed=1)
        except LostData as e:
            self._counters.last_error = f"{self._host}: an output that was to be handed over is lost: {e}"
            await self._restart()
        except Exception as e:
            # The new owner would make an output without these rows; the barrier raises it.
            self._host.fail(e)

    async def _give(self, part: int, pieces: list[Piece], epoch: int, first: int, lost: Callable[[str], bool]) -> None:
        """Send the rows of an output to its owner; empties the list."""
        ordered = await self._host.offload(_by_input, pieces)
        ordered.reverse()
        numbers: dict[tuple[int, int], int] = {}
        while ordered:
            target = self._owners.worker_for[part]
            if self._counting.bound.get(part) != epoch or lost(target):
                return
            input_id, table = ordered.pop()
            of = partition, attempt = origin(input_id)
            parts, lengths = np.array([part], dtype=np.uint32), np.array([table.num_rows], dtype=np.uint64)
            shard = Shard(input_id, table, parts, lengths)
            first_id = shard_id(partition, attempt, epoch)
            numbers[of] = await self._resender.send(shard, target, first_id, numbers.get(of, first), first + NUMBERS)


def _by_input(pieces: list[Piece]) -> list[tuple[int, pa.Table]]:
    """(id of the shard, its rows) in order; empties the list. Any thread."""
    out: list[tuple[int, pa.Table]] = []
    while pieces:
        input_id, rows = pieces.pop()
        table = rows.table()
        if rows.inputs is None:
            out.append((input_id, table))
            continue
        # Rows of one output lie in the order of their inputs, see `rows.coalesce`.
        ends = [0, *(np.flatnonzero(np.diff(rows.inputs)) + 1).tolist(), table.num_rows]
        out += [(int(rows.inputs[low]), table.slice(low, high - low)) for low, high in pairwise(ends)]
    return sorted(out, key=lambda item: item[0])
