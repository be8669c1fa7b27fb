"""Calls to the workers of a run that end as soon as one of the workers is gone. On the scheduler's event loop."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from dask_gpurt.shuffle.scheduler.reopen import LOOK_SECONDS, PATIENCE, PATIENCE_SECONDS

#: calls to survivors; a worker that is stopped for longer is treated as lost for the shuffle
TELL_SECONDS = 60.0


class Asking:
    """Asks the workers of one scheduler's runs."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        #: questions, those included that nobody waits for any more
        self._asking: set[asyncio.Future[Any]] = set()

    async def broadcast(self, msg: dict[str, Any], workers: list[str], seconds: float = math.inf) -> Any:
        """Answers or errors by address; None as soon as one of the workers is gone.

        Not a moment later: distributed goes on trying to connect to a dead process for half a minute.

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
                await asyncio.wait({asking}, timeout=LOOK_SECONDS)
            return None
        finally:
            # Not cancelled: a comm that waits for its answer would be closed, and it ends by itself.
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
            asking.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def tell(self, state: Any, data: dict[str, Any], patience: int = PATIENCE) -> list[Any] | None:
        """Call all that take part; None when one of them is gone meanwhile. One that closes may answer with any error
        before the scheduler hears of it, so it is asked again.

        Raises
        ------
        RuntimeError
            One of them answered with errors `patience` times.
        """
        msg = {"op": "shuffle_receive", "shuffle_id": state.id, "run_id": state.run_id, "data": data}
        workers = [a for a in state.participating_workers if a in self._scheduler.workers]
        good: list[Any] = []
        while workers:
            answers = await self.broadcast(msg, workers, TELL_SECONDS)
            if answers is None:
                return None
            bad = {a: r for a, r in answers.items() if not isinstance(r, dict) or r.get("status") != "OK"}
            good += [answers[a] for a in workers if a not in bad]
            workers = list(bad)
            if bad:
                patience -= 1
                if patience < 0:
                    raise RuntimeError(f"answers to {data['gpurt']!r}: {bad!r}")
                await asyncio.sleep(PATIENCE_SECONDS)
        return good

    async def flush(self, state: Any, workers: list[str]) -> list[Any] | None:
        """Have workers send what they have for a run; the errors of those who can not. None: one of them is gone."""
        msg = {"op": "shuffle_inputs_done", "shuffle_id": state.id, "run_id": state.run_id}
        results = await self.broadcast(msg, workers)
        return None if results is None else [r for r in results.values() if r is not None]
