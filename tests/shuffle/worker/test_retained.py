"""What runs retain, and a worker that is short of memory."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

from dask_gpurt.memory import reclaim
from dask_gpurt.shuffle.worker import retained
from dask_gpurt.shuffle.worker.send_log import RetainBudget, SendLog


class Loop:
    """An event loop that calls at once."""

    def add_callback(self, call: Any) -> None:
        call()


class Logs(weakref.WeakKeyDictionary[Any, Any]):
    """A run begins while another thread looks through them."""

    def items(self) -> Any:
        for item in super().items():
            yield item
            retained.begin(SendLog(RetainBudget(0)), Loop())  # type: ignore[arg-type]


def test_a_run_that_begins_meanwhile_does_not_keep_others_from_giving_back() -> None:
    log: SendLog[str] = SendLog(RetainBudget(100))
    log.ran(0, "k", 0, [("a", "rows")], 10)
    with mock.patch.object(retained, "_logs", Logs()):
        retained.begin(log, Loop())  # type: ignore[arg-type]
        before = reclaim.errors
        reclaim.give_back()
        assert reclaim.errors == before
    assert log.budget.used_bytes == 0
