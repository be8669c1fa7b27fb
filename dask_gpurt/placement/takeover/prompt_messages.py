"""`PromptMessages`: tasks reach idle workers at once, see `model.prompt`. Taken over: ``send`` of each worker's stream.

Clients that live in the scheduler's process, as with `LocalCluster`, send their graphs at once too. Others do if they
load the preload.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from distributed import Client
from distributed.batched import BatchedSend

from dask_gpurt.model import prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed.scheduler import Scheduler

    from dask_gpurt.model.prompt import PromptStream


class PromptMessages:
    """The streams of one scheduler; `safe`: whether Dask's intervals are to be kept for now."""

    def __init__(self, scheduler: Scheduler, safe: Callable[[], bool]) -> None:
        self._scheduler = scheduler
        self._safe = safe
        self._streams: dict[str, PromptStream] = {}
        #: each lives as long as the stream of its client
        self._clients: weakref.WeakSet[PromptStream] = weakref.WeakSet()
        self._early = 0
        for address in scheduler.workers:
            self.worker_added(address)

    @property
    def early(self) -> int:
        """Messages to workers that did not wait for Dask's interval."""
        return self._early + sum(stream.early for stream in self._streams.values())

    def worker_added(self, address: str) -> None:
        """Take over the stream to a worker that has joined."""
        self.worker_removed(address)
        scheduler = self._scheduler
        if isinstance(scheduler.stream_comms.get(address), BatchedSend):  # in simulations it is not
            self._streams[address] = prompt.tasks(scheduler, scheduler.workers[address], self._safe)

    def worker_removed(self, address: str) -> None:
        """Let go of the stream to a worker that has left."""
        stream = self._streams.pop(address, None)
        if stream is not None:
            self._early += stream.early
            stream.uninstall()

    def graph_arrived(self, client: str) -> None:
        """Have the client that has sent a graph, if it is one of this process, send the next ones at once."""
        for known in list(Client._instances):
            if known.id == client:
                stream = prompt.graphs(known, self._safe)
                if stream is not None:
                    self._clients.add(stream)

    def uninstall(self) -> None:
        """Give all streams back."""
        for address in list(self._streams):
            self.worker_removed(address)
        for stream in list(self._clients):
            stream.uninstall()
        self._clients.clear()
