"""`WorkerSeam` puts a `TieredStore` in the place of ``worker.data``, and puts everything back exactly.

With `spill_buffer`, which knows the private names of distributed's `SpillBuffer`, this is the seam to distributed: no
other module of the tiers uses a private name of it. What both rely on stands in tables and is
looked up before anything is changed (`SeamMismatch`).

Taken over:

* ``worker.memory_manager.data`` **and** ``worker.state.data``: setting one alone makes every dependent fail;
* ``worker.execute``, ``worker.gather_dep`` and ``worker.handlers["get_data"]``: see `overrides`.

What becomes of a lost key is in `lost_keys`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dask.task_spec import Alias
from distributed.worker_state_machine import FreeKeysEvent, RescheduleEvent

from dask_gpurt.errors import SeamMismatch
from dask_gpurt.model.checks import require_call, require_names
from dask_gpurt.tiers.device.ahead import DeviceAhead
from dask_gpurt.tiers.device.oom import RetryAlone
from dask_gpurt.tiers.hints.pending_tasks import LocalUses
from dask_gpurt.tiers.hints.prefetch import Prefetch
from dask_gpurt.tiers.hints.worker import HintReceiver
from dask_gpurt.tiers.stores.task_store import TieredStore
from dask_gpurt.tiers.worker import spill_buffer
from dask_gpurt.tiers.worker.inputs import Inputs
from dask_gpurt.tiers.worker.lost_keys import Losses
from dask_gpurt.tiers.worker.overrides import Execute, GatherDep, GetData, Override, Parts
from dask_gpurt.tiers.worker.small_tasks import SmallTasks
from dask_gpurt.tiers.worker.task_admission import Turns

if TYPE_CHECKING:
    from dask.typing import Key
    from distributed import WorkerPlugin
    from distributed.spill import SpillBuffer
    from distributed.worker import Worker

    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.tiers.device.setup import DeviceMemory
    from dask_gpurt.tiers.engine.engine import Engine

#: attributes of a Worker that the tiers use
NAMES = (
    *("memory_manager.data", "memory_manager.memory_limit", "monitor.get_process_memory"),
    *("state.data", "state.tasks", "state.actors"),
    *("handlers", "handle_stimulus", "batched_send", "digest_metric"),
    *("transfer_outgoing_count", "transfer_outgoing_count_limit", "_pending_plugins"),
)


def pending_plugins(worker: Worker) -> tuple[WorkerPlugin, ...]:
    """Those that came with the worker and have not run yet: before it registers, so only a preload sees any."""
    # That it is there is looked up with `NAMES`, which comes later.
    plugins: tuple[WorkerPlugin, ...] = getattr(worker, "_pending_plugins", ())
    return plugins


class WorkerSeam:
    """Puts a `TieredStore` in the place of ``worker.data``, which is a `SpillBuffer`.

    Parameters
    ----------
    guard
        Counts the failures of every part, and switches it off after too many.
    prefetch_share
        Share of the budget for values that are read ahead; 0: none is.

    Raises
    ------
    SeamMismatch
        This distributed is not one we know. Nothing was changed.
    """

    def __init__(self, worker: Worker, engine: Engine, guard: Guard, *, prefetch_share: float = 0.0) -> None:
        self._worker = worker
        self._engine = engine
        self._guard = guard
        self._check()
        self.store = TieredStore(engine, on_lost=lambda key: self.losses.lost(key), renames=self._renames)
        #: gives up what has no valid copy left
        self.losses = Losses(worker, self.store, guard, active=lambda: self.execute.active)
        #: what the scheduler says about next uses
        self.hints = HintReceiver(worker, engine, self.store, guard)
        #: what this worker knows by itself
        self.local = LocalUses(worker, engine, self.store, guard)
        #: reads ahead what `local` tells
        self.prefetch = Prefetch(engine, worker.state.tasks, self.store.entry, prefetch_share, guard)
        self.local.on_pending = self.prefetch.pending
        #: what was ``worker.data``
        self.original: SpillBuffer = worker.memory_manager.data
        #: which task begins now
        self.turns = Turns(
            engine,
            limit_bytes=lambda: worker.memory_manager.memory_limit,
            process_bytes=lambda: worker.monitor.get_process_memory(),
            seceded=self._seceded,
            threads=lambda: worker.state.nthreads,
        )
        #: brings inputs into memory
        self.inputs = Inputs(worker, self.store, self.losses)
        small = SmallTasks(worker, engine, self.store, self.turns, guard)
        parts = Parts(worker, guard, engine, self.store, self.inputs, self.turns, small, self.local, self.hints)
        self.execute = Execute(parts)
        self._overrides: tuple[Override, ...] = (self.execute, GatherDep(parts), GetData(parts))

    def serve_device(self, device: DeviceMemory) -> None:
        """Run tasks by what the device has room for, and bring what they read back to it ahead of them."""
        worker, space = self._worker, device.space
        # The device has victims of its own, which are chosen by next uses however much host memory is free.
        self._engine.eviction.relaxes = False
        self._engine.eviction.press()
        self.execute.retry_alone = RetryAlone(space, lambda: self.execute.running)
        self.execute.device_turns = Turns(
            space,
            limit_bytes=lambda: device.allocator.limit_bytes,
            process_bytes=lambda: space.fixed_bytes,
            seceded=self._seceded,
            threads=lambda: worker.state.nthreads,
        )
        if not self.prefetch.share:
            return
        tasks, find = worker.state.tasks, self.store.entry
        ahead = DeviceAhead(self._engine, tasks, find, lambda: space.room_bytes, self._guard)
        self.store.ahead = ahead

        def pending(priority: tuple[float, ...], number: int, key: Key) -> None:
            self.prefetch.pending(priority, number, key)
            ahead.pending(priority, number, key)

        self.local.on_pending = pending

    def _seceded(self, key: Key) -> bool:
        tasks = self._worker.state.tasks
        return key in tasks and tasks[key].state == "long-running"

    def _renames(self, key: Key) -> Key | None:
        ts = self._worker.state.tasks.get(key)
        spec: object = None if ts is None else ts.run_spec
        return spec.target if isinstance(spec, Alias) else None

    def _check(self) -> None:
        worker = self._worker
        require_names(worker, "worker", NAMES)
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
        for override in self._overrides:
            override.install()
        self.prefetch.install()
        self.hints.install()
        self._engine.eviction.on_moved = self.turns.look
        self._engine.eviction.on_pressed.append(self._pressed)
        self._pressed()

    def _stop_listening(self) -> None:
        self._engine.eviction.on_moved = lambda: None
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

    async def give_back(self) -> None:
        """Drain into the original mapping, then put everything back."""
        self._stop_listening()
        await self.hints.uninstall()
        self.local.uninstall()
        self.prefetch.uninstall()
        if self.store.ahead is not None:
            self.store.ahead.stop()
        for key in await self.store.unbox():
            self.losses.give_up(key)
        for key in await spill_buffer.give_back(self.store, self.original, self._engine):
            self.losses.give_up(key)
        # What a user's plugin has put over the store stays: it has values, or reads through the store, which passes on.
        for owner in (self._worker.memory_manager, self._worker.state):
            if owner.data is self.store:
                owner.data = self.original
        self._unwrap()

    def abandon(self) -> None:
        """The worker is closing: unhook, but leave the data where it is."""
        self._stop_listening()
        self.local.uninstall()
        self.prefetch.uninstall()
        if self.store.ahead is not None:
            self.store.ahead.stop()
        self._unwrap()

    def _unwrap(self) -> None:
        for override in self._overrides:
            override.uninstall()
