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
from dask_gpurt.observe import seam
from dask_gpurt.observe.collect import fetch_matrix
from dask_gpurt.observe.collect.causes import CLOCK, WAITS, heartbeat_key
from dask_gpurt.observe.collect.slots import SlotMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from dask.typing import Key
    from distributed import Worker

    from dask_gpurt.model.ranges import Ranges

logger = logging.getLogger("distributed.worker.gpurt")

#: exceptions of our own until nothing is measured any more
ERRORS = 10
#: sources of fetches that are told apart; the rest is one
SOURCES = 256
_CODING = ("deserialize", "decompress", "serialize", "compress")


class WorkerSlots:
    """The slot meter of one worker, and what was fetched from whom. Make it on the worker's event loop."""

    def __init__(self, worker: Worker, ranges: Ranges | None = None) -> None:
        self._worker = worker
        self.meter = SlotMeter(worker.state.nthreads)
        self._ranges = ranges
        #: exceptions of our own
        self.errors = 0
        self.last_traceback = ""
        self._stock_execute: Callable[..., Any] = worker.execute
        self._stock_stimulus: Callable[..., Any] = worker.handle_stimulus
        self._had_execute = "execute" in vars(worker)
        self._had_stimulus = "handle_stimulus" in vars(worker)
        #: tasks that ran when we came
        self._adopted: dict[Hashable, Any] = {ts.key: self.meter.started(ts.key) for ts in worker.state.executing}
        self._active = True
        #: part of the network seconds that was decoding, of those seen so far
        self._coding_seconds = 0.0
        self._network_seen = 0.0
        self._digests_seen = (0.0, 0.0)
        #: source address -> [bytes, seconds, requests] of fetches
        self._sources: dict[str, list[float]] = {}
        self._log_seen: Any = None
        self._execute = self._wrap_execute()
        self._stimulus = self._wrap_stimulus()
        self._submits: list[tuple[Any, Any]] = []

    def install(self) -> None:
        """Start measuring.

        Raises
        ------
        SeamMismatch
            This worker has not what is measured by. Nothing was changed.
        """
        seam.check_worker(self._worker)
        self._worker.execute = self._execute
        self._worker.handle_stimulus = self._stimulus
        if self._ranges is not None:
            for executor in self._worker.executors.values():
                if "ThreadPoolExecutor" in str(type(executor)):
                    self._mark_ranges(executor, self._ranges)
        self._look()

    def uninstall(self) -> None:
        """Put back what was there. A second call does nothing."""
        self._active = False
        worker = self._worker
        if vars(worker).get("execute") is self._execute:
            if self._had_execute:
                worker.execute = self._stock_execute
            else:
                del worker.execute
        if vars(worker).get("handle_stimulus") is self._stimulus:
            if self._had_stimulus:
                worker.handle_stimulus = self._stock_stimulus
            else:
                del worker.handle_stimulus
        for executor, ours in self._submits:
            if vars(executor).get("submit") is ours:
                del executor.submit
        self._submits.clear()

    # ------------------------------------------------------------------ wrappers

    def _failed(self) -> None:
        self.errors += 1
        self.last_traceback = traceback.format_exc()
        if self.errors == 1:
            logger.warning("dask-gpurt: a slot could not be measured\n%s", self.last_traceback)
        if self.errors >= ERRORS:
            self._active = False

    def _look(self) -> None:
        state = self._worker.state
        executing = state.executing
        self.meter.state(
            state.nthreads,
            len(executing),
            paused=not state.running,
            waiting=len(state.waiting),
            constrained=len(state.constrained),
        )
        if self._adopted:
            now = {ts.key for ts in executing}
            for key in [key for key in self._adopted if key not in now]:
                self.meter.ended(self._adopted.pop(key))

    def _wrap_stimulus(self) -> Callable[..., Any]:
        stock, look = self._stock_stimulus, self._look

        def handle_stimulus(*stims: Any) -> Any:
            instructions = stock(*stims)
            if self._active:
                try:
                    for stim in stims:
                        if type(stim) is SecedeEvent:
                            self.meter.seceded(stim.key)
                    look()
                except Exception:
                    self._failed()
            return instructions

        return handle_stimulus

    def _wrap_execute(self) -> Callable[..., Any]:
        stock = self._stock_execute

        async def execute(key: Key, *, stimulus_id: str) -> Any:
            if not self._active:
                return await stock(key, stimulus_id=stimulus_id)
            task = self.meter.started(key)
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
                self.meter.ended(task, seconds)

        return execute

    def _mark_ranges(self, executor: Any, ranges: Ranges) -> None:
        stock = executor.submit

        def submit(fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            task = SLOT.get()
            key = getattr(task, "key", None)
            if key is None or not self._active:
                return stock(fn, *args, **kwargs)

            def run() -> Any:
                with ranges.range(str(key)):
                    return fn(*args, **kwargs)

            return stock(run)

        executor.submit = submit
        self._submits.append((executor, submit))

    # ------------------------------------------------------------------ reading

    def seconds(self) -> dict[str, float]:
        """`SlotMeter.seconds`, with the decoding of fetched inputs under ``serialisation``. On the event loop."""
        out = self.meter.seconds()
        digests = self._worker.digests_total
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
            WAITS: self.meter.tails.told(),
            CLOCK: time.monotonic(),
            "fetched": fetch_matrix.told(self._sources),
            "nic_bytes_per_second": self.nic_bytes_per_second,
        }

    @functools.cached_property
    def nic_bytes_per_second(self) -> float | None:
        """Of the network card that this worker listens on; None: unknown. Looked up once, with the first heartbeat."""
        return fetch_matrix.nominal_bytes_per_second(fetch_matrix.host_of(self._worker.address))

    def _fetched(self) -> None:
        """Take in what was fetched since the last look; Dask keeps the last thousand or so."""
        log = self._worker.transfer_incoming_log
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
            "ranges": bool(self._submits),
            "errors": self.errors,
            "last_traceback": self.last_traceback,
        }
