"""`Journal`: the sink for the events of the engines (`dask_gpurt.model.events`). It is bounded.

Each event becomes one line of the process's own Dask logger, so it is in ``client.get_worker_logs()`` and on the
dashboard's Logs page. It is counted by name, and the last ones are kept for `dask_gpurt.status`. Events of one name
are logged at most once per second: a fault that repeats a thousand times must not become the next problem.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import logging

    from dask_gpurt.model import Event


class Journal:
    """Callable as a `dask_gpurt.model.Sink`. Safe to call from any thread."""

    #: events kept
    KEEP = 100
    #: seconds between two log lines of one event name
    QUIET_SECONDS = 1.0

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._last: collections.deque[Event] = collections.deque(maxlen=self.KEEP)
        self._logged: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        with self._lock:
            self._counts[event.name] += 1
            self._last.append(event)
            speak = now - self._logged.get(event.name, -self.QUIET_SECONDS) >= self.QUIET_SECONDS
            if speak:
                self._logged[event.name] = now
            count = self._counts[event.name]
        if speak:
            self._logger.info("%s: %s (%d so far)", event.name, event.message, count)

    def statistics(self) -> dict[str, Any]:
        """``{"counts": {name: n}, "last": [{"name", "message", "time", ...fields}]}``, oldest first."""
        with self._lock:
            return {
                "counts": dict(self._counts),
                "last": [{"name": e.name, "message": e.message, "time": e.time, **e.fields} for e in self._last],
            }
