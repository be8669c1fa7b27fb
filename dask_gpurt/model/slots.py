"""`waiting`: how an engine says that the current task waits, without knowing what measures it.

A *slot* is one place of a worker in which a task runs; a worker has as many as threads. What measures slots sets
`SLOT` in the context of a task's execution. Dask carries the context into the task's thread, and asyncio carries it
from there into coroutines that the thread waits for. So code that runs on behalf of a task finds its slot wherever it
runs, and other code finds none. ``with waiting(UNSPILL): ...`` then costs a look at a context variable.

A coroutine that outlives its task, such as a background flush, finds the slot of a task that has ended. Such a slot
ignores it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from types import TracebackType

#: reading inputs from a lower tier
UNSPILL = "unspill"
#: waiting for room in memory
MEMORY = "memory"
#: waiting for bytes from, or for, another worker
NETWORK = "network"


class Slot(Protocol):
    """Takes what a task says about its waits; from any thread."""

    def enter(self, cause: str) -> list[Any]:
        """The task waits from now on. Returns what `leave` wants."""

    def leave(self, token: list[Any]) -> None:
        """It waits no longer. In any order with other waits; the one that was entered last counts."""


#: of the task that runs in this context; None: slots are not measured, or there is no task
SLOT: ContextVar[Slot | None] = ContextVar("gpurt-slot", default=None)


class waiting:
    """``with waiting(cause)``: what is inside is no work of the task. Nests; the innermost cause counts."""

    __slots__ = ("_cause", "_slot", "_token")

    _token: list[Any]

    def __init__(self, cause: str) -> None:
        self._cause = cause
        self._slot: Slot | None = None

    def __enter__(self) -> None:
        slot = SLOT.get()
        if slot is not None:
            self._token = slot.enter(self._cause)
            self._slot = slot

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._slot is not None:
            self._slot.leave(self._token)
