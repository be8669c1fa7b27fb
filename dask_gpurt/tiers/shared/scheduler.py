"""`SharedCopiesPlugin`: stored copies outlive their worker. The scheduler's half; `worker` is the other.

Workers report which keys they have written to the object store. When one is about to be removed, *before* Dask works
out what was lost with it, its keys get heirs: each key that it alone holds, and of which there is a copy, gets a second
holder. That is a running worker, which gets a message to take the copy over, and is registered by ``add_keys``, Dask's
own call for keys that a worker reports. For Dask the key was then never lost: nothing is computed again, no dependent
goes back to waiting, and scattered data survive too. There is no race with a recomputation, as none is begun.

The message to the heir is sent on the same stream as any task that needs the key there, and before it. A peer that asks
over its own connection may come sooner: Dask then asks the scheduler again for holders and retries. If the copy is
missing or damaged, or the heir declines, the key is released there and computed again, later than it would have been,
but right.

Objects of a worker that is gone are swept, but for adopted ones. When the scheduler ends, all that is known is swept;
when it starts, what other clusters left behind (`leases`).

Only the public method ``remove_worker`` is replaced, on the instance and in the handlers (a worker that leaves calls it
there), and put back.

Rejected: to let the recomputation begin and overtake it (no transition leads from "waiting" to "memory", and inputs
that were released long ago would be computed for nothing); to answer a recomputation in ``execute`` with the copy (the
same inputs).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import time
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from dask_gpurt.model.checks import require_call, require_names
from dask_gpurt.model.events import Event, Sink, null_sink
from dask_gpurt.model.no_hook import ignored
from dask_gpurt.model.wrapped import Wrapped
from dask_gpurt.tiers.backoff import BackOff
from dask_gpurt.tiers.scheduler_plugin import TierPlugin, speaks
from dask_gpurt.tiers.shared.protocol import HEARTBEAT_FIELD, PROTOCOL, REPORT, TELL, Copy, as_copy
from dask_gpurt.tiers.storage.object.leases import (
    EXPIRE_SECONDS,
    expired,
    second_look_seconds,
    sweep,
    sweep_expired,
    worker_prefix,
)

if TYPE_CHECKING:
    import datetime
    from collections.abc import Awaitable, Callable, Collection, Coroutine

    from dask.typing import Key
    from distributed.scheduler import Scheduler

    from dask_gpurt.tiers.storage.object.client import Bucket

logger = logging.getLogger("distributed.scheduler.gpurt")

#: between two looks for workers that have not been greeted
LOOK_SECONDS = 1.0
#: for the last sweep
CLOSE_SECONDS = 20.0


class _Removal(Wrapped):
    """``remove_worker``, or the handler of that name, with `before` called first."""

    def __init__(self, owner: object, name: str, before: Callable[[str], None]) -> None:
        self._before = before
        super().__init__(owner, name)

    def _wrap(self, stock: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def remove_worker(address: str, *args: object, **kwargs: object) -> object:
            if self._active:
                self._before(address)
            return await stock(address, *args, **kwargs)

        return remove_worker


class SharedCopiesPlugin(TierPlugin):
    """`start` it on a scheduler, `stop` it to end. `bucket` is the store that the workers write to."""

    name = "gpurt-shared-copies"

    def __init__(self, bucket: Bucket, *, sink: Sink = null_sink) -> None:
        super().__init__("shared copies", look=self._greet, look_seconds=LOOK_SECONDS, stop=self.stop, sink=sink)
        self._bucket = bucket
        self._expire_seconds = EXPIRE_SECONDS
        self._removals: list[_Removal] = []
        #: workers that were greeted -> the prefix that each was given
        self._issued: dict[str, str] = {}
        #: of these, the ones that write there: they report, and can take copies over
        self._answered: set[str] = set()
        #: workers that could not write where they were to: they are not greeted again at once
        self._rests: dict[str, BackOff] = {}
        #: prefixes of workers that have left us -> when they were removed (monotonic seconds; infinite: they are here,
        #: and may have values there), and the keys whose copies others adopted. Each is swept once more, later or at
        #: the end: a write may have been under way when its worker went.
        self._gone: dict[str, tuple[float, set[Key]]] = {}
        #: key -> worker -> its copy
        self._copies: dict[Key, dict[str, Copy]] = {}
        self._sweeps: set[asyncio.Task[None]] = set()
        #: prefixes of other clusters that had expired at the start, and from when on they are looked at once more
        self._expired: dict[str, datetime.datetime] = {}
        self._look_again_at = math.inf
        self.adopted_keys = 0
        self.adopted_bytes = 0
        #: keys of removed workers that had no copy, or that no worker could take
        self.lost_keys = 0
        self.swept_objects = 0
        self.expired_prefixes = 0
        #: reports about what is not below the worker's own prefix, or that make no sense
        self.refused_reports = 0

    # ------------------------------------------------------------------ life

    def _prepare(self, scheduler: Scheduler) -> None:
        call = {"worker": "address", "keys": [], "stimulus_id": "s"}
        require_call(getattr(scheduler, "worker_send", None), "Scheduler.worker_send", "address", {})
        require_call(getattr(scheduler, "add_keys", None), "Scheduler.add_keys", **call)
        require_call(getattr(scheduler, "remove_worker", None), "Scheduler.remove_worker", "address", stimulus_id="s")
        require_names(scheduler, "Scheduler", ("tasks", "workers", "handlers", "stream_handlers", "coerce_address"))
        self._removals = [_Removal(scheduler, "remove_worker", self._before_removal)]
        if scheduler.handlers.get("unregister") == scheduler.remove_worker:
            self._removals.append(_Removal(scheduler.handlers, "unregister", self._before_removal))
        for removal in self._removals:
            removal.install()
        scheduler.stream_handlers[REPORT] = self._reported
        self._begin_sweep(self._find_expired())

    def stop(self) -> None:
        """End: workers report no more, and keep what they have."""
        scheduler = self._end()
        if scheduler is None:
            return
        for removal in self._removals:
            removal.uninstall()
        # It stays known: reports may be under way, and an unknown op would end the worker that sent it.
        scheduler.stream_handlers[REPORT] = ignored
        for address in self._issued:
            if address in scheduler.workers:
                scheduler.worker_send(address, {"op": TELL, "bye": True})
        self._copies.clear()

    async def close(self) -> None:
        """The scheduler closes, and with it the cluster: all that is known goes."""
        self._end()
        prefixes = {*self._issued.values(), *self._gone}
        for task in list(self._sweeps):
            task.cancel()
        self._bucket.attempts = 1  # a store that is down must not keep the scheduler from closing
        work = [asyncio.ensure_future(self._sweep(prefix)) for prefix in prefixes]
        if work:
            _, left = await asyncio.wait(work, timeout=CLOSE_SECONDS)
            if left:
                logger.warning("%d prefixes in %s are left to a later sweep", len(left), self._bucket.url)

    def statistics(self) -> dict[str, Any]:
        """Return counts as plain JSON."""
        return {
            "store": self._bucket.url,
            "workers": len(self._answered),
            "known_copies": sum(map(len, self._copies.values())),
            "adopted_keys": self.adopted_keys,
            "adopted_bytes": self.adopted_bytes,
            "lost_keys": self.lost_keys,
            "swept_objects": self.swept_objects,
            "expired_prefixes": self.expired_prefixes,
            "refused_reports": self.refused_reports,
            **self.part.statistics(),
        }

    # ------------------------------------------------------------------ what is stored

    def _greet(self, scheduler: Scheduler) -> None:
        """Greet workers that understand us and have not been greeted."""
        now = time.monotonic()
        for address, ws in scheduler.workers.items():
            if address not in self._issued and speaks(ws, HEARTBEAT_FIELD, PROTOCOL):
                if (rest := self._rests.get(address)) is not None and now < rest.until:
                    continue
                prefix = self._issued[address] = worker_prefix(scheduler.address)
                scheduler.worker_send(address, {"op": TELL, "hello": True, "prefix": prefix})
        # Workers come and go for weeks. By now nothing is under way, and no key has a copy there.
        before = now - self._expire_seconds
        for prefix in [prefix for prefix, (when, keys) in self._gone.items() if when < before and not keys]:
            del self._gone[prefix]
            self._begin_sweep(self._sweep(prefix))
        if now >= self._look_again_at:
            self._look_again_at = math.inf
            self._begin_sweep(self._sweep_expired())

    def _reported(self, worker: str = "", prefix: str = "", copies: list[Copy] | tuple[()] = (), **_: object) -> None:
        # In the loop that reads the worker's stream: what is raised here would remove the worker.
        try:
            if self._scheduler is None or worker not in self._scheduler.workers:
                return
            issued = self._issued.get(worker)
            if not prefix:  # it has left us
                self._forget(worker)
                return
            if prefix != issued:
                self._refused(f"{worker} names the prefix {prefix!r}, and was given {issued!r}")
                return
            self._answered.add(worker)
            self._rests.pop(worker, None)
            tasks = self._scheduler.tasks
            for item in copies:
                copy = as_copy(item, prefix)
                if copy is None:
                    self._refused(f"{worker} reports {item!r}, which is no copy below {prefix!r}")
                elif copy.key in tasks:
                    of_key = self._copies.setdefault(copy.key, {})
                    if (before := of_key.get(worker)) is not None and before.name != copy.name:
                        self._not_needed(before)  # adopted, and written again below its own prefix
                    of_key[worker] = copy
        except Exception:
            self._failed("report")

    def _forget(self, worker: str) -> str:
        """A worker has left; return its prefix, which is swept later, or at the end if it may have values there."""
        answered = worker in self._answered
        self._answered.discard(worker)
        prefix = self._issued.pop(worker, "")
        if prefix and answered:
            self._gone.setdefault(prefix, (math.inf, set()))
        elif prefix:  # it could not write there, and asks again: each time it gets another prefix
            now = time.monotonic()
            self._gone.setdefault(prefix, (now, set()))
            self._rests.setdefault(worker, BackOff()).failed(now)
        return prefix

    def _refused(self, message: str) -> None:
        self.refused_reports += 1
        if self.refused_reports in (1, 10, 100, 1000):
            logger.warning("a report of stored copies is ignored (%d so far): %s", self.refused_reports, message)

    def transition(self, key: Key, start: str, finish: str, *args: object, stimulus_id: str, **kwargs: object) -> None:
        """Forget the copies of a key that leaves memory."""
        if start == "memory":
            for copy in self._copies.pop(key, {}).values():
                self._not_needed(copy)

    def _not_needed(self, copy: Copy) -> None:
        origin = copy.name.rpartition("/")[0]
        if origin in self._gone:
            self._gone[origin][1].discard(copy.key)

    def restart(self, scheduler: Scheduler) -> None:
        """Forget all copies."""
        self._copies.clear()
        for _, keys in self._gone.values():
            keys.clear()  # else what is below the prefix would stay until the scheduler ends

    # ------------------------------------------------------------------ a worker goes

    def _before_removal(self, address: str) -> None:
        try:
            self._adopt(address)
        except Exception:
            self._failed("adoption")

    def _adopt(self, address: str) -> None:
        scheduler = self._scheduler
        if scheduler is None or scheduler.status in (Status.closing, Status.closed):
            return
        address = scheduler.coerce_address(address)
        leaving = scheduler.workers.get(address)
        prefix = self._forget(address)
        self._rests.pop(address, None)
        if leaving is None or not prefix:
            return
        self._gone[prefix] = time.monotonic(), self._gone[prefix][1]
        heirs = [
            (ws.nbytes, i, ws)
            for i, ws in enumerate(scheduler.workers.values())
            if ws is not leaving and ws.address in self._answered and ws.status == Status.running
        ]
        heapq.heapify(heirs)
        legacies: dict[str, dict[str, list[Copy]]] = {}
        kept: set[str] = set()
        for ts in leaving.has_what:
            if len(ts.who_has) > 1 or ts.actor:
                continue
            copy = self._copies.get(ts.key, {}).pop(address, None)
            if copy is None or not heirs:
                self.lost_keys += 1
                continue
            # To the one that holds least: the keys of one worker spread over all others.
            held, i, heir = heirs[0]
            heapq.heapreplace(heirs, (held + copy.nbytes, i, heir))
            legacies.setdefault(heir.address, {}).setdefault(copy.name.rpartition("/")[0], []).append(copy)
            self._copies[ts.key] = {heir.address: copy}
            kept.add(copy.name)
            self.adopted_keys += 1
            self.adopted_bytes += copy.nbytes
        for heir_address, by_prefix in legacies.items():
            stimulus_id = f"gpurt-adopt-{time.time()}"
            for origin, copies in by_prefix.items():
                scheduler.worker_send(
                    heir_address,
                    {"op": TELL, "prefix": origin, "adopt": [tuple(c) for c in copies], "stimulus_id": stimulus_id},
                )
                scheduler.add_keys(worker=heir_address, keys=[c.key for c in copies], stimulus_id=stimulus_id)
                self._gone.setdefault(origin, (math.inf, set()))[1].update(c.key for c in copies)
        if kept:
            message = f"{len(kept)} keys of {address} are read back from {self._bucket.url} instead of computed again"
            logger.info("%s", message)
            self._sink(Event("tiers.adopted", message, {"worker": address, "keys": len(kept)}))
        self._begin_sweep(self._sweep(prefix, kept, keep_lease=True))

    # ------------------------------------------------------------------ sweeping

    def _begin_sweep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._sweeps.add(task)
        task.add_done_callback(self._sweeps.discard)

    async def _sweep(self, prefix: str, keep: Collection[str] = (), *, keep_lease: bool = False) -> None:
        try:
            self.swept_objects += await asyncio.to_thread(sweep, self._bucket, prefix, keep=keep, keep_lease=keep_lease)
        except Exception:
            self._failed("sweep")

    async def _find_expired(self) -> None:
        try:
            self._expired = await asyncio.to_thread(expired, self._bucket, expire_seconds=self._expire_seconds)
        except Exception:
            self._failed("look for expired leases")
        else:
            # A look of every second, not a sleep here: nothing is to wait when the scheduler closes.
            self._look_again_at = time.monotonic() + second_look_seconds(self._bucket)

    async def _sweep_expired(self) -> None:
        try:
            swept = await asyncio.to_thread(sweep_expired, self._bucket, self._expired)
            self.expired_prefixes += len(swept)
        except Exception:
            self._failed("sweep of expired leases")
