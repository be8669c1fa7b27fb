"""`JoinFilters`: the keys of one side of a hash join reach the workers that split the other side. On the scheduler.

Theory of operation (what may be dropped and why that is right: `protocol.join_plan`).

1. `arrange`, when a graph comes: the smaller side gets the lower priorities (`join_sides`).
2. `side`, when a run begins: what its workers do, by the metas of both sides. A join that is not plain to see, or that
   some other task takes part in, has no filter.
3. `begin`, when the barrier of a side that collects keys is reached: all its inputs are split. The workers say how many
   keys they hold, and of which inputs. If these are all inputs, and the other side is larger and still has some to
   come, they make bits of the keys; the union goes to the workers of the other side, and into its spec for those that
   join later. All of that runs beside the flush, and nothing waits for it.
4. Where the keys are many and the other side has split some inputs, it is asked first which keys of a sample of these
   inputs are among them. If a filter would cost more than it saves (`protocol.join_price`), none is made.

A worker that was lost has taken keys with it. Then the inputs that are held are not all, and there is no filter until
they were split again and the barrier is reached once more. A run that was restarted begins without keys.

The scheduler receives and sends `words * 8` bytes for every worker; `BYTES` bounds that.

Rejected: the keys so far before the barrier (a key that is absent may come with the next input), and a filter for each
range of outputs (the ids of outputs are a hash of the keys, so a range has no fewer keys to look up).
"""

from __future__ import annotations

import asyncio
import collections
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol.join_plan import Join, JoinSide, covers, side_of
from dask_gpurt.shuffle.protocol.join_price import pays, worth_asking
from dask_gpurt.shuffle.protocol.messages import (
    AskJoinBits,
    AskJoinHits,
    AskJoinKeys,
    JoinBits,
    JoinHits,
    JoinKeys,
    TakeJoinFilter,
)
from dask_gpurt.shuffle.rows.key_filter import KeyFilter, union, words_for
from dask_gpurt.shuffle.scheduler import output_tasks
from dask_gpurt.shuffle.scheduler.calls import AnswersFailed
from dask_gpurt.shuffle.scheduler.join_sides import JoinSides, expected

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from distributed.scheduler import Scheduler, TaskState

    from dask_gpurt.shuffle.scheduler.calls import Calls
    from dask_gpurt.shuffle.scheduler.runs import RunRecord, Runs

logger = logging.getLogger("distributed.scheduler.gpurt")

#: bytes that one filter may make the scheduler receive, and send, all workers together
BYTES = 64 << 20


class JoinFilters:
    """The filters of one scheduler's joins.

    Parameters
    ----------
    off
        Whether joins have no filter.
    moved
        Called with tasks that have another priority than they came with.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runs: Runs,
        calls: Calls,
        off: Callable[[], bool],
        moved: Callable[[Iterable[TaskState]], None],
        failed: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._runs = runs
        self._calls = calls
        self._off = off
        self._failed = failed
        #: filters that were sent, and their bytes, once each
        self.sent = 0
        self.sent_bytes = 0
        self.sides = JoinSides(scheduler, runs, calls, moved, failed)
        #: why there was no filter -> times
        self.none: collections.Counter[str] = collections.Counter()

    def statistics(self) -> dict[str, Any]:
        """Counts; plain JSON values."""
        return {
            "sent": self.sent,
            "sent_bytes": self.sent_bytes,
            "reordered": self.sides.reordered,
            "changed": self.sides.changed,
            "none": dict(self.none),
        }

    # ---- a graph comes

    def arrange(self, keys: Iterable[Hashable]) -> None:
        """Put the smaller sides of new joins first. Before any of their tasks is on its way; never raises."""
        if self._off():
            return
        try:
            tasks = self._scheduler.tasks
            for key in keys:
                # Keys of partitions are tuples; barriers are few.
                name = seam.id_from_key(key) if isinstance(key, str) else None
                barrier = tasks.get(key) if name is not None else None
                join = None if barrier is None or barrier.state != "released" else self._join_of(barrier)
                if join is None or join.left != name:
                    continue
                barriers = self._barriers(join)
                if barriers is not None and not self._planned(join.left, join, barriers)[1]:
                    self.sides.arrange(join, barriers)
        except Exception:
            self._failed()

    # ---- a run begins

    def side(self, shuffle_id: seam.ShuffleId) -> JoinSide | None:
        """What a shuffle does as the side of a join; None: nothing. Never raises."""
        if self._off():
            return None
        try:
            barrier = self._runs.barrier_of(shuffle_id)
            join = None if barrier is None else self._join_of(barrier)
            barriers = None if join is None else self._barriers(join)
            if join is None or barriers is None:
                return None
            side, why = self._planned(shuffle_id, join, barriers)
            if side is None:
                # Both sides have the same reason.
                self.none[why] += shuffle_id == join.left
                return None
            partner = self._runs.get(seam.ShuffleId(side.partner))
            side.filter = partner.join_filter if partner is not None else None
            return side
        except Exception:
            self._failed()
            return None

    def _join_of(self, barrier: TaskState) -> Join | None:
        """The join that all tasks behind a barrier make."""
        joins = (output_tasks.join_of(ts.run_spec) for ts in barrier.dependents)
        first = next(joins, None)
        return first if first is not None and all(other == first for other in joins) else None

    def _barriers(self, join: Join) -> dict[str, TaskState] | None:
        """Shuffle id -> barrier of both sides; None when other tasks take part."""
        found = {name: self._runs.barrier_of(seam.ShuffleId(name)) for name in (join.left, join.right)}
        barriers = {name: ts for name, ts in found.items() if ts is not None}
        if len(barriers) < 2 or any(self._join_of(ts) != join for ts in barriers.values()):
            return None
        return barriers

    def _planned(self, shuffle_id: str, join: Join, barriers: dict[str, TaskState]) -> tuple[JoinSide | None, str]:
        import pandas as pd

        metas = {name: output_tasks.meta_of(ts.run_spec) for name, ts in barriers.items()}
        if not all(type(meta) is pd.DataFrame for meta in metas.values()):
            return None, "not pandas"
        inputs = {name: len(ts.dependencies) for name, ts in barriers.items()}
        return side_of(join, shuffle_id, metas, inputs, self.sides.collecting(join))

    # ---- a barrier is reached

    def begin(self, record: RunRecord) -> None:
        """All inputs of a run are split: send its keys to the other side, if that may help. In the background."""
        side = record.spec.join
        if side is not None and side.builds and record.join_filter is None and not record.join_asked:
            record.join_asked = True
            seam.in_background(self._scheduler, self._send, record, side)

    async def _send(self, record: RunRecord, side: JoinSide) -> None:
        try:
            if why := await self._sent(record, side):
                self.none[why] += 1
        except (AnswersFailed, TimeoutError):
            # One closes, or is stopped. The filter is a help, not a part of the run. And it is no error of ours: a few
            # of those leave all shuffles to Dask.
            self.none["a worker did not answer"] += 1
        except Exception:
            self._failed()

    async def _sent(self, record: RunRecord, side: JoinSide) -> str:
        """Send the keys of a run to the other side; returns why not."""
        if not self._to_come(side):
            return "the other side was split first"
        epoch, holders = record.amendments.epoch, set(self._calls.workers_of(record))
        partner = self._runs.get(seam.ShuffleId(side.partner))
        asked = [self._calls.tell(record, AskJoinKeys())]
        if partner is not None:
            asked.append(self._calls.tell(partner, AskJoinKeys()))
        answers = await asyncio.gather(*asked)
        known, seen = ([JoinKeys.from_dict(one) for one in some or ()] for some in (*answers, [])[:2])
        if not covers([one.inputs for one in known], side.inputs):
            record.join_asked = False  # a lost worker had some: again when they were split again
            return "the keys of some inputs are gone"
        rows = sum(one.rows for one in known)
        to_come = expected(seen, side.partner_inputs)
        if rows > to_come:
            return "the other side is not larger"
        words, workers = words_for(rows), len(record.participants)
        if not words or words * 8 * workers > BYTES:
            return "too many keys"
        if worth_asking(rows) and not await self._pays(record, known, seen, to_come):
            return "it would drop too few rows"
        parts = [JoinBits.from_dict(one).bits for one in await self._calls.tell(record, AskJoinBits(words)) or ()]
        # As many answers are not enough: another worker may have taken the place of a lost one, whose keys are gone.
        same = record.amendments.epoch == epoch and set(self._calls.workers_of(record)) == holders
        if not same or len(parts) != len(known) or not all(len(bits) == words * 8 for bits in parts):
            return "the keys of some inputs are gone"
        bits = await asyncio.get_running_loop().run_in_executor(None, union, parts)
        some = [one for one in known if one.rows]
        bounded = bool(some) and all(one.bounded for one in some)
        low, high = min((one.low for one in some), default=0), max((one.high for one in some), default=-1)
        return await self._use(record, side, KeyFilter(bits, (low, high) if bounded else None))

    async def _pays(
        self, record: RunRecord, known: Sequence[JoinKeys], seen: Sequence[JoinKeys], expected_rows: float
    ) -> bool:
        """Whether a filter pays, by a sample of the inputs that the other side has split; without one: it does."""
        sample = b"".join(one.sample for one in seen)
        split = sum(one.split_rows for one in seen)
        if not sample or not split:
            return True
        answers = [JoinHits.from_dict(one).hits for one in await self._calls.tell(record, AskJoinHits(sample)) or ()]
        hits = np.zeros(len(sample) // 4, dtype=np.uint8)
        for one in answers:
            hits |= np.frombuffer(one, dtype=np.uint8)
        keys = sum(one.rows for one in known)
        return pays(
            keys,
            expected_rows - sum(one.seen_rows for one in seen),
            float(hits.mean()),
            sum(one.seconds for one in known) / max(1, keys),
            sum(one.split_seconds for one in seen) / split,
        )

    async def _use(self, record: RunRecord, side: JoinSide, keys: KeyFilter) -> str:
        if not self._runs.current(record):
            return "its run is over"
        if not self._to_come(side):
            return "the other side was split first"
        record.join_filter = keys  # for a run of the other side that begins later, see `side`
        partner = self._runs.get(seam.ShuffleId(side.partner))
        self.sent += 1
        self.sent_bytes += len(keys.bits)
        if partner is None:
            return ""
        if partner.spec.join is None:
            return "the other side has no filter"
        # Workers that join the run from now on get it with the spec.
        partner.spec.join.filter = keys
        low, high = keys.bounds or (0, -1)
        await self._calls.tell(partner, TakeJoinFilter(keys.bits, keys.bounds is not None, low, high))
        return ""

    def _to_come(self, side: JoinSide) -> bool:
        """Whether the other side has inputs that are not split yet."""
        barrier = self._runs.barrier_of(seam.ShuffleId(side.partner))
        # Behind a barrier that was reached the inputs are released: they are not to come again.
        return barrier is not None and barrier.state == "waiting"
