"""Make the outputs that belong to a worker, each once.

Invariants
- `take` removes. A frame merged with itself is one shuffle whose outputs are asked for twice by one task: the second
  time it gets the first frame again, found by a weak reference, within the same execution only (a retry must not see
  what the failed one changed). Any other output asked for again (its task failed after the take and is retried) can not
  be served, and an empty answer would be silently wrong: the scheduler is asked to open it again (`reopen`), for all of
  its rows to come once more. Should it refuse, the whole shuffle is restarted, by the way upstream restarts
  an inconsistent one. Shards lost on a tier do the same. Both at most `RESTARTS` times per shuffle on one worker.
- Nothing is taken of an output that is open: some of its rows may be there.
"""

from __future__ import annotations

import enum
import functools
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from dask_gpurt.errors import LostData
from dask_gpurt.memory.malloc import heap
from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.messages import OPEN_OUTPUT, OutputOpened
from dask_gpurt.shuffle.rows.assemble import Assembler
from dask_gpurt.shuffle.worker.handover import HandingRun
from dask_gpurt.shuffle.worker.receiver import submit

if TYPE_CHECKING:
    from collections.abc import Collection

    import pandas as pd

#: restarts of one shuffle asked for by this worker; then the error is the user's
RESTARTS = 5


class NotTaken(enum.Enum):
    """Why an output's rows are not there."""

    #: it is not complete
    OPEN = "open"
    #: they were taken before
    HANDED_OUT = "handed out"


class OutputsRun(HandingRun):
    """The part of a run that makes outputs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._assemble = Assembler(self.meta.drop(columns=self.column) if self.drop_column else self.meta)
        #: outputs handed out
        self._taken: set[int] = set()
        #: output -> (weak reference to the frame it was given as, the execution that got it)
        self._given: dict[int, tuple[weakref.ref[pd.DataFrame], Any]] = {}
        #: bytes of a row of the outputs, about
        self._row_bytes = 0.0
        #: outputs of this worker
        self._mine = sum(owner == self.local_address for owner in self._worker_for.values())

    def _get_assigned_worker(self, id: int) -> str:
        return self._worker_for[id]

    def get_output_partition(self, partition_id: int, key: Any, **kwargs: Any) -> pd.DataFrame:
        # As inherited, without its two round trips to the event loop where there is nothing to wait for there: the
        # output belongs here, and nothing is ever under way to a disk of ours.
        if partition_id not in self._worker_for:
            # It was in memory when this run began for the rest, and was lost since.
            self._restart(f"output {partition_id} is not of this run")
        self.raise_if_closed()
        if self._get_assigned_worker(partition_id) != self.local_address or not self._counting.ready(partition_id):
            seam.sync(self._loop, self._not_here, partition_id, key)
        # Opened again, a run takes inputs once more while it makes the outputs that were complete.
        if not self.transferred and self._counting.opened is None:
            raise RuntimeError("`get_output_partition` called before barrier task")
        with (
            self._capture_metrics("foreground"),
            seam.context_meter.meter("p2p-get-output-noncpu"),
            seam.context_meter.meter("p2p-get-output-cpu", func=seam.thread_time),
        ):
            return self._get_output_partition(partition_id, key, **kwargs)

    def _get_output_partition(self, partition_id: int, key: Any, **kwargs: Any) -> pd.DataFrame:
        here = seam.execution()
        frame, execution = self._given.get(partition_id, (None, None))
        if frame is not None and here is not None and execution == here and (df := frame()) is not None:
            return df.copy()
        try:
            taken = seam.sync(self._loop, self._take, partition_id)
        except LostData as e:
            self._restart(f"output {partition_id} was lost: {e}", e)
        if taken is NotTaken.OPEN:
            seam.sync(self._loop, self._not_here, partition_id, key)
        if taken is NotTaken.HANDED_OUT:
            if seam.sync(self._loop, self._ask_again, key):
                raise seam.Reschedule
            self._restart(f"output {partition_id} was asked for again")
        start = time.perf_counter()
        pieces = self._counted(partition_id, [piece for some in taken for piece in some])
        taken.clear()
        df = self._assemble(pieces)
        self._given[partition_id] = (weakref.ref(df), here)
        if len(df):
            if not self._row_bytes:
                self._row_bytes = float(df.memory_usage().sum()) / len(df)
            heap.freed(int(len(df) * self._row_bytes), functools.partial(submit, self.executor))
        self._counters.add(outputs=1, seconds_assemble=time.perf_counter() - start)
        return df

    def _restart(self, why: str, cause: BaseException | None = None) -> NoReturn:
        """Have the scheduler start this shuffle anew (run id + 1), and this task again."""
        self._counters.last_error = f"{self}: {why}"
        if self._counters.restarted(self.id) > RESTARTS:
            raise RuntimeError(f"{self} was restarted {RESTARTS} times by this worker: {why}") from cause
        self._counters.add(restarts=1)
        seam.sync(self._loop, self._ask_for_restart)
        raise seam.Reschedule

    # ---- event loop

    async def _ask_for_restart(self) -> None:
        try:
            await self.scheduler.shuffle_barrier(id=self.id, run_id=self.run_id, consistent=False)
        except Exception as e:
            # The scheduler knows no such run: it was restarted or forgotten meanwhile, and the message that closes it
            # here is under way. Then running the task again is right too.
            self._counters.add(restarts_refused=1)
            self._counters.last_error = f"{self}: {e!r}"

    async def _not_here(self, part: int, key: Any) -> NoReturn:
        """An output that belongs to another worker, or is not complete: the scheduler says where and when."""
        await self.scheduler.shuffle_restrict_task(
            id=self.id, run_id=self.run_id, key=key, worker=self._get_assigned_worker(part)
        )
        raise seam.Reschedule

    async def _ask_again(self, key: Any) -> bool:
        """Whether the scheduler has an output that was handed out opened again."""
        answer = await getattr(self.scheduler, OPEN_OUTPUT)(id=self.id, run_id=self.run_id, key=key)
        return OutputOpened.from_dict(answer).opened

    async def _take(self, part: int) -> list[Any] | NotTaken:
        """The rows of an output, or why there are none."""
        self.raise_if_closed()
        if not self._counting.ready(part):
            return NotTaken.OPEN
        if part in self._taken:
            return NotTaken.HANDED_OUT
        self._taken.add(part)
        if len(self._taken) >= self._mine:
            self._ledger.idle(True)
        since = self._counting.bound.get(part)
        if self._few or self._merging.locked():
            await self._merge()
        taken = await self._store.take(self._key, part)
        if self._counting.bound.get(part) != since:
            # Which is not done to an output that is being made. Some of its new rows may be among these.
            raise LostData(f"output {part} became void while it was taken")
        return taken

    def _void(self, parts: Collection[int]) -> None:
        self._taken -= set(parts)
        for part in parts:
            self._given.pop(part, None)
        self._ledger.idle(False)
