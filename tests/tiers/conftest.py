"""Helpers of the tier tests: an engine on a real folder, and system calls that fail on demand."""

# ruff: noqa: ASYNC240
from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from distributed.utils_test import async_poll_for

from dask_gpurt.model.circuit_breaker import Guard
from dask_gpurt.model.tier import Tier
from dask_gpurt.tiers.engine.engine import Engine
from dask_gpurt.tiers.storage.disk.tier import DiskTier
from dask_gpurt.tiers.stores.task_store import TieredStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distributed import Worker

    from dask_gpurt.tiers.storage.handle import Handle


def guard() -> Guard:
    """A circuit breaker of a test's own."""
    return Guard("tiers", logging.getLogger("tests.tiers"))


class HostSlabs:
    """Ordinary, pageable memory."""

    tier = Tier.HOST

    def allocate(self, nbytes: int) -> memoryview:
        """Allocate a slab."""
        return numpy.empty(nbytes, "u1").data

    def release(self, slab: memoryview) -> None:
        """Let the slab go; its memory goes with the last reference."""
        slab.release()


def handles(engine: Engine) -> list[Handle]:
    """All copies on lower tiers."""
    return [e.handle for e in engine.books.entries if e.handle is not None]


_beats: weakref.WeakKeyDictionary[Worker, asyncio.Lock] = weakref.WeakKeyDictionary()


async def beat(worker: Worker) -> None:
    """One more heartbeat, now. Its own must not be under way: two at a time end a worker (distributed's `spans`)."""
    lock = _beats.get(worker)
    if lock is None:
        lock = _beats[worker] = asyncio.Lock()
        periodic = worker.periodic_callbacks["heartbeat"]
        own = periodic.callback

        async def one_at_a_time() -> None:
            async with lock:
                await own()

        periodic.callback = one_at_a_time
        spans: Any = worker.extensions["spans"]
        await async_poll_for(lambda: not spans.digests_total_since_heartbeat, timeout=30)  # one that began before
    async with lock:
        await worker.heartbeat()


class FaultyOs:
    """`os`, except that chosen calls fail, are short, or flip a bit.

    ``plan`` maps (function name, n-th call counted from 0) to an exception to raise, or to a callable that gets the
    real function and its arguments.
    """

    def __init__(self) -> None:
        self.plan: dict[tuple[str, int], Any] = {}
        #: function name -> what to do at every call
        self.always: dict[str, Any] = {}
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if not callable(real):
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            n = self.calls.get(name, 0)
            self.calls[name] = n + 1
            fault = self.plan.get((name, n), self.always.get(name))
            if isinstance(fault, BaseException):
                raise fault
            if fault is not None:
                return fault(real, *args, **kwargs)
            return real(*args, **kwargs)

        return call


def enospc() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


class Rig:
    """An engine and a store on a folder of this test."""

    def __init__(self, directory: str, budget: int | None, os_layer: Any, **disk: Any) -> None:
        self.lost: list[Any] = []
        #: seconds; back-off ends only when a test says so
        self.now = 0.0
        self.disk = DiskTier(directory, os_layer=os_layer, **disk)
        self.engine = Engine(self.disk, budget_bytes=budget, clock=lambda: self.now)
        #: key -> the one that it is another name of
        self.names: dict[Any, Any] = {"b": "a", "c": "b"}
        self.store = TieredStore(self.engine, on_lost=self.lost.append, renames=self.names.get)

    async def settle(self) -> None:
        """Until no I/O is under way, deletions have reached the disk, and no I/O thread holds a value any more."""
        io = self.engine.io
        while io.in_flight:
            await self.engine.idle()
        for pool in (io._writers, io._readers):
            # A thread that wrote a value holds it until it takes up the next piece of work, and as long it can be
            # revived. So each gets one: the barrier opens when all have come.
            everyone = threading.Barrier(pool._max_workers)
            await asyncio.gather(*(io.loop.run_in_executor(pool, everyone.wait) for _ in range(pool._max_workers)))

    def validate(self) -> None:
        """Every invariant of the engine, and: the files on disk are the handles."""
        self.engine.validate()
        names = sorted({h.name for h in handles(self.engine) if hasattr(h, "name")})
        assert names == self.disk.files(), "files on disk and handles differ"
        assert self.disk.used_bytes == sum(
            os.stat(os.path.join(self.disk.directory, n)).st_size for n in self.disk.files()
        )

    def hint(self, key: Any, next_use: tuple[float, ...] | None) -> None:
        """The priority of the next task that reads a key."""
        entry = self.store.entry(key)
        if entry is not None:
            self.engine.hint(entry, next_use)

    def spill_all(self) -> None:
        self.engine.shrink(1 << 60)


@pytest.fixture
def run_rig(tmp_path: Any) -> Callable[..., None]:
    """``run_rig(test, budget=..., os_layer=..., **disk)`` runs ``await test(rig)`` and closes everything."""

    def run(
        test: Callable[[Rig], Awaitable[None]], *, budget: int | None = None, os_layer: Any = os, **disk: Any
    ) -> None:
        async def main() -> None:
            rig = Rig(str(tmp_path / "tier"), budget, os_layer, **disk)
            try:
                await test(rig)
            finally:
                await rig.engine.close()
            assert not os.path.exists(rig.disk.directory)

        asyncio.run(main())

    return run
