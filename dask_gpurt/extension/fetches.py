"""`Fetches`: on a worker, what is done around fetches from other workers.

*A fetch from a worker that has left* fails at once, not after the time to connect.

The race. One batch of messages from the scheduler brings a task with an input on a peer, and then the news that the
peer was removed. Both are handled in one turn of the loop. The fetch that the first message has begun runs only after
it, when the connections to the peer have been cut. It connects anew, and Dask repeats that for
``distributed.comm.timeouts.connect`` (30 s), though every attempt is refused.

It costs more than the fetch. Meanwhile the scheduler has the input computed again, perhaps here; but a key that is
being fetched is *resumed* only when its fetch has ended. So the task and all that depends on it wait the 30 s. The
tiers can hold a fetch back as well, for memory.

A fetch therefore looks first. Every peer that a key can be fetched from is in ``has_what``, and a peer that was
removed is not. The event then is the one that a refused connection ends in.

*Checksums* (``gpurt.transfers.verify``). A fetch asks its peer to answer with checksums, see `signed`. One that is
wrong is a lost connection for Dask: it asks another holder, or the same one again within a second. After `LIMIT` of
them in a row from one sender the scheduler hears of it, see `corrupt`.

Rejected: a shorter time to connect. It is the user's, and right for a peer that is busy.

Taken over: ``worker.gather_dep``; with checksums also ``worker.rpc.connect`` and the handler ``get_data``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from distributed.worker_state_machine import (
    GatherDepFailureEvent,
    GatherDepNetworkFailureEvent,
    GatherDepSuccessEvent,
)

from dask_gpurt.extension import seam, signed
from dask_gpurt.extension.corrupt import LIMIT, OP
from dask_gpurt.extension.signed import WANTED, Fetch
from dask_gpurt.model.wrapped import Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from distributed import Worker
    from distributed.comm import Comm

logger = logging.getLogger("distributed.worker.gpurt")


class Fetches(Wrapped):
    """The wrappers of one worker.

    Parameters
    ----------
    verify
        Ask peers for checksums, and send them to peers that ask.
    """

    def __init__(self, worker: Worker, *, verify: bool = False) -> None:
        seam.check_fetches(worker)
        self._worker = worker
        #: fetches that were not begun
        self.spared = 0
        #: the scheduler listens to reports of corrupt fetches
        self.reports = False
        self.counts: Counter[str] = Counter(verified=0, unverified=0, corrupt=0, reported=0, signed=0, unsigned=0)
        #: sender -> fetches that failed their checksum so far
        self.corrupt_from: Counter[str] = Counter()
        #: sender -> fetches in a row that failed their checksum
        self._in_a_row: Counter[str] = Counter()
        self._ways: tuple[Wrapped, ...] = ()
        super().__init__(worker, "gather_dep")
        if verify:
            self.verify()

    @property
    def verifies(self) -> bool:
        """Whether it asks for checksums."""
        return bool(self._ways)

    def verify(self) -> None:
        """Ask for checksums from now on, and send them.

        Raises
        ------
        SeamMismatch
            This worker has not what they rely on. Nothing was changed.
        """
        worker = self._worker
        seam.check_checksums(worker)
        signed.register()
        self._ways = (_Ask(worker.rpc, "connect"), _Answer(worker.handlers, self.counts))
        if self._active:
            for way in self._ways:
                way.install()

    def install(self) -> None:
        """Put ours in their places."""
        for way in self._ways:
            way.install()
        super().install()

    def uninstall(self) -> None:
        """Put back what was there; fetches under way end as they would have. A second call does nothing."""
        super().uninstall()
        self.stop_verifying()

    def stop_verifying(self) -> None:
        """Put back what was there for checksums."""
        for way in self._ways:
            way.uninstall()

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        has_what = self._worker.state.has_what

        async def gather_dep(worker: str, to_gather: Any, total_nbytes: int, *, stimulus_id: str) -> Any:
            if self._active and worker not in has_what:
                self.spared += 1
                return GatherDepNetworkFailureEvent(
                    worker=worker, total_nbytes=total_nbytes, stimulus_id=f"gpurt-peer-left-{time.time()}"
                )
            if not self._asks(worker):
                return await stock(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)
            fetch = Fetch()
            token = signed.current.set(fetch)
            try:
                event = await stock(worker, to_gather, total_nbytes, stimulus_id=stimulus_id)
            finally:
                signed.current.reset(token)
            if isinstance(event, GatherDepFailureEvent) and not (fetch.corrupt or fetch.unreadable):
                # What Dask adds around the values has turned. As a failure it would hang the task (dask/distributed
                # issue 6705), and whoever gets this comm next would be answered by a sender that waits for an "OK".
                fetch.corrupt = f"the answer does not parse, {event.exception_text}"
                if fetch.comm is not None:
                    fetch.comm.abort()
                event = GatherDepNetworkFailureEvent(
                    worker=worker, total_nbytes=total_nbytes, stimulus_id=f"gpurt-unparsed-{time.time()}"
                )
            self._ended(worker, to_gather, fetch, event)
            return event

        return gather_dep

    def _asks(self, sender: str) -> bool:
        # Within a process nothing is serialized. What a user permits to be read may not have our family.
        able = self._active and bool(self._ways) and not sender.startswith("inproc:")
        return able and self._worker.rpc.deserializers is None

    def _ended(self, sender: str, keys: Collection[Any], fetch: Fetch, event: object) -> None:
        if not fetch.corrupt:
            if isinstance(event, GatherDepSuccessEvent):
                self._in_a_row.pop(sender, None)
                # Of a collection each element has a checksum.
                self.counts["verified"] += min(fetch.verified, len(event.data))
                self.counts["unverified"] += max(0, len(event.data) - fetch.verified)
            return
        self.counts["corrupt"] += 1
        self._in_a_row[sender] += 1
        self.corrupt_from[sender] += 1
        logger.warning("dask-gpurt: fetched from %s, to be fetched again: %s", sender, fetch.corrupt)
        if self._in_a_row[sender] >= LIMIT and self.reports:
            self.counts["reported"] += 1
            self._worker.batched_send({"op": OP, "sender": sender, "keys": list(keys)})

    def statistics(self) -> dict[str, int]:
        """Plain JSON values."""
        return {"spared": self.spared, **(self.counts if self._ways else {})}


class _Ask(Wrapped):
    """``worker.rpc.connect``: the request of a fetch that wants checksums says so."""

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        async def connect(*args: Any, **kwargs: Any) -> Comm:
            comm: Comm = await stock(*args, **kwargs)
            fetch = signed.current.get()
            if self._active and fetch is not None:
                fetch.comm = comm
                _ask_on(comm)
            return comm

        return connect


def _ask_on(comm: Comm) -> None:
    """Have the next message on a comm ask for checksums, if it is a fetch."""
    write, attributes = comm.write, getattr(comm, "__dict__", None)
    if attributes is None:
        return  # a comm of others, which then answers without

    def ask(msg: Any, *args: Any, **kwargs: Any) -> Any:
        attributes.pop("write", None)
        if isinstance(msg, dict) and msg.get("op") == "get_data":
            msg = {**msg, "keys": [*msg["keys"], WANTED]}
        return write(msg, *args, **kwargs)

    if "write" not in attributes:
        attributes["write"] = ask


class _Answer(Wrapped):
    """The handler ``get_data``: who asks for checksums gets them."""

    def __init__(self, handlers: dict[str, Any], counts: Counter[str]) -> None:
        self._counts = counts
        super().__init__(handlers, "get_data")

    def _wrap(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        async def get_data(comm: Comm, *args: Any, **kwargs: Any) -> Any:
            keys = kwargs.get("keys", ())
            if not self._active or WANTED not in keys:
                self._counts["unsigned"] += self._active
                return await stock(comm, *args, **kwargs)
            kwargs["keys"] = [key for key in keys if key != WANTED]
            if kwargs.get("serializers") is None:
                self._counts["signed"] += 1
                kwargs["serializers"] = signed.serializers(comm)
            return await stock(comm, *args, **kwargs)

        return get_data
