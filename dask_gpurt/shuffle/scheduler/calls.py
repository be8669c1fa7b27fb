"""Calls to the workers of a run that end as soon as one of the workers is gone. On the scheduler's event loop."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

from distributed import Status

from dask_gpurt.shuffle.protocol.messages import Amend, AskHistogram, Flush, HistogramAnswer, Vouched, Wire
from dask_gpurt.shuffle.scheduler.runs import PATIENCE, PATIENCE_SECONDS, RECHECK_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distributed.scheduler import Scheduler

    from dask_gpurt.shuffle.scheduler.runs import RunRecord

#: calls to survivors, in seconds; where one is stopped for longer the run is restarted
TELL_SECONDS = 60.0
#: the call for histograms; without an answer nothing is bound late
HISTOGRAM_SECONDS = 10.0


class FlushFailed(Exception):
    """Workers answered a flush with errors; holds the first one."""


class AnswersFailed(RuntimeError):
    """Workers went on answering a message with errors."""


class Calls:
    """Calls the workers of one scheduler's runs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: calls whose answers have not come, those included that were given up
        self.unanswered: set[asyncio.Future[Any]] = set()
        #: done when a worker has left; None while no call waits for that
        self._left: asyncio.Future[None] | None = None

    def worker_left(self) -> None:
        """End calls to workers that are gone."""
        if self._left is not None:
            self._left.set_result(None)
            self._left = None

    async def broadcast(self, msg: dict[str, Any], workers: list[str], seconds: float = math.inf) -> Any:
        """Answers or errors by address; None as soon as one of the workers is gone.

        Not a moment later: distributed goes on trying to connect to a dead process for half a minute.

        Parameters
        ----------
        msg
            With its handler as ``op``.
        seconds
            To wait for all answers.

        Raises
        ------
        TimeoutError
            There are not all answers after so many seconds.
        """
        deadline = time.monotonic() + seconds
        asking = asyncio.ensure_future(self._scheduler.broadcast(msg=msg, workers=workers, on_error="return"))
        try:
            while all(address in self._scheduler.workers for address in workers):
                if asking.done():
                    return asking.result()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no answer to {msg['op']!r} within {seconds:g} s")
                if self._left is None:
                    self._left = asyncio.get_running_loop().create_future()
                await asyncio.wait({asking, self._left}, timeout=RECHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            return None
        finally:
            # Not cancelled: a comm that waits for its answer would be closed, and it ends by itself.
            self.unanswered.add(asking)
            asking.add_done_callback(self.unanswered.discard)
            asking.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def tell(self, record: RunRecord, message: Wire) -> list[Any] | None:
        """Send a message to all that take part; their answers, or None when one of them is gone meanwhile.

        One that closes may answer with any error before the scheduler hears of it, so it is asked again.

        Raises
        ------
        AnswersFailed
            One of them answered with errors more than `PATIENCE` times.
        TimeoutError
            One of them did not answer within `TELL_SECONDS`.
        """
        msg = _receive(record, message)
        workers = self.workers_of(record)
        good: list[Any] = []
        failures = 0
        while workers:
            answers = await self.broadcast(msg, workers, TELL_SECONDS)
            if answers is None:
                return None
            bad = {a: r for a, r in answers.items() if not _good(r)}
            good += [answers[a] for a in workers if a not in bad]
            workers = list(bad)
            if bad:
                failures += 1
                if failures > PATIENCE:
                    raise AnswersFailed(f"answers to {message!r}: {bad!r}")
                await asyncio.sleep(PATIENCE_SECONDS)
        return good

    async def amend(self, record: RunRecord) -> list[Vouched] | None:
        """Tell all that take part of the latest epoch; what they vouch for. As `tell`."""
        answers = await self.tell(record, Amend.of(record.amendments, record.worker_for))
        return None if answers is None else [Vouched.from_dict(one) for one in answers]

    async def histograms(self, record: RunRecord, workers: list[str]) -> list[HistogramAnswer] | None:
        """What workers counted; None when one of them did not answer."""
        try:
            answers = await self.broadcast(_receive(record, AskHistogram()), workers, HISTOGRAM_SECONDS)
        except TimeoutError:
            return None
        found = list((answers or {}).values())
        if not found or not all(map(_good, found)):
            return None
        return [HistogramAnswer.from_dict(one) for one in found]

    async def flush(self, record: RunRecord, workers: list[str]) -> list[Any] | None:
        """Have workers send what they have for a run; errors of those that cannot. None: one of them is gone."""
        results = await self.broadcast(_receive(record, Flush(record.amendments.epoch)), workers)
        return None if results is None else [r for r in results.values() if not _good(r)]

    def workers_of(self, record: RunRecord) -> list[str]:
        """Addresses of those that take part in a run and are there."""
        return [address for address in record.participants if address in self._scheduler.workers]

    def closing(self, addresses: Iterable[str]) -> bool:
        """Whether one of these closes: it has ended its runs, and leaves once the tasks in its threads have ended."""
        workers = [self._scheduler.workers.get(address) for address in addresses]
        return any(ws is not None and ws.status is Status.closing for ws in workers)


def _good(answer: Any) -> bool:
    return isinstance(answer, dict) and answer.get("status") == "OK"


def _receive(record: RunRecord, message: Wire) -> dict[str, Any]:
    return {
        "op": "shuffle_receive",
        "shuffle_id": record.id,
        "run_id": record.run.run_id,
        "data": message.to_dict(),
    }
