"""Give another worker the rows of outputs that were bound late: the old owner's part of `rebalance_plan`.

Theory of operation. Rows are taken from the store and sent as shards of the epoch in which the output was bound, by
input and attempt (`recovery.shard_id`), in their order. A shard's number keeps what several old owners, or
several outputs, send the new owner of one input apart: every move of a run has numbers of its own, above those that
`_resend` uses.

What was taken is sent piece by piece inside the budget for unsent bytes, and goes when it was encoded; so a worker
holds one output more than its store does, as when it makes one.

Invariants
- An output is taken in the same turn of the loop in which it was seen that its move is not void. Were it void, rows of
  a later epoch could lie in the store by then, and this worker be the owner again.
- `inputs_done` waits for it (`_resending`), so no barrier passes before all is handed over and acknowledged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.errors import LostData
from dask_gpurt.shuffle.protocol.recovery import CUTS, origin, shard_id
from dask_gpurt.shuffle.rows.partition import Shard
from dask_gpurt.shuffle.worker.amendment import Outgoing
from dask_gpurt.shuffle.worker.receiver import ReceivingRun

if TYPE_CHECKING:
    import pyarrow as pa

    from dask_gpurt.shuffle.rows.slices import Piece

#: outputs of one run that are bound late, at most
MOVES = 8
#: shards that an input may have of one of them
NUMBERS = CUTS // 2 // MOVES


class HandingRun(ReceivingRun):
    """The part of a run that hands outputs over."""

    async def _hand_over(self, epoch: int, giving: list[tuple[int, int]]) -> None:
        try:
            for part, place in giving:
                if self._few or self._merging.locked():
                    await self._merge()
                if self._counting.bound.get(part) != epoch or self.closed:
                    continue  # a worker was lost meanwhile
                taken = await self._store.take(self._key, part)
                pieces = [piece for some in taken for piece in some]
                taken.clear()
                await self._give(part, pieces, epoch, CUTS // 2 + place * NUMBERS)
                self._counters.add(outputs_handed=1)
        except LostData as e:
            self._counters.last_error = f"{self}: an output that was to be handed over is lost: {e}"
            await self._ask_for_restart()
        except Exception as e:
            # The new owner would make an output without these rows; the barrier tells it.
            if not self.closed:
                self._exception = e

    async def _give(self, part: int, pieces: list[Piece], epoch: int, first: int) -> None:
        """Send the rows of an output to its owner; empties the list."""
        ordered: list[tuple[int, pa.Table]] = await self.offload(_by_input, pieces)
        ordered.reverse()
        numbers: dict[tuple[int, int], int] = {}
        while ordered:
            target = self._worker_for[part]
            if self._counting.bound.get(part) != epoch or target in self._ledger.lost:
                return
            input_id, table = ordered.pop()
            partition, attempt = origin(input_id)
            number = numbers.get((partition, attempt), first)
            shard = Shard(
                input_id, table, np.array([part], dtype=np.uint32), np.array([table.num_rows], dtype=np.uint64)
            )
            parcels: list[Any] = await self.offload(
                self._pieces, shard, target, shard_id(partition, attempt, epoch), number
            )
            numbers[partition, attempt] = number = number + len(parcels)
            if number > first + NUMBERS:
                raise OverflowError(f"output {part} of {self} has more than {NUMBERS} messages of one input")
            data = Outgoing()
            data[target] = parcels
            await self._stage(data)

    async def _ask_for_restart(self) -> None:
        raise NotImplementedError


def _by_input(pieces: list[Piece]) -> list[tuple[int, pa.Table]]:
    """(id of the shard, its rows) in order; empties the list. Any thread."""
    out: list[tuple[int, pa.Table]] = []
    while pieces:
        input_id, rows = pieces.pop()
        table = rows.table()
        if rows.inputs is None:
            out.append((input_id, table))
            continue
        out += [(one, table.filter(rows.inputs == one)) for one in np.unique(rows.inputs).tolist()]
    return sorted(out, key=lambda item: item[0])
