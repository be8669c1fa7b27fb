"""`SimWorker`: what a live worker does with the scheduler's messages, without sockets and threads.

It follows upstream's worker state machine, because schedules depend on it. Inputs are fetched as `inputs` says. Ready
tasks run in order of priority. A task that is stolen or released while it runs runs to its end, and its result is
dropped. With a finished task a worker reports the times of its computation, of reading spilled inputs and of the
transfers made for it, as live workers do.

Left out: failures, actors, resources, pausing, the retry of requests to busy peers, the time to (de)serialise.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import pickle
from typing import TYPE_CHECKING, Any

from dask_gpurt.simulate.clock import EPOCH
from dask_gpurt.simulate.inputs import EXECUTING, READY, WAITING, Inputs, Run
from dask_gpurt.simulate.memory import Store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dask.typing import Key

    from dask_gpurt.simulate.surroundings import Surroundings

_TYPE = pickle.dumps(object)


class SimWorker:
    """Executors, memory and the requests of one worker."""

    def __init__(self, sim: Surroundings, index: int, address: str) -> None:
        self.sim = sim
        self.loop = sim.loop
        self.index = index
        self.address = address
        cluster = sim.cluster
        self.threads = cluster.threads
        self.slowness = cluster.slowness_of(index)
        memory = cluster.memory_of(index)
        limit = float("inf") if memory is None else memory * cluster.spill_share
        self.store = Store(
            self.loop,
            limit,
            cluster.disk_write,
            cluster.disk_read,
            sim.memory_changed,
            self._resides,
            in_background=cluster.spill_in_background,
            next_use=sim.next_use,
        )
        self.free = self.threads
        self.runs: dict[Any, Run] = {}
        self._ready: list[tuple[Any, int, Run]] = []
        self._order = itertools.count()
        self.inputs = Inputs(sim, self, self._complete, self._wake)
        #: how many tasks here use a key
        self._uses: collections.Counter[Any] = collections.Counter()
        self._woken = False
        self.busy_seconds = 0.0
        #: see `Result.network_seconds` and `Result.disk_seconds`
        self._network_seconds = 0.0
        self.disk_seconds = 0.0
        #: tasks that wait for inputs, and since when that, what is ready and the number of free slots are what they are
        self._waiting = 0
        self._since = 0.0

    # ------------------------------------------------------------------ messages

    def receive(self, message: dict[str, Any]) -> None:
        """A message of the scheduler arrives."""
        op = message["op"]
        if op == "compute-task":
            self._compute(message)
        elif op == "free-keys":
            for key in message["keys"]:
                self._free(key)
        elif op == "remove-replicas":
            self._remove_replicas(message["keys"], message["stimulus_id"])
        elif op == "acquire-replicas":
            for key in message["who_has"]:
                if key not in self.store and key not in self.inputs:
                    self.inputs.want(key, None, (1,))
            self.inputs.communicate()
        elif op == "steal-request":
            self._steal(message["key"], message["stimulus_id"])
        else:
            self.sim.ignored[op] += 1  # a policy's own messages to its worker part, which is not simulated

    def _resides(self, key: Key, tier: str | None, nbytes: int) -> None:
        self.sim.resides(self, key, tier, nbytes)

    def _compute(self, message: dict[str, Any]) -> None:
        key = message["key"]
        old = self.runs.get(key)
        if old is not None:
            old.run_id = message["run_id"]
            if old.cancelled:
                old.cancelled = False
                self._uses.update(old.inputs)
            return
        inputs = tuple(message["who_has"])
        run = Run(key, message["priority"], message["run_id"], inputs)
        if key in self.store:
            self._finished(run, self.loop.now)
            return
        self.runs[key] = run
        self._uses.update(inputs)
        for d in inputs:
            if d not in self.store:
                run.missing.add(d)
                self.inputs.want(d, run, run.priority)
        self._charge()
        if run.missing:
            self._waiting += 1
            self.inputs.communicate()
        else:
            self._is_ready(run)
            self._wake()

    def _free(self, key: Key) -> None:
        run = self.runs.get(key)
        if run is not None and not run.cancelled:
            if run.state is EXECUTING:
                run.cancelled = True
                self._uses_less(run.inputs)
            else:
                self._forget(run)
        # An input of a task that still runs goes as well: the task keeps its value, but no other task gets it.
        self.store.drop(key)

    def _remove_replicas(self, keys: Iterable[Any], stimulus_id: str) -> None:
        refused = []
        for key in keys:
            if self._uses.get(key):
                refused.append(key)
            else:
                self.store.drop(key)
        if refused:
            self.sim.tell("add-keys", self, keys=refused, stimulus_id=stimulus_id)

    def _steal(self, key: Key, stimulus_id: str) -> None:
        run = self.runs.get(key)
        state: str | None
        if run is not None and not run.cancelled:
            state = run.state
            if state is not EXECUTING:
                self._forget(run)
                self.sim.stolen += 1
        else:
            state = "memory" if key in self.store else None
        self.sim.tell("steal-response", self, key=key, state=state, stimulus_id=stimulus_id)

    def _charge(self) -> None:
        """Add up the time until now; before a slot or a task that waits or is ready changes."""
        now = self.loop.now
        if self.free:
            # While writes are not done, what is ready waits for room; a slot is counted once.
            blocked = max(0.0, min(now, self.store.settled_at) - self._since)
            held = min(self.free, sum(not run.cancelled for *_, run in self._ready)) if blocked else 0
            self.disk_seconds += blocked * held
            self._network_seconds += (now - self._since - blocked) * min(self._waiting, self.free)
            self._network_seconds += blocked * min(self._waiting, self.free - held)
        self._since = now

    def network_seconds(self) -> float:
        """See `Result.network_seconds`, until now."""
        self._charge()
        return self._network_seconds

    def _forget(self, run: Run) -> None:
        self._charge()
        del self.runs[run.key]
        if run.state is WAITING and run.missing:
            self._waiting -= 1
        run.cancelled = True
        self._uses_less(run.inputs)
        self.inputs.forget(run)

    def _uses_less(self, keys: Iterable[Any]) -> None:
        for key in keys:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]

    # ------------------------------------------------------------------ execution

    def _complete(self, run: Run) -> None:
        self._charge()
        self._waiting -= 1
        self._is_ready(run)

    def _is_ready(self, run: Run) -> None:
        run.state = READY
        heapq.heappush(self._ready, (run.priority, next(self._order), run))

    def _wake(self) -> None:
        """Start what can start, after all that happens at this instant, or when the disk lets us."""
        if self._woken:
            return
        self._woken = True
        self.loop.at(max(self.loop.now, self.store.settled_at), self._execute)

    def _execute(self) -> None:
        self._woken = False
        if self.store.settled_at > self.loop.now:
            self._wake()
            return
        self._charge()
        while self.free and self._ready:
            run = heapq.heappop(self._ready)[-1]
            if run.cancelled:
                continue
            self.free -= 1
            run.state = EXECUTING
            self.store.pin(run.inputs)
            began, loaded = self.store.use(run.inputs)
            if loaded > self.loop.now:
                run.startstops.append({"action": "disk-read", "start": EPOCH + began, "stop": EPOCH + loaded})
            run.since = self.loop.now
            self.disk_seconds += loaded - self.loop.now
            seconds = self.sim.duration(run.key) * self.slowness
            self.loop.at(loaded + seconds, self._computed, run, loaded)

    def _computed(self, run: Run, began: float) -> None:
        run.startstops.append({"action": "compute", "start": EPOCH + began, "stop": EPOCH + self.loop.now})
        self.busy_seconds += self.loop.now - began
        overhead = self.sim.cluster.overhead_seconds
        if overhead:
            self.loop.after(overhead, self._executed, run, began)
        else:
            self._executed(run, began)

    def _executed(self, run: Run, began: float) -> None:
        now = self.loop.now
        self._charge()
        self.free += 1
        self.store.unpin(run.inputs)
        del self.runs[run.key]
        self.sim.executed(run.key, self.index, began, now, run.cancelled)
        if run.cancelled:
            self._wake()
            return
        self._uses_less(run.inputs)
        done = self.store.put(run.key, self.sim.size(run.key))
        self._finished(run, done)
        self._wake()

    def _finished(self, run: Run, when: float) -> None:
        self.sim.tell(
            "task-finished",
            self,
            after=when,
            key=run.key,
            stimulus_id="task-finished",
            run_id=run.run_id,
            metadata={},
            nbytes=self.store.sizes[run.key],
            type=_TYPE,
            typename="object",
            thread=self.index,
            startstops=run.startstops,
        )

    # ------------------------------------------------------------------ heartbeat

    def metrics(self) -> dict[str, Any]:
        """What upstream's `Worker.get_metrics` has that the scheduler reads."""
        store = self.store
        return {
            "bandwidth": {"total": self.inputs.bandwidth, "workers": {}, "types": {}},
            "digests_total_since_heartbeat": {},
            "managed_bytes": store.resident_bytes,
            "spilled_bytes": {"memory": store.on_disk_bytes, "disk": store.on_disk_bytes},
            "transfer": {"incoming_bytes": 0, "incoming_count": len(self.inputs.asked), "incoming_count_total": 0},
            "event_loop_interval": 0.02,
            "memory": store.resident_bytes,
            "cpu": 0.0,
            "time": EPOCH + self.loop.now,
            "num_fds": 0,
        }

    def executing(self) -> dict[Any, float]:
        """Key -> seconds for which it has run so far."""
        now = self.loop.now
        return {r.key: now - r.since for r in self.runs.values() if r.state is EXECUTING and not r.cancelled}
