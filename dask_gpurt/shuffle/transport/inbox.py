"""Messages that transports bring: unpacked in the transport's thread, stored on the event loop.

Theory of operation. `Inbox.on_message` runs in a transport's thread: it expands and unpacks the frames there, so that
checksums cost the event loop nothing, and puts the shards into a mailbox. On the loop one task stores what is there,
one message after the other. Where a message has to wait for room, a second task takes over the rest: so there are as
many tasks as messages that wait, and one in the common case.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dask_gpurt.errors import WireError
from dask_gpurt.shuffle.transport.link import records
from dask_gpurt.shuffle.transport.mailbox import Mailbox
from dask_gpurt.shuffle.transport.select.compress import expanded

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from dask_gpurt.shuffle.transport.link.records import RunKey
    from dask_gpurt.shuffle.transport.peers import LinkTable


class RunReceiver(Protocol):
    """A run that messages are for."""

    def unpack(self, frames: list[Any]) -> Any:
        """The shards of a message; any thread. Raises `WireError`."""

    async def accept(self, shards: Any, nbytes: int) -> None:
        """Store them; returns when they are stored."""


class _Stored(NamedTuple):
    """A message that is unpacked and not yet stored."""

    run: RunReceiver
    shards: object
    nbytes: int
    #: called with "" when it is stored, else with the reason why not
    done: Callable[[str], None]


class Inbox:
    """What came by transports to one worker.

    Parameters
    ----------
    loop
        Where messages are stored.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: Mapping[RunKey, RunReceiver],
        links: LinkTable,
        count: Callable[..., None],
    ) -> None:
        self._loop, self._runs, self._links, self._count = loop, runs, links, count
        self._tasks: set[asyncio.Task[None]] = set()
        self._box: Mailbox[_Stored] = Mailbox(
            loop.call_soon_threadsafe, self._take, lambda message: message.done("the worker has ended")
        )

    def on_message(
        self,
        key: RunKey,
        sender: str,
        frames: list[Any],
        paid: int,
        done: Callable[[str], None],
        name: str,
    ) -> None:
        """Take a message that came by a transport; in its thread.

        Parameters
        ----------
        paid
            Bytes of credit that it cost.
        done
            Called once, in any thread: with "" when it is stored, else with the reason why not.
        """
        counters = self._links.of(sender, name)
        run = self._runs.get(key)
        if run is None:
            done("the run is not here")
            return
        came = sum(map(records.size_of, frames))
        try:
            frames = expanded(frames, paid)
            size = sum(map(records.size_of, frames))
            shards = run.unpack(frames)
        except WireError as e:
            self._links.was_corrupt(sender, name)
            self._count(refused=1)
            done(f"refused: {e}")
            return
        except MemoryError as e:
            # It came as it was sent. Counted as corrupt, it would be held against a healthy sender.
            self._count(transport_errors=1)
            self._links.had_problem(sender, traceback.format_exc())
            done(repr(e))
            return
        except Exception as e:
            self._links.was_corrupt(sender, name)
            self._count(refused=1, transport_errors=1)
            self._links.had_problem(sender, traceback.format_exc())
            done(repr(e))
            return
        counters.messages_in += 1
        counters.bytes_in += came
        self._box.put(_Stored(run, shards, size, done))

    def _take(self) -> None:
        if not self._box.waiting:
            return
        task = self._loop.create_task(self._store_some())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Runs after the task's first step: what is left then is left because that step waits.
        self._loop.call_soon(self._take)

    async def _store_some(self) -> None:
        waiting = self._box.waiting
        while waiting:
            await self._store(*waiting.popleft())

    async def _store(self, run: RunReceiver, shards: object, nbytes: int, done: Callable[[str], None]) -> None:
        problem = "cancelled"
        try:
            await run.accept(shards, nbytes)
            problem = ""
        except Exception as e:
            # The sender comes again by the safe path, and gets the error itself.
            problem = repr(e)
        finally:
            done(problem)
