"""What the runs of a worker retain to send again, and how a worker that is short of memory gets it back.

What is retained stays until its run is over, within the worker's budget. At its memory limit a worker gets all of it
back (`memory.reclaim`); then a loss costs more, as inputs have to be split again.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from dask_gpurt.memory import reclaim
from dask_gpurt.shuffle.worker.send_log import RetainBudget

if TYPE_CHECKING:
    from distributed.worker import Worker
    from tornado.ioloop import IOLoop

    from dask_gpurt.shuffle.worker.send_log import SendLog

_budgets: weakref.WeakKeyDictionary[Worker, RetainBudget] = weakref.WeakKeyDictionary()
#: logs of runs under way -> the event loop that they belong to
_logs: weakref.WeakKeyDictionary[SendLog[Any], IOLoop] = weakref.WeakKeyDictionary()


def retained_of(worker: Worker, share: float) -> RetainBudget:
    """The budget of a worker: `share` of its memory limit, nothing if it has none."""
    budget = _budgets.setdefault(worker, RetainBudget(0))
    budget.limit_bytes = int((worker.memory_manager.memory_limit or 0) * share)
    return budget


def begin(log: SendLog[Any], loop: IOLoop) -> None:
    """A run retains shards: they may be asked back from now on."""
    _logs[log] = loop


def end(log: SendLog[Any]) -> None:
    """A run is over and retains nothing."""
    _logs.pop(log, None)
    log.settle()


def _give_back() -> None:
    """A worker of this process is at its memory limit; any thread."""
    for ref in _logs.keyrefs():  # one step for other threads, which `items` is not: a run may begin meanwhile
        if (log := ref()) is not None and (loop := _logs.get(log)) is not None:
            loop.add_callback(log.settle)


reclaim.register(_give_back)
