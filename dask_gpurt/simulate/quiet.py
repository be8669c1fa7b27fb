"""What a simulation does without: the scheduler's log, and for large graphs the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Let the scheduler log warnings only."""
    loggers = [logging.getLogger(n) for n in ("distributed.scheduler", "distributed.diskutils")]
    levels = [logger.level for logger in loggers]
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Do not look for garbage.

    A graph of tasks is a web of cycles that stays until the end. Looking through it over and over finds nothing and
    takes two fifths of a replay's time.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
