"""Stand-ins for distributed's WorkerState and TaskState: the attributes that placement reads, and nothing else."""

from __future__ import annotations

from typing import Any

from distributed.core import Status

from dask_gpurt.config import PlacementSettings
from dask_gpurt.placement.engine import Engine

SETTINGS = PlacementSettings(enabled=True, candidates=16)


class FakeWorker:
    def __init__(self, i: int, *, host: str = "", nthreads: int = 1, memory_limit: int = 0) -> None:
        self.host = host or f"10.0.0.{i}"
        self.address = f"tcp://{self.host}:{1000 + i}"
        self.status = Status.running
        self.nthreads = nthreads
        self.memory_limit = memory_limit
        self.nbytes = 0
        self.processing: set[Any] = set()
        self.long_running: set[Any] = set()
        self.executing: dict[Any, float] = {}
        self.needs_what: dict[Any, int] = {}
        self._network_occ = 0

    def __repr__(self) -> str:
        return self.address


class FakePrefix:
    def __init__(self, name: str) -> None:
        self.name = name
        self.duration_average = -1.0


class FakeGroup:
    def __init__(self, name: str, prefix: FakePrefix) -> None:
        self.name = name
        self.prefix = prefix


class FakeTask:
    def __init__(
        self,
        key: str,
        *dependencies: FakeTask,
        nbytes: int = -1,
        on: tuple[FakeWorker, ...] = (),
        prefix: str = "",
        group: str = "",
    ) -> None:
        self.key = key
        self.prefix = FakePrefix(prefix or key.split("-")[0])
        self.group = FakeGroup(group or self.prefix.name, self.prefix)
        self.dependencies = set(dependencies)
        self.dependents: set[FakeTask] = set()
        #: of a task that has been computed: who is still to run
        self.waiters: set[FakeTask] | None = self.dependents
        for d in dependencies:
            d.dependents.add(self)
        self.nbytes = nbytes
        self.who_has: set[FakeWorker] | None = set(on) or None
        self.actor = False
        self.processing_on: FakeWorker | None = None
        for ws in on:
            ws.nbytes += max(0, nbytes)

    def get_nbytes(self) -> int:
        return self.nbytes if self.nbytes >= 0 else 1024

    def __repr__(self) -> str:
        return self.key


class FakeScheduler:
    def __init__(self, workers: list[FakeWorker]) -> None:
        self.workers = {ws.address: ws for ws in workers}
        self.running = set(workers)
        self.tasks: dict[str, FakeTask] = {}
        self.bandwidth = 1e8
        self.transition_counter = 0
        self.queued: list[FakeTask] = []
        self.task_groups: dict[str, Any] = {}
        self.total_nthreads = sum(ws.nthreads for ws in workers)

    def is_rootish(self, ts: FakeTask) -> bool:
        return True


def make_engine(workers: list[FakeWorker], **settings: Any) -> Engine:
    engine = Engine(FakeScheduler(workers), PlacementSettings(**{"enabled": True, "candidates": 16, **settings}))
    engine.always = True  # the cost is what most of these tests are about
    engine.budget.decision_seconds = engine.budget.share = float("inf")  # the machine's load is not what is tested
    engine.adopt()
    return engine


def assign(engine: Engine, ts: FakeTask, ws: FakeWorker, queued: bool = False) -> None:
    """What the scheduler does when it sends a task to a worker."""
    ts.processing_on = ws
    ws.processing.add(ts)
    for d in ts.dependencies:
        if ws not in (d.who_has or ()):
            if d not in ws.needs_what:
                ws._network_occ += d.get_nbytes()
            ws.needs_what[d] = ws.needs_what.get(d, 0) + 1
    engine.scheduler.tasks[ts.key] = ts
    engine.books.entered(ts.key, queued)


def finish(engine: Engine, ts: FakeTask, seconds: float, nbytes: int = 0, startstops: Any = ()) -> None:
    """What the scheduler does when a task has been computed."""
    ws = ts.processing_on
    assert ws is not None
    ts.processing_on = None
    ws.processing.discard(ts)
    for d in list(ws.needs_what):
        if d in ts.dependencies:
            del ws.needs_what[d]
            ws._network_occ -= d.get_nbytes()
            assert d.who_has is not None
            d.who_has.add(ws)
    stops = [*startstops, {"action": "compute", "start": 100.0, "stop": 100.0 + seconds}]
    engine.books.left(ts.key, "memory", {"startstops": stops, "nbytes": nbytes, "worker": ws.address})


def learn(engine: Engine, prefix: str, seconds: float, nbytes: int = 0) -> None:
    """Let the engine know the duration of a prefix."""
    p = engine.durations.prefix(prefix)
    for _ in range(5):
        p.learn(seconds, nbytes)
