"""`CorruptFetches`: on the scheduler, what becomes of a value that a worker cannot fetch unharmed from its holder.

A worker whose fetch fails a checksum lets Dask fetch again, from another holder if there is one. After `LIMIT` of them
in a row from one sender it says so here. Then, for each value that only such senders hold:

1. another worker, which has not complained about all of them, is asked to fetch it, over another link. Its copy is what
   the first worker finds at its next look. Nothing is computed again, and scattered data is helped as well;
2. when there is no such worker, the holders forget the value, and it is computed again, by another worker if there is
   one and the user has not said where. Scattered data is left as it is: the link may yet get better.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from dask_gpurt.model.no_hook import ignored

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dask.typing import Key
    from distributed import Scheduler
    from distributed.scheduler import TaskState

logger = logging.getLogger("distributed.scheduler.gpurt")

#: of the messages: ``{"op": OP, "sender": address, "keys": [...]}``
OP = "gpurt-corrupt"
#: fetches in a row from one sender that fail their checksum, after which it is reported
LIMIT = 3


class CorruptFetches:
    """The reports to one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: sender -> workers that complained about it
        self._complaints: defaultdict[str, set[str]] = defaultdict(set)
        #: what was done
        self.counts: Counter[str] = Counter(reports=0, relayed=0, recomputed=0, left=0, exceptions=0)

    def start(self) -> None:
        """Listen to workers; before any of them can speak."""
        self._scheduler.stream_handlers[OP] = self._heard

    def stop(self) -> None:
        """Ignore what workers say from now on. It stays known: an unknown op would remove the worker that sent it."""
        if self._scheduler.stream_handlers.get(OP) == self._heard:
            self._scheduler.stream_handlers[OP] = ignored

    def forget(self, worker: str) -> None:
        """A worker left."""
        self._complaints.pop(worker, None)
        for complaints in self._complaints.values():
            complaints.discard(worker)

    def statistics(self) -> dict[str, Any]:
        """Plain JSON: ``senders`` with the number of workers that complained, and counts."""
        return {"senders": {sender: len(by) for sender, by in self._complaints.items()}, **self.counts}

    def _heard(self, worker: str = "", sender: str = "", keys: Iterable[Key] = (), **kwargs: Any) -> None:
        workers = self._scheduler.workers
        if sender not in workers or worker not in workers:
            return
        self.counts["reports"] += 1
        self._complaints[sender].add(worker)
        logger.warning("dask-gpurt: %s gets corrupt data from %s. Remedy: check their network", worker, sender)
        for key in keys:
            ts = self._scheduler.tasks.get(key)
            if ts is None or not ts.who_has:
                continue
            if any(worker not in self._complaints.get(ws.address, ()) for ws in ts.who_has):
                continue  # another holder serves
            try:
                self._help(ts)
            except Exception:  # it would end the stream of a worker
                self.counts["exceptions"] += 1
                logger.exception("dask-gpurt: no help for %r", key)

    def _help(self, ts: TaskState) -> None:
        scheduler, holders = self._scheduler, list(ts.who_has or ())
        needed = any(d.processing_on in holders for d in ts.waiters or ())
        stimulus_id = f"gpurt-corrupt-{time.time()}"
        able = [ws for ws in scheduler.workers.values() if ws not in holders and ws.status is Status.running]
        relays = [ws for ws in able if any(ws.address not in self._complaints[h.address] for h in holders)]
        if relays:
            emptiest = min(relays, key=lambda ws: ws.nbytes)
            scheduler.request_acquire_replicas(emptiest.address, [ts.key], stimulus_id=stimulus_id)
            self.counts["relayed"] += 1
        elif needed or ts.run_spec is None or ts.actor:
            self.counts["left"] += 1  # a holder must not lose an input of a task that it has
        else:
            if able and not (ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions):
                scheduler.set_restrictions({ts.key: [ws.address for ws in able]})
                ts.loose_restrictions = True
            for ws in holders:
                # In this order: it must not answer that it has the value still.
                free = {"op": "free-keys", "keys": [ts.key], "stimulus_id": stimulus_id}
                scheduler.worker_send(ws.address, free)
                scheduler.release_worker_data(ts.key, ws.address, stimulus_id)
            self.counts["recomputed"] += 1
