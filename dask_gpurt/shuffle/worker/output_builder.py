"""Make the outputs that belong to a worker, each once.

Invariants
- `take` removes. A frame merged with itself is one shuffle whose outputs are asked for twice by one task. The second
  time it gets a copy of that frame, found by a weak reference, within the same execution only: a retry must not see
  what the failed one changed.
- Any other output that is asked for again (its task failed after the take and is retried) is not there, and an empty
  answer would be silently wrong. The scheduler is asked to open it again (`reopen`), for all of its rows to come once
  more. Should it refuse, the whole shuffle is restarted, by the way upstream restarts an inconsistent one. Shards lost
  on a tier do the same. At most `RESTARTS` runs of a shuffle end so on one worker in ten minutes.
- Nothing is taken of an output that is open: only some of its rows may be there.
- Rows that were taken are kept where a device had no memory to make the output of them: its task is run once more.
"""

from __future__ import annotations

import enum
import functools
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from dask_gpurt.errors import LostData
from dask_gpurt.memory.malloc import heap
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.rows.slices import Slice
from dask_gpurt.shuffle.worker.host import RunHost, submit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable
    from collections.abc import Set as AbstractSet

    from dask_gpurt.shuffle.counters import ShuffleCounters
    from dask_gpurt.shuffle.protocol.recovery import Counting, Validity
    from dask_gpurt.shuffle.rows.kinds import RowKind
    from dask_gpurt.shuffle.rows.slices import Piece
    from dask_gpurt.shuffle.worker.owners import Owners
    from dask_gpurt.shuffle.worker.receiver import Receiver
    from dask_gpurt.shuffle.worker.scheduler_calls import SchedulerCalls

#: runs of one shuffle that this worker has restarted of late; then the error is the user's
RESTARTS = 5


class Absent(enum.Enum):
    """Why the rows of an output cannot be taken."""

    OPEN = "some of them are still to come"
    TAKEN = "they were taken before"


class OutputBuilder:
    """Makes the outputs of one run. `check_place` and `build` in the thread of an output's task.

    Parameters
    ----------
    sync
        Calls a coroutine function, with arguments, on the event loop and waits for it.
    lost
        Addresses of the workers that were lost; the caller keeps the set up to date.
    made_all
        Called with True when this worker has made all of its outputs, and with False when some became void.
    """

    def __init__(
        self,
        host: RunHost,
        *,
        sync: Callable[..., Any],
        rows: RowKind,
        owners: Owners,
        counting: Counting,
        receiver: Receiver,
        scheduler: SchedulerCalls,
        lost: AbstractSet[str],
        made_all: Callable[[bool], None],
        counters: ShuffleCounters,
    ) -> None:
        self._host, self._sync = host, sync
        self._owners, self._counting = owners, counting
        self._receiver, self._scheduler, self._lost, self._made_all = receiver, scheduler, lost, made_all
        self._counters = counters
        self._rows = rows
        #: outputs handed out
        self._taken: set[int] = set()
        #: output -> (weak reference to the frame it was given as, the execution that got it)
        self._given: dict[int, tuple[weakref.ref[Any], Any]] = {}
        #: output -> its rows, of which it could not be made for want of device memory
        self._unmade: dict[int, list[Piece]] = {}
        #: bytes of a row of the outputs, about
        self._row_bytes = 0.0
        #: number of outputs of this worker
        self._mine = len(owners.mine())

    def check_place(self, part: int, key: Hashable) -> None:
        """Return if an output can be made here, now.

        Raises
        ------
        Reschedule
            It belongs to another worker or is not complete: the scheduler runs its task where and when it can be made.
        """
        if part not in self._owners.worker_for:
            # It was in memory, or not wanted, when this run began for the rest. The next run has it.
            self._restart(f"output {part} is not of this run", counts=False)
        self._host.raise_if_closed()
        owner, here = self._owners.worker_for[part], self._host.local_address
        # A worker that was started under the address of a lost one has no rows of what that one owned.
        if owner != here or here in self._lost or not self._counting.ready(part):
            self._move(part, key)

    def build(self, part: int, key: Hashable) -> Any:
        """Make an output."""
        here = seam.execution()
        frame, execution = self._given.get(part, (None, None))
        if frame is not None and here is not None and execution == here and (df := frame()) is not None:
            return df.copy()
        pieces = self._unmade.pop(part, None) or self._pieces(part, key)
        start = time.perf_counter()
        try:
            df = self._rows.assemble(pieces)
        except MemoryError:
            if not self._rows.on_host:
                self._unmade[part] = pieces
            raise
        self._given[part] = (weakref.ref(df), here)
        if self._rows.on_host and len(df):
            if not self._row_bytes:
                self._row_bytes = float(df.memory_usage().sum()) / len(df)
            heap.freed(int(len(df) * self._row_bytes), functools.partial(submit, self._host.executor))
        self._counters.add(outputs=1, seconds_assemble=time.perf_counter() - start)
        return df

    def _pieces(self, part: int, key: Hashable) -> list[Piece]:
        """The rows of an output that count, taken."""
        try:
            taken = self._sync(self._take, part)
        except LostData as e:
            self._restart(f"output {part} was lost: {e}", e)
        if taken is Absent.OPEN:
            self._move(part, key)
        if taken is Absent.TAKEN:
            if self._sync(self._scheduler.open_again, key):
                raise seam.Reschedule
            self._restart(f"output {part} was asked for again")
        validity, chunks = taken
        return counted(validity, [piece for chunk in chunks for piece in chunk])

    def void(self, parts: Collection[int]) -> None:
        """Rows that came for these outputs until now count no more, and owners may be others; on the event loop."""
        self._taken -= set(parts)
        self._mine = len(self._owners.mine())
        for part in parts:
            self._given.pop(part, None)
            self._unmade.pop(part, None)
        self._made_all(False)

    def _move(self, part: int, key: Hashable) -> NoReturn:
        self._sync(self._scheduler.move_task, key, self._owners.worker_for[part])
        raise seam.Reschedule

    def _restart(self, why: str, cause: BaseException | None = None, *, counts: bool = True) -> NoReturn:
        """Have the scheduler start this shuffle anew (run id + 1), and this task again.

        `counts`: a cause that may come again with the next run, which must not go on for ever.
        """
        host = self._host
        self._counters.last_error = f"{host}: {why}"
        if counts and self._counters.restarted(host.id, host.run_id) > RESTARTS:
            raise RuntimeError(f"{host} was restarted {RESTARTS} times by this worker: {why}") from cause
        self._counters.add(restarts=1)
        self._sync(self._scheduler.restart)
        raise seam.Reschedule

    async def _take(self, part: int) -> tuple[Validity | None, list[list[Piece]]] | Absent:
        """The pieces of an output, by chunk, and which of their rows count (asked later, it may be another answer)."""
        self._host.raise_if_closed()
        if not self._counting.ready(part):
            return Absent.OPEN
        if part in self._taken:
            return Absent.TAKEN
        self._taken.add(part)
        if len(self._taken) >= self._mine:
            self._made_all(True)
        since = self._counting.bound.get(part)
        await self._receiver.settle()
        taken = await self._receiver.take(part)
        if self._counting.bound.get(part) != since:
            # An output that is being made is never void on purpose. Some of its new rows may be among these.
            raise LostData(f"output {part} became void while it was taken")
        return self._counting.of(part), taken


def counted(validity: Validity | None, pieces: list[Piece]) -> list[Piece]:
    """The rows of an output that come from attempts that count; all of them when `validity` is None."""
    if validity is None:
        return pieces
    out: list[Piece] = []
    for input_id, rows in pieces:
        inputs = rows.inputs
        if inputs is None:
            if validity.valid(input_id):
                out.append((input_id, rows))
            continue
        some, inverse = np.unique(inputs, return_inverse=True)
        keep = np.array([validity.valid(int(i)) for i in some])[inverse]
        if keep.all():
            out.append((input_id, rows))
        elif keep.any():
            out.append((int(inputs[keep].min()), Slice.whole(rows.table().filter(keep), None, inputs[keep])))
    return out
