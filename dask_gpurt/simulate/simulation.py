"""The real Scheduler, unstarted, with simulated workers on a virtual clock.

Everything that decides is the code that runs in production: upstream's transitions, queuing, deciders, stealing and
active memory management, and this package's `PlacementPlugin`, installed through its seam. What is simulated is the
rest: workers (`worker`), their memory (`memory`), the network (`network`), and the messages between them, which arrive
after `Cluster.message_seconds`, in order.

A scheduler that is not started has no sockets, no periodic callbacks and no clients. WorkerStates are made by hand as
`Scheduler.add_worker` makes them; the graph is given to the method that `update_graph` calls in the end; what recurs
(heartbeats, balancing, active memory management) recurs on the virtual clock.

One simulation per process at a time (`clock.patched`).
"""

from __future__ import annotations

import collections
import random
import time
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import dask
import dask.order
from distributed.scheduler import TaskPrefix, heartbeat_interval

from dask_gpurt.simulate import seam
from dask_gpurt.simulate.busy import Busy
from dask_gpurt.simulate.client import clients
from dask_gpurt.simulate.clock import EPOCH, VirtualLoop
from dask_gpurt.simulate.model import Cluster, Result, StableStr, Workload, stable
from dask_gpurt.simulate.network import Network
from dask_gpurt.simulate.worker import SimWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dask.typing import Key

    from dask_gpurt.placement.monitor import Monitor
    from dask_gpurt.simulate.surroundings import Peer

_P = ParamSpec("_P")
_T = TypeVar("_T")

CLIENT = "simulated-client"
#: virtual seconds without any progress after which a run counts as stuck
STUCK_SECONDS = 300.0


class SimulationError(RuntimeError):
    """The simulated cluster does not get its work done."""


class _Stream:
    """Stands in for the `BatchedSend` to one worker."""

    def __init__(self, sim: Simulation, worker: SimWorker) -> None:
        self._sim = sim
        self._worker = worker

    def send(self, *messages: dict[str, Any]) -> None:
        sim = self._sim
        for message in messages:
            sim.loop.at(sim.busy.sends_at + sim.cluster.message_seconds, self._worker.receive, message)

    def closed(self) -> bool:
        return False

    def abort(self) -> None:
        pass


class Simulation:
    """One workload on one cluster. Create it on a running event loop (`Scheduler` wants one), under the configuration
    that the scheduler is to have."""

    def __init__(self, workload: Workload, cluster: Cluster, seed: int) -> None:
        seam.check()
        self.workload = workload
        self.cluster = cluster
        self.seed = seed
        self.loop = VirtualLoop()
        self.random = random.Random(seed)
        self.network = Network(self.loop, cluster.capacities())
        #: bytes/s that workers and scheduler assume before they have measured anything
        self.bandwidth = float(dask.utils.parse_bytes(dask.config.get("distributed.scheduler.bandwidth")))
        #: our keys (the scheduler's) -> the workload's
        self.names: dict[Key, Key] = {}
        self._stable: dict[Key, Key] = {}
        self._durations: dict[Key, float] = {}
        self._sizes: dict[Key, int] = {}
        self.result = Result(workload.name, "", seed, cluster.workers)
        self.result.bytes_moved = {"node": 0, "rack": 0, "far": 0}
        #: called with every change of residence: (address, key, "memory", "disk" or None for gone, bytes)
        self.residence: list[Callable[[str, Key, str | None, int], None]] = []
        #: messages to workers that have no meaning here, by op
        self.ignored: collections.Counter[str] = collections.Counter()
        self.stolen = 0
        self.keep_timeline = False
        #: pin every task to the worker that `Workload.plan` names
        self.follow_plan = False
        self._memory = 0
        self._progress_at = 0.0
        self._outputs_left: set[Key] = set()
        self.clients = clients(self, workload.steps, CLIENT)
        self._scheduler_seconds = 0.0
        self._in_scheduler = False
        self.busy = Busy(self.loop, cluster.scheduler)
        self.scheduler = seam.unstarted_scheduler((CLIENT, *(client.name for client in self.clients)))
        self.workers: list[SimWorker] = []
        self._by_address: dict[str, int] = {}
        for i in range(cluster.workers):
            self._add_worker(i)
        self._learn_keys()

    # ------------------------------------------------------------------ making

    def _add_worker(self, i: int) -> None:
        node = self.cluster.node_of(i)
        address = f"tcp://10.{node >> 16 & 255}.{node >> 8 & 255}.{node & 255}:{20000 + i % self.cluster.per_node}"
        worker = SimWorker(self, i, address)
        self.workers.append(worker)
        self._by_address[address] = i
        seam.add_worker(
            self.scheduler,
            name=i,
            address=address,
            server_id=StableStr(f"worker-{i}", self.seed),
            threads=self.cluster.threads,
            memory_limit=self.cluster.memory_of(i) or 0,
            metrics=worker.metrics(),
            stream=_Stream(self, worker),
        )

    def _learn_keys(self) -> None:
        durations = self.workload.durations(self.seed)
        for key, task in self.workload.tasks.items():
            name = self._name(key)
            self._durations[name] = durations[key]
            self._sizes[name] = int(task.nbytes)
        for key, placed in self.workload.inputs.items():
            self._sizes[self._name(key)] = int(placed.nbytes)

    def _name(self, key: Key) -> Key:
        """The scheduler's key for one of the workload's: the same, but with a hash that does not change."""
        name = self._stable.get(key)
        if name is None:
            name = self._stable[key] = stable(key, self.seed)
            self.names[name] = key
        return name

    def stable(self, key: Key) -> Key:
        """The scheduler's key for one of the workload's."""
        return self._stable[key]

    # ------------------------------------------------------------------ for the workers

    def size(self, key: Key) -> int:
        """Bytes of a result."""
        return self._sizes[key]

    def duration(self, key: Key) -> float:
        """Seconds of a task on a worker of slowness 1."""
        return self._durations[key]

    def holders(self, key: Key) -> list[int]:
        """Workers that have a key in fact and to the scheduler's knowledge, in the scheduler's order."""
        ts = self.scheduler.tasks.get(key)
        if ts is None:
            return []
        found = (self._by_address[ws.address] for ws in ts.who_has or ())
        return [i for i in found if key in self.workers[i].store]

    def next_use(self, key: Key) -> tuple[float, ...] | None:
        """The priority of the first task that waits for a key; None without any."""
        ts = self.scheduler.tasks.get(key)
        return None if ts is None or not ts.waiters else min(w.priority for w in ts.waiters)

    def tell(self, op: str, worker: Peer, after: float | None = None, **message: object) -> None:
        """A message from a worker to the scheduler, not sent before the time `after`."""
        when = max(self.loop.now, after or 0.0) + self.cluster.message_seconds
        self.loop.at(when, self.busy.arrives, self.busy.cost.of(op), self._arrived, op, worker.address, message)

    def _arrived(self, op: str, address: str, message: dict[str, Any]) -> None:
        if op == "task-finished":
            self._progress_at = self.loop.now
        self.in_scheduler(self.scheduler.stream_handlers[op], worker=address, **message)
        if op == "task-finished":
            key = message["key"]
            if key in self._outputs_left:
                ts = self.scheduler.tasks.get(key)
                if ts is not None and ts.state == "memory":
                    self._outputs_left.discard(key)
                    for client in self.clients:
                        client.has(key)

    def in_scheduler(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call into the scheduler; its processor time is added up (what else the machine does is no part of it)."""
        if self._in_scheduler:
            return function(*args, **kwargs)
        self._in_scheduler = True
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            self._scheduler_seconds += time.thread_time() - began
            self._in_scheduler = False

    def moved(self, source: int, target: int, nbytes: int) -> None:
        """Bytes have come from one worker to another."""
        self.result.bytes_moved[self.cluster.link_class(source, target)] += nbytes
        self.result.transfers += 1
        self._progress_at = self.loop.now

    def memory_changed(self, nbytes: int) -> None:
        """Task data in the memory of a worker has become so much more, or less."""
        self._memory += nbytes
        if self._memory > self.result.peak_total_bytes:
            self.result.peak_total_bytes = self._memory

    def resides(self, worker: Peer, key: Key, tier: str | None, nbytes: int) -> None:
        """A key came to memory, went to disk, or left a worker."""
        for listener in self.residence:
            listener(worker.address, key, tier, nbytes)

    def executed(self, key: Key, worker: int, start: float, stop: float, wasted: bool) -> None:
        """A worker has run a task; `wasted`: its result is not wanted any more."""
        self.result.executed += 1
        self.result.wasted += wasted
        if self.keep_timeline:
            self.result.timeline.append((self.names[key], worker, start, stop))
            if not wasted:
                self.result.assigned[self.names[key]] = worker

    @property
    def waiting(self) -> bool:
        """Outputs of what was submitted are missing, or a client has more to submit."""
        return bool(self._outputs_left) or not all(client.done for client in self.clients)

    def release(self, outputs: Iterable[Key], client: str = CLIENT) -> None:
        """The client lets go of outputs."""
        keys = [self._name(k) for k in outputs]
        self.in_scheduler(self.scheduler.client_releases_keys, keys=keys, client=client, stimulus_id="release")
        # What is not wanted any more is not waited for either.
        tasks = self.scheduler.tasks
        self._outputs_left.difference_update([k for k in keys if k not in tasks or not tasks[k].who_wants])

    def begin(self) -> None:
        """Submit the workload: all at once, or each client its first step."""
        if not self.clients:
            self.busy.hold(self.busy.cost.submitted * len(self.workload.tasks))
            self.submit()
        for client in self.clients:
            client.start()

    # ------------------------------------------------------------------ running

    def know(self, durations: Mapping[str, float]) -> None:
        """What the scheduler has learned of kinds of task before: prefix -> seconds."""
        for name, seconds in durations.items():
            prefix = self.scheduler.task_prefixes.setdefault(name, TaskPrefix(name))
            prefix.duration_average = seconds

    def place_inputs(self) -> None:
        """Put the data there that the workload begins with."""
        for key, placed in self.workload.inputs.items():
            name = self._name(key)
            for i, tier in placed.where.items():
                if tier == "disk":
                    self.workers[i].store.put_on_disk(name, int(placed.nbytes))
                else:
                    self.workers[i].store.put(name, int(placed.nbytes))
            addresses = [self.workers[i].address for i in placed.where]
            self.scheduler.update_data(who_has={name: addresses}, nbytes={name: int(placed.nbytes)}, client=CLIENT)

    def submit(
        self,
        keys: Iterable[Key] | None = None,
        outputs: Iterable[Key] | None = None,
        *,
        ordered: bool = False,
        client: str = CLIENT,
    ) -> set[Key]:
        """Hand the graph to the scheduler, as `Scheduler.update_graph` does once it has it in its hands.

        Parameters
        ----------
        keys, outputs
            The part of the workload that is submitted, and what the client wants of it; None: all.
        ordered
            `keys` are in the order in which dask would run them; otherwise `dask.order` is asked.

        Returns
        -------
        The scheduler's keys of the outputs that are not in memory yet.
        """
        keys = None if keys is None else list(keys)
        dsk = {}
        by_type: dict[str, dict[Key, object]] = {}
        for key in self.workload.tasks if keys is None else keys:
            task = self.workload.tasks[key]
            name = self._name(key)
            dsk[name] = seam.task(name, [self._name(d) for d in task.dependencies], task.data_producer)
            annotations = dict(task.annotations or {})
            if self.follow_plan:
                annotations["workers"] = [self.workload.plan[key]]
            for kind, value in annotations.items():
                by_type.setdefault(kind, {})[name] = self._annotation(kind, value)
        if keys is None:
            order = {self._name(k): i for k, i in self.workload.order.items()}
        elif ordered:
            order = {self._name(k): i for i, k in enumerate(keys)}
        else:
            order = dask.order.order(dsk=dsk)
        wanted = {self._name(k) for k in (self.workload.outputs if outputs is None else outputs)}
        self._outputs_left |= wanted
        self.in_scheduler(
            seam.create_tasks,
            self.scheduler,
            start=EPOCH + self.loop.now,
            dsk=dsk,
            keys=wanted,
            ordered=order,
            client=client,
            annotations_by_type=by_type,
        )
        tasks = self.scheduler.tasks
        missing = {k for k in wanted if k not in tasks or tasks[k].state != "memory"}
        self._outputs_left -= wanted - missing
        return missing

    def _annotation(self, kind: str, value: Any) -> object:
        # A workload names workers by index; it cannot know their addresses.
        if kind == "workers":
            return [self.workers[w].address if isinstance(w, int) else w for w in value]
        return value

    def start_ticking(self) -> None:
        """Heartbeats, and what the scheduler would do periodically."""
        s = self.scheduler
        n = len(self.workers)
        for worker in self.workers:
            self.loop.tick(heartbeat_interval(n) * self.random.random(), self._heartbeat, worker)
        stealing, amm = s.extensions.get("stealing"), s.extensions.get("amm")
        if stealing is not None and dask.config.get("distributed.scheduler.work-stealing"):
            seconds = seam.balance_seconds(stealing)
            self.loop.tick(seconds, self._recur, "stealing", "balance", seconds)
        if amm is not None and dask.config.get("distributed.scheduler.active-memory-manager.start"):
            self.loop.tick(amm.interval, self._recur, "amm", "run_once", amm.interval)
        placement = s.plugins.get("gpurt-placement")
        monitor = None if placement is None else placement.monitor
        if monitor is not None:
            monitor.stop()  # its timer would run by the real clock
            self.loop.tick(monitor.interval_seconds(), self._monitor, monitor)

    def _monitor(self, monitor: Monitor) -> None:
        self.in_scheduler(monitor.go)
        self.loop.tick(monitor.interval_seconds(), self._monitor, monitor)

    def _recur(self, extension: str, name: str, seconds: float) -> None:
        # Looked up each time: a policy may exchange the extension or its method.
        self.in_scheduler(getattr(self.scheduler.extensions[extension], name))
        self.loop.tick(seconds, self._recur, extension, name, seconds)

    def _heartbeat(self, worker: SimWorker) -> None:
        self.in_scheduler(
            self.scheduler.heartbeat_worker,
            address=worker.address,
            resolve_address=False,
            now=EPOCH + self.loop.now,
            metrics=worker.metrics(),
            executing=worker.executing(),
        )
        self.loop.tick(heartbeat_interval(len(self.workers)), self._heartbeat, worker)

    def run(self) -> None:
        """Run until all outputs are there.

        Raises
        ------
        SimulationError
            Nothing has finished or moved for `STUCK_SECONDS`, and nothing is under way.
        """
        loop = self.loop
        while self.waiting:
            if not loop.step():
                raise SimulationError(self._stuck("no event is left"))
            if not loop.pending and loop.now - self._progress_at > STUCK_SECONDS:
                raise SimulationError(self._stuck(f"nothing has happened for {STUCK_SECONDS:g} s"))

    def _stuck(self, why: str) -> str:
        states = collections.Counter(ts.state for ts in self.scheduler.tasks.values())
        return (
            f"{self.workload.name} is stuck at {self.loop.now:.3f} s, {why}: {len(self._outputs_left)} outputs are "
            f"missing, tasks by state: {dict(states)}"
        )

    def finish(self) -> Result:
        """Fill in the result."""
        r = self.result
        r.makespan_seconds = self.loop.now
        stores = [w.store for w in self.workers]
        r.peak_memory_bytes = max(s.peak_bytes for s in stores)
        r.spilled_bytes = sum(s.spilled_bytes for s in stores)
        r.read_bytes = sum(s.read_bytes for s in stores)
        r.busy_seconds = sum(w.busy_seconds for w in self.workers)
        r.network_seconds = sum(w.network_seconds() for w in self.workers)
        r.disk_seconds = sum(w.disk_seconds for w in self.workers)
        r.stolen = self.stolen
        r.scheduler_seconds = self._scheduler_seconds
        r.events = self.loop.count
        return r
