"""The barrier on the scheduler: what it does when a worker does not answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpurt.shuffle.scheduler.barrier import Barrier
from dask_gpurt.shuffle.scheduler.calls import AnswersFailed
from dask_gpurt.shuffle.scheduler.recovery import Amender


@pytest.mark.parametrize("error", [TimeoutError("no answer"), AnswersFailed("it closes")])
def test_a_worker_that_is_stopped_or_closes_restarts_the_run_and_fails_no_query(error: Exception) -> None:
    restarted: list[str] = []
    record = SimpleNamespace(
        id="s",
        version=0,
        run=SimpleNamespace(run_id=1),
        telling=None,
        participants={"tcp://a"},
        amendments=SimpleNamespace(epoch=1, handing={}),
    )
    runs: Any = SimpleNamespace(
        get=lambda shuffle_id: record,
        barrier_of=lambda shuffle_id: SimpleNamespace(state="processing"),
        current=lambda record: True,
        restart=lambda record, why: restarted.append(why),
    )

    async def flushed(*args: Any) -> list[Any]:
        return []

    async def no_answer(*args: Any) -> Any:
        raise error

    calls: Any = SimpleNamespace(flush=flushed, amend=no_answer, tell=no_answer)
    barrier = Barrier(runs, calls, SimpleNamespace(), SimpleNamespace(hear=flushed), lambda record: None, lambda: None)  # type: ignore[arg-type]
    assert asyncio.run(barrier.passes("s", 1)) is False
    assert restarted == [str(error)]


@pytest.mark.parametrize("error", [TimeoutError("no answer"), AnswersFailed("it closes"), ValueError("ours")])
def test_only_an_error_of_ours_counts_as_one_when_an_epoch_is_announced(error: Exception) -> None:
    """A few of those leave all shuffles to Dask."""
    restarted: list[str] = []
    failed: list[int] = []
    runs: Any = SimpleNamespace(
        current=lambda record: True,
        restart=lambda record, why: restarted.append(why),
        changed=lambda record: None,
    )

    async def no_answer(*args: Any) -> Any:
        raise error

    calls: Any = SimpleNamespace(amend=no_answer)
    nothing: Any = None
    record: Any = SimpleNamespace(version=0, telling=None, amendments=SimpleNamespace(epoch=1, opened=None))

    async def check() -> None:
        Amender(nothing, runs, calls, nothing, lambda: failed.append(1)).amend(record)
        await record.telling

    asyncio.run(check())
    assert len(restarted) == 1
    assert str(error) in restarted[0]
    assert len(failed) == isinstance(error, ValueError)
