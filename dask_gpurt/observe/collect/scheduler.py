"""Feeds a `StallLedger` from a scheduler: its plugin, and the one wrapper around what heartbeats call.

distributed has no hook for heartbeats that a scheduler without us would survive (an extension of the worker that the
scheduler lacks breaks the worker's heartbeat). So ``handlers["heartbeat_worker"]`` is wrapped, and put back exactly;
the stock handler runs first, and what it raises or returns is passed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed import SchedulerPlugin

from dask_gpurt.observe import seam
from dask_gpurt.observe.collect.causes import BARRIER
from dask_gpurt.observe.collect.stall_ledger import ERRORS, StallLedger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from dask.typing import Key
    from distributed import Scheduler

#: name in ``WorkerState.metrics``
NAME = "gpurt"
_HANDLER = "heartbeat_worker"


class LedgerPlugin(SchedulerPlugin):
    """The stall ledger of one scheduler."""

    name = "gpurt-ledger"
    idempotent = True

    def __init__(self, planning: Callable[[], float] = lambda: 0.0) -> None:
        self._planning = planning
        self._scheduler: Scheduler | None = None
        self._stock: Callable[..., object] | None = None
        self._wrapper: Callable[..., object] | None = None
        #: None before `attach` and after `detach`
        self.ledger: StallLedger | None = None

    def attach(self, scheduler: Scheduler) -> None:
        """Take in what is there and follow it from now on."""
        seam.check_scheduler(scheduler)
        self._scheduler = scheduler
        self.ledger = StallLedger(scheduler, self._planning)
        stock = self._stock = scheduler.handlers.get(_HANDLER)
        if stock is None:
            return  # the figures of workers are then taken at every look, see `statistics`

        def heartbeat_worker(*args: object, **kwargs: object) -> object:
            reply = stock(*args, **kwargs)
            ledger = self.ledger
            if ledger is not None:
                ledger.guarded(_heard, ledger, scheduler, kwargs.get("address"))
            return reply

        self._wrapper = scheduler.handlers[_HANDLER] = heartbeat_worker
        scheduler.plugins[self.name] = self

    def detach(self) -> None:
        """Put everything back. A second call does nothing."""
        self.ledger = None
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is None:
            return
        if scheduler.plugins.get(self.name) is self:
            del scheduler.plugins[self.name]
        if scheduler.handlers.get(_HANDLER) is self._wrapper and self._stock is not None:
            scheduler.handlers[_HANDLER] = self._stock

    def statistics(self) -> dict[str, Any]:
        """See `StallLedger.statistics`; empty when it is not attached."""
        return {} if self.ledger is None else self.ledger.statistics()

    # ------------------------------------------------------------------ hooks

    def transition(self, key: Key, start: str, finish: str, *args: object, stimulus_id: str, **kwargs: object) -> None:
        """A task went from one state to another."""
        # Called for every transition of every task: leave as early as possible.
        ledger = self.ledger
        if ledger is None or start == finish or ledger.errors >= ERRORS:
            return
        if start == "processing" or finish == "processing" or (type(key) is str and key.startswith(BARRIER)):
            try:
                ledger.transition(key, start, finish, kwargs)
            except Exception:
                ledger.failed()

    def update_graph(
        self,
        scheduler: Scheduler,
        *,
        client: str,
        keys: set[Key],
        annotations: dict[str, dict[Key, Any]],
        **kwargs: Any,
    ) -> None:
        """A graph has arrived."""
        ledger = self.ledger
        if ledger is not None:
            ledger.guarded(ledger.graph_arrived, client, keys, annotations.get("span") or {})

    def log_event(self, topic: str | Collection[str], msg: object) -> None:
        """An event was logged: those of work stealing tell which tasks were moved."""
        # ("confirm", key, state, victim, thief, stimulus_id) is the only public trace of a stolen task.
        ledger = self.ledger
        if ledger is None or topic != "stealing":
            return
        if isinstance(msg, (tuple, list)) and msg and msg[0] == "confirm":
            ledger.guarded(ledger.moved, msg[1], msg[3], msg[4])

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """A worker has come."""
        ledger = self.ledger
        if ledger is not None:
            ledger.guarded(ledger.worker_added, scheduler.workers[worker])

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: object) -> None:
        """A worker has left."""
        ledger = self.ledger
        if ledger is not None:
            ledger.guarded(ledger.worker_removed, worker)

    def restart(self, scheduler: Scheduler) -> None:
        """The cluster was restarted: no task is left."""
        ledger = self.ledger
        if ledger is not None:
            ledger.guarded(ledger.restarted)


def _heard(ledger: StallLedger, scheduler: Scheduler, address: Any) -> None:
    # The worker's own address; the scheduler may have resolved a name in it.
    ws = scheduler.workers.get(address) or scheduler.workers.get(scheduler.coerce_address(address))
    if ws is not None:
        figures = ws.metrics.get(NAME)
        ledger.heartbeat(ws, figures if isinstance(figures, dict) and figures else None)
