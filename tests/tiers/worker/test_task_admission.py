"""A task waits for another where both do not fit in the process, and never for good."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dask_gpurt.tiers.worker import task_admission as module
from dask_gpurt.tiers.worker.task_admission import LEAST_BYTES, SHARE, Outputs, Turn, Turns

if TYPE_CHECKING:
    from collections.abc import Coroutine

MB = 1 << 20
LIMIT = 1000 * MB


class Case:
    """Turns over memory that a test sets."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(resident_bytes=0, moving_bytes=0)
        self.process_bytes = 0
        self.limit_bytes: int | None = LIMIT
        self.seceded: set[str] = set()
        engine: Any = self.engine
        self.turns = Turns(
            engine,
            limit_bytes=lambda: self.limit_bytes,
            process_bytes=lambda: self.process_bytes,
            seceded=self.seceded.__contains__,
            threads=lambda: 2,
        )

    async def begun(self, key: str, nbytes: int, *, in_memory: bool = True) -> Turn:
        entry: Any = SimpleNamespace(nbytes=nbytes, in_memory=in_memory)
        turn = await self.turns.begin(key, [entry])
        assert turn is not None
        return turn


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def waits(case: Case) -> None:
    """Let all go on until nothing does."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_second_of_two_that_do_not_fit_waits_for_the_first() -> None:
    async def main() -> None:
        case = Case()
        case.process_bytes = case.engine.resident_bytes = 400 * MB
        first = await case.begun("a-1", 200 * MB)
        second = asyncio.ensure_future(case.begun("a-2", 200 * MB))
        await waits(case)
        # 400 as they are inputs, 200 and 200 to come: fits
        assert second.done()
        case.process_bytes = 650 * MB
        third = asyncio.ensure_future(case.begun("a-3", 200 * MB))
        await waits(case)
        assert not third.done()
        assert case.turns.waits == 1
        case.process_bytes = 300 * MB
        case.turns.end(second.result())
        await third
        case.turns.end(first)
        case.turns.end(third.result())
        case.turns.end(third.result())  # twice is harmless
        assert case.turns._waited_for() == []
        assert case.turns.wait_seconds > 0

    run(main())


def test_one_that_is_alone_begins_whatever_memory_looks_like() -> None:
    async def main() -> None:
        case = Case()
        case.process_bytes = 2 * LIMIT
        await case.begun("a-1", 500 * MB)
        assert case.turns.waits == 0

    run(main())


def test_values_that_can_leave_are_no_reason_to_wait() -> None:
    async def main() -> None:
        case = Case()
        case.process_bytes = 800 * MB
        case.engine.resident_bytes = 700 * MB
        await case.begun("a-1", 100 * MB)
        await case.begun("a-2", 100 * MB)
        assert case.turns.waits == 0

    run(main())


def test_what_has_to_be_read_first_counts_too() -> None:
    async def main() -> None:
        case = Case()
        case.process_bytes = int(SHARE * LIMIT) - 350 * MB
        await case.begun("a-1", 100 * MB)
        fits = asyncio.ensure_future(case.begun("a-2", 100 * MB))
        await waits(case)
        assert fits.done()
        case.turns.end(fits.result())
        too_much = asyncio.ensure_future(case.begun("a-2", 130 * MB, in_memory=False))
        await waits(case)
        assert not too_much.done()
        too_much.cancel()

    run(main())


def test_twice_the_result_counts_where_it_is_known() -> None:
    async def main() -> None:
        case = Case()
        case.turns.outputs.learn("('make', 0)", 300 * MB)
        first = await case.turns.begin("('make', 1)", [])
        assert first is not None
        assert first.growth == 600 * MB
        second = asyncio.ensure_future(case.turns.begin("('make', 2)", []))
        await waits(case)
        assert not second.done()
        case.turns.end(first)
        await second
        assert await case.turns.begin("unknown", []) is None  # nor does a small one wait
        case.turns.outputs.learn("small", LEAST_BYTES // 4)
        assert await case.turns.begin("small", []) is None

    run(main())


def test_what_a_thread_may_allocate_besides_does_not_wait() -> None:
    """Of 1,000 MB two threads may take a 64th together without being counted: 7.8 MB each."""

    async def main() -> None:
        case = Case()
        await case.begun("a-1", 100 * MB)
        case.process_bytes = LIMIT
        entry: Any = SimpleNamespace(nbytes=7 * MB, in_memory=True)
        assert await case.turns.begin("b-1", [entry]) is None
        more = asyncio.ensure_future(case.turns.begin("b-1", [entry, entry]))
        await waits(case)
        assert not more.done()
        more.cancel()
        case.limit_bytes = None
        assert case.turns.least_bytes == LEAST_BYTES

    run(main())


def test_our_own_writes_are_waited_for_also_by_one_that_is_alone() -> None:
    async def main() -> None:
        case = Case()
        case.process_bytes = LIMIT
        case.engine.moving_bytes = 50 * MB
        relieved = asyncio.Event()
        case.turns.on_short = relieved.set
        turn = asyncio.ensure_future(case.begun("a-1", 100 * MB))
        await relieved.wait()
        assert not turn.done()
        case.engine.moving_bytes = 0
        await turn
        assert case.turns.waits == 1

    run(main())


def test_without_a_limit_nobody_waits() -> None:
    async def main() -> None:
        case = Case()
        case.limit_bytes = None
        case.process_bytes = 100 * LIMIT
        for i in range(3):
            await case.begun(f"a-{i}", LIMIT)
        assert case.turns.waits == 0

    run(main())


def test_nobody_waits_for_a_task_that_has_seceded() -> None:
    async def main() -> None:
        case = Case()
        case.process_bytes = LIMIT
        await case.begun("a-1", 100 * MB)
        case.seceded.add("a-1")
        await case.begun("a-2", 100 * MB)
        assert case.turns.waits == 0

    run(main())


def test_a_task_that_may_itself_wait_for_this_one_is_not_waited_for_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        clock = [0.0]
        monkeypatch.setattr(module, "monotonic", lambda: clock[0])
        monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
        case = Case()
        case.process_bytes = LIMIT
        relieved = asyncio.Event()
        case.turns.on_short = relieved.set
        await case.begun("a-1", 100 * MB)
        second = asyncio.ensure_future(case.begun("a-2", 100 * MB))
        await relieved.wait()
        assert not second.done()
        clock[0] = module.PATIENCE_SECONDS + 1
        await second
        assert case.turns.passed_by == 1
        case.turns.end(second.result())
        await case.begun("a-3", 100 * MB)  # at once: the first is not waited for by anybody
        assert case.turns.waits == 1

    run(main())


def test_one_that_waits_may_be_cancelled() -> None:
    async def main() -> None:
        case = Case()
        case.process_bytes = LIMIT
        first = await case.begun("a-1", 100 * MB)
        second = asyncio.ensure_future(case.begun("a-2", 100 * MB))
        await waits(case)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert list(case.turns._running) == [first]

    run(main())


def test_results_larger_than_usual_count_at_once_smaller_ones_by_and_by() -> None:
    outputs = Outputs()
    assert outputs.expected("('x', 0)") is None
    outputs.learn("('x', 0)", 100)
    outputs.learn("('x', 1)", 1000)
    assert outputs.expected("('x', 2)") == 1000
    outputs.learn("('x', 2)", 0)
    assert outputs.expected("('x', 3)") == 800
    for i in range(module._PREFIXES):
        outputs.learn(f"('p{i}', 0)", 1)
    assert outputs.expected("('x', 4)") is None
