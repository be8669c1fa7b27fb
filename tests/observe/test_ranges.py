"""Profiler ranges: one per task, in the task's own thread, named by its key; none where there is no profiler."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Worker, wait
from distributed.utils_test import gen_cluster, inc

from dask_gpurt.backends import nvtx
from dask_gpurt.observe.collect.worker import WorkerSlots

if TYPE_CHECKING:
    from collections.abc import Iterator


class Recorder:
    """Stands in for a profiler."""

    def __init__(self) -> None:
        self.open: list[tuple[str, int]] = []
        self.closed: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        here = (name, threading.get_ident())
        self.open.append(here)
        try:
            yield
        finally:
            self.open.remove(here)
            self.closed.append((name, threading.get_ident()))


def _ident(_: int) -> int:
    return threading.get_ident()


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("", 2)])
async def test_a_range_for_each_task_in_its_thread(c: Any, s: Any, a: Worker) -> None:
    recorder = Recorder()
    slots = WorkerSlots(a, recorder)
    slots.install()
    try:
        futures = c.map(_ident, range(5), key=[f"t-{i}" for i in range(5)])
        failing = c.submit(lambda: 1 / 0, key="bad")
        await wait([*futures, failing])
        threads = await c.gather(futures)
    finally:
        slots.uninstall()
    assert dict(recorder.closed) | {"bad": 0} == {f"t-{i}": threads[i] for i in range(5)} | {"bad": 0}
    assert sorted(name for name, _ in recorder.closed) == ["bad", *(f"t-{i}" for i in range(5))]
    assert recorder.open == []
    assert not any("submit" in vars(executor) for executor in a.executors.values())
    assert "execute" not in vars(a)
    assert "handle_stimulus" not in vars(a)
    await wait(c.submit(inc, 1, key="after"))
    assert len(recorder.closed) == 6


def test_without_the_package_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert nvtx.find() is None


def test_the_package_is_used_as_it_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def annotate(message: str, domain: str) -> Any:
        seen.append((message, domain))
        return contextlib.nullcontext()

    monkeypatch.setitem(sys.modules, "nvtx", types.SimpleNamespace(annotate=annotate))
    ranges = nvtx.find()
    assert ranges is not None
    with ranges.range("('x', 0)"):
        pass
    assert seen == [("('x', 0)", "dask-gpurt")]
