"""`SimClient`: a client that submits graph after graph: persist, reuse, compute, let go.

It submits the next graph when it has the outputs of the last one, or at once after one that it only persists. What it
still holds stays in memory, as futures keep it. Several clients share the scheduler and run side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dask.typing import Key

    from dask_gpurt.simulate.busy import Busy
    from dask_gpurt.simulate.clock import VirtualLoop
    from dask_gpurt.simulate.model import Cluster, Step


class Submits(Protocol):
    """What a client needs of its simulation."""

    loop: VirtualLoop
    busy: Busy
    cluster: Cluster

    def submit(self, keys: Iterable[Any] | None, outputs: Iterable[Any] | None, *, client: str) -> set[Any]:
        """Hand a graph to the scheduler; the outputs that are not in memory yet."""

    def release(self, outputs: Iterable[Any], client: str) -> None:
        """Let go of outputs."""


class SimClient:
    """One client and its steps, in order."""

    def __init__(self, sim: Submits, name: str, steps: Sequence[Step]) -> None:
        self.sim = sim
        self.name = name
        self._steps = list(steps)
        self._next = 0
        #: outputs that the client waits for, by the step that has them
        self._missing: set[Any] = set()
        self.done = not self._steps
        #: virtual time at which each step was submitted
        self.submitted: list[float] = []

    def start(self) -> None:
        """Begin with the first step."""
        if self._steps:
            self.sim.loop.after(self._steps[0].seconds, self._submit)

    def _submit(self) -> None:
        busy = self.sim.busy
        busy.arrives(busy.cost.submitted * len(self._steps[self._next].keys), self._submitted)

    def _submitted(self) -> None:
        step = self._steps[self._next]
        self.submitted.append(self.sim.loop.now)
        last = self._next + 1 == len(self._steps)
        missing = self.sim.submit(step.keys, step.outputs, client=self.name)
        self._missing = missing if step.waits or last else set()
        if not self._missing:
            self._goes_on()

    def has(self, key: Key) -> None:
        """An output is in memory."""
        if key in self._missing:
            self._missing.discard(key)
            if not self._missing:
                self._goes_on()

    def _goes_on(self) -> None:
        self.sim.loop.at(self.sim.busy.sends_at + self.sim.cluster.message_seconds, self._finished)

    def _finished(self) -> None:
        step = self._steps[self._next]
        self._next += 1
        if step.releases:
            self.sim.release(step.releases, client=self.name)
        if self._next == len(self._steps):
            self.done = True
        else:
            self.sim.loop.after(self._steps[self._next].seconds, self._submit)


def clients(sim: Submits, steps: Sequence[Step], name: str) -> list[SimClient]:
    """Those that the steps of a workload name; none for a workload that is one graph."""
    numbers = sorted({step.client for step in steps})
    return [SimClient(sim, f"{name}-{i}", [step for step in steps if step.client == i]) for i in numbers]
