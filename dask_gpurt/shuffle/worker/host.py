"""What the parts of a run ask of the run that they belong to (`run.GpurtShuffleRun`), and how its threads are used."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor

    from distributed.core import ConnectionPool

T = TypeVar("T")


class RunHost(Protocol):
    """A run as its parts see it. Its text names it in errors."""

    #: of the shuffle
    id: str
    run_id: int
    #: address of this worker
    local_address: str
    #: threads of this worker
    executor: ThreadPoolExecutor
    #: connections by worker address
    rpc: ConnectionPool
    RETRY_COUNT: int
    RETRY_DELAY_MIN: float
    RETRY_DELAY_MAX: float
    closed: bool

    def raise_if_closed(self) -> None:
        """Raise what ended the run, else `ShuffleClosedError`, if it is closed."""

    def fail(self, exception: Exception) -> None:
        """End the run with this error, unless it is closed: the barrier raises it."""

    async def offload(self, function: Callable[..., T], *args: object) -> T:
        """Call a function in a thread of the worker."""


def submit(executor: ThreadPoolExecutor, function: Callable[[], object]) -> None:
    """Run a function in a thread of the worker, now or later; not at all if the pool is shut down."""
    # A worker that closes with runs open has shut it down; its memory goes with the process.
    with contextlib.suppress(RuntimeError):
        executor.submit(function)
