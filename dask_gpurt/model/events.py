"""`Event`: what an engine reports into the sink that it was given. It does not know what becomes of it.

Events are for what is rare and worth a line: a fallback, a failed write, the end of a shuffle. What happens per task
is counted in each engine's ``statistics()`` instead.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened."""

    #: dotted, engine first: ``placement.fallback``, ``tiers.corrupt``, ``shuffle.done``
    name: str
    #: one line for a human
    message: str
    #: plain JSON values
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: seconds since the epoch
    time: float = dataclasses.field(default_factory=time.time)


Sink = Callable[[Event], None]


def null_sink(event: Event) -> None:
    """Drop the event."""
