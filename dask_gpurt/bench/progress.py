"""How far a benchmark is: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import threading

#: called with steps done, steps in all, and what is done next
Progress = Callable[[int, int, str], None]

_WIDTH = 24


def no_progress(step: int, steps: int, what: str) -> None:
    """Tell nobody."""


class Bar:
    """One line that is written over on a terminal; silent elsewhere, where the lines that stay tell the same.

    Parameters
    ----------
    interrupted
        Once it is set, the next step raises KeyboardInterrupt: one that was raised in a finalizer or in a library's
        callback may never have reached us.
    """

    def __init__(self, interrupted: threading.Event) -> None:
        self._interrupted = interrupted
        self._live = sys.stdout.isatty()
        self._start = time.monotonic()

    def __call__(self, step: int, steps: int, what: str) -> None:
        if self._interrupted.is_set():
            raise KeyboardInterrupt
        if self._live:
            filled = round(_WIDTH * step / max(1, steps))
            bar = "█" * filled + "·" * (_WIDTH - filled)
            text = f"{bar} {step}/{steps}  {what}  {time.monotonic() - self._start:.0f} s"
            click.echo(f"\r\033[K{text}", nl=False)

    def line(self, text: str) -> None:
        """A line that stays."""
        click.echo(f"\r\033[K{text}" if self._live else text)
