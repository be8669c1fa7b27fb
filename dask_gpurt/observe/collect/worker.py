"""`WorkerSlots`: attaches a `SlotMeter` to a worker.

``worker.execute`` and ``worker.handle_stimulus`` are wrapped, and put back exactly. The first lies outside of what
the tiers put there: they leave before us, or pass through. Both call the original first or unconditionally. An
exception of ours is counted, the meter is given up after `ERRORS` of them, and the task does not notice.

Profiler ranges (`dask_gpurt.model.ranges`) are opened in the task's own thread. So the executors' ``submit`` is
wrapped too, but only where a profiler is there to see them.

What came over the network was also decoded. The worker's own meters (``digests_total``, context ``gather-dep``) know
the share, by which waiting for the network is split into ``network`` and ``serialisation``.
"""

from __future__ import annotations

import functools
import logging
import time
import traceback
from typing import TYPE_CHECKING, Any

from distributed.worker_state_machine import SecedeEvent

from dask_gpurt.model.slots import SLOT
from dask_gpurt.model.wrapped import Wrapped
from dask_gpurt.observe import seam
from dask_gpurt.observe.collect import fetch_matrix
from dask_gpurt.observe.collect.causes import CLOCK, WAITS, heartbeat_key
from dask_gpurt.observe.collect.slots import SlotMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from concurrent.futures import Executor, Future

    from dask.typing import Key
    from distributed import Worker
    from distributed.worker_state_machine import StateMachineEvent

    from dask_gpurt.model.ranges import Ranges

logger = logging.getLogger("distributed.worker.gpurt")

#: exceptions of our own until nothing is measured any more
ERRORS = 10
#: sources of fetches that are counted one by one; the rest is one
SOURCES = 256
_CODING = ("deserialize", "decompress", "serialize", "compress")


class WorkerSlots:
    """The slot meter of one worker, and what was fetched from whom. Make it on the worker's event loop."""

    def __init__(self, worker: Worker, ranges: Ranges | None = None) -> None:
        self.worker = worker
        self.meter = SlotMeter(worker.state.nthreads)
        self._ranges = ranges
        #: exceptions of our own
        self.errors = 0
        self.last_traceback = ""
        #: tasks that ran when we came
        self._adopted: dict[Hashable, Any] = {ts.key: self.meter.started(ts.key) for ts in worker.state.executing}
        #: False: pass all on, measure nothing
        self.active = True
        #: part of the network seconds that was decoding, of those seen so far
        self._coding_seconds = 0.0
        self._network_seen = 0.0
        self._digests_seen = (0.0, 0.0)
        #: source address -> [bytes, seconds, requests] of fetches
        self._sources: dict[str, list[float]] = {}
        self._log_seen: dict[str, Any] | None = None
        self._wrapped: list[Wrapped] = [_Execute(self), _Stimulus(self)]

    def install(self) -> None:
        """Start measuring.

        Raises
        ------
        SeamMismatch
            This worker has not what is measured by. Nothing was changed.
        """
        seam.check_worker(self.worker)
        if self._ranges is not None:
            threads = (e for e in self.worker.executors.values() if "ThreadPoolExecutor" in str(type(e)))
            self._wrapped += [_Submit(self, executor, self._ranges) for executor in threads]
        for wrapped in self._wrapped:
            wrapped.install()
        self.look()

    def uninstall(self) -> None:
        """Put back what was there. A second call does nothing."""
        self.active = False
        for wrapped in self._wrapped:
            wrapped.uninstall()

    # ------------------------------------------------------------------ for the wrappers

    def failed(self) -> None:
        """Count the exception that is being handled; with `ERRORS` of them nothing is measured any more."""
        self.errors += 1
        self.last_traceback = traceback.format_exc()
        if self.errors == 1:
            logger.warning("dask-gpurt: a slot could not be measured\n%s", self.last_traceback)
        if self.errors >= ERRORS:
            self.active = False

    def look(self) -> None:
        """The state machine may have changed."""
        state = self.worker.state
        executing = state.executing
        # Without resources no task waits for any, and the length of that queue is a call.
        constrained = len(state.constrained) if state.total_resources else 0
        counts = (state.nthreads, len(executing), not state.running, len(state.waiting), constrained)
        if counts != self.meter.now:
            self.meter.state(*counts, standing=seam.standing_seconds(self.worker))
        if self._adopted:
            now = {ts.key for ts in executing}
            for key in [key for key in self._adopted if key not in now]:
                self.meter.ended(self._adopted.pop(key))

    # ------------------------------------------------------------------ reading

    def seconds(self) -> dict[str, float]:
        """`SlotMeter.seconds`, with the decoding of fetched inputs under ``serialisation``. On the event loop."""
        out = self.meter.seconds()
        digests = self.worker.digests_total
        coding = sum(digests.get(("gather-dep", label, "seconds"), 0.0) for label in _CODING)
        every = coding + digests.get(("gather-dep", "network", "seconds"), 0.0)
        old_coding, old_every = self._digests_seen
        if every > old_every:
            share = min(1.0, max(0.0, (coding - old_coding) / (every - old_every)))
            self._coding_seconds += max(0.0, out["network"] - self._network_seen) * share
            self._digests_seen, self._network_seen = (coding, every), out["network"]
        # Both stay counters: what is taken off one grows by no more than the other has grown since the last look.
        out["network"] -= self._coding_seconds
        out["serialisation"] += self._coding_seconds
        return out

    def heartbeat(self) -> dict[str, Any]:
        """See `dask_gpurt.observe.figures.table`."""
        self._fetched()
        return {
            **{heartbeat_key(name): round(value, 6) for name, value in self.seconds().items()},
            WAITS: self.meter.tails.as_json(),
            CLOCK: time.monotonic(),
            "fetched": fetch_matrix.reported(self._sources),
            "nic_bytes_per_second": self.nic_bytes_per_second,
        }

    @functools.cached_property
    def nic_bytes_per_second(self) -> float | None:
        """Of the network card that this worker listens on; None: unknown. Looked up once, with the first heartbeat."""
        return fetch_matrix.nominal_bytes_per_second(fetch_matrix.host_of(self.worker.address))

    def _fetched(self) -> None:
        """Take in what was fetched since the last look; Dask keeps the last thousand or so."""
        log = self.worker.transfer_incoming_log
        fresh = []
        for entry in reversed(log):
            if entry is self._log_seen:
                break
            fresh.append(entry)
        if fresh:
            self._log_seen = fresh[0]
        for entry in fresh:
            who = str(entry["who"])
            if who not in self._sources and len(self._sources) >= SOURCES:
                who = fetch_matrix.OTHERS
            sums = self._sources.setdefault(who, [0.0, 0.0, 0.0])
            sums[0] += entry["total"]
            sums[1] += max(0.0, entry["stop"] - entry["start"])
            sums[2] += 1

    def statistics(self) -> dict[str, Any]:
        """Plain JSON: ``seconds`` by use, ``fetched`` by source (bytes, seconds, requests), ``errors``."""
        self._fetched()
        return {
            "seconds": self.seconds(),
            "fetched": {
                who: {"bytes": n, "seconds": s, "requests": int(count)} for who, (n, s, count) in self._sources.items()
            },
            "ranges": any(isinstance(wrapped, _Submit) for wrapped in self._wrapped),
            "errors": self.errors,
            "last_traceback": self.last_traceback,
        }


class _Stimulus(Wrapped):
    """``worker.handle_stimulus``: looks at the state machine after it has changed."""

    def __init__(self, slots: WorkerSlots) -> None:
        self._slots = slots
        super().__init__(slots.worker, "handle_stimulus")

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        slots, look, seceded = self._slots, self._slots.look, self._slots.meter.seceded

        def handle_stimulus(*stims: StateMachineEvent) -> Any:
            instructions = stock(*stims)
            if slots.active:
                try:
                    for stim in stims:
                        if type(stim) is SecedeEvent:
                            seceded(stim.key)
                    look()
                except Exception:
                    slots.failed()
            return instructions

        return handle_stimulus


class _Execute(Wrapped):
    """``worker.execute``: a task is on its slot from the start to the end of it."""

    def __init__(self, slots: WorkerSlots) -> None:
        self._slots = slots
        super().__init__(slots.worker, "execute")

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        slots, meter = self._slots, self._slots.meter

        async def execute(key: Key, *, stimulus_id: str) -> Any:
            if not slots.active:
                return await stock(key, stimulus_id=stimulus_id)
            task = meter.started(key)
            # The coroutine runs in an asyncio task, hence in a context, of its own.
            SLOT.set(task)
            seconds = None
            try:
                event = await stock(key, stimulus_id=stimulus_id)
                start, stop = getattr(event, "start", None), getattr(event, "stop", None)
                if start is not None and stop is not None:
                    seconds = max(0.0, stop - start)
                return event
            finally:
                meter.ended(task, seconds)

        return execute


class _Submit(Wrapped):
    """``submit`` of a pool of threads: a task runs in a profiler's range with its key."""

    def __init__(self, slots: WorkerSlots, executor: Executor, ranges: Ranges) -> None:
        self._slots = slots
        self._ranges = ranges
        super().__init__(executor, "submit")

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        slots, ranges = self._slots, self._ranges

        def submit(fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[Any]:
            task = SLOT.get()
            key = getattr(task, "key", None)
            if key is None or not slots.active:
                return stock(fn, *args, **kwargs)

            def run() -> object:
                with ranges.range(str(key)):
                    return fn(*args, **kwargs)

            return stock(run)

        return submit
