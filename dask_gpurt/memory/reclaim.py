"""Memory that a part of this package keeps for later, given back when a worker is at its limit.

A part says once how its memory is given back (`register`), and the watch on the process calls `give_back`. The parts do
not know each other.

Why: a worker that distributed had paused had nothing in memory but the pages that its shuffles kept. While it is paused
no rows come in and no output is made, so the shuffles had no occasion to look.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("distributed.worker.gpurt")

_givers: list[Callable[[], object]] = []
#: times that one failed, of this process
errors = 0


def register(giver: Callable[[], object]) -> None:
    """`giver` gives back what this process keeps without using it. Called in any thread, for as long as it lives."""
    if giver not in _givers:
        _givers.append(giver)


def give_back() -> None:
    """Call all givers; one that fails does not keep the others from it. Not on an event loop: unmapping takes time."""
    global errors
    for giver in tuple(_givers):
        try:
            giver()
        except Exception:
            errors += 1
            if errors in (1, 10, 100, 1000):  # asked twice a second while a worker is at its limit
                logger.exception("dask-gpurt: memory that is kept for later was not given back")
