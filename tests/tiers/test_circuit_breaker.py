"""A part that fails on every task is switched off: Dask's own code does the work, no key is lost, status says why."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from distributed import wait
from distributed.utils_test import async_poll_for, gen_cluster

from dask_gpurt.extension import on_worker
from dask_gpurt.model import circuit_breaker
from dask_gpurt.tiers.hints.pending_tasks import NAME
from dask_gpurt.tiers.hints.protocol import OP
from tests.memory_watch import NO_WATCH
from tests.tiers.hints.test_hints_cluster import attach, make, press, runtime
from tests.tiers.hints.test_prefetch import Bench, bench

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from distributed import Client, Scheduler, Worker

    from dask_gpurt.model.events import Event
    from dask_gpurt.tiers.runtime import TierRuntime

    RunRig = Callable[..., None]
    Test = Callable[[Client, Scheduler, Worker, Worker], Awaitable[None]]

LIMIT = 10


@pytest.fixture(autouse=True)
def few_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "LIMIT", LIMIT)


def on_cluster(test: Test) -> None:
    gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=NO_WATCH)(test)()


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("injected")


def why(worker: Worker, part: str) -> str | None:
    """What status says of a part that was switched off."""
    parts = on_worker(worker)
    assert parts is not None
    reason: str | None = parts.statistics()["tiers"]["retired"].get(part)
    return reason


REASON = f"{LIMIT} failures within 60 s; the last one: RuntimeError: injected"


async def store_all(tiers: TierRuntime) -> None:
    """Move all values of a worker to disk."""
    store = tiers.store
    assert store is not None
    tiers.engine.shrink(1 << 60)
    await async_poll_for(lambda: len(store.slow) == len(store), timeout=30)
    tiers.engine.shrink(0)


@pytest.mark.cluster
def test_execute() -> None:
    async def test(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        plugin = await attach(s, a, b)
        x = c.map(make, range(2 * LIMIT), workers=[a.address], pure=False)
        await wait(x)
        await store_all(runtime(a))
        seam = runtime(a)._seam
        assert seam is not None
        calls = []

        async def broken(key: Any) -> Any:
            calls.append(key)
            raise RuntimeError("injected")

        seam.inputs.bring = broken  # type: ignore[method-assign]
        y = c.map(lambda v: int(v[0]), x, workers=[a.address], pure=False)
        assert await c.gather(y) == list(range(2 * LIMIT))
        assert why(a, "execute") == REASON
        assert len(calls) == LIMIT  # from then on stock's method alone
        assert runtime(a).statistics()["fallbacks"] == {"execute": LIMIT}
        assert runtime(a).statistics()["sync_reads"] > 0
        assert plugin.statistics()["version"]
        assert why(b, "execute") is None
        assert all(s.tasks[f.key].state == "memory" for f in x)
        runtime(a).engine.validate()
        await plugin.uninstall()
        assert "execute" not in vars(a)
        assert await c.gather(c.map(lambda v: int(v[0]), x, pure=False)) == list(range(2 * LIMIT))

    on_cluster(test)


@pytest.mark.cluster
@pytest.mark.parametrize("part", ["get_data", "gather_dep"])
def test_transfers(part: str) -> None:
    async def test(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        plugin = await attach(s, a, b)
        x = c.map(make, range(2 * LIMIT), workers=[a.address], pure=False)
        await wait(x)
        await store_all(runtime(a))
        seam, culprit = runtime(a)._seam, a if part == "get_data" else b
        assert seam is not None

        async def broken(*args: Any) -> Any:
            raise RuntimeError("injected")

        if part == "get_data":
            seam.inputs.ensure = broken  # type: ignore[method-assign]
        else:
            runtime(b).engine.admit = broken  # type: ignore[method-assign]
        for i, f in enumerate(x):  # a transfer each
            assert await c.submit(lambda v: int(v[0]), f, workers=[b.address], pure=False) == i
        assert why(culprit, part) == REASON
        assert runtime(culprit).statistics()["fallbacks"][part] == LIMIT
        assert all(s.tasks[f.key].state == "memory" for f in x)
        for w in (a, b):
            runtime(w).engine.validate()
        await plugin.uninstall()
        assert await c.gather(c.map(lambda v: int(v[0]), x, pure=False)) == list(range(2 * LIMIT))

    on_cluster(test)


@pytest.mark.cluster
def test_hints_on_the_worker() -> None:
    async def test(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        plugin = await attach(s, a, b)
        first = c.submit(make, 1, workers=[a.address])
        await wait(first)
        await async_poll_for(lambda: runtime(a).statistics()["hints"]["active"], timeout=10)
        runtime(a).engine.hint = fail  # type: ignore[method-assign]
        x = c.map(make, range(2 * LIMIT), workers=[a.address], pure=False)
        assert await c.gather(c.map(lambda v: int(v[0]), x, pure=False)) == list(range(2 * LIMIT))
        await async_poll_for(lambda: why(a, "hints") is not None, timeout=10)
        assert why(a, "hints") == REASON
        hints = runtime(a).statistics()["hints"]
        assert hints["state"] == f"off: {REASON}"
        assert not hints["active"]
        assert runtime(a).protocols() == {}  # the next heartbeat asks for nothing
        assert runtime(b).protocols() != {}
        a.stream_handlers[OP](items=[(first.key, [(1, 2, 3)])])  # under way
        # one more: forgetting the hints at the switch-off fails in the same way, and that is counted as well
        assert runtime(a).statistics()["hints"]["exceptions"] == LIMIT + 1
        assert set(s.workers) == {a.address, b.address}
        await plugin.uninstall()

    on_cluster(test)


@pytest.mark.cluster
def test_what_a_worker_knows_itself() -> None:
    async def test(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        plugin = await attach(s, a, b)
        press(runtime(a))
        await asyncio.sleep(0)
        assert NAME in a.plugins
        x = c.map(make, range(2 * LIMIT), workers=[a.address], pure=False)
        await wait(x)
        runtime(a).engine.books.set_due = fail  # type: ignore[method-assign]
        y = c.map(lambda v: int(v[0]), x, workers=[a.address], pure=False)
        assert await c.gather(y) == list(range(2 * LIMIT))
        assert (why(a, "local uses") or "").startswith(f"{LIMIT} failures within 60 s")
        await async_poll_for(lambda: NAME not in a.plugins, timeout=10)
        press(runtime(a))  # nor does it come back
        assert NAME not in a.plugins
        assert await c.gather(c.map(lambda v: int(v[0]), x, pure=False)) == list(range(2 * LIMIT))
        await plugin.uninstall()

    on_cluster(test)


def test_prefetch(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        x = await b.put("x", stored=True)
        b.prefetch._start = fail  # type: ignore[method-assign]
        for i in range(LIMIT):
            b.send(f"t{i}", ["x"], i)
            await b.settle()
        assert b.prefetch.statistics()["retired"] == REASON
        b.prefetch.share = 1.0  # by new settings
        b.send("u", ["x"], 1)
        await b.settle()
        assert b.prefetch.statistics()["queue"] == 0
        assert b.prefetch.statistics()["exceptions"] == LIMIT
        await b.run("u")  # reads by itself
        assert x.in_memory

    bench(run_rig, test)


@pytest.mark.cluster
@pytest.mark.parametrize("half", ["scheduler", "worker"])
def test_shared_copies(half: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    from tests.tiers.shared import test_shared as shared_copies

    monkeypatch.setattr(circuit_breaker, "LIMIT", 1)

    @gen_cluster(client=True, nthreads=[("", 1)] * 2, config=shared_copies.CONFIG)
    async def test(c: Client, s: Scheduler, a: Worker, b: Worker) -> None:
        log = tmp_path / "log"
        shared = await shared_copies.extended(s, (tmp_path / "store").as_uri())
        await shared_copies.greeted(shared, 2)
        roots = c.map(
            shared_copies.make, range(6), log=str(log), workers=[a.address], allow_other_workers=True, pure=False
        )
        await wait(roots)
        await shared_copies.spill(a, shared, len(a.data))
        if half == "scheduler":
            shared._adopt = fail  # type: ignore[method-assign]
        else:
            heir = runtime(b)._shared
            assert heir is not None
            heir._adopt = fail  # type: ignore[method-assign]
        await a.close()
        assert await c.gather(c.map(lambda v: int(np.max(v)), roots)) == list(range(6))  # computed again
        assert len(shared_copies.runs(log)) == 12
        reason = "1 failures within 60 s; the last one: RuntimeError: injected"
        if half == "scheduler":
            assert s.plugins["gpurt"].statistics()["shared_copies"]["retired"] == reason  # type: ignore[attr-defined]
            assert "remove_worker" not in vars(s)
        else:
            assert why(b, "shared copies") == reason
            assert "shared_copies" not in runtime(b).protocols()
        runtime(b).engine.validate()

    test()


def test_the_log_says_what_was_raised_and_where() -> None:
    events: list[Event] = []
    guard = circuit_breaker.Guard("tiers", logging.getLogger("tests.tiers"), sink=events.append)
    try:
        fail()
    except RuntimeError:
        guard.failed("part")
    assert "part: exception, RuntimeError: injected, File " in events[0].message
    assert "in fail; Dask's own code took over" in events[0].message
    guard.failed("other", "rejected", "x is not queued")
    assert events[1].message == "other: rejected; Dask's own code took over"
