"""`TraceRecorder`: records graphs, sizes, times, transfers, tiers and decisions of a run, as `format` has them.

It is a plugin of the scheduler. It appends a small list per event, and hands a block of them to `Writer` when it has
4,096, or every second. A task costs one record when its graph comes, one when it is assigned and one when it is
finished, 1 to 3 us each. Other transitions return at once. Numbers stand for keys; the table of them has an entry per
task that the scheduler knows, so memory is bounded by what the scheduler holds itself.

A recording must not disturb the run: Dask catches what a plugin raises, and this one counts it. It works without the
rest of the extension, so that a run of stock Dask can be recorded and replayed under another policy.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVarTuple

import dask
import distributed
from distributed import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from dask_gpurt._version import __version__
from dask_gpurt.observe import seam
from dask_gpurt.observe.trace import samples
from dask_gpurt.observe.trace.format import Kind, plain_key
from dask_gpurt.observe.trace.writer import Writer, discard

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

    from dask.typing import Key
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

logger = logging.getLogger("distributed.scheduler.gpurt")

#: records in a block
BLOCK = 4096
#: tasks that were there before, written in one turn of the event loop: some 20 us each
EARLIER = 500
#: milliseconds between two samples of workers that have something to do, and at most between two blocks
SAMPLE_MS = 1000
#: characters kept of an exception's text
MAX_ERROR = 200

# Numbers, because an enum's attribute is three times the price of a global, and these are on the hot path.
_TASK, _ASSIGNED, _FINISHED, _RELEASED = int(Kind.TASK), int(Kind.ASSIGNED), int(Kind.FINISHED), int(Kind.RELEASED)
_ERRED, _FORGOTTEN, _DECISION = int(Kind.ERRED), int(Kind.FORGOTTEN), int(Kind.DECISION)
_time = time.time
_Ts = TypeVarTuple("_Ts")


class TraceRecorder(SchedulerPlugin):
    """Writes the trace of one scheduler to one file, from `start` to `stop`.

    Parameters
    ----------
    path
        A new file on the scheduler's machine; `path` is the one that was made, see `Writer`.
    name
        The plugin's name.
    client
        Stop when this client leaves, and remove the file and its directory, which holds nothing else. None: record
        until `stop`.
    decision
        Asked for a task's decision when it is assigned: ``(kind, address or None, predicted seconds or None)``, or None
        when nothing is known. None: no decisions are recorded.
    """

    def __init__(
        self,
        path: str,
        *,
        name: str = "gpurt-trace",
        client: str | None = None,
        decision: Callable[[Hashable], tuple[str, str | None, float | None] | None] | None = None,
    ) -> None:
        self.name = name
        self.path = path
        self.client = client
        self.decision = decision
        #: exceptions in our hooks; the last one as text
        self.errors = 0
        self.last_error: str | None = None
        self.scheduler: Scheduler | None = None
        self._writer: Writer | None = None
        self._t0 = 0.0
        self._block: list[list[Any]] = []
        #: key -> number of every task the scheduler knows
        self._tasks: dict[Hashable, int] = {}
        self._next_task = 0
        #: keys that have a number, as a task depends on them, and no record yet
        self._unwritten: set[Hashable] = set()
        self._workers: dict[str, int] = {}
        self._next_worker = 0
        self._prefixes: dict[str, int] = {}
        self._ticks: PeriodicCallback | None = None
        self._rhythm = samples.Rhythm()
        #: tasks that were there before and whose turn to be written has not come; None: all have been
        self._earlier: Iterator[TaskState] | None = None

    # ------------------------------------------------------------------ begin and end

    def open(self, scheduler: Scheduler, config: Mapping[str, Any]) -> None:
        """Begin. Workers that are there already are written first, tasks in several turns of the event loop.

        Raises
        ------
        SeamMismatch
            This distributed has not what a trace is made of.
        OSError
            The file cannot be made.
        """
        seam.check_tasks()
        self._writer = Writer(self.path)
        self.path = self._writer.path
        self.scheduler = scheduler
        self._t0 = _time()
        versions = {"dask": dask.__version__, "distributed": distributed.__version__, "dask_gpurt": __version__}
        about = {
            "versions": versions,
            "config": dict(config),
            "bandwidth": float(scheduler.bandwidth),
            # What the scheduler had learned before: a replay begins as wise as the run did.
            "durations": {
                name: float(prefix.duration_average)
                for name, prefix in scheduler.task_prefixes.items()
                if prefix.duration_average >= 0
            },
            "disk": samples.disk(scheduler),
        }
        self._add([int(Kind.BEGIN), self._t0, about])
        for ws in scheduler.workers.values():
            self._worker(ws)
        self._earlier = iter(list(scheduler.tasks.values()))
        self._write_earlier()
        self._ticks = PeriodicCallback(self._tick, SAMPLE_MS)
        self._ticks.start()

    def _write_earlier(self) -> None:
        """Write some of the tasks that were there before. What happens to one before its turn writes it, see `_known`.

        Not all at once: 100,000 of them would block the loop for two seconds.
        """
        if self._has_ended() or self._writer is None or self._earlier is None:
            return
        loop = asyncio.get_running_loop()
        if self._writer.is_behind:  # it would have to drop blocks
            loop.call_later(0.01, self._write_earlier)
            return
        some = list(itertools.islice(self._earlier, EARLIER))
        for ts in some:
            self._guarded(self._tasks_of, (ts.key,))
        if some:
            loop.call_soon(self._write_earlier)
        else:
            self._earlier = None
            self._guarded(self._inputs)

    def stop(self) -> Writer | None:
        """End; the caller closes the writer it gets off the event loop. None: it was not recording."""
        if self._writer is None:
            return None
        if self._ticks is not None:
            self._ticks.stop()
        self._guarded(self._inputs)
        self._guarded(self._sample)
        self._guarded(self._disk)
        writer, self._writer = self._writer, None
        writer.put(self._block)
        self._block = []
        self.scheduler = self._earlier = None
        return writer

    def last(self, records: int, lost: int) -> list[Any]:
        """The record at the end."""
        return [int(Kind.END), self._now(), records, lost]

    def statistics(self) -> dict[str, Any]:
        """Plain JSON values."""
        w = self._writer
        return {
            "path": self.path,
            "recording": w is not None and w.error is None,
            "records": w.records + len(self._block) if w else 0,
            "lost_records": w.lost if w else 0,
            "bytes": w.bytes if w else 0,
            "error": (w.error if w else None) or self.last_error,
            "errors": self.errors,
        }

    # ------------------------------------------------------------------ Dask's hooks

    async def close(self) -> None:
        """The scheduler closes."""
        writer = self.stop()
        if writer is not None:
            writer.close(self.last)

    def update_graph(
        self, scheduler: Scheduler, *, client: str, keys: Iterable[Key], tasks: Iterable[Key], **kwargs: Any
    ) -> None:
        """A client has submitted a graph."""
        if self._has_ended():
            return
        self._guarded(self._graph, scheduler, client, keys, tasks)

    def transition(self, key: Key, start: str, finish: str, *args: object, **kwargs: Any) -> None:
        """A task went from one state to another."""
        writer = self._writer
        if writer is None or writer.error is not None:  # as `_has_ended`, without the price of a call
            return
        # Most transitions are none of these.
        if finish == "processing":
            self._guarded(self._assigned, key)
        elif finish == "memory":
            if start != "memory":
                self._guarded(self._finished, key, kwargs)
        elif start == "memory":
            self._event(_RELEASED, key)
        elif finish == "erred":
            self._guarded(self._erred, key, kwargs)
        if finish == "forgotten" and (number := self._tasks.pop(key, None)) is not None:
            self._unwritten.discard(key)
            self._add([_FORGOTTEN, number, self._now()])

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """A worker has come."""
        ws = scheduler.workers.get(worker)
        if not self._has_ended() and ws is not None:
            self._worker(ws)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: object) -> None:
        """A worker has left."""
        number = self._workers.pop(worker, None)
        if not self._has_ended() and number is not None:
            self._add([int(Kind.WORKER_GONE), number, self._now()])

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """A client has left. The trace that it asked for ends, if it has not: nothing could fetch the file."""
        if client == self.client:
            scheduler.plugins.pop(self.name, None)
            threading.Thread(
                target=discard, args=(self.path, self.stop(), self.last), name="gpurt-trace-end", daemon=True
            ).start()

    # ------------------------------------------------------------------ records

    def _has_ended(self) -> bool:
        """Whether nothing that happens is written any more: before and after all, and from the writer's first error on.

        The plugin stays after an error: its client asks it for the file, which may be hours later.
        """
        return self._writer is None or self._writer.error is not None

    def _graph(self, scheduler: Scheduler, client: str, keys: Iterable[Key], tasks: Iterable[Key]) -> None:
        known, new = self._tasks, self._tasks_of(tasks)
        wanted = [known[k] for k in keys if k in known]
        self._add([int(Kind.GRAPH), self._now(), client, new, wanted])
        # After the graph's own record: the tasks right before that are its own.
        if self._earlier is None:
            self._inputs()

    def _tasks_of(self, keys: Iterable[Hashable]) -> int:
        """Write those that are not written yet; how many are tasks."""
        assert self.scheduler is not None
        known, states, new = self._tasks, self.scheduler.tasks, 0
        for key in keys:
            if (key not in known or key in self._unwritten) and (ts := states.get(key)) is not None:
                new += self._task(ts)
        return new

    def _inputs(self) -> None:
        """Write what tasks depend on and no graph brought: scattered data."""
        self._tasks_of(list(self._unwritten))

    def _known(self, key: Hashable) -> int | None:
        """The number of a task that something happens to; one that is not written yet is written first."""
        assert self.scheduler is not None
        if (key not in self._tasks or key in self._unwritten) and (ts := self.scheduler.tasks.get(key)) is not None:
            self._task(ts, ran=True)
        return self._tasks.get(key)

    def _guarded(self, record: Callable[[*_Ts], object], *args: *_Ts) -> None:
        if self._writer is None:
            return
        try:
            record(*args)
        except Exception as e:
            self.errors += 1
            self.last_error = f"{type(e).__name__}: {e}"

    def _now(self) -> int:
        return int((_time() - self._t0) * 1e6)

    def _us(self, seconds: float) -> int:
        return int((seconds - self._t0) * 1e6)

    def _add(self, record: list[Any]) -> None:
        block = self._block
        block.append(record)
        if len(block) >= BLOCK:
            self._flush()

    def _flush(self) -> None:
        if self._writer is not None and self._block:
            self._writer.put(self._block)
            self._block = []

    def _worker(self, ws: WorkerState) -> None:
        # Numbers are never given twice, also when a worker has left.
        number = self._workers.get(ws.address)
        if number is None:
            number = self._workers[ws.address] = self._next_worker
            self._next_worker += 1
        limit = int(ws.memory_limit)
        self._add([int(Kind.WORKER), number, self._now(), ws.address, ws.host, str(ws.name), ws.nthreads, limit])

    def _prefix(self, name: str) -> int:
        number = self._prefixes.get(name)
        if number is None:
            number = self._prefixes[name] = len(self._prefixes)
            self._add([int(Kind.PREFIX), number, name])
        return number

    def _number(self, key: Hashable) -> int:
        """Of a task, whose record is written now or will be later."""
        number = self._tasks.get(key)
        if number is None:
            number = self._tasks[key] = self._next_task
            self._next_task += 1
            self._unwritten.add(key)
        return number

    def _task(self, ts: TaskState, *, ran: bool = False) -> bool:
        """Write it; False when it is data, not a task. `ran`: what it has in memory was made just now."""
        number = self._number(ts.key)
        self._unwritten.discard(ts.key)
        if ts.run_spec is None or (ts.state == "memory" and not ran):
            # Scattered, or there before the trace began.
            holders = [self._workers[ws.address] for ws in ts.who_has or () if ws.address in self._workers]
            self._add([int(Kind.DATA), number, plain_key(ts.key), max(seam.size(ts.nbytes) or 0, 0), holders])
            return False
        depends = [self._number(d.key) for d in ts.dependencies]
        # Whatever is not a number (a user's own type) orders after what is; a trace keeps the order, not the type.
        priority = [p if isinstance(p, (int, float)) else 0 for p in ts.priority or ()]
        prefix = self._prefix(ts.prefix.name)
        self._add([_TASK, number, plain_key(ts.key), prefix, priority, depends, self._restrictions(ts)])
        return True

    def _restrictions(self, ts: TaskState) -> dict[str, Any] | None:
        """What the user or a shuffle demanded; None for most."""
        out: dict[str, Any] = {}
        if ts.worker_restrictions:
            out["workers"] = [self._workers[a] for a in ts.worker_restrictions if a in self._workers]
        if ts.host_restrictions:
            out["hosts"] = sorted(ts.host_restrictions)
        if ts.resource_restrictions:
            # A user's amount may be one of numpy's, which msgpack cannot pack.
            out["resources"] = {name: float(amount) for name, amount in ts.resource_restrictions.items()}
        if out and ts.loose_restrictions:
            out["loose"] = True
        if ts.actor:
            out["actor"] = True
        if not seam.is_queueable(ts):
            out["queueable"] = False
        if getattr(ts.run_spec, "data_producer", False):
            out["data_producer"] = True
        return out or None

    def _assigned(self, key: Hashable) -> None:
        assert self.scheduler is not None
        number = self._known(key)
        ts = self.scheduler.tasks.get(key)
        if number is None or ts is None or ts.processing_on is None:
            return
        self._add([_ASSIGNED, number, self._workers.get(ts.processing_on.address), self._now()])
        if self.decision is not None and (decided := self.decision(key)) is not None:
            kind, address, seconds = decided
            where = None if address is None else self._workers.get(address)
            self._add([_DECISION, number, kind, where, seconds])

    def _finished(self, key: Hashable, report: Mapping[str, Any]) -> None:
        number = self._known(key)
        if number is None:
            return
        start = stop = None
        transfers: list[list[int | None]] = []
        reads: list[list[int]] = []
        for s in report.get("startstops") or ():
            a, b = self._us(s["start"]), self._us(s["stop"])
            action = s["action"]
            if action == "compute":
                start, stop = a, b
            elif action == "transfer":
                transfers.append([a, b, self._workers.get(s.get("source"))])
            elif action == "disk-read":
                reads.append([a, b])
        worker = self._workers.get(report.get("worker", ""))
        nbytes = seam.size(report.get("nbytes"))
        self._add([_FINISHED, number, worker, self._now(), nbytes, start, stop, transfers, reads])

    def _erred(self, key: Hashable, report: Mapping[str, Any]) -> None:
        number = self._known(key)
        if number is not None:
            self._add([_ERRED, number, self._now(), str(report.get("exception_text", ""))[:MAX_ERROR]])

    def _event(self, kind: int, key: Hashable) -> None:
        number = self._tasks.get(key)
        if number is not None:
            self._add([kind, number, self._now()])

    # ------------------------------------------------------------------ samples

    def _disk(self) -> None:
        """At the end, beside what the begin has."""
        if self.scheduler is not None:
            self._add([int(Kind.SAMPLE), self._now(), None, {"disk": samples.disk(self.scheduler)}])

    def _tick(self) -> None:
        if self._writer is None or self._ticks is None or self.scheduler is None:
            return
        if self._writer.error is not None:
            logger.warning("dask-gpurt: the recording into %s has ended: %s", self.path, self._writer.error)
            self._ticks.stop()
            self._flush()  # counted as lost
            self._earlier = None
            self._tasks.clear()
            self._unwritten.clear()
            return
        if self._rhythm.tick(self.scheduler):
            self._guarded(self._sample)
        self._flush()

    def _sample(self) -> None:
        if self.scheduler is None:
            return
        now = self._now()
        for address, ws in self.scheduler.workers.items():
            self._add([int(Kind.SAMPLE), now, self._workers.get(address), samples.figures(ws)])
