"""The ledger comes and goes with the extension; the feed looks only while a page asks. One loop, no processes."""

# ruff: noqa: ASYNC110  (what is waited for is in another part of the same loop, and has no event)

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest import mock

import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.config import Settings
from dask_gpurt.extension import GpurtScheduler
from dask_gpurt.observe.figures import history
from tests.observe.fakes import beat

pytestmark = pytest.mark.cluster

#: lets the task below end
GO = threading.Event()


def _until_told() -> bool:
    return GO.wait(60)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_attached_and_detached_while_a_task_runs(c: Any, s: Any, a: Any) -> None:
    stock = s.handlers["heartbeat_worker"]
    GO.clear()
    future = c.submit(_until_told)
    while not a.state.executing:
        await asyncio.sleep(0.01)
    plugin = GpurtScheduler(Settings.load())
    await plugin.start(s)
    await asyncio.sleep(0.25)
    GO.set()
    await future
    await beat(a)
    told = plugin.statistics()["ledger"]
    assert told["busy_seconds"] + sum(told["causes"].values()) == pytest.approx(told["slot_seconds"], rel=0.02)
    assert told["busy_seconds"] >= 0.2
    await plugin.uninstall()
    assert s.handlers["heartbeat_worker"] == stock
    assert "handle_stimulus" not in vars(a)
    assert "execute" not in vars(a)
    assert await c.submit(int, 3) == 3


@gen_cluster(nthreads=[("127.0.0.1", 1)])
async def test_heartbeats_of_a_worker_with_a_host_name_are_heard(s: Any, a: Any) -> None:
    """As with ``--contact-address tcp://localhost:4000``: the scheduler knows it by what the name stands for."""
    plugin = GpurtScheduler(Settings.load({"shuffle.enabled": False}))
    await plugin.start(s)
    assert plugin.ledger is not None
    assert plugin.ledger.ledger is not None
    known, heard = a.address, []
    with mock.patch.object(plugin.ledger.ledger, "heartbeat", lambda ws, now: heard.append((ws.address, bool(now)))):
        for own in (known, f"tcp://localhost:{a.port}", f"127.0.0.1:{a.port}"):
            a.contact_address = own
            await beat(a)
    assert heard == [(known, True)] * 3
    assert plugin.ledger.ledger.errors == 0
    await plugin.uninstall()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_the_feed_looks_only_while_a_page_asks(c: Any, s: Any, a: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(history, "INTERVAL_MS", 20)
    made = history.provide(s, dict)
    assert history.CALLBACK not in s.periodic_callbacks
    assert len(made.history) == 0
    assert history.of(s) is made
    while len(made.history) < 3:
        await asyncio.sleep(0.02)
    monkeypatch.setattr(history, "UNSEEN_SECONDS", 0.0)
    while history.CALLBACK in s.periodic_callbacks:
        await asyncio.sleep(0.02)
    looks = len(made.history)
    await asyncio.sleep(0.1)
    assert len(made.history) == looks
    history.withdraw(s)
