"""Workers that are held: they get nothing, what they have leaves them, and they come back. Live, in one process."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Event, Nanny, Worker
from distributed.active_memory_manager import ActiveMemoryManagerPolicy
from distributed.core import Status
from distributed.utils_test import NO_AMM, async_poll_for, gen_cluster, inc, slowinc

from dask_gpurt.config import Settings
from dask_gpurt.extension import GpurtScheduler
from dask_gpurt.quarantine import scheduler as module
from dask_gpurt.quarantine.evidence import SLOW_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from distributed import Scheduler

    from dask_gpurt.quarantine.scheduler import Quarantine

pytestmark = pytest.mark.timeout(200)


@contextlib.asynccontextmanager
async def guarded(s: Scheduler, mode: str = "alarm", **settings: Any) -> AsyncIterator[Quarantine]:
    """The whole extension on a scheduler; taken out at the end."""
    plugin = GpurtScheduler(Settings.load({"quarantine": mode, **settings}))
    await plugin.start(s)
    s.add_plugin(plugin, name=plugin.name)
    assert plugin.quarantine is not None
    try:
        yield plugin.quarantine
    finally:
        await plugin.uninstall()


async def until(condition: Any) -> None:
    await async_poll_for(condition, timeout=60)


THREE = [("127.0.0.1", 1)] * 3


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_a_held_worker_gets_nothing_and_loses_nothing(c: Any, s: Any, *workers: Any) -> None:
    async with guarded(s) as quarantine:
        there = c.map(inc, range(30), pure=False)
        scattered = await c.scatter({"x": 1}, workers=[workers[0].address])
        await c.gather(there)
        assert workers[0].data
        quarantine.hold([workers[0].address], "test")
        assert s.workers[workers[0].address].status is Status.closing_gracefully
        assert workers[0].status is Status.running  # it was not told
        await until(lambda: quarantine.look() or not workers[0].data)
        more = c.map(inc, range(100, 160), pure=False)
        assert sum(await c.gather(more)) == sum(range(101, 161))
        assert not workers[0].data
        assert all(len(s.tasks[f.key].who_has) for f in there)
        assert (await c.gather(scattered["x"])) == 1
        assert await c.gather(there) == list(range(1, 31))
        s.validate_state()
        assert quarantine.release([workers[0].address]) == [workers[0].address]
        await c.gather(c.map(inc, range(200, 260), pure=False))
        assert workers[0].data
        s.validate_state()


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_what_it_has_not_begun_is_done_by_others(c: Any, s: Any, *workers: Any) -> None:
    async with guarded(s) as quarantine:
        go = Event("go")

        def wait(i: int) -> int:
            Event("go").wait()
            return i

        futures = c.map(wait, range(12), workers=[w.address for w in workers], allow_other_workers=True)
        await until(lambda: all(w.state.executing_count for w in workers))
        bad = workers[0]
        running = {ts.key for ts in bad.state.executing}
        quarantine.hold([bad.address], "test")
        await until(lambda: {ts.key for ts in s.workers[bad.address].processing} <= running)
        await go.set()
        assert await c.gather(futures) == list(range(12))
        # What it was in the middle of ended there, and its result leaves it.
        await until(lambda: quarantine.look() or not bad.data)
        s.validate_state()


# Without the limit, as the memory monitor ends a pause that has no reason.
@gen_cluster(client=True, nthreads=THREE, config={**NO_AMM, "distributed.worker.memory.pause": False})
async def test_a_pause_and_its_end_do_not_let_it_in(c: Any, s: Any, *workers: Any) -> None:
    async with guarded(s) as quarantine:
        bad = workers[0]
        quarantine.hold([bad.address], "test")
        bad.status = Status.paused
        await asyncio.sleep(0.1)
        bad.status = Status.running
        await asyncio.sleep(0.1)
        assert s.workers[bad.address].status is Status.closing_gracefully
        bad.status = Status.paused
        await asyncio.sleep(0.1)
        quarantine.release([bad.address])
        assert s.workers[bad.address].status is Status.paused  # as it has said
        bad.status = Status.running
        await until(lambda: s.workers[bad.address].status is Status.running)


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_a_held_worker_can_be_retired(c: Any, s: Any, *workers: Any) -> None:
    async with guarded(s) as quarantine:
        futures = c.map(inc, range(30))
        await c.gather(futures)
        quarantine.hold([workers[0].address], "test")
        await s.retire_workers([workers[0].address])
        await until(lambda: workers[0].address not in s.workers)
        assert quarantine.statistics()["held"] == {}
        assert await c.gather(futures) == list(range(1, 31))


@gen_cluster(client=True, nthreads=THREE, config={"distributed.worker.memory.pause": False})
async def test_a_held_worker_whose_retirement_failed_works_again_once_released(c: Any, s: Any, *workers: Any) -> None:
    """distributed gives it back the status that the scheduler had for it, which was that of a held one."""
    async with guarded(s) as quarantine:
        bad, *others = workers
        data = await c.scatter({"x": 1}, workers=[bad.address])
        for other in others:
            other.status = Status.paused
        await until(lambda: len(s.running) == 1)
        quarantine._holds.hold(bad.address)  # type: ignore[union-attr]
        await s.retire_workers([bad.address])
        await until(lambda: bad.status is Status.closing_gracefully)
        assert bad.address in s.workers  # there was no other for its data
        quarantine._holds.release(bad.address)  # type: ignore[union-attr]
        await until(lambda: bad.status is Status.running)
        assert await c.submit(inc, data["x"], workers=[bad.address]) == 2
        s.validate_state()


class _Broken(ActiveMemoryManagerPolicy):
    """A user's, of the cluster's own memory manager."""

    def run(self) -> Any:
        raise ZeroDivisionError("no good")


@gen_cluster(client=True, nthreads=THREE, config={"distributed.scheduler.active-memory-manager.interval": "1h"})
async def test_a_memory_manager_that_raises_leaves_no_hold_half_done(c: Any, s: Any, *workers: Any) -> None:
    async with guarded(s) as quarantine:
        bad = workers[0].address
        data = await c.scatter([1, 2], workers=[bad])
        s.extensions["amm"].add_policy(_Broken())
        assert quarantine.hold([bad], "fan failed") == [bad]
        assert quarantine.statistics()["held"][bad]["found"] == "fan failed"
        assert quarantine.guard.parts["drain"].failures == 1
        quarantine.look()
        assert await c.gather(data) == [1, 2]
        quarantine._why.clear()
        assert quarantine.statistics()["held"][bad]["found"] == "reason unknown"


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=NO_AMM)
async def test_the_last_worker_is_never_held(c: Any, s: Any, a: Any, b: Any) -> None:
    async with guarded(s) as quarantine:
        assert quarantine.hold([a.address, b.address], "test") == [a.address]
        assert await c.submit(inc, 1) == 2


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_a_task_that_only_it_may_run_lets_it_go(c: Any, s: Any, *workers: Any) -> None:
    """Stock would run it; a cluster that hangs is worse than a worker that is suspected."""
    async with guarded(s) as quarantine:
        bad = workers[0]
        quarantine.hold([bad.address], "test")
        future = c.submit(inc, 1, workers=[bad.address])
        await until(lambda: s.tasks.get(future.key) is not None and s.tasks[future.key].state == "no-worker")
        quarantine.look()
        assert await future == 2
        assert bad.address not in quarantine.statistics()["held"]
        assert quarantine.counts["let_go"] == 1


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=NO_AMM)
async def test_queued_tasks_let_it_go_when_all_others_have_left(c: Any, s: Any, a: Any, b: Any) -> None:
    async with guarded(s) as quarantine:
        assert quarantine.hold([a.address], "test") == [a.address]
        quarantine.look()
        assert quarantine.statistics()["held"], "nothing waits"
        await b.close()
        futures = c.map(inc, range(20), pure=False)  # so many that Dask keeps them in its queue of roots
        await until(lambda: len(s.queued) == 20)
        assert not s.unrunnable
        quarantine.look()
        assert await c.gather(futures) == list(range(1, 21))
        assert quarantine.counts["let_go"] == 1


@gen_cluster(client=True, nthreads=[], config=NO_AMM)
async def test_resources_count_as_that(c: Any, s: Any) -> None:
    async with Worker(s.address, resources={"GPU": 1}) as bad, Worker(s.address), guarded(s) as quarantine:
        quarantine.hold([bad.address], "test")
        future = c.submit(inc, 1, resources={"GPU": 1})
        await until(lambda: s.tasks.get(future.key) is not None and s.tasks[future.key].state == "no-worker")
        quarantine.look()
        assert await future == 2


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_uninstalling_lets_all_go(c: Any, s: Any, *workers: Any) -> None:
    before = s.stream_handlers["worker-status-change"]
    async with guarded(s) as quarantine:
        quarantine.hold([workers[0].address], "test")
        assert len(s.running) == 2
    assert len(s.running) == 3
    assert s.stream_handlers["worker-status-change"] == before
    s.validate_state()


# ------------------------------------------------------------------ on evidence


def wrong(quarantine: Quarantine, sender: Any, receivers: Any, times: int = 2) -> None:
    for receiver in receivers:
        quarantine.evidence.corrupt(sender.address, receiver.address, times, quarantine._clock())


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_alarm_only_says_so(c: Any, s: Any, *workers: Any) -> None:
    async with guarded(s, "alarm") as quarantine:
        wrong(quarantine, workers[0], workers[1:])
        quarantine.look()
        quarantine.look()
        stats = quarantine.statistics()
        assert [(one["worker"], one["cause"]) for one in stats["suspects"]] == [(workers[0].address, "corruption")]
        assert stats["counts"]["alarms"] == 1
        assert len(s.running) == 3


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_at_most_a_third(c: Any, s: Any, *workers: Any) -> None:
    async with guarded(s, "on") as quarantine:
        quarantine.evidence.hardware(workers[0].address, "Xid 79")
        quarantine.evidence.hardware(workers[1].address, "Xid 79")
        quarantine.look()
        assert list(quarantine.statistics()["held"]) == [workers[0].address]
        assert [one["worker"] for one in quarantine.statistics()["suspects"]] == [workers[1].address]
        assert quarantine.counts["held"] == 1
        assert quarantine.counts["alarms"] == 1


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_one_for_which_there_was_no_room_is_held_once_there_is(c: Any, s: Any, *workers: Any) -> None:
    async with guarded(s, "on") as quarantine:
        for worker in workers[:2]:
            quarantine.evidence.hardware(worker.address, "Xid 79")
        quarantine.look()
        assert list(quarantine.statistics()["held"]) == [workers[0].address]
        quarantine.release([workers[0].address])
        quarantine.look()
        stats = quarantine.statistics()
        assert list(stats["held"]) == [workers[1].address]
        assert stats["suspects"] == []
        assert stats["counts"] == {"suspects": 2, "alarms": 1, "held": 2, "released": 1, "let_go": 0}


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_a_suspect_that_is_well_again_is_none(c: Any, s: Any, *workers: Any) -> None:
    slowness = {workers[0].address: 3.0}
    async with guarded(s, "alarm") as quarantine:
        quarantine._slowness = lambda: slowness
        now = quarantine._clock()
        quarantine._clock = lambda: now
        for _ in range(2):
            quarantine.look()
            now += SLOW_SECONDS
        assert [one["cause"] for one in quarantine.statistics()["suspects"]] == ["slow"]
        slowness[workers[0].address] = 1.0
        quarantine.look()
        assert quarantine.statistics()["suspects"] == []
        slowness[workers[0].address] = 3.0
        for _ in range(2):
            quarantine.look()
            now += SLOW_SECONDS
        assert quarantine.counts["alarms"] == 2


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_a_link_is_never_held(c: Any, s: Any, *workers: Any) -> None:
    async with guarded(s, "on") as quarantine:
        wrong(quarantine, workers[0], workers[1:2], times=5)
        quarantine.look()
        assert quarantine.statistics()["held"] == {}
        assert quarantine.statistics()["suspects"][0]["peer"] == workers[1].address


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_heartbeats_are_evidence(c: Any, s: Any, *workers: Any) -> None:
    async with guarded(s, "on") as quarantine:
        parts = workers[0]._gpurt
        parts.health._disk = lambda: {"EIO": 4}
        await workers[0].heartbeat()
        quarantine.look()
        assert quarantine.statistics()["held"][workers[0].address]["cause"] == "disk"


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_a_worker_whose_card_reported_an_error_may_be_let_in_by_hand(c: Any, s: Any, *workers: Any) -> None:
    """Its heartbeats go on to tell of the same error."""
    async with guarded(s, "on") as quarantine:
        bad = workers[0]
        bad._gpurt.health._xid = "Xid 79 of 0000:3b:00, 5 s after the machine's start"
        await bad.heartbeat()
        quarantine.look()
        assert quarantine.statistics()["held"][bad.address]["cause"] == "hardware"
        assert quarantine.release([bad.address])
        await bad.heartbeat()
        quarantine.look()
        assert quarantine.statistics()["held"] == {}


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, Worker=Nanny, config=NO_AMM)
async def test_hardware_does_not_come_back_by_a_restart(c: Any, s: Any, a: Any, b: Any) -> None:
    async with Worker(s.address), guarded(s, "on") as quarantine:
        bad = a.worker_address
        quarantine.evidence.hardware(bad, "Xid 79")
        quarantine.look()
        assert bad in quarantine.statistics()["held"]
        await a.kill()
        await until(lambda: bad not in s.workers)
        await a.instantiate()
        await until(lambda: len(s.workers) == 3 and len(s.running) == 3)
        quarantine.look()
        assert list(quarantine.statistics()["held"]) == [a.worker_address]
        assert quarantine.release([a.worker_address])
        quarantine.look()
        assert quarantine.statistics()["held"] == {}


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, Worker=Nanny, config=NO_AMM)
async def test_one_held_by_hand_does_not_come_back_by_a_restart(c: Any, s: Any, a: Any, b: Any) -> None:
    """Also where nothing is held by itself; and what is said of it then names the worker that is there."""
    async with guarded(s) as quarantine:
        old = a.worker_address
        assert quarantine.hold([old], "fan failed") == [old]
        await a.kill()
        await until(lambda: old not in s.workers)
        await a.instantiate()
        await until(lambda: len(s.running) == 2)
        quarantine.look()
        held = quarantine.statistics()["held"]
        assert list(held) == [a.worker_address]
        assert held[a.worker_address]["worker"] == a.worker_address
        assert held[a.worker_address]["remedy"] == f"dask gpurt release ADDRESS {a.name}"
        assert quarantine.release([a.worker_address])
        quarantine.look()
        assert quarantine.statistics()["held"] == {}


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_a_slow_one_comes_back_when_it_is_as_fast_as_others(c: Any, s: Any, *workers: Any) -> None:
    seconds = {w.address: 0.2 for w in workers}

    async def measured(scheduler: Any, addresses: list[str]) -> dict[str, float]:
        return {address: seconds[address] for address in addresses}

    now = 0.0
    stock, module._measured = module._measured, measured
    try:
        async with guarded(s, "on") as quarantine:
            slow = workers[0].address
            quarantine._clock = lambda: now
            quarantine._slowness = lambda: {slow: 3.0}
            quarantine.look()
            now = SLOW_SECONDS
            quarantine.look()
            assert list(quarantine.statistics()["held"]) == [slow]
            quarantine._slowness = dict
            seconds[slow] = 0.6
            workers[0]._gpurt.health._clocks = lambda: "by heat"
            await workers[0].heartbeat()
            for _ in range(4):  # its processors are as fast as others', and its card is not
                seconds[slow] = 0.2
                now += 31
                quarantine.look()
                assert quarantine._trial is not None
                await quarantine._trial
            assert list(quarantine.statistics()["held"]) == [slow]
            workers[0]._gpurt.health._clocks = str
            await workers[0].heartbeat()
            for pace in (0.6, 0.2, 0.2, 0.6, 0.2, 0.2):  # never three in a row
                seconds[slow] = pace
                now += 31
                quarantine.look()
                await quarantine._trial
                assert list(quarantine.statistics()["held"]) == [slow]
            now += 31
            quarantine.look()
            await quarantine._trial
            assert quarantine.statistics()["held"] == {}
    finally:
        module._measured = stock


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_the_known_computation_is_run_on_workers(c: Any, s: Any, *workers: Any) -> None:
    """One without the extension does not answer, and that is no error."""
    async with guarded(s):
        async with Worker(s.address) as late:
            await late._gpurt.uninstall()
            answers = await module._measured(s, list(s.workers))
        assert set(answers) == {w.address for w in workers}
        assert all(0 <= seconds < 600 for seconds in answers.values())


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_an_exception_is_counted_and_ends_nothing(c: Any, s: Any, *workers: Any) -> None:
    async with guarded(s, "on") as quarantine:
        quarantine._slowness = lambda: 1 / 0
        quarantine._tick()
        assert quarantine.statistics()["exceptions"] == 1
        assert await c.submit(inc, 1) == 2


@gen_cluster(client=True, nthreads=THREE, config=NO_AMM)
async def test_it_goes_on_while_tasks_come(c: Any, s: Any, *workers: Any) -> None:
    """In and out again and again under work: every result is right, and the books stay in order."""
    async with guarded(s) as quarantine:
        futures = c.map(slowinc, range(300), delay=0.005)
        more = c.map(inc, futures)
        for i in range(12):
            bad = workers[i % 3].address
            quarantine.hold([bad], "test")
            await asyncio.sleep(0.1)
            quarantine.look()
            quarantine.release([bad])
        assert await c.gather(more) == [i + 2 for i in range(300)]
        s.validate_state()
