"""Credit on the safe path, distributed's comms, which have none of their own.

`SafeSender` waits for credit before a message is sent, `SafeReceiver` gives it.

Theory of operation. The sender asks for a total by a call before it sends (`SafeSender.credit`). The receiver's gate
answers when it has room (`SafeReceiver.answer`), and every answer to a message brings what that message has given back.
Asking is bounded: after `WANT_SECONDS` a message goes without credit, as a shuffle must never hang on the safe path. It
is then counted at the receiver (``uncredited``), not held against its budget.

Both sides count the same bytes in their totals, with credit or without: all messages of at most the limit. Else one
message without credit would leave the totals apart, and every later one would be granted bytes that never come.
(A message that comes twice, after a comm failed, is counted twice at the receiver; that costs this link's later
messages their credit, and no budget.)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle.transport.select.selector import SAFE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dask_gpurt.shuffle.transport.base import ReceiveGate
    from dask_gpurt.shuffle.transport.link.records import RunKey

#: seconds that a sender waits for credit, then it sends without
WANT_SECONDS = 30.0
#: seconds after which the receiver answers whatever it has granted: a call must not stay open for long
_ANSWER_SECONDS = 1.0


class SafeSender:
    """The credit of one run's messages to one peer, which gives it for messages of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: bytes in all
        self._granted = 0
        self._sent = 0
        self._asking = asyncio.Lock()

    async def credit(self, nbytes: int, ask: Callable[[int], Awaitable[dict[str, Any]]]) -> float:
        """Wait until the receiver has room for a message; returns the seconds. `ask` asks the peer for a total."""
        if nbytes > self._limit:
            return 0.0
        start = time.perf_counter()
        async with self._asking:  # one after the other: totals only make sense in order
            wanted = self._sent + nbytes
            deadline = time.monotonic() + WANT_SECONDS
            while self._granted < wanted and time.monotonic() < deadline:
                answer = await ask(wanted)
                if answer.get("status") != "OK" or "granted" not in answer:
                    break
                self.granted(answer)
            self._sent = wanted
        return time.perf_counter() - start

    def granted(self, answer: dict[str, Any]) -> None:
        """Enter an answer of the peer, which may bring credit."""
        self._granted = max(self._granted, int(answer.get("granted", 0)))


class SafeReceiver:
    """The links of the safe path to this worker."""

    def __init__(self, gate: ReceiveGate, here: Callable[[RunKey], bool]) -> None:
        self._gate = gate
        self._here = here
        self._loop = asyncio.get_running_loop()
        #: links -> the event that wakes those who wait for their credit
        self._waiting: dict[tuple[str, str, RunKey], asyncio.Event] = {}

    async def answer(self, key: RunKey, sender: str, total: int) -> dict[str, Any]:
        """Answer a peer that wants credit for `total` bytes in all."""
        link = (SAFE, sender, key)
        if not self._here(key):
            return {"status": "OK"}
        waiting = self._opened(link)
        wanted = False
        deadline = self._loop.time() + _ANSWER_SECONDS
        while self._gate.granted(link) < total and (rest := deadline - self._loop.time()) > 0:
            # The run may have left meanwhile, and its link with it: a want of that would spoil the gate's books.
            if self._waiting.get(link) is not waiting:
                break
            # Still False: messages that went without credit are under way, and have to arrive first.
            wanted = wanted or self._gate.want(link, total)
            waiting.clear()
            if self._gate.granted(link) >= total:
                break
            try:
                await asyncio.wait_for(waiting.wait(), rest)
            except TimeoutError:
                break
        return {"status": "OK", "granted": self._gate.granted(link)}

    def _opened(self, link: tuple[str, str, RunKey]) -> asyncio.Event:
        """The event of a link, which is opened when it is first used: one that is not used needs no window."""
        waiting = self._waiting.get(link)
        if waiting is None:
            waiting = self._waiting[link] = asyncio.Event()
            self._gate.open(link, functools.partial(self._wake, waiting))
        return waiting

    def _wake(self, event: asyncio.Event, total: int) -> None:
        """Credit for a sender that waits; any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits
            self._loop.call_soon_threadsafe(event.set)

    def granted(self, key: RunKey, sender: str) -> int:
        """Bytes that a sender may have sent, in all; part of every answer."""
        return self._gate.granted((SAFE, sender, key))

    def arrive(self, key: RunKey, sender: str, nbytes: int) -> Callable[[], None] | None:
        """Enter a message; returns what to call when it is stored, None: it came without credit."""
        link = (SAFE, sender, key)
        if nbytes > self._gate.message_limit or not self._here(key):
            return None  # its sender does not count it either
        waiting = self._opened(link)
        if not self._gate.arrive(link, nbytes):
            self._gate.overdraw(link, nbytes)
            waiting.set()
            return None
        return functools.partial(self._gate.stored, link, nbytes)

    def forget(self, key: RunKey, peer: str | None = None) -> None:
        """Forget the links of a run: with one peer, or all of them."""
        for link in [w for w in self._waiting if w[2] == key and peer in (None, w[1])]:
            self._waiting.pop(link).set()
            self._gate.close(link)
