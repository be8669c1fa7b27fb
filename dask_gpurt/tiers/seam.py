"""The only file that touches private names of distributed's Worker.

With `adoption`, which knows those of its `SpillBuffer`, it is the seam to distributed: no other module of the tiers
uses a private name of it. Both look up all they rely on before anything is changed (`SeamMismatch`).

Taken over, and put back exactly:

* ``worker.memory_manager.data`` **and** ``worker.state.data``: setting one alone makes every dependent fail;
* ``worker.execute``: first the inputs are brought into memory (in threads) and pinned for the run, and the gate is
  passed;
* ``worker.handlers["get_data"]``: the same for keys that a peer asks for.

An exception in our part of a wrapper is counted and the stock function runs as if we were not there: it reads
synchronously, which is slow but right. While `execute` awaits, the state machine may cancel the task, free its inputs,
and want it again; so after the wait a task whose inputs are not all here is handed back (``RescheduleEvent``), at most
`_MAX_RETURNS` times, instead of failing with a KeyError that stock could not have had.

A lost key (its last copy unreadable) is freed: the state machine then tells the scheduler (``release-worker-data``),
which computes it again, or fetches it from another holder. Tasks here that wait for it are freed and returned with a
``reschedule`` message each; the scheduler ignores that message for those it has taken back itself. A scattered
key has no recipe, and freeing it would break the scheduler (its memory->released puts pure data back to "waiting" when
a dependent is processing); it stays here as LOST, and tasks that read it fail with `LostData`, until no task here waits
for it. Only the scheduler knows
whether a key that was fetched here has a recipe or another holder, so it is asked.

Rejected: letting a task fail on lost data (wrong: the recipe exists); a ``missing-data`` message (no longer understood
by the scheduler).
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.metrics import context_meter, time
from distributed.worker_state_machine import FreeKeysEvent, RescheduleEvent

from dask_gpurt.errors import SeamMismatch
from dask_gpurt.model.slots import UNSPILL, waiting
from dask_gpurt.tiers import adoption
from dask_gpurt.tiers.adoption import require_call, require_names
from dask_gpurt.tiers.hints_worker import HintReceiver
from dask_gpurt.tiers.store import TieredStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.spill import SpillBuffer

    from dask_gpurt.tiers.engine import Engine
    from dask_gpurt.tiers.entry import Entry

logger = logging.getLogger("distributed.worker.gpurt")

#: times one task is handed back because an input was missing, before stock reports the error
_MAX_RETURNS = 5
_ENDED = {"error", "memory", "released", "forgotten"}
_RUNNING = {Status.running, Status.paused, Status.closing_gracefully}


class WorkerSeam:
    """Puts a `TieredStore` in the place of ``worker.data``, which is a `SpillBuffer`.

    Raises
    ------
    SeamMismatch
        This distributed is not one we know. Nothing was changed.
    """

    def __init__(self, worker: Any, engine: Engine) -> None:
        self._worker = worker
        self._engine = engine
        self._check()
        self.store = TieredStore(engine, on_lost=self.lost)
        #: what the scheduler says about next uses
        self.hints = HintReceiver(worker, engine, self.store)
        #: what was ``worker.data``
        self.original: SpillBuffer = worker.memory_manager.data
        self._stock_execute: Callable[..., Any] = worker.execute
        self._stock_get_data: Callable[..., Any] = worker.handlers["get_data"]
        self._had_execute = "execute" in vars(worker)
        self._active = False
        #: decisions that were left to stock Dask because our code raised
        self.fallbacks: Counter[str] = Counter()
        self.last_traceback = ""
        #: keys that were lost and given up to the scheduler
        self.lost_keys = 0
        #: tasks handed back because an input was not here after the wait
        self.returned_tasks = 0
        self._returns: Counter[Any] = Counter()
        self._tasks: set[asyncio.Future[None]] = set()
        self._execute_wrapper = self._wrap_execute()
        self._get_data_wrapper = self._wrap_get_data()

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
        require_call(worker.handlers.get("get_data"), "the get_data handler", None, keys=(), who="", serializers=None)
        require_call(FreeKeysEvent, "FreeKeysEvent", keys=(), stimulus_id="s")
        require_call(RescheduleEvent, "RescheduleEvent", key="k", stimulus_id="s")
        adoption.check(worker.memory_manager.data)

    # ------------------------------------------------------------------ taking over and giving back

    def take_over(self) -> None:
        """Adopt the data and swap it in, in one step of the loop."""
        worker = self._worker
        with self._engine.counters.loop_time:
            adoption.adopt(self.original, self.store)
        worker.memory_manager.data = self.store
        worker.state.data = self.store
        worker.execute = self._execute_wrapper
        worker.handlers["get_data"] = self._get_data_wrapper
        self._active = True
        self.hints.install()

    async def give_back(self) -> None:
        """Drain into the original mapping, then put everything back."""
        await self.hints.uninstall()
        for key in await adoption.give_back(self.store, self.original, self._engine):
            self._give_up(key)
        self._restore()

    def abandon(self) -> None:
        """The worker is closing: unhook, but leave the data where it is."""
        self._unwrap()

    def _restore(self) -> None:
        self._worker.memory_manager.data = self.original
        self._worker.state.data = self.original
        self._unwrap()

    def _unwrap(self) -> None:
        worker = self._worker
        # Where somebody has wrapped us in turn, ours stays in the chain and only passes through.
        self._active = False
        if vars(worker).get("execute") is self._execute_wrapper:
            if self._had_execute:
                worker.execute = self._stock_execute
            else:
                del worker.execute
        if worker.handlers.get("get_data") is self._get_data_wrapper:
            worker.handlers["get_data"] = self._stock_get_data

    # ------------------------------------------------------------------ wrappers

    def _wrap_execute(self) -> Callable[..., Any]:
        stock = self._stock_execute

        async def execute(key: Any, *, stimulus_id: str) -> Any:
            if not self._active or self._worker.status not in _RUNNING:
                return await stock(key, stimulus_id=stimulus_id)
            pinned: list[Entry] = []
            try:
                pinned = await self._bring_inputs(key)
                if self._must_return(key):
                    self.returned_tasks += 1
                    return RescheduleEvent(key=key, stimulus_id=f"gpurt-inputs-missing-{time()}")
            except Exception:
                self._fell_back("execute")
            except BaseException:
                self.store.release(pinned)
                raise
            try:
                event = await stock(key, stimulus_id=stimulus_id)
                self.hints.executed(key, pinned, event)
                return event
            finally:
                self.store.release(pinned)

        return execute

    async def _bring_inputs(self, key: Any) -> list[Entry]:
        ts = self._worker.state.tasks[key]
        pinned, seconds = await self._ensure([d.key for d in ts.dependencies])
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
                await self._settle_lost(entry.key)
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
                return await stock(comm, *args, **kwargs)
            finally:
                self.store.release(pinned)

        return get_data

    def _fell_back(self, where: str) -> None:
        self.fallbacks[where] += 1
        self.last_traceback = traceback.format_exc()
        if self.fallbacks[where] in (1, 10, 100, 1000):
            logger.warning("%s was left to stock Dask (%d times)", where, self.fallbacks[where])

    # ------------------------------------------------------------------ loss

    def lost(self, key: Any) -> None:
        """A key turned out to have no valid copy here: settle it in the background."""
        task = asyncio.ensure_future(self._settle_lost(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle_lost(self, key: Any) -> None:
        """Give the key up if it can be had elsewhere or computed again; else later, when nobody here waits for it."""
        try:
            if not await self._recoverable(key):
                task = asyncio.ensure_future(self._give_up_when_unused(key))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif self.store.is_lost(key):
                self._give_up(key)
        except Exception:
            self._fell_back("lost")

    async def _give_up_when_unused(self, key: Any) -> None:
        # First its dependents fail (`LostData`), then the scheduler is told, which tells the clients.
        while self._active and self.store.is_lost(key):
            await asyncio.sleep(0.1)
            ts = self._worker.state.tasks.get(key)
            if ts is None or all(d.state in _ENDED for d in ts.dependents):
                if self.store.is_lost(key):
                    self._give_up(key)
                return

    async def _recoverable(self, key: Any) -> bool:
        ts = self._worker.state.tasks.get(key)
        if ts is None or ts.run_spec is not None:
            return True
        scheduler = self._worker.scheduler
        holders = await scheduler.who_has(keys=[key])
        if any(address != self._worker.address for address in holders.get(key, ())):
            return True
        return await scheduler.get_runspec(key=key) is not None

    def _give_up(self, key: Any) -> None:
        """On the loop, outside of the state machine."""
        self.lost_keys += 1
        state = self._worker.state
        ts = state.tasks.get(key)
        stimulus_id = f"gpurt-lost-{time()}"
        if ts is not None and ts.state == "memory":
            waiting = [d.key for d in ts.dependents if d.state in ("ready", "constrained", "waiting")]
            # Dependents first: the state machine's invariants want the inputs of a ready task to be here.
            self._worker.handle_stimulus(FreeKeysEvent(keys=[*waiting, key], stimulus_id=stimulus_id))
            for dependent in waiting:
                # After release-worker-data on the same stream: a task that the scheduler has taken back because of it
                # is no longer "processing" here, and it ignores this.
                self._worker.batched_send({"op": "reschedule", "key": dependent, "stimulus_id": stimulus_id})
        if key in self.store.own_keys_view:  # the state machine did not know it
            self.store.forget(key)
