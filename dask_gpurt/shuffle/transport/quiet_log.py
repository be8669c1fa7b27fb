"""Log warnings that may come thousands of times per second: one line per period, which says how many there were."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

#: between two lines of one transport
PERIOD_SECONDS = 30.0


class QuietLog:
    """Log the first warning of each period. Thread-safe.

    Parameters
    ----------
    now
        Seconds of any monotonic clock.
    """

    def __init__(self, logger: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._now = now
        self._next = -math.inf
        self._left_out = 0
        self._lock = threading.Lock()

    def warning(self, text: str) -> None:
        """Log it, unless a line of this period was logged. The next line says how many were left out."""
        with self._lock:
            now = self._now()
            if now < self._next:
                self._left_out += 1
                return
            self._next = now + PERIOD_SECONDS
            before, self._left_out = self._left_out, 0
        self._logger.warning("%s%s", text, f" ({before} more warnings since the last one)" if before else "")
