"""`RootQueue`: overrides which queued root task goes to which worker. See `seam` for the rules.

`install` takes over three names of the scheduler. The choices are the engine's, by methods of it, of its blocks and of
`decide.root_dispatch`. Everything else of queuing stays *stock*, that is Dask's own: how many tasks a worker gets, when
free slots are filled, the transitions.

1. ``waiting -> processing`` (table entry). A root that is given out `at_once` is not queued, `choose` names its worker.
   Nor is one that has a `home`. One that `waits` becomes ``queued`` although workers are idle. Slots are filled in the
   next turn of the event loop, when the whole graph has arrived. Not with ``validate=True``: distributed then asserts
   that nothing is queued while a worker is idle, and exactly that is relaxed here for one turn.
2. ``stimulus_queue_slots_maybe_opened``. A worker with a free slot is offered the task that `pull` names, through
   stock's own transition. What is left goes as in stock: the head of the queue to the least busy worker, unless that
   head is `held`. With ``validate=True`` stock's own method does the latter, as it asserts that a free slot is used.
3. ``decide_worker_rootish_queuing_enabled``. Within step 2 it answers with the worker of that step. Otherwise it
   answers with the least busy of the `takers` that is `worth` it. If there is none the task stays queued, but only
   while other workers are busy: their next finished task fills slots again.

If anything raises, stock's methods do their work on a state that is valid at any point: a task is queued or assigned.

Cost: stock adds up the free slots of all idle workers and compares all of them for each task. That is O(workers) per
root: 66 s of blocked event loop for 37,500 tasks on 10,000 workers. Here each event asks the workers that have just
finished a task and `root_dispatch.ASKED` others. Only the first round after a graph, which gives most workers
something, asks all.
"""

from __future__ import annotations

import asyncio
import math
import operator
import time
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from distributed.core import Status

from dask_gpurt.placement.evaluate.decision_record import HOME

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from distributed.scheduler import RecsMsgs, Scheduler, TaskState, WorkerState

    from dask_gpurt.placement.engine import Engine
    from dask_gpurt.placement.takeover.seam import Seam

NAMES = ("_TRANSITIONS_TABLE", "stimulus_queue_slots_maybe_opened", "decide_worker_rootish_queuing_enabled")
_address = operator.attrgetter("address")
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


def _load(ws: WorkerState) -> float:
    return len(ws.processing) / ws.nthreads


def _has_thread(ws: WorkerState) -> bool:
    return len(ws.processing) - len(ws.long_running) < ws.nthreads


class RootQueue:
    """Overrides how one scheduler gives out its queued root tasks."""

    def __init__(self, seam: Seam, engine: Engine) -> None:
        self.scheduler: Scheduler = seam.scheduler
        self.seam = seam
        self.part = seam.part("roots")
        dispatch, groups = engine.root_dispatch, engine.groups
        self._at_once, self._choose = dispatch.tiny.at_once, dispatch.tiny.worker
        self._waits, self._pull, self._pending = groups.waits, engine.pull, groups.__len__
        self._worth, self._held, self._stock = engine.worth, engine.held, engine.leaves_roots
        self._home, self._dispatch = dispatch.home, dispatch
        self._log, self._books = engine.log, engine.books
        self._given = engine.given
        self._quiet, self._hungry = dispatch.quiet, dispatch.hungry
        self._first, self._takers = dispatch.first, dispatch.takers
        #: the task that becomes ready now
        self._deciding: TaskState | None = None
        #: the worker that the root now in transition was offered to
        self._chosen: list[WorkerState] = []
        #: slots are to be filled in the next turn of the event loop
        self._dealing = False
        #: the next round is the first after a graph. It fills threads only; slots beyond them are filled when a task is
        #: done. Otherwise a root would run before a task that stock has put on the same worker and that others need.
        self._first_deal = False

    def install(self) -> None:
        """Take over; all names or none.

        Raises
        ------
        InstallError
            Another plugin has taken over one of them.
        """
        seam, s = self.seam, self.scheduler
        seam.require_free(*NAMES)
        self._stock_pump = seam.stock("stimulus_queue_slots_maybe_opened")
        self._stock_decide = seam.stock("decide_worker_rootish_queuing_enabled")
        table = dict(type(s)._TRANSITIONS_TABLE)
        self._stock_ready = table["waiting", "processing"]
        table["waiting", "processing"] = self._ready
        for name, ours in zip(NAMES, (table, self._slots_opened, self._decide), strict=True):
            seam.put(name, ours)

    # ------------------------------------------------------------------ the three overrides

    def _ready(self, state: Scheduler, key: Hashable, stimulus_id: str, **kwargs: object) -> RecsMsgs:
        """``waiting -> processing``: with `state` the scheduler, as the table's functions are called."""
        ts = state.tasks.get(key)
        if self.part.retired is None and not state.validate:
            try:
                at_once, home = self._at_once(ts), self._home(ts)
                if (
                    (at_once or home or (self._waits(ts) and state.idle_task_count))
                    and ts._queueable
                    and not math.isinf(state.WORKER_SATURATION)
                    and state.is_rootish(ts)
                    and not self._stock()
                ):
                    if (ws := home or (self._choose(ts) if at_once else None)) is not None:
                        self._chosen.append(ws)
                        if home is None:
                            self._books.tiny_key = key
                        else:
                            self._dispatch.at_home += 1
                            self._log.root(key, ws.address, HOME)
                    elif not at_once and self._deal_soon():
                        return {key: "queued"}, {}, {}
            except Exception:
                self.seam.failed(self.part.name)
        # Stock's decider, which this may call, has no argument for the task.
        self._deciding = ts
        try:
            return self._stock_ready(state, key, stimulus_id, **kwargs)
        finally:
            self._deciding = None
            self._chosen.clear()

    def _slots_opened(self, *, stimulus_id: str) -> None:
        # Called after every task: leave early where a cheap test allows it.
        s = self.scheduler
        queued, idle = s.queued, s.idle_task_count
        first_deal, self._first_deal = self._first_deal, False
        if not queued:  # as stock's does
            return
        if self.part.retired is not None or self._stock():
            self._stock_pump(stimulus_id=stimulus_id)
            return
        if not idle and self._ask(self._quiet, False):
            return
        given = 0
        if self._pending():
            order = self._order(first_deal or s.validate) if idle else []
            # Once more, as what is more urgent than a worker's own roots has gone to others, or is held for them.
            for ws in order * 2 if first_deal else order:
                while (
                    ws in idle and queued and (not first_deal or _has_thread(ws)) and self._ask(self._worth, True, ws)
                ):
                    ts = self._offer(ws)
                    if ts is None or not self._send(ts, ws, stimulus_id):
                        break
                    given += 1
        if s.validate:
            self._stock_pump(stimulus_id=stimulus_id)
            return
        for ws in self._hungry_workers():
            ts = self._offer(ws, ahead=True) if queued else None
            # A root that needs inputs from elsewhere as well would only wait beside the others.
            if ts is not None and all(ws in d.who_has for d in ts.dependencies):
                self._send(ts, ws, stimulus_id)
        while idle and queued:
            ts = queued.peek()
            threads = bool(first_deal and given and self._ask(self._waits, False, ts))
            if threads and not any(map(_has_thread, idle)):
                return
            if self._ask(self._held, False, ts):
                return
            ws = self._least_busy(ts, threads)
            if ws is None or not self._send(ts, ws, stimulus_id):
                return

    def _decide(self) -> WorkerState | None:
        s = self.scheduler
        ws = self._chosen.pop() if self._chosen else None
        if ws is None or ws.status is not Status.running or s.workers.get(ws.address) is not ws:
            if self.part.retired is not None or s.validate or self._stock():
                return self._stock_decide()
            ws = self._least_busy(self._deciding)
        if ws is not None:
            self._ask(self._given, None, ws)
        return ws

    # ------------------------------------------------------------------ parts of them

    def _least_busy(self, ts: TaskState | None, threads: bool = False) -> WorkerState | None:
        """A worker for a root that no worker pulled (`ts`, when it is known), one with a free thread if `threads`.

        None: it stays queued.
        """
        s = self.scheduler
        idle = s.idle_task_count
        if not idle:
            return None

        def able(ws: WorkerState) -> bool:
            return (not threads or _has_thread(ws)) and self._worth(ws)

        try:
            pool = [ws for ws in self._takers(ts, able) if ws in idle and able(ws)]
        except Exception:
            self.seam.failed(self.part.name)
            return self._stock_decide()
        if pool:
            return min(pool, key=_load)
        # Free slots say nothing: a worker may have one and be at work. A seceded task may wait for this one.
        at_work = any(len(ws.processing) > len(ws.long_running) for ws in s.running)
        return None if at_work else self._stock_decide()

    def _send(self, ts: TaskState, ws: WorkerState, stimulus_id: str) -> bool:
        """Send a queued task to a worker, or to its `home`; False when it is still queued."""
        home = self._ask(self._home, None, ts)
        if home is not None:
            self._ask(self._log.root, None, ts.key, home.address, HOME)
        self._chosen.append(home or ws)
        try:
            self.scheduler.transitions({ts.key: "processing"}, stimulus_id)
        finally:
            self._chosen.clear()
        self._dispatch.at_home += ts.state == "processing" and home is not None
        # Not whether it went: Dask fails a task whose inputs are larger than the worker, and those behind it may go.
        return bool(ts.state != "queued")

    def _offer(self, ws: WorkerState, ahead: bool = False) -> TaskState | None:
        """The task that a worker pulls, checked; None: none in particular."""
        try:
            ts = self._pull(ws, ahead)
            if ts is None or (ts.state == "queued" and self.scheduler.tasks.get(ts.key) is ts):
                return ts
            self.seam.failed(self.part.name, "rejected", f"{ts!r} is not queued")
        except Exception:
            self.seam.failed(self.part.name)
        return None

    def _order(self, everybody: bool) -> list[WorkerState]:
        idle = self.scheduler.idle_task_count
        try:
            some = list(self._first())
            if not everybody and len(some) > 1:
                some = list(dict.fromkeys(ws for ws in some if ws in idle))
        except Exception:
            self.seam.failed(self.part.name)
            some = []
        # Neighbouring blocks go to workers of one host: sorted by address.
        return sorted(idle, key=_address) if everybody else some

    def _hungry_workers(self) -> list[WorkerState]:
        s = self.scheduler
        hungry: list[WorkerState] = self._ask(self._hungry, [])
        return [ws for ws in hungry if s.workers.get(ws.address) is ws and ws.status is Status.running]

    def _ask(self, question: Callable[[*_Ts], _T], otherwise: _T, *args: *_Ts) -> _T:
        """What one of the callables answers; `otherwise` if it raises, which is counted."""
        try:
            return question(*args)
        except Exception:
            self.seam.failed(self.part.name)
            return otherwise

    # ------------------------------------------------------------------ dealing soon

    def _deal_soon(self) -> bool:
        """Fill slots in the next turn of the event loop; False when there is no event loop."""
        if self._dealing:
            return True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        loop.call_soon(self._deal)
        self._dealing = True
        return True

    def _deal(self) -> None:
        # Also after an uninstall: it calls whatever method is there by then, so nothing stays queued.
        self._dealing = False
        s = self.scheduler
        if s.queued and s.idle_task_count:
            self._first_deal = not s.validate
            s.stimulus_queue_slots_maybe_opened(stimulus_id=f"gpurt-deal-{time.time()}")
