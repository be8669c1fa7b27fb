"""`ResidenceSender`: reports to the scheduler which keys of this worker are only on disk, or below the device.

Messages are batched and name only what has changed. Every move of an entry passes its log, which calls this. A key is
noted when it goes to disk, when a device value moves, or when the scheduler believes it to be below. `FLUSH_SECONDS`
later one message says what is true by then, so a value that is written and read within that time is not mentioned.
Entries that are no keys of the worker (chunks of shuffles) are noted too, and left out of the message.

Only the scheduler knows whether it listens; see `model.residence` for how this worker gets to know.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dask_gpurt.model.residence import message
from dask_gpurt.model.tier import Tier
from dask_gpurt.tiers.engine.entry import State

if TYPE_CHECKING:
    from collections.abc import Hashable

    from dask.typing import Key
    from distributed.worker import Worker

    from dask_gpurt.model.circuit_breaker import Guard
    from dask_gpurt.tiers.engine.entry import EventLog
    from dask_gpurt.tiers.stores.task_store import TieredStore

#: between the first change and the message about it
FLUSH_SECONDS = 0.02
#: keys in one message, at most; the others follow in the next
FLUSH_KEYS = 1000


class ResidenceSender:
    """The residence of the keys of one store, as its scheduler knows it. Use on the loop's thread."""

    def __init__(self, worker: Worker, store: TieredStore, log: EventLog, guard: Guard) -> None:
        self._worker = worker
        self._store = store
        self._log = log
        self._guard = guard
        self._part = guard.part("residence", on_retired=self.stop)
        self._dirty: dict[Hashable, None] = {}
        #: keys that the scheduler believes to be below here: whether on disk, or else in host memory
        self._reported: dict[Hashable, bool] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._on = False
        self.sent_messages = 0
        self.sent_keys = 0

    def start(self) -> None:
        """Begin, with what is on disk already. A second call tells all again: the scheduler may be a new one."""
        if self._part.retired is not None:
            return
        self._on = True
        self._reported.clear()
        self._log.listener = self._moved
        self._store.on_device_moved = self._note
        for key in [*self._store.disk, *self._store.below_device]:
            self._note(key)

    def stop(self) -> None:
        """End. A second call does nothing."""
        self._on = False
        self._log.listener = None
        self._store.on_device_moved = lambda key: None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._dirty.clear()
        self._reported.clear()

    def statistics(self) -> dict[str, Any]:
        """Counts since it was made, as plain JSON."""
        return {
            "on": self._on,
            "messages": self.sent_messages,
            "keys": self.sent_keys,
            "believed": len(self._reported),
            **self._part.statistics(),
        }

    def _moved(self, key: Hashable, after: State | None) -> None:
        if after is State.STORED or key in self._reported:
            self._note(key)

    def _note(self, key: Hashable) -> None:
        self._dirty[key] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if not self._on:
            return
        try:
            self._send()
        except Exception:
            # A tier unknown to the scheduler costs it a better choice, nothing else.
            self._guard.failed(self._part.name)

    def _send(self) -> None:
        below: dict[bool, list[tuple[Key, float]]] = {True: [], False: []}
        back: list[Key] = []
        for key in list(self._dirty)[:FLUSH_KEYS]:
            del self._dirty[key]
            place = self._store.place_of(key)
            if place is not None and not place.here:
                on_disk = place.tier >= Tier.DISK
                if self._reported.get(key) is not on_disk:
                    self._reported[key] = on_disk
                    below[on_disk].append((key, float(place.nbytes)))
            elif self._reported.pop(key, None) is not None:
                back.append(key)
        if back or any(below.values()):
            device = self._store.device
            rate = None if device is None else device.copies.promotion_rate
            self._worker.batched_send(message(below[True], back, below[False], rate))
            self.sent_messages += 1
            self.sent_keys += len(back) + sum(map(len, below.values()))
        if self._dirty:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)
