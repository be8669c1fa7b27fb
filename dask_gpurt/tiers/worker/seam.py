"""The only file that touches private names of distributed's Worker.

With `spill_buffer`, which knows those of its `SpillBuffer`, it is the seam to distributed: no other module of the tiers
uses a private name of it. Both look up all they rely on before anything is changed (`SeamMismatch`).

Taken over, and put back exactly:

* ``worker.memory_manager.data`` **and** ``worker.state.data``: setting one alone makes every dependent fail;
* ``worker.execute``: first the task's turn comes (`task_admission`), its inputs are brought into memory (in threads)
  and pinned for the run, and the gate is passed;
* ``worker.handlers["get_data"]``: the same for keys that a peer asks for;
* ``worker.gather_dep``: what is about to be fetched passes the gate first, as what is read from disk does.

An exception in our part of a wrapper is counted and the stock function runs as if we were not there: it reads
synchronously, which is slow but right. While `execute` awaits, the state machine may cancel the task, free its inputs,
and want it again; so after the wait a task whose inputs are not all here is handed back (``RescheduleEvent``), at most
`_MAX_RETURNS` times, instead of failing with a KeyError that stock could not have had.

What becomes of a lost key is in `lost_keys`.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.metrics import context_meter, time
from distributed.worker_state_machine import ExecuteSuccessEvent, FreeKeysEvent, RescheduleEvent

from dask_gpurt.errors import SeamMismatch
from dask_gpurt.model.slots import UNSPILL, waiting
from dask_gpurt.tiers.device.oom import out_of_memory, with_note
from dask_gpurt.tiers.hints.pending_tasks import LocalUses
from dask_gpurt.tiers.hints.prefetch import Prefetch
from dask_gpurt.tiers.hints.worker import HintReceiver
from dask_gpurt.tiers.stores.task_store import TieredStore
from dask_gpurt.tiers.worker import spill_buffer
from dask_gpurt.tiers.worker.lost_keys import Losses
from dask_gpurt.tiers.worker.small_tasks import SmallTasks
from dask_gpurt.tiers.worker.spill_buffer import require_call, require_names
from dask_gpurt.tiers.worker.task_admission import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.spill import SpillBuffer

    from dask_gpurt.tiers.device.oom import RetryAlone
    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.engine.entry import Entry
    from dask_gpurt.tiers.engine.memory_gate import Reservation
    from dask_gpurt.tiers.worker.task_admission import Turn

logger = logging.getLogger("distributed.worker.gpurt")

#: times one task is handed back because an input was missing, before stock reports the error
_MAX_RETURNS = 5
#: results below this need no room of their own, in bytes
_RESERVED_BYTES = 2**20
_RUNNING = {Status.running, Status.paused, Status.closing_gracefully}


class WorkerSeam:
    """Puts a `TieredStore` in the place of ``worker.data``, which is a `SpillBuffer`.

    Raises
    ------
    SeamMismatch
        This distributed is not one we know. Nothing was changed.
    """

    def __init__(self, worker: Any, engine: Engine, *, prefetch_share: float = 0.0) -> None:
        self._worker = worker
        self._engine = engine
        self._check()
        self.store = TieredStore(engine, on_lost=lambda key: self.losses.lost(key))
        #: gives up what has no valid copy left
        self.losses = Losses(worker, self.store, active=lambda: self._active, failed=lambda: self._fell_back("lost"))
        #: what the scheduler says about next uses
        self.hints = HintReceiver(worker, engine, self.store)
        #: what this worker knows by itself
        self.local = LocalUses(worker, engine, self.store)
        #: reads ahead what it tells
        self.prefetch = Prefetch(engine, worker.state.tasks, self.store.entry, prefetch_share)
        self.local.on_pending = self.prefetch.pending
        #: what was ``worker.data``
        self.original: SpillBuffer = worker.memory_manager.data
        self._stock_execute: Callable[..., Any] = worker.execute
        self._stock_get_data: Callable[..., Any] = worker.handlers["get_data"]
        self._stock_gather_dep: Callable[..., Any] = worker.gather_dep
        #: what was set on the worker itself, by somebody who wrapped it before us
        self._had = {name for name in ("execute", "gather_dep") if name in vars(worker)}
        self._active = False
        #: runs a task again that failed for want of device memory; None without a device tier
        self.retry_alone: RetryAlone | None = None
        self._executing = 0
        #: which task begins now
        self.turns = Turns(
            engine,
            limit_bytes=lambda: worker.memory_manager.memory_limit,
            process_bytes=lambda: worker.monitor.get_process_memory(),
            seceded=lambda key: key in worker.state.tasks and worker.state.tasks[key].state == "long-running",
        )
        self.small = SmallTasks(worker, engine, self.store, self.turns.outputs, lambda: self._fell_back("execute"))
        #: decisions that were left to stock Dask because our code raised
        self.fallbacks: Counter[str] = Counter()
        self.last_traceback = ""
        #: seconds that tasks waited for their inputs, the gate included, summed
        self.input_wait_seconds = 0.0
        #: tasks handed back because an input was not here after the wait
        self.returned_tasks = 0
        self._returns: Counter[Any] = Counter()
        self._execute_wrapper = self._wrap_execute()
        self._get_data_wrapper = self._wrap_get_data()
        self._gather_dep_wrapper = self._wrap_gather_dep()

    def _check(self) -> None:
        worker = self._worker
        require_names(
            worker,
            "worker",
            ("memory_manager.data", "state.data", "state.tasks", "state.actors", "handlers", "handle_stimulus"),
        )
        if worker.state.data is not worker.memory_manager.data:
            raise SeamMismatch(
                "worker.state.data and worker.memory_manager.data are two objects: something else has replaced one "
                "of them. Remedy: load dask_gpurt first, or set gpurt.tiers.enabled: false"
            )
        require_call(worker.execute, "Worker.execute", "key", stimulus_id="s")
        require_call(worker.gather_dep, "Worker.gather_dep", "address", ["key"], 1, stimulus_id="s")
        require_call(worker.handlers.get("get_data"), "the get_data handler", None, keys=(), who="", serializers=None)
        require_call(FreeKeysEvent, "FreeKeysEvent", keys=(), stimulus_id="s")
        require_call(RescheduleEvent, "RescheduleEvent", key="k", stimulus_id="s")
        spill_buffer.check(worker.memory_manager.data)

    # ------------------------------------------------------------------ taking over and giving back

    def take_over(self) -> None:
        """Adopt the data and swap it in, in one step of the loop."""
        worker = self._worker
        with self._engine.counters.loop_time:
            spill_buffer.adopt(self.original, self.store)
        worker.memory_manager.data = self.store
        worker.state.data = self.store
        worker.execute = self._execute_wrapper
        worker.gather_dep = self._gather_dep_wrapper
        worker.handlers["get_data"] = self._get_data_wrapper
        self._active = True
        self.prefetch.install()
        self.hints.install()
        self._engine.eviction.on_pressed.append(self._pressed)
        self._pressed()

    def _stop_listening(self) -> None:
        listeners = self._engine.eviction.on_pressed
        if self._pressed in listeners:
            listeners.remove(self._pressed)

    def _pressed(self) -> None:
        """Next uses are worth their price from now on, or not any more."""
        if self._pressed not in self._engine.eviction.on_pressed:  # it was called for, and then we left
            return
        pressed = self._engine.eviction.pressed
        self.hints.want(pressed)
        if pressed:
            self.local.install()
        else:
            self.local.uninstall()
            self.prefetch.clear()

    @property
    def executing(self) -> int:
        """Tasks that run now."""
        return self._executing

    async def give_back(self) -> None:
        """Drain into the original mapping, then put everything back."""
        self._stop_listening()
        await self.hints.uninstall()
        self.local.uninstall()
        self.prefetch.uninstall()
        for key in await self.store.unbox():
            self.losses.give_up(key)
        for key in await spill_buffer.give_back(self.store, self.original, self._engine):
            self.losses.give_up(key)
        self._restore()

    def abandon(self) -> None:
        """The worker is closing: unhook, but leave the data where it is."""
        self._stop_listening()
        self.local.uninstall()
        self.prefetch.uninstall()
        self._unwrap()

    def _restore(self) -> None:
        self._worker.memory_manager.data = self.original
        self._worker.state.data = self.original
        self._unwrap()

    def _unwrap(self) -> None:
        worker = self._worker
        # Where somebody has wrapped us in turn, ours stays in the chain and only passes through.
        self._active = False
        for name, ours, stock in (
            ("execute", self._execute_wrapper, self._stock_execute),
            ("gather_dep", self._gather_dep_wrapper, self._stock_gather_dep),
        ):
            if vars(worker).get(name) is not ours:
                continue
            if name in self._had:
                setattr(worker, name, stock)
            else:
                delattr(worker, name)
        if worker.handlers.get("get_data") is self._get_data_wrapper:
            worker.handlers["get_data"] = self._stock_get_data

    # ------------------------------------------------------------------ wrappers

    def _wrap_execute(self) -> Callable[..., Any]:
        stock = self._stock_execute

        async def execute(key: Any, *, stimulus_id: str) -> Any:
            if not self._active or self._worker.status not in _RUNNING:
                return await stock(key, stimulus_id=stimulus_id)
            held = self.small.hold(key)
            if held is not None:
                self._executing += 1
                try:
                    event = await stock(key, stimulus_id=stimulus_id)
                    self.small.ended(event)
                    if self._engine.eviction.pressed:  # meanwhile
                        self.local.executed(key)
                        self.hints.executed(key, held, event)
                    return event
                finally:
                    self._executing -= 1
                    self.store.release(held)
            pinned: list[Entry] = []
            turn: Turn | None = None
            try:
                turn = await self.turns.begin(key, self._inputs(key))
                pinned = await self._bring_inputs(key)
                if self._must_return(key):
                    self.returned_tasks += 1
                    self.turns.end(turn)
                    return RescheduleEvent(key=key, stimulus_id=f"gpurt-inputs-missing-{time()}")
            except Exception:
                self._fell_back("execute")
            except BaseException:
                self.turns.end(turn)
                self.store.release(pinned)
                raise
            try:
                retry = self.retry_alone
                if retry is not None:
                    await retry.enter()
                room = await self._reserve_output(key)
                self._executing += 1
                try:
                    event = await stock(key, stimulus_id=stimulus_id)
                finally:
                    self._executing -= 1
                    if room is not None:
                        room.release()
                self._learn_output(event)
                if retry is not None and self._wants_memory(event):
                    # The task has not ended for the state machine: it hears of the second event alone.
                    event = await retry.again(
                        lambda: stock(key, stimulus_id=stimulus_id), self._wants_memory, with_note
                    )
                self.local.executed(key)
                self.hints.executed(key, pinned, event)
                return event
            finally:
                self.turns.end(turn)
                self.store.release(pinned)

        return execute

    async def _reserve_output(self, key: Any) -> Reservation | None:
        """Room for what a task will return, by what tasks of its prefix returned so far.

        Without it, tasks that have no inputs, or small ones, all begin at once where one result would still fit. Given
        up when the task was cancelled meanwhile: stock then has to hear at once that nothing runs.
        """
        nbytes = self.turns.outputs.expected(key)
        if nbytes is None or nbytes < _RESERVED_BYTES:
            return None
        try:
            return await self._engine.admit(nbytes)
        except Exception:
            self._fell_back("reserve")
            return None

    def _learn_output(self, event: Any) -> None:
        if isinstance(event, ExecuteSuccessEvent) and event.nbytes:
            self.turns.outputs.learn(event.key, event.nbytes)

    def _inputs(self, key: Any) -> list[Entry]:
        ts = self._worker.state.tasks.get(key)
        found = [] if ts is None else [self.store.entry(d.key) for d in ts.dependencies]
        return [entry for entry in found if entry is not None]

    async def _bring_inputs(self, key: Any) -> list[Entry]:
        ts = self._worker.state.tasks.get(key)
        if ts is None:  # forgotten while it waited for its turn
            return []
        pinned, seconds = await self._ensure([d.key for d in ts.dependencies])
        self.input_wait_seconds += seconds
        if seconds > 0.005:  # the threshold and the label of stock: orange in the task stream
            now = time()
            ts.startstops.append({"action": "disk-read", "start": now - seconds, "stop": now})
        return pinned

    async def _ensure(self, keys: list[Any]) -> tuple[list[Entry], float]:
        """Pin, load, and give up what turns out to be lost. Also the seconds it took."""
        absent = [e for e in map(self.store.entry, keys) if e is not None and not e.in_memory]
        start = time()
        if absent:
            with waiting(UNSPILL):
                pinned = await self.store.ensure(keys)
        else:
            pinned = await self.store.ensure(keys)
        seconds = time() - start
        for entry in pinned:
            if self.store.is_lost(entry.key):
                await self.losses.settle(entry.key)
        read = [e for e in absent if e.in_memory]
        if read:
            context_meter.digest_metric("disk-read", len(read), "count")
            context_meter.digest_metric("disk-read", sum(e.nbytes for e in read), "bytes")
        if seconds > 0.0001:
            context_meter.digest_metric("disk-read", seconds, "seconds")
        return pinned, seconds

    def _must_return(self, key: Any) -> bool:
        """Is an input missing that was here when the state machine started the task?"""
        state = self._worker.state
        ts = state.tasks.get(key)
        if ts is None or ts.state not in ("executing", "long-running"):
            return False  # stock knows what to do with a cancelled one
        if all(d.key in state.data or d.key in state.actors for d in ts.dependencies):
            self._returns.pop(key, None)
            return False
        self._returns[key] += 1
        if self._returns[key] > _MAX_RETURNS:
            del self._returns[key]
            return False
        return True

    def _wrap_get_data(self) -> Callable[..., Any]:
        stock = self._stock_get_data
        worker = self._worker

        async def get_data(comm: Any, *args: Any, **kwargs: Any) -> Any:
            # A request that stock will turn away needs nothing loaded; its own limit is at most twice this one.
            limit = worker.transfer_outgoing_count_limit
            busy = limit is not False and worker.transfer_outgoing_count >= 2 * limit
            pinned: list[Entry] = []
            if self._active and not busy and worker.status in _RUNNING:
                try:
                    keys = list(kwargs["keys"] if "keys" in kwargs else args[0])
                    pinned, seconds = await self._ensure(keys)
                    if seconds > 0.0001:
                        worker.digest_metric(("get-data", "disk-read", "seconds"), seconds)
                except Exception:
                    self._fell_back("get_data")
            try:
                answer = await stock(comm, *args, **kwargs)
                who = kwargs["who"] if "who" in kwargs else args[1] if len(args) > 1 else None
                if who and answer is Status.dont_reply:
                    self.hints.sent(pinned)
                return answer
            finally:
                self.store.release(pinned)

        return get_data

    def _wants_memory(self, event: Any) -> bool:
        try:
            return out_of_memory(event) is not None
        except Exception:  # the error's own code, while it is unpickled
            self._fell_back("out of memory")
            return False

    def _wrap_gather_dep(self) -> Callable[..., Any]:
        stock = self._stock_gather_dep

        async def gather_dep(worker: str, to_gather: Any, total_nbytes: int, *, stimulus_id: str) -> Any:
            room: Reservation | None = None
            if self._active and self._worker.status in _RUNNING:
                try:
                    room = await self._engine.admit(total_nbytes)
                except Exception:
                    self._fell_back("gather_dep")
            try:
                return await stock(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)
            finally:
                # The values become entries in this turn of the loop or the next.
                if room is not None:
                    room.release()

        return gather_dep

    def _fell_back(self, where: str) -> None:
        self.fallbacks[where] += 1
        self.last_traceback = traceback.format_exc()
        if self.fallbacks[where] in (1, 10, 100, 1000):
            logger.warning("%s was left to stock Dask (%d times)", where, self.fallbacks[where])
