"""The scheduler's side of `rebalance_plan`: when outputs are bound late, what is known then, and what changes.

Theory of operation. Workers tell the rows of outputs together with their flush, so a barrier has them when all inputs
are in place (`hear`). Before it passes, `begin` asks the policy; where outputs move, it changes their owners in one
turn of the loop and begins a new epoch, which `Amender` tells the workers as it tells a loss. The barrier then goes
round once more: its flush ends when all has been handed over.

Shuffles with the same outputs (the sides of a join) move together. The one whose barrier comes last decides for all;
the others have passed theirs, but no output can have been made, as each waits for every barrier. Their flush is asked
for by that last barrier (`settled`).

Outputs move only as long as nobody has made or begun one, where their tasks are plain to see, and to workers that
these tasks may run on. A run is looked at once, and a shuffle that was restarted while outputs were handed over never
again.

Seconds per byte are those of the latest large outputs whose tasks are named alike (`ended`), where there were any, else
those measured on one core. Not the scheduler's own averages: tasks that only stand for persisted results count in them.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.protocol import rebalance_plan
from dask_gpurt.shuffle.protocol.histogram import add_up
from dask_gpurt.shuffle.protocol.rebalance_plan import Output, Plan, Prices, Room, choose
from dask_gpurt.shuffle.protocol.recovery import EPOCHS
from dask_gpurt.shuffle.scheduler.co_shuffles import sources
from dask_gpurt.shuffle.scheduler.reopen import PATIENCE
from dask_gpurt.shuffle.worker.handover import MOVES, NUMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np

    from dask_gpurt.shuffle.scheduler.recovery import Amender

#: seconds per byte of unpacking, and of a join with it, where no such task of this cluster tells
UNPACK_PER_BYTE = 1 / 1e9
JOIN_PER_BYTE = 1 / 300e6
#: of taking, encoding and storing what is moved; and of sending it, where no message tells
HANDLE_PER_BYTE = 1 / 1e9
SEND_PER_BYTE = 1 / 500e6
#: tasks whose seconds are looked at: of so many of a run's large outputs; and in all, at a time
WATCHED = 16
WATCHED_AT_ALL = 4096
#: of writing to disk and reading back
SPILL_PER_BYTE = 2 / 500e6
#: of the rounds of messages
FIXED_SECONDS = 0.05
#: looks at a partner whose barrier is about to end, `reopen.LOOK_SECONDS` apart
LOOKS = 50
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
    """

    def __init__(self, scheduler: Any, plugin: Any, amender: Amender, able: Callable[[str], bool]) -> None:
        self._scheduler = scheduler
        self._plugin = plugin
        self._amender = amender
        self._able = able
        #: run -> what its workers told
        self._told: weakref.WeakKeyDictionary[Any, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
        #: runs that were looked at
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        #: run -> looks at a partner whose barrier was about to end
        self._looks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: run -> flushes that failed while it handed over
        self._failures: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: key of a large output -> (what its task is called, its bytes), until it is made
        self._watched: dict[Any, tuple[str, float]] = {}
        #: what a task is called -> seconds per byte of its output's rows, a running mean
        self._learned: dict[str, float] = {}
        #: shuffles that are left alone, the oldest first
        self._never: dict[Any, None] = {}
        self.moved = 0
        self.moved_bytes = 0
        #: runs in which outputs moved
        self.runs = 0

    # ---- what is known

    async def hear(self, state: Any, workers: list[str]) -> None:
        """Ask the workers of a run for their histograms, once. Never raises."""
        if state in self._told:
            return
        msg = {
            "op": "shuffle_receive",
            "shuffle_id": state.id,
            "run_id": state.run_id,
            "data": {"gpurt": "histogram"},
        }
        try:
            answers = await self._amender.broadcast(msg, workers, 10.0)
        except TimeoutError:
            return
        told = list((answers or {}).values())
        if told and all(isinstance(one, dict) and one.get("status") == "OK" for one in told):
            self._told[state] = told

    def told(self, state: Any) -> list[dict[str, Any]] | None:
        """What the workers of a run told; None: not known."""
        return self._told.get(state)

    # ---- binding

    def begin(self, shuffle_id: Any, state: Any) -> bool | None:
        """Move what is worth it, when all inputs of a run are in place; whether owners have changed.

        None: not known yet, ask again a little later.
        """
        if not state.run_spec.spec.settings.late_binding or state in self._seen or shuffle_id in self._never:
            return False
        group = self._group(shuffle_id, state)
        if not group:
            return group if group is None else False
        self._seen.update(group.values())
        plan = self._plan(group)
        if not plan.moves:
            return False
        for name, one in group.items():
            run_state, worker_for = one.run_spec.spec.state, one.run_spec.worker_for
            moves = [move for move in plan.moves if move.part in worker_for]
            run_state.epoch += 1
            for move in moves:
                worker_for[move.part] = move.target
                run_state.bound[move.part] = run_state.epoch
                run_state.handing[move.part] = move.source
                run_state.moves[move.part] = move.source, move.target
            one.participating_workers |= {move.target for move in moves}
            self._amender.amend(name, one)
        self.runs += 1
        self.moved += len(plan.moves)
        self.moved_bytes += int(sum(move.nbytes for move in plan.moves))
        return True

    def _group(self, shuffle_id: Any, state: Any) -> dict[Any, Any] | None:
        """Runs with the same outputs, by shuffle; empty when they can not move, None when that is not known yet."""
        amender = self._amender
        barrier = amender.barrier_of(shuffle_id)
        dependents = set(barrier.dependents)
        names = {shuffle_id} | {name for ts in dependents for name, _ in sources(self._plugin, ts)}
        group: dict[Any, Any] = {}
        for name in names:
            one, its = self._plugin.active_shuffles.get(name), amender.barrier_of(name)
            if its is None or one in self._seen or name in self._never or not amender.ours(one):
                return {}
            if name != shuffle_id:
                if not amender.passed(one):
                    return {}  # its own barrier decides
                if its.state == "processing":
                    # Its result is under way. Or its worker was lost then and it has to run again, for which it may
                    # need the thread that waits here.
                    self._looks[state] = self._looks.get(state, 0) + 1
                    return None if self._looks[state] < LOOKS else {}
                if its.state != "memory" or not one.run_spec.spec.settings.late_binding:
                    return {}
            run_state = one.run_spec.spec.state
            busy = run_state.opened is not None or run_state.handing or one._failed or amender.amending(name, one)
            if busy or run_state.epoch + 1 >= EPOCHS or one not in self._told or set(its.dependents) != dependents:
                return {}
            group[name] = one
        return group

    def _plan(self, group: dict[Any, Any]) -> Plan:
        states = list(group.values())
        sizes = [self._sizes(one) for one in states]
        if sum(float(size.max(initial=0.0)) for size in sizes) < rebalance_plan.LEAST_BYTES:
            return Plan()  # as with many small outputs
        tasks: dict[int, list[Any]] = {}
        for ts in self._amender.barrier_of(states[0].id).dependents:
            part, *others = {seam.output_of(ts.run_spec, name) for name in group}
            if part is None or others:
                return Plan()
            tasks.setdefault(part, []).append(ts)
        limit = min(one.run_spec.spec.settings.cut_bytes for one in states) * _LEAST_CUT * NUMBERS
        outputs = []
        for part, some in tasks.items():
            if any(ts.state in ("memory", "released", "forgotten") for ts in some):
                continue  # made, or not wanted
            owner, *others = {one.run_spec.worker_for.get(part) for one in states}
            if owner is None or others:
                return Plan()
            nbytes = float(sum(size[part] if part < len(size) else 0.0 for size in sizes))
            allowed: frozenset[str] | None = frozenset()
            if rebalance_plan.LEAST_BYTES <= nbytes < limit and all(ts.state == "waiting" for ts in some):
                allowed = self._allowed(some)
            outputs.append(Output(part, owner, nbytes, allowed))
        held: dict[str, float] = {}
        for output in outputs:
            held[output.owner] = held.get(output.owner, 0.0) + output.nbytes
        if not outputs:
            return Plan()
        self._watch(tasks, outputs)
        name = tasks[max(outputs, key=lambda o: o.nbytes).part][0].prefix.name
        return choose(outputs, self._rooms(states, held), self._prices(states, name), MOVES)

    def _sizes(self, state: Any) -> np.ndarray[Any, Any]:
        """Bytes by output, about."""
        rows, nbytes, _ = add_up(self._told[state])
        return rows * (nbytes / max(1, int(rows.sum())))

    def _allowed(self, some: list[Any]) -> frozenset[str] | None:
        """Workers that the tasks of an output may run on, by the user's word."""
        allowed: frozenset[str] | None = None
        for ts in some:
            if ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions:
                valid = self._scheduler.valid_workers(ts)
                if valid is not None:
                    names = frozenset(ws.address for ws in valid)
                    allowed = names if allowed is None else allowed & names
        return allowed

    def _rooms(self, states: list[Any], held: dict[str, float]) -> dict[str, Room]:
        lost = {address for one in states for address in one.run_spec.spec.state.lost}
        restricted = [self._amender.barrier_of(one.id).worker_restrictions for one in states]
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

    def _prices(self, states: list[Any], name: str) -> Prices:
        """Of moving outputs whose tasks are called `name`."""
        unpack = self._learned.get(name, JOIN_PER_BYTE if len(states) > 1 else UNPACK_PER_BYTE)
        rates = sorted(one["rate"] for state in states for one in self._told[state] if one["rate"] > 0)
        send = 1 / rates[len(rates) // 2] if rates else SEND_PER_BYTE
        return Prices(unpack, send + HANDLE_PER_BYTE, SPILL_PER_BYTE, FIXED_SECONDS)

    def _watch(self, tasks: dict[int, list[Any]], outputs: list[Output]) -> None:
        for output in sorted(outputs, key=lambda o: -o.nbytes)[:WATCHED]:
            if output.nbytes >= rebalance_plan.LEAST_BYTES:
                ts = tasks[output.part][0]
                self._watched[ts.key] = ts.prefix.name, output.nbytes
        while len(self._watched) > WATCHED_AT_ALL:
            del self._watched[next(iter(self._watched))]

    def ended(self, key: Any, startstops: Iterable[dict[str, Any]]) -> None:
        """A task has ended well: learn from it, should it be that of a large output."""
        if (watched := self._watched.pop(key, None)) is not None:
            name, nbytes = watched
            seconds = sum(one["stop"] - one["start"] for one in startstops if one["action"] == "compute") / nbytes
            self._learned[name] = (self._learned.get(name, seconds) + seconds) / 2
            while len(self._learned) > WATCHED_AT_ALL:
                del self._learned[next(iter(self._learned))]

    # ---- until it is done

    def _others(self, shuffle_id: Any, state: Any) -> Iterator[tuple[Any, Any]]:
        """Other active runs with the same outputs."""
        barrier = self._amender.barrier_of(shuffle_id)
        found = dict(pair for ts in barrier.dependents for pair in sources(self._plugin, ts))
        yield from ((name, one) for name, one in found.items() if name != shuffle_id and self._amender.ours(one))

    async def settled(self, shuffle_id: Any, state: Any) -> bool:
        """Whether the runs that moved outputs with this one, and have passed their barriers, have handed them over."""
        for name, one in list(self._others(shuffle_id, state)):
            run_state = one.run_spec.spec.state
            if not run_state.handing or not self._amender.passed(one):
                continue
            epoch = run_state.epoch
            if self._amender.amending(name, one):
                return False
            there = [address for address in one.participating_workers if address in self._scheduler.workers]
            problems = await self._amender.flush(one, there)
            if problems is None or run_state.epoch != epoch or not self._amender.current(name, one):
                return False
            if problems:
                self._failures[one] = self._failures.get(one, 0) + 1
                if self._failures[one] > PATIENCE:
                    self._amender.restart(name, one, f"outputs can not be handed over: {problems[0]!r}")
                return False
            run_state.handing.clear()
        return True

    def leave(self, shuffle_id: Any, state: Any) -> None:
        """A run is restarted; were outputs being handed over, its shuffle is left alone from now on."""
        if state.run_spec.spec.state.handing:
            self._never[shuffle_id] = None
            while len(self._never) > 10_000:
                del self._never[next(iter(self._never))]

    def statistics(self) -> dict[str, int]:
        """Counts; plain JSON values."""
        return {"runs": self.runs, "outputs": self.moved, "bytes": self.moved_bytes}
