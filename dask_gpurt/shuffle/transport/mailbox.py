"""Hand things from one thread to the loop of another, many at a time: mostly from a transport's to an event loop.

`Mailbox.put` gives a thing to the loop. `Outcomes` are the receipts of messages that coroutines wait for.

Theory of operation. `call_soon_threadsafe` wakes the loop by a write to a pipe, whatever else waits already; the loop
reads it, runs one handle and waits again. On a busy worker that, and the two changes of the GIL's owner, cost more than
a message of 64 KiB. Here what comes is put aside, and the loop is called once for what a turn of a transport's thread
brings, or a few of them. One call takes all that is there.
"""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from dask_gpurt.shuffle.transport.ioloop import current_loop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from dask_gpurt.shuffle.transport.base import Receipt

T = TypeVar("T")
#: for so many things the loop is called at once, though the turn has not ended: it may begin while others come
FEW = 4


class Mailbox(Generic[T]):
    """Things for a loop, in the order in which they came.

    Parameters
    ----------
    call
        Has the loop call a function, soon: `asyncio`'s ``call_soon_threadsafe``, or `IoLoop.call`.
    take
        Called on the loop when there is something: takes things out of `waiting`, from the left. It is not called again
        for what it leaves there.
    refuse
        Called with what is never looked at, because the loop is closed.
    """

    def __init__(
        self,
        call: Callable[[Callable[[], None]], object],
        take: Callable[[], None],
        refuse: Callable[[T], None] = lambda thing: None,
    ) -> None:
        self._call, self._take, self._refuse = call, take, refuse
        self.waiting: collections.deque[T] = collections.deque()
        self._lock = threading.Lock()
        self._called = False

    def put(self, thing: T) -> None:
        """Any thread. From an `IoLoop` it goes at the end of the turn, or when there are `FEW`."""
        self.waiting.append(thing)
        if self._called:
            return
        turn = current_loop() if len(self.waiting) < FEW else None
        if turn is None:
            self.flush()
        else:
            turn.at_end(self.flush)

    def flush(self) -> None:
        """Call the loop, if there is something and it was not called."""
        with self._lock:
            if self._called or not self.waiting:
                return
            self._called = True
        try:
            self._call(self._look)
        except RuntimeError:  # it is closed
            self._called = False
            while self.waiting:
                self._refuse(self.waiting.popleft())

    def _look(self) -> None:
        # Before anything is taken: a thread that finds it set has put its thing there before this look.
        self._called = False
        self._take()


class Outcomes:
    """Receipts of messages, for coroutines that wait for them on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._box: Mailbox[tuple[asyncio.Future[Receipt], Receipt]] = Mailbox(loop.call_soon_threadsafe, self._take)

    def expect(self) -> tuple[asyncio.Future[Receipt], Callable[[Receipt], None]]:
        """(future to wait for, function to call once with the receipt, in any thread)."""
        future: asyncio.Future[Receipt] = self._loop.create_future()

        def ended(receipt: Receipt) -> None:
            self._box.put((future, receipt))

        return future, ended

    def _take(self) -> None:
        waiting = self._box.waiting
        while waiting:
            future, receipt = waiting.popleft()
            if not future.done():  # else what waited was cancelled
                future.set_result(receipt)
