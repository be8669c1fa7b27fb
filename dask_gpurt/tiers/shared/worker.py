"""`SharedCopies`: stored copies outlive their worker. The worker's half; `scheduler` is the other.

It reports to the scheduler which keys it has written to the object store, and takes over copies of workers that are
gone. Such a key comes into ``worker.data`` as STORED, without being read, through the event with which scattered data
come (`UpdateDataEvent`). If the copy turns out to be missing or damaged when it is needed, that is an ordinary loss:
see `lost_keys`.

Nothing is reported when a copy goes. The scheduler forgets a copy when its key leaves memory, and never uses a copy of
a key that the worker does not hold.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distributed.metrics import time
from distributed.worker_state_machine import UpdateDataEvent

from dask_gpurt.tiers.shared.protocol import HEARTBEAT_FIELD, PROTOCOL, REPORT, TELL, Copy, as_copy
from dask_gpurt.tiers.storage.object.leases import is_object
from dask_gpurt.tiers.storage.object.tier import ObjectHandle
from dask_gpurt.tiers.stores.task_store import StoredCopy

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask.typing import Key
    from distributed.worker import Worker

    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.tiers.engine.engine import Engine
    from dask_gpurt.tiers.engine.entry import Entry
    from dask_gpurt.tiers.storage.object.leases import LeaseKeeper
    from dask_gpurt.tiers.storage.object.tier import ObjectTier
    from dask_gpurt.tiers.stores.task_store import TieredStore

#: between a write and the message about it
REPORT_SECONDS = 0.05


class SharedCopies:
    """Reports copies of one worker and adopts those of others. Use on the event loop's thread.

    `objects` is the tier whose copies other workers can read.
    """

    def __init__(
        self,
        worker: Worker,
        engine: Engine,
        store: TieredStore,
        objects: ObjectTier,
        lease: LeaseKeeper,
        guard: Guard,
    ) -> None:
        self._worker = worker
        self._engine = engine
        self._store = store
        self._objects = objects
        self._lease = lease
        self._guard = guard
        self._part = guard.part("shared copies", on_retired=self.uninstall)
        #: a scheduler listens
        self.heard = False
        self._moving: asyncio.Task[None] | None = None
        self._fresh: dict[Entry, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.reported = 0
        self.adopted = 0
        #: adoptions that could not be: the key was being computed here, say
        self.refused = 0

    # ------------------------------------------------------------------ life

    def install(self) -> None:
        """Begin to listen."""
        self._worker.stream_handlers[TELL] = self._heard
        self._engine.eviction.on_copy = self._copied

    def uninstall(self) -> None:
        """End. A handler stays and declines, as messages may be under way."""
        if self.heard:
            _leave(self._worker)
        self.heard = False
        if self._moving is not None:
            self._moving.cancel()
        self._engine.eviction.on_copy = None
        self._worker.stream_handlers[TELL] = _decliner(self._worker)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heartbeat(self) -> dict[str, Any]:
        """What a scheduler that wants reports has to see."""
        return {HEARTBEAT_FIELD: PROTOCOL} if self._part.retired is None else {}

    def statistics(self) -> dict[str, Any]:
        """Return counts as plain JSON."""
        return {
            "scheduler_listens": self.heard,
            "reported": self.reported,
            "adopted": self.adopted,
            "refused": self.refused,
            "fostered_prefixes": len(self._lease.fostered),
            "lease_renewals": self._lease.renewals,
            "lease_failures": self._lease.failures,
            "lease_age_seconds": self._lease.age_seconds,
            "failed_deletions": self._objects.failed_deletions,
            **self._part.statistics(),
        }

    # ------------------------------------------------------------------ to the scheduler

    def _copied(self, entry: Entry) -> None:
        if not self.heard or self._store.entry(entry.key) is not entry:
            return  # a shard, or gone
        if self._is_reported(entry):
            self._fresh[entry] = None
            if self._timer is None:
                self._timer = self._engine.io.loop.call_later(REPORT_SECONDS, self._report)

    def _report(self) -> None:
        self._timer = None
        fresh, self._fresh = self._fresh, {}
        copies = [
            Copy(e.key, e.handle.name, e.nbytes, e.handle.nbytes, e.handle.digest)
            for e in fresh
            if not e.gone and isinstance(e.handle, ObjectHandle)
        ]
        self._send(copies)

    def _is_reported(self, entry: Entry) -> bool:
        """Whether its copy is below the prefix that this scheduler gave us; it refuses reports of others."""
        return isinstance(entry.handle, ObjectHandle) and is_object(entry.handle.name, self._objects.prefix)

    async def _move(self, prefix: str) -> None:
        """Write below this prefix from now on, and report what is written there."""
        try:
            await asyncio.to_thread(self._lease.add, prefix)
        except Exception:
            self._failed("prefix")
            _leave(self._worker)  # it asks again
            return
        self._objects.move_to(prefix)
        self.heard = True
        self._report()  # even if there is none: it says that we have moved

    def _failed(self, what: str) -> None:
        self._guard.failed(self._part.name, what)

    def _send(self, copies: list[Copy]) -> None:
        self.reported += len(copies)
        self._worker.batched_send({"op": REPORT, "prefix": self._objects.prefix, "copies": [tuple(c) for c in copies]})

    # ------------------------------------------------------------------ from the scheduler

    def _heard(
        self,
        hello: bool = False,
        bye: bool = False,
        prefix: str = "",
        adopt: list[Copy] | tuple[()] = (),
        stimulus_id: str = "",
    ) -> None:
        # In the loop that reads the scheduler's stream: what is raised here would end this worker.
        try:
            if (hello or bye) and self._moving is not None:
                self._moving.cancel()  # it is for a scheduler's part that has left
            if hello:
                self._moving = asyncio.ensure_future(self._move(prefix))
            if bye:
                self.heard = False
            if adopt:
                self._adopt(prefix, list(adopt), stimulus_id)
        except Exception:
            self._failed("adoption")
            for key, *_ in adopt:
                self._decline(key)

    def _adopt(self, prefix: str, copies: list[Copy], stimulus_id: str) -> None:
        data: dict[Key, StoredCopy] = {}
        tasks = self._worker.state.tasks
        for item in copies:
            copy = as_copy(item, prefix)
            if copy is None:
                self._decline(item[0])
                continue
            key = copy.key
            ts = tasks.get(key)
            if ts is not None and ts.state == "memory":
                continue  # it has come here meanwhile; the object goes with the prefix
            # Not beside a fetch: were it dropped before that ends, the state machine would raise, and end this worker.
            if ts is not None and ts.state not in ("released", "fetch", "missing"):
                self._decline(key)
                continue
            self._lease.foster(prefix, 1)
            handle = self._objects.adopt(copy.name, copy.stored_bytes, copy.digest, on_free=self._freed)
            data[key] = StoredCopy(copy.nbytes, handle)
        if data:
            self._worker.handle_stimulus(UpdateDataEvent(data=data, stimulus_id=stimulus_id or f"gpurt-adopt-{time()}"))
        for key, stored in data.items():
            entry = self._store.entry(key)
            if entry is not None and entry.handle is stored.handle:
                self.adopted += 1
            else:
                self._engine.io.free(stored.handle)
                self._decline(key)

    def _freed(self, handle: ObjectHandle) -> None:
        # In an I/O thread.
        self._lease.foster(handle.name.rpartition("/")[0], -1)

    def _decline(self, key: Key) -> None:
        """Correct the scheduler, which believes that we have the key; then it is computed again."""
        self.refused += 1
        _release(self._worker, key)


def _release(worker: Worker, key: Key) -> None:
    worker.batched_send({"op": "release-worker-data", "key": key, "stimulus_id": f"gpurt-not-adopted-{time()}"})


def _leave(worker: Worker) -> None:
    """Without a prefix a worker is no heir."""
    worker.batched_send({"op": REPORT, "prefix": "", "copies": []})


def _decliner(worker: Worker) -> Callable[..., None]:
    """Stands in for the handler when that has left: the scheduler must not believe that we took something over."""

    def decline(hello: bool = False, adopt: list[Copy] | tuple[()] = (), **_: object) -> None:
        if hello:
            _leave(worker)
        for key, *_rest in adopt:
            _release(worker, key)

    return decline
