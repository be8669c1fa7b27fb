"""The inputs of one simulated worker: who could send them, what is asked for, and what has arrived.

Inputs are fetched in order of the priority of the tasks that need them, one request per peer at a time, as many keys of
a peer together as fit one request.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Any

from dask_gpurt.simulate.clock import EPOCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from dask.typing import Key

    from dask_gpurt.simulate.surroundings import Peer, Surroundings

#: holders of an input that are considered as its source
SOURCES = 4
WAITING, READY, EXECUTING = "waiting", "ready", "executing"


class Run:
    """A task on a worker, from the scheduler's message to its end."""

    __slots__ = ("cancelled", "inputs", "key", "missing", "priority", "run_id", "since", "startstops", "state")

    def __init__(self, key: Key, priority: tuple[float, ...], run_id: int, inputs: tuple[Key, ...]) -> None:
        self.key = key
        self.priority = priority
        self.run_id = run_id
        self.inputs = inputs
        #: inputs that are not here yet
        self.missing: set[Key] = set()
        self.state = WAITING
        self.cancelled = False
        #: begin of execution
        self.since = 0.0
        self.startstops: list[dict[str, Any]] = []


class Inputs:
    """The requests of one worker.

    Parameters
    ----------
    sim
        What is around the worker.
    me
        The worker.
    complete
        Called with each task whose last input has arrived.
    settled
        Called after the tasks of an answer are complete.
    """

    def __init__(
        self, sim: Surroundings, me: Peer, complete: Callable[[Run], None], settled: Callable[[], None]
    ) -> None:
        self._sim = sim
        self._me = me
        self._complete = complete
        self._settled = settled
        #: as `Worker.bandwidth`, bytes/s
        self.bandwidth = sim.bandwidth
        self._order = itertools.count()
        #: input -> tasks waiting for it; None among them: a replica wanted by the scheduler
        self._wanted: dict[Key, dict[Run | None, None]] = {}
        #: peer -> heap of (priority, order, key) it could send
        self._offers: dict[int, list[tuple[tuple[float, ...], int, Key]]] = {}
        self._peers: list[tuple[tuple[float, ...], bool, int, int]] = []
        self._fetching: set[Key] = set()
        #: peers that are to answer
        self.asked: set[int] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._wanted

    def forget(self, run: Run) -> None:
        """A task does not need its inputs any more."""
        for d in run.missing:
            waiting = self._wanted.get(d)
            if waiting is not None:
                waiting.pop(run, None)
                if not waiting and d not in self._fetching:
                    del self._wanted[d]

    def want(self, key: Key, run: Run | None, priority: tuple[float, ...]) -> None:
        """A task needs a key that is not here; None: the scheduler wants a replica."""
        waiting = self._wanted.setdefault(key, {})
        waiting[run] = None
        if key not in self._fetching:
            self._offer(key, priority)

    def _offer(self, key: Key, priority: tuple[float, ...]) -> None:
        """Note who could send a key: neighbours if there are any, else a few of its holders."""
        sim = self._sim
        holders = sim.holders(key)
        if not holders:
            return  # its last copy is gone; the scheduler computes it again and sends the task anew
        node = sim.cluster.node_of(self._me.index)
        near = [h for h in holders if sim.cluster.node_of(h) == node]
        sources = near or holders
        if len(sources) > SOURCES:
            sources = sim.random.sample(sources, SOURCES)
        for h in sources:
            heapq.heappush(self._offers.setdefault(h, []), (priority, next(self._order), key))
            heapq.heappush(self._peers, (priority, not near, next(self._order), h))

    def communicate(self) -> None:
        """Ask the peers that are not asked yet, as many as may be asked at a time."""
        limit = self._sim.cluster.connections
        while self._peers and len(self.asked) < limit:
            peer = heapq.heappop(self._peers)[-1]
            if peer in self.asked:
                continue  # listed again when its answer is here
            offers = self._offers.get(peer)
            if not offers:
                continue
            source = self._sim.workers[peer]
            keys: list[Key] = []
            nbytes = 0
            while offers:
                priority, _, key = offers[0]
                if key in self._fetching or key in self._me.store or not self._wanted.get(key):
                    heapq.heappop(offers)
                    continue
                if key not in source.store:
                    heapq.heappop(offers)
                    self._offer(key, priority)
                    continue
                size = source.store.sizes[key]
                if keys and nbytes + size > self._sim.cluster.request_bytes:
                    break
                heapq.heappop(offers)
                keys.append(key)
                nbytes += size
                self._fetching.add(key)
            if keys:
                self.asked.add(peer)
                self._fetch(source, keys, nbytes)

    def _fetch(self, source: Peer, keys: list[Key], nbytes: int) -> None:
        latency, resources = self._sim.cluster.route(source.index, self._me.index)
        started = self._sim.loop.now
        # Spilled values are read before they are sent.
        _, ready = source.store.use(keys)
        source.store.pin(keys)

        def send() -> None:
            self._sim.network.start(resources, nbytes, arrived)

        def arrived() -> None:
            source.store.unpin(keys)
            self._arrived(source, keys, nbytes, started)

        self._sim.loop.at(max(ready, started) + latency, send)

    def _arrived(self, source: Peer, keys: list[Key], nbytes: int, started: float) -> None:
        sim, now = self._sim, self._sim.loop.now
        self.asked.discard(source.index)
        sim.moved(source.index, self._me.index, nbytes)
        if nbytes > 1_000_000:
            self.bandwidth = self.bandwidth * 0.95 + nbytes / max(now - started, 1e-3) * 0.05
        kept, reported, done = [], False, now
        for key in keys:
            self._fetching.discard(key)
            waiting = self._wanted.pop(key, {})
            if not waiting:
                continue  # not wanted any more
            done = max(done, self._me.store.put(key, sim.size(key)))
            kept.append(key)
            for run in waiting:
                if run is None:
                    continue
                run.missing.discard(key)
                if not reported:
                    # All of a request is reported with one task, whichever that is.
                    reported = True
                    run.startstops.append(
                        {
                            "action": "transfer",
                            "start": EPOCH + started,
                            "stop": EPOCH + now,
                            "source": source.address,
                        }
                    )
                if not run.missing:
                    self._complete(run)
        if kept:
            sim.tell("add-keys", self._me, after=done, keys=kept, stimulus_id="fetched")
        offers = self._offers.get(source.index)
        if offers:
            heapq.heappush(self._peers, (offers[0][0], False, next(self._order), source.index))
        self.communicate()
        self._settled()
