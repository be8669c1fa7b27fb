"""What is put around three methods of a worker, so that what they read is in memory, and pinned, before they read it.

* `Execute`, around ``worker.execute``: the task's turn comes (`task_admission`), its inputs are brought into memory in
  threads and pinned for the run (`inputs`), and there is room for its result (`memory_gate`);
* `GetData`, around the handler ``get_data``: the same for keys that a peer asks for. No more at a time than Dask sends,
  which is one request while the worker is paused: it counts a request before it reads, so the others are "busy";
* `GatherDep`, around ``worker.gather_dep``: what is about to be fetched waits for room first.

An exception in our part is counted, and Dask's own method runs as if ours were not there: it reads synchronously, which
is slow but right. After too many failures the override is switched off (`circuit_breaker`), with the same effect.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.metrics import time
from distributed.worker_state_machine import ExecuteSuccessEvent, RescheduleEvent

from dask_gpurt.model.wrapped import Wrapped
from dask_gpurt.tiers.device.oom import out_of_memory, with_note

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from dask.typing import Key
    from distributed.comm import Comm
    from distributed.worker import Worker
    from distributed.worker_state_machine import StateMachineEvent

    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.tiers.device.oom import RetryAlone
    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.engine.entry import Entry
    from dask_gpurt.tiers.engine.memory_gate import Reservation
    from dask_gpurt.tiers.hints.pending_tasks import LocalUses
    from dask_gpurt.tiers.hints.worker import HintReceiver
    from dask_gpurt.tiers.stores.task_store import TieredStore
    from dask_gpurt.tiers.worker.inputs import Inputs
    from dask_gpurt.tiers.worker.small_tasks import SmallTasks
    from dask_gpurt.tiers.worker.task_admission import Turn, Turns

#: results below this need no room of their own, in bytes
_RESERVED_BYTES = 2**20
#: shorter waits are not measured, in seconds
_LEAST_WAIT = 0.0001
#: a worker in any other state has no use for us
_RUNNING = {Status.running, Status.paused, Status.closing_gracefully}


@dataclasses.dataclass(eq=False, slots=True)
class Parts:
    """What the overrides of one worker work with."""

    worker: Worker
    guard: Guard
    engine: Engine
    store: TieredStore
    inputs: Inputs
    turns: Turns
    small: SmallTasks
    local: LocalUses
    hints: HintReceiver


class Override(Wrapped):
    """One of them. Failures are counted, and switch it off, under the name of the method."""

    def __init__(self, owner: object, name: str, parts: Parts) -> None:
        self._parts = parts
        self._worker = parts.worker
        self._part = parts.guard.part(name)
        super().__init__(owner, name)

    @property
    def active(self) -> bool:
        """It is installed."""
        return self._active

    @property
    def works(self) -> bool:
        """Our part has something to do: installed, not switched off, and the worker runs."""
        return self._active and self._part.retired is None and self._worker.status in _RUNNING

    def _failed(self, reason: str = "exception") -> None:
        self._parts.guard.failed(self._name, reason)


class Execute(Override):
    """``worker.execute``."""

    def __init__(self, parts: Parts) -> None:
        #: runs a task again that failed for want of device memory; None without a device tier
        self.retry_alone: RetryAlone | None = None
        #: which task begins now, by device memory; None without a device tier
        self.device_turns: Turns | None = None
        #: tasks that run now
        self.running = 0
        super().__init__(parts.worker, "execute", parts)

    def _wrap(self, stock: Callable[..., Awaitable[StateMachineEvent]]) -> Callable[..., Awaitable[StateMachineEvent]]:
        parts, part, worker, small = self._parts, self._part, self._worker, self._parts.small

        async def execute(key: Key, *, stimulus_id: str) -> StateMachineEvent:
            # As `works`, without a call: each task passes here.
            if not self._active or part.retired is not None or worker.status not in _RUNNING:
                return await stock(key, stimulus_id=stimulus_id)
            held = small.hold(key)
            if held is None:
                return await self._when_ready(stock, key, stimulus_id)
            self.running += 1
            try:
                event = await stock(key, stimulus_id=stimulus_id)
                small.ended(event)
                if parts.engine.eviction.pressed:  # meanwhile
                    parts.local.executed(key)
                    parts.hints.executed(key, held, event)
                return event
            finally:
                self.running -= 1
                parts.store.release(held)

        return execute

    async def _when_ready(self, stock: Callable[..., Any], key: Key, stimulus_id: str) -> StateMachineEvent:
        """Run a task when its turn has come and its inputs are here; or hand it back."""
        parts = self._parts
        pinned: list[Entry] = []
        turn: Turn | None = None
        device_turn: Turn | None = None
        device_turns = self.device_turns
        try:
            try:
                inputs = parts.inputs.of(key)
                turn = await parts.turns.begin(key, inputs)
                if device_turns is not None:
                    device_turn = await device_turns.begin(key, parts.store.device_inputs(inputs))
                pinned = await parts.inputs.bring(key)
                parts.store.lend(key, pinned)
            except Exception:
                self._failed("inputs")
            retry = self.retry_alone
            if retry is not None:
                await retry.enter()
            room = await self._reserve_output(key)
            self.running += 1
            try:
                if self._must_return(key):  # after the last wait: stock reads the inputs before it waits for anything
                    return RescheduleEvent(key=key, stimulus_id=f"gpurt-inputs-missing-{time()}")
                event: StateMachineEvent = await stock(key, stimulus_id=stimulus_id)
            finally:
                self.running -= 1
                if room is not None:
                    room.release()
            if isinstance(event, ExecuteSuccessEvent) and event.nbytes:
                # What lies on the device needs no room in host memory.
                parts.turns.outputs.learn(event.key, parts.store.host_bytes(event.value, event.nbytes))
                if device_turns is not None:
                    on_host = parts.store.device is None or not parts.store.device.backend.owns(event.value)
                    device_turns.outputs.learn(event.key, 0 if on_host else event.nbytes)
            if retry is not None and self._wants_memory(event):
                # The task has not ended for the state machine: it hears of the second event alone.
                again = functools.partial(stock, key, stimulus_id=stimulus_id)
                try:
                    event = await retry.again(again, self._wants_memory, with_note)
                except Exception:  # of the device, say: the task has ended as it did at first
                    self._failed("out of memory")
            parts.local.executed(key)
            parts.hints.executed(key, pinned, event)
            return event
        finally:
            parts.turns.end(turn)
            if device_turns is not None:
                device_turns.end(device_turn)
            parts.store.release(pinned)

    def _must_return(self, key: Key) -> bool:
        try:
            return self._parts.inputs.must_return(key)
        except Exception:
            self._failed("inputs")
            return False

    async def _reserve_output(self, key: Key) -> Reservation | None:
        """Room for what a task will return, by what tasks of its prefix returned so far.

        Without it, tasks that have no inputs, or small ones, all begin at once where one result would still fit. Given
        up when the task was cancelled meanwhile: stock then has to hear at once that nothing runs.
        """
        nbytes = self._parts.turns.outputs.expected(key)
        if nbytes is None or nbytes < _RESERVED_BYTES:
            return None
        try:
            return await self._parts.engine.admit(nbytes)
        except Exception:
            self._failed("room for the result")
            return None

    def _wants_memory(self, event: StateMachineEvent) -> bool:
        try:
            return out_of_memory(event) is not None
        except Exception:  # the error's own code, while it is unpickled
            self._failed("out of memory")
            return False


class GetData(Override):
    """The handler ``get_data``."""

    def __init__(self, parts: Parts) -> None:
        #: requests whose values are being brought, which stock has not counted yet
        self._bringing = 0
        super().__init__(parts.worker.handlers, "get_data", parts)

    def _wrap(self, stock: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        parts, worker = self._parts, self._worker

        async def get_data(comm: Comm, *args: Any, **kwargs: Any) -> Any:
            begun, limit = worker.transfer_outgoing_count, self._limit()
            pinned: list[Entry] = []
            if self.works and begun < limit:  # else stock turns it away, and nothing needs to be loaded
                if begun + self._bringing >= limit:
                    return {"status": "busy"}
                self._bringing += 1
                try:
                    keys = list(kwargs["keys"] if "keys" in kwargs else args[0])
                    pinned, seconds = await parts.inputs.ensure(keys)
                    if seconds > _LEAST_WAIT:
                        worker.digest_metric(("get-data", "disk-read", "seconds"), seconds)
                except Exception:
                    self._failed()
                finally:
                    self._bringing -= 1
            try:
                for entry in pinned:
                    self._raise_if_unread(entry)
                answer = await stock(comm, *args, **kwargs)
                who = kwargs["who"] if "who" in kwargs else args[1] if len(args) > 1 else None
                if who and answer is Status.dont_reply:
                    parts.hints.sent(pinned)
                return answer
            finally:
                parts.store.release(pinned)

        return get_data

    def _raise_if_unread(self, entry: Entry) -> None:
        """Raise what reading a value raised. Stock counts a request before it reads, and would count this one for ever:
        after ten of them the worker is "busy" until it ends.
        """
        store = self._parts.store
        if store.is_lost(entry.key):
            store[entry.key]
        elif not entry.in_memory and entry.load_error is not None:
            raise entry.load_error

    def _limit(self) -> float:
        """Requests at a time that stock allows at most: to the same host it allows twice its limit."""
        if self._worker.status == Status.paused:
            return 1
        limit = self._worker.transfer_outgoing_count_limit
        return math.inf if limit is False else 2 * limit


class GatherDep(Override):
    """``worker.gather_dep``."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.worker, "gather_dep", parts)

    def _wrap(self, stock: Callable[..., Awaitable[StateMachineEvent]]) -> Callable[..., Awaitable[StateMachineEvent]]:
        async def gather_dep(
            worker: str, to_gather: Collection[Key], total_nbytes: int, *, stimulus_id: str
        ) -> StateMachineEvent:
            room: Reservation | None = None
            if self.works:
                try:
                    room = await self._parts.engine.admit(total_nbytes)
                except Exception:
                    self._failed()
            try:
                return await stock(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)
            finally:
                # The values become entries in this turn of the loop or the next.
                if room is not None:
                    room.release()

        return gather_dep
