"""Work for a worker's thread pool that may be shut down."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor


def submit(executor: ThreadPoolExecutor, function: Callable[[], object]) -> None:
    """Run a function in a thread of the worker, now or later; not at all if the pool is shut down."""
    # A worker that closes with runs open has shut it down; its memory goes with the process.
    with contextlib.suppress(RuntimeError):
        executor.submit(function)
