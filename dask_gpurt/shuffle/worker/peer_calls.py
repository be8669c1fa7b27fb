"""Calls of a run to its peers, the same run on other workers, by distributed's comms; and what a peer's loss ends.

Theory of operation. A send to a lost worker ends at once and well: its outputs have new owners, who are sent what it
held (`amendment`). Only the scheduler says that a worker is lost. A send that fails waits for that news: then it counts
as done, else its error is the run's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Any

from dask_gpurt.shuffle import seam
from dask_gpurt.shuffle.worker.message import Message, as_is

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from collections.abc import Set as AbstractSet

    from dask_gpurt.shuffle.worker.host import RunHost

#: seconds that a failed send waits for the news that its peer is lost
NEWS_SECONDS = 30.0
#: and if its error does not look like a lost peer. A worker that closes may answer with anything: what it needs for an
#: answer is closed already
ODD_SECONDS = 3.0
#: until the connections to a lost peer are closed once more
AGAIN_SECONDS = 0.1

#: an answer of distributed's comms: its "status" is "OK" or "error"
Answer = dict[str, Any]


class PeerCalls:
    """Calls to the peers of one run; the caller keeps the set of lost workers up to date. All on the event loop.

    Parameters
    ----------
    unlink
        Ends the run's links with a peer.
    """

    def __init__(self, host: RunHost, lost: AbstractSet[str], unlink: Callable[[str], None]) -> None:
        self._host = host
        self._lost = lost
        self._unlink = unlink
        #: peer -> done when it is lost
        self._losses: dict[str, asyncio.Future[None]] = {}

    async def call(self, address: str, data: Message | dict[str, Any]) -> Answer:
        """Send a message or a question to a peer, again after a failed comm."""
        answer: Answer = await seam.retry(
            functools.partial(self._once, address, as_is(data) if isinstance(data, Message) else data),
            count=self._host.RETRY_COUNT,
            delay_min=self._host.RETRY_DELAY_MIN,
            delay_max=self._host.RETRY_DELAY_MAX,
            operation=f"P2P send to {address}",
        )
        return answer

    async def _once(self, address: str, data: object) -> Answer:
        host = self._host
        host.raise_if_closed()
        if address in self._lost:
            raise seam.ShuffleClosedError(f"{address} is lost, {host} goes on without it")
        answer: Answer = await host.rpc(address).shuffle_receive(data=data, shuffle_id=host.id, run_id=host.run_id)
        return answer

    async def unless_lost(self, address: str, sending: Coroutine[Any, Any, Answer]) -> Answer:
        """Await a send. One to a worker that is lost, or is lost meanwhile, counts as done."""
        if address in self._lost:
            sending.close()
            return {"status": "OK"}
        lost = self._losses.get(address)
        if lost is None:
            lost = self._losses[address] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(sending)
        # Not cancelled when the peer is lost: a transport may be in the middle of it. Its retries see the loss.
        waiting: set[asyncio.Future[Any]] = {task, lost}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
            return {"status": "OK"}
        error = task.exception()
        if (error is not None or task.result()["status"] == "error") and not self._host.closed:
            leaving = isinstance(error, (OSError, seam.ShuffleClosedError, seam.P2PConsistencyError)) or error is None
            # Only the scheduler says that a peer is gone.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(lost), NEWS_SECONDS if leaving else ODD_SECONDS)
                return {"status": "OK"}
        return task.result()

    def disconnect(self, addresses: Iterable[str]) -> None:
        """Close the connections to lost workers.

        Else what is on its way there would connect for as long as Dask does, with its rows in memory.
        """
        for address in addresses:
            self._unlink(address)
            try:
                self._host.rpc.remove(address)
            except RuntimeError:
                # A connect that another run of this worker has ended is not over yet: the pool cannot end it twice, and
                # has left out those that come after it.
                asyncio.get_running_loop().call_later(AGAIN_SECONDS, self.disconnect, [address])

    def end(self, addresses: Iterable[str] | None = None) -> None:
        """End the sends to lost workers; None: to all, since the run closes."""
        for address in list(self._losses) if addresses is None else addresses:
            if (lost := self._losses.get(address)) is not None and not lost.done():
                lost.set_result(None)
