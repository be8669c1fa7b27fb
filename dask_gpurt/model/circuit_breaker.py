"""`Guard`: counts failures of our own code, and switches a part off after too many of them.

An engine wraps every call that Dask makes into it. When the call raises, Dask's own code does the work and the engine
calls `Guard.failed`. That counts the failure by part and reason, keeps the last traceback as text, and emits an event,
at most one per part and `EVENT_SECONDS`. After `LIMIT` failures of one part within `WINDOW_SECONDS` the part is
switched off with one WARNING: a part that fails on every task costs more than it can gain. Rare failures never add up.
A part that has to undo something then gives `Guard.part` a callback.

Use on one event loop.
"""

from __future__ import annotations

import math
import time
import traceback
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from dask_gpurt.model import Event, Sink, null_sink

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

#: failures within the window after which a part is switched off; of code that runs for every task
LIMIT = 100
WINDOW_SECONDS = 60.0
#: one event per so many seconds and part, at most
EVENT_SECONDS = 10.0


class Part:
    """One override, or one group of hooks, and its failures."""

    __slots__ = ("_last_event", "_times", "fallbacks", "last_traceback", "name", "on_retired", "retired")

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        #: reason -> how often Dask's own code did the work because of a failure
        self.fallbacks: Counter[str] = Counter()
        self.last_traceback: str | None = None
        #: why it retired; None while it works
        self.retired: str | None = None
        #: called once, when it retires
        self.on_retired: Callable[[], None] | None = None
        self._times: deque[float] = deque(maxlen=limit)
        self._last_event = -math.inf

    @property
    def failures(self) -> int:
        """How often Dask's own code did the work, for any reason."""
        return sum(self.fallbacks.values())

    def statistics(self) -> dict[str, Any]:
        """Plain JSON: how often it failed, the last traceback, and why it was switched off; "" if it was not."""
        return {
            "exceptions": self.failures,
            "last_traceback": self.last_traceback or "",
            "retired": self.retired or "",
        }


class Guard:
    """The failures of all parts of one engine on one process.

    Parameters
    ----------
    engine
        Its name: the prefix of events (``placement.fallback``, ``placement.retired``) and of log lines.
    logger
        Gets the WARNING when a part is switched off.
    sink
        Gets the events.
    limit, window_seconds
        So many failures of a part within this time switch it off; None: `LIMIT` within `WINDOW_SECONDS`.
    """

    def __init__(
        self,
        engine: str,
        logger: logging.Logger,
        *,
        sink: Sink = null_sink,
        clock: Callable[[], float] = time.monotonic,
        limit: int | None = None,
        window_seconds: float | None = None,
    ) -> None:
        self.engine = engine
        self.logger = logger
        self.parts: dict[str, Part] = {}
        self._sink = sink
        self._clock = clock
        self._limit = LIMIT if limit is None else limit
        self._window = WINDOW_SECONDS if window_seconds is None else window_seconds

    def part(self, name: str, on_retired: Callable[[], None] | None = None) -> Part:
        """Return the part of this name, made if there is none; `on_retired` is called when it is switched off."""
        part = self.parts.setdefault(name, Part(name, self._limit))
        if on_retired is not None:
            part.on_retired = on_retired
        return part

    def failed(self, part_name: str, reason: str = "exception", detail: str | None = None) -> None:
        """Count a failure of a part; retire it when there are too many. Call inside ``except`` for the traceback."""
        part = self.part(part_name)
        part.fallbacks[reason] += 1
        part.last_traceback = detail if detail is not None else traceback.format_exc()
        now = self._clock()
        times = part._times
        times.append(now)
        if now - part._last_event >= EVENT_SECONDS:
            part._last_event = now
            self._emit(
                Event(
                    f"{self.engine}.fallback",
                    f"{part_name}: {_short(part.last_traceback, reason)}; Dask's own code took over",
                    {"part": part_name, "reason": reason, "traceback": part.last_traceback},
                )
            )
        if part.retired is None and len(times) == times.maxlen and now - times[0] <= self._window:
            part.retired = (
                f"{len(times)} failures within {self._window:g} s; the last one: "
                f"{part.last_traceback.strip().rsplit(chr(10), 1)[-1]}"
            )
            self.logger.warning(
                "%s: %s is switched off, Dask's own code takes over: %s", self.engine, part_name, part.retired
            )
            self._emit(
                Event(f"{self.engine}.retired", f"{part_name} is switched off: {part.retired}", {"part": part_name})
            )
            if part.on_retired is not None:
                try:
                    part.on_retired()
                except Exception:
                    part.fallbacks["not switched off cleanly"] += 1
                    self.logger.exception("%s: %s could not be switched off cleanly", self.engine, part_name)

    def _emit(self, event: Event) -> None:
        try:
            self._sink(event)
        except Exception:
            # A sink that fails must not undo the fallback that the event is about.
            self.logger.exception("%s: the event sink failed on %s", self.engine, event.name)


def _short(text: str, reason: str) -> str:
    """The reason, for the log; of an exception also what it was, and the line that raised it."""
    if reason != "exception":
        return reason
    lines = text.strip().splitlines()
    places = [line.strip() for line in lines if line.lstrip().startswith('File "')]
    return ", ".join([reason, *lines[-1:], *places[-1:]])
