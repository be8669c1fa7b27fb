"""The scheduler's side of `rebalance_plan`: when outputs are bound late, what is known then, and what changes.

Theory of operation. Workers are asked for the rows of outputs together with their flush, so a barrier has them when all
inputs are in place (`hear`). Before it passes, `begin` asks the policy. Where outputs move, it changes their owners in
one turn of the loop and begins a new epoch, which is announced to the workers as that of a loss is. The barrier then
tries once more: its flush ends when all has been handed over.

Shuffles with the same outputs (the sides of a join) move together. The one whose barrier comes last decides for all;
the others have passed theirs, but no output can have been made, as each waits for every barrier. Their flush is asked
for by that last barrier (`settled`).

Outputs move only as long as none was made or begun, where their tasks are plain to see, and to workers that these tasks
may run on. A run is looked at once, and a shuffle that was restarted while outputs were handed over never again.

Seconds per byte are those of the latest large outputs whose tasks are named alike (`ended`), where there were any, else
those measured on one core. Not the scheduler's own averages: tasks that only stand for persisted results count in them.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle.protocol import rebalance_plan
from dask_gpurt.shuffle.protocol.histogram import add_up
from dask_gpurt.shuffle.protocol.rebalance_plan import Output, Plan, Prices, Room, choose
from dask_gpurt.shuffle.protocol.recovery import EPOCHS, MOVES, NUMBERS
from dask_gpurt.shuffle.scheduler.output_tasks import output_of
from dask_gpurt.shuffle.scheduler.restart import NOT_WANTED
from dask_gpurt.shuffle.scheduler.runs import LISTENED, PATIENCE, PATIENCE_SECONDS, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from distributed.scheduler import Scheduler, TaskState

    from dask_gpurt.shuffle.protocol.messages import HistogramAnswer
    from dask_gpurt.shuffle.scheduler.calls import Calls
    from dask_gpurt.shuffle.scheduler.runs import RunRecord, Runs

#: seconds per byte of unpacking, and of a join with it, where no such task of this cluster tells
UNPACK_PER_BYTE = 1 / 1e9
JOIN_PER_BYTE = 1 / 300e6
#: of taking, encoding and storing what is moved; and of sending it, where no message tells
HANDLE_PER_BYTE = 1 / 1e9
SEND_PER_BYTE = 1 / 500e6
#: the tasks of so many of a run's large outputs tell the seconds that they took
WATCHED = 16
#: of writing to disk and reading back
SPILL_PER_BYTE = 2 / 500e6
#: of the rounds of messages
FIXED_SECONDS = 0.05
#: a partner whose barrier is about to end is waited for so long
PARTNER_SECONDS = 1.0
#: share of a worker's memory that shuffled rows may fill before they are written to disk
ROOM = 0.6
#: messages of at least half of `cut_bytes` must suffice for an output, should all of it be of one input
_LEAST_CUT = 0.5


class Binder:
    """Binds outputs of one scheduler's runs late.

    Parameters
    ----------
    able
        Whether a worker can run our spec, by its address.
    off
        Whether outputs stay where they were planned.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runs: Runs,
        calls: Calls,
        able: Callable[[str], bool],
        off: Callable[[], bool] = lambda: False,
    ) -> None:
        self._scheduler = scheduler
        self._runs = runs
        self._calls = calls
        self._able = able
        self._off = off
        #: what a task is called -> seconds per byte of its output's rows, a running mean
        self._learned: dict[str, float] = {}
        self.moved = 0
        self.moved_bytes = 0
        #: runs in which outputs moved
        self.runs = 0

    # ---- what is known

    async def hear(self, record: RunRecord, workers: list[str]) -> None:
        """Ask the workers of a run for their histograms, once."""
        if record.histograms is None:
            record.histograms = await self._calls.histograms(record, workers)

    # ---- binding

    def begin(self, record: RunRecord) -> list[RunRecord] | None:
        """Move what is worth it, when all inputs of a run are in place.

        Returns
        -------
        list or None
            Runs whose owners have changed, each in a new epoch. None: not known yet, ask again after a change.
        """
        if not record.spec.settings.late_binding or record.rebalanced or self._runs.left_alone(record.id):
            return []
        if self._off():
            return []
        group = self._group(record)
        if not group:
            return group
        for one in group:
            one.rebalanced = True
        plan = self._plan(group)
        if not plan.moves:
            return []
        for one in group:
            state, worker_for = one.amendments, one.worker_for
            moves = [move for move in plan.moves if move.part in worker_for]
            state.epoch += 1
            for move in moves:
                worker_for[move.part] = move.target
                state.bound[move.part] = state.epoch
                state.handing[move.part] = move.source
                state.moves[move.part] = move.source, move.target
            one.participants.update(move.target for move in moves)
        self.runs += 1
        self.moved += len(plan.moves)
        self.moved_bytes += int(sum(move.nbytes for move in plan.moves))
        return group

    def _group(self, record: RunRecord) -> list[RunRecord] | None:
        """Runs with the same outputs; empty when they cannot move, None when that is not known yet."""
        barrier = self._runs.barrier_of(record.id)
        if barrier is None:
            return []
        dependents = set(barrier.dependents)
        names = {record.id} | {name for ts in dependents for name, _ in self._runs.sources(ts)}
        group: list[RunRecord] = []
        for name in names:
            one, its = self._runs.get(name), self._runs.barrier_of(name)
            if its is None or one is None or one.rebalanced or self._runs.left_alone(name):
                return []
            if one is not record:
                if not one.passed:
                    return []  # its own barrier decides
                if its.state == "processing":
                    # Its result is under way. Or its worker was lost then and it has to run again, for which it may
                    # need the thread that waits here.
                    now = time.monotonic()
                    if record.partner_deadline is None:
                        record.partner_deadline = now + PARTNER_SECONDS
                    return None if now < record.partner_deadline else []
                if its.state != "memory" or not one.spec.settings.late_binding:
                    return []
                if one.made:
                    return []  # by an earlier query: its workers have no rows of these any more
            state = one.amendments
            busy = state.opened is not None or state.handing or one.failed or one.telling is not None
            if busy or state.epoch + 1 >= EPOCHS or one.histograms is None or set(its.dependents) != dependents:
                return []
            group.append(one)
        return group

    def _plan(self, group: list[RunRecord]) -> Plan:
        sizes = [_sizes(one.histograms or ()) for one in group]
        if sum(float(size.max(initial=0.0)) for size in sizes) < rebalance_plan.LEAST_BYTES:
            return Plan()  # as with many small outputs
        tasks: dict[int, list[TaskState]] = {}
        barrier = self._runs.barrier_of(group[0].id)
        for ts in () if barrier is None else barrier.dependents:
            part, *others = {output_of(ts.run_spec, one.id) for one in group}
            if part is None or others:
                return Plan()
            tasks.setdefault(part, []).append(ts)
        limit = min(one.spec.settings.cut_bytes for one in group) * _LEAST_CUT * NUMBERS
        outputs = []
        for part, some in tasks.items():
            if any(ts.state in NOT_WANTED for ts in some):
                continue  # made, or not wanted
            owner, *apart = {one.worker_for.get(part) for one in group}
            if owner is None or apart:
                return Plan()
            nbytes = float(sum(size[part] if part < len(size) else 0.0 for size in sizes))
            allowed: frozenset[str] | None = frozenset()
            # An owner that drained and came back may have rows of before that do not count: it would hand them over.
            void = any(part in one.amendments.bound for one in group)
            movable = rebalance_plan.LEAST_BYTES <= nbytes < limit and not void
            if movable and all(ts.state == "waiting" for ts in some):
                allowed = self._allowed(some)
            outputs.append(Output(part, owner, nbytes, allowed))
        held: dict[str, float] = {}
        for output in outputs:
            held[output.owner] = held.get(output.owner, 0.0) + output.nbytes
        if not outputs:
            return Plan()
        self._watch(tasks, outputs)
        name = tasks[max(outputs, key=lambda o: o.nbytes).part][0].prefix.name
        return choose(outputs, self._rooms(group, held), self._prices(group, name), MOVES)

    def _allowed(self, some: list[TaskState]) -> frozenset[str] | None:
        """Workers that the tasks of an output may run on, by the user's word."""
        allowed: frozenset[str] | None = None
        for ts in some:
            if ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions:
                valid = self._scheduler.valid_workers(ts)
                if valid is not None:
                    names = frozenset(ws.address for ws in valid)
                    allowed = names if allowed is None else allowed & names
        return allowed

    def _rooms(self, group: list[RunRecord], held: dict[str, float]) -> dict[str, Room]:
        """The workers by address; `held`: bytes of the outputs that each owns."""
        lost = {address for one in group for address in one.amendments.lost}
        barriers = [self._runs.barrier_of(one.id) for one in group]
        restricted = [ts.worker_restrictions for ts in barriers if ts is not None]
        rooms = {}
        for address, ws in self._scheduler.workers.items():
            takes = (
                ws in self._scheduler.running
                and address not in lost
                and self._able(address)
                and all(not some or address in some for some in restricted)
            )
            nbytes = math.inf
            if ws.memory_limit:
                # What it holds of this run is in its memory, as far as it has not been written to disk.
                others = max(0.0, ws.memory.process - held.get(address, 0.0))
                nbytes = max(0.0, ws.memory_limit * ROOM - others)
            rooms[address] = Room(ws.nthreads, nbytes, takes)
        return rooms

    def _prices(self, group: list[RunRecord], name: str) -> Prices:
        """Of moving outputs whose tasks are called `name`."""
        unpack = self._learned.get(name, JOIN_PER_BYTE if len(group) > 1 else UNPACK_PER_BYTE)
        rates = sorted(one.rate for record in group for one in record.histograms or () if one.rate > 0)
        send = 1 / rates[len(rates) // 2] if rates else SEND_PER_BYTE
        return Prices(unpack, send + HANDLE_PER_BYTE, SPILL_PER_BYTE, FIXED_SECONDS)

    def _watch(self, tasks: dict[int, list[TaskState]], outputs: list[Output]) -> None:
        """Learn from the tasks of the largest outputs, when they have ended."""
        for output in sorted(outputs, key=lambda o: -o.nbytes)[:WATCHED]:
            if output.nbytes >= rebalance_plan.LEAST_BYTES:
                ts = tasks[output.part][0]
                self._runs.listen(ts.key, functools.partial(self._learn, ts.prefix.name, output.nbytes))

    def _learn(self, name: str, nbytes: float, startstops: Iterable[dict[str, Any]]) -> None:
        """The task of a large output has ended well."""
        seconds = sum(one["stop"] - one["start"] for one in startstops if one["action"] == "compute") / nbytes
        if seconds < 0:
            return  # its worker's clock was set back meanwhile
        self._learned[name] = (self._learned.get(name, seconds) + seconds) / 2
        while len(self._learned) > LISTENED:
            del self._learned[next(iter(self._learned))]

    # ---- until it is done

    def _others(self, record: RunRecord) -> list[RunRecord]:
        """Other active runs with some of the same outputs."""
        barrier = self._runs.barrier_of(record.id)
        found = dict(pair for ts in (() if barrier is None else barrier.dependents) for pair in self._runs.sources(ts))
        return [one for one in found.values() if one is not None and one is not record]

    async def settled(self, record: RunRecord) -> Step:
        """Whether the runs that moved outputs with this one, and have passed their barriers, have handed them over."""
        for one in self._others(record):
            state = one.amendments
            if not state.handing or not one.passed:
                continue
            epoch = state.epoch
            if one.telling is not None:
                return Step.WAIT
            problems = await self._calls.flush(one, self._calls.workers_of(one))
            if problems is None or state.epoch != epoch or not self._runs.current(one):
                return Step.WAIT
            if problems:
                one.failed_flushes += 1
                if one.failed_flushes > PATIENCE:
                    self._runs.restart(one, f"outputs cannot be handed over: {problems[0]!r}")
                await asyncio.sleep(PATIENCE_SECONDS)
                return Step.AGAIN
            state.handing.clear()
        return Step.DONE

    def statistics(self) -> dict[str, int]:
        """Counts; plain JSON values."""
        return {"runs": self.runs, "outputs": self.moved, "bytes": self.moved_bytes}


def _sizes(histograms: Iterable[HistogramAnswer]) -> np.ndarray[Any, Any]:
    """Bytes by output, about."""
    rows, nbytes, _ = add_up(histograms)
    return rows * (nbytes / max(1, int(rows.sum())))
