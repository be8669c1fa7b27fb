"""`play`: random work on a live cluster in this process, with losses at random moments and slow messages.

A seed gives the work, the settings, the delays of messages and the events. Which message comes first still depends on
the machine, so a seed that fails may pass the next time: play it many times.

Events: ``close``, ``kill`` (the worker's stream is cut first), ``remove`` (by the scheduler), ``drop`` (the stream is
cut and the worker stays), ``retire``, ``pause``, ``add`` a worker. Another client may ``cancel`` the same work, want
its answer ``again``, or ``release`` other work half-way and compute it anew. Each comes at a moment of the scheduler:
the n-th transition of some kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import dask
from distributed import Client, Scheduler, SchedulerPlugin, Worker, batched, core
from distributed.core import Status

from dask_gpurt.config import Settings
from dask_gpurt.extension.scheduler import GpurtScheduler
from dask_gpurt.shuffle.counters import counters_of
from dask_gpurt.shuffle.protocol import rebalance_plan
from dask_gpurt.shuffle.scheduler import rebalance
from tests.stress.works import LAG, WORKS, Work, check, make

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

EVENTS = (
    *(("close",), ("kill",), ("remove",), ("drop",), ("retire",), ("pause",), ("add",), ("cancel", "kill")),
    *(("close", "add"), ("kill", "kill"), ("close", "close"), ("retire", "add"), ("kill", "add", "kill")),
    *(("release",), ("release", "kill"), ("again", "kill"), ("again", "retire"), ("release", "close", "add")),
    *(("pause", "kill"), ("retire", "kill"), ("retire", "release"), ("add", "kill"), ("drop", "again")),
)
#: part of a key, and the state that a task comes to
MOMENTS = (
    *(("transfer", "memory"), ("transfer", "processing"), ("barrier", "processing"), ("barrier", "memory")),
    *(("barrier", "waiting"), ("", "memory"), ("", "processing"), ("", "released")),
)
#: without an answer for so long it hangs
HANG_SECONDS = 75.0


class Plan(NamedTuple):
    """What a seed gives."""

    works: tuple[str, ...]
    events: tuple[str, ...]
    #: probability and most seconds of the delay of a message
    delay: tuple[float, float]
    #: milliseconds between messages of a stream
    intervals: tuple[int, ...]
    workers: int
    threads: int
    settings: dict[str, Any]
    config: dict[str, Any]
    #: outputs change hands whenever that levels their bytes
    eager: bool = False


def plan(seed: int, works: tuple[str, ...] = (), events: tuple[str, ...] = ()) -> Plan:
    """What `play` does with a seed."""
    r = random.Random(seed)
    chosen = [r.choice(list(WORKS)) for _ in range(r.choice([1, 1, 2, 2, 3]))], r.choice(EVENTS)
    LAG[0] = r.choice([0.0, 0.01, 0.05, 0.15])
    return Plan(
        works or tuple(chosen[0]),
        events or chosen[1],
        r.choice([(0.0, 0.0), (0.2, 0.02), (0.5, 0.05), (0.1, 0.3)]),
        r.choice([(2,), (1, 10, 40), (50,)]),
        r.randint(3, 4),
        r.choice([1, 1, 2]),
        {
            "shuffle.transport": r.choice(["auto", "rpc", "tcp"]),
            "shuffle.join-filter": r.choice(["off", "auto"]),
            "shuffle.retain": r.choice([0.1, 0.1, 0.0]),
            "shuffle.receive-budget": r.choice([64 << 20, 1 << 16]),
            "transfers.verify": r.random() < 0.2,
            # The least is 4 kB of a worker's 4 GiB: nearly all goes to disk.
            "tiers.host-limit": r.choice([0.6, 0.6, 1e-6]),
        },
        {
            "dataframe.shuffle.method": "p2p",
            "distributed.p2p.comm.retry.delay.min": "100ms",
            "distributed.scheduler.allowed-failures": 10,
            "distributed.scheduler.worker-saturation": r.choice([1.1, 1.1, "inf", 1.0]),
        },
        r.random() < 0.4,
    )


@contextlib.contextmanager
def slow_messages(seed: int, planned: Plan) -> Iterator[None]:
    """Delay calls, and let every stream send at an interval of its own."""
    r = random.Random(seed + 1)
    probability, most = planned.delay
    ask, begin = core.send_recv, batched.BatchedSend.__init__

    async def late(comm: Any, **kwargs: Any) -> Any:
        if r.random() < probability:
            await asyncio.sleep(r.random() * most)
        answer = await ask(comm, **kwargs)
        if r.random() < probability:
            await asyncio.sleep(r.random() * most)
        return answer

    def own(self: Any, interval: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, f"{r.choice(planned.intervals)}ms", *args, **kwargs)

    with mock.patch.object(core, "send_recv", late), mock.patch.object(batched.BatchedSend, "__init__", own):
        yield


@contextlib.contextmanager
def late_binding(eager: bool) -> Iterator[None]:
    """Have small outputs change hands, at no price."""
    if not eager:
        yield
        return
    free = rebalance_plan.Prices(1 / 1e3, 1 / 1e9, 1 / 1e9, 0.0)
    with (
        mock.patch.object(rebalance_plan, "LEAST_BYTES", 256),
        mock.patch.object(rebalance, "FIXED_SECONDS", 0.0),
        mock.patch.object(rebalance.Binder, "_prices", return_value=free),
    ):
        yield


class _Trigger(SchedulerPlugin):
    """Ends a future at the n-th transition of a kind."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, str, list[int], asyncio.Future[None]]] = []

    def moment(self, r: random.Random) -> asyncio.Future[None]:
        part, finish = r.choice(MOMENTS)
        come = asyncio.get_running_loop().create_future()
        self.moments.append((part, finish, [int(2 ** r.uniform(0, 2 if part == "barrier" else 4.5))], come))
        return come

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        for part, wanted, left, come in self.moments:
            if finish == wanted and part in str(key):
                left[0] -= 1
                if not left[0] and not come.done():
                    come.set_result(None)


class _Cluster:
    """The scheduler, the workers, and what may happen to them."""

    def __init__(self, scheduler: Scheduler, make_worker: Callable[[], Any], r: random.Random) -> None:
        self.scheduler, self.make_worker, self.r = scheduler, make_worker, r
        self.workers: list[Worker] = []
        self.happened: list[str] = []

    def victim(self) -> Worker | None:
        """A worker that is not the last one; often the one that runs a barrier."""
        live = [w for w in self.workers if w.status in (Status.running, Status.paused)]
        if len(live) < 2:
            return None
        tasks = self.scheduler.tasks.values()
        at = {ts.processing_on.address for ts in tasks if ts.processing_on and "barrier" in str(ts.key)}
        there = [w for w in live if w.address in at]
        return self.r.choice(there if there and self.r.random() < 0.6 else live)

    async def event(self, kind: str, client: Client, works: list[Work]) -> None:
        """Have one of the events happen."""
        r = self.r
        self.happened.append(kind)
        if kind == "add":
            self.workers.append(await self.make_worker())
        elif kind == "cancel":
            future = client.compute(r.choice(works).collection)
            await asyncio.sleep(r.random() * 0.3)
            del future
        elif kind == "again":
            work = r.choice(works)
            check(await client.compute(work.collection), work.want)
        elif kind == "release":
            work = make(r.choice(list(WORKS)), r)
            future = client.compute(work.collection)
            await asyncio.sleep(r.random() * 0.6)
            future.release()
            await asyncio.sleep(r.choice([0.0, 0.01, 0.2]))
            check(await client.compute(work.collection), work.want)
        elif (worker := self.victim()) is not None:
            self.happened[-1] += f" {worker.address}"
            if kind in ("kill", "drop"):
                worker.batched_stream.comm.abort()
            if kind in ("close", "kill"):
                await worker.close(executor_wait=False)
            elif kind == "remove":
                await self.scheduler.remove_worker(worker.address, stimulus_id="stress", close=True)
            elif kind == "retire":
                await self.scheduler.retire_workers([worker.address], close_workers=True, remove=True)
            elif kind == "pause":
                worker.status = Status.paused
                await asyncio.sleep(r.random() * 1.5)
                if worker.status == Status.paused:
                    worker.status = Status.running


async def play(seed: int, planned: Plan, *, stock: bool = False) -> dict[str, Any]:
    """Play a seed; what was counted of the shuffles' recovery, moves and join filters ({} without the extension).

    Raises
    ------
    AssertionError
        A wrong answer, an error that was counted, or something is left.
    TimeoutError
        No answer for `HANG_SECONDS`.
    Exception
        What the work has failed with.
    """
    with slow_messages(seed, planned), late_binding(planned.eager), dask.config.set(planned.config):
        return await asyncio.wait_for(_play(seed, planned, stock), HANG_SECONDS)


async def _play(seed: int, planned: Plan, stock: bool) -> dict[str, Any]:
    r = random.Random(seed + 2)
    async with contextlib.AsyncExitStack() as stack:
        s = await stack.enter_async_context(
            Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0")
        )
        extension = None
        if not stock:
            extension = GpurtScheduler(Settings.load(planned.settings))
            await extension.start(s)
            s.add_plugin(extension, name=extension.name)
        cluster = _Cluster(s, lambda: Worker(s.address, nthreads=planned.threads, memory_limit="4GiB"), r)
        stack.push_async_callback(_close, cluster)
        cluster.workers += await asyncio.gather(*(cluster.make_worker() for _ in range(planned.workers)))
        c, other = [
            await stack.enter_async_context(Client(s.address, asynchronous=True, set_as_default=False)) for _ in "12"
        ]
        works = [make(name, r) for name in planned.works]
        trigger = _Trigger()
        s.add_plugin(trigger, name="trigger")

        async def at_its_moment(kind: str, come: asyncio.Future[None], wait: float, late: float) -> None:
            await asyncio.wait([come], timeout=wait)
            await asyncio.sleep(late)
            await cluster.event(kind, other, works)

        async def run(work: Work, wait: float) -> None:
            await asyncio.sleep(wait)
            check(await c.compute(work.collection), work.want)

        events = [
            at_its_moment(kind, trigger.moment(r), 2 * r.random(), r.choice([0, 0, 0.005, 0.03, 0.2]))
            for kind in planned.events
        ]
        await _together([*events, *(run(work, r.choice([0, 0, 0.05, 0.3])) for work in works)])
        if r.random() < 0.4:
            await run(works[0], 0)
        return {} if extension is None else await _checked(s, extension, cluster.workers)


async def _together(parts: list[Coroutine[Any, Any, None]]) -> None:
    """Run them at once; when one fails, the others come to their end before the cluster closes.

    A worker that starts while its scheduler closes never ends (stock Dask too): its `close` waits for itself.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        await asyncio.wait(tasks, timeout=20)


async def _checked(s: Scheduler, extension: GpurtScheduler, workers: list[Worker]) -> dict[str, Any]:
    statistics = extension.statistics()
    assert not (bad := list(errors(statistics))), bad
    for _ in range(500):
        if not s.tasks:
            break
        await asyncio.sleep(0.02)
    assert not s.tasks, f"left: {list(s.tasks.values())[:5]}"
    shuffle = statistics["shuffle"]
    return {
        **shuffle["recovery"],
        "outputs_moved": shuffle["late_binding"]["outputs"],
        "filters": shuffle["join_filters"]["sent"],
        "rows_dropped": sum(counters_of(worker).join_rows_dropped for worker in workers),
    }


def errors(statistics: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Errors of ours that were counted, and the last one's text, with where they are."""
    for name, value in statistics.items():
        if isinstance(value, dict):
            yield from errors(value, f"{path}.{name}")
        elif value and (name in ("errors", "exceptions", "last_error", "retired")):
            yield f"{path}.{name}", value


async def _close(cluster: _Cluster) -> None:
    closing = (w.close(executor_wait=False) for w in cluster.workers)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), 20)
