"""A name that observation relies on is looked up before anything is changed."""

from __future__ import annotations

import types

import pytest
from distributed import Worker

from dask_gpurt.errors import SeamMismatch
from dask_gpurt.extension import seam as extension_seam
from dask_gpurt.observe import seam


def test_what_is_there_passes() -> None:
    seam.check_tasks()
    names = {"workers": {}, "tasks": {}, "queued": (), "unrunnable": (), "handlers": {}, "coerce_address": str}
    seam.check_scheduler(types.SimpleNamespace(**names))


def test_what_is_missing_is_named_with_the_remedy() -> None:
    with pytest.raises(SeamMismatch, match=r"scheduler\.queued does not exist.*Remedy"):
        seam.check_scheduler(types.SimpleNamespace(workers={}, tasks={}))
    worker = types.SimpleNamespace(state=types.SimpleNamespace(has_what={}), gather_dep=lambda worker: None)
    with pytest.raises(SeamMismatch, match=r"worker\.execute does not exist.*on-error: stock"):
        seam.check_worker(worker)
    with pytest.raises(SeamMismatch, match=r"Worker\.gather_dep cannot be called"):
        extension_seam.check_fetches(worker)


def test_a_worker_that_cannot_be_refused_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask would log what a preload raises, and start the worker as if nothing had been asked."""

    async def start_unsafe(self: Worker) -> Worker:
        return self

    monkeypatch.setattr(Worker, "start_unsafe", start_unsafe)
    with pytest.raises(SystemExit, match="no disk"):
        extension_seam.refuse(Worker.__new__(Worker), RuntimeError("no disk"))
