"""Links shared fairly: every transfer gets its max-min fair rate, at any time.

A transfer occupies a few *resources* (the sender's port, the receiver's port, or the network cards of their nodes and
the uplinks of their racks), each with a capacity in bytes/s. Rates are max-min fair: no transfer can get more without
taking from one that has no more than itself. That is what many TCP streams approach.

Progressive filling, the definition that tests compare with, is O(flows * resources): too much for each of 10^5
transfers. `Network` keeps one *level* per resource, the rate of a transfer that is held back only there. It updates
only what a start or an end changes: a resource's new level follows from the levels of the other resources of its
transfers; when it moves by more than `TOLERANCE`, those others are visited in turn. This is the distributed
algorithm of ATM's "explicit rate" (Charny 1994), which converges to the max-min rates; stopping at the tolerance keeps
the work local. Starts and ends of one instant are taken together; with more than `MANY` transfers under way, those of
up to a microsecond per transfer are (5 ms with 5,000): without that, a shuffle among 1,000 workers takes hours to
simulate. A transfer that starts waits for that long, and what one that ends leaves free lies idle so long.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dask_gpurt.simulate.clock import VirtualLoop

#: relative change of a level that is not passed on
TOLERANCE = 1e-3
#: visits of resources per update and changed resource, at most: stops an update that circles around the tolerance
VISITS = 200
#: transfers under way from which changes are taken together, and for how long per transfer, in seconds
MANY = 500
LAZY_SECONDS = 1e-6


class Flow:
    """One transfer under way."""

    __slots__ = ("done", "left_bytes", "rate", "resources", "updated", "version")

    def __init__(self, resources: tuple[int, ...], nbytes: float, now: float, done: Callable[[], None]) -> None:
        self.resources = resources
        self.left_bytes = nbytes
        #: bytes/s
        self.rate = 0.0
        self.updated = now
        #: counts changes of rate; an end planned for an older one is void
        self.version = 0
        self.done = done


class Network:
    """The transfers of one simulation."""

    def __init__(self, loop: VirtualLoop, capacities: Sequence[float]) -> None:
        for c in capacities:
            if not 0 < c < math.inf:
                raise ValueError(f"a link of {c!r} bytes/s; must be finite and more than 0")
        self._loop = loop
        self._capacity = list(capacities)
        self._level = [math.inf] * len(self._capacity)
        #: of each resource: its transfers, and the other resources of each of them
        self._flows: list[dict[Flow, tuple[int, ...]]] = [{} for _ in self._capacity]
        self._dirty: dict[int, None] = {}
        self._planned = False
        #: transfers under way
        self.active = 0

    def start(self, resources: Sequence[int], nbytes: float, done: Callable[[], None]) -> Flow:
        """Begin a transfer; `done` is called when its last byte has arrived."""
        flow = Flow(tuple(dict.fromkeys(resources)), float(nbytes), self._loop.now, done)
        self.active += 1
        for r in flow.resources:
            self._flows[r][flow] = tuple(q for q in flow.resources if q != r)
        if nbytes <= 0 or not flow.resources:
            self._loop.after(0.0, self._end, flow, flow.version)
        self._changed(flow.resources)
        return flow

    def rates(self) -> dict[Flow, float]:
        """The transfers under way and their rates, in bytes/s."""
        return {f: f.rate for flows in self._flows for f in flows}

    def _changed(self, resources: Sequence[int]) -> None:
        for r in resources:
            self._dirty[r] = None
        if not self._planned:
            self._planned = True
            if self.active <= MANY:
                self._loop.at_instant_end(self._update)
            else:
                self._loop.after(LAZY_SECONDS * self.active, self._update)

    def _update(self) -> None:
        self._planned = False
        level, flows_of = self._level, self._flows
        queue = deque(self._dirty)
        waiting = set(queue)
        touched = self._dirty
        self._dirty = {}
        budget = VISITS * len(queue)
        while queue and budget:
            budget -= 1
            r = queue.popleft()
            waiting.discard(r)
            old, new = level[r], self._fair_level(r)
            if new == old or abs(new - old) <= TOLERANCE * min(old, new):
                continue
            level[r] = new
            touched[r] = None
            lower = min(old, new)
            for others in flows_of[r].values():
                for q in others:
                    # Where both the old and the new level are above q's, q saw its own limit before and does now.
                    if q not in waiting and lower < level[q] * (1 + TOLERANCE):
                        waiting.add(q)
                        queue.append(q)
        now = self._loop.now
        of = level.__getitem__
        changed: dict[Flow, None] = {}
        for r in touched:
            changed.update(dict.fromkeys(flows_of[r]))
        for f in changed:
            rate, old = min(map(of, f.resources)), f.rate
            if abs(rate - old) <= TOLERANCE * old or f.left_bytes <= 0:
                continue
            f.left_bytes = max(0.0, f.left_bytes - f.rate * (now - f.updated))
            f.updated = now
            f.rate = rate
            f.version += 1
            self._loop.at(now + f.left_bytes / rate, self._end, f, f.version)

    def _fair_level(self, r: int) -> float:
        """The rate of a flow that only `r` holds back; infinite when all its flows are held back elsewhere."""
        level = self._level
        of = level.__getitem__
        limits = sorted(
            [
                level[others[0]] if len(others) == 1 else min(map(of, others), default=math.inf)
                for others in self._flows[r].values()
            ]
        )
        left, n = self._capacity[r], len(limits)
        for limit in limits:
            if limit * n >= left:
                return left / n
            left -= limit
            n -= 1
        return math.inf

    def _end(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return
        flow.version = -1
        flow.left_bytes = 0.0
        self.active -= 1
        for r in flow.resources:
            del self._flows[r][flow]
        self._changed(flow.resources)
        flow.done()
