"""Schedulers with a gate, for the tests on live workers in one process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from distributed import Worker
from distributed.utils_test import async_poll_for

from dask_gpurt.config import Settings
from dask_gpurt.extension import GpurtScheduler
from dask_gpurt.preflight import checks, worker
from dask_gpurt.preflight.checks import Finding, State

if TYPE_CHECKING:
    import threading
    from collections.abc import AsyncIterator

    import pytest
    from distributed import Scheduler

    from dask_gpurt.preflight.gate import Gate

#: a worker fails its check of the disk when its folder has this in its name
BAD = "bad-disk"


@contextlib.asynccontextmanager
async def gated(s: Scheduler, mode: str, **settings: Any) -> AsyncIterator[Gate]:
    """The whole extension on a scheduler; taken out at the end."""
    plugin = GpurtScheduler(Settings.load({"preflight": mode, **settings}))
    await plugin.start(s)
    s.add_plugin(plugin, name=plugin.name)
    assert plugin.gate is not None
    try:
        yield plugin.gate
    finally:
        await plugin.uninstall()


def stub(monkeypatch: pytest.MonkeyPatch, gate: threading.Event | None = None, patience: float = 0.0) -> None:
    """Checks that take no time, and that wait for an event; with ``warn``, they wait for `patience` seconds alone."""

    def run(plan: checks.Plan) -> tuple[list[Finding], None]:
        if gate is not None:
            assert gate.wait(60)
        bad = any(BAD in folder for folder in plan.folders)
        failed = Finding("disk", State.FAIL, "read-only", "a writable one", "mount it")
        return [failed if bad else Finding("disk", State.OK)], None

    monkeypatch.setattr(checks, "run", run)
    monkeypatch.setattr(worker, "QUIET_SECONDS", patience)


@contextlib.asynccontextmanager
async def workers(s: Scheduler, *folders: Any, **kwargs: Any) -> AsyncIterator[list[Worker]]:
    """One worker of one thread in each of these folders."""
    async with contextlib.AsyncExitStack() as opened:
        out = []
        for i, folder in enumerate(folders):
            w = Worker(s.address, nthreads=1, name=f"{i}-{folder.name}", local_directory=str(folder), **kwargs)
            out.append(await opened.enter_async_context(w))
        yield out


async def until(condition: Any) -> None:
    """Wait until something is so."""
    await async_poll_for(condition, timeout=60)
