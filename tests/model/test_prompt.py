"""Messages that somebody waits for are sent at once, all others at Dask's interval."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Client, Event, Scheduler, Worker, wait
from distributed.utils_test import async_poll_for, gen_cluster, inc

from dask_gpurt.config import Settings
from dask_gpurt.extension import GpurtScheduler
from dask_gpurt.extension import safe as switch
from dask_gpurt.extension.parts import NAME
from dask_gpurt.extension.worker import on_worker
from dask_gpurt.model import prompt
from dask_gpurt.model.prompt import PromptStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dask_gpurt.placement.takeover.prompt_messages import PromptMessages

#: a test would not live to see the end of such an interval, in seconds
LONG = 1000.0
QUIET = {"distributed.scheduler.work-stealing": False, "distributed.scheduler.active-memory-manager.start": False}
ONE = [("127.0.0.1", 1)]


@contextlib.asynccontextmanager
async def extension(s: Scheduler) -> AsyncIterator[GpurtScheduler]:
    plugin = GpurtScheduler(Settings.load({}))
    await plugin.start(s)
    s.add_plugin(plugin, name=NAME)
    try:
        yield plugin
    finally:
        await plugin.uninstall()


def slow_down(c: Client, s: Scheduler, *workers: Worker) -> None:
    """Have all streams keep what they are given, if nothing sends it early."""
    for stream in (c.scheduler_comm, *s.stream_comms.values(), *(w.batched_stream for w in workers)):
        stream.interval = LONG


def messages(plugin: GpurtScheduler) -> PromptMessages:
    assert plugin.placement is not None
    assert plugin.placement.messages is not None
    return plugin.placement.messages


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=ONE, config=QUIET)
async def test_a_chain_waits_for_no_interval(c: Client, s: Scheduler, a: Worker) -> None:
    async with extension(s) as plugin:
        await c.submit(inc, 0, key="first")  # its client's stream is known from now on
        slow_down(c, s, a)
        x = c.submit(inc, 1, key="x-0")
        for i in range(5):
            x = c.submit(inc, x, key=f"x-{i + 1}")
        assert await x == 7
        for i in range(3):
            assert await c.submit(inc, i, key=f"y-{i}") == i + 1
        assert messages(plugin).early >= 3
        parts = on_worker(a)
        assert parts is not None
        assert parts.statistics()["messages_early"] >= 3
        assert plugin.placement is not None
        assert plugin.placement.statistics()["messages_early"] == messages(plugin).early


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], config=QUIET)
async def test_what_fills_the_last_thread_is_sent_and_more_is_not(c: Client, s: Scheduler, a: Worker) -> None:
    async with extension(s):
        await c.submit(inc, 0, key="first")
        slow_down(c, s, a)
        go = Event("go", client=c)
        held = [c.submit(lambda: Event("go").wait(30), key=f"held-{i}") for i in range(2)]
        await async_poll_for(lambda: len(a.state.executing) == 2, timeout=10)
        stream = s.stream_comms[a.address]
        # One that was woken with nothing to send has no deadline, and sends the next message at once.
        stream.next_deadline = stream.loop.time() + LONG
        more = c.submit(inc, 1, key="more")
        await async_poll_for(lambda: "more" in s.tasks and s.tasks["more"].state == "processing", timeout=10)
        assert [m["key"] for m in stream.buffer if m["op"] == "compute-task"] == ["more"]
        await go.set()
        # A thread becomes free: what the worker has done is reported at once, and what waits for that thread is sent.
        await wait(held)
        assert await c.submit(inc, 5, key="then") == 6
        assert await more == 2


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=ONE, config=QUIET)
async def test_a_wish_to_cancel_too(c: Client, s: Scheduler, a: Worker) -> None:
    async with extension(s):
        await c.submit(inc, 0, key="first")
        slow_down(c, s, a)
        unwanted = c.submit(inc, 1, key="unwanted", workers=["nowhere"])
        await async_poll_for(lambda: "unwanted" in s.tasks, timeout=10)
        await c.cancel([unwanted])
        await async_poll_for(lambda: "unwanted" not in s.tasks, timeout=10)


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=ONE, config=QUIET)
async def test_errors_too(c: Client, s: Scheduler, a: Worker) -> None:
    async with extension(s):
        await c.submit(inc, 0, key="first")
        slow_down(c, s, a)
        for i in range(2):
            with pytest.raises(ZeroDivisionError):
                await c.submit(lambda: 1 / 0, key=f"bad-{i}")


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=ONE, config=QUIET)
async def test_not_in_safe_mode_and_streams_are_given_back(c: Client, s: Scheduler, a: Worker) -> None:
    async with extension(s) as plugin:
        assert await c.submit(inc, 0, key="first") == 1
        streams: list[Any] = [s.stream_comms[a.address], a.batched_stream, c.scheduler_comm]
        assert ["send" in vars(stream) for stream in streams] == [True, True, True]
        early = messages(plugin)
        switch.on_scheduler(plugin, ["placement"], on=True)
        switch.on_node(a, ["placement"])
        before = early.early
        for i in range(3):
            assert await c.submit(inc, i, key=f"safe-{i}") == i + 1
        assert early.early == before
    assert ["send" in vars(stream) for stream in streams] == [False, False, False]
    assert await c.submit(inc, 9, key="last") == 10


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=ONE, config=QUIET)
async def test_workers_that_come_and_go(c: Client, s: Scheduler, a: Worker) -> None:
    async with extension(s) as plugin:
        async with Worker(s.address, nthreads=1) as b:
            slow_down(c, s, a, b)
            assert await c.submit(inc, 1, key="x", workers=[b.address]) == 2
            assert b.address in messages(plugin)._streams
        assert list(messages(plugin)._streams) == [a.address]


@pytest.mark.cluster
@gen_cluster(client=True, nthreads=ONE, config=QUIET)
async def test_a_rule_that_raises_leaves_the_stream_to_dask(c: Client, s: Scheduler, a: Worker) -> None:
    def broken(_: object) -> bool:
        raise RuntimeError("broken on purpose")

    class Other:
        """A stream of another version."""

        def send(self, *messages: object) -> None: ...

    other = PromptStream(Other(), broken)  # type: ignore[arg-type]
    other.install()
    assert "send" not in vars(other._stream)
    stream = PromptStream(s.stream_comms[a.address], broken)
    stream.install()
    for i in range(5):
        assert await c.submit(inc, i, key=f"x-{i}") == i + 1
    assert stream.early == 0
    stream.uninstall()
    assert "send" not in vars(s.stream_comms[a.address])


class Stream:
    """A stream whose messages wait until they are taken."""

    def __init__(self) -> None:
        self.batch_count, self.next_deadline = 0, LONG
        self.loop = self.waker = None
        self.buffer: list[Any] = []

    def send(self, *messages: Any) -> None:
        self.buffer.extend(messages)


class Message(dict[str, Any]):
    looked_at = 0

    def __getitem__(self, name: str) -> Any:
        Message.looked_at += 1
        return super().__getitem__(name)


def test_each_message_is_looked_at_once_however_many_wait() -> None:
    # One message for each future that a client lets go of, all in one turn of the event loop.
    stream = Stream()
    ws = SimpleNamespace(address="a", processing=set(), long_running=set(), nthreads=1)
    scheduler: Any = SimpleNamespace(stream_comms={"a": stream})
    sender = prompt.tasks(scheduler, ws, lambda: False)
    for _ in range(100):
        stream.send(Message(op="free-keys"))
    assert Message.looked_at <= 200
    # A task among them is found, also when an earlier batch was longer.
    stream.buffer, stream.batch_count = [], 1
    stream.send(Message(op="free-keys"))
    assert not sender._urgent(())
    ws.processing.add("x")
    stream.buffer.append(Message(op="compute-task"))
    assert sender._urgent(())
    assert not prompt.tasks(scheduler, SimpleNamespace(**{**vars(ws), "nthreads": 0}), lambda: False)._urgent(())
