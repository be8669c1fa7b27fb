"""A trace, read back: tasks, workers, runs and samples as plain objects, ready to be replayed or drawn."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import TraceError
from dask_gpurt.observe.trace.format import Kind, read

if TYPE_CHECKING:
    import os

    from dask.typing import Key


@dataclasses.dataclass(slots=True)
class TracedWorker:
    """One worker of the recorded run."""

    number: int
    address: str
    host: str
    name: str
    threads: int
    memory_limit_bytes: int
    #: seconds since the begin of the trace
    joined_seconds: float
    #: None: it was there until the end
    left_seconds: float | None = None


@dataclasses.dataclass(slots=True)
class Transfer:
    """Inputs of one task that came from another worker."""

    start_seconds: float
    stop_seconds: float
    #: None: a worker that has left
    source: int | None


@dataclasses.dataclass(slots=True)
class TracedTask:
    """One task, with its last run. Times in seconds since the begin of the trace."""

    number: int
    key: Key
    prefix: str
    priority: tuple[float, ...]
    #: numbers of tasks
    dependencies: tuple[int, ...]
    #: None, or any of ``workers`` (numbers), ``hosts``, ``resources``, ``loose``, ``actor``, ``queueable``,
    #: ``data_producer``
    restrictions: dict[str, Any] | None = None
    #: which graph it came with, counted from 0; None: it was there before
    graph: int | None = None
    #: True: data that no task of the trace made; `holders` had it
    data: bool = False
    holders: tuple[int, ...] = ()
    worker: int | None = None
    assigned_seconds: float | None = None
    finished_seconds: float | None = None
    nbytes: int | None = None
    compute_start_seconds: float | None = None
    compute_stop_seconds: float | None = None
    transfers: list[Transfer] = dataclasses.field(default_factory=list)
    #: (start, stop)
    disk_reads: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    released_seconds: float | None = None
    #: text of the exception; None: its last run did not fail
    erred: str | None = None
    #: how often it was finished
    runs: int = 0
    #: (kind, worker chosen or None, predicted seconds or None)
    decision: tuple[str, int | None, float | None] | None = None

    @property
    def compute_seconds(self) -> float | None:
        """Time spent computing in the last run, reads of spilled inputs that overlap with it taken out."""
        if self.compute_start_seconds is None or self.compute_stop_seconds is None:
            return None
        seconds = self.compute_stop_seconds - self.compute_start_seconds
        for start, stop in self.disk_reads:
            overlap = min(stop, self.compute_stop_seconds) - max(start, self.compute_start_seconds)
            seconds -= max(0.0, overlap)
        return max(seconds, 0.0)


@dataclasses.dataclass(slots=True)
class Graph:
    """One submission."""

    seconds: float
    client: str
    tasks: int
    #: numbers of tasks whose results the client holds on to
    wanted: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class Sample:
    """What was measured of a worker, or of the scheduler (None), at one moment."""

    seconds: float
    worker: int | None
    figures: dict[str, Any]


@dataclasses.dataclass(slots=True)
class Trace:
    """All of one file."""

    path: str
    #: when the trace begins, in seconds since the epoch
    begin: float = 0.0
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    workers: dict[int, TracedWorker] = dataclasses.field(default_factory=dict)
    tasks: dict[int, TracedTask] = dataclasses.field(default_factory=dict)
    graphs: list[Graph] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    #: records that the recorder had to drop
    lost_records: int = 0
    #: length in seconds
    seconds: float = 0.0
    #: why the file ends before the recording did; None: it is whole
    damage: str | None = None

    def makespan_seconds(self) -> float:
        """From the first graph to the last finished task; 0 when nothing ran."""
        ends = [t.finished_seconds for t in self.tasks.values() if t.finished_seconds is not None]
        return max(ends) - self.graphs[0].seconds if ends and self.graphs else 0.0

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, damaged: bool = False) -> Trace:
        """Read a file.

        Parameters
        ----------
        damaged
            Take what is good of a file that was cut off or damaged, and say so in `damage`.

        Raises
        ------
        TraceError
            Not a trace, another version, or damaged.
        OSError
            The file cannot be read.
        """
        trace = cls(str(path))
        builder = _Builder(trace)
        with open(path, "rb") as file:
            try:
                for block in read(file, str(path)):
                    for record in block:
                        builder.add(record)
                if not builder.ended:
                    raise TraceError(f"{path} has no end: the scheduler that wrote it was killed, or still writes it")
            except TraceError as e:
                if not trace.about:  # nothing of it is good
                    raise
                if not damaged:
                    raise TraceError(
                        f"{e}. Remedy: Trace.load(path, damaged=True), or `dask gpurt trace --damaged`, takes what is "
                        "good of it"
                    ) from e
                trace.damage = str(e)
        return trace


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / 1e6


_NUMBER = (int, float)
_MAYBE = (int, type(None))
_MAYBE_NUMBER = (int, float, type(None))
#: the types of a record's elements, see `Kind`
_FIELDS: dict[Kind, tuple[Any, ...]] = {
    Kind.BEGIN: (_NUMBER, dict),
    Kind.WORKER: (int, int, str, str, str, int, int),
    Kind.WORKER_GONE: (int, int),
    Kind.PREFIX: (int, str),
    Kind.TASK: (int, (str, list), int, list, list, (dict, type(None))),
    Kind.GRAPH: (int, str, int, list),
    Kind.ASSIGNED: (int, _MAYBE, int),
    Kind.FINISHED: (int, _MAYBE, int, _MAYBE, _MAYBE, _MAYBE, list, list),
    Kind.RELEASED: (int, int),
    Kind.ERRED: (int, int, str),
    Kind.SAMPLE: (int, _MAYBE, dict),
    Kind.DATA: (int, (str, list), int, list),
    Kind.DECISION: (int, str, _MAYBE, _MAYBE_NUMBER),
    Kind.END: (int, int, int),
    Kind.FORGOTTEN: (int, int),
}
#: what is read of the begin and of a task's restrictions: the type, and that of what is in it
_ABOUT: dict[str, tuple[Any, Any]] = {
    "versions": (dict, str),
    "config": (dict, object),
    "durations": (dict, _NUMBER),
    "disk": (dict, _NUMBER),
}
_RESTRICTIONS: dict[str, tuple[Any, Any]] = {
    "workers": (list, int),
    "hosts": (list, str),
    "resources": (dict, _NUMBER),
}


def _key(plain: str | list[Any]) -> Key:
    return tuple(_all(plain, (str, int), "parts of a key")) if isinstance(plain, list) else plain


def _all(values: list[Any], types: type | tuple[type, ...], name: str) -> list[Any]:
    if not all(isinstance(value, types) for value in values):
        raise TypeError(f"{name} are {str(values)[:100]}")
    return values


def _check(tree: dict[str, Any], known: dict[str, tuple[Any, Any]]) -> None:
    for name, (types, inside) in known.items():
        value = tree.get(name)
        if value is not None:
            if not isinstance(value, types):
                raise TypeError(f"{name} is {str(value)[:100]}")
            _all(list(value.values()) if isinstance(value, dict) else value, inside, name)


class _Builder:
    """Adds records to a `Trace`, in the order of the file."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ended = False
        self._prefixes: dict[int, str] = {}
        #: tasks since the last graph: the graph's own record comes after them
        self._new: list[TracedTask] = []
        self._began = False

    def add(self, record: list[Any]) -> None:
        number, *rest = record
        try:
            kind = Kind(number)
            for value, types in zip(rest, _FIELDS[kind], strict=True):
                if not isinstance(value, types):
                    raise TypeError(f"{str(value)[:100]} is of the wrong type")
            getattr(self, f"_{kind.name.lower()}")(*rest)
        except (TypeError, ValueError, KeyError, OverflowError) as e:
            raise TraceError(
                f"{self.trace.path}: the record {str(record)[:200]} is not one of this version: {e}"
            ) from e

    def _begin(self, seconds: float, about: dict[str, Any]) -> None:
        _check(about, _ABOUT)
        self.trace.begin, self.trace.about = seconds, about

    def _worker(self, number: int, at: int, address: str, host: str, name: str, threads: int, limit: int) -> None:
        if threads < 1:
            raise ValueError("a worker has at least one thread")
        self.trace.workers[number] = TracedWorker(number, address, host, name, threads, limit, at / 1e6)

    def _worker_gone(self, number: int, at: int) -> None:
        self.trace.workers[number].left_seconds = at / 1e6

    def _prefix(self, number: int, name: str) -> None:
        self._prefixes[number] = name

    def _task(
        self,
        number: int,
        key: str | list[Any],
        prefix: int,
        priority: list[float],
        depends: list[int],
        restrictions: dict[str, Any] | None,
    ) -> None:
        name = self._prefixes[prefix]
        _check(restrictions or {}, _RESTRICTIONS)
        order, inputs = _all(priority, _NUMBER, "priorities"), _all(depends, int, "dependencies")
        task = TracedTask(number, _key(key), name, tuple(order), tuple(inputs), restrictions)
        self.trace.tasks[number] = task
        self._new.append(task)

    def _data(self, number: int, key: str | list[Any], nbytes: int, holders: list[int]) -> None:
        where = tuple(_all(holders, int, "holders"))
        task = TracedTask(number, _key(key), "data", (), (), data=True, holders=where, nbytes=nbytes)
        self.trace.tasks[number] = task

    def _graph(self, at: int, client: str, tasks: int, wanted: list[int]) -> None:
        # Tasks that were there before the trace began come before the first graph, more of them than it says.
        for task in self._new[max(0, len(self._new) - tasks) :]:
            task.graph = len(self.trace.graphs)
        self._new.clear()
        self.trace.graphs.append(Graph(at / 1e6, client, tasks, tuple(_all(wanted, int, "wanted tasks"))))

    def _assigned(self, number: int, worker: int | None, at: int) -> None:
        task = self._known(number)
        if task is not None:
            task.worker, task.assigned_seconds = worker, at / 1e6

    def _finished(
        self,
        number: int,
        worker: int | None,
        at: int,
        nbytes: int | None,
        start: int | None,
        stop: int | None,
        transfers: list[list[Any]],
        reads: list[list[int]],
    ) -> None:
        task = self._known(number)
        if task is None:
            return
        # It may have failed before, and been run again.
        task.finished_seconds, task.nbytes, task.erred = at / 1e6, nbytes, None
        if worker is not None:
            task.worker = worker
        task.compute_start_seconds, task.compute_stop_seconds = _seconds(start), _seconds(stop)
        task.transfers = [Transfer(a / 1e6, b / 1e6, source) for a, b, source in transfers]
        task.disk_reads = [(a / 1e6, b / 1e6) for a, b in reads]
        task.runs += 1

    def _released(self, number: int, at: int) -> None:
        task = self._known(number)
        if task is not None:
            task.released_seconds = at / 1e6

    def _erred(self, number: int, at: int, name: str) -> None:
        task = self._known(number)
        if task is not None:
            task.erred, task.finished_seconds = name, at / 1e6

    def _forgotten(self, number: int, at: int) -> None:
        self._known(number)

    def _sample(self, at: int, worker: int | None, figures: dict[str, Any]) -> None:
        self.trace.samples.append(Sample(at / 1e6, worker, figures))

    def _decision(self, number: int, kind: str, worker: int | None, seconds: float | None) -> None:
        task = self._known(number)
        if task is not None:
            task.decision = (kind, worker, seconds)

    def _end(self, at: int, records: int, lost: int) -> None:
        self.trace.seconds, self.trace.lost_records = at / 1e6, lost
        self.ended = True

    def _known(self, number: int) -> TracedTask | None:
        """None where the record of the task was in a block that had to be dropped."""
        return self.trace.tasks.get(number)
