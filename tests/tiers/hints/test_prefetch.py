"""Reading ahead: what is read, what is not, how it is counted, and when it stops."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed.core import Status

from dask_gpurt.tiers.engine.entry import NEVER, Entry, State
from dask_gpurt.tiers.hints.pending_tasks import LocalUses
from dask_gpurt.tiers.hints.prefetch import BAD_IN_A_ROW, Prefetch
from tests.tiers.conftest import guard

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.tiers.conftest import Rig

    RunRig = Callable[..., None]

SIZE = 10_000


class Bench:
    """An engine with room for ten values, and a worker that has only tasks."""

    def __init__(self, rig: Rig, share: float = 1.0) -> None:
        self.rig = rig
        self.tasks: dict[str, Any] = {}
        worker = SimpleNamespace(plugins={}, state=SimpleNamespace(tasks=self.tasks), status=Status.running)
        self.local = LocalUses(worker, rig.engine, rig.store, guard())
        self.prefetch = Prefetch(rig.engine, self.tasks, rig.store.entry, share, guard())
        self.local.on_pending = self.prefetch.pending
        self.prefetch.install()
        self.local.install()
        rig.engine.eviction.press()

    async def put(self, key: str, *, stored: bool = False) -> Entry:
        self.tasks.setdefault(key, Task(key, None, "memory"))
        # bytes, not an array: what was evicted is gone until it is read
        self.rig.store[key] = bytes(SIZE)
        found = self.rig.store.entry(key)
        assert found is not None
        if stored:
            # what this asks for is exactly one value, the only one that is not pinned
            others = [e for e in self.rig.engine.books.entries if e is not found]
            for other in others:
                self.rig.engine.pin(other)
            self.rig.engine.shrink(1)
            await self.rig.settle()
            self.rig.engine.shrink(0)
            for other in others:
                self.rig.engine.unpin(other)
            assert found.state is State.STORED
        return found

    def send(self, key: str, inputs: list[str], priority: int) -> None:
        """The scheduler sends a task."""
        ts = self.tasks[key] = Task(key, (priority,), "ready")
        for name in inputs:
            ts.dependencies.add(self.tasks[name])
            self.tasks[name].dependents.add(ts)
        self.local.transition(key, "released", "waiting")
        self.local.transition(key, "waiting", "ready")

    async def run(self, key: str) -> None:
        ts = self.tasks[key]
        ts.state = "executing"
        self.local.transition(key, "ready", "executing")
        entries = await self.rig.store.ensure([d.key for d in ts.dependencies])
        self.local.executed(key)
        self.rig.store.release(entries)
        ts.state = "memory"
        self.local.transition(key, "executing", "memory")

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
            await self.rig.settle()
        self.rig.engine.validate()


class Task(SimpleNamespace):
    def __init__(self, key: str, priority: Any, state: str) -> None:
        super().__init__(key=key, priority=priority, state=state, dependencies=set(), dependents=set())

    __hash__ = object.__hash__  # type: ignore[assignment]


def bench(run_rig: RunRig, test: Callable[[Bench], Awaitable[None]], *, share: float = 1.0, values: float = 10) -> None:
    async def main(rig: Rig) -> None:
        await test(Bench(rig, share))

    run_rig(main, budget=int(values * (SIZE + 100)))


def test_reads_ahead_and_counts(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        x, y = await b.put("x", stored=True), await b.put("y", stored=True)
        b.send("t", ["x"], 1)
        await b.settle()
        assert x.in_memory
        assert x.prefetched
        assert y.state is State.STORED  # nobody has asked for it
        reads = b.rig.engine.counters.cumulative["disk-read", "count"]
        await b.run("t")
        assert b.rig.engine.counters.cumulative["disk-read", "count"] == reads == 1
        assert b.prefetch.outcomes == {"in_time": 1, "late": 0, "early": 0, "wasted": 0}
        assert b.prefetch.ahead_bytes == 0
        b.send("u", ["y"], 2)
        await asyncio.sleep(0)  # begun, not finished: ends are told by the loop
        assert y.state is State.LOADING
        await b.run("u")
        assert b.prefetch.outcomes["late"] == 1
        b.send("v", ["y"], 3)
        await b.settle()
        assert b.prefetch.started == 2  # it is in memory

    bench(run_rig, test)


def test_in_the_order_of_priorities_within_the_share(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        entries = [await b.put(f"x{i}", stored=True) for i in range(6)]
        for i, priority in enumerate([6, 3, 5, 1, 4, 2]):
            b.send(f"t{i}", [f"x{i}"], priority)
        await b.settle()
        assert [i for i, e in enumerate(entries) if e.in_memory] == [3, 5]  # a quarter of ten is two
        await b.run("t3")
        await b.settle()
        assert [i for i, e in enumerate(entries) if e.in_memory] == [1, 3, 5]

    bench(run_rig, test, share=0.25)


def test_drives_out_only_what_is_needed_later(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        late = await b.put("late", stored=True)
        soon = await b.put("soon", stored=True)
        here = [await b.put(f"h{i}") for i in range(6)]
        for i in range(6):
            b.send(f"t{i}", [f"h{i}"], 10 + i)
        b.send("t-late", ["late"], 100)
        await b.settle()
        assert late.state is State.STORED  # all that is in memory is needed before it
        assert b.prefetch.started == 0
        b.send("t-soon", ["soon"], 1)
        await b.settle()
        assert soon.in_memory
        assert [e.in_memory for e in here] == [True] * 5 + [False]
        b.rig.engine.hint(here[0], NEVER)
        await b.run("t0")
        await b.settle()
        assert b.prefetch.outcomes["early"] == b.prefetch.outcomes["wasted"] == 0

    bench(run_rig, test, values=6)


def test_stops_when_it_is_wrong(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        for i in range(BAD_IN_A_ROW):
            await b.put(f"x{i}", stored=True)
        y = await b.put("y", stored=True)
        for i in range(BAD_IN_A_ROW):
            b.send(f"t{i}", [f"x{i}"], i)
        await b.settle()
        assert b.prefetch.started == BAD_IN_A_ROW
        for i in range(BAD_IN_A_ROW):
            del b.rig.store[f"x{i}"]
        assert b.prefetch.outcomes["wasted"] == BAD_IN_A_ROW
        assert b.prefetch.rests == 1
        b.send("u", ["y"], 1)
        await b.settle()
        assert y.state is State.STORED
        b.rig.now += 1.1
        b.prefetch.pump()
        await b.settle()
        assert y.in_memory
        await b.run("u")
        assert b.prefetch.outcomes["in_time"] == 1

    bench(run_rig, test)


def test_counts_what_left_too_early(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        x = await b.put("x", stored=True)
        b.send("t", ["x"], 1)
        await b.settle()
        assert x.prefetched
        b.rig.engine.shrink(1)
        await b.settle()
        assert x.state is State.STORED
        assert b.prefetch.outcomes["early"] == 1

    bench(run_rig, test)


def test_off(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        x = await b.put("x", stored=True)
        b.send("t", ["x"], 1)
        await b.settle()
        assert x.state is State.STORED
        b.prefetch.uninstall()
        b.local.uninstall()
        assert x.due is None
        await b.run("t")
        assert x.in_memory

    bench(run_rig, test, share=0)


def test_due_leaves_last_and_ends_with_the_task(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        x, y = await b.put("x"), await b.put("y")
        b.rig.engine.hint(y, (0, 0))
        b.send("t", ["x"], 100)
        b.send("u", ["x"], 50)
        assert x.due == (50,)
        assert b.rig.engine.books.victims.first() is y  # whatever its priority: its task was not sent
        await b.run("u")
        assert x.due == (100,)
        b.local.transition("t", "ready", "released")
        assert x.due is None
        # A value that comes later is due for those who wait for it.
        b.tasks["z"] = Task("z", None, "fetch")
        b.send("v", ["z"], 7)
        z = await b.put("z")
        assert z.due == (7,)
        assert np.isclose(len(b.local._live), 1)

    bench(run_rig, test)


def test_what_has_run_does_not_pile_up_behind_what_waits(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        x = await b.put("x")
        b.send("waits", ["x"], 1)
        for i in range(300):
            b.send(f"t{i}", ["x"], 2 + i)
            await b.run(f"t{i}")
        assert x.dues is not None
        assert len(x.dues) < 100
        assert x.due == (1,)

    bench(run_rig, test)


def test_no_more_is_ahead_than_has_to_be(run_rig: RunRig) -> None:
    """What is in memory long before its use takes the place of something else."""

    async def test(b: Bench) -> None:
        async def reads_of(*names: str) -> list[bool]:
            entries = [await b.put(name, stored=True) for name in names]
            for i, name in enumerate(names):
                b.send(f"t-{name}", [name], i)
            await b.settle()
            found = [e.in_memory for e in entries]
            b.rig.now += 1  # reading took no time at all on this clock
            for name in names:
                await b.run(f"t-{name}")
                del b.rig.store[name]
                await b.settle()
            return found

        assert await reads_of("a", "b", "c") == [True, True, True]
        for i in range(60):
            await reads_of(f"early{i}")
        assert b.prefetch.window_bytes == 0
        assert await reads_of("d", "e", "f") == [True, False, False]  # one always may
        for i in range(2):
            late = await b.put(f"late{i}", stored=True)
            b.send(f"u{i}", [f"late{i}"], 1)
            await asyncio.sleep(0)
            assert late.state is State.LOADING
            await b.run(f"u{i}")
            await b.settle()
        assert b.prefetch.outcomes["late"] == 2
        assert await reads_of("g", "h", "i") == [True, True, False]
        assert b.prefetch.statistics()["window_bytes"] == b.prefetch.window_bytes

    bench(run_rig, test)


def test_the_schedulers_word_alone_reads_nothing(run_rig: RunRig) -> None:
    async def test(b: Bench) -> None:
        x = await b.put("x", stored=True)
        b.rig.engine.hint(x, (1,))
        await b.settle()
        assert x.state is State.STORED

    bench(run_rig, test)
